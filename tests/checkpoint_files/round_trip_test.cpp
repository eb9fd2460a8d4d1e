// Writer and reader against each other; python's safetensors is the independent side
// (python_vectors_test.cpp).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "safetensors/safetensors.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

std::vector<std::byte> pattern(size_t size, uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>((seed = seed * 1664525u + 1013904223u) >> 24);
  return bytes;
}

// Tensor i, from 1, has pattern i.
void write_file(const std::string& path, const std::vector<TensorInfo>& tensors,
                const std::map<std::string, std::string>& metadata = {}) {
  auto writer = must(SafetensorsWriter::create(path, tensors, metadata));
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
  const auto file = must(SafetensorsFile::open(dir.file("x.safetensors")));
  EXPECT_EQ(file->header().metadata, metadata);
  EXPECT_EQ(file->header().data_offset % 8, 0u);
  ASSERT_EQ(file->header().tensors.size(), tensors.size());
  uint32_t seed = 1;
  for (const TensorInfo& written : tensors) {
    const TensorInfo* read = file->find(written.name);
    ASSERT_NE(read, nullptr) << written.name;
    EXPECT_EQ(read->dtype, written.dtype);
    EXPECT_EQ(read->shape, written.shape);
    EXPECT_EQ(read_tensor(*file, *read), pattern(read->size_bytes(), seed++)) << written.name;
  }
  EXPECT_EQ(file->find("F4")->size_bytes() * 2, 3u * 4);  // two elements a byte
  EXPECT_EQ(file->find("nothing"), nullptr);
}

TEST(SafetensorsWriter, AppearsOnlyWhenFinished) {
  TempDir dir;
  const std::string path = dir.file("x.safetensors");
  {
    auto writer = must(
        SafetensorsWriter::create(path, {{.name = "a", .dtype = DType::kU8, .shape = {4}}}, {}));
    ASSERT_OK(writer->write(pattern(3, 1)));
    EXPECT_THAT(writer->finish(),
                Refused(Code::kInvalidArgument, "expected 4 bytes of data, got 3"));
    EXPECT_EQ(writer->write(pattern(2, 1)).code(), Code::kInvalidArgument);
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));  // the destructor removed the partial file
}

TEST(SafetensorsWriter, RefusesWhatTheReaderWould) {
  TempDir dir;
  const std::pair<std::vector<TensorInfo>, const char*> cases[] = {
      {{{.name = ""}}, "expected a UTF-8 name"},
      {{{.name = "a\xff"}}, "expected a UTF-8 name"},
      {{{.name = "__metadata__"}}, "other than __metadata__"},
      {{{.name = "a"}, {.name = "a"}}, "named twice"},
      {{{.name = "a", .shape = {-1}}}, "expected sizes >= 0"},
      {{{.name = "a", .dtype = DType::kF4, .shape = {3}}}, "half a byte"},
      {{{.name = "a", .shape = {int64_t{1} << 40, int64_t{1} << 40}}}, "overflows"}};
  for (const auto& [tensors, words] : cases)
    EXPECT_THAT(SafetensorsWriter::create(dir.file("x.safetensors"), tensors, {}),
                Refused(Code::kInvalidArgument, words));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

// For each page of the file: whether it is in the page cache.
std::vector<bool> cached_pages(const std::string& path) {
  const uint64_t size = std::filesystem::file_size(path);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  EXPECT_NE(map, MAP_FAILED);
  close(fd);
  EXPECT_TRUE(is_mapped(path)) << "a mapping is seen where there is one";
  std::vector<unsigned char> marks((size + page - 1) / page);
  EXPECT_EQ(mincore(map, size, marks.data()), 0);
  munmap(map, size);
  std::vector<bool> cached;
  for (const unsigned char mark : marks) cached.push_back((mark & 1) != 0);
  return cached;
}

class LargeFile : public testing::Test {
 protected:
  static constexpr int64_t kBytes = int64_t{12} << 20;
  void SetUp() override {
    path_ = std::filesystem::canonical(dir_.path()) / "x.safetensors";
    write_file(path_, {{.name = "a", .dtype = DType::kU8, .shape = {kBytes}},
                       {.name = "b", .dtype = DType::kU8, .shape = {kBytes}}});
  }
  TempDir dir_;
  std::string path_;
};

TEST_F(LargeFile, IsReadAndNeverMappedAndACutIsAnErrorWhereItEnds) {
  const auto file = must(SafetensorsFile::open(path_));
  const TensorInfo& b = *file->find("b");
  EXPECT_EQ(read_tensor(*file, b), pattern(kBytes, 2));
  EXPECT_FALSE(is_mapped(path_));
  std::filesystem::resize_file(path_, file->offset(b) + 100);
  std::vector<std::byte> bytes(101);
  EXPECT_OK(file->read(file->offset(b), bytes.data(), 100));
  const Status cut = file->read(file->offset(b), bytes.data(), 101);
  EXPECT_THAT(cut, Refused(Code::kIo, path_ + ": expected "));
  EXPECT_THAT(cut.message(), HasSubstr("was cut"));
  EXPECT_EQ(file->check_unchanged().code(), Code::kIo);
}

// More than one call to the system gives (8 MiB of a fast disk), from and to the middle of a page;
// and nothing far from it: a page may come with the folio around it.
TEST_F(LargeFile, IsPrefetchedWhereItIsAskedFor) {
  const auto file = must(SafetensorsFile::open(path_));
  ASSERT_EQ(fdatasync(file->descriptor()), 0);
  ASSERT_EQ(posix_fadvise(file->descriptor(), 0, 0, POSIX_FADV_DONTNEED), 0);
  if (std::ranges::count(cached_pages(path_), true) > 0)
    GTEST_SKIP() << "a file system that keeps its pages";
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = (uint64_t{1} << 20) + 100;
  const uint64_t end = begin + (uint64_t{16} << 20) + 100;
  file->prefetch(begin, end - begin);
  file->prefetch(file->size_bytes(), 1);  // nothing is there
  const auto first = static_cast<std::ptrdiff_t>(begin / page);
  const auto last = static_cast<std::ptrdiff_t>((end - 1) / page);
  std::vector<bool> cached;
  std::ptrdiff_t there = 0;
  for (int i = 0; i < 500 && there != last - first + 1; ++i) {  // appears meanwhile
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    cached = cached_pages(path_);
    there = std::count(cached.begin() + first, cached.begin() + last + 1, true);
  }
  EXPECT_EQ(there, last - first + 1);
  constexpr std::ptrdiff_t kFolioPages = 512;
  EXPECT_LE(std::ranges::count(cached, true), there + 2 * kFolioPages) << "of " << cached.size();
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
