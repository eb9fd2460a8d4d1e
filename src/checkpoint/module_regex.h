// Regular expressions and globs that config files write for module names, matched as their
// producers do: Python's re.match and fnmatch. Private to the room.
//
// A config file may come from anybody, so matching takes time linear in the expression times the
// name: a set of states is walked, each at most once a position. There are no captures and so no
// back-references. Understood: literals, ., sets, \d \w \s \b \A \Z and their opposites, ^ $,
// groups, |, * + ? {m,n} with ?, look-ahead, and look-behind of a fixed width. Everything else
// (flags, \1, possessive quantifiers, code points beyond ASCII) is refused by name.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal {

class ModuleRegex {
 public:
  // kUnsupported, naming the expression and what of it is not understood.
  static Result<ModuleRegex> regex(std::string_view expression);
  // fnmatch: * ? [set] [!set], against the whole name.
  static Result<ModuleRegex> glob(std::string_view pattern);

  // Whether the expression matches from the beginning of the name on. Takes what it needs from
  // `budget`, a number of steps that a file may cost; once that is negative the result means
  // nothing.
  bool match(std::string_view name, int64_t& budget) const;
  // Whether all digits are the same to it, so that "experts.3" and "experts.7" give the same
  // result.
  bool digits_are_equal() const { return digits_are_equal_; }

  using CharSet = std::bitset<256>;
  enum class Op : uint8_t {
    kSet,
    kSplit,
    kJump,
    kBegin,
    kEnd,
    kStrictEnd,
    kWordEdge,
    kNoWordEdge,
    kLook,
    kAccept
  };
  struct Instruction {
    Op op = Op::kAccept;
    bool negative = false;  // kLook
    int32_t first = 0;      // kSet: index of the set; kSplit, kJump, kLook: where it goes on
    int32_t second = 0;     // kSplit: the other way; kLook: where the inner expression begins
    // kLook: how far back the inner one begins; -1: look-ahead, at the position itself
    int32_t width = -1;
  };

 private:
  friend class RegexCompiler;
  bool run(int32_t start, size_t position, std::string_view name, int64_t& budget) const;

  std::vector<Instruction> program_;
  std::vector<CharSet> sets_;
  bool digits_are_equal_ = true;
};

}  // namespace nvfp4_moe::internal
