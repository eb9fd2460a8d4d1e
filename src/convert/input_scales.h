// The file of `quantize --input-scales`: the output of `calibrate --json`, or an object of the same
// form.
//
//   {"layers": [{"layer": 3, "hidden_scale": 0.0123, "intermediate_scale": 0.0045}, ...]}
//
// The file is not trusted. Every layer occurs once, its number is an integer of the checkpoint, its
// scales are normal positive floats. null means "not calibrated" and gives 1.0. A missing layer is
// an error, because an accidental 1.0 makes engines with static scales silently wrong.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/nvfp4_view.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// kBadInput for a text that does not fit. `layers`: the checkpoint's MoE layers; `needed`: those
// that must be in the file.
Result<std::map<int64_t, LayerScales>> parse_input_scales(std::string_view text,
                                                          const std::vector<int64_t>& layers,
                                                          const std::vector<int64_t>& needed);
// The same for a regular file of at most 16 MiB. Messages begin with its path.
Result<std::map<int64_t, LayerScales>> read_input_scales(const std::string& path,
                                                         const std::vector<int64_t>& layers,
                                                         const std::vector<int64_t>& needed);

}  // namespace nvfp4_moe::internal
