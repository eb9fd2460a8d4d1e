// NVFP4 to BF16, F16, F32 and FP8.
//
// A tensor scale leaves only 127 x 16 possible values. Each conversion builds a table with the one
// exact rounding, then looks up each element. convert_to_fp8 walks its scale blocks twice: for
// amax, then for codes.
#include "core/dequantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int kScaleBytes = 127;

Status check_view(const char* what, const Nvfp4View& view) {
  if (view.rows < 0 || view.cols < 0 || view.cols % kBlockElems != 0)
    return invalid_argument(std::string(what) +
                            ": expected rows >= 0 and cols a multiple of 16, got (" +
                            std::to_string(view.rows) + ", " + std::to_string(view.cols) + ")");
  if (view.rows == 0 || view.cols == 0) return {};
  if (view.codes == nullptr || view.block_scales == nullptr)
    return invalid_argument(std::string(what) + ": expected codes and block scales, got null");
  if (!std::isfinite(view.tensor_scale))
    return invalid_argument(std::string(what) + ": expected a finite tensor scale, got " +
                            std::to_string(view.tensor_scale));
  for (int64_t r = 0; r < view.rows; ++r) {
    const uint8_t* scales = view.row_scales(r);
    for (int64_t b = 0; b < view.cols / kBlockElems; ++b)
      if (!is_valid_block_scale(scales[b]))
        return bad_input(std::string(what) + ": row " + std::to_string(r) + " block scale " +
                         std::to_string(b) + ": expected an E4M3 byte 0..126, got " +
                         std::to_string(scales[b]));
  }
  return {};
}

double exact_value(uint8_t code, int scale_byte, float tensor_scale) {
  return static_cast<double>(e2m1_to_float(code)) *
         e4m3_to_float(static_cast<uint8_t>(scale_byte)) * tensor_scale;
}

template <class Out, class Round>
void dequantize_as(const Nvfp4View& view, const Round& round, Out* out) {
  // by scale byte, code
  auto values = std::make_unique<std::array<std::array<Out, 16>, kScaleBytes>>();
  for (int byte = 0; byte < kScaleBytes; ++byte)
    for (uint8_t code = 0; code < 16; ++code)
      (*values)[static_cast<size_t>(byte)][code] =
          round(exact_value(code, byte, view.tensor_scale));
  for (int64_t r = 0; r < view.rows; ++r) {
    const uint8_t* codes = view.row_codes(r);
    const uint8_t* scales = view.row_scales(r);
    for (int64_t b = 0; b < view.cols / kBlockElems; ++b) {
      const std::array<Out, 16>& of_code = (*values)[scales[b]];
      for (int i = 0; i < kBlockElems / 2; ++i) {
        const uint8_t byte = *codes++;
        *out++ = of_code[low_code(byte)];
        *out++ = of_code[high_code(byte)];
      }
    }
  }
}

// One FP8 scale block: rows [r0, r1), columns [c0, c1).
struct Region {
  int64_t r0, r1, c0, c1;
};

uint8_t code_at(const Nvfp4View& view, int64_t r, int64_t c) {
  const uint8_t byte = view.row_codes(r)[c / 2];
  return c % 2 == 0 ? low_code(byte) : high_code(byte);
}

float convert_region(const Nvfp4View& view, const Region& region, uint8_t* out) {
  float amax = 0;  // before the tensor scale; the product of code and block scale is exact in float
  for (int64_t r = region.r0; r < region.r1; ++r)
    for (int64_t c = region.c0; c < region.c1; ++c)
      amax = std::max(amax, e2m1_to_float(code_at(view, r, c) & 7) *
                                e4m3_to_float(view.row_scales(r)[c / kBlockElems]));
  const auto quotient = static_cast<float>(
      static_cast<double>(amax) * std::fabs(static_cast<double>(view.tensor_scale)) / kE4m3Max);
  const float scale = quotient == 0.0f ? 1.0f : quotient;

  std::array<std::array<uint8_t, 16>, kScaleBytes>
      bytes;  // by scale byte, code; filled on first use
  std::array<bool, kScaleBytes> filled{};
  for (int64_t r = region.r0; r < region.r1; ++r) {
    for (int64_t c = region.c0; c < region.c1; ++c) {
      const uint8_t scale_byte = view.row_scales(r)[c / kBlockElems];
      std::array<uint8_t, 16>& of_code = bytes[scale_byte];
      if (!filled[scale_byte]) {
        // The quotient of a 30-bit and a 24-bit significand: in double it is never rounded onto a
        // boundary of E4M3 that it does not equal.
        for (uint8_t code = 0; code < 16; ++code)
          of_code[code] =
              e4m3_from_double(exact_value(code, scale_byte, view.tensor_scale) / scale);
        filled[scale_byte] = true;
      }
      out[r * view.cols + c] = of_code[code_at(view, r, c)];
    }
  }
  return scale;
}

bool whole_tensor(const Fp8Scaling& scaling) {
  return scaling.block_rows == 0 && scaling.block_cols == 0;
}

}  // namespace

Status dequantize(const Nvfp4View& view, DType out_dtype, void* out) {
  if (!is_activation(out_dtype))
    return invalid_argument(std::string("dequantize: expected BF16, F16 or F32, got ") +
                            to_string(out_dtype));
  NVFP4_MOE_TRY(check_view("dequantize", view));
  if (out_dtype == DType::kBf16) {
    dequantize_as(view, bf16_from_double, static_cast<uint16_t*>(out));
  } else if (out_dtype == DType::kF16) {
    dequantize_as(view, fp16_from_double, static_cast<uint16_t*>(out));
  } else {
    dequantize_as(
        view, [](double value) { return static_cast<float>(value); }, static_cast<float*>(out));
  }
  return {};
}

Status convert_to_fp8(const Nvfp4View& view, const Fp8Scaling& scaling, uint8_t* out,
                      float* scales) {
  if (!whole_tensor(scaling) && (scaling.block_rows <= 0 || scaling.block_cols <= 0))
    return invalid_argument("convert_to_fp8: expected 0 x 0 or positive scale blocks, got " +
                            std::to_string(scaling.block_rows) + " x " +
                            std::to_string(scaling.block_cols));
  NVFP4_MOE_TRY(check_view("convert_to_fp8", view));
  if (whole_tensor(scaling)) {
    *scales = convert_region(view, {0, view.rows, 0, view.cols}, out);
    return {};
  }
  for (int64_t r = 0; r < view.rows; r += scaling.block_rows)
    for (int64_t c = 0; c < view.cols; c += scaling.block_cols)
      *scales++ = convert_region(view,
                                 {r, std::min(view.rows, r + scaling.block_rows), c,
                                  std::min(view.cols, c + scaling.block_cols)},
                                 out);
  return {};
}

}  // namespace nvfp4_moe::internal
