// Drops root's rights, for tests that run as root.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

namespace nvfp4_moe::internal::test {

inline constexpr uid_t kNobody = 65534;

// root may read anything. While this object lives, files are opened with another user's rights.
// Without root it changes nothing, because the user's own rights already suffice. Other threads'
// rights change too.
class AsNobody {
 public:
  AsNobody() : changed_(::geteuid() == 0 && ::seteuid(kNobody) == 0) {}
  ~AsNobody() {
    if (!changed_) return;
    EXPECT_EQ(::seteuid(0), 0);
  }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  bool changed_;
};

}  // namespace nvfp4_moe::internal::test
