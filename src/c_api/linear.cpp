// The C interface: dense linears.
#include "moe/linear.h"

#include <cmath>

#include "c_api/common.h"
#include "moe/batch_check.h"

struct nvfp4_moe_linear {
  std::unique_ptr<nvfp4_moe::internal::Executor> executor;  // null: the linear's own
  std::unique_ptr<nvfp4_moe::internal::NvfpLinear> linear;  // destroyed before the executor
};

using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace moe = nvfp4_moe::internal;

extern "C" {

nvfp4_moe_status nvfp4_moe_linear_open(const nvfp4_moe_linear_options* options,
                                       nvfp4_moe_linear** out) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("out", out));
    *out = nullptr;
    NVFP4_MOE_ASSIGN(const nvfp4_moe_linear_options given, api::read_struct("options", options));
    moe::LinearOptions linear;
    linear.backend = api::backend_name(given.backend);
    if (given.device != nullptr) linear.device = given.device;
    NVFP4_MOE_ASSIGN(
        linear.activation_format,
        api::read_enum("activation_format", given.activation_format, moe::ActivationFormat::kFp8));
    NVFP4_MOE_ASSIGN(linear.activation_scale,
                     api::read_enum("activation_scale", given.activation_scale,
                                    moe::ActivationScale::kVllmOrder));
    linear.input_scale = given.input_scale;
    if (given.static_headroom != 0.0f) linear.static_headroom = given.static_headroom;
    linear.max_tokens = given.max_tokens;
    auto handle = std::make_unique<nvfp4_moe_linear>();
    NVFP4_MOE_ASSIGN(handle->executor, api::make_executor(given.parallel_for,
                                                          given.parallel_for_user, given.threads));
    linear.executor = handle->executor.get();
    const auto view = moe::Nvfp4View::contiguous(given.codes, given.block_scales,
                                                 given.tensor_scale, given.rows, given.cols);
    NVFP4_MOE_ASSIGN(handle->linear, moe::NvfpLinear::open(view, linear));
    *out = handle.release();
    return {};
  });
}

void nvfp4_moe_linear_close(nvfp4_moe_linear* linear) { delete linear; }

nvfp4_moe_status nvfp4_moe_linear_describe(const nvfp4_moe_linear* linear, char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    return api::write_text(linear->linear->describe_json(), json);
  });
}

nvfp4_moe_status nvfp4_moe_linear_workspace_bytes(const nvfp4_moe_linear* linear, int64_t tokens,
                                                  size_t* bytes) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    NVFP4_MOE_TRY(api::check_pointer("bytes", bytes));
    NVFP4_MOE_TRY(moe::check_tokens(tokens, linear->linear->max_tokens()));
    *bytes = linear->linear->workspace_bytes(tokens);
    return {};
  });
}

nvfp4_moe_status nvfp4_moe_linear_run(const nvfp4_moe_linear* linear,
                                      const nvfp4_moe_linear_batch* batch, void* workspace,
                                      size_t workspace_bytes, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    NVFP4_MOE_ASSIGN(const nvfp4_moe_linear_batch given, api::read_struct("batch", batch));
    moe::LinearBatch checked;
    checked.tokens = given.tokens;
    checked.x = given.x;
    NVFP4_MOE_ASSIGN(checked.x_dtype, api::read_dtype("x_dtype", given.x_dtype, moe::DType::kBf16));
    checked.out = given.out;
    NVFP4_MOE_ASSIGN(checked.out_dtype,
                     api::read_dtype("out_dtype", given.out_dtype, checked.x_dtype));
    return linear->linear->run(checked, workspace, workspace_bytes, stream);
  });
}

}  // extern "C"
