/* The same in C: loads a checkpoint's layer, runs four tokens, and prints what was done.
 *   embed_c MODEL_DIRECTORY [LAYER] */
#include <inttypes.h>
#include <nvfp4_moe/nvfp4_moe.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 4 };

static void check(nvfp4_moe_status status) {
  if (status == NVFP4_MOE_STATUS_OK) return;
  fprintf(stderr, "embed: %s\n", nvfp4_moe_last_error());
  exit(1);
}

/* Memory of at least one byte. A workspace is aligned to 256 bytes. */
static void* allocate(size_t bytes) {
  void* memory = aligned_alloc(256, (bytes + 256) / 256 * 256);
  if (memory == NULL) {
    fprintf(stderr, "embed: out of memory\n");
    exit(1);
  }
  return memory;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: embed_c MODEL_DIRECTORY [LAYER]\n");
    return 2;
  }
  const int64_t layer_index = argc > 2 ? atoll(argv[2]) : 0;
  nvfp4_moe_checkpoint* checkpoint = NULL;
  check(nvfp4_moe_checkpoint_open(argv[1], &checkpoint));
  nvfp4_moe_config config = {.struct_size = sizeof(config)};
  check(nvfp4_moe_checkpoint_config(checkpoint, layer_index, &config));

  const nvfp4_moe_layer_options options = {.struct_size = sizeof(options), .max_tokens = kTokens};
  nvfp4_moe_layer* layer = NULL;
  check(nvfp4_moe_layer_open_checkpoint(checkpoint, layer_index, NULL, &options, &layer));
  size_t workspace_bytes = 0;
  check(nvfp4_moe_layer_workspace_bytes(layer, kTokens, &workspace_bytes));
  void* const workspace = allocate(workspace_bytes);

  const int64_t count = kTokens * config.hidden_size, assignments = kTokens * config.top_k;
  float* const hidden = allocate(count * sizeof(float)); /* (tokens, hidden_size) */
  float* const out = allocate(count * sizeof(float));
  int32_t* const ids = allocate(assignments * sizeof(int32_t)); /* (tokens, top_k) */
  float* const weights = allocate(assignments * sizeof(float));
  for (int64_t i = 0; i < count; ++i) hidden[i] = 0.5f;
  for (int64_t i = 0; i < assignments; ++i) {
    ids[i] = (int32_t)(i % config.num_experts);
    weights[i] = 1.0f / (float)config.top_k;
  }
  const nvfp4_moe_batch batch = {.struct_size = sizeof(batch),
                                 .tokens = kTokens,
                                 .hidden = hidden,
                                 .hidden_dtype = NVFP4_MOE_DTYPE_F32,
                                 .topk_ids = ids,
                                 .topk_weights = weights,
                                 .out = out};
  check(nvfp4_moe_layer_run(layer, &batch, workspace, workspace_bytes, NULL));

  char* description = NULL;
  check(nvfp4_moe_layer_describe(layer, &description));
  printf("nvfp4-moe %s\n%s\n", nvfp4_moe_version(), description);
  nvfp4_moe_text_free(description);
  for (int64_t token = 0; token < kTokens; ++token)
    printf("token %" PRId64 ": %g\n", token, out[token * config.hidden_size]);

  free(weights), free(ids), free(out), free(hidden), free(workspace);
  nvfp4_moe_layer_close(layer);
  nvfp4_moe_checkpoint_close(checkpoint);
  return 0;
}
