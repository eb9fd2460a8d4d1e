// ExpertParallelLayer: one layer over the ranks of an exchange, each with some of the experts.
//
// kAllToAll: each rank brings tokens of its own. They are quantized where they are and go, as codes and scales, to the
// ranks of their experts; the experts' rows come back and are combined at home in the order of k. The bits are those of
// one rank with all experts, whatever the placement (docs/expert-parallel.md says for which configs).
// kAllReduce: all ranks bring the same tokens. Each computes what its experts add, in fp32, and the sums are added in
// the order of the ranks: one fp32 sum more than a layer of one rank has.
// On GPUs both go over an exchange with NCCL (use_nccl) or over memory that all ranks reach (use_peers): a run is then
// enqueued in its stream, and may be captured, but for kAllToAll over NCCL without a capacity.
// All calls but status and load are collective.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "moe/layer.h"
#include "parallel/placement.h"

namespace nvfp4_moe {

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
  // kAllToAll: the most tokens that a rank may have for one other in a run. All messages of a home are then as long, by it
  // and by the home's tokens, and workspaces are made for it; a run with more fails on every rank and says how many they were. On a device nobody waits
  // for that: out is NaN on every rank, and status fails. 0: as many as come, for which a run over NCCL waits. Over memory
  // that all reach whatever comes fits, and a capacity changes nothing.
  int64_t capacity = 0;
  Timeout load_timeout{30 * 60 * 1000};  // for the slowest rank to have its experts packed
};

class Announcement;
class DeviceAllToAll;
class DeviceReduce;
class DeviceSlots;
class Dispatch;

// Gives the exchange NCCL between devices, this rank's being `device` ("cuda:1"): what layers over it on GPUs need.
// Collective. library and communicator: exchange/nccl.h.
Status use_nccl(Exchange& exchange, const std::string& device, const std::string& library = "",
                void* communicator = nullptr);

// Gives the exchange the ranks' memory between devices, this rank's being `device`, instead of NCCL: for GPUs of one host
// that reach each other's memory. Collective; kUnsupported on all ranks where one cannot (exchange/peers.h). Runs of layers over
// it follow each other on each rank's device, in one stream or by events.
Status use_peers(Exchange& exchange, const std::string& device);

class ExpertParallelLayer {
 public:
  // config and source are those of the whole layer; options.range is left alone, and options.limits.max_tokens is for
  // the tokens of this rank's batch, alike on all. A rank that cannot open ends all with its message; ranks that do not
  // agree are refused by name, on every rank.
  static Result<std::unique_ptr<ExpertParallelLayer>> open(const MoeConfig& config, const LayerSource& source,
                                                           const LayerOptions& options,
                                                           const ExpertParallelOptions& parallel,
                                                           std::shared_ptr<Exchange> exchange,
                                                           const ProgressFn& progress = {});
  // The same on this very backend.
  static Result<std::unique_ptr<ExpertParallelLayer>> open_on(const Backend& backend, const MoeConfig& config,
                                                              const LayerSource& source, const LayerOptions& options,
                                                              const ExpertParallelOptions& parallel,
                                                              std::shared_ptr<Exchange> exchange,
                                                              const ProgressFn& progress = {});
  // Of a checkpoint's layer, of which each rank reads the experts of its slots alone. config: none takes the checkpoint's.
  static Result<std::unique_ptr<ExpertParallelLayer>> open_checkpoint(
      const Checkpoint& checkpoint, int64_t layer, const std::optional<MoeOptions>& config, const LayerOptions& options,
      const ExpertParallelOptions& parallel, std::shared_ptr<Exchange> exchange, const ProgressFn& progress = {});
  ~ExpertParallelLayer();

  const MoeConfig& config() const { return config_; }  // of the whole layer
  const MoeLayer& layer() const { return *layer_; }    // this rank's experts: slot s is expert placement().expert_of(s)
  const Placement& placement() const { return placement_; }
  const ExpertParallelOptions& options() const { return options_; }
  Exchange& exchange() const { return *exchange_; }
  int64_t max_tokens() const { return max_tokens_; }

  // batch: as for MoeLayer::run. kAllToAll: of any number of tokens, 0 too, another one on each rank. kAllReduce: the
  // same on all ranks; the shared expert is rank 0's, and the others do not read shared_weights.
  // Where one rank fails, no rank's out is worth anything.
  // stream: on a device. What is enqueued ends by itself, or by the exchange's failure, which the next call says.
  Status run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream = nullptr) const;
  // Takes this rank's turn in a run that it cannot begin, in place of run: ends it on all ranks with `why`.
  Status decline(const Status& why) const;
  // What a run of so many tokens needs. kAllToAll: the greater part is for what other ranks may send.
  size_t workspace_bytes(int64_t tokens) const;
  size_t workspace_bytes() const { return workspace_bytes(max_tokens_); }
  // What this rank's last run in this workspace reports. kAllToAll: hidden, weights and out are counted where the token
  // is, intermediate where the expert is: the sums over the ranks are what one rank alone would report. kAllReduce:
  // each rank counts what it computes; bad_expert_ids and nonfinite_outputs are the same on all.
  // On a device it fails as failure() does.
  Result<RunStatus> status(const void* workspace, size_t workspace_bytes, void* stream = nullptr) const;
  // On a device, what runs have met since they were enqueued, those of graphs too: the exchange's failure, while work was
  // under way; with a capacity, once, that runs since it was last asked for had more tokens than that. Waits for the
  // stream.
  Status failure(void* stream = nullptr) const;

  // MoeLayer's description of this rank's experts, with the whole layer's sizes and "expert_parallel": how it is divided.
  std::string describe_json() const;
  // MoeLayer::replace_expert, and on a stream, of a slot of this rank. Neither is collective: if an expert has several
  // slots, the caller replaces all of them, between the same two runs on every rank.
  Status replace_expert(int64_t local_expert, const ExpertSource& source);
  Status replace_expert_on_stream(int64_t local_expert, const ExpertSource& source, void* stream);

  // (num_experts) assignments of this rank's batches to each expert since open or the last reset.
  // On a device both wait for it.
  Result<std::vector<uint64_t>> load() const;
  Status reset_load() const;
  // The sum of all ranks' load: what a placement is proposed from (parallel/balance.h). kAllReduce: one rank's, since
  // all count the same tokens; kAllToAll: collective. mine: why this rank cannot take part.
  Result<std::vector<uint64_t>> gather_load(const Status& mine = {}) const;
  // Gives this rank's slots other experts, in place, so that all ranks have the placement; it has as many slots on each
  // rank as there are. The weights are what a fresh open with that placement packs. A rank that fails ends the exchange,
  // since ranks would no longer agree who has what. On a device it waits for all work, and no graph of the layer may be
  // replayed on any rank until it has returned on all.
  Status rearrange(const Placement& placement, const LayerSource& source);
  // The same of a checkpoint's layer, of which each rank reads the experts that are new to its slots. expert_of_slot: as
  // for Placement::of_map.
  Status rearrange_checkpoint(std::vector<int64_t> expert_of_slot, const Checkpoint& checkpoint, int64_t layer);

 private:
  ExpertParallelLayer(const MoeConfig& config, Placement placement, const ExpertParallelOptions& options,
                      std::shared_ptr<Exchange> exchange, int64_t max_tokens);
  Status check_batch(const Batch& batch, const void* workspace, size_t workspace_bytes) const;
  void translate(const Batch& batch, int32_t* slots) const;
  Status run_all_reduce(const Batch& batch, void* workspace) const;
  bool has_shared() const;  // this rank computes the shared expert

  const MoeConfig config_;
  Placement placement_;
  const ExpertParallelOptions options_;
  const std::shared_ptr<Exchange> exchange_;
  const int64_t max_tokens_;
  std::string weights_;  // LayerSource::weights
  std::unique_ptr<MoeLayer> layer_;
  // One of the four: kAllToAll and kAllReduce, on hosts and on devices.
  std::unique_ptr<Dispatch> dispatch_;
  std::unique_ptr<DeviceSlots> device_slots_;  // on a device
  std::unique_ptr<DeviceAllToAll> device_dispatch_;
  std::unique_ptr<DeviceReduce> device_reduce_;
  std::unique_ptr<Announcement> announcement_;     // kAllReduce
  std::unique_ptr<std::atomic<uint64_t>[]> load_;  // (num_experts)
  mutable std::atomic<bool> in_use_{false};
};

}  // namespace nvfp4_moe
