// warmup: does in advance what would make the first call slow. On a host these are page faults of
// weights (most of all those of a mapped cache) and workspace, and sleeping threads; on a device,
// loading kernels.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "core/router.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal {
namespace {

// One token, and small, middle and large batches, to cover the kernels that a plan chooses between.
// On a host the last count gives every expert a row, so that all weights are read. A device loads a
// kernel at its first launch, so its counts are close enough together to reach every variant.
std::vector<int64_t> warmup_tokens(const MoeConfig& config, const ExpertRange& range,
                                   bool on_device, int64_t max_tokens) {
  const int64_t all_experts = (range.count + config->top_k - 1) / config->top_k;
  std::vector<int64_t> counts = {1, 8, 64, all_experts};
  if (on_device) {
    constexpr int64_t kMost = 4096;
    for (int64_t tokens = 2; tokens <= kMost; tokens *= 2) counts.push_back(tokens);
  }
  for (int64_t& count : counts) count = std::min(count, max_tokens);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

constexpr size_t kSelectingTokens = 8;  // maximum tokens of a run that selects experts

// Arrays in memory that a backend can read: the caller's on a host, copies on a device.
class InputArrays {
 public:
  InputArrays(const Backend& backend, int device, void* stream)
      : backend_(backend), device_(device), stream_(stream) {}

  template <class T>
  Result<T*> place(std::vector<T>& values) {
    if (backend_.memory == nullptr) return values.data();
    const size_t size_bytes = values.size() * sizeof(T);
    NVFP4_MOE_ASSIGN(Buffer copy, backend_.allocate(size_bytes, device_, "warmup's batch"));
    NVFP4_MOE_TRY(
        backend_.memory->to_device(device_, copy.data(), values.data(), size_bytes, stream_));
    copies_.push_back(std::move(copy));
    return reinterpret_cast<T*>(copies_.back().data());
  }

 private:
  const Backend& backend_;
  int device_;
  void* stream_;
  std::vector<Buffer> copies_;
};

}  // namespace

Status MoeLayer::warmup(void* workspace, size_t workspace_bytes, void* stream,
                        const ProgressFn& progress) const {
  NVFP4_MOE_TRY(check_process("warmup"));
  const auto start = std::chrono::steady_clock::now();
  const MoeConfig& config = weights_->config;
  const std::vector<int64_t> counts =
      warmup_tokens(config, weights_->range, backend_->memory != nullptr, plan_.limits.max_tokens);
  const auto most = static_cast<size_t>(counts.back());
  const auto top_k = static_cast<size_t>(config->top_k);
  std::vector<uint16_t> hidden(most *
                               static_cast<size_t>(config->hidden_size));  // (most, H) bf16 zeros
  std::vector<uint16_t> out(hidden.size());                                // (most, H)
  std::vector<int64_t> ids(most * top_k);                                  // (most, k) round-robin
  std::vector<float> weights(ids.size(), 1.0f);                            // (most, k)
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = weights_->range.global(static_cast<int64_t>(i) % weights_->range.count);

  InputArrays arrays(*backend_, weights_->device, stream);
  NVFP4_MOE_ASSIGN(uint16_t* const placed_hidden, arrays.place(hidden));
  NVFP4_MOE_ASSIGN(uint16_t* const placed_out, arrays.place(out));
  NVFP4_MOE_ASSIGN(int64_t* const placed_ids, arrays.place(ids));
  NVFP4_MOE_ASSIGN(float* const placed_weights, arrays.place(weights));
  const auto run_tokens = [&](int64_t tokens, const SelectExperts* selection) {
    Batch batch;
    batch.tokens = tokens;
    batch.hidden = placed_hidden;
    batch.topk_ids = placed_ids;
    batch.ids_dtype = DType::kI64;
    batch.topk_weights = placed_weights;
    batch.out = placed_out;
    batch.selection = selection;
    return run_local(batch, workspace, workspace_bytes, stream).in("warmup");
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    NVFP4_MOE_TRY(run_tokens(counts[i], nullptr));
    if (!progress) continue;
    const std::string item = std::to_string(counts[i]) + " tokens";
    const double elapsed_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!progress({"warmup", item, static_cast<int64_t>(i) + 1, static_cast<int64_t>(counts.size()),
                   0, 0, elapsed_s}))
      return Status(Code::kCancelled, "warmup: cancelled after " + item);
  }
  SelectExperts selection;
  selection.config.num_experts = config->num_experts;
  selection.config.top_k = config->top_k;
  if (backend_->memory != nullptr && selection.config.check().ok()) {
    // Runs that select experts have their own kernels, one for few tokens and one for many.
    std::vector<uint16_t> logits(kSelectingTokens *
                                 static_cast<size_t>(config->num_experts));  // bf16 zeros
    NVFP4_MOE_ASSIGN(selection.logits, arrays.place(logits));
    selection.logits_stride = config->num_experts;
    selection.topk_ids = placed_ids;
    selection.ids_dtype = DType::kI64;
    selection.topk_weights = placed_weights;
    for (const int64_t tokens : counts) {
      if (tokens > static_cast<int64_t>(kSelectingTokens)) break;
      selection.tokens = tokens;
      NVFP4_MOE_TRY(run_tokens(tokens, &selection));
    }
  }
  // A device's arrays are freed here: once the status has been read back, its work with them is
  // done.
  return read_status(workspace, workspace_bytes, stream).status();
}

}  // namespace nvfp4_moe::internal
