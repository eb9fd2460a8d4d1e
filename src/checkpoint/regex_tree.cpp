#include "checkpoint/regex_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/printable.h"

namespace nvfp4_moe::internal {

namespace {
using CharSet = ModuleRegex::CharSet;
using Op = ModuleRegex::Op;
}  // namespace

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

CharSet chars_of(bool (*member)(char)) {
  CharSet set;
  for (int c = 0; c < 128; ++c) set[static_cast<size_t>(c)] = member(static_cast<char>(c));
  return set;
}
CharSet only(char c) { return CharSet().set(static_cast<uint8_t>(c)); }

RegexNode RegexNode::of(Kind kind, std::vector<RegexNode> parts) {
  RegexNode node;
  node.kind = kind;
  node.parts = std::move(parts);
  return node;
}
RegexNode RegexNode::of(const CharSet& set) {
  RegexNode node = of(Kind::kSet);
  node.set = set;
  return node;
}
RegexNode RegexNode::of(Op assertion) {
  RegexNode node = of(Kind::kAssert);
  node.assertion = assertion;
  return node;
}

std::optional<int> RegexNode::width() const {
  constexpr int kMaxWidth = 1 << 12;
  switch (kind) {
    case Kind::kSet: return 1;
    case Kind::kSequence: {
      int sum = 0;
      for (const RegexNode& part : parts) {
        const auto one = part.width();
        if (!one || sum + *one > kMaxWidth) return std::nullopt;
        sum += *one;
      }
      return sum;
    }
    case Kind::kEither: {
      const auto first = parts.front().width();
      for (size_t i = 1; i < parts.size(); ++i)
        if (parts[i].width() != first) return std::nullopt;
      return first;
    }
    case Kind::kRepeat: {
      const auto one = parts.front().width();
      if (!one || least != most || int64_t{*one} * least > kMaxWidth) return std::nullopt;
      return *one * least;
    }
    case Kind::kAssert:
    case Kind::kLook: break;
  }
  return 0;
}

namespace {

constexpr int kMaxDepth = 64;

CharSet spaces() {
  CharSet set;
  for (const char c : std::string_view(" \t\n\r\f\v\x1c\x1d\x1e\x1f"))
    set.set(static_cast<uint8_t>(c));
  return set;
}

// Sets of \d \w \s and their opposites.
std::optional<CharSet> class_of(char letter) {
  switch (letter) {
    case 'd': return chars_of(is_digit);
    case 'D': return ~chars_of(is_digit);
    case 'w': return chars_of(is_word);
    case 'W': return ~chars_of(is_word);
    case 's': return spaces();
    case 'S': return ~spaces();
    default: return std::nullopt;
  }
}

// Parses an expression of Python's re.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<RegexNode> parse() {
    if (text_.size() > kMaxExpression) return refused("more than 4096 characters");
    for (const char c : text_)
      if (static_cast<uint8_t>(c) >= 128) return refused("a character beyond ASCII");
    NVFP4_MOE_ASSIGN(RegexNode node, either(0));
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
    return unsupported(fmt::format("regular expression '{}': {} at {} is not understood here",
                                   printable(text_, 400), what, std::min(at_, text_.size())));
  }

  Result<RegexNode> either(int depth) {
    if (depth > kMaxDepth) return refused("nesting deeper than 64");
    std::vector<RegexNode> ways;
    do {
      NVFP4_MOE_ASSIGN(RegexNode way, sequence(depth));
      ways.push_back(std::move(way));
    } while (take("|"));
    if (ways.size() == 1) return std::move(ways.front());
    return RegexNode::of(RegexNode::Kind::kEither, std::move(ways));
  }

  Result<RegexNode> sequence(int depth) {
    std::vector<RegexNode> parts;
    while (!ended() && text_[at_] != '|' && text_[at_] != ')') {
      NVFP4_MOE_ASSIGN(RegexNode part, atom(depth));
      NVFP4_MOE_ASSIGN(std::optional<RegexNode> repeated, quantified(part));
      parts.push_back(repeated ? *std::move(repeated) : std::move(part));
    }
    return RegexNode::of(RegexNode::Kind::kSequence, std::move(parts));
  }

  // The part with its quantifier, if one follows.
  Result<std::optional<RegexNode>> quantified(const RegexNode& part) {
    int least = 0, most = kUnbounded;
    if (take("*")) {
    } else if (take("+")) {
      least = 1;
    } else if (take("?")) {
      most = 1;
    } else if (!braces(least, most)) {
      return std::optional<RegexNode>();
    }
    if (part.kind == RegexNode::Kind::kAssert) return refused("a repeated assertion");
    if (most != kUnbounded && least > most)
      return refused("a repetition whose least is above its most");
    if (least > 1000 || most > 1000) return refused("more than 1000 repetitions");
    if (take("+")) return refused("a possessive quantifier");
    take("?");  // lazy: the same matches in another order
    if (!ended() && (text_[at_] == '*' || text_[at_] == '+' || text_[at_] == '?'))
      return refused("a multiple repeat");
    const size_t here = at_;
    int unused[2] = {0, kUnbounded};
    if (braces(unused[0], unused[1])) {
      at_ = here;
      return refused("a multiple repeat");
    }
    RegexNode node = RegexNode::of(RegexNode::Kind::kRepeat, {part});
    node.least = least;
    node.most = most;
    return std::optional<RegexNode>(std::move(node));
  }

  // {m}, {m,}, {,n}, {m,n}; any other brace is a literal.
  bool braces(int& least, int& most) {
    const size_t begin = at_;
    const auto number = [&](int fallback) {
      int value = 0;
      const size_t first = at_;
      while (!ended() && is_digit(text_[at_]))
        value = std::min(value * 10 + (text_[at_++] - '0'), 100000);
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

  Result<RegexNode> atom(int depth) {
    const char c = text_[at_];
    if (c == '(') return group(depth);
    if (c == '[') return set();
    if (c == '\\') return escape();
    if (c == '*' || c == '+' || c == '?') return refused("nothing to repeat");
    ++at_;
    if (c == '.') return RegexNode::of(~only('\n'));
    if (c == '^') return RegexNode::of(Op::kBegin);
    if (c == '$') return RegexNode::of(Op::kEnd);
    if (c == '{') {  // a quantifier without an operand
      --at_;
      int least = 0, most = 0;
      const size_t here = at_;
      if (braces(least, most)) {
        at_ = here;
        return refused("nothing to repeat");
      }
      ++at_;
    }
    return RegexNode::of(only(c));
  }

  Result<RegexNode> group(int depth) {
    RegexNode look = RegexNode::of(RegexNode::Kind::kLook);
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
    NVFP4_MOE_ASSIGN(RegexNode inner, either(depth + 1));
    if (!take(")")) return refused("a missing )");
    if (!looks) return inner;
    if (look.behind && !inner.width()) return refused("a look-behind without a fixed width");
    look.parts.push_back(std::move(inner));
    return look;
  }

  Result<RegexNode> escape() {
    ++at_;
    if (ended()) return refused("a \\ at the end");
    const char c = text_[at_++];
    if (const auto set = class_of(c)) return RegexNode::of(*set);
    switch (c) {
      case 'A': return RegexNode::of(Op::kBegin);
      case 'Z': return RegexNode::of(Op::kStrictEnd);
      case 'b': return RegexNode::of(Op::kWordEdge);
      case 'B': return RegexNode::of(Op::kNoWordEdge);
      default: break;
    }
    if (const auto literal = literal_escape(c)) return RegexNode::of(only(*literal));
    --at_;
    return refused(fmt::format("'\\{}'", c));
  }

  // The character that \c means, in a set or outside.
  static std::optional<char> literal_escape(char c) {
    constexpr std::string_view kLetters = "tnrfva", kMeant = "\t\n\r\f\v\a";
    if (const size_t i = kLetters.find(c); i != std::string_view::npos) return kMeant[i];
    if (is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return std::nullopt;
    return c;
  }

  // One member of a set, or a class of several characters.
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

  Result<RegexNode> set() {
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
    return RegexNode::of(negative ? ~all : all);
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Result<RegexNode> parse_regex(std::string_view expression) { return Parser(expression).parse(); }

}  // namespace nvfp4_moe::internal
