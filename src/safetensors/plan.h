// The two steps before the first byte is written: offsets for a list of tensors, and the header's
// bytes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/status.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {

// Sets begin and end in the given order. kInvalidArgument for names and shapes that the reader
// would refuse.
Status assign_offsets(std::vector<TensorInfo>& tensors);

// Length, JSON and padding: everything before the data section, which begins at a multiple of 8.
Result<std::string> header_bytes(const std::vector<TensorInfo>& tensors,
                                 const std::map<std::string, std::string>& metadata);

}  // namespace nvfp4_moe::internal
