// HtmlPage: a verb's report as one file for a browser (--html): pictures drawn from its JSON, then
// the facts and tables of stdout, with the same digits.
//
// The page loads nothing, and its policy forbids all requests and all scripts but its own. Names
// from checkpoints are hostile input: text is escaped, the JSON has no `<`, `>` or `&`, and the
// script creates text nodes and attributes only, never markup.
#pragma once

#include <string>
#include <string_view>

#include "cli/console/table.h"

namespace nvfp4_moe::internal::cli {

// Draws the pictures (html_script.cpp). kPageScriptHash is what the page's policy admits: SHA-256
// in base64. tests/python/test_html_pages.py prints the new one if the script has changed.
extern const std::string_view kPageScript, kPageScriptHash;

class HtmlPage {
 public:
  void fact(const std::string& label, const std::string& text, Style style);
  void line(const std::string& text);
  void table(const Table& table);
  // The whole page. report: the object that --json prints.
  std::string text(const Json& report) const;

 private:
  std::string body_;
};

}  // namespace nvfp4_moe::internal::cli
