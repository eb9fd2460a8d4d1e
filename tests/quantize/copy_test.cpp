// Files that quantize copies in addition to a model's weights, and links that stay inside the
// model.
#include <sys/stat.h>

#include <filesystem>

#include "convert/checkpoint_copy.h"
#include "quantize/models.h"
#include "support/as_nobody.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

class Copy : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(in_, tiny_model()));
    fs::permissions(dir_.path(), fs::perms(0755));
    fs::create_directories(dir_.file("secrets"));
    std::ofstream(dir_.file("secrets/key")) << "key";
  }
  void expect_refused(const std::string& name, Code code, const std::string& words) {
    attacked();
    const AsNobody nobody;
    for (const Status& status :
         {other_files(in_).status(), quantize_checkpoint(in_, out_).status()})
      EXPECT_THAT(status, Refused(code, fs::canonical(in_).string() + "/" + name + ": " + words));
    EXPECT_FALSE(fs::exists(out_)) << "before any work";
  }
  TempDir dir_;
  const std::string in_ = dir_.file("in"), out_ = dir_.file("out");
};

ATTACK_TEST_F(kSpecialFiles, Copy, ALinkOutOfTheModelIsRefusedByName) {
  // A folder whose name merely begins like the model's is not the model.
  fs::create_directory(dir_.file("in-other"));
  std::ofstream(dir_.file("in-other/x")) << "x";
  fs::create_directory(in_ + "/sub");
  const std::pair<std::string, std::string> links[] = {
      {"notes.txt", dir_.file("secrets/key")},
      {"notes.txt", "../secrets/key"},
      {"notes.txt", "/etc/passwd"},
      {"notes.txt", dir_.file("secrets")},
      {"notes.txt", "nothing"},
      {"notes.txt", "notes.txt"},
      {"notes.txt", "../in-other/x"},
      {"sub/notes.txt", "../../secrets/key"},
      {"sub/up", ".."}};  // would be copied without end
  for (const auto& [name, target] : links) {
    SCOPED_TRACE(name + " -> " + target);
    fs::create_symlink(target, in_ + "/" + name);
    expect_refused(name, Code::kBadInput, "a symbolic link ");
    fs::remove(in_ + "/" + name);
  }
  fs::create_symlink("../secrets/key", in_ + "/hf_quant_config.json");
  EXPECT_EQ(other_files(in_).status().code(), Code::kBadInput);
  fs::remove(in_ + "/hf_quant_config.json");
  EXPECT_OK(quantize_checkpoint(in_, out_));
}

TEST_F(Copy, ALinkInsideTheModelIsCopiedAsItsFile) {
  fs::create_directory(in_ + "/real");
  std::ofstream(in_ + "/real/a.txt") << "a";
  fs::permissions(in_ + "/real/a.txt", fs::perms(0750));
  fs::create_symlink("real/a.txt", in_ + "/file.txt");
  fs::create_symlink(fs::canonical(in_ + "/real/a.txt"), in_ + "/absolute.txt");
  fs::create_symlink("real", in_ + "/folder");
  const auto result = must(quantize_checkpoint(in_, out_));
  EXPECT_EQ(result->copied_files,
            (Names{"absolute.txt", "file.txt", "folder/a.txt", "real/a.txt"}));
  for (const std::string& name : result->copied_files) {
    EXPECT_EQ(read_file(out_ + "/" + name), "a") << name;
    EXPECT_FALSE(fs::is_symlink(out_ + "/" + name));
    EXPECT_EQ(fs::status(out_ + "/" + name).permissions(), fs::perms(0750));
  }
  // The model's folder may itself be reached through a link.
  fs::create_symlink(in_, dir_.file("alias"));
  EXPECT_EQ(must(quantize_checkpoint(dir_.file("alias"), dir_.file("out2")))->copied_files,
            result->copied_files);
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
  EXPECT_EQ(result->copied_files, (Names{"sub/code.py", "tokenizer.json"}));
  EXPECT_EQ(read_file(out_ + "/sub/code.py"), "pass");
  // Only the blobs: no other revision and no other files.
  std::ofstream(repository / "refs") << "main";
  fs::create_symlink("../../refs", snapshot / "refs.txt");
  EXPECT_THAT(quantize_checkpoint(snapshot.string(), dir_.file("out3")),
              Refused(Code::kBadInput, "refs.txt"));
}

// A copy without its tokenizer would pass as a success, so an unreadable file is an error with its
// name.
ATTACK_TEST_F(kUnreadableExtras, Copy, WhatCannotBeReadIsRefusedByNameBeforeAnyWork) {
  fs::create_directories(in_ + "/sub/deep");
  const Names names = {"sub/code.py", "sub/deep/a.txt", "tokenizer.json"};
  for (const std::string& name : names) std::ofstream(in_ + "/" + name) << "x";
  for (const auto& entry : fs::recursive_directory_iterator(in_))
    fs::permissions(entry.path(), fs::perms(entry.is_directory() ? 0755 : 0644));
  fs::permissions(in_, fs::perms(0755));
  {
    const AsNobody nobody;
    EXPECT_EQ(other_files(in_)->size(), 3u);
  }
  const auto refused = [&](const std::string& changed, int mode, const std::string& name,
                           const std::string& words) {
    const fs::path path = in_ + "/" + changed;
    const fs::perms before = fs::status(path).permissions();
    fs::permissions(path, fs::perms(mode));
    expect_refused(name, Code::kIo, words);
    fs::permissions(path, before);
  };
  for (const std::string& name : names) refused(name, 0, name, "cannot open: Permission denied");
  for (const char* name : {"sub", "sub/deep"})  // may be entered, not listed
    refused(name, 0311, name, "cannot list: Permission denied");
  // May be listed, but no file in it read.
  refused("sub", 0644, "sub/code.py", "cannot stat: Permission denied");
  ASSERT_EQ(::mkfifo((in_ + "/sub/pipe").c_str(), 0644), 0);
  expect_refused("sub/pipe", Code::kBadInput, "expected a regular file, got a FIFO");
  fs::remove(in_ + "/sub/pipe");
  // Only the config at the top is rewritten; one in a subfolder is a file like any other.
  std::ofstream(in_ + "/sub/hf_quant_config.json") << "{}";
  EXPECT_EQ(must(quantize_checkpoint(in_, out_))->copied_files,
            (Names{"sub/code.py", "sub/deep/a.txt", "sub/hf_quant_config.json", "tokenizer.json"}));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
