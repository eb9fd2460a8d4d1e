// The error of each reader of files for a path that is not a regular file.
#include "io/open_file.h"

#include <sys/stat.h>

#include <functional>

#include "io/content_hash.h"
#include "io/files.h"
#include "io/output_file.h"
#include "safetensors/safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(OpenRegularFile, IsReadAndAnythingElseRefusedByItsKind) {
  const TempDir dir;
  // There is no writer: a reader that waited would wait forever.
  ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600), 0);
  ASSERT_TRUE(std::filesystem::create_directory(dir.path() / "folder"));
  ASSERT_OK(must(SafetensorsWriter::create(dir.file("x.safetensors"), {}, {}))->finish());
  std::filesystem::create_symlink("x.safetensors", dir.path() / "link");
  const std::pair<std::string, const char*> kinds[] = {{dir.file("fifo"), "a FIFO"},
                                                       {dir.file("folder"), "a directory"},
                                                       {"/dev/null", "a character device"}};
  using Path = const std::string&;
  const struct {
    const char* name;
    bool follows_links;  // a user names the file
    std::function<Status(Path)> read;
  } readers[] = {
      {"SafetensorsFile", true, [](Path path) { return SafetensorsFile::open(path).status(); }},
      {"read_text_file", true, [](Path path) { return read_text_file(path).status(); }},
      {"hash_file", false, [](Path path) { return hash_file(path).status(); }},
      {"copy_file", false, [&](Path path) { return copy_file(path, dir.file("copy")); }}};
  for (const auto& reader : readers) {
    SCOPED_TRACE(reader.name);
    for (const auto& [path, kind] : kinds)
      EXPECT_THAT(reader.read(path),
                  Refused(Code::kBadInput, path + ": expected a regular file, got " + kind));
    EXPECT_FALSE(std::filesystem::exists(dir.file("copy")));
    const Status linked = reader.read(dir.file("link"));
    if (reader.follows_links)
      EXPECT_OK(linked);
    else
      EXPECT_THAT(linked, Refused(Code::kIo, "link: cannot open: Too many levels of symbolic"));
    EXPECT_THAT(reader.read(dir.file("missing")),
                Refused(Code::kIo, "missing: cannot open: No such file or directory"));
    EXPECT_OK(reader.read(dir.file("x.safetensors")));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
