// combine: rows_out (R, H), topk_weights (T, k) -> out (T, H).
//
// acc = fma(weight, row, acc) in fp32, from 0, in increasing k over the assignments that have a
// row; acc + row under before_down. Then the shared expert's row is added, and the result is
// rounded once to out's type. A token without rows gives zeros. The order is fixed, so the bits are
// those of every other backend.
//
// The kernel also counts nonfinite router weights of rows, and nonfinite elements of out. If the
// plan requests it, extra CTAs of the same kernel add up counts that no earlier step has. If rows
// come from other ranks, a token's CTAs wait for the rows of that token, and write NaN if the run
// has failed.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/awaited_rows.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kTokenThreads = kCombineThreads;
constexpr int kAssignmentsAtOnce = 8;  // rows that a thread reads at once
// Up to this many CTAs each read the host's failure word, which takes about as long as reading
// their rows. For more CTAs a separate kernel reads it once.
constexpr int64_t kCtasThatAskTheHost = 512;
// A device cannot call a constexpr function of the host, but can use its result.
template <DType kOut>
constexpr uint32_t kOverflowBits = overflow_bits(kOut);

struct CombineArgs {
  const void* rows;                  // (R, H) row_format
  const void* shared_rows;           // (T, H), or null
  const int32_t* row_of_assignment;  // (T, top_k)
  const float* weights;              // (T, top_k)
  const float* shared_weights;       // (T), or null
  void* out;                         // (T, H)
  int64_t tokens, top_k, hidden;
  bool multiply_by_weight;  // false: the rows are already weighted
};

// Arguments of the extra CTAs, which add up counts.
struct CountArgs {
  RunStatus* status;
  const RowCounts* token_counts;  // (T) from quantize, or null
  struct Intermediate {
    const uint16_t* bf16;      // (R, k), or null
    const uint8_t* flags;      // (R) 1 if the row is nonfinite; null: read the values
    const int64_t* row_count;  // R
    int64_t k;
  } parts[2];
};

__device__ void add(uint64_t& counter, uint64_t value) {
  if (value != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
              static_cast<unsigned long long>(value));
}

// Reads from L2, since L1 may hold older values: this kernel has not waited yet.
__device__ RowCounts from_l2(const RowCounts* counts) {
  const auto* const halves = reinterpret_cast<const ulonglong2*>(counts);
  const ulonglong2 first = __ldcg(halves), second = __ldcg(halves + 1);
  return {first.x, first.y, second.x, second.y};
}

// A warp takes a row, or the flags of 32 rows. With few tokens a CTA takes a row, so that a long
// row is read at once. One warp adds up quantize's counts. The results of route and quantize are
// complete before this kernel waits: see combine_tokens.
template <bool kSmall>
__device__ void count(const CountArgs& args, int64_t tokens, int64_t cta, int64_t ctas) {
  constexpr int kReaders = kSmall ? kTokenThreads : 32;  // threads per row
  const int lane = static_cast<int>(threadIdx.x % 32),
            reader = static_cast<int>(threadIdx.x) % kReaders;
  const int64_t warp = cta * (kTokenThreads / 32) + threadIdx.x / 32,
                warps = ctas * (kTokenThreads / 32);
  int64_t row_counts[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    row_counts[i] = args.parts[i].bf16 != nullptr ? __ldcg(args.parts[i].row_count) : 0;
  if (warp == 0 && args.token_counts != nullptr) {
    RowCounts sum{};
    for (int64_t t = lane; t < tokens; t += 32) {
      const RowCounts own = from_l2(args.token_counts + t);
      sum.nonfinite += own.nonfinite, sum.blocks += own.blocks;
      sum.saturated += own.saturated, sum.zeroed += own.zeroed;
    }
    add(args.status->nonfinite_tokens, sum.nonfinite);
    add(args.status->hidden_blocks, sum.blocks);
    add(args.status->hidden_saturated, sum.saturated);
    add(args.status->hidden_zeroed, sum.zeroed);
  }
  ptx::grid_dependency_wait();
  uint64_t nonfinite = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const CountArgs::Intermediate& part = args.parts[i];
    const int64_t rows = row_counts[i];
    if (!kSmall && part.flags != nullptr) {
      for (int64_t first = warp * 32; first < rows; first += warps * 32)
        nonfinite += __popc(
            __ballot_sync(0xFFFFFFFFu, first + lane < rows && part.flags[first + lane] != 0));
      continue;
    }
    for (int64_t row = kSmall ? cta : warp; row < rows; row += kSmall ? ctas : warps) {
      bool bad = false;
#pragma unroll 4
      for (int64_t i = reader * 8; i < part.k; i += kReaders * 8) {
        const uint4 vec8 = *reinterpret_cast<const uint4*>(part.bf16 + row * part.k + i);
        for (uint32_t two : {vec8.x, vec8.y, vec8.z, vec8.w})
          bad |= (two & 0x7F80u) == 0x7F80u || (two & 0x7F800000u) == 0x7F800000u;
      }
      nonfinite += (kSmall ? __syncthreads_or(bad) : __any_sync(0xFFFFFFFFu, bad)) != 0;
    }
  }
  if (reader == 0) add(args.status->nonfinite_rows, nonfinite);
}

template <int kBytes>
struct VectorOf {
  using Type = uint4;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};

template <DType kOut, int kChannels>
__device__ void store_channels(void* out, int64_t at, const float (&values)[kChannels]) {
  constexpr int kBytes = kChannels * (kOut == DType::kF32 ? 4 : 2);
  if (reinterpret_cast<uintptr_t>(out) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) store_element<kOut>(out, at + i, values[i]);
    return;
  }
  __align__(16) uint8_t bytes[kBytes];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) store_element<kOut>(bytes, i, values[i]);
  using Vector = typename VectorOf<kBytes>::Type;
  auto* const to =
      reinterpret_cast<Vector*>(static_cast<uint8_t*>(out) + at * (kBytes / kChannels));
#pragma unroll
  for (int i = 0; i < kBytes / static_cast<int>(sizeof(Vector)); ++i)
    to[i] = reinterpret_cast<const Vector*>(bytes)[i];
}

template <DType kOut, int kChannels>
__device__ void count_outputs(uint64_t& counter, const float (&values)[kChannels]) {
  uint32_t nonfinite = 0;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) nonfinite += magnitude_bits(values[i]) >= kOverflowBits<kOut>;
  add(counter, nonfinite);
}

// A thread's channels of a row, kept in the stored format, so that all reads can be in flight
// before the first value is needed.
template <DType kRow, int kChannels>
struct Channels {
  static constexpr int kBytes = kChannels * (kRow == DType::kF32 ? 4 : 2);
  using Vector = typename VectorOf<kBytes>::Type;
  static constexpr int kVectors = kBytes / static_cast<int>(sizeof(Vector));
  Vector vectors[kVectors];

  __device__ void read(const void* rows, int64_t first) {
    const auto* const from = reinterpret_cast<const Vector*>(rows) + first * kVectors / kChannels;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = __ldcg(from + i);
  }
  __device__ float value(int channel) const { return load_element<kRow>(vectors, channel); }
};

// Up to kAssignmentsAtOnce assignments of a token: the row of each, or -1, and its weight.
struct Assignments {
  int32_t rows[kAssignmentsAtOnce];
  float weights[kAssignmentsAtOnce];

  __device__ Assignments(const CombineArgs& args, int64_t token, int64_t first) {
#pragma unroll
    for (int i = 0; i < kAssignmentsAtOnce; ++i) {
      const int64_t assignment = token * args.top_k + first + i;
      const bool there = first + i < args.top_k;
      rows[i] = there ? __ldcg(args.row_of_assignment + assignment) : -1;
      weights[i] = there ? __ldcg(args.weights + assignment) : 1.0f;
    }
  }
  __device__ uint32_t nonfinite_weights() const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kAssignmentsAtOnce; ++i)
      count += rows[i] >= 0 && magnitude_bits(weights[i]) >= kInfBits;
    return count;
  }
};

// A CTA takes a token. It handles kTokenThreads * kChannels channels at a time, every gridDim.y-th
// such group. kAwaited: rows come from other ranks.
template <DType kRow, DType kOut, int kChannels, bool kAwaited>
__global__ void __launch_bounds__(kTokenThreads, kAwaited ? 3 : 0)
    combine_tokens(CombineArgs args, const __grid_constant__ CountArgs counts,
                   const __grid_constant__ AwaitedRows awaited) {
  ptx::launch_dependents();
  if (blockIdx.x >= args.tokens) {
    const int64_t cta = (blockIdx.x - args.tokens) * gridDim.y + blockIdx.y;
    count<kChannels == kSmallCombineChannels>(counts, args.tokens, cta,
                                              (gridDim.x - args.tokens) * gridDim.y);
    return;
  }
  const int64_t token = blockIdx.x;
  // route has ended before gemm1 lets any kernel start.
  Assignments assignments(args, token, 0);
  if (!kAwaited || awaited.flags == nullptr || args.shared_rows != nullptr)
    ptx::grid_dependency_wait();
  bool failed = false;
  if constexpr (kAwaited) failed = rows_failed(awaited, args.row_of_assignment, token, args.top_k);
  const auto count_weights = [&](uint32_t nonfinite) {
    add(counts.status->nonfinite_weights, nonfinite);
  };
  const auto combine_channels = [&](int32_t channel) {
    float acc[kChannels] = {};
    for (int64_t first = 0; first < args.top_k; first += kAssignmentsAtOnce) {
      if (args.top_k > kAssignmentsAtOnce) assignments = Assignments(args, token, first);
      if (channel == 0) count_weights(assignments.nonfinite_weights());  // once per token
      Channels<kRow, kChannels> read[kAssignmentsAtOnce];
#pragma unroll
      for (int i = 0; i < kAssignmentsAtOnce; ++i)
        if (assignments.rows[i] >= 0)
          read[i].read(args.rows, assignments.rows[i] * args.hidden + channel);
#pragma unroll
      for (int i = 0; i < kAssignmentsAtOnce; ++i) {
        if (assignments.rows[i] < 0) continue;
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
          acc[c] = args.multiply_by_weight ? fmaf(assignments.weights[i], read[i].value(c), acc[c])
                                           : acc[c] + read[i].value(c);
      }
    }
    if (args.shared_rows != nullptr) {
      Channels<kRow, kChannels> read;
      read.read(args.shared_rows, token * args.hidden + channel);
      const float weight = args.shared_weights != nullptr ? args.shared_weights[token] : 1.0f;
      if (channel == 0) count_weights(magnitude_bits(weight) >= kInfBits);
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        acc[c] = args.shared_weights != nullptr ? fmaf(weight, read.value(c), acc[c])
                                                : acc[c] + read.value(c);
    }
    if (kAwaited && failed) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) acc[c] = __uint_as_float(0x7FC00000u);
    }
    uint32_t largest = 0;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) largest = max(largest, magnitude_bits(acc[c]));
    if (largest >= kOverflowBits<kOut>) count_outputs<kOut>(counts.status->nonfinite_outputs, acc);
    store_channels<kOut>(args.out, token * args.hidden + channel, acc);
  };
  const auto hidden = static_cast<int32_t>(args.hidden);
  auto channel = static_cast<int32_t>((blockIdx.y * kTokenThreads + threadIdx.x) * kChannels);
  if constexpr (kChannels == kSmallCombineChannels) {
    if (channel < hidden) combine_channels(channel);
  } else {
#pragma unroll 1
    for (; channel < hidden; channel += static_cast<int32_t>(gridDim.y) * kTokenThreads * kChannels)
      combine_channels(channel);
  }
  if (kAwaited) ptx::grid_dependency_wait();
}

// Waits until every rank's push_rows has reported `taken`. The CTA that reports it is the last of
// its grid, so all CTAs that send rows have started by then. If a rank is late, the token's CTA
// detects that again without delay.
__global__ void __launch_bounds__(32)
    await_rows_kernel(const __grid_constant__ AwaitedRows awaited) {
  const auto rank = static_cast<int>(threadIdx.x);
  const PeerControl* const own = awaited.wait.control;
  if (rank < awaited.world) {
    const uint64_t dispatch = word_from_l2(own->dispatch);
    wait_for_rank(
        awaited.wait, [&] { return rank; },
        [&] { return ptx::load_acquire_system(&own->taken[rank]) >= dispatch; });
  }
  __syncwarp();
  // only now, so that dependent CTAs do not occupy the device while they wait
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
}

// Copies the host's failure word to the run's, for a combine with many CTAs.
__global__ void __launch_bounds__(32)
    take_link_failure_kernel(const __grid_constant__ AwaitedRows awaited) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (threadIdx.x == 0 && ptx::load_volatile(awaited.link_failed) != 0)
    atomicOr(awaited.failed, kLinkFailed);
}

CountArgs count_args(const StepContext& step) {
  const CombinePlan& plan = step.plan->combine;
  CountArgs counts{};
  counts.status = step.buffers.status;
  if (plan.counts_hidden) counts.token_counts = Scratch(step).token_counts;
  if (!plan.counts_intermediate) return counts;
  int index = 0;
  for (const PartBuffers* part : {&step.buffers.routed, &step.buffers.shared}) {
    if (part->experts == 0) continue;
    const bool reported = part == &step.buffers.routed && plan.reads_flags;
    counts.parts[index++] = {part->intermediate.bf16,
                             reported ? part->intermediate.nonfinite : nullptr,
                             part->row_offsets + part->experts, part->intermediate_size};
  }
  return counts;
}

}  // namespace

Status combine(const StepContext& step) {
  const Batch& batch = step.batch;
  const MoeConfig& config = step.weights.config;
  const CombinePlan& plan = step.plan->combine;
  if (batch.tokens == 0) return {};
  CombineArgs args{};
  args.rows = step.buffers.routed.rows_out;
  args.shared_rows = step.buffers.shared.experts > 0 ? step.buffers.shared.rows_out : nullptr;
  args.row_of_assignment = step.buffers.row_of_assignment;
  args.weights = batch.topk_weights;
  args.multiply_by_weight = config->router_weight == RouterWeight::kAfterDown;
  args.shared_weights = batch.shared_weights;
  args.out = batch.out;
  args.tokens = batch.tokens;
  args.top_k = config->top_k;
  args.hidden = config->hidden_size;
  const CountArgs counts = count_args(step);
  const bool awaits = step.awaited != nullptr, small = plan.channels == kSmallCombineChannels;
  AwaitedRows awaited = awaits ? *step.awaited : AwaitedRows{};
  dim3 grid(static_cast<unsigned>(batch.tokens + plan.counting_ctas),
            static_cast<unsigned>(plan.ctas_per_token));
  if (awaits && small)
    grid.y = static_cast<unsigned>(
        ceil_div(args.hidden, int64_t{kTokenThreads} * kLargeCombineChannels));
  if (awaited.flags != nullptr && int64_t{grid.x} * grid.y > kWaitingCtas)
    NVFP4_MOE_TRY(launch<await_rows_kernel>("await_rows", 1u, 32, 0, step.stream, awaited));
  if (awaited.link_failed != nullptr && int64_t{grid.x} * grid.y > kCtasThatAskTheHost) {
    NVFP4_MOE_TRY(
        launch<take_link_failure_kernel>("take_link_failure", 1u, 32, 0, step.stream, awaited));
    awaited.link_failed = nullptr;
  }
  return with_dtype(batch.out_dtype, [&](auto out) {
    const auto launch_as = [&]<DType kRow, int kChannels, bool kAwaited>() {
      return launch<combine_tokens<kRow, out.value, kChannels, kAwaited>>(
          "combine", grid, kTokenThreads, 0, step.stream, args, counts, awaited);
    };
    const auto of_rows = [&]<DType kRow>() {
      if (awaits) return launch_as.template operator()<kRow, kLargeCombineChannels, true>();
      return small ? launch_as.template operator()<kRow, kSmallCombineChannels, false>()
                   : launch_as.template operator()<kRow, kLargeCombineChannels, false>();
    };
    return config->row_format == RowFormat::kBf16 ? of_rows.template operator()<DType::kBf16>()
                                                  : of_rows.template operator()<DType::kF32>();
  });
}

}  // namespace nvfp4_moe::internal::cuda
