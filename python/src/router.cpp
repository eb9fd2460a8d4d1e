// A router's selection on arrays, on the host or in a GPU's memory: arrays become the request of moe/router.h, which
// checks it and does the work. On a GPU that is enqueued in the framework's current stream, and nothing is read back.
#include "moe/router.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "tensor.h"

namespace nvfp4_moe::python {

namespace {

using Two = nb::typed<nb::tuple, nb::any, nb::any>;  // ids, weights

// The fields of the package's RouterConfig, in its order.
RouterConfig router_config(int64_t num_experts, int64_t top_k, const std::string& scoring, bool renormalize,
                           double renormalize_epsilon, double routed_scaling_factor, int64_t num_expert_group,
                           int64_t topk_group, const std::string& group_score, bool correction_bias,
                           bool hash_routing) {
  RouterConfig config;
  config.num_experts = num_experts;
  config.top_k = top_k;
  config.scoring = take(parse<Scoring>(scoring));
  config.renormalize = renormalize;
  config.renormalize_epsilon = static_cast<float>(renormalize_epsilon);
  config.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  config.num_expert_group = num_expert_group;
  config.topk_group = topk_group;
  config.group_score = take(parse<GroupScore>(group_score));
  config.correction_bias = correction_bias;
  config.hash_routing = hash_routing;
  check(config.check());
  return config;
}

void check_router_config(int64_t num_experts, int64_t top_k, const std::string& scoring, bool renormalize,
                         double renormalize_epsilon, double routed_scaling_factor, int64_t num_expert_group,
                         int64_t topk_group, const std::string& group_score, bool correction_bias, bool hash_routing) {
  router_config(num_experts, top_k, scoring, renormalize, renormalize_epsilon, routed_scaling_factor, num_expert_group,
                topk_group, group_score, correction_bias, hash_routing);
}

// (T, E) with rows that lie anywhere but one after the other's elements: what is not so is copied.
Tensor logits_of(nb::handle object) {
  if (nb::hasattr(object, "__dlpack__")) {
    // A tensor that is lazily negated has elements two apart, and is copied below.
    Tensor logits = Tensor::of_run(object, "logits");
    const bool row_major =
        logits.ndim() == 2 && logits.is_floating() && logits.stride(1) == 1 && logits.stride(0) >= 0 &&
        reinterpret_cast<uintptr_t>(logits.data()) % static_cast<uintptr_t>(bits(logits.dtype()) / 8) == 0;
    if (row_major) return logits;
  }
  return Tensor::contiguous(object, "logits");
}

std::string on(const Tensor& beside) { return " on " + to_string(beside.device()); }

// An input beside the logits; none where the object is None.
std::optional<Tensor> input_of(nb::handle object, const char* name, const Tensor& logits) {
  if (object.is_none()) return std::nullopt;
  std::optional<Tensor> array(Tensor::contiguous(object, name));
  if (array->device() != logits.device()) array->fail_expected("an array" + on(logits));
  return array;
}

Tensor output_of(nb::handle object, const char* name, const Sizes& shape, const char* dtype, const Tensor& logits,
                 bool (Tensor::*right_dtype)() const) {
  Tensor array(object, name);
  if (!(array.*right_dtype)() || array.shape() != shape || array.device() != logits.device() || !array.is_contiguous())
    array.fail_expected(to_string(shape) + " " + dtype + on(logits) + ", contiguous");
  if (!array.is_writable()) fail(std::string(name) + ": expected an array that can be written, got a read-only one");
  return array;
}

DType ids_dtype_named(const std::string& name) {
  if (name == "int32") return DType::kI32;
  if (name == "int64") return DType::kI64;
  fail("ids_dtype: expected int32 or int64, got " + name);
}

Two select_experts(nb::handle logits_object, nb::handle bias_object, nb::handle token_ids_object,
                   nb::handle table_object, const std::string& ids_dtype, nb::handle out, nb::handle bad_ids_object,
                   int64_t num_experts, int64_t top_k, const std::string& scoring, bool renormalize,
                   double renormalize_epsilon, double routed_scaling_factor, int64_t num_expert_group,
                   int64_t topk_group, const std::string& group_score, bool correction_bias, bool hash_routing) {
  SelectExperts call;
  call.config = router_config(num_experts, top_k, scoring, renormalize, renormalize_epsilon, routed_scaling_factor,
                              num_expert_group, topk_group, group_score, correction_bias, hash_routing);
  call.ids_dtype = ids_dtype_named(ids_dtype);
  const Tensor logits = logits_of(logits_object);
  if (logits.ndim() != 2 || !logits.is_floating() || logits.shape(1) != num_experts)
    logits.fail_expected("(T, " + std::to_string(num_experts) +
                         ") bfloat16 (or its bits as uint16), float16 or float32");
  if (!logits.device().is_host() && logits.device().type != nb::device::cuda::value)
    throw Failure(unsupported("select_experts on " + to_string(logits.device()) + ": expected cpu or cuda"));
  call.tokens = logits.shape(0);
  call.logits = logits.data();
  call.logits_dtype = logits.dtype();
  call.logits_stride = call.tokens > 1 ? logits.stride(0) : num_experts;

  const std::optional<Tensor> bias = input_of(bias_object, "correction_bias", logits);
  if (bias.has_value() != correction_bias)
    fail(std::string("correction_bias: expected ") + (correction_bias ? "an array" : "None") +
         " with this config, got " + (correction_bias ? "None" : "an array"));
  if (bias) {
    if (!bias->is_f32() || bias->shape() != Sizes{num_experts})
      bias->fail_expected(to_string(Sizes{num_experts}) + " float32");
    call.correction_bias = bias->as<float>();
  }
  const std::optional<Tensor> token_ids = input_of(token_ids_object, "token_ids", logits);
  const std::optional<Tensor> table = input_of(table_object, "hash_table", logits);
  if (token_ids.has_value() != hash_routing || table.has_value() != hash_routing)
    fail(std::string("token_ids, hash_table: expected ") + (hash_routing ? "both" : "neither") + " with this config");
  if (hash_routing) {
    if (!token_ids->is_index() || token_ids->shape() != Sizes{call.tokens})
      token_ids->fail_expected(to_string(Sizes{call.tokens}) + " int32 or int64");
    if (!table->is_index() || table->ndim() != 2 || table->shape(0) < 1 || table->shape(1) != top_k)
      table->fail_expected("(vocab_size, " + std::to_string(top_k) + ") int32 or int64");
    call.token_ids = token_ids->data();
    call.token_ids_dtype = token_ids->dtype();
    call.hash_table = table->data();
    call.hash_table_dtype = table->dtype();
    call.vocab_size = table->shape(0);
  }
  std::optional<Tensor> bad_ids;
  if (!bad_ids_object.is_none()) {
    bad_ids.emplace(output_of(bad_ids_object, "bad_ids", {1}, "int64", logits, &Tensor::is_index));
    if (bad_ids->dtype() != DType::kI64) bad_ids->fail_expected("(1,) int64");
    call.bad_ids = bad_ids->as<uint64_t>();
  }
  const Sizes shape = {call.tokens, top_k};
  const bool given = !out.is_none();
  if (given && (!nb::isinstance<nb::tuple>(out) || nb::len(out) != 2))
    fail("out: expected a tuple of topk_ids and topk_weights");
  const Tensor ids = given ? output_of(out[0], "topk_ids", shape, "int32 or int64", logits, &Tensor::is_index)
                           : logits.empty_like(shape, call.ids_dtype);
  const Tensor weights = given ? output_of(out[1], "topk_weights", shape, "float32", logits, &Tensor::is_f32)
                               : logits.empty_like(shape, DType::kF32);
  call.ids_dtype = ids.dtype();
  call.topk_ids = ids.data();
  call.topk_weights = weights.as<float>();
  void* const stream = logits.stream_or(nb::none());
  {
    const WithoutLock unlocked;
    if (call.tokens > 0)
      check(logits.device().is_host() ? router::select_experts(call)
                                      : router::device_select_experts(logits.device().index, call, stream));
  }
  return nb::make_tuple(ids.object(), weights.object());
}

}  // namespace

void bind_router(nb::module_& m) {
  m.def("check_router_config", &check_router_config);
  m.def("select_experts", &select_experts, nb::arg("logits"), nb::arg("correction_bias").none(),
        nb::arg("token_ids").none(), nb::arg("hash_table").none(), nb::arg("ids_dtype"), nb::arg("out").none(),
        nb::arg("bad_ids").none(), nb::arg("num_experts"), nb::arg("top_k"), nb::arg("scoring"), nb::arg("renormalize"),
        nb::arg("renormalize_epsilon"), nb::arg("routed_scaling_factor"), nb::arg("num_expert_group"),
        nb::arg("topk_group"), nb::arg("group_score"), nb::arg("correction_bias_wanted"), nb::arg("hash_routing"));
}

}  // namespace nvfp4_moe::python
