// The layer of a few tokens in one launch: route, gemm1_swiglu, gemm2 and combine.
//
// With few tokens and small experts a layer is launch latency, not bandwidth. So one kernel with
// one cta per multiprocessor does all of it. Every cta routes the batch itself and owns a share of
// both GEMMs: `units` of 16 weight rows of gate/up of the experts with rows, and 16 output channels
// of down for all of these experts. Weights depend on no other cta, so a warp copies its share of
// both GEMMs through its own ring in shared memory, in one sequence of pieces of 16 weight rows x
// 128 k, without a barrier of the cta. Between the GEMMs the grid waits once: then the intermediate
// of all ctas is in L2. Since a cta has an output channel of all experts, it adds them in the order
// of k itself.
//
//   gate/up   `unit_warps` warps share a unit along K: partial sums in shared memory, the
//             activation, bf16 intermediate to global memory in the order of B fragments
//   down      `down_warps` warps share an expert along K; partial sums in shared memory by
//             assignment; then each row's sum, its rounding to row_format, and combine
//
// Products are mma.m16n8k16 of weights (16 rows) and tokens (8 columns).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/atomic.cuh"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/decode_batch.cuh"
#include "backend/sm90/decode_weights.cuh"

namespace nvfp4_moe::internal::sm90 {

// ---- the grid

// Waits until every cta of the grid has arrived, and makes their writes visible. Bit 31 of the
// counter flips when all have: the first cta adds what the others leave to 2^31. The counter needs
// no reset, and any number of launches may use it one after the other. Two grids that use it never
// overlap before their barrier: all ctas of a grid are resident when it begins (a cooperative
// launch, of one cta per multiprocessor), so a second grid finds room only once ctas of the first
// have ended, and these have passed it.
// Called by one thread, after a barrier of its cta.
__device__ inline void wait_for_grid(uint32_t* counter) {
  const uint32_t add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  const uint32_t before = cuda::ptx::atomic_add_acq_rel(counter, add);
  while (((cuda::ptx::load_acquire(counter) ^ before) & 0x80000000u) == 0) {
  }
}

__device__ uint32_t decode_grid_counter = 0;

// ---- gate and up

// Row of the intermediate of an assignment.
__device__ inline uint16_t* decode_row(const DecodeArgs& args, int32_t assignment) {
  const auto routed = static_cast<int32_t>(args.ids.assignments);
  return assignment < routed
             ? args.routed.rows + int64_t{assignment} * args.routed.row_elems
             : args.shared.rows + int64_t{assignment - routed} * args.shared.row_elems;
}

// kColumns: tokens whose sums are kept: 1, 2, 4 or 8.
template <bool kGated, int kColumns>
struct DecodeGateUp {
  static constexpr int kBatch = 8 / kColumns;  // units between two barriers of a team
  static constexpr int kSums = 16 * kColumns;  // of a unit and a warp
  static constexpr int kChannels = kGated ? 8 : 16;
  static constexpr int kPartialBytes = 2 * kDecodeWarps * kBatch * kSums * 4;

  // partials: (2, 16 warps, kBatch, kSums)
  __device__ static void run(const DecodeArgs& args, const DecodeShare& share,
                             const DecodeRouting& routing, const uint8_t* x, int32_t row_bytes,
                             float* partials, DecodeRing& ring) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32),
               warp = static_cast<int32_t>(threadIdx.x / 32);
    const int32_t q = lane % 4, r = lane / 4;
    const uint8_t* const own_row =
        x + (kColumns == 1 || r >= args.tokens ? 0 : r) * row_bytes + q * 16;
    Bf16Products::Constants constants;
    constants.pin();
    const int32_t teams = unit_teams(args), members = 1 << args.unit_shift;
    DecodeUnit at(args, share, share.first_unit + share.unit_team);
    int buffer = 0;
#pragma unroll 1
    for (int32_t first = share.first_unit + share.unit_team; first < share.last_unit;
         first += teams * kBatch) {
      DecodeUnit unit = at;
      int32_t index = first;
#pragma unroll 1
      for (int i = 0; i < kBatch && index < share.last_unit; ++i, index += teams) {
        DecodeSums sums;
#pragma unroll 1
        for (int32_t k_tile = share.unit_member; k_tile < args.k_tiles; k_tile += members) {
          Bf16Products::Weights weights[2];
          DecodeColumns columns;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            columns.words[j] = *reinterpret_cast<const uint4*>(own_row + (k_tile * 4 + j) * 64);
          ring.take<false>(weights);
          sums.multiply(weights, columns, constants);
        }
        float* const to = partials + ((buffer * kDecodeWarps + warp) * kBatch + i) * kSums;
        if constexpr (kColumns == 1) {
          if (q == 0) to[r] = sums.at(0), to[r + 8] = sums.at(2);
        } else if (q * 2 < kColumns) {
          float* const own = to + r * kColumns + q * 2;
          *reinterpret_cast<float2*>(own) = make_float2(sums.at(0), sums.at(1));
          *reinterpret_cast<float2*>(own + 8 * kColumns) = make_float2(sums.at(2), sums.at(3));
        }
        unit.advance(args, share, teams);
      }
      if (members == 1)
        __syncwarp();
      else
        cuda::ptx::named_barrier_sync(1 + share.unit_team, members * 32);
      finish(args, share, routing, at, first,
             partials +
                 (buffer * kDecodeWarps + (share.unit_team << args.unit_shift)) * kBatch * kSums);
      at = unit;
      buffer ^= 1;
    }
  }

  // The team's outputs of a batch of units. Several lanes add the partial sums of one output.
  __device__ static void finish(const DecodeArgs& args, const DecodeShare& share,
                                const DecodeRouting& routing, const DecodeUnit& first_unit,
                                int32_t first, const float* partials) {
    constexpr int kOutputs = kBatch * kChannels * kColumns;
    const int32_t teams = unit_teams(args), members = 1 << args.unit_shift;
    const int32_t thread = static_cast<int32_t>(threadIdx.x) & (members * 32 - 1),
                  adder_shift = max(args.unit_shift - 1, 0), adders = 1 << adder_shift,
                  adder = thread & (adders - 1);
#pragma unroll 1
    for (int32_t output = thread >> adder_shift; output < kOutputs;
         output += (members * 32) >> adder_shift) {
      const int32_t in_batch = output / (kChannels * kColumns),
                    channel_of_unit = output / kColumns % kChannels, token = output % kColumns;
      float gate = 0, up = 0;
#pragma unroll 1
      for (int32_t member = adder; member < members; member += adders) {
        const float* const from = partials + (member * kBatch + in_batch) * kSums;
        if constexpr (kGated) gate += from[channel_of_unit * kColumns + token];
        up += from[(channel_of_unit + (kGated ? 8 : 0)) * kColumns + token];
      }
#pragma unroll 1
      for (int32_t distance = adders / 2; distance > 0; distance /= 2) {
        if constexpr (kGated) gate += __shfl_xor_sync(cuda::kAllLanes, gate, distance);
        up += __shfl_xor_sync(cuda::kAllLanes, up, distance);
      }
      if (adder != 0 || first + in_batch * teams >= share.last_unit || token >= args.tokens)
        continue;
      DecodeUnit unit = first_unit;
      unit.advance(args, share, in_batch * teams);
      const int32_t assignment = routing.rows[unit.place][token];
      if (assignment < 0) continue;
      store(args, share, routing, unit, channel_of_unit, token, assignment, gate, up);
    }
  }

  __device__ static void store(const DecodeArgs& args, const DecodeShare& share,
                               const DecodeRouting& routing, const DecodeUnit& unit,
                               int32_t channel_of_unit, int32_t token, int32_t assignment,
                               float gate, float up) {
    constexpr float kFactor = Bf16Products::kAccumulatorFactor;
    const DecodePart& part = part_of(args, share, unit.place);
    const DecodeScales& scales = routing.scales[unit.place];
    const int32_t channel = unit.unit * kChannels + channel_of_unit;
    // a nonfinite token's rows are NaN
    const float scale =
        (routing.nonfinite_tokens >> token & 1) != 0 ? __uint_as_float(0x7FC00000u) : 1.0f;
    float value;
    if constexpr (kGated) {
      const cuda::LaneBiases bias = part.gemm1_biases.of(
          routing.place_experts[unit.place], static_cast<uint32_t>(channel), part.channels);
      value = args.activation.gated<false>(fmaf(gate * kFactor, scale * scales.gate, bias.first),
                                           fmaf(up * kFactor, scale * scales.up, bias.second));
    } else {
      const float bias =
          part.gemm1_biases
              .of(routing.place_experts[unit.place], static_cast<uint32_t>(channel), part.channels)
              .first;
      value = cuda::relu2(fmaf(up * kFactor, scale * scales.up, bias));
    }
    if (args.before_down && unit.place < share.places) value *= routing.weights[assignment];
    uint16_t* const row = decode_row(args, assignment);
    row[fragment_element(channel)] = cuda::bf16_from_float(value);
    // the rest of the row's last 32 elements is multiplied too
    if (part.row_elems != part.channels && channel >= part.channels - 16)
      row[fragment_element(channel + 16)] = 0;
  }
};

// ---- down and combine

// A device cannot call a constexpr function of the host, but can use its result.
template <DType kOut>
constexpr uint32_t kDecodeOverflowBits = overflow_bits(kOut);

__device__ inline void count_one(uint64_t& counter) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&counter), 1ull);
}

struct DecodeDown {
  const DecodeArgs& args;
  const DecodeShare& share;
  const DecodeRouting& routing;
  uint8_t* x;       // the intermediate's rows: (assignments, row bytes), then the shared expert's
  float* partials;  // (2, rows, warps that share an expert, 16)
  int32_t routed, rows;  // assignments; with those of the shared expert

  __device__ uint8_t* row_of(int32_t assignment) const {
    const int32_t bytes = decode_row_bytes(args.routed.down_k_tiles);
    return assignment < routed
               ? x + assignment * bytes
               : x + routed * bytes +
                     (assignment - routed) * decode_row_bytes(args.shared.down_k_tiles);
  }
  // Sets the elements of all rows beyond I to 0: they are multiplied too.
  __device__ void pad_rows() const {
    for (int32_t row = static_cast<int32_t>(threadIdx.x / 32); row < rows; row += kDecodeWarps) {
      const DecodePart& part = row < routed ? args.routed : args.shared;
      for (int32_t i = part.row_elems / 8 + static_cast<int32_t>(threadIdx.x % 32);
           i < part.down_k_tiles * (cuda::kTileK / 8); i += 32)
        reinterpret_cast<uint4*>(row_of(row))[i] = uint4{};
    }
  }
  // Waits for the grid, and starts the copies of all rows. Called by one warp.
  __device__ void fetch_rows() const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const uint32_t full = cuda::ptx::shared_address(&routing.rows_full);
    if (lane == 0) {
      wait_for_grid(&decode_grid_counter);
      cuda::ptx::fence_proxy_async();
      cuda::ptx::mbarrier_arrive_expect_tx(
          full, static_cast<uint32_t>(
                    (routing.row_count * args.routed.row_elems +
                     (args.shared.units > 0 ? args.tokens * args.shared.row_elems : 0)) *
                    2));
    }
    __syncwarp();
    const uint64_t policy = cuda::ptx::create_policy_evict_normal();
#pragma unroll 1
    for (int32_t assignment = lane; assignment < rows; assignment += 32)
      if (routing.place_of[assignment] >= 0)
        cuda::ptx::copy_bulk(
            cuda::ptx::shared_address(row_of(assignment)), decode_row(args, assignment),
            static_cast<uint32_t>(
                (assignment < routed ? args.routed.row_elems : args.shared.row_elems) * 2),
            full, policy);
  }

  // Counts nonfinite rows, each in one cta.
  __device__ void check_rows() const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32),
               warp = kDecodeWarps - 1 - static_cast<int32_t>(threadIdx.x / 32);
    const auto ctas = static_cast<int32_t>(gridDim.x);
#pragma unroll 1
    for (int32_t row = static_cast<int32_t>(blockIdx.x) + warp * ctas; row < rows;
         row += kDecodeWarps * ctas) {
      if (routing.place_of[row] < 0) continue;
      const int32_t vectors = (row < routed ? args.routed : args.shared).row_elems / 8;
      bool nonfinite = false;
      for (int32_t i = lane; i < vectors; i += 32)
        nonfinite |= any_nonfinite(reinterpret_cast<const uint4*>(row_of(row))[i]);
      if (__any_sync(cuda::kAllLanes, nonfinite) && lane == 0)
        count_one(args.status->nonfinite_rows);
    }
  }

  __device__ void store(const DecodeSums& sums, int buffer, int32_t place) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, r = lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t assignment = routing.rows[place][q * 2 + i];
      if (assignment < 0) continue;
      float* const to =
          partials + (((buffer * rows + assignment) << args.down_shift) + share.down_member) * 16;
      to[r] = sums.at(i), to[r + 8] = sums.at(2 + i);
    }
  }

  // A cta's partial sums of a block -> the rows' rounded values, in place of the first partial sum.
  // An assignment without a row becomes -0, which adds nothing.
  __device__ void round_rows(int buffer, int32_t block) const {
#pragma unroll 1
    for (auto i = static_cast<int32_t>(threadIdx.x); i < rows * 16; i += kDecodeThreads) {
      const int32_t assignment = i / 16, channel = i % 16, place = routing.place_of[assignment];
      float* const at = partials + ((buffer * rows + assignment) << args.down_shift) * 16 + channel;
      float value = -0.0f;
      if (place >= 0) {
        float sum = at[0];
#pragma unroll 1
        for (int32_t member = 1; member < 1 << args.down_shift; ++member) sum += at[member * 16];
        const cuda::LaneBiases bias =
            part_of(args, share, place)
                .down_biases.of(routing.place_experts[place],
                                static_cast<uint32_t>(block * 16 + channel), args.hidden_size);
        value =
            fmaf(sum * Bf16Products::kAccumulatorFactor, routing.scales[place].down, bias.first);
        if (!args.rows_fp32) value = cuda::bf16_to_float(cuda::bf16_from_float(value));
      }
      *at = value;
    }
  }

  template <DType kOut>
  __device__ void combine(int buffer, int32_t block) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread >= args.tokens * 16) return;
    const int32_t token = thread / 16, channel = thread % 16, first = token * args.top_k;
    const float* const values = partials + ((buffer * rows) << args.down_shift) * 16 + channel;
    float acc = 0;
#pragma unroll 4
    for (int32_t k = 0; k < args.top_k; ++k) {
      const float row = values[((first + k) << args.down_shift) * 16];
      acc = args.before_down ? acc + row : fmaf(routing.weights[first + k], row, acc);
    }
    if (args.shared.units > 0) {
      const float row = values[((routed + token) << args.down_shift) * 16];
      acc = args.shared_weights != nullptr ? fmaf(routing.weights[routed + token], row, acc)
                                           : acc + row;
    }
    if (cuda::magnitude_bits(acc) >= kDecodeOverflowBits<kOut>)
      count_one(args.status->nonfinite_outputs);
    cuda::store_element<kOut>(args.out, int64_t{token} * args.hidden_size + block * 16 + channel,
                              acc);
  }

  __device__ void run(DecodeRing& ring) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, token = lane / 4, members = 1 << args.down_shift;
    Bf16Products::Constants constants;
    constants.pin();
    if (threadIdx.x < 32) fetch_rows();
    cuda::ptx::mbarrier_wait(cuda::ptx::shared_address(&routing.rows_full), 0);
    int buffer = 0;
#pragma unroll 1
    for (int32_t block = share.first_block; block < share.last_block; ++block, buffer ^= 1) {
#pragma unroll 1
      for (int32_t place = share.down_team; place < share.all_places; place += down_teams(args)) {
        const DecodePart& part = part_of(args, share, place);
        // A token without this place reads another's row; its sums are not stored.
        int32_t assignment = routing.rows[place][token];
        const int32_t another = __reduce_max_sync(cuda::kAllLanes, assignment);
        if (assignment < 0) assignment = another;
        const uint8_t* const own_row = row_of(assignment) + q * 16;
        DecodeSums sums;
#pragma unroll 1
        for (int32_t k_tile = share.down_member; k_tile < part.down_k_tiles; k_tile += members) {
          DecodeColumns columns;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            columns.words[i] = *reinterpret_cast<const uint4*>(own_row + (k_tile * 4 + i) * 64);
          Bf16Products::Weights weights[2];
          ring.take<true>(weights);
          sums.multiply(weights, columns, constants);
        }
        store(sums, buffer, place);
      }
      __syncthreads();
      round_rows(buffer, block);
      __syncthreads();
      switch (args.out_dtype) {
        case DType::kF32: combine<DType::kF32>(buffer, block); break;
        case DType::kF16: combine<DType::kF16>(buffer, block); break;
        default: combine<DType::kBf16>(buffer, block);
      }
    }
    check_rows();
  }
};

template <bool kGated, int kColumns>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    sm90_decode_kernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(128) uint8_t decode_shared[];
  __shared__ DecodeRouting routing;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  uint8_t* const x = decode_shared + kDecodeRingBytes + args.partial_bytes;
  auto* const partials = reinterpret_cast<float*>(decode_shared + kDecodeRingBytes);
  const int32_t row_bytes = decode_row_bytes(args.k_tiles);
  cuda::ptx::prefetch_parameters(args);
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();
  // Hidden is requested before the weights: it would wait for them in the memory system.
  if (thread < 32) {
    // a cta that has just started waits for each of its instructions to be fetched
    if (args.ids.assignments <= 32)
      route_decode<1>(args, routing);
    else
      route_decode<kDecodeAssignments / 32>(args, routing);
  } else {
    const auto read = [&]<DType kType>() {
      return read_hidden<kType>(args, x, row_bytes, thread - 32, kDecodeThreads - 32);
    };
    uint32_t nonfinite;
    switch (args.hidden_dtype) {
      case DType::kF32: nonfinite = read.template operator()<DType::kF32>(); break;
      case DType::kF16: nonfinite = read.template operator()<DType::kF16>(); break;
      default: nonfinite = read.template operator()<DType::kBf16>();
    }
    nonfinite = __reduce_or_sync(cuda::kAllLanes, nonfinite);
    if (thread % 32 == 0) routing.nonfinite_of_warp[thread / 32] = nonfinite;
  }
  __syncthreads();
  const DecodeShare share(args, routing.places);
  DecodeScales scales;
  if (thread < share.all_places) {
    const TensorScales& of =
        part_of(args, share, thread).tensor_scales[routing.place_experts[thread]];
    scales = {of.gate, of.up, of.down};
  }
  DecodeRing ring(decode_shared, DecodePieces(args, share, routing));
  ring.start();
  if (thread < share.all_places) routing.scales[thread] = scales;
  if (thread == 0) {
    uint32_t nonfinite = 0;
    for (int warp = 1; warp < kDecodeWarps; ++warp) nonfinite |= routing.nonfinite_of_warp[warp];
    routing.nonfinite_tokens = nonfinite;
    cuda::ptx::mbarrier_init(cuda::ptx::shared_address(&routing.rows_full), 1);
    cuda::ptx::fence_mbarrier_init();
    if (blockIdx.x == 0) {
      RunStatus status;
      status.bad_expert_ids = routing.bad_ids;
      status.nonfinite_tokens = __popc(nonfinite & routing.tokens_with_rows);
      status.nonfinite_weights = routing.nonfinite_weights;
      *args.status = status;
    }
  }
  __syncthreads();
  DecodeGateUp<kGated, kColumns>::run(args, share, routing, x, row_bytes, partials, ring);
  // orders this cta's reads of hidden and its rows of the intermediate before the bulk copies
  cuda::ptx::fence_proxy_async();
  __syncthreads();
  const auto routed = static_cast<int32_t>(args.ids.assignments);
  const DecodeDown down{args,
                        share,
                        routing,
                        x,
                        partials,
                        routed,
                        routed + (args.shared.units > 0 ? args.tokens : 0)};
  if (args.routed.row_elems % cuda::kTileK != 0 || args.shared.row_elems % cuda::kTileK != 0) {
    down.pad_rows();
    __syncthreads();
  }
  down.run(ring);
}

}  // namespace nvfp4_moe::internal::sm90
