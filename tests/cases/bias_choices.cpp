// The choices of expert biases; case_table.cpp sets expert_biases.
#include "cases/choices.h"

namespace nvfp4_moe::internal {
namespace {

// gpt-oss: its activation at its own limit and slope.
void oai(Case& c) { clamp(c, Activation::kSwigluOai, 7); }
void format(Case& c, ActivationFormat activation_format) { c.options.activation_format = activation_format; }

}  // namespace

const std::vector<Choice>& bias_choices() {
  using A = Activation;
  using F = ActivationFormat;
  static const std::vector<Choice> all = {
      {"w4a4_biases_oai", oai},
      {"w4a16_biases_oai",
       [](Case& c) {
         oai(c);
         format(c, F::kBf16);
       }},
      {"w4a8_biases_oai",
       [](Case& c) {
         oai(c);
         format(c, F::kInt8Block);
       }},
      {"fp8_biases_oai",
       [](Case& c) {
         oai(c);
         format(c, F::kFp8);
       }},
      {"w4a4_biases_swiglu", [](Case&) {}},
      {"w4a4_biases_static_fixed_clamp",
       [](Case& c) {
         clamp(c, A::kSwigluClamped, 2);
         c.options.activation_scale = ActivationScale::kStatic;
         c.options.intermediate_scale = IntermediateScale::kFixed;
       }},
      {"w4a4_biases_compat",
       [](Case& c) {
         c.options.activation_scale = ActivationScale::kCompat;
         c.options.intermediate_scale = IntermediateScale::kCompat;
       }},
      {"w4a16_biases_step_rows_fp32",
       [](Case& c) {
         clamp(c, A::kSwigluStep, 1);
         format(c, F::kBf16);
         c.options.row_format = RowFormat::kFp32;
         c.hidden_dtype = c.out_dtype = DType::kF32;
       }},
      {"w4a4_biases_shared_ep_i64",
       [](Case& c) {
         shared(c, 96);
         c.range = {c.options.num_experts / 4, c.options.num_experts / 2};
         c.ids_dtype = DType::kI64;
       }},
      {"w4a16_biases_oai_fp16",
       [](Case& c) {
         oai(c);
         format(c, F::kBf16);
         c.hidden_dtype = c.out_dtype = DType::kF16;
       }},
      {"w4a16_biases_oai_batch_invariant",
       [](Case& c) {
         oai(c);
         format(c, F::kBf16);
         c.options.batch_invariant = true;
       }},
      {"w4a8_biases_rows_fp32_ep",
       [](Case& c) {
         format(c, F::kInt8Block);
         c.options.row_format = RowFormat::kFp32;
         c.range = {c.options.num_experts / 2, c.options.num_experts / 4};
       }},
      {"fp8_biases_static_shared",
       [](Case& c) {
         format(c, F::kFp8);
         c.options.activation_scale = ActivationScale::kStatic;
         shared(c, 32);
       }},
  };
  return all;
}

}  // namespace nvfp4_moe::internal
