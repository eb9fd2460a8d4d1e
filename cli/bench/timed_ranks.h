// TimedRanks: a layer over ranks for `bench --ep`. All ranks begin a run together, and the run
// takes as long as its slowest rank.
//
// On a host each run is timed separately, and so is the part that a rank spends in the exchange,
// including waiting for others. On GPUs a graph of all batches is replayed, which has no such
// parts. The cost of the exchange is relative to the ranks' own experts: all tokens of a batch, the
// same packed weights, no other rank.
//
// Ranks that exchange wait in each batch for the slowest rank. Own experts do not wait. To get the
// slowest rank's time for them, each rank also replays a graph of only the batches in which it is
// the busiest. A rank's own time is that of the graph of all batches.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/rank_batches.h"
#include "cli/bench/subject.h"
#include "cli/bench/timed_layer.h"
#include "exchange/local_ranks.h"
#include "parallel/open.h"

namespace nvfp4_moe::internal::cli {

// The parts of a rank's exchange in a run. all_reduce has only a combine.
enum class WirePart : uint8_t { kAgree, kDispatch, kCombine };
inline constexpr size_t kWireParts = 3;
inline constexpr const char* kWirePartNames[kWireParts] = {"agree", "dispatch", "combine"};
using OfParts = std::array<double, kWireParts>;

// One rank's run. Sent between ranks as raw bytes.
struct RankRun {
  double us = 0;
  // own experts on devices: only the batches in which this rank is the busiest, per batch
  double as_busiest_us = 0;
  OfParts part_us{};     // zeros on devices
  OfParts sent_bytes{};  // to other ranks
};

// Attributes transfers of one run to RankRun's parts by their operation.
class WireRecorder {
 public:
  void begin_run() { dispatched_ = false; }
  void clear() { run_ = RankRun(); }
  void add(const Transfer& transfer);
  void add(WirePart part, int64_t sent_bytes, double us = 0);
  const RankRun& run() const { return run_; }

 private:
  RankRun run_;
  bool dispatched_ = false;  // the run has had an all_to_all_v: later transfers are the combine
};

// The ranks of this process, for all layers that are timed over them. Records what they send.
class RankHosts {
 public:
  // device(index): the device of rank first + index. threads: per rank.
  RankHosts(const LocalRanks& ranks, const std::function<std::string(int index)>& device,
            int threads);
  ~RankHosts();
  RankHosts(const RankHosts&) = delete;
  RankHosts& operator=(const RankHosts&) = delete;
  const LocalRanks& ranks() const { return ranks_; }
  int threads() const { return threads_; }
  const std::string& device(int index) const { return hosts_[static_cast<size_t>(index)].device; }

 private:
  friend class TimedRanks;
  struct Host {
    std::string device;
    std::unique_ptr<Executor> executor;
    WireRecorder recorder;
  };
  const LocalRanks& ranks_;
  const int threads_;
  std::vector<Host> hosts_;  // by index; the exchanges hold pointers to them
};

// The computation of the ranks in a timed run.
enum class RanksWork : uint8_t {
  kLayer,       // the layer over all ranks
  kOwnExperts,  // each rank its own experts on all tokens, as a separate layer: ids of others'
                // slots are -1, out is bf16
};

struct RanksRound {
  std::vector<double> us;           // (runs) of the slowest rank of each batch, ascending
  std::vector<double> rank_us;      // (world) median of the rank's runs
  std::vector<OfParts> sent_bytes;  // (world) mean of the rank's runs
  OfParts shares{};                 // of the total time of all ranks
};

// The division of a layer over ranks.
struct RanksLayer {
  CombineBy combine = CombineBy::kAllToAll;
  int64_t max_tokens = 0;              // of all ranks together
  int64_t copies = 1;                  // copies of the layer on every rank
  std::optional<Placement> placement;  // nullopt: contiguous
};

class TimedRanks {
 public:
  // Packs the copies on every rank.
  static Result<TimedRanks> open(RankHosts& hosts, const Subject& subject,
                                 const std::string& backend, const RanksLayer& divided,
                                 const ProgressFn& progress);
  CombineBy combine() const { return divided_.combine; }
  int64_t max_tokens() const { return divided_.max_tokens; }
  const MoeLayer& layer() const { return *ranks_.front()->copies.front(); }
  const Placement& placement() const { return ranks_of(layer()).placement(); }
  // Gives all copies another placement with the same number of slots, in place.
  Status rearrange(const Placement& placement, const LayerSource& source);

  // Sets the batches to time next, of all ranks together and the same in every process.
  // own_experts: time() will also be called for own experts.
  Status prepare(const std::shared_ptr<ColdBatches>& batches, bool own_experts);
  Result<RanksRound> time(const Repeat& repeat, RanksWork work);
  // The ranks' output for a batch, (tokens, hidden_size) bf16, on rank 0; empty elsewhere.
  Result<std::vector<uint16_t>> outputs(RandomTokens& batch);

 private:
  struct Rank {
    std::vector<std::unique_ptr<MoeLayer>> copies;
    Buffer workspace;
    std::vector<uint16_t> out;       // (max_tokens, hidden_size) of a run
    std::vector<PlacedBatch> parts;  // this rank's tokens of each batch
    // (batches)(tokens, top_k) -1 if the slot is another rank's
    std::vector<std::vector<int32_t>> own_slots;
    std::vector<PlacedBatch> own;  // all tokens of each batch, with own_slots
    std::vector<size_t> busiest;   // the batches in which this rank is the busiest
  };
  TimedRanks(RankHosts& hosts, const Subject& subject, const RanksLayer& divided)
      : hosts_(&hosts), options_(subject.options), divided_(divided) {}
  Exchange& exchange(int index) const { return *hosts_->ranks().exchange(index); }
  Status open_rank(int index, const Subject& subject, const std::string& backend,
                   const ProgressFn& progress);
  // This rank's tokens of a batch; its out is rank.out.
  Batch part_of(RandomTokens& tokens, int index) const;
  Status prepare_own(int index);
  Status run(const Rank& rank, RanksWork work, size_t batch, void* stream) const;
  Status time_runs(int index, const Repeat& repeat, RanksWork work,
                   std::vector<RankRun>& runs) const;
  Status time_replays(int index, const Repeat& repeat, RanksWork work,
                      std::vector<RankRun>& runs) const;

  RankHosts* hosts_;
  MoeOptions options_;
  RanksLayer divided_;
  std::shared_ptr<ColdBatches> batches_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // by index
};

}  // namespace nvfp4_moe::internal::cli
