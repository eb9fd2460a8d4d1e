// The packed cache: hits give the same bytes, everything doubtful is refused and rebuilt.
#include "moe/packed_cache.h"

#include <filesystem>
#include <fstream>

#include "moe/tiny.h"

namespace nvfp4_moe {
namespace {

using namespace test;
using testing::HasSubstr;
namespace fs = std::filesystem;

// A copy of the committed checkpoint of ModelOpt's own making, so that it can be touched.
class PackedCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    model_ = directory_.file("model");
    fs::copy(fs::path(NVFP4_MOE_SOURCE_DIR) / "tests/vectors/modelopt_qwen3_moe", model_);
    cache_.directory = directory_.file("cache/below");
    options_ = tiny_layer_options();
  }
  std::unique_ptr<MoeLayer> open(CacheOutcome* outcome = nullptr) {
    const auto checkpoint = Checkpoint::open(model_);
    EXPECT_OK(checkpoint);
    auto layer = open_checkpoint_layer(*checkpoint, checkpoint->model().layers.at(0), {}, slice_, options_, cache_, {},
                                       outcome == nullptr ? &outcome_ : outcome);
    EXPECT_OK(layer);
    return layer.ok() ? std::move(*layer) : nullptr;
  }
  std::vector<float> run(const MoeLayer& layer) {
    TinyBatch batch(layer.config().options(), 4);
    return run_tiny(layer, batch);
  }
  void overwrite(uint64_t offset, uint8_t flip) {
    std::fstream file(outcome_.path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(byte ^ flip));
  }

  TempDir directory_;
  std::string model_;
  CacheOptions cache_;
  LayerOptions options_;
  IntermediateSlice slice_;
  CacheOutcome outcome_;
};

TEST_F(PackedCacheTest, SecondOpenIsAHitWithTheSameBytes) {
  const auto first = open();
  EXPECT_FALSE(outcome_.hit);
  EXPECT_EQ(outcome_.reason, "");
  const auto second = open();
  EXPECT_TRUE(outcome_.hit);
  EXPECT_EQ(first->weights().tensor_scales, second->weights().tensor_scales);
  ASSERT_EQ(first->weights().bytes.size_bytes(), second->weights().bytes.size_bytes());
  EXPECT_EQ(
      std::memcmp(first->weights().bytes.data(), second->weights().bytes.data(), first->weights().bytes.size_bytes()),
      0);
  EXPECT_TRUE(same_bits(run(*first), run(*second)));
  EXPECT_EQ(first->describe_json(), second->describe_json());
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(cache_.directory)) files += entry.is_regular_file();
  EXPECT_EQ(files, 1u);  // nothing half-written is left beside it
}

TEST_F(PackedCacheTest, WithoutADirectoryThereIsNone) {
  cache_.directory.clear();
  EXPECT_NE(open(), nullptr);
  EXPECT_FALSE(outcome_.hit);
  EXPECT_EQ(outcome_.path, "");
}

TEST_F(PackedCacheTest, ReplacingInAMappedLayerLeavesTheFileAlone) {
  open();
  const auto mapped = open();
  ASSERT_TRUE(outcome_.hit);
  const std::vector<float> before = run(*mapped);
  ExpertBuffers buffers;
  ASSERT_OK(mapped->unpack_expert(1, buffers));
  const MoeOptions& o = mapped->config().options();
  const auto view = [](const Nvfp4Buffers& b, int64_t rows, int64_t cols) {
    return Nvfp4View::contiguous(b.codes.data(), b.block_scales.data(), 1.0f, rows, cols);
  };
  const ExpertSource source{view(buffers.gate, o.intermediate_size, o.hidden_size),
                            view(buffers.up, o.intermediate_size, o.hidden_size),
                            view(buffers.down, o.hidden_size, o.intermediate_size)};
  for (int64_t e = 0; e < o.num_experts; ++e) ASSERT_OK(mapped->replace_expert(e, source));
  EXPECT_FALSE(same_bits(run(*mapped), before));
  EXPECT_TRUE(same_bits(run(*open()), before));
  EXPECT_TRUE(outcome_.hit);
}

TEST_F(PackedCacheTest, EverythingThatChangesTheBytesChangesTheKey) {
  open();
  const auto expect_rebuilt = [&](const char* what) {
    open();
    EXPECT_FALSE(outcome_.hit) << what;
    open();
    EXPECT_TRUE(outcome_.hit) << what;
  };
  const std::string shard = model_ + "/model.safetensors";
  fs::last_write_time(shard, fs::last_write_time(shard) + std::chrono::seconds(1));
  expect_rebuilt("mtime");
  EXPECT_EQ(outcome_.reason, "");
  cache_.checksum = true;
  expect_rebuilt("checksum");
  {  // a byte of the data, with the old mtime: only a checksum can see that
    const auto time = fs::last_write_time(shard);
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const int byte = file.get();
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(byte ^ 1));
    file.close();
    fs::last_write_time(shard, time);
  }
  expect_rebuilt("data");
  options_.range = {1, 2};
  expect_rebuilt("range");
  slice_ = {16, 16};
  expect_rebuilt("slice");
  options_.backend = "reference";
  open();
  const bool reference_was_auto = outcome_.hit;
  EXPECT_EQ(reference_was_auto, backends().size() == 1);
}

TEST_F(PackedCacheTest, AnotherConfigIsStale) {
  open();
  const auto checkpoint = Checkpoint::open(model_);
  ASSERT_OK(checkpoint);
  const int64_t layer = checkpoint->model().layers.at(0);
  MoeOptions options = *checkpoint->layer_options(layer);
  options.activation_format = ActivationFormat::kBf16;
  ASSERT_OK(open_checkpoint_layer(*checkpoint, layer, options, {}, options_, cache_, {}, &outcome_));
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("expected key"));
}

TEST_F(PackedCacheTest, PlantedFaultsAreRefusedAndRebuilt) {
  const std::vector<float> expected = run(*open());
  const uint64_t size = fs::file_size(outcome_.path);
  struct Case {
    const char* text;
    std::function<void()> plant;
  };
  const Case cases[] = {
      {"expected a packed cache", [&] { overwrite(0, 1); }},              // magic
      {"expected a packed cache", [&] { overwrite(8, 1); }},              // version
      {"expected a packed cache", [&] { overwrite(12, 1); }},             // header size
      {"expected key", [&] { overwrite(16, 1); }},                        // key
      {"packed bytes", [&] { overwrite(32, 1); }},                        // scale sets
      {"packed bytes", [&] { overwrite(39, 0x80); }},                     // an absurd count
      {"packed bytes", [&] { overwrite(40, 1); }},                        // payload offset
      {"packed bytes", [&] { overwrite(48, 1); }},                        // payload size
      {"header hash", [&] { overwrite(56, 1); }},                         // payload hash
      {"header hash", [&] { overwrite(4096, 1); }},                       // a tensor scale
      {"bytes, got", [&] { fs::resize_file(outcome_.path, size - 1); }},  // truncated
      {"bytes, got", [&] { fs::resize_file(outcome_.path, size + 1); }},  // longer
      {"bytes, got 0", [&] { fs::resize_file(outcome_.path, 0); }},       // empty
      {"regular file", [&] { fs::remove(outcome_.path), fs::create_directory(outcome_.path); }},
      {"open",
       [&] { fs::rename(outcome_.path, outcome_.path + "x"), fs::create_symlink(outcome_.path + "x", outcome_.path); }},
  };
  for (const Case& c : cases) {
    open();
    c.plant();
    const auto layer = open();
    EXPECT_FALSE(outcome_.hit) << c.text;
    EXPECT_THAT(outcome_.reason, HasSubstr(c.text));
    EXPECT_TRUE(same_bits(run(*layer), expected)) << c.text;
    if (fs::is_directory(outcome_.path)) {  // cannot be replaced by a file: told, and the layer works
      fs::remove(outcome_.path);
      continue;
    }
    EXPECT_TRUE(same_bits(run(*open()), expected));
    EXPECT_TRUE(outcome_.hit) << c.text;
  }
  // A payload byte is seen where the checksum is asked for.
  cache_.checksum = true;
  open();
  overwrite(size - 1, 0x11);
  open();
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("payload hash"));
  open();
  EXPECT_TRUE(outcome_.hit);
}

TEST_F(PackedCacheTest, AnUnwritableDirectoryIsNoFailure) {
  cache_.directory = model_ + "/config.json/sub";  // below a file
  EXPECT_NE(open(), nullptr);
  EXPECT_FALSE(outcome_.hit);
  EXPECT_NE(outcome_.reason, "");
}

}  // namespace
}  // namespace nvfp4_moe
