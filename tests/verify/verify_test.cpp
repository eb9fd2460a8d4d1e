// Tests the engine: a clean checkpoint passes on every count. Each fault, planted in the files
// before they are read or after the layer is packed, is found and named by layer, expert, tensor
// and coordinate.
#include "verify/verify.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "moe/layer.h"
#include "quantize/models.h"
#include "support/read_tensor.h"
#include "verify/verify_packed.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

constexpr int64_t kHidden = 128, kInter = 64;

// One pair of original and NVFP4 checkpoint for all tests; tests that damage a file work on a copy.
struct Models {
  TempDir dir;
  std::string original = dir.file("original"), nvfp4 = dir.file("nvfp4"), ct = dir.file("ct"),
              mse = dir.file("mse");
  Models() {
    EXPECT_OK(synthesize_checkpoint(original, tiny_model(2, 6, kHidden, kInter)));
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

// ---- faults, written into a checkpoint's files

using Bytes = std::vector<uint8_t>;

std::string expert_tensor(int64_t expert, const std::string& word) {
  return "layers.1.ffn.experts." + std::to_string(expert) + "." + word;
}

Bytes bytes_of(const std::string& dir, const std::string& tensor) {
  const auto index = must(TensorIndex::open(dir));
  const TensorIndex::Ref ref = index->find(tensor);
  return read_tensor<uint8_t>(*ref.file, *ref.info);
}
void put_bytes(const std::string& dir, const std::string& tensor, const Bytes& bytes) {
  const auto index = must(TensorIndex::open(dir));
  const TensorIndex::Ref ref = index->find(tensor);
  ASSERT_EQ(ref.info->size_bytes(), bytes.size());
  const std::string path = ref.file->path();
  const auto modified = std::filesystem::last_write_time(path);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(ref.file->data_offset() + ref.info->begin));
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  std::filesystem::last_write_time(path, modified);  // a reader that has it open checks the time
}
void change(const std::string& dir, const std::string& tensor,
            const std::function<void(Bytes& bytes)>& how) {
  Bytes bytes = bytes_of(dir, tensor);
  how(bytes);
  put_bytes(dir, tensor, bytes);
}

void double_scale(uint8_t& scale) {
  scale = static_cast<uint8_t>(scale < 0x70 ? scale + 8 : scale - 8);
}

// A matrix gets another one's tensors, as they were before any damage.
void copy_matrix(const std::string& dir, const std::string& from, const std::string& to) {
  for (const char* part : {".weight", ".weight_scale", ".weight_scale_2"})
    put_bytes(dir, to + part, bytes_of(models().nvfp4, from + part));
}

// Each expert gets the tensors of the next one, the last one those of the first.
void shift_experts(const std::string& dir) {
  for (const char* word : {"w1", "w2", "w3"})
    for (int64_t e = 0; e < 6; ++e)
      copy_matrix(dir, expert_tensor((e + 1) % 6, word), expert_tensor(e, word));
}

using Words = std::vector<std::string>;
struct Fault {
  const char* name;
  std::function<void(const std::string& dir)> damage;
  Words changed;   // of the line that names it if the files change after they were packed
  Words original;  // of the line that names it against the original
};
const std::string kGate = expert_tensor(3, "w1"), kUp = expert_tensor(3, "w3"),
                  kDown = expert_tensor(3, "w2");
const Fault kFaults[] = {
    {"code, high nibble",
     [](const std::string& d) {
       change(d, kUp + ".weight", [](Bytes& codes) { codes[20 * kHidden / 2 + 33] ^= 0x40; });
     },
     {"packed weights", "up", kUp + ".weight", "(20, 67)", "code"},
     {"original", "up", kUp + ".weight", "(20, 67)"}},
    {"code, low nibble",
     [](const std::string& d) {
       change(d, kGate + ".weight", [](Bytes& codes) { codes[30 * kHidden / 2 + 11] ^= 0x04; });
     },
     {"packed weights", "gate", kGate + ".weight", "(30, 22)", "code"},
     {"original", "gate", kGate + ".weight", "(30, 22)"}},
    {"block scale",
     [](const std::string& d) {
       change(d, kDown + ".weight_scale",
              [](Bytes& scales) { double_scale(scales[100 * kInter / 16 + 2]); });
     },
     {"down", kDown, "(100, 32)", "block_scale"},
     {"original", "down", kDown, "(100, "}},
    {"swapped gate and up",
     [](const std::string& d) {
       copy_matrix(d, kGate, kUp);
       copy_matrix(d, kUp, kGate);
     },
     {"gate", kGate, "(0, "},
     {"gate", kGate, "(0, ", "gate and up seem swapped"}},
    {"transposed scales",
     [](const std::string& d) {
       change(d, kUp + ".weight_scale", [](Bytes& bytes) {
         const Bytes plain = bytes;
         const size_t rows = kInter, blocks = plain.size() / rows;
         for (size_t r = 0; r < rows; ++r)
           for (size_t b = 0; b < blocks; ++b) bytes[b * rows + r] = plain[r * blocks + b];
       });
     },
     {"up", kUp, "block_scale"},
     {"up", kUp, "(0, ", "seem transposed"}},
    {"twice the tensor scale",
     [](const std::string& d) {
       change(d, kDown + ".weight_scale_2", [](Bytes& bytes) {
         float scale = 0;
         std::memcpy(&scale, bytes.data(), 4);
         scale *= 2;
         std::memcpy(bytes.data(), &scale, 4);
       });
     },
     {"down", kDown, "tensor_scale"},
     {"down", kDown}},
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
  // The report fails only in layer 1, and a line of it holds every word.
  static void expect_named(const Result<VerifyReport>& report, const Words& words) {
    ASSERT_OK(report);
    EXPECT_FALSE(report->passed());
    ASSERT_EQ(report->layers.size(), 2u);
    EXPECT_TRUE(report->layers[0].passed()) << report->layers[0].failures.front();
    const auto has_all = [&](const std::string& line) {
      return line.find("layer 1") != line.npos &&
             std::ranges::all_of(words, [&](const auto& w) { return line.find(w) != line.npos; });
    };
    EXPECT_TRUE(std::ranges::any_of(report->layers[1].failures, has_all))
        << "expected a line with " << ::testing::PrintToString(words) << " in "
        << ::testing::PrintToString(report->layers[1].failures);
    EXPECT_TRUE(nlohmann::json::accept(to_json(*report)));
  }

  TempDir dir_;
};

TEST_F(Verify, ACleanCheckpointPasses) {
  for (const std::string& path : {models().nvfp4, models().ct, models().mse}) {
    VerifyOptions o = against();
    o.states.skipped_share = 0.1;
    const auto report = must(verify(path, o));
    EXPECT_TRUE(report->passed());
    ASSERT_EQ(report->layers.size(), 2u);
    for (const LayerVerification& layer : report->layers) {
      EXPECT_THAT(layer.failures, IsEmpty());
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
  VerifyOptions o = options();
  o.backend = "reference";
  const auto report = must(verify(models().nvfp4, o));
  EXPECT_TRUE(report->layers[0].run->backend_is_reference);
  EXPECT_EQ(report->layers[0].run->comparison.max_abs, 0);
}

TEST_F(Verify, LayersRangesLimitsAndProgress) {
  VerifyOptions o = against();
  o.layers = {1};
  o.range = {2, 3};
  o.limit_sqnr_db = 15;
  auto report = must(verify(models().nvfp4, o));
  EXPECT_TRUE(report->passed());
  ASSERT_EQ(report->layers.size(), 1u);
  EXPECT_EQ(report->layers[0].original->weights, 3u * 3 * kHidden * kInter);
  EXPECT_EQ(report->layers[0].original->experts.at(2).expert, 4);
  o.limit_sqnr_db = 60;
  report = verify(models().nvfp4, o);
  EXPECT_FALSE(report->passed());
  EXPECT_TRUE(report->layers[0].original->below_limit);
  EXPECT_EQ(report->layers[0].original->broken_half_steps, 0u);

  const auto code = [&](auto change) {
    VerifyOptions changed = options();
    change(changed);
    return verify(models().nvfp4, changed).status().code();
  };
  EXPECT_EQ(code([](auto& v) { v.layers = {2}; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& v) { v.range = {4, 3}; }), Code::kInvalidArgument);
  EXPECT_NE(code([](auto& v) { v.backend = "sm9000"; }), Code::kOk);
  EXPECT_EQ(code([](auto& v) { v.progress = [](const Progress&) { return false; }; }),
            Code::kCancelled);
  EXPECT_FALSE(verify(dir_.file("nowhere"), options()).ok());
  o = against();
  int64_t last = 0;
  o.progress = [&](const Progress& p) {
    EXPECT_GE(p.done, last);
    EXPECT_EQ(p.total, 2 * 6 * 4);
    last = p.done;
    return true;
  };
  ASSERT_OK(verify(models().nvfp4, o));
  EXPECT_EQ(last, 2 * 6 * 4);
}

// The layer that is packed and run differs from the files if they change once it is packed. A fault
// that is in the files from the beginning is found against the original.
TEST_F(Verify, EachFaultIsNamedByItsPlace) {
  for (const Fault& fault : kFaults) {
    SCOPED_TRACE(fault.name);
    const auto changed = verify_changed("layer 1 expert 5: pack", fault.damage, options());
    expect_named(changed, fault.changed);
    expect_named(changed, {"expert 3"});
    VerifyOptions o = against();
    o.states.tokens = 0;
    const std::string dir = damaged(fault.damage);
    const auto planted = verify(dir, o);
    expect_named(planted, fault.original);
    expect_named(planted, {"expert 3"});
    if (std::string(fault.name).starts_with("code")) {
      EXPECT_EQ(changed->layers[1].packed->differing_bytes, 1u);
      EXPECT_EQ(changed->layers[1].packed->faulty_tensors, 1);
      EXPECT_EQ(planted->layers[1].original->broken_half_steps, 1u);
      EXPECT_TRUE(verify(dir, options())->passed()) << "without the original nothing can know";
    } else if (fault.name == std::string("swapped gate and up")) {
      EXPECT_FALSE(changed->layers[1].run->passed()) << "the run notices too";
      const auto& errors = planted->layers[1].original->experts;
      EXPECT_EQ(std::ranges::max_element(errors, {}, &ExpertError::relative_l2)->expert, 3);
    }
  }
}

TEST_F(Verify, ExpertsOffByOne) {
  VerifyOptions o = options();
  o.range = {1, 4};
  auto report = verify_changed("layer 1 expert 4: pack", shift_experts, o);
  for (int64_t e = 1; e < 3; ++e)
    expect_named(report, {"expert " + std::to_string(e), expert_tensor(e, "w1")});
  EXPECT_EQ(report->layers[1].packed->faulty_tensors, 4 * 3);
  o = against();
  o.states.tokens = 0;
  report = verify(damaged(shift_experts), o);
  expect_named(report, {"expert 0", "gate", expert_tensor(0, "w1"), "(0, ",
                        "matches the original's expert 1"});
  EXPECT_EQ(report->layers[1].original->faulty_tensors, 18);
}

// Row 17 of down gives channel 17. The packed layer is compared before the files change, and run
// afterwards.
TEST_F(Verify, AnotherResultIsNamedByTokenAndChannel) {
  const std::function<void(uint8_t*, uint8_t*)> faults[] = {
      // of the row's codes and scales
      [](uint8_t* codes, uint8_t*) {
        std::for_each_n(codes, kInter / 2, [](uint8_t& pair) { pair ^= 0x88; });
      },
      [](uint8_t*, uint8_t* scales) { std::for_each_n(scales, kInter / 16, double_scale); },
      [](uint8_t* codes, uint8_t*) { std::memset(codes, 0, kInter / 2); }};
  for (const auto& fault : faults) {
    SCOPED_TRACE(&fault - faults);
    const auto report = verify_changed(
        "layer 1 expert 5: unpack and compare",
        [&](const std::string& d) {
          for (int64_t e = 0; e < 6; ++e) {
            Bytes codes = bytes_of(d, expert_tensor(e, "w2.weight"));
            Bytes scales = bytes_of(d, expert_tensor(e, "w2.weight_scale"));
            fault(codes.data() + 17 * kInter / 2, scales.data() + 17 * kInter / 16);
            put_bytes(d, expert_tensor(e, "w2.weight"), codes);
            put_bytes(d, expert_tensor(e, "w2.weight_scale"), scales);
          }
        },
        options());
    expect_named(report, {"token ", "channel 17"});
    EXPECT_TRUE(report->layers[1].packed->passed());
  }
}

// A byte of the packed buffer itself, in the backend's memory.
TEST_F(Verify, OneBitOfThePackedBytesIsFound) {
  const auto checkpoint = must(Checkpoint::open(models().nvfp4));
  const auto config = must(MoeConfig::make(*checkpoint->layer_options(1)));
  for (const char* backend : {"auto", "reference"}) {
    for (const double where : {0.02, 0.4, 0.77}) {
      LayerOptions o;
      o.backend = backend;
      o.range = {0, 6};
      o.limits.max_tokens = 1;
      const auto layer = must(MoeLayer::open(*config, *layer_source(*checkpoint, 1), o));
      const Buffer& bytes = (*layer)->weights().bytes;
      bytes.data()[static_cast<size_t>(where * static_cast<double>(bytes.size_bytes()))] ^=
          std::byte{4};
      const auto check =
          must(check_packed(*checkpoint, 1, **layer, [](int64_t) { return Status(); }));
      EXPECT_FALSE(check->passed());
      EXPECT_EQ(check->differing_bytes, 1u);
      ASSERT_EQ(check->faults.size(), 1u);
      EXPECT_THAT(to_string(check->faults[0]),
                  AllOf(HasSubstr("layer 1 expert"), HasSubstr("layers.1.ffn.")));
    }
  }
}

TEST_F(Verify, ANanBlockScaleStopsTheLayerAsAFinding) {
  const auto report = verify(damaged([](const std::string& d) {
                               change(d, expert_tensor(1, "w1.weight_scale"),
                                      [](Bytes& scales) { scales[40] = 0x7F; });
                             }),
                             options());
  expect_named(report, {"expert 1", "block_scale_nan"});
  EXPECT_FALSE(report->layers[1].run.has_value());
}

TEST_F(Verify, AnotherModelsOriginalFails) {
  ASSERT_OK(synthesize_checkpoint(dir_.file("other"), tiny_model(1, 6, 64, kInter)));
  VerifyOptions o = against();
  o.against = dir_.file("other");
  EXPECT_EQ(must(verify(models().nvfp4, o))->failed_layers(), 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal
