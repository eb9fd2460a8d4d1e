// RankCombine: a layer's experts divided over the ranks of an exchange. Base of all
// implementations. docs/explanation/expert-parallel.md explains both ways to combine.
//
//                  kAllToAll          kAllReduce
//   host           HostAllToAll       HostAllReduce      any exchange
//   NCCL           DeviceAllToAll     DeviceAllReduce    connect.h: use_nccl
//   peer memory    PeerAllToAll       PeerAllReduce      connect.h: use_peers
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "exchange/exchange.h"
#include "moe/combine.h"
#include "moe/layer.h"
#include "parallel/placement.h"
#include "parallel/slots.h"

namespace nvfp4_moe::internal {

enum class CombineBy : uint8_t { kAllToAll, kAllReduce };
const char* to_string(CombineBy);
template <>
struct EnumNames<CombineBy> {
  static constexpr const char* kWhat = "combine";
  static constexpr std::array kAll = {"all_to_all", "all_reduce"};
};

struct ExpertParallelOptions {
  CombineBy combine = CombineBy::kAllToAll;
  std::optional<Placement> placement;  // empty: contiguous
  // kAllToAll: the most tokens that a rank may send to another rank in a run. All messages of a
  // source rank then have the same length, and workspaces are sized for it. A run with more tokens
  // fails on every rank; on a device out is NaN, and status fails. 0: no limit; a run over NCCL
  // then waits for the counts. Over peer memory a capacity has no effect.
  int64_t capacity = 0;
  Timeout load_timeout{30 * 60 * 1000};  // for the slowest rank to pack its experts
};

// Facts found while a layer opens. The same on all ranks.
struct Ranks {
  MoeConfig config;  // of the whole layer
  Placement placement;
  ExpertParallelOptions options;
  std::shared_ptr<Exchange> exchange;
  int64_t max_tokens;   // of one rank's batch
  int64_t capacity;     // the most tokens from one rank to another
  bool fixed;           // all messages have the length that the capacity allows
  std::string weights;  // LayerSource::weights
};

class RankCombine : public Combine {
 public:
  const Placement& placement() const { return ranks_.placement; }
  const ExpertParallelOptions& options() const { return ranks_.options; }
  Exchange& exchange() const { return *ranks_.exchange; }

  // Collective, once all ranks have their combine: reserves memory that the ranks write to.
  virtual Status reserve() { return {}; }

  void fail(const Status& why) override;
  Status link_state() override { return link() == nullptr ? Status() : link()->state(); }
  Status work_state() override { return link() == nullptr ? Status() : link()->state_of_work(); }
  Status report(void*) override { return {}; }
  void describe(Json& json) const override;

  // The sum of all ranks' local_expert_load, from which a placement is proposed
  // (parallel/balance.h). kAllReduce: that of one rank, since all count the same tokens.
  Result<std::vector<uint64_t>> expert_load(const Status& mine = {}) override;
  // (num_experts) assignments of this rank's batches to each expert. On a device both wait for it.
  Result<std::vector<uint64_t>> local_expert_load() { return slots().expert_load(); }
  Status reset_expert_load() override { return slots().reset_expert_load(); }

  // Collective: loads other experts into this rank's slots, in place, so that all ranks follow
  // `placement`, which must have the same number of slots on each rank as before. If a rank fails,
  // the exchange ends, since ranks would no longer agree on the placement. On a device it waits for
  // all work; no rank may replay a graph of the layer until it has returned on all.
  Status rearrange(const Placement& placement, const LayerSource& source);
  // The same for a checkpoint's layer. expert_of_slot: as for Placement::of_map.
  Status rearrange_checkpoint(std::vector<int64_t> expert_of_slot, const Checkpoint& checkpoint,
                              int64_t layer);

 protected:
  RankCombine(MoeLayer& layer, const Ranks& ranks)
      : Combine(ranks.config, ranks.max_tokens), ranks_(ranks), layer_(layer) {}
  virtual Slots& slots() = 0;
  int rank() const { return exchange().rank(); }
  int world() const { return exchange().world(); }
  int64_t top_k() const { return ranks_.config->top_k; }

  Ranks ranks_;  // destroyed after everything that uses the exchange
  MoeLayer& layer_;

 private:
  DeviceLink* link() const;  // null on hosts
};

// The RankCombine of a layer that is known to be over ranks. Combine has no other subclass.
inline RankCombine& ranks_of(const MoeLayer& layer) {
  return static_cast<RankCombine&>(*layer.combine());
}
// The same for any layer; kUnsupported, naming `what`, if it has only one rank.
Result<RankCombine*> ranks_of(const MoeLayer& layer, const char* what);

// Makes the combine of an open rank, for all three transports or for those of its name.
Result<std::unique_ptr<RankCombine>> make_all_reduce(MoeLayer& layer, const Ranks& ranks);
Result<std::unique_ptr<RankCombine>> make_host_all_to_all(MoeLayer& layer, const Ranks& ranks);
Result<std::unique_ptr<RankCombine>> make_device_all_to_all(MoeLayer& layer, const Ranks& ranks);
// Bytes that a rank sends to all others for a sum of `count` values over peer memory, including
// flags, if runs have at most max_values.
int64_t bytes_of_peer_sum(int64_t count, int64_t max_values, int64_t world, DType out_dtype);

// Runs gemm1_swiglu, requantize and gemm2 for a part's rows.
Status multiply(const LayerSteps& steps, const StepContext& step, const PartBuffers& part);

}  // namespace nvfp4_moe::internal
