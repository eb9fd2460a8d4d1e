// What opening a layer says of arrays that lie elsewhere, and of memory that is not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/layer.h"
#include "moe/tiny.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

TEST(LayerSource, OfAHostRefusesArraysOnADevice) {
  const TinyLayer tiny;
  LayerSource source = tiny.source();
  source.expert = [&](int64_t e) -> Result<LoadedExpert> {
    LoadedExpert loaded;
    loaded.source = tiny.experts[static_cast<size_t>(e)].source();
    loaded.source.on_device = true;
    return loaded;
  };
  const auto refused = MoeLayer::open(tiny.config(), source, tiny_layer_options());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), testing::HasSubstr("expert 0: codes, block scales: expected host memory"));
  const auto layer = MoeLayer::open(tiny.config(), tiny.source(), tiny_layer_options());
  ASSERT_OK(layer);
  ExpertSource on_device = tiny.experts[1].source();
  on_device.on_device = true;
  EXPECT_EQ((*layer)->replace_expert(0, on_device).code(), Code::kInvalidArgument);
}

TEST(LayerSource, SaysWhatMemoryWasFor) {
  MoeOptions options;
  options.num_experts = 1 << 15;
  options.top_k = 1;
  options.hidden_size = options.intermediate_size = 1 << 20;  // more than an address space holds
  LayerSource source;
  source.name = "layer 12";
  source.expert = [](int64_t) -> Result<LoadedExpert> { return LoadedExpert(); };
  LayerOptions layer_options;
  layer_options.limits.max_tokens = 1;
  const auto config = MoeConfig::make(options);
  ASSERT_OK(config);
  const auto layer = MoeLayer::open(*config, source, layer_options);
  EXPECT_EQ(layer.status().code(), Code::kOutOfMemory);
  EXPECT_EQ(layer.status().message().rfind("packed weights of layer 12: expected ", 0), 0u) << layer.status().message();
}

}  // namespace
}  // namespace nvfp4_moe::internal
