// A safetensors file from header text: the length first, then the text, then as much data as the
// text's last offset asks for (up to a limit), so that a fuzzer need not find those numbers.
#pragma once

#include <cctype>
#include <cstdint>
#include <string>

namespace fuzz {

inline constexpr uint64_t kMaxData = uint64_t{1} << 16;

// The largest number of the text that could be an offset: the data section that fits it.
inline uint64_t largest_number(const std::string& text) {
  uint64_t largest = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    uint64_t number = 0;
    for (;
         i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])) && number <= kMaxData;
         ++i)
      number = number * 10 + static_cast<uint64_t>(text[i] - '0');
    if (number <= kMaxData && number > largest) largest = number;
  }
  return largest;
}

inline std::string framed(const std::string& header, char fill) {
  uint64_t length = header.size();
  std::string bytes(8, '\0');
  for (char& c : bytes) c = static_cast<char>(length & 0xFF), length >>= 8;
  const uint64_t data_bytes = largest_number(header);
  bytes += header;
  bytes.resize(bytes.size() + data_bytes, fill);
  return bytes;
}

}  // namespace fuzz
