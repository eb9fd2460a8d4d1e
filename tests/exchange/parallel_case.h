// A case of the case table over several ranks, each a thread.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/cases.h"
#include "core/arena.h"
#include "core/executor.h"
#include "exchange/ranks.h"
#include "parallel/open.h"
#include "support/case_source.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

inline constexpr Timeout kCaseTimeout{60000};
inline constexpr std::byte kPoisonByte{0xFF};  // NaN in every float format

// Tokens [first, first + count) of the case's batch.
inline Batch slice_of(const CaseData& data, int64_t first, int64_t count, uint8_t* out) {
  Batch batch = data.batch(out);
  const int64_t hidden = data.spec.options.hidden_size, top_k = data.spec.options.top_k;
  const auto bytes = [](int64_t values, DType dtype) { return values * bits(dtype) / 8; };
  batch.tokens = count;
  batch.hidden =
      static_cast<const std::byte*>(batch.hidden) + bytes(first * hidden, batch.hidden_dtype);
  batch.topk_ids =
      static_cast<const std::byte*>(batch.topk_ids) + bytes(first * top_k, batch.ids_dtype);
  batch.topk_weights += first * top_k;
  if (batch.shared_weights != nullptr) batch.shared_weights += first;
  batch.out = out + bytes(first * hidden, batch.out_dtype);
  return batch;
}

// A poisoned workspace of exactly this size, followed by a guard.
class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(size_t size_bytes)
      : size_bytes_(size_bytes), storage_(size_bytes + 2 * Arena::kAlignment, kPoisonByte) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    base_ = storage_.data() + (Arena::kAlignment - address % Arena::kAlignment) % Arena::kAlignment;
  }
  ~PoisonedWorkspace() {
    for (const std::byte* at = base_ + size_bytes_; at < storage_.data() + storage_.size(); ++at)
      if (*at != kPoisonByte)
        ADD_FAILURE() << "written " << at - base_ - size_bytes_ << " bytes behind the workspace";
  }
  std::byte* data() { return base_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  size_t size_bytes_;
  std::vector<std::byte> storage_;
  std::byte* base_ = nullptr;
};

struct ParallelRun {
  std::vector<uint8_t> out;                // of all tokens; kAllReduce: rank 0's
  std::vector<RunStatus> statuses;         // (world)
  std::vector<std::string> messages;       // (world) of the run; empty if it was fine
  std::vector<std::vector<uint8_t>> outs;  // kAllReduce: (world)
};

inline ExpertParallelOptions combined_by(CombineBy combine) {
  ExpertParallelOptions options;
  options.combine = combine;
  return options;
}
inline ExpertParallelOptions with_capacity(int64_t capacity) {
  ExpertParallelOptions options;
  options.capacity = capacity;
  return options;
}

// How the case's tokens are distributed over the ranks of kAllToAll: nearly even, or all on one.
enum class Tokens { kEven, kAllOnLast };

inline std::pair<int64_t, int64_t> tokens_of(Tokens tokens, int64_t count, int rank, int world) {
  if (tokens == Tokens::kAllOnLast)
    return rank == world - 1 ? std::pair(int64_t{0}, count) : std::pair(int64_t{0}, int64_t{0});
  const int64_t first = rank * count / world;
  return {first, (rank + 1) * count / world - first};
}

inline LayerOptions options_of(const CaseData& data) {
  LayerOptions options;
  options.limits.max_tokens = std::max<int64_t>(data.spec.tokens, 1);
  options.executor = &serial_executor();
  return options;
}

inline ParallelRun run_parallel(const Backend& backend, const CaseData& data, int world,
                                const ExpertParallelOptions& parallel,
                                Tokens tokens = Tokens::kEven, Over over = Over::kThreads) {
  ParallelRun run;
  const bool reduce = parallel.combine == CombineBy::kAllReduce;
  run.out.assign(data.out_bytes(), 0xFF);
  run.statuses.resize(static_cast<size_t>(world));
  run.messages.resize(static_cast<size_t>(world));
  run.outs.assign(static_cast<size_t>(world), run.out);
  on_ranks(over, world, kCaseTimeout, [&](Exchange& exchange) {
    const auto rank = static_cast<size_t>(exchange.rank());
    const LayerSource source = source_of(data);
    const auto layer = open_over_ranks_on(backend, data.config, source, options_of(data),
                                          internal::Parallel{borrowed(exchange), parallel});
    if (!layer.ok()) {
      run.messages[rank] = layer.status().message();
      return;
    }
    const auto [first, count] = reduce
                                    ? std::pair(int64_t{0}, data.spec.tokens)
                                    : tokens_of(tokens, data.spec.tokens, exchange.rank(), world);
    PoisonedWorkspace workspace((*layer)->workspace_bytes(count));
    const Batch batch =
        slice_of(data, first, count, reduce ? run.outs[rank].data() : run.out.data());
    const Status status = (*layer)->run(batch, workspace.data(), workspace.size_bytes());
    run.messages[rank] = status.message();
    if (status.ok())
      run.statuses[rank] = *(*layer)->status(workspace.data(), workspace.size_bytes());
    EXPECT_OK(exchange.barrier());  // leaving now would end the ranks that are still running
  });
  if (reduce) run.out = run.outs[0];
  return run;
}

// Every expert twice, on neighbouring ranks: experts of contiguous placements, then those of the
// next rank.
inline Placement redundant(int64_t experts, int world) {
  std::vector<int64_t> map;
  for (int rank = 0; rank < world; ++rank)
    for (int copy = 0; copy < std::min(2, world); ++copy) {
      const int of = (rank + copy) % world;
      for (int64_t e = of * experts / world; e < (of + 1) * experts / world; ++e) map.push_back(e);
    }
  return *Placement::of_map(experts, world, map);
}

// Rank r holds experts r, r + world, r + 2 world, ... and, if it would hold one fewer than rank 0,
// expert 0 as well.
inline Placement round_robin(int64_t experts, int world) {
  std::vector<int64_t> map;
  for (int rank = 0; rank < world; ++rank)
    for (int64_t first = 0; first < experts; first += world)
      map.push_back(first + rank < experts ? first + rank : 0);
  return *Placement::of_map(experts, world, map);
}

// All tokens choose expert 0 at k = 0, and `second` at k = 1; `second` may be -1.
inline void choose_expert_0(CaseData& data, int64_t second) {
  for (int64_t token = 0; token < data.spec.tokens; ++token) {
    data.set_id(token, 0, 0);
    data.set_id(token, 1, second);
  }
}

}  // namespace nvfp4_moe::internal::test
