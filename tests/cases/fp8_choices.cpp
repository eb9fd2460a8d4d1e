// The choices of fp8; case_table.cpp sets the activation format.
#include "cases/choices.h"

namespace nvfp4_moe::internal {

const std::vector<Choice>& fp8_choices() {
  using A = Activation;
  using H = ActivationScale;
  using I = IntermediateScale;
  static const std::vector<Choice> all = {
      {"fp8", [](Case&) {}},
      {"fp8_static",
       [](Case& c) {
         c.options.activation_scale = H::kStatic;
         c.options.static_headroom = 4;
       }},
      {"fp8_fixed_checkpoint",
       [](Case& c) {
         c.options.activation_scale = H::kStatic;
         c.options.intermediate_scale = I::kFixed;
       }},
      {"fp8_fixed_given",
       [](Case& c) {
         c.options.intermediate_scale = I::kFixed;
         c.options.intermediate_fixed = 0x1p-5f;
       }},
      {"fp8_fixed_clamp",
       [](Case& c) {
         clamp(c, A::kSwigluClamped, 2);
         c.options.intermediate_scale = I::kFixed;
       }},
      {"fp8_fixed_clamp_oai_before_down",
       [](Case& c) {
         clamp(c, A::kSwigluOai, 2.5f);
         before_down(c);
         c.options.intermediate_scale = I::kFixed;
       }},
      {"fp8_clamped", [](Case& c) { clamp(c, A::kSwigluClamped, 1.5f); }},
      {"fp8_step_fp16",
       [](Case& c) {
         clamp(c, A::kSwigluStep, 1);
         c.hidden_dtype = c.out_dtype = DType::kF16;
       }},
      {"fp8_oai_before_down",
       [](Case& c) {
         clamp(c, A::kSwigluOai, 1.25f);
         before_down(c);
       }},
      {"fp8_rows_fp32_i64",
       [](Case& c) {
         c.options.row_format = RowFormat::kFp32;
         c.hidden_dtype = c.out_dtype = DType::kF32;
         c.ids_dtype = DType::kI64;
       }},
      {"fp8_shared_ep",
       [](Case& c) {
         shared(c, 96);
         c.range = {c.options.num_experts / 4, c.options.num_experts / 2};
       }},
      {"fp8_batch_invariant", [](Case& c) { c.options.batch_invariant = true; }},
  };
  return all;
}

const std::vector<Choice>& fp8_on_input_choices() {
  static const std::vector<Choice> all = {
      {"fp8_on_input_shared", [](Case& c) { shared(c, 96); }},
      {"fp8_on_input_static_shared_rows_fp32",
       [](Case& c) {
         c.options.activation_scale = ActivationScale::kStatic;
         c.options.row_format = RowFormat::kFp32;
         c.out_dtype = DType::kF32;
         shared(c, 32);
       }},
      {"fp8_on_input_fp16", [](Case& c) { c.hidden_dtype = c.out_dtype = DType::kF16; }},
  };
  return all;
}

}  // namespace nvfp4_moe::internal
