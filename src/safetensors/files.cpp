// Reading whole text files, and printable text; see files.h.
#include "safetensors/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace nvfp4_moe {
namespace {

// Length of the well-formed UTF-8 sequence at the head of `text`, 0 where there is none; its scalar value in `value`.
size_t utf8_length(std::string_view text, uint32_t& value) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) {
    value = lead;
    return 1;
  }
  size_t length = 0;
  uint32_t least = 0;
  if ((lead & 0xE0) == 0xC0) {
    length = 2, least = 0x80, value = lead & 0x1F;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3, least = 0x800, value = lead & 0x0F;
  } else if ((lead & 0xF8) == 0xF0) {
    length = 4, least = 0x10000, value = lead & 0x07;
  } else {
    return 0;
  }
  if (text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  if (value < least || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return 0;
  return length;
}

// What could break a line or disguise a name on a terminal.
bool is_control(uint32_t value) {
  return value < 0x20 || (value >= 0x7F && value < 0xA0) || (value >= 0x200E && value <= 0x200F) ||
         (value >= 0x2028 && value <= 0x202E) || (value >= 0x2066 && value <= 0x2069) || value == 0xFEFF;
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  size_t at = 0;
  while (at < text.size()) {
    uint32_t value = 0;
    const size_t length = utf8_length(text.substr(at), value);
    if (at + (length == 0 ? 1 : length) > max_bytes) return out + "...";
    if (length == 0 || is_control(value) || value == '\\') {
      for (size_t i = 0; i < (length == 0 ? 1 : length); ++i)
        out += fmt::format("\\x{:02X}", static_cast<uint8_t>(text[at + i]));
    } else {
      out += text.substr(at, length);
    }
    at += length == 0 ? 1 : length;
  }
  return out;
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    uint32_t value = 0;
    const size_t length = utf8_length(text.substr(at), value);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

bool is_git_lfs_pointer(std::string_view head) { return head.starts_with("version https://git-lfs.github.com/spec/"); }

Status git_lfs_pointer_status() {
  return bad_input(
      "expected the file itself, got a Git-LFS pointer to it: run `git lfs pull` in its directory, or download the "
      "file");
}

Status errno_status(const std::string& path, std::string_view what, int error_number) {
  return io_error(
      fmt::format("{}: {}: {}", printable(path, 4096), what, std::generic_category().message(error_number)));
}

Result<bool> has_entry(const std::string& path) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return errno_status(path, "cannot look up", errno);
}

Result<std::string> read_text_file(const std::string& path, size_t max_bytes) {
  // O_NONBLOCK: opening a FIFO without a writer would wait for ever otherwise.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return errno_status(path, "cannot open", errno);
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) {
    const int error_number = errno;
    ::close(fd);
    return errno_status(path, "cannot stat", error_number);
  }
  const bool regular = S_ISREG(facts.st_mode);
  if (!regular || static_cast<uint64_t>(facts.st_size) > max_bytes) {
    ::close(fd);
    if (!regular) return bad_input(fmt::format("{}: expected a regular file", printable(path, 4096)));
    return bad_input(fmt::format("{}: expected at most {} bytes, got {}", printable(path, 4096), max_bytes,
                                 static_cast<uint64_t>(facts.st_size)));
  }
  std::string text(static_cast<size_t>(facts.st_size), '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = ::read(fd, text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error_number = errno;
      ::close(fd);
      return errno_status(path, "cannot read", error_number);
    }
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  ::close(fd);
  text.resize(filled);
  if (is_git_lfs_pointer(text)) return git_lfs_pointer_status().in(printable(path, 4096));
  return text;
}

}  // namespace nvfp4_moe
