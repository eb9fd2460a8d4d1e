// push_tokens (backend/device_peers.h): takes a small batch from expert ids to packets in the
// memory of all expert ranks. One kernel, because separate launches would take longer than the
// work.
//
// Each CTA has one token: it finds the slots, quantizes hidden as quantize does, and writes the
// packets. CTA 0 also begins the run as route does and clears the status. Since the others run
// meanwhile, each CTA keeps counts per token, and push_rows adds them. Latency is the limit:
// reading hidden, the link, and the fence between a packet and its flag.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/peer_packets.cuh"
#include "backend/cuda/exchange/peers.h"
#include "backend/cuda/exchange/slots.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kTokenThreads = 512;  // per token; the maximum

// Arrays that route would write on the source rank. Here no rows are routed.
struct SourceStart {
  RunStatus* status;
  int32_t* row_of_assignment;   // (T, k)
  int64_t* shared_row_offsets;  // (2), or null
  int32_t* cleared;             // (cleared_count), or null
  int32_t cleared_count;
};

struct TokenArgs {
  PushTokens call;
  SourceStart start;
  RowArgs rows;
  RowCounts* token_counts;  // (T)
};

// Called by CTA 0.
__device__ void begin_run(const TokenArgs& args) {
  const SlotsOfIds& slots = args.call.slots;
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < args.start.cleared_count; i += threads) args.start.cleared[i] = 0;
  int bad_ids = 0;
  const int64_t assignments = slots.tokens * slots.top_k;
  for (int64_t first = 0; first < assignments; first += threads) {
    const int64_t assignment = first + thread;
    bad_ids += __syncthreads_count(assignment < assignments &&
                                   is_no_expert(slots, id_of(slots, assignment)));
  }
  if (thread != 0) return;
  RunStatus status;
  status.bad_expert_ids = static_cast<uint64_t>(bad_ids);
  *args.start.status = status;
  if (args.start.shared_row_offsets == nullptr) return;
  args.start.shared_row_offsets[0] = 0;
  args.start.shared_row_offsets[1] = args.call.push.tokens;
}

// Returns whether the token has a slot.
__device__ bool put_slots(const TokenArgs& args, int64_t token) {
  bool any = false;
  const int64_t top_k = args.call.push.packet.top_k;
  for (int64_t k = threadIdx.x; k < top_k; k += blockDim.x) {
    const int32_t slot = put_slot(args.call.slots, token, k);
    const int64_t assignment = token * top_k + k;
    args.start.row_of_assignment[assignment] = slot < 0 ? -1 : static_cast<int32_t>(assignment);
    any |= slot >= 0;
  }
  return __syncthreads_or(any) != 0;
}

// Vec: the format, Vec8 of NVFP4 or E4m3Vec8; void: hidden is rounded to bf16.
template <class Vec>
__global__ void __launch_bounds__(kTokenThreads)
    push_tokens_kernel(const __grid_constant__ TokenArgs args) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const PushPackets& push = args.call.push;
  const int world = push.link.world;
  const int64_t token = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x);
  RowCounts& counts = args.token_counts[token];
  RowArgs rows = args.rows;
  rows.counters = {&counts.nonfinite, &counts.blocks, &counts.saturated, &counts.zeroed};
  uint4 first{};  // starts loading hidden while slots are found
  if constexpr (!std::is_void_v<Vec>) first = load_vec8(rows, token, thread);
  if (thread == 0) counts = RowCounts{};
  const bool has_row = put_slots(args, token) || args.start.shared_row_offsets != nullptr;
  if constexpr (std::is_void_v<Vec>)
    round_row<DType::kBf16>(rows, token, has_row);
  else if (has_row)
    quantize_vec8_row<Vec>(rows, token, first);
  else
    expect_row(rows, token, false, ThreadGroup::cta());
  // After this barrier all threads see the whole row.
  const bool late =
      __syncthreads_or(leaves_out(push.link.wait) ||
                       (thread < world && !packets_are_taken(push.link, thread))) != 0;
  if (token == 0 && thread == 0) {
    *push.failed = late ? kPeerIsLate : 0;
    begin_dispatch(push.link);
  }
  if (!late) {
    // Each group of warps writes the packets of one or more ranks.
    const int groups = max(1, min(world, static_cast<int>(blockDim.x) / kPacketThreads));
    const int threads = groups == 1 ? static_cast<int>(blockDim.x) : kPacketThreads;
    for (int ahead = thread / threads; ahead < world && thread < groups * threads; ahead += groups)
      push_packet(push, token, (push.link.rank + ahead) % world, {thread % threads, threads});
    __syncthreads();
    if (thread < world) flag_packet(push, token, thread);
  }
  if (token == 0) begin_run(args);
}

}  // namespace

bool pushes_tokens(const StepContext& source, const LayerSteps& steps) {
  const QuantizeKernel kernel = source.plan->hidden.kernel;
  return steps.counters != nullptr && source.batch.tokens > 0 &&
         source.batch.hidden_dtype == DType::kBf16 && !source.plan->scale_hidden &&
         source.batch.tokens <= kWaitingCtas &&
         (kernel == QuantizeKernel::kVec8Cta || kernel == QuantizeKernel::kRound);
}

Status push_tokens(const StepContext& source, const LayerSteps& steps, const PushTokens& call) {
  const bool shared = source.buffers.shared.experts > 0;
  TokenArgs args{
      call, {}, hidden_args(source, source.buffers.routed), Scratch(source).token_counts};
  args.start = {source.buffers.status, source.buffers.row_of_assignment,
                shared ? source.buffers.shared.row_offsets : nullptr, steps.counters(source),
                source.plan->route.cleared_counters};
  if (args.start.cleared == nullptr) args.start.cleared_count = 0;
  const auto ctas = static_cast<unsigned>(source.batch.tokens);
  const int threads = std::min(source.plan->hidden.threads, kTokenThreads);
  const auto launch_as = [&]<class Vec>() {
    return launch_on<push_tokens_kernel<Vec>>(source.weights.device, "push_tokens", ctas, threads,
                                              source.stream, args);
  };
  if (source.plan->hidden.kernel == QuantizeKernel::kRound)
    return launch_as.template operator()<void>();
  return is_fp8(source) ? launch_as.template operator()<E4m3Vec8>()
                        : launch_as.template operator()<Vec8>();
}

}  // namespace nvfp4_moe::internal::cuda
