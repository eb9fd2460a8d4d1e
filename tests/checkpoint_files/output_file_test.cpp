// OutputFile: whole files or none, and nothing replaced but regular files.
#include "io/output_file.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <functional>

#include "safetensors/safetensors.h"
#include "support/attack.h"
#include "support/forked_child.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

size_t entries(const fs::path& directory) {
  return static_cast<size_t>(
      std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
}

// Files that are not regular, each with its own name.
struct Special {
  const char* kind;
  std::function<void(const std::string&)> make;
};
const Special kSpecial[] = {
    {"a FIFO", [](const std::string& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); }},
    {"a directory", [](const std::string& path) { ASSERT_TRUE(fs::create_directory(path)); }},
    {"a socket",
     [](const std::string& path) {
       const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
       sockaddr_un address{};
       address.sun_family = AF_UNIX;
       ASSERT_LT(path.size(), sizeof address.sun_path);
       path.copy(address.sun_path, path.size());
       ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
       ::close(fd);
     }},
};

TEST(OutputFile, AppearsWholeAndReplacesARegularFile) {
  const TempDir dir;
  const std::string path = dir.file("x");
  std::ofstream(path) << "before";
  {
    auto unfinished = must(OutputFile::create(path));
    ASSERT_OK(unfinished->write(bytes_of("half")));
  }
  EXPECT_EQ(entries(dir.path()), 1u) << "an unfinished one leaves nothing";
  auto file = must(OutputFile::create(path));
  ASSERT_OK(file->write(bytes_of("after ")));
  EXPECT_EQ(read_file(path), "before") << "until the end";
  EXPECT_EQ(OutputFile::create(path).status().code(), Code::kBusy);
  const std::string large(3 << 20, 'x');
  ASSERT_OK(file->write(bytes_of(large)));
  ASSERT_OK(file->finish());
  EXPECT_EQ(read_file(path), "after " + large);
  EXPECT_EQ(entries(dir.path()), 1u);
  EXPECT_FALSE(file->finish().ok());
}

ATTACK_TEST(kSpecialFiles, OutputFile, WhatIsNoRegularFileIsRefusedAndStays) {
  for (const Special& special : kSpecial) {
    const TempDir dir;
    const std::string path = dir.file("x");
    special.make(path);
    const auto before = fs::symlink_status(path).type();
    for (const Status& status :
         {OutputFile::create(path).status(), output_path(path).status(),
          SafetensorsWriter::create(path, {}, {}).status(), write_text_file(path, "x")}) {
      attacked();
      EXPECT_THAT(status, Refused(Code::kInvalidArgument, special.kind));
      EXPECT_THAT(status.message(), HasSubstr(path));
    }
    EXPECT_EQ(fs::symlink_status(path).type(), before) << special.kind;
    EXPECT_EQ(entries(dir.path()), 1u);
  }
  // The special file appears while the bytes are made.
  const TempDir dir;
  auto file = must(OutputFile::create(dir.file("x")));
  ASSERT_EQ(::mkfifo(dir.file("x").c_str(), 0600), 0);
  attacked();
  EXPECT_EQ(file->finish().code(), Code::kInvalidArgument);
  EXPECT_TRUE(fs::is_fifo(dir.file("x")));
  EXPECT_EQ(entries(dir.path()), 1u);
}

ATTACK_TEST(kSpecialFiles, OutputFile, ALinkIsFollowedOnlyWhereAUserNamesIt) {
  const TempDir dir;
  std::ofstream(dir.file("target")) << "before";
  fs::create_symlink("target", dir.file("link"));
  attacked();
  EXPECT_EQ(OutputFile::create(dir.file("link")).status().code(), Code::kInvalidArgument);
  const auto path = must(output_path(dir.file("link")));
  EXPECT_EQ(*path, fs::canonical(dir.path()) / "target");
  ASSERT_OK(write_text_file(*path, "after"));
  EXPECT_TRUE(fs::is_symlink(dir.file("link")));
  EXPECT_EQ(read_file(dir.file("target")), "after");
  for (const char* target : {"nothing", "loop", "/dev/null"}) {
    fs::create_symlink(target, dir.file("loop"));
    attacked();
    EXPECT_THAT(output_path(dir.file("loop")), Refused(Code::kInvalidArgument, dir.file("loop")));
    fs::remove(dir.file("loop"));
  }
}

ATTACK_TEST(kSpecialFiles, OutputFile, WhatCannotBeWrittenIsSaidFirst) {
  const TempDir dir;
  EXPECT_EQ(output_path(dir.file("none/x")).status().code(), Code::kIo);
  EXPECT_EQ(output_path("").status().code(), Code::kInvalidArgument);
  fs::permissions(dir.path(), fs::perms(0755));
  fs::create_directory(dir.file("open"));
  fs::permissions(dir.file("open"), fs::perms(0777));
  std::ofstream(dir.file("open/kept")) << "kept";
  fs::permissions(dir.file("open/kept"), fs::perms(0444));
  EXPECT_EQ(in_forked_child([&] {
              if (::geteuid() == 0 && ::setuid(65534) != 0) return 9;
              if (output_path(dir.file("open/kept")).status().code() != Code::kIo) return 1;
              if (!output_path(dir.file("open/new")).ok()) return 2;
              // A user who owns the folder may write to it.
              if (::access(dir.path().c_str(), W_OK) == 0) return 0;
              return output_path(dir.file("new")).status().code() == Code::kIo ? 0 : 3;
            }),
            0);
}

// The temporary name: a leftover is reused, but not through a link, and files that are not ours
// stay.
ATTACK_TEST(kSpecialFiles, OutputFile, ALeftoverOfAKilledRunIsTaken) {
  const TempDir dir;
  const std::string path = dir.file("x"), partial = partial_path(path);
  std::ofstream(dir.file("other")) << "other";
  fs::create_hard_link(dir.file("other"), partial);
  ASSERT_OK(write_text_file(path, "whole"));
  EXPECT_EQ(read_file(path), "whole");
  EXPECT_EQ(read_file(dir.file("other")), "other") << "a leftover is removed, never written into";
  EXPECT_FALSE(fs::exists(partial));
  for (const Special& special : kSpecial) {
    special.make(partial);
    attacked();
    EXPECT_EQ(write_text_file(path, "again").code(), Code::kInvalidArgument) << special.kind;
    EXPECT_NE(fs::symlink_status(partial).type(), fs::file_type::not_found);
    fs::remove(partial);
  }
  fs::create_symlink("other", partial);
  attacked();
  EXPECT_EQ(write_text_file(path, "again").code(), Code::kInvalidArgument);
  EXPECT_EQ(read_file(path), "whole");
  EXPECT_EQ(read_file(dir.file("other")), "other");
  // A user's own file whose name merely has the same ending.
  std::ofstream(dir.file("y.partial")) << "download";
  ASSERT_OK(write_text_file(dir.file("y"), "y"));
  EXPECT_EQ(read_file(dir.file("y.partial")), "download");
}

TEST(SameFile, IsSeenByAnyName) {
  const TempDir dir;
  std::ofstream(dir.file("a")) << "a";
  std::ofstream(dir.file("b")) << "a";
  fs::create_hard_link(dir.file("a"), dir.file("hard"));
  fs::create_symlink("a", dir.file("soft"));
  for (const char* same : {"hard", "soft", "./a"})
    EXPECT_TRUE(same_file(dir.file("a"), dir.file(same))) << same;
  for (const char* other : {"b", "new"})
    EXPECT_FALSE(same_file(dir.file("a"), dir.file(other))) << other;
  EXPECT_TRUE(same_file(dir.file("new"), dir.file("./new")));
  EXPECT_FALSE(same_file(dir.file("new"), dir.file("new2")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
