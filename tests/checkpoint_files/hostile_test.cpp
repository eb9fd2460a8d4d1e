// Hostile files: each case of the table, every truncation of a good file, and every byte of its
// header disturbed.
#include <set>

#include "safetensors/safetensors.h"
#include "support/attack.h"
#include "support/hostile_safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

Result<SafetensorsHeader> parse(const std::string& head, uint64_t file_size_bytes) {
  return parse_safetensors_header(std::as_bytes(std::span(head)), file_size_bytes);
}
std::string good_file() {
  return read_file(NVFP4_MOE_SOURCE_DIR "/tests/vectors/safetensors/python.safetensors");
}

// One line that a terminal shows unchanged, and short enough to be read.
void expect_presentable(const std::string& message) {
  EXPECT_LE(message.size(), 800u) << message;
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    EXPECT_TRUE(byte >= 0x20 && byte != 0x7F) << message;
  }
}

ATTACK_TEST(kHostileFiles, HostileTable, IsRefusedInOneLineEach) {
  TempDir dir;
  std::set<std::string> names;
  for (const HostileCase& hostile : hostile_cases()) {
    SCOPED_TRACE(hostile.name);
    EXPECT_TRUE(names.insert(hostile.name).second);
    const std::filesystem::path path = dir.path() / hostile.name;
    write_hostile_case(path, hostile);
    const auto index = TensorIndex::open(path.string());
    attacked();
    std::filesystem::remove_all(path);
    if (index.ok()) {
      ADD_FAILURE() << "accepted";
      continue;
    }
    const Status& status = index.status();
    EXPECT_EQ(status.code(), Code::kBadInput) << status.message();
    expect_presentable(status.message());
    EXPECT_THAT(status.message(), StartsWith(path.string()));
    for (const std::string& word : hostile.words) EXPECT_THAT(status.message(), HasSubstr(word));
  }
}

ATTACK_TEST(kTruncations, HostileHeader, EveryTruncationIsRefused) {
  const std::string good = good_file();
  const uint64_t data_offset = must(parse(good, good.size()))->data_offset;
  for (size_t size = 0; size < good.size(); ++size) {
    // a separate allocation, so that sanitizers detect a read past its end
    const std::string cut = good.substr(0, size);
    attacked();
    ASSERT_EQ(parse(cut, cut.size()).status().code(), Code::kBadInput) << size;
    // The file is complete, but the caller passes less of it than the header needs.
    ASSERT_EQ(parse(cut, good.size()).ok(), size >= data_offset) << size;
  }
}

ATTACK_TEST(kHostileFiles, HostileHeader, DisturbedBytesNeverBreakTheTiling) {
  const std::string good = good_file();
  const uint64_t data_offset = must(parse(good, good.size()))->data_offset;
  int refused = 0;
  int accepted = 0;
  for (size_t at = 0; at < data_offset; ++at) {
    for (const char byte : {'\0', '"', '{', ']', '9', '-', '.', ' ', '\xFF'}) {
      std::string bent = good;
      bent[at] = byte;
      const auto header = parse(bent, bent.size());
      attacked();
      if (!header.ok()) {
        ASSERT_EQ(header.status().code(), Code::kBadInput);
        expect_presentable(header.status().message());
        ++refused;
        continue;
      }
      ++accepted;  // a name or a shape of the same product
      uint64_t covered = 0;
      for (const TensorInfo& info : header->tensors) {
        ASSERT_EQ(info.begin, covered);
        covered = info.end;
      }
      ASSERT_EQ(header->data_offset + covered, bent.size());
    }
  }
  EXPECT_GT(refused, accepted);
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
