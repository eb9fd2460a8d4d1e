// Checkpoints that ModelOpt's and compressed-tensors' own exporters wrote
// (tests/vectors/make_checkpoint_vectors.py): they load, unpack to their own bytes, and run with
// the reference's results.
#include "support/backends.h"
#include "support/support.h"
#include "verify/verify.h"

namespace nvfp4_moe::internal {
namespace {

TEST(Producers, TheirCheckpointsVerify) {
  for (const char* name : {"modelopt_qwen3_moe", "compressed_tensors_qwen3_moe"}) {
    for (const ActivationFormat format : test::kActivationFormats) {
      VerifyOptions options;
      options.states.tokens = 24;
      options.choose_format = false;
      options.adjust = [format](MoeOptions& o) { o.activation_format = format; };
      const auto report =
          verify(std::string(NVFP4_MOE_SOURCE_DIR) + "/tests/vectors/" + name, options);
      ASSERT_OK(report);
      ASSERT_FALSE(report->layers.empty()) << name;
      for (const LayerVerification& layer : report->layers) {
        for (const std::string& failure : layer.failures) ADD_FAILURE() << name << ": " << failure;
        ASSERT_TRUE(layer.packed && layer.run);
        EXPECT_EQ(layer.packed->experts, layer.options.num_experts);
        EXPECT_EQ(layer.options.activation_format, format);
        ASSERT_EQ(layer.fp8.has_value(), format == ActivationFormat::kFp8);
        if (layer.fp8) {
          EXPECT_GT(layer.fp8->inexact, layer.fp8->weights / 10);
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
