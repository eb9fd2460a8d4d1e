// Both GEMMs in tiles of 512 weight rows by up to 8 rows of activations, or in wide tiles if the
// rank has many rows.
#include "backend/sm90/kernel_entry.cuh"

namespace nvfp4_moe::internal::sm90 {

constinit const KernelEntry kM512N8OrWide = make_kernel_entry_with_wide<512, 8>();

}  // namespace nvfp4_moe::internal::sm90
