// Borrowed views of weights in checkpoint layout: one matrix, one expert. Also the range of local
// experts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/status.h"

namespace nvfp4_moe::internal {

// One NVFP4 matrix W of shape (rows, cols), K = cols: w = e2m1(code) * e4m3(block_scale) *
// tensor_scale. Strides may exceed a row's length, for a slice of columns of a larger tensor.
struct Nvfp4View {
  // (rows, cols/2), low nibble = even k; row r at codes + r * codes_stride
  const uint8_t* codes = nullptr;
  // (rows, cols/16), E4M3 with sign 0; row r at + r * scales_stride
  const uint8_t* block_scales = nullptr;
  float tensor_scale = 1.0f;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t codes_stride = 0;   // bytes
  int64_t scales_stride = 0;  // bytes

  static Nvfp4View contiguous(const uint8_t* codes, const uint8_t* block_scales, float tensor_scale,
                              int64_t rows, int64_t cols) {
    return {codes, block_scales, tensor_scale, rows, cols, cols / 2, cols / 16};
  }
  const uint8_t* row_codes(int64_t r) const { return codes + r * codes_stride; }
  const uint8_t* row_scales(int64_t r) const { return block_scales + r * scales_stride; }
};

// Whether `count` parts of part_bytes each, `stride` bytes apart (at least 0), end inside the
// address space.
inline bool ends_in_memory(const void* first, int64_t count, int64_t stride, int64_t part_bytes) {
  int64_t bytes = 0;
  if (count < 1) return true;
  return !__builtin_mul_overflow(count - 1, stride, &bytes) &&
         !__builtin_add_overflow(bytes, part_bytes, &bytes) &&
         static_cast<uint64_t>(bytes) <= UINTPTR_MAX - reinterpret_cast<uintptr_t>(first);
}

// The biases of one expert, fp32. docs/explanation/numerics.md defines where they are added. All
// are null for the shared expert, and if MoeOptions::expert_biases is not set.
struct ExpertBiases {
  const float* gate = nullptr;  // (intermediate); null without a gate
  const float* up = nullptr;    // (intermediate)
  const float* down = nullptr;  // (hidden)
};

// One expert's matrices: the output of a checkpoint and the input of a packer.
struct ExpertSource {
  Nvfp4View gate;  // (intermediate, hidden); without a gate (has_gate of the activation) no rows
  Nvfp4View up;    // (intermediate, hidden)
  Nvfp4View down;  // (hidden, intermediate)
  // True if codes and block scales of all matrices are in the memory of the layer's device. The
  // work that writes them is then enqueued in `stream` before the packer gets them. False: host
  // memory.
  bool on_device = false;
  void* stream = nullptr;    // on_device: null is the device's default stream
  ExpertBiases biases = {};  // finite, always in host memory
};

// The message of every check of block scales for the first illegal one. matrix: "gate".
inline Status illegal_block_scale(const char* matrix, uint8_t byte, int64_t row, int64_t block) {
  return bad_input(
      std::string(matrix) + " block scale: expected E4M3 with sign 0 and not NaN, got byte " +
      std::to_string(byte) + " at row " + std::to_string(row) + " block " + std::to_string(block));
}

// Range of global experts that this rank holds. The only place that maps global ids to local ones.
struct ExpertRange {
  int64_t first = 0;
  int64_t count = 0;

  // Local index of a global id, or nullopt if another rank holds it.
  std::optional<int64_t> local(int64_t global) const {
    if (global < first || global >= first + count) return std::nullopt;
    return global - first;
  }
  int64_t global(int64_t local_expert) const { return first + local_expert; }
  bool operator==(const ExpertRange&) const = default;
};

// A rank's slice [first, first + count) of the intermediate dimension (tensor parallel): rows of
// gate and up, columns of down. Multiples of 16. count 0 means the whole dimension.
struct IntermediateSlice {
  int64_t first = 0;
  int64_t count = 0;
  bool operator==(const IntermediateSlice&) const = default;
};

// The activation scales that a checkpoint has for one layer: each is the maximum over ALL experts
// of the layer, including those of other ranks. nullopt if no expert has a usable one.
struct LayerScales {
  std::optional<float> hidden;        // max of gate and up input_scale
  std::optional<float> intermediate;  // max of down input_scale
};

}  // namespace nvfp4_moe::internal
