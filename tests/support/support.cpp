#include "support/support.h"

#include <unistd.h>

#include <cstdlib>

namespace nvfp4_moe::test {

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "nvfp4_moe_test_XXXXXX").string();
  path_ = mkdtemp(pattern.data());
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace nvfp4_moe::test
