// All-to-all on hosts, from a rank's tokens to their expert ranks and back.
//
//   source rank   route, quantize          tokens (T) -> codes and scales, as the GEMM reads them
//   dispatch      a packet for each token and rank: activations, the slots that it goes to on that
//                 rank, and weights
//   expert rank   route, gemm1_swiglu, requantize, gemm2 on the tokens of all ranks
//   combine       a row for each assignment, in the order in which the packets request them
//   source rank   rows to the arrays of combine; the shared expert; combine, in the order of k
//
// All steps are the backend's own, so the bits are those of one rank with all experts.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "backend/device_exchange.h"
#include "parallel/exchange_counts.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal {
namespace {

void add(RunStatus& to, const RunStatus& intermediate) {
  to.nonfinite_rows += intermediate.nonfinite_rows;
  to.intermediate_blocks += intermediate.intermediate_blocks;
  to.intermediate_saturated += intermediate.intermediate_saturated;
  to.intermediate_zeroed += intermediate.intermediate_zeroed;
}

// Calls body(token, k) for the assignments of `rank`, token by token.
template <class Body>
void for_assignments(const Placement& placement, const int32_t* slots, int64_t tokens,
                     int64_t top_k, int rank, const Body& body) {
  const int64_t first = placement.first_slot(rank), end = placement.first_slot(rank + 1);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t k = 0; k < top_k; ++k)
      if (const int64_t slot = slots[token * top_k + k]; slot >= first && slot < end)
        body(token, k);
}

constexpr uint8_t kLargestE4m3 = 0x7E;  // larger bytes are NaN or negative

Status refused(const char* field, const std::string& expected, float got) {
  return io_error(std::string("dispatch: ") + field + ": expected " + expected + ", got " +
                  std::to_string(got));
}

bool is_scale(float value, float least) {
  return value >= least && value <= std::numeric_limits<float>::max();
}

// Ok if the row's flag and scales can come from a rank's quantizer. Scales must be checked because
// the exact sum of int8_block derives an index from one. Every code is valid.
Status check_received(const ActivationBuffers& activations, ActivationFormat format, int64_t hidden,
                      int64_t row) {
  const uint8_t flag = activations.nonfinite[row];
  if (flag > 1) return refused("flag of a nonfinite token", "0 or 1", flag);
  if (flag == 1) return {};  // out is NaN for any scales
  const int64_t blocks = hidden / 16;
  if (format == ActivationFormat::kNvfp4 || format == ActivationFormat::kFp8) {
    const float scale = activations.row_scale[row];
    if (!is_scale(scale, std::numeric_limits<float>::denorm_min()))
      return refused("row scale", "a finite number above 0", scale);
  }
  if (format == ActivationFormat::kNvfp4) {
    for (int64_t block = 0; block < blocks; ++block)
      if (const uint8_t scale = activations.block_scales[row * blocks + block];
          scale > kLargestE4m3)
        return refused("block scale", "an E4M3 byte of at most 126", scale);
  }
  if (format == ActivationFormat::kInt8Block) {
    for (int64_t block = 0; block < blocks; ++block)
      if (const float scale = activations.int8_scales[row * blocks + block];
          !is_scale(scale, 0x1p-116f))
        return refused("block scale", "a finite number from 2^-116", scale);
  }
  return {};
}

class HostAllToAll : public RankCombine {
 public:
  HostAllToAll(MoeLayer& layer, const Ranks& ranks)
      : RankCombine(layer, ranks),
        source_{layer.weights().config,
                {0, layer.weights().config->num_experts},
                layer.weights().scales,
                {},
                Buffer()},
        packet_(layer.weights().config),
        slots_(ranks.placement, top_k()),
        counts_(world(), ranks.capacity, ranks.fixed, top_k()),
        send_bytes_(static_cast<size_t>(world())),
        recv_bytes_(static_cast<size_t>(world())) {}

  size_t workspace_bytes(int64_t tokens) const override {
    return spans(nullptr, tokens).size_bytes;
  }
  Status begin(const Batch& batch, std::byte* workspace, void* stream, Status mine) override;
  Status run(const Batch& batch, std::byte* workspace, void* stream) override;

 private:
  // T: tokens of this rank. U: the most tokens that all ranks send to this one. R: rows that come
  // back.
  struct Spans {
    RunStatus* status = nullptr;
    int32_t* slots = nullptr;        // (T, k)
    std::byte* send = nullptr;       // packets for all ranks
    std::byte* recv = nullptr;       // (U) packets
    int32_t* ids = nullptr;          // (U, k) slots of this rank
    float* weights = nullptr;        // (U, k)
    std::byte* send_rows = nullptr;  // (U k) rows, for the ranks that requested them
    std::byte* recv_rows = nullptr;  // (R) rows
    std::byte* source = nullptr;     // workspace of T tokens
    std::byte* expert = nullptr;     // workspace of U tokens
    size_t size_bytes = 0;
  };
  Slots& slots() override { return slots_; }
  Spans spans(std::byte* workspace, int64_t tokens) const;
  Status send_tokens(const LayerBuffers& source, const Batch& batch, const Spans& spans);
  Status take_tokens(const LayerBuffers& expert, const Spans& spans) const;
  Status send_rows(const LayerBuffers& expert, const Spans& spans);
  void take_rows(const LayerBuffers& source, int64_t tokens, const Spans& spans) const;

  const PackedWeights source_;  // without experts: config and range, for steps that read no weights
  const PacketFormat packet_;
  HostSlots slots_;
  PacketCounts counts_;
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

HostAllToAll::Spans HostAllToAll::spans(std::byte* workspace, int64_t tokens) const {
  const Plan& plan = layer_.plan();
  const int64_t received = counts_.received();
  const auto bytes_of = [&](const PackedWeights& weights, int64_t most) {
    return static_cast<int64_t>(
        layer_.backend().workspace_bytes(weights.config, weights.range, plan, most));
  };
  Arena arena(workspace, plan.limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * top_k());
  spans.send = arena.take<std::byte>("", "send", counts_.sent(tokens) * packet_.bytes);
  spans.recv = arena.take<std::byte>("", "recv", received * packet_.bytes);
  spans.ids = arena.take<int32_t>("", "ids", received * top_k());
  spans.weights = arena.take<float>("", "weights", received * top_k());
  spans.send_rows = arena.take<std::byte>("", "send_rows", received * top_k() * packet_.row_bytes);
  spans.recv_rows =
      arena.take<std::byte>("", "recv_rows", counts_.rows_back(tokens) * packet_.row_bytes);
  spans.source = arena.take<std::byte>("", "source", bytes_of(source_, tokens));
  spans.expert = arena.take<std::byte>("", "expert", bytes_of(layer_.weights(), received));
  spans.size_bytes = arena.size_bytes();
  return spans;
}

Status HostAllToAll::begin(const Batch& batch, std::byte* workspace, void* stream, Status mine) {
  const std::span<int64_t> counts = counts_.own();
  std::ranges::fill(counts, 0);
  int32_t* const slots = mine.ok() ? spans(workspace, batch.tokens).slots : nullptr;
  if (mine.ok()) mine = slots_.translate(batch, rank(), slots, stream);
  for (int expert = 0; expert < world() && mine.ok(); ++expert) {
    int64_t last = -1;
    for_assignments(placement(), slots, batch.tokens, top_k(), expert, [&](int64_t token, int64_t) {
      counts[2 * static_cast<size_t>(expert)] += token != last;
      counts[2 * static_cast<size_t>(expert) + 1] += 1;
      last = token;
    });
  }
  return counts_.gather(exchange(), batch.tokens, mine, false);
}

Status HostAllToAll::send_tokens(const LayerBuffers& source, const Batch& batch,
                                 const Spans& spans) {
  const MoeConfig& config = source_.config;
  const auto arrays =
      wire_arrays(source.routed.hidden, config->activation_format, config->hidden_size);
  const int me = rank();
  std::byte* message = spans.send;
  for (int expert = 0; expert < world(); ++expert) {
    std::byte* packet = message - packet_.bytes;
    int64_t last = -1;
    int32_t rows = 0;
    for_assignments(
        placement(), spans.slots, batch.tokens, top_k(), expert, [&](int64_t token, int64_t k) {
          if (token != last) {
            packet += packet_.bytes;
            std::byte* to = packet;
            for (const WireArray& array : arrays) {
              if (array.row_bytes > 0)
                std::memcpy(to, array.row(token), static_cast<size_t>(array.row_bytes));
              to += array.row_bytes;
            }
            std::memset(to, 0, static_cast<size_t>(packet + packet_.bytes - to));
            std::memset(packet + packet_.slots_at, 0xFF,
                        static_cast<size_t>(top_k()) * sizeof(int32_t));  // -1
            std::memcpy(packet + packet_.first_row_at, &rows, sizeof(rows));
            last = token;
          }
          const int64_t assignment = token * top_k() + k;
          std::memcpy(packet + packet_.slots_at + k * 4, &spans.slots[assignment], sizeof(int32_t));
          std::memcpy(packet + packet_.weights_at + k * 4, &batch.topk_weights[assignment],
                      sizeof(float));
          ++rows;
        });
    send_bytes_[static_cast<size_t>(expert)] = counts_.packets_between(me, expert) * packet_.bytes;
    recv_bytes_[static_cast<size_t>(expert)] = counts_.packets_between(expert, me) * packet_.bytes;
    message += send_bytes_[static_cast<size_t>(expert)];
  }
  return exchange().all_to_all_v(spans.send, send_bytes_, spans.recv, recv_bytes_);
}

Status HostAllToAll::take_tokens(const LayerBuffers& expert, const Spans& spans) const {
  const MoeConfig& config = source_.config;
  const auto arrays =
      wire_arrays(expert.routed.hidden, config->activation_format, config->hidden_size);
  const ExpertRange& range = layer_.weights().range;
  const std::byte* message = spans.recv;
  const int me = rank();
  int64_t at = 0;
  for (int from = 0; from < world(); ++from) {
    int64_t rows = 0;
    for (int64_t token = 0; token < counts_.tokens_between(from, me); ++token, ++at) {
      const std::byte* const packet = message + token * packet_.bytes;
      const std::byte* next = packet;
      for (const WireArray& array : arrays) {
        if (array.row_bytes > 0)
          std::memcpy(array.row(at), next, static_cast<size_t>(array.row_bytes));
        next += array.row_bytes;
      }
      const Status legal =
          check_received(expert.routed.hidden, config->activation_format, config->hidden_size, at);
      if (!legal.ok())
        return legal.in("token " + std::to_string(token) + " from rank " + std::to_string(from));
      std::memcpy(spans.ids + at * top_k(), packet + packet_.slots_at,
                  static_cast<size_t>(top_k()) * sizeof(int32_t));
      std::memcpy(spans.weights + at * top_k(), packet + packet_.weights_at,
                  static_cast<size_t>(top_k()) * sizeof(float));
      int32_t first_row = 0;
      std::memcpy(&first_row, packet + packet_.first_row_at, sizeof(first_row));
      if (first_row != rows)
        return {Code::kIo, "dispatch: expected a packet whose first row is " +
                               std::to_string(rows) + " from rank " + std::to_string(from) +
                               ", got " + std::to_string(first_row)};
      for (int64_t k = 0; k < top_k(); ++k) {
        const int32_t slot = spans.ids[at * top_k() + k];
        if (slot != -1 && !range.local(slot))
          return {Code::kIo, "dispatch: expected slots of rank " + std::to_string(me) + ", got " +
                                 std::to_string(slot) + " from rank " + std::to_string(from)};
        rows += slot != -1;
      }
    }
    if (rows != counts_.rows_between(from, me))
      return {Code::kIo, "dispatch: expected " + std::to_string(counts_.rows_between(from, me)) +
                             " rows for rank " + std::to_string(from) + ", got packets of " +
                             std::to_string(rows)};
    message += counts_.packets_between(from, me) * packet_.bytes;
  }
  return {};
}

Status HostAllToAll::send_rows(const LayerBuffers& expert, const Spans& spans) {
  const auto* const rows_out = static_cast<const std::byte*>(expert.routed.rows_out);
  const int me = rank();
  std::byte* message = spans.send_rows;
  int64_t assignment = 0;
  for (int to = 0; to < world(); ++to) {
    std::byte* row = message;
    for (const int64_t end = assignment + counts_.tokens_between(to, me) * top_k();
         assignment < end; ++assignment) {
      const int32_t from = expert.row_of_assignment[assignment];
      if (from < 0) continue;
      std::memcpy(row, rows_out + from * packet_.row_bytes, static_cast<size_t>(packet_.row_bytes));
      row += packet_.row_bytes;
    }
    send_bytes_[static_cast<size_t>(to)] = counts_.rows_back_between(to, me) * packet_.row_bytes;
    recv_bytes_[static_cast<size_t>(to)] = counts_.rows_back_between(me, to) * packet_.row_bytes;
    message += send_bytes_[static_cast<size_t>(to)];
  }
  return exchange().all_to_all_v(spans.send_rows, send_bytes_, spans.recv_rows, recv_bytes_);
}

void HostAllToAll::take_rows(const LayerBuffers& source, int64_t tokens, const Spans& spans) const {
  auto* const rows_out = static_cast<std::byte*>(source.routed.rows_out);
  const std::byte* message = spans.recv_rows;
  for (int expert = 0; expert < world(); ++expert) {
    const std::byte* row = message;
    for_assignments(placement(), spans.slots, tokens, top_k(), expert,
                    [&](int64_t token, int64_t k) {
                      const int32_t to = source.row_of_assignment[token * top_k() + k];
                      std::memcpy(rows_out + to * packet_.row_bytes, row,
                                  static_cast<size_t>(packet_.row_bytes));
                      row += packet_.row_bytes;
                    });
    message += counts_.rows_back_between(rank(), expert) * packet_.row_bytes;
  }
}

Status HostAllToAll::run(const Batch& batch, std::byte* workspace, void*) {
  const LayerSteps& steps = *layer_.backend().steps;
  const PackedWeights& weights = layer_.weights();
  const size_t guard_bytes = layer_.plan().limits.guard_bytes;
  const Spans s = spans(workspace, batch.tokens);

  Arena source_arena(s.source, guard_bytes);
  const LayerBuffers source =
      layer_buffers(source_.config, source_.range, batch.tokens, source_arena);
  Batch routed = batch;
  routed.topk_ids = s.slots;
  routed.ids_dtype = DType::kI32;
  const StepContext at_source{source_, routed, source, layer_.executor(), source_arena};
  NVFP4_MOE_TRY(steps.route(at_source));
  NVFP4_MOE_TRY(steps.quantize(at_source));
  NVFP4_MOE_TRY(send_tokens(source, batch, s));

  Batch taken;
  for (int from = 0; from < world(); ++from) taken.tokens += counts_.tokens_between(from, rank());
  taken.topk_ids = s.ids;
  taken.topk_weights = s.weights;
  Arena expert_arena(s.expert, guard_bytes);
  LayerBuffers expert = layer_buffers(weights.config, weights.range, taken.tokens, expert_arena);
  if (expert.shared.experts > 0)
    expert.shared.hidden = expert.routed.hidden;  // its tokens stay on their source rank
  NVFP4_MOE_TRY(take_tokens(expert, s));
  const StepContext at_expert{weights, taken, expert, layer_.executor(), expert_arena};
  NVFP4_MOE_TRY(steps.route(at_expert));
  NVFP4_MOE_TRY(multiply(steps, at_expert, expert.routed));
  NVFP4_MOE_TRY(send_rows(expert, s));

  take_rows(source, batch.tokens, s);
  // The shared expert uses this rank's own weights, and the arrays of the source rank's tokens.
  const StepContext shared{weights, routed, source, layer_.executor(), source_arena};
  if (source.shared.experts > 0) NVFP4_MOE_TRY(multiply(steps, shared, source.shared));
  NVFP4_MOE_TRY(steps.combine(at_source));
  *s.status = *source.status;
  add(*s.status, *expert.status);
  return {};
}

}  // namespace

Result<std::unique_ptr<RankCombine>> make_host_all_to_all(MoeLayer& layer, const Ranks& ranks) {
  return std::unique_ptr<RankCombine>(std::make_unique<HostAllToAll>(layer, ranks));
}

}  // namespace nvfp4_moe::internal
