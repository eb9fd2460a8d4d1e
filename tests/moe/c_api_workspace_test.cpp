// The C interface: workspaces of the size that a batch's tokens need, and what a run of them does.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "moe/c_layer.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(CApi, AWorkspaceOfTheBatchsTokensIsEnough) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  TinyBatch batch(c.tiny.options, 2);
  const std::vector<float> expected = c.expected(batch);
  EXPECT_LT(layer.workspace_bytes(2), layer.workspace_bytes(16));
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(2));
  layer.run(c_batch(batch), workspace);
  EXPECT_TRUE(same_bits(batch.out, expected));
  TinyBatch larger(c.tiny.options, 16);
  EXPECT_THROW(layer.run(c_batch(larger), workspace), nvfp4_moe::Error);
  EXPECT_THROW(layer.workspace_bytes(-1), nvfp4_moe::Error);
  EXPECT_THROW(layer.workspace_bytes(17), nvfp4_moe::Error);
}

TEST(CApi, DescribesARunOfSoManyTokens) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  const auto run = nlohmann::json::parse(layer.describe_run(2));
  EXPECT_EQ(run["tokens"], 2);
  EXPECT_EQ(run["workspace_bytes"], layer.workspace_bytes(2));
  EXPECT_TRUE(run["steps"].contains("gemm1_swiglu"));
  EXPECT_THROW(layer.describe_run(17), nvfp4_moe::Error);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
