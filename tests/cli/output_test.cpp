// Verbs write only to new files, and to regular files that the user names; never to an input or a
// device.
#include <sys/stat.h>

#include <fstream>

#include "cli/run_tool.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A model of one layer and states of `tokens` tokens for it.
struct Inputs {
  TempDir dir;
  std::string model = dir.file("model");
  std::string states = dir.file("states.safetensors");

  explicit Inputs(int64_t tokens = 2) {
    BuilderOptions options;
    EXPECT_OK(CheckpointBuilder(options).write(model));
    const std::vector<float> values(static_cast<size_t>(tokens * options.hidden_size), 0.5f);
    write_named_tensors(states,
                        {tensor("hidden", DType::kF32, {tokens, options.hidden_size}, values)});
  }
  ToolRun run(const std::vector<std::string>& more) const {
    return run_tool(joined({{"run", model, "--layer", "0", "--input", states}, more}));
  }
};

void expect_refused(const ToolRun& run, const std::string& words) {
  EXPECT_EQ(run.exit_code, 2) << run.err;
  EXPECT_EQ(run.out, "");
  EXPECT_EQ(count_lines(run.err), 1) << run.err;
  EXPECT_THAT(run.err, HasSubstr(words));
}
void expect_attack_refused(const ToolRun& run, const std::string& words) {
  attacked();
  expect_refused(run, words);
}

ATTACK_TEST(kSpecialFiles, Output, IsNoDeviceFifoOrFolder) {
  const Inputs inputs;
  const std::string fifo = inputs.dir.file("fifo"), link = inputs.dir.file("link");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  // A link to /dev/null: if the tool replaced it, it would no longer be a link.
  fs::create_symlink("/dev/null", link);
  for (const char* option : {"--output", "--dump"}) {
    expect_attack_refused(
        inputs.run({option, "/dev/null"}),
        "/dev/null: expected a regular file to replace or nothing, got a character device");
    expect_attack_refused(inputs.run({option, fifo}), "got a FIFO");
    expect_attack_refused(inputs.run({option, link}), link);
    expect_attack_refused(inputs.run({option, inputs.dir.path().string()}), "got a directory");
  }
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_TRUE(fs::is_fifo(fifo));
  EXPECT_TRUE(fs::is_symlink(link));
}

TEST(Output, IsRefusedBeforeAnyWork) {
  // The input cannot be read either; the error is still about the output.
  const Inputs inputs;
  std::ofstream(inputs.states) << "no states";
  expect_refused(inputs.run({"--output", "/dev/null"}), "/dev/null");
}

ATTACK_TEST(kSpecialFiles, Output, IsNoInput) {
  const Inputs inputs;
  const std::string hard = inputs.dir.file("hard"), soft = inputs.dir.file("soft");
  fs::create_hard_link(inputs.states, hard);
  fs::create_symlink(inputs.states, soft);
  const std::string before = read_file(inputs.states);
  for (const char* option : {"--output", "--dump"}) {
    for (const std::string& name : {inputs.states, hard, soft}) {
      const ToolRun run = inputs.run({option, name});
      expect_attack_refused(run, std::string(option) + " " + name);
      EXPECT_THAT(run.err, HasSubstr("--input " + inputs.states));
    }
    for (const char* file : {"config.json", "model.safetensors"}) {
      const std::string of_model = inputs.model + "/" + file;
      ASSERT_TRUE(fs::exists(of_model));
      const std::string kept = read_file(of_model);
      expect_attack_refused(inputs.run({option, of_model}), "the model's");
      EXPECT_EQ(read_file(of_model), kept);
    }
  }
  EXPECT_EQ(read_file(inputs.states), before);
  const std::string both = inputs.dir.file("both");
  expect_attack_refused(inputs.run({"--output", both, "--dump", inputs.dir.file("./both")}),
                        "--output");
  EXPECT_FALSE(fs::exists(both));
}

// A model of one file: that file and the neighbours that may belong to it.
ATTACK_TEST(kSpecialFiles, Output, IsNoModelOfOneFile) {
  Inputs inputs;
  inputs.model += "/model.safetensors";
  const std::string config = fs::path(inputs.model).parent_path().string() + "/config.json";
  const std::string before = read_file(inputs.model);
  for (const char* option : {"--output", "--dump"})
    for (const std::string& file : {inputs.model, config})
      expect_attack_refused(inputs.run({option, file}), "the model's " + file);
  EXPECT_EQ(read_file(inputs.model), before);
}

ATTACK_TEST(kSpecialFiles, Output, GoesThroughALinkToARegularFile) {
  const Inputs inputs;
  const std::string target = inputs.dir.file("target"), link = inputs.dir.file("link");
  std::ofstream(target) << "before";
  fs::create_symlink("target", link);
  const ToolRun run = inputs.run({"--output", link});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(fs::is_symlink(link));
  const auto written = SafetensorsFile::open(target);
  ASSERT_OK(written);
  EXPECT_NE(written->find("out"), nullptr);

  fs::create_symlink("nothing", inputs.dir.file("dangling"));
  expect_attack_refused(inputs.run({"--output", inputs.dir.file("dangling")}), "leads nowhere");
}

// The library accepts a batch of no tokens, and so does the tool: the output is empty too.
TEST(Output, AnInputWithoutTokensHasAnOutputWithoutTokens) {
  const Inputs inputs(0);
  const std::string out = inputs.dir.file("out");
  for (const char* backend : {"auto", "reference"}) {
    const ToolRun run = inputs.run({"--output", out, "--backend", backend, "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.json()["tokens"], 0);
    const auto written = SafetensorsFile::open(out);
    ASSERT_OK(written);
    ASSERT_NE(written->find("out"), nullptr);
    EXPECT_EQ(written->find("out")->shape, (std::vector<int64_t>{0, BuilderOptions().hidden_size}));
    EXPECT_EQ(written->find("out")->dtype, DType::kF32);
  }
  // The environment asks for dumps too, but there is nothing to dump.
  const std::string dumps = inputs.dir.file("dumps");
  ASSERT_TRUE(fs::create_directory(dumps));
  run_ok({"run", inputs.model, "--layer", "0", "--input", inputs.states, "--output", out},
         {{"NVFP4_MOE_DUMP", dumps}});
  EXPECT_TRUE(fs::is_empty(dumps));
  expect_refused(inputs.run({"--dump", inputs.dir.file("dump")}),
                 "--dump: expected an input of at least one token");
}

// Measuring takes long: a path that --write refuses is reported before the input is read.
TEST(Output, CalibrateAsksForItsFolderFirst) {
  const Inputs inputs;
  const std::string out = inputs.dir.file("out"), missing = inputs.dir.file("missing");
  ASSERT_TRUE(fs::create_directory(out));
  std::ofstream(out + "/kept") << "kept";
  expect_refused(run_tool({"calibrate", inputs.model, "--input", missing, "--write", out}),
                 "new or empty directory");
  expect_refused(run_tool({"calibrate", inputs.model, "--input", missing, "--write", inputs.model}),
                 "apart");
  EXPECT_EQ(read_file(out + "/kept"), "kept");
}

// Dumps requested by the environment variable never overwrite each other, even if an earlier
// process had the same number.
TEST(Output, ADumpReplacesNoOther) {
  const Inputs inputs;
  const std::string dumps = inputs.dir.file("dumps");
  ASSERT_TRUE(fs::create_directory(dumps));
  // The shell's own process becomes the tool, so its number is known beforehand.
  const std::string script =
      "for i in 0 1; do echo kept > \"$0/repro-$$-$i.safetensors\"; done; "
      "exec env NVFP4_MOE_DUMP=\"$0\" \"$@\" > /dev/null 2>&1";
  const std::string command = "sh -c '" + script + "' " + dumps + " " NVFP4_MOE_TOOL " run " +
                              inputs.model + " --layer 0 --input " + inputs.states + " --output " +
                              inputs.dir.file("out");
  ASSERT_EQ(std::system(command.c_str()), 0);
  int kept = 0, written = 0;
  for (const auto& entry : fs::directory_iterator(dumps)) {
    if (read_file(entry.path().string()) == "kept\n")
      ++kept;
    else
      written += SafetensorsFile::open(entry.path().string()).ok();
  }
  EXPECT_EQ(kept, 2);
  EXPECT_GT(written, 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
