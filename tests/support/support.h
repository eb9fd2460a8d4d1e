// Helpers for all test rooms: a temporary directory, a file's bytes, and matchers for Status and
// Result.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "support/must.h"

namespace nvfp4_moe::internal::test {

// A fresh directory, removed with all its contents at the end of the scope.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::string& path);

// Whether this process has a mapping of the file; no part of the path may be a link.
bool is_mapped(const std::string& path);

// Every regular file below a folder: its content by relative path.
using Files = std::map<std::string, std::string>;
Files read_files(const std::filesystem::path& folder);
// The names with different contents, or that only one side has: a test's description of two
// folders.
std::vector<std::string> differing(const Files& a, const Files& b);

}  // namespace nvfp4_moe::internal::test

#define EXPECT_OK(...)                                                        \
  do {                                                                        \
    const auto& expect_ok_value = (__VA_ARGS__);                              \
    EXPECT_TRUE(expect_ok_value.ok())                                         \
        << ::nvfp4_moe::internal::test::status_of(expect_ok_value).message(); \
  } while (false)
#define ASSERT_OK(...)                                                        \
  do {                                                                        \
    const auto& assert_ok_value = (__VA_ARGS__);                              \
    ASSERT_TRUE(assert_ok_value.ok())                                         \
        << ::nvfp4_moe::internal::test::status_of(assert_ok_value).message(); \
  } while (false)
