// layer.run and the torch op's entry: checks arrays, takes a workspace, and runs the layer without
// the interpreter lock.
//
// Everything here is on the path of every call. Checks compare integers, and messages are built
// only for failures.
#include <mutex>

#include "layer.h"
#include "moe/batch_check.h"
#include "torch_memory.h"

namespace nvfp4_moe::internal::python {

namespace {

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "(";
  for (const int64_t size : shape) text += (text.size() == 1 ? "" : ", ") + std::to_string(size);
  return text + (shape.size() == 1 ? ",)" : ")");
}

// Raises a message such as "... expected (4, 64) bfloat16, float16 or float32, contiguous, on cpu"
// for a wrong array.
void check_array(const Tensor& array, std::initializer_list<int64_t> shape, bool right_dtype,
                 const char* dtypes, const Device& device) {
  bool right =
      right_dtype && array.ndim() == static_cast<int32_t>(shape.size()) && array.device() == device;
  int32_t i = 0;
  for (const int64_t size : shape) right = right && array.shape(i++) == size;
  if (right && array.is_contiguous()) return;
  array.fail_expected(shape_text(shape) + " " + dtypes + " on " + to_string(device) +
                      ", contiguous");
}

constexpr const char* kFloats = "bfloat16, float16 or float32";

void lease(RunWorkspace& workspace, const OpenLayer& open, const Tensor& hidden, int64_t tokens,
           void* stream) {
  const MoeLayer& layer = *open.layer;
  const Status status =
      workspace.lease(*open.workspaces, open.layer->workspace_bytes(tokens), hidden, stream);
  if (status.ok()) return;
  throw Failure(status.in("workspace for " + std::to_string(tokens) + " tokens of a layer of " +
                          std::to_string(layer.weights().range.count) + " experts, hidden_size " +
                          std::to_string(layer.config()->hidden_size) + ", intermediate_size " +
                          std::to_string(layer.config()->intermediate_size)));
}

}  // namespace

Status OpenLayer::prepare() {
  if (!device.is_host()) {
    const Backend& backend = layer->backend();
    const RunStatus nothing;
    NVFP4_MOE_ASSIGN(device_status, backend.allocate(sizeof(nothing), device.index, "run status"));
    NVFP4_MOE_TRY(backend.memory->to_device(device.index, device_status.data(), &nothing,
                                            sizeof(nothing), nullptr));
  }
  return {};
}

OpenLayer::~OpenLayer() { layer_handles().remove(handle); }

HandleTable<OpenLayer>& layer_handles() {
  // outlives every layer
  static HandleTable<OpenLayer>& table = *new HandleTable<OpenLayer>("layer");
  return table;
}

Batch batch_of(const OpenLayer& open, const Tensor& hidden, const Tensor& topk_ids,
               const Tensor& topk_weights) {
  const MoeConfig& config = open.layer->config();
  if (hidden.ndim() != 2)
    hidden.fail_expected("(tokens, " + std::to_string(config->hidden_size) + ") " + kFloats +
                         " on " + to_string(open.device) + ", contiguous");
  const int64_t tokens = hidden.shape(0);
  check_array(hidden, {tokens, config->hidden_size}, hidden.is_floating(), kFloats, open.device);
  check_array(topk_ids, {tokens, config->top_k}, topk_ids.is_index(), "int32 or int64",
              open.device);
  check_array(topk_weights, {tokens, config->top_k}, topk_weights.is_f32(), "float32", open.device);
  Batch batch;
  batch.tokens = tokens;
  batch.hidden = hidden.data();
  batch.hidden_dtype = hidden.dtype();
  batch.topk_ids = topk_ids.data();
  batch.ids_dtype = topk_ids.dtype();
  batch.topk_weights = reinterpret_cast<const float*>(topk_weights.data());
  return batch;
}

namespace {

// begun: set when the ranks of an exchange will receive a failure without further calls.
nb::object run_arrays(OpenLayer& open, const LayerArrays& arrays, bool& begun) {
  if (!open.device.is_host()) check(open.layer->check_process("run"));  // before anything asks CUDA
  const Tensor hidden = Tensor::of_run(arrays.hidden, "hidden");
  const Tensor topk_ids = Tensor::of_run(arrays.topk_ids, "topk_ids");
  const Tensor topk_weights = Tensor::of_run(arrays.topk_weights, "topk_weights");
  Tensor::refuse_gradients({&hidden, &topk_weights});
  Batch batch = batch_of(open, hidden, topk_ids, topk_weights);
  if (!arrays.shared_weights.is_none()) {
    const Tensor shared = Tensor::of_run(arrays.shared_weights, "shared_weights");
    check_array(shared, {batch.tokens}, shared.is_f32(), "float32", open.device);
    Tensor::refuse_gradients({&shared});
    batch.shared_weights = reinterpret_cast<const float*>(shared.data());
  }
  batch.selection = arrays.selection;
  const int64_t hidden_size = hidden.shape(1);
  check(check_tokens(batch.tokens, open.layer->max_tokens()));
  void* const stream = hidden.stream_or(arrays.stream);
  const nb::object out_object =
      arrays.out.is_none() ? new_like_in(hidden, {batch.tokens, hidden_size}, arrays.stream, stream)
                           : nb::borrow(arrays.out);
  const Tensor out = Tensor::of_run(out_object, "out");
  check_array(out, {batch.tokens, hidden_size}, out.is_floating(), kFloats, open.device);
  if (!arrays.out.is_none()) out.check_writable();
  batch.out = out.data();
  batch.out_dtype = out.dtype();
  RunWorkspace workspace;
  const bool given = !arrays.workspace.is_none();
  if (given) workspace.use(Tensor(arrays.workspace, "workspace"), open.device);
  {
    const WithoutLock unlocked;
    if (!given) lease(workspace, open, hidden, batch.tokens, stream);
    begun = true;
    check(open.layer->run(batch, workspace.data(), workspace.size_bytes(), stream,
                          reinterpret_cast<RunStatus*>(open.device_status.data())));
    if (open.device.is_host()) {
      const RunStatus status = take(open.layer->status(workspace.data(), workspace.size_bytes()));
      const std::lock_guard lock(open.status_mutex);
      open.status = status;
    }
  }
  return arrays.out.is_none() ? hidden.in_framework(out_object) : out_object;
}

}  // namespace

void decline_run(const OpenLayer& open, const std::exception& raised) {
  if (open.layer->combine() == nullptr) throw;
  raise_on_all_ranks(raised, [&](const Status& failure) { return open.layer->decline(failure); });
}

nb::object run_layer(OpenLayer& open, const LayerArrays& arrays) {
  bool begun = false;
  try {
    return run_arrays(open, arrays, begun);
  } catch (const std::exception& raised) {
    if (begun) throw;
    decline_run(open, raised);
  }
}

}  // namespace nvfp4_moe::internal::python
