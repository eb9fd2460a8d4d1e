// Helpers of tests of messages from other ranks.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/status.h"
#include "exchange/ranks.h"

namespace nvfp4_moe::internal::test {

using Bytes = std::vector<std::byte>;

// Expects a known code, and a message of one line if and only if the status is a failure.
inline void expect_said(const Status& status) {
  EXPECT_GE(status.code(), Code::kOk);
  EXPECT_LE(status.code(), Code::kCancelled);
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
  EXPECT_EQ(status.ok(), status.message().empty()) << status.message();
}

}  // namespace nvfp4_moe::internal::test
