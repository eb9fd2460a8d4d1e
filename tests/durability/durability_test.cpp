// A power loss at any moment of a run: a rerun finishes with the same bytes, and once a run has
// reported that it is done, nothing can be lost.
#include <functional>
#include <set>

#include "durability/crash_images.h"
#include "durability/small_model.h"
#include "io/output_file.h"
#include "support/attack.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;
using namespace test;

// The calls of one run of `work` in a folder that holds `before`. Checks that the record misses
// none.
std::vector<RecordedCall> record(const Image& before, const fs::path& folder,
                                 const std::function<void()>& work) {
  write_image(before, folder);
  std::vector<RecordedCall> calls;
  {
    RecordedCalls recorded(folder);
    work();
    calls = recorded.calls();
  }
  EXPECT_THAT(differing(image_of_all(before, calls), read_image(folder)), testing::IsEmpty());
  return calls;
}

// The part of an image that belongs to OUT; the image must have nothing else.
Image of_out(const Image& image) {
  Image out;
  for (const auto& [path, content] : image) {
    if (path == "out/") continue;
    EXPECT_TRUE(path.starts_with("out/")) << path;
    out[path.substr(4)] = content;
  }
  return out;
}

// Crashes at every call of a quantize that begins with `before`; returns the images that needed a
// rerun.
std::vector<Image> crash_everywhere(const SmallModel& model, const Image& before) {
  std::vector<Image> unfinished;
  std::set<Image> seen;
  const TempDir run;
  const std::vector<RecordedCall> calls = record(before, run.file("disk"), [&] {
    EXPECT_OK(quantize_checkpoint(model.in, run.file("disk/out"), model.options));
  });
  for (size_t count = 0; count <= calls.size(); ++count) {
    for (const Image& image : crash_images(before, calls, count)) {
      if (count == calls.size()) {
        EXPECT_THAT(differing(of_out(image), model.expected), testing::IsEmpty())
            << "said to be done, and lost";
      }
      const bool first_seen = seen.insert(image).second;
      attacked(first_seen || count == calls.size() ? 1 : 0);
      if (!first_seen || of_out(image) == model.expected) continue;
      unfinished.push_back(image);
      EXPECT_FALSE(image.contains("out/config.json") && !image.contains("out/quantize.plan.json"))
          << "counts as finished and is not, after call " << count;
      const TempDir again;
      write_image(image, again.file("disk"));
      const auto result = quantize_checkpoint(model.in, again.file("disk/out"), model.options);
      EXPECT_TRUE(result.ok()) << result.status().message() << ", after call " << count;
      EXPECT_THAT(differing(read_image(again.file("disk/out")), model.expected), testing::IsEmpty())
          << "after call " << count;
      if (testing::Test::HasFailure()) return unfinished;
    }
  }
  return unfinished;
}

ATTACK_TEST(kPowerCuts, Durability, QuantizeSurvivesACrashAtEveryCall) {
  const SmallModel model;
  const std::vector<Image> unfinished = crash_everywhere(model, {});
  ASSERT_GT(unfinished.size(), 60u) << "moments that differ";
  // A run that resumes may be interrupted too: resumed from a state in the middle, it crashes at
  // every call again.
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(crash_everywhere(model, unfinished[unfinished.size() / 2]).size(), 20u);
}

// A rerun after a crash keeps the shards that are done.
ATTACK_TEST(kPowerCuts, Durability, WhatIsOnDiskIsNotMadeAgain) {
  const SmallModel model;
  const TempDir run;
  int64_t steps = 0;
  QuantizeOptions options = model.options;
  options.progress = [&](const Progress& p) { return (steps = p.done) < p.total - 1; };
  const std::vector<RecordedCall> calls = record({}, run.file("disk"), [&] {
    EXPECT_EQ(quantize_checkpoint(model.in, run.file("disk/out"), options).status().code(),
              Code::kCancelled);
  });
  const Image lost = crash_images({}, calls, calls.size())[1];
  attacked();
  const TempDir again;
  write_image(lost, again.file("disk"));
  const auto result = quantize_checkpoint(model.in, again.file("disk/out"), model.options);
  ASSERT_OK(result);
  EXPECT_GE(result->resumed_shards, 2);
  for (const std::string& note : result->notes)
    EXPECT_EQ(note.find("no measurements"), std::string::npos) << note;
}

ATTACK_TEST(kPowerCuts, Durability, OtherWritersLoseNothingOnceTheyAreDone) {
  const SmallModel model;
  const TempDir run;
  const std::string quantized = run.file("quantized");
  ASSERT_OK(quantize_checkpoint(model.in, quantized, model.options));
  const struct {
    const char* name;
    std::function<Status(const std::string& out)> write;
  } writers[] = {{"scales",
                  [&](const std::string& out) {
                    return write_input_scales(quantized, out, {{0, {0.5f, 0.25f}}});
                  }},
                 {"synthesized", [](const std::string& out) {
                    return synthesize_checkpoint(out, small_sizes()).status();
                  }}};
  for (const auto& writer : writers) {
    const std::string disk = run.file(writer.name);
    const auto calls = record({}, disk, [&] { EXPECT_OK(writer.write(disk + "/out")); });
    const Image expected = read_image(disk);
    EXPECT_FALSE(expected.empty());
    for (const Image& image : crash_images({}, calls, calls.size())) {
      attacked();
      EXPECT_THAT(differing(image, expected), testing::IsEmpty()) << writer.name;
    }
  }
}

// Replacing one file: the old or the new content at every moment, the new one at the end.
ATTACK_TEST(kPowerCuts, Durability, AReplacedFileIsTheOldOneOrTheNew) {
  const Image before = {{"x", "old content"}};
  const auto check = [&](const char* what, const std::function<void(const std::string&)>& write) {
    const TempDir run;
    const auto calls = record(before, run.file("disk"), [&] { write(run.file("disk/x")); });
    const std::string after = read_file(run.file("disk/x"));
    EXPECT_NE(after, "old content");
    size_t old = 0;
    for (size_t count = 0; count <= calls.size(); ++count) {
      for (const Image& image : crash_images(before, calls, count)) {
        attacked();
        ASSERT_TRUE(image.contains("x")) << what << ": the name is lost after call " << count;
        EXPECT_TRUE(image.at("x") == after ||
                    (image.at("x") == "old content" && count < calls.size()))
            << what << " after call " << count;
        old += image.at("x") == "old content";
        EXPECT_TRUE(count < calls.size() || image.size() == 1)
            << what << ": a temporary file stays";
      }
    }
    EXPECT_GT(old, 2u);
  };
  check("text", [](const std::string& path) {
    EXPECT_OK(write_text_file(path, std::string(3 << 20, 'n')));
  });
  check("safetensors", [](const std::string& path) {
    write_named_tensors(path, {tensor("t", DType::kU8, {5000}, std::vector<uint8_t>(5000, 7))});
  });
}

}  // namespace
}  // namespace nvfp4_moe::internal
