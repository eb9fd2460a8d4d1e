// The engine on trial: a clean checkpoint passes on every count; each fault, planted in what is packed, in the file, or
// in a kernel's result, is found and named by layer, expert, tensor and coordinate.
// Long because each fault is planted in each place.
#include "verify/verify.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "core/float_formats.h"
#include "moe/layer.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

using test::TempDir;

constexpr int64_t kHidden = 128, kInter = 64;

// One pair of original and NVFP4 checkpoint for all tests; those that damage a file work on a copy.
struct Models {
  TempDir dir;
  std::string original = dir.file("original"), nvfp4 = dir.file("nvfp4"), ct = dir.file("ct"), mse = dir.file("mse");
  Models() {
    SynthesizeOptions o;
    o.layers = 2;
    o.num_experts = 6;
    o.top_k = 3;
    o.hidden_size = kHidden;
    o.intermediate_size = kInter;
    o.vocab_size = 32;
    EXPECT_OK(synthesize_checkpoint(original, o));
    QuantizeOptions q;
    EXPECT_OK(quantize_checkpoint(original, nvfp4, q));
    q.format = OutputFormat::kCompressedTensors;
    EXPECT_OK(quantize_checkpoint(original, ct, q));
    q.format = OutputFormat::kModelOpt;
    q.scales = ScaleSearch::kMse;
    q.share_gate_up_scale = false;
    EXPECT_OK(quantize_checkpoint(original, mse, q));
  }
};

const Models& models() {
  static const Models all;
  return all;
}

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

  // A copy of the NVFP4 checkpoint whose tensors' bytes may be changed.
  std::string damaged(const std::function<void(const std::string& dir)>& damage) {
    const std::string copy = dir_.file("damaged");
    std::filesystem::remove_all(copy);
    std::filesystem::copy(models().nvfp4, copy, std::filesystem::copy_options::recursive);
    damage(copy);
    return copy;
  }
  static std::vector<uint8_t> bytes_of(const std::string& dir, const std::string& tensor) {
    const auto index = TensorIndex::open(dir);
    const TensorIndex::Ref ref = index->find(tensor);
    return test::read_tensor<uint8_t>(*ref.file, *ref.info);
  }
  static void put_bytes(const std::string& dir, const std::string& tensor, const std::vector<uint8_t>& bytes) {
    const auto index = TensorIndex::open(dir);
    const TensorIndex::Ref ref = index->find(tensor);
    ASSERT_EQ(ref.info->size_bytes(), bytes.size());
    std::fstream file(ref.file->path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(ref.file->data_offset() + ref.info->begin));
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }

  // The report fails in layer 1 alone, and a line of it holds every word.
  static void expect_named(const Result<VerifyReport>& report, const std::vector<std::string>& words) {
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
    EXPECT_TRUE(found) << "wanted a line with: " << ::testing::PrintToString(words) << " in\n" << all;
    EXPECT_TRUE(nlohmann::json::accept(to_json(*report)));
  }

  TempDir dir_;
};

std::string expert_tensor(int64_t expert, const char* word) {
  return "layers.1.ffn.experts." + std::to_string(expert) + "." + word;
}

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
      EXPECT_GE(layer.packed->bytes_compared, 6u * 3 * (kHidden * kInter / 2 + kHidden * kInter / 16));
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

// ---- planted in what is packed; the file is whole

class PackedFault : public Verify {
 protected:
  // Changes what the packer is given for expert 3 of layer 1, on copies of its arrays.
  VerifyOptions tampered(
      std::function<void(LoadedExpert&, std::vector<uint8_t>* codes, std::vector<uint8_t>* scales)> change) {
    VerifyOptions o = options();
    o.tamper_source = [change](int64_t layer, int64_t expert, LoadedExpert& loaded) -> Status {
      if (layer != 1 || expert != 3) return {};
      Nvfp4View* views[] = {&loaded.source.gate, &loaded.source.up, &loaded.source.down};
      loaded.storage.reserve(loaded.storage.size() + 6);
      std::vector<uint8_t>*codes[3], *scales[3];
      for (int p = 0; p < 3; ++p) {
        Nvfp4View& v = *views[p];
        loaded.storage.emplace_back(v.codes, v.codes + v.rows * v.cols / 2);
        codes[p] = &loaded.storage.back();
        loaded.storage.emplace_back(v.block_scales, v.block_scales + v.rows * v.cols / 16);
        scales[p] = &loaded.storage.back();
        v = Nvfp4View::contiguous(codes[p]->data(), scales[p]->data(), v.tensor_scale, v.rows, v.cols);
      }
      change(loaded, codes[1], scales[2]);  // up's codes, down's block scales
      return {};
    };
    return o;
  }
};

TEST_F(PackedFault, OneFlippedCode) {
  const auto report = verify(models().nvfp4, tampered([](LoadedExpert&, auto* codes, auto*) {
                               (*codes)[static_cast<size_t>(20 * kHidden / 2 + 33)] ^= 0x40;  // high nibble: column 67
                             }));
  expect_named(report, {"layer 1", "expert 3", "up", expert_tensor(3, "w3"), "(20, 67)", "code"});
  EXPECT_EQ(report->layers[1].packed->differing_bytes, 1u);
  EXPECT_EQ(report->layers[1].packed->faulty_tensors, 1);
}

TEST_F(PackedFault, BlockScaleTimesTwo) {
  const auto report = verify(models().nvfp4, tampered([](LoadedExpert&, auto*, auto* scales) {
                               uint8_t& byte = (*scales)[static_cast<size_t>(100 * kInter / 16 + 2)];
                               byte = static_cast<uint8_t>(byte < 0x70 ? byte + 8 : byte - 8);
                             }));
  expect_named(report, {"layer 1", "expert 3", "down", expert_tensor(3, "w2"), "(100, 32)", "block_scale"});
}

TEST_F(PackedFault, SwappedGateAndUp) {
  const auto report =
      verify(models().nvfp4, tampered([](LoadedExpert& e, auto*, auto*) { std::swap(e.source.gate, e.source.up); }));
  expect_named(report, {"layer 1", "expert 3", "gate", expert_tensor(3, "w1"), "(0, "});
  expect_named(report, {"layer 1", "expert 3", "up", expert_tensor(3, "w3"), "(0, "});
  EXPECT_FALSE(report->layers[1].run->passed()) << "the run notices too";
}

TEST_F(PackedFault, TransposedScales) {
  const auto report = verify(models().nvfp4, tampered([](LoadedExpert&, auto*, auto* scales) {
                               const std::vector<uint8_t> plain = *scales;
                               for (size_t r = 0; r < kHidden; ++r)
                                 for (size_t b = 0; b < kInter / 16; ++b)
                                   (*scales)[b * kHidden + r] = plain[r * kInter / 16 + b];
                             }));
  expect_named(report, {"layer 1", "expert 3", "down", expert_tensor(3, "w2"), "block_scale"});
}

TEST_F(PackedFault, ReciprocalTensorScale) {
  const auto report = verify(models().nvfp4, tampered([](LoadedExpert& e, auto*, auto*) {
                               e.source.down.tensor_scale = 1.0f / e.source.down.tensor_scale;
                             }));
  expect_named(report, {"layer 1", "expert 3", "down", expert_tensor(3, "w2"), "tensor_scale"});
}

TEST_F(PackedFault, ExpertRangeOffByOne) {
  const auto checkpoint = Checkpoint::open(models().nvfp4);
  ASSERT_OK(checkpoint);
  VerifyOptions o = options();
  o.range = {1, 4};
  o.tamper_source = [&](int64_t layer, int64_t expert, LoadedExpert& loaded) -> Status {
    if (layer != 1) return {};
    NVFP4_MOE_ASSIGN(loaded, checkpoint->expert(layer, expert + 1));
    return {};
  };
  const auto report = verify(models().nvfp4, o);
  for (int64_t e = 1; e < 3; ++e)
    expect_named(report, {"layer 1", "expert " + std::to_string(e), expert_tensor(e, "w1")});
  EXPECT_EQ(report->layers[1].packed->faulty_tensors, 4 * 3);
}

// A byte of the packed buffer itself, wherever the backend keeps it.
TEST_F(PackedFault, OneBitOfThePackedBytes) {
  for (const char* backend : {"auto", "reference"}) {
    for (const double where : {0.02, 0.4, 0.77}) {
      VerifyOptions o = options();
      o.backend = backend;
      o.tamper_packed = [&](int64_t number, const MoeLayer& layer) {
        const Buffer& bytes = layer.weights().bytes;
        if (number == 1)
          bytes.data()[static_cast<size_t>(where * static_cast<double>(bytes.size_bytes()))] ^= std::byte{4};
      };
      const auto report = verify(models().nvfp4, o);
      expect_named(report, {"layer 1", "expert", "layers.1.ffn.", "packed weights"});
      EXPECT_EQ(report->layers[1].packed->differing_bytes, 1u);
    }
  }
}

TEST_F(Verify, FaultInAKernelsResultIsNamedByTokenAndChannel) {
  struct Fault {
    const char* name;
    std::function<float(float, float)> change;  // of a value, given the token's largest
  };
  const Fault faults[] = {{"sign", [](float x, float) { return -x; }},
                          {"double", [](float x, float) { return 2 * x; }},
                          {"zero", [](float, float) { return 0.0f; }},
                          {"nan", [](float, float) { return std::nanf(""); }},
                          {"large", [](float, float most) { return 4 * most; }}};
  for (const Fault& fault : faults) {
    VerifyOptions o = options();
    int64_t channel = 0;
    o.tamper_output = [&](int64_t layer, float* out, int64_t, int64_t channels) {
      if (layer != 1) return;
      float* row = out + 7 * channels;
      for (int64_t c = 1; c < channels; ++c)
        if (std::fabs(row[c]) > std::fabs(row[channel])) channel = c;
      row[channel] = fault.change(row[channel], std::fabs(row[channel]));
    };
    const auto report = verify(models().nvfp4, o);
    expect_named(report, {"layer 1", "token 7", "channel " + std::to_string(channel)});
    EXPECT_TRUE(report->layers[1].packed->passed()) << fault.name;
  }
}

// ---- planted in the checkpoint, found against the original

class FileFault : public Verify {};

TEST_F(FileFault, OneFlippedCode) {
  const std::string tensor = expert_tensor(4, "w1.weight");
  const std::string dir = damaged([&](const std::string& d) {
    auto bytes = bytes_of(d, tensor);
    bytes[30 * kHidden / 2 + 11] ^= 0x04;  // low nibble: column 22
    put_bytes(d, tensor, bytes);
  });
  const auto report = verify(dir, against());
  expect_named(report, {"original", "layer 1", "expert 4", "gate", tensor, "(30, 22)"});
  EXPECT_EQ(report->layers[1].original->broken_half_steps, 1u);
  // Without the original nothing can know.
  EXPECT_TRUE(verify(dir, options())->passed());
}

TEST_F(FileFault, BlockScaleTimesTwo) {
  const std::string tensor = expert_tensor(4, "w2.weight_scale");
  const std::string dir = damaged([&](const std::string& d) {
    auto bytes = bytes_of(d, tensor);
    uint8_t& byte = bytes[100 * kInter / 16 + 3];
    byte = static_cast<uint8_t>(byte < 0x70 ? byte + 8 : byte - 8);
    put_bytes(d, tensor, bytes);
  });
  const auto report = verify(dir, against());
  expect_named(report, {"original", "layer 1", "expert 4", "down", expert_tensor(4, "w2"), "(100, "});
  const WeightFault& fault = report->layers[1].original->faults.front();
  EXPECT_GE(fault.col, 48);
  EXPECT_LT(fault.col, 64);
}

TEST_F(FileFault, SwappedGateAndUp) {
  const std::string dir = damaged([](const std::string& d) {
    for (const char* part : {".weight", ".weight_scale", ".weight_scale_2"}) {
      const auto gate = bytes_of(d, expert_tensor(2, "w1") + part), up = bytes_of(d, expert_tensor(2, "w3") + part);
      put_bytes(d, expert_tensor(2, "w1") + part, up);
      put_bytes(d, expert_tensor(2, "w3") + part, gate);
    }
  });
  const auto report = verify(dir, against());
  expect_named(report, {"layer 1", "expert 2", "gate", expert_tensor(2, "w1"), "(0, ", "gate and up look swapped"});
  expect_named(report, {"layer 1", "expert 2", "up", expert_tensor(2, "w3"), "(0, "});
}

TEST_F(FileFault, TransposedScales) {
  const std::string tensor = expert_tensor(0, "w3.weight_scale");
  const std::string dir = damaged([&](const std::string& d) {
    const auto plain = bytes_of(d, tensor);
    auto turned = plain;
    for (size_t r = 0; r < kInter; ++r)
      for (size_t b = 0; b < kHidden / 16; ++b) turned[b * kInter + r] = plain[r * kHidden / 16 + b];
    put_bytes(d, tensor, turned);
  });
  expect_named(verify(dir, against()),
               {"layer 1", "expert 0", "up", expert_tensor(0, "w3"), "(0, ", "look transposed"});
}

TEST_F(FileFault, ReciprocalTensorScale) {
  const std::string tensor = expert_tensor(5, "w2.weight_scale_2");
  const std::string dir = damaged([&](const std::string& d) {
    auto bytes = bytes_of(d, tensor);
    float s = 0;
    std::memcpy(&s, bytes.data(), 4);
    s = 1.0f / s;
    std::memcpy(bytes.data(), &s, 4);
    put_bytes(d, tensor, bytes);
  });
  const auto report = verify(dir, against());
  expect_named(report, {"layer 1", "expert 5", expert_tensor(5, "w2")});
}

TEST_F(FileFault, ExpertsOffByOne) {
  const std::string dir = damaged([](const std::string& d) {
    for (const char* word : {"w1", "w2", "w3"}) {
      for (const char* part : {".weight", ".weight_scale", ".weight_scale_2"}) {
        std::vector<std::vector<uint8_t>> all;
        for (int64_t e = 0; e < 6; ++e) all.push_back(bytes_of(d, expert_tensor(e, word) + part));
        for (int64_t e = 0; e < 6; ++e)
          put_bytes(d, expert_tensor(e, word) + part, all[static_cast<size_t>((e + 1) % 6)]);
      }
    }
  });
  const auto report = verify(dir, against());
  expect_named(report,
               {"layer 1", "expert 0", "gate", expert_tensor(0, "w1"), "(0, ", "matches the original's expert 1"});
  EXPECT_EQ(report->layers[1].original->faulty_tensors, 18);
}

TEST_F(FileFault, NanBlockScaleStopsTheLayerAsAFinding) {
  const std::string tensor = expert_tensor(1, "w1.weight_scale");
  const std::string dir = damaged([&](const std::string& d) {
    auto bytes = bytes_of(d, tensor);
    bytes[40] = 0x7F;
    put_bytes(d, tensor, bytes);
  });
  const auto report = verify(dir, options());
  expect_named(report, {"layer 1", "expert 1", "block_scale_nan"});
  EXPECT_FALSE(report->layers[1].run.has_value());
}

TEST_F(FileFault, AnotherModelsOriginal) {
  SynthesizeOptions o;
  o.layers = 1;
  o.num_experts = 6;
  o.top_k = 3;
  o.hidden_size = 64;
  o.intermediate_size = kInter;
  o.vocab_size = 32;
  ASSERT_OK(synthesize_checkpoint(dir_.file("other"), o));
  VerifyOptions options = against();
  options.against = dir_.file("other");
  const auto report = verify(models().nvfp4, options);
  ASSERT_OK(report);
  EXPECT_EQ(report->failed_layers(), 2);
}

}  // namespace
}  // namespace nvfp4_moe
