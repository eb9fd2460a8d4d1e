#include "checkpoint/findings.h"

#include <fmt/format.h>

#include <cmath>

#include "safetensors/files.h"

namespace nvfp4_moe {

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
    case SourceFormat::kMxfp4: return "mxfp4";
    case SourceFormat::kFloat: return "float";
  }
  return "unknown";
}

std::string describe_place(const Finding& finding) {
  std::string out;
  if (finding.layer >= 0) out += fmt::format("layer {} ", finding.layer);
  if (finding.expert >= 0) out += fmt::format("expert {} ", finding.expert);
  out += printable(finding.tensor, 400);
  if (!finding.expected.empty()) out += ": expected " + finding.expected;
  if (!finding.actual.empty()) out += (finding.expected.empty() ? ": " : ", got ") + finding.actual;
  return out;
}

std::string to_string(const Finding& finding) {
  std::string out = fmt::format("{} {}: {}", to_string(finding.severity), finding.id, describe_place(finding));
  if (finding.count > 1) out += fmt::format(" (and {} more)", finding.count - 1);
  return out;
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
  const auto key = std::make_pair(finding.layer, fmt::format("{}{}", static_cast<int>(finding.severity), finding.id));
  const auto [found, fresh] = by_key_.emplace(key, findings_.size());
  if (fresh) {
    findings_.push_back(std::move(finding));
  } else {
    findings_[found->second].count += finding.count;
  }
}

bool FindingList::has_error() const {
  for (const Finding& finding : findings_) {
    if (finding.severity == Severity::kError) return true;
  }
  return false;
}

Status FindingList::first_error() const {
  for (const Finding& finding : findings_) {
    if (finding.severity == Severity::kError) return error_of(finding);
  }
  return {};
}

}  // namespace nvfp4_moe
