// The part of a self-check that calls the device, on a thread of its own.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/device_streams.h"
#include "core/batch.h"
#include "moe/exact_layer.h"
#include "moe/self_check.h"

namespace nvfp4_moe::internal {

// A layer of the check.
struct CheckLayer {
  int64_t hidden = 0, intermediate = 0, shared_intermediate = 0;
  RowFormat row_format = RowFormat::kBf16;
  RouterWeight router_weight = RouterWeight::kAfterDown;
  bool biases = false;

  // Sets the options that exact_options leaves to its caller.
  void set(MoeOptions& options) const;
};
std::array<CheckLayer, 3> check_layers(Activation activation);
// How a run differs from the plan of its batch.
struct CheckedPlan {
  int configuration = -1;  // Limits::gemm_config
  int ctas = 0;            // of persistent kernels
};
// A number of CTAs up to `most` that get one or more whole tiles each and share as few others as
// possible, so that those are split along K on a device of any size.
int ctas_that_split(int64_t tiles, int most);
// A run of the check, with its device memory.
struct CheckRun {
  std::byte* workspace = nullptr;
  std::vector<StepPlan> steps;
  std::vector<float> out;  // (tokens, hidden)
};

// Owns all device memory of a check. If the check timed out, it must not be destroyed: the kernel
// may still use that memory. Lives in one thread.
class CheckSession {
 public:
  using Clock = std::chrono::steady_clock;
  // begins: called with a kernel's name before it is enqueued. The first one, of the plain backend,
  // is named once it has ended: until then CUDA may be loading modules, or may wait for other work
  // of the device before it does.
  CheckSession(const CheckScope& scope, const DeviceFacts& device, Clock::time_point deadline,
               std::function<void(const std::string& kernel)> begins);
  ~CheckSession();
  CheckSession(const CheckSession&) = delete;
  CheckSession& operator=(const CheckSession&) = delete;

  // Everything except `milliseconds`. Called once.
  CheckOutcome run();

 private:
  struct Arrays;  // the layer's arrays in a run's workspace, copied to the host

  const MoeConfig& config() const { return *config_; }
  Status run_layers();
  // Packs the same experts for both backends.
  Status open(const CheckLayer& layer);
  // Runs both backends over a batch in which expert e has rows[e] rows, the checked one by each of
  // the plans.
  Status compare_runs(const std::vector<int64_t>& rows, const std::vector<CheckedPlan>& plans);
  // The plan of a run, and its steps.
  Result<std::pair<Plan, std::vector<StepPlan>>> plan(const Backend& backend, int64_t tokens,
                                                      const CheckedPlan& checked) const;
  Result<CheckRun> run(const Backend& backend, const Batch& batch, const Plan& plan,
                       std::vector<StepPlan> steps);
  // kCheckFailed, naming the first step that differs, unless both runs have the same out.
  Status compare(const Batch& batch, int64_t rows, const CheckRun& plain, const CheckRun& own);
  Result<Arrays> arrays_of(const CheckRun& run, int64_t tokens);

  // The experts and the batch in device memory.
  Result<std::vector<ExpertSource>> place(const std::vector<ExpertBuffers>& experts);
  Result<Batch> place(const ExactBatch& batch);
  Result<std::byte*> take(size_t size_bytes);
  Result<std::byte*> put(const void* from, size_t size_bytes);
  Status copy_to(void* to, const void* from, size_t size_bytes);
  Status copy_from(void* to, const void* from, size_t size_bytes);
  Status wait();  // until the stream's work has ended, or the deadline
  void begin(const Backend& backend, const std::string& kernel);

  const Backend& own_;
  const CheckScope scope_;
  const DeviceFacts device_;
  const Clock::time_point deadline_;
  const std::function<void(const std::string&)> begins_;
  const Backend* plain_ = nullptr;  // null until the check begins
  const DeviceMemory* memory_ = nullptr;
  const DeviceStreams* streams_ = nullptr;
  void* stream_ = nullptr;
  std::optional<MoeConfig> config_;
  std::deque<PackedWeights> layers_;  // of the plain backend and of the checked one, in turn
  std::deque<Buffer> buffers_;
  // For runs of the plain backend, and of the checked one.
  struct Workspace {
    std::byte* data = nullptr;
    size_t size_bytes = 0;
  } workspaces_[2];
  std::vector<std::byte> poison_;
  std::string kernel_;
  bool has_run_kernels_ = false;
  std::set<std::pair<std::string, std::string>> step_variants_;  // steps and kernels that ran
  bool timed_out_ = false;
};

}  // namespace nvfp4_moe::internal
