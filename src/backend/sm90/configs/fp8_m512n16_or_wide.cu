// Both GEMMs of E4M3 in tiles of 512 weight rows by up to 16 rows of activations, or in wide tiles
// if the rank has many rows.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kFp8M512N16OrWide = make_kernel_entry_with_wide<512, 16, true>();

}  // namespace nvfp4_moe::internal::sm90
