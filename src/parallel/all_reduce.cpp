// The parts of a run by all-reduce that all transports share, and the sum on hosts.
#include "parallel/all_reduce.h"

#include <bit>
#include <string>

#include "core/arena.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

// Rounds values (count) fp32 to out, each once. Returns how many are NaN or Inf as stored.
uint64_t store(const float* values, int64_t count, DType dtype, void* out) {
  uint64_t nonfinite = 0;
  const uint32_t overflow = overflow_bits(dtype);
  for (int64_t i = 0; i < count; ++i) {
    nonfinite += (std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFu) >= overflow;
    if (dtype == DType::kF32)
      static_cast<float*>(out)[i] = values[i];
    else
      static_cast<uint16_t*>(out)[i] =
          dtype == DType::kBf16 ? bf16_from_float(values[i]) : fp16_from_float(values[i]);
  }
  return nonfinite;
}

}  // namespace

AllReduce::Spans AllReduce::spans(std::byte* workspace, int64_t tokens) const {
  Arena arena(workspace, layer_.plan().limits.guard_bytes);
  Spans spans;
  spans.status = arena.take<RunStatus>("", "status", 1);
  spans.failed = arena.take<uint32_t>("", "failed", 1);
  spans.slots = arena.take<int32_t>("", "slots", tokens * top_k());
  spans.partial = arena.take<float>("", "partial", tokens * config()->hidden_size);
  spans.parts = arena.take<float>("", "parts", parts_values(tokens));
  spans.inner_bytes = layer_.local_workspace_bytes(tokens);
  spans.inner = arena.take<std::byte>("", "inner", static_cast<int64_t>(spans.inner_bytes));
  spans.size_bytes = arena.size_bytes();
  return spans;
}

Status AllReduce::begin(const Batch& batch, std::byte*, void* stream, Status mine) {
  bool captured = false;
  if (const DeviceMemory* const memory = layer_.backend().memory; memory != nullptr && mine.ok()) {
    const Result<uint64_t> capture = memory->capture_id(stream);
    mine = capture.status();
    captured = capture.ok() && *capture != 0;
  }
  NVFP4_MOE_TRY(counts_.gather(exchange(), batch.tokens, mine, captured));
  for (int rank = 1; rank < world(); ++rank)
    if (counts_.tokens(rank) != counts_.tokens(0))
      return invalid_argument("tokens of rank " + std::to_string(rank) + ": expected " +
                              std::to_string(counts_.tokens(0)) + " as on rank 0, got " +
                              std::to_string(counts_.tokens(rank)));
  return {};
}

Status AllReduce::run(const Batch& batch, std::byte* workspace, void* stream) {
  const Spans s = spans(workspace, batch.tokens);
  // All ranks have the same tokens, so all use source rank 0 for turns.
  NVFP4_MOE_TRY(slots_->translate(batch, 0, s.slots, stream));
  Batch mine = batch;
  mine.topk_ids = s.slots;
  mine.ids_dtype = DType::kI32;
  if (layer_.weights().config->shared_intermediate_size == 0) mine.shared_weights = nullptr;
  mine.out = s.partial;
  mine.out_dtype = DType::kF32;
  // on hosts, sum copies it
  RunStatus* const status = layer_.backend().memory == nullptr ? nullptr : s.status;
  NVFP4_MOE_TRY(layer_.run_local(mine, s.inner, s.inner_bytes, stream, status));
  return sum(batch, s, stream);
}

Status HostAllReduce::sum(const Batch& batch, const Spans& s, void*) {
  const int64_t values = batch.tokens * config()->hidden_size;
  NVFP4_MOE_TRY(exchange().all_reduce(s.partial, values, DType::kF32));
  *s.status = *reinterpret_cast<const RunStatus*>(s.inner);
  s.status->nonfinite_outputs = store(s.partial, values, batch.out_dtype, batch.out);
  return {};
}

}  // namespace nvfp4_moe::internal
