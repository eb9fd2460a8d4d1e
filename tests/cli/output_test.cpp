// Verbs write only to new files, and to regular files that the user names; never to an input or a
// device. --html follows the same rules, and its page holds the JSON of its run.
#include <sys/stat.h>

#include <fstream>

#include "cli/run_tool.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using testing::Not;
using Words = std::vector<std::string>;

// A model of one layer and states for it.
class Output : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(CheckpointBuilder(BuilderOptions{}).write(model_));
    write_states(2);
  }
  void write_states(int64_t tokens) const {
    const std::vector<float> values(static_cast<size_t>(tokens * channels_), 0.5f);
    write_named_tensors(states_, {tensor("hidden", DType::kF32, {tokens, channels_}, values)});
  }
  ToolRun run(const Words& more, const std::string& model = "",
              const std::map<std::string, std::string>& env = {}) const {
    const Words words = {"run", model.empty() ? model_ : model, "--layer", "0", "--input", states_};
    return run_tool(joined({words, more}), env);
  }
  static void expect_refused(const ToolRun& run, const std::string& words) {
    EXPECT_EQ(run.exit_code, 2) << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(count_lines(run.err), 1) << run.err;
    EXPECT_THAT(run.err, HasSubstr(words));
  }
  // The option is refused by every command that has it.
  void expect_all_refuse(const std::string& file, const std::string& words,
                         const std::string& model = "") {
    attacked(5);
    for (const char* option : {"--output", "--dump"})
      expect_refused(run({option, file}, model), words);
    for (const char* verb : {"inspect", "verify", "bench"})
      expect_refused(run_tool({verb, model.empty() ? model_ : model, "--html", file}), words);
  }

  const int64_t channels_ = BuilderOptions().hidden_size;
  const TempDir dir_;
  const std::string model_ = dir_.file("model"), states_ = dir_.file("states.safetensors"),
                    out_ = dir_.file("out"), page_ = dir_.file("page.html");
};
using Html = Output;

ATTACK_TEST_F(kSpecialFiles, Output, IsNoDeviceFifoOrFolder) {
  const std::string fifo = dir_.file("fifo"), link = dir_.file("link");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  // A link to /dev/null: if the tool replaced it, it would no longer be a link.
  fs::create_symlink("/dev/null", link);
  fs::create_symlink("nothing", dir_.file("dangling"));
  expect_all_refuse(
      "/dev/null",
      "/dev/null: expected a regular file to replace or nothing, got a character device");
  expect_all_refuse(fifo, "got a FIFO");
  expect_all_refuse(link, link);
  expect_all_refuse(dir_.file("dangling"), "leads nowhere");
  expect_all_refuse(dir_.path().string(), "got a directory");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_TRUE(fs::is_fifo(fifo));
  EXPECT_TRUE(fs::is_symlink(link));
  // It is refused before any work: the input cannot be read either.
  std::ofstream(states_) << "no states";
  expect_refused(run({"--output", "/dev/null"}), "/dev/null");
}

ATTACK_TEST_F(kSpecialFiles, Output, IsNoInputAndNoPartOfTheModel) {
  const std::string hard = dir_.file("hard"), soft = dir_.file("soft");
  fs::create_hard_link(states_, hard);
  fs::create_symlink(states_, soft);
  const Files before = read_files(dir_.path());
  attacked(6);
  for (const char* option : {"--output", "--dump"})
    for (const std::string& name : {states_, hard, soft})
      expect_refused(run({option, name}), option + (" " + name) +
                                              ": expected another file than "
                                              "--input " +
                                              states_);
  expect_refused(run_tool({"verify", model_, "--input", states_, "--html", states_}), "--input");
  const std::string one_file = model_ + "/model.safetensors", config = model_ + "/config.json";
  for (const std::string& model : {model_, one_file})
    for (const std::string& file : {one_file, config})
      expect_all_refuse(file, "the model's " + file, model);
  expect_refused(run({"--output", out_, "--dump", dir_.file("./out")}), "--output");
  EXPECT_EQ(differing(read_files(dir_.path()), before), Words{});
  const std::string original = dir_.file("original");
  ASSERT_OK(CheckpointBuilder({.format = SourceFormat::kFloat}).write(original));
  expect_refused(
      run_tool({"verify", model_, "--against", original, "--html", original + "/config.json"}),
      "the model's");
}

ATTACK_TEST_F(kSpecialFiles, Output, GoesThroughALinkToARegularFile) {
  attacked();
  const std::string target = dir_.file("target"), link = dir_.file("link");
  std::ofstream(target) << "before";
  fs::create_symlink("target", link);
  const ToolRun ran = run({"--output", link});
  ASSERT_EQ(ran.exit_code, 0) << ran.err;
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_NE((*must(SafetensorsFile::open(target))).find("out"), nullptr);
}

// The library accepts a batch of no tokens, and so does the tool: the output is empty too.
TEST_F(Output, AnInputWithoutTokensHasAnOutputWithoutTokens) {
  write_states(0);
  const std::string dumps = dir_.file("dumps");
  ASSERT_TRUE(fs::create_directory(dumps));
  for (const char* backend : {"auto", "reference"}) {
    // The environment asks for dumps too, but there is nothing to dump.
    const ToolRun ran =
        run({"--output", out_, "--backend", backend, "--json"}, "", {{"NVFP4_MOE_DUMP", dumps}});
    ASSERT_EQ(ran.exit_code, 0) << ran.err;
    EXPECT_EQ(ran.json()["tokens"], 0);
    const auto written = must(SafetensorsFile::open(out_));
    const TensorInfo* const info = written->find("out");
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->shape, (std::vector<int64_t>{0, channels_}));
    EXPECT_EQ(info->dtype, DType::kF32);
  }
  EXPECT_TRUE(fs::is_empty(dumps));
  expect_refused(run({"--dump", dir_.file("dump")}),
                 "--dump: expected an input of at least one token");
}

// Measuring takes long: a path that --write refuses is reported before the input is read.
TEST_F(Output, CalibrateAsksForItsFolderFirst) {
  ASSERT_TRUE(fs::create_directory(out_));
  std::ofstream(out_ + "/kept") << "kept";
  const Words words = {"calibrate", model_, "--input", dir_.file("missing"), "--write"};
  expect_refused(run_tool(joined({words, {out_}})), "new or empty directory");
  expect_refused(run_tool(joined({words, {model_}})), "apart");
  EXPECT_EQ(read_file(out_ + "/kept"), "kept");
}

// Dumps requested by the environment variable never overwrite each other, even if an earlier
// process had the same number.
TEST_F(Output, ADumpReplacesNoOther) {
  const std::string dumps = dir_.file("dumps");
  ASSERT_TRUE(fs::create_directory(dumps));
  // The shell's own process becomes the tool, so its number is known beforehand.
  const std::string script =
      "for i in 0 1; do echo kept > \"$0/repro-$$-$i.safetensors\"; done; "
      "exec env NVFP4_MOE_DUMP=\"$0\" \"$@\" > /dev/null 2>&1";
  const std::string command = "sh -c '" + script + "' " + dumps + " " NVFP4_MOE_TOOL " run " +
                              model_ + " --layer 0 --input " + states_ + " --output " + out_;
  ASSERT_EQ(std::system(command.c_str()), 0);
  int kept = 0, written = 0;
  for (const auto& [name, content] : read_files(dumps)) ++(content == "kept\n" ? kept : written);
  EXPECT_EQ(kept, 2);
  EXPECT_GT(written, 0);
}

int count_of(const std::string& text, const std::string& word) {
  int count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

// The text of the page's JSON element.
std::string embedded(const std::string& page) {
  const std::string opens = "<script type=\"application/json\" id=\"report\">";
  const size_t begin = page.find(opens) + opens.size();
  EXPECT_GE(begin, opens.size()) << page;
  return page.substr(begin, page.find("</script>", begin) - begin);
}

TEST_F(Html, APageHoldsTheJsonOfItsRun) {
  for (const Words& words : std::vector<Words>{
           {"inspect"}, {"verify"}, {"bench", "--seconds", "0", "--tokens", "1,3"}}) {
    SCOPED_TRACE(words[0]);
    const ToolRun ran = run_ok(joined({words, {model_, "--html", page_, "--quiet", "--json"}}));
    const std::string page = read_file(page_);
    EXPECT_EQ(nlohmann::ordered_json::parse(embedded(page)).dump(),
              nlohmann::ordered_json::parse(ran.out).dump());
    EXPECT_THAT(page, HasSubstr("<title>" + words[0]));
    EXPECT_GT(count_of(page, "<tr>"), 1);
    EXPECT_FALSE(ran.json()["host"]["cpu"].get<std::string>().empty());
    EXPECT_FALSE(fs::exists(page_ + ".nvfp4-moe.partial"));
  }
  EXPECT_THAT(run_ok({"inspect", model_, "--html", page_}).out,
              HasSubstr("page      " + page_ + "\nrepro "));
}

TEST_F(Html, AFailedCheckHasAPageAndAnErrorHasNone) {
  std::ofstream(page_) << "before";
  EXPECT_EQ(run_tool({"inspect", dir_.file("missing"), "--html", page_}).exit_code, 4);
  EXPECT_EQ(read_file(page_), "before");
  EXPECT_THAT(run_tool({"inspect", model_, "--html", dir_.file("none/page.html")}).err,
              HasSubstr("none"));

  CheckpointBuilder damaged{BuilderOptions{}};
  damaged.plant(Plant::kNanBlockScale, 0, 1);
  ASSERT_OK(damaged.write(dir_.file("damaged")));
  EXPECT_EQ(run_tool({"inspect", dir_.file("damaged"), "--html", page_}).exit_code, 1);
  EXPECT_THAT(read_file(page_), HasSubstr("check failed: "));
}

ATTACK_TEST_F(kHostileNames, Html, NoNameGetsOutOfItsText) {
  const std::string module = "model.layers.0.mlp.experts.0.up_proj.";
  std::vector<NamedTensor> tensors;
  for (const char* name :
       {"</script><script>alert(1)</script>", "<!--<script>", "<img src=x onerror=alert(1)>",
        "'\" onload='alert(1)", "&lt;b&gt;&#60;", "\xE2\x80\xA8\xE2\x80\xA9", "\\u003c/script>"}) {
    tensors.push_back(tensor(module + name, DType::kU8, {1}, std::vector<uint8_t>(1)));
    attacked();
  }
  const std::string hostile = dir_.file("<b>hostile");
  ASSERT_OK(CheckpointBuilder({.model_type = "qwen3_moe"}).write(hostile));
  write_named_tensors(hostile + "/more.safetensors", tensors);
  const ToolRun ran = run_tool({"inspect", hostile, "--json", "--html", page_});
  EXPECT_EQ(ran.exit_code, 1) << ran.err;
  const std::string page = read_file(page_);
  EXPECT_EQ(count_of(page, "<script"), 2);
  EXPECT_EQ(count_of(page, "</script"), 2);
  for (const char* markup : {"<!--", "<img", "<b>hostile", "\xE2\x80\xA8"})
    EXPECT_THAT(page, Not(HasSubstr(markup)));
  EXPECT_EQ(embedded(page).find_first_of("<>&"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(embedded(page)), ran.json());
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
