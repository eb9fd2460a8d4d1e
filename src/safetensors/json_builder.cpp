#include "safetensors/json_builder.h"

#include <fmt/format.h>

#include <algorithm>

#include "safetensors/files.h"

namespace nvfp4_moe {
namespace {

constexpr size_t kSearched = 16;  // members up to which an object is searched from end to end

}  // namespace

bool JsonBuilder::refuse(std::string reason) {
  refusal_ = std::move(reason);
  return false;
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
  if (at < members.size() && strict_) return refuse(fmt::format("duplicate key '{}'", printable(name)));
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

bool JsonBuilder::parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ...": keep the last part.
  std::string_view text = error.what();
  if (const size_t column = text.find("column "); column != std::string_view::npos)
    if (const size_t colon = text.find(": ", column); colon != std::string_view::npos) text.remove_prefix(colon + 2);
  if (const size_t bracket = text.find("] "); text.starts_with("[json.exception") && bracket != std::string_view::npos)
    text.remove_prefix(bracket + 2);
  // The text quotes what it last read, which may be a megabyte: the reason stands before it.
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
  if (container.is_object()) return &(container.items()[stack_.back().member].value = std::move(value));
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

}  // namespace nvfp4_moe
