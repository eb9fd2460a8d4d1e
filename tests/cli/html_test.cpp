// --html: a page holds the JSON of its run, names from a checkpoint cannot escape from its text,
// and the file follows the rules of --output.
#include <filesystem>
#include <fstream>

#include "cli/run_tool.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

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

class Html : public testing::Test {
 protected:
  void SetUp() override { ASSERT_OK(CheckpointBuilder(BuilderOptions{}).write(model_)); }

  std::vector<std::string> command(const std::string& verb) const {
    std::vector<std::string> words = {verb, model_, "--html", page_, "--quiet"};
    if (verb == "bench") words.insert(words.end(), {"--seconds", "0", "--tokens", "1,3"});
    return words;
  }
  void expect_refused(const std::vector<std::string>& words, const std::string& why) {
    const ToolRun run = run_tool(words);
    EXPECT_EQ(run.exit_code, 2) << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_THAT(run.err, HasSubstr("--html"));
    EXPECT_THAT(run.err, HasSubstr(why));
  }

  TempDir dir_;
  std::string model_ = dir_.file("model");
  std::string page_ = dir_.file("page.html");
};

TEST_F(Html, APageHoldsTheJsonOfItsRun) {
  for (const char* verb : {"inspect", "verify", "bench"}) {
    const ToolRun run = run_tool(joined({command(verb), {"--json"}}));
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const std::string page = read_file(page_);
    EXPECT_EQ(nlohmann::ordered_json::parse(embedded(page)).dump(-1, ' ', true) + "\n",
              nlohmann::ordered_json::parse(run.out).dump(-1, ' ', true) + "\n")
        << verb;
    EXPECT_THAT(page, HasSubstr("<title>" + std::string(verb)));
    EXPECT_GT(count_of(page, "<tr>"), 1) << verb;
    EXPECT_FALSE(run.json()["host"]["cpu"].get<std::string>().empty()) << verb;
    EXPECT_FALSE(fs::exists(page_ + ".nvfp4-moe.partial"));
  }
}

TEST_F(Html, AsTextTheFileIsNamed) {
  const ToolRun run = run_ok(command("inspect"));
  EXPECT_THAT(run.out, HasSubstr("page      " + page_ + "\nrepro "));
}

TEST_F(Html, AFailedCheckHasAPageAndAnErrorHasNone) {
  std::ofstream(page_) << "before";
  EXPECT_EQ(run_tool({"inspect", dir_.file("missing"), "--html", page_}).exit_code, 4);
  EXPECT_EQ(read_file(page_), "before");

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
  ASSERT_OK(CheckpointBuilder({.model_type = "qwen3_moe"}).write(dir_.file("<b>hostile")));
  write_named_tensors(dir_.file("<b>hostile") + "/more.safetensors", tensors);
  const ToolRun run = run_tool({"inspect", dir_.file("<b>hostile"), "--json", "--html", page_});
  EXPECT_EQ(run.exit_code, 1) << run.err;
  const std::string page = read_file(page_);
  EXPECT_EQ(count_of(page, "<script"), 2);
  EXPECT_EQ(count_of(page, "</script"), 2);
  for (const char* markup : {"<!--", "<img", "<b>hostile", "\xE2\x80\xA8"})
    EXPECT_THAT(page, Not(HasSubstr(markup)));
  for (const char c : {'<', '>', '&'}) EXPECT_EQ(count_of(embedded(page), std::string(1, c)), 0);
  EXPECT_EQ(nlohmann::json::parse(embedded(page)), run.json());
}

ATTACK_TEST_F(kSpecialFiles, Html, TheFileIsAskedForBeforeAnyWork) {
  const std::string shard = model_ + "/model.safetensors", before = read_file(shard);
  std::ofstream(dir_.file("states")) << "no states";
  for (const char* verb : {"inspect", "verify", "bench"}) {
    std::vector<std::string> words = command(verb);
    for (const auto& [file, why] :
         std::vector<std::pair<std::string, std::string>>{{"/dev/null", "a character device"},
                                                          {dir_.path().string(), "a directory"},
                                                          {shard, "the model's"}}) {
      words[3] = file;
      expect_refused(words, why);
      attacked();
    }
    // A model of one file: that file and the neighbours that may belong to it.
    words[1] = words[3] = shard;
    expect_refused(words, "the model's");
    words[3] = model_ + "/config.json";
    expect_refused(words, "the model's");
    attacked(2);
  }
  expect_refused({"verify", model_, "--input", dir_.file("states"), "--html", dir_.file("states")},
                 "--input");
  ASSERT_OK(CheckpointBuilder({.format = SourceFormat::kFloat}).write(dir_.file("original")));
  expect_refused({"verify", model_, "--against", dir_.file("original"), "--html",
                  dir_.file("original") + "/config.json"},
                 "the model's");
  attacked(2);
  EXPECT_EQ(read_file(shard), before);
  const ToolRun nowhere = run_tool({"inspect", model_, "--html", dir_.file("none/page.html")});
  EXPECT_NE(nowhere.exit_code, 0);
  EXPECT_THAT(nowhere.err, HasSubstr("none"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
