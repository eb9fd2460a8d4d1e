// One layer in several formats of activations, for tests of a format's error.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "cases/cases.h"
#include "judge/judge.h"
#include "support/case_run.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// Rows and output in fp32, so that only the format's error shows and no rounding after it; the same
// weights in every format. 48 tokens of 512.
inline std::vector<float> same_weights_in(const Backend& backend, ActivationFormat format,
                                          DataKind kind) {
  Case spec;
  spec.options = test::sizes_of(8, 2, 512, 256);
  spec.options.row_format = RowFormat::kFp32;
  spec.range = {0, 8};
  spec.tokens = 48;
  spec.data = kind;
  spec.out_dtype = DType::kF32;
  auto data = make_case(spec);
  EXPECT_OK(data);
  data->spec.options.activation_format = format;
  data->config = *MoeConfig::make(data->spec.options);
  CaseRun host(backend, *data);
  EXPECT_TRUE(host.ok());
  return to_floats(host.run(*data), DType::kF32);
}

// Against hidden unchanged: it is bf16, so the bf16 layer multiplies it without rounding.
inline double format_error(const Backend& backend, ActivationFormat format, DataKind kind) {
  const std::vector<float> truth =
      same_weights_in(kReferenceBackend, ActivationFormat::kBf16, kind);
  const Comparison c =
      compare(truth.data(), same_weights_in(backend, format, kind).data(), 48, 512);
  EXPECT_EQ(c.nonfinite_mismatches, 0);
  return c.relative_l2;
}

}  // namespace nvfp4_moe::internal::test
