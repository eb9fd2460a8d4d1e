#include "core/boot_id.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace nvfp4_moe::internal {

Result<std::string> boot_id() {
  constexpr const char* kPath = "/proc/sys/kernel/random/boot_id";
  errno = 0;
  // e: close-on-exec, so that programs started meanwhile do not inherit it
  std::FILE* const file = std::fopen(kPath, "re");
  char text[64] = {};
  const bool read = file != nullptr && std::fgets(text, sizeof(text), file) != nullptr;
  const int error = errno;
  if (file != nullptr) std::fclose(file);
  if (!read) return unsupported(std::string("expected ") + kPath + ", got " + std::strerror(error));
  return std::string(text, std::strcspn(text, "\n"));
}

}  // namespace nvfp4_moe::internal
