// Folding findings: one entry per (layer, id), which names the first place and counts the rest.
// Private to the room.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace nvfp4_moe::internal {

class FindingList {
 public:
  // Adds, or raises the count of the first finding with the same layer and id (and severity), whose
  // examples name it.
  void add(Finding finding);
  void add_always(Finding finding) {
    findings_.push_back(std::move(finding));
  }  // one that folds with nothing
  // One finding for all of these tensors, if there are any: the first is named, the next ones are
  // its examples.
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
  // The first error as error_of says it, with the number of the others.
  Status first_error() const;
  std::vector<Finding> take() { return std::move(findings_); }
  const std::vector<Finding>& all() const { return findings_; }

 private:
  std::vector<Finding> findings_;
  std::map<std::pair<int64_t, std::string>, size_t> by_key_;
};

// "layer 12 expert 7 NAME: expected ..., got ..."; parts that are not set are left out.
std::string describe_place(const Finding& finding);
// "1.5e-05": a float with the digits that tell it apart.
std::string float_string(float value);

}  // namespace nvfp4_moe::internal
