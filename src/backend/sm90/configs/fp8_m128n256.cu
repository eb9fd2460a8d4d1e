// Both GEMMs of E4M3 in tiles of 128 weight rows by up to 256 rows of activations.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kFp8M128N256 = make_kernel_entry<128, 256, true>();

}  // namespace nvfp4_moe::internal::sm90
