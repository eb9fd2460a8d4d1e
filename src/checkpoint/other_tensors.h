// Tensors of an experts' module that no format of this library has. Some are harmless, some the
// caller accepts (CheckpointOptions::accept_tensors). Any other may change the result of the
// experts, so the layer is refused. Private to src/checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

// Such tensors of one layer's routed experts, or of its shared expert.
class OtherTensors {
 public:
  // part: the text after the projection in the name, or the whole name if it has no projection. The
  // name must outlive this object.
  void add(std::string_view name, std::string_view part, const CheckpointOptions& options);
  // Adds a finding for each kind. Returns an error that names the first refused tensor.
  Status report(int64_t layer, FindingList& findings) const;
  // The first refused tensor of an unsupported quantization (AWQ, SVDQuant, zero points), and the
  // reason. Empty if no tensor was refused for that.
  const std::string& unsupported_format() const { return unsupported_format_; }

  bool has_refused() const { return !refused_.empty(); }
  const std::vector<std::string_view>& names() const { return all_; }

 private:
  std::vector<std::string_view> all_, harmless_, accepted_, refused_;
  std::string_view first_reason_;
  std::string unsupported_format_;
};

// Whether the whole name matches the pattern. '*' matches any characters.
bool matches_pattern(std::string_view pattern, std::string_view name);

}  // namespace nvfp4_moe::internal
