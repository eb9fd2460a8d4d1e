// The format functions, in bytes of their float or bf16 side per second.
#include <benchmark/benchmark.h>

#include <vector>

#include "core/dequantize.h"
#include "core/quantize.h"
#include "core/scale_layout.h"

namespace nvfp4_moe {
namespace {

constexpr int64_t kRows = 64;

std::vector<float> values(int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  uint32_t state = 1;
  for (float& value : out) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-30f;
  }
  return out;
}

struct Quantized {
  explicit Quantized(int64_t cols)
      : x(values(kRows * cols)),
        codes(static_cast<size_t>(kRows * cols / 2)),
        scales(static_cast<size_t>(kRows * cols / 16)) {}
  std::vector<float> x;         // (kRows, cols)
  std::vector<uint8_t> codes;   // (kRows, cols/2)
  std::vector<uint8_t> scales;  // (kRows, cols/16)
};

void set_bytes(benchmark::State& state, int64_t bytes) { state.SetBytesProcessed(state.iterations() * bytes); }

void quantize_rows(benchmark::State& state) {
  const int64_t cols = state.range(0);
  Quantized q(cols);
  QuantizeCounts counts;
  for (auto _ : state) {
    for (int64_t r = 0; r < kRows; ++r) {
      const std::span<const float> row(q.x.data() + r * cols, static_cast<size_t>(cols));
      benchmark::DoNotOptimize(quantize_row_exact(row, dynamic_token_scale(row_amax(row)),
                                                  q.codes.data() + r * cols / 2, q.scales.data() + r * cols / 16,
                                                  counts));
    }
  }
  set_bytes(state, kRows * cols * 4);
}
BENCHMARK(quantize_rows)->Arg(2048)->Arg(7168);

template <ScaleSearch kSearch>
void quantize_matrix(benchmark::State& state) {
  const int64_t cols = state.range(0);
  Quantized q(cols);
  QuantizeCounts counts;
  for (auto _ : state) {
    const Status status = quantize_weights(q.x, kRows, cols, tensor_scale_from_amax(2.0), kSearch, q.codes.data(),
                                           q.scales.data(), counts);
    if (!status.ok()) state.SkipWithError(status.message().c_str());
  }
  set_bytes(state, kRows * cols * 4);
}
BENCHMARK(quantize_matrix<ScaleSearch::kMax>)->Arg(2048);
BENCHMARK(quantize_matrix<ScaleSearch::kMse>)->Arg(2048);
BENCHMARK(quantize_matrix<ScaleSearch::kSweep>)->Arg(2048);

void dequantize_to_bf16(benchmark::State& state) {
  const int64_t cols = state.range(0);
  Quantized q(cols);
  QuantizeCounts counts;
  const float scale = tensor_scale_from_amax(2.0);
  const Status status =
      quantize_weights(q.x, kRows, cols, scale, ScaleSearch::kMax, q.codes.data(), q.scales.data(), counts);
  if (!status.ok()) state.SkipWithError(status.message().c_str());
  const Nvfp4View view = Nvfp4View::contiguous(q.codes.data(), q.scales.data(), scale, kRows, cols);
  std::vector<uint16_t> out(static_cast<size_t>(kRows * cols));
  for (auto _ : state) {
    const Status done = dequantize(view, DType::kBf16, out.data());
    if (!done.ok()) state.SkipWithError(done.message().c_str());
    benchmark::ClobberMemory();
  }
  set_bytes(state, kRows * cols * 2);
}
BENCHMARK(dequantize_to_bf16)->Arg(2048);

// Bytes of scales, not of weights.
void swizzle(benchmark::State& state) {
  const int64_t rows = 2048, scale_cols = state.range(0) / 16;
  const std::vector<uint8_t> linear(static_cast<size_t>(rows * scale_cols), 0x38);
  std::vector<uint8_t> swizzled(static_cast<size_t>(swizzled_scale_bytes(rows, scale_cols)));
  for (auto _ : state) {
    swizzle_scales(linear.data(), scale_cols, rows, scale_cols, swizzled.data());
    benchmark::ClobberMemory();
  }
  set_bytes(state, rows * scale_cols);
}
BENCHMARK(swizzle)->Arg(2048)->Arg(7168);

}  // namespace
}  // namespace nvfp4_moe
