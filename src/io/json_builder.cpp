#include "io/json_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>

#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

constexpr size_t kSearched = 16;  // objects with up to this many members are searched linearly

constexpr double kInfinity = std::numeric_limits<double>::infinity();
struct NonFiniteWord {
  std::string_view word;
  std::string_view number;  // of the same length; its digits vary
  double value;
};
constexpr NonFiniteWord kNonFiniteWords[] = {
    {"-Infinity", "-1.00E+00", -kInfinity},
    {"Infinity", "1.00E+00", kInfinity},
    {"NaN", "1E0", std::numeric_limits<double>::quiet_NaN()}};

// The whole word at `at`; null if there is another word.
const NonFiniteWord* word_at(std::string_view text, size_t at) {
  for (const NonFiniteWord& one : kNonFiniteWords) {
    if (!text.substr(at).starts_with(one.word)) continue;
    const size_t end = at + one.word.size();
    return end < text.size() && in_json_word(text[end]) ? nullptr : &one;
  }
  return nullptr;
}

// A form of the word's number that does not occur in the text; empty if all of them occur.
std::string stand_in(const NonFiniteWord& word, std::string_view text) {
  std::string number(word.number);
  for (int i = 0; i < 100; ++i) {
    number[number.find('E') - 1] = static_cast<char>('0' + i / 10);
    number.back() = static_cast<char>('0' + i % 10);
    if (text.find(number) == std::string_view::npos) return number;
  }
  return {};
}

}  // namespace

bool in_json_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_.+-").find(c) != std::string_view::npos;
}

NonFiniteNumbers replace_non_finite(std::string_view text) {
  NonFiniteNumbers out;
  if (text.find("NaN") == std::string_view::npos && text.find("Infinity") == std::string_view::npos)
    return out;
  std::map<std::string_view, std::string> chosen;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      in_string = !in_string;
    } else if (!in_string && (i == 0 || !in_json_word(text[i - 1]))) {
      const NonFiniteWord* word = word_at(text, i);
      if (word == nullptr) continue;
      if (!chosen.contains(word->word)) {
        std::string number = stand_in(*word, text);
        if (number.empty()) continue;  // left unchanged, and so refused
        out.values.emplace(number, word->value);
        chosen.emplace(word->word, std::move(number));
      }
      if (out.text.empty()) out.text = text;
      out.text.replace(i, word->word.size(), chosen[word->word]);
      i += word->word.size() - 1;
    }
  }
  return out;
}

bool JsonBuilder::refuse(std::string reason) {
  refusal_ = std::move(reason);
  return false;
}

bool JsonBuilder::number_float(double value, const std::string& token) {
  if (numbers_ != nullptr)
    if (const auto word = numbers_->values.find(token); word != numbers_->values.end())
      value = word->second;
  return add(Json(value));
}

std::string JsonBuilder::key_path() const {
  std::string path;
  for (const Level& level : stack_) {
    if (level.value->is_array()) {
      // an open element is already counted
      path += fmt::format("[{}]", level.value->size() - (&level != &stack_.back() ? 1 : 0));
    } else if (level.member < level.value->items().size()) {
      path += (path.empty() ? "" : ".") + level.value->items()[level.member].key;
    }
  }
  return path;
}

bool JsonBuilder::key(std::string& name) {
  Level& level = stack_.back();
  Json::Object& members = level.value->items();
  if (members.size() >= limits_.max_members)
    return refuse(fmt::format("expected at most {} keys in one object", limits_.max_members));
  size_t at = members.size();
  if (members.size() < kSearched) {
    for (size_t i = 0; i < members.size(); ++i)
      if (members[i].key == name) at = i;
  } else {
    if (level.by_name.empty())
      for (size_t i = 0; i < members.size(); ++i) level.by_name.emplace(members[i].key, i);
    at = level.by_name.emplace(name, members.size()).first->second;
  }
  if (at < members.size() && strict_)
    return refuse(fmt::format("duplicate key '{}'", printable(name)));
  if (at == members.size()) members.push_back({std::move(name), Json()});
  level.member = at;
  return true;
}

bool JsonBuilder::end_object() {
  if (strict_)
    std::sort(stack_.back().value->items().begin(), stack_.back().value->items().end(),
              [](const Json::Member& a, const Json::Member& b) { return a.key < b.key; });
  stack_.pop_back();
  return true;
}

bool JsonBuilder::end_array() {
  stack_.pop_back();
  return true;
}

bool JsonBuilder::parse_error(size_t position, const std::string&,
                              const nlohmann::detail::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ...": keep the
  // last part.
  std::string_view text = error.what();
  if (const size_t column = text.find("column "); column != std::string_view::npos)
    if (const size_t colon = text.find(": ", column); colon != std::string_view::npos)
      text.remove_prefix(colon + 2);
  if (const size_t bracket = text.find("] ");
      text.starts_with("[json.exception") && bracket != std::string_view::npos)
    text.remove_prefix(bracket + 2);
  // parse_json_strict quotes the word. nlohmann's own quotation may be a megabyte, and may show a
  // stand-in.
  if (const size_t quoted = text.find("; last read"); quoted != std::string_view::npos)
    text = text.substr(0, quoted);
  if (const size_t quoted = text.find(" parsing '"); quoted != std::string_view::npos)
    text = text.substr(0, quoted);
  position_ = position;
  return refuse(printable(text));
}

Json* JsonBuilder::place(Json value) {
  if (++values_ > limits_.max_values) {
    refuse(fmt::format("expected at most {} values", limits_.max_values));
    return nullptr;
  }
  if (stack_.empty()) {
    root_ = std::move(value);
    return &root_;
  }
  Json& container = *stack_.back().value;
  if (container.is_object())
    return &(container.items()[stack_.back().member].value = std::move(value));
  auto& array = std::get<Json::Array>(container.value_);
  if (array.size() >= limits_.max_elements) {
    refuse(fmt::format("expected at most {} elements in one array", limits_.max_elements));
    return nullptr;
  }
  return &array.emplace_back(std::move(value));
}

bool JsonBuilder::open(Json container) {
  if (stack_.size() >= static_cast<size_t>(limits_.max_depth))
    return refuse(fmt::format("expected at most {} levels of nesting", limits_.max_depth));
  Json* placed = place(std::move(container));
  if (placed == nullptr) return false;
  stack_.push_back({placed, 0, {}});
  return true;
}

}  // namespace nvfp4_moe::internal
