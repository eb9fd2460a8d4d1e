// Structs of the library as Python dicts, keyed by their field names.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "checkpoint/checkpoint.h"
#include "core/batch.h"
#include "core/progress.h"

namespace nvfp4_moe::internal::python {

namespace nb = nanobind;

using Dict = nb::typed<nb::dict, nb::str, nb::any>;

// Converts a JSON object of the library to Python objects.
inline Dict parse_json(const std::string& text) {
  return nb::cast<nb::dict>(nb::module_::import_("json").attr("loads")(text));
}

Dict to_dict(const Finding& finding);
Dict to_dict(const LayerStatistics& statistics);
Dict to_dict(const LayerScales& scales);
Dict to_dict(const RunStatus& status);
Dict to_dict(const Progress& progress);
// Copies the view's rows to {"codes" uint8 (rows, cols/2), "scales" uint8 (rows, cols/16),
// "tensor_scale" float}.
Dict to_dict(const Nvfp4View& view);
// {"gate", "up", "down"}, each as above. Experts without a gate have None for "gate".
Dict to_dict(const ExpertSource& source);

}  // namespace nvfp4_moe::internal::python
