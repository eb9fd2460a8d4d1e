// NVFP4_MOE_CHECK for a layer on a device: one token of each run is compared with the reference,
// later and in a thread of the layer.
//
// After a run the device copies a token to pinned memory (backend/device_sampling.h). The thread
// unpacks the experts that the token needs, computes the token with the reference backend and
// compares by the limits of one token (judge/judge.h). It keeps as many experts as a token has. A
// run never waits for the thread: if the run's slot is not free, its token is dropped and counted.
//
// When the layer ends, the thread still checks the samples that have arrived, unless the device is
// busy. Then a failure that no call has returned is printed, and how many tokens were not checked.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/device_sampling.h"
#include "core/fork.h"

namespace nvfp4_moe::internal {

class RowCheck {
 public:
  // backend: one with `memory`. The weights are packed and outlive the check. name: the layer's,
  // for messages; may be empty.
  static Result<std::unique_ptr<RowCheck>> open(const Backend& backend,
                                                const PackedWeights& weights, DeviceKind kind,
                                                std::string name);
  // Waits until the thread has ended, and for kernels in flight, since memory is freed.
  ~RowCheck();

  // Enqueues the copy of a token of the run that was enqueued in `stream` before it. Does not wait.
  Status sample(const Batch& batch, void* stream) { return sampler_->sample(batch, stream); }
  // The first failure that no call has returned yet: kCheckFailed with the run's number, the token,
  // the channel and both values, or the error for which a token could not be checked. Does not
  // wait.
  Status failure();
  // The same after all samples that the device has written by now are checked.
  Status finish();

  // While it is held the check reads no weights. Take it before weights change.
  using Hold = std::unique_lock<std::mutex>;
  Hold hold() { return Hold(reading_); }
  // Call it under a hold after an expert was replaced, in `stream`'s order or at rest.
  Status replaced(int64_t local_expert, void* stream, bool at_rest);

  // Counts of tokens, one a run.
  struct Counts {
    uint64_t checked = 0;
    // not compared: the slot was not free, an expert was replaced before it was read, or the check
    // itself failed
    uint64_t dropped = 0;
    uint64_t failed = 0;  // checked and found wrong
  };
  Counts counts() const;

 private:
  RowCheck(const Backend& backend, const PackedWeights& weights, std::string name)
      : backend_(backend), weights_(weights), name_(std::move(name)) {}
  Status prepare(DeviceKind kind);
  void run();
  // Prints what no call can return any more. The thread has ended.
  void report() noexcept;
  Sample* oldest() const;
  Sample* slot(int index) const;
  // Computes and compares. False: an expert has changed since.
  Result<bool> check(const Sample& sample);
  // The same for the thread: a failure is logged, and any error but kCheckFailed means that the run
  // could not be checked. `compared`: whether the token was.
  Status check_and_log(const Sample& sample, bool& compared) noexcept;
  // Makes the reference's expert `at` a copy of the layer's local expert. False: it has changed.
  Result<bool> load(int64_t at, int64_t local_expert, uint64_t replaced);
  // The ids of the reference's experts for a token, -1 for those that this layer does not hold.
  // False: an expert has changed.
  Result<bool> load_experts(const Sample& sample, std::vector<int64_t>& ids);
  const std::byte* array(const Sample& sample, int64_t offset) const {
    return reinterpret_cast<const std::byte*>(&sample) + offset;
  }
  std::string place() const;

  const Backend& backend_;
  const PackedWeights& weights_;
  const std::string name_;
  const uint32_t process_ = fork_count();
  std::unique_ptr<RowSampler> sampler_;
  SampleLayout layout_;

  // The reference's layer, with top_k experts. Used by the thread only.
  struct Resident {
    int64_t expert = -2;  // the local expert that it holds; -2: nothing yet
    uint64_t replaced = 0;
  };
  std::unique_ptr<PackedWeights> reference_;
  Plan plan_;
  Buffer workspace_;
  std::vector<Resident> residents_;  // as PackedWeights::tensor_scales

  std::mutex reading_;                 // held while weights are read or change
  uint64_t replacements_ = 0;          // guarded by reading_
  std::vector<uint64_t> replaced_at_;  // the same; of each expert, as PackedWeights::tensor_scales

  std::atomic<uint64_t> checked_{0}, skipped_{0}, failed_{0};
  // A forked child can neither wait for the thread nor destroy its condition.
  struct Worker {
    std::mutex mutex;  // guards the members below
    std::condition_variable changed;
    Status failure;
    bool ends = false;
    std::thread thread;
  };
  std::unique_ptr<Worker> worker_ = std::make_unique<Worker>();
};

}  // namespace nvfp4_moe::internal
