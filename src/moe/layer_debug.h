// What NVFP4_MOE_CHECK and NVFP4_MOE_DUMP attach to a layer: the same experts on the reference
// backend, and a directory for repros. Here runs may allocate, lock and write files.
#pragma once

#include <memory>
#include <string>

#include "moe/layer.h"

namespace nvfp4_moe::internal {

struct LayerDebug {
  std::string dump_directory;           // empty: no dumps
  std::unique_ptr<MoeLayer> reference;  // null: no check

  // Runs `layer` on the checked batch, with whatever was asked for before and after.
  Status run(const MoeLayer& layer, const Batch& batch, std::byte* workspace,
             const RunContext& context) const;
};

}  // namespace nvfp4_moe::internal
