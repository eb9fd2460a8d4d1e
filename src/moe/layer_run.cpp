// A layer's runs and what they report, of one rank or over ranks.
#include "backend/layer_steps.h"
#include "core/router.h"
#include "moe/batch_check.h"
#include "moe/layer.h"
#include "moe/layer_debug.h"
#include "moe/workspace_claim.h"

namespace nvfp4_moe {

Status MoeLayer::run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream,
                     RunStatus* status) const {
  if (!combine_) return run_local(batch, workspace, workspace_bytes, stream, status);
  NVFP4_MOE_TRY(run_over_ranks(batch, workspace, workspace_bytes, stream));
  if (status == nullptr || backend_->memory == nullptr) return {};
  return backend_->memory->gather_rows(weights_->device, status, workspace, 1, sizeof(RunStatus), sizeof(RunStatus),
                                       stream);
}

Status MoeLayer::run_local(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream,
                           RunStatus* status) const {
  NVFP4_MOE_TRY(check_batch(batch, workspace, workspace_bytes));
  NVFP4_MOE_TRY(check_workspace(workspace, workspace_bytes, local_workspace_bytes(batch.tokens)));
  NVFP4_MOE_TRY(check_process("run"));
  const WeightUses::Use in_use = use();
  if (!in_use) return Status(Code::kBusy, "run: the layer's weights are being replaced");
  NVFP4_MOE_TRY(note_capture(stream));
  // A device's stream orders the runs in a workspace. A run of no tokens writes to its workspace too: counts and offsets.
  const WorkspaceClaim claim(backend_->memory == nullptr ? workspace : nullptr);
  if (!claim) return WorkspaceClaim::busy();
  const RunContext context{executor_, stream, status};
  auto* const bytes = static_cast<std::byte*>(workspace);
  Batch ready = batch;
  if (batch.selection != nullptr && backend_->memory == nullptr) {
    nvfp4_moe::select_experts(*batch.selection);
    ready.selection = nullptr;
  }
  return debug_ ? debug_->run(*this, ready, bytes, context) : backend_->run(*weights_, plan_, ready, bytes, context);
}

Status MoeLayer::run_over_ranks(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream) const {
  const Combine::Call call(*combine_);
  NVFP4_MOE_TRY(call.status());
  NVFP4_MOE_TRY(combine_->link_state());
  const auto check = [&]() -> Status {
    NVFP4_MOE_TRY(check_tokens(batch.tokens, max_tokens()));
    if (batch.selection != nullptr)
      return unsupported("selection: expected experts that are selected before a run over an exchange, got logits");
    if (batch.shared_weights != nullptr && config()->shared_intermediate_size == 0)
      return invalid_argument("shared_weights: expected null (the layer has no shared expert), got a pointer");
    Batch mine = batch;
    if (weights_->config->shared_intermediate_size == 0) mine.shared_weights = nullptr;  // another rank's
    NVFP4_MOE_TRY(check_batch(mine, workspace, workspace_bytes));
    return check_workspace(workspace, workspace_bytes, this->workspace_bytes(batch.tokens));
  };
  Status mine = check();
  // A device's stream orders the runs in a workspace.
  const WorkspaceClaim claim(mine.ok() && backend_->memory == nullptr ? workspace : nullptr);
  if (!claim) mine = WorkspaceClaim::busy();
  const WeightUses::Use in_use = use();
  if (!in_use) mine = Status(Code::kBusy, "run: the layer's weights are being replaced");
  if (mine.ok()) mine = note_capture(stream);
  auto* const bytes = static_cast<std::byte*>(workspace);
  NVFP4_MOE_TRY(combine_->begin(batch, bytes, stream, mine));
  const Status status = combine_->run(batch, bytes, stream);
  if (!status.ok()) combine_->fail(status);  // the others are past the point where a rank may decline
  return status;
}

Status MoeLayer::decline(const Status& why) const {
  if (!combine_) return why;
  const Combine::Call call(*combine_);
  NVFP4_MOE_TRY(call.status());
  return combine_->begin({}, nullptr, nullptr, why);
}

Status MoeLayer::failure(void* stream) const {
  if (!combine_) return {};
  NVFP4_MOE_TRY(combine_->work_state());
  return combine_->report(stream);
}

Result<RunStatus> MoeLayer::status(const void* workspace, size_t workspace_bytes, void* stream) const {
  NVFP4_MOE_TRY(failure(stream));
  const Result<RunStatus> status = read_status(workspace, workspace_bytes, stream);
  if (combine_) NVFP4_MOE_TRY(combine_->work_state());  // what this has waited for
  return status;
}

Result<RunStatus> MoeLayer::read_status(const void* workspace, size_t workspace_bytes, void* stream) const {
  NVFP4_MOE_TRY(check_workspace(workspace, workspace_bytes, sizeof(RunStatus)));
  const auto* const status = static_cast<const RunStatus*>(workspace);  // every walk begins with it
  if (backend_->memory == nullptr) return *status;
  NVFP4_MOE_TRY(check_process("status"));
  RunStatus copy;
  NVFP4_MOE_TRY(backend_->memory->to_host(weights_->device, &copy, status, sizeof(copy), stream));
  return copy;
}

}  // namespace nvfp4_moe
