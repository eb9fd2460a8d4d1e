// Hostile GGUF files: a table of wrong ones, every truncation of a good one, and every byte of its
// header changed.
#include <functional>
#include <set>

#include "checkpoint/checkpoint.h"
#include "gguf/gguf.h"
#include "support/attack.h"
#include "support/gguf_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

Result<GgufHeader> parse(const std::string& head, uint64_t file_size, bool* more_needed = nullptr) {
  return parse_gguf_header(std::as_bytes(std::span(head)), file_size, more_needed);
}

void expect_presentable(const Status& status) {
  EXPECT_TRUE(status.code() == Code::kBadInput || status.code() == Code::kUnsupported)
      << status.message();
  EXPECT_LE(status.message().size(), 800u) << status.message();
  for (const char c : status.message()) {
    const auto byte = static_cast<unsigned char>(c);
    EXPECT_TRUE(byte >= 0x20 && byte != 0x7F) << status.message();
  }
}

using Words = std::vector<std::string>;
const std::string kOnes = le64(~uint64_t{0});
const std::string kMagic = "GGUF" + le32(3);

struct FileCase {
  const char* name;
  std::string bytes;
  Words words;
};
const FileCase kFiles[] = {
    {"empty", "", {"magic", "cut off"}},
    {"only_magic", "GGUF", {"version", "cut off"}},
    {"tensors_all_ones", kMagic + kOnes + le64(0), {"tensors", "18446744073709551615"}},
    {"pairs_all_ones", kMagic + le64(0) + kOnes, {"metadata pairs", "18446744073709551615"}},
    {"key_all_ones", kMagic + le64(0) + le64(1) + kOnes, {"key", "cut off"}},
    {"git_lfs_pointer",
     "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
     {"git lfs pull"}},
};

// Metadata pairs: key, type and bytes.
struct PairCase {
  const char* name;
  std::string key;
  uint32_t type;
  std::string bytes;
  Words words;
};
const PairCase kPairs[] = {
    {"key_empty", "", 4, le32(1), {"keys of 1 to 65535 bytes", "got 0"}},
    {"key_too_long", std::string(65536, 'k'), 4, le32(1), {"keys of 1 to 65535", "got 65536"}},
    {"key_bad_utf8", "a\xFF", 4, le32(1), {"metadata 'a\\xFF'", "invalid UTF-8"}},
    {"key_twice", "general.architecture", 8, gguf_text("x"), {"'general.architecture'", "twice"}},
    {"value_type_13", "k", 13, le32(1), {"metadata 'k'", "value type from 0 to 12", "got 13"}},
    {"text_all_ones", "k", 8, kOnes, {"metadata 'k'", "18446744073709551615", "cut off"}},
    {"array_of_arrays", "k", 9, le32(9) + le64(1) + le32(4) + le64(0), {"elements of type 9"}},
    {"array_all_ones", "k", 9, le32(4) + kOnes, {"metadata 'k'", "elements in what is left"}},
    {"array_past_the_end", "k", 9, le32(12) + le64(20), {"elements in what is left", "got 20"}},
    {"array_of_strings_all_ones", "k", 9, le32(8) + kOnes, {"strings in what is left"}},
    {"alignment_three", "general.alignment", 4, le32(3), {"power of two", "got 3"}},
    {"alignment_text", "general.alignment", 8, gguf_text("32"), {"got '32'"}},
};

// Shapes and types of a tensor with the data of (2, 2) floats.
struct ShapeCase {
  const char* name;
  std::vector<uint64_t> shape;
  uint32_t type;
  Words words;
};
const ShapeCase kShapes[] = {
    {"five_dimensions", {1, 1, 1, 2, 2}, 0, {"tensor 'x'", "at most 4 dimensions", "got 5"}},
    {"dimension_2_63", {uint64_t{1} << 63, 2}, 0, {"tensor 'x'", "9223372036854775808"}},
    {"overflow_to_zero", {uint64_t{1} << 32, uint64_t{1} << 32}, 0, {"tensor 'x'", "overflows"}},
    {"overflow_in_bytes", {uint64_t{1} << 59, 2}, 28, {"tensor 'x'"}},
    {"type_4", {2, 2}, 4, {"tensor 'x'", "ggml type with a known size", "got 4"}},
    {"no_whole_block", {2, 96}, GgufBuilder::kNvfp4, {"whole blocks of 64", "NVFP4", "(2, 96)"}},
    {"larger_than_its_data", {1, 64}, GgufBuilder::kF32, {"tensor 'x'", "cut off"}},
    {"smaller_than_its_data", {0, 2}, GgufBuilder::kF32, {"data: expected 0 to 0", "got 32"}},
};

// Other edits of a file with this tensor.
struct EditCase {
  const char* name;
  std::function<void(GgufBuilder&)> edit;
  Words words;
};
const EditCase kEdits[] = {
    {"other_magic", [](auto& b) { b.magic = "GGML"; }, {"'GGUF'", "'GGML'"}},
    {"version_4", [](auto& b) { b.version = 4; }, {"version 2 or 3", "got 4"}},
    {"big_endian", [](auto& b) { b.version = 3u << 24; }, {"little-endian", "big-endian"}},
    {"many_tensors", [](auto& b) { b.more_tensors = 1 << 20; }, {"at most 1048576 tensors"}},
    {"one_more_tensor", [](auto& b) { b.more_tensors = 1; }, {"tensor"}},
    {"name_empty", [](auto& b) { b.tensors()[0].name = ""; }, {"1 to 4096 bytes", "got 0"}},
    {"name_too_long", [](auto& b) { b.tensors()[0].name.resize(4097, 'n'); }, {"got 4097"}},
    {"name_bad_utf8", [](auto& b) { b.tensors()[0].name = "\xC0\xAF"; }, {"invalid UTF-8"}},
    {"name_twice", [](auto& b) { b.tensor("x", {1}, 0, "1234"); }, {"tensor 'x'", "twice"}},
    {"offset_unaligned", [](auto& b) { b.tensors()[0].offset = 4; }, {"alignment 32", "got 4"}},
    {"hole_at_the_start", [](auto& b) { b.tensors()[0].offset = 32; }, {"expected 0", "got 32"}},
    {"overlap",
     [](auto& b) { b.tensor("y", {1}, 0, "1234").tensors()[1].offset = 0; },
     {"tensor 'y'", "expected 32", "got 0"}},
    {"hole_between",
     [](auto& b) { b.tensor("y", {1}, 0, "1234").tensors()[1].offset = 64; },
     {"tensor 'y'", "expected 32", "got 64"}},
};

GgufBuilder one_tensor() {
  GgufBuilder builder;
  builder.text("general.architecture", "qwen3moe");
  builder.tensor("x", {2, 2}, GgufBuilder::kF32, std::string(16, 'x'));
  return builder;
}

ATTACK_TEST(kHostileFiles, HostileGguf, IsRefusedInOneLineEach) {
  TempDir dir;
  const std::string path = dir.file("model.gguf");
  std::set<std::string> names;
  const auto refused = [&](const char* name, const std::string& bytes, const Words& words) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(names.insert(name).second);
    write_file(path, bytes);
    const Status status = open_gguf(path).status();
    attacked();
    expect_presentable(status);
    EXPECT_THAT(status.message(), StartsWith(path));
    for (const std::string& word : words) EXPECT_THAT(status.message(), HasSubstr(word));
    EXPECT_EQ(Checkpoint::open(path).status().message(), status.message());
  };
  for (const FileCase& one : kFiles) refused(one.name, one.bytes, one.words);
  for (const PairCase& one : kPairs)
    refused(one.name, one_tensor().raw(one.key, one.type, one.bytes).bytes(), one.words);
  for (const ShapeCase& one : kShapes) {
    GgufBuilder builder = one_tensor();
    builder.tensors()[0].shape = one.shape;
    builder.tensors()[0].type = one.type;
    refused(one.name, builder.bytes(), one.words);
  }
  for (const EditCase& one : kEdits) {
    GgufBuilder builder = one_tensor();
    one.edit(builder);
    refused(one.name, builder.bytes(), one.words);
  }
  refused("data_after_the_end", one_tensor().bytes() + "x", {"data: expected 16 to 32", "got 33"});
}

// The files are valid before the table alters them.
TEST(HostileGguf, TheGoodFilesAreGood) {
  GgufBuilder builder;
  builder.text("general.architecture", "qwen3moe").real("r", 1.5f).number("n", 7);
  builder.raw("array", 9, le32(5) + le64(2) + le32(3) + le32(~0u)).raw("flag", 7, "\1");
  builder.raw("long", 8, gguf_text(std::string(5000, 'x')))
      .raw("words", 9, le32(8) + le64(2) + gguf_text("a") + gguf_text(""));
  builder.tensor("x", {2, 2}, GgufBuilder::kF32, std::string(16, 'x'));
  builder.tensor("empty", {0, 2}, GgufBuilder::kF32, "");
  builder.tensor("blocks", {3, 128}, GgufBuilder::kNvfp4, std::string(3 * 72, 'b'));
  for (const uint32_t version : {2u, 3u}) {
    builder.version = version;
    const std::string file = builder.bytes();
    const auto header = must(parse(file, file.size()));
    EXPECT_EQ(std::get<int64_t>(header->metadata.at("n")), 7);
    EXPECT_EQ(std::get<double>(header->metadata.at("r")), 1.5);
    EXPECT_TRUE(std::get<bool>(header->metadata.at("flag")));
    EXPECT_EQ(std::get<std::vector<int64_t>>(header->metadata.at("array")),
              (std::vector<int64_t>{3, -1}));
    EXPECT_EQ(std::get<GgufSkipped>(header->metadata.at("long")).count, 5000u);
    EXPECT_EQ(std::get<GgufSkipped>(header->metadata.at("words")).count, 2u);
    ASSERT_EQ(header->tensors.size(), 3u);
    EXPECT_EQ(describe(header->tensors[0]), "(2, 2) F32");
    EXPECT_EQ(describe(header->tensors[2]), "(3, 128) NVFP4");
    EXPECT_EQ(header->tensors[2].size_bytes(), 3u * 72);
    // The padding of the last tensor may be missing.
    EXPECT_OK(parse(file, file.size() - (32 - 3 * 72 % 32)));
  }
  GgufBuilder aligned;
  aligned.number("general.alignment", 128).alignment = 128;
  aligned.tensor("x", {1}, GgufBuilder::kF32, "1234").tensor("y", {1}, GgufBuilder::kF32, "5678");
  const std::string file = aligned.bytes();
  const auto header = must(parse(file, file.size()));
  EXPECT_EQ(header->data_offset % 128, 0u);
  EXPECT_EQ(file.substr(header->data_offset + header->tensors[1].begin, 4), "5678");
}

ATTACK_TEST(kTruncations, HostileGguf, EveryTruncationIsRefused) {
  const GgufBuilder model = gguf_model({.experts = 1, .hidden = 64, .layers = 1});
  const std::string good = model.bytes();
  const auto whole = must(parse(good, good.size()));
  const uint64_t end = whole->data_offset + whole->tensors.back().end;
  for (size_t size = 0; size < good.size(); ++size) {
    // a separate allocation, so that sanitizers detect a read past its end
    const std::string cut = good.substr(0, size);
    const auto header = parse(cut, cut.size());
    attacked();
    ASSERT_EQ(header.ok(), size >= end) << size;
    if (!header.ok()) expect_presentable(header.status());
    // The file is complete, but the caller passes less of it than the header needs.
    bool more_needed = false;
    ASSERT_EQ(parse(cut, good.size(), &more_needed).ok(), size >= model.header().size()) << size;
    ASSERT_EQ(more_needed, size < model.header().size());
  }
}

// Tensors cover the data from its beginning: each begins at the padded end of the one before it.
ATTACK_TEST(kHostileFiles, HostileGguf, DisturbedBytesNeverBreakTheTiling) {
  const GgufBuilder model = gguf_model({.experts = 1, .hidden = 64, .layers = 1});
  const std::string good = model.bytes();
  int refused = 0;
  int accepted = 0;
  for (size_t at = 0; at < model.header().size(); ++at) {
    for (const int byte : {0x00, 0x01, 0x09, 0x20, 0x7F, 0x80, 0xFF}) {
      std::string bent = good;
      bent[at] = static_cast<char>(byte);
      const auto header = parse(bent, bent.size());
      attacked();
      if (!header.ok()) {
        expect_presentable(header.status());
        ++refused;
        continue;
      }
      ++accepted;
      uint64_t covered = 0;
      for (const TensorInfo& info : header->tensors) {
        ASSERT_GE(info.begin, covered);
        ASSERT_GE(info.end, info.begin);
        covered = info.end;
      }
      ASSERT_LE(header->data_offset + covered, bent.size());
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(accepted, 0);
}

// A header of any length is found by reading further; an endless one is refused.
TEST(HostileGguf, LongHeadersAreReadInSteps) {
  TempDir dir;
  GgufBuilder builder;
  std::string words;
  for (int i = 0; i < 300000; ++i) words += gguf_text("word " + std::to_string(i));
  builder.raw("tokenizer.ggml.tokens", 9, le32(8) + le64(300000) + words);
  builder.tensor("x", {1}, GgufBuilder::kF32, "1234");
  write_file(dir.file("model.gguf"), builder.bytes());
  const auto file = must(GgufFile::open(dir.file("model.gguf")));
  ASSERT_GT(file->data_offset(), 4u << 20);
  char read[4];
  ASSERT_OK(file->read(file->offset(file->tensors()[0]), read, 4));
  EXPECT_EQ(std::string(read, 4), "1234");
  // 101 MiB of text, none of it on disk.
  GgufBuilder endless;
  endless.raw("k", 8, le64(uint64_t{101} << 20));
  write_file(dir.file("endless.gguf"), endless.header());
  std::filesystem::resize_file(dir.file("endless.gguf"), uint64_t{200} << 20);
  EXPECT_THAT(GgufFile::open(dir.file("endless.gguf")).status().message(),
              HasSubstr("at most 104857600 bytes"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
