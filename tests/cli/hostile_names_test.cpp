// Names in files, paths and arguments reach the terminal only as plain text.
#include <fstream>
#include <sstream>

#include "cli/run_tool.h"
#include "core/printable.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/hostile_safetensors.h"
#include "support/write_tensors.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

// One name of each class: C0, C1, direction, separators, zero width, tags.
const std::vector<std::string>& hostile_names() {
  static const std::vector<std::string> names = {"esc\x1B]0;title\x07\x1B[2J",
                                                 "c1\xC2\x9B"
                                                 "31m\xC2\x85",
                                                 "bidi\xE2\x80\xAE\xE2\x81\xA6",
                                                 "separators\xE2\x80\xA8\xE2\x80\xA9\r\n",
                                                 "zero\xE2\x80\x8B\xEF\xBB\xBF\xC2\xAD",
                                                 "tags\xF3\xA0\x81\x81\xEF\xB8\x8F",
                                                 "del\x7F\b\x08",
                                                 "plain größe"};
  return names;
}

void expect_safe(const std::string& text, const std::string& what) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    EXPECT_EQ(printable(line, kWholeText), line) << what;
}

class HostileNames : public testing::Test {
 protected:
  void SetUp() override {
    model_ = dir_.file("m\x1B[31m\xC2\x9B\xE2\x80\xAE");
    ASSERT_OK(CheckpointBuilder({.model_type = "qwen3_moe"}).write(model_));
    std::vector<NamedTensor> tensors;
    for (const std::string& name : hostile_names())
      for (const char* module : {"", "model.layers.0.mlp.experts.0.up_proj."})
        tensors.push_back(tensor(module + name, DType::kU8, {1}, std::vector<uint8_t>(1)));
    write_named_tensors(model_ + "/more.safetensors", tensors);
  }
  void expect_safe_run(const std::vector<std::string>& arguments, int exit_code) {
    const ToolRun run = run_tool(arguments);
    attacked();
    EXPECT_EQ(run.exit_code, exit_code) << run.out << run.err;
    expect_safe(run.out, "stdout");
    expect_safe(run.err, "stderr");
  }

  TempDir dir_;
  std::string model_;
};

ATTACK_TEST_F(kHostileNames, HostileNames, InspectShowsThemEscapedAndJsonHasThemExactly) {
  const ToolRun text = run_tool({"inspect", model_});
  attacked();
  EXPECT_EQ(text.exit_code, 1) << text.err;  // tensors of an expert that no format has are errors
  expect_safe(text.out, "stdout");
  expect_safe(text.err, "stderr");
  EXPECT_THAT(text.out, HasSubstr("esc\\x1B]0;title\\x07\\x1B[2J"));
  EXPECT_THAT(text.out, HasSubstr("bidi\\xE2\\x80\\xAE\\xE2\\x81\\xA6"));
  EXPECT_THAT(text.out, HasSubstr("plain größe"));
  EXPECT_THAT(text.out, HasSubstr("repro     nvfp4-moe inspect $'"));

  const ToolRun run = run_tool({"inspect", model_, "--json"});
  attacked();
  expect_safe(run.out, "stdout");
  const nlohmann::json json = run.json();
  ASSERT_TRUE(json.is_object()) << run.out;
  EXPECT_EQ(json["path"], model_);
  std::string all = json.dump();
  for (const std::string& name : hostile_names()) {
    const std::string quoted = nlohmann::json(name).dump();
    EXPECT_THAT(all, HasSubstr(quoted.substr(1, quoted.size() - 2)));
  }
}

ATTACK_TEST_F(kHostileNames, HostileNames, ErrorsAndUsageShowThemEscaped) {
  for (const std::string& name : hostile_names()) {
    expect_safe_run({"inspect", dir_.file(name)}, 4);
    expect_safe_run({"inspect", model_, "--layers", name}, 2);
    expect_safe_run({"inspect", model_, name}, 2);
    expect_safe_run({name}, 2);
    expect_safe_run({"inspect", dir_.file(name), "--json"}, 4);
    expect_safe_run({"inspect", model_, "--" + name, "--json"}, 2);
    expect_safe_run({"verify", dir_.file(name)}, 4);
    expect_safe_run({"run", "--replay", dir_.file(name)}, 4);
  }
  expect_safe_run({"inspect", dir_.file("bytes\xFF\xC3")}, 4);
  expect_safe_run({"inspect", dir_.file("bytes\xFF\xC3"), "--json"}, 4);
}

ATTACK_TEST_F(kHostileNames, HostileNames, ANameThatIsNoUtf8IsRefusedByAMessageThatIs) {
  const std::string header =
      "{\"a\xFF\x9B\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
  std::ofstream(model_ + "/bad.safetensors", std::ios::binary) << safetensors_bytes(header, 1);
  expect_safe_run({"inspect", model_}, 4);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
