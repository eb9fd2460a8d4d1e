#include "cli/console/html_page.h"

#include <fmt/format.h>

#include "core/printable.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr std::string_view kStyle = R"css(
:root{color-scheme:light dark;--paper:#fff;--panel:#f6f8fa;--ink:#1f2328;--soft:#59636e;
--grid:#d0d7de;--cell:#e6eaef;--good:#1a7f37;--warn:#bf8700;--bad:#cf222e;
--s0:#1b66c9;--s1:#e08a2c;--s2:#2f9e78;--s3:#8a5cc2;--s4:#8b8f96;--s5:#b5486f}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--panel:#151b23;--ink:#e6edf3;
--soft:#9198a1;--grid:#3d444d;--cell:#262c36;--good:#3fb950;--warn:#d29922;--bad:#f85149;
--s0:#5aa2ff;--s1:#e59a4a;--s2:#46b890;--s3:#ab8ae0;--s4:#8b8f96;--s5:#e07a9f}}
body{margin:0 auto;padding:1.5rem;max-width:70rem;background:var(--paper);color:var(--ink);
font:15px/1.5 -apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:1.6rem;margin:0}h2{font-size:1.1rem;margin:0}
code,.pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
header p,.note{color:var(--soft);margin:.2rem 0;overflow-wrap:anywhere}
header code{color:var(--ink)}
.state{font-weight:600}.good,header .good{color:var(--good)}.warning{color:var(--warn)}
.bad,header .bad{color:var(--bad)}
figure{margin:1.2rem 0;padding:1rem;border:1px solid var(--grid);border-radius:8px;overflow-x:auto}
.legend span{margin-right:1.2rem;font-size:13px;white-space:nowrap}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
svg{display:block;margin-top:.6rem}svg text{font-size:12px;fill:var(--ink)}
svg .soft{fill:var(--soft)}svg .over{pointer-events:none}
.grid{stroke:var(--grid)}.track{fill:var(--cell)}
.none{fill:var(--cell);background:var(--cell)}.error{fill:var(--bad);background:var(--bad)}
.warn{fill:var(--warn);background:var(--warn)}.ring{fill:none;stroke:var(--ink);stroke-width:2;
pointer-events:none}
.path{fill:none;stroke-width:2}.dash{stroke-dasharray:5 4}
.s0{fill:var(--s0);stroke:var(--s0);background:var(--s0)}
.s1{fill:var(--s1);stroke:var(--s1);background:var(--s1)}
.s2{fill:var(--s2);stroke:var(--s2);background:var(--s2)}
.s3{fill:var(--s3);stroke:var(--s3);background:var(--s3)}
.s4{fill:var(--s4);stroke:var(--s4);background:var(--s4)}
.s5{fill:var(--s5);stroke:var(--s5);background:var(--s5)}
.path.path{fill:none}rect.bar,rect.cell{stroke:none}
.fact{display:grid;grid-template-columns:7rem 1fr;margin:.2rem 0;overflow-wrap:anywhere}
.fact b{font-weight:600;color:var(--soft)}.pre{white-space:pre-wrap;margin:0}
.scroll{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:left;border-bottom:1px solid var(--grid);white-space:nowrap}
th{background:var(--panel)}.r{text-align:right}
)css";

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : printable(text, kWholeText)) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

// The report's JSON as a script element can hold it. These characters occur in strings only; it is
// ASCII, so that U+2028 and U+2029 are escaped already.
std::string embedded(const Json& report) {
  std::string out;
  for (const char c : report.dump(-1, true)) {
    if (c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out;
}

const char* class_of(Style style) {
  return style == Style::kGood      ? "good"
         : style == Style::kWarning ? "warning"
         : style == Style::kBad     ? "bad"
                                    : "";
}

std::string state_of(const Json& report) {
  const Json& failures = report["failures"];
  if (failures.empty()) return "<p class=\"state good\">ok</p>\n";
  return fmt::format("<p class=\"state bad\">check failed: {}{}</p>\n",
                     escaped(failures.front().text()),
                     failures.size() > 1 ? fmt::format(" (and {} more)", failures.size() - 1) : "");
}

}  // namespace

void HtmlPage::fact(const std::string& label, const std::string& text, Style style) {
  body_ += fmt::format("<p class=\"fact\"><b>{}</b><span class=\"{}\">{}</span></p>\n",
                       escaped(label), class_of(style), escaped(text));
}

void HtmlPage::line(const std::string& text) {
  if (text.empty()) return;
  body_ += fmt::format("<p class=\"{}\">{}</p>\n", text.front() == ' ' ? "pre" : "", escaped(text));
}

void HtmlPage::table(const Table& table) {
  const auto row = [&](const char* tag, const auto& text, const auto& style) {
    body_ += "<tr>";
    for (size_t c = 0; c < table.columns().size(); ++c) {
      const Column& column = table.columns()[c];
      if (column.title.empty()) continue;  // in JSON only
      body_ += fmt::format("<{0} class=\"{1}{2}\">{3}</{0}>", tag, column.right ? "r " : "",
                           class_of(style(c)), escaped(text(c)));
    }
    body_ += "</tr>\n";
  };
  body_ += "<div class=\"scroll\"><table>\n";
  row(
      "th", [&](size_t c) { return table.columns()[c].title; },
      [](size_t) { return Style::kPlain; });
  for (const std::vector<Cell>& cells : table.rows())
    row(
        "td", [&](size_t c) { return cells[c].text; }, [&](size_t c) { return cells[c].style; });
  body_ += "</table></div>\n";
}

std::string HtmlPage::text(const Json& report) const {
  const std::string verb = escaped(report["verb"].text());
  const Json& path = report["path"];
  const std::string subject = escaped((path.is_string() ? path : report["layer"]).text());
  const Json& host = report["host"];
  return fmt::format(
             "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
             "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
             "style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'; form-action "
             "'none'\">\n"
             "<meta name=\"viewport\" content=\"width=device-width\">\n"
             "<title>{} {} - nvfp4-moe</title>\n<style>{}</style>\n</head>\n<body>\n"
             "<header>\n<h1>{} {}</h1>\n{}<p><code>{}</code></p>\n"
             "<p>nvfp4-moe {} on {}, {} threads</p>\n</header>\n",
             kPageScriptHash, verb, subject, kStyle, verb, subject, state_of(report),
             escaped(report["repro"].text()), escaped(report["version"].text()),
             escaped(host["cpu"].text()), host["available_threads"].get<int64_t>()) +
         "<main id=\"pictures\"></main>\n<noscript><p class=\"note\">The pictures need JavaScript; "
         "the tables and --json have the numbers.</p></noscript>\n<section>\n" +
         body_ + "</section>\n<script type=\"application/json\" id=\"report\">" + embedded(report) +
         "</script>\n<script>" + std::string(kPageScript) + "</script>\n</body>\n</html>\n";
}

}  // namespace nvfp4_moe::internal::cli
