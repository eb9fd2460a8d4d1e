// A GGUF file's metadata as a ModelInfo: which family, which sizes. Private to the room.
//
// The same rules as model_config.h has for config.json: nothing is guessed, an architecture that is
// not in the table is refused by name, and a field that it needs and the file lacks is an error
// with the field's name. The format is not said here: the types of the tensors are the declaration.
#pragma once

#include "checkpoint/checkpoint.h"
#include "gguf/gguf.h"

namespace nvfp4_moe::internal {

// index: tells whether the last blocks that are declared for multi-token prediction are there.
// Errors: kBadInput for what is wrong or missing, kUnsupported for what is legal but not here.
Result<ModelInfo> parse_gguf_config(const GgufMetadata& metadata, const TensorIndex& index);

}  // namespace nvfp4_moe::internal
