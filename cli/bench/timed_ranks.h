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

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/rank_batches.h"
#include "cli/bench/rank_hosts.h"
#include "cli/bench/subject.h"
#include "cli/bench/timed_layer.h"
#include "parallel/open.h"
#include "parallel/placement.h"

namespace nvfp4_moe::internal::cli {

// The computation of the ranks in a timed run.
enum class RanksWork : uint8_t {
  kLayer,       // the layer over all ranks
  kOwnExperts,  // each rank its own experts on all tokens, as a separate layer: ids of others'
                // slots are -1, out is bf16
};

struct RanksRound {
  std::vector<std::vector<RankRun>> ranks;  // (world, runs)
  std::vector<double> slowest_us;           // (runs) of the slowest rank of each batch, ascending
  double rank_median_us(size_t rank) const;
  // Mean over a rank's runs.
  double sent_bytes(size_t rank) const;
  double sent_bytes(size_t rank, WirePart part) const;
  // The part's share of the total time of all ranks.
  double share(WirePart part) const;
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
  // Packs the copies on every rank. kUnsupported on all ranks if they cannot run such a layer; the
  // exchange remains usable.
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
  // A rank's batches on the device of its layer.
  struct Prepared {
    std::vector<PlacedBatch> placed;  // on a device
    std::vector<Batch> batches;
    Status add(const MoeLayer& layer, const Batch& batch);
  };
  struct Rank {
    std::vector<std::unique_ptr<MoeLayer>> copies;
    Buffer workspace;
    std::vector<uint16_t> out;  // (max_tokens, hidden_size) of a run
    Prepared parts;             // this rank's tokens of each batch
    std::vector<std::vector<int32_t>>
        own_slots;                // (batches)(tokens, top_k) -1 if the slot is another rank's
    Prepared own;                 // all tokens of each batch, with own_slots
    std::vector<size_t> busiest;  // the batches in which this rank is the busiest
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
