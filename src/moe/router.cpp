#include "moe/router.h"

#include <string>

#include "moe/batch_check.h"
#include "moe/registry.h"

namespace nvfp4_moe::router {
namespace {

// They keep every product of two of them, and their bytes, inside int64.
constexpr int64_t kMostTokens = int64_t{1} << 30, kMostStride = int64_t{1} << 30, kMostVocab = int64_t{1} << 40;

Status check_size(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(std::string(name) + ": expected " + std::to_string(low) + " to " + std::to_string(high) +
                          ", got " + std::to_string(value));
}

Status check_index_dtype(const char* name, DType dtype) {
  if (dtype == DType::kI32 || dtype == DType::kI64) return {};
  return invalid_argument(std::string(name) + ": expected I32 or I64, got " + to_string(dtype));
}

// An array that the config asks for, or asks not to be given.
Status check_asked(const char* name, const void* data, const char* option, bool asked) {
  if (asked == (data != nullptr)) return {};
  return invalid_argument(std::string(name) + ": expected " + (asked ? "a pointer with " : "null without ") + option +
                          (asked ? ", got null" : ", got a pointer"));
}

Status check_arrays(const SelectExperts& call) {
  const RouterConfig& config = call.config;
  const int64_t k = config.top_k, assignments = call.tokens * k;
  const Array ids = {"topk_ids", call.topk_ids, call.ids_dtype, assignments};
  const Array weights = {"topk_weights", call.topk_weights, DType::kF32, assignments};
  const Array bad_ids = {"bad_ids", call.bad_ids, DType::kU64, 1};
  const Array inputs[] = {
      {"logits", call.logits, call.logits_dtype, (call.tokens - 1) * call.logits_stride + config.num_experts},
      {"correction_bias", call.correction_bias, DType::kF32, config.num_experts},
      {"token_ids", call.token_ids, call.token_ids_dtype, call.tokens},
      {"hash_table", call.hash_table, call.hash_table_dtype, call.vocab_size * k},
  };
  NVFP4_MOE_TRY(check_array(ids));
  NVFP4_MOE_TRY(check_array(weights));
  NVFP4_MOE_TRY(check_apart(ids, weights));
  if (call.bad_ids != nullptr) {
    NVFP4_MOE_TRY(check_array(bad_ids));
    NVFP4_MOE_TRY(check_apart(ids, bad_ids));
    NVFP4_MOE_TRY(check_apart(weights, bad_ids));
  }
  for (const Array& input : inputs) {
    if (input.data == nullptr && &input != &inputs[0]) continue;  // check_asked has seen it
    NVFP4_MOE_TRY(check_array(input));
    for (const Array* written : {&ids, &weights, &bad_ids})
      if (written->data != nullptr) NVFP4_MOE_TRY(check_apart(*written, input));
  }
  return {};
}

}  // namespace

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
  NVFP4_MOE_TRY(check_asked("correction_bias", call.correction_bias, "config.correction_bias", config.correction_bias));
  NVFP4_MOE_TRY(check_asked("token_ids", call.token_ids, "config.hash_routing", config.hash_routing));
  NVFP4_MOE_TRY(check_asked("hash_table", call.hash_table, "config.hash_routing", config.hash_routing));
  return check_arrays(call);
}

Status select_experts(const SelectExperts& call) {
  NVFP4_MOE_TRY(check_call(call));
  nvfp4_moe::select_experts(call);
  return {};
}

Status device_select_experts(int index, const SelectExperts& call, void* stream, const DeviceRouter* functions) {
  NVFP4_MOE_TRY(check_size("device (N of cuda:N)", index, 0, INT32_MAX));
  NVFP4_MOE_TRY(check_call(call));
  if (functions == nullptr) functions = device_router(DeviceKind::kCuda);
  if (functions == nullptr)
    return unsupported("device cuda:" + std::to_string(index) + ": this build has no CUDA backend");
  if (call.tokens == 0) return {};
  return functions->select_experts(index, call, stream);
}

}  // namespace nvfp4_moe::router
