// Layers of ragged shapes for tests of an architecture's own kernels, and checks for any layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "support/case_run.h"

namespace nvfp4_moe::internal::test {

struct Ragged {
  int64_t experts, top_k, tokens;
  Routing routing;
};
// hidden 1040, intermediate 720: K is not a multiple of any tile. fp32 rows and output.
Case ragged_case(const Ragged& ragged, ActivationFormat format);

// A run fuses kernels and omits codes; its bits and counts are those of the steps. A small layer
// with a shared expert.
void expect_run_is_its_steps(const Backend& backend, int64_t tokens, IntermediateScale scale,
                             DataKind values, ActivationFormat format = ActivationFormat::kNvfp4);

// The same for any case that both hold; returns `whole`'s output.
std::vector<uint8_t> run_against_steps(CaseRun& whole, CaseRun& parts, const CaseData& data);

// The limit that two outputs of a case's layer exceed; "" if they are close enough.
std::string beyond_limits(const CaseData& data, const std::vector<uint8_t>& expected,
                          const std::vector<uint8_t>& actual);

// The backend's output is within the contract of the plain kernels', it writes nothing outside its
// arrays, and a repeat gives the same bits.
void expect_agrees_with_plain(const Backend& backend, const CaseData& data, int repeats = 1);

}  // namespace nvfp4_moe::internal::test
