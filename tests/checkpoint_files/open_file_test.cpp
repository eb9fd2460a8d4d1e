// The error of each reader of files for a path that is not a regular file.
#include "io/open_file.h"

#include <sys/stat.h>

#include <fstream>
#include <functional>

#include "io/content_hash.h"
#include "io/files.h"
#include "io/output_file.h"
#include "safetensors/safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

struct Reader {
  const char* name;
  bool follows_links;
  std::function<Status(const std::string& path)> read;
};

std::vector<Reader> readers(const TempDir& dir) {
  return {{"SafetensorsFile", true,
           [](const std::string& path) { return SafetensorsFile::open(path).status(); }},
          {"read_text_file", true,
           [](const std::string& path) { return read_text_file(path).status(); }},
          {"hash_file", false, [](const std::string& path) { return hash_file(path).status(); }},
          {"copy_file", false,
           [copy = dir.file("copy")](const std::string& path) { return copy_file(path, copy); }}};
}

TEST(OpenRegularFile, AnythingElseIsRefusedByItsKind) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo(dir.file("fifo").c_str(), 0600),
            0);  // there is no writer: a reader that waited would wait forever
  ASSERT_TRUE(std::filesystem::create_directory(dir.path() / "folder"));
  const std::pair<std::string, const char*> cases[] = {{dir.file("fifo"), "a FIFO"},
                                                       {dir.file("folder"), "a directory"},
                                                       {"/dev/null", "a character device"}};
  for (const Reader& reader : readers(dir)) {
    for (const auto& [path, kind] : cases) {
      const Status status = reader.read(path);
      EXPECT_EQ(status.code(), Code::kBadInput) << reader.name << " of " << kind;
      EXPECT_EQ(status.message(), path + ": expected a regular file, got " + kind) << reader.name;
    }
  }
  EXPECT_FALSE(std::filesystem::exists(dir.file("copy")));
}

TEST(OpenRegularFile, LinksAreFollowedWhereAUserNamesThem) {
  const TempDir dir;
  std::vector<TensorInfo> none;
  auto writer = must(SafetensorsWriter::create(dir.file("x.safetensors"), none, {}));
  ASSERT_OK(writer->finish());
  std::filesystem::create_symlink("x.safetensors", dir.path() / "link");
  for (const Reader& reader : readers(dir)) {
    EXPECT_OK(reader.read(dir.file("x.safetensors")));
    const Status linked = reader.read(dir.file("link"));
    EXPECT_EQ(linked.code(), reader.follows_links ? Code::kOk : Code::kIo) << reader.name;
    if (!reader.follows_links) {
      EXPECT_THAT(linked.message(),
                  HasSubstr("link: cannot open: Too many levels of symbolic links"))
          << reader.name;
    }
    const Status missing = reader.read(dir.file("missing"));
    EXPECT_EQ(missing.code(), Code::kIo) << reader.name;
    EXPECT_THAT(missing.message(), HasSubstr("missing: cannot open: No such file or directory"))
        << reader.name;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
