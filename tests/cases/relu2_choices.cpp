// The choices of relu2, experts without a gate; case_table.cpp sets the activation.
#include "cases/choices.h"

namespace nvfp4_moe::internal {
namespace {

Choice in_format(const char* name, ActivationFormat format, void (*apply)(Case&) = nullptr) {
  return {name, [format, apply](Case& c) {
            c.options.activation_format = format;
            if (apply != nullptr) apply(c);
          }};
}

}  // namespace

const std::vector<Choice>& relu2_choices() {
  using F = ActivationFormat;
  static const std::vector<Choice> all = {
      in_format("w4a4_relu2", F::kNvfp4),
      in_format("w4a16_relu2", F::kBf16),
      in_format("w4a8_relu2", F::kInt8Block),
      in_format("fp8_relu2", F::kFp8),
      // Nemotron-3 Nano: a shared expert of its own size beside the routed ones.
      in_format("w4a4_relu2_shared_ep_i64", F::kNvfp4,
                [](Case& c) {
                  shared(c, 96);
                  c.range = {c.options.num_experts / 4, c.options.num_experts / 2};
                  c.ids_dtype = DType::kI64;
                }),
      in_format("w4a4_relu2_static_fixed", F::kNvfp4,
                [](Case& c) {
                  c.options.activation_scale = ActivationScale::kStatic;
                  c.options.intermediate_scale = IntermediateScale::kFixed;
                }),
      in_format("w4a4_relu2_fixed_given_before_down", F::kNvfp4,
                [](Case& c) {
                  before_down(c);
                  c.options.intermediate_scale = IntermediateScale::kFixed;
                  c.options.intermediate_fixed = 0x1p-5f;
                }),
      in_format("w4a4_relu2_compat", F::kNvfp4,
                [](Case& c) {
                  c.options.activation_scale = ActivationScale::kCompat;
                  c.options.intermediate_scale = IntermediateScale::kCompat;
                }),
      in_format("w4a16_relu2_before_down_rows_fp32", F::kBf16,
                [](Case& c) {
                  before_down(c);
                  c.options.row_format = RowFormat::kFp32;
                  c.hidden_dtype = c.out_dtype = DType::kF32;
                  shared(c, 48);
                }),
      in_format("w4a16_relu2_biases_fp16", F::kBf16,
                [](Case& c) {
                  c.options.expert_biases = true;
                  c.hidden_dtype = c.out_dtype = DType::kF16;
                }),
      in_format("w4a4_relu2_biases_shared", F::kNvfp4,
                [](Case& c) {
                  c.options.expert_biases = true;
                  shared(c, 32);
                }),
      in_format("w4a16_relu2_batch_invariant", F::kBf16, [](Case& c) { c.options.batch_invariant = true; }),
      in_format("w4a8_relu2_before_down_ep", F::kInt8Block,
                [](Case& c) {
                  before_down(c);
                  c.range = {c.options.num_experts / 2, c.options.num_experts / 4};
                }),
      in_format("fp8_relu2_static_fixed_shared", F::kFp8,
                [](Case& c) {
                  c.options.activation_scale = ActivationScale::kStatic;
                  c.options.intermediate_scale = IntermediateScale::kFixed;
                  shared(c, 32);
                }),
      in_format("fp8_relu2_biases", F::kFp8, [](Case& c) { c.options.expert_biases = true; }),
  };
  return all;
}

}  // namespace nvfp4_moe::internal
