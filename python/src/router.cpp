// A router's GEMM and expert selection on arrays, on the host or on a GPU. Arrays become a request
// of moe/router.h, which checks it and does the work. On a GPU the work is enqueued in the
// framework's current stream, and nothing is read back.
#include "router.h"

#include <optional>
#include <string>

#include "moe/router.h"

namespace nvfp4_moe::internal::python {

RouterConfig router_config(const RouterFields& fields) {
  const auto& [num_experts, top_k, scoring, renormalize, renormalize_epsilon, routed_scaling_factor,
               num_expert_group, topk_group, group_score, correction_bias, hash_routing,
               expert_scale] = fields;
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
  config.expert_scale = expert_scale;
  check(config.check());
  return config;
}

namespace {

using Two = nb::typed<nb::tuple, nb::any, nb::any>;  // ids, weights

// Reads (T, E) logits in place if they are aligned and each row is contiguous; copies others.
Tensor logits_of(nb::handle object) {
  if (nb::hasattr(object, "__dlpack__")) {
    // A lazily negated tensor has a stride of two elements and is copied below.
    Tensor logits = Tensor::of_run(object, "logits");
    const bool row_major = logits.ndim() == 2 && logits.is_floating() && logits.stride(1) == 1 &&
                           logits.stride(0) >= 0 &&
                           reinterpret_cast<uintptr_t>(logits.data()) %
                                   static_cast<uintptr_t>(bits(logits.dtype()) / 8) ==
                               0;
    if (row_major) return logits;
  }
  return Tensor::contiguous(object, "logits");
}

std::string on(const Tensor& beside) { return " on " + to_string(beside.device()); }

// Reads an optional input; nullopt for None.
std::optional<Tensor> input_of(nb::handle object, const char* name, const Tensor& logits) {
  if (object.is_none()) return std::nullopt;
  std::optional<Tensor> array(Tensor::contiguous(object, name));
  if (array->device() != logits.device()) array->fail_expected("an array" + on(logits));
  return array;
}

Tensor output_of(nb::handle object, const char* name, const Sizes& shape, const char* dtype,
                 const Tensor& logits, bool (Tensor::*right_dtype)() const) {
  Tensor array(object, name);
  if (!(array.*right_dtype)() || array.shape() != shape || array.device() != logits.device() ||
      !array.is_contiguous())
    array.fail_expected(to_string(shape) + " " + dtype + on(logits) + ", contiguous");
  array.check_writable();
  return array;
}

DType ids_dtype_named(const std::string& name) {
  if (name == "int32") return DType::kI32;
  if (name == "int64") return DType::kI64;
  fail("ids_dtype: expected int32 or int64, got " + name);
}

}  // namespace

Selection::Selection(const RouterConfig& config, const SelectionArrays& arrays, DType ids_dtype)
    : logits_(logits_of(arrays.logits)) {
  call_.config = config;
  call_.ids_dtype = ids_dtype;
  const int64_t num_experts = config.num_experts, top_k = config.top_k;
  // An array (E) that must be given if and only if the config asks for it.
  const auto per_expert = [&](nb::handle object, const char* name, bool asked) {
    std::optional<Tensor> array = input_of(object, name, *logits_);
    if (array.has_value() != asked)
      fail(std::string(name) + ": expected " + (asked ? "an array" : "None") +
           ", since RouterConfig." + name + " is " + (asked ? "set" : "not set") + ", got " +
           (asked ? "None" : "an array"));
    if (array && (!array->is_f32() || array->shape() != Sizes{num_experts}))
      array->fail_expected(to_string(Sizes{num_experts}) + " float32");
    return array;
  };
  if (logits_->ndim() != 2 || !logits_->is_floating() || logits_->shape(1) != num_experts)
    logits_->fail_expected("(T, " + std::to_string(num_experts) +
                           ") bfloat16 (or its bits as uint16), float16 or float32");
  if (!logits_->device().is_host() && logits_->device().type != nb::device::cuda::value)
    throw Failure(unsupported("select_experts on " + to_string(logits_->device()) +
                              ": expected cpu or cuda"));
  call_.tokens = logits_->shape(0);
  call_.logits = logits_->data();
  call_.logits_dtype = logits_->dtype();
  call_.logits_stride = call_.tokens > 1 ? logits_->stride(0) : num_experts;

  bias_ = per_expert(arrays.correction_bias, "correction_bias", config.correction_bias);
  if (bias_) call_.correction_bias = bias_->as<float>();
  scale_ = per_expert(arrays.expert_scale, "expert_scale", config.expert_scale);
  if (scale_) call_.expert_scale = scale_->as<float>();
  token_ids_ = input_of(arrays.token_ids, "token_ids", *logits_);
  table_ = input_of(arrays.hash_table, "hash_table", *logits_);
  if (token_ids_.has_value() != config.hash_routing || table_.has_value() != config.hash_routing)
    fail(std::string("token_ids, hash_table: expected ") +
         (config.hash_routing ? "both" : "neither") + ", since RouterConfig.hash_routing is " +
         (config.hash_routing ? "set" : "not set"));
  if (config.hash_routing) {
    if (!token_ids_->is_index() || token_ids_->shape() != Sizes{call_.tokens})
      token_ids_->fail_expected(to_string(Sizes{call_.tokens}) + " int32 or int64");
    if (!table_->is_index() || table_->ndim() != 2 || table_->shape(0) < 1 ||
        table_->shape(1) != top_k)
      table_->fail_expected("(vocab_size, " + std::to_string(top_k) + ") int32 or int64");
    call_.token_ids = token_ids_->data();
    call_.token_ids_dtype = token_ids_->dtype();
    call_.hash_table = table_->data();
    call_.hash_table_dtype = table_->dtype();
    call_.vocab_size = table_->shape(0);
  }
  if (!arrays.bad_ids.is_none()) {
    bad_ids_.emplace(
        output_of(arrays.bad_ids, "bad_ids", {1}, "int64", *logits_, &Tensor::is_index));
    if (bad_ids_->dtype() != DType::kI64) bad_ids_->fail_expected("(1,) int64");
    call_.bad_ids = bad_ids_->as<uint64_t>();
  }
  const Sizes shape = {call_.tokens, top_k};
  const bool given = !arrays.out.is_none();
  if (given && (!nb::isinstance<nb::tuple>(arrays.out) || nb::len(arrays.out) != 2))
    fail("out: expected a tuple of topk_ids and topk_weights");
  ids_.emplace(given ? output_of(arrays.out[0], "topk_ids", shape, "int32 or int64", *logits_,
                                 &Tensor::is_index)
                     : logits_->empty_like(shape, call_.ids_dtype));
  weights_.emplace(
      given ? output_of(arrays.out[1], "topk_weights", shape, "float32", *logits_, &Tensor::is_f32)
            : logits_->empty_like(shape, DType::kF32));
  call_.ids_dtype = ids_->dtype();
  call_.topk_ids = ids_->data();
  call_.topk_weights = weights_->as<float>();
}

namespace {

Two select_experts(nb::handle logits, nb::handle correction_bias, nb::handle expert_scale,
                   nb::handle token_ids, nb::handle hash_table, const std::string& ids_dtype,
                   nb::handle out, nb::handle bad_ids, const RouterFields& router) {
  const Selection selection(
      router_config(router),
      {logits, correction_bias, expert_scale, token_ids, hash_table, out, bad_ids},
      ids_dtype_named(ids_dtype));
  const SelectExperts& call = selection.call();
  void* const stream = selection.logits().stream_or(nb::none());
  {
    const WithoutLock unlocked;
    if (call.tokens > 0)
      check(selection.logits().device().is_host()
                ? router::select_experts(call)
                : router::device_select_experts(selection.logits().device().index, call, stream));
  }
  if (!out.is_none()) return nb::make_tuple(selection.ids().object(), selection.weights().object());
  return nb::make_tuple(selection.logits().in_framework(selection.ids()),
                        selection.logits().in_framework(selection.weights()));
}

// Reads (T, H) with contiguous rows, which may have a stride; copies anything else.
Tensor rows_of(nb::handle object, const char* name) {
  if (nb::hasattr(object, "__dlpack__")) {
    Tensor rows = Tensor::of_run(object, name);
    if (rows.ndim() == 2 && rows.stride(1) == 1 && rows.stride(0) >= 0 &&
        rows.stride(0) % kRouterVector == 0)
      return rows;
  }
  return Tensor::contiguous(object, name);
}

void check_bf16(const Tensor& array) {
  if (array.ndim() != 2 || !array.is_floating() || array.dtype() != DType::kBf16)
    array.fail_expected("two dimensions of bfloat16 (or its bits as uint16)");
}

DType logits_dtype_named(const std::string& name) {
  if (name == "bfloat16") return DType::kBf16;
  if (name == "float32") return DType::kF32;
  fail("logits_dtype: expected bfloat16 or float32, got " + name);
}

nb::object router_gemm(nb::handle hidden_object, nb::handle weight_object,
                       const std::string& logits_dtype, nb::handle out) {
  const Tensor hidden = rows_of(hidden_object, "hidden"),
               weight = Tensor::contiguous(weight_object, "weight");
  check_bf16(hidden);
  check_bf16(weight);
  const Device device = hidden.device();
  if (!device.is_host() && device.type != nb::device::cuda::value)
    throw Failure(unsupported("router_gemm on " + to_string(device) + ": expected cpu or cuda"));
  if (weight.shape(1) != hidden.shape(1) || weight.device() != device)
    weight.fail_expected("(E, " + std::to_string(hidden.shape(1)) + ")" + on(hidden));
  RouterGemm call;
  call.tokens = hidden.shape(0);
  call.num_experts = weight.shape(0);
  call.hidden_size = hidden.shape(1);
  call.hidden = hidden.data();
  call.hidden_stride = call.tokens > 1 ? hidden.stride(0) : call.hidden_size;
  call.weight = weight.data();
  call.logits_dtype = logits_dtype_named(logits_dtype);
  const Sizes shape = {call.tokens, call.num_experts};
  const Tensor logits = out.is_none() ? hidden.empty_like(shape, call.logits_dtype)
                                      : output_of(out, "out", shape, "bfloat16 or float32", hidden,
                                                  &Tensor::is_floating);
  call.logits = logits.data();
  call.logits_dtype = logits.dtype();
  void* const stream = hidden.stream_or(nb::none());
  {
    const WithoutLock unlocked;
    check(device.is_host() ? router::router_gemm(call)
                           : router::device_router_gemm(device.index, call, stream));
  }
  return out.is_none() ? hidden.in_framework(logits) : logits.object();
}

}  // namespace

void bind_router(nb::module_& m) {
  m.def("router_gemm", &router_gemm, nb::arg("hidden"), nb::arg("weight"), nb::arg("logits_dtype"),
        nb::arg("out").none());
  m.def(
      "check_router_config", [](const RouterFields& router) { (void)router_config(router); },
      nb::arg("router"));
  m.def("select_experts", &select_experts, nb::arg("logits"), nb::arg("correction_bias").none(),
        nb::arg("expert_scale").none(), nb::arg("token_ids").none(), nb::arg("hash_table").none(),
        nb::arg("ids_dtype"), nb::arg("out").none(), nb::arg("bad_ids").none(), nb::arg("router"));
}

}  // namespace nvfp4_moe::internal::python
