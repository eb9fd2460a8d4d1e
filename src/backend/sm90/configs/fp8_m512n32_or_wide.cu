// Both GEMMs of E4M3 in tiles of 512 weight rows by up to 32 rows of activations, or if the rank
// has many rows in wide ones.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kFp8M512N32OrWide = make_kernel_entry_with_wide<512, 32, true>();

}  // namespace nvfp4_moe::internal::sm90
