// Both GEMMs in tiles of 256 weight rows by up to 64 rows of activations.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kM256N64 = make_kernel_entry<256, 64>();

}  // namespace nvfp4_moe::internal::sm90
