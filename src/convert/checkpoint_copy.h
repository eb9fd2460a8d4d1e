// Carrying a checkpoint's other content over into a new directory, byte for byte.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"
#include "safetensors/safetensors.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe {

// kInvalidArgument where OUT is IN, or one contains the other.
Status check_apart(const std::string& in, const std::string& out);

// Streams one tensor through the page cache, giving its pages back as it goes.
Status copy_tensor(const TensorIndex::Ref& from, ShardedWriter& writer);

// Every file of IN that is not weights, their index or a config that the caller rewrites (config.json,
// hf_quant_config.json), with subdirectories; hidden ones are left out. Returns the relative paths.
Result<std::vector<std::string>> copy_other_files(const std::string& in, const std::string& out);

}  // namespace nvfp4_moe
