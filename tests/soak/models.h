// The layers of the soak: how each is opened, and every output that is right.
//
// A model has two versions of local expert 0, which replacements swap, and is otherwise constant.
// So a run must give the bits of one version or of the other. Anything else means a weight half
// written, a shared workspace or freed memory.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "moe/c_layer.h"

namespace nvfp4_moe::internal::test {

inline constexpr int64_t kSoakMaxTokens = 16;
inline constexpr const char* kSoakBackends[] = {"cpu", "reference"};

class SoakModel {
 public:
  static constexpr size_t kVersions = 2;
  using Open = std::function<nvfp4_moe_status(const nvfp4_moe_layer_options&, nvfp4_moe_layer**)>;
  struct Right {
    std::vector<float> out;  // (T, H)
    uint64_t bad_expert_ids = 0, nonfinite_tokens = 0;
  };

  // Arrays in this process's memory, with these sizes; choose sets the config's other fields.
  static SoakModel from_arrays(const std::string& name, const MoeOptions& options,
                               const std::function<void(nvfp4_moe_config&)>& choose = {});
  // The first layer of a checkpoint. Opens that name a cache directory go through the packed cache.
  static SoakModel from_checkpoint(const std::string& name, const std::string& path);

  const std::string& name() const { return name_; }
  nvfp4_moe_status open(const nvfp4_moe_layer_options& options, nvfp4_moe_layer** layer) const {
    return open_(options, layer);
  }
  size_t batches() const { return batches_.size(); }
  // A copy; the caller may write its output.
  TinyBatch batch(size_t index) const { return batches_[index]; }
  const Expert& version(size_t index) const { return versions_[index]; }
  // The version that gives this output; kVersions if neither does.
  size_t version_of(size_t backend, size_t batch, const std::vector<float>& out) const;
  const Right& right(size_t backend, size_t batch, size_t version) const {
    return right_[(backend * batches_.size() + batch) * kVersions + version];
  }
  // The version that all these codes and scales belong to; kVersions if they are mixed.
  size_t version_of(const nvfp4_moe_expert_out& out) const;
  // Arrays for nvfp4_moe_layer_unpack_expert of local expert 0, kept in `expert`.
  static nvfp4_moe_expert_out buffers(Expert& expert);

 private:
  SoakModel() = default;
  // Fills in the batches and the right outputs, from a layer that no other thread uses. Needs
  // versions_ and open_.
  void learn(const MoeOptions& options);

  std::string name_;
  Open open_;
  std::vector<Expert> versions_;  // (kVersions)
  std::vector<TinyBatch>
      batches_;  // several sizes, the last with a bad id and a token that is not finite
  std::vector<Right> right_;  // (backend, batch, version)
};

}  // namespace nvfp4_moe::internal::test
