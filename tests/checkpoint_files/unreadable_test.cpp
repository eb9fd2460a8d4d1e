// Unreadable files are reported with the system's reason, and a Git LFS pointer with the command
// that fetches the file.
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "safetensors/safetensors.h"
#include "support/as_nobody.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPointer =
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize "
    "4998663184\n";

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
};

ATTACK_TEST_F(kSpecialFiles, Unreadable, FilesAndFoldersWithTheReason) {
  const std::string shard = "model-00002-of-00002.safetensors";
  for (const std::string& name : {std::string("config.json"), std::string("hf_quant_config.json"),
                                  std::string("model.safetensors.index.json"), shard}) {
    const fs::path path = fs::path(model_) / name;
    fs::permissions(path, fs::perms::none);
    const Status status = open_as_nobody(model_);
    attacked();
    EXPECT_EQ(status.code(), Code::kIo) << name;
    EXPECT_EQ(status.message(), path.string() + ": cannot open: Permission denied");
    fs::permissions(path, fs::perms(0644));
  }
  fs::permissions(model_, fs::perms(0644));  // may be listed, but none of its files may be opened
  EXPECT_THAT(open_as_nobody(model_).message(), HasSubstr(": Permission denied"));
  fs::permissions(model_, fs::perms::none);
  EXPECT_THAT(open_as_nobody(model_).message(), HasSubstr(": Permission denied"));
  fs::permissions(model_, fs::perms(0755));
  fs::remove(fs::path(model_) / "model.safetensors.index.json");
  fs::permissions(model_, fs::perms(0311));  // may be entered, not listed
  EXPECT_EQ(open_as_nobody(model_).message(), model_ + ": cannot list: Permission denied");
  fs::permissions(model_, fs::perms(0755));
  fs::create_directory(fs::path(model_) / "inner");
  fs::permissions(model_, fs::perms::none);
  EXPECT_EQ(open_as_nobody(model_ + "/inner").message(),
            model_ + "/inner: cannot open: Permission denied");
}

// A name that exists but cannot be followed is not a missing name.
ATTACK_TEST_F(kSpecialFiles, Unreadable, LinksThatLeadNowhere) {
  for (const char* name :
       {"hf_quant_config.json", "config.json", "model-00001-of-00002.safetensors"}) {
    const fs::path path = fs::path(model_) / name;
    fs::rename(path, path.string() + ".kept");
    fs::create_symlink(path, path);
    attacked();
    EXPECT_EQ(Checkpoint::open(model_).status().message(),
              path.string() + ": cannot open: Too many levels of symbolic links");
    fs::remove(path);
    fs::create_symlink("nowhere", path);
    attacked();
    EXPECT_EQ(Checkpoint::open(model_).status().message(),
              path.string() + ": cannot open: No such file or directory");
    fs::remove(path);
    fs::rename(path.string() + ".kept", path);
  }
  fs::remove(fs::path(model_) / "model-00001-of-00002.safetensors");
  EXPECT_THAT(Checkpoint::open(model_).status().message(),
              HasSubstr("'model-00001-of-00002.safetensors', which is not there"));
}

ATTACK_TEST_F(kSpecialFiles, Unreadable, GitLfsPointersWithWhatToDo) {
  for (const char* name : {"model-00002-of-00002.safetensors", "model.safetensors.index.json",
                           "config.json", "hf_quant_config.json"}) {
    const fs::path path = fs::path(model_) / name;
    fs::rename(path, path.string() + ".kept");
    std::ofstream(path) << kPointer;
    attacked();
    const Status status = Checkpoint::open(model_).status();
    EXPECT_EQ(status.code(), Code::kBadInput) << name;
    EXPECT_EQ(status.message(), path.string() +
                                    ": expected the file itself, got a Git-LFS pointer to it: run "
                                    "`git lfs pull` in its directory, or "
                                    "download the file");
    fs::remove(path);
    fs::rename(path.string() + ".kept", path);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
