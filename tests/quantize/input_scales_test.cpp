// The file of quantize --input-scales: every layer once, exact integers, scales that a float can
// represent.
#include "convert/input_scales.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "support/attack.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

const std::vector<int64_t> kLayers = {0, 1, 3};

std::string entry(const std::string& layer, const std::string& hidden = "0.5",
                  const std::string& inner = "0.25") {
  return R"({"layer": )" + layer + R"(, "hidden_scale": )" + hidden +
         R"(, "intermediate_scale": )" + inner + "}";
}

std::string file_of(const std::vector<std::string>& entries) {
  std::string text = R"({"schema": 1, "layers": [)";
  for (size_t i = 0; i < entries.size(); ++i) text += (i == 0 ? "" : ", ") + entries[i];
  return text + "]}";
}

TEST(InputScales, AreTheNumbersOfTheFile) {
  const std::string text =
      file_of({entry("3", "1e-3", "null"), entry("0"), entry("1", "3.4e38", "1.2e-38")});
  const auto scales = must(parse_input_scales(text, kLayers, kLayers));
  ASSERT_EQ(scales->size(), 3u);
  EXPECT_EQ(scales->at(0).hidden, 0.5f);
  EXPECT_EQ(scales->at(0).intermediate, 0.25f);
  EXPECT_EQ(scales->at(1).hidden, 3.4e38f);
  EXPECT_EQ(scales->at(3).hidden, 1e-3f);
  EXPECT_EQ(scales->at(3).intermediate, std::nullopt);  // null: not calibrated
  // A layer that is not quantized may be listed or not.
  EXPECT_OK(parse_input_scales(text, kLayers, {1}));
  EXPECT_OK(parse_input_scales(file_of({entry("1")}), kLayers, {1}));
}

ATTACK_TEST(kHostileNumbers, InputScales, NumbersThatDoNotFitAreRefusedByName) {
  // After entries of layers 0 and 1.
  const std::pair<std::string, const char*> cases[] = {
      {entry("-1"), "layer -1: the checkpoint has no such MoE layer"},
      {entry("1.5"), "layer: expected an integer, got 1.5"},
      {entry("18446744073709551615"), "layer: expected an integer, got 18446744073709551615"},
      {entry("null"), "layer: expected an integer, got none"},
      {entry("1", "0.125"), "layer 1: expected each layer once, got it again"},
      {entry("3", "0"), "layer 3: hidden_scale: expected a positive normal number"},
      {entry("3", "1e39"), "layer 3: hidden_scale: "},
      {entry("3", "1e-39"), "layer 3: hidden_scale: "},
      {entry("3", "0.5", "\"inf\""), "layer 3: intermediate_scale: "},
      {entry("3", "0.5", "[1]"), "got an array of 1"},
      {R"({"layer": 3, "hidden_scale": 0.5})", "layer 3: expected intermediate_scale, got none"},
      {R"({"layer": 3, "layer": 3, "hidden_scale": 0.5, "intermediate_scale": 1})",
       "duplicate key"},
  };
  for (const auto& [added, words] : cases) {
    attacked();
    EXPECT_THAT(parse_input_scales(file_of({entry("0"), entry("1"), added}), kLayers, kLayers),
                Refused(Code::kBadInput, words));
  }
  EXPECT_THAT(
      parse_input_scales(file_of({}), kLayers, kLayers),
      Refused(Code::kBadInput,
              "layer 0, 1, 3: expected scales of all 3 layers that are quantized, got none"));
  for (const char* text : {"", "[]", "{}", R"({"layers": {}})", R"({"schema": 2, "layers": []})",
                           "{\"layers\": [NaN]}"}) {
    attacked();
    EXPECT_EQ(parse_input_scales(text, kLayers, kLayers).status().code(), Code::kBadInput) << text;
  }
}

ATTACK_TEST(kSpecialFiles, InputScales, AFileWithoutAnEndIsRefused) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo(dir.file("pipe").c_str(), 0600), 0);
  std::ofstream(dir.file("large")) << "{";
  std::filesystem::resize_file(dir.file("large"), (size_t{16} << 20) + 1);
  std::ofstream(dir.file("scales.json")) << file_of({entry("0"), entry("1")});
  const std::pair<std::string, const char*> cases[] = {
      {"/dev/zero", "/dev/zero: expected a regular file, got a character device"},
      {dir.file("pipe"), "got a FIFO"},
      {dir.file("large"), "expected at most 16777216 bytes, got 16777217"},
      {dir.file("scales.json"), "expected scales of all 3 layers"}};
  for (const auto& [path, words] : cases) {
    attacked();
    EXPECT_THAT(read_input_scales(path, kLayers, kLayers).status().message(), HasSubstr(words));
  }
  EXPECT_OK(read_input_scales(dir.file("scales.json"), kLayers, {0, 1}));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
