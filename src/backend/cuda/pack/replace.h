// The part of packing (pack/pack.cu) that replacing an expert needs.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::internal::cuda {

// Device memory that pack_expert allocates for host rows if weights.staging is smaller.
int64_t expert_staging_bytes(const PackedWeights& weights, int64_t local_expert);

}  // namespace nvfp4_moe::internal::cuda
