// calibrate: measures static activation scales by running the reference's steps on sample hidden
// states.
//
// Per layer, over the tokens that have at least one assignment:
// - hidden amax = max |hidden|. Under on_input, of hidden times its router weight, and also of
//   hidden itself if a shared expert reads it.
// - intermediate amax = max over rows of |bf16(SwiGLU)|. The router weight is included iff the
//   layer's router_weight is before_down, when it multiplies the intermediate before it is
//   quantized.
//
// scale = amax/2688 (ModelOpt's direction). Both are maxima over all experts, so they fit every
// rank. write_input_scales (convert/quantize_checkpoint.h) writes them to a checkpoint, and
// QuantizeOptions::input_scales to a new one.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/executor.h"
#include "core/progress.h"
#include "moe/layer.h"
#include "verify/moments.h"
#include "verify/states.h"

namespace nvfp4_moe::internal {

struct CalibrateOptions {
  std::vector<int64_t> layers;  // empty: all
  std::string input;     // states file (verify/states.h); empty: seeded states, not real data
  std::string moments;   // a new file for second moments (verify/moments.h), or empty
  StatesOptions states;  // of the file (tokens), or of the seeded fallback
  Executor* executor = nullptr;  // null: serial
  ProgressFn progress;
};

struct LayerCalibration {
  int64_t layer = 0;
  int64_t tokens = 0;        // with at least one assignment
  int64_t experts_seen = 0;  // experts that any assignment named
  float hidden_amax = 0;
  float intermediate_amax = 0;
  bool router_weighted = false;  // intermediate_amax includes the router weight
  std::string source;            // LayerStates::source
  LayerScales scales() const;    // amax/2688, 1 if amax is 0; none without tokens
};

struct Calibration {
  std::vector<LayerCalibration> layers;
  double seconds = 0;
  std::vector<std::string> notes;                 // the seeded fallback, experts never seen
  std::map<int64_t, LayerScales> scales() const;  // only layers that had tokens
};

// Calibrates one layer, for the experts in `range`, on the batch's hidden states, ids and weights
// (out is ignored). `states` names the batch in messages and in the result. kBadInput if the states
// have NaN or Inf. progress: called after each packed expert, and between the parts of each step;
// cancelling gives kCancelled. moments: receives those of the range's experts, or null.
Result<LayerCalibration> calibrate_layer(const LayerSource& source, MoeOptions options,
                                         const ExpertRange& range, const Batch& batch,
                                         Executor& executor, const std::string& states,
                                         const ProgressFn& progress = {},
                                         LayerMoments* moments = nullptr);

// kBadInput if a layer's states have NaN or Inf.
Result<Calibration> calibrate(const Checkpoint& checkpoint, const CalibrateOptions& options);

}  // namespace nvfp4_moe::internal
