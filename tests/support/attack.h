// Tests that attack the library: ./dev attack runs only these and adds up their attempts.
//
// ATTACK_TEST, ATTACK_TEST_F and ATTACK_TEST_P replace TEST, TEST_F and TEST_P and take the kind of
// attack as their first argument. CMake reads these lines and gives the tests the label `attack`.
// At the end of each such test, even a skipped one, stdout has the line "attacked: KIND COUNT",
// which tools/attack_summary.py adds up.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

namespace nvfp4_moe::internal::test {

enum class AttackKind {
#define ATTACK_KIND(name, words, one) name,
#include "support/attack_kinds.def"
#undef ATTACK_KIND
};

// Counts attacks of the running test. Call it at the attack, from any thread. A test not declared
// with ATTACK_TEST fails.
void attacked(int64_t count = 1);

// Registers the kind of a test, or of all tests that a parameterized one makes.
class AttackMark {
 public:
  AttackMark(AttackKind kind, const char* suite, const char* name);
};

}  // namespace nvfp4_moe::internal::test

#define ATTACK_MARK(kind, suite, name)                                          \
  static const ::nvfp4_moe::internal::test::AttackMark attack_##suite##_##name( \
      ::nvfp4_moe::internal::test::AttackKind::kind, #suite, #name);
#define ATTACK_TEST(kind, suite, name) ATTACK_MARK(kind, suite, name) TEST(suite, name)
#define ATTACK_TEST_F(kind, suite, name) ATTACK_MARK(kind, suite, name) TEST_F(suite, name)
#define ATTACK_TEST_P(kind, suite, name) ATTACK_MARK(kind, suite, name) TEST_P(suite, name)
