// Debug attachments of a layer, set by NVFP4_MOE_CHECK and NVFP4_MOE_DUMP: the same experts on the
// reference backend, and a directory for repros. Debug runs may allocate, lock and write files. On
// a device the check takes one token of each run, and a run only enqueues.
#pragma once

#include <memory>
#include <string>

#include "moe/layer.h"
#include "moe/row_check.h"

namespace nvfp4_moe::internal {

struct LayerDebug {
  std::string dump_directory;           // empty: no dumps
  std::unique_ptr<MoeLayer> reference;  // null: no check, or a device
  std::unique_ptr<RowCheck> rows;       // null: no check, or a host

  // Runs `layer` on the checked batch, with the requested dump and check.
  Status run(const MoeLayer& layer, const Batch& batch, std::byte* workspace,
             const RunContext& context) const;
};

}  // namespace nvfp4_moe::internal
