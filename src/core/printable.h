// Text that is safe to print. Names and paths come from files and arguments that nobody vouches
// for; what is said about them goes to terminals, logs and other programs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nvfp4_moe::internal {

inline constexpr size_t kWholeText = SIZE_MAX;

// `text` as one line that shows all of itself, in well-formed UTF-8. Bytes that are not UTF-8, and
// characters that control a terminal, separate, turn the direction of text, or show nothing are
// written as \xNN, byte by byte. Printable text stays as it is, so that printing twice changes
// nothing; a backslash is printable. Longer than max_bytes: cut between characters, with "..."
// behind.
std::string printable(std::string_view text, size_t max_bytes = 200);

// Position of the first byte that is not part of well-formed UTF-8 (overlong forms, surrogates and
// values past U+10FFFF are not), or npos.
size_t find_invalid_utf8(std::string_view text);

}  // namespace nvfp4_moe::internal
