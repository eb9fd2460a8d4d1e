// Opens an imatrix.dat: reads names and sizes, skips values.
#include "gguf/imatrix.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <set>

#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the file's numbers are read as they lie");

constexpr int32_t kMaxEntries = 1 << 20;
constexpr int32_t kMaxName = 4096;

// Reads from `at`, never beyond the file.
class ImatrixCursor {
 public:
  explicit ImatrixCursor(const TensorFile& file) : file_(file) {}
  uint64_t at() const { return at_; }
  bool at_end() const { return at_ == file_.size_bytes(); }

  // Skips the next bytes, which must exist.
  Result<uint64_t> skip(uint64_t size_bytes, const std::string& what) {
    if (size_bytes > file_.size_bytes() - at_)
      return bad_input(fmt::format("{}: expected {} bytes from {}, got an end at {}", what,
                                   size_bytes, at_, file_.size_bytes()));
    const uint64_t begin = at_;
    at_ += size_bytes;
    return begin;
  }
  Result<int32_t> number(const std::string& what, int32_t least, int32_t most) {
    NVFP4_MOE_ASSIGN(const uint64_t begin, skip(sizeof(int32_t), what));
    int32_t value = 0;
    NVFP4_MOE_TRY(file_.read(begin, &value, sizeof(value)));
    if (value < least || value > most)
      return bad_input(
          fmt::format("{} at {}: expected {} to {}, got {}", what, begin, least, most, value));
    return value;
  }
  Result<std::string> text(const std::string& what, int32_t least) {
    NVFP4_MOE_ASSIGN(const int32_t length, number(what + ", length", least, kMaxName));
    NVFP4_MOE_ASSIGN(const uint64_t begin, skip(static_cast<uint64_t>(length), what));
    std::string value(static_cast<size_t>(length), '\0');
    NVFP4_MOE_TRY(file_.read(begin, value.data(), value.size()));
    return value;
  }

 private:
  const TensorFile& file_;
  uint64_t at_ = 0;
};

Result<TensorTable> read_table(const TensorFile& file) {
  ImatrixCursor cursor(file);
  TensorTable table;
  std::set<std::string> names;
  NVFP4_MOE_ASSIGN(const int32_t entries, cursor.number("number of entries", 1, kMaxEntries));
  for (int32_t i = 0; i < entries; ++i) {
    const std::string what = fmt::format("entry {}", i);
    TensorInfo info;
    NVFP4_MOE_ASSIGN(info.name, cursor.text(what + ", name", 1));
    if (!names.insert(info.name).second)
      return bad_input(
          fmt::format("{}: expected each name once, got '{}' again", what, printable(info.name)));
    NVFP4_MOE_TRY(cursor.number(what + ", calls", 0, INT32_MAX).status());
    NVFP4_MOE_ASSIGN(const int32_t values,
                     cursor.number(what + ", number of values", 1, INT32_MAX));
    info.dtype = DType::kF32;
    info.shape = {values};
    NVFP4_MOE_ASSIGN(info.begin,
                     cursor.skip(static_cast<uint64_t>(values) * sizeof(float), what + ", values"));
    info.end = cursor.at();
    table.tensors.push_back(std::move(info));
  }
  if (!cursor.at_end())
    NVFP4_MOE_TRY(cursor.number("number of chunks", INT32_MIN, INT32_MAX).status());
  if (!cursor.at_end()) NVFP4_MOE_TRY(cursor.text("data set", 0).status());
  if (!cursor.at_end())
    return bad_input(
        fmt::format("expected an end at {}, got {} bytes", cursor.at(), file.size_bytes()));
  return table;
}

}  // namespace

Result<ImatrixFile> ImatrixFile::open(const std::string& path) {
  ImatrixFile file;
  NVFP4_MOE_TRY(file.open_descriptor(path));
  Result<TensorTable> table = read_table(file);
  if (!table.ok()) return table.status().in(printable(path, 4096));
  file.table_ = std::move(*table);
  file.index_names();
  return file;
}

}  // namespace nvfp4_moe::internal
