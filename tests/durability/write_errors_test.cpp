// A full or broken disk: the error has the reason, no temporary file is left, and a rerun finishes.
#include <cerrno>

#include "durability/recorded_calls.h"
#include "durability/small_model.h"
#include "io/output_file.h"
#include "support/attack.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;
using namespace test;
using testing::HasSubstr;

std::vector<std::string> temporary_files(const fs::path& folder) {
  std::vector<std::string> found;
  if (!fs::exists(folder)) return found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.find("partial") != std::string::npos || name.ends_with(".part")) found.push_back(name);
  }
  return found;
}

ATTACK_TEST(kWriteErrors, WriteErrors, AreToldAndLeaveNothingBehind) {
  const SmallModel model;
  struct Case {
    const char* call;
    int error;
    const char* reason;
  };
  for (const Case& c :
       {Case{"open", ENOSPC, "No space left on device"},
        Case{"write", ENOSPC, "No space left on device"}, Case{"write", EIO, "Input/output error"},
        Case{"fsync", EIO, "Input/output error"}, Case{"rename", EIO, "Input/output error"},
        Case{"close", EDQUOT, "Disk quota exceeded"}}) {
    int64_t failed = 0;
    for (int64_t number = 0;; ++number) {
      const TempDir run;
      const std::string out = run.file("out");
      bool hit = false;
      Status status;
      {
        const InjectedFault fault(run.path(), {c.call, number, 1, c.error});
        status = quantize_checkpoint(model.in, out, model.options).status();
        hit = fault.hit() > 0;
      }
      if (!hit) break;
      ++failed;
      attacked();
      EXPECT_EQ(status.code(), Code::kIo) << c.call << " " << number << " " << status.message();
      EXPECT_THAT(status.message(), HasSubstr(c.reason)) << c.call << " " << number;
      EXPECT_THAT(status.message(), HasSubstr(run.path().string())) << "the file is named";
      EXPECT_THAT(temporary_files(out), testing::IsEmpty()) << c.call << " " << number;
      if (read_image(run.path()).contains("out/") && read_image(out) != model.expected) {
        EXPECT_OK(quantize_checkpoint(model.in, out, model.options));
        EXPECT_THAT(differing(read_image(out), model.expected), testing::IsEmpty())
            << c.call << " " << number;
      }
      if (HasFailure()) return;
    }
    EXPECT_GT(failed, 8) << c.call << ": every one of them was tried";
  }
}

ATTACK_TEST(kWriteErrors, WriteErrors, ShortAndInterruptedWritesAreGoneOnWith) {
  const SmallModel model;
  for (const Fault& fault :
       {Fault{"write", 0, 1 << 20, 0}, Fault{"write", 1, 1, EINTR}, Fault{"fsync", 0, 1, EINTR}}) {
    const TempDir run;
    const InjectedFault injected(run.path(), fault);
    ASSERT_OK(quantize_checkpoint(model.in, run.file("out"), model.options));
    EXPECT_GT(injected.hit(), 0);
    attacked(injected.hit() > 0 ? 1 : 0);
    EXPECT_THAT(differing(read_image(run.file("out")), model.expected), testing::IsEmpty())
        << fault.call << fault.error;
  }
}

// A file system without sync for folders does not cause an error.
ATTACK_TEST(kWriteErrors, WriteErrors, AFolderWithoutSyncIsTakenAsItIs) {
  const TempDir run;
  const InjectedFault injected(run.path(), {"fsync", 1, 1, EINVAL});
  EXPECT_OK(write_text_file(run.file("x"), "text"));
  EXPECT_EQ(injected.hit(), 1);
  attacked(injected.hit());
  EXPECT_EQ(read_file(run.file("x")), "text");
}

}  // namespace
}  // namespace nvfp4_moe::internal
