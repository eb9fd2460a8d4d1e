// Folds findings: one entry per (layer, id), which names the first place and counts the rest.
// Private to src/checkpoint.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace nvfp4_moe::internal {

class FindingList {
 public:
  // Adds the finding. If there is one with the same layer, id and severity, raises its count and
  // adds the name to its examples.
  void add(Finding finding);
  void add_always(Finding finding) {
    findings_.push_back(std::move(finding));
  }  // for a finding that is never folded
  // Adds one finding for all of these tensors, if there are any. It names the first, and the next
  // ones are its examples.
  template <class Names>
  void add_folded(Finding finding, const Names& names) {
    if (names.empty()) return;
    finding.tensor = names.front();
    finding.count = static_cast<int64_t>(names.size());
    for (size_t i = 1; i < names.size() && i <= Finding::kMaxExamples; ++i)
      finding.examples.emplace_back(names[i]);
    add(std::move(finding));
  }
  bool has_error() const;
  // The first error, formatted by error_of, with the number of the others.
  Status first_error() const;
  std::vector<Finding> take() { return std::move(findings_); }
  const std::vector<Finding>& all() const { return findings_; }

 private:
  std::vector<Finding> findings_;
  std::map<std::pair<int64_t, std::string>, size_t> by_key_;
};

// "layer 12 expert 7 NAME: expected ..., got ..."; parts that are not set are left out.
std::string describe_place(const Finding& finding);
// "1.5e-05": a float with enough digits to distinguish it from others.
std::string float_string(float value);

}  // namespace nvfp4_moe::internal
