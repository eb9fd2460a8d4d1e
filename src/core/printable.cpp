#include "core/printable.h"

#include <algorithm>
#include <iterator>

namespace nvfp4_moe::internal {
namespace {

// Length of the well-formed UTF-8 sequence at the start of `text`, 0 if there is none. Its scalar
// value is returned in `value`.
size_t utf8_length(std::string_view text, uint32_t& value) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) {
    value = lead;
    return 1;
  }
  size_t length = 0;
  uint32_t least = 0;
  if ((lead & 0xE0) == 0xC0) {
    length = 2, least = 0x80, value = lead & 0x1F;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3, least = 0x800, value = lead & 0x0F;
  } else if ((lead & 0xF8) == 0xF0) {
    length = 4, least = 0x10000, value = lead & 0x07;
  } else {
    return 0;
  }
  if (text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  if (value < least || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return 0;
  return length;
}

struct Characters {
  uint32_t first;
  uint32_t last;
};
// Characters that control (Cc), separate (Zl, Zp), change the direction of text or are invisible:
// Unicode 15's Default_Ignorable_Code_Point and the annotation marks. Visible marks (Arabic number
// signs) are text.
constexpr Characters kHidden[] = {
    {0x00, 0x1F},     {0x7F, 0x9F},     {0xAD, 0xAD},       {0x034F, 0x034F},   {0x061C, 0x061C},
    {0x115F, 0x1160}, {0x17B4, 0x17B5}, {0x180B, 0x180F},   {0x200B, 0x200F},   {0x2028, 0x202E},
    {0x2060, 0x206F}, {0x3164, 0x3164}, {0xFDD0, 0xFDEF},   {0xFE00, 0xFE0F},   {0xFEFF, 0xFEFF},
    {0xFFA0, 0xFFA0}, {0xFFF0, 0xFFFB}, {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A}, {0xE0000, 0xE0FFF},
};

bool is_hidden(uint32_t value) {
  if (value >= 0x20 && value < 0x7F) return false;
  if ((value & 0xFFFE) == 0xFFFE)
    return true;  // noncharacters: U+FFFE, U+FFFF and the same two of every plane
  const auto* found =
      std::upper_bound(std::begin(kHidden), std::end(kHidden), value,
                       [](uint32_t v, const Characters& one) { return v < one.first; });
  return found != std::begin(kHidden) && value <= std::prev(found)->last;
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  out.reserve(std::min(text.size(), max_bytes));
  for (size_t at = 0; at < text.size();) {
    uint32_t value = 0;
    const size_t whole = utf8_length(text.substr(at), value);
    const size_t length = whole == 0 ? 1 : whole;
    if (at + length > max_bytes) return out + "...";
    if (whole == 0 || is_hidden(value)) {
      for (const char c : text.substr(at, length)) {
        out += "\\x";
        out += kDigits[static_cast<uint8_t>(c) >> 4];
        out += kDigits[static_cast<uint8_t>(c) & 15];
      }
    } else {
      out += text.substr(at, length);
    }
    at += length;
  }
  return out;
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    uint32_t value = 0;
    const size_t length = utf8_length(text.substr(at), value);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

}  // namespace nvfp4_moe::internal
