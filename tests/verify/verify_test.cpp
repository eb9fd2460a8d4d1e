// Tests the engine: a clean checkpoint passes on every count. Each fault, planted in the files
// before they are read or after the layer is packed, is found and named by layer, expert, tensor
// and coordinate.
//
// Long because each fault is planted in each place.
#include "verify/verify.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "moe/layer.h"
#include "support/read_tensor.h"
#include "support/support.h"
#include "verify/verify_packed.h"

namespace nvfp4_moe::internal {
namespace {

using test::TempDir;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 128, kInter = 64;

SynthesizeOptions sizes(int64_t layers, int64_t hidden) {
  return {.layers = layers,
          .num_experts = 6,
          .top_k = 3,
          .hidden_size = hidden,
          .intermediate_size = kInter,
          .vocab_size = 32};
}

// One pair of original and NVFP4 checkpoint for all tests; tests that damage a file work on a copy.
struct Models {
  TempDir dir;
  std::string original = dir.file("original"), nvfp4 = dir.file("nvfp4"), ct = dir.file("ct"),
              mse = dir.file("mse");
  Models() {
    EXPECT_OK(synthesize_checkpoint(original, sizes(2, kHidden)));
    QuantizeOptions q;
    EXPECT_OK(quantize_checkpoint(original, nvfp4, q));
    q.format = OutputFormat::kCompressedTensors;
    EXPECT_OK(quantize_checkpoint(original, ct, q));
    q.format = OutputFormat::kModelOpt;
    q.search = ScaleSearch::kMse;
    q.share_gate_up_scale = false;
    EXPECT_OK(quantize_checkpoint(original, mse, q));
  }
};

const Models& models() {
  static const Models all;
  return all;
}

std::string expert_tensor(int64_t expert, const std::string& word) {
  return "layers.1.ffn.experts." + std::to_string(expert) + "." + word;
}

// ---- faults, written into a checkpoint's files

std::vector<uint8_t> bytes_of(const std::string& dir, const std::string& tensor) {
  const auto index = TensorIndex::open(dir);
  const TensorIndex::Ref ref = index->find(tensor);
  return test::read_tensor<uint8_t>(*ref.file, *ref.info);
}
void put_bytes(const std::string& dir, const std::string& tensor,
               const std::vector<uint8_t>& bytes) {
  const auto index = TensorIndex::open(dir);
  const TensorIndex::Ref ref = index->find(tensor);
  ASSERT_EQ(ref.info->size_bytes(), bytes.size());
  const auto modified = std::filesystem::last_write_time(ref.file->path());
  {
    std::fstream file(ref.file->path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(ref.file->data_offset() + ref.info->begin));
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  std::filesystem::last_write_time(ref.file->path(),
                                   modified);  // a reader that has it open checks only the time
}
void change(const std::string& dir, const std::string& tensor,
            const std::function<void(std::vector<uint8_t>& bytes)>& how) {
  auto bytes = bytes_of(dir, tensor);
  how(bytes);
  put_bytes(dir, tensor, bytes);
}

void flip_signs(uint8_t& pair) { pair ^= 0x88; }
void double_scale(uint8_t& scale) {
  scale = static_cast<uint8_t>(scale < 0x70 ? scale + 8 : scale - 8);
}

void swap_gate_and_up(const std::string& dir, int64_t expert) {
  for (const char* part : {".weight", ".weight_scale", ".weight_scale_2"}) {
    const std::string gate = expert_tensor(expert, "w1") + part,
                      up = expert_tensor(expert, "w3") + part;
    const auto of_gate = bytes_of(dir, gate);
    put_bytes(dir, gate, bytes_of(dir, up));
    put_bytes(dir, up, of_gate);
  }
}

// The block scales of a matrix of `rows` rows.
void transpose_scales(const std::string& dir, const std::string& tensor, size_t rows) {
  change(dir, tensor, [&](std::vector<uint8_t>& bytes) {
    const auto plain = bytes;
    const size_t blocks = plain.size() / rows;
    for (size_t r = 0; r < rows; ++r)
      for (size_t b = 0; b < blocks; ++b) bytes[b * rows + r] = plain[r * blocks + b];
  });
}

void change_tensor_scale(const std::string& dir, const std::string& tensor, float (*how)(float)) {
  change(dir, tensor, [=](std::vector<uint8_t>& bytes) {
    float s = 0;
    std::memcpy(&s, bytes.data(), 4);
    s = how(s);
    std::memcpy(bytes.data(), &s, 4);
  });
}

// Each expert gets the tensors of the next one, the last one those of the first.
void shift_experts(const std::string& dir) {
  for (const char* word : {"w1", "w2", "w3"}) {
    for (const char* part : {".weight", ".weight_scale", ".weight_scale_2"}) {
      std::vector<std::vector<uint8_t>> all;
      for (int64_t e = 0; e < 6; ++e) all.push_back(bytes_of(dir, expert_tensor(e, word) + part));
      for (int64_t e = 0; e < 6; ++e)
        put_bytes(dir, expert_tensor(e, word) + part, all[static_cast<size_t>((e + 1) % 6)]);
    }
  }
}

// A fault in a checkpoint's files, and words of the lines that name it.
struct FaultCase {
  const char* name;
  std::function<void(const std::string& dir)> damage;
  std::vector<std::vector<std::string>> lines;
};

class Verify : public ::testing::Test {
 protected:
  VerifyOptions options() const {
    VerifyOptions o;
    o.states.tokens = 12;
    return o;
  }
  VerifyOptions against() const {
    VerifyOptions o = options();
    o.against = models().original;
    o.states.tokens = 0;
    return o;
  }

  // A copy of the NVFP4 checkpoint; `damage` may change its files.
  std::string damaged(const std::function<void(const std::string& dir)>& damage) {
    const std::string copy = dir_.file("damaged");
    std::filesystem::remove_all(copy);
    std::filesystem::copy(models().nvfp4, copy, std::filesystem::copy_options::recursive);
    damage(copy);
    return copy;
  }
  // The report fails only in layer 1, and a line of it holds every word.
  static void expect_named(const Result<VerifyReport>& report,
                           const std::vector<std::string>& words) {
    ASSERT_OK(report);
    EXPECT_FALSE(report->passed());
    ASSERT_EQ(report->layers.size(), 2u);
    EXPECT_TRUE(report->layers[0].passed()) << report->layers[0].failures.front();
    ASSERT_FALSE(report->layers[1].failures.empty());
    std::string all;
    bool found = false;
    for (const std::string& line : report->layers[1].failures) {
      bool every = true;
      for (const std::string& word : words) every = every && line.find(word) != std::string::npos;
      found = found || every;
      all += line + "\n";
    }
    EXPECT_TRUE(found) << "wanted a line with: " << ::testing::PrintToString(words) << " in\n"
                       << all;
    EXPECT_TRUE(nlohmann::json::accept(to_json(*report)));
  }

  TempDir dir_;
};

TEST_F(Verify, ACleanCheckpointPasses) {
  for (const std::string& path : {models().nvfp4, models().ct, models().mse}) {
    VerifyOptions o = options();
    o.against = models().original;
    o.states.skipped_share = 0.1;
    const auto report = verify(path, o);
    ASSERT_OK(report);
    EXPECT_TRUE(report->passed());
    ASSERT_EQ(report->layers.size(), 2u);
    for (const LayerVerification& layer : report->layers) {
      for (const std::string& failure : layer.failures) ADD_FAILURE() << failure;
      ASSERT_TRUE(layer.packed && layer.run && layer.original);
      EXPECT_EQ(layer.packed->experts, 6 + (layer.options.shared_intermediate_size > 0));
      EXPECT_GE(layer.packed->bytes_compared,
                6u * 3 * (kHidden * kInter / 2 + kHidden * kInter / 16));
      EXPECT_EQ(layer.packed->differing_bytes, 0u);
      EXPECT_EQ(layer.run->tokens, 12);
      EXPECT_GT(layer.run->comparison.cosine, 0.999);
      EXPECT_GT(layer.run->status.hidden_blocks, 0u);
      EXPECT_EQ(layer.original->weights, 6u * 3 * kHidden * kInter);
      EXPECT_EQ(layer.original->broken_half_steps, 0u);
      EXPECT_GT(layer.original->sqnr_db, 18);
      EXPECT_LT(layer.original->sqnr_db, 24);
      EXPECT_GT(layer.original->max_abs, 0);
      EXPECT_NE(layer.original->max_tensor, "");
    }
    const auto json = nlohmann::json::parse(to_json(*report));
    EXPECT_EQ(json.at("passed"), true);
    EXPECT_EQ(json.at("layers").at(1).at("run").at("tokens"), 12);
  }
}

TEST_F(Verify, TheReferenceJudgedByItselfSaysSo) {
  VerifyOptions o = options();
  o.backend = "reference";
  const auto report = verify(models().nvfp4, o);
  ASSERT_OK(report);
  EXPECT_TRUE(report->layers[0].run->backend_is_reference);
  EXPECT_EQ(report->layers[0].run->comparison.max_abs, 0);
}

TEST_F(Verify, LayersRangesAndLimits) {
  VerifyOptions o = options();
  o.against = models().original;
  o.layers = {1};
  o.range = {2, 3};
  o.limit_sqnr_db = 15;
  auto report = verify(models().nvfp4, o);
  ASSERT_OK(report);
  EXPECT_TRUE(report->passed());
  ASSERT_EQ(report->layers.size(), 1u);
  EXPECT_EQ(report->layers[0].original->weights, 3u * 3 * kHidden * kInter);
  o.limit_sqnr_db = 60;
  report = verify(models().nvfp4, o);
  ASSERT_OK(report);
  EXPECT_FALSE(report->passed());
  EXPECT_TRUE(report->layers[0].original->below_limit);
  EXPECT_EQ(report->layers[0].original->broken_half_steps, 0u);

  o = options();
  o.layers = {2};
  EXPECT_EQ(verify(models().nvfp4, o).status().code(), Code::kInvalidArgument);
  o.layers = {};
  o.range = {4, 3};
  EXPECT_EQ(verify(models().nvfp4, o).status().code(), Code::kInvalidArgument);
  o.range = {};
  o.backend = "sm9000";
  EXPECT_FALSE(verify(models().nvfp4, o).ok());
  o = options();
  o.against = models().original;
  int64_t told = 0, last = 0;
  o.progress = [&](const Progress& p) {
    EXPECT_GE(p.done, last);
    EXPECT_EQ(p.total, 2 * 6 * 4);
    last = p.done;
    ++told;
    return true;
  };
  ASSERT_OK(verify(models().nvfp4, o));
  EXPECT_EQ(last, 2 * 6 * 4);
  EXPECT_GE(told, 2 * 6 * 4);
  o.progress = [](const Progress&) { return false; };
  EXPECT_EQ(verify(models().nvfp4, o).status().code(), Code::kCancelled);
  EXPECT_FALSE(verify(dir_.file("nowhere"), options()).ok());
}

// ---- the layer that is packed and run differs from the files: they change once it is packed

class ChangedAfter : public Verify {
 protected:
  // Verifies a copy; `fault` changes its files when progress reports `done` as its item.
  Result<VerifyReport> verify_changed(const std::string& done,
                                      const std::function<void(const std::string& dir)>& fault,
                                      VerifyOptions o) {
    const std::string dir = damaged([](const std::string&) {});
    int times = 0;
    o.progress = [&](const Progress& p) {
      if (p.item == done) {
        fault(dir);
        ++times;
      }
      return true;
    };
    auto report = verify(dir, o);
    EXPECT_EQ(times, 1) << done;
    return report;
  }
};

TEST_F(ChangedAfter, IsNamedByItsPlace) {
  const FaultCase cases[] = {
      {"code",
       [](const std::string& d) {  // high nibble: column 67
         change(d, expert_tensor(3, "w3.weight"),
                [](auto& codes) { codes[20 * kHidden / 2 + 33] ^= 0x40; });
       },
       {{"packed weights", "layer 1", "expert 3", "up", expert_tensor(3, "w3.weight"), "(20, 67)",
         "code"}}},
      {"block scale",
       [](const std::string& d) {
         change(d, expert_tensor(3, "w2.weight_scale"),
                [](auto& scales) { double_scale(scales[100 * kInter / 16 + 2]); });
       },
       {{"layer 1", "expert 3", "down", expert_tensor(3, "w2"), "(100, 32)", "block_scale"}}},
      {"swapped gate and up",
       [](const std::string& d) { swap_gate_and_up(d, 3); },
       {{"layer 1", "expert 3", "gate", expert_tensor(3, "w1"), "(0, "},
        {"layer 1", "expert 3", "up", expert_tensor(3, "w3"), "(0, "}}},
      {"transposed scales",
       [](const std::string& d) {
         transpose_scales(d, expert_tensor(3, "w2.weight_scale"), kHidden);
       },
       {{"layer 1", "expert 3", "down", expert_tensor(3, "w2"), "block_scale"}}},
      {"half the tensor scale",
       [](const std::string& d) {
         change_tensor_scale(d, expert_tensor(3, "w2.weight_scale_2"),
                             [](float scale) { return scale / 2; });
       },
       {{"layer 1", "expert 3", "down", expert_tensor(3, "w2"), "tensor_scale"}}},
  };
  for (const FaultCase& one : cases) {
    SCOPED_TRACE(one.name);
    const auto report = verify_changed("layer 1 expert 5: pack", one.damage, options());
    for (const auto& words : one.lines) expect_named(report, words);
    if (&one == &cases[0]) {
      EXPECT_EQ(report->layers[1].packed->differing_bytes, 1u);
      EXPECT_EQ(report->layers[1].packed->faulty_tensors, 1);
    }
    if (&one == &cases[2]) {
      EXPECT_FALSE(report->layers[1].run->passed()) << "the run notices too";
    }
  }
}

TEST_F(ChangedAfter, ExpertRangeOffByOne) {
  VerifyOptions o = options();
  o.range = {1, 4};
  const auto report = verify_changed("layer 1 expert 4: pack", shift_experts, o);
  for (int64_t e = 1; e < 3; ++e)
    expect_named(report, {"layer 1", "expert " + std::to_string(e), expert_tensor(e, "w1")});
  EXPECT_EQ(report->layers[1].packed->faulty_tensors, 4 * 3);
}

// Row 17 of down gives channel 17. The packed layer is compared before the files change, and run
// afterwards.
TEST_F(ChangedAfter, AnotherResultIsNamedByTokenAndChannel) {
  const struct {
    const char* name;
    std::function<void(uint8_t* codes, uint8_t* scales)> of_row;
  } faults[] = {
      {"sign", [](uint8_t* codes, uint8_t*) { std::for_each_n(codes, kInter / 2, flip_signs); }},
      {"double",
       [](uint8_t*, uint8_t* scales) { std::for_each_n(scales, kInter / 16, double_scale); }},
      {"zero", [](uint8_t* codes, uint8_t*) { std::memset(codes, 0, kInter / 2); }}};
  for (const auto& fault : faults) {
    SCOPED_TRACE(fault.name);
    const auto report = verify_changed(
        "layer 1 expert 5: unpack and compare",
        [&](const std::string& d) {
          for (int64_t e = 0; e < 6; ++e) {
            auto codes = bytes_of(d, expert_tensor(e, "w2.weight"));
            auto scales = bytes_of(d, expert_tensor(e, "w2.weight_scale"));
            fault.of_row(codes.data() + 17 * kInter / 2, scales.data() + 17 * kInter / 16);
            put_bytes(d, expert_tensor(e, "w2.weight"), codes);
            put_bytes(d, expert_tensor(e, "w2.weight_scale"), scales);
          }
        },
        options());
    expect_named(report, {"layer 1", "token ", "channel 17"});
    EXPECT_TRUE(report->layers[1].packed->passed());
  }
}

// A byte of the packed buffer itself, in the backend's memory.
TEST_F(Verify, OneBitOfThePackedBytesIsFound) {
  const auto checkpoint = Checkpoint::open(models().nvfp4);
  ASSERT_OK(checkpoint);
  const auto config = MoeConfig::make(*checkpoint->layer_options(1));
  ASSERT_OK(config);
  for (const char* backend : {"auto", "reference"}) {
    for (const double where : {0.02, 0.4, 0.77}) {
      LayerOptions o;
      o.backend = backend;
      o.range = {0, 6};
      o.limits.max_tokens = 1;
      const auto layer = MoeLayer::open(*config, *layer_source(*checkpoint, 1), o);
      ASSERT_OK(layer);
      const Buffer& bytes = (*layer)->weights().bytes;
      bytes.data()[static_cast<size_t>(where * static_cast<double>(bytes.size_bytes()))] ^=
          std::byte{4};
      const auto check = check_packed(*checkpoint, 1, **layer, [](int64_t) { return Status(); });
      ASSERT_OK(check);
      EXPECT_FALSE(check->passed());
      EXPECT_EQ(check->differing_bytes, 1u);
      ASSERT_EQ(check->faults.size(), 1u);
      EXPECT_THAT(to_string(check->faults[0]),
                  AllOf(HasSubstr("layer 1 expert"), HasSubstr("layers.1.ffn.")));
    }
  }
}

// ---- planted in the checkpoint, found against the original

TEST_F(Verify, AFaultInTheFilesIsFoundAgainstTheOriginal) {
  const FaultCase cases[] = {
      {"code",
       [](const std::string& d) {  // low nibble: column 22
         change(d, expert_tensor(4, "w1.weight"),
                [](auto& codes) { codes[30 * kHidden / 2 + 11] ^= 0x04; });
       },
       {{"original", "layer 1", "expert 4", "gate", expert_tensor(4, "w1.weight"), "(30, 22)"}}},
      {"block scale",
       [](const std::string& d) {
         change(d, expert_tensor(4, "w2.weight_scale"),
                [](auto& scales) { double_scale(scales[100 * kInter / 16 + 3]); });
       },
       {{"original", "layer 1", "expert 4", "down", expert_tensor(4, "w2"), "(100, "}}},
      {"swapped gate and up",
       [](const std::string& d) { swap_gate_and_up(d, 2); },
       {{"layer 1", "expert 2", "gate", expert_tensor(2, "w1"), "(0, ", "gate and up seem swapped"},
        {"layer 1", "expert 2", "up", expert_tensor(2, "w3"), "(0, "}}},
      {"transposed scales",
       [](const std::string& d) {
         transpose_scales(d, expert_tensor(0, "w3.weight_scale"), kInter);
       },
       {{"layer 1", "expert 0", "up", expert_tensor(0, "w3"), "(0, ", "seem transposed"}}},
      {"reciprocal tensor scale",
       [](const std::string& d) {
         change_tensor_scale(d, expert_tensor(5, "w2.weight_scale_2"),
                             [](float scale) { return 1 / scale; });
       },
       {{"layer 1", "expert 5", expert_tensor(5, "w2")}}},
      {"experts off by one",
       shift_experts,
       {{"layer 1", "expert 0", "gate", expert_tensor(0, "w1"), "(0, ",
         "matches the original's expert 1"}}},
  };
  for (const FaultCase& one : cases) {
    SCOPED_TRACE(one.name);
    const std::string dir = damaged(one.damage);
    const auto report = verify(dir, against());
    for (const auto& words : one.lines) expect_named(report, words);
    const OriginalCheck& original = *report->layers[1].original;
    if (&one == &cases[0]) {
      EXPECT_EQ(original.broken_half_steps, 1u);
      EXPECT_TRUE(verify(dir, options())->passed()) << "without the original nothing can know";
    }
    if (&one == &cases[1]) {
      EXPECT_EQ(original.faults.front().col / 16, 3);
    }
    if (&one == &cases[5]) {
      EXPECT_EQ(original.faulty_tensors, 18);
    }
  }
}

TEST_F(Verify, ANanBlockScaleStopsTheLayerAsAFinding) {
  const auto report = verify(damaged([](const std::string& d) {
                               change(d, expert_tensor(1, "w1.weight_scale"),
                                      [](auto& scales) { scales[40] = 0x7F; });
                             }),
                             options());
  expect_named(report, {"layer 1", "expert 1", "block_scale_nan"});
  EXPECT_FALSE(report->layers[1].run.has_value());
}

TEST_F(Verify, AnotherModelsOriginalFails) {
  ASSERT_OK(synthesize_checkpoint(dir_.file("other"), sizes(1, 64)));
  VerifyOptions options = against();
  options.against = dir_.file("other");
  const auto report = verify(models().nvfp4, options);
  ASSERT_OK(report);
  EXPECT_EQ(report->failed_layers(), 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal
