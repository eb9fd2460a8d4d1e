#include "support/support.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace nvfp4_moe::test {

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "nvfp4_moe_test_XXXXXX").string();
  path_ = mkdtemp(pattern.data());
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

}  // namespace nvfp4_moe::test
