// A safetensors file: an open descriptor that read() reads, and a read-only private mapping for data().
//
// Everything that the library loads goes through read(), so that a file that is cut, or a disk that fails, is a Status.
// The same through a mapping would be a SIGBUS, which a library cannot catch without taking the handler of its host.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "safetensors/files.h"
#include "safetensors/safetensors.h"
#include "safetensors/shape.h"

namespace nvfp4_moe {
namespace {

size_t page_bytes() {
  static const size_t size = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

int64_t nanoseconds(const struct timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  file.path_ = path;
  // O_NONBLOCK: opening a FIFO without a writer would wait for ever otherwise.
  file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) return errno_status(path, "cannot open", errno);
  struct stat facts {};
  if (::fstat(file.fd_, &facts) != 0) return errno_status(path, "cannot stat", errno);
  const std::string shown = printable(path, 4096);
  if (!S_ISREG(facts.st_mode)) return bad_input(fmt::format("{}: expected a regular file", shown));

  file.size_bytes_ = static_cast<uint64_t>(facts.st_size);
  file.modified_ns_ = nanoseconds(facts.st_mtim);
  if (file.size_bytes_ > 0) {
    void* map = ::mmap(nullptr, file.size_bytes_, PROT_READ, MAP_PRIVATE, file.fd_, 0);
    if (map == MAP_FAILED) return errno_status(path, "cannot map", errno);
    file.map_ = static_cast<std::byte*>(map);
    // Advice only, to both ways of reading: what is asked for is read, and nothing around it.
    (void)::madvise(map, file.size_bytes_, MADV_RANDOM);
    (void)::posix_fadvise(file.fd_, 0, 0, POSIX_FADV_RANDOM);
  }
  std::vector<std::byte> head(static_cast<size_t>(std::min<uint64_t>(file.size_bytes_, 8)));
  NVFP4_MOE_TRY(file.read(0, head.data(), head.size()));
  if (head.size() == 8) {
    uint64_t length = 0;
    std::memcpy(&length, head.data(), sizeof length);
    head.resize(static_cast<size_t>(std::min<uint64_t>(file.size_bytes_, 8 + std::min(length, kMaxHeaderBytes))));
    NVFP4_MOE_TRY(file.read(8, head.data() + 8, head.size() - 8));
  }
  if (is_git_lfs_pointer({reinterpret_cast<const char*>(head.data()), head.size()}))
    return git_lfs_pointer_status().in(shown);
  Result<SafetensorsHeader> header = parse_safetensors_header(head, file.size_bytes_);
  if (!header.ok()) return header.status().in(shown);
  file.header_ = std::move(*header);
  for (size_t i = 0; i < file.header_.tensors.size(); ++i) file.by_name_.emplace(file.header_.tensors[i].name, i);
  return file;
}

Status SafetensorsFile::read(uint64_t offset, void* to, size_t size_bytes) const {
  auto* bytes = static_cast<std::byte*>(to);
  for (size_t filled = 0; filled < size_bytes;) {
    const ssize_t got = ::pread(fd_, bytes + filled, size_bytes - filled, static_cast<off_t>(offset + filled));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(path_, "cannot read", errno);
    if (got == 0)
      return io_error(fmt::format("{}: expected {} bytes as when it was opened, got an end at {}: it was cut",
                                  printable(path_, 4096), size_bytes_, offset + filled));
    filled += static_cast<size_t>(got);
  }
  return {};
}

Status SafetensorsFile::check_unchanged() const {
  struct stat facts {};
  if (::fstat(fd_, &facts) != 0) return errno_status(path_, "cannot stat", errno);
  const auto size = static_cast<uint64_t>(facts.st_size);
  if (size != size_bytes_)
    return io_error(fmt::format("{}: expected {} bytes as when it was opened, got {}: it was changed meanwhile",
                                printable(path_, 4096), size_bytes_, size));
  if (nanoseconds(facts.st_mtim) != modified_ns_)
    return io_error(
        fmt::format("{}: expected the content that was opened, got another time of modification: it was "
                    "written to meanwhile",
                    printable(path_, 4096)));
  return {};
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

const std::byte* SafetensorsFile::data(const TensorInfo& info) const { return map_ + header_.data_offset + info.begin; }

void SafetensorsFile::prefetch(const std::byte* data, size_t size_bytes) const {
  if (map_ == nullptr || size_bytes == 0 || data < map_ || data >= map_ + size_bytes_) return;
  constexpr size_t kBytesPerCall =
      128 << 10;  // one call fetches no more than the device's read-ahead: 128 KiB by default
  const size_t begin = static_cast<size_t>(data - map_);
  const size_t end = begin + std::min(size_bytes, static_cast<size_t>(size_bytes_) - begin);
  for (size_t at = begin / page_bytes() * page_bytes(); at < end; at += kBytesPerCall)
    (void)::madvise(map_ + at, std::min(kBytesPerCall, end - at), MADV_WILLNEED);
}

void SafetensorsFile::release(const std::byte* data, size_t size_bytes) const {
  if (map_ == nullptr || size_bytes == 0 || data < map_ || data >= map_ + size_bytes_) return;
  const size_t page = page_bytes();
  const size_t begin = static_cast<size_t>(data - map_);
  const size_t end = begin + std::min(size_bytes, static_cast<size_t>(size_bytes_) - begin);
  const size_t first = begin / page * page;
  const size_t last = (end + page - 1) / page * page;
  // Advice only: that it may fail changes no result.
  (void)::madvise(map_ + first, last - first, MADV_DONTNEED);
}

uint64_t SafetensorsFile::resident_bytes() const {
  if (map_ == nullptr) return 0;
  const auto map_begin = reinterpret_cast<uintptr_t>(map_);
  const uintptr_t map_end = map_begin + static_cast<uintptr_t>(size_bytes_);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  uint64_t kib_total = 0;
  while (std::getline(smaps, line)) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    uint64_t kib = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
      inside = begin >= map_begin && begin < map_end;
    else if (inside && std::sscanf(line.c_str(), "Rss: %" SCNu64 " kB", &kib) == 1)
      kib_total += kib;
  }
  return kib_total * 1024;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  if (this == &other) return *this;
  if (map_ != nullptr) ::munmap(map_, size_bytes_);
  if (fd_ >= 0) ::close(fd_);
  fd_ = std::exchange(other.fd_, -1);
  modified_ns_ = other.modified_ns_;
  path_ = std::move(other.path_);
  header_ = std::move(other.header_);
  by_name_ = std::move(other.by_name_);
  map_ = std::exchange(other.map_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) ::munmap(map_, size_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace nvfp4_moe
