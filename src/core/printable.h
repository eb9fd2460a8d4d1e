// Text that is safe to print. Names and paths come from untrusted files and arguments, and messages
// about them go to terminals, logs and other programs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nvfp4_moe::internal {

inline constexpr size_t kWholeText = SIZE_MAX;

// `text` as one line in well-formed UTF-8 with everything visible. Bytes that are not UTF-8, and
// characters that control a terminal, separate, change the direction of text, or are invisible, are
// written as \xNN, byte by byte. Printable text does not change, so printing twice changes nothing;
// a backslash is printable. Text longer than max_bytes is cut between characters, and "..." is
// appended.
std::string printable(std::string_view text, size_t max_bytes = 200);

// Position of the first byte that is not part of well-formed UTF-8 (overlong forms, surrogates and
// values past U+10FFFF are not), or npos.
size_t find_invalid_utf8(std::string_view text);

}  // namespace nvfp4_moe::internal
