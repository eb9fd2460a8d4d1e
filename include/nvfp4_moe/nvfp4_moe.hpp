// nvfp4-moe for C++20: a thin wrapper of the C interface. nvfp4_moe.h documents every function and
// field.
//
// Handles close themselves, failures are thrown as nvfp4_moe::Error, and texts are std::string.
// Structs are the C structs: nvfp4_moe::make<nvfp4_moe_config>() returns one with its size set and
// all other fields at their defaults.
// Long because it wraps every function of C.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nvfp4_moe/nvfp4_moe.h"

namespace nvfp4_moe {

class Error : public std::runtime_error {
 public:
  Error(nvfp4_moe_status status, const std::string& text)
      : std::runtime_error(text), status_(status) {}
  nvfp4_moe_status status() const noexcept { return status_; }

 private:
  nvfp4_moe_status status_;
};

inline void check(nvfp4_moe_status status) {
  if (status != NVFP4_MOE_STATUS_OK) throw Error(status, nvfp4_moe_last_error());
}

// A zeroed struct with its struct_size set.
template <class Struct>
Struct make() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

// Takes over a text of the C interface.
template <class Function, class... Arguments>
std::string text_of(Function&& function, Arguments&&... arguments) {
  char* text = nullptr;
  const nvfp4_moe_status status = function(std::forward<Arguments>(arguments)..., &text);
  const std::unique_ptr<char, void (*)(char*)> owned(text, nvfp4_moe_text_free);
  check(status);
  return text;
}

inline std::string version() { return nvfp4_moe_version(); }
inline std::int32_t abi_version() noexcept { return nvfp4_moe_abi_version(); }
inline std::string status_name(nvfp4_moe_status status) { return nvfp4_moe_status_name(status); }
inline void set_log_callback(nvfp4_moe_log_fn callback, void* user = nullptr) {
  nvfp4_moe_set_log_callback(callback, user);
}
inline std::string explain(const nvfp4_moe_config& config, const char* backend = nullptr) {
  return text_of(nvfp4_moe_explain, &config, backend);
}

// Workspace memory: aligned to 256 bytes, at least one byte.
class Workspace {
 public:
  explicit Workspace(std::size_t size_bytes)
      : size_bytes_(size_bytes), data_(::operator new (size_bytes + 1, std::align_val_t{256})) {}
  void* data() const noexcept { return data_.get(); }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  struct Free {
    void operator()(void* data) const noexcept { ::operator delete (data, std::align_val_t{256}); }
  };
  std::size_t size_bytes_;
  std::unique_ptr<void, Free> data_;
};

// The needs of a layer, computed without its weights.
struct Plan {
  std::string text;  // the plan, to be read by people
  std::size_t workspace_bytes = 0, packed_bytes = 0;
};
inline Plan plan(const nvfp4_moe_config& config, const nvfp4_moe_layer_options& options,
                 float hidden_scale = 0, float intermediate_scale = 0) {
  Plan plan;
  const auto call = [&](char** text) {
    return nvfp4_moe_plan(&config, &options, hidden_scale, intermediate_scale, text,
                          &plan.workspace_bytes, &plan.packed_bytes);
  };
  plan.text = text_of(call);
  return plan;
}
// Runs a repro file and returns the JSON report. Throws with status CHECK_FAILED if a limit is
// exceeded.
inline std::string replay(const std::string& path, const char* backend = nullptr) {
  return text_of(nvfp4_moe_replay, path.c_str(), backend);
}

class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path) {
    nvfp4_moe_checkpoint* handle = nullptr;
    check(nvfp4_moe_checkpoint_open(path.c_str(), &handle));
    handle_.reset(handle);
  }
  Checkpoint(const std::string& path, const nvfp4_moe_checkpoint_options& options) {
    nvfp4_moe_checkpoint* handle = nullptr;
    check(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &handle));
    handle_.reset(handle);
  }
  std::string info() const { return text_of(nvfp4_moe_checkpoint_info, handle_.get()); }
  std::string findings(std::int64_t layer = -1) const {
    return text_of(nvfp4_moe_checkpoint_findings, handle_.get(), layer);
  }
  nvfp4_moe_config config(std::int64_t layer) const {
    auto config = make<nvfp4_moe_config>();
    check(nvfp4_moe_checkpoint_config(handle_.get(), layer, &config));
    return config;
  }
  const nvfp4_moe_checkpoint* get() const noexcept { return handle_.get(); }

 private:
  struct Close {
    void operator()(nvfp4_moe_checkpoint* handle) const noexcept {
      nvfp4_moe_checkpoint_close(handle);
    }
  };
  std::unique_ptr<nvfp4_moe_checkpoint, Close> handle_;
};

// Connection of one rank to the other ranks. Layers opened over it may outlive it.
class Exchange {
 public:
  Exchange(const nvfp4_moe_exchange_callbacks& callbacks, int rank, int world,
           std::int64_t timeout_ms = 0) {
    nvfp4_moe_exchange* handle = nullptr;
    check(nvfp4_moe_exchange_connect(&callbacks, rank, world, timeout_ms, &handle));
    handle_.reset(handle);
  }
  // Waits for all ranks of the group, each on a thread of its own.
  Exchange(nvfp4_moe_thread_group* group, int rank, int world, std::int64_t timeout_ms = 0) {
    nvfp4_moe_exchange* handle = nullptr;
    check(nvfp4_moe_thread_group_join(group, rank, world, timeout_ms, &handle));
    handle_.reset(handle);
  }
  void use_nccl(const char* device, const char* library = nullptr, void* communicator = nullptr) {
    check(nvfp4_moe_exchange_use_nccl(handle_.get(), device, library, communicator));
  }
  void use_peers(const char* device) { check(nvfp4_moe_exchange_use_peers(handle_.get(), device)); }
  nvfp4_moe_exchange* get() const noexcept { return handle_.get(); }

 private:
  struct Close {
    void operator()(nvfp4_moe_exchange* handle) const noexcept { nvfp4_moe_exchange_close(handle); }
  };
  std::unique_ptr<nvfp4_moe_exchange, Close> handle_;
};

// A group that connects ranks that are threads of this process.
class ThreadGroup {
 public:
  explicit ThreadGroup(int world) {
    nvfp4_moe_thread_group* handle = nullptr;
    check(nvfp4_moe_thread_group_create(world, &handle));
    handle_.reset(handle);
  }
  nvfp4_moe_thread_group* get() const noexcept { return handle_.get(); }

 private:
  struct Close {
    void operator()(nvfp4_moe_thread_group* handle) const noexcept {
      nvfp4_moe_thread_group_close(handle);
    }
  };
  std::unique_ptr<nvfp4_moe_thread_group, Close> handle_;
};

// Proposes a placement that balances the load over the ranks: the expert of each slot.
inline std::vector<std::int64_t> propose_placement(const std::vector<std::uint64_t>& load,
                                                   int world, std::int64_t slots_per_rank) {
  std::vector<std::int64_t> expert_of_slot(world > 0 && slots_per_rank > 0
                                               ? static_cast<std::size_t>(world) *
                                                     static_cast<std::size_t>(slots_per_rank)
                                               : 1);
  check(nvfp4_moe_propose_placement(load.data(), static_cast<std::int64_t>(load.size()), world,
                                    slots_per_rank, expert_of_slot.data()));
  return expert_of_slot;
}

class Layer {
 public:
  // config null: the checkpoint's config.
  Layer(const Checkpoint& checkpoint, std::int64_t layer, const nvfp4_moe_layer_options& options,
        const nvfp4_moe_config* config = nullptr) {
    nvfp4_moe_layer* handle = nullptr;
    check(nvfp4_moe_layer_open_checkpoint(checkpoint.get(), layer, config, &options, &handle));
    handle_.reset(handle);
  }
  Layer(const nvfp4_moe_config& config, const nvfp4_moe_layer_tensors& tensors,
        const nvfp4_moe_layer_options& options) {
    nvfp4_moe_layer* handle = nullptr;
    check(nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &handle));
    handle_.reset(handle);
  }

  std::string describe() const { return text_of(nvfp4_moe_layer_describe, get()); }
  std::string describe_run(std::int64_t tokens) const {
    return text_of(nvfp4_moe_layer_describe_run, get(), tokens);
  }
  // The smallest workspace for a run of that many tokens. More tokens never need less.
  std::size_t workspace_bytes(std::int64_t tokens) const {
    std::size_t bytes = 0;
    check(nvfp4_moe_layer_workspace_bytes(get(), tokens, &bytes));
    return bytes;
  }
  void run(const nvfp4_moe_batch& batch, const Workspace& workspace, void* stream = nullptr) const {
    check(nvfp4_moe_layer_run(get(), &batch, workspace.data(), workspace.size_bytes(), stream));
  }
  // Selects the experts from logits, then runs, in one call.
  void run_logits(const nvfp4_moe_router_config& router, const nvfp4_moe_router_batch& routing,
                  const nvfp4_moe_batch& batch, const Workspace& workspace,
                  void* stream = nullptr) const {
    check(nvfp4_moe_layer_run_logits(get(), &router, &routing, &batch, workspace.data(),
                                     workspace.size_bytes(), stream));
  }
  nvfp4_moe_run_status status(const Workspace& workspace) const {
    auto status = make<nvfp4_moe_run_status>();
    check(nvfp4_moe_layer_run_status(get(), workspace.data(), workspace.size_bytes(), &status));
    return status;
  }
  void replace_expert(std::int64_t local_expert, const nvfp4_moe_expert& expert) {
    check(nvfp4_moe_layer_replace_expert(handle_.get(), local_expert, &expert));
  }
  void replace_expert_on_stream(std::int64_t local_expert, const nvfp4_moe_expert& expert,
                                void* stream) {
    check(nvfp4_moe_layer_replace_expert_on_stream(handle_.get(), local_expert, &expert, stream));
  }
  void unpack_expert(std::int64_t local_expert, nvfp4_moe_expert_out& expert) const {
    check(nvfp4_moe_layer_unpack_expert(get(), local_expert, &expert));
  }
  void write_repro(const nvfp4_moe_batch& batch, const std::string& path,
                   bool with_output = true) const {
    check(nvfp4_moe_layer_write_repro(get(), &batch, with_output ? 1 : 0, path.c_str()));
  }
  // Over an exchange only: the assignments of each expert on all ranks.
  std::vector<std::uint64_t> expert_load(std::int64_t num_experts) const {
    std::vector<std::uint64_t> load(static_cast<std::size_t>(num_experts));
    check(nvfp4_moe_layer_expert_load(get(), load.data(), num_experts));
    return load;
  }
  void reset_expert_load() const { check(nvfp4_moe_layer_reset_expert_load(get())); }
  void rearrange(const std::vector<std::int64_t>& expert_of_slot, const Checkpoint& checkpoint,
                 std::int64_t layer) {
    check(nvfp4_moe_layer_rearrange(handle_.get(), expert_of_slot.data(),
                                    static_cast<std::int64_t>(expert_of_slot.size()),
                                    checkpoint.get(), layer));
  }
  void rearrange(const std::vector<std::int64_t>& expert_of_slot,
                 const nvfp4_moe_layer_tensors& tensors) {
    check(nvfp4_moe_layer_rearrange_tensors(handle_.get(), expert_of_slot.data(),
                                            static_cast<std::int64_t>(expert_of_slot.size()),
                                            &tensors));
  }
  const nvfp4_moe_layer* get() const noexcept { return handle_.get(); }

 private:
  struct Close {
    void operator()(nvfp4_moe_layer* handle) const noexcept { nvfp4_moe_layer_close(handle); }
  };
  std::unique_ptr<nvfp4_moe_layer, Close> handle_;
};

class Linear {
 public:
  explicit Linear(const nvfp4_moe_linear_options& options) {
    nvfp4_moe_linear* handle = nullptr;
    check(nvfp4_moe_linear_open(&options, &handle));
    handle_.reset(handle);
  }
  std::string describe() const { return text_of(nvfp4_moe_linear_describe, get()); }
  // The smallest workspace for a run of that many tokens. More tokens never need less.
  std::size_t workspace_bytes(std::int64_t tokens) const {
    std::size_t bytes = 0;
    check(nvfp4_moe_linear_workspace_bytes(get(), tokens, &bytes));
    return bytes;
  }
  void run(const nvfp4_moe_linear_batch& batch, const Workspace& workspace,
           void* stream = nullptr) const {
    check(nvfp4_moe_linear_run(get(), &batch, workspace.data(), workspace.size_bytes(), stream));
  }
  const nvfp4_moe_linear* get() const noexcept { return handle_.get(); }

 private:
  struct Close {
    void operator()(nvfp4_moe_linear* handle) const noexcept { nvfp4_moe_linear_close(handle); }
  };
  std::unique_ptr<nvfp4_moe_linear, Close> handle_;
};

// ---- format, on the host and on a GPU; counts may be null

inline void quantize(const void* x, nvfp4_moe_dtype dtype, std::int64_t rows, std::int64_t cols,
                     nvfp4_moe_search search, float& tensor_scale, std::uint8_t* codes,
                     std::uint8_t* block_scales, nvfp4_moe_quantize_counts* counts = nullptr) {
  check(
      nvfp4_moe_quantize(x, dtype, rows, cols, search, &tensor_scale, codes, block_scales, counts));
}
inline void quantize_dynamic_token(const void* x, nvfp4_moe_dtype dtype, std::int64_t rows,
                                   std::int64_t cols, std::uint8_t* codes,
                                   std::uint8_t* block_scales, float* row_scales,
                                   nvfp4_moe_quantize_counts* counts = nullptr) {
  check(nvfp4_moe_quantize_dynamic_token(x, dtype, rows, cols, codes, block_scales, row_scales,
                                         counts));
}
inline void quantize_static(const void* x, nvfp4_moe_dtype dtype, std::int64_t rows,
                            std::int64_t cols, float& tensor_scale, std::uint8_t* codes,
                            std::uint8_t* block_scales,
                            nvfp4_moe_quantize_counts* counts = nullptr) {
  check(
      nvfp4_moe_quantize_static(x, dtype, rows, cols, &tensor_scale, codes, block_scales, counts));
}
inline void quantize_vllm_order(const void* x, nvfp4_moe_dtype dtype, std::int64_t rows,
                                std::int64_t cols, float tensor_scale, std::uint8_t* codes,
                                std::uint8_t* block_scales,
                                nvfp4_moe_quantize_counts* counts = nullptr) {
  check(nvfp4_moe_quantize_vllm_order(x, dtype, rows, cols, tensor_scale, codes, block_scales,
                                      counts));
}
inline void quantize_int8_block(const void* x, nvfp4_moe_dtype dtype, std::int64_t rows,
                                std::int64_t cols, std::int8_t* codes, float* block_scales,
                                nvfp4_moe_quantize_counts* counts = nullptr) {
  check(nvfp4_moe_quantize_int8_block(x, dtype, rows, cols, codes, block_scales, counts));
}
inline void swiglu_quantize(const nvfp4_moe_swiglu& options, const void* gate_up, std::int64_t rows,
                            std::int64_t inner, const float* row_weights, std::uint8_t* codes,
                            std::uint8_t* block_scales, float* row_scales,
                            nvfp4_moe_quantize_counts* counts = nullptr) {
  check(nvfp4_moe_swiglu_quantize(&options, gate_up, rows, inner, row_weights, codes, block_scales,
                                  row_scales, counts));
}
inline void dequantize(const std::uint8_t* codes, const std::uint8_t* block_scales,
                       float tensor_scale, std::int64_t rows, std::int64_t cols,
                       nvfp4_moe_dtype out_dtype, void* out) {
  check(nvfp4_moe_dequantize(codes, block_scales, tensor_scale, rows, cols, out_dtype, out));
}
inline void convert_to_fp8(const std::uint8_t* codes, const std::uint8_t* block_scales,
                           float tensor_scale, std::int64_t rows, std::int64_t cols,
                           std::int64_t block_rows, std::int64_t block_cols, std::uint8_t* out,
                           float* scales) {
  check(nvfp4_moe_convert_to_fp8(codes, block_scales, tensor_scale, rows, cols, block_rows,
                                 block_cols, out, scales));
}
inline std::int64_t fp8_scale_count(std::int64_t rows, std::int64_t cols, std::int64_t block_rows,
                                    std::int64_t block_cols) noexcept {
  return nvfp4_moe_fp8_scale_count(rows, cols, block_rows, block_cols);
}
inline void pack_codes(const std::uint8_t* values, std::int64_t count, std::uint8_t* packed) {
  check(nvfp4_moe_pack_codes(values, count, packed));
}
inline void unpack_codes(const std::uint8_t* packed, std::int64_t count, std::uint8_t* values) {
  check(nvfp4_moe_unpack_codes(packed, count, values));
}
inline std::int64_t swizzled_bytes(std::int64_t rows, std::int64_t scale_cols) noexcept {
  return nvfp4_moe_swizzled_bytes(rows, scale_cols);
}
inline void swizzle_scales(const std::uint8_t* linear, std::int64_t rows, std::int64_t scale_cols,
                           std::uint8_t* swizzled) {
  check(nvfp4_moe_swizzle_scales(linear, rows, scale_cols, swizzled));
}
inline void unswizzle_scales(const std::uint8_t* swizzled, std::int64_t rows,
                             std::int64_t scale_cols, std::uint8_t* linear) {
  check(nvfp4_moe_unswizzle_scales(swizzled, rows, scale_cols, linear));
}
inline void device_quantize(const std::string& device, nvfp4_moe_quantize_mode mode,
                            nvfp4_moe_search search, const void* x, nvfp4_moe_dtype dtype,
                            std::int64_t rows, std::int64_t cols, float tensor_scale,
                            std::uint8_t* codes, std::uint8_t* block_scales, float* scales,
                            void* stream = nullptr) {
  check(nvfp4_moe_device_quantize(device.c_str(), mode, search, x, dtype, rows, cols, tensor_scale,
                                  codes, block_scales, scales, stream));
}
inline void device_dequantize(const std::string& device, const std::uint8_t* codes,
                              const std::uint8_t* block_scales, const float* scales,
                              bool scale_of_row, std::int64_t rows, std::int64_t cols,
                              nvfp4_moe_dtype out_dtype, void* out, void* stream = nullptr) {
  check(nvfp4_moe_device_dequantize(device.c_str(), codes, block_scales, scales,
                                    scale_of_row ? 1 : 0, rows, cols, out_dtype, out, stream));
}
inline void device_swiglu_quantize(const std::string& device, const nvfp4_moe_swiglu& options,
                                   const void* gate_up, std::int64_t rows, std::int64_t inner,
                                   const float* row_weights, std::uint8_t* codes,
                                   std::uint8_t* block_scales, float* row_scales,
                                   void* stream = nullptr) {
  check(nvfp4_moe_device_swiglu_quantize(device.c_str(), &options, gate_up, rows, inner,
                                         row_weights, codes, block_scales, row_scales, stream));
}
inline void device_swizzle_scales(const std::string& device, const std::uint8_t* linear,
                                  std::int64_t matrices, std::int64_t rows, std::int64_t scale_cols,
                                  std::uint8_t* swizzled, void* stream = nullptr) {
  check(nvfp4_moe_device_swizzle_scales(device.c_str(), linear, matrices, rows, scale_cols,
                                        swizzled, stream));
}
inline void device_unswizzle_scales(const std::string& device, const std::uint8_t* swizzled,
                                    std::int64_t matrices, std::int64_t rows,
                                    std::int64_t scale_cols, std::uint8_t* linear,
                                    void* stream = nullptr) {
  check(nvfp4_moe_device_unswizzle_scales(device.c_str(), swizzled, matrices, rows, scale_cols,
                                          linear, stream));
}

// ---- router, on the host and on a GPU

inline void router_gemm(const nvfp4_moe_router_gemm_call& call) {
  check(nvfp4_moe_router_gemm(&call));
}
inline void device_router_gemm(const std::string& device, const nvfp4_moe_router_gemm_call& call,
                               void* stream = nullptr) {
  check(nvfp4_moe_device_router_gemm(device.c_str(), &call, stream));
}
inline void select_experts(const nvfp4_moe_router_config& config,
                           const nvfp4_moe_router_batch& batch) {
  check(nvfp4_moe_select_experts(&config, &batch));
}
inline void device_select_experts(const std::string& device, const nvfp4_moe_router_config& config,
                                  const nvfp4_moe_router_batch& batch, void* stream = nullptr) {
  check(nvfp4_moe_device_select_experts(device.c_str(), &config, &batch, stream));
}

}  // namespace nvfp4_moe
