// MoeLayer: {backend, packed weights, plan, how ranks combine} with run. Complete or never
// returned.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/device_replacement.h"
#include "checkpoint/checkpoint.h"
#include "core/progress.h"
#include "moe/combine.h"
#include "moe/env.h"
#include "moe/weight_uses.h"
#include "moe/workspaces.h"

namespace nvfp4_moe::internal {

// Where a layer's experts come from: a checkpoint, or arrays of the caller. Called once per local
// expert, in order; what it returns is dropped before the next call.
struct LayerSource {
  std::function<Result<LoadedExpert>(int64_t global_expert)> expert;
  std::function<Result<LoadedExpert>()> shared_expert;  // may be empty
  LayerScales scales;
  std::optional<DeclaredActivations> declared;  // of a checkpoint's layer, for describe_json
  std::string name;     // "layer 12", put before "expert 7" in messages and progress; may be empty
  std::string weights;  // which weights these are, as ranks compare it: weights_id. Empty: arrays,
                        // which nobody compares
};

struct LayerOptions {
  // or "cuda:N", "cuda" being "cuda:0": where weights, workspaces and batches lie
  std::string device = "cpu";
  // or a name of the registry; NVFP4_MOE_BACKEND is used if this is "auto"
  std::string backend = "auto";
  ExpertRange range;  // count 0: all experts
  Limits limits;
  // null: the layer owns a pool (NVFP4_MOE_THREADS, else one thread per core)
  Executor* executor = nullptr;
};

// `explain`'s report on one backend: why it was or was not chosen.
struct BackendReport {
  std::string backend;
  bool chosen = false;
  std::string reason;
  bool supported = false;  // would take the layer if it were forced
};
// Pure: which backend takes this config on this device, and why the others do not.
std::vector<BackendReport> explain(const MoeConfig& config, const DeviceFacts& device,
                                   const std::string& forced = "auto");

// A run of that many tokens under a plan of this backend, one entry for each step. Needs no device.
std::vector<StepPlan> describe_run(const Backend& backend, const MoeConfig& config,
                                   const ExpertRange& range, const Plan& plan, int64_t tokens);

// Plans a layer without its weights. Pure, except for the environment's backend.
struct LayerNeeds {
  Plan plan;
  size_t packed_bytes = 0;
};
Result<LayerNeeds> plan_layer(const MoeConfig& config, const LayerScales& scales,
                              const LayerOptions& options);

struct LayerDebug;

// Under fp8, over all matrices of a layer: their shifts, and how many of the weights E4M3 does not
// hold exactly.
struct Fp8LayerWeights {
  int32_t least_shift = 0, most_shift = 0;
  uint64_t weights = 0, inexact = 0;
};

class MoeLayer {
 public:
  // Packs streaming: peak memory = packed + one expert. progress may be empty; cancelling gives
  // kCancelled.
  static Result<std::unique_ptr<MoeLayer>> open(const MoeConfig& config, const LayerSource& source,
                                                const LayerOptions& options,
                                                const ProgressFn& progress = {});
  // The same on this very backend: neither options.backend nor the registry is asked.
  static Result<std::unique_ptr<MoeLayer>> open_on(const Backend& backend, const MoeConfig& config,
                                                   const LayerSource& source,
                                                   const LayerOptions& options,
                                                   const ProgressFn& progress = {});
  ~MoeLayer();

  const Backend& backend() const { return *backend_; }
  // Of the whole layer, which batches are made for. Over ranks weights().config differs: its
  // experts are all ranks' slots.
  const MoeConfig& config() const { return combine_ ? combine_->config() : weights_->config; }
  // The most tokens of a batch. Over ranks plan().limits differ: they are for what this rank
  // computes.
  int64_t max_tokens() const { return combine_ ? combine_->max_tokens() : plan_.limits.max_tokens; }
  // How the ranks combine whose experts this layer's are a part of; null: there is one rank.
  Combine* combine() const { return combine_.get(); }
  // Makes the layer one rank's part (parallel/open.h).
  void set_combine(std::unique_ptr<Combine> combine) { combine_ = std::move(combine); }
  // Bytes and tensor scales change under replace_expert: to read them takes a use().
  const PackedWeights& weights() const { return *weights_; }
  const Plan& plan() const { return plan_; }
  Executor& executor() const { return *executor_; }
  // The least workspace of a run of that many tokens; more never need less. Without a number:
  // max_tokens().
  size_t workspace_bytes(int64_t tokens) const {
    return combine_ ? combine_->workspace_bytes(tokens) : local_workspace_bytes(tokens);
  }
  size_t workspace_bytes() const {
    return combine_ ? combine_->workspace_bytes(max_tokens()) : plan_.workspace.total_bytes;
  }
  size_t local_workspace_bytes(int64_t tokens) const;  // of run_local
  // run_local of that many bf16 tokens, one entry for each step.
  std::vector<StepPlan> describe_run(int64_t tokens) const;
  // The same and the workspace that it needs; kInvalidArgument for more tokens than the layer
  // takes.
  Result<std::string> describe_run_json(int64_t tokens) const;
  // Nothing under other formats, and while weights are being replaced.
  std::optional<Fp8LayerWeights> fp8_weights() const;
  std::string describe_json() const;  // backend, kernel per step, activations and why, sizes, notes

  // Checks the batch (shape, dtype, pointers, token count), then runs. const: several streams may
  // run one layer at once, each with a workspace of its own. status: on a device, device memory
  // that gets what the run reports, instead of the workspace's; else null. Over ranks it is
  // collective: with all_to_all each rank has any number of tokens, 0 too; with all_reduce all have
  // the same tokens, and the shared expert is rank 0's. If one rank fails, no rank's out is worth
  // anything. What is enqueued on a device ends by itself or by the exchange's failure, which the
  // next call reports.
  Status run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream = nullptr,
             RunStatus* status = nullptr) const;
  // The same of this rank's experts, for which topk_ids are slots, and without the other ranks.
  Status run_local(const Batch& batch, void* workspace, size_t workspace_bytes,
                   void* stream = nullptr, RunStatus* status = nullptr) const;
  // In place of a run that this rank cannot begin: over ranks, ends it on all of them. Returns why.
  Status decline(const Status& why) const;
  // The checks of run_local, without reading an array. needs_out: whether batch.out is checked.
  Status check_batch(const Batch& batch, const void* workspace = nullptr,
                     size_t workspace_bytes = 0, bool needs_out = true) const;
  // Runs run_local on zeros at the token counts that touch every kernel of its plan, every page of
  // its weights and the workspace, so that the first real call costs no more than the next one.
  // progress may be empty; cancelling gives kCancelled.
  Status warmup(void* workspace, size_t workspace_bytes, void* stream = nullptr,
                const ProgressFn& progress = {}) const;
  // Counts of the last run in this workspace. On a device it waits for the stream first.
  // Over ranks: with all_to_all hidden, weights and out are counted on the source rank, and
  // intermediate on the expert rank, so that the sums over the ranks are what one rank would
  // report; with all_reduce each rank counts what it computes, and bad_expert_ids and
  // nonfinite_outputs are the same on all. Fails as failure() does.
  Result<RunStatus> status(const void* workspace, size_t workspace_bytes,
                           void* stream = nullptr) const;
  // Over ranks on a device, what has happened to runs since they were enqueued, those of graphs
  // too: the exchange's failure while work was under way; with a capacity, once, that runs since
  // the last call had more tokens than that. Waits for the stream.
  Status failure(void* stream = nullptr) const;

  // Replaces one expert's weights in place: kBusy while a run is in flight. The source is checked
  // before anything is written. A host's layer allocates nothing; a device's takes staging memory,
  // of 8 MiB as a rule (128 rows of a very long K are more), and gives it back: if that fails,
  // kOutOfMemory, the expert is as it was. local_expert may be kSharedExpert. On a device it waits
  // for all work of the device. kInvalidArgument if a graph has captured the layer: nothing would
  // keep a replay from beginning meanwhile.
  Status replace_expert(int64_t local_expert, const ExpertSource& source);
  // The same on a device in the order of `stream`, graphs or not: work that was enqueued there
  // before it has the old expert, work after it the new one, each of them whole. Other streams that
  // run the layer are the caller's to order by events. It waits for the source, never for `stream`
  // or the device, and disturbs no capture of another thread; takes the packed expert's size more
  // in staging memory. kBusy if for 10 seconds no pause came between runs.
  Status replace_expert_on_stream(int64_t local_expert, const ExpertSource& source, void* stream);
  // replace_expert also of a layer that graphs have captured, for a caller who lets none of them
  // run meanwhile.
  Status replace_expert_at_rest(int64_t local_expert, const ExpertSource& source);
  // The expert with its tensor scales, bit for bit as it was given; kBusy while weights are being
  // replaced.
  Status unpack_expert(int64_t local_expert, ExpertBuffers& out) const;
  // While it lives no weight changes: replace_expert gives kBusy. False if one is being replaced
  // right now.
  WeightUses::Use use() const { return WeightUses::Use(uses_); }
  // Within a use: notes whether the stream is captured, and so whether graphs hold this layer from
  // now on.
  Status note_capture(void* stream) const;

  // kUnsupported, saying that it was about to do `what`, for a layer on a GPU in a process forked
  // from the one that opened it: CUDA works in no forked child. A host's layer runs there, on the
  // calling thread. Run, status, replace_expert, unpack_expert and warmup check it themselves.
  Status check_process(const char* what) const;
  // kUnsupported, naming `what`, for a layer over ranks.
  Status check_one_rank(const char* what) const;

 private:
  MoeLayer() = default;
  friend class PackedCache;
  // Everything but the experts: plan made, memory of the packed weights not there yet.
  static Result<std::unique_ptr<MoeLayer>> prepare(const Backend& backend, const MoeConfig& config,
                                                   const LayerScales& scales,
                                                   const LayerOptions& options, const Env& env);
  Status pack(const LayerSource& source, const ProgressFn& progress);
  // The reference layer and the dump directory, if the environment asks for them. Needs the
  // experts.
  Status attach_debug(const Env& env, const LayerOptions& options);
  Status run_over_ranks(const Batch& batch, void* workspace, size_t workspace_bytes,
                        void* stream) const;
  // The counts of run_local in the workspace.
  Result<RunStatus> read_status(const void* workspace, size_t workspace_bytes, void* stream) const;
  Status check_local_expert(int64_t local_expert) const;
  // check_matrix for all three, and their biases; the block scales of arrays on a device are left
  // to Backend::pack_expert.
  Status check_source(const ExpertSource& source, int64_t local_expert) const;
  // All that is checked of a replacement before weights are claimed.
  Status check_replacement(int64_t local_expert, const ExpertSource& source) const;
  Status replace_in_place(int64_t local_expert, const ExpertSource& source, bool captured_too);

  std::unique_ptr<Combine>
      combine_;  // null: one rank. Holds the exchange, which goes after the weights have been freed
  const Backend* backend_ = nullptr;
  std::unique_ptr<PackedWeights> weights_;
  Plan plan_;
  std::optional<DeclaredActivations> declared_;
  LastSize last_size_;
  std::unique_ptr<Executor> owned_executor_;
  Executor* executor_ = nullptr;
  std::unique_ptr<LayerDebug> debug_;  // null unless NVFP4_MOE_CHECK or NVFP4_MOE_DUMP is set
  mutable WeightUses uses_;            // by runs and unpacks
  ForkMutex replacing_;  // held while weights are written: a forked child gets whole experts
  mutable std::atomic<bool> captured_{
      false};  // a run was captured; written within a use, read within a replacement
  ReplacementEvent
      last_replacement_;  // on a stream; dropped before the weights. Written within a replacement
  const uint32_t process_ = fork_count();
};

// {weights, inexact, least_shift, most_shift}, or null.
Json fp8_weights_json(const std::optional<Fp8LayerWeights>& fp8);

// The packed experts of an open layer, unpacked one at a time. The layer must outlive the source.
LayerSource unpacked_source(const MoeLayer& layer);
// A LayerSource over a checkpoint's layer, or over a slice of its intermediate dimension (the
// shared expert is cut in the same proportion). The checkpoint must outlive the source.
Result<LayerSource> layer_source(const Checkpoint& checkpoint, int64_t layer,
                                 const IntermediateSlice& slice = {});
DeviceFacts host_facts();
// N of "cuda:N", 0 of "cuda"; empty for other names.
std::optional<int> gpu_index(const std::string& device);
// The device of "cpu" or "cuda:N". kInvalidArgument for other names, kUnsupported if this build or
// machine has no such device.
Result<DeviceFacts> device_facts(const std::string& device);

// kInvalidArgument or kBadInput, naming the matrix, unless it is (rows, cols), lies in host memory,
// and holds only legal scales: block scales with sign 0 and not NaN, a tensor scale finite and not
// negative.
Status check_matrix(const char* name, const Nvfp4View& view, int64_t rows, int64_t cols);

}  // namespace nvfp4_moe::internal
