// The steps of the layer on a GPU, in the order they run. Each enqueues its kernels in call.stream and returns; a
// launch that fails leaves its error for cudaGetLastError, which run reads once at its end.
#pragma once

#include "backend/host_layer.h"

namespace nvfp4_moe::cuda {

void route(const HostCall& call);
// With the tiles that another backend's GEMMs want; even: an expert's tiles share its rows (even_tile_rows).
void route_in_tiles(const HostCall& call, int rows_of_tile, bool even);
void quantize(const HostCall& call);
void gemm1_swiglu(const HostCall& call, const HostPart& part);
void requantize(const HostCall& call, const HostPart& part);
void gemm2(const HostCall& call, const HostPart& part);
void combine(const HostCall& call);

}  // namespace nvfp4_moe::cuda
