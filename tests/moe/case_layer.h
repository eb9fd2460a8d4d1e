// A case of the case table as a layer, for tests of what its experts have that the tiny layer's do not.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/cases.h"
#include "moe/repro.h"
#include "moe/tiny.h"
#include "support/case_source.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

inline std::unique_ptr<MoeLayer> open_case(const CaseData& data, const char* backend = "cpu") {
  LayerOptions options = tiny_layer_options(data.spec.tokens);
  options.backend = backend;
  options.range = data.spec.range;
  auto layer = MoeLayer::open(data.config, source_of(data), options);
  EXPECT_OK(layer);
  return layer.ok() ? std::move(*layer) : nullptr;
}

// out's bytes.
inline std::vector<uint8_t> run_case(const MoeLayer& layer, const CaseData& data) {
  std::vector<uint8_t> out(data.out_bytes());
  const Buffer workspace = workspace_of(layer);
  EXPECT_OK(layer.run(data.batch(out.data()), workspace.data(), workspace.size_bytes()));
  return out;
}

// Written with its output, read and run again: the bits of the backend that wrote it, and what another one may differ by.
inline void expect_to_travel_in_a_repro_file(const CaseData& data) {
  const auto layer = open_case(data, "reference");
  ASSERT_NE(layer, nullptr);
  std::vector<uint8_t> out = run_case(*layer, data);
  TempDir directory;
  const std::string path = directory.file("repro.safetensors");
  ASSERT_OK(write_repro(path, *layer, data.batch(out.data()), true));
  const auto report = replay(path, "reference");
  ASSERT_OK(report);
  EXPECT_TRUE(report->passed());
  ASSERT_TRUE(report->same_bits.has_value());
  EXPECT_TRUE(*report->same_bits);
  const auto on_cpu = replay(path, "cpu");
  ASSERT_OK(on_cpu);
  EXPECT_TRUE(on_cpu->passed());
}

}  // namespace nvfp4_moe::internal::test
