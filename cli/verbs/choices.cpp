#include "cli/verbs/choices.h"

#include <fmt/format.h>

#include "cli/console/lists.h"
#include "cli/verbs/shared_options.h"

namespace nvfp4_moe::internal::cli {
namespace {

template <class Enum>
Status apply_name(const char* option, const std::string& name, Enum& value) {
  if (name.empty()) return {};
  Result<Enum> parsed = parse<Enum>(name);
  if (!parsed.ok()) return parsed.status().in(option);
  value = *parsed;
  return {};
}

}  // namespace

Status NumericChoices::apply(MoeOptions& options) const {
  if (!chooses_format())
    NVFP4_MOE_TRY(apply_name("--activation-format", activation_format, options.activation_format));
  NVFP4_MOE_TRY(apply_name("--activation-scale", activation_scale, options.activation_scale));
  NVFP4_MOE_TRY(apply_name("--intermediate-scale", intermediate_scale, options.intermediate_scale));
  NVFP4_MOE_TRY(apply_name("--router-weight", router_weight, options.router_weight));
  NVFP4_MOE_TRY(apply_name("--row-format", row_format, options.row_format));
  if (intermediate_fixed) options.intermediate_fixed = intermediate_fixed;
  if (static_headroom) options.static_headroom = *static_headroom;
  if (batch_invariant) options.batch_invariant = true;
  return {};
}

void add_numeric_choices(CLI::App& verb, NumericChoices& choices) {
  const auto add = [&](auto&&... arguments) {
    return verb.add_option(arguments...)->group("Numbers");
  };
  add("--activation-format", choices.activation_format,
      "How activations are quantized: nvfp4 (W4A4), bf16 (W4A16, not at all), int8_block or fp8 "
      "(W4A8), or auto: what DIR declares or more precise (default)")
      ->type_name("auto|" + choice_of<ActivationFormat>());
  add("--activation-scale", choices.activation_scale,
      "Scale of the layer's input: dynamic_token (each token's own, the default), static (the "
      "checkpoint's input scale, as a power of two) or vllm_order (that scale as it is, in vLLM's "
      "order of operations)")
      ->type_name(choice_of<ActivationScale>());
  add("--intermediate-scale", choices.intermediate_scale,
      "Scale of the activation function's output: dynamic_token (the default), fixed (one power of "
      "two for all) or vllm_order")
      ->type_name(choice_of<IntermediateScale>());
  add("--intermediate-fixed", choices.intermediate_fixed,
      "Scale for --intermediate-scale fixed, a power of two");
  add("--static-headroom", choices.static_headroom, "Factor of the static scale, a power of two");
  add("--router-weight", choices.router_weight,
      "Where router weights are multiplied (default: the model family's)")
      ->type_name(choice_of<RouterWeight>());
  add("--row-format", choices.row_format, "Type of the experts' results before they are added")
      ->type_name(choice_of<RowFormat>());
  verb.add_flag("--batch-invariant", choices.batch_invariant,
                "Make a token's result independent of the rest of the batch, bit for bit")
      ->group("Numbers");
}

Result<ExpertRange> LocalPart::range(int64_t num_experts) const {
  if (expert_range.empty()) return ExpertRange{0, num_experts};
  const auto parsed = parse_first_count(expert_range);
  if (!parsed.ok()) return parsed.status().in("--expert-range");
  const ExpertRange range{parsed->first, parsed->second};
  if (range.count < 1 || range.first > num_experts || range.count > num_experts - range.first) {
    return invalid_argument(fmt::format("--expert-range: expected experts within 0:{}, got {}",
                                        num_experts, expert_range));
  }
  return range;
}

Result<IntermediateSlice> LocalPart::slice(int64_t intermediate_size) const {
  if (intermediate_slice.empty()) return IntermediateSlice{};
  const auto parsed = parse_first_count(intermediate_slice);
  if (!parsed.ok()) return parsed.status().in("--intermediate-slice");
  const IntermediateSlice slice{parsed->first, parsed->second};
  if (slice.count < 16 || slice.first % 16 != 0 || slice.count % 16 != 0 ||
      slice.first > intermediate_size || slice.count > intermediate_size - slice.first) {
    return invalid_argument(
        fmt::format("--intermediate-slice: expected multiples of 16 within 0:{}, got {}",
                    intermediate_size, intermediate_slice));
  }
  return slice;
}

void add_expert_range(CLI::App& verb, LocalPart& part) {
  verb.add_option("--expert-range", part.expert_range,
                  "Experts to load, as first:count (default: all)")
      ->group("Numbers");
}

void add_intermediate_slice(CLI::App& verb, LocalPart& part) {
  verb.add_option("--intermediate-slice", part.intermediate_slice,
                  "Part of the intermediate dimension to load, as first:count (default: all)")
      ->group("Numbers");
}

}  // namespace nvfp4_moe::internal::cli
