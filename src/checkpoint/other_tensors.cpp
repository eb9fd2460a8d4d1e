#include "checkpoint/other_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "checkpoint/expert_names.h"
#include "core/printable.h"

namespace nvfp4_moe::internal {
namespace {

// The last word of a name without leading underscores: ModelOpt writes both `svdquant_lora_a` and
// `weight_quantizer._svdquant_lora_a`.
std::string_view last_word(std::string_view name) {
  name = name.substr(name.rfind('.') + 1);  // npos + 1 is 0
  return name.substr(std::min(name.find_first_not_of('_'), name.size()));
}

// Scales of the KV cache, scales of activations that another format quantizes, and the shape of
// packed codes. The result of an expert does not depend on them.
constexpr std::string_view kHarmless[] = {"k_scale",     "v_scale",     "q_scale",
                                          "kv_scale",    "input_scale", "input_global_scale",
                                          "weight_shape"};

struct Reason {
  std::string_view word;
  std::string_view reason;
};
constexpr Reason kUnsupportedFormats[] = {
    {"bias", "experts with biases are implemented for gpt_oss and openai_privacy_filter only"},
    {"pre_quant_scale",
     "AWQ: activations must be multiplied by pre_quant_scale first, which is not implemented"},
    {"svdquant_lora_a", "SVDQuant: the low-rank part is not implemented"},
    {"svdquant_lora_b", "SVDQuant: the low-rank part is not implemented"},
    {"weight_zero_point", "zero points are not part of NVFP4"},
    {"weight_g_idx", "reordered input channels are not implemented"},
    {"blocks", "MXFP4 experts in the layout of gpt-oss are implemented for gpt_oss only"},
};

std::string_view reason_of_format(std::string_view word) {
  const auto* found = std::find_if(std::begin(kUnsupportedFormats), std::end(kUnsupportedFormats),
                                   [&](const Reason& row) { return row.word == word; });
  return found == std::end(kUnsupportedFormats) ? std::string_view() : found->reason;
}

std::string_view reason_of(std::string_view name, std::string_view word, bool has_projection) {
  if (const std::string_view reason = reason_of_format(word); !reason.empty()) return reason;
  if (name.find("lora_") != std::string_view::npos)
    return "an unmerged LoRA: merge it into the weights";
  if (is_format_part(word, true)) {
    return has_projection ? "part of a matrix in another format than the layer's"
                          : "weights under a name that experts of this family do not have";
  }
  return "a tensor that may change what the experts compute";
}

}  // namespace

void OtherTensors::add(std::string_view name, std::string_view part,
                       const CheckpointOptions& options) {
  all_.push_back(name);
  const auto& accepted = options.accept_tensors;
  const std::string_view word = last_word(part);
  if (std::find(std::begin(kHarmless), std::end(kHarmless), word) != std::end(kHarmless)) {
    harmless_.push_back(name);
  } else if (std::any_of(accepted.begin(), accepted.end(), [&](const std::string& pattern) {
               return matches_pattern(pattern, name);
             })) {
    accepted_.push_back(name);
  } else {
    if (refused_.empty()) first_reason_ = reason_of(name, word, part != name);
    refused_.push_back(name);
    if (unsupported_format_.empty() && !reason_of_format(word).empty())
      unsupported_format_ = fmt::format("{}: {}", printable(name, 400), reason_of_format(word));
  }
}

Status OtherTensors::report(int64_t layer, FindingList& findings) const {
  findings.add_folded({Severity::kNote, "harmless_expert_tensor", layer, -1, "", "",
                       "not read: what the experts compute does not depend on it"},
                      harmless_);
  findings.add_folded({Severity::kWarning, "accepted_tensor", layer, -1, "", "",
                       "left out, as accept_tensors says"},
                      accepted_);
  if (refused_.empty()) return {};
  const std::string actual = fmt::format(
      "{} (accept_tensors, --accept-tensor on the command line, leaves it out)", first_reason_);
  findings.add_folded({Severity::kError, "unknown_expert_tensor", layer, -1, "",
                       "only tensors of a known format in an experts' module", actual},
                      refused_);
  return unsupported(
             fmt::format("layer {} {}: {}", layer, printable(refused_.front(), 400), actual))
      .of_finding("unknown_expert_tensor");
}

bool matches_pattern(std::string_view pattern, std::string_view name) {
  size_t p = 0;
  size_t n = 0;
  size_t star = std::string_view::npos;  // the last '*', which matches name[..] up to `taken`
  size_t taken = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace nvfp4_moe::internal
