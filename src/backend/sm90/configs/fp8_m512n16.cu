// Both GEMMs of E4M3 in tiles of 512 weight rows by up to 16 rows of activations.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kFp8M512N16 = make_kernel_entry<512, 16, true>();

}  // namespace nvfp4_moe::internal::sm90
