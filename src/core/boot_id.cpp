#include "core/boot_id.h"

#include <fstream>

namespace nvfp4_moe {

const Result<std::string>& boot_id() {
  static const Result<std::string> id = []() -> Result<std::string> {
    constexpr const char* kPath = "/proc/sys/kernel/random/boot_id";
    std::string text;
    if (!std::getline(std::ifstream(kPath), text) || text.empty())
      return unsupported(std::string(kPath) + ": expected the host's boot id, got no text");
    return text;
  }();
  return id;
}

}  // namespace nvfp4_moe
