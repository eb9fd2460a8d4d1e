// The format functions (docs/explanation/format.md) on a caller's arrays, in host or device memory.
// This is the only entry point for C and Python. It checks the arguments, with one set of messages,
// and then calls core's functions or the device's (backend/device_functions.h), which give the same
// bits.
//
// On the host the work is done when a function returns. On a device it is enqueued in the place's
// stream; nothing is allocated, waited for or read back, so a graph can capture it. Therefore only
// the host reports invalid numbers in an array and counts; on a device such numbers give a NaN
// scale.
//
// Arrays are row-major and contiguous. x is (rows, cols) of BF16, F16 or F32, cols a multiple of
// 16; codes is (rows, cols/2), block_scales (rows, cols/16). All sizes are checked before anything
// is written: kInvalidArgument names the argument, the expected and the actual value. Empty arrays
// may be null.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "backend/device_functions.h"
#include "core/config.h"
#include "core/dtype.h"
#include "core/quantize.h"
#include "core/status.h"

namespace nvfp4_moe::internal::formats {

// The memory of a call's arrays.
class Place {
 public:
  static Place host() { return {}; }
  // cuda:index. functions: null for those of this build; tests of this file pass their own table.
  static Place cuda(int index, void* stream, const DeviceFormats* functions = nullptr) {
    Place place;
    place.is_host_ = false;
    place.index_ = index;
    place.stream_ = stream;
    place.functions_ = functions;
    return place;
  }
  bool is_host() const { return is_host_; }
  int index() const { return index_; }
  void* stream() const { return stream_; }
  const DeviceFormats* functions() const { return functions_; }

 private:
  bool is_host_ = true;
  int index_ = 0;
  void* stream_ = nullptr;
  const DeviceFormats* functions_ = nullptr;
};

// Handling of a row with NaN or Inf under kStatic and kVllmOrder on the host, whose scale cannot
// express it. (kWeights always refuses; kDynamicToken gives such a row a NaN scale.)
enum class NonfiniteRows : bool {
  kRefused,  // kInvalidArgument names the row
  kZeroed,   // zero codes and block scales, and the row is counted
};

struct Quantize {
  QuantizeMode mode = QuantizeMode::kWeights;
  // others only with kWeights, and kSweep only on the host
  ScaleSearch search = ScaleSearch::kMax;
  // (cols) for kMse and kSweep on the host, see core/quantize.h; or null
  const float* channel_weights = nullptr;
  const void* x = nullptr;
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  // kWeights: if empty, amax / 2688 of x. kDynamicToken: must be empty. The other modes require it:
  // kStatic rounds it up to a power of two, kVllmOrder requires a normal number.
  std::optional<float> tensor_scale;
  uint8_t* codes = nullptr;
  uint8_t* block_scales = nullptr;
  // kDynamicToken: (rows), NaN for a row with NaN or Inf. Otherwise (1), the scale that was used;
  // NaN on a device if weights contain NaN or Inf. Null only for kDynamicToken without rows.
  float* scales = nullptr;
  NonfiniteRows nonfinite_rows = NonfiniteRows::kRefused;
};
// counts: added to, only on the host.
Status quantize(const Place& place, const Quantize& call, QuantizeCounts& counts);

// Host only: int8 codes (rows, cols) and fp32 scales (rows, cols/16), as in core/quantize.h.
struct QuantizeInt8Block {
  const void* x = nullptr;
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  int8_t* codes = nullptr;
  float* block_scales = nullptr;
};
Status quantize_int8_block(const QuantizeInt8Block& call, QuantizeCounts& counts);

struct Dequantize {
  const uint8_t* codes = nullptr;
  const uint8_t* block_scales = nullptr;
  // in the same memory as codes: (1), or (rows) with scale_of_row; null: tensor_scale
  const float* scales = nullptr;
  bool scale_of_row = false;  // a row with a NaN scale becomes NaN
  float tensor_scale = 1.0f;
  int64_t rows = 0;
  int64_t cols = 0;
  DType out_dtype = DType::kBf16;  // BF16, F16 or F32
  void* out = nullptr;             // (rows, cols)
};
// On the host kBadInput reports a block scale above 0x7E.
Status dequantize(const Place& place, const Dequantize& call);

struct SwigluQuantize {
  Activation activation = Activation::kSwiglu;
  std::optional<float> swiglu_limit;
  float swiglu_alpha = MoeOptions{}.swiglu_alpha;
  std::optional<float> situ_gate_limit, situ_up_limit;
  // (rows, 2 inner): all of gate, then all of up; interleaved: g0 u0 g1 u1 and so on
  const void* gate_up = nullptr;
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t inner = 0;  // a multiple of 16
  bool interleaved = false;
  const float* row_weights = nullptr;  // (rows) router weights under before_down, or null
  std::optional<float> power_of_two;  // the tensor scale of every row; empty: each row gets its own
  QuantizedRows out;
};
Status swiglu_quantize(const Place& place, const SwigluQuantize& call, QuantizeCounts& counts);

// Matrices of (rows, scale_cols) block scales, contiguous, each swizzled separately
// (core/scale_layout.h).
struct ScaleMatrices {
  const uint8_t* from = nullptr;
  int64_t matrices = 1;
  int64_t rows = 0;
  int64_t scale_cols = 0;  // cols/16
  uint8_t* to = nullptr;
};
// Converts linear to (matrices, swizzled_bytes), with zero padding, and back.
Status swizzle_scales(const Place& place, const ScaleMatrices& call);
Status unswizzle_scales(const Place& place, const ScaleMatrices& call);
// Bytes of one swizzled matrix.
Result<int64_t> swizzled_bytes(int64_t rows, int64_t scale_cols);

// Host only. Converts scales (rows, scale_cols) of rows sorted by expert to tiles; each expert's
// tiles have their own base.
struct ExpertScales {
  const uint8_t* from = nullptr;
  int64_t rows = 0;
  int64_t scale_cols = 0;
  const int64_t* row_offsets = nullptr;  // (experts + 1) ascending, from 0 to rows
  int64_t experts = 0;
  uint8_t* to = nullptr;  // (expert_swizzled_bytes)
};
Status swizzle_expert_scales(const ExpertScales& call);
Result<int64_t> expert_swizzled_bytes(int64_t rows, int64_t scale_cols, int64_t experts);

// Host only. Converts NVFP4 to FP8 E4M3, with one scale per tensor or per block.
struct ToFp8 {
  const uint8_t* codes = nullptr;
  const uint8_t* block_scales = nullptr;
  float tensor_scale = 1.0f;
  int64_t rows = 0;
  int64_t cols = 0;
  std::optional<std::pair<int64_t, int64_t>>
      block;                // (rows, cols) of a block, 1 to 2^30 each; empty: the whole tensor
  uint8_t* out = nullptr;   // (rows, cols)
  float* scales = nullptr;  // (fp8_scales) row-major over blocks
};
Status to_fp8(const ToFp8& call);
// (rows, cols) of to_fp8's scales.
Result<std::pair<int64_t, int64_t>> fp8_scales(
    int64_t rows, int64_t cols, const std::optional<std::pair<int64_t, int64_t>>& block);

// Host only. Packs `count` codes below 16, one per byte, into count/2 bytes, the even element in
// the low nibble; and back.
Status pack_codes(const uint8_t* codes, int64_t count, uint8_t* packed);
Status unpack_codes(const uint8_t* packed, int64_t count, uint8_t* codes);

}  // namespace nvfp4_moe::internal::formats
