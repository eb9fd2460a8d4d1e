/* nvfp4-moe: mixture-of-experts layers with NVFP4 weights. The C interface; C11 and C++.
 * Long because the C interface is one header.
 *
 * Rules for all functions
 * - Status: every function that can fail returns an nvfp4_moe_status; NVFP4_MOE_STATUS_OK is 0.
 *   After a failure, nvfp4_moe_last_error() on the same thread returns the message: what failed,
 *   what was expected, what was found, and the "[id]" of a checkpoint's finding if there is one.
 *   Nothing throws or prints.
 * - Structs begin with `size_t struct_size`: set it to sizeof(the struct). Zero is the default of
 *   all other fields. Structs only grow at their end. A struct of an older, shorter header is
 *   accepted. So is one of a newer header, if the fields that this library does not know are zero.
 * - Handles are opaque. An out handle is NULL after a failure. Closing NULL does nothing.
 * - A char** receives a NUL-terminated UTF-8 text. Free it with nvfp4_moe_text_free.
 * - Arrays are row-major and contiguous, in the caller's memory. The library keeps no pointer to
 *   them after the call.
 * - codes: packed E2M1, two per byte, the even element along K in the low nibble. block_scales:
 *   E4M3 bytes with sign 0, one per 16 elements along K. value = e2m1(code) * e4m3(block_scale) *
 *   tensor_scale.
 * - Callbacks must return: no longjmp. A C++ callback may throw if the library calls it on the
 *   caller's own thread (progress, log, and parallel_for after its bodies have returned). The call
 *   then fails with NVFP4_MOE_STATUS_INTERNAL and the exception's text; a layer that was being
 *   opened is closed, and an open one stays usable.
 * - fork(): a child may run, change and close what its parent opened, on the calling thread, even
 *   if other threads of the parent were inside the library. Layers that the child opens have
 *   threads of their own. GPUs are an exception, since CUDA does not work in a forked child: runs
 *   fail with NVFP4_MOE_STATUS_UNSUPPORTED, and close frees host memory only.
 * - Threads: "any thread" = may be called at any time, from any thread, also while others use the
 *   same handle. "exclusive" = no other thread may use that handle during the call.
 */
#ifndef NVFP4_MOE_NVFP4_MOE_H_
#define NVFP4_MOE_NVFP4_MOE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define NVFP4_MOE_API __attribute__((visibility("default")))
#else
#define NVFP4_MOE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define NVFP4_MOE_ABI_VERSION 1

/* ---- statuses and constants ---- */

typedef int32_t nvfp4_moe_status;
enum {
  NVFP4_MOE_STATUS_OK = 0,
  NVFP4_MOE_STATUS_CHECK_FAILED = 1,     /* a comparison ran and did not hold */
  NVFP4_MOE_STATUS_INVALID_ARGUMENT = 2, /* the caller's option, shape, dtype or pointer is wrong */
  NVFP4_MOE_STATUS_UNSUPPORTED = 3,      /* valid, but no backend supports it here */
  NVFP4_MOE_STATUS_BAD_INPUT = 4,        /* the contents of a file or of a weight array are wrong */
  NVFP4_MOE_STATUS_IO = 5,               /* the operating system refused a file operation */
  NVFP4_MOE_STATUS_OUT_OF_MEMORY = 6,
  NVFP4_MOE_STATUS_BUSY = 7, /* the object is in use elsewhere */
  NVFP4_MOE_STATUS_INTERNAL = 8,
  NVFP4_MOE_STATUS_CANCELLED = 9 /* a progress callback asked to stop */
};

typedef int32_t nvfp4_moe_dtype;
enum {
  NVFP4_MOE_DTYPE_DEFAULT = 0, /* given at each field */
  NVFP4_MOE_DTYPE_BF16 = 1,
  NVFP4_MOE_DTYPE_F16 = 2,
  NVFP4_MOE_DTYPE_F32 = 3,
  NVFP4_MOE_DTYPE_I32 = 4,
  NVFP4_MOE_DTYPE_I64 = 5
};

/* g, u: gate and up, L: swiglu_limit, a: swiglu_alpha, b: situ_gate_limit, l: situ_up_limit. */
typedef int32_t nvfp4_moe_activation;
enum {
  NVFP4_MOE_ACTIVATION_SWIGLU = 0,         /* silu(g) * u */
  NVFP4_MOE_ACTIVATION_SWIGLU_CLAMPED = 1, /* silu(min(g, L)) * clamp(u, -L, L): DeepSeek-V4 */
  NVFP4_MOE_ACTIVATION_SWIGLU_STEP = 2,    /* min(silu(g), L) * clamp(u, -L, L): Step-3.5 */
  /* g = min(g, L), u = clamp(u, -L, L): g * sigmoid(a g) * (u + 1), gpt-oss */
  NVFP4_MOE_ACTIVATION_SWIGLU_OAI = 3,
  NVFP4_MOE_ACTIVATION_RELU2 = 4,     /* relu(u)^2; experts have no gate: Nemotron-3 */
  NVFP4_MOE_ACTIVATION_GELU = 5,      /* gelu(g) * u, gelu(x) = x Phi(x) */
  NVFP4_MOE_ACTIVATION_GELU_TANH = 6, /* the same with gelu's approximation by tanh: Gemma-4 */
  NVFP4_MOE_ACTIVATION_SITU = 7       /* b tanh(g/b) sigmoid(g) * l tanh(u/l): Kimi-K3 */
};
typedef int32_t nvfp4_moe_format; /* of activations */
enum {
  /* nvfp4_moe_layer_open_checkpoint only: the declared format, or a more precise one
     (docs/explanation/numerics.md) */
  NVFP4_MOE_FORMAT_AUTO = -1,
  NVFP4_MOE_FORMAT_NVFP4 = 0, /* W4A4 */
  NVFP4_MOE_FORMAT_BF16 = 1,  /* W4A16 */
  /* W4A8: int8, one fp32 scale per 16; takes no other scale option */
  NVFP4_MOE_FORMAT_INT8_BLOCK = 2,
  /* W4A8: E4M3, a power of two per row; weights rounded to E4M3. Not VLLM_ORDER */
  NVFP4_MOE_FORMAT_FP8 = 3
};
typedef int32_t nvfp4_moe_scale; /* of hidden */
enum {
  NVFP4_MOE_SCALE_DYNAMIC_TOKEN = 0, /* each row's own power of two; needs no calibration */
  /* the input scale, rounded up to a power of two, times static_headroom */
  NVFP4_MOE_SCALE_STATIC = 1,
  NVFP4_MOE_SCALE_VLLM_ORDER = 2 /* the input scale as it is, in vLLM's operation order */
};
typedef int32_t nvfp4_moe_intermediate_scale; /* of the activation's output */
enum {
  NVFP4_MOE_INTERMEDIATE_SCALE_DYNAMIC_TOKEN = 0,
  NVFP4_MOE_INTERMEDIATE_SCALE_FIXED = 1,
  NVFP4_MOE_INTERMEDIATE_SCALE_VLLM_ORDER = 2
};
typedef int32_t nvfp4_moe_router_weight;
enum {
  NVFP4_MOE_ROUTER_WEIGHT_AFTER_DOWN = 0, /* multiplies an expert's output */
  /* multiplies the activation's output before it is quantized: DeepSeek-V4 */
  NVFP4_MOE_ROUTER_WEIGHT_BEFORE_DOWN = 1,
  /* multiplies hidden, but not the shared expert's; top_k 1: Llama-4 */
  NVFP4_MOE_ROUTER_WEIGHT_ON_INPUT = 2
};
typedef int32_t nvfp4_moe_row_format;
enum { NVFP4_MOE_ROW_FORMAT_BF16 = 0, NVFP4_MOE_ROW_FORMAT_FP32 = 1 };
typedef int32_t nvfp4_moe_search; /* of block scales, by nvfp4_moe_quantize */
enum {
  NVFP4_MOE_SEARCH_MAX = 0,
  NVFP4_MOE_SEARCH_MSE = 1,
  NVFP4_MOE_SEARCH_SWEEP = 2 /* on the host only */
};

/* A local expert index that names the shared expert. */
#define NVFP4_MOE_SHARED_EXPERT ((int64_t)-1)

typedef struct nvfp4_moe_checkpoint nvfp4_moe_checkpoint;
typedef struct nvfp4_moe_layer nvfp4_moe_layer;
typedef struct nvfp4_moe_linear nvfp4_moe_linear;
typedef struct nvfp4_moe_exchange nvfp4_moe_exchange;
typedef struct nvfp4_moe_thread_group nvfp4_moe_thread_group;

/* ---- library ---- */

/* Returns the library's version, "0.1.0". Any thread. */
NVFP4_MOE_API const char* nvfp4_moe_version(void);
/* Returns NVFP4_MOE_ABI_VERSION of the library that runs. Any thread. */
NVFP4_MOE_API int32_t nvfp4_moe_abi_version(void);
/* Returns the message of the calling thread's last failure, "" if no call has failed. It is valid
 * until the thread's next failing call. Any thread. */
NVFP4_MOE_API const char* nvfp4_moe_last_error(void);
/* Returns a status as text: "out of memory" for NVFP4_MOE_STATUS_OUT_OF_MEMORY, and so on;
 * "unknown" for other numbers. Any thread. */
NVFP4_MOE_API const char* nvfp4_moe_status_name(nvfp4_moe_status status);
/* Frees a text that a function of this header returned. NULL does nothing. Any thread. */
NVFP4_MOE_API void nvfp4_moe_text_free(char* text);

/* Receives log messages. level: 1 error, 2 warning, 3 info, 4 debug. Calls do not overlap. The
 * callback must not call the library. */
typedef void (*nvfp4_moe_log_fn)(int level, const char* text, void* user);
/* Sets the log callback of the whole process. NULL turns logging off, which is the default. Any
 * thread. */
NVFP4_MOE_API void nvfp4_moe_set_log_callback(nvfp4_moe_log_fn callback, void* user);

/* Progress of opening a layer. The callback is called at least once per expert, on the thread that
 * opens. Return 0 to cancel (NVFP4_MOE_STATUS_CANCELLED). */
typedef struct nvfp4_moe_progress {
  size_t struct_size;
  const char* what; /* "pack" */
  const char* item; /* "layer 12 expert 7"; both texts are valid during the call only */
  int64_t done;     /* items */
  int64_t total;
  int64_t done_bytes;
  int64_t total_bytes;
  double elapsed_s;
} nvfp4_moe_progress;
typedef int32_t (*nvfp4_moe_progress_fn)(const nvfp4_moe_progress* progress, void* user);

/* Runs the library's loops on the caller's threads. Call body(context, begin, end) over disjoint
 * ranges that cover [0, count), each at most `grain` long, from any threads, and return when all
 * calls have returned. Every thread that runs a layer calls it, so calls may overlap. body never
 * throws. In a forked child the caller has to create its threads again. */
typedef void (*nvfp4_moe_parallel_body)(void* context, int64_t begin, int64_t end);
typedef void (*nvfp4_moe_parallel_for)(int64_t count, int64_t grain, nvfp4_moe_parallel_body body,
                                       void* context, void* user);

/* ---- config ---- */

typedef struct nvfp4_moe_config {
  size_t struct_size;
  int64_t num_experts; /* global */
  int64_t top_k;
  int64_t hidden_size;              /* multiple of 16 */
  int64_t intermediate_size;        /* multiple of 16; this rank's slice under tensor parallel */
  int64_t shared_intermediate_size; /* 0: no shared expert */
  nvfp4_moe_activation activation;
  float swiglu_limit; /* L; 0: none (required by SWIGLU_CLAMPED, SWIGLU_STEP and SWIGLU_OAI, refused
                         by the others) */
  float swiglu_alpha; /* of SWIGLU_OAI; 0: 1.702, its value for all other activations too */
  nvfp4_moe_format activation_format;
  nvfp4_moe_scale activation_scale;
  nvfp4_moe_intermediate_scale intermediate_scale;
  float intermediate_fixed; /* a power of two for FIXED; 0: from the limit or the input scale */
  float max_router_weight;  /* bound of the router weights, used by FIXED under BEFORE_DOWN; 0: 1 */
  float static_headroom;    /* a power of two; 0: 1, which is the only value without SCALE_STATIC */
  nvfp4_moe_router_weight router_weight;
  nvfp4_moe_row_format row_format;
  int32_t batch_invariant; /* 0 or 1 */
  int32_t expert_biases;   /* 0 or 1: gate, up and down of the routed experts have biases */
  int32_t reserved;        /* 0 */
  float situ_gate_limit;   /* b; 0: none (required by SITU, refused by the others) */
  float situ_up_limit;     /* l; 0: none (likewise) */
} nvfp4_moe_config;

/* ---- exchange: ranks that each hold some of a layer's experts ---- */

/* The caller's communication between ranks. all_to_all_v is called on the threads that call the
 * library, one at a time. */
typedef struct nvfp4_moe_exchange_callbacks {
  size_t struct_size;
  void* user;
  /* Sends one block to each rank and receives one block from each, in rank order, this rank
   * included. send: (sum of send_bytes). recv: (sum of recv_bytes). Return 0 after recv is filled
   * and send may be written to. For a failure return anything else, after writing its cause to
   * error: a text shorter than error_bytes that names the missing rank if it is known. The call
   * must return within timeout_ms, since nothing else can end it. */
  int32_t (*all_to_all_v)(void* user, const void* send, const int64_t* send_bytes, void* recv,
                          const int64_t* recv_bytes, int64_t timeout_ms, char* error,
                          size_t error_bytes);
  /* Ends the calls of the other ranks, if possible. Called at most once, on any thread including
   * the library's own, and possibly while all_to_all_v runs on another thread. May be NULL: the
   * other ranks then end by their timeout. */
  void (*abort)(void* user, const char* message);
} nvfp4_moe_exchange_callbacks;

/* Connects this rank to the others. Waits for all ranks, and fails on all of them if they disagree
 * on rank or world size. timeout_ms: at most 1000000000; 0: 30000. Ranks of one host also poll each
 * other's processes, so a rank that dies or gives up is reported within a second, even if no call
 * is in progress. Any thread. */
NVFP4_MOE_API nvfp4_moe_status
nvfp4_moe_exchange_connect(const nvfp4_moe_exchange_callbacks* callbacks, int32_t rank,
                           int32_t world, int64_t timeout_ms, nvfp4_moe_exchange** exchange);
/* Creates a group that connects ranks that are threads of this process. Close it after all ranks
 * have joined. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_thread_group_create(int32_t world,
                                                             nvfp4_moe_thread_group** group);
/* Closes the group. */
NVFP4_MOE_API void nvfp4_moe_thread_group_close(nvfp4_moe_thread_group* group);
/* Joins the group as one rank. Waits for all other ranks, each of which joins on a thread of its
 * own. timeout_ms 0: 30000. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_thread_group_join(nvfp4_moe_thread_group* group,
                                                           int32_t rank, int32_t world,
                                                           int64_t timeout_ms,
                                                           nvfp4_moe_exchange** exchange);
/* Adds NCCL between devices to the exchange, for layers on GPUs. Collective; call it before the
 * first layer is opened over the exchange. device: this rank's GPU, "cuda:1". library: a path or
 * name; NULL: the copy that the process has loaded, else libnccl.so.2. communicator: an ncclComm_t
 * of the exchange's ranks, preferably nonblocking (ncclConfig_t::blocking 0). It stays the caller's
 * and must outlive the exchange and all layers over it. NULL: one is created. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_exchange_use_nccl(nvfp4_moe_exchange* exchange,
                                                           const char* device, const char* library,
                                                           void* communicator);
/* Adds peer memory to the exchange, instead of NCCL: the ranks' kernels write into each other's
 * device memory. Collective; call it before the first layer is opened over the exchange. For at
 * most 16 GPUs of one host that all reach each other. If two do not, every rank gets
 * NVFP4_MOE_STATUS_UNSUPPORTED, with both devices and the reason. On each device, runs of layers
 * over the exchange must follow each other, in one stream or ordered by events. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_exchange_use_peers(nvfp4_moe_exchange* exchange,
                                                            const char* device);
/* Closes the exchange. Layers over it stay usable, and this rank leaves the exchange when the last
 * of them is closed too. Exclusive. */
NVFP4_MOE_API void nvfp4_moe_exchange_close(nvfp4_moe_exchange* exchange);

typedef int32_t nvfp4_moe_combine;
enum {
  /* each rank has tokens of its own; the result has the bits of one rank with all experts */
  NVFP4_MOE_COMBINE_ALL_TO_ALL = 0,
  NVFP4_MOE_COMBINE_ALL_REDUCE = 1 /* all ranks have the same tokens; adds one fp32 sum */
};
/* How a layer is divided over an exchange (docs/how-to/expert-parallel.md). All ranks open with the
 * same config and the same values here, on CPUs, or on GPUs over NCCL or peer memory. These calls
 * are collective: opening, runs, nvfp4_moe_layer_rearrange, and nvfp4_moe_layer_expert_load with
 * all_to_all. If one rank cannot go on, the call fails on all with its message. */
typedef struct nvfp4_moe_expert_parallel {
  size_t struct_size;
  nvfp4_moe_exchange* exchange;
  const int64_t* expert_of_slot; /* (slots) the expert of each slot, rank by rank, the same number
                                    on each; NULL: ranges */
  int64_t
      slots; /* a multiple of the world; more than num_experts: redundant experts; 0 with NULL */
  /* all_to_all: the most tokens that one rank may send to another; 0: no limit. A run with more
   * fails. On a GPU, a run with a capacity can be captured: if it has too many tokens, out is NaN
   * on every rank and nvfp4_moe_layer_run_status fails. A graph contains each rank's token count,
   * so ranks must replay together what they captured together. */
  int64_t capacity;
  nvfp4_moe_combine combine;
  int32_t reserved; /* 0 */
} nvfp4_moe_expert_parallel;

typedef struct nvfp4_moe_layer_options {
  size_t struct_size;
  const char* backend;  /* NULL or "auto": NVFP4_MOE_BACKEND, else by priority */
  int64_t first_expert; /* the local experts; count 0 and first 0: all */
  int64_t expert_count;
  int64_t max_tokens; /* at least 1 */
  int64_t
      slice_first; /* open_checkpoint: the part of the intermediate size to load; count 0: all */
  int64_t slice_count;         /* multiples of 16 */
  const char* cache_directory; /* open_checkpoint: where packed layers are kept and read from; NULL:
                                  no cache */
  nvfp4_moe_parallel_for parallel_for; /* NULL: the layer has a pool of its own */
  void* parallel_for_user;
  nvfp4_moe_progress_fn progress; /* may be NULL */
  void* progress_user;
  int32_t threads; /* of the layer's pool, or a hint for parallel_for; 0: NVFP4_MOE_THREADS, else
                      one per core */
  int32_t cache_checksum; /* 1: hash the whole checkpoint, not only its files' paths, times and
                             samples */
  const char*
      device; /* where weights, workspaces and a batch's arrays are: NULL or "cpu", or "cuda:N" */
  int32_t cache_trusted; /* 1: do not compare the hash of packed bytes that come from the cache */
  /* NULL: this process computes with the local experts only. Otherwise the exchange's ranks share
   * all experts: first_expert and expert_count are 0, tensors hold all experts (a rank reads its
   * own), and there is no cache and no slice. */
  const nvfp4_moe_expert_parallel* expert_parallel;
} nvfp4_moe_layer_options;

/* Reports which backend would run this config, and why the others would not: JSON [{"backend",
 * "chosen", "reason"}]. backend: NULL or "auto", or a name to force. Needs no weights. Any thread.
 */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_explain(const nvfp4_moe_config* config,
                                                 const char* backend, char** json);
/* Plans a layer without its weights: the plan as text, workspace bytes, and bytes of packed
 * weights. Each output may be NULL. hidden_scale and intermediate_scale: the checkpoint's input
 * scales; 0: none. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_plan(const nvfp4_moe_config* config,
                                              const nvfp4_moe_layer_options* options,
                                              float hidden_scale, float intermediate_scale,
                                              char** text, size_t* workspace_bytes,
                                              size_t* packed_bytes);

/* ---- checkpoint ---- */

/* Opens a checkpoint. path: a model directory, one .safetensors file, or a .gguf file (any part of
 * a split model). Reads only headers and config files. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_checkpoint_open(const char* path,
                                                         nvfp4_moe_checkpoint** checkpoint);
/* The caller's decisions about a checkpoint whose files leave them open. */
typedef struct nvfp4_moe_checkpoint_options {
  size_t struct_size;
  /* Row order of tensors that hold gate and up: "gate_first", "up_first" or "interleaved". NULL:
   * from family and names. */
  const char* gate_up_order;
  /* (accept_count) names of expert tensors to ignore; '*' matches any characters. Unknown tensors
   * are errors otherwise. */
  const char* const* accept_tensors;
  size_t accept_count;
  /* Model type, or family, whose rules read a config.json with an unknown model_type. NULL: such a
   * checkpoint is an error, which names what fits. */
  const char* family;
} nvfp4_moe_checkpoint_options;
/* Opens a checkpoint with options, which may be NULL. Otherwise as nvfp4_moe_checkpoint_open. Any
 * thread. */
NVFP4_MOE_API nvfp4_moe_status
nvfp4_moe_checkpoint_open_with(const char* path, const nvfp4_moe_checkpoint_options* options,
                               nvfp4_moe_checkpoint** checkpoint);
/* Closes the checkpoint. Layers opened from it stay usable. Exclusive. */
NVFP4_MOE_API void nvfp4_moe_checkpoint_close(nvfp4_moe_checkpoint* checkpoint);
/* Describes the checkpoint as a JSON object: architecture, family, format, producer, layers,
 * config, files, size_bytes. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_checkpoint_info(const nvfp4_moe_checkpoint* checkpoint,
                                                         char** json);
/* Lists the checkpoint's findings as a JSON array of {"severity", "id", "layer", "expert",
 * "tensor", "expected", "actual", "count", "examples", "text"}. layer -1: the findings of opening.
 * Otherwise reads the experts of that layer and checks them. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_checkpoint_findings(const nvfp4_moe_checkpoint* checkpoint,
                                                             int64_t layer, char** json);
/* Returns the layer's config as the checkpoint declares it. activation_format is the declared one:
 * BF16 for weight-only experts and floats. The caller sets config->struct_size. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_checkpoint_config(const nvfp4_moe_checkpoint* checkpoint,
                                                           int64_t layer, nvfp4_moe_config* config);

/* ---- layer: open, plan, run ---- */

/* Opens a layer of a checkpoint. If config is NULL it uses the checkpoint's config, with the
 * slice's sizes and NVFP4_MOE_FORMAT_AUTO. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_open_checkpoint(
    const nvfp4_moe_checkpoint* checkpoint, int64_t layer, const nvfp4_moe_config* config,
    const nvfp4_moe_layer_options* options, nvfp4_moe_layer** out);

/* One expert's arrays. H: hidden_size, I: its intermediate size. An expert without a gate (RELU2)
 * has NULL for the gate's arrays, here and below, and its gate tensor scale is not read. on_device
 * 0: codes and block scales are in host memory, and stream is NULL. on_device 1: they are in the
 * memory of the layer's device, written by work already enqueued in `stream` (a cudaStream_t of
 * that device; NULL: the default stream). They are packed on the device, in the same stream. */
typedef struct nvfp4_moe_expert {
  size_t struct_size;
  const uint8_t* gate_codes;        /* (I, H/2) */
  const uint8_t* gate_block_scales; /* (I, H/16) */
  const uint8_t* up_codes;          /* (I, H/2) */
  const uint8_t* up_block_scales;   /* (I, H/16) */
  const uint8_t* down_codes;        /* (H, I/2) */
  const uint8_t* down_block_scales; /* (H, I/16) */
  float gate_tensor_scale;
  float up_tensor_scale;
  float down_tensor_scale;
  int32_t on_device; /* 0 or 1 */
  void* stream;
  const float* gate_bias; /* (I); NULL, all three, without expert_biases and for a shared expert */
  const float* up_bias;   /* (I) */
  const float* down_bias; /* (H); biases are finite and always in host memory */
} nvfp4_moe_expert;

/* A layer's E local experts, stacked. A stride is the distance in bytes from one expert's array to
 * the next; 0: contiguous. So gate and up may be halves of one (E, 2I, H/2) tensor. The last expert
 * must end inside the address space. */
typedef struct nvfp4_moe_layer_tensors {
  size_t struct_size;
  const uint8_t* gate_codes;        /* (E, I, H/2) */
  const uint8_t* gate_block_scales; /* (E, I, H/16) */
  const float* gate_tensor_scales;  /* (E) */
  const uint8_t* up_codes;          /* (E, I, H/2) */
  const uint8_t* up_block_scales;   /* (E, I, H/16) */
  const float* up_tensor_scales;    /* (E) */
  const uint8_t* down_codes;        /* (E, H, I/2) */
  const uint8_t* down_block_scales; /* (E, H, I/16) */
  const float* down_tensor_scales;  /* (E) */
  int64_t gate_up_codes_stride;
  int64_t gate_up_scales_stride;
  int64_t down_codes_stride;
  int64_t down_scales_stride;
  const nvfp4_moe_expert* shared; /* NULL: none; its own on_device applies to it */
  float hidden_scale; /* input scales, each the maximum over ALL experts of the layer; 0: none */
  float intermediate_scale;
  int32_t on_device; /* as in nvfp4_moe_expert; tensor scales are always in host memory */
  int32_t reserved;  /* 0 */
  void* stream;
  const float* gate_biases; /* (E, I); NULL, all three, without expert_biases. Finite, in host
                               memory always */
  const float* up_biases;   /* (E, I) */
  const float* down_biases; /* (E, H) */
  int64_t gate_up_biases_stride;
} nvfp4_moe_layer_tensors;
/* Opens a layer from arrays. The arrays are not used after it returns. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_open_tensors(const nvfp4_moe_config* config,
                                                            const nvfp4_moe_layer_tensors* tensors,
                                                            const nvfp4_moe_layer_options* options,
                                                            nvfp4_moe_layer** out);
/* Closes the layer. Exclusive: no run may be in flight. */
NVFP4_MOE_API void nvfp4_moe_layer_close(nvfp4_moe_layer* layer);

/* Describes the layer as JSON: backend, kernels, every numeric choice, sizes, notes. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_describe(const nvfp4_moe_layer* layer, char** json);
/* Describes a run of that many bf16 tokens as JSON: backend, tokens, the kernel of each step,
 * workspace_bytes. On a GPU it is the plan that each run makes. NVFP4_MOE_STATUS_INVALID_ARGUMENT
 * unless 0 <= tokens <= max_tokens. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_describe_run(const nvfp4_moe_layer* layer,
                                                            int64_t tokens, char** json);
/* Returns the smallest workspace for a run of that many tokens (0 to max_tokens). More tokens never
 * need less. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_workspace_bytes(const nvfp4_moe_layer* layer,
                                                               int64_t tokens, size_t* bytes);

/* Inputs and output of one run. T tokens, k = top_k, H = hidden_size. out and the workspace overlap
 * nothing else. */
typedef struct nvfp4_moe_batch {
  size_t struct_size;
  int64_t tokens;            /* 0 to max_tokens */
  const void* hidden;        /* (T, H) */
  const void* topk_ids;      /* (T, k) global expert ids; -1 and other ranks' experts add nothing */
  const float* topk_weights; /* (T, k) */
  const float* shared_weights;  /* (T) factors of the shared expert's rows; NULL: 1 */
  void* out;                    /* (T, H) */
  nvfp4_moe_dtype hidden_dtype; /* BF16 (default), F16 or F32 */
  nvfp4_moe_dtype ids_dtype;    /* I32 (default) or I64 */
  nvfp4_moe_dtype out_dtype;    /* BF16, F16 or F32; default: hidden's */
  int32_t reserved;             /* 0 */
} nvfp4_moe_batch;
/* Runs the layer. On a CPU it returns when out is written; on a GPU it only enqueues in `stream`.
 * It allocates nothing. workspace: at least nvfp4_moe_layer_workspace_bytes for the batch's tokens,
 * aligned to 256 bytes, in the memory of the layer's device. Layers that run one after another may
 * share it. stream: a cudaStream_t; NULL on a CPU. Any thread, each with a workspace of its own. On
 * a CPU, a run in a workspace that another run is using fails with NVFP4_MOE_STATUS_BUSY. On a GPU,
 * runs in one stream may share a workspace, since each waits for the one before. Runs in different
 * streams must not share one, which is not checked. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_run(const nvfp4_moe_layer* layer,
                                                   const nvfp4_moe_batch* batch, void* workspace,
                                                   size_t workspace_bytes, void* stream);

/* Counts of the last run in a workspace. The caller sets struct_size. */
typedef struct nvfp4_moe_run_status {
  size_t struct_size;
  uint64_t bad_expert_ids;   /* ids that are neither -1 nor an expert; skipped */
  uint64_t nonfinite_tokens; /* their output rows are NaN, no other row changes */
  uint64_t nonfinite_rows;   /* assignments whose intermediate is not finite */
  uint64_t hidden_blocks;    /* quantized blocks; below: with a scale saturated at 448, with a scale
                                rounded to 0 */
  uint64_t hidden_saturated;
  uint64_t hidden_zeroed;
  uint64_t intermediate_blocks;
  uint64_t intermediate_saturated;
  uint64_t intermediate_zeroed;
  uint64_t nonfinite_weights; /* NaN or Inf in router weights of computed assignments, and in
                                 shared_weights */
  uint64_t
      nonfinite_outputs; /* NaN or Inf in out; if tokens and weights are finite, it is overflow */
} nvfp4_moe_run_status;
/* Reads the counts of the last run in a workspace. Any thread, after the run; on a GPU, after the
 * run's stream has finished it. Over ranks on GPUs it fails with the cause that ended the exchange
 * during runs or replays. It also fails once if runs since the last call had more tokens than the
 * capacity. On a GPU under NVFP4_MOE_CHECK it first waits for the check of those runs, and returns
 * NVFP4_MOE_STATUS_CHECK_FAILED once if that found a wrong token, or once the error for which a
 * token could not be checked. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_run_status(const nvfp4_moe_layer* layer,
                                                          const void* workspace,
                                                          size_t workspace_bytes,
                                                          nvfp4_moe_run_status* status);

/* Replaces one expert in place. The result is byte-identical to a fresh load. local_expert: 0 to
 * expert_count - 1, or NVFP4_MOE_SHARED_EXPERT. The arrays are checked before anything is written.
 * Any thread; NVFP4_MOE_STATUS_BUSY while a run or another replacement is in progress. A layer in
 * host memory allocates nothing. A layer on a GPU uses 8 MiB of staging memory (128 rows if that is
 * more) and waits for all work of the device; NVFP4_MOE_STATUS_OUT_OF_MEMORY leaves the expert
 * unchanged. If a run of the layer was captured in a CUDA graph, the call fails with
 * NVFP4_MOE_STATUS_INVALID_ARGUMENT, since a replay could begin meanwhile and read parts of both
 * experts: use the next function. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_replace_expert(nvfp4_moe_layer* layer,
                                                              int64_t local_expert,
                                                              const nvfp4_moe_expert* expert);
/* Replaces one expert on a GPU in the order of `stream` (a cudaStream_t; NULL: the default stream):
 * runs and replays enqueued there earlier use the whole old expert, later ones the whole new one.
 * Pass the stream that replays. If other streams run the layer, order them by events, before and
 * after. The call returns when the arrays are no longer needed. It does not wait for the stream or
 * the device, and disturbs no capture of another thread. It also needs staging memory of the packed
 * expert's size, which the stream frees. Any thread. NVFP4_MOE_STATUS_BUSY if runs left no gap
 * between them for 10 seconds; NVFP4_MOE_STATUS_INVALID_ARGUMENT for a layer in host memory, and
 * for a stream that is capturing. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_replace_expert_on_stream(
    nvfp4_moe_layer* layer, int64_t local_expert, const nvfp4_moe_expert* expert, void* stream);

/* Returns the expert load of a layer over an exchange: the assignments of each expert on all ranks
 * since open or the last reset. load: (num_experts), the config's. Collective under all_to_all. On
 * a GPU it waits for the device. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_expert_load(const nvfp4_moe_layer* layer,
                                                           uint64_t* load, int64_t num_experts);
/* Resets this rank's expert-load counters. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_reset_expert_load(const nvfp4_moe_layer* layer);
/* Proposes a placement that balances that load over the ranks: expert_of_slot (world *
 * slots_per_rank), for nvfp4_moe_expert_parallel. Ranks get the same result from the same load. Any
 * thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_propose_placement(const uint64_t* load,
                                                           int64_t num_experts, int32_t world,
                                                           int64_t slots_per_rank,
                                                           int64_t* expert_of_slot);
/* Moves experts to other slots in place, reading them from a checkpoint's layer with the same
 * weights. Collective. slots: the number that the layer has. The result is byte-identical to a
 * fresh open with that placement. If one rank fails, the call fails on all; if experts were already
 * replaced by then, the exchange ends. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_rearrange(nvfp4_moe_layer* layer,
                                                         const int64_t* expert_of_slot,
                                                         int64_t slots,
                                                         const nvfp4_moe_checkpoint* checkpoint,
                                                         int64_t layer_index);
/* Moves experts to other slots as nvfp4_moe_layer_rearrange does, but reads them from arrays of all
 * experts, as for nvfp4_moe_layer_open_tensors. Their shared expert and input scales are ignored.
 */
NVFP4_MOE_API nvfp4_moe_status
nvfp4_moe_layer_rearrange_tensors(nvfp4_moe_layer* layer, const int64_t* expert_of_slot,
                                  int64_t slots, const nvfp4_moe_layer_tensors* tensors);

/* Output of nvfp4_moe_layer_unpack_expert; shapes as in nvfp4_moe_expert. NULL arrays are skipped,
 * and so are biases of an expert without biases. The scales are always written. */
typedef struct nvfp4_moe_expert_out {
  size_t struct_size;
  uint8_t* gate_codes;
  uint8_t* gate_block_scales;
  uint8_t* up_codes;
  uint8_t* up_block_scales;
  uint8_t* down_codes;
  uint8_t* down_block_scales;
  float gate_tensor_scale;
  float up_tensor_scale;
  float down_tensor_scale;
  int32_t reserved;
  float* gate_bias;
  float* up_bias;
  float* down_bias;
} nvfp4_moe_expert_out;
/* Unpacks an expert into the same bytes that were packed. Any thread; NVFP4_MOE_STATUS_BUSY while
 * weights are being replaced. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_unpack_expert(const nvfp4_moe_layer* layer,
                                                             int64_t local_expert,
                                                             nvfp4_moe_expert_out* expert);

/* ---- repro: one call in one file ---- */

/* Writes layer and batch to a .safetensors file, and the values in batch->out if with_output is 1.
 * A regular file at path is replaced when the new one is complete, also through a symbolic link.
 * Anything else at path is an error. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_write_repro(const nvfp4_moe_layer* layer,
                                                           const nvfp4_moe_batch* batch,
                                                           int32_t with_output, const char* path);
/* Runs such a file on a backend (NULL: auto) and compares the result with the stored output and
 * with the reference. json receives the report. If a limit is exceeded, the call returns the report
 * and NVFP4_MOE_STATUS_CHECK_FAILED. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_replay(const char* path, const char* backend, char** json);

/* ---- dense linear: y = x W^T, W (rows, cols) = (out_features, in_features) ---- */

typedef struct nvfp4_moe_linear_options {
  size_t struct_size;
  int64_t rows;
  int64_t cols;                /* multiple of 16 */
  const uint8_t* codes;        /* (rows, cols/2) */
  const uint8_t* block_scales; /* (rows, cols/16) */
  float tensor_scale;
  float input_scale;     /* the checkpoint's number, for STATIC and VLLM_ORDER */
  float static_headroom; /* a power of two; 0: 1 */
  nvfp4_moe_format activation_format;
  nvfp4_moe_scale activation_scale;
  int32_t threads;
  int64_t max_tokens; /* at least 1 */
  const char* backend;
  nvfp4_moe_parallel_for parallel_for;
  void* parallel_for_user;
  const char*
      device; /* where weights, workspaces and a batch's arrays are: NULL or "cpu", or "cuda:N" */
} nvfp4_moe_linear_options;
/* Opens a dense linear. The weights are not used after it returns. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_linear_open(const nvfp4_moe_linear_options* options,
                                                     nvfp4_moe_linear** out);
/* Closes it. Exclusive. */
NVFP4_MOE_API void nvfp4_moe_linear_close(nvfp4_moe_linear* linear);
/* Describes it as JSON. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_linear_describe(const nvfp4_moe_linear* linear,
                                                         char** json);
/* Returns the smallest workspace for a run, as nvfp4_moe_layer_workspace_bytes does. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_linear_workspace_bytes(const nvfp4_moe_linear* linear,
                                                                int64_t tokens, size_t* bytes);
typedef struct nvfp4_moe_linear_batch {
  size_t struct_size;
  int64_t tokens;
  const void* x;             /* (T, cols) */
  void* out;                 /* (T, rows) */
  nvfp4_moe_dtype x_dtype;   /* BF16 (default), F16 or F32 */
  nvfp4_moe_dtype out_dtype; /* default: x's */
} nvfp4_moe_linear_batch;
/* Runs it. Everything is as in nvfp4_moe_layer_run, including NVFP4_MOE_STATUS_BUSY for a shared
 * workspace. Any thread, each with a workspace of its own. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_linear_run(const nvfp4_moe_linear* linear,
                                                    const nvfp4_moe_linear_batch* batch,
                                                    void* workspace, size_t workspace_bytes,
                                                    void* stream);

/* ---- format: host arrays, all "any thread". x is (rows, cols) of BF16, F16 or F32, cols a
 * multiple of 16; codes is (rows, cols/2), block_scales (rows, cols/16). ---- */

/* Counts, overwritten by each call. The caller sets struct_size. The argument may be NULL in every
 * function below. */
typedef struct nvfp4_moe_quantize_counts {
  size_t struct_size;
  uint64_t blocks;
  uint64_t saturated_scales;
  uint64_t zero_scales;
  uint64_t saturated_codes;
  uint64_t nonfinite_rows;
} nvfp4_moe_quantize_counts;

/* Quantizes weights. tensor_scale: in, a positive number, or 0 for amax/2688 of x; out, the value
 * used. x must be finite. search: NVFP4_MOE_SEARCH_MAX, _MSE (the better of two) or _SWEEP (the
 * best of all block scales). */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_quantize(const void* x, nvfp4_moe_dtype dtype,
                                                  int64_t rows, int64_t cols,
                                                  nvfp4_moe_search search, float* tensor_scale,
                                                  uint8_t* codes, uint8_t* block_scales,
                                                  nvfp4_moe_quantize_counts* counts);
/* Quantizes activations, each row with the smallest power of two >= amax/2688 as its scale:
 * row_scales (rows). A row with NaN or Inf gets zero codes, zero block scales and a NaN row scale.
 */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_quantize_dynamic_token(
    const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols, uint8_t* codes,
    uint8_t* block_scales, float* row_scales, nvfp4_moe_quantize_counts* counts);
/* Quantizes activations with one power of two. tensor_scale: in, a positive number; out, the power
 * of two that it was rounded up to. Rows with NaN or Inf get zero codes and scales, and are
 * counted. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_quantize_static(const void* x, nvfp4_moe_dtype dtype,
                                                         int64_t rows, int64_t cols,
                                                         float* tensor_scale, uint8_t* codes,
                                                         uint8_t* block_scales,
                                                         nvfp4_moe_quantize_counts* counts);
/* Quantizes activations in vLLM's operation order, with any positive normal tensor_scale. Rows with
 * NaN or Inf as above. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_quantize_vllm_order(const void* x, nvfp4_moe_dtype dtype,
                                                             int64_t rows, int64_t cols,
                                                             float tensor_scale, uint8_t* codes,
                                                             uint8_t* block_scales,
                                                             nvfp4_moe_quantize_counts* counts);
/* Options of nvfp4_moe_swiglu_quantize. */
typedef struct nvfp4_moe_swiglu {
  size_t struct_size;
  nvfp4_moe_activation activation;
  float swiglu_limit;  /* as in nvfp4_moe_config */
  float swiglu_alpha;  /* 0: 1.702 */
  float power_of_two;  /* the tensor scale of every row; 0: each row its own, as in
                          quantize_dynamic_token */
  int32_t interleaved; /* 1: g0 u0 g1 u1 ...; 0: all of gate, then all of up */
  nvfp4_moe_dtype dtype;
  float situ_gate_limit; /* as in nvfp4_moe_config */
  float situ_up_limit;
} nvfp4_moe_swiglu;
/* Computes gemm2's input from gemm1's output in one pass: h = activation(gate, up) * row_weight,
 * rounded to bf16 once, quantized. gate_up: (rows, 2 inner) of BF16 (default), F16 or F32, inner a
 * multiple of 16. row_weights: (rows) router weights, NULL for none. codes (rows, inner/2),
 * block_scales (rows, inner/16), row_scales (rows). A row of h with NaN or Inf gets a NaN row
 * scale, zero codes and zero block scales. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_swiglu_quantize(const nvfp4_moe_swiglu* options,
                                                         const void* gate_up, int64_t rows,
                                                         int64_t inner, const float* row_weights,
                                                         uint8_t* codes, uint8_t* block_scales,
                                                         float* row_scales,
                                                         nvfp4_moe_quantize_counts* counts);
/* Quantizes activations to INT8_BLOCK: codes (rows, cols) within +-127, block_scales (rows,
 * cols/16) = max(amax/127, 2^-116). A row with NaN or Inf gets zero codes and NaN scales, and is
 * counted. zero_scales: blocks that are not all zero, but whose codes are; nothing saturates. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_quantize_int8_block(const void* x, nvfp4_moe_dtype dtype,
                                                             int64_t rows, int64_t cols,
                                                             int8_t* codes, float* block_scales,
                                                             nvfp4_moe_quantize_counts* counts);
/* Dequantizes to out: (rows, cols) of BF16, F16 or F32. Each value is exact, then rounded once. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_dequantize(const uint8_t* codes,
                                                    const uint8_t* block_scales, float tensor_scale,
                                                    int64_t rows, int64_t cols,
                                                    nvfp4_moe_dtype out_dtype, void* out);
/* Converts to FP8 E4M3 with one scale per tensor (block_rows = block_cols = 0) or per block, for
 * example 128 x 128: value ~= e4m3(out) * scale. scales: nvfp4_moe_fp8_scale_count floats,
 * row-major over blocks. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_convert_to_fp8(
    const uint8_t* codes, const uint8_t* block_scales, float tensor_scale, int64_t rows,
    int64_t cols, int64_t block_rows, int64_t block_cols, uint8_t* out, float* scales);
/* Returns the number of scales of nvfp4_moe_convert_to_fp8, or -1 for invalid sizes. */
NVFP4_MOE_API int64_t nvfp4_moe_fp8_scale_count(int64_t rows, int64_t cols, int64_t block_rows,
                                                int64_t block_cols);

/* Packs E2M1 codes, two per byte, and unpacks them. values: (count), one code below 16 per byte,
 * count even. packed: (count/2). */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_pack_codes(const uint8_t* values, int64_t count,
                                                    uint8_t* packed);
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_unpack_codes(const uint8_t* packed, int64_t count,
                                                      uint8_t* values);

/* Converts block scales to and from the 128x4 layout (docs/explanation/layouts.md). linear: (rows,
 * scale_cols). swizzled: nvfp4_moe_swizzled_bytes bytes. */
NVFP4_MOE_API int64_t nvfp4_moe_swizzled_bytes(int64_t rows,
                                               int64_t scale_cols); /* -1 for invalid sizes */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_swizzle_scales(const uint8_t* linear, int64_t rows,
                                                        int64_t scale_cols, uint8_t* swizzled);
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_unswizzle_scales(const uint8_t* swizzled, int64_t rows,
                                                          int64_t scale_cols, uint8_t* linear);

/* ---- format on a GPU: the functions above on arrays in its memory, with the same bits. device:
 * "cuda:N". Each function enqueues in `stream` (a cudaStream_t; NULL: the default stream) and
 * returns. It allocates nothing, waits for nothing, and can be captured. So it counts nothing and
 * cannot fail because of an array's values: if a host function would fail, a scale is NaN. codes is
 * aligned to 8 bytes. UNSUPPORTED in a build without CUDA. ---- */
typedef int32_t nvfp4_moe_quantize_mode;
enum {
  /* tensor_scale: a positive number to be used, or 0: amax/2688 of x */
  NVFP4_MOE_QUANTIZE_MODE_WEIGHTS = 0,
  NVFP4_MOE_QUANTIZE_MODE_DYNAMIC_TOKEN = 1, /* tensor_scale: 0 */
  /* tensor_scale: a positive number, rounded up to a power of two */
  NVFP4_MOE_QUANTIZE_MODE_STATIC = 2,
  NVFP4_MOE_QUANTIZE_MODE_VLLM_ORDER =
      3 /* tensor_scale: the input scale, a positive normal number */
};
/* Quantizes on a GPU. search: NVFP4_MOE_SEARCH_MAX, or with WEIGHTS also NVFP4_MOE_SEARCH_MSE;
 * _SWEEP is UNSUPPORTED. scales: with DYNAMIC_TOKEN (rows), NaN for a row with NaN or Inf;
 * otherwise one number, the value used, NaN if weights contain NaN or Inf. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_device_quantize(
    const char* device, nvfp4_moe_quantize_mode mode, nvfp4_moe_search search, const void* x,
    nvfp4_moe_dtype dtype, int64_t rows, int64_t cols, float tensor_scale, uint8_t* codes,
    uint8_t* block_scales, float* scales, void* stream);
/* Dequantizes on a GPU. scales: one number, or (rows) if scale_of_row is 1. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_device_dequantize(const char* device, const uint8_t* codes,
                                                           const uint8_t* block_scales,
                                                           const float* scales,
                                                           int32_t scale_of_row, int64_t rows,
                                                           int64_t cols, nvfp4_moe_dtype out_dtype,
                                                           void* out, void* stream);
/* Computes nvfp4_moe_swiglu_quantize on a GPU. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_device_swiglu_quantize(
    const char* device, const nvfp4_moe_swiglu* options, const void* gate_up, int64_t rows,
    int64_t inner, const float* row_weights, uint8_t* codes, uint8_t* block_scales,
    float* row_scales, void* stream);
/* Converts block scales of several matrices on a GPU. linear: (matrices, rows, scale_cols).
 * swizzled: (matrices, nvfp4_moe_swizzled_bytes(rows, scale_cols)). */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_device_swizzle_scales(const char* device,
                                                               const uint8_t* linear,
                                                               int64_t matrices, int64_t rows,
                                                               int64_t scale_cols,
                                                               uint8_t* swizzled, void* stream);
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_device_unswizzle_scales(const char* device,
                                                                 const uint8_t* swizzled,
                                                                 int64_t matrices, int64_t rows,
                                                                 int64_t scale_cols,
                                                                 uint8_t* linear, void* stream);

/* ---- router: from the logits of all experts to the topk_ids and topk_weights of
 * nvfp4_moe_layer_run (docs/explanation/numerics.md, 12). Hosts and GPUs give the same bits. ----
 */

typedef int32_t nvfp4_moe_scoring; /* of a logit x */
enum {
  NVFP4_MOE_SCORING_SOFTMAX = 0, /* over all experts, or with renormalize over the chosen ones */
  NVFP4_MOE_SCORING_SIGMOID = 1, /* 1 / (1 + e^-x) */
  NVFP4_MOE_SCORING_SQRT_SOFTPLUS = 2 /* sqrt(log(1 + e^x)): DeepSeek-V4 */
};
typedef int32_t nvfp4_moe_group_score;
enum {
  NVFP4_MOE_GROUP_SCORE_MAX = 0,     /* the largest selection score of the group: DeepSeek-V2 */
  NVFP4_MOE_GROUP_SCORE_TOP2_SUM = 1 /* the sum of the two largest: DeepSeek-V3 */
};

typedef struct nvfp4_moe_router_config {
  size_t struct_size;
  int64_t num_experts;      /* E, 1 to 1024 */
  int64_t top_k;            /* k, 1 to 32, at most E */
  int64_t num_expert_group; /* divides E, at most 32; 0: 1 */
  int64_t topk_group;       /* groups that experts are chosen from; 0: all */
  nvfp4_moe_scoring scoring;
  nvfp4_moe_group_score group_score;
  int32_t renormalize;         /* 1: weights are divided by their sum */
  float renormalize_epsilon;   /* added to that sum; 0 with SOFTMAX */
  float routed_scaling_factor; /* multiplies every weight, at the end; 0: 1 */
  int32_t correction_bias;     /* 1: a bias is added to the scores for the selection, and not to the
                                  weights */
  int32_t hash_routing; /* 1: a table by token id gives the experts, and the scores only their
                           weights */
  int32_t expert_scale; /* 1: each expert has a factor of its weights (Gemma-4) */
} nvfp4_moe_router_config;

/* One call of a router's GEMM, for the small batches of decoding: logits (T, E) = hidden (T, H)
 * times the transposed weight (E, H). Products are added in fp32 in an order that depends on H only
 * (docs/explanation/numerics.md, section 12), so every host and GPU gives the same bits. */
typedef struct nvfp4_moe_router_gemm_call {
  size_t struct_size;
  int64_t tokens;      /* T, 0 to 2^30 */
  int64_t num_experts; /* E, 1 to 1024 */
  int64_t hidden_size; /* H, a multiple of 8 up to 2^20 */
  const void*
      hidden; /* (T, H) BF16 in rows hidden_stride elements apart, each aligned to 16 bytes */
  int64_t hidden_stride;        /* a multiple of 8; 0: H */
  const void* weight;           /* (E, H) BF16, aligned to 16 bytes */
  void* logits;                 /* (T, E); overlaps nothing else */
  nvfp4_moe_dtype logits_dtype; /* BF16 (default), rounded once, or F32 */
} nvfp4_moe_router_gemm_call;

/* Computes the logits on the CPU. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_router_gemm(const nvfp4_moe_router_gemm_call* call);
/* Computes the logits on arrays in the memory of a GPU (device: "cuda:N"), under the rules of
 * nvfp4_moe_device_select_experts. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_device_router_gemm(const char* device,
                                                            const nvfp4_moe_router_gemm_call* call,
                                                            void* stream);

/* Inputs and outputs of one selection. T tokens. Outputs overlap nothing else. Arrays that the
 * config does not need are NULL. */
typedef struct nvfp4_moe_router_batch {
  size_t struct_size;
  int64_t tokens;               /* 0 to 2^30 */
  const void* logits;           /* (T, E), rows logits_stride elements apart */
  int64_t logits_stride;        /* 0: E */
  const float* correction_bias; /* (E) */
  const void* token_ids;        /* (T), with config.hash_routing */
  const void* hash_table;       /* (vocab_size, k) expert ids, with config.hash_routing */
  int64_t vocab_size;
  void* topk_ids;                   /* (T, k), best first */
  float* topk_weights;              /* (T, k) */
  uint64_t* bad_ids;                /* one number, added to; NULL: not counted */
  nvfp4_moe_dtype logits_dtype;     /* BF16 (default), F16 or F32 */
  nvfp4_moe_dtype token_ids_dtype;  /* I64 (default) or I32 */
  nvfp4_moe_dtype hash_table_dtype; /* I64 (default) or I32 */
  nvfp4_moe_dtype ids_dtype;        /* I32 (default) or I64 */
  const float* expert_scale;        /* (E), with config.expert_scale */
} nvfp4_moe_router_batch;

/* Selects experts on the CPU. If scores are equal, the lower id comes first; NaN comes after every
 * number. A token with a NaN in its selection scores has NaN weights. Ids are always valid, except
 * with config.hash_routing: a token id outside the vocabulary, and a table entry that is not an
 * expert, count in bad_ids and give id -1 and weight 0. Any thread. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_select_experts(const nvfp4_moe_router_config* config,
                                                        const nvfp4_moe_router_batch* batch);
/* Selects experts on arrays in the memory of a GPU (device: "cuda:N"), bad_ids included. Enqueues
 * in `stream` (a cudaStream_t; NULL: the default stream), allocates nothing, waits for nothing, and
 * can be captured. UNSUPPORTED in a build without CUDA. Any thread. */
NVFP4_MOE_API nvfp4_moe_status
nvfp4_moe_device_select_experts(const char* device, const nvfp4_moe_router_config* config,
                                const nvfp4_moe_router_batch* batch, void* stream);

/* Selects experts and runs the layer in one call, with the same bits in routing->topk_ids,
 * routing->topk_weights and batch->out as nvfp4_moe_select_experts and nvfp4_moe_layer_run give.
 * All arrays are in the memory of the layer's device. num_experts and top_k of the router are the
 * layer's, and routing->tokens is the batch's. batch->topk_ids and topk_weights are NULL or
 * routing's. Everything else is as in nvfp4_moe_layer_run. */
NVFP4_MOE_API nvfp4_moe_status nvfp4_moe_layer_run_logits(const nvfp4_moe_layer* layer,
                                                          const nvfp4_moe_router_config* router,
                                                          const nvfp4_moe_router_batch* routing,
                                                          const nvfp4_moe_batch* batch,
                                                          void* workspace, size_t workspace_bytes,
                                                          void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* NVFP4_MOE_NVFP4_MOE_H_ */
