// Writer and reader against each other; python's safetensors is the independent side (python_vectors_test.cpp).
#include <algorithm>
#include <fstream>
#include <vector>

#include "safetensors/safetensors.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

using test::TempDir;
using testing::HasSubstr;

std::vector<std::byte> pattern(size_t size, uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((seed = seed * 1664525u + 1013904223u) >> 24);
  return bytes;
}

uint64_t file_size(const std::string& path) { return std::filesystem::file_size(path); }

void write_file(const std::string& path, const std::vector<TensorInfo>& tensors,
                const std::map<std::string, std::string>& metadata = {}) {
  auto writer = SafetensorsWriter::create(path, tensors, metadata);
  ASSERT_OK(writer);
  uint32_t seed = 1;
  for (const TensorInfo& info : tensors) {
    size_t bytes = static_cast<size_t>(bits(info.dtype));
    for (const int64_t size : info.shape) bytes *= static_cast<size_t>(size);
    ASSERT_OK(writer->write(pattern(bytes / 8, seed++)));
  }
  ASSERT_OK(writer->finish());
}

TEST(SafetensorsRoundTrip, EveryDtypeComesBack) {
  TempDir dir;
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 17; ++i) {
    const auto dtype = static_cast<DType>(i);
    tensors.push_back({.name = to_string(dtype), .dtype = dtype, .shape = {3, 2 + i % 3 * 2}});
  }
  tensors.push_back({.name = "scalar", .dtype = DType::kF32, .shape = {}});
  tensors.push_back({.name = "empty", .dtype = DType::kBf16, .shape = {0, 1 << 20}});
  tensors.push_back({.name = "odd \"name\" \n é", .dtype = DType::kU8, .shape = {5}});
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"note", "a \"quote\"\n"}};
  write_file(dir.file("x.safetensors"), tensors, metadata);

  const auto file = SafetensorsFile::open(dir.file("x.safetensors"));
  ASSERT_OK(file);
  EXPECT_EQ(file->header().metadata, metadata);
  EXPECT_EQ(file->header().data_offset % 8, 0u);
  ASSERT_EQ(file->header().tensors.size(), tensors.size());
  uint32_t seed = 1;
  for (const TensorInfo& written : tensors) {
    const TensorInfo* read = file->find(written.name);
    ASSERT_NE(read, nullptr) << written.name;
    EXPECT_EQ(read->dtype, written.dtype);
    EXPECT_EQ(read->shape, written.shape);
    const auto bytes = pattern(read->size_bytes(), seed++);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), file->data(*read))) << written.name;
  }
  EXPECT_EQ(file->find("F4")->size_bytes() * 2, 3u * 4);  // 17th dtype: 2 + 16 % 3 * 2 = 4 columns, two per byte
  EXPECT_EQ(file->find("nothing"), nullptr);
  EXPECT_EQ(file->find("empty")->size_bytes(), 0u);
}

TEST(SafetensorsRoundTrip, NoTensors) {
  TempDir dir;
  write_file(dir.file("x.safetensors"), {});
  EXPECT_EQ(file_size(dir.file("x.safetensors")), 16u);
  EXPECT_OK(SafetensorsFile::open(dir.file("x.safetensors")));
}

TEST(SafetensorsWriter, AppearsOnlyWhenFinished) {
  TempDir dir;
  const std::string path = dir.file("x.safetensors");
  const std::vector<TensorInfo> tensors = {{.name = "a", .dtype = DType::kU8, .shape = {4}}};
  {
    auto writer = SafetensorsWriter::create(path, tensors, {});
    ASSERT_OK(writer);
    ASSERT_OK(writer->write(pattern(3, 1)));
    const Status early = writer->finish();
    EXPECT_EQ(early.code(), Code::kInvalidArgument);
    EXPECT_THAT(early.message(), HasSubstr("expected 4 bytes of data, got 3"));
    EXPECT_EQ(writer->write(pattern(2, 1)).code(), Code::kInvalidArgument);
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));  // the destructor removed the partial file
}

TEST(SafetensorsWriter, TwoWritersOfOneFileAreKeptApart) {
  TempDir dir;
  const std::vector<TensorInfo> tensors = {{.name = "a", .dtype = DType::kU8, .shape = {4}}};
  auto first = SafetensorsWriter::create(dir.file("x.safetensors"), tensors, {});
  ASSERT_OK(first);
  EXPECT_EQ(SafetensorsWriter::create(dir.file("x.safetensors"), tensors, {}).status().code(), Code::kBusy);
  ASSERT_OK(first->write(pattern(4, 1)));
  ASSERT_OK(first->finish());
  EXPECT_OK(SafetensorsFile::open(dir.file("x.safetensors")));
}

TEST(SafetensorsWriter, RefusesWhatTheReaderWould) {
  TempDir dir;
  const auto refusal = [&](std::vector<TensorInfo> tensors) {
    return SafetensorsWriter::create(dir.file("x.safetensors"), std::move(tensors), {}).status();
  };
  EXPECT_THAT(refusal({{.name = ""}}).message(), HasSubstr("expected a UTF-8 name"));
  EXPECT_THAT(refusal({{.name = "a\xff"}}).message(), HasSubstr("expected a UTF-8 name"));
  EXPECT_THAT(refusal({{.name = "__metadata__"}}).message(), HasSubstr("other than __metadata__"));
  EXPECT_THAT(refusal({{.name = "a"}, {.name = "a"}}).message(), HasSubstr("named twice"));
  EXPECT_THAT(refusal({{.name = "a", .shape = {-1}}}).message(), HasSubstr("expected sizes >= 0"));
  EXPECT_THAT(refusal({{.name = "a", .dtype = DType::kF4, .shape = {3}}}).message(), HasSubstr("half a byte"));
  EXPECT_THAT(refusal({{.name = "a", .shape = {int64_t{1} << 40, int64_t{1} << 40}}}).message(),
              HasSubstr("overflows"));
  EXPECT_EQ(refusal({{.name = ""}}).code(), Code::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(SafetensorsWriter, NamesTheSystemsReason) {
  TempDir dir;
  const Status status = SafetensorsWriter::create(dir.file("none/x.safetensors"), {}, {}).status();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr("No such file or directory"));
}

TEST(SafetensorsFile, ResidentBytesFollowReadingAndRelease) {
  TempDir dir;
  constexpr int64_t kBytes = int64_t{8} << 20;
  write_file(dir.file("x.safetensors"), {{.name = "a", .dtype = DType::kU8, .shape = {kBytes}},
                                         {.name = "b", .dtype = DType::kU8, .shape = {kBytes}}});
  auto opened = SafetensorsFile::open(dir.file("x.safetensors"));
  ASSERT_OK(opened);
  const SafetensorsFile file = std::move(*opened);
  EXPECT_LE(file.resident_bytes(), uint64_t{128} << 10);  // opening keeps nothing but what a fault maps around
  const TensorInfo* a = file.find("a");
  uint64_t sum = 0;
  for (uint64_t i = 0; i < a->size_bytes(); i += 512) sum += std::to_integer<uint64_t>(file.data(*a)[i]);
  EXPECT_GT(sum, 0u);
  EXPECT_GE(file.resident_bytes(), static_cast<uint64_t>(kBytes));
  EXPECT_LE(file.resident_bytes(), static_cast<uint64_t>(kBytes) + (uint64_t{128} << 10));  // b stays on disk
  file.release(file.data(*a), a->size_bytes());
  EXPECT_LE(file.resident_bytes(), uint64_t{128} << 10);
  EXPECT_EQ(file.data(*a)[0], pattern(1, 1)[0]);  // still readable
}

TEST(SafetensorsFile, OperatingSystemErrorsAreIo) {
  TempDir dir;
  const Status missing = SafetensorsFile::open(dir.file("none.safetensors")).status();
  EXPECT_EQ(missing.code(), Code::kIo);
  EXPECT_THAT(missing.message(), HasSubstr("none.safetensors: cannot open: No such file or directory"));
  EXPECT_EQ(SafetensorsFile::open(dir.path().string()).status().code(), Code::kBadInput);  // a directory
}

}  // namespace
}  // namespace nvfp4_moe
