// A case on a backend: packed weights, plan and a poisoned workspace with guard bytes between its
// spans. A device's workspace has a mirror in host memory, and buffers() points into the mirror.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/layer_steps.h"
#include "cases/cases.h"

namespace nvfp4_moe::internal::test {

class CaseRun {
 public:
  // max_tokens < 0: the case's own count. If this machine does not run the backend, or if pack or
  // plan fail, the constructor fails the current test and ok() is false; a run then fails with a
  // message too and computes nothing. gemm_config: Limits::gemm_config.
  CaseRun(const Backend& backend, const CaseData& data, int64_t max_tokens = -1,
          int gemm_config = -1);
  bool ok() const { return ok_; }

  const Backend& backend() const { return *backend_; }
  PackedWeights& weights() { return weights_; }
  const Plan& plan() const { return plan_; }
  const LayerBuffers& buffers() const { return buffers_; }

  // Fills every byte of the workspace, guards included, with a pattern that is NaN in every float
  // format.
  void poison();
  // Runs the layer and returns out's bytes, poisoned before the run. Executor: serial unless given.
  std::vector<uint8_t> run(const CaseData& data, Executor* executor = nullptr);
  // The same with the backend's steps, one after the other.
  std::vector<uint8_t> run_steps(const CaseData& data);
  // Only the run, into batch.out, of a batch returned by place. On a device it has not finished on
  // return.
  Status run_into(const Batch& batch, Executor& executor, void* stream = nullptr) const;

  // The batch in the backend's memory: itself on a host, a copy that lives until the next call on a
  // device.
  Batch place(const Batch& batch);
  // On a device: waits, then copies its workspace to the mirror and placed.out to out.
  void fetch(const Batch& placed, void* out);
  // The offset of the first byte outside all arrays of the last run that is no longer the pattern,
  // or -1.
  int64_t broken_guard() const;

  // A call for single steps of a batch returned by place. Its buffers are the backend's own, not
  // the mirror.
  StepContext step(const Batch& batch, Executor& executor) const;
  // Copies the arrays of the host walk from another run of the same case.
  void copy_arrays(const CaseRun& from);

 private:
  size_t out_bytes(const Batch& batch) const;
  void upload_workspace();

  const Backend* backend_;
  bool ok_ = false;
  PackedWeights weights_;
  Plan plan_;
  std::vector<std::byte> storage_;
  std::byte* base_ = nullptr;
  Buffer device_workspace_, device_batch_;  // devices only
  std::byte* device_base_ = nullptr;
  mutable LayerBuffers step_buffers_;  // of the most recently made step, and its plan
  mutable std::shared_ptr<const RunPlan> step_plan_;
  mutable int64_t last_tokens_ = 0;  // of the last run or step
  int64_t tokens_ = 0;               // of the case
  LayerBuffers buffers_;
};

// Every count of a run.
void expect_same_status(const RunStatus& expected, const RunStatus& actual);

// (tokens, channels) of a dtype as floats.
std::vector<float> to_floats(const std::vector<uint8_t>& bytes, DType dtype);
// Compares bitwise, with any NaN equal to any other. Returns the first difference in words.
std::string difference(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& actual,
                       DType dtype, int64_t channels);

}  // namespace nvfp4_moe::internal::test
