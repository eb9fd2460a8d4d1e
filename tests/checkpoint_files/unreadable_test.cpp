// Unreadable files are reported with the system's reason, and a Git LFS pointer with the command
// that fetches the file.
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "support/as_nobody.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

Status open_as_nobody(const std::string& path) {
  const AsNobody nobody;
  return Checkpoint::open(path).status();
}

class Unreadable : public testing::Test {
 protected:
  void SetUp() override {
    fs::permissions(dir_.path(), fs::perms(0755));
    ASSERT_OK(CheckpointBuilder({.model_type = "qwen3_moe", .shards = 2}).write(model_));
    fs::permissions(model_, fs::perms(0755));
    for (const auto& entry : fs::directory_iterator(model_))
      fs::permissions(entry.path(), fs::perms(0644));
    ASSERT_OK(open_as_nobody(model_));
  }
  void TearDown() override { fs::permissions(model_, fs::perms(0755)); }

  TempDir dir_;
  std::string model_ = dir_.file("model");
  const std::vector<std::string> files_ = {"config.json", "hf_quant_config.json",
                                           "model-00002-of-00002.safetensors",
                                           "model.safetensors.index.json"};
};

ATTACK_TEST_F(kSpecialFiles, Unreadable, FilesAndFoldersWithTheReason) {
  for (const std::string& name : files_) {
    const std::string path = model_ + "/" + name;
    fs::permissions(path, fs::perms::none);
    attacked();
    EXPECT_THAT(open_as_nobody(model_),
                Refused(Code::kIo, path + ": cannot open: Permission denied"));
    fs::permissions(path, fs::perms(0644));
  }
  // May be listed, but none of its files may be opened; and nothing at all.
  for (const int mode : {0644, 0}) {
    fs::permissions(model_, fs::perms(mode));
    EXPECT_THAT(open_as_nobody(model_).message(), HasSubstr(": Permission denied"));
  }
  fs::permissions(model_, fs::perms(0755));
  fs::remove(fs::path(model_) / "model.safetensors.index.json");
  fs::permissions(model_, fs::perms(0311));  // may be entered, not listed
  EXPECT_EQ(open_as_nobody(model_).message(), model_ + ": cannot list: Permission denied");
}

// Links that lead nowhere, whose names exist all the same, and pointers of Git LFS.
ATTACK_TEST_F(kSpecialFiles, Unreadable, WhatStandsForAFileWithTheReason) {
  for (const std::string& name : files_) {
    const fs::path path = fs::path(model_) / name;
    fs::rename(path, path.string() + ".kept");
    for (const auto& [target, reason] : {std::pair(path, "Too many levels of symbolic links"),
                                         {fs::path("nowhere"), "No such file or directory"}}) {
      fs::create_symlink(target, path);
      attacked();
      EXPECT_EQ(Checkpoint::open(model_).status().message(),
                path.string() + ": cannot open: " + reason);
      fs::remove(path);
    }
    std::ofstream(path) << "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\n";
    attacked();
    EXPECT_THAT(Checkpoint::open(model_),
                Refused(Code::kBadInput,
                        path.string() + ": expected the file itself, got a Git-LFS pointer to it: "
                                        "run `git lfs pull` in its directory"));
    fs::remove(path);
    fs::rename(path.string() + ".kept", path);
  }
  fs::remove(fs::path(model_) / "model-00001-of-00002.safetensors");
  EXPECT_THAT(Checkpoint::open(model_).status().message(),
              HasSubstr("'model-00001-of-00002.safetensors', which is not there"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
