// What run checks before it computes: everything a caller can get wrong about a batch, without reading its arrays.
#include <cstdint>
#include <string>

#include "moe/layer.h"

namespace nvfp4_moe {
namespace {

// One array of a batch: (count) elements of dtype at data.
struct Array {
  const char* name;
  const void* data;
  DType dtype;
  int64_t count;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const { return begin() + static_cast<uintptr_t>(count) * static_cast<uintptr_t>(bits(dtype) / 8); }
};

Status check_array(const Array& array) {
  const uintptr_t alignment = static_cast<uintptr_t>(bits(array.dtype) / 8);
  if (array.data == nullptr) return invalid_argument(std::string(array.name) + ": expected a pointer, got null");
  if (array.begin() % alignment != 0)
    return invalid_argument(std::string(array.name) + ": expected an address that is a multiple of " +
                            std::to_string(alignment) + " (" + to_string(array.dtype) + "), got one that is not");
  if (array.end() < array.begin())
    return invalid_argument(std::string(array.name) + ": expected " + std::to_string(array.count) +
                            " elements of memory, got an address too near the end of the address space");
  return {};
}

bool overlap(const Array& a, const Array& b) { return a.begin() < b.end() && b.begin() < a.end(); }

Status check_dtype(const char* name, DType dtype) {
  if (is_activation(dtype)) return {};
  return invalid_argument(std::string(name) + " dtype: expected BF16, F16 or F32, got " + to_string(dtype));
}

}  // namespace

Status MoeLayer::check_batch(const Batch& batch, const void* workspace, size_t workspace_bytes) const {
  const MoeConfig& config = weights_->config;
  if (batch.tokens < 0 || batch.tokens > plan_.limits.max_tokens)
    return invalid_argument("tokens: expected 0 to " + std::to_string(plan_.limits.max_tokens) + ", got " +
                            std::to_string(batch.tokens));
  NVFP4_MOE_TRY(check_dtype("hidden", batch.hidden_dtype));
  NVFP4_MOE_TRY(check_dtype("out", batch.out_dtype));
  if (batch.ids_dtype != DType::kI32 && batch.ids_dtype != DType::kI64)
    return invalid_argument(std::string("topk_ids dtype: expected I32 or I64, got ") + to_string(batch.ids_dtype));
  if (batch.shared_weights != nullptr && config->shared_intermediate_size == 0)
    return invalid_argument("shared_weights: expected null (the layer has no shared expert), got a pointer");
  if (batch.tokens == 0) return {};

  const int64_t values = batch.tokens * config->hidden_size;
  const int64_t choices = batch.tokens * config->top_k;
  const Array out{"out", batch.out, batch.out_dtype, values};
  const Array space{"workspace", workspace, DType::kU8, static_cast<int64_t>(workspace_bytes)};
  const Array inputs[] = {
      {"hidden", batch.hidden, batch.hidden_dtype, values},
      {"topk_ids", batch.topk_ids, batch.ids_dtype, choices},
      {"topk_weights", batch.topk_weights, DType::kF32, choices},
      {"shared_weights", batch.shared_weights, DType::kF32, batch.tokens},
  };
  NVFP4_MOE_TRY(check_array(out));
  for (const Array& input : inputs) {
    if (&input == &inputs[3] && input.data == nullptr) continue;  // shared_weights may be left out
    NVFP4_MOE_TRY(check_array(input));
    if (overlap(input, out))
      return invalid_argument(std::string("out: expected memory of its own, got memory that overlaps ") + input.name);
    if (overlap(input, space))
      return invalid_argument(std::string("workspace: expected memory of its own, got memory that overlaps ") +
                              input.name);
  }
  if (overlap(out, space))
    return invalid_argument("workspace: expected memory of its own, got memory that overlaps out");
  return {};
}

}  // namespace nvfp4_moe
