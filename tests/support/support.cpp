#include "support/support.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace nvfp4_moe::internal::test {

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

bool is_mapped(const std::string& path) {
  const std::string end = " " + std::filesystem::canonical(path).string();
  std::ifstream maps("/proc/self/maps");
  EXPECT_TRUE(maps.is_open());
  for (std::string line; std::getline(maps, line);)
    if (line.ends_with(end)) return true;
  return false;
}

Files read_files(const std::filesystem::path& folder) {
  Files files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file())
      files[entry.path().lexically_relative(folder).string()] = read_file(entry.path().string());
  return files;
}

std::vector<std::string> differing(const Files& a, const Files& b) {
  std::vector<std::string> names;
  for (const auto& [name, content] : a)
    if (const auto other = b.find(name); other == b.end() || other->second != content)
      names.push_back(name);
  for (const auto& [name, content] : b)
    if (!a.contains(name)) names.push_back(name);
  return names;
}

}  // namespace nvfp4_moe::internal::test
