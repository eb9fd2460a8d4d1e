#include "cli/console/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "core/printable.h"

namespace nvfp4_moe::internal::cli {

std::string styled(const std::string& text, Style style, bool color) {
  if (!color || style == Style::kPlain) return text;
  const char* code = style == Style::kGood ? "32" : style == Style::kWarning ? "33" : "31;1";
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

Cell cell(const std::string& text, Style style) { return {text, text, style}; }
Cell cell(int64_t value) { return {fmt::format("{}", value), value, Style::kPlain}; }
Cell cell(double value, const char* format) {
  // JSON has no NaN or Inf: they become strings, not a silent null.
  if (!std::isfinite(value))
    return {fmt::format("{}", value), fmt::format("{}", value), Style::kPlain};
  return {fmt::format(fmt::runtime(format), value), value, Style::kPlain};
}
Cell count_cell(uint64_t count) { return {fmt::format("{}", count), count, Style::kPlain}; }
Cell bytes_cell(uint64_t bytes) { return {bytes_text(bytes), bytes, Style::kPlain}; }
Cell no_cell() { return {"", nullptr, Style::kPlain}; }
Cell verdict(bool pass) {
  return {pass ? "pass" : "FAIL", pass, pass ? Style::kGood : Style::kBad};
}

void Table::add(std::vector<Cell> cells) {
  cells.resize(columns_.size());
  for (Cell& one : cells) one.text = printable(one.text, kWholeText);
  rows_.push_back(std::move(cells));
}

std::string Table::text(bool color) const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = std::max<size_t>(columns_[c].title.size(), 3);
    for (const auto& row : rows_) width = std::max(width, row[c].text.size());
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_text) {
    std::string out = "|";
    for (size_t c = 0; c < columns_.size(); ++c)
      if (!columns_[c].title.empty()) out += fmt::format(" {} |", cell_text(c));
    return out + "\n";
  };
  const auto pad = [&](size_t c, const std::string& text, size_t shown) {
    const std::string spaces(widths[c] - shown, ' ');
    return columns_[c].right ? spaces + text : text + spaces;
  };
  std::string out =
      line([&](size_t c) { return pad(c, columns_[c].title, columns_[c].title.size()); });
  out += line([&](size_t c) {
    return columns_[c].right ? std::string(widths[c] - 1, '-') + ":" : std::string(widths[c], '-');
  });
  for (const auto& row : rows_) {
    out += line([&](size_t c) {
      return pad(c, styled(row[c].text, row[c].style, color), row[c].text.size());
    });
  }
  return out;
}

Json Table::json() const {
  Json array = Json::array();
  for (const auto& row : rows_) {
    Json object = Json::object();
    for (size_t c = 0; c < columns_.size(); ++c) object[columns_[c].key] = row[c].value;
    array.push_back(std::move(object));
  }
  return array;
}

}  // namespace nvfp4_moe::internal::cli
