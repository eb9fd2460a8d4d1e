// Regular expressions and globs that config files write for module names, matched as their
// producers do: Python's re.match and fnmatch. Private to src/checkpoint.
//
// A config file is untrusted, so matching takes time linear in the expression times the name: it
// walks a set of states, each at most once per position. There are no captures and so no
// back-references. Supported: literals, ., sets, \d \w \s \b \A \Z and their opposites, ^ $,
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
  // kUnsupported, with the expression and the part of it that is not supported.
  static Result<ModuleRegex> regex(std::string_view expression);
  // fnmatch: * ? [set] [!set], against the whole name.
  static Result<ModuleRegex> glob(std::string_view pattern);

  // Whether the expression matches from the beginning of the name. Subtracts its steps from
  // `budget`, the steps that one file may cost. Once the budget is negative, the result is
  // meaningless.
  bool match(std::string_view name, int64_t& budget) const;
  // Whether the expression treats all digits as equal, so that "experts.3" and "experts.7" give the
  // same result.
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
    int32_t first = 0;      // kSet: index of the set; kSplit, kJump, kLook: next instruction
    int32_t second = 0;     // kSplit: the other branch; kLook: start of the inner expression
    // kLook: characters back to where the inner expression begins; -1: look-ahead, at the position
    // itself
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
