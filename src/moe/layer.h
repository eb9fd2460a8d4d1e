// MoeLayer: a backend, packed weights, a plan and, over ranks, a Combine; run executes them. open
// returns a complete layer or an error.
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
#include "moe/backend_selection.h"
#include "moe/combine.h"
#include "moe/env.h"
#include "moe/weight_uses.h"
#include "moe/workspaces.h"

namespace nvfp4_moe::internal {

// Where a layer's experts come from: a checkpoint, or the caller's arrays. `expert` is called once
// per local expert, in order; each result is dropped before the next call.
struct LayerSource {
  std::function<Result<LoadedExpert>(int64_t global_expert)> expert;
  std::function<Result<LoadedExpert>()> shared_expert;  // may be empty
  LayerScales scales;
  std::optional<DeclaredActivations> declared;  // from the checkpoint, for describe_json
  std::string name;  // "layer 12", put before "expert 7" in messages and progress; may be empty
  // identifies the weights, for comparison across ranks: weights_id. Empty: arrays, which are not
  // compared
  std::string weights;
};

struct LayerOptions {
  // or "cuda:N" ("cuda" means "cuda:0"): the memory of weights, workspaces and batches
  std::string device = "cpu";
  // or a name of the registry; if "auto", NVFP4_MOE_BACKEND is used
  std::string backend = "auto";
  ExpertRange range;  // count 0: all experts
  Limits limits;
  // null: the layer owns a pool (NVFP4_MOE_THREADS, or one thread per core)
  Executor* executor = nullptr;
};

// Describes a run of that many tokens under a plan of this backend, one entry per step. Needs no
// device.
std::vector<StepPlan> describe_run(const Backend& backend, const MoeConfig& config,
                                   const ExpertRange& range, const Plan& plan, int64_t tokens);

// Plans a layer without its weights. Pure, except that it reads NVFP4_MOE_BACKEND.
struct LayerNeeds {
  Plan plan;
  size_t packed_bytes = 0;
};
Result<LayerNeeds> plan_layer(const MoeConfig& config, const LayerScales& scales,
                              const LayerOptions& options);

struct LayerDebug;

// fp8 statistics over all matrices of a layer: their shifts, and how many weights E4M3 cannot
// represent exactly.
struct Fp8LayerWeights {
  int32_t least_shift = 0, most_shift = 0;
  uint64_t weights = 0, inexact = 0;
};

class MoeLayer {
 public:
  // Packs one expert at a time: peak memory = packed + one expert. progress may be empty;
  // cancelling gives kCancelled.
  static Result<std::unique_ptr<MoeLayer>> open(const MoeConfig& config, const LayerSource& source,
                                                const LayerOptions& options,
                                                const ProgressFn& progress = {});
  // The same on a given backend: options.backend and the registry are ignored.
  static Result<std::unique_ptr<MoeLayer>> open_on(const Backend& backend, const MoeConfig& config,
                                                   const LayerSource& source,
                                                   const LayerOptions& options,
                                                   const ProgressFn& progress = {});
  ~MoeLayer();

  const Backend& backend() const { return *backend_; }
  // The config of the whole layer, which batches must match. Over ranks weights().config differs:
  // its experts are the slots of all ranks.
  const MoeConfig& config() const { return combine_ ? combine_->config() : weights_->config; }
  // The maximum tokens of a batch. Over ranks plan().limits differ: they limit the tokens that this
  // rank computes.
  int64_t max_tokens() const { return combine_ ? combine_->max_tokens() : plan_.limits.max_tokens; }
  // Combines this layer's experts with those of other ranks; null: there is one rank.
  Combine* combine() const { return combine_.get(); }
  // Makes this layer one rank's part (parallel/open.h).
  void set_combine(std::unique_ptr<Combine> combine) { combine_ = std::move(combine); }
  // The self-check that the selection of the backend depended on (BackendSelection), for
  // describe_json.
  void set_self_check(std::optional<CheckReport> check) { self_check_ = std::move(check); }
  // The warning about a check that failed (check_warning); empty if none did.
  std::string self_check_warning() const {
    return self_check_ && self_check_->failed()
               ? check_warning(*self_check_, *backend_, plan_.device)
               : "";
  }
  // replace_expert changes bytes and tensor scales: hold a use() while you read them.
  const PackedWeights& weights() const { return *weights_; }
  const Plan& plan() const { return plan_; }
  Executor& executor() const { return *executor_; }
  // The minimum workspace of a run with that many tokens; it never shrinks as tokens grow. Without
  // an argument: for max_tokens().
  size_t workspace_bytes(int64_t tokens) const {
    return combine_ ? combine_->workspace_bytes(tokens) : local_workspace_bytes(tokens);
  }
  size_t workspace_bytes() const {
    return combine_ ? combine_->workspace_bytes(max_tokens()) : plan_.workspace.total_bytes;
  }
  size_t local_workspace_bytes(int64_t tokens) const;  // for run_local
  // Describes run_local with that many bf16 tokens, one entry per step.
  std::vector<StepPlan> describe_run(int64_t tokens) const;
  // The same as JSON, with the workspace size; kInvalidArgument for more tokens than the layer
  // accepts.
  Result<std::string> describe_run_json(int64_t tokens) const;
  // Empty under other formats, and while weights are being replaced.
  std::optional<Fp8LayerWeights> fp8_weights() const;
  std::string describe_json() const;  // backend, kernel per step, activations and why, sizes, notes

  // Checks the batch (shape, dtype, pointers, token count), then runs. const: several streams may
  // run one layer at once, each with its own workspace. status: device memory that receives the
  // run's report instead of the workspace; null on hosts.
  //
  // Over ranks it is collective. With all_to_all each rank has any number of tokens, including 0.
  // With all_reduce all ranks have the same tokens, and rank 0 runs the shared expert. If one rank
  // fails, out is invalid on every rank. Work enqueued on a device finishes, or ends with the
  // exchange's failure, which the next call reports.
  Status run(const Batch& batch, void* workspace, size_t workspace_bytes, void* stream = nullptr,
             RunStatus* status = nullptr) const;
  // Runs only this rank's experts, without the other ranks. topk_ids are slots.
  Status run_local(const Batch& batch, void* workspace, size_t workspace_bytes,
                   void* stream = nullptr, RunStatus* status = nullptr) const;
  // Call it instead of run if this rank cannot begin a run: over ranks, ends the run on all.
  // Returns why.
  Status decline(const Status& why) const;
  // The checks of run_local; reads no array. needs_out: whether batch.out is checked.
  Status check_batch(const Batch& batch, const void* workspace = nullptr,
                     size_t workspace_bytes = 0, bool needs_out = true) const;
  // Runs run_local on zeros, at token counts that use every kernel of its plan, every page of its
  // weights and the workspace, so that the first real call costs no more than later ones. progress
  // may be empty; cancelling gives kCancelled.
  Status warmup(void* workspace, size_t workspace_bytes, void* stream = nullptr,
                const ProgressFn& progress = {}) const;
  // Counts of the last run in this workspace. On a device it waits for the stream first. Over ranks
  // with all_to_all, hidden, weights and out are counted on the source rank and intermediate on the
  // expert rank, so that the sum over the ranks equals the report of a single rank. With all_reduce
  // each rank counts what it computes; bad_expert_ids and nonfinite_outputs are the same on all.
  // Fails as failure() does.
  Result<RunStatus> status(const void* workspace, size_t workspace_bytes,
                           void* stream = nullptr) const;
  // Over ranks on a device, failures of runs after they were enqueued, replays of graphs included:
  // the exchange's failure while work was in progress and, with a capacity, reported once, that
  // runs since the last call exceeded it. On a device under NVFP4_MOE_CHECK, once, a token that the
  // check has found wrong; earlier runs of the stream are checked first. Waits for the stream.
  Status failure(void* stream = nullptr) const;

  // Replaces one expert's weights in place; kBusy while a run is in flight. The source is checked
  // before anything is written. local_expert may be kSharedExpert. A host layer allocates nothing.
  // A device layer allocates temporary staging memory, usually 8 MiB (128 rows of a very long K
  // take more); if that fails, kOutOfMemory, and the expert is unchanged. On a device it waits for
  // all work of the device. kInvalidArgument if a graph has captured the layer, since a replay
  // could start meanwhile.
  Status replace_expert(int64_t local_expert, const ExpertSource& source);
  // The same on a device in the order of `stream`, with or without graphs: earlier work in the
  // stream uses the old expert, later work the new one, never a mix. The caller must order other
  // streams that run the layer with events. It waits for the source, never for `stream` or the
  // device, and disturbs no capture of another thread. It needs staging memory for one more packed
  // expert. kBusy if there was no pause between runs for 10 seconds.
  Status replace_expert_on_stream(int64_t local_expert, const ExpertSource& source, void* stream);
  // replace_expert, also for a layer that graphs have captured. The caller must not let any of them
  // run meanwhile.
  Status replace_expert_at_rest(int64_t local_expert, const ExpertSource& source);
  // Returns the expert with its tensor scales, bit for bit as it was given; kBusy while weights are
  // being replaced.
  Status unpack_expert(int64_t local_expert, ExpertBuffers& out) const;
  // Weights do not change while it is alive: replace_expert returns kBusy. False if a replacement
  // is in progress.
  WeightUses::Use use() const { return WeightUses::Use(uses_); }
  // Call within a use: records whether the stream is being captured, after which graphs hold this
  // layer.
  Status note_capture(void* stream) const;

  // kUnsupported, naming `what`, for a layer on a GPU in a process that was forked from the one
  // that opened it: CUDA does not work in a forked child. A host layer works there, on the calling
  // thread. Run, status, replace_expert, unpack_expert and warmup check this themselves.
  Status check_process(const char* what) const;
  // kUnsupported, naming `what`, for a layer over ranks.
  Status check_one_rank(const char* what) const;

 private:
  MoeLayer() = default;
  friend class PackedCache;
  // Does everything except packing the experts: the plan is made, but the memory of the packed
  // weights is not allocated yet.
  static Result<std::unique_ptr<MoeLayer>> prepare(const Backend& backend, const MoeConfig& config,
                                                   const LayerScales& scales,
                                                   const LayerOptions& options, const Env& env);
  Status pack(const LayerSource& source, const ProgressFn& progress);
  // Sets up the check and the dump directory if the environment requests them. Needs the experts.
  Status attach_debug(const Env& env, const LayerOptions& options, const std::string& name);
  Status run_over_ranks(const Batch& batch, void* workspace, size_t workspace_bytes,
                        void* stream) const;
  // The counts of run_local in the workspace.
  Result<RunStatus> read_status(const void* workspace, size_t workspace_bytes, void* stream) const;
  Status check_local_expert(int64_t local_expert) const;
  // check_matrix for all three matrices, and their biases. Backend::pack_expert checks the block
  // scales of arrays on a device.
  Status check_source(const ExpertSource& source, int64_t local_expert) const;
  // All checks of a replacement that precede claiming the weights.
  Status check_replacement(int64_t local_expert, const ExpertSource& source) const;
  Status replace_in_place(int64_t local_expert, const ExpertSource& source, bool captured_too);

  std::unique_ptr<Combine>
      combine_;  // null: one rank. Holds the exchange, which is destroyed after the weights
  const Backend* backend_ = nullptr;
  std::unique_ptr<PackedWeights> weights_;
  Plan plan_;
  std::optional<DeclaredActivations> declared_;
  std::optional<CheckReport> self_check_;
  WorkspaceSizeCache workspace_size_;
  std::unique_ptr<Executor> owned_executor_;
  Executor* executor_ = nullptr;
  std::unique_ptr<LayerDebug> debug_;  // null unless NVFP4_MOE_CHECK or NVFP4_MOE_DUMP is set
  mutable WeightUses uses_;            // by runs and unpacks
  // held while weights are written, so that a forked child gets whole experts
  ForkMutex replacing_;
  mutable std::atomic<bool> captured_{
      false};  // a run was captured; written within a use, read within a replacement
  ReplacementEvent
      last_replacement_;  // on a stream; destroyed before the weights. Written within a replacement
  const uint32_t process_ = fork_count();
};

// {weights, inexact, least_shift, most_shift}, or null.
Json fp8_weights_json(const std::optional<Fp8LayerWeights>& fp8);

// The packed experts of an open layer, unpacked one at a time. The layer must outlive the source.
LayerSource unpacked_source(const MoeLayer& layer);
// A LayerSource for a checkpoint's layer, or for a slice of its intermediate dimension (the shared
// expert is sliced in the same proportion). The checkpoint must outlive the source.
Result<LayerSource> layer_source(const Checkpoint& checkpoint, int64_t layer,
                                 const IntermediateSlice& slice = {});
DeviceFacts host_facts();
// N for "cuda:N", 0 for "cuda"; empty for other names.
std::optional<int> gpu_index(const std::string& device);
// The device for "cpu" or "cuda:N". kInvalidArgument for other names, kUnsupported if this build or
// machine has no such device.
Result<DeviceFacts> device_facts(const std::string& device);

// kInvalidArgument or kBadInput, naming the matrix, unless it is (rows, cols), is in host memory,
// and has only valid scales: block scales with sign 0 and not NaN, a tensor scale finite and not
// negative.
Status check_matrix(const char* name, const Nvfp4View& view, int64_t rows, int64_t cols);

}  // namespace nvfp4_moe::internal
