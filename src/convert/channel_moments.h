// Second moments of the inputs of experts' matrices, by input channel, from a calibration file.
// They weight the errors of a search for block scales (core/quantize.h). An expert's gate and up
// multiply its hidden rows, down its intermediate.
//
// Kinds of files, detected by their content:
//   calibrate --moments   safetensors: layers.L.hidden_moments F32 (experts, hidden),
//                         layers.L.intermediate_moments F32 (experts, intermediate): means of
//                         squares over an expert's rows; layers.L.rows I64 (experts)
//   imatrix, GGUF         blk.L.ffn_gate_exps.weight.in_sum2 F32 (experts, hidden) with .counts
//                         (experts, 1); if there is none, ffn_gate_up_exps or ffn_up_exps, and
//                         ffn_down_exps (experts, intermediate). up's input is gate's
//   imatrix.dat           the same names without .in_sum2, F32 (experts * columns); no counts
//
// A factor common to an expert's moments changes nothing, so sums work as well as means. A
// hundredth of their mean is added to each, so that a channel that was quiet in the sample has a
// small weight instead of none.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "io/content_hash.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

// Empty if no row reached the expert, or all moments are 0. Its errors then have no weights.
struct ExpertMoments {
  std::vector<float> hidden;        // (hidden)
  std::vector<float> intermediate;  // (intermediate)
};

class ChannelMoments {
 public:
  // kBadInput, with the file's name, if it is of a different kind.
  static Result<ChannelMoments> open(const std::string& path);
  // Reads all moments of a layer before they are needed. kBadInput names the file, the tensor and
  // the place if one is missing, has another shape, is negative or is not finite.
  Status read_layer(int64_t layer, int64_t experts, int64_t hidden, int64_t intermediate);
  // The moments of an expert, read again from the file. Its layer must have been read.
  Result<ExpertMoments> expert(int64_t layer, int64_t expert) const;
  // The number of experts with empty moments in the layers that were read.
  int64_t unweighted_experts() const { return unweighted_; }
  // Hash of everything that was read.
  ContentHash hash() const { return hasher_.digest(); }

 private:
  enum class Kind { kMoments, kGguf, kDat };
  // Moments of one matrix's inputs: (experts, cols), and which experts have any.
  struct Stacked {
    const TensorInfo* values = nullptr;
    int64_t cols = 0;
    std::vector<bool> weighted;  // (experts)
  };
  struct Layer {
    Stacked hidden, intermediate;
  };
  ChannelMoments() = default;
  Result<const TensorInfo*> find(const std::vector<std::string>& names) const;
  Result<Stacked> read_stacked(const std::vector<std::string>& stems, int64_t layer,
                               int64_t experts, int64_t cols);
  Result<std::vector<bool>> read_counts(const std::string& name, int64_t experts);
  Result<std::vector<float>> moments_of(const Stacked& stacked, int64_t expert) const;

  std::unique_ptr<TensorFile> file_;
  Kind kind_ = Kind::kMoments;
  std::map<int64_t, Layer> layers_;
  ContentHasher hasher_;
  int64_t unweighted_ = 0;
};

}  // namespace nvfp4_moe::internal
