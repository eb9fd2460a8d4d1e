#include "checkpoint/module_regex.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace nvfp4_moe {
namespace {

using CharSet = ModuleRegex::CharSet;
using Op = ModuleRegex::Op;

constexpr size_t kMaxExpression = 4096;
constexpr int kMaxDepth = 64;
constexpr size_t kMaxProgram = 1 << 15;
constexpr int kUnbounded = -1;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

CharSet set_of(bool (*member)(char)) {
  CharSet set;
  for (int c = 0; c < 128; ++c) set[static_cast<size_t>(c)] = member(static_cast<char>(c));
  return set;
}
CharSet only(char c) { return CharSet().set(static_cast<uint8_t>(c)); }
CharSet spaces() {
  CharSet set;
  for (const char c : std::string_view(" \t\n\r\f\v\x1c\x1d\x1e\x1f")) set.set(static_cast<uint8_t>(c));
  return set;
}
CharSet any_but_newline() { return ~only('\n'); }

// \d \w \s and their opposites.
std::optional<CharSet> class_of(char letter) {
  switch (letter) {
    case 'd': return set_of(is_digit);
    case 'D': return ~set_of(is_digit);
    case 'w': return set_of(is_word);
    case 'W': return ~set_of(is_word);
    case 's': return spaces();
    case 'S': return ~spaces();
    default: return std::nullopt;
  }
}

struct Node {
  enum class Kind : uint8_t { kEmpty, kSet, kAssert, kSequence, kEither, kRepeat, kLook } kind = Kind::kEmpty;
  CharSet set;
  Op assertion = Op::kBegin;
  int least = 0, most = 0;  // kRepeat; most may be kUnbounded
  bool behind = false, negative = false;
  std::vector<Node> parts;  // one of kRepeat and kLook
};

Node node_of(Node::Kind kind, std::vector<Node> parts = {}) {
  Node node;
  node.kind = kind;
  node.parts = std::move(parts);
  return node;
}
Node node_of(const CharSet& set) {
  Node node = node_of(Node::Kind::kSet);
  node.set = set;
  return node;
}
Node node_of(Op assertion) {
  Node node = node_of(Node::Kind::kAssert);
  node.assertion = assertion;
  return node;
}

// How many characters the node takes; none where that is not one number.
std::optional<int> width_of(const Node& node) {
  constexpr int kMaxWidth = 1 << 12;
  switch (node.kind) {
    case Node::Kind::kSet: return 1;
    case Node::Kind::kSequence: {
      int sum = 0;
      for (const Node& part : node.parts) {
        const auto width = width_of(part);
        if (!width || sum + *width > kMaxWidth) return std::nullopt;
        sum += *width;
      }
      return sum;
    }
    case Node::Kind::kEither: {
      const auto first = width_of(node.parts.front());
      for (size_t i = 1; i < node.parts.size(); ++i)
        if (width_of(node.parts[i]) != first) return std::nullopt;
      return first;
    }
    case Node::Kind::kRepeat: {
      const auto one = width_of(node.parts.front());
      if (!one || node.least != node.most || int64_t{*one} * node.least > kMaxWidth) return std::nullopt;
      return *one * node.least;
    }
    case Node::Kind::kEmpty:
    case Node::Kind::kAssert:
    case Node::Kind::kLook: break;
  }
  return 0;
}

// An expression of Python's re as a tree.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<Node> parse() {
    if (text_.size() > kMaxExpression) return refused("more than 4096 characters");
    for (const char c : text_)
      if (static_cast<uint8_t>(c) >= 128) return refused("a character beyond ASCII");
    NVFP4_MOE_ASSIGN(Node node, either(0));
    if (at_ < text_.size()) return refused("an unbalanced )");
    return node;
  }

 private:
  bool ended() const { return at_ >= text_.size(); }
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  Status refused(std::string_view what) const {
    return unsupported(fmt::format("regular expression '{}': {} at {} is not understood here", printable(text_, 400), what,
                                   std::min(at_, text_.size())));
  }

  Result<Node> either(int depth) {
    if (depth > kMaxDepth) return refused("nesting deeper than 64");
    std::vector<Node> ways;
    do {
      NVFP4_MOE_ASSIGN(Node way, sequence(depth));
      ways.push_back(std::move(way));
    } while (take("|"));
    if (ways.size() == 1) return std::move(ways.front());
    return node_of(Node::Kind::kEither, std::move(ways));
  }

  Result<Node> sequence(int depth) {
    std::vector<Node> parts;
    while (!ended() && text_[at_] != '|' && text_[at_] != ')') {
      NVFP4_MOE_ASSIGN(Node part, atom(depth));
      NVFP4_MOE_ASSIGN(std::optional<Node> repeated, quantified(part));
      parts.push_back(repeated ? *std::move(repeated) : std::move(part));
    }
    return node_of(Node::Kind::kSequence, std::move(parts));
  }

  // The part with the quantifier that follows it, if one does.
  Result<std::optional<Node>> quantified(const Node& part) {
    int least = 0, most = kUnbounded;
    if (take("*")) {
    } else if (take("+")) {
      least = 1;
    } else if (take("?")) {
      most = 1;
    } else if (!braces(least, most)) {
      return std::optional<Node>();
    }
    if (part.kind == Node::Kind::kAssert) return refused("a repeated assertion");
    if (most != kUnbounded && least > most) return refused("a repetition whose least is above its most");
    if (least > 1000 || most > 1000) return refused("more than 1000 repetitions");
    if (take("+")) return refused("a possessive quantifier");
    take("?");  // lazy: another order of the same matches
    if (!ended() && (text_[at_] == '*' || text_[at_] == '+' || text_[at_] == '?')) return refused("a multiple repeat");
    const size_t here = at_;
    int unused[2] = {0, kUnbounded};
    if (braces(unused[0], unused[1])) {
      at_ = here;
      return refused("a multiple repeat");
    }
    Node node = node_of(Node::Kind::kRepeat, {part});
    node.least = least;
    node.most = most;
    return std::optional<Node>(std::move(node));
  }

  // {m}, {m,}, {,n}, {m,n}; any other brace is a literal.
  bool braces(int& least, int& most) {
    const size_t begin = at_;
    const auto number = [&](int fallback) {
      int value = 0;
      const size_t first = at_;
      while (!ended() && is_digit(text_[at_])) value = std::min(value * 10 + (text_[at_++] - '0'), 100000);
      return at_ == first ? fallback : value;
    };
    if (!take("{") || take("}")) {
      at_ = begin;
      return false;
    }
    const size_t first = at_;
    least = number(0);
    const bool named = at_ > first;
    most = take(",") ? number(kUnbounded) : named ? least : kUnbounded;
    if (take("}")) return true;
    at_ = begin;
    return false;
  }

  Result<Node> atom(int depth) {
    const char c = text_[at_];
    if (c == '(') return group(depth);
    if (c == '[') return set();
    if (c == '\\') return escape();
    if (c == '*' || c == '+' || c == '?') return refused("nothing to repeat");
    ++at_;
    if (c == '.') return node_of(any_but_newline());
    if (c == '^') return node_of(Op::kBegin);
    if (c == '$') return node_of(Op::kEnd);
    if (c == '{') {  // a quantifier that follows nothing
      --at_;
      int least = 0, most = 0;
      const size_t here = at_;
      if (braces(least, most)) {
        at_ = here;
        return refused("nothing to repeat");
      }
      ++at_;
    }
    return node_of(only(c));
  }

  Result<Node> group(int depth) {
    Node look = node_of(Node::Kind::kLook);
    bool looks = true;
    if (take("(?=")) {
    } else if (take("(?!")) {
      look.negative = true;
    } else if (take("(?<=")) {
      look.behind = true;
    } else if (take("(?<!")) {
      look.behind = look.negative = true;
    } else if (take("(?P<")) {
      looks = false;
      const size_t first = at_;
      while (!ended() && is_word(text_[at_])) ++at_;
      if (at_ == first || is_digit(text_[first]) || !take(">")) return refused("a group's name");
    } else if (take("(?:")) {
      looks = false;
    } else if (text_.substr(at_).starts_with("(?")) {
      return refused(fmt::format("'{}'", printable(text_.substr(at_, 4))));
    } else {
      take("(");
      looks = false;
    }
    NVFP4_MOE_ASSIGN(Node inner, either(depth + 1));
    if (!take(")")) return refused("a missing )");
    if (!looks) return inner;
    if (look.behind && !width_of(inner)) return refused("a look-behind without a fixed width");
    look.parts.push_back(std::move(inner));
    return look;
  }

  Result<Node> escape() {
    ++at_;
    if (ended()) return refused("a \\ at the end");
    const char c = text_[at_++];
    if (const auto set = class_of(c)) return node_of(*set);
    switch (c) {
      case 'A': return node_of(Op::kBegin);
      case 'Z': return node_of(Op::kStrictEnd);
      case 'b': return node_of(Op::kWordEdge);
      case 'B': return node_of(Op::kNoWordEdge);
      default: break;
    }
    if (const auto literal = literal_escape(c)) return node_of(only(*literal));
    --at_;
    return refused(fmt::format("'\\{}'", c));
  }

  // The character that \c stands for, in a set or out of it.
  static std::optional<char> literal_escape(char c) {
    constexpr std::string_view kLetters = "tnrfva", kMeant = "\t\n\r\f\v\a";
    if (const size_t i = kLetters.find(c); i != std::string_view::npos) return kMeant[i];
    if (is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return std::nullopt;
    return c;
  }

  // One member of a set, or a class of several.
  Result<CharSet> member(char& single, bool& is_single) {
    const char c = text_[at_++];
    is_single = true;
    single = c;
    if (c != '\\') return only(c);
    if (ended()) return refused("a \\ at the end");
    const char e = text_[at_++];
    if (const auto set = class_of(e)) {
      is_single = false;
      return *set;
    }
    const auto literal = e == 'b' ? std::optional<char>('\b') : literal_escape(e);
    if (!literal) {
      --at_;
      return refused(fmt::format("'\\{}'", e));
    }
    single = *literal;
    return only(*literal);
  }

  Result<Node> set() {
    take("[");
    const bool negative = take("^");
    CharSet all;
    for (bool first = true;; first = false) {
      if (ended()) return refused("a set without its ]");
      if (!first && take("]")) break;
      char low = 0, high = 0;
      bool single = false;
      NVFP4_MOE_ASSIGN(const CharSet one, member(low, single));
      all |= one;
      const std::string_view rest = text_.substr(at_);
      if (rest.size() < 2 || rest[0] != '-' || rest[1] == ']') continue;
      ++at_;
      bool closed = false;
      NVFP4_MOE_TRY(member(high, closed).status());
      if (!single || !closed || low > high) return refused("a range");
      for (int c = low; c <= high; ++c) all.set(static_cast<size_t>(c));
    }
    return node_of(negative ? ~all : all);
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

// A tree as instructions.
class RegexCompiler {
 public:
  static Result<ModuleRegex> compile(const Node& node, std::string_view text) {
    RegexCompiler compiler;
    compiler.emit(node);
    compiler.add({});
    if (compiler.too_long())
      return unsupported(fmt::format("regular expression '{}': more than {} steps long with its repetitions",
                                     printable(text, 400), kMaxProgram));
    const CharSet digits = set_of(is_digit);
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

  // Nodes rather than instructions are counted, since empty ones may be repeated too.
  bool too_long() const { return emitted_ > kMaxProgram; }

  void emit(const Node& node) {
    ++emitted_;
    if (too_long()) return;  // refused by compile
    switch (node.kind) {
      case Node::Kind::kEmpty: return;
      case Node::Kind::kSet:
        add({.op = Op::kSet, .first = static_cast<int32_t>(out_.sets_.size())});
        out_.sets_.push_back(node.set);
        return;
      case Node::Kind::kAssert: add({.op = node.assertion}); return;
      case Node::Kind::kSequence:
        for (const Node& part : node.parts) emit(part);
        return;
      case Node::Kind::kEither: {
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
      case Node::Kind::kRepeat: {
        const Node& part = node.parts.front();
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
      case Node::Kind::kLook: {
        const int32_t width = node.behind ? width_of(node.parts.front()).value_or(0) : -1;
        const int32_t look = add({.op = Op::kLook, .negative = node.negative, .second = next() + 1, .width = width});
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
  NVFP4_MOE_ASSIGN(const Node node, Parser(expression).parse());
  return RegexCompiler::compile(node, expression);
}

Result<ModuleRegex> ModuleRegex::glob(std::string_view pattern) {
  if (pattern.size() > kMaxExpression)
    return unsupported(fmt::format("pattern '{}': more than 4096 characters", printable(pattern, 400)));
  Node any = node_of(Node::Kind::kRepeat, {node_of(CharSet().set())});
  any.most = kUnbounded;
  std::vector<Node> parts;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    size_t close = c == '[' ? i + 1 : pattern.size();
    if (close < pattern.size() && pattern[close] == '!') ++close;
    if (close < pattern.size() && pattern[close] == ']') ++close;  // a literal, as the first of its set
    close = std::min(pattern.find(']', close), pattern.size());
    if (c == '*') {
      parts.push_back(any);
    } else if (c == '?') {
      parts.push_back(node_of(CharSet().set()));
    } else if (c == '[' && close < pattern.size()) {
      size_t first = i + 1;
      const bool negative = pattern[first] == '!';
      if (negative) ++first;
      CharSet set;
      for (size_t at = first; at < close; ++at) {
        const bool range = at + 2 < close && pattern[at + 1] == '-';
        const auto low = static_cast<uint8_t>(pattern[at]), high = static_cast<uint8_t>(pattern[range ? at + 2 : at]);
        for (int member = low; member <= high; ++member) set.set(static_cast<size_t>(member));
        if (range) at += 2;
      }
      parts.push_back(node_of(negative ? ~set : set));
      i = close;
    } else {
      parts.push_back(node_of(only(c)));
    }
  }
  parts.push_back(node_of(Op::kStrictEnd));
  return RegexCompiler::compile(node_of(Node::Kind::kSequence, std::move(parts)), pattern);
}

bool ModuleRegex::match(std::string_view name, int64_t& budget) const { return run(0, 0, name, budget); }

// Walks all ways through the program, each (instruction, position) once.
bool ModuleRegex::run(int32_t start, size_t position, std::string_view name, int64_t& budget) const {
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
          goes_on = at < name.size() && sets_[static_cast<size_t>(now.first)][static_cast<uint8_t>(name[at])];
          ++at;
          break;
        case Op::kSplit:
          open.emplace_back(now.second, at);
          next = now.first;
          break;
        case Op::kJump: next = now.first; break;
        case Op::kBegin: goes_on = at == 0; break;
        case Op::kEnd: goes_on = at == name.size() || (at + 1 == name.size() && name[at] == '\n'); break;
        case Op::kStrictEnd: goes_on = at == name.size(); break;
        case Op::kWordEdge: goes_on = edge(at); break;
        case Op::kNoWordEdge: goes_on = !edge(at); break;
        case Op::kLook: {
          const size_t back = now.width < 0 ? 0 : static_cast<size_t>(now.width);
          // A look-behind has one width, so the inner expression ends where it should if it matches at all.
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

}  // namespace nvfp4_moe
