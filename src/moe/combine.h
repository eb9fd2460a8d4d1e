// Combine: how a layer whose experts are divided over ranks runs. A MoeLayer of one rank has none.
//
// src/parallel has one class for each transport (host, NCCL, peer memory) and method (all-to-all,
// all-reduce). A run calls link_state, begin, run and, if that fails, fail. MoeLayer::run makes
// these calls and checks the batch first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "core/config.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

class Json;  // io/json.h

class Combine {
 public:
  virtual ~Combine() = default;
  Combine(const Combine&) = delete;
  Combine& operator=(const Combine&) = delete;

  const MoeConfig& config() const { return config_; }  // of the whole layer
  int64_t max_tokens() const { return max_tokens_; }   // of this rank's batch

  // Workspace bytes for a batch of this many tokens.
  virtual size_t workspace_bytes(int64_t tokens) const = 0;
  // Collective: each rank sends its exchange counts, or why it cannot run (mine), to all. Ok on all
  // ranks or on none. If mine is Ok, it first enqueues the work that needs no other rank. batch and
  // workspace have been checked.
  virtual Status begin(const Batch& batch, std::byte* workspace, void* stream, Status mine) = 0;
  // The rest of the run. Call it after begin with the same arguments.
  virtual Status run(const Batch& batch, std::byte* workspace, void* stream) = 0;
  // Ends the run on all ranks after run has failed.
  virtual void fail(const Status& why) = 0;

  // The failure of the link between the ranks' devices, without waiting. Always Ok on hosts.
  virtual Status link_state() = 0;
  // The same, but Ok if all enqueued work had finished before the failure.
  virtual Status work_state() = 0;
  // Faults that runs on a device have found since the last call. Waits for the stream.
  virtual Status report(void* stream) = 0;

  // (num_experts) assignments to each expert on all ranks since the layer was opened or the last
  // reset. Collective for all-to-all. mine: why this rank cannot take part.
  virtual Result<std::vector<uint64_t>> expert_load(const Status& mine) = 0;
  virtual Status reset_expert_load() = 0;  // this rank's counts

  // Describes how the layer is divided, for MoeLayer::describe_json.
  virtual void describe(Json& json) const = 0;

  // Allows one collective call of a rank at a time: other ranks would take a second one for the
  // first.
  class Call {
   public:
    explicit Call(Combine& combine) : in_use_(combine.in_use_), granted_(!in_use_.exchange(true)) {}
    ~Call() {
      if (granted_) in_use_.store(false);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    Status status() const {
      if (granted_) return {};
      return {Code::kBusy, "expert parallel layer: expected one call at a time, got a second one"};
    }

   private:
    std::atomic<bool>& in_use_;
    const bool granted_;
  };

 protected:
  Combine(const MoeConfig& config, int64_t max_tokens) : config_(config), max_tokens_(max_tokens) {}

 private:
  const MoeConfig config_;
  const int64_t max_tokens_;
  std::atomic<bool> in_use_{false};
};

}  // namespace nvfp4_moe::internal
