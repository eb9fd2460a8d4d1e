// The layer of a few tokens in one launch: route, gemm1_swiglu, gemm2 and combine.
//
// With few tokens and small experts a layer is launch latency, not bandwidth. So one kernel with
// one cta per multiprocessor does all of it. Every cta routes the batch itself and owns a share of
// both GEMMs: `groups` of 16 weight rows of gate/up of the experts with rows, and 16 output
// channels of down for all of these experts. Weights depend on no other cta, so a warp copies its
// share of both GEMMs through its own ring in shared memory, in one sequence of subtiles of 16
// weight rows x 128 k, without a barrier of the cta. Between the GEMMs the grid waits once: then
// the intermediate of all ctas is in L2. Since a cta has an output channel of all experts, it adds
// them in the order of k itself.
//
//   gate/up   rows of subtiles are groups: the activation, bf16 intermediate to global memory in
//             the order of B fragments
//   down      rows of subtiles are experts: results, rounded to row_format, in shared memory by
//             assignment; then combine
//
// The cta's rows of subtiles, one after the other, are divided among its warps into equal runs. The
// warp that begins a row adds the partials of the warps that go on with it (decode_weights.cuh).
// Products are mma.m16n8k16 of weights (16 rows) and tokens (8 columns).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/pdl.cuh"
#include "backend/sm90/decode_down.cuh"
#include "backend/sm90/decode_gate_up.cuh"

namespace nvfp4_moe::internal::sm90 {

template <cuda::Gemm1Function kFunction>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    sm90_decode_kernel(const __grid_constant__ Bf16DecodeArgsOf<kFunction> args) {
  extern __shared__ __align__(128) uint8_t decode_shared[];
  __shared__ Bf16DecodeRouting routing;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  uint8_t* const x = decode_shared + kDecodeRingBytes + args.partial_bytes;
  const DecodePartials partials{reinterpret_cast<float4*>(decode_shared + kDecodeRingBytes)};
  const int32_t row_bytes = decode_row_bytes(args.k_tiles), routers = routing_warps(args);
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();
  // Hidden is requested before the weights: it would wait for them in the memory system.
  if (thread < routers * 32) {
    route_decode(args, routers, routing);
    __syncwarp();
    if (thread < 32) divide_subtiles<kFunction>(args, routing);
  } else {
    const uint32_t counter = read_grid_counter();
    const auto read = [&]<DType kType, bool kAligned>() {
      return read_hidden<kType, kAligned>(args, x, row_bytes, thread - routers * 32,
                                          kDecodeThreads - routers * 32);
    };
    uint32_t nonfinite;
    switch (args.hidden_dtype) {
      case DType::kF32: nonfinite = read.template operator()<DType::kF32, false>(); break;
      case DType::kF16: nonfinite = read.template operator()<DType::kF16, false>(); break;
      default:
        if (reinterpret_cast<uintptr_t>(args.hidden) % 16 == 0)
          nonfinite = read.template operator()<DType::kBf16, true>();
        else
          nonfinite = read.template operator()<DType::kBf16, false>();
    }
    nonfinite = __reduce_or_sync(cuda::kAllLanes, nonfinite);
    if (thread % 32 == 0) routing.nonfinite_of_warp[thread / 32] = nonfinite;
    if (thread == kDecodeGridReader) routing.grid_before = counter;
  }
  __syncthreads();
  const DecodeShare share = routing.share;
  DecodeScales scales;
  if (thread < share.all_active) {
    const TensorScales& of = part_of(args, share, thread).tensor_scales[routing.expert_of[thread]];
    scales = {of.gate, of.up, of.down};
  }
  DecodeRing ring(decode_shared, DecodeSubtiles(args, share, routing));
  ring.start();
  if (thread < share.all_active) routing.scales[thread] = scales;
  if (thread == 0) {
    uint32_t nonfinite = 0;
    for (int warp = routers; warp < kDecodeWarps; ++warp)
      nonfinite |= routing.nonfinite_of_warp[warp];
    routing.nonfinite_tokens = nonfinite;
    if (blockIdx.x == 0) {
      RunStatus status;
      status.bad_expert_ids = routing.bad_ids;
      status.nonfinite_tokens = __popc(nonfinite & routing.tokens_with_rows);
      status.nonfinite_weights = routing.nonfinite_weights;
      *args.status = status;
    }
  }
  __syncthreads();
  DecodeGateUp<kFunction>{args, share, routing}.run(ring, routing.gate_up[thread / 32], x,
                                                    row_bytes, partials);
  __syncthreads();
  if (thread == 0) arrive_at_grid(&decode_grid_counter);
  const auto routed = static_cast<int32_t>(args.ids.assignments);
  const DecodeDown<> down{
      args,    share,
      routing, reinterpret_cast<float*>(decode_shared + kDecodeRingBytes + kDecodePartialBytes),
      routed,  routed + (args.shared.groups > 0 ? args.tokens : 0)};
  if (routing.row_count < routed) down.clear_missing_rows();
  const DecodeRun& own_down = routing.down[thread / 32];
  const ColumnsAt columns = down.columns_of(DecodeRows(own_down));
  if (thread == 0) wait_for_grid(&decode_grid_counter, routing.grid_before);
  __syncthreads();
  down.run(ring, own_down, columns, partials);
}

}  // namespace nvfp4_moe::internal::sm90
