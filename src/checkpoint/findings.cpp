#include "checkpoint/findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "io/files.h"

namespace nvfp4_moe::internal {

const char* to_string(Severity severity) {
  switch (severity) {
    case Severity::kNote: return "note";
    case Severity::kWarning: return "warning";
    case Severity::kError: return "error";
  }
  return "error";
}

const char* to_string(SourceFormat format) {
  switch (format) {
    case SourceFormat::kModelOpt: return "modelopt";
    case SourceFormat::kModelOptStacked: return "modelopt-stacked";
    case SourceFormat::kCompressedTensors: return "compressed-tensors";
    case SourceFormat::kGgufNvfp4: return "gguf-nvfp4";
    case SourceFormat::kMxfp4: return "mxfp4";
    case SourceFormat::kFloat: return "float";
  }
  return "unknown";
}

bool is_nvfp4(SourceFormat format) {
  return format != SourceFormat::kMxfp4 && format != SourceFormat::kFloat;
}

std::string describe_place(const Finding& finding) {
  std::string out;
  if (finding.layer >= 0) out += fmt::format("layer {} ", finding.layer);
  if (finding.expert >= 0) out += fmt::format("expert {} ", finding.expert);
  out += printable(finding.tensor, 400);
  if (!finding.expected.empty()) out += ": expected " + printable(finding.expected, kWholeText);
  if (!finding.actual.empty())
    out += (finding.expected.empty() ? ": " : ", got ") + printable(finding.actual, kWholeText);
  return out;
}

std::string to_string(const Finding& finding) {
  std::string out =
      fmt::format("{} {}: {}", to_string(finding.severity), finding.id, describe_place(finding));
  if (finding.count <= 1) return out;
  out += fmt::format(" (and {} more", finding.count - 1);
  for (const std::string& example : finding.examples) {
    out += &example == &finding.examples.front() ? ", such as " : ", ";
    out += printable(example, 400);
  }
  return out + ")";
}

Status error_of(const Finding& finding, int64_t more) {
  const std::string others = more > 0 ? fmt::format(" (and {} more)", more) : "";
  return bad_input(describe_place(finding) + others).of_finding(finding.id);
}

std::string float_string(float value) {
  if (std::isnan(value)) return "NaN";
  return fmt::format("{}", value);
}

void FindingList::add(Finding finding) {
  const auto key = std::make_pair(
      finding.layer, fmt::format("{}{}", static_cast<int>(finding.severity), finding.id));
  const auto [found, fresh] = by_key_.emplace(key, findings_.size());
  if (fresh) {
    findings_.push_back(std::move(finding));
    return;
  }
  Finding& first = findings_[found->second];
  first.count += finding.count;
  finding.examples.insert(finding.examples.begin(), std::move(finding.tensor));
  for (std::string& example : finding.examples) {
    const bool known =
        example == first.tensor ||
        std::find(first.examples.begin(), first.examples.end(), example) != first.examples.end();
    if (!known && first.examples.size() < Finding::kMaxExamples)
      first.examples.push_back(std::move(example));
  }
}

bool FindingList::has_error() const {
  for (const Finding& finding : findings_) {
    if (finding.severity == Severity::kError) return true;
  }
  return false;
}

Status FindingList::first_error() const {
  const Finding* first = nullptr;
  int64_t errors = 0;
  for (const Finding& finding : findings_) {
    if (finding.severity != Severity::kError) continue;
    if (first == nullptr) first = &finding;
    errors += finding.count;
  }
  return first == nullptr ? Status() : error_of(*first, errors - 1);
}

}  // namespace nvfp4_moe::internal
