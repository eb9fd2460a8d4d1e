// The count of attacks (support/attack.h): only tests that declare their kind may add to it.
#include "support/attack.h"

#include <gtest/gtest-spi.h>

namespace nvfp4_moe::internal::test {
namespace {

TEST(AttackCount, ATestWithoutAKindMayNotAttack) {
  EXPECT_NONFATAL_FAILURE(attacked(),
                          "attacked(): expected a test of ATTACK_TEST, got one that names no kind");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
