// Peak rate of a Hopper GPU's tensor cores for the instruction of this backend's GEMMs.
#pragma once

#include "core/status.h"

namespace nvfp4_moe::internal::sm90 {

Result<double> product_rate(int device);

}  // namespace nvfp4_moe::internal::sm90
