// The .target of a PTX text: which devices run it, and which instructions it may have.
#pragma once

#include <string>

namespace ptxemu {

struct Target {
  int number;   // 90 of sm_90a; 0 without a target
  char suffix;  // a: for one architecture; f: for its family; 0: for all later ones
  std::string name() const;
  std::string devices() const;  // that run it
};
Target target_of(const std::string& ptx);
bool runs_on(const Target& target, int compute_capability);
// The first instruction that this text's target lacks, with what it requires; "" if it lacks none.
std::string missing_feature(const std::string& ptx, const Target& target);

}  // namespace ptxemu
