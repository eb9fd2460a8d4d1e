// A record is a token's activations in the arrays of its format, one behind the other, then top_k slots (int32, -1 where
// the assignment is none of that rank's) and top_k weights (fp32).
#include "moe/dispatch.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/scale_layout.h"

namespace nvfp4_moe {
namespace {

constexpr int64_t kRecordAlignment = 16;

// One array of a token's activations: rows of row_bytes.
struct WireArray {
  void* rows = nullptr;
  int64_t row_bytes = 0;
  std::byte* row(int64_t token) const { return static_cast<std::byte*>(rows) + token * row_bytes; }
};

// What of a token's activations goes over the wire: all that gemm1 reads.
std::array<WireArray, 4> wire_arrays(const ActivationBuffers& activations, ActivationFormat format, int64_t hidden) {
  const WireArray nonfinite{activations.nonfinite, 1}, row_scale{activations.row_scale, 4};
  switch (format) {
    case ActivationFormat::kNvfp4:
      return {{{activations.codes, hidden / 2}, {activations.block_scales, hidden / 16}, row_scale, nonfinite}};
    case ActivationFormat::kBf16: return {{{activations.bf16, 2 * hidden}, nonfinite, {}, {}}};
    case ActivationFormat::kInt8Block:
      return {{{activations.int8_codes, hidden}, {activations.int8_scales, hidden / 16 * 4}, nonfinite, {}}};
    case ActivationFormat::kFp8: return {{{activations.fp8, hidden}, row_scale, nonfinite, {}}};
  }
  return {};
}

int64_t activation_bytes(const MoeConfig& config) {
  int64_t bytes = 0;
  for (const WireArray& array : wire_arrays({}, config->activation_format, config->hidden_size))
    bytes += array.row_bytes;
  return round_up(bytes, sizeof(int32_t));
}

void add(RunStatus& to, const RunStatus& intermediate) {
  to.nonfinite_rows += intermediate.nonfinite_rows;
  to.intermediate_blocks += intermediate.intermediate_blocks;
  to.intermediate_saturated += intermediate.intermediate_saturated;
  to.intermediate_zeroed += intermediate.intermediate_zeroed;
}

Status multiply(const LayerSteps& steps, const StepContext& step, const PartBuffers& part) {
  NVFP4_MOE_TRY(steps.gemm1_swiglu(step, part));
  NVFP4_MOE_TRY(steps.requantize(step, part));
  return steps.gemm2(step, part);
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
      capacity_(capacity),
      fixed_(fixed),
      top_k_(layer.config()->top_k),
      activation_bytes_(activation_bytes(layer.config())),
      record_bytes_(round_up(activation_bytes_ + top_k_ * 8, kRecordAlignment)),
      row_bytes_(layer.config()->hidden_size * (layer.config()->row_format == RowFormat::kBf16 ? 2 : 4)),
      announcement_(world, 2 * int64_t{world}),
      counts_(2 * static_cast<size_t>(world)),
      send_bytes_(static_cast<size_t>(world)),
      recv_bytes_(static_cast<size_t>(world)) {}

Dispatch::Spans Dispatch::spans(std::byte* workspace, int64_t tokens) const {
  const Backend& backend = layer_.backend();
  const Plan& plan = layer_.plan();
  const int64_t received = world_ * capacity_;
  const int64_t sent = fixed_ ? received : tokens * std::min<int64_t>(top_k_, world_);
  const auto bytes_of = [&](const PackedWeights& weights, int64_t most) {
    return static_cast<int64_t>(backend.workspace_bytes(weights.config, weights.range, plan, most));
  };
  Arena arena(workspace, plan.limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * top_k_);
  spans.send = arena.take<std::byte>("", "send", sent * record_bytes_);
  spans.recv = arena.take<std::byte>("", "recv", received * record_bytes_);
  spans.ids = arena.take<int32_t>("", "ids", received * top_k_);
  spans.weights = arena.take<float>("", "weights", received * top_k_);
  spans.send_rows = arena.take<std::byte>("", "send_rows", received * top_k_ * row_bytes_);
  spans.recv_rows = arena.take<std::byte>("", "recv_rows", (fixed_ ? received : tokens) * top_k_ * row_bytes_);
  spans.home = arena.take<std::byte>("", "home", bytes_of(home_, tokens));
  spans.owner = arena.take<std::byte>("", "owner", bytes_of(layer_.weights(), received));
  spans.size_bytes = arena.size_bytes();
  return spans;
}

size_t Dispatch::workspace_bytes(int64_t tokens) const { return spans(nullptr, tokens).size_bytes; }

int32_t* Dispatch::slots(std::byte* workspace) const { return spans(workspace, 0).slots; }

Status Dispatch::check_capacity() const {
  int from = 0, to = 0;
  for (int s = 0; s < world_; ++s)
    for (int d = 0; d < world_; ++d)
      if (tokens_between(s, d) > tokens_between(from, to)) from = s, to = d;
  if (tokens_between(from, to) <= capacity_) return {};
  return invalid_argument("capacity: expected at least " + std::to_string(tokens_between(from, to)) +
                          " tokens, which rank " + std::to_string(from) + " has for rank " + std::to_string(to) +
                          ", got " + std::to_string(capacity_));
}

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
  NVFP4_MOE_TRY(announcement_.gather(exchange, tokens, mine, counts_));
  return check_capacity();
}

Status Dispatch::send_tokens(Exchange& exchange, const Placement& placement, const LayerBuffers& home,
                             const Batch& batch, const Spans& spans) {
  const MoeConfig& config = home_.config;
  const auto arrays = wire_arrays(home.routed.hidden, config->activation_format, config->hidden_size);
  const int me = exchange.rank();
  std::byte* message = spans.send;
  for (int rank = 0; rank < world_; ++rank) {
    std::byte* record = message - record_bytes_;
    int64_t last = -1;
    for_assignments(placement, spans.slots, batch.tokens, top_k_, rank, [&](int64_t token, int64_t k) {
      if (token != last) {
        record += record_bytes_;
        std::byte* to = record;
        for (const WireArray& array : arrays) {
          if (array.row_bytes > 0) std::memcpy(to, array.row(token), static_cast<size_t>(array.row_bytes));
          to += array.row_bytes;
        }
        std::memset(to, 0, static_cast<size_t>(record + record_bytes_ - to));
        std::memset(record + activation_bytes_, 0xFF, static_cast<size_t>(top_k_) * sizeof(int32_t));  // -1
        last = token;
      }
      const int64_t assignment = token * top_k_ + k;
      std::byte* const slots = record + activation_bytes_;
      std::memcpy(slots + k * 4, &spans.slots[assignment], sizeof(int32_t));
      std::memcpy(slots + (top_k_ + k) * 4, &batch.topk_weights[assignment], sizeof(float));
    });
    send_bytes_[static_cast<size_t>(rank)] = records_between(me, rank) * record_bytes_;
    recv_bytes_[static_cast<size_t>(rank)] = records_between(rank, me) * record_bytes_;
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
    for (int64_t token = 0; token < tokens_between(from, rank); ++token, ++at) {
      const std::byte* const record = message + token * record_bytes_;
      const std::byte* next = record;
      for (const WireArray& array : arrays) {
        if (array.row_bytes > 0) std::memcpy(array.row(at), next, static_cast<size_t>(array.row_bytes));
        next += array.row_bytes;
      }
      const std::byte* const slots = record + activation_bytes_;
      std::memcpy(spans.ids + at * top_k_, slots, static_cast<size_t>(top_k_) * sizeof(int32_t));
      std::memcpy(spans.weights + at * top_k_, slots + top_k_ * 4, static_cast<size_t>(top_k_) * sizeof(float));
      for (int64_t k = 0; k < top_k_; ++k) {
        const int32_t slot = spans.ids[at * top_k_ + k];
        if (slot != -1 && !range.local(slot))
          return {Code::kIo, "dispatch: expected slots of rank " + std::to_string(rank) + ", got " +
                                 std::to_string(slot) + " from rank " + std::to_string(from)};
        rows += slot != -1;
      }
    }
    if (rows != rows_between(from, rank))
      return {Code::kIo, "dispatch: expected " + std::to_string(rows_between(from, rank)) + " rows for rank " +
                             std::to_string(from) + ", got records of " + std::to_string(rows)};
    message += records_between(from, rank) * record_bytes_;
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
    for (const int64_t end = assignment + tokens_between(to, me) * top_k_; assignment < end; ++assignment) {
      const int32_t from = owner.row_of_assignment[assignment];
      if (from < 0) continue;
      std::memcpy(row, rows_out + from * row_bytes_, static_cast<size_t>(row_bytes_));
      row += row_bytes_;
    }
    send_bytes_[static_cast<size_t>(to)] = replies_between(me, to) * row_bytes_;
    recv_bytes_[static_cast<size_t>(to)] = replies_between(to, me) * row_bytes_;
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
      std::memcpy(rows_out + to * row_bytes_, row, static_cast<size_t>(row_bytes_));
      row += row_bytes_;
    });
    message += replies_between(owner, rank) * row_bytes_;
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
  for (int from = 0; from < world_; ++from) taken.tokens += tokens_between(from, me);
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
