// The C interface: names, versions, and what an error says of the checkpoint that caused it.
#include "moe/c_layer.h"
#include "support/checkpoint_builder.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

TEST(CApi, ErrorsNameTheFindingBehindThem) {
  test::CheckpointBuilder builder({.model_type = "deepseek_v4"});
  builder.plant(test::Plant::kNanBlockScale, 1, 3);
  const TempDir directory;
  ASSERT_OK(builder.write(directory.path().string()));
  const nvfp4_moe::Checkpoint checkpoint(directory.path().string());
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 1;
  options.threads = 1;
  nvfp4_moe_layer* layer = nullptr;
  EXPECT_EQ(nvfp4_moe_layer_open_checkpoint(checkpoint.get(), 1, nullptr, &options, &layer),
            NVFP4_MOE_STATUS_BAD_INPUT);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("layer 1 expert 3 "));
  EXPECT_THAT(nvfp4_moe_last_error(), testing::EndsWith("[block_scale_nan]"));
}

TEST(CApi, NamesAndVersions) {
  EXPECT_EQ(nvfp4_moe::version(), "0.1.0");
  EXPECT_EQ(nvfp4_moe_abi_version(), NVFP4_MOE_ABI_VERSION);
  EXPECT_STREQ(nvfp4_moe_status_name(NVFP4_MOE_STATUS_OUT_OF_MEMORY), "out of memory");
  EXPECT_STREQ(nvfp4_moe_status_name(-1), "unknown");
  EXPECT_STREQ(nvfp4_moe_status_name(100), "unknown");
}

}  // namespace
}  // namespace nvfp4_moe::internal
