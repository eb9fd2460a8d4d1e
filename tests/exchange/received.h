// Helpers of tests of messages from other ranks.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/status.h"
#include "exchange/ranks.h"

namespace nvfp4_moe::internal::test {

using Bytes = std::vector<std::byte>;

// What comes of a failure is a text of one line and a code that there is.
inline void expect_said(const Status& status) {
  EXPECT_GE(status.code(), Code::kOk);
  EXPECT_LE(status.code(), Code::kCancelled);
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
  EXPECT_EQ(status.ok(), status.message().empty()) << status.message();
}

}  // namespace nvfp4_moe::internal::test
