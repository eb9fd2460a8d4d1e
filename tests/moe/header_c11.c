/* The header is C: this file is compiled as C11 with every warning, linked to the shared library
 * and run. */
#include <nvfp4_moe/nvfp4_moe.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  /* A layer of one expert, hidden 32, intermediate 16, all weights 1 x 1 x 1/64. */
  static uint8_t codes[32 * 16 / 2], scales[32 * 16 / 16];
  static const float tensor_scale = 1.0f / 64;
  memset(codes, 0x22, sizeof codes);
  memset(scales, 0x38, sizeof scales);
  nvfp4_moe_config config = {.struct_size = sizeof config,
                             .num_experts = 1,
                             .top_k = 1,
                             .hidden_size = 32,
                             .intermediate_size = 16,
                             .activation_format = NVFP4_MOE_FORMAT_BF16};
  nvfp4_moe_layer_tensors tensors = {.struct_size = sizeof tensors,
                                     .gate_codes = codes,
                                     .gate_block_scales = scales,
                                     .gate_tensor_scales = &tensor_scale,
                                     .up_codes = codes,
                                     .up_block_scales = scales,
                                     .up_tensor_scales = &tensor_scale,
                                     .down_codes = codes,
                                     .down_block_scales = scales,
                                     .down_tensor_scales = &tensor_scale};
  nvfp4_moe_layer_options options = {.struct_size = sizeof options, .max_tokens = 1, .threads = 1};
  nvfp4_moe_layer* layer = NULL;
  if (nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer) != NVFP4_MOE_STATUS_OK) {
    fprintf(stderr, "open: %s\n", nvfp4_moe_last_error());
    return 1;
  }
  static _Alignas(256) unsigned char workspace[1 << 16];
  float hidden[32], out[32];
  for (int i = 0; i < 32; ++i) hidden[i] = 2.0f;
  const int32_t ids[1] = {0};
  const float weights[1] = {1.0f};
  nvfp4_moe_batch batch = {.struct_size = sizeof batch,
                           .tokens = 1,
                           .hidden = hidden,
                           .topk_ids = ids,
                           .topk_weights = weights,
                           .out = out,
                           .hidden_dtype = NVFP4_MOE_DTYPE_F32};
  if (nvfp4_moe_layer_run(layer, &batch, workspace, sizeof workspace, NULL) !=
      NVFP4_MOE_STATUS_OK) {
    fprintf(stderr, "run: %s\n", nvfp4_moe_last_error());
    return 1;
  }
  nvfp4_moe_layer_close(layer);
  /* gate = up = 32 * 2 / 64 = 1; silu(1) = 0.7311, in bf16 0.73046875; down: 16 * 0.73046875 / 64 =
   * 0.182617 */
  for (int i = 0; i < 32; ++i) {
    if (out[i] < 0.1826f || out[i] > 0.1827f) {
      fprintf(stderr, "out[%d]: expected 0.182617, got %g\n", i, (double)out[i]);
      return 1;
    }
  }
  if (nvfp4_moe_layer_run(NULL, &batch, workspace, sizeof workspace, NULL) !=
      NVFP4_MOE_STATUS_INVALID_ARGUMENT)
    return 1;
  printf("%s: %s\n", nvfp4_moe_version(), nvfp4_moe_last_error());
  return 0;
}
