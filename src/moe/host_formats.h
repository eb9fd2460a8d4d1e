// The format functions on the host, after their arguments are checked (moe/formats.h).
#pragma once

#include "core/quantize.h"
#include "core/status.h"
#include "moe/formats.h"

namespace nvfp4_moe::internal::formats::host {

// A kStatic tensor scale is already a power of two.
Status quantize(const Quantize& call, QuantizeCounts& counts);
Status quantize_int8_block(const QuantizeInt8Block& call, QuantizeCounts& counts);
Status dequantize(const Dequantize& call);

}  // namespace nvfp4_moe::internal::formats::host
