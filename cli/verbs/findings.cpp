#include "cli/verbs/findings.h"

#include <fmt/format.h>

#include <cctype>
#include <map>
#include <set>

namespace nvfp4_moe::internal::cli {
namespace {

// "model.layers.3.mlp.experts.17.up_proj" -> "model.layers.*.mlp.experts.*.up_proj", so that
// similar tensors become one line.
std::string folded_name(const std::string& name) {
  std::string out;
  bool word_begins = true, in_number = false;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (digit && (word_begins || in_number)) {
      if (!in_number) out += '*';
      in_number = true;
    } else {
      out += c;
      in_number = false;
    }
    word_begins = c == '.';
  }
  return out;
}

bool is_ignored(const Finding& finding) { return finding.id.starts_with("ignored"); }

// One row per finding. With fold_notes, notes of one kind become one row, because a model has one
// per layer.
Table findings_table(const std::vector<const Finding*>& findings, bool fold_notes) {
  Table table({{"severity", "severity", false},
               {"id", "finding", false},
               {"layer", "layer"},
               {"expert", "expert"},
               {"tensor", "tensor", false},
               {"expected", "expected", false},
               {"actual", "actual", false},
               {"count", "count"}});
  std::set<std::string> folded;
  for (const Finding* finding : findings) {
    int64_t count = finding->count;
    bool several = false;
    if (fold_notes && finding->severity == Severity::kNote) {
      if (!folded.insert(finding->id).second) continue;
      for (const Finding* other : findings) {
        if (other == finding || other->id != finding->id || other->severity != Severity::kNote)
          continue;
        count += other->count;
        several = true;
      }
    }
    const auto number = [](int64_t value) { return value < 0 ? no_cell() : cell(value); };
    const Style style = finding->severity == Severity::kError     ? Style::kBad
                        : finding->severity == Severity::kWarning ? Style::kWarning
                                                                  : Style::kPlain;
    table.add({cell(to_string(finding->severity), style), cell(finding->id),
               several ? cell("several") : number(finding->layer),
               several ? no_cell() : number(finding->expert),
               cell(finding->tensor + (several ? ", ..." : "")), cell(finding->expected),
               cell(finding->actual), cell(count)});
  }
  return table;
}

}  // namespace

void report_findings(const std::vector<Finding>& findings, Report& report) {
  int64_t errors = 0, warnings = 0;
  std::vector<const Finding*> shown;
  std::map<std::string, std::pair<int64_t, std::string>> ignored;  // folded name -> count, reason
  for (const Finding& finding : findings) {
    if (is_ignored(finding)) {
      auto& [count, reason] = ignored[folded_name(finding.tensor)];
      count += finding.count;
      reason = finding.actual.empty() ? finding.expected : finding.actual;
      continue;
    }
    errors += finding.severity == Severity::kError;
    warnings += finding.severity == Severity::kWarning;
    if (finding.severity == Severity::kError) report.fail(to_string(finding));
    shown.push_back(&finding);
  }
  report.line("");
  report.fact("findings",
              fmt::format("{} error{}, {} warning{}", errors, errors == 1 ? "" : "s", warnings,
                          warnings == 1 ? "" : "s"),
              errors > 0     ? Style::kBad
              : warnings > 0 ? Style::kWarning
                             : Style::kGood);
  report.json()["errors"] = errors;
  report.json()["warnings"] = warnings;
  if (!shown.empty()) report.table("findings", findings_table(shown, true));
  Json rows = findings_table(shown, false).json();
  for (size_t i = 0; i < shown.size(); ++i) rows[i]["examples"] = shown[i]->examples;
  report.json()["findings"] = rows;

  Json json = Json::array();
  int64_t total = 0;
  for (const auto& [name, what] : ignored) {
    total += what.first;
    json.push_back({{"tensor", name}, {"count", what.first}, {"reason", what.second}});
  }
  report.json()["ignored"] = json;
  if (total > 0)
    report.fact("ignored", fmt::format("{} tensors that are not routed experts:", total));
  for (const auto& [name, what] : ignored) {
    report.line(fmt::format("          {:>6}  {}{}", what.first, name,
                            what.second.empty() ? "" : "  " + what.second));
  }
}

}  // namespace nvfp4_moe::internal::cli
