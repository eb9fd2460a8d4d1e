// Files that change while a checkpoint is open cause an error with a reason, never a signal. Tests
// that could end in a signal run in a child process.
#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint/experts.h"
#include "support/attack.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;

// A complete load: each expert is read to its last byte.
Status load_layer(const Checkpoint& checkpoint) {
  NVFP4_MOE_TRY(checkpoint.validate(0, {}).status());
  NVFP4_MOE_TRY(checkpoint.statistics(0, {}).status());
  NVFP4_MOE_TRY(checkpoint.layer_scales(0).status());
  uint64_t sum = 0;
  for (int64_t e = 0; e < checkpoint.model().options.num_experts; ++e) {
    NVFP4_MOE_ASSIGN(const LoadedExpert loaded, checkpoint.expert(0, e));
    sum += read_all(loaded);
  }
  return sum > 0 ? Status() : bad_input("nothing was read");
}

class Truncation : public testing::TestWithParam<SourceFormat> {
 protected:
  void SetUp() override {
    CheckpointBuilder builder({.model_type = "qwen3_moe",
                               .format = GetParam(),
                               .layers = 1,
                               .hidden_size = 256,
                               .intermediate_size = 256,
                               .random_codes = GetParam() != SourceFormat::kFloat});
    ASSERT_OK(builder.write(dir_.path().string()));
    size_ = fs::file_size(shard_);
  }
  Result<Checkpoint> open() const { return Checkpoint::open(dir_.path().string()); }
  TempDir dir_;
  const std::string shard_ = dir_.file("model.safetensors");
  uintmax_t size_ = 0;
};

ATTACK_TEST_P(kTruncations, Truncation, AFileThatWasCutIsAnError) {
  const auto checkpoint = must(open());
  ASSERT_OK(load_layer(*checkpoint));
  for (const uintmax_t size : {size_ - 1, size_ / 2, uintmax_t{4096}, uintmax_t{0}}) {
    fs::resize_file(shard_, size);
    EXPECT_EQ(in_forked_child([&] {
                for (int64_t e = 0; e < 8; ++e) {  // not only the first one to be loaded
                  const std::string message = checkpoint->expert(0, e).status().message();
                  if (message.find(shard_) == message.npos) return 2;
                  if (message.find("was cut") == message.npos &&
                      message.find("changed meanwhile") == message.npos)
                    return 3;
                }
                return checkpoint->validate(0, {}).ok() || checkpoint->statistics(0, {}).ok() ||
                               checkpoint->layer_scales(0).ok()
                           ? 4
                           : 0;
              }),
              0)
        << "cut to " << size;
  }
}

ATTACK_TEST_P(kTruncations, Truncation, AFileThatIsCutInTheMiddleOfALoadIsAnErrorAtAnyMoment) {
  fs::copy_file(shard_, dir_.file("whole"));
  std::mt19937 random(3);
  for (int round = 0; round < 25; ++round) {
    fs::remove(shard_);
    fs::copy_file(dir_.file("whole"), shard_);
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      const auto checkpoint = open();
      if (!checkpoint.ok() || ::write(ready[1], "x", 1) != 1) _exit(3);
      for (;;)
        if (!load_layer(*checkpoint).ok()) _exit(1);
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    close(ready[0]), close(ready[1]);
    usleep(static_cast<useconds_t>(random() % 20'000));
    ASSERT_EQ(truncate(shard_.c_str(), static_cast<off_t>(random() % size_)), 0);
    attacked();
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << "status " << status;
  }
}

ATTACK_TEST_P(kTruncations, Truncation, AFileThatIsWrittenOverIsAnErrorAndOneThatIsReplacedIsNot) {
  const auto checkpoint = must(open());
  fs::copy_file(shard_, dir_.file("copy"));
  fs::resize_file(dir_.file("copy"), 100);
  fs::rename(shard_, dir_.file("opened"));
  fs::rename(dir_.file("copy"), shard_);
  attacked();
  EXPECT_OK(load_layer(*checkpoint));  // the file that was opened still exists
  EXPECT_FALSE(open().ok());
  std::fstream file(dir_.file("opened"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x01');
  file.close();
  fs::last_write_time(dir_.file("opened"), fs::last_write_time(dir_.file("opened")) +
                                               std::chrono::seconds(1));  // clocks may be coarse
  attacked();
  for (const Status& status :
       {checkpoint->expert(0, 0).status(), checkpoint->validate(0, {}).status()})
    EXPECT_THAT(status.message(), HasSubstr("it was written to meanwhile"));
}

INSTANTIATE_TEST_SUITE_P(Formats, Truncation,
                         testing::Values(SourceFormat::kModelOpt, SourceFormat::kModelOptStacked,
                                         SourceFormat::kMxfp4, SourceFormat::kFloat),
                         [](const auto& param) {
                           return param.param == SourceFormat::kModelOpt          ? "modelopt"
                                  : param.param == SourceFormat::kModelOptStacked ? "stacked"
                                  : param.param == SourceFormat::kMxfp4           ? "mxfp4"
                                                                                  : "floats";
                         });

}  // namespace
}  // namespace nvfp4_moe::internal::test
