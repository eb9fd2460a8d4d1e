// The steps of the layer (backend/host_layer.h tells what each reads and writes), each in a file of its own.
#pragma once

#include <functional>

#include "backend/host_layer.h"

namespace nvfp4_moe::cpu {

void route(const HostCall& call);
void quantize(const HostCall& call);
void gemm1_swiglu(const HostCall& call, const HostPart& part);
void requantize(const HostCall& call, const HostPart& part);
void gemm2(const HostCall& call, const HostPart& part);
void combine(const HostCall& call);

// Calls body(expert, panel) for every panel of every expert that has rows, in parallel.
template <class Body>
void for_each_panel(const HostCall& call, const HostPart& part, int64_t panels, const Body& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (part.row_offsets[i / panels] < part.row_offsets[i / panels + 1]) body(i / panels, i % panels);
  };
  call.executor.parallel_for(part.experts * panels, 1, std::ref(range));  // by reference: nothing is allocated
}

// The packed bytes and tensor scales of a part's expert.
const uint8_t* expert_bytes(const PackedWeights& weights, const HostPart& part, int64_t expert);
const TensorScales& expert_scales(const PackedWeights& weights, const HostPart& part, int64_t expert);

}  // namespace nvfp4_moe::cpu
