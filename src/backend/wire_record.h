// A token on the wire: what its home sends, once, to each rank that has experts of it.
//
//   record   activations | slots (k) int32 | weights (k) fp32 | first_row int32, rounded up to 16 bytes
//
// activations: the arrays of their format one behind the other, all that gemm1 reads. slots: -1 where the assignment is
// none of that rank's. The rows come back record by record, k by k: first_row is how many the message's earlier records
// ask for, so that a rank may work on any record without those before it. Between devices that write into each other's memory rows
// have places of their own, and nobody writes or reads first_row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/layer_steps.h"
#include "core/scale_layout.h"

namespace nvfp4_moe {

// One array of a token's activations: rows of row_bytes.
struct WireArray {
  void* rows = nullptr;
  int64_t row_bytes = 0;
  std::byte* row(int64_t token) const { return static_cast<std::byte*>(rows) + token * row_bytes; }
};
inline constexpr int kWireArrays = 4;  // at most; the others have no bytes

inline std::array<WireArray, kWireArrays> wire_arrays(const ActivationBuffers& activations, ActivationFormat format,
                                                      int64_t hidden) {
  const WireArray nonfinite{activations.nonfinite, 1}, row_scale{activations.row_scale, 4};
  switch (format) {
    case ActivationFormat::kNvfp4:
      return {{{activations.codes, hidden / 2}, {activations.block_scales, hidden / 16}, row_scale, nonfinite}};
    case ActivationFormat::kBf16: return {{{activations.bf16, 2 * hidden}, nonfinite, {}, {}}};
    case ActivationFormat::kInt8Block:
      return {{{activations.int8_codes, hidden}, {activations.int8_scales, hidden / 16 * 4}, nonfinite, {}}};
    case ActivationFormat::kFp8: return {{{activations.fp8, hidden}, row_scale, nonfinite, {}}};
  }
  return {};
}

// Where the parts of a record begin, and its size.
struct WireRecord {
  int64_t top_k = 0;
  int64_t slots_at = 0, weights_at = 0, first_row_at = 0;  // multiples of 4
  int64_t bytes = 0;                                       // a multiple of 16
  int64_t row_bytes = 0;                                   // of what comes back for each slot

  WireRecord() = default;
  explicit WireRecord(const MoeConfig& config) : top_k(config->top_k) {
    for (const WireArray& array : wire_arrays({}, config->activation_format, config->hidden_size))
      slots_at += array.row_bytes;
    slots_at = round_up(slots_at, sizeof(int32_t));
    weights_at = slots_at + top_k * 4;
    first_row_at = weights_at + top_k * 4;
    bytes = round_up(first_row_at + 4, 16);
    row_bytes = config->hidden_size * (config->row_format == RowFormat::kBf16 ? 2 : 4);
  }
};

}  // namespace nvfp4_moe
