#include "checkpoint/module_regex.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/regex_tree.h"
#include "core/printable.h"

namespace nvfp4_moe::internal {
namespace {

using CharSet = ModuleRegex::CharSet;
using Op = ModuleRegex::Op;

constexpr size_t kMaxProgram = 1 << 15;

}  // namespace

// Compiles a tree to instructions.
class RegexCompiler {
 public:
  static Result<ModuleRegex> compile(const RegexNode& node, std::string_view text) {
    RegexCompiler compiler;
    compiler.emit(node);
    compiler.add({});
    if (compiler.too_long())
      return unsupported(
          fmt::format("regular expression '{}': more than {} steps long with its repetitions",
                      printable(text, 400), kMaxProgram));
    const CharSet digits = chars_of(is_digit);
    for (const CharSet& set : compiler.out_.sets_) {
      const size_t of_digits = (set & digits).count();
      if (of_digits != 0 && of_digits != 10) compiler.out_.digits_are_equal_ = false;
    }
    return std::move(compiler.out_);
  }

 private:
  int32_t add(const ModuleRegex::Instruction& instruction) {
    out_.program_.push_back(instruction);
    return static_cast<int32_t>(out_.program_.size()) - 1;
  }
  int32_t next() const { return static_cast<int32_t>(out_.program_.size()); }
  ModuleRegex::Instruction& at(int32_t index) { return out_.program_[static_cast<size_t>(index)]; }

  // Counts nodes, not instructions, since empty nodes may be repeated too.
  bool too_long() const { return emitted_ > kMaxProgram; }

  void emit(const RegexNode& node) {
    ++emitted_;
    if (too_long()) return;  // refused by compile
    switch (node.kind) {
      case RegexNode::Kind::kSet:
        add({.op = Op::kSet, .first = static_cast<int32_t>(out_.sets_.size())});
        out_.sets_.push_back(node.set);
        return;
      case RegexNode::Kind::kAssert: add({.op = node.assertion}); return;
      case RegexNode::Kind::kSequence:
        for (const RegexNode& part : node.parts) emit(part);
        return;
      case RegexNode::Kind::kEither: {
        std::vector<int32_t> ends;
        for (size_t i = 0; i < node.parts.size(); ++i) {
          const bool last = i + 1 == node.parts.size();
          const int32_t split = last ? -1 : add({.op = Op::kSplit, .first = next() + 1});
          emit(node.parts[i]);
          if (last) break;
          ends.push_back(add({.op = Op::kJump}));
          at(split).second = next();
        }
        for (const int32_t end : ends) at(end).first = next();
        return;
      }
      case RegexNode::Kind::kRepeat: {
        const RegexNode& part = node.parts.front();
        for (int i = 0; i < node.least && !too_long(); ++i) emit(part);
        if (node.most == kUnbounded) {
          const int32_t split = add({.op = Op::kSplit, .first = next() + 1});
          emit(part);
          add({.op = Op::kJump, .first = split});
          at(split).second = next();
          return;
        }
        std::vector<int32_t> splits;
        for (int i = node.least; i < node.most && !too_long(); ++i) {
          splits.push_back(add({.op = Op::kSplit, .first = next() + 1}));
          emit(part);
        }
        for (const int32_t split : splits) at(split).second = next();
        return;
      }
      case RegexNode::Kind::kLook: {
        const int32_t width = node.behind ? node.parts.front().width().value_or(0) : -1;
        const int32_t look =
            add({.op = Op::kLook, .negative = node.negative, .second = next() + 1, .width = width});
        emit(node.parts.front());
        add({});
        at(look).first = next();
        return;
      }
    }
  }

  ModuleRegex out_;
  size_t emitted_ = 0;
};

Result<ModuleRegex> ModuleRegex::regex(std::string_view expression) {
  NVFP4_MOE_ASSIGN(const RegexNode node, parse_regex(expression));
  return RegexCompiler::compile(node, expression);
}

Result<ModuleRegex> ModuleRegex::glob(std::string_view pattern) {
  if (pattern.size() > kMaxExpression)
    return unsupported(
        fmt::format("pattern '{}': more than 4096 characters", printable(pattern, 400)));
  RegexNode any = RegexNode::of(RegexNode::Kind::kRepeat, {RegexNode::of(CharSet().set())});
  any.most = kUnbounded;
  std::vector<RegexNode> parts;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    size_t close = c == '[' ? i + 1 : pattern.size();
    if (close < pattern.size() && pattern[close] == '!') ++close;
    if (close < pattern.size() && pattern[close] == ']')
      ++close;  // a literal, since it is the first of its set
    close = std::min(pattern.find(']', close), pattern.size());
    if (c == '*') {
      parts.push_back(any);
    } else if (c == '?') {
      parts.push_back(RegexNode::of(CharSet().set()));
    } else if (c == '[' && close < pattern.size()) {
      size_t first = i + 1;
      const bool negative = pattern[first] == '!';
      if (negative) ++first;
      CharSet set;
      for (size_t at = first; at < close; ++at) {
        const bool range = at + 2 < close && pattern[at + 1] == '-';
        const auto low = static_cast<uint8_t>(pattern[at]),
                   high = static_cast<uint8_t>(pattern[range ? at + 2 : at]);
        for (int member = low; member <= high; ++member) set.set(static_cast<size_t>(member));
        if (range) at += 2;
      }
      parts.push_back(RegexNode::of(negative ? ~set : set));
      i = close;
    } else {
      parts.push_back(RegexNode::of(only(c)));
    }
  }
  parts.push_back(RegexNode::of(Op::kStrictEnd));
  return RegexCompiler::compile(RegexNode::of(RegexNode::Kind::kSequence, std::move(parts)),
                                pattern);
}

bool ModuleRegex::match(std::string_view name, int64_t& budget) const {
  return run(0, 0, name, budget);
}

// Walks all ways through the program, each (instruction, position) once.
bool ModuleRegex::run(int32_t start, size_t position, std::string_view name,
                      int64_t& budget) const {
  const size_t positions = name.size() + 1;
  std::vector<bool> seen(program_.size() * positions);
  std::vector<std::pair<int32_t, size_t>> open = {{start, position}};
  const auto word_at = [&](size_t i) { return i < name.size() && is_word(name[i]); };
  const auto edge = [&](size_t i) { return (i > 0 && word_at(i - 1)) != word_at(i); };
  while (!open.empty()) {
    auto [pc, at] = open.back();
    open.pop_back();
    for (;;) {
      const size_t state = static_cast<size_t>(pc) * positions + at;
      if (seen[state]) break;
      seen[state] = true;
      if (--budget < 0) return false;
      const Instruction& now = program_[static_cast<size_t>(pc)];
      bool goes_on = true;
      int32_t next = pc + 1;
      switch (now.op) {
        case Op::kAccept: return true;
        case Op::kSet:
          goes_on = at < name.size() &&
                    sets_[static_cast<size_t>(now.first)][static_cast<uint8_t>(name[at])];
          ++at;
          break;
        case Op::kSplit:
          open.emplace_back(now.second, at);
          next = now.first;
          break;
        case Op::kJump: next = now.first; break;
        case Op::kBegin: goes_on = at == 0; break;
        case Op::kEnd:
          goes_on = at == name.size() || (at + 1 == name.size() && name[at] == '\n');
          break;
        case Op::kStrictEnd: goes_on = at == name.size(); break;
        case Op::kWordEdge: goes_on = edge(at); break;
        case Op::kNoWordEdge: goes_on = !edge(at); break;
        case Op::kLook: {
          const size_t back = now.width < 0 ? 0 : static_cast<size_t>(now.width);
          // A look-behind has a fixed width, so if the inner expression matches, it ends at the
          // right position.
          const bool found = back <= at && run(now.second, at - back, name, budget);
          if (budget < 0) return false;
          goes_on = found != now.negative;
          next = now.first;
          break;
        }
      }
      if (!goes_on) break;
      pc = next;
    }
  }
  return false;
}

}  // namespace nvfp4_moe::internal
