// Expressions and globs against names. The expected values come from Python's re.match and fnmatch.
#include "checkpoint/module_regex.h"

#include <string>
#include <vector>

#include "support/attack.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr const char* kDown = "model.layers.3.mlp.experts.17.down_proj";

bool matches(const char* expression, std::string_view name) {
  const Result<ModuleRegex> regex = ModuleRegex::regex(expression);
  EXPECT_OK(regex);
  int64_t budget = 1 << 20;
  const bool found = regex->match(name, budget);
  EXPECT_GT(budget, 0) << expression;
  return found;
}

TEST(ModuleRegex, MatchesAsPythonDoes) {
  const struct {
    const char* expression;
    const char* name;
    bool expected;
  } cases[] = {
      {"", kDown, true},
      {"layers", kDown, false},  // re.match begins at the beginning, and may end anywhere
      {".*layers", kDown, true},
      {".*down_proj$", "model.layers.3.mlp.experts.17.down_proj.weight", false},
      {"^(?!.*experts).*_proj$", kDown, false},
      {"(?=.*experts)(?!.*shared).*(gate|up)_proj", "model.layers.3.mlp.experts.1.up_proj", true},
      {"(?=.*experts)(?!.*shared).*(gate|up)_proj", "model.layers.3.mlp.shared_experts.up_proj",
       false},
      {".*(?<!shared_)experts\\..*", kDown, true},
      {".*(?<!shared_)experts\\..*", "model.layers.3.mlp.shared_experts.up_proj", false},
      {".*(?<=mlp\\.)experts", kDown, true},
      {"model\\.layers\\.\\d\\.", "model.layers.31.mlp", false},
      {"model\\.layers\\.(?:[0-2]|1\\d)\\.", "model.layers.12.mlp", true},
      {"model\\.layers\\.[^0-2]\\.", kDown, true},
      {".*experts\\.\\d{2}\\.", kDown, true},
      {".*experts\\.\\d{3,}\\.", kDown, false},
      {".*?experts\\.\\w+?\\.down", kDown, true},
      {".*\\bexperts\\b", "model.layers.3.mlp.shared_experts.up_proj", false},
      {"(a|ab)(c|bcd)(d*)", "abcd", true},
      {"(a*)*b", "aaac", false},
      {"a{x", "a{x", true},
      {"[]a]+$", "a]a", true},
      {"[a\\-z]$", "-", true},
      {"\\Amodel.*proj\\Z", kDown, true},
      {".", "\n", false},
      {"a$", "a\n", true},
      {"a\\Z", "a\n", false},
  };
  for (const auto& one : cases)
    EXPECT_EQ(matches(one.expression, one.name), one.expected)
        << one.expression << " on " << one.name;
}

TEST(ModuleRegex, GlobsMatchAsFnmatchDoes) {
  const struct {
    const char* pattern;
    const char* name;
    bool expected;
  } cases[] = {
      {"*.attn.*", "layers.0.attn.wq", true},
      {"model.layers.*.mlp.gate", "model.layers.3.mlp.gate_proj", false},
      {"model.layers.[!0-2].*", kDown, true},
      {"model.layers.?.*", "model.layers.12.mlp", false},
      {"*[]]", "a]", true},
      {"[a", "[a", true},
      {"*down", kDown, false},
  };
  for (const auto& one : cases) {
    const auto glob = must(ModuleRegex::glob(one.pattern));
    int64_t budget = 1 << 20;
    EXPECT_EQ(glob->match(one.name, budget), one.expected) << one.pattern << " on " << one.name;
  }
}

TEST(ModuleRegex, KnowsWhetherDigitsAreEqual) {
  for (const char* expression : {".*experts.*", "layers\\.\\d+", "[\\w.]+", "(?!.*shared)"})
    EXPECT_TRUE(ModuleRegex::regex(expression)->digits_are_equal()) << expression;
  for (const char* expression : {".*layers\\.3\\.", "[0-4]", "[^7]"})
    EXPECT_FALSE(ModuleRegex::regex(expression)->digits_are_equal()) << expression;
}

TEST(ModuleRegex, RefusesByNameWhatItDoesNotUnderstand) {
  for (const char* expression :
       {"(a)\\1", "(?i)a", "a*+", "(?>a)", "(?P=x)", "(?#x)", "\\q", "\\x41", "(?<=a+)b", "(", ")",
        "a**", "*a", "[a", "a\\", "a{2}{3}", "[z-a]", "x{3,2}", "^*"})
    EXPECT_THAT(ModuleRegex::regex(expression),
                Refused(Code::kUnsupported, "regular expression '"));
}

ATTACK_TEST(kHostileFiles, ModuleRegex, HostileExpressionsEnd) {
  const std::string name = "model." + std::string(400, 'a');
  std::string deep, empty = "()";
  for (int i = 0; i < 5000; ++i) deep += '(';
  for (int i = 0; i < 8; ++i) empty = "(" + empty + "){1000}";
  const std::vector<std::string> expressions = {"(a+)+$",
                                                "model\\.(a|aa)+$b",
                                                "model\\.(a*)*(a*)*(a*)*!",
                                                "(.*.*.*.*.*.*.*.*)*!",
                                                "((((a{1000}){1000}){1000}){1000})",
                                                "(?:(?=(?:(?=.*.*.*x).)*y).)*z",
                                                deep,
                                                empty,
                                                std::string(5000, 'a'),
                                                "(?<=" + std::string(3000, '.') + ")a"};
  for (const std::string& expression : expressions) {
    attacked();
    const Result<ModuleRegex> regex = ModuleRegex::regex(expression);
    if (!regex.ok()) {
      EXPECT_EQ(regex.status().code(), Code::kUnsupported);
      continue;
    }
    int64_t budget = 1 << 22;
    EXPECT_FALSE(regex->match(name, budget)) << expression;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
