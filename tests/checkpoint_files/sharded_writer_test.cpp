// ShardedWriter: plan, stream, index, resume.
#include "safetensors/sharded_writer.h"

#include <nlohmann/json.hpp>

#include "io/output_file.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

// Five tensors of 40, 40, 0, 100 and 8 bytes; shards of at most 80 bytes: {a, b, empty}, {large},
// {scalar}.
std::vector<TensorInfo> five_tensors() {
  return {{.name = "a", .dtype = DType::kF32, .shape = {10}},
          {.name = "b", .dtype = DType::kU8, .shape = {40}},
          {.name = "empty", .dtype = DType::kU8, .shape = {0, 7}},
          {.name = "large", .dtype = DType::kF4, .shape = {2, 100}},
          {.name = "scalar", .dtype = DType::kF64, .shape = {}}};
}
const std::map<std::string, size_t> kSizes = {
    {"a", 40}, {"b", 40}, {"empty", 0}, {"large", 100}, {"scalar", 8}};

std::vector<std::byte> content(const std::string& name) {
  return std::vector<std::byte>(kSizes.at(name), static_cast<std::byte>(name[0]));
}

Result<ShardedWriter> open_writer(const TempDir& dir,
                                  const std::map<std::string, std::string>& metadata = {}) {
  return ShardedWriter::create(dir.path().string(), five_tensors(), 80, metadata);
}

// Writes what is needed, in two pieces each; the names written, in order.
std::vector<std::string> write_needed(ShardedWriter& writer, const std::string& stop_before = "") {
  std::vector<std::string> written;
  for (const TensorInfo& info : five_tensors()) {
    if (info.name == stop_before) break;
    if (!writer.needs(info.name)) continue;
    const auto bytes = content(info.name);
    const std::span<const std::byte> all = bytes;
    EXPECT_OK(writer.write(info.name, all.first(all.size() / 3)));
    EXPECT_OK(writer.write(info.name, all.subspan(all.size() / 3)));
    written.push_back(info.name);
  }
  return written;
}

void expect_whole(const TempDir& dir) {
  const auto index = must(TensorIndex::open(dir.path().string()));
  ASSERT_EQ(index->files().size(), 3u);
  ASSERT_EQ(index->tensors().size(), 5u);
  for (const auto& [name, size] : kSizes) {
    const auto ref = index->find(name);
    ASSERT_NE(ref.info, nullptr) << name;
    ASSERT_EQ(ref.info->size_bytes(), size) << name;
    EXPECT_EQ(read_tensor(*ref.file, *ref.info), content(name)) << name;
  }
}

TEST(ShardedWriter, PlansStreamsAndIndexes) {
  TempDir dir;
  auto writer = must(open_writer(dir));
  EXPECT_EQ(writer->shards(), 3u);
  EXPECT_EQ(writer->data_bytes(), 188u);
  EXPECT_FALSE(writer->needs("nothing"));
  write_needed(*writer);
  EXPECT_FALSE(fs::exists(dir.file("model.safetensors.index.json")));
  ASSERT_OK(writer->finish());
  expect_whole(dir);
  const auto index = nlohmann::json::parse(read_file(dir.file("model.safetensors.index.json")));
  EXPECT_EQ(index["metadata"]["total_size"], 188);
  EXPECT_EQ(index["weight_map"]["empty"], "model-00001-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["large"], "model-00002-of-00003.safetensors");
}

TEST(ShardedWriter, ResumesBehindTheCompleteShards) {
  TempDir dir;
  {
    auto writer = must(open_writer(dir));
    write_needed(*writer, "scalar");  // interrupted before the last tensor
    EXPECT_THAT(writer->finish(), Refused(Code::kInvalidArgument,
                                          "tensor 'scalar': expected 8 bytes for () F64, got 0"));
  }
  EXPECT_TRUE(fs::exists(dir.file("model-00002-of-00003.safetensors")));
  EXPECT_FALSE(fs::exists(partial_path(dir.file("model-00003-of-00003.safetensors"))));
  EXPECT_FALSE(TensorIndex::open(dir.path().string()).ok());  // no index, and a shard is missing
  auto writer = must(open_writer(dir));
  EXPECT_EQ(writer->complete_shards(), 2u);
  EXPECT_OK(writer->write("a", content("a")));  // not needed: ignored
  EXPECT_EQ(write_needed(*writer), std::vector<std::string>{"scalar"});
  ASSERT_OK(writer->finish());
  expect_whole(dir);
}

TEST(ShardedWriter, AShardMadeOtherwiseIsNotTakenForComplete) {
  TempDir dir;
  for (const char* options : {"max", "mse"}) {
    auto writer = must(open_writer(dir, {{"scales", options}}));
    EXPECT_EQ(writer->complete_shards(), 0u);
    EXPECT_EQ(write_needed(*writer).size(), 5u);
    ASSERT_OK(writer->finish());
  }
  // With the same options a complete shard is kept, and one that is cut short is written again.
  fs::resize_file(dir.file("model-00002-of-00003.safetensors"), 100);
  auto writer = must(open_writer(dir, {{"scales", "mse"}}));
  EXPECT_EQ(writer->complete_shards(), 2u);
  EXPECT_FALSE(fs::exists(dir.file("model.safetensors.index.json")));  // incomplete: no index
  EXPECT_EQ(write_needed(*writer), std::vector<std::string>{"large"});
  ASSERT_OK(writer->finish());
  expect_whole(dir);
}

TEST(ShardedWriter, RefusesWrongOrderAndSizes) {
  TempDir dir;
  auto writer = must(open_writer(dir));
  const auto refused = [&](const char* tensor, const char* bytes_of, const char* words) {
    EXPECT_THAT(writer->write(tensor, content(bytes_of)), Refused(Code::kInvalidArgument, words));
  };
  refused("b", "b", "expected bytes of tensor 'a' next, got 'b'");
  refused("nothing", "a", "tensor 'nothing': not in the list");
  refused("a", "large", "expected 40 bytes for (10) F32, got 100");
  write_needed(*writer);
  refused("scalar", "scalar", "all tensors are written already");
  EXPECT_OK(writer->finish());
  EXPECT_EQ(ShardedWriter::create(dir.path().string(), five_tensors(), 0, {}).status().code(),
            Code::kInvalidArgument);
  TempDir empty;
  ASSERT_OK(must(ShardedWriter::create(empty.path().string(), {}, 10, {}))->finish());
  EXPECT_TRUE(fs::exists(empty.file("model-00001-of-00001.safetensors")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
