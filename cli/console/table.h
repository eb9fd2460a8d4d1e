// Table: rows of named columns, printed as aligned text for people or as JSON objects for programs.
//
// A column has a key with its unit ("median_us") and a title ("median us"). Text is a Markdown
// table, so that it can be pasted into an issue.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/json.h"

namespace nvfp4_moe::internal::cli {

enum class Style { kPlain, kGood, kWarning, kBad };
std::string styled(const std::string& text, Style style, bool color);

struct Column {
  std::string key;
  std::string title;  // empty: only in JSON
  bool right = true;  // alignment of the text
};

struct Cell {
  std::string text;
  Json value;
  Style style = Style::kPlain;
};
// A cell whose text is also its value.
Cell cell(const std::string& text, Style style = Style::kPlain);
Cell cell(int64_t value);
// Formats the value with fmt, for example cell(x, "{:.3f}"). The JSON value keeps all digits.
Cell cell(double value, const char* format);
Cell count_cell(uint64_t count);
// "1.3 GiB", and the number of bytes.
Cell bytes_cell(uint64_t bytes);
// Empty text and null.
Cell no_cell();
// "pass" or "FAIL", true or false.
Cell verdict(bool pass);

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<Cell> cells);  // one per column
  bool empty() const { return rows_.empty(); }
  std::string text(bool color) const;
  Json json() const;  // an array of objects

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace nvfp4_moe::internal::cli
