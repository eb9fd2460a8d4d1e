#include "parallel/dispatch.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "parallel/multiply.h"
#include "parallel/received_activations.h"

namespace nvfp4_moe {
namespace {

void add(RunStatus& to, const RunStatus& intermediate) {
  to.nonfinite_rows += intermediate.nonfinite_rows;
  to.intermediate_blocks += intermediate.intermediate_blocks;
  to.intermediate_saturated += intermediate.intermediate_saturated;
  to.intermediate_zeroed += intermediate.intermediate_zeroed;
}

// Calls body(token, k) for the assignments of `rank`, token by token.
template <class Body>
void for_assignments(const Placement& placement, const int32_t* slots, int64_t tokens, int64_t top_k, int rank,
                     const Body& body) {
  const int64_t first = placement.first_slot(rank), end = placement.first_slot(rank + 1);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t k = 0; k < top_k; ++k)
      if (const int64_t slot = slots[token * top_k + k]; slot >= first && slot < end) body(token, k);
}

}  // namespace

// T tokens of this rank, U of all ranks for this one at most, R replies.
struct Dispatch::Spans {
  RunStatus* status = nullptr;
  int32_t* slots = nullptr;        // (T, k)
  std::byte* send = nullptr;       // records for all ranks
  std::byte* recv = nullptr;       // (U) records
  int32_t* ids = nullptr;          // (U, k) slots of this rank
  float* weights = nullptr;        // (U, k)
  std::byte* send_rows = nullptr;  // (U k) rows, for the ranks that asked
  std::byte* recv_rows = nullptr;  // (R) rows
  std::byte* home = nullptr;       // a workspace of T tokens
  std::byte* owner = nullptr;      // a workspace of U tokens
  size_t size_bytes = 0;
};

Dispatch::Dispatch(const MoeLayer& layer, int world, int64_t capacity, bool fixed)
    : layer_(layer),
      home_{layer.config(), {0, layer.config()->num_experts}, layer.weights().scales, {}, Buffer()},
      world_(world),
      record_(layer.config()),
      top_k_(record_.top_k),
      sizes_(world, capacity, fixed, top_k_),
      counts_(2 * static_cast<size_t>(world)),
      send_bytes_(static_cast<size_t>(world)),
      recv_bytes_(static_cast<size_t>(world)) {}

Dispatch::Spans Dispatch::spans(std::byte* workspace, int64_t tokens) const {
  const Backend& backend = layer_.backend();
  const Plan& plan = layer_.plan();
  const int64_t received = sizes_.received();
  const auto bytes_of = [&](const PackedWeights& weights, int64_t most) {
    return static_cast<int64_t>(backend.workspace_bytes(weights.config, weights.range, plan, most));
  };
  Arena arena(workspace, plan.limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * top_k_);
  spans.send = arena.take<std::byte>("", "send", sizes_.sent(tokens) * record_.bytes);
  spans.recv = arena.take<std::byte>("", "recv", received * record_.bytes);
  spans.ids = arena.take<int32_t>("", "ids", received * top_k_);
  spans.weights = arena.take<float>("", "weights", received * top_k_);
  spans.send_rows = arena.take<std::byte>("", "send_rows", received * top_k_ * record_.row_bytes);
  spans.recv_rows = arena.take<std::byte>("", "recv_rows", sizes_.rows_back(tokens) * record_.row_bytes);
  spans.home = arena.take<std::byte>("", "home", bytes_of(home_, tokens));
  spans.owner = arena.take<std::byte>("", "owner", bytes_of(layer_.weights(), received));
  spans.size_bytes = arena.size_bytes();
  return spans;
}

size_t Dispatch::workspace_bytes(int64_t tokens) const { return spans(nullptr, tokens).size_bytes; }

int32_t* Dispatch::slots(std::byte* workspace) const { return spans(workspace, 0).slots; }

Status Dispatch::announce(Exchange& exchange, const Placement& placement, int64_t tokens, const int32_t* slots,
                          const Status& mine) {
  std::fill(counts_.begin(), counts_.end(), 0);
  for (int rank = 0; rank < world_ && mine.ok(); ++rank) {
    int64_t last = -1;
    for_assignments(placement, slots, tokens, top_k_, rank, [&](int64_t token, int64_t) {
      counts_[2 * static_cast<size_t>(rank)] += token != last;
      counts_[2 * static_cast<size_t>(rank) + 1] += 1;
      last = token;
    });
  }
  return sizes_.announce(exchange, tokens, mine, counts_);
}

Status Dispatch::send_tokens(Exchange& exchange, const Placement& placement, const LayerBuffers& home,
                             const Batch& batch, const Spans& spans) {
  const MoeConfig& config = home_.config;
  const auto arrays = wire_arrays(home.routed.hidden, config->activation_format, config->hidden_size);
  const int me = exchange.rank();
  std::byte* message = spans.send;
  for (int rank = 0; rank < world_; ++rank) {
    std::byte* record = message - record_.bytes;
    int64_t last = -1;
    int32_t rows = 0;
    for_assignments(placement, spans.slots, batch.tokens, top_k_, rank, [&](int64_t token, int64_t k) {
      if (token != last) {
        record += record_.bytes;
        std::byte* to = record;
        for (const WireArray& array : arrays) {
          if (array.row_bytes > 0) std::memcpy(to, array.row(token), static_cast<size_t>(array.row_bytes));
          to += array.row_bytes;
        }
        std::memset(to, 0, static_cast<size_t>(record + record_.bytes - to));
        std::memset(record + record_.slots_at, 0xFF, static_cast<size_t>(top_k_) * sizeof(int32_t));  // -1
        std::memcpy(record + record_.first_row_at, &rows, sizeof(rows));
        last = token;
      }
      const int64_t assignment = token * top_k_ + k;
      std::memcpy(record + record_.slots_at + k * 4, &spans.slots[assignment], sizeof(int32_t));
      std::memcpy(record + record_.weights_at + k * 4, &batch.topk_weights[assignment], sizeof(float));
      ++rows;
    });
    send_bytes_[static_cast<size_t>(rank)] = sizes_.records_between(me, rank) * record_.bytes;
    recv_bytes_[static_cast<size_t>(rank)] = sizes_.records_between(rank, me) * record_.bytes;
    message += send_bytes_[static_cast<size_t>(rank)];
  }
  return exchange.all_to_all_v(spans.send, send_bytes_, spans.recv, recv_bytes_);
}

Status Dispatch::take_tokens(int rank, const LayerBuffers& buffers, const Spans& spans) const {
  const MoeConfig& config = home_.config;
  const auto arrays = wire_arrays(buffers.routed.hidden, config->activation_format, config->hidden_size);
  const ExpertRange& range = layer_.weights().range;
  const std::byte* message = spans.recv;
  int64_t at = 0;
  for (int from = 0; from < world_; ++from) {
    int64_t rows = 0;
    for (int64_t token = 0; token < sizes_.tokens_between(from, rank); ++token, ++at) {
      const std::byte* const record = message + token * record_.bytes;
      const std::byte* next = record;
      for (const WireArray& array : arrays) {
        if (array.row_bytes > 0) std::memcpy(array.row(at), next, static_cast<size_t>(array.row_bytes));
        next += array.row_bytes;
      }
      const Status legal = check_received(buffers.routed.hidden, config->activation_format, config->hidden_size, at);
      if (!legal.ok()) return legal.in("token " + std::to_string(token) + " from rank " + std::to_string(from));
      std::memcpy(spans.ids + at * top_k_, record + record_.slots_at, static_cast<size_t>(top_k_) * sizeof(int32_t));
      std::memcpy(spans.weights + at * top_k_, record + record_.weights_at,
                  static_cast<size_t>(top_k_) * sizeof(float));
      int32_t first_row = 0;
      std::memcpy(&first_row, record + record_.first_row_at, sizeof(first_row));
      if (first_row != rows)
        return {Code::kIo, "dispatch: expected a record whose first row is " + std::to_string(rows) + " from rank " +
                               std::to_string(from) + ", got " + std::to_string(first_row)};
      for (int64_t k = 0; k < top_k_; ++k) {
        const int32_t slot = spans.ids[at * top_k_ + k];
        if (slot != -1 && !range.local(slot))
          return {Code::kIo, "dispatch: expected slots of rank " + std::to_string(rank) + ", got " +
                                 std::to_string(slot) + " from rank " + std::to_string(from)};
        rows += slot != -1;
      }
    }
    if (rows != sizes_.rows_between(from, rank))
      return {Code::kIo, "dispatch: expected " + std::to_string(sizes_.rows_between(from, rank)) + " rows for rank " +
                             std::to_string(from) + ", got records of " + std::to_string(rows)};
    message += sizes_.records_between(from, rank) * record_.bytes;
  }
  return {};
}

Status Dispatch::send_rows(Exchange& exchange, const LayerBuffers& owner, const Spans& spans) {
  const int me = exchange.rank();
  const auto* const rows_out = static_cast<const std::byte*>(owner.routed.rows_out);
  std::byte* message = spans.send_rows;
  int64_t assignment = 0;
  for (int to = 0; to < world_; ++to) {
    std::byte* row = message;
    for (const int64_t end = assignment + sizes_.tokens_between(to, me) * top_k_; assignment < end; ++assignment) {
      const int32_t from = owner.row_of_assignment[assignment];
      if (from < 0) continue;
      std::memcpy(row, rows_out + from * record_.row_bytes, static_cast<size_t>(record_.row_bytes));
      row += record_.row_bytes;
    }
    send_bytes_[static_cast<size_t>(to)] = sizes_.rows_back_between(to, me) * record_.row_bytes;
    recv_bytes_[static_cast<size_t>(to)] = sizes_.rows_back_between(me, to) * record_.row_bytes;
    message += send_bytes_[static_cast<size_t>(to)];
  }
  return exchange.all_to_all_v(spans.send_rows, send_bytes_, spans.recv_rows, recv_bytes_);
}

void Dispatch::take_rows(int rank, const Placement& placement, const LayerBuffers& home, int64_t tokens,
                         const Spans& spans) const {
  auto* const rows_out = static_cast<std::byte*>(home.routed.rows_out);
  const std::byte* message = spans.recv_rows;
  for (int owner = 0; owner < world_; ++owner) {
    const std::byte* row = message;
    for_assignments(placement, spans.slots, tokens, top_k_, owner, [&](int64_t token, int64_t k) {
      const int32_t to = home.row_of_assignment[token * top_k_ + k];
      std::memcpy(rows_out + to * record_.row_bytes, row, static_cast<size_t>(record_.row_bytes));
      row += record_.row_bytes;
    });
    message += sizes_.rows_back_between(rank, owner) * record_.row_bytes;
  }
}

Status Dispatch::run(Exchange& exchange, const Placement& placement, const Batch& batch, std::byte* workspace) {
  const LayerSteps& steps = *layer_.backend().steps;
  const PackedWeights& weights = layer_.weights();
  const size_t guard_bytes = layer_.plan().limits.guard_bytes;
  const Spans s = spans(workspace, batch.tokens);
  const int me = exchange.rank();

  Arena home_arena(s.home, guard_bytes);
  const LayerBuffers home = layer_buffers(home_.config, home_.range, batch.tokens, home_arena);
  Batch routed = batch;
  routed.topk_ids = s.slots;
  routed.ids_dtype = DType::kI32;
  const StepContext at_home{home_, routed, home, layer_.executor(), home_arena};
  NVFP4_MOE_TRY(steps.route(at_home));
  NVFP4_MOE_TRY(steps.quantize(at_home));
  NVFP4_MOE_TRY(send_tokens(exchange, placement, home, batch, s));

  Batch taken;
  for (int from = 0; from < world_; ++from) taken.tokens += sizes_.tokens_between(from, me);
  taken.topk_ids = s.ids;
  taken.topk_weights = s.weights;
  Arena owner_arena(s.owner, guard_bytes);
  LayerBuffers owner = layer_buffers(weights.config, weights.range, taken.tokens, owner_arena);
  if (owner.shared.experts > 0) owner.shared.hidden = owner.routed.hidden;  // whose tokens stay at home
  NVFP4_MOE_TRY(take_tokens(me, owner, s));
  const StepContext at_owner{weights, taken, owner, layer_.executor(), owner_arena};
  NVFP4_MOE_TRY(steps.route(at_owner));
  NVFP4_MOE_TRY(multiply(steps, at_owner, owner.routed));
  NVFP4_MOE_TRY(send_rows(exchange, owner, s));

  take_rows(me, placement, home, batch.tokens, s);
  // The shared expert's weights are this rank's own; its arrays are those of the tokens at home.
  const StepContext shared{weights, routed, home, layer_.executor(), home_arena};
  if (home.shared.experts > 0) NVFP4_MOE_TRY(multiply(steps, shared, home.shared));
  NVFP4_MOE_TRY(steps.combine(at_home));
  *s.status = *home.status;
  add(*s.status, *owner.status);
  return {};
}

}  // namespace nvfp4_moe
