#include "cli/console/lists.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

namespace nvfp4_moe::internal::cli {
namespace {

constexpr size_t kMostNumbers = 1'000'000;

Result<int64_t> parse_number(std::string_view text, std::string_view whole) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    return invalid_argument(fmt::format("\"{}\": expected a number >= 0, got \"{}\"", whole, text));
  }
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

Status too_many(std::string_view text) {
  return invalid_argument(
      fmt::format("\"{}\": expected at most {} numbers, got more", text, kMostNumbers));
}

// Expands "64..4096:x2" to values.
Status expand_range(std::string_view part, size_t dots, std::string_view whole,
                    std::vector<int64_t>& values) {
  std::string_view tail = part.substr(dots + 2);
  std::string_view step = "x2";
  if (const size_t colon = tail.find(':'); colon != std::string_view::npos) {
    step = tail.substr(colon + 1);
    tail = tail.substr(0, colon);
  }
  NVFP4_MOE_ASSIGN(const int64_t first, parse_number(part.substr(0, dots), whole));
  NVFP4_MOE_ASSIGN(const int64_t last, parse_number(tail, whole));
  if (step.empty() || (step[0] != 'x' && step[0] != '+')) {
    return invalid_argument(
        fmt::format("\"{}\": expected a step x2 or +8, got \"{}\"", whole, step));
  }
  NVFP4_MOE_ASSIGN(const int64_t amount, parse_number(step.substr(1), whole));
  const bool multiply = step[0] == 'x';
  if (last < first)
    return invalid_argument(fmt::format("\"{}\": the range ends before it begins", whole));
  if (amount < (multiply ? 2 : 1) || (multiply && first == 0)) {
    return invalid_argument(
        fmt::format("\"{}\": expected {}, got the step {} from {}, which never reaches {}", whole,
                    multiply ? "a first number above 0 and a factor above 1, as in 1..64:x2"
                             : "a step of at least +1",
                    step, first, last));
  }
  for (int64_t value = first;;) {
    if (values.size() >= kMostNumbers) return too_many(whole);
    values.push_back(value);
    const int64_t room = last - value;
    if (multiply ? value > last / amount : amount > room) return {};
    value = multiply ? value * amount : value + amount;
  }
}

}  // namespace

Result<std::vector<int64_t>> parse_list(std::string_view text) {
  std::vector<int64_t> values;
  for (const std::string_view part : split(text, ',')) {
    const size_t dash = part.find('-');
    NVFP4_MOE_ASSIGN(const int64_t first, parse_number(part.substr(0, dash), text));
    int64_t last = first;
    if (dash != std::string_view::npos) {
      NVFP4_MOE_ASSIGN(last, parse_number(part.substr(dash + 1), text));
    }
    if (last < first)
      return invalid_argument(
          fmt::format("\"{}\": the range {} ends before it begins", text, part));
    if (static_cast<uint64_t>(last - first) >= kMostNumbers - values.size()) return too_many(text);
    for (int64_t value = first; value <= last; ++value) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

Result<std::vector<int64_t>> parse_sweep(std::string_view text) {
  std::vector<int64_t> values;
  for (const std::string_view part : split(text, ',')) {
    if (const size_t dots = part.find(".."); dots != std::string_view::npos) {
      NVFP4_MOE_TRY(expand_range(part, dots, text, values));
    } else {
      NVFP4_MOE_ASSIGN(const int64_t value, parse_number(part, text));
      if (values.size() >= kMostNumbers) return too_many(text);
      values.push_back(value);
    }
  }
  return values;
}

Result<std::vector<std::string>> parse_names(std::string_view text) {
  std::vector<std::string> names;
  for (const std::string_view part : split(text, ',')) {
    if (part.empty())
      return invalid_argument(fmt::format("\"{}\": expected names, got an empty one", text));
    names.emplace_back(part);
  }
  return names;
}

Result<std::pair<int64_t, int64_t>> parse_first_count(std::string_view text) {
  const auto parts = split(text, ':');
  if (parts.size() != 2)
    return invalid_argument(fmt::format("\"{}\": expected first:count, for example 16:8", text));
  NVFP4_MOE_ASSIGN(const int64_t first, parse_number(parts[0], text));
  NVFP4_MOE_ASSIGN(const int64_t count, parse_number(parts[1], text));
  return std::pair{first, count};
}

Result<uint64_t> parse_bytes(std::string_view text) {
  static constexpr std::array<std::pair<std::string_view, uint64_t>, 10> kUnits = {
      {{"KiB", 1ull << 10},
       {"MiB", 1ull << 20},
       {"GiB", 1ull << 30},
       {"TiB", 1ull << 40},
       {"kB", 1'000},
       {"KB", 1'000},
       {"MB", 1'000'000},
       {"GB", 1'000'000'000},
       {"TB", 1'000'000'000'000},
       {"B", 1}}};
  std::string_view digits = text;
  uint64_t unit = 1;
  for (const auto& [name, bytes] : kUnits) {
    if (text.ends_with(name)) {
      digits = text.substr(0, text.size() - name.size());
      unit = bytes;
      break;
    }
  }
  double number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const double value = number * static_cast<double>(unit);
  if (error != std::errc() || end != digits.data() + digits.size() || !(value >= 1) ||
      value > 9e18) {
    return invalid_argument(
        fmt::format("\"{}\": expected a size such as 5GB, 512MiB or 1048576", text));
  }
  return static_cast<uint64_t>(value);
}

std::string bytes_text(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kNames[unit]);
}

std::string duration_text(double seconds) {
  if (!(seconds >= 0)) return "?";
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  if (seconds > 360000) return "> 100 h";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace nvfp4_moe::internal::cli
