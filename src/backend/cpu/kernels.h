// The functions of an instruction set for the CPU backend: one const table each, with the same
// signatures.
//
// The table is chosen once, by CPUID (kernels.cpp lists them, best first); a backend named
// "cpu:NAME" forces one. Every table reads the same packed panels (panel.h) and the same activation
// operands (below), and gives the same bits for nvfp4 and int8_block (docs/explanation/cpu.md,
// "Order of accumulation"). A table's own code is in one file, NAME.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/cpu/panel.h"
#include "backend/layer_steps.h"
#include "core/activation.h"
#include "core/config.h"
#include "core/dtype.h"
#include "core/float_formats.h"
#include "core/quantize.h"

namespace nvfp4_moe::internal::cpu {

// A block of 16 of a row of activations, as the integer kernels read it. Their weights are u8, 2w +
// 12 in 0..24, for unsigned-by-signed dot products; bias compensates for the 12.
struct Int8Block {
  int8_t values[16];  // nvfp4: 2a; int8_block: the code
  int32_t bias;       // -12 * sum(values)
  // the block's scale times 2^8 (kernels decode weight scales as 2^-8 s), divided by 2 for each 2x
  float scale;
};
static_assert(sizeof(Int8Block) == 24);
inline constexpr int64_t kInt8ChunkBytes =
    kBlocksPerChunk * static_cast<int64_t>(sizeof(Int8Block));
inline constexpr float kNvfp4OperandFactor = 64.0f;  // 2^8 / (2 * 2)
inline constexpr float kInt8OperandFactor = 128.0f;  // 2^8 / 2

inline const Int8Block* int8_blocks(const std::byte* row) {
  return reinterpret_cast<const Int8Block*>(row);
}

// Number of W4A16 and fp8 products in a slice, a multiple of 16: large enough to amortize decoding,
// small enough for the contract's bound (float_tile.h) and for the L1 cache.
inline constexpr int64_t kMostSlice = 512;
constexpr int64_t float_slice(int64_t k) {
  const int64_t half = k / 2 / kBlockElems * kBlockElems;
  return half < kBlockElems ? kBlockElems : half > kMostSlice ? kMostSlice : half;
}

// One or two adjacent panels, which a kernel multiplies at a time. gemm1's are a gate panel and its
// up panel, if it has a gate.
inline constexpr int64_t kStripPanels = 2;
inline constexpr int64_t kStripRows = kStripPanels * kPanelRows;
struct Strip {
  const uint8_t* bytes = nullptr;  // (panels, chunks, 576)
  int64_t panels = 0;
  int64_t chunks = 0;
  // fp8: of each panel's matrix. Kernels multiply w8 * 2^shift, which needs no multiplication to
  // decode; multiply() in gemm.h removes the power of two. The shift determines when w8 becomes
  // subnormal (core/fp8.h).
  std::array<int, kStripPanels> fp8_shift{};
  // the bytes that this thread reads after this strip, to prefetch; bytes if there are none
  const uint8_t* next = nullptr;
};

// The rows of activations that a strip is multiplied with.
struct OperandRows {
  const std::byte* const* rows = nullptr;  // (count) operands of one activation format
  int64_t count = 0;
  int64_t k = 0;
  bool same_bits = false;       // a row's result must not depend on count (batch_invariant)
  bool for_single_row = false;  // single_row_operands' bytes follow every row
};

// An instruction set's functions for one activation format. A row's operands have the length of
// panels: chunks of 64 along K, zeros after the row's end.
struct Multiplication {
  const char* name;     // for describe() and plans
  int64_t chunk_bytes;  // of a row's operands
  // 1: rows of operands may be anywhere. n: rows fill tiles of n, so they must be equally spaced.
  // The rows that complete the last tile are read too; their results in acc are meaningless
  int64_t tile_rows;
  // acc (count, panels * 16) = sum over k of row i's operand times the strip's weight rows, without
  // tensor scales and row scales. Overwrites acc.
  void (*multiply)(const Strip& strip, const OperandRows& rows, float* acc);
  // Further operands of a row, if multiply() uses them to be faster in a batch in which most
  // experts have a single row; or 0. They change no bit of a single row. A row among several has
  // the bits of a single row, or those of the same batch without such operands.
  int64_t single_row_chunk_bytes = 0;
};

// Epilogue of gemm1 with a gate: acc (count, 32) = 16 gate and 16 up channels -> out row i at out +
// i * stride, 16 channels of bf16.
struct SwigluRows {
  const float* acc = nullptr;         // (count, 32)
  int64_t count = 0;                  //
  const float* gate_alpha = nullptr;  // (count); NaN for a nonfinite row
  const float* up_alpha = nullptr;    // (count)
  // (16) of the channels, added after the alphas; both null if there are no biases
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;  // (16)
  const float* weight = nullptr;   // (count) router weights, or null
  uint16_t* out = nullptr;
  int64_t stride = 0;
};

// Computes the activation for the 16 channels of `lanes` (bit i: channel i) whose sigmoid's
// argument is below kSigmoidTail, into out.
void swiglu_tail(const MoeOptions& options, uint32_t lanes, const float* gate, const float* up,
                 float* out);

// Epilogue of gemm2, of the linear and of gemm1 without a gate: out[i * stride + c] = acc[i][c] *
// alpha[i] (+ bias[c]), under relu2 the square of its positive part (* weight[i]), rounded once to
// dtype.
struct RoundRows {
  const float* acc = nullptr;    // (count, acc_stride)
  int64_t acc_stride = 0;        //
  int64_t count = 0;             //
  int64_t channels = 0;          // of each row
  const float* alpha = nullptr;  // (count)
  const float* bias = nullptr;   // (channels, a multiple of 16 then), or null
  bool relu2 = false;
  const float* weight = nullptr;  // (count) router weights, or null
  void* out = nullptr;
  DType dtype = DType::kBf16;
  int64_t stride = 0;
};

// Quantizes one row x[0 .. k) to NVFP4. scale: the row's tensor scale, or 0 for its own power of
// two; vllm_order: vLLM's operations in its order.
struct QuantizeRow {
  const void* x = nullptr;
  DType dtype = DType::kBf16;
  int64_t k = 0;
  float scale = 0;
  bool vllm_order = false;
  uint8_t* codes = nullptr;         // (k/2)
  uint8_t* block_scales = nullptr;  // (k/16)
};
struct RowCounts {
  uint64_t blocks = 0, saturated = 0, zeroed = 0;
  float row_scale = 1.0f;
};

struct Kernels {
  const char* name;
  const char* backend_name;   // "cpu:NAME"
  const char* requires_text;  // requirements on the host, for messages
  bool (*runs_on_host)();

  Multiplication nvfp4, int8_block, bf16, fp8;
  const Multiplication& multiplication(ActivationFormat format) const {
    switch (format) {
      case ActivationFormat::kNvfp4: return nvfp4;
      case ActivationFormat::kInt8Block: return int8_block;
      case ActivationFormat::kFp8: return fp8;
      case ActivationFormat::kBf16: break;
    }
    return bf16;
  }
  // Converts one row to operands: chunks_of(k) times the chunk_bytes of its multiplication.
  void (*nvfp4_operands)(const uint8_t* codes, const uint8_t* block_scales, int64_t k,
                         std::byte* out);
  void (*int8_operands)(const int8_t* codes, const float* scales, int64_t k, std::byte* out);
  void (*bf16_operands)(const uint16_t* bf16, int64_t k, std::byte* out);
  // Writes the further operands of a row after bf16_operands': chunks_of(k) times
  // bf16.single_row_chunk_bytes.
  void (*single_row_operands)(int64_t k, std::byte* row) = nullptr;
  void (*fp8_operands)(const uint8_t* codes, int64_t k, std::byte* out);

  void (*swiglu)(const MoeOptions& options, const SwigluRows& rows);
  void (*round)(const RoundRows& rows);
  // max |x|; NaN or Inf if the row is nonfinite.
  float (*amax)(const void* x, DType dtype, int64_t k);
  // the row must be finite, and amax must be the row's
  RowCounts (*quantize)(const QuantizeRow& row);
  // int8_block, for a finite row: codes (k), scales (k/16).
  RowCounts (*quantize_int8)(const void* x, DType dtype, int64_t k, int8_t* codes, float* scales);
  // fp8, for a finite row: codes (k) under the row's scale, a power of two.
  RowCounts (*quantize_fp8)(const void* x, DType dtype, int64_t k, float scale, uint8_t* codes);
  void (*to_bf16)(const void* x, DType dtype, int64_t k, uint16_t* out);
  // out (k) of dtype: x times a weight that dtype can represent.
  void (*scale_hidden)(const void* x, DType dtype, int64_t k, float weight, void* out);
  // Returns the number of elements of out that are NaN or Inf.
  uint64_t (*combine)(const StepContext& step, int64_t first_token, int64_t end_token);
};

// Every table of this build, best first; portable, which runs anywhere, is the last. A new
// instruction set is a new file and two entries here.
extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAmxKernels;
extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAvx512VnniKernels;
extern const Kernels kAvx2Kernels;
#endif
// Clang's arm_neon.h provides dot products in a target region from version 16 on.
#if defined(__aarch64__) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 16)
#define NVFP4_MOE_NEON
extern const Kernels kNeonKernels;
#endif
inline constexpr const Kernels* kAllKernels[] = {
#if defined(__x86_64__)
    &kAmxKernels,      &kAvx512Bf16Kernels, &kAvx512VnniKernels, &kAvx2Kernels,
#endif
#if defined(NVFP4_MOE_NEON)
    &kNeonKernels,
#endif
    &kPortableKernels,
};
// The first table that this host supports and that is not slower than the next one.
const Kernels& best_kernels();

}  // namespace nvfp4_moe::internal::cpu
