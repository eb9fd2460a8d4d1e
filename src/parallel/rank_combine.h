// RankCombine: a layer's experts divided over the ranks of an exchange. What all ways to combine
// share.
//
// kAllToAll: each rank has tokens of its own. The source rank quantizes them and sends codes and
// scales to the ranks of their experts; the rows come back and are combined on the source rank in
// the order of k. The bits are those of one rank with all experts, whatever the placement
// (docs/how-to/expert-parallel.md says for which configs). kAllReduce: all ranks have the same
// tokens. Each computes what its experts add, in fp32, and the sums are added in the order of the
// ranks: one fp32 sum more than a layer of one rank has.
//
//                  kAllToAll          kAllReduce
//   host           HostAllToAll       HostAllReduce      any exchange
//   NCCL           DeviceAllToAll     DeviceAllReduce    connect.h: use_nccl
//   peer memory    PeerAllToAll       PeerAllReduce      connect.h: use_peers
// On GPUs a run is enqueued in its stream and may be captured, except kAllToAll over NCCL without a
// capacity.
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
  std::optional<Placement> placement;  // none: contiguous
  // kAllToAll: the most tokens that a rank may have for one other in a run. All messages of a
  // source rank then have the same length, which depends on the capacity and the rank's tokens, and
  // workspaces are made for it; a run with more tokens fails on every rank and says how many they
  // were. On a device nobody waits for that: out is NaN on every rank, and status fails. 0: any
  // number of tokens, for which a run over NCCL waits. Over peer memory everything fits, and a
  // capacity changes nothing.
  int64_t capacity = 0;
  Timeout load_timeout{30 * 60 * 1000};  // for the slowest rank to have its experts packed
};

// Facts found while opening a layer. The same on all ranks.
struct Ranks {
  MoeConfig config;  // of the whole layer
  Placement placement;
  ExpertParallelOptions options;
  std::shared_ptr<Exchange> exchange;
  int64_t max_tokens;   // of a rank's batch
  int64_t capacity;     // tokens from one rank to another, at most
  bool fixed;           // messages have the capacity's length
  std::string weights;  // LayerSource::weights
};

class RankCombine : public Combine {
 public:
  const Placement& placement() const {
    return ranks_.placement;
  }  // slot s of the layer is expert placement().expert_of(s)
  const ExpertParallelOptions& options() const { return ranks_.options; }
  Exchange& exchange() const { return *ranks_.exchange; }

  void fail(const Status& why) override;
  Status link_state() override;
  Status work_state() override;
  Status report(void*) override { return {}; }
  void describe(Json& json) const override;

  // The sum of all ranks' local_expert_load: what a placement is proposed from
  // (parallel/balance.h). kAllReduce: one rank's, since all count the same tokens.
  Result<std::vector<uint64_t>> expert_load(const Status& mine = {}) override;
  // (num_experts) assignments of this rank's batches to each expert. On a device both wait for it.
  Result<std::vector<uint64_t>> local_expert_load() { return slots().expert_load(); }
  Status reset_expert_load() override { return slots().reset_expert_load(); }

  // Collective: gives this rank's slots other experts, in place, so that all ranks have the
  // placement; it has the same number of slots on each rank as before. The weights are what a fresh
  // open with that placement packs. A rank that fails ends the exchange, since ranks would no
  // longer agree who has what. On a device it waits for all work, and no graph of the layer may be
  // replayed on any rank until it has returned on all.
  Status rearrange(const Placement& placement, const LayerSource& source);
  // The same for a checkpoint's layer, from which each rank reads the experts that are new to its
  // slots. expert_of_slot: as for Placement::of_map.
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

// The ranks of a layer that is one over ranks: src/parallel has no other subclass of Combine.
inline RankCombine& ranks_of(const MoeLayer& layer) {
  return static_cast<RankCombine&>(*layer.combine());
}
// The same of any layer; kUnsupported, naming `what`, for one of one rank.
Result<RankCombine*> ranks_of(const MoeLayer& layer, const char* what);

// gemm1_swiglu, requantize and gemm2 of a part's rows.
Status multiply(const LayerSteps& steps, const StepContext& step, const PartBuffers& part);

}  // namespace nvfp4_moe::internal
