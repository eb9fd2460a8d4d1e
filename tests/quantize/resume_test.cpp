// Resuming an unfinished quantize gives the same bytes. It detects changes of finished shards, of
// the source with unchanged time, of the options and of the plan file.
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "convert/quantize_plan.h"
#include "quantize/models.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

void change_byte_keeping_time(const std::string& path, uint64_t at) {
  const auto time = fs::last_write_time(path);
  change_byte(path, at);
  fs::last_write_time(path, time);
}

// A run that was stopped when three quarters of its items were done.
class Resume : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(in_, tiny_model(1, 4, 64, 32)));
    options_.max_shard_bytes = 8 << 10;
    ASSERT_OK(quantize_checkpoint(in_, whole_, options_));
    QuantizeOptions stopped = options_;
    stopped.progress = [](const Progress& p) { return 4 * p.done < 3 * p.total; };
    ASSERT_EQ(quantize_checkpoint(in_, out_, stopped).status().code(), Code::kCancelled);
    ASSERT_TRUE(fs::exists(plan_));
    for (const auto& entry : fs::directory_iterator(out_))
      if (entry.path().filename().string().starts_with("model-00002"))
        shard_ = entry.path().string();
    ASSERT_NE(shard_, "");
  }
  Result<QuantizeResult> resume() { return quantize_checkpoint(in_, out_, options_); }
  // The result is the same as if the run had never been stopped.
  void expect_whole(const Result<QuantizeResult>& result) {
    ASSERT_OK(result);
    EXPECT_THAT(differing(read_files(out_), read_files(whole_)), IsEmpty());
  }
  void write_plan(const std::string& text) {
    std::ofstream(plan_, std::ios::binary | std::ios::trunc) << text;
  }

  TempDir dir_;
  const std::string in_ = dir_.file("in"), out_ = dir_.file("out"), whole_ = dir_.file("whole");
  const std::string plan_ = out_ + "/quantize.plan.json";
  std::string shard_;  // a finished one
  QuantizeOptions options_;
};

TEST_F(Resume, AtAnyStepGivesTheSameBytesAndReport) {
  const auto whole = must(quantize_checkpoint(in_, dir_.file("whole2"), options_));
  const std::string out = dir_.file("steps");
  int64_t runs = 0;
  for (int64_t stop_after = 2;; stop_after += 2, ++runs) {
    options_.progress = [&](const Progress& p) { return p.done < stop_after; };
    const auto result = quantize_checkpoint(in_, out, options_);
    if (!result.ok()) {
      ASSERT_EQ(result.status().code(), Code::kCancelled) << result.status().message();
      EXPECT_FALSE(fs::exists(out + "/config.json")) << "unfinished, but has a config";
      continue;
    }
    EXPECT_GT(result->resumed_shards, 2);
    EXPECT_DOUBLE_EQ(result->mean_sqnr_db(), whole->mean_sqnr_db())
        << "shards of earlier runs are in the report";
    EXPECT_EQ(result->layers[0].gate.counts.blocks, whole->layers[0].gate.counts.blocks);
    for (const std::string& note : result->notes)
      EXPECT_EQ(note.find("again"), std::string::npos) << note;
    break;
  }
  EXPECT_GT(runs, 3);
  EXPECT_THAT(differing(read_files(out), read_files(whole_)), IsEmpty());
}

// Every byte of a finished shard counts, even the last one, and even if size and time are
// unchanged.
TEST_F(Resume, AnAlteredShardIsWrittenAgain) {
  change_byte_keeping_time(shard_, fs::file_size(shard_) - 1);
  const auto result = resume();
  expect_whole(result);
  EXPECT_THAT(result->notes,
              testing::Contains(AllOf(StartsWith(fs::path(shard_).filename().string()),
                                      HasSubstr("written again"))));
}

TEST_F(Resume, AShardThatNobodyRecordedIsWrittenAgain) {
  json plan = json::parse(read_file(plan_));
  plan["shards"] = json::array();
  write_plan(plan.dump());
  const auto result = resume();
  expect_whole(result);
  EXPECT_EQ(result->resumed_shards, 0);
}

ATTACK_TEST_F(kSpecialFiles, Resume, AShardThatIsNoFileIsRefused) {
  fs::rename(shard_, dir_.file("elsewhere"));
  fs::create_symlink(dir_.file("elsewhere"), shard_);
  attacked();
  EXPECT_THAT(resume(), Refused(Code::kInvalidArgument, shard_));
  EXPECT_TRUE(fs::is_symlink(shard_));
}

TEST_F(Resume, OtherOptionsAndAnotherSourceAreRefused) {
  const std::pair<const char*, std::function<void(QuantizeOptions&)>> changes[] = {
      {"search", [](auto& o) { o.search = ScaleSearch::kSweep; }},
      {"format", [](auto& o) { o.format = OutputFormat::kCompressedTensors; }},
      {"share_gate_up_scale", [](auto& o) { o.share_gate_up_scale = false; }},
      {"family", [](auto& o) { o.reading.family = "deepseek_v4"; }},
      {"gate_up_order", [](auto& o) { o.reading.gate_up_order = GateUpOrder::kUpFirst; }},
      {"input_scales",
       [](auto& o) {
         o.input_scales[0] = {0.5f, 0.5f};
       }},
      {"max_shard_bytes", [](auto& o) { o.max_shard_bytes = 16 << 10; }}};
  for (const auto& [word, change] : changes) {
    QuantizeOptions other = options_;
    change(other);
    EXPECT_THAT(quantize_checkpoint(in_, out_, other), Refused(Code::kInvalidArgument, word));
  }
  const auto index = must(TensorIndex::open(in_));
  const TensorIndex::Ref ref = index->find("layers.0.ffn.experts.0.w1.weight");
  const uint64_t at = ref.file->data_offset() + ref.info->begin + 17;
  change_byte_keeping_time(ref.file->path(), at);
  EXPECT_THAT(resume(),
              Refused(Code::kInvalidArgument,
                      "another files: " + fs::path(ref.file->path()).filename().string()));
  change_byte_keeping_time(ref.file->path(), at);
  json config = json::parse(read_file(in_ + "/config.json"));
  config["rope_theta"] = 1;
  std::ofstream(in_ + "/config.json") << config.dump();
  EXPECT_THAT(resume(), Refused(Code::kInvalidArgument, "another config.json"));
}

TEST_F(Resume, TwoRunsDoNotShareAFolder) {
  QuantizeOptions options = options_;
  Status second;
  options.progress = [&](const Progress& p) {
    if (p.done == 1) second = resume().status();
    return true;
  };
  expect_whole(quantize_checkpoint(in_, out_, options));
  EXPECT_THAT(second, Refused(Code::kBusy, out_));
}

TEST_F(Resume, ASourceThatChangesMeanwhileIsNoticed) {
  options_.progress = [&](const Progress& p) {
    if (p.done == p.total)
      for (const auto& entry : fs::directory_iterator(in_))
        fs::last_write_time(entry.path(),
                            fs::last_write_time(entry.path()) + std::chrono::seconds(1));
    return true;
  };
  EXPECT_THAT(resume(), Refused(Code::kBadInput, "changed while it was read"));
  EXPECT_FALSE(fs::exists(out_ + "/config.json"));
}

ATTACK_TEST_F(kHostileNumbers, Resume, NumbersOfAPlanThatDoNotFitAreErrors) {
  const json sound = json::parse(read_file(plan_));
  const auto refused = [&](const std::string& key, const json& value) {
    json changed = sound;
    changed[key] = value;
    write_plan(changed.dump());
    attacked();
    EXPECT_THAT(resume(), Refused(Code::kBadInput, "not a plan of quantize")) << changed[key];
  };
  const auto scales = [](const json& layer, const json& hidden) {
    return json{{"layer", layer}, {"hidden", hidden}, {"intermediate", 0.5}};
  };
  for (const json& layer : {json(1.5), json(1e300), json(uint64_t{1} << 63), json("0")})
    refused("input_scales", json::array({scales(layer, 0.5)}));
  for (const json& hidden : {json(1e39), json(1e300), json(-0.5), json("inf")})
    refused("input_scales", json::array({scales(0, hidden)}));
  refused("input_scales", json::array({scales(0, 0.5), scales(0, 0.25)}));
  for (const json& size : {json(0), json(-1), json(1e18), json(uint64_t{1} << 63)})
    refused("max_shard_bytes", size);
  refused("layers", json::array({0.0}));
}

ATTACK_TEST_F(kHostileFiles, Resume, TamperedPlansAreErrors) {
  const json sound = json::parse(read_file(plan_));
  std::vector<std::string> texts = {
      "", "{", "null", "[]", "{}", "\xff", std::string(200000, '['), "[" + sound.dump() + "]"};
  for (const auto& [key, value] : sound.items()) {
    json changed = sound;
    for (const json& wrong :
         {json(nullptr), json(-1), json("x"), json::array({json::array({1})}), json::object()}) {
      changed[key] = wrong;
      texts.push_back(changed.dump());
    }
    changed.erase(key);
    texts.push_back(changed.dump());
  }
  for (const std::string& text : texts) {
    write_plan(text);
    const Status status = resume().status();
    attacked();
    EXPECT_TRUE(status.code() == Code::kBadInput || status.code() == Code::kInvalidArgument)
        << text.substr(0, 200);
    EXPECT_THAT(status.message(), HasSubstr(out_));
    EXPECT_LT(status.message().size(), 1000u);
    EXPECT_TRUE(fs::exists(shard_)) << "nothing is thrown away on a tampered plan's word";
  }
  write_plan(sound.dump());
  expect_whole(resume());
}

TEST_F(Resume, LeftoversDoNotBlock) {
  const std::string partials[] = {"quantize.plan.json.partial",
                                  "quantize.plan.json.nvfp4-moe.partial"};
  for (const std::string& name : partials) std::ofstream(out_ + "/" + name) << "half";
  std::ofstream(out_ + "/config.json.nvfp4-moe.partial") << "half";
  expect_whole(resume());
  // Stopped before there was a plan.
  const std::string early = dir_.file("early");
  fs::create_directory(early);
  for (const std::string& name : partials) std::ofstream(early + "/" + name) << "half";
  std::ofstream(early + "/quantize.plan.json");
  ASSERT_OK(quantize_checkpoint(in_, early, options_));
  EXPECT_THAT(differing(read_files(early), read_files(whole_)), IsEmpty());
  // A folder with any other content belongs to someone else.
  const std::string other = dir_.file("other");
  fs::create_directory(other);
  std::ofstream(other + "/notes.txt") << "mine";
  EXPECT_EQ(quantize_checkpoint(in_, other, options_).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(read_file(other + "/notes.txt"), "mine");
}

TEST(QuantizePlanFile, GoesBothWays) {
  QuantizePlan plan;
  plan.version = "1.2.3";
  plan.source = "/a\\x80";
  plan.files = {{"model.safetensors", 123, -5, {1, ~uint64_t{0}}},
                {"b", uint64_t{1} << 62, INT64_MAX, {}}};
  plan.config = {3, 4};
  plan.format = "modelopt";
  plan.layers = {0, 7};
  plan.search = "mse";
  plan.calibration = "0123456789abcdef0123456789abcdef";
  plan.share_gate_up_scale = false;
  plan.input_scales[3] = {0.1f, 0x1p-126f};
  plan.max_shard_bytes = 5;
  plan.shards["model-00001-of-00002.safetensors"] = {"model-00001-of-00002.safetensors", {5, 6}};
  plan.experts[{1, 2}][1].sum_sq = 0.1;
  plan.experts[{1, 2}][2].counts.blocks = 9;
  const std::string text = to_json(plan);
  const auto back = must(parse_quantize_plan(text));
  EXPECT_OK(check_same_work(plan, *back));
  EXPECT_EQ(to_json(*back), text);
}

// Sources above 16 MiB are sampled: one page of every tensor, more of a large one. Requantized
// weights are detected. A page of a mapping that is gone would kill the process.
ATTACK_TEST(kTruncations, SourceSample, SeesEveryTensorOfALargeFileAndACut) {
  const TempDir dir;
  const std::string path = dir.file("large.safetensors");
  std::map<std::string, RawTensor> tensors;
  for (const auto& [name, count] : {std::pair{"a", 100}, {"b", 10 << 20}, {"c", 9 << 20}})
    tensors[name] = {DType::kU8, {count}, std::vector<uint8_t>(static_cast<size_t>(count))};
  ASSERT_OK(write_tensors(path, tensors));
  const auto sample = [&] {
    return must(describe_source(*must(SafetensorsFile::open(path))))->sample;
  };
  const ContentHash before = sample();
  EXPECT_EQ(sample(), before);
  const auto file = must(SafetensorsFile::open(path));
  for (const TensorInfo& info : file->header().tensors) {
    const uint64_t middle = file->header().data_offset + info.begin + info.size_bytes() / 2;
    change_byte(path, middle);
    EXPECT_NE(sample(), before) << info.name;
    change_byte(path, middle);
  }
  fs::resize_file(path, 4096);
  attacked();
  EXPECT_EQ(describe_source(*file).status().code(), Code::kIo);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
