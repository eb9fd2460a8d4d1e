#include "support/attack.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <string>

namespace nvfp4_moe::internal::test {
namespace {

const char* words_of(AttackKind kind) {
  switch (kind) {
#define ATTACK_KIND(name, words, one) \
  case AttackKind::name:              \
    return words;
#include "support/attack_kinds.def"
#undef ATTACK_KIND
  }
  return "";
}

// Marked tests, as Suite.Name without parameters.
std::map<std::string, AttackKind>& marked() {
  static std::map<std::string, AttackKind> tests;
  return tests;
}

std::atomic<int64_t> tried{0};

// The entry of a test; null if it is not marked. "All/Suite.Name/7" belongs to Suite.Name.
const AttackKind* kind_of(const testing::TestInfo& test) {
  const std::string suite = test.test_suite_name(), name = test.name();
  const auto found =
      marked().find(suite.substr(suite.rfind('/') + 1) + "." + name.substr(0, name.find('/')));
  return found == marked().end() ? nullptr : &found->second;
}

// Prints the count of each marked test at its end.
class Reporter : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { tried = 0; }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (const AttackKind* kind = kind_of(test))
      std::printf("attacked: %s %lld\n", words_of(*kind), static_cast<long long>(tried.load()));
    std::fflush(stdout);
  }
};

}  // namespace

AttackMark::AttackMark(AttackKind kind, const char* suite, const char* name) {
  if (marked().empty()) testing::UnitTest::GetInstance()->listeners().Append(new Reporter);
  marked()[std::string(suite) + "." + name] = kind;
}

void attacked(int64_t count) {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr || kind_of(*test) == nullptr)
    ADD_FAILURE() << "attacked(): expected a test of ATTACK_TEST, got one that names no kind";
  tried += count;
}

}  // namespace nvfp4_moe::internal::test
