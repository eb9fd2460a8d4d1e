// A small checkpoint and a folder for its packed layer, for tests of the packed cache.
#pragma once

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moe/packed_cache.h"
#include "moe/tiny.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// A copy of the committed checkpoint that ModelOpt made, so that tests may change it.
class CachedModel : public testing::Test {
 protected:
  void SetUp() override {
    model_ = directory_.file("model");
    std::filesystem::copy(
        std::filesystem::path(NVFP4_MOE_SOURCE_DIR) / "tests/vectors/modelopt_qwen3_moe", model_);
    cache_.directory = directory_.file("cache/below");
    options_ = tiny_layer_options();
  }
  Checkpoint checkpoint() const {
    auto opened = Checkpoint::open(model_);
    EXPECT_OK(opened);
    return std::move(*opened);
  }
  // Opens the first layer, with the checkpoint's options or with these.
  std::unique_ptr<MoeLayer> open(const std::optional<MoeOptions>& options = {}) {
    const Checkpoint opened = checkpoint();
    auto layer = open_checkpoint_layer(opened, opened.model().layers.at(0), options, slice_,
                                       options_, cache_, {}, &outcome_);
    EXPECT_OK(layer);
    return layer.ok() ? std::move(*layer) : nullptr;
  }
  MoeOptions stored() const {
    const Checkpoint opened = checkpoint();
    return *opened.layer_options(opened.model().layers.at(0));
  }
  // The offset of a tensor's bytes in its file.
  static uint64_t place_of(const Checkpoint& opened, const std::string& name) {
    const TensorIndex::Ref ref = opened.index().find(name);
    EXPECT_NE(ref.info, nullptr) << name;
    return ref.file->offset(*ref.info);
  }
  std::vector<float> run(const MoeLayer& layer) {
    TinyBatch batch(layer.config().options(), 4);
    return run_tiny(layer, batch);
  }
  static void flip(const std::string& path, uint64_t offset, uint8_t bits) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(byte ^ bits));
  }
  void overwrite(uint64_t offset, uint8_t bits) { flip(outcome_.path, offset, bits); }

  TempDir directory_;
  std::string model_;
  CacheOptions cache_;
  LayerOptions options_;
  IntermediateSlice slice_;
  CacheOutcome outcome_;
};

}  // namespace nvfp4_moe::internal::test
