#include "parallel/received_activations.h"

#include <cmath>
#include <limits>
#include <string>

namespace nvfp4_moe {
namespace {

constexpr uint8_t kLargestE4m3 = 0x7E;  // beyond it are NaN and negative numbers

Status refused(const char* field, const std::string& expected, float got) {
  return io_error(std::string("dispatch: ") + field + ": expected " + expected + ", got " + std::to_string(got));
}

bool is_scale(float value, float least) { return value >= least && value <= std::numeric_limits<float>::max(); }

}  // namespace

Status check_received(const ActivationBuffers& activations, ActivationFormat format, int64_t hidden, int64_t row) {
  const uint8_t flag = activations.nonfinite[row];
  if (flag > 1) return refused("flag of a nonfinite token", "0 or 1", flag);
  if (flag == 1) return {};  // out is NaN, whatever the scales are
  const int64_t blocks = hidden / 16;
  if (format == ActivationFormat::kNvfp4 || format == ActivationFormat::kFp8) {
    const float scale = activations.row_scale[row];
    if (!is_scale(scale, std::numeric_limits<float>::denorm_min()))
      return refused("row scale", "a finite number above 0", scale);
  }
  if (format == ActivationFormat::kNvfp4) {
    for (int64_t block = 0; block < blocks; ++block)
      if (const uint8_t scale = activations.block_scales[row * blocks + block]; scale > kLargestE4m3)
        return refused("block scale", "an E4M3 byte of at most 126", scale);
  }
  if (format == ActivationFormat::kInt8Block) {
    for (int64_t block = 0; block < blocks; ++block)
      if (const float scale = activations.int8_scales[row * blocks + block]; !is_scale(scale, 0x1p-116f))
        return refused("block scale", "a finite number from 2^-116", scale);
  }
  return {};
}

}  // namespace nvfp4_moe
