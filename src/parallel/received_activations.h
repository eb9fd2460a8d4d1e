// Activations that another rank has sent, before a host's steps read them.
#pragma once

#include <cstdint>

#include "backend/layer_steps.h"
#include "core/status.h"

namespace nvfp4_moe {

// Ok if the row's flag and scales are ones that a rank's quantizer writes; else kIo with the field and its value. The exact sum of
// int8_block makes an index of a scale. Codes need no check: each is a value of its format.
Status check_received(const ActivationBuffers& activations, ActivationFormat format, int64_t hidden, int64_t row);

}  // namespace nvfp4_moe
