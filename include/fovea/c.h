/* SPDX-License-Identifier: Apache-2.0
 *
 * fovea: exact fused attention, forward and backward. The C ABI (C99).
 *
 *     s_ij = softcap(scale * <q_i, k_j>) + bias_ij + bias2_ij - slope_h * |i + shift - j|
 *     o_i  = sum over allowed j of  keep_ij * softmax_j(s_ij) / (1 - p_drop) * v_j
 *
 * One fovea_problem describes the operation for the forward, the backward, the workspace query and
 * explain. Rules that hold everywhere:
 *   - every struct begins with its own size in bytes (`sizeof`) and grows at its end. A program compiled with an older
 *     header passes shorter structs: what they lack is 0. One compiled with a newer header passes longer ones: they are
 *     accepted where everything that this library does not know is 0, up to 4096 bytes;
 *   - what is zero means the default, a NULL tensor was not given, an unknown bit is refused;
 *   - nothing is written before everything has been checked;
 *   - no function prints, exits or aborts; whatever fails returns a status, and
 *     fovea_last_error() says in words which argument, what it was and what is accepted;
 *   - the rounding mode and the flushing of denormals are the caller's. Floating-point exceptions are masked during a
 *     call, and the caller's masks and flags are as before after it.
 */
#ifndef FOVEA_C_H
#define FOVEA_C_H

#include <stddef.h>
#include <stdint.h>

#define FOVEA_VERSION_MAJOR 0
#define FOVEA_VERSION_MINOR 1
#define FOVEA_VERSION_PATCH 0

#if defined(_WIN32)
#define FOVEA_API
#else
#define FOVEA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a call can end with. */
typedef enum fovea_status {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1, /* the values make no sense: Python's ValueError */
  FOVEA_INVALID_TYPE = 2,     /* an element type that does not go here: Python's TypeError */
  FOVEA_UNSUPPORTED = 3,      /* meaningful, but no backend does it here: NotImplementedError */
  FOVEA_OUT_OF_MEMORY = 4,    /* memory or the caller's workspace is too small */
  FOVEA_DEVICE_ERROR = 5,     /* a device fault: RuntimeError */
  FOVEA_INTERNAL_ERROR = 6    /* a fault of fovea's own: please report it */
} fovea_status;

/* The type of a tensor's elements. */
typedef enum fovea_dtype {
  FOVEA_FP32 = 1,
  FOVEA_FP16 = 2,
  FOVEA_BF16 = 3,
  FOVEA_FP64 = 4, /* CPU only */
  FOVEA_BOOL = 5, /* one byte, 0 or not 0 */
  FOVEA_INT32 = 6,
  FOVEA_INT64 = 7
} fovea_dtype;

/* Which of the two computations a question is about. */
typedef enum fovea_direction { FOVEA_FORWARD = 0, FOVEA_BACKWARD = 1 } fovea_direction;

/* Where row i of the queries stands among the keys: shift = Sk - Sq, or 0. Used by causal, window and
 * ALiBi alike; with variable lengths per sequence, with seqused the used lengths. */
typedef enum fovea_align { FOVEA_BOTTOM_RIGHT = 0, FOVEA_TOP_LEFT = 1 } fovea_align;

/* The rule that turns (seed, offset, b, h, i, j) into a dropout decision. */
typedef enum fovea_rng {
  FOVEA_RNG_FOVEA = 0,
  FOVEA_RNG_TORCH_MEM_EFFICIENT = 1 /* bit for bit PyTorch's memory-efficient kernel */
} fovea_rng;

/* Where the tensors lie. */
typedef enum fovea_device { FOVEA_CPU = 0, FOVEA_CUDA = 1 } fovea_device;

/* The largest number of dimensions of a tensor. */
#define FOVEA_MAX_RANK 5

/* fovea_tensor::flags */
#define FOVEA_TENSOR_STRIDED 1u /* stride[] is meant; without it the tensor is row-major contiguous */

/* A view of the caller's memory. Strides count elements, may be negative, and are 0 wherever an input is
 * broadcast. `data` may be NULL only where the tensor has no elements. */
typedef struct fovea_tensor {
  size_t size; /* sizeof(fovea_tensor) */
  void* data;
  int32_t dtype; /* fovea_dtype */
  int32_t rank;
  uint32_t flags;
  uint32_t reserved; /* 0 */
  int64_t shape[FOVEA_MAX_RANK];
  int64_t stride[FOVEA_MAX_RANK];
} fovea_tensor;

/* fovea_problem::flags */
#define FOVEA_CAUSAL 1u        /* j <= i + shift */
#define FOVEA_DETERMINISTIC 2u /* the same bits every run (on the CPU always) */
#define FOVEA_SCALE 4u         /* `scale` is meant; without it 1 / sqrt(D) */
#define FOVEA_WINDOW 8u        /* `window_left`, `window_right` are meant; without it unbounded */
/* Rows of out, lse, grad_q, grad_k and grad_v that no sequence owns (cu_seqlens, seqused) become 0, in lse -inf.
 * Without it they are not written. */
#define FOVEA_CLEAR_ROWS 16u

/* Shapes. Dense: q is (B, Sq, Hq, D), or (B1, B2, Sq, Hq, D) with a batch of two levels. Variable length:
 * cu_seqlens_q and cu_seqlens_k are given and q is packed, (total_q, Hq, D). "Broadcastable" is NumPy's
 * rule: shapes are aligned at the right, a missing dimension or a 1 is broadcast. The other layout that
 * people use, (B, H, S, D), is a matter of strides.
 * Limits: 2^50 elements and 2^50 bytes from the first to the last of a tensor, 2^32 heads, 2^32 for D and Dv; with
 * dropout sequences of at most 2^32. */
typedef struct fovea_problem {
  size_t size; /* sizeof(fovea_problem) */

  uint32_t flags;
  int32_t align;  /* fovea_align */
  int32_t rng;    /* fovea_rng */
  int32_t device; /* fovea_device: where the pointers point */
  int32_t device_index;
  int32_t reserved;    /* 0 */
  const char* backend; /* NULL: the best; else one that fovea_backends() names, and no other serves */
  void* stream;        /* CUDA: the stream; CPU: NULL */

  double scale;         /* with FOVEA_SCALE: any finite number */
  int64_t window_left;  /* with FOVEA_WINDOW: keys i + shift - left <= j; -1: unbounded */
  int64_t window_right; /* with FOVEA_WINDOW: keys j <= i + shift + right; -1: unbounded */
  double softcap;       /* 0: none; s = softcap * tanh(s / softcap) */
  double dropout_p;     /* 0 <= p <= 1; the backward gets the forward's p, seed and offset */
  uint64_t seed;
  uint64_t offset;
  const uint64_t* seed_ptr;   /* optional, on the device: added to seed */
  const uint64_t* offset_ptr; /* optional, on the device: added to offset */

  /* Inputs of both directions. */
  const fovea_tensor* q;            /* (B, Sq, Hq, D) | (total_q, Hq, D); fp32, fp16, bf16, on the CPU fp64 */
  const fovea_tensor* k;            /* (B, Sk, Hk, D) | (total_k, Hk, D); Hq % Hk == 0, the type of q */
  const fovea_tensor* v;            /* (B, Sk, Hk, Dv) | (total_k, Hk, Dv) */
  const fovea_tensor* bias;         /* broadcastable to (B, Hq, Sq, Sk), with two levels to (B1, B2, Hq, Sq, Sk);
                                       packed to (B, Hq, max_seqlen_q, max_seqlen_k), within each sequence */
  const fovea_tensor* bias2;        /* a second one, as bias */
  const fovea_tensor* mask;         /* the shape as of bias, bool: not 0 takes part */
  const fovea_tensor* alibi_slopes; /* (Hq), (B, Hq) or (B1, B2, Hq), fp32 (fp64 with fp64 q) */
  const fovea_tensor* sink;         /* (Hq), fp32 (fp64 with fp64 q): one more logit, without a value */
  const fovea_tensor* cu_seqlens_q; /* (B + 1), int32 or int64: starts at 0, never decreases */
  const fovea_tensor* cu_seqlens_k;
  const fovea_tensor* seqused_q; /* (B), int32: only so many rows of each sequence exist */
  const fovea_tensor* seqused_k;
  int64_t max_seqlen_q; /* packed: at least the longest sequence, with seqused its longest used part; */
  int64_t max_seqlen_k; /*   0 on the CPU: the longest sequence */
  int64_t batch_outer;  /* packed with a batch of two levels: B1, B = B1 * B2; 0: one level */

  /* The forward writes these; the backward reads both. */
  const fovea_tensor* out; /* (B, Sq, Hq, Dv) | (total_q, Hq, Dv), the type of q */
  const fovea_tensor* lse; /* (B, Hq, Sq) | (B1, B2, Hq, Sq) | (Hq, total_q): natural logarithm, fp32
                              (fp64 with fp64 q); optional in the forward */

  /* The backward reads these. */
  const fovea_tensor* grad_out; /* as out */
  const fovea_tensor* grad_lse; /* as lse; optional */
  /* The backward writes those of these that are given, at least one, and only those. */
  const fovea_tensor* grad_q;
  const fovea_tensor* grad_k;
  const fovea_tensor* grad_v;
  const fovea_tensor* grad_bias; /* the shape of the bias as given, its type */
  const fovea_tensor* grad_bias2;
  const fovea_tensor* grad_sink; /* (Hq) */
} fovea_problem;

/* The version of the library that is loaded: major * 10000 + minor * 100 + patch. */
FOVEA_API int fovea_version(void);

/* What went wrong in this thread's last call; "" if nothing did. Valid until the thread's next call. */
FOVEA_API const char* fovea_last_error(void);

/* The name of a status: "ok", "invalid argument", ... */
FOVEA_API const char* fovea_status_name(fovea_status status);

/* Bytes of scratch memory that the call needs: on the device of the tensors, any alignment. It depends on
 * shapes, strides, types, options, the number of threads and the longest sequence (max_seqlen_*, else what
 * cu_seqlens_* say), not on what else the tensors hold or where they lie; on a CUDA device also on which of the
 * tensors' addresses are multiples of 16 (NULL is). */
FOVEA_API fovea_status fovea_workspace(const fovea_problem* problem, fovea_direction direction, size_t* bytes);

/* Computes out (and lse, if it is given) from q, k, v and the options. `workspace` is the caller's, of at least
 * fovea_workspace() bytes; NULL if that is 0. No two concurrent calls may share one. */
FOVEA_API fovea_status fovea_forward(const fovea_problem* problem, void* workspace, size_t workspace_bytes);

/* Computes the gradients whose tensors are given, at least one. The workspace is as for fovea_forward(). */
FOVEA_API fovea_status fovea_backward(const fovea_problem* problem, void* workspace, size_t workspace_bytes);

/* Which backend serves the problem and why each other one does not: text, ended by NUL, cut to
 * `capacity` bytes; `*needed` (optional) gets the whole length and 1. The tensors' data may be NULL.
 * FOVEA_UNSUPPORTED if no backend serves it; the text says why all the same. */
FOVEA_API fovea_status fovea_explain(const fovea_problem* problem, fovea_direction direction, char* text,
                                     size_t capacity, size_t* needed);

/* fovea_explain() for a problem in its one-line text form, such as
 * "fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal=br softcap=30". */
FOVEA_API fovea_status fovea_explain_line(const char* line, char* text, size_t capacity, size_t* needed);

/* fovea_explain() for a GPU of an architecture, such as "sm_90", which need not be there: what it would do with the
 * problem. Of several products of an architecture the largest is meant. The device that the line names is ignored. */
FOVEA_API fovea_status fovea_explain_for(const char* line, const char* architecture, char* text, size_t capacity,
                                         size_t* needed);

/* The one-line text form of a problem. */
FOVEA_API fovea_status fovea_describe(const fovea_problem* problem, fovea_direction direction, char* text,
                                      size_t capacity, size_t* needed);

/* One line for each backend: its name, a tab, "available" or why it is not. */
FOVEA_API fovea_status fovea_backends(char* text, size_t capacity, size_t* needed);

/* What this machine is to fovea, for people: a line each for the version, the processor, instruction sets, threads,
 * backends, the driver, every GPU, NVRTC (which one, and why that one), the folder of compiled kernels, and each
 * environment variable FOVEA_...: a name, a tab, and what it is or why it cannot be used. A variable with a value that
 * is not accepted is "REFUSED", then the value and what is accepted. */
FOVEA_API fovea_status fovea_machine(char* text, size_t capacity, size_t* needed);

/* Where NVRTC is looked for before all other places but FOVEA_NVRTC: absolute names of folders, separated by ':'. A
 * folder has the library in it, or below it where NVIDIA's wheels (nvidia/cu13/lib, ...), a toolkit or conda put it.
 * The Python package gives sys.path. Before the first call for a GPU; later ones change nothing. */
FOVEA_API fovea_status fovea_set_nvrtc_folders(const char* folders);

/* The dropout decisions as bytes, 1 = kept, (batch, heads, seqlen_q, seqlen_k) row-major, on the CPU. */
FOVEA_API fovea_status fovea_dropout_mask(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, double p,
                                          uint64_t seed, uint64_t offset, fovea_rng rng, uint8_t* mask);

/* Threads that a CPU call uses. n = 0: the least of the cores this process may use and its cgroup's quota,
 * which is also where it starts. No thread is made before the first call that has work for it. */
FOVEA_API fovea_status fovea_set_num_threads(int n);

/* The number of threads that a CPU call uses now. */
FOVEA_API int fovea_num_threads(void);

/* Compiles (or reads from the cache) and loads the kernels that the call needs, so that the call itself never does:
 * before a CUDA graph captures it, or to have the time spent before the first call. Nothing is computed; the tensors'
 * data may be NULL, which stands for an address that is a multiple of 16. On the CPU there is nothing to do. */
FOVEA_API fovea_status fovea_prepare(const fovea_problem* problem, fovea_direction direction);

#ifdef __cplusplus
}
#endif
#endif /* FOVEA_C_H */
