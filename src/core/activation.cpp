#include "core/activation.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {

Result<GatedActivation> GatedActivation::make(MoeOptions options) {
  if (!has_gate(options.activation))
    return invalid_argument(std::string("activation: expected one of gate and up, got ") +
                            to_string(options.activation));
  // Applies the config's own rules and messages, on a layer of the smallest legal size.
  options.num_experts = options.top_k = 1;
  options.hidden_size = options.intermediate_size = 16;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  return of(config.options());
}

void swiglu_quantize(const GatedActivation& activation, const GateUp& input,
                     const float* row_weights, float power_of_two, const QuantizedRows& out,
                     QuantizeCounts& counts) {
  const int64_t inner = input.inner;
  const int64_t stride = input.interleaved ? 2 : 1;
  const int64_t up = input.interleaved ? 1 : inner;
  std::vector<float> gate_up(static_cast<size_t>(2 * inner));  // gate and up of a row
  std::vector<float> h(static_cast<size_t>(inner));
  for (int64_t r = 0; r < input.rows; ++r) {
    to_floats(static_cast<const std::byte*>(input.data) + r * 2 * inner * (bits(input.dtype) / 8),
              input.dtype, 2 * inner, gate_up.data());
    for (int64_t i = 0; i < inner; ++i) {
      const float value = activation(gate_up[i * stride], gate_up[i * stride + up]);
      h[i] =
          bf16_to_float(bf16_from_float(row_weights == nullptr ? value : value * row_weights[r]));
    }
    const float amax = row_amax(h);
    const bool finite = std::isfinite(amax);
    const float scale = power_of_two != 0.0f ? power_of_two
                        : finite             ? dynamic_token_scale(amax)
                                             : 1.0f;
    quantize_row_exact(h, scale, out.codes + r * (inner / 2),
                       out.block_scales + r * (inner / kBlockElems), counts);
    out.row_scales[r] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace nvfp4_moe::internal
