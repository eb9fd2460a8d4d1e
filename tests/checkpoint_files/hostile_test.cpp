// Hostile files: each case of the table, every truncation of a good file, and every byte of its
// header disturbed.
#include <set>

#include "safetensors/safetensors.h"
#include "support/attack.h"
#include "support/hostile_safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
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
  for (const HostileCase& hostile : hostile_cases()) {
    SCOPED_TRACE(hostile.name);
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

TEST(HostileTable, HasEnoughCasesWithNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const HostileCase& hostile : hostile_cases()) EXPECT_TRUE(names.insert(hostile.name).second);
  EXPECT_GE(names.size(), 60u);
}

// The files are valid before the table alters them; otherwise a case could be refused for another
// reason.
TEST(HostileTable, TheGoodFilesAreGood) {
  const std::string header = "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
  const std::string file = safetensors_bytes(header, 4);
  EXPECT_OK(parse_safetensors_header(as_bytes(file), file.size()));
  const std::string padded = safetensors_bytes(header + " \n\t ", 4);
  EXPECT_OK(parse_safetensors_header(as_bytes(padded), padded.size()));
}

ATTACK_TEST(kTruncations, HostileHeader, EveryTruncationIsRefused) {
  const std::string good =
      read_file(NVFP4_MOE_SOURCE_DIR "/tests/vectors/safetensors/python.safetensors");
  ASSERT_OK(parse_safetensors_header(as_bytes(good), good.size()));
  for (size_t size = 0; size < good.size(); ++size) {
    // a separate allocation, so that sanitizers detect a read past its end
    const std::string cut = good.substr(0, size);
    const auto header = parse_safetensors_header(as_bytes(cut), cut.size());
    attacked();
    ASSERT_FALSE(header.ok()) << size;
    ASSERT_EQ(header.status().code(), Code::kBadInput);
    // The file is complete, but the caller passes less of it than the header needs.
    const auto partial = parse_safetensors_header(as_bytes(cut), good.size());
    const uint64_t data_offset = parse_safetensors_header(as_bytes(good), good.size())->data_offset;
    ASSERT_EQ(partial.ok(), size >= data_offset) << size;
  }
}

ATTACK_TEST(kHostileFiles, HostileHeader, DisturbedBytesNeverBreakTheTiling) {
  const std::string good =
      read_file(NVFP4_MOE_SOURCE_DIR "/tests/vectors/safetensors/python.safetensors");
  const uint64_t data_offset = parse_safetensors_header(as_bytes(good), good.size())->data_offset;
  int refused = 0;
  int accepted = 0;
  for (size_t at = 0; at < data_offset; ++at) {
    for (const char byte : {'\0', '"', '{', ']', '9', '-', '.', ' ', '\xFF'}) {
      std::string bent = good;
      bent[at] = byte;
      const auto header = parse_safetensors_header(as_bytes(bent), bent.size());
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
