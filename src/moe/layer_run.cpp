// A layer's runs, on one rank or over ranks: the checks before they compute, which read no array,
// and their reports.
#include <cstdint>
#include <string>

#include "backend/layer_steps.h"
#include "core/router.h"
#include "moe/batch_check.h"
#include "moe/layer.h"
#include "moe/layer_debug.h"
#include "moe/router.h"
#include "moe/workspaces.h"

namespace nvfp4_moe::internal {

Status check_array(const Array& array) {
  const uintptr_t alignment = static_cast<uintptr_t>(bits(array.dtype) / 8);
  if (array.data == nullptr)
    return invalid_argument(std::string(array.name) + ": expected a pointer, got null");
  if (array.begin() % alignment != 0)
    return invalid_argument(
        std::string(array.name) + ": expected an address that is a multiple of " +
        std::to_string(alignment) + " (" + to_string(array.dtype) + "), got one that is not");
  if (array.end() < array.begin())
    return invalid_argument(
        std::string(array.name) + ": expected " + std::to_string(array.count) +
        " elements of memory, got an address too near the end of the address space");
  return {};
}

Status check_apart(const Array& written, const Array& other) {
  if (written.begin() >= other.end() || other.begin() >= written.end()) return {};
  return invalid_argument(std::string(written.name) +
                          ": expected memory of its own, got memory that overlaps " + other.name);
}

Status check_activation_dtype(const char* name, DType dtype) {
  if (is_activation(dtype)) return {};
  return invalid_argument(std::string(name) + " dtype: expected BF16, F16 or F32, got " +
                          to_string(dtype));
}

Status check_tokens(int64_t tokens, int64_t max_tokens) {
  if (tokens >= 0 && tokens <= max_tokens) return {};
  return invalid_argument(
      "tokens: expected 0 to " + std::to_string(max_tokens) + ", got " + std::to_string(tokens) +
      (tokens > 0 ? "; open the layer with a larger max_tokens, or split the batch" : ""));
}

Status check_forked(const char* what, bool forked) {
  if (!forked) return {};
  return unsupported(std::string(what) +
                     ": expected the process that opened this on a GPU, got one forked from it, "
                     "where CUDA does not "
                     "work (start it with spawn or exec, and open there)");
}

namespace {

// Checks that the selection fits the batch: its tokens, a router with the layer's experts, and
// outputs to the batch's arrays.
Status check_selection(const MoeConfig& config, const Batch& batch) {
  const SelectExperts& call = *batch.selection;
  const auto differs = [](const char* what, int64_t expected, int64_t got) {
    return invalid_argument(std::string("router ") + what + ": expected the layer's " +
                            std::to_string(expected) + ", got " + std::to_string(got));
  };
  if (call.config.num_experts != config->num_experts)
    return differs("num_experts", config->num_experts, call.config.num_experts);
  if (call.config.top_k != config->top_k) return differs("top_k", config->top_k, call.config.top_k);
  if (call.tokens != batch.tokens)
    return invalid_argument("router tokens: expected the batch's " + std::to_string(batch.tokens) +
                            ", got " + std::to_string(call.tokens));
  if (call.topk_ids != batch.topk_ids || call.ids_dtype != batch.ids_dtype ||
      call.topk_weights != batch.topk_weights)
    return invalid_argument(
        "topk_ids, topk_weights: expected the arrays that the selection writes, got others");
  return router::check_call(call);
}

// Checks that nothing else writes the selection's inputs, and that its outputs are not inputs of
// the layer.
Status check_selected(const SelectExperts& call, const Array& hidden, const Array& shared_weights,
                      const Array& out, const Array& workspace) {
  const auto [reads, writes] = router::arrays_of(call);
  for (const Array& read : reads)
    for (const Array* written : {&out, &workspace})
      if (read.data != nullptr) NVFP4_MOE_TRY(check_apart(*written, read));
  for (const Array& written : writes)
    for (const Array* other : {&hidden, &shared_weights, &out, &workspace})
      if (written.data != nullptr && other->data != nullptr)
        NVFP4_MOE_TRY(check_apart(written, *other));
  return {};
}

}  // namespace

Status MoeLayer::check_batch(const Batch& batch, const void* workspace, size_t workspace_bytes,
                             bool needs_out) const {
  const MoeConfig& config = weights_->config;
  NVFP4_MOE_TRY(check_tokens(batch.tokens, plan_.limits.max_tokens));
  NVFP4_MOE_TRY(check_activation_dtype("hidden", batch.hidden_dtype));
  NVFP4_MOE_TRY(check_activation_dtype("out", batch.out_dtype));
  if (batch.ids_dtype != DType::kI32 && batch.ids_dtype != DType::kI64)
    return invalid_argument(std::string("topk_ids dtype: expected I32 or I64, got ") +
                            to_string(batch.ids_dtype));
  if (batch.shared_weights != nullptr && config->shared_intermediate_size == 0)
    return invalid_argument(
        "shared_weights: expected null (the layer has no shared expert), got a pointer");
  if (batch.selection != nullptr) NVFP4_MOE_TRY(check_selection(config, batch));
  if (batch.tokens == 0) return {};

  const int64_t values = batch.tokens * config->hidden_size;
  const int64_t assignments = batch.tokens * config->top_k;
  const Array out{"out", batch.out, batch.out_dtype, needs_out ? values : 0};
  const Array space{"workspace", workspace, DType::kU8, static_cast<int64_t>(workspace_bytes)};
  const Array inputs[] = {
      {"hidden", batch.hidden, batch.hidden_dtype, values},
      {"topk_ids", batch.topk_ids, batch.ids_dtype, assignments},
      {"topk_weights", batch.topk_weights, DType::kF32, assignments},
      {"shared_weights", batch.shared_weights, DType::kF32, batch.tokens},
  };
  if (needs_out) NVFP4_MOE_TRY(check_array(out));
  NVFP4_MOE_TRY(check_apart(space, out));
  for (const Array& input : inputs) {
    if (&input == &inputs[3] && input.data == nullptr) continue;  // shared_weights may be left out
    NVFP4_MOE_TRY(check_array(input));
    NVFP4_MOE_TRY(check_apart(out, input));
    NVFP4_MOE_TRY(check_apart(space, input));
  }
  return batch.selection != nullptr
             ? check_selected(*batch.selection, inputs[0], inputs[3], out, space)
             : Status();
}

Status MoeLayer::run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream,
                     RunStatus* status) const {
  if (!combine_) return run_local(batch, workspace, workspace_bytes, stream, status);
  NVFP4_MOE_TRY(run_over_ranks(batch, workspace, workspace_bytes, stream));
  if (status == nullptr || backend_->memory == nullptr) return {};
  return backend_->memory->gather_rows(weights_->device, status, workspace, 1, sizeof(RunStatus),
                                       sizeof(RunStatus), stream);
}

Status MoeLayer::run_local(const Batch& batch, void* workspace, size_t workspace_bytes,
                           void* stream, RunStatus* status) const {
  NVFP4_MOE_TRY(check_batch(batch, workspace, workspace_bytes));
  NVFP4_MOE_TRY(check_workspace(workspace, workspace_bytes, local_workspace_bytes(batch.tokens)));
  NVFP4_MOE_TRY(check_process("run"));
  const WeightUses::Use in_use = use();
  if (!in_use) return Status(Code::kBusy, "run: the layer's weights are being replaced");
  NVFP4_MOE_TRY(note_capture(stream));
  // On a device the stream orders the runs in a workspace. A run without tokens writes to its
  // workspace too: counts and offsets.
  const WorkspaceClaim claim(backend_->memory == nullptr ? workspace : nullptr);
  if (!claim) return WorkspaceClaim::busy();
  const RunContext context{executor_, stream, status};
  auto* const bytes = static_cast<std::byte*>(workspace);
  Batch ready = batch;
  if (batch.selection != nullptr && backend_->memory == nullptr) {
    nvfp4_moe::internal::select_experts(*batch.selection);
    ready.selection = nullptr;
  }
  return debug_ ? debug_->run(*this, ready, bytes, context)
                : backend_->run(*weights_, plan_, ready, bytes, context);
}

Status MoeLayer::run_over_ranks(const Batch& batch, void* workspace, size_t workspace_bytes,
                                void* stream) const {
  const Combine::Call call(*combine_);
  NVFP4_MOE_TRY(call.status());
  NVFP4_MOE_TRY(combine_->link_state());
  const auto check = [&]() -> Status {
    NVFP4_MOE_TRY(check_tokens(batch.tokens, max_tokens()));
    if (batch.selection != nullptr)
      return unsupported(
          "selection: expected experts that are selected before a run over an exchange, got "
          "logits");
    if (batch.shared_weights != nullptr && config()->shared_intermediate_size == 0)
      return invalid_argument(
          "shared_weights: expected null (the layer has no shared expert), got a pointer");
    Batch mine = batch;
    if (weights_->config->shared_intermediate_size == 0)
      mine.shared_weights = nullptr;  // unused: another rank runs the shared expert
    NVFP4_MOE_TRY(check_batch(mine, workspace, workspace_bytes));
    return check_workspace(workspace, workspace_bytes, this->workspace_bytes(batch.tokens));
  };
  Status mine = check();
  // On a device the stream orders the runs in a workspace.
  const WorkspaceClaim claim(mine.ok() && backend_->memory == nullptr ? workspace : nullptr);
  if (!claim) mine = WorkspaceClaim::busy();
  const WeightUses::Use in_use = use();
  if (!in_use) mine = Status(Code::kBusy, "run: the layer's weights are being replaced");
  if (mine.ok()) mine = note_capture(stream);
  auto* const bytes = static_cast<std::byte*>(workspace);
  NVFP4_MOE_TRY(combine_->begin(batch, bytes, stream, mine));
  const Status status = combine_->run(batch, bytes, stream);
  if (!status.ok())
    combine_->fail(status);  // the others are past the point at which a rank may decline
  return status;
}

Status MoeLayer::decline(const Status& why) const {
  if (!combine_) return why;
  const Combine::Call call(*combine_);
  NVFP4_MOE_TRY(call.status());
  return combine_->begin({}, nullptr, nullptr, why);
}

Status MoeLayer::failure(void* stream) const {
  if (debug_ && debug_->rows) {
    NVFP4_MOE_TRY(check_process("status"));
    // Waits for the stream, and then for the check of its runs.
    NVFP4_MOE_TRY(backend_->memory->to_host(weights_->device, nullptr, nullptr, 0, stream));
    NVFP4_MOE_TRY(debug_->rows->finish());
  }
  if (!combine_) return {};
  NVFP4_MOE_TRY(combine_->work_state());
  return combine_->report(stream);
}

Result<RunStatus> MoeLayer::status(const void* workspace, size_t workspace_bytes,
                                   void* stream) const {
  NVFP4_MOE_TRY(failure(stream));
  const Result<RunStatus> status = read_status(workspace, workspace_bytes, stream);
  // failures of the work that this has waited for
  if (combine_) NVFP4_MOE_TRY(combine_->work_state());
  return status;
}

Result<RunStatus> MoeLayer::read_status(const void* workspace, size_t workspace_bytes,
                                        void* stream) const {
  NVFP4_MOE_TRY(check_workspace(workspace, workspace_bytes, sizeof(RunStatus)));
  // every workspace begins with it
  const auto* const status = static_cast<const RunStatus*>(workspace);
  if (backend_->memory == nullptr) return *status;
  NVFP4_MOE_TRY(check_process("status"));
  RunStatus copy;
  NVFP4_MOE_TRY(backend_->memory->to_host(weights_->device, &copy, status, sizeof(copy), stream));
  return copy;
}

}  // namespace nvfp4_moe::internal
