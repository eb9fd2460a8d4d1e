#include "cli/bench/subject.h"

#include <fmt/format.h>

namespace nvfp4_moe::internal::cli {

std::string sizes_text(const Subject& subject) {
  const MoeOptions& sizes = subject.options;
  std::string text =
      fmt::format("{}: experts {}:{} of {}, top-{}, hidden {}, intermediate {}", subject.name,
                  subject.range.first, subject.range.count, sizes.num_experts, sizes.top_k,
                  sizes.hidden_size, sizes.intermediate_size);
  if (sizes.shared_intermediate_size > 0)
    text += fmt::format(", shared expert {}", sizes.shared_intermediate_size);
  return text;
}

}  // namespace nvfp4_moe::internal::cli
