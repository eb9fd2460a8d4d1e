// Makes layers of random NVFP4 weights on a device quickly: one expert is drawn, packed, and copied
// to all others.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/packed_layout.h"
#include "core/random.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal {

inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
inline void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

inline std::vector<uint8_t> random_bytes(Random& random, size_t count, uint64_t mask,
                                         uint64_t offset) {
  std::vector<uint8_t> bytes((count + 7) / 8 * 8);
  uint64_t state = static_cast<uint64_t>(random.below(1 << 30)) * 2654435761u + 88172645463325252u;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const uint64_t word = (state & mask) + offset;
    std::memcpy(bytes.data() + i, &word, 8);
  }
  bytes.resize(count);
  return bytes;
}

inline Nvfp4Buffers random_matrix(Random& random, int64_t rows, int64_t cols) {
  // Scales 0x20..0x5F: from 2^-3 to 120.
  return {random_bytes(random, static_cast<size_t>(rows * cols / 2), ~0ull, 0),
          random_bytes(random, static_cast<size_t>(rows * cols / 16), 0x3F3F3F3F3F3F3F3Full,
                       0x2020202020202020ull)};
}

// One expert of random weights, copied to all others on the device.
inline PackedWeights make_layer(const Backend& backend, const MoeConfig& config,
                                const ExpertRange& range, uint64_t seed) {
  PackedWeights weights{config, range, {}, {}, {}};
  weights.tensor_scales.assign(static_cast<size_t>(range.count) + 1, {1e-3f, 1e-3f, 1e-3f});
  weights.zero_scale_codes.resize(static_cast<size_t>(range.count) + 1);
  auto bytes = backend.allocate(backend.packed_bytes(config, range), 0, "packed weights");
  must(bytes.status());
  weights.bytes = std::move(*bytes);
  Random random(seed);
  const int64_t h = config->hidden_size, n = config->intermediate_size;
  const Nvfp4Buffers gate = random_matrix(random, n, h), up = random_matrix(random, n, h),
                     down = random_matrix(random, h, n);
  const auto view = [](const Nvfp4Buffers& matrix, int64_t rows, int64_t cols) {
    Nvfp4View result{};
    result.codes = matrix.codes.data();
    result.block_scales = matrix.block_scales.data();
    result.rows = rows;
    result.cols = cols;
    result.codes_stride = cols / 2;
    result.scales_stride = cols / 16;
    result.tensor_scale = 1.0f / (30.0f * std::sqrt(static_cast<float>(cols)));
    return result;
  };
  const ExpertSource source{view(gate, n, h), view(up, n, h), view(down, h, n)};
  must(backend.pack_expert(weights, 0, source));
  const cuda::PackedLayout layout(config, range);
  std::byte* const base = weights.bytes.data();
  const auto size = static_cast<size_t>(layout.routed.expert_stride);
  for (int64_t e = 1; e < range.count; ++e)
    must(cudaMemcpy(base + layout.expert_offset(e), base + layout.expert_offset(0), size,
                    cudaMemcpyDeviceToDevice));
  // The bytes begin with the tensor scales, three per expert; with fp8 the same number of shifts
  // follows.
  const auto repeat = [&](std::byte* of_first, size_t size_bytes) {
    for (int64_t e = 1; e <= range.count; ++e)
      must(cudaMemcpy(of_first + static_cast<size_t>(e) * size_bytes, of_first, size_bytes,
                      cudaMemcpyDeviceToDevice));
  };
  repeat(base, sizeof(TensorScales));
  if (config->activation_format == ActivationFormat::kFp8)
    repeat(base + cuda::fp8_shifts_offset(range), sizeof(cuda::Fp8Shifts));
  return weights;
}

}  // namespace nvfp4_moe::internal
