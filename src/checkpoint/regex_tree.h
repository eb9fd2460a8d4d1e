// Expressions of Python's re as trees, for module_regex.cpp. Private to the room.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/module_regex.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

constexpr size_t kMaxExpression = 4096;
constexpr int kUnbounded = -1;

struct RegexNode {
  enum class Kind : uint8_t {
    kSet,
    kAssert,
    kSequence,
    kEither,
    kRepeat,
    kLook
  } kind = Kind::kSequence;
  ModuleRegex::CharSet set;
  ModuleRegex::Op assertion = ModuleRegex::Op::kBegin;
  int least = 0, most = 0;  // kRepeat; most may be kUnbounded
  bool behind = false, negative = false;
  std::vector<RegexNode> parts;  // one part for kRepeat and kLook

  static RegexNode of(Kind kind, std::vector<RegexNode> parts = {});
  static RegexNode of(const ModuleRegex::CharSet& set);
  static RegexNode of(ModuleRegex::Op assertion);
  // The number of characters that it matches; empty if that number varies.
  std::optional<int> width() const;
};

bool is_digit(char c);
bool is_word(char c);
ModuleRegex::CharSet chars_of(bool (*member)(char));
ModuleRegex::CharSet only(char c);

Result<RegexNode> parse_regex(std::string_view expression);

}  // namespace nvfp4_moe::internal
