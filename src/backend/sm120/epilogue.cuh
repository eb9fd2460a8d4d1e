// Stores a consumer warp's accumulators to the output, or to a split-K partial.
#pragma once

#include <cstdint>

#include "backend/cuda/fp4/epilogue.cuh"
#include "backend/cuda/fp4/split_k.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/sm120/mainloop.cuh"

namespace nvfp4_moe::internal::sm120 {

// Stores a tile's accumulators octet by octet: temporaries live only during their octet, since
// accumulators take most registers.
template <class Traits, class Epilogue>
__device__ void store_tile(const Epilogue& epilogue, const cuda::TileRows& rows,
                           const RowFactor* factors, int32_t m_tile,
                           const Accumulators<Traits>& accumulators) {
  cuda::LaneBiases biases[Traits::kWarpGroups];
#pragma unroll
  for (int m = 0; m < Traits::kWarpGroups; ++m)
    biases[m] = lane_biases(epilogue, rows, m_tile, Traits::first_group() + m);
#pragma unroll
  for (int n = 0; n < Traits::kWarpOctets; ++n) {
    if ((Traits::first_octet() + n) * 8 >= rows.count) break;
#pragma unroll
    for (int m = 0; m < Traits::kWarpGroups; ++m)
      store_fragment(epilogue, rows, factors, m_tile, Traits::first_group() + m,
                     Traits::first_octet() + n, accumulators[m][n], biases[m]);
    ptx::compiler_fence();
  }
}

// Stores them to a partial, for the rows that the work tile has.
template <class Traits>
__device__ void store_partial_tile(const GemmArgs& args, int32_t partial, int count,
                                   const Accumulators<Traits>& accumulators) {
#pragma unroll
  for (int m = 0; m < Traits::kWarpGroups; ++m)
#pragma unroll
    for (int n = 0; n < Traits::kWarpOctets; ++n) {
      if ((Traits::first_octet() + n) * 8 >= count) break;
      store_partial<Traits>(args, partial, m, n, accumulators[m][n]);
    }
}

}  // namespace nvfp4_moe::internal::sm120
