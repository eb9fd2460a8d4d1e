// Both GEMMs in tiles of 256 weight rows by up to 128 rows of activations.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kM256N128 = make_kernel_entry<256, 128>();

}  // namespace nvfp4_moe::internal::sm90
