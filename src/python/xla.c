/* SPDX-License-Identifier: Apache-2.0 */
/* fovea for XLA, which fovea.jax registers: one handler for the forward and one for the backward, on the CPU and on
 * CUDA devices. A handler makes a fovea_problem of its buffers and attributes, and calls the C ABI, which checks it
 * before anything is written. It links neither jaxlib nor libfovea: fovea_xla_connect() gets the addresses of what it
 * calls.
 *
 * Attributes: `integers` (the order is that of `Integer` below), `numbers` (scale, softcap, dropout_p) and `backend`, a
 * name or "". Arguments are those of kTensors whose bits are set in kGiven, in that order; then, if kSeed is set, four
 * words of 32 bits: seed and offset. A number of dropout_streams is two words of 32 bits, in a last dimension of their
 * own. Results likewise, by the bits of kResults; on CUDA devices then the workspace. */
#include "python/xla_ffi.h"

#include <fovea/c.h>
#include <stdlib.h>
#include <string.h>

typedef enum Integer {
  kGiven,
  kResults,
  kSeed,
  kFlags,
  kAlign,
  kLeft,
  kRight,
  kMaxQ,
  kMaxK,
  kOuter,
  kHeadsFirst,
  kIntegers
} Integer;
enum { kScale, kSoftcap, kDropout, kNumbers };
enum { kLongestName = 64 };

/* fovea_problem's tensors in its order. */
#define TENSOR(name) offsetof(fovea_problem, name)
static const size_t kTensors[] = {TENSOR(q),
                                  TENSOR(k),
                                  TENSOR(v),
                                  TENSOR(bias),
                                  TENSOR(bias2),
                                  TENSOR(mask),
                                  TENSOR(alibi_slopes),
                                  TENSOR(sink),
                                  TENSOR(cu_seqlens_q),
                                  TENSOR(cu_seqlens_k),
                                  TENSOR(seqused_q),
                                  TENSOR(seqused_k),
                                  TENSOR(out),
                                  TENSOR(lse),
                                  TENSOR(grad_out),
                                  TENSOR(grad_lse),
                                  TENSOR(grad_q),
                                  TENSOR(grad_k),
                                  TENSOR(grad_v),
                                  TENSOR(grad_bias),
                                  TENSOR(grad_bias2),
                                  TENSOR(grad_sink),
                                  TENSOR(dropout_streams)};
#undef TENSOR
enum { kTensorCount = sizeof kTensors / sizeof *kTensors, kStreams = kTensorCount - 1 };
/* q, k, v, out, grad_out, grad_q, grad_k, grad_v: with kHeadsFirst their dimensions are (..., H, S, D). */
static const int64_t kRows = 1 | 2 | 4 | 1 << 12 | 1 << 14 | 1 << 16 | 1 << 17 | 1 << 18;

typedef fovea_status Compute(const fovea_problem*, void*, size_t);
static Compute* forward;
static Compute* backward;
static fovea_status (*workspace_of)(const fovea_problem*, fovea_direction, size_t*);
static const char* (*last_error)(void);

/* Before any call: the addresses of fovea_forward, fovea_backward, fovea_workspace and fovea_last_error. */
FOVEA_API void fovea_xla_connect(Compute* run_forward, Compute* run_backward,
                                 fovea_status (*workspace)(const fovea_problem*, fovea_direction, size_t*),
                                 const char* (*error)(void));
void fovea_xla_connect(Compute* run_forward, Compute* run_backward,
                       fovea_status (*workspace)(const fovea_problem*, fovea_direction, size_t*),
                       const char* (*error)(void)) {
  forward = run_forward;
  backward = run_backward;
  workspace_of = workspace;
  last_error = error;
}

static XlaError* refuse(const XlaCallFrame* frame, int32_t code, const char* message) {
  XlaErrorArgs arguments = {sizeof arguments, NULL, message, code};
  return frame->api->error_create(&arguments);
}

static XlaError* refuse_status(const XlaCallFrame* frame, fovea_status status) {
  switch (status) {
    case FOVEA_INVALID_ARGUMENT:
    case FOVEA_INVALID_TYPE:
      return refuse(frame, kXlaInvalidArgument, last_error());
    case FOVEA_UNSUPPORTED:
      return refuse(frame, kXlaUnimplemented, last_error());
    case FOVEA_OUT_OF_MEMORY:
      return refuse(frame, kXlaResourceExhausted, last_error());
    default:
      return refuse(frame, kXlaInternal, last_error());
  }
}

/* The metadata of a handler. A newer XLA accepts older versions for a year; an older one accepts its own alone. */
static void describe(const XlaCallFrame* frame, XlaMetadata* metadata) {
  int32_t minor = kXlaOldestMinor;
  if (frame->api != NULL && frame->api->version.major == kXlaMajor && frame->api->version.minor > minor) {
    minor = frame->api->version.minor < kXlaNewestMinor ? frame->api->version.minor : kXlaNewestMinor;
  }
  metadata->version.major = kXlaMajor;
  metadata->version.minor = minor;
  metadata->traits = kXlaCommandBufferCompatible; /* the same kernels are launched by every call */
}

static const void* attribute(const XlaCallFrame* frame, const char* name) {
  const size_t length = strlen(name);
  for (int64_t n = 0; n < frame->attributes.size; ++n) {
    const XlaSpan* found = frame->attributes.names[n];
    if (found->size == length && memcmp(found->data, name, length) == 0) {
      return frame->attributes.values[n];
    }
  }
  return NULL;
}

static int32_t type_of(int32_t type) {
  switch (type) {
    case kXlaPred:
      return FOVEA_BOOL;
    case kXlaS32:
      return FOVEA_INT32;
    case kXlaS64:
      return FOVEA_INT64;
    case kXlaF16:
      return FOVEA_FP16;
    case kXlaF32:
      return FOVEA_FP32;
    case kXlaF64:
      return FOVEA_FP64;
    case kXlaBf16:
      return FOVEA_BF16;
    default:
      return 0; /* which the library refuses by the tensor's name */
  }
}

static void swap(int64_t* pair) {
  const int64_t first = pair[0];
  pair[0] = pair[1];
  pair[1] = first;
}

static void read(fovea_tensor* tensor, const XlaBuffer* buffer, int heads_first) {
  memset(tensor, 0, sizeof *tensor);
  tensor->size = sizeof *tensor;
  tensor->data = buffer->data;
  tensor->dtype = type_of(buffer->dtype);
  tensor->rank = (int32_t)buffer->rank;
  int64_t stride = 1;
  for (int64_t dim = buffer->rank - 1; dim >= 0; --dim) {
    tensor->shape[dim] = buffer->dims[dim];
    tensor->stride[dim] = stride;
    stride *= buffer->dims[dim];
  }
  if (heads_first) {
    tensor->flags = FOVEA_TENSOR_STRIDED;
    swap(tensor->shape + buffer->rank - 3);
    swap(tensor->stride + buffer->rank - 3);
  } else {
    memset(tensor->stride, 0, sizeof tensor->stride);
  }
}

/* Numbers of 64 bits, each of two words; false if the last dimension is not that of the words. */
static int join_words(fovea_tensor* tensor) {
  const int32_t last = tensor->rank - 1;
  if (last < 0 || tensor->shape[last] != 2) {
    return 0;
  }
  tensor->rank = last;
  tensor->dtype = FOVEA_INT64;
  return 1;
}

/* Reads the tensors whose bits are set in `which` into `tensors`, which the problem then points to; false if there are
 * not so many, or one has another shape than it can have. */
static int read_all(fovea_problem* problem, fovea_tensor* tensors, const XlaBuffers* from, int64_t which,
                    int heads_first) {
  int64_t at = 0;
  for (int n = 0; n < kTensorCount; ++n) {
    if ((which >> n & 1) == 0) {
      continue;
    }
    const XlaBuffer* buffer = at < from->size ? from->items[at++] : NULL;
    const int swapped = heads_first && (kRows >> n & 1) != 0;
    if (buffer == NULL || buffer->rank > FOVEA_MAX_RANK || (swapped && buffer->rank < 3)) {
      return 0;
    }
    read(&tensors[n], buffer, swapped);
    if (n == kStreams && !join_words(&tensors[n])) {
      return 0;
    }
    *(const fovea_tensor**)(void*)((char*)problem + kTensors[n]) = &tensors[n];
  }
  return 1;
}

static int count(int64_t bits) {
  int ones = 0;
  for (; bits != 0; bits &= bits - 1) {
    ++ones;
  }
  return ones;
}

enum { kAttempts = 100 };

static XlaError* compute_on_cpu(const XlaCallFrame* frame, const fovea_problem* problem, fovea_direction direction) {
  fovea_status status = FOVEA_OUT_OF_MEMORY;
  size_t bytes = 0;
  /* Again where another thread has changed the number of threads in between: with it grows what is needed. */
  for (int attempt = 0; attempt < kAttempts && status == FOVEA_OUT_OF_MEMORY; ++attempt) {
    size_t needed = 0;
    status = workspace_of(problem, direction, &needed);
    if (status != FOVEA_OK) {
      return refuse_status(frame, status);
    }
    bytes = needed > bytes ? needed : bytes;
    void* workspace = bytes == 0 ? NULL : malloc(bytes);
    if (bytes != 0 && workspace == NULL) {
      return refuse(frame, kXlaResourceExhausted, "fovea: no memory for the workspace");
    }
    status = (direction == FOVEA_FORWARD ? forward : backward)(problem, workspace, bytes);
    free(workspace);
  }
  return status == FOVEA_OK ? NULL : refuse_status(frame, status);
}

static XlaError* compute_on_cuda(const XlaCallFrame* frame, fovea_problem* problem, fovea_direction direction,
                                 const XlaBuffer* workspace) {
  XlaStreamArgs stream = {sizeof stream, NULL, frame->context, NULL};
  XlaError* error = frame->api->stream_get(&stream);
  if (error != NULL) {
    return error;
  }
  XlaOrdinalArgs device = {sizeof device, NULL, frame->context, 0};
  error = frame->api->device_ordinal_get(&device);
  if (error != NULL) {
    return error;
  }
  problem->device = FOVEA_CUDA;
  problem->device_index = device.ordinal;
  problem->stream = stream.stream;
  const size_t bytes = (size_t)workspace->dims[0];
  const fovea_status status =
      (direction == FOVEA_FORWARD ? forward : backward)(problem, bytes == 0 ? NULL : workspace->data, bytes);
  return status == FOVEA_OK ? NULL : refuse_status(frame, status);
}

static XlaError* handle(const XlaCallFrame* frame, fovea_direction direction, int on_cuda) {
  if (frame->extension != NULL && frame->extension->type == kXlaMetadataExtension) {
    describe(frame, ((XlaMetadataExtension*)frame->extension)->metadata);
    return NULL;
  }
  const size_t api_read = on_cuda ? sizeof *frame->api : offsetof(XlaApi, others);
  if (frame->struct_size < sizeof *frame || frame->api->struct_size < api_read) {
    return refuse(frame, kXlaUnimplemented, "fovea: this version of JAX is too old; docs/jax.md has the oldest");
  }
  const XlaArray* integers = attribute(frame, "integers");
  const XlaArray* numbers = attribute(frame, "numbers");
  const XlaSpan* backend = attribute(frame, "backend");
  if (integers == NULL || integers->size != kIntegers || numbers == NULL || numbers->size != kNumbers ||
      backend == NULL || backend->size >= kLongestName) {
    return refuse(frame, kXlaInvalidArgument, "fovea: attributes of another version of fovea.jax");
  }
  const int64_t* integer = integers->data;
  const double* number = numbers->data;
  const int64_t arguments = count(integer[kGiven]) + (integer[kSeed] != 0 ? 1 : 0);
  const int64_t results = count(integer[kResults]) + (on_cuda ? 1 : 0);
  if (frame->arguments.size != arguments || frame->results.size != results) {
    return refuse(frame, kXlaInvalidArgument, "fovea: tensors of another version of fovea.jax");
  }

  fovea_problem problem;
  fovea_tensor tensors[kTensorCount];
  char name[kLongestName];
  memset(&problem, 0, sizeof problem);
  problem.size = sizeof problem;
  if (!read_all(&problem, tensors, &frame->arguments, integer[kGiven], integer[kHeadsFirst] != 0) ||
      !read_all(&problem, tensors, &frame->results, integer[kResults], integer[kHeadsFirst] != 0)) {
    return refuse(frame, kXlaInvalidArgument, "fovea: a tensor of another shape than fovea.jax makes");
  }
  if (integer[kSeed] != 0) {
    const XlaBuffer* words = frame->arguments.items[arguments - 1];
    problem.seed_ptr = words->data;
    problem.offset_ptr = problem.seed_ptr + 1;
  }
  problem.flags = (uint32_t)integer[kFlags];
  problem.align = (int32_t)integer[kAlign];
  problem.window_left = integer[kLeft];
  problem.window_right = integer[kRight];
  problem.max_seqlen_q = integer[kMaxQ];
  problem.max_seqlen_k = integer[kMaxK];
  problem.batch_outer = integer[kOuter];
  problem.scale = number[kScale];
  problem.softcap = number[kSoftcap];
  problem.dropout_p = number[kDropout];
  if (backend->size != 0) {
    memcpy(name, backend->data, backend->size);
    name[backend->size] = '\0';
    problem.backend = name;
  }
  if (on_cuda) {
    return compute_on_cuda(frame, &problem, direction, frame->results.items[results - 1]);
  }
  return compute_on_cpu(frame, &problem, direction);
}

/* The handlers. */
#define HANDLER(name, direction, on_cuda)        \
  FOVEA_API XlaError* name(XlaCallFrame* frame); \
  XlaError* name(XlaCallFrame* frame) { return handle(frame, direction, on_cuda); }
HANDLER(fovea_xla_forward_cpu, FOVEA_FORWARD, 0)
HANDLER(fovea_xla_backward_cpu, FOVEA_BACKWARD, 0)
HANDLER(fovea_xla_forward_cuda, FOVEA_FORWARD, 1)
HANDLER(fovea_xla_backward_cuda, FOVEA_BACKWARD, 1)
#undef HANDLER
