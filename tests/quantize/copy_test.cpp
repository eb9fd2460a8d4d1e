// Files that quantize copies in addition to a model's weights, and links that stay inside the
// model.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "convert/checkpoint_copy.h"
#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "support/as_nobody.h"
#include "support/attack.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

SynthesizeOptions one_layer() {
  return {.layers = 1,
          .num_experts = 2,
          .top_k = 1,
          .hidden_size = 32,
          .intermediate_size = 16,
          .vocab_size = 16};
}

class Copy : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(in_, one_layer()));
    std::ofstream(dir_.file("secret")) << "root:x:0";
    fs::create_directory(dir_.file("secrets"));
    std::ofstream(dir_.file("secrets/key")) << "key";
  }
  void expect_refused(const std::string& link) {
    attacked();
    for (const Status& status :
         {quantize_checkpoint(in_, out_).status(), other_files(in_).status()}) {
      EXPECT_THAT(status, Refused(Code::kBadInput, link));
    }
    EXPECT_FALSE(fs::exists(out_)) << "before any work";
    fs::remove(link);
  }
  TempDir dir_;
  std::string in_ = dir_.file("in"), out_ = dir_.file("out");
};

ATTACK_TEST_F(kSpecialFiles, Copy, ALinkOutOfTheModelIsRefusedByName) {
  const std::string link = fs::canonical(in_).string() + "/notes.txt";
  for (const std::string& target :
       {dir_.file("secret"), std::string("../secret"), std::string("/etc/passwd"),
        dir_.file("secrets"), std::string("nothing"), std::string("notes.txt"),
        std::string("../in-other/x")}) {
    fs::create_symlink(target, link);
    expect_refused(link);
  }
  // A folder whose name merely begins like the model's is not the model.
  fs::create_directory(dir_.file("in-other"));
  std::ofstream(dir_.file("in-other/x")) << "x";
  fs::create_symlink("../in-other/x", link);
  expect_refused(link);
  // Through another link, in a folder below, and under a config's name.
  fs::create_directory(in_ + "/sub");
  fs::create_symlink("../../secret", in_ + "/sub/notes.txt");
  expect_refused(fs::canonical(in_).string() + "/sub/notes.txt");
  fs::create_symlink("../secret", in_ + "/hf_quant_config.json");
  Status status = other_files(in_).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  fs::remove(in_ + "/hf_quant_config.json");
  // A folder around the link would be copied without end.
  fs::create_symlink("..", in_ + "/sub/up");
  expect_refused(fs::canonical(in_).string() + "/sub/up");
  EXPECT_OK(quantize_checkpoint(in_, out_));
}

TEST_F(Copy, ALinkInsideTheModelIsCopiedAsItsFile) {
  fs::create_directory(in_ + "/real");
  std::ofstream(in_ + "/real/a.txt") << "a";
  fs::create_symlink("real/a.txt", in_ + "/file.txt");
  fs::create_symlink(fs::canonical(in_ + "/real/a.txt"), in_ + "/absolute.txt");
  fs::create_symlink("real", in_ + "/folder");
  const auto result = must(quantize_checkpoint(in_, out_));
  EXPECT_EQ(result->copied_files,
            (std::vector<std::string>{"absolute.txt", "file.txt", "folder/a.txt", "real/a.txt"}));
  for (const std::string& name : result->copied_files) {
    EXPECT_EQ(read_file(out_ + "/" + name), "a") << name;
    EXPECT_FALSE(fs::is_symlink(out_ + "/" + name));
  }
  // The model's folder may itself be reached through a link.
  fs::create_symlink(in_, dir_.file("alias"));
  const auto again = must(quantize_checkpoint(dir_.file("alias"), dir_.file("out2")));
  EXPECT_EQ(again->copied_files, result->copied_files);
}

// Hugging Face's cache: the snapshot holds links into the repository's blobs.
TEST_F(Copy, TheHubsCacheIsOneModel) {
  const fs::path repository = dir_.path() / "models--a--b";
  const fs::path snapshot = repository / "snapshots" / "0123abcd";
  fs::create_directories(repository / "blobs");
  fs::create_directories(snapshot / "sub");
  std::ofstream(in_ + "/tokenizer.json") << "{}";
  int number = 0;
  for (const auto& entry : fs::directory_iterator(in_)) {
    const fs::path blob = repository / "blobs" / std::to_string(number++);
    fs::rename(entry.path(), blob);
    fs::create_symlink(fs::path("../../blobs") / blob.filename(),
                       snapshot / entry.path().filename());
  }
  std::ofstream(repository / "blobs" / "code") << "pass";
  fs::create_symlink("../../../blobs/code", snapshot / "sub" / "code.py");
  const auto result = must(quantize_checkpoint(snapshot.string(), out_));
  EXPECT_EQ(result->copied_files, (std::vector<std::string>{"sub/code.py", "tokenizer.json"}));
  EXPECT_EQ(read_file(out_ + "/sub/code.py"), "pass");

  // Only the blobs: no other revision and no other files.
  std::ofstream(repository / "refs") << "main";
  fs::create_symlink("../../refs", snapshot / "refs.txt");
  const Status status = quantize_checkpoint(snapshot.string(), dir_.file("out3")).status();
  EXPECT_THAT(status, Refused(Code::kBadInput, "refs.txt"));
}

// A copy without its tokenizer would pass as a success, so an unreadable file is an error with its
// name.
ATTACK_TEST_F(kUnreadableExtras, Copy, WhatCannotBeReadIsRefusedByNameBeforeAnyWork) {
  fs::permissions(dir_.path(), fs::perms(0755));
  fs::create_directories(in_ + "/sub/deep");
  for (const char* name : {"tokenizer.json", "sub/code.py", "sub/deep/a.txt"})
    std::ofstream(in_ + "/" + name) << "x";
  for (const auto& entry : fs::recursive_directory_iterator(in_))
    fs::permissions(entry.path(), fs::perms(entry.is_directory() ? 0755 : 0644));
  fs::permissions(in_, fs::perms(0755));
  const auto refused = [&](const std::string& name, Code code, const std::string& words) {
    attacked();
    const AsNobody nobody;
    for (const Status& status :
         {other_files(in_).status(), quantize_checkpoint(in_, out_).status()}) {
      EXPECT_EQ(status.code(), code) << name << ": " << status.message();
      EXPECT_THAT(status.message(),
                  HasSubstr(fs::canonical(in_).string() + "/" + name + ": " + words));
    }
    EXPECT_FALSE(fs::exists(out_)) << name;
  };
  {
    const AsNobody nobody;
    EXPECT_EQ(other_files(in_)->size(), 3u);
  }
  for (const char* name : {"tokenizer.json", "sub/code.py", "sub/deep/a.txt"}) {
    fs::permissions(in_ + "/" + name, fs::perms::none);
    refused(name, Code::kIo, "cannot open: Permission denied");
    fs::permissions(in_ + "/" + name, fs::perms(0644));
  }
  for (const char* name : {"sub", "sub/deep"}) {
    fs::permissions(in_ + "/" + name, fs::perms(0311));  // may be entered, not listed
    refused(name, Code::kIo, "cannot list: Permission denied");
    fs::permissions(in_ + "/" + name, fs::perms(0755));
  }
  fs::permissions(in_ + "/sub", fs::perms(0644));  // may be listed, but no file in it read
  refused("sub/code.py", Code::kIo, "cannot stat: Permission denied");
  fs::permissions(in_ + "/sub", fs::perms(0755));
  ASSERT_EQ(::mkfifo((in_ + "/sub/pipe").c_str(), 0644), 0);
  refused("sub/pipe", Code::kBadInput, "expected a regular file, got a FIFO");
  fs::remove(in_ + "/sub/pipe");
  // Only the config at the top is rewritten; one in a subfolder is a file like any other.
  std::ofstream(in_ + "/sub/hf_quant_config.json") << "{}";
  const auto result = must(quantize_checkpoint(in_, out_));
  EXPECT_EQ(result->copied_files,
            (std::vector<std::string>{"sub/code.py", "sub/deep/a.txt", "sub/hf_quant_config.json",
                                      "tokenizer.json"}));
}

TEST_F(Copy, PermissionsStay) {
  std::ofstream(in_ + "/run.sh") << "#!/bin/sh";
  fs::permissions(in_ + "/run.sh", fs::perms(0750));
  ASSERT_OK(quantize_checkpoint(in_, out_));
  EXPECT_EQ(fs::status(out_ + "/run.sh").permissions(), fs::perms(0750));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
