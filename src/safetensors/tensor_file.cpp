// Reads through an open descriptor. See tensor_file.h.
#include "safetensors/tensor_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/files.h"
#include "io/open_file.h"

namespace nvfp4_moe::internal {
namespace {

int64_t nanoseconds(const struct timespec& time) {
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

std::string shape_string(std::span<const int64_t> shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

std::string describe(const TensorInfo& info) {
  return fmt::format("{} {}", shape_string(info.shape),
                     info.blocks ? info.blocks->name : to_string(info.dtype));
}

Status TensorFile::open_descriptor(const std::string& path) {
  path_ = path;
  NVFP4_MOE_ASSIGN(RegularFile opened, open_regular_file(path));
  fd_ = opened.descriptor.release();
  size_bytes_ = static_cast<uint64_t>(opened.facts.st_size);
  modified_ns_ = nanoseconds(opened.facts.st_mtim);
  // Advice only: the system then reads what is requested, and nothing around it.
  (void)::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  return {};
}

Status TensorFile::read(uint64_t offset, void* to, size_t size_bytes) const {
  auto* bytes = static_cast<std::byte*>(to);
  for (size_t filled = 0; filled < size_bytes;) {
    const ssize_t got =
        ::pread(fd_, bytes + filled, size_bytes - filled, static_cast<off_t>(offset + filled));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(path_, "cannot read", errno);
    if (got == 0)
      return io_error(
          fmt::format("{}: expected {} bytes as when it was opened, got an end at {}: it was cut",
                      printable(path_, 4096), size_bytes_, offset + filled));
    filled += static_cast<size_t>(got);
  }
  return {};
}

Status TensorFile::check_unchanged() const {
  struct stat facts {};
  if (::fstat(fd_, &facts) != 0) return errno_status(path_, "cannot stat", errno);
  const auto size = static_cast<uint64_t>(facts.st_size);
  if (size != size_bytes_)
    return io_error(
        fmt::format("{}: expected {} bytes as when it was opened, got {}: it was changed meanwhile",
                    printable(path_, 4096), size_bytes_, size));
  if (nanoseconds(facts.st_mtim) != modified_ns_)
    return io_error(fmt::format(
        "{}: expected the content that was opened, got another time of modification: it was "
        "written to meanwhile",
        printable(path_, 4096)));
  return {};
}

const TensorInfo* TensorFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors()[found->second];
}

void TensorFile::index_names() {
  for (size_t i = 0; i < tensors().size(); ++i) by_name_.emplace(tensors()[i].name, i);
}

void TensorFile::prefetch(uint64_t offset, size_t size_bytes) const {
  // One call fetches at most the device's read-ahead, 128 KiB by default. So each call ends at a
  // multiple of that many bytes in the file, and requests no more pages than one call fetches.
  constexpr uint64_t kBytesPerCall = 128 << 10;
  if (offset >= size_bytes_) return;
  const uint64_t end = offset + std::min<uint64_t>(size_bytes, size_bytes_ - offset);
  for (uint64_t at = offset; at < end;) {
    const uint64_t next = std::min(end, (at / kBytesPerCall + 1) * kBytesPerCall);
    (void)::posix_fadvise(fd_, static_cast<off_t>(at), static_cast<off_t>(next - at),
                          POSIX_FADV_WILLNEED);
    at = next;
  }
}

TensorFile::TensorFile(TensorFile&& other) noexcept { *this = std::move(other); }

TensorFile& TensorFile::operator=(TensorFile&& other) noexcept {
  if (this == &other) return *this;
  if (fd_ >= 0) ::close(fd_);
  fd_ = std::exchange(other.fd_, -1);
  modified_ns_ = other.modified_ns_;
  path_ = std::move(other.path_);
  by_name_ = std::move(other.by_name_);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

TensorFile::~TensorFile() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace nvfp4_moe::internal
