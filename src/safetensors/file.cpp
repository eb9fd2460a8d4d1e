// A safetensors file as a read-only private mapping: opening touches the header's pages and gives them back.
//
// A file that is truncated by somebody else while it is mapped gives SIGBUS on the pages that are gone; that is left
// to the operator, as with every memory-mapped loader.
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

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO without a writer would wait for ever otherwise. The mapping outlives the descriptor.
  const Descriptor descriptor{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (descriptor.fd < 0) return errno_status(path, "cannot open", errno);
  struct stat facts {};
  if (::fstat(descriptor.fd, &facts) != 0) return errno_status(path, "cannot stat", errno);
  const std::string shown = printable(path, 4096);
  if (!S_ISREG(facts.st_mode)) return bad_input(fmt::format("{}: expected a regular file", shown));

  SafetensorsFile file;
  file.path_ = path;
  file.size_bytes_ = static_cast<uint64_t>(facts.st_size);
  if (file.size_bytes_ > 0) {
    void* map = ::mmap(nullptr, file.size_bytes_, PROT_READ, MAP_PRIVATE, descriptor.fd, 0);
    if (map == MAP_FAILED) return errno_status(path, "cannot map", errno);
    file.map_ = static_cast<std::byte*>(map);
    (void)::madvise(map, file.size_bytes_, MADV_RANDOM);  // advice only; prefetch() says what to read ahead
    if (file.size_bytes_ >= 8) {
      uint64_t header_bytes = 0;
      std::memcpy(&header_bytes, file.map_, sizeof header_bytes);
      file.prefetch(file.map_, static_cast<size_t>(std::min<uint64_t>(header_bytes, kMaxHeaderBytes)) + 8);
    }
  }
  const size_t head_bytes = static_cast<size_t>(std::min<uint64_t>(file.size_bytes_, 8 + kMaxHeaderBytes));
  Result<SafetensorsHeader> header = parse_safetensors_header({file.map_, head_bytes}, file.size_bytes_);
  if (!header.ok()) return header.status().in(shown);
  file.header_ = std::move(*header);
  for (size_t i = 0; i < file.header_.tensors.size(); ++i) file.by_name_.emplace(file.header_.tensors[i].name, i);
  file.release(file.map_, static_cast<size_t>(file.header_.data_offset));
  return file;
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
  path_ = std::move(other.path_);
  header_ = std::move(other.header_);
  by_name_ = std::move(other.by_name_);
  map_ = std::exchange(other.map_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) ::munmap(map_, size_bytes_);
}

}  // namespace nvfp4_moe
