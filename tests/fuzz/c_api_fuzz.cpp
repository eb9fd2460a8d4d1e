// The C interface with arguments of every kind: struct sizes, null pointers, enums, sizes, ids and
// dtypes out of range.
//
// One input is a list of calls on at most one layer and one linear. Arrays have the sizes that are
// passed with them, or the sizes are impossible: the library cannot detect a caller that passes
// wrong sizes of its memory. Checks that nothing crashes or leaks, that codes are known ones, and
// that every failure has a one-line text and leaves no handle open.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "fuzz/c_api_values.h"

using namespace nvfp4_moe::internal::fuzz;  // NOLINT: a target is one file

namespace {

constexpr int64_t kMaxTokens = 5;

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
    using Call = void (Session::*)();
    static constexpr Call kCalls[] = {
        &Session::explain,     &Session::plan,          &Session::open_layer, &Session::run_layer,
        &Session::run_layer,   &Session::layer_queries, &Session::replace,    &Session::unpack,
        &Session::open_linear, &Session::run_linear,    &Session::values,     &Session::values,
        &Session::values,      &Session::values,        &Session::files};
    for (int calls = 0; calls < 24 && a_.more(); ++calls)
      (this->*kCalls[a_.pick(std::size(kCalls))])();
  }

 private:
  nvfp4_moe_config small_config() {
    nvfp4_moe_config c{};
    c.num_experts = a_.in(1, 4);
    c.top_k = a_.in(1, 3);
    c.hidden_size = 16 * a_.in(1, 3);
    c.intermediate_size = 16 * a_.in(1, 3);
    c.shared_intermediate_size = a_.pick(4) == 0 ? 16 * a_.in(1, 2) : 0;
    c.activation = a_.enumerator(8);
    const bool limited =
        c.activation > NVFP4_MOE_ACTIVATION_SWIGLU && c.activation < NVFP4_MOE_ACTIVATION_RELU2;
    c.swiglu_limit = limited ? 7.0f : 0.0f;
    if (c.activation == NVFP4_MOE_ACTIVATION_SITU)
      c.situ_gate_limit = 4.0f, c.situ_up_limit = a_.rarely(3) ? a_.number() : 25.0f;
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
    check_json(
        [&](char** out) { return nvfp4_moe_explain(a_.structure(config), a_.backend(), out); });
  }

  void plan() {
    const nvfp4_moe_config config = any_config();
    nvfp4_moe_layer_options options = small_options();
    if (a_.rarely(2)) options.max_tokens = a_.any_int64() >> a_.pick(56);
    size_t workspace = 0, packed = 0;
    check_json([&](char** out) {
      return nvfp4_moe_plan(a_.structure(config), a_.structure(options), a_.scale(), a_.scale(),
                            out, a_.maybe(&workspace), a_.maybe(&packed));
    });
  }

  // A call that returns text, mostly.
  template <class Call>
  void check_json(Call&& call) {
    char* text = nullptr;
    char** out = a_.maybe(&text);
    const nvfp4_moe_status code = call(out);
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
    nvfp4_moe_expert e{};
    a_.give_weights(e, inner * config.hidden_size, gives_gate(config));
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
    const bool gate = gives_gate(config);
    a_.give_weights(t, experts * values * stride_factor, gate);
    if (gate) t.gate_tensor_scales = a_.maybe(a_.floats(experts));
    t.up_tensor_scales = a_.maybe(a_.floats(experts));
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
    const bool ok =
        check(nvfp4_moe_layer_open_tensors(given, a_.structure(t), a_.structure(options), out));
    if (out != nullptr) REQUIRE(ok == (opened != nullptr));
    if (opened == nullptr) return;
    nvfp4_moe_layer_close(layer_);
    layer_ = opened;
    config_ = Arguments::as_read(given, config);
  }

  // Memory of a run: rarely misaligned, missing, or said to be smaller than it is.
  struct Workspace {
    Workspace(Arguments& a, size_t size)
        : memory(std::aligned_alloc(256, (size + 511) / 256 * 256)), given(size) {
      std::memset(memory, 0xA5, size);
      at = static_cast<char*>(memory) + (a.rarely() ? a.in(1, 255) : 0);
      if (a.rarely(5)) at = nullptr;
      if (a.rarely()) given = static_cast<size_t>(a.in(0, static_cast<int64_t>(size)));
    }
    ~Workspace() { std::free(memory); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    void* memory;
    char* at = nullptr;
    size_t given;
  };

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
    b.topk_ids = a_.maybe(a_.indices(ids, b.ids_dtype != NVFP4_MOE_DTYPE_I64, [&](int64_t) {
      return a_.rarely(3) ? a_.any_int64() : a_.in(-1, config_.num_experts);
    }));
    b.topk_weights = a_.maybe(a_.floats(ids));
    b.shared_weights = a_.pick(2) == 0 ? nullptr : a_.floats(tokens);
    b.out = a_.maybe(a_.zeros(tokens * config_.hidden_size * 8));
    b.reserved = a_.rarely(6) ? 1 : 0;
    if (a_.rarely()) b.tokens = a_.rarely(1) ? -1 : a_.in(kMaxTokens + 1, int64_t{1} << 60);
    const nvfp4_moe_batch* batch = a_.structure(b);
    // The size for these tokens, or for the layer's most tokens if it was opened with a smaller
    // limit.
    size_t size = 0;
    int64_t most = std::min(tokens, kMaxTokens);
    while (layer_ != nullptr && !check(nvfp4_moe_layer_workspace_bytes(layer_, most, &size)))
      REQUIRE(most-- > 0);
    const Workspace workspace(a_, size);
    void* const stream = a_.rarely(5) ? &cancel_ : nullptr;
    if (!check(nvfp4_moe_layer_run(layer_, batch, workspace.at, workspace.given, stream))) return;
    check(nvfp4_moe_layer_run_status(layer_, workspace.at, workspace.given,
                                     a_.structure(nvfp4_moe_run_status{})));
    if (a_.rarely())
      check(nvfp4_moe_layer_write_repro(layer_, batch, a_.pick(2), "/nonexistent/x.safetensors"));
  }

  void layer_queries() {
    check_json([&](char** out) { return nvfp4_moe_layer_describe(layer_, out); });
    check_json([&](char** out) {
      return nvfp4_moe_layer_describe_run(layer_, a_.in(-1, kMaxTokens + 1), out);
    });
    size_t bytes = 0;
    check(nvfp4_moe_layer_workspace_bytes(layer_, a_.in(-1, kMaxTokens + 1), a_.maybe(&bytes)));
    check(nvfp4_moe_layer_run_status(layer_, nullptr, 0, a_.structure(nvfp4_moe_run_status{})));
    if (!a_.rarely(3)) return;
    nvfp4_moe_layer_close(layer_);
    layer_ = nullptr;
  }

  int64_t local_expert() { return a_.rarely(2) ? a_.bad_size() : a_.in(-1, config_.num_experts); }
  int64_t inner_of(int64_t expert) const {
    return expert == NVFP4_MOE_SHARED_EXPERT ? config_.shared_intermediate_size
                                             : config_.intermediate_size;
  }

  void replace() {
    if (layer_ == nullptr && !a_.rarely()) return;
    const int64_t which = local_expert();
    const nvfp4_moe_expert* given = a_.structure(expert(config_, inner_of(which)));
    check(a_.rarely() ? nvfp4_moe_layer_replace_expert_on_stream(layer_, which, given, nullptr)
                      : nvfp4_moe_layer_replace_expert(layer_, which, given));
  }

  void unpack() {
    if (layer_ == nullptr && !a_.rarely()) return;
    const int64_t which = local_expert();
    nvfp4_moe_expert_out e{};
    a_.give_weights(e, config_.hidden_size * inner_of(which));
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
    const int64_t most = std::clamp<int64_t>(b.tokens, 0, kMaxTokens);
    if (linear_ != nullptr) REQUIRE(check(nvfp4_moe_linear_workspace_bytes(linear_, most, &size)));
    const Workspace workspace(a_, size);
    check(nvfp4_moe_linear_run(linear_, a_.structure(b), workspace.at, workspace.given, nullptr));
    check_json([&](char** out) { return nvfp4_moe_linear_describe(linear_, out); });
  }

  void values() { Values(a_).play(); }

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
    reading.family = kPaths[a_.pick(static_cast<int>(std::size(kPaths)))];
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
