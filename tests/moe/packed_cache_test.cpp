// The packed cache: hits give the same bytes, and every doubtful entry is refused and rebuilt.
#include "moe/packed_cache.h"

#include <sys/stat.h>

#include <filesystem>

#include "moe/cache_key.h"
#include "moe/cached_model.h"
#include "moe/registry.h"
#include "support/attack.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
namespace fs = std::filesystem;

class PackedCacheTest : public CachedModel {};

// In every format; fp8's file holds shifts and counts together with the tensor scales.
TEST_F(PackedCacheTest, SecondOpenIsAHitWithTheSameBytes) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kFp8}) {
    MoeOptions options = stored();
    options.activation_format = format;
    const auto first = open(options);
    EXPECT_FALSE(outcome_.hit);
    const auto second = open(options);
    EXPECT_TRUE(outcome_.hit);
    EXPECT_EQ(outcome_.reason, "");
    const PackedWeights &a = first->weights(), &b = second->weights();
    EXPECT_EQ(a.tensor_scales, b.tensor_scales);
    EXPECT_EQ(a.fp8_weights, b.fp8_weights);
    EXPECT_EQ(!b.fp8_weights.empty(), format == ActivationFormat::kFp8);
    ASSERT_EQ(a.bytes.size_bytes(), b.bytes.size_bytes());
    EXPECT_EQ(std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size_bytes()), 0);
    EXPECT_TRUE(same_bits(run(*first), run(*second)));
    EXPECT_EQ(first->describe_json(), second->describe_json());
  }
  const fs::directory_iterator files(cache_.directory);
  EXPECT_EQ(std::distance(begin(files), end(files)), 1) << "no half-written file is left";
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
  const LayerSource source = unpacked_source(*mapped);
  const auto first = must(source.expert(1));
  for (int64_t e = 0; e < mapped->config()->num_experts; ++e)
    ASSERT_OK(mapped->replace_expert(e, first->source));
  EXPECT_FALSE(same_bits(run(*mapped), before));
  EXPECT_TRUE(same_bits(run(*open()), before));
  EXPECT_TRUE(outcome_.hit);
}

// Two models with equal names, sizes and times, as tar, cp -p and image layers make them, that
// differ in one byte.
TEST_F(PackedCacheTest, AnotherModelOfEqualShapesAndTimesIsAnotherEntry) {
  const std::string ours = model_, other = directory_.file("other");
  fs::copy(ours, other);
  const std::string shard = "/model.safetensors";
  const uint64_t code = place_of(checkpoint(), checkpoint().tensor_name(0, 0, "up"));
  flip(other + shard, code, 0x10);  // far from the sample in the middle
  for (const std::string& model : {ours, other})
    fs::last_write_time(model + shard, fs::file_time_type(std::chrono::hours(24 * 365 * 20)));
  const std::vector<float> of_ours = run(*open());
  model_ = other;
  const std::vector<float> of_other = run(*open());
  EXPECT_FALSE(outcome_.hit);
  EXPECT_FALSE(same_bits(of_ours, of_other));
  for (int i = 0; i < 2; ++i) {  // both are kept
    model_ = i == 0 ? ours : other;
    EXPECT_TRUE(same_bits(run(*open()), i == 0 ? of_ours : of_other));
    EXPECT_TRUE(outcome_.hit);
  }
  // The other model under our path: another inode is another file, even if its times are the same.
  fs::rename(ours, directory_.file("away"));
  fs::rename(other, ours);
  model_ = ours;
  EXPECT_TRUE(same_bits(run(*open()), of_other));
  EXPECT_FALSE(outcome_.hit);
  // With checksums the content counts, not inodes or times: the file is overwritten in place, with
  // the old time.
  cache_.checksum = true;
  open();
  fs::copy_file(directory_.file("away") + shard, ours + shard,
                fs::copy_options::overwrite_existing);
  fs::last_write_time(ours + shard, fs::file_time_type(std::chrono::hours(24 * 365 * 20)));
  EXPECT_TRUE(same_bits(run(*open()), of_ours));
  EXPECT_FALSE(outcome_.hit);
  // The same bytes in another inode with another time are the same source.
  fs::copy_file(ours + shard, ours + "/copy");
  fs::rename(ours + "/copy", ours + shard);
  EXPECT_TRUE(same_bits(run(*open()), of_ours));
  EXPECT_TRUE(outcome_.hit);
}

// If device, inode and all times are the same (copies of a disk image), only the bytes distinguish
// two models.
TEST_F(PackedCacheTest, ScalarsAndTheMiddleOfEachMatrixAreRead) {
  const Checkpoint opened = checkpoint();
  const int64_t layer = opened.model().layers.at(0);
  const auto config = MoeConfig::make(stored());
  ASSERT_OK(config);
  CacheSubject subject{opened, layer, *config, {0, 4}, {}, {}, kReferenceBackend};
  const auto key = [](const CacheSubject& of) { return to_string(*must(cache_sample_hash(of))); };
  const std::string shard = model_ + "/model.safetensors";
  const auto middle_of = [&](const std::string& name) {
    return place_of(opened, name) + opened.index().find(name).info->size_bytes() / 2;
  };
  const std::string codes = opened.tensor_name(layer, 1, "down");
  for (const std::string& name : {codes, codes + "_scale", codes + "_scale_2"}) {
    const std::string before = key(subject);
    flip(shard, middle_of(name), 1);
    EXPECT_NE(key(subject), before) << name;
    flip(shard, middle_of(name), 1);
    EXPECT_EQ(key(subject), before) << name;
  }
  // Expert 3 is another rank's: it is not read.
  CacheSubject fewer = subject;
  fewer.range = {0, 2};
  const std::string before = key(subject), of_fewer = key(fewer);
  flip(shard, middle_of(opened.tensor_name(layer, 3, "up")), 1);
  EXPECT_NE(key(subject), before);
  EXPECT_EQ(key(fewer), of_fewer);
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
  EXPECT_THAT(outcome_.reason, "");
  cache_.checksum = true;
  expect_rebuilt("checksum");
  {  // a byte of the data, with the old mtime: only a checksum detects that
    const auto time = fs::last_write_time(shard);
    flip(shard, fs::file_size(shard) - 1, 1);
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

TEST_F(PackedCacheTest, SizesAreTheCheckpoints) {
  const Checkpoint opened = checkpoint();
  const struct {
    const char* words;
    std::function<void(MoeOptions&)> change;
  } cases[] = {
      {"num_experts: expected the checkpoint's 4, got 2 (a rank's part of the experts",
       [](MoeOptions& o) { o.num_experts = 2, o.top_k = 1; }},
      {"num_experts: expected the checkpoint's ", [](MoeOptions& o) { o.num_experts += 1; }},
      {"intermediate_size: expected the checkpoint's ",
       [](MoeOptions& o) { o.intermediate_size = 16; }},
      {"shared_intermediate_size: expected the checkpoint's ",
       [](MoeOptions& o) { o.shared_intermediate_size += 16; }},
  };
  for (const auto& [words, change] : cases) {
    MoeOptions options = stored();
    change(options);
    EXPECT_THAT(open_checkpoint_layer(opened, 0, options, {}, options_, cache_, {}, nullptr),
                Refused(Code::kInvalidArgument, words));
  }
}

ATTACK_TEST_F(kCacheTampering, PackedCacheTest, PlantedFaultsAreRefusedAndRebuilt) {
  const std::vector<float> expected = run(*open());
  const uint64_t size = fs::file_size(outcome_.path);
  // cache_file_test.cpp flips every bit of a file.
  const struct {
    const char* text;
    std::function<void()> plant;
  } cases[] = {
      {"expected a packed cache", [&] { overwrite(0, 1); }},  // magic
      {"expected a packed cache", [&] { overwrite(8, 1); }},  // version
      {"expected key", [&] { overwrite(16, 1); }},            // key
      {"packed bytes", [&] { overwrite(32, 1); }},            // scale sets
      {"packed bytes", [&] { overwrite(48, 1); }},            // payload size
      {"head hash", [&] { overwrite(56, 1); }},               // payload hash
      {"head hash", [&] { overwrite(4096, 1); }},             // a tensor scale
      {"payload hash", [&] { overwrite(8192, 1); }},  // the payload's first byte and its last
      {"payload hash", [&] { overwrite(size - 1, 0x80); }},
      {"bytes, got", [&] { fs::resize_file(outcome_.path, size - 1); }},  // truncated
      {"bytes, got", [&] { fs::resize_file(outcome_.path, size + 1); }},  // longer
      {"bytes, got 0", [&] { fs::resize_file(outcome_.path, 0); }},       // empty
      {"regular file", [&] { fs::remove(outcome_.path), fs::create_directory(outcome_.path); }},
      {"symbolic link",
       [&] {
         fs::rename(outcome_.path, outcome_.path + "x"),
             fs::create_symlink(outcome_.path + "x", outcome_.path);
       }},
      {"symbolic link",
       [&] { fs::remove(outcome_.path), fs::create_symlink("nowhere", outcome_.path); }},
      {"a FIFO", [&] { fs::remove(outcome_.path), (void)mkfifo(outcome_.path.c_str(), 0600); }},
      {"owner only may write, got mode 622", [&] { (void)chmod(outcome_.path.c_str(), 0622); }},
      {"owner only may write, got mode 664", [&] { (void)chmod(outcome_.path.c_str(), 0664); }},
  };
  for (const auto& c : cases) {
    open();
    c.plant();
    attacked();
    const auto layer = open();
    EXPECT_FALSE(outcome_.hit) << c.text;
    EXPECT_THAT(outcome_.reason, HasSubstr(c.text));
    EXPECT_TRUE(same_bits(run(*layer), expected)) << c.text;
    const bool special = c.text == std::string("regular file") || c.text == std::string("a FIFO");
    EXPECT_EQ(fs::is_directory(outcome_.path) || fs::is_fifo(outcome_.path),
              special);  // stays; the layer works
    if (special) {
      fs::remove(outcome_.path);
      continue;
    }
    EXPECT_TRUE(same_bits(run(*open()), expected));
    EXPECT_TRUE(outcome_.hit) << c.text;
  }
  // Damage of the payload is missed only if the cache is unchecked; damage of the head never is.
  open();
  overwrite(size - 1, 0x11);
  attacked();
  cache_.unchecked = true;
  open();
  EXPECT_TRUE(outcome_.hit);
  overwrite(88, 1);
  attacked();
  open();
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("head hash"));
}

ATTACK_TEST_F(kSpecialFiles, PackedCacheTest, AnUnwritableDirectoryIsNoFailure) {
  cache_.directory = model_ + "/config.json/sub";  // below a file
  attacked();
  EXPECT_NE(open(), nullptr);
  EXPECT_FALSE(outcome_.hit);
  EXPECT_NE(outcome_.reason, "");
}

}  // namespace
}  // namespace nvfp4_moe::internal
