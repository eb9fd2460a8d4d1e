/* The header is C: this file is compiled as C11 with every warning, linked to the shared library
 * and run. It plans a layer and reads an error. */
#include <nvfp4_moe/nvfp4_moe.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  nvfp4_moe_config config = {.struct_size = sizeof config,
                             .num_experts = 1,
                             .top_k = 1,
                             .hidden_size = 32,
                             .intermediate_size = 16,
                             .activation_format = NVFP4_MOE_FORMAT_BF16};
  nvfp4_moe_layer_options options = {.struct_size = sizeof options, .max_tokens = 1, .threads = 1};
  char* text = NULL;
  size_t workspace_bytes = 0;
  if (nvfp4_moe_plan(&config, &options, 0, 0, &text, &workspace_bytes, NULL) !=
          NVFP4_MOE_STATUS_OK ||
      strstr(text, "gemm1_swiglu") == NULL || workspace_bytes == 0) {
    fprintf(stderr, "plan: %s\n", nvfp4_moe_last_error());
    return 1;
  }
  nvfp4_moe_text_free(text);
  if (nvfp4_moe_layer_run(NULL, NULL, NULL, 0, NULL) != NVFP4_MOE_STATUS_INVALID_ARGUMENT) return 1;
  printf("%s: %s\n", nvfp4_moe_version(), nvfp4_moe_last_error());
  return 0;
}
