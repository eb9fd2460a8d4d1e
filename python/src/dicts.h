// Structs of the library as Python dicts, keyed by their field names.
#pragma once

#include "arrays.h"
#include "checkpoint/checkpoint.h"
#include "core/batch.h"
#include "core/progress.h"

namespace nvfp4_moe::python {

Dict to_dict(const Finding& finding);
Dict to_dict(const LayerStatistics& statistics);
Dict to_dict(const LayerScales& scales);
Dict to_dict(const RunStatus& status);
Dict to_dict(const Progress& progress);
// {"codes" uint8 (rows, cols/2), "scales" uint8 (rows, cols/16), "tensor_scale" float}: copies of the view's rows.
Dict to_dict(const Nvfp4View& view);
// {"gate", "up", "down"} of such.
Dict to_dict(const ExpertSource& source);

}  // namespace nvfp4_moe::python
