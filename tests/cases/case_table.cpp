// The complete table of named choices.
#include "cases/choices.h"

namespace nvfp4_moe::internal {
namespace {

using A = Activation;

void bf16(Case& c) { c.options.activation_format = ActivationFormat::kBf16; }
void int8(Case& c) { c.options.activation_format = ActivationFormat::kInt8Block; }
void fp8(Case& c) { c.options.activation_format = ActivationFormat::kFp8; }
void i64(Case& c) { c.ids_dtype = DType::kI64; }
void biases(Case& c) { c.options.expert_biases = true; }
void batch_invariant(Case& c) { c.options.batch_invariant = true; }
void rows_fp32(Case& c) { c.options.row_format = RowFormat::kFp32; }
void static_scale(Case& c) { c.options.activation_scale = ActivationScale::kStatic; }
void headroom(Case& c) { c.options.static_headroom = 4; }
void fixed(Case& c) { c.options.intermediate_scale = IntermediateScale::kFixed; }
void vllm_order(Case& c) {
  c.options.activation_scale = ActivationScale::kVllmOrder;
  c.options.intermediate_scale = IntermediateScale::kVllmOrder;
}
void before_down(Case& c) {
  c.options.router_weight = RouterWeight::kBeforeDown;
  c.options.max_router_weight = 2.5f;
}
// Ranks with some of the experts.
void middle_half(Case& c) { c.range = {c.options.num_experts / 4, c.options.num_experts / 2}; }
void third_quarter(Case& c) { c.range = {c.options.num_experts / 2, c.options.num_experts / 4}; }

void dtypes(Case& c, DType hidden, DType out) {
  c.hidden_dtype = hidden;
  c.out_dtype = out;
}
void fp16(Case& c) { dtypes(c, DType::kF16, DType::kF16); }
void fp32(Case& c) { dtypes(c, DType::kF32, DType::kF32); }
void to_fp32(Case& c) { dtypes(c, DType::kBf16, DType::kF32); }
void from_fp32(Case& c) { dtypes(c, DType::kF32, DType::kBf16); }
void fp16_to_fp32(Case& c) { dtypes(c, DType::kF16, DType::kF32); }

Setting fixed_at(float power_of_two) {
  return [power_of_two](Case& c) {
    fixed(c);
    c.options.intermediate_fixed = power_of_two;
  };
}
// Limits low enough that many values reach them.
Setting clamped(Activation activation, float limit) {
  return [activation, limit](Case& c) {
    c.options.activation = activation;
    c.options.swiglu_limit = limit;
  };
}
// gpt-oss: its activation with its own limit.
void oai(Case& c) { clamped(A::kSwigluOai, 7)(c); }
void gelu(Case& c) { c.options.activation = A::kGelu; }
void gelu_tanh(Case& c) { c.options.activation = A::kGeluTanh; }
void situ(Case& c) {
  c.options.activation = A::kSitu;
  c.options.situ_gate_limit = 1.5f;
  c.options.situ_up_limit = 2.5f;
}
Setting alpha(float alpha) {
  return [alpha](Case& c) { c.options.swiglu_alpha = alpha; };
}
Setting shared_without_weights(int64_t intermediate_size) {
  return [intermediate_size](Case& c) { c.options.shared_intermediate_size = intermediate_size; };
}
Setting shared(int64_t intermediate_size) {
  return [intermediate_size](Case& c) {
    c.options.shared_intermediate_size = intermediate_size;
    c.shared_weights = true;
  };
}

}  // namespace

const std::vector<Choice>& plain_choices() {
  static const std::vector<Choice> all = {
      {"w4a4", {}},
      {"w4a16", {bf16}},
      {"w4a8", {int8}},
      {"w4a4_static", {static_scale, headroom}},
      {"w4a4_vllm_order", {vllm_order}},
      // Only in this case alpha is not a power of two times the tensor scale; fp32 rows and output
      // show its last bit.
      {"w4a4_vllm_order_rows_fp32", {vllm_order, rows_fp32, to_fp32}},
      {"w4a4_fixed_given", {fixed_at(0x1p-7f)}},
      {"w4a4_fixed_clamp", {clamped(A::kSwigluClamped, 2), fixed}},
      {"w4a4_fixed_clamp_oai_before_down", {clamped(A::kSwigluOai, 2.5f), before_down, fixed}},
      {"w4a4_fixed_checkpoint", {static_scale, fixed}},
      {"w4a4_clamped", {clamped(A::kSwigluClamped, 1.5f)}},
      {"w4a4_step", {clamped(A::kSwigluStep, 1)}},
      {"w4a4_oai", {clamped(A::kSwigluOai, 1.25f)}},
      {"w4a16_clamped", {bf16, clamped(A::kSwigluClamped, 1.5f)}},
      {"w4a16_step", {bf16, clamped(A::kSwigluStep, 1)}},
      {"w4a16_oai", {bf16, clamped(A::kSwigluOai, 1.25f), alpha(1.5f)}},
      {"w4a4_before_down", {before_down}},
      {"w4a16_before_down", {bf16, before_down}},
      {"w4a4_rows_fp32", {rows_fp32}},
      {"w4a16_rows_fp32", {bf16, rows_fp32}},
      {"w4a4_shared", {shared(96)}},
      {"w4a4_shared_before_down", {before_down, shared_without_weights(32)}},
      {"w4a16_shared", {bf16, shared(144)}},
      {"w4a4_ep", {middle_half}},
      {"w4a16_ep_i64", {bf16, third_quarter, i64}},
      {"w4a4_i64_fp32", {i64, fp32}},
      {"w4a4_fp16", {fp16}},
      {"w4a16_fp16_to_fp32", {bf16, fp16_to_fp32}},
      {"w4a16_fp32_to_bf16", {bf16, from_fp32}},
      {"w4a8_clamped", {int8, clamped(A::kSwigluClamped, 1.5f)}},
      {"w4a8_oai_before_down", {int8, clamped(A::kSwigluOai, 1.25f), before_down}},
      {"w4a8_step_fp16", {int8, clamped(A::kSwigluStep, 1), fp16}},
      // hidden of fp32: codes and scales follow the two fp32 divisions, not the quotients of bf16
      // numbers.
      {"w4a8_rows_fp32_i64", {int8, rows_fp32, fp32, i64}},
      {"w4a8_shared_ep", {int8, shared(96), middle_half}},
      {"w4a4_batch_invariant", {batch_invariant}},
  };
  return all;
}

const std::vector<Choice>& on_input_choices() {
  static const std::vector<Choice> all = {
      {"w4a4_on_input_shared", {shared(96)}},
      {"w4a16_on_input_shared", {bf16, shared(144)}},
      {"w4a8_on_input_shared", {int8, shared(96)}},
      {"w4a4_on_input", {}},
      {"w4a16_on_input", {bf16}},
      {"w4a8_on_input", {int8}},
      {"w4a4_on_input_static_shared", {static_scale, shared(32)}},
      {"w4a4_on_input_vllm_order_shared_rows_fp32", {vllm_order, rows_fp32, to_fp32, shared(32)}},
      {"w4a4_on_input_shared_ep_i64", {middle_half, i64, shared(64)}},
      {"w4a16_on_input_ep", {bf16, third_quarter}},
      {"w4a4_on_input_shared_fp16", {fp16, shared(96)}},
      {"w4a4_on_input_fp32", {fp32}},
      {"w4a16_on_input_shared_fp32_to_bf16", {bf16, from_fp32, shared(48)}},
      {"w4a16_on_input_fp16", {bf16, fp16}},
      {"w4a8_on_input_shared_fp16", {int8, fp16, shared_without_weights(48)}},
      {"w4a4_on_input_shared_batch_invariant", {batch_invariant, shared(96)}},
  };
  return all;
}

const std::vector<Choice>& fp8_choices() {
  static const std::vector<Choice> all = {
      {"fp8", {}},
      {"fp8_static", {static_scale, headroom}},
      {"fp8_fixed_checkpoint", {static_scale, fixed}},
      {"fp8_fixed_given", {fixed_at(0x1p-5f)}},
      {"fp8_fixed_clamp", {clamped(A::kSwigluClamped, 2), fixed}},
      {"fp8_fixed_clamp_oai_before_down", {clamped(A::kSwigluOai, 2.5f), before_down, fixed}},
      {"fp8_clamped", {clamped(A::kSwigluClamped, 1.5f)}},
      {"fp8_step_fp16", {clamped(A::kSwigluStep, 1), fp16}},
      {"fp8_oai_before_down", {clamped(A::kSwigluOai, 1.25f), before_down}},
      {"fp8_rows_fp32_i64", {rows_fp32, fp32, i64}},
      {"fp8_shared_ep", {shared(96), middle_half}},
      {"fp8_batch_invariant", {batch_invariant}},
  };
  return all;
}

const std::vector<Choice>& fp8_on_input_choices() {
  static const std::vector<Choice> all = {
      {"fp8_on_input_shared", {shared(96)}},
      {"fp8_on_input_static_shared_rows_fp32", {static_scale, rows_fp32, to_fp32, shared(32)}},
      {"fp8_on_input_fp16", {fp16}},
  };
  return all;
}

const std::vector<Choice>& bias_choices() {
  static const std::vector<Choice> all = {
      {"w4a4_biases_oai", {oai}},
      {"w4a16_biases_oai", {oai, bf16}},
      {"w4a8_biases_oai", {oai, int8}},
      {"fp8_biases_oai", {oai, fp8}},
      {"w4a4_biases_swiglu", {}},
      {"w4a4_biases_static_fixed_clamp", {clamped(A::kSwigluClamped, 2), static_scale, fixed}},
      {"w4a4_biases_vllm_order", {vllm_order}},
      {"w4a16_biases_step_rows_fp32", {clamped(A::kSwigluStep, 1), bf16, rows_fp32, fp32}},
      {"w4a4_biases_shared_ep_i64", {shared(96), middle_half, i64}},
      {"w4a16_biases_oai_fp16", {oai, bf16, fp16}},
      {"w4a16_biases_oai_batch_invariant", {oai, bf16, batch_invariant}},
      {"w4a8_biases_rows_fp32_ep", {int8, rows_fp32, third_quarter}},
      {"fp8_biases_static_shared", {fp8, static_scale, shared(32)}},
  };
  return all;
}

const std::vector<Choice>& relu2_choices() {
  static const std::vector<Choice> all = {
      {"w4a4_relu2", {}},
      {"w4a16_relu2", {bf16}},
      {"w4a8_relu2", {int8}},
      {"fp8_relu2", {fp8}},
      // Nemotron-3 Nano: a shared expert with its own size in addition to the routed ones.
      {"w4a4_relu2_shared_ep_i64", {shared(96), middle_half, i64}},
      {"w4a4_relu2_static_fixed", {static_scale, fixed}},
      {"w4a4_relu2_fixed_given_before_down", {before_down, fixed_at(0x1p-5f)}},
      {"w4a4_relu2_vllm_order", {vllm_order}},
      {"w4a16_relu2_before_down_rows_fp32", {bf16, before_down, rows_fp32, fp32, shared(48)}},
      {"w4a16_relu2_biases_fp16", {bf16, biases, fp16}},
      {"w4a4_relu2_biases_shared", {biases, shared(32)}},
      {"w4a16_relu2_batch_invariant", {bf16, batch_invariant}},
      {"w4a8_relu2_before_down_ep", {int8, before_down, third_quarter}},
      {"fp8_relu2_static_fixed_shared", {fp8, static_scale, fixed, shared(32)}},
      {"fp8_relu2_biases", {fp8, biases}},
  };
  return all;
}

const std::vector<Choice>& gelu_and_situ_choices() {
  static const std::vector<Choice> all = {
      {"w4a4_gelu_tanh", {gelu_tanh}},
      {"w4a16_gelu", {gelu, bf16}},
      {"w4a8_situ", {situ, int8}},
      {"fp8_gelu_tanh", {gelu_tanh, fp8}},
      {"w4a4_situ_shared_ep_i64", {situ, shared(96), middle_half, i64}},
      {"w4a4_situ_fixed_clamp_before_down", {situ, before_down, fixed}},
      {"w4a4_gelu_static_fixed", {gelu, static_scale, fixed}},
      {"w4a4_gelu_tanh_vllm_order", {gelu_tanh, vllm_order}},
      {"w4a16_gelu_tanh_before_down_rows_fp32",
       {gelu_tanh, bf16, before_down, rows_fp32, fp32, shared(48)}},
      {"w4a16_situ_biases_fp16", {situ, bf16, biases, fp16}},
      {"w4a16_situ_batch_invariant", {situ, bf16, batch_invariant}},
      {"w4a8_gelu_before_down_ep", {gelu, int8, before_down, third_quarter}},
      {"w4a8_gelu_tanh_biases", {gelu_tanh, int8, biases}},
      {"fp8_situ_fixed_clamp_shared", {situ, fp8, fixed, shared(32)}},
      {"fp8_gelu_biases", {gelu, fp8, biases}},
  };
  return all;
}

}  // namespace nvfp4_moe::internal
