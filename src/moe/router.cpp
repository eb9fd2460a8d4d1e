#include "moe/router.h"

#include <cstddef>
#include <string>

#include "moe/registry.h"

namespace nvfp4_moe::internal::router {
namespace {

// Keep every product of two of them, in elements and in bytes, within int64.
constexpr int64_t kMostTokens = int64_t{1} << 30, kMostStride = int64_t{1} << 30,
                  kMostVocab = int64_t{1} << 40;
constexpr int64_t kMostHiddenSize = int64_t{1} << 20;

Status check_size(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(std::string(name) + ": expected " + std::to_string(low) + " to " +
                          std::to_string(high) + ", got " + std::to_string(value));
}

Status check_index_dtype(const char* name, DType dtype) {
  if (dtype == DType::kI32 || dtype == DType::kI64) return {};
  return invalid_argument(std::string(name) + ": expected I32 or I64, got " + to_string(dtype));
}

// Checks an array that must be given if and only if the config asks for it.
Status check_asked(const char* name, const void* data, const char* option, bool asked) {
  if (asked == (data != nullptr)) return {};
  return invalid_argument(std::string(name) + ": expected " +
                          (asked ? "a pointer with " : "null without ") + option +
                          (asked ? ", got null" : ", got a pointer"));
}

// Arrays that the config does not need are null: check_asked has checked that.
bool left_out(const Array& array) { return array.data == nullptr; }

Status check_arrays(const SelectExperts& call) {
  const auto [reads, writes] = arrays_of(call);
  for (const Array* always : {&reads[0], &writes[0], &writes[1]})
    NVFP4_MOE_TRY(check_array(*always));
  for (size_t i = 0; i < writes.size(); ++i) {
    if (left_out(writes[i])) continue;
    NVFP4_MOE_TRY(check_array(writes[i]));
    for (size_t earlier = 0; earlier < i; ++earlier)
      NVFP4_MOE_TRY(check_apart(writes[earlier], writes[i]));
  }
  for (const Array& read : reads) {
    if (left_out(read)) continue;
    NVFP4_MOE_TRY(check_array(read));
    for (const Array& written : writes)
      if (!left_out(written)) NVFP4_MOE_TRY(check_apart(written, read));
  }
  return {};
}

Status check_vectors(const char* name, int64_t value, int64_t low, int64_t high) {
  NVFP4_MOE_TRY(check_size(name, value, low, high));
  if (value % kRouterVector == 0) return {};
  return invalid_argument(std::string(name) + ": expected a multiple of " +
                          std::to_string(kRouterVector) + ", got " + std::to_string(value));
}

// Checks vector alignment, which check_array does not.
Status check_vector_array(const Array& array) {
  NVFP4_MOE_TRY(check_array(array));
  if (array.begin() % (kRouterVector * sizeof(uint16_t)) == 0) return {};
  return invalid_argument(std::string(array.name) +
                          ": expected an address that is a multiple of 16, for its rows are read" +
                          " by vectors");
}

// The given functions, or this build's.
Result<const DeviceRouter*> router_of(int index, const DeviceRouter* functions) {
  if (functions == nullptr) functions = device_router(DeviceKind::kCuda);
  if (functions == nullptr)
    return unsupported(
        "device cuda:" + std::to_string(index) +
        ": this build has no CUDA backend; build it with nvcc 12.9 or later on PATH");
  return functions;
}

Status check_device_index(int index) {
  return check_size("device (N of cuda:N)", index, 0, INT32_MAX);
}

}  // namespace

SelectionArrays arrays_of(const SelectExperts& call) {
  const RouterConfig& config = call.config;
  const int64_t k = config.top_k, assignments = call.tokens * k;
  return {.reads = {{
              {"logits", call.logits, call.logits_dtype,
               (call.tokens - 1) * call.logits_stride + config.num_experts},
              {"correction_bias", call.correction_bias, DType::kF32, config.num_experts},
              {"token_ids", call.token_ids, call.token_ids_dtype, call.tokens},
              {"hash_table", call.hash_table, call.hash_table_dtype, call.vocab_size * k},
              {"expert_scale", call.expert_scale, DType::kF32, config.num_experts},
          }},
          .writes = {{
              {"topk_ids", call.topk_ids, call.ids_dtype, assignments},
              {"topk_weights", call.topk_weights, DType::kF32, assignments},
              {"bad_ids", call.bad_ids, DType::kU64, 1},
          }}};
}

Status check_call(const RouterGemm& call) {
  NVFP4_MOE_TRY(check_size("tokens", call.tokens, 0, kMostTokens));
  NVFP4_MOE_TRY(check_size("num_experts", call.num_experts, 1, kMaxRouterExperts));
  NVFP4_MOE_TRY(check_vectors("hidden_size", call.hidden_size, kRouterVector, kMostHiddenSize));
  NVFP4_MOE_TRY(check_vectors("hidden_stride", call.hidden_stride, 0, kMostStride));
  if (call.logits_dtype != DType::kBf16 && call.logits_dtype != DType::kF32)
    return invalid_argument("logits: expected BF16 or F32, got " +
                            std::string(to_string(call.logits_dtype)));
  if (call.tokens == 0) return {};
  const Array hidden = {"hidden", call.hidden, DType::kBf16,
                        (call.tokens - 1) * call.hidden_stride + call.hidden_size};
  const Array weight = {"weight", call.weight, DType::kBf16, call.num_experts * call.hidden_size};
  const Array logits = {"logits", call.logits, call.logits_dtype, call.tokens * call.num_experts};
  NVFP4_MOE_TRY(check_vector_array(hidden));
  NVFP4_MOE_TRY(check_vector_array(weight));
  NVFP4_MOE_TRY(check_array(logits));
  NVFP4_MOE_TRY(check_apart(logits, hidden));
  return check_apart(logits, weight);
}

Status router_gemm(const RouterGemm& call) {
  NVFP4_MOE_TRY(check_call(call));
  nvfp4_moe::internal::router_gemm(call);
  return {};
}

Status device_router_gemm(int index, const RouterGemm& call, void* stream,
                          const DeviceRouter* functions) {
  NVFP4_MOE_TRY(check_device_index(index));
  NVFP4_MOE_TRY(check_call(call));
  NVFP4_MOE_ASSIGN(functions, router_of(index, functions));
  if (call.tokens == 0) return {};
  return functions->router_gemm(index, call, stream);
}

Status check_call(const SelectExperts& call) {
  const RouterConfig& config = call.config;
  NVFP4_MOE_TRY(config.check());
  NVFP4_MOE_TRY(check_size("tokens", call.tokens, 0, kMostTokens));
  NVFP4_MOE_TRY(check_activation_dtype("logits", call.logits_dtype));
  NVFP4_MOE_TRY(check_index_dtype("topk_ids", call.ids_dtype));
  NVFP4_MOE_TRY(check_size("logits_stride", call.logits_stride, 0, kMostStride));
  if (config.hash_routing) {
    NVFP4_MOE_TRY(check_index_dtype("token_ids", call.token_ids_dtype));
    NVFP4_MOE_TRY(check_index_dtype("hash_table", call.hash_table_dtype));
    NVFP4_MOE_TRY(check_size("vocab_size", call.vocab_size, 1, kMostVocab));
  }
  if (call.tokens == 0) return {};
  NVFP4_MOE_TRY(check_asked("correction_bias", call.correction_bias, "config.correction_bias",
                            config.correction_bias));
  NVFP4_MOE_TRY(
      check_asked("expert_scale", call.expert_scale, "config.expert_scale", config.expert_scale));
  NVFP4_MOE_TRY(
      check_asked("token_ids", call.token_ids, "config.hash_routing", config.hash_routing));
  NVFP4_MOE_TRY(
      check_asked("hash_table", call.hash_table, "config.hash_routing", config.hash_routing));
  return check_arrays(call);
}

Status select_experts(const SelectExperts& call) {
  NVFP4_MOE_TRY(check_call(call));
  nvfp4_moe::internal::select_experts(call);
  return {};
}

Status device_select_experts(int index, const SelectExperts& call, void* stream,
                             const DeviceRouter* functions) {
  NVFP4_MOE_TRY(check_device_index(index));
  NVFP4_MOE_TRY(check_call(call));
  NVFP4_MOE_ASSIGN(functions, router_of(index, functions));
  if (call.tokens == 0) return {};
  return functions->select_experts(index, call, stream);
}

}  // namespace nvfp4_moe::internal::router
