// Tests that attack the library: ./dev attack runs them alone and adds up what they tried.
//
// ATTACK_TEST, ATTACK_TEST_F and ATTACK_TEST_P stand for TEST, TEST_F and TEST_P with the kind of
// attack in front. CMake reads these lines and gives the tests the label `attack`. At the end of
// each such test, skipped ones included, stdout has the line "attacked: KIND COUNT", which
// tools/attack_summary.py adds up.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

namespace nvfp4_moe::internal::test {

enum class AttackKind {
#define ATTACK_KIND(name, words, one) name,
#include "support/attack_kinds.def"
#undef ATTACK_KIND
};

// Adds attacks to those of the running test, where they happen; from any thread. A test that is not
// one of ATTACK_TEST fails.
void attacked(int64_t count = 1);

// Says of a test, or of all that a parameterized one makes, which kind it is.
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
