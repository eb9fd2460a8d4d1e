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

// One name of each class: C0, C1, direction, separators, zero width, tags.
const std::string kHostileNames[] = {"esc\x1B]0;title\x07\x1B[2J",
                                     "c1\xC2\x9B"
                                     "31m\xC2\x85",
                                     "bidi\xE2\x80\xAE\xE2\x81\xA6",
                                     "separators\xE2\x80\xA8\xE2\x80\xA9\r\n",
                                     "zero\xE2\x80\x8B\xEF\xBB\xBF\xC2\xAD",
                                     "tags\xF3\xA0\x81\x81\xEF\xB8\x8F",
                                     "del\x7F\b\x08",
                                     "plain größe"};

class HostileNames : public testing::Test {
 protected:
  void SetUp() override {
    model_ = dir_.file("m\x1B[31m\xC2\x9B\xE2\x80\xAE");
    ASSERT_OK(CheckpointBuilder({.model_type = "qwen3_moe"}).write(model_));
    std::vector<NamedTensor> tensors;
    for (const std::string& name : kHostileNames)
      for (const char* module : {"", "model.layers.0.mlp.experts.0.up_proj."})
        tensors.push_back(tensor(module + name, DType::kU8, {1}, std::vector<uint8_t>(1)));
    write_named_tensors(model_ + "/more.safetensors", tensors);
  }
  ToolRun safe_run(const std::vector<std::string>& arguments, int exit_code) {
    const ToolRun run = run_tool(arguments);
    attacked();
    EXPECT_EQ(run.exit_code, exit_code) << run.out << run.err;
    std::istringstream lines(run.out + run.err);
    for (std::string line; std::getline(lines, line);) EXPECT_EQ(printable(line, kWholeText), line);
    return run;
  }

  TempDir dir_;
  std::string model_;
};

ATTACK_TEST_F(kHostileNames, HostileNames, InspectShowsThemEscapedAndJsonHasThemExactly) {
  // tensors of an expert that no format has are errors
  const ToolRun text = safe_run({"inspect", model_}, 1);
  for (const char* shown : {"esc\\x1B]0;title\\x07\\x1B[2J", "bidi\\xE2\\x80\\xAE\\xE2\\x81\\xA6",
                            "plain größe", "repro     nvfp4-moe inspect $'"})
    EXPECT_THAT(text.out, HasSubstr(shown));
  const nlohmann::json json = safe_run({"inspect", model_, "--json"}, 1).json();
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["path"], model_);
  for (const std::string& name : kHostileNames) {
    const std::string quoted = nlohmann::json(name).dump();
    EXPECT_THAT(json.dump(), HasSubstr(quoted.substr(1, quoted.size() - 2)));
  }
}

ATTACK_TEST_F(kHostileNames, HostileNames, ErrorsAndUsageShowThemEscaped) {
  for (const std::string& name : kHostileNames) {
    safe_run({"inspect", dir_.file(name)}, 4);
    safe_run({"inspect", model_, "--layers", name}, 2);
    safe_run({"inspect", model_, name}, 2);
    safe_run({name}, 2);
    safe_run({"inspect", dir_.file(name), "--json"}, 4);
    safe_run({"inspect", model_, "--" + name, "--json"}, 2);
    safe_run({"run", "--replay", dir_.file(name)}, 4);
  }
  // Names that are not UTF-8, of a path and of a tensor.
  safe_run({"inspect", dir_.file("bytes\xFF\xC3")}, 4);
  safe_run({"inspect", dir_.file("bytes\xFF\xC3"), "--json"}, 4);
  const std::string header =
      "{\"a\xFF\x9B\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
  std::ofstream(model_ + "/bad.safetensors", std::ios::binary) << safetensors_bytes(header, 1);
  safe_run({"inspect", model_}, 4);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
