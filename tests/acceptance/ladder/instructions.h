// The lowest rungs of the ladder: single instructions of each architecture, with their wrappers of
// backend/cuda/ptx, against what their documentation says they compute.
#pragma once

#include <string>
#include <vector>

namespace nvfp4_moe::internal::ladder {

struct Instruction {
  const char* name;
  std::string (*run)();  // returns an empty string, or the first difference or CUDA's error
};

std::vector<Instruction> sm90_instructions();
std::vector<Instruction> sm100_instructions();
std::vector<Instruction> sm120_instructions();

}  // namespace nvfp4_moe::internal::ladder
