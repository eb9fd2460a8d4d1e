// TimedRanks: a layer over ranks as `bench --ep` times it: all ranks begin a run together, and it takes as long as its
// slowest rank.
//
// What goes between ranks is counted where it goes: host memory by the exchange's observer, device memory by a transport
// around NCCL's. On a host each run is timed by itself, with the parts of it that a rank spends in the exchange, waiting
// for others included. On GPUs a graph of all batches is replayed, which has no such parts.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench/rank_batches.h"
#include "cli/bench/subject.h"
#include "cli/bench/timed_layer.h"
#include "exchange/local_ranks.h"
#include "moe/expert_parallel.h"

namespace nvfp4_moe::cli {

// What a rank exchanges in a run. all_reduce has a combine alone.
enum class WirePart : uint8_t { kAgree, kDispatch, kCombine };
inline constexpr size_t kWireParts = 3;
inline constexpr const char* kWirePartNames[kWireParts] = {"agree", "dispatch", "combine"};

// One rank's run. Goes between ranks as it lies in memory.
struct RankRun {
  double us = 0;
  std::array<double, kWireParts> part_us{};     // zeros on devices
  std::array<double, kWireParts> sent_bytes{};  // to other ranks
  double all_sent_bytes() const { return sent_bytes[0] + sent_bytes[1] + sent_bytes[2]; }
};

struct RanksRound {
  std::vector<std::vector<RankRun>> ranks;  // (world, runs)
  std::vector<double> slowest_us;           // (runs) of the slowest rank, ascending
  double rank_median_us(size_t rank) const;
  // Mean over a rank's runs.
  double sent_bytes(size_t rank) const;
  double sent_bytes(size_t rank, WirePart part) const;
  // Of all time of all ranks.
  double share(WirePart part) const;
};

// Turns transfers of one run into RankRun's parts, by their operation.
class WireRecorder {
 public:
  void begin_run() { dispatched_ = false; }
  void clear() { run_ = RankRun(); }
  void add(std::string_view what, int64_t sent_bytes, double us);
  const RankRun& run() const { return run_; }

 private:
  RankRun run_;
  bool dispatched_ = false;  // the run has had an all_to_all_v: what follows goes back
};

// The ranks of this process with what each has of its own for all layers that are timed over them.
class RankHosts {
 public:
  // device: of rank first + index, by index. threads: of each.
  static Result<RankHosts> make(const LocalRanks& ranks, const std::function<std::string(int index)>& device,
                                int threads);
  const LocalRanks& ranks() const { return *ranks_; }
  int threads() const { return threads_; }
  const std::string& device(int index) const { return hosts_[static_cast<size_t>(index)]->device; }
  // Gives every rank's exchange NCCL, what goes over it counted, where the hosts are on devices. Collective.
  Status connect_devices();
  ~RankHosts();
  RankHosts(RankHosts&&) = default;

 private:
  RankHosts() = default;
  friend class TimedRanks;
  struct Host {
    std::string device;
    std::unique_ptr<Executor> executor;
    WireRecorder recorder;
  };
  const LocalRanks* ranks_ = nullptr;
  int threads_ = 1;
  std::vector<std::unique_ptr<Host>> hosts_;  // by index; the exchanges hold pointers to them
};

class TimedRanks {
 public:
  // Packs `copies` copies on every rank. max_tokens: of all ranks together. kUnsupported, on all ranks alike and with the
  // exchange as good as before, where the ranks cannot run such a layer.
  static Result<TimedRanks> open(RankHosts& hosts, const Subject& subject, const std::string& backend,
                                 CombineBy combine, int64_t max_tokens, int64_t copies, const ProgressFn& progress);
  CombineBy combine() const { return combine_; }
  int64_t max_tokens() const { return max_tokens_; }
  const ExpertParallelLayer& layer() const { return *ranks_.front()->copies.front(); }

  // The batches of what is timed next, of all ranks together, the same in every process.
  Status prepare(const std::shared_ptr<ColdBatches>& batches);
  Result<RanksRound> time(const Repeat& repeat);
  // What the ranks give for a batch, (tokens, hidden_size) bf16, on rank 0; empty elsewhere.
  Result<std::vector<uint16_t>> outputs(RandomTokens& batch);

 private:
  struct Rank {
    std::vector<std::unique_ptr<ExpertParallelLayer>> copies;
    Buffer workspace;
    std::vector<uint16_t> out;        // (tokens, hidden_size) of a run
    std::vector<PlacedBatch> placed;  // on a device
    std::vector<Batch> batches;       // this rank's tokens of each
  };
  TimedRanks(RankHosts& hosts, const Subject& subject, CombineBy combine, int64_t max_tokens)
      : hosts_(&hosts), options_(subject.options), combine_(combine), max_tokens_(max_tokens) {}
  Exchange& exchange(int index) const { return *hosts_->ranks().exchange(index); }
  Status open_rank(int index, const Subject& subject, const std::string& backend, int64_t max_tokens, int64_t copies,
                   const ProgressFn& progress);
  // This rank's tokens of a batch; its out is rank.out.
  Batch part_of(RandomTokens& tokens, int index) const;
  Status time_runs(int index, const Repeat& repeat, std::vector<RankRun>& runs) const;
  Status time_replays(int index, const Repeat& repeat, std::vector<RankRun>& runs) const;

  RankHosts* hosts_;
  MoeOptions options_;
  CombineBy combine_;
  int64_t max_tokens_;
  std::shared_ptr<ColdBatches> batches_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // by index
};

}  // namespace nvfp4_moe::cli
