// Both GEMMs of E4M3 in tiles of 256 weight rows by up to 8 rows of activations.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kFp8M256N8 = make_kernel_entry<256, 8, true>();

}  // namespace nvfp4_moe::internal::sm90
