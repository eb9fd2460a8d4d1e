// Unwraps results that a test needs, and checks errors that it expects.
#pragma once

#include <gmock/gmock.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "core/status.h"

namespace nvfp4_moe::internal::test {

using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

inline const Status& status_of(const Status& status) { return status; }
template <class T>
const Status& status_of(const Result<T>& result) {
  return result.status();
}

// The value of the result. A failed result ends the test, from a function or a constructor too. The
// builtins are those of std::source_location, which clang 14 does not have.
template <class T>
Result<T> must(Result<T> result, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (result.ok()) return result;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " +
                           result.status().message());
}

// Matches a Status or Result with this code and these words in its message.
MATCHER_P2(Refused, code, words, "") {
  const Status& status = status_of(arg);
  *result_listener << "code " << static_cast<int>(status.code()) << ": " << status.message();
  return status.code() == code && status.message().find(words) != std::string::npos;
}

}  // namespace nvfp4_moe::internal::test
