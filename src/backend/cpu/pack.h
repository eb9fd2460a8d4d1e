// Packs and unpacks one expert. Experts are in order in PackedWeights::bytes, the shared one last.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::internal::cpu {

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range);
Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source);
Status unpack_expert(const PackedWeights& weights, int64_t local_expert, const LentStaging&,
                     ExpertBuffers& out);

}  // namespace nvfp4_moe::internal::cpu
