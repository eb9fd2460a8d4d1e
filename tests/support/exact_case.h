// The product's exact layers (moe/exact_layer.h) as cases: every backend's output has the
// reference's bits.
#pragma once

#include <cstdint>
#include <functional>

#include "cases/cases.h"
#include "moe/exact_layer.h"

namespace nvfp4_moe::internal::test {

using internal::ExactSizes;

// choices: those of the options that exact_options leaves to its caller.
CaseData exact_case(const ExactSizes& sizes, ActivationFormat format, int64_t tokens,
                    bool batch_invariant = false, Activation activation = Activation::kSwiglu,
                    const std::function<void(MoeOptions&)>& choices = {});

}  // namespace nvfp4_moe::internal::test
