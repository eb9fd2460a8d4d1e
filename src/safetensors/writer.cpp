// Writes one safetensors file in the order given, through a fixed buffer, into NAME.partial that is renamed at the end.
//
// The temporary name is fixed, so that what a killed run leaves is overwritten by the next and never piles up; a lock
// keeps two writers apart. Layout: length, header padded with spaces so that the data begins at a multiple of 8, data.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "safetensors/files.h"
#include "safetensors/plan.h"
#include "safetensors/safetensors.h"
#include "safetensors/shape.h"

namespace nvfp4_moe {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;  // scalars would cost a system call each otherwise

std::string quoted(const std::string& text) { return nlohmann::json(text).dump(); }

}  // namespace

Status assign_offsets(std::vector<TensorInfo>& tensors) {
  std::set<std::string_view> names;
  uint64_t offset = 0;
  for (TensorInfo& info : tensors) {
    if (info.name.empty() || info.name.size() > kMaxTensorNameBytes || info.name == "__metadata__" ||
        find_invalid_utf8(info.name) != std::string::npos)
      return invalid_argument(fmt::format("tensor '{}': expected a UTF-8 name of 1 to {} bytes other than __metadata__",
                                          printable(info.name), kMaxTensorNameBytes));
    if (!names.insert(info.name).second)
      return invalid_argument(fmt::format("tensor '{}': named twice", printable(info.name)));
    const Result<uint64_t> bytes = tensor_bytes(info.dtype, info.shape);
    if (!bytes.ok())
      return invalid_argument(fmt::format("tensor '{}': {}", printable(info.name), bytes.status().message()));
    if (*bytes > (uint64_t{1} << 62) - offset)
      return invalid_argument(fmt::format("tensor '{}': expected less than 2^62 bytes in all", printable(info.name)));
    info.begin = offset;
    info.end = offset += *bytes;
  }
  if (tensors.size() > kMaxTensors)
    return invalid_argument(fmt::format("expected at most {} tensors, got {}", kMaxTensors, tensors.size()));
  return {};
}

Result<std::string> header_bytes(const std::vector<TensorInfo>& tensors,
                                 const std::map<std::string, std::string>& metadata) {
  std::string text(8, '\0');
  text += '{';
  if (!metadata.empty()) {
    for (const auto& [key, value] : metadata)
      if (find_invalid_utf8(key) != std::string::npos || find_invalid_utf8(value) != std::string::npos)
        return invalid_argument(fmt::format("__metadata__: '{}': expected UTF-8", printable(key)));
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) text += fmt::format("{}:{},", quoted(key), quoted(value));
    text.back() = '}';
    text += ',';
  }
  for (const TensorInfo& info : tensors)
    text += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},", quoted(info.name),
                        to_string(info.dtype), fmt::join(info.shape, ","), info.begin, info.end);
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size() - 8;
  if (length > kMaxWrittenHeaderBytes)
    return invalid_argument(fmt::format("header: expected at most {} bytes, got {}", kMaxWrittenHeaderBytes, length));
  for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i) & 0xFF);
  return text;
}

struct SafetensorsWriter::Impl {
  std::string path;
  std::string partial;
  int fd = -1;
  bool renamed = false;
  Status failure;         // of an earlier write: the file can no longer become whole
  uint64_t expected = 0;  // bytes of the data section
  uint64_t received = 0;
  std::vector<std::byte> buffer;  // (<= kBufferBytes) not yet handed to the system

  ~Impl() {
    if (fd < 0) return;
    if (!renamed) ::unlink(partial.c_str());
    ::close(fd);
  }

  Status lock_partial();
  Status write_all(const std::byte* data, size_t size);
  Status flush() {
    NVFP4_MOE_TRY(write_all(buffer.data(), buffer.size()));
    buffer.clear();
    return {};
  }
};

// Opens and locks the temporary file. Another writer may rename or remove it between open and flock; then the lock is
// held on a file that is no longer there under that name, and the loop tries again.
Status SafetensorsWriter::Impl::lock_partial() {
  for (;;) {
    const int opened = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (opened < 0) return errno_status(partial, "cannot create", errno);
    if (::flock(opened, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      ::close(opened);
      return {Code::kBusy, fmt::format("{}: another writer holds it", printable(partial, 4096))};
    }
    struct stat held {};
    struct stat named {};
    if (::fstat(opened, &held) == 0 && ::lstat(partial.c_str(), &named) == 0 && held.st_dev == named.st_dev &&
        held.st_ino == named.st_ino) {
      fd = opened;
      if (::ftruncate(fd, 0) != 0) return errno_status(partial, "cannot truncate", errno);
      return {};
    }
    ::close(opened);
  }
}

Status SafetensorsWriter::Impl::write_all(const std::byte* data, size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(fd, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failure = errno_status(partial, "cannot write", errno);
    data += written;
    size -= static_cast<size_t>(written);
  }
  return {};
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path, std::vector<TensorInfo> tensors,
                                                    const std::map<std::string, std::string>& metadata) {
  const Status assigned = assign_offsets(tensors);
  if (!assigned.ok()) return assigned.in(printable(path, 4096));
  const Result<std::string> header = header_bytes(tensors, metadata);
  if (!header.ok()) return header.status().in(printable(path, 4096));

  SafetensorsWriter writer;
  Impl& impl = *writer.impl_;
  impl.path = path;
  impl.partial = path + ".partial";
  impl.expected = tensors.empty() ? 0 : tensors.back().end;
  NVFP4_MOE_TRY(impl.lock_partial());
  impl.buffer.reserve(kBufferBytes);
  NVFP4_MOE_TRY(impl.write_all(reinterpret_cast<const std::byte*>(header->data()), header->size()));
  return writer;
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(impl.failure);
  if (bytes.size() > impl.expected - impl.received)
    return invalid_argument(fmt::format("{}: expected {} bytes of data, got {} or more", printable(impl.path, 4096),
                                        impl.expected, impl.received + bytes.size()));
  impl.received += bytes.size();
  if (impl.buffer.size() + bytes.size() > kBufferBytes) NVFP4_MOE_TRY(impl.flush());
  if (bytes.size() > kBufferBytes) return impl.write_all(bytes.data(), bytes.size());
  impl.buffer.insert(impl.buffer.end(), bytes.begin(), bytes.end());
  return {};
}

Status SafetensorsWriter::finish() {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(impl.failure);
  if (impl.renamed) return invalid_argument(fmt::format("{}: finished already", printable(impl.path, 4096)));
  if (impl.received != impl.expected)
    return invalid_argument(
        fmt::format("{}: expected {} bytes of data, got {}", printable(impl.path, 4096), impl.expected, impl.received));
  NVFP4_MOE_TRY(impl.flush());
  if (::fsync(impl.fd) != 0) return impl.failure = errno_status(impl.partial, "cannot sync", errno);
  if (std::rename(impl.partial.c_str(), impl.path.c_str()) != 0)
    return impl.failure = errno_status(impl.path, "cannot rename into place", errno);
  impl.renamed = true;
  sync_directory(std::filesystem::path(impl.path).parent_path().string());  // the rename lasts only from here
  return {};
}

SafetensorsWriter::SafetensorsWriter() : impl_(std::make_unique<Impl>()) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

}  // namespace nvfp4_moe
