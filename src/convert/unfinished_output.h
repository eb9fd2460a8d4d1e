// OUT between the first byte and the last: claimed by a plan file, resumed by the same plan, closed
// by its removal.
//
// After a crash at any time, OUT is one of: without a plan and without shards (a rerun starts
// again), with a plan (a rerun continues), or complete. Each step is on disk before the next
// begins: plan; shard, its record in the plan, its name; index; copied files; config.json; removal
// of the plan.
#pragma once

#include <string>
#include <utility>

#include "convert/quantize_plan.h"
#include "core/status.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {

class UnfinishedOutput {
 public:
  // Checks for everything that claim() would refuse for any plan. Reads no weights.
  static Status check(const std::string& in, const std::string& out);
  // Claims OUT, which is new, empty, or an unfinished run of the same plan; otherwise
  // kInvalidArgument. kBusy while another run holds it: OUT is locked while this object exists.
  static Result<UnfinishedOutput> claim(const std::string& out, QuantizePlan plan);

  // For the writer of the shards: the finished ones, and a callback that records each new one.
  // Borrows this object.
  ShardRecords records();
  // Measurements of experts. An added one is durable with the next shard's record. That is soon
  // enough, since find() is only called for an expert if all its shards are finished.
  void add(ExpertId id, const ExpertQuality& quality) { plan_.experts[id] = quality; }
  const ExpertQuality* find(ExpertId id) const;
  // Counts of CSF's exceptions, of this run and earlier ones. save_exceptions makes them durable.
  std::map<ExpertId, ExceptionCounts>& exceptions() { return plan_.exceptions; }
  Status save_exceptions() const;

  const QuantizePlan& plan() const { return plan_; }
  // Finishes OUT, which has everything else: it is a checkpoint from here on.
  Status close();

 private:
  // An open folder and its lock.
  class Lock {
   public:
    static Result<Lock> take(const std::string& folder);
    Lock(Lock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Lock& operator=(Lock&& other) noexcept {
      std::swap(fd_, other.fd_);
      return *this;
    }
    ~Lock();

   private:
    explicit Lock(int fd) : fd_(fd) {}
    int fd_;
  };

  UnfinishedOutput(std::string out, Lock lock) : out_(std::move(out)), lock_(std::move(lock)) {}
  std::string plan_path() const;

  std::string out_;
  Lock lock_;
  QuantizePlan plan_;
};

}  // namespace nvfp4_moe::internal
