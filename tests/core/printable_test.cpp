// Text that is safe to print: all classes of characters that a terminal interprets or hides.
#include "core/printable.h"

#include <cstdio>

#include "core/status.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(Printable, TextStaysAsItIs) {
  for (const char* text :
       {"", "layers.0.mlp", "a\\b \\x1B", "größe 名 Ω 👍 العربية ١٢", "e\xCC\x81"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, EachClassThatIsNotTextIsEscaped) {
  const std::pair<const char*, std::string> cases[] = {
      {"C0 and DEL", std::string("\0\n\r\t\x1B\x7F", 6)},
      {"C1: CSI and OSC in one character", "\xC2\x9B\xC2\x9D\xC2\x85"},
      {"C1 as a bare byte", "\x9B"},
      {"soft hyphen", "\xC2\xAD"},
      {"zero width", "\xE2\x80\x8B\xE2\x80\x8D\xEF\xBB\xBF"},
      {"separators of lines and paragraphs", "\xE2\x80\xA8\xE2\x80\xA9"},
      {"direction overrides", "\xE2\x80\xAA\xE2\x80\xAE"},
      {"direction isolates", "\xE2\x81\xA6\xE2\x81\xA9"},
      {"direction marks", "\xE2\x80\x8E\xE2\x80\x8F\xD8\x9C"},
      {"word joiner", "\xE2\x81\xA0"},
      {"fillers", "\xE3\x85\xA4\xEF\xBE\xA0"},
      {"variation selectors", "\xEF\xB8\x8F\xF3\xA0\x84\x80"},
      {"tags", "\xF3\xA0\x80\x81"},
      {"annotations", "\xEF\xBF\xB9"},
      {"no characters", "\xEF\xBF\xBE\xF0\x9F\xBF\xBF\xEF\xB7\x90"},
      {"no UTF-8", "\xFF\xC3"},
      {"overlong", "\xC0\x9B"},
      {"surrogates", "\xED\xA0\x80\xED\xBF\xBF"},
      {"past the last", "\xF4\x90\x80\x80"},
  };
  for (const auto& [what, text] : cases) {
    std::string escaped;
    for (const char c : text) {
      char byte[5];
      std::snprintf(byte, sizeof byte, "\\x%02X", static_cast<unsigned>(static_cast<uint8_t>(c)));
      escaped += byte;
    }
    EXPECT_EQ(printable(text), escaped) << what;
    EXPECT_EQ(printable("a" + text + "b"), "a" + escaped + "b") << what;
    EXPECT_EQ(printable(escaped), escaped) << what;  // twice equals once
  }
}

TEST(Printable, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(printable(std::string(300, 'x'), 4), "xxxx...");
  EXPECT_EQ(printable("xéé", 4), "xé...");
  EXPECT_EQ(printable("xxxx", 4), "xxxx");
  EXPECT_EQ(printable(std::string(300, 'x')).size(), 203u);
  EXPECT_EQ(printable(std::string(300, 'x'), kWholeText).size(), 300u);
}

TEST(Printable, MessagesOfAStatusAre) {
  const Status status = io_error("\x1B]0;x\x07.safetensors: \xFF").in("a\nb");
  EXPECT_EQ(status.message(), "a\\x0Ab: \\x1B]0;x\\x07.safetensors: \\xFF");
  EXPECT_EQ(status.of_finding("id").finding(), "id");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
