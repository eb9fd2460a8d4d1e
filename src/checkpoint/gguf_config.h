// A GGUF file's metadata as a ModelInfo: family and sizes. Private to src/checkpoint.
//
// The rules are those of model_config.h for config.json. Nothing is guessed. An architecture that
// is not in the table is refused by name, and a missing field that it needs is an error with the
// field's name. The format is not determined here, since the tensor types declare it.
#pragma once

#include "checkpoint/checkpoint.h"
#include "gguf/gguf.h"

namespace nvfp4_moe::internal {

// index shows whether the last blocks, declared for multi-token prediction, exist. Errors:
// kBadInput for a wrong or missing field, kUnsupported for a valid one that is not implemented.
Result<ModelInfo> parse_gguf_config(const GgufMetadata& metadata, const TensorIndex& index);

}  // namespace nvfp4_moe::internal
