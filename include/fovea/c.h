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
 *     header passes shorter structs: the missing fields are taken as 0. One compiled with a newer header passes longer
 *     ones, of at most 4096 bytes: they are accepted if all fields that this library does not know are 0;
 *   - a field of 0 means its default, a NULL tensor is absent, an unknown flag bit is an error;
 *   - nothing is written before everything has been checked;
 *   - no function prints, exits or aborts; every failure returns a status, and
 *     fovea_last_error() returns a text with the argument, its value and what is accepted;
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

/* The result of a call. */
typedef enum fovea_status {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1, /* the values make no sense: Python's ValueError */
  FOVEA_INVALID_TYPE = 2,     /* an element type that is not accepted: Python's TypeError */
  FOVEA_UNSUPPORTED = 3,      /* valid, but no backend here can compute it: NotImplementedError */
  FOVEA_OUT_OF_MEMORY = 4,    /* an allocation failed, or the caller's workspace is too small */
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

/* The forward or the backward of a problem, for fovea_workspace(), fovea_explain(), fovea_describe() and
 * fovea_prepare(). */
typedef enum fovea_direction { FOVEA_FORWARD = 0, FOVEA_BACKWARD = 1 } fovea_direction;

/* The position of query i among the keys is i + shift: with FOVEA_BOTTOM_RIGHT shift = Sk - Sq, with FOVEA_TOP_LEFT 0.
 * It is used by causal, window and ALiBi. With variable lengths Sk and Sq are those of each sequence, with seqused
 * the used lengths. FOVEA_POSITIONS gives another shift. */
typedef enum fovea_align { FOVEA_BOTTOM_RIGHT = 0, FOVEA_TOP_LEFT = 1 } fovea_align;

/* The rule that turns (seed, offset, b, h, i, j) into a dropout decision. */
typedef enum fovea_rng {
  FOVEA_RNG_FOVEA = 0,
  FOVEA_RNG_TORCH_MEM_EFFICIENT = 1 /* bit for bit PyTorch's memory-efficient kernel */
} fovea_rng;

/* The memory that holds the tensors. */
typedef enum fovea_device { FOVEA_CPU = 0, FOVEA_CUDA = 1 } fovea_device;

/* The largest number of dimensions of a tensor. */
#define FOVEA_MAX_RANK 5

/* fovea_tensor::flags */
#define FOVEA_TENSOR_STRIDED 1u /* stride[] is used; without the flag the tensor is row-major contiguous */

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
#define FOVEA_DETERMINISTIC 2u /* the same bits in every run (on the CPU always) */
#define FOVEA_SCALE 4u         /* `scale` is used; without the flag 1 / sqrt(D) */
#define FOVEA_WINDOW 8u        /* `window_left`, `window_right` are used; without the flag unbounded */
/* Rows of out, lse, grad_q, grad_k and grad_v that belong to no sequence (cu_seqlens, seqused) become 0, in lse
 * -inf. Without the flag they are not written. */
#define FOVEA_CLEAR_ROWS 16u
/* `position_q`, `position_k`, `positions_q` and `positions_k` are used; `align` must have its default. Without the flag
 * `align` says where queries are among the keys, and dropout counts rows and columns from 0. */
#define FOVEA_POSITIONS 32u

/* Bits of fovea_problem::accumulate. */
#define FOVEA_ACCUMULATE_OUT 1u
#define FOVEA_ACCUMULATE_GRAD_Q 2u
#define FOVEA_ACCUMULATE_GRAD_K 4u
#define FOVEA_ACCUMULATE_GRAD_V 8u
#define FOVEA_ACCUMULATE_GRAD_BIAS 16u
#define FOVEA_ACCUMULATE_GRAD_BIAS2 32u
#define FOVEA_ACCUMULATE_GRAD_SINK 64u

/* Shapes. Dense: q is (B, Sq, Hq, D), or (B1, B2, Sq, Hq, D) with a batch of two levels. Variable length:
 * cu_seqlens_q and cu_seqlens_k are given and q is packed, (total_q, Hq, D). "Broadcastable" is NumPy's
 * rule: shapes are aligned at the right, a missing dimension or a 1 is broadcast. The other common layout,
 * (B, H, S, D), is expressed by strides.
 * Limits: 2^50 elements and 2^50 bytes from the first to the last of a tensor, 2^32 heads, 2^32 for D and Dv; with
 * dropout sequences of at most 2^32. */
typedef struct fovea_problem {
  size_t size; /* sizeof(fovea_problem) */

  uint32_t flags;
  int32_t align;  /* fovea_align */
  int32_t rng;    /* fovea_rng */
  int32_t device; /* fovea_device: the memory that holds the tensors */
  int32_t device_index;
  int32_t reserved;    /* 0 */
  const char* backend; /* NULL: fovea chooses; else the only backend that may compute, as fovea_backends() names it */
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
  const fovea_tensor* mask;         /* the shape as of bias, bool: not 0: the pair is allowed */
  const fovea_tensor* alibi_slopes; /* (Hq), (B, Hq) or (B1, B2, Hq), fp32 (fp64 with fp64 q); it has no gradient.
                                       slope * |i + shift - j| is subtracted from s_ij */
  const fovea_tensor* sink;         /* (Hq), fp32 (fp64 with fp64 q): one more logit, without a value */
  const fovea_tensor* cu_seqlens_q; /* (B + 1), int32 or int64: starts at 0, never decreases */
  const fovea_tensor* cu_seqlens_k;
  const fovea_tensor* seqused_q; /* (B), int32: the number of rows that each sequence has, from its first on */
  const fovea_tensor* seqused_k;
  int64_t max_seqlen_q; /* packed: at least the longest sequence, with seqused its longest used part; */
  int64_t max_seqlen_k; /*   0 on the CPU: the longest sequence */
  int64_t batch_outer;  /* packed with a batch of two levels: B1, B = B1 * B2; 0: one level */

  /* The forward writes these; the backward reads both. */
  const fovea_tensor* out; /* (B, Sq, Hq, Dv) | (total_q, Hq, Dv), the type of q, or fp32 with a q of 16 bits */
  const fovea_tensor* lse; /* (B, Hq, Sq) | (B1, B2, Hq, Sq) | (Hq, total_q): natural logarithm, fp32
                              (fp64 with fp64 q); optional in the forward */

  /* The backward reads these. */
  const fovea_tensor* grad_out; /* as out, the type of q */
  const fovea_tensor* grad_lse; /* as lse; optional */
  /* The backward computes the gradients whose tensors are given; at least one must be. */
  const fovea_tensor* grad_q;     /* as q, or fp32 with a q of 16 bits */
  const fovea_tensor* grad_k;     /* the same */
  const fovea_tensor* grad_v;     /* the same */
  const fovea_tensor* grad_bias;  /* shape and type of the bias as given, or fp32 with one of 16 bits */
  const fovea_tensor* grad_bias2; /* the same */
  const fovea_tensor* grad_sink;  /* as sink */

  /* With FOVEA_POSITIONS: where rows are in a larger problem of which this call computes a part. In sequence b, query i
   * has position position_q + positions_q[b] + i and key j has position position_k + positions_k[b] + j. Causal,
   * window and ALiBi then use shift = the position of query 0 minus that of key 0. Dropout decides about a pair by its
   * positions. Biases and masks have the rows and columns of this call. Each position of a first row is under 2^40 in
   * size. With dropout it is a multiple of 16, 0 or more, all positions are under 2^32, and rng is FOVEA_RNG_FOVEA. */
  int64_t position_q;
  int64_t position_k;
  const fovea_tensor* positions_q; /* (B), int64; optional: 0 */
  const fovea_tensor* positions_k; /* the same for keys */
  /* The number n of the stream of random numbers that dropout has for a head of a batch entry. Broadcastable to
   * (B, Hq), with two levels to (B1, B2, Hq), int64; optional: b * Hq + h. */
  const fovea_tensor* dropout_streams;
  /* Results that are combined with what their tensors hold, bits FOVEA_ACCUMULATE_*. A gradient is added to it. With
   * FOVEA_ACCUMULATE_OUT, out and lse (required) hold the result over other keys, 0 and -inf where a row has had none,
   * and get the result over those keys and these. Such results are fp32 or fp64, and rows of them that belong to no
   * sequence are kept. */
  uint64_t accumulate;
} fovea_problem;

/* How fovea_rows shares out rows. */
typedef enum fovea_rows_kind {
  FOVEA_ROWS_ZIGZAG = 0,     /* one sequence: each rank has a piece from the front and one from the back */
  FOVEA_ROWS_CONTIGUOUS = 1, /* one sequence or several: each rank has adjacent rows, in the order of the ranks */
  FOVEA_ROWS_PACKED = 2      /* sequences one after the other: long ones are cut, short ones given whole */
} fovea_rows_kind;

/* A plan of which rows of a sequence, or of packed sequences, each rank of a group has: what is asked, and the memory
 * that fovea_rows_plan() fills. A piece is a range of adjacent rows of one sequence. A rank has at most two pieces of
 * each sequence. Its rows lie in its memory piece by piece: first the first piece of every sequence, then the second
 * ones. Results that are NULL are not written; an array of a number for each rank has ranks * head_ranks of them. */
typedef struct fovea_rows {
  size_t size; /* sizeof(fovea_rows) */

  int32_t kind;   /* fovea_rows_kind */
  uint32_t flags; /* FOVEA_CAUSAL and FOVEA_WINDOW, for pairs and balance */
  int64_t ranks;  /* at least 1 */
  /* 0 and 1: ranks exchange keys alone. n: the rows of each of `ranks` are shared out, in their order, among n ranks
   * that exchange heads; rank r * n + m has part m of those of r, and computes all of them for its heads.
   * ranks * head_ranks is at most 65536. */
  int64_t head_ranks;
  int64_t block;          /* 0: 128. Pieces begin at multiples of so many rows; dropout needs a multiple of 16 */
  int64_t sequences;      /* the number of lengths, at most 2^31; 1 if kind is FOVEA_ROWS_ZIGZAG */
  const int64_t* lengths; /* (sequences): rows of each, 0 or more; at most 2^31 in all */
  int64_t window_left;    /* with FOVEA_WINDOW: as in fovea_problem, with a shift of 0 */
  int64_t window_right;

  int64_t* rows;          /* for each rank: the number of its rows, which may be 0 */
  int64_t* pairs;         /* for each rank: pairs of a query that it computes and a key that causal and window allow */
  int64_t* sends;         /* for each rank: rows of keys that it gives to each other rank if keys are gathered */
  int64_t* receives;      /* for each rank: rows of keys that it gets then, from all other ranks */
  int64_t* piece_counts;  /* for each rank: the number of its pieces */
  int64_t* pieces;        /* (piece_capacity, 3): sequence, first row within it, number of rows; rank after rank */
  int64_t piece_capacity; /* with `pieces`: for how many it has memory */
  double* balance;        /* one number: the largest of `pairs` over their mean. 1 is perfect, or no pairs at all */
} fovea_rows;

/* The version of the library that is loaded: major * 10000 + minor * 100 + patch. */
FOVEA_API int fovea_version(void);

/* The error of this thread's last call; "" if it succeeded. Valid until the thread's next call. */
FOVEA_API const char* fovea_last_error(void);

/* The name of a status: "ok", "invalid argument", ... */
FOVEA_API const char* fovea_status_name(fovea_status status);

/* Bytes of scratch memory that the call needs: on the device of the tensors, any alignment. It depends on
 * shapes, strides, types, options, the number of threads and the longest sequence (max_seqlen_*, else what
 * cu_seqlens_* give). It does not depend on other values. On a CUDA device it also depends on which of the tensors'
 * addresses are multiples of 16 bytes; NULL counts as a multiple. */
FOVEA_API fovea_status fovea_workspace(const fovea_problem* problem, fovea_direction direction, size_t* bytes);

/* Computes out (and lse, if it is given) from q, k, v and the options. `workspace` is the caller's, of at least
 * fovea_workspace() bytes; NULL if that is 0. No two concurrent calls may share one. */
FOVEA_API fovea_status fovea_forward(const fovea_problem* problem, void* workspace, size_t workspace_bytes);

/* Computes the gradients whose tensors are given, at least one. The workspace is as for fovea_forward(). */
FOVEA_API fovea_status fovea_backward(const fovea_problem* problem, void* workspace, size_t workspace_bytes);

/* Writes which backend is used for the problem, and why each other one is not: text, ended by NUL, cut to
 * `capacity` bytes. `*needed` (optional) is set to the length of the whole text plus 1. The tensors' data may be NULL.
 * Returns FOVEA_UNSUPPORTED if no backend can compute the problem; the text then has the reasons. */
FOVEA_API fovea_status fovea_explain(const fovea_problem* problem, fovea_direction direction, char* text,
                                     size_t capacity, size_t* needed);

/* fovea_explain() for a problem in its one-line text form, such as
 * "fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal align=br softcap=30". */
FOVEA_API fovea_status fovea_explain_line(const char* line, char* text, size_t capacity, size_t* needed);

/* fovea_explain() for a GPU of an architecture, such as "sm_90". The machine needs no such GPU. If an architecture has
 * several products, the largest is assumed. The device that the line names is ignored. */
FOVEA_API fovea_status fovea_explain_for(const char* line, const char* architecture, char* text, size_t capacity,
                                         size_t* needed);

/* The one-line text form of a problem. */
FOVEA_API fovea_status fovea_describe(const fovea_problem* problem, fovea_direction direction, char* text,
                                      size_t capacity, size_t* needed);

/* One line for each backend: its name, a tab, "available" or why it is not. */
FOVEA_API fovea_status fovea_backends(char* text, size_t capacity, size_t* needed);

/* Writes a description of this machine. It has a line for each of: the version, the processor, instruction sets,
 * threads, backends, the driver, every GPU, NVRTC (its path, and why it was chosen), the folder of compiled kernels,
 * and each environment variable FOVEA_... A line is a name, a tab, and a value or the reason why it cannot be used. If
 * the value of a variable is not accepted, it is "REFUSED", then the value and what is accepted. */
FOVEA_API fovea_status fovea_machine(char* text, size_t capacity, size_t* needed);

/* Sets the folders that are searched for NVRTC first, after FOVEA_NVRTC: absolute names, separated by ':'. The library
 * is in a folder itself, or below it where NVIDIA's wheels (nvidia/cu13/lib, ...), a toolkit or conda put it. The
 * Python package gives sys.path. Call it before the first call for a GPU; later calls have no effect. */
FOVEA_API fovea_status fovea_set_nvrtc_folders(const char* folders);

/* The dropout decisions as bytes, 1 = kept, (batch, heads, seqlen_q, seqlen_k) row-major, on the CPU. */
FOVEA_API fovea_status fovea_dropout_mask(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, double p,
                                          uint64_t seed, uint64_t offset, fovea_rng rng, uint8_t* mask);

/* Sets the number of threads that a CPU call uses, at most 4096. n = 0, the default: the smaller of the number of cores
 * that this process may use and its cgroup's quota. A thread is created by the first call that has work for it. In a
 * process with PyTorch a call computes on PyTorch's threads, and n = 0 is not more than PyTorch uses. */
FOVEA_API fovea_status fovea_set_num_threads(int n);

/* The number of threads that a CPU call uses now. */
FOVEA_API int fovea_num_threads(void);

/* Compiles (or reads from the cache) and loads the kernels that the call needs. Call it before a CUDA graph captures
 * the call, or to compile before the first call. Nothing is computed. The tensors' data may be NULL, which counts as an
 * address that is a multiple of 16. On the CPU it does nothing. */
FOVEA_API fovea_status fovea_prepare(const fovea_problem* problem, fovea_direction direction);

/* Shares out rows among ranks: fills the arrays that `rows` has. `*needed` (optional) is set to the number of pieces of
 * all ranks. The plan depends on what is asked alone, so every rank makes the same one. If piece_capacity is too small,
 * the call is FOVEA_INVALID_ARGUMENT, *needed is set, and nothing else is written. */
FOVEA_API fovea_status fovea_rows_plan(const fovea_rows* rows, int64_t* needed);

#ifdef __cplusplus
}
#endif
#endif /* FOVEA_C_H */
