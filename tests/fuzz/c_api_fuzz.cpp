// The C interface with arguments of every kind: struct sizes, null pointers, enums, sizes, ids and
// dtypes out of range.
//
// One input is a list of calls on at most one layer and one linear. Arrays have the sizes that are
// passed with them, or the sizes are impossible: the library cannot detect a caller that passes
// wrong sizes of its memory. Checks that nothing crashes or leaks, that codes are known ones, and
// that every failure has a one-line text and leaves no handle open.
//
// Long because every function of the interface has its call.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "fuzz/c_api_arguments.h"
#include "fuzz/require.h"
#include "nvfp4_moe/nvfp4_moe.h"

using nvfp4_moe::internal::fuzz::Arguments;

namespace {

constexpr int64_t kMaxTokens = 5;

bool check(nvfp4_moe_status code) {
  REQUIRE(code >= NVFP4_MOE_STATUS_OK && code <= NVFP4_MOE_STATUS_CANCELLED);
  REQUIRE(code != NVFP4_MOE_STATUS_INTERNAL && code != NVFP4_MOE_STATUS_OUT_OF_MEMORY);
  if (code == NVFP4_MOE_STATUS_OK) return true;
  const char* text = nvfp4_moe_last_error();
  REQUIRE(text != nullptr && text[0] != '\0');
  for (; *text != '\0'; ++text) REQUIRE(*text != '\n');
  return false;
}

void check_text(nvfp4_moe_status code, char* text) {
  if (check(code)) REQUIRE(text != nullptr && text[0] != '\0');
  if (!check(code) && code != NVFP4_MOE_STATUS_CHECK_FAILED) REQUIRE(text == nullptr);
  nvfp4_moe_text_free(text);
}

// A host's "threads" on one thread: pieces in reverse order.
void lent_parallel_for(int64_t count, int64_t grain, nvfp4_moe_parallel_body body, void* context,
                       void*) {
  for (int64_t begin = (count - 1) / grain * grain; begin >= 0; begin -= grain)
    body(context, begin, std::min(begin + grain, count));
}

// Options of an older header may end between `progress` and `progress_user`: then there is no
// number at which to stop.
int32_t cancel_at(const nvfp4_moe_progress* progress, void* user) {
  return user != nullptr && progress->done < *static_cast<const int64_t*>(user) ? 1 : 0;
}

class Session {
 public:
  Session(const uint8_t* data, size_t size) : a_(data, size) {}
  ~Session() {
    nvfp4_moe_layer_close(layer_);
    nvfp4_moe_linear_close(linear_);
  }

  void play() {
    for (int calls = 0; calls < 24 && a_.more(); ++calls) one_call();
  }

 private:
  void one_call() {
    switch (a_.pick(15)) {
      case 0: explain(); break;
      case 1: plan(); break;
      case 2: open_layer(); break;
      case 3:
      case 4: run_layer(); break;
      case 5: layer_queries(); break;
      case 6: replace(); break;
      case 7: unpack(); break;
      case 8: open_linear(); break;
      case 9: run_linear(); break;
      case 10: quantize(); break;
      case 11: convert(); break;
      case 12: select_experts(); break;
      case 13: router_gemm(); break;
      default: files(); break;
    }
  }

  nvfp4_moe_config small_config() {
    nvfp4_moe_config c{};
    c.num_experts = a_.in(1, 4);
    c.top_k = a_.in(1, 3);
    c.hidden_size = 16 * a_.in(1, 3);
    c.intermediate_size = 16 * a_.in(1, 3);
    c.shared_intermediate_size = a_.pick(4) == 0 ? 16 * a_.in(1, 2) : 0;
    c.activation = a_.enumerator(5);
    const bool limited =
        c.activation != NVFP4_MOE_ACTIVATION_SWIGLU && c.activation != NVFP4_MOE_ACTIVATION_RELU2;
    c.swiglu_limit = limited ? 7.0f : 0.0f;
    if (a_.rarely(3)) c.swiglu_limit = a_.number();
    if (a_.rarely(3)) c.swiglu_alpha = a_.number();
    c.activation_format = a_.enumerator(3);
    c.activation_scale = a_.enumerator(3);
    c.intermediate_scale = a_.enumerator(3);
    if (a_.pick(3) == 0) c.intermediate_fixed = a_.scale();
    if (a_.rarely(3)) c.max_router_weight = a_.number();
    if (a_.rarely(3)) c.static_headroom = a_.number();
    c.router_weight = a_.enumerator(3);
    if (c.router_weight == NVFP4_MOE_ROUTER_WEIGHT_ON_INPUT && !a_.rarely(2)) c.top_k = 1;
    c.row_format = a_.enumerator(2);
    c.batch_invariant = a_.enumerator(2);
    return c;
  }
  // Any sizes: for calls that take no arrays.
  nvfp4_moe_config any_config() {
    nvfp4_moe_config c = small_config();
    for (int64_t* size : {&c.num_experts, &c.top_k, &c.hidden_size, &c.intermediate_size,
                          &c.shared_intermediate_size})
      if (a_.rarely(2)) *size = a_.rarely(1) ? a_.bad_size() : a_.any_int64() >> a_.pick(56);
    return c;
  }
  nvfp4_moe_layer_options small_options() {
    nvfp4_moe_layer_options o{};
    o.backend = a_.rarely(2) ? a_.backend() : nullptr;
    o.max_tokens = kMaxTokens;
    if (a_.rarely(3)) {
      o.first_expert = a_.rarely(1) ? a_.bad_size() : a_.in(0, 4);
      o.expert_count = a_.rarely(1) ? a_.bad_size() : a_.in(0, 4);
    }
    if (a_.rarely()) o.max_tokens = a_.bad_size();
    if (a_.rarely()) o.slice_first = a_.in(-16, 64);
    if (a_.rarely()) o.slice_count = a_.in(-16, 64);
    if (a_.rarely()) o.cache_directory = "/nonexistent/cache";
    o.parallel_for = lent_parallel_for;
    o.threads = a_.rarely() ? a_.enumerator(3) : 1;
    if (o.threads > 4 && o.threads <= 4096)
      o.threads = 4097;  // a pool of thousands of threads is legal, and slow
    if (a_.rarely()) o.parallel_for = nullptr;
    if (o.parallel_for == nullptr && o.threads == 0) o.threads = 1;
    if (a_.rarely(3)) {
      cancel_ = a_.in(0, 3);
      o.progress = cancel_at;
      o.progress_user = &cancel_;
    }
    o.cache_checksum = a_.rarely() ? a_.enumerator(3) : 0;
    o.cache_trusted = a_.rarely() ? a_.enumerator(3) : 0;
    return o;
  }

  void explain() {
    const nvfp4_moe_config config = any_config();
    char* json = nullptr;
    char** out = a_.maybe(&json);
    check_text_or_null(nvfp4_moe_explain(a_.structure(config), a_.backend(), out), out, json);
  }

  void plan() {
    const nvfp4_moe_config config = any_config();
    nvfp4_moe_layer_options options = small_options();
    if (a_.rarely(2)) options.max_tokens = a_.any_int64() >> a_.pick(56);
    char* text = nullptr;
    size_t workspace = 0;
    size_t packed = 0;
    char** out = a_.maybe(&text);
    const nvfp4_moe_status code =
        nvfp4_moe_plan(a_.structure(config), a_.structure(options), a_.scale(), a_.scale(), out,
                       a_.maybe(&workspace), a_.maybe(&packed));
    check_text_or_null(code, out, text);
  }

  void check_text_or_null(nvfp4_moe_status code, char** out, char* text) {
    if (out == nullptr)
      check(code);
    else
      check_text(code, text);
  }

  // Whether to pass arrays of a gate: rarely so if experts have no gate.
  bool gives_gate(const nvfp4_moe_config& config) {
    return config.activation != NVFP4_MOE_ACTIVATION_RELU2 || a_.rarely(5);
  }

  nvfp4_moe_expert expert(const nvfp4_moe_config& config, int64_t inner) {
    const int64_t hidden = config.hidden_size;
    nvfp4_moe_expert e{};
    if (gives_gate(config)) {
      e.gate_codes = a_.maybe(a_.bytes(inner * hidden / 2));
      e.gate_block_scales = a_.maybe(a_.block_scales(inner * hidden / 16));
    }
    e.up_codes = a_.maybe(a_.bytes(inner * hidden / 2));
    e.up_block_scales = a_.maybe(a_.block_scales(inner * hidden / 16));
    e.down_codes = a_.maybe(a_.bytes(inner * hidden / 2));
    e.down_block_scales = a_.maybe(a_.block_scales(inner * hidden / 16));
    e.gate_tensor_scale = a_.scale();
    e.up_tensor_scale = a_.scale();
    e.down_tensor_scale = a_.scale();
    e.on_device = a_.rarely(5) ? 1 : 0;
    return e;
  }

  void open_layer() {
    nvfp4_moe_config config = small_config();
    nvfp4_moe_layer_options options = small_options();
    // Arrays for all experts, for every range: a range must not reach beyond them.
    const int64_t experts = config.num_experts;
    const int64_t values = config.hidden_size * config.intermediate_size;
    const int64_t stride_factor = a_.rarely(2) ? 2 : 1;
    nvfp4_moe_layer_tensors t{};
    if (gives_gate(config)) {
      t.gate_codes = a_.maybe(a_.bytes(experts * values / 2 * stride_factor));
      t.gate_block_scales = a_.maybe(a_.block_scales(experts * values / 16 * stride_factor));
      t.gate_tensor_scales = a_.maybe(a_.floats(experts));
    }
    t.up_codes = a_.maybe(a_.bytes(experts * values / 2 * stride_factor));
    t.up_block_scales = a_.maybe(a_.block_scales(experts * values / 16 * stride_factor));
    t.up_tensor_scales = a_.maybe(a_.floats(experts));
    t.down_codes = a_.maybe(a_.bytes(experts * values / 2 * stride_factor));
    t.down_block_scales = a_.maybe(a_.block_scales(experts * values / 16 * stride_factor));
    t.down_tensor_scales = a_.maybe(a_.floats(experts));
    for (const auto& [stride, one] : {std::pair{&t.gate_up_codes_stride, values / 2},
                                      std::pair{&t.gate_up_scales_stride, values / 16},
                                      std::pair{&t.down_codes_stride, values / 2},
                                      std::pair{&t.down_scales_stride, values / 16}}) {
      *stride = a_.pick(2) == 0 ? 0 : one * stride_factor;
      if (a_.rarely(5)) *stride = a_.in(0, one - 1);
      if (a_.rarely(5)) *stride = -a_.in(1, one);
    }
    if (config.shared_intermediate_size > 0 ? !a_.rarely() : a_.rarely())
      t.shared =
          a_.structure(expert(config, std::max<int64_t>(config.shared_intermediate_size, 16)));
    t.hidden_scale = a_.scale();
    t.intermediate_scale = a_.scale();
    // Impossible sizes: the arrays must not be accessed.
    if (a_.rarely()) {
      int64_t* sizes[] = {&config.top_k, &config.hidden_size, &config.intermediate_size,
                          &config.num_experts};
      *sizes[a_.pick(4)] = -a_.in(0, 64);
    }
    nvfp4_moe_layer* opened = nullptr;
    nvfp4_moe_layer** out = a_.maybe(&opened);
    const nvfp4_moe_config* given = a_.structure(config);
    const nvfp4_moe_status code =
        nvfp4_moe_layer_open_tensors(given, a_.structure(t), a_.structure(options), out);
    const bool ok = check(code);
    if (out != nullptr) REQUIRE(ok == (opened != nullptr));
    if (opened == nullptr) return;
    nvfp4_moe_layer_close(layer_);
    layer_ = opened;
    config_ = config;
    size_t config_bytes = 0;
    std::memcpy(&config_bytes, given, sizeof(config_bytes));
    if (config_bytes < sizeof(config)) {  // fields that an older header's struct lacks were zero
      nvfp4_moe_config cut{};
      std::memcpy(&cut, &config, config_bytes);
      config_ = cut;
    }
  }

  void run_layer() {
    if (layer_ == nullptr && !a_.rarely()) return open_layer();
    const int64_t tokens = a_.in(0, kMaxTokens + 1);
    nvfp4_moe_batch b{};
    b.tokens = tokens;
    b.hidden_dtype = a_.enumerator(4);
    b.ids_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : NVFP4_MOE_DTYPE_I64;
    if (a_.rarely()) b.ids_dtype = a_.enumerator(6);
    b.out_dtype = a_.enumerator(4);
    b.hidden = a_.maybe(a_.bytes(tokens * config_.hidden_size * 8));
    const int64_t ids = tokens * config_.top_k;
    uint8_t* topk_ids = a_.zeros(ids * 8);
    for (int64_t i = 0; i < ids; ++i) {
      const int64_t id = a_.rarely(3) ? a_.any_int64() : a_.in(-1, config_.num_experts);
      const auto narrow = static_cast<int32_t>(id);
      if (b.ids_dtype == NVFP4_MOE_DTYPE_I64)
        std::memcpy(topk_ids + 8 * i, &id, 8);
      else
        std::memcpy(topk_ids + 4 * i, &narrow, 4);
    }
    b.topk_ids = a_.maybe(topk_ids);
    b.topk_weights = a_.maybe(a_.floats(ids));
    b.shared_weights = a_.pick(2) == 0 ? nullptr : a_.floats(tokens);
    b.out = a_.maybe(a_.zeros(tokens * config_.hidden_size * 8));
    b.reserved = a_.rarely(6) ? 1 : 0;
    if (a_.rarely()) b.tokens = a_.rarely(1) ? -1 : a_.in(kMaxTokens + 1, int64_t{1} << 60);
    const nvfp4_moe_batch* batch = a_.structure(b);

    size_t size = 0;
    // The size for these tokens, or for the layer's most tokens if it was opened with a smaller
    // limit.
    int64_t most = std::min(tokens, kMaxTokens);
    while (layer_ != nullptr && !check(nvfp4_moe_layer_workspace_bytes(layer_, most, &size)))
      REQUIRE(most-- > 0);
    void* memory = std::aligned_alloc(256, (size + 511) / 256 * 256);
    std::memset(memory, 0xA5, size);
    char* workspace = static_cast<char*>(memory);
    if (a_.rarely()) workspace += a_.in(1, 255);
    if (a_.rarely(5)) workspace = nullptr;
    size_t given = size;
    if (a_.rarely()) given = static_cast<size_t>(a_.in(0, static_cast<int64_t>(size)));
    const bool ran = check(nvfp4_moe_layer_run(
        layer_, batch, workspace, given, a_.rarely(5) ? static_cast<void*>(&cancel_) : nullptr));
    if (ran || a_.rarely()) {
      nvfp4_moe_run_status* status = a_.structure(nvfp4_moe_run_status{});
      if (ran) check(nvfp4_moe_layer_run_status(layer_, workspace, given, status));
    }
    if (ran && a_.rarely())
      check(nvfp4_moe_layer_write_repro(layer_, batch, a_.pick(2), "/nonexistent/x.safetensors"));
    std::free(memory);
  }

  void layer_queries() {
    char* json = nullptr;
    char** out = a_.maybe(&json);
    check_text_or_null(nvfp4_moe_layer_describe(layer_, out), out, json);
    char* run_json = nullptr;
    char** run_out = a_.maybe(&run_json);
    check_text_or_null(nvfp4_moe_layer_describe_run(layer_, a_.in(-1, kMaxTokens + 1), run_out),
                       run_out, run_json);
    size_t bytes = 0;
    check(nvfp4_moe_layer_workspace_bytes(layer_, a_.in(-1, kMaxTokens + 1), a_.maybe(&bytes)));
    check(nvfp4_moe_layer_run_status(layer_, nullptr, 0, a_.structure(nvfp4_moe_run_status{})));
    if (a_.rarely(3)) {
      nvfp4_moe_layer_close(layer_);
      layer_ = nullptr;
    }
  }

  int64_t local_expert() { return a_.rarely(2) ? a_.bad_size() : a_.in(-1, config_.num_experts); }

  void replace() {
    if (layer_ == nullptr && !a_.rarely()) return;
    const int64_t which = local_expert();
    const int64_t inner = which == NVFP4_MOE_SHARED_EXPERT ? config_.shared_intermediate_size
                                                           : config_.intermediate_size;
    if (a_.rarely())
      check(nvfp4_moe_layer_replace_expert_on_stream(
          layer_, which, a_.structure(expert(config_, inner)), nullptr));
    else
      check(nvfp4_moe_layer_replace_expert(layer_, which, a_.structure(expert(config_, inner))));
  }

  void unpack() {
    if (layer_ == nullptr && !a_.rarely()) return;
    const int64_t which = local_expert();
    const int64_t inner = which == NVFP4_MOE_SHARED_EXPERT ? config_.shared_intermediate_size
                                                           : config_.intermediate_size;
    const int64_t values = config_.hidden_size * inner;
    nvfp4_moe_expert_out e{};
    e.gate_codes = a_.maybe(a_.zeros(values / 2));
    e.gate_block_scales = a_.maybe(a_.zeros(values / 16));
    e.up_codes = a_.maybe(a_.zeros(values / 2));
    e.up_block_scales = a_.maybe(a_.zeros(values / 16));
    e.down_codes = a_.maybe(a_.zeros(values / 2));
    e.down_block_scales = a_.maybe(a_.zeros(values / 16));
    check(nvfp4_moe_layer_unpack_expert(layer_, which, a_.structure(e)));
  }

  void open_linear() {
    nvfp4_moe_linear_options o{};
    o.rows = a_.in(1, 40);
    o.cols = 16 * a_.in(1, 3);
    o.codes = a_.maybe(a_.bytes(o.rows * o.cols / 2));
    o.block_scales = a_.maybe(a_.block_scales(o.rows * o.cols / 16));
    const int64_t rows = o.rows;
    const int64_t cols = o.cols;
    if (a_.rarely(3)) (a_.pick(2) == 0 ? o.rows : o.cols) = -a_.in(0, 64);
    if (a_.rarely()) o.cols = cols - a_.in(1, 15);
    o.tensor_scale = a_.scale();
    o.input_scale = a_.scale();
    if (a_.rarely(3)) o.static_headroom = a_.number();
    o.activation_format = a_.enumerator(3);
    o.activation_scale = a_.enumerator(3);
    o.threads = 1;
    o.max_tokens = a_.rarely() ? -a_.in(0, 5) : kMaxTokens;
    o.backend = a_.rarely(2) ? a_.backend() : nullptr;
    o.parallel_for = a_.rarely(3) ? nullptr : lent_parallel_for;
    nvfp4_moe_linear* opened = nullptr;
    nvfp4_moe_linear** out = a_.maybe(&opened);
    const bool ok = check(nvfp4_moe_linear_open(a_.structure(o), out));
    if (out != nullptr) REQUIRE(ok == (opened != nullptr));
    if (opened == nullptr) return;
    nvfp4_moe_linear_close(linear_);
    linear_ = opened;
    linear_rows_ = rows;
    linear_cols_ = cols;
  }

  void run_linear() {
    if (linear_ == nullptr && !a_.rarely()) return open_linear();
    nvfp4_moe_linear_batch b{};
    b.tokens = a_.in(0, kMaxTokens + 1);
    b.x = a_.maybe(a_.bytes(b.tokens * linear_cols_ * 8));
    b.out = a_.maybe(a_.zeros(b.tokens * linear_rows_ * 8));
    b.x_dtype = a_.enumerator(4);
    b.out_dtype = a_.enumerator(4);
    if (a_.rarely()) b.tokens = -1;
    size_t size = 0;
    if (linear_ != nullptr)
      REQUIRE(check(nvfp4_moe_linear_workspace_bytes(
          linear_, std::clamp<int64_t>(b.tokens, 0, kMaxTokens), &size)));
    void* memory = std::aligned_alloc(256, (size + 511) / 256 * 256);
    char* workspace = static_cast<char*>(memory) + (a_.rarely() ? 1 : 0);
    check(nvfp4_moe_linear_run(linear_, a_.structure(b), a_.maybe(workspace),
                               a_.rarely() ? size / 2 : size, nullptr));
    char* json = nullptr;
    check_text(nvfp4_moe_linear_describe(linear_, &json), json);
    std::free(memory);
  }

  void quantize() {
    const int64_t rows = a_.in(0, 5);
    const int64_t cols = 16 * a_.in(0, 4);
    const int64_t said_rows = a_.rarely()    ? -a_.in(1, 9)
                              : a_.rarely(5) ? std::numeric_limits<int64_t>::max()
                                             : rows;
    const int64_t said_cols = a_.rarely()    ? -a_.in(1, 99)
                              : a_.rarely(5) ? a_.in(1, 15) + cols - 16
                                             : cols;
    const int32_t dtype = a_.enumerator(6);
    const void* x = a_.maybe(a_.bytes(rows * cols * 8));
    uint8_t* codes = a_.maybe(a_.zeros(rows * cols / 2));
    uint8_t* scales = a_.maybe(a_.zeros(rows * cols / 16));
    nvfp4_moe_quantize_counts* counts = a_.structure(nvfp4_moe_quantize_counts{});
    const int which = a_.pick(6);
    if (which == 0) {
      float tensor_scale = a_.pick(2) == 0 ? 0.0f : a_.scale();
      check(nvfp4_moe_quantize(x, dtype, said_rows, said_cols, a_.enumerator(2),
                               a_.maybe(&tensor_scale), codes, scales, counts));
    } else if (which == 1) {
      check(nvfp4_moe_quantize_dynamic_token(x, dtype, said_rows, said_cols, codes, scales,
                                             a_.maybe(a_.floats(rows)), counts));
    } else if (which == 2) {
      check(nvfp4_moe_quantize_static(x, dtype, said_rows, said_cols, a_.maybe(a_.floats(1)), codes,
                                      scales, counts));
    } else if (which == 3) {
      check(nvfp4_moe_quantize_compat(x, dtype, said_rows, said_cols, a_.scale(), codes, scales,
                                      counts));
    } else if (which == 4) {
      auto* int8_codes = reinterpret_cast<int8_t*>(a_.maybe(a_.zeros(rows * cols)));
      check(nvfp4_moe_quantize_int8_block(x, dtype, said_rows, said_cols, int8_codes,
                                          a_.maybe(a_.floats(rows * cols / 16)), counts));
    } else {
      check(nvfp4_moe_dequantize(codes, scales, a_.scale(), said_rows, said_cols, dtype,
                                 a_.maybe(a_.zeros(rows * cols * 8))));
    }
  }

  void convert() {
    const int64_t rows = a_.in(0, 150);
    const int64_t cols = a_.in(0, 9);
    const int64_t said = a_.rarely() ? -a_.in(1, 9) : rows;
    const int which = a_.pick(5);
    if (which == 0) {
      const int64_t bytes = nvfp4_moe_swizzled_bytes(rows, cols);
      REQUIRE(bytes >= rows * cols);
      check(nvfp4_moe_swizzle_scales(a_.maybe(a_.bytes(rows * cols)), said, cols,
                                     a_.maybe(a_.zeros(bytes))));
    } else if (which == 1) {
      const int64_t bytes = nvfp4_moe_swizzled_bytes(rows, cols);
      check(nvfp4_moe_unswizzle_scales(a_.maybe(a_.bytes(bytes)), said, cols,
                                       a_.maybe(a_.zeros(rows * cols))));
    } else if (which == 2) {
      check(nvfp4_moe_pack_codes(a_.maybe(a_.bytes(rows, a_.pick(2) == 0 ? 0x0F : 0x1F)), said,
                                 a_.maybe(a_.zeros(rows / 2))));
      check(nvfp4_moe_unpack_codes(a_.maybe(a_.bytes(rows / 2)), said, a_.maybe(a_.zeros(rows))));
    } else if (which == 3) {
      const int64_t k = 16 * cols;
      const int64_t block_rows = a_.rarely(2) ? a_.in(-1, 200) : 0;
      const int64_t block_cols = a_.rarely(2) ? a_.in(-1, 200) : 0;
      const int64_t count = nvfp4_moe_fp8_scale_count(rows, k, block_rows, block_cols);
      check(nvfp4_moe_convert_to_fp8(a_.maybe(a_.bytes(rows * k / 2)),
                                     a_.maybe(a_.block_scales(rows * k / 16)), a_.scale(), said, k,
                                     block_rows, block_cols, a_.maybe(a_.zeros(rows * k)),
                                     a_.maybe(a_.floats(std::max<int64_t>(count, 0)))));
    } else {  // only numbers go in
      const auto any = [&] { return a_.rarely(1) ? a_.bad_size() : a_.any_int64(); };
      const int64_t p = any();
      const int64_t q = any();
      REQUIRE(nvfp4_moe_swizzled_bytes(p, q) >= -1);
      REQUIRE(nvfp4_moe_fp8_scale_count(p, q, any(), any()) >= -1);
      REQUIRE(nvfp4_moe_status_name(static_cast<int32_t>(p))[0] != '\0');
    }
  }

  // Indices from -1 to count, one beyond the legal ones at either end, rarely anything; of 8 bytes
  // unless I32.
  uint8_t* indices(int64_t size, int64_t count, nvfp4_moe_dtype dtype) {
    uint8_t* memory = a_.zeros(size * 8);
    const int64_t first = a_.in(0, 200), step = a_.in(0, 9);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t index = a_.rarely(7) ? a_.any_int64() : (first + step * i) % (count + 2) - 1;
      const auto narrow = static_cast<int32_t>(index);
      if (dtype == NVFP4_MOE_DTYPE_I32)
        std::memcpy(memory + 4 * i, &narrow, 4);
      else
        std::memcpy(memory + 8 * i, &index, 8);
    }
    return memory;
  }

  void router_gemm() {
    nvfp4_moe_router_gemm_call c{};
    const int64_t tokens = a_.in(0, 3), experts = a_.in(1, 5), size = 8 * a_.in(1, 3);
    c.tokens = tokens;
    c.num_experts = experts;
    c.hidden_size = a_.rarely() ? size - a_.in(0, 30) : size;
    c.hidden_stride = a_.pick(2) == 0 ? 0 : 24 - (a_.rarely() ? a_.in(0, 40) : 0);
    c.logits_dtype = a_.enumerator(4);
    c.hidden = a_.maybe(a_.bytes(tokens * 24 * 2));
    c.weight = a_.maybe(a_.bytes(experts * size * 2));
    c.logits = a_.maybe(a_.zeros(tokens * experts * 4));
    if (a_.rarely()) c.tokens = a_.rarely(1) ? -1 : int64_t{1} << a_.in(31, 62);
    const nvfp4_moe_router_gemm_call* call = a_.structure(c);
    check(a_.rarely(5) ? nvfp4_moe_device_router_gemm(a_.device(), call, nullptr)
                       : nvfp4_moe_router_gemm(call));
  }

  void select_experts() {
    nvfp4_moe_router_config c{};
    c.num_experts = a_.in(1, 40);
    c.top_k = a_.in(1, std::min<int64_t>(c.num_experts, 8));
    if (a_.pick(2) == 0) {
      c.num_expert_group = a_.in(1, 4);
      c.num_experts *= c.num_expert_group;
      c.topk_group = a_.in(0, c.num_expert_group);
    }
    c.scoring = a_.enumerator(3);
    c.group_score = a_.enumerator(2);
    c.renormalize = a_.enumerator(2);
    if (a_.rarely(2)) c.renormalize_epsilon = a_.number();
    if (a_.rarely(2)) c.routed_scaling_factor = a_.number();
    c.correction_bias = a_.pick(2);
    c.hash_routing = a_.pick(3) == 0 ? 1 : 0;
    if (c.hash_routing == 1 && !a_.rarely(2))
      c.correction_bias = 0, c.num_expert_group = 0, c.scoring = 1;
    c.reserved = a_.rarely(6) ? 1 : 0;
    const nvfp4_moe_router_config* given = a_.structure(c);
    // The arrays fit the config that the library reads: fields that an older header's struct lacks
    // are zero.
    nvfp4_moe_router_config read{};
    size_t size = 0;
    if (given != nullptr) std::memcpy(&size, given, sizeof(size));
    std::memcpy(&read, &c, std::min(size, sizeof(c)));

    nvfp4_moe_router_batch b{};
    const int64_t tokens = a_.in(0, 4), experts = read.num_experts,
                  k = std::max<int64_t>(read.top_k, 0);
    b.tokens = tokens;
    b.logits_stride = a_.pick(2) == 0 ? 0 : experts + a_.in(0, 3);
    b.logits_dtype = a_.enumerator(4);
    b.logits = a_.maybe(a_.bytes(tokens * (experts + 3) * 8));
    if (read.correction_bias == 1 || a_.rarely()) b.correction_bias = a_.maybe(a_.floats(experts));
    b.vocab_size = a_.in(0, 6);
    b.token_ids_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : a_.enumerator(6);
    b.hash_table_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : a_.enumerator(6);
    if (read.hash_routing == 1 || a_.rarely()) {
      b.token_ids = a_.maybe(indices(tokens, b.vocab_size, b.token_ids_dtype));
      b.hash_table = a_.maybe(indices(b.vocab_size * k, experts, b.hash_table_dtype));
    }
    b.ids_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : a_.enumerator(6);
    uint8_t* ids = a_.zeros(tokens * k * 8);
    b.topk_ids = a_.maybe(ids);
    b.topk_weights = a_.maybe(reinterpret_cast<float*>(a_.zeros(tokens * k * 4)));
    uint64_t bad_ids = 0;
    b.bad_ids = a_.maybe(&bad_ids);
    if (a_.rarely()) b.tokens = a_.rarely(1) ? -1 : int64_t{1} << a_.in(31, 62);
    if (a_.rarely(5)) b.logits_stride = -a_.in(1, 9);
    const nvfp4_moe_router_batch* batch = a_.structure(b);
    const bool done =
        check(a_.rarely(5) ? nvfp4_moe_device_select_experts(a_.device(), given, batch, nullptr)
                           : nvfp4_moe_select_experts(given, batch));
    if (!done || batch == nullptr) return;
    nvfp4_moe_router_batch seen{};
    std::memcpy(&size, batch, sizeof(size));
    std::memcpy(&seen, &b, std::min(size, sizeof(b)));
    for (int64_t i = 0; i < seen.tokens * k; ++i) {
      int64_t id = 0;
      int32_t narrow = 0;
      std::memcpy(&narrow, ids + 4 * i, 4);
      std::memcpy(&id, ids + 8 * i, 8);
      if (seen.ids_dtype != NVFP4_MOE_DTYPE_I64) id = narrow;
      REQUIRE(id >= (read.hash_routing == 1 ? -1 : 0) && id < experts);
    }
  }

  void files() {
    static constexpr const char* kPaths[] = {
        nullptr, "", "/", "/dev/null", "/nonexistent", "\xFF\n", "/proc/self/mem"};
    const char* path = kPaths[a_.pick(static_cast<int>(std::size(kPaths)))];
    nvfp4_moe_checkpoint* checkpoint = nullptr;
    nvfp4_moe_checkpoint** out = a_.maybe(&checkpoint);
    REQUIRE(!check(nvfp4_moe_checkpoint_open(path, out)));
    nvfp4_moe_checkpoint_options reading{};
    reading.struct_size = sizeof(reading);
    reading.gate_up_order = kPaths[a_.pick(static_cast<int>(std::size(kPaths)))];
    reading.accept_tensors = a_.pick(2) == 0 ? nullptr : kPaths;
    reading.accept_count = static_cast<size_t>(a_.pick(static_cast<int>(std::size(kPaths)) + 1));
    REQUIRE(!check(nvfp4_moe_checkpoint_open_with(path, a_.structure(reading), out)));
    REQUIRE(checkpoint == nullptr);
    char* json = nullptr;
    check_text(nvfp4_moe_replay(path, a_.backend(), &json), json);
    json = nullptr;
    check_text(nvfp4_moe_checkpoint_info(nullptr, &json), json);
    check_text(nvfp4_moe_checkpoint_findings(nullptr, a_.any_int64(), &json), json);
    check(nvfp4_moe_checkpoint_config(nullptr, a_.any_int64(), a_.structure(nvfp4_moe_config{})));
    nvfp4_moe_layer* layer = nullptr;
    check(nvfp4_moe_layer_open_checkpoint(nullptr, a_.any_int64(), a_.structure(any_config()),
                                          a_.structure(small_options()), a_.maybe(&layer)));
    REQUIRE(layer == nullptr);
    nvfp4_moe_checkpoint_close(nullptr);
    nvfp4_moe_set_log_callback(nullptr, nullptr);
  }

  Arguments a_;
  nvfp4_moe_layer* layer_ = nullptr;
  nvfp4_moe_config config_{};  // of the layer
  nvfp4_moe_linear* linear_ = nullptr;
  int64_t linear_rows_ = 0;
  int64_t linear_cols_ = 0;
  int64_t cancel_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Session(data, size).play();
  return 0;
}
