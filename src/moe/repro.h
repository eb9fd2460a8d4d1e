// Repros: one layer call in one self-contained safetensors file, and running such a file again.
//
// Metadata: "format" = "nvfp4_moe_repro", "version", "backend", "library_version", "config"
// (moe/config_json.h), "range_first", "hidden_scale" and "intermediate_scale" (the checkpoint's
// activation scales, absent if it has none). Tensors (E local experts, T tokens, k = top_k, H
// hidden, I intermediate):
//   expert.<local>.{gate,up,down}.codes         U8       (I, H/2) (I, H/2) (H, I/2)
//   expert.<local>.{gate,up,down}.block_scales  F8_E4M3  (I, H/16) (I, H/16) (H, I/16)
//   (no gate under relu2); shared.* the same, with the shared expert's I, if the layer has one
//   tensor_scales  F32 (E, 3), or (E + 1, 3) with the shared expert last
//   hidden (T, H), topk_ids (T, k), topk_weights (T, k) F32, shared_weights (T) F32 if given,
//   output (T, H) if known
#pragma once

#include <optional>
#include <string>

#include "judge/judge.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal {

// Writes the call, including batch.out if with_output. The file appears complete or not at all.
Status write_repro(const std::string& path, const MoeLayer& layer, const Batch& batch,
                   bool with_output);

struct ReplayReport {
  std::string recorded_backend;  // the backend that wrote the file
  std::string backend;           // the backend of the replay
  std::string describe;          // MoeLayer::describe_json of the replay's layer
  int64_t tokens = 0;
  RunStatus status;                       // of the replay
  std::optional<bool> same_bits;          // replay == stored; absent if the file has no output
  std::optional<Comparison> with_output;  // stored output against the replay
  Comparison with_reference;              // reference against the replay
  std::string broken_output_limit;        // empty if the comparison passes
  std::string broken_reference_limit;
  bool passed() const { return broken_output_limit.empty() && broken_reference_limit.empty(); }
};
// Runs the file's call on `backend` ("auto": as for a layer) and `device`, and compares. The file
// is untrusted: anything wrong with it is kBadInput. executor may be null.
Result<ReplayReport> replay(const std::string& path, const std::string& backend = "auto",
                            Executor* executor = nullptr, const std::string& device = "cpu");

}  // namespace nvfp4_moe::internal
