// NvfpLinear: a dense NVFP4 linear y = x W^T with a backend's own kernels, for attention
// projections and the like.
//
// W is (rows, cols) = (out_features, in_features), x (tokens, cols), y (tokens, rows). As with
// MoeLayer, open returns a complete object or an error, and run neither allocates nor locks.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "core/executor.h"
#include "core/fork.h"
#include "moe/backend_selection.h"
#include "moe/env.h"
#include "moe/workspaces.h"

namespace nvfp4_moe::internal {

struct LinearOptions {
  std::string device = "cpu";  // or "cuda:N": the memory of weights, workspaces and batches
  // or a name of the registry; if "auto", NVFP4_MOE_BACKEND is used
  std::string backend = "auto";
  ActivationFormat activation_format = ActivationFormat::kNvfp4;
  ActivationScale activation_scale = ActivationScale::kDynamicToken;
  float input_scale = 0.0f;  // the checkpoint's number, for static and vllm_order; otherwise unused
  float static_headroom = 1.0f;  // power of two, multiplies the static scale
  int64_t max_tokens = 0;        // at least 1
  // null: the linear owns a pool (NVFP4_MOE_THREADS, or one thread per core)
  Executor* executor = nullptr;
};

class NvfpLinear {
 public:
  // Packs a copy of the weights; the view is not kept.
  static Result<std::unique_ptr<NvfpLinear>> open(const Nvfp4View& weights,
                                                  const LinearOptions& options);
  // The same with the settings and the selection of a caller.
  static Result<std::unique_ptr<NvfpLinear>> open(const Nvfp4View& weights,
                                                  const LinearOptions& options, const Env& env,
                                                  const BackendSelector& selector);

  const Backend& backend() const { return *backend_; }
  const LinearWeights& weights() const { return weights_; }
  int64_t max_tokens() const { return max_tokens_; }
  // The minimum workspace of a run with that many tokens; it never shrinks as tokens grow. Without
  // an argument: for max_tokens().
  size_t workspace_bytes(int64_t tokens) const {
    return workspace_size_.get(
        tokens, [&](int64_t n) { return backend_->linear_workspace_bytes(weights_, n); });
  }
  size_t workspace_bytes() const { return workspace_bytes(max_tokens_); }
  std::string describe_json() const;

  // See MoeLayer::check_process.
  Status check_process(const char* what) const;
  // Checks the batch, then runs. Several threads may run one linear at once, each with its own
  // workspace (256-byte aligned, workspace_bytes of the batch's tokens).
  Status run(const LinearBatch& batch, void* workspace, size_t workspace_bytes,
             void* stream = nullptr) const;

 private:
  NvfpLinear() = default;
  const Backend* backend_ = nullptr;
  std::optional<CheckReport> self_check_;  // BackendSelection::check
  LinearWeights weights_;
  WorkspaceSizeCache workspace_size_;
  int64_t max_tokens_ = 0;
  std::unique_ptr<Executor> owned_executor_;
  Executor* executor_ = nullptr;
  const uint32_t process_ = fork_count();
};

}  // namespace nvfp4_moe::internal
