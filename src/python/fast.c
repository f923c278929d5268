/* SPDX-License-Identifier: Apache-2.0 */
/* The fast path of fovea.torch: from Python's arguments to the C ABI and back without Python code in between, for
 * CPython's limited API. It needs no header of PyTorch and links neither PyTorch nor libfovea: start() gets the
 * addresses of what it calls. Tensors are read by DLPack's exchange API, which PyTorch 2.11 has, and made by C
 * functions of libtorch. Python's methods do either where these are missing.
 *
 * It computes the calls that it understands entirely and declines every other one by returning None: then Python
 * computes the same call from the beginning, which is also how every error gets its text. So it may decline, but must
 * not accept what Python would refuse, nor compute what a mode, a transform or the profiler would have to see. An
 * exception goes on to the caller where repeating the call would repeat what others have seen: a seed that was drawn, a
 * hook that ran.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000 /* 3.10, the first with METH_FASTCALL; PyTorch 2.9 needs it as well */
#include <Python.h>
#include <fovea/c.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- what start() is given ---- */

/* Each list is given a macro that is written for each of its entries. */
/* clang-format off */

/* Python's objects, by the names that fovea.torch._fast gives them. */
#define OBJECTS(X) \
  X(Tensor) X(Parameter) X(strided) X(dtypes) X(modes) X(transforms) X(profiler) X(tracing) X(forward_ad) \
  X(any_autocast) X(autocast_enabled) X(autocast_dtype) X(grad_enabled) X(deterministic) X(warn_only) X(stream) \
  X(draw_seed) X(apply) X(node) X(backward) X(compiling) X(empty_like) X(zeros_like) X(empty_strided) X(exchange) \
  X(backend_order) X(math_allowed) X(flash_allowed) X(efficient_allowed) X(cudnn_allowed) X(begin_backward) \
  X(stop)

/* What enable() gives to connect(): fovea.torch._enable has them. */
#define CONNECTIONS(X) X(in_python) X(state) X(decide) X(give_back) X(composite) X(operators)

typedef struct Opaque* Handle; /* AtenTensorHandle */

/* Functions: name, result, arguments. The library's, */
#define LIBRARY(X) \
  X(fovea_forward, fovea_status, (const fovea_problem*, void*, size_t)) \
  X(fovea_backward, fovea_status, (const fovea_problem*, void*, size_t)) \
  X(fovea_workspace, fovea_status, (const fovea_problem*, fovea_direction, size_t*))

/* of libtorch one that makes an object of a tensor: stable from PyTorch 2.14 on; before that THPVariable_Wrap(const
 * at::TensorBase&) of C++, whose argument is an address like a handle, */
#define WRAPPERS(X) \
  X(torch_tensor_to_pyobject, int32_t, (Handle, void*, void**)) \
  X(THPVariable_Wrap, PyObject*, (Handle))

/* and these: all of them, or Python's methods instead. */
#define STABLE(X) \
  X(aoti_torch_get_data_ptr, int32_t, (Handle, void**)) \
  X(aoti_torch_empty_strided, int32_t, \
    (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*)) \
  X(aoti_torch_delete_tensor_object, int32_t, (Handle)) \
  X(aoti_torch_device_type_cpu, int32_t, (void)) \
  X(aoti_torch_device_type_cuda, int32_t, (void)) \
  X(aoti_torch_dtype_float32, int32_t, (void)) \
  X(aoti_torch_dtype_float16, int32_t, (void)) \
  X(aoti_torch_dtype_bfloat16, int32_t, (void)) \
  X(aoti_torch_dtype_float64, int32_t, (void)) \
  X(aoti_torch_dtype_uint8, int32_t, (void))

/* Names of keywords and attributes, as Python's interned strings. The first ones are the tensors of a call, in the
 * order of the operator fovea::attention. */
#define NAMES(X) \
  X(q) X(k) X(v) X(bias) X(bias2) X(mask) X(alibi_slopes) X(sink) X(cu_seqlens_q) X(cu_seqlens_k) X(seqused_q) \
  X(seqused_k) X(seed) X(offset) X(scale) X(causal) X(window) X(align) X(softcap) X(dropout_p) X(rng) \
  X(max_seqlen_q) X(max_seqlen_k) X(batch_shape) X(layout) X(deterministic) X(backend) X(return_lse) \
  X(_current_level) X(requires_grad) X(is_nested) X(is_neg) X(shape) X(stride) X(dtype) X(data_ptr) X(is_cpu) \
  X(is_cuda) X(get_device) X(device) X(new_empty_strided) X(contiguous) X(to_save) X(materialize_grads) X(call) \
  X(needs_input_grad) X(saved_tensors) X(cpu) X(cuda) X(enable_gqa) X(decisions)
/* clang-format on */

enum {
#define NAME(name) k_##name,
  NAMES(NAME)
#undef NAME
      kNames
};
enum { kTensors = 14, kFields = k_seqused_k + 1, kGrads = 6, kCodes = FOVEA_INT64 + 1, kUint8 = kCodes };
static const int kDifferentiable[kGrads] = {k_q, k_k, k_v, k_bias, k_bias2, k_sink};

/* Of DLPack 1.3 what is called: https://dmlc.github.io/dlpack/latest/c_api.html */
typedef struct DlTensor {
  void* data;
  struct {
    int32_t type, index;
  } device;
  int32_t rank;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *stride;
  uint64_t byte_offset;
} DlTensor;
typedef struct Exchange {
  struct {
    uint32_t major, minor;
  } version;
  void *previous, *allocate, *from_object, *to_object;
  int (*read)(void* object, DlTensor* tensor); /* what it gives is the object's */
} Exchange;
enum { kDlCpu = 1, kDlCuda = 2, kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4, kDlBool = 6 };

/* clang-format off */
/* NOLINTBEGIN(bugprone-macro-parentheses): names and types */
static struct {
#define OBJECT(name) PyObject* name;
#define FUNCTION(name, result, arguments) result(*name) arguments;
  OBJECTS(OBJECT) CONNECTIONS(OBJECT) LIBRARY(FUNCTION) WRAPPERS(FUNCTION) STABLE(FUNCTION)
#undef OBJECT
#undef FUNCTION
  PyObject* names[kNames];
  PyObject* zero; /* 0.0 */
  const Exchange* dlpack; /* NULL: tensors are read by methods */
  int stable, cpu, cuda;  /* 0: tensors are made by methods */
  int32_t types[kUint8 + 1]; /* PyTorch's number of each type of results, and of uint8 */
  long long served; /* calls of sdpa() that it has computed */
  PyObject* left;   /* by the reason, calls that it has given to `composite` */
  pthread_key_t scratch;
} G;
/* NOLINTEND(bugprone-macro-parentheses) */
/* clang-format on */

/* ---- a call ---- */

/* What a call has besides its tensors; it is kept for the backward as bytes. */
typedef struct Options {
  uint64_t seed, offset;
  double scale, softcap, dropout_p;
  int64_t window_left, window_right, max_seqlen_q, max_seqlen_k;
  uint32_t given;  /* a bit for each tensor that is there */
  uint32_t flags;  /* fovea_problem::flags */
  int32_t align;   /* fovea_align, -1 if none was given */
  int32_t rng;     /* fovea_rng */
  int32_t swapped; /* layout="bhsd": dimensions of heads and rows are exchanged */
  int32_t packed;
} Options;

typedef struct View {
  PyObject* object; /* borrowed */
  void* data;
  int32_t type; /* fovea_dtype, or kUint8 */
  int32_t rank;
  int32_t device, index;
  int64_t shape[FOVEA_MAX_RANK], stride[FOVEA_MAX_RANK];
} View;

typedef struct Call {
  Options options;
  View tensors[kTensors];
  fovea_problem problem;
  fovea_tensor memory[kFields + 10]; /* what the problem points to */
  int used;
  int learns, computed; /* of a forward: a backward is likely to follow; the library has done it */
} Call;

/* Whether calling this returned True, False (0) or something else, or failed (-1). */
static int is_true(PyObject* result) {
  int truth = -1;
  if (result == Py_True) truth = 1;
  if (result == Py_False) truth = 0;
  Py_XDECREF(result);
  return truth;
}

static int ask(PyObject* function) { return is_true(PyObject_CallNoArgs(function)); }

static int attribute(PyObject* object, int name) { return is_true(PyObject_GetAttr(object, G.names[name])); }

static PyObject* method(PyObject* object, int name) {
  return PyObject_CallMethodObjArgs(object, G.names[name], (PyObject*)NULL);
}

static int grad_enabled(void) { return ask(G.grad_enabled); }

/* is_watched() in _eager.py: whether a mode, a transform, the profiler or tracing needs to see the operator. */
static int is_watched(void) {
  PyObject* modes = PyObject_CallNoArgs(G.modes);
  if (!modes) return 1;
  const long count = PyLong_AsLong(modes);
  Py_DECREF(modes);
  if (count != 0 || ask(G.transforms) != 0 || ask(G.profiler) != 0) return 1;
  PyObject* level = PyObject_GetAttr(G.forward_ad, G.names[k__current_level]);
  if (!level) return 1;
  const long current = PyLong_AsLong(level);
  Py_DECREF(level);
  if (current >= 0) return 1;
  PyObject* state = PyObject_CallNoArgs(G.tracing);
  Py_XDECREF(state);
  return state != Py_None;
}

/* ---- tensors ---- */

static int type_of(uint8_t code, uint8_t bits) {
  switch (code << 8 | bits) {
    case kDlFloat << 8 | 32:
      return FOVEA_FP32;
    case kDlFloat << 8 | 16:
      return FOVEA_FP16;
    case kDlBfloat << 8 | 16:
      return FOVEA_BF16;
    case kDlFloat << 8 | 64:
      return FOVEA_FP64;
    case kDlBool << 8 | 8:
      return FOVEA_BOOL;
    case kDlInt << 8 | 32:
      return FOVEA_INT32;
    case kDlInt << 8 | 64:
      return FOVEA_INT64;
    case kDlUint << 8 | 8:
      return kUint8;
    default:
      return kUint8 + 1;
  }
}

/* A tensor without memory, such as a sparse one, raises an exception. */
static int read_by_dlpack(PyObject* object, View* x) {
  DlTensor tensor;
  if (G.dlpack->read(object, &tensor) != 0 || tensor.rank > FOVEA_MAX_RANK || tensor.dtype.lanes != 1 ||
      (tensor.device.type != kDlCpu && tensor.device.type != kDlCuda))
    return 0;
  x->data = tensor.data ? (char*)tensor.data + tensor.byte_offset : NULL;
  x->type = type_of(tensor.dtype.code, tensor.dtype.bits);
  x->rank = tensor.rank;
  x->device = tensor.device.type == kDlCpu ? FOVEA_CPU : FOVEA_CUDA;
  x->index = tensor.device.type == kDlCpu ? -1 : tensor.device.index;
  for (int i = 0; i < tensor.rank; ++i) {
    x->shape[i] = tensor.shape[i];
    x->stride[i] = tensor.stride[i];
  }
  return 1;
}

/* The rank, or -1. Takes the reference. */
static Py_ssize_t read_dims(PyObject* tuple, int64_t* dims) {
  if (!tuple) return -1;
  Py_ssize_t rank = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
  if (rank > FOVEA_MAX_RANK) rank = -1;
  for (Py_ssize_t i = 0; i < rank; ++i) dims[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  Py_DECREF(tuple);
  return PyErr_Occurred() ? -1 : rank;
}

static int address_of(PyObject* tensor, void** data) {
  PyObject* address = method(tensor, k_data_ptr);
  if (!address) return 0;
  *data = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  return !PyErr_Occurred();
}

static int read_by_methods(PyObject* object, View* x) {
  const Py_ssize_t rank = read_dims(PyObject_GetAttr(object, G.names[k_shape]), x->shape);
  if (rank < 0 || read_dims(method(object, k_stride), x->stride) != rank) return 0;
  x->rank = (int32_t)rank;
  PyObject* type = PyObject_GetAttr(object, G.names[k_dtype]);
  Py_XDECREF(type); /* all types live for ever */
  for (x->type = 1; x->type <= kUint8 && PyTuple_GetItem(G.dtypes, x->type - 1) != type;) ++x->type;
  x->index = -1;
  x->device = FOVEA_CPU;
  if (attribute(object, k_is_cpu) != 1) {
    if (attribute(object, k_is_cuda) != 1) return 0;
    PyObject* index = method(object, k_get_device);
    if (!index) return 0;
    x->index = (int32_t)PyLong_AsLong(index);
    x->device = FOVEA_CUDA;
    Py_DECREF(index);
  }
  return address_of(object, &x->data);
}

/* A dense tensor of PyTorch's own type. Gradients may be zeros that lie nowhere. */
static int read_tensor(PyObject* object, View* x) {
  PyObject* type = (PyObject*)Py_TYPE(object);
  if (type != G.Tensor && type != G.Parameter) return 0;
  x->object = object;
  if (!(G.dlpack ? read_by_dlpack(object, x) : read_by_methods(object, x)) || x->type > kUint8) return 0;
  int64_t numbers = 1;
  for (int i = 0; i < x->rank; ++i) numbers *= x->shape[i];
  return x->data || numbers == 0;
}

/* survey() in _eager.py. */
static int read_plain(PyObject* object, View* x, int* learns) {
  PyObject* type = (PyObject*)Py_TYPE(object);
  if (type != G.Tensor && type != G.Parameter) return 0;
  if (attribute(object, k_is_nested) != 0 || is_true(method(object, k_is_neg)) != 0) return 0;
  if (!G.dlpack) {
    PyObject* layout = PyObject_GetAttr(object, G.names[k_layout]);
    Py_XDECREF(layout);
    if (layout != G.strided) return 0;
  }
  const int requires_grad = attribute(object, k_requires_grad);
  if (requires_grad < 0) return 0;
  *learns |= requires_grad;
  return read_tensor(object, x);
}

static PyObject* dims_tuple(int rank, const int64_t* dims) {
  PyObject* tuple = PyTuple_New(rank);
  for (int i = 0; tuple && i < rank; ++i) {
    PyObject* number = PyLong_FromLongLong(dims[i]);
    if (!number || PyTuple_SetItem(tuple, i, number) != 0) {
      Py_CLEAR(tuple);
    }
  }
  return tuple;
}

/* Empty tensors of types that q does not have, by type and device: naming both takes longer than all the rest of making
 * a tensor. Borrowed. */
enum { kDevices = 65 };
static PyObject* model_of(const View* like, const View* x) {
  static PyObject* models[kUint8 + 1][kDevices];
  if (x->type == like->type) return like->object;
  if (like->index + 1 >= kDevices) return NULL;
  PyObject** model = &models[x->type][like->index + 1];
  if (*model) return *model;
  PyObject* device = PyObject_GetAttr(like->object, G.names[k_device]);
  PyObject* options = device ? PyDict_New() : NULL;
  PyObject* arguments = Py_BuildValue("((i)(i))", 0, 1);
  if (options && arguments && PyDict_SetItem(options, G.names[k_device], device) == 0 &&
      PyDict_SetItem(options, G.names[k_dtype], PyTuple_GetItem(G.dtypes, x->type - 1)) == 0)
    *model = PyObject_Call(G.empty_strided, arguments, options);
  Py_XDECREF(arguments);
  Py_XDECREF(options);
  Py_XDECREF(device);
  return *model;
}

static PyObject* new_by_methods(const View* like, const View* x) {
  PyObject* result = NULL;
  PyObject* model = model_of(like, x);
  PyObject* shape = model ? dims_tuple(x->rank, x->shape) : NULL;
  PyObject* stride = shape ? dims_tuple(x->rank, x->stride) : NULL;
  if (stride) result = PyObject_CallMethodObjArgs(model, G.names[k_new_empty_strided], shape, stride, (PyObject*)NULL);
  Py_XDECREF(shape);
  Py_XDECREF(stride);
  return result;
}

static PyObject* object_of(Handle tensor) {
  if (!G.torch_tensor_to_pyobject) return G.THPVariable_Wrap(tensor);
  void* object = NULL;
  return G.torch_tensor_to_pyobject(tensor, NULL, &object) == 0 ? object : NULL;
}

/* New memory of x's type, shape and strides, on the device of another tensor; sets x's address. */
static Handle new_handle(const View* like, View* x) {
  Handle tensor = NULL;
  int32_t failed;
  if (like->device == FOVEA_CPU) {
    failed = G.aoti_torch_empty_strided(x->rank, x->shape, x->stride, G.types[x->type], G.cpu, like->index, &tensor);
  } else {
    Py_BEGIN_ALLOW_THREADS /* the allocator may wait for the device */
        failed =
            G.aoti_torch_empty_strided(x->rank, x->shape, x->stride, G.types[x->type], G.cuda, like->index, &tensor);
    Py_END_ALLOW_THREADS
  }
  if (failed) return NULL;
  if (G.aoti_torch_get_data_ptr(tensor, &x->data) == 0) return tensor;
  G.aoti_torch_delete_tensor_object(tensor);
  return NULL;
}

/* A new tensor of x's type, shape and strides, on the device of another one. */
static PyObject* new_tensor(const View* like, View* x) {
  x->device = like->device;
  x->index = like->index;
  if (G.stable) {
    Handle tensor = new_handle(like, x);
    x->object = tensor ? object_of(tensor) : NULL;
    if (tensor) G.aoti_torch_delete_tensor_object(tensor);
  } else {
    x->object = new_by_methods(like, x);
    if (x->object && !address_of(x->object, &x->data)) Py_CLEAR(x->object);
  }
  return x->object;
}

static void contiguous(View* x) {
  int64_t step = 1;
  for (int i = x->rank - 1; i >= 0; --i) {
    x->stride[i] = step;
    step *= x->shape[i] > 1 ? x->shape[i] : 1;
  }
}

/* Whether the elements fill a piece of memory, each once: then torch.empty_like() takes over the strides. */
static int is_dense(const View* x) {
  int order[FOVEA_MAX_RANK];
  int count = 0;
  for (int i = 0; i < x->rank; ++i) {
    if (x->shape[i] == 0) return 0;
    if (x->shape[i] == 1) continue;
    int at = count++;
    for (; at > 0 && x->stride[order[at - 1]] > x->stride[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t step = 1;
  for (int n = 0; n < count; ++n) {
    if (x->stride[order[n]] != step) return 0;
    step *= x->shape[order[n]];
  }
  return 1;
}

/* new_grad() in _call.py: a gradient with the strides of its tensor. `cleared`: parts of it stay as they are made. */
static PyObject* new_grad(const View* of, int in_rows, int cleared, View* grad) {
  *grad = *of;
  if (cleared || !is_dense(of)) {
    PyObject* like = cleared ? G.zeros_like : G.empty_like;
    PyObject* result = PyObject_CallFunctionObjArgs(like, of->object, (PyObject*)NULL);
    if (result && read_tensor(result, grad)) {
      if (!in_rows || of->device == FOVEA_CPU || grad->stride[grad->rank - 1] == 1) return result;
    }
    Py_XDECREF(result);
    if (!result || PyErr_Occurred()) return NULL;
  }
  if (in_rows && of->device != FOVEA_CPU && grad->stride[grad->rank - 1] != 1) contiguous(grad);
  return new_tensor(of, grad);
}

/* ---- the problem ---- */

static void put(Call* call, const fovea_tensor** slot, const View* x, int in_rows) {
  fovea_tensor* tensor = &call->memory[call->used++];
  tensor->size = sizeof *tensor;
  tensor->data = x->data;
  tensor->dtype = x->type;
  tensor->rank = x->rank;
  tensor->flags = FOVEA_TENSOR_STRIDED;
  tensor->reserved = 0;
  for (int i = 0; i < FOVEA_MAX_RANK; ++i) {
    tensor->shape[i] = i < x->rank ? x->shape[i] : 0;
    tensor->stride[i] = i < x->rank ? x->stride[i] : 0;
  }
  if (in_rows && call->options.swapped) {
    const int heads = x->rank - 3, rows = x->rank - 2;
    tensor->shape[heads] = x->shape[rows];
    tensor->shape[rows] = x->shape[heads];
    tensor->stride[heads] = x->stride[rows];
    tensor->stride[rows] = x->stride[heads];
  }
  *slot = tensor;
}

static int has(const Call* call, int name) { return (call->options.given >> name) & 1u; }

/* Lengths without regard to swaps. */
static int64_t rows_of(const Call* call, int name) {
  const View* x = &call->tensors[name];
  return x->shape[x->rank - (call->options.swapped ? 2 : 3)];
}

/* The problem of tensors and options; what is computed is put into it later. Returns 0 where Python has to look. */
static int build(Call* call) {
  const Options* o = &call->options;
  const View* q = &call->tensors[k_q];
  fovea_problem* p = &call->problem;
  memset(p, 0, sizeof *p);
  p->size = sizeof *p;
  call->used = 0;
  const fovea_tensor** slots[kFields] = {&p->q,
                                         &p->k,
                                         &p->v,
                                         &p->bias,
                                         &p->bias2,
                                         &p->mask,
                                         &p->alibi_slopes,
                                         &p->sink,
                                         &p->cu_seqlens_q,
                                         &p->cu_seqlens_k,
                                         &p->seqused_q,
                                         &p->seqused_k};
  for (int name = 0; name < kTensors; ++name) {
    if (!has(call, name)) continue;
    const View* x = &call->tensors[name];
    if (x->device != q->device || x->index != q->index) return 0;
    const int in_rows = name <= k_v;
    if (in_rows && (o->packed ? x->rank != 3 : x->rank != 4 && x->rank != 5)) return 0;
    if (name >= kFields) {
      for (int i = 0; i < x->rank; ++i)
        if (x->shape[i] != 1) return 0;
      if (x->type != FOVEA_INT64) return 0;
      *(name == k_seed ? &p->seed_ptr : &p->offset_ptr) = x->data;
    } else if (x->type == kUint8) {
      return 0;
    } else {
      put(call, slots[name], x, in_rows);
    }
  }
  p->flags = o->flags;
  p->align = o->align < 0 ? FOVEA_BOTTOM_RIGHT : o->align;
  p->rng = o->rng;
  p->device = q->device;
  p->device_index = q->device == FOVEA_CPU ? 0 : q->index;
  p->scale = o->scale;
  if (o->flags & FOVEA_WINDOW) {
    p->window_left = o->window_left;
    p->window_right = o->window_right;
  }
  p->softcap = o->softcap;
  p->dropout_p = o->dropout_p;
  p->seed = o->seed;
  p->offset = o->offset;
  p->max_seqlen_q = o->max_seqlen_q;
  p->max_seqlen_k = o->max_seqlen_k;
  if (q->device == FOVEA_CUDA) {
    PyObject* index = PyLong_FromLong(q->index);
    PyObject* stream = index ? PyObject_CallFunctionObjArgs(G.stream, index, (PyObject*)NULL) : NULL;
    Py_XDECREF(index);
    if (!stream) return 0;
    p->stream = PyLong_AsVoidPtr(stream);
    Py_DECREF(stream);
  }
  return !PyErr_Occurred();
}

/* ---- computing ---- */

/* The workspace of a thread on the CPU, kept for its next call as _Scratch in _problem.py does. No Python code runs
 * while the library uses it. */
enum { kLargestKept = 4 << 20, kAttempts = 100 };
typedef struct Scratch {
  void* memory;
  size_t bytes;
} Scratch;

static void free_scratch(void* kept) {
  Scratch* scratch = kept;
  free(scratch->memory);
  free(scratch);
}

static fovea_status compute_on_cpu(const fovea_problem* problem, fovea_direction direction) {
  fovea_status (*function)(const fovea_problem*, void*, size_t) =
      direction == FOVEA_BACKWARD ? G.fovea_backward : G.fovea_forward;
  Scratch* kept = pthread_getspecific(G.scratch);
  if (!kept) {
    kept = calloc(1, sizeof *kept);
    if (!kept) return FOVEA_OUT_OF_MEMORY;
    if (pthread_setspecific(G.scratch, kept) != 0) {
      free(kept);
      return FOVEA_OUT_OF_MEMORY;
    }
  }
  fovea_status status = function(problem, kept->memory, kept->bytes);
  size_t bytes = kept->bytes;
  /* Again where another thread has changed the number of threads in between: with it grows what is needed. */
  for (int attempt = 0; attempt < kAttempts && status == FOVEA_OUT_OF_MEMORY; ++attempt) {
    size_t needed = 0;
    status = G.fovea_workspace(problem, direction, &needed);
    if (status != FOVEA_OK) return status;
    bytes = needed > bytes ? needed : bytes;
    void* memory = NULL;
    if (posix_memalign(&memory, 64, bytes) != 0) return FOVEA_OUT_OF_MEMORY;
    status = function(problem, memory, bytes);
    if (bytes <= kLargestKept) {
      free(kept->memory);
      kept->memory = memory;
      kept->bytes = bytes;
    } else {
      free(memory);
    }
  }
  return status;
}

/* Bytes of workspace that problems on a device needed before, by a hash of all but their addresses. A number of another
 * problem is harmless: the library refuses a workspace that is too small. */
enum { kSizes = 1024 };
static struct {
  uint64_t hash;
  size_t bytes;
} sizes[kSizes];

static uint64_t mixed(uint64_t hash, const void* of, size_t bytes) {
  const unsigned char* at = of;
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    memcpy(&word, at + i, 8);
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 29;
  }
  return hash;
}

static uint64_t hash_of(const Call* call, fovea_direction direction) {
  uint64_t hash = (uint64_t)direction + 1;
  Options options = call->options;
  options.seed = options.offset = 0;
  hash = mixed(hash, &options, sizeof options);
  const int32_t device[2] = {call->problem.device, call->problem.device_index};
  hash = mixed(hash, device, sizeof device);
  for (int i = 0; i < call->used; ++i) {
    hash = mixed(hash, &call->memory[i].dtype, 8); /* and the rank */
    hash = mixed(hash, call->memory[i].shape, sizeof call->memory[i].shape);
    hash = mixed(hash, call->memory[i].stride, sizeof call->memory[i].stride);
  }
  return hash;
}

static PyObject* tuple_of(PyObject* const* objects, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t at = 0; tuple && at < count; ++at) {
    Py_INCREF(objects[at]);
    PyTuple_SetItem(tuple, at, objects[at]);
  }
  return tuple;
}

/* The tensors that are given, and out and lse if they are not NULL. */
static PyObject* tensors_of(const Call* call, PyObject* out, PyObject* lse) {
  PyObject* there[kTensors + 2];
  int count = 0;
  for (int name = 0; name < kTensors; ++name)
    if (has(call, name)) there[count++] = call->tensors[name].object;
  if (out) there[count++] = out;
  if (lse) there[count++] = lse;
  return tuple_of(there, count);
}

/* Whether Python may compute the call: not after a KeyboardInterrupt or another exception that is no Exception, which
 * goes on. All others are those of reading and computing, which Python meets again. */
static int may_decline(void) {
  const int may = !PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_Exception);
  if (may) PyErr_Clear();
  return may;
}

/* begin_backward() in _ahead.py, for the first call of a kind. Returns 0 after an exception that goes on. */
static int begin_backward(const Call* call) {
  PyObject* saved = tensors_of(call, NULL, NULL);
  PyObject* options = PyBytes_FromStringAndSize((const char*)&call->options, sizeof call->options);
  PyObject* done =
      saved && options ? PyObject_CallFunctionObjArgs(G.begin_backward, saved, options, (PyObject*)NULL) : NULL;
  Py_XDECREF(done);
  Py_XDECREF(options);
  Py_XDECREF(saved);
  return may_decline();
}

static fovea_status compute_on_device(const Call* call, fovea_direction direction) {
  const fovea_problem* problem = &call->problem;
  fovea_status (*function)(const fovea_problem*, void*, size_t) =
      direction == FOVEA_BACKWARD ? G.fovea_backward : G.fovea_forward;
  const uint64_t hash = hash_of(call, direction);
  fovea_status status = FOVEA_OUT_OF_MEMORY;
  int known = sizes[hash % kSizes].hash == hash;
  for (int attempt = 0; attempt < 2 && status == FOVEA_OUT_OF_MEMORY; ++attempt, known = 0) {
    size_t needed = sizes[hash % kSizes].bytes;
    if (!known) {
      if (direction == FOVEA_FORWARD && call->learns && !begin_backward(call)) return FOVEA_OUT_OF_MEMORY;
      Py_BEGIN_ALLOW_THREADS status = G.fovea_workspace(problem, direction, &needed);
      Py_END_ALLOW_THREADS if (status != FOVEA_OK) return status;
      sizes[hash % kSizes].hash = hash;
      sizes[hash % kSizes].bytes = needed;
    }
    /* From PyTorch's allocator, which knows streams and the memory pools of graphs. */
    View workspace = {.type = kUint8, .rank = 1, .shape = {(int64_t)needed}, .stride = {1}};
    Handle handle = G.stable ? new_handle(&call->tensors[k_q], &workspace) : NULL;
    PyObject* owner = G.stable ? NULL : new_tensor(&call->tensors[k_q], &workspace);
    if (!handle && !owner) return FOVEA_OUT_OF_MEMORY;
    Py_BEGIN_ALLOW_THREADS status = function(problem, workspace.data, needed);
    Py_END_ALLOW_THREADS Py_XDECREF(owner);
    if (handle) G.aoti_torch_delete_tensor_object(handle);
  }
  return status;
}

static int compute(const Call* call, fovea_direction direction) {
  fovea_status status;
  if (call->problem.device == FOVEA_CPU) {
    Py_BEGIN_ALLOW_THREADS status = compute_on_cpu(&call->problem, direction);
    Py_END_ALLOW_THREADS
  } else {
    status = compute_on_device(call, direction);
  }
  return status == FOVEA_OK;
}

/* ---- Python's arguments ---- */

/* "Python shall compute this call." */
static PyObject* decline(void) { return may_decline() ? Py_NewRef(Py_None) : NULL; }

static int read_number(PyObject* value, double* number) {
  if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value)) return 0;
  *number = PyFloat_AsDouble(value);
  return !PyErr_Occurred();
}

static int read_integer(PyObject* value, int64_t* number) {
  if (!PyLong_CheckExact(value)) return 0;
  *number = PyLong_AsLongLong(value);
  return !PyErr_Occurred();
}

/* An integer of up to 64 bits, signed or not. */
static int read_word(PyObject* value, uint64_t* word) {
  if (!PyLong_CheckExact(value)) return 0;
  int overflow = 0;
  *word = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow > 0) *word = PyLong_AsUnsignedLongLong(value);
  return overflow >= 0 && !PyErr_Occurred();
}

/* The place of a string among two, or -1. */
static int choice(PyObject* value, const char* first, const char* second) {
  if (!PyUnicode_Check(value)) return -1;
  if (PyUnicode_CompareWithASCIIString(value, first) == 0) return 0;
  return PyUnicode_CompareWithASCIIString(value, second) == 0 ? 1 : -1;
}

static int read_window(PyObject* value, Options* o) {
  if (!PyTuple_CheckExact(value) || PyTuple_Size(value) != 2) return 0;
  if (!read_integer(PyTuple_GetItem(value, 0), &o->window_left)) return 0;
  if (!read_integer(PyTuple_GetItem(value, 1), &o->window_right)) return 0;
  if (o->window_left < -1 || o->window_right < -1) return 0;
  if (o->window_left != -1 || o->window_right != -1) o->flags |= FOVEA_WINDOW;
  return 1;
}

static int raise_flag(PyObject* value, Options* o, uint32_t flag) {
  if (value != Py_True && value != Py_False) return 0;
  if (value == Py_True) o->flags |= flag;
  return 1;
}

static int read_option(int name, PyObject* value, Options* o, int* return_lse) {
  switch (name) {
    case k_scale:
      o->flags |= value == Py_None ? 0 : FOVEA_SCALE;
      return value == Py_None || read_number(value, &o->scale);
    case k_causal:
      return raise_flag(value, o, FOVEA_CAUSAL);
    case k_deterministic:
      return raise_flag(value, o, FOVEA_DETERMINISTIC);
    case k_window:
      return read_window(value, o);
    case k_align:
      if (value != Py_None) o->align = choice(value, "bottom_right", "top_left");
      return value == Py_None || o->align >= 0;
    case k_rng:
      return (o->rng = choice(value, "fovea", "torch_mem_efficient")) >= 0;
    case k_layout:
      return (o->swapped = choice(value, "bshd", "bhsd")) >= 0;
    case k_softcap:
      return read_number(value, &o->softcap);
    case k_dropout_p:
      return read_number(value, &o->dropout_p);
    case k_max_seqlen_q:
      return value == Py_None || read_integer(value, &o->max_seqlen_q);
    case k_max_seqlen_k:
      return value == Py_None || read_integer(value, &o->max_seqlen_k);
    case k_return_lse:
      *return_lse = value == Py_True;
      return value == Py_True || value == Py_False;
    default:
      return value == Py_None; /* backend, batch_shape */
  }
}

/* torch.use_deterministic_algorithms(): 1 if it is on, -1 where Python has to look. */
static int deterministic(void) {
  const int on = ask(G.deterministic);
  return on > 0 && ask(G.warn_only) != 0 ? -1 : on;
}

/* Whether Python need not cast q, k and v. */
static int agrees_with_autocast(const Call* call) {
  const int autocast = ask(G.any_autocast);
  if (autocast <= 0) return autocast == 0;
  PyObject* device = G.names[call->tensors[k_q].device == FOVEA_CPU ? k_cpu : k_cuda];
  const int enabled = is_true(PyObject_CallFunctionObjArgs(G.autocast_enabled, device, (PyObject*)NULL));
  if (enabled <= 0) return enabled == 0;
  PyObject* type = PyObject_CallFunctionObjArgs(G.autocast_dtype, device, (PyObject*)NULL);
  Py_XDECREF(type);
  for (int name = k_q; name <= k_v; ++name)
    if (PyTuple_GetItem(G.dtypes, call->tensors[name].type - 1) != type) return 0;
  return 1;
}

static void clear_options(Options* o) {
  memset(o, 0, sizeof *o);
  o->align = -1;
  o->swapped = 1;
  o->window_left = o->window_right = -1;
}

/* Reads q, k, v and the dictionary of keywords. Returns 0 where Python has to look. */
static int read_call(PyObject* const* qkv, PyObject* keywords, Call* call, int* learns, int* return_lse) {
  Options* o = &call->options;
  clear_options(o);
  PyObject* given[kTensors] = {qkv[0], qkv[1], qkv[2]};
  PyObject *key, *value, *seed = Py_None;
  Py_ssize_t at = 0;
  while (PyDict_Next(keywords, &at, &key, &value)) {
    int name = k_bias;
    while (name <= k_return_lse && G.names[name] != key) ++name;
    if (name > k_return_lse) return 0;
    if (name == k_seed) {
      seed = value;
    } else if (name == k_offset && PyLong_CheckExact(value)) {
      if (!read_word(value, &o->offset)) return 0;
    } else if (name < kTensors) {
      if (value != Py_None) given[name] = value;
      if (name == k_offset && value == Py_None) return 0;
    } else if (!read_option(name, value, o, return_lse)) {
      return 0;
    }
  }
  const int drawn = seed == Py_None && o->dropout_p != 0;
  if (PyLong_CheckExact(seed)) {
    if (!read_word(seed, &o->seed)) return 0;
  } else if (seed != Py_None) {
    given[k_seed] = seed;
  }
  for (int name = 0; name < kTensors; ++name) {
    if (!given[name]) continue;
    int wants = 0;
    View* x = &call->tensors[name];
    if (!read_plain(given[name], x, &wants)) return 0;
    /* Python converts these. */
    if (name == k_sink && (x->type == FOVEA_BF16 || x->type == FOVEA_FP16)) return 0;
    if (name == k_alibi_slopes && (wants || x->type != FOVEA_FP32)) return 0;
    if ((name == k_seqused_q || name == k_seqused_k) && x->type != FOVEA_INT32) return 0;
    *learns |= wants;
    o->given |= 1u << name;
  }
  if (has(call, k_cu_seqlens_q) || has(call, k_cu_seqlens_k)) {
    o->packed = 1;
    o->swapped = 0;
  }
  if (o->packed || has(call, k_seqused_q) || has(call, k_seqused_k)) o->flags |= FOVEA_CLEAR_ROWS;
  for (int name = k_q; name <= k_v; ++name)
    if (call->tensors[name].rank < 3) return 0;
  if (o->align < 0 && ((o->flags & (FOVEA_CAUSAL | FOVEA_WINDOW)) || has(call, k_alibi_slopes))) {
    /* Queries and keys must have the same lengths, which is seen here where they have the same tensors of lengths. */
    if (given[k_seqused_q] != given[k_seqused_k] || given[k_cu_seqlens_q] != given[k_cu_seqlens_k]) return 0;
    if (!o->packed && rows_of(call, k_q) != rows_of(call, k_k)) return 0;
  }
  if (!(o->flags & FOVEA_DETERMINISTIC)) {
    const int on = deterministic();
    if (on < 0) return 0;
    if (on) o->flags |= FOVEA_DETERMINISTIC;
  }
  if (!agrees_with_autocast(call) || is_watched()) return 0;
  return drawn ? 2 : 1;
}

/* ---- the functions of the module ---- */

/* out_layout() and lse_shape() in _call.py; `order`: as_number() in _enable_order.py, or 0. */
static void result_layouts(const Call* call, long order, View* out, View* lse) {
  const View* q = &call->tensors[k_q];
  const int heads = q->rank - (call->options.swapped ? 3 : 2), rows = q->rank - (call->options.swapped ? 2 : 3);
  const int64_t last = call->tensors[k_v].shape[call->tensors[k_v].rank - 1];
  out->type = q->type;
  out->rank = q->rank;
  memcpy(out->shape, q->shape, sizeof q->shape);
  out->shape[q->rank - 1] = last;
  out->stride[q->rank - 1] = 1;
  out->stride[heads] = last;
  out->stride[rows] = q->shape[heads] * last;
  int64_t distance = q->shape[rows] * q->shape[heads] * last;
  for (int i = q->rank - 4; i >= 0; --i) {
    out->stride[i] = distance;
    distance *= q->shape[i];
  }
  distance = last;
  for (; order > 1; order >>= 3) { /* the innermost first */
    out->stride[order & 7] = distance;
    distance *= q->shape[order & 7];
  }
  lse->type = q->type == FOVEA_FP64 ? FOVEA_FP64 : FOVEA_FP32;
  lse->rank = q->rank - 1;
  for (int i = 0; i < q->rank - 3; ++i) lse->shape[i] = q->shape[i];
  lse->shape[q->rank - 3] = q->shape[heads];
  lse->shape[q->rank - 2] = q->shape[rows];
  contiguous(lse);
}

/* What the backward needs goes through autograd's apply() as one argument; forward() takes it apart. */
static PyObject* differentiable(const Call* call, PyObject* out, PyObject* lse, PyObject* result) {
  PyObject* to_save = tensors_of(call, out, lse);
  PyObject* options = PyBytes_FromStringAndSize((const char*)&call->options, sizeof call->options);
  PyObject* token = to_save && options ? PyTuple_Pack(3, to_save, options, result) : NULL;
  Py_XDECREF(to_save);
  Py_XDECREF(options);
  if (!token) return NULL;
  PyObject* more[1 + kGrads] = {token};
  for (int i = 0; i < kGrads; ++i)
    more[1 + i] = has(call, kDifferentiable[i]) ? call->tensors[kDifferentiable[i]].object : Py_None;
  const int few = more[4] == Py_None && more[5] == Py_None && more[6] == Py_None;
  PyObject* arguments = tuple_of(more, few ? 4 : 7);
  Py_DECREF(token);
  PyObject* found = arguments ? PyObject_Call(G.apply, arguments, NULL) : NULL;
  Py_XDECREF(arguments);
  return found;
}

/* The result of what has been read, or None. `drawn`: with a new seed, which goes into `keywords` (NULL: is lost, by a
 * lack of memory alone) if Python shall compute the call. `order` of the result's dimensions, or 0. */
static PyObject* forward(Call* call, int drawn, int learns, int return_lse, long order, PyObject* keywords) {
  call->learns = learns;
  call->computed = 0;
  PyObject* seed = NULL;
  if (drawn) {
    PyObject* of = PyTuple_Pack(1, call->tensors[k_q].object);
    seed = of ? PyObject_CallFunctionObjArgs(G.draw_seed, of, (PyObject*)NULL) : NULL;
    Py_XDECREF(of);
    if (!seed) return NULL;
    if (!read_tensor(seed, &call->tensors[k_seed])) {
      Py_DECREF(seed);
      return decline();
    }
    call->options.given |= 1u << k_seed;
  }
  View out, lse;
  PyObject *found = NULL, *new_out = NULL, *new_lse = NULL;
  if (build(call)) {
    result_layouts(call, order, &out, &lse);
    new_out = new_tensor(&call->tensors[k_q], &out);
    const int with_lse = learns || return_lse;
    if (new_out && with_lse) new_lse = new_tensor(&call->tensors[k_q], &lse);
    if (new_out && (new_lse || !with_lse)) {
      put(call, &call->problem.out, &out, 1);
      if (with_lse) put(call, &call->problem.lse, &lse, 0);
      call->computed = compute(call, FOVEA_FORWARD);
      if (call->computed) {
        found = return_lse ? PyTuple_Pack(2, new_out, new_lse) : Py_NewRef(new_out);
        if (found && learns) {
          PyObject* result = differentiable(call, new_out, new_lse, found);
          Py_DECREF(found);
          found = result;
        }
      }
    }
  }
  Py_XDECREF(new_out);
  Py_XDECREF(new_lse);
  PyObject* result = call->computed ? found : decline();
  if (!call->computed && result && seed && keywords && PyDict_SetItem(keywords, G.names[k_seed], seed) != 0)
    Py_CLEAR(result);
  Py_XDECREF(seed);
  return result;
}

/* attention(q, k, v, keywords): the result, or None. */
static PyObject* fast_attention(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  (void)module;
  if (count != 4 || !PyDict_Check(arguments[3])) return decline();
  Call call;
  int learns = 0, return_lse = 0;
  const int read = read_call(arguments, arguments[3], &call, &learns, &return_lse);
  if (!read) return decline();
  if (learns) {
    const int enabled = grad_enabled();
    if (enabled < 0) return decline();
    learns = enabled;
  }
  return forward(&call, read == 2, learns, return_lse, 0, arguments[3]);
}

/* ---- scaled_dot_product_attention, where enable() is in force ---- */

/* A call as PyTorch has it: its arguments, those that were left out too, in the order of the operator. */
enum { kQuery, kKey, kValue, kMask, kDropout, kCausal, kScale, kGqa, kSdpa };

/* Of a call what decides how it is computed, as bytes: a key of State.decisions in _enable_state.py. */
typedef struct Kind {
  double dropout_p, scale;
  int32_t causal, gqa, scaled, deterministic, learns; /* learns: a bit for each tensor */
  int32_t count;                                      /* of words */
  int64_t words[4 * (4 + 2 * FOVEA_MAX_RANK)]; /* of each tensor type, rank, device, its number, shape, strides */
} Kind;

/* Whether a fused kernel is the first that is allowed: _math_comes_first() in _enable_kernel.py. */
static int fused_comes_first(void) {
  PyObject* allowed[] = {G.math_allowed, G.flash_allowed, G.efficient_allowed, G.cudnn_allowed}; /* by SDPBackend */
  PyObject* order = PyObject_CallNoArgs(G.backend_order);
  const Py_ssize_t count = order && PyList_Check(order) ? PyList_Size(order) : 0;
  long first = -1;
  for (Py_ssize_t at = 0; first < 0 && at < count; ++at) {
    const long backend = PyLong_AsLong(PyList_GetItem(order, at));
    if (backend >= 0 && backend < 4 && ask(allowed[backend]) == 1) first = backend;
  }
  Py_XDECREF(order);
  return first > 0;
}

/* Reads q, k, v and the mask, which is a bias if it has numbers. Returns 0 where Python has to look. */
static int read_sdpa(PyObject* const* given, Call* call, Kind* kind) {
  Options* o = &call->options;
  clear_options(o);
  memset(kind, 0, offsetof(Kind, words));
  for (int at = kQuery; at <= kMask; ++at) {
    if (given[at] == Py_None) continue;
    View x;
    int wants = 0;
    if (!read_plain(given[at], &x, &wants)) return 0;
    kind->learns |= wants << at;
    const int64_t words[] = {at << 8 | x.type, x.rank, x.device, x.index};
    memcpy(kind->words + kind->count, words, sizeof words);
    memcpy(kind->words + kind->count + 4, x.shape, (size_t)x.rank * sizeof *x.shape);
    memcpy(kind->words + kind->count + 4 + x.rank, x.stride, (size_t)x.rank * sizeof *x.stride);
    kind->count += 4 + 2 * x.rank;
    const int name = at != kMask ? at : x.type == FOVEA_BOOL ? k_mask : k_bias;
    call->tensors[name] = x;
    o->given |= 1u << name;
  }
  for (int at = kCausal; at <= kGqa; at += kGqa - kCausal)
    if (given[at] != Py_True && given[at] != Py_False) return 0;
  kind->causal = given[kCausal] == Py_True;
  kind->gqa = given[kGqa] == Py_True;
  kind->scaled = given[kScale] != Py_None;
  if (!read_number(given[kDropout], &kind->dropout_p)) return 0;
  if (kind->scaled && !read_number(given[kScale], &kind->scale)) return 0;
  kind->deterministic = deterministic();
  if (kind->deterministic < 0 || is_watched() || !agrees_with_autocast(call)) return 0;
  if (kind->learns) {
    const int enabled = grad_enabled();
    if (enabled < 0) return 0;
    if (!enabled) kind->learns = 0;
  }
  o->align = FOVEA_TOP_LEFT;
  o->dropout_p = kind->dropout_p;
  o->scale = kind->scale;
  if (kind->causal) o->flags |= FOVEA_CAUSAL;
  if (kind->scaled) o->flags |= FOVEA_SCALE;
  if (kind->deterministic) o->flags |= FOVEA_DETERMINISTIC;
  return fused_comes_first();
}

/* What for_c() in _enable_decisions.py has decided about calls of this kind, a new reference. The reason why PyTorch
 * computes them is a text the first time, when Python says so, then a tuple of it. */
static PyObject* decision(PyObject* const* given, const Kind* kind) {
  PyObject* decisions = PyObject_GetAttr(G.state, G.names[k_decisions]);
  PyObject* key = PyBytes_FromStringAndSize(
      (const char*)kind, (Py_ssize_t)(offsetof(Kind, words) + (size_t)kind->count * sizeof *kind->words));
  PyObject* found = decisions && key ? PyDict_GetItemWithError(decisions, key) : NULL;
  Py_XINCREF(found);
  if (!found && decisions && key && !PyErr_Occurred()) {
    PyObject* arguments = tuple_of(given, kSdpa);
    found = arguments ? PyObject_Call(G.decide, arguments, NULL) : NULL;
    Py_XDECREF(arguments);
    PyObject* kept = found && PyUnicode_Check(found) ? PyTuple_Pack(1, found) : Py_XNewRef(found);
    if (found && (!kept || PyDict_SetItem(decisions, key, kept) != 0)) Py_CLEAR(found);
    Py_XDECREF(kept);
  }
  Py_XDECREF(key);
  Py_XDECREF(decisions);
  return found;
}

/* Whether a call that PyTorch computes was counted. */
static int count_left(PyObject* reason) {
  PyObject* before = PyDict_GetItemWithError(G.left, reason);
  PyObject* now = PyErr_Occurred() ? NULL : PyLong_FromLongLong(before ? PyLong_AsLongLong(before) + 1 : 1);
  const int counted = now && PyDict_SetItem(G.left, reason, now) == 0;
  Py_XDECREF(now);
  return counted;
}

/* PyTorch's result. Its own reading of arguments takes time for each: those with their default are left out. */
static PyObject* by_pytorch(PyObject* const* given, const Kind* kind) {
  PyObject* const defaults[] = {Py_None, G.zero, Py_False}; /* from the mask on */
  Py_ssize_t count = kScale;
  while (count > kMask && given[count - 1] == defaults[count - 1 - kMask]) --count;
  PyObject* arguments = tuple_of(given, count);
  PyObject* options = kind->scaled || kind->gqa ? PyDict_New() : NULL;
  const int failed = (kind->scaled && options && PyDict_SetItem(options, G.names[k_scale], given[kScale]) != 0) ||
                     (kind->gqa && options && PyDict_SetItem(options, G.names[k_enable_gqa], Py_True) != 0);
  PyObject* result = arguments && !failed && !PyErr_Occurred() ? PyObject_Call(G.composite, arguments, options) : NULL;
  Py_XDECREF(options);
  Py_XDECREF(arguments);
  return result;
}

/* sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False): the kernel
 * that enable() registers. */
static PyObject* fast_sdpa(PyObject* module, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  (void)module;
  const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
  PyObject* given[kSdpa] = {NULL, NULL, NULL, Py_None, G.zero, Py_False, Py_None, Py_False};
  int known = count >= kMask && count <= kScale;
  for (Py_ssize_t at = 0; known && at < count; ++at) given[at] = arguments[at];
  for (Py_ssize_t at = 0; known && at < named; ++at) {
    PyObject* name = PyTuple_GetItem(keywords, at);
    const int is_scale = PyUnicode_Compare(name, G.names[k_scale]) == 0;
    known = is_scale || PyUnicode_Compare(name, G.names[k_enable_gqa]) == 0;
    if (known) given[is_scale ? kScale : kGqa] = arguments[count + at];
  }
  Call call;
  Kind kind;
  PyObject* result = NULL;
  if (known && read_sdpa(given, &call, &kind)) {
    PyObject* how = decision(given, &kind);
    if (!how) return NULL;
    const int ordered = PyLong_CheckExact(how); /* True is no such number */
    if (how == Py_True || ordered) {
      result = forward(&call, kind.dropout_p != 0, kind.learns != 0, 0, ordered ? PyLong_AsLong(how) : 0, NULL);
      /* Counted in _enable_state.py; `stop` is the exception by which checkpoints end what they compute again. */
      G.served += call.computed && (result || PyErr_ExceptionMatches(G.stop));
    } else if (how == Py_None) {
      result = by_pytorch(given, &kind);
      Py_DECREF(how);
      return result;
    } else if (how != Py_False) {
      PyObject* reason = PyTuple_Check(how) ? PyTuple_GetItem(how, 0) : how;
      if (reason != how && PyDict_Size(G.operators) == 0)
        result = count_left(reason) ? by_pytorch(given, &kind) : NULL;
      else
        result = PyObject_CallFunctionObjArgs(G.give_back, reason, given[0], given[1], given[2], given[3], given[4],
                                              given[5], given[6], given[7], (PyObject*)NULL);
      Py_DECREF(how);
      return result;
    }
    const int declined = how == Py_False || result == Py_None;
    Py_DECREF(how);
    if (!declined) return result;
    Py_XDECREF(result);
  }
  if (!may_decline()) return NULL;
  PyObject* all = tuple_of(arguments, count);
  PyObject* options = all ? PyDict_New() : NULL;
  for (Py_ssize_t at = 0; options && at < named; ++at)
    if (PyDict_SetItem(options, PyTuple_GetItem(keywords, at), arguments[count + at]) != 0) Py_CLEAR(options);
  result = options ? PyObject_Call(G.in_python, all, options) : NULL;
  Py_XDECREF(options);
  Py_XDECREF(all);
  return result;
}

/* connect(in_python, state, decide, give_back, composite, operators): before sdpa() is called. */
static PyObject* fast_connect(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  (void)module;
  PyObject** slots[] = {&G.in_python, &G.state, &G.decide, &G.give_back, &G.composite, &G.operators};
  if (count != sizeof slots / sizeof *slots) {
    PyErr_SetString(PyExc_TypeError, "connect: accepted: six arguments");
    return NULL;
  }
  for (int at = 0; at < count; ++at) {
    Py_INCREF(arguments[at]);
    Py_XDECREF(*slots[at]);
    *slots[at] = arguments[at];
  }
  Py_RETURN_NONE;
}

/* counts(reset): how many calls sdpa() has computed since the last reset, and by the reason how many PyTorch has. */
static PyObject* fast_counts(PyObject* module, PyObject* reset) {
  (void)module;
  PyObject* left = PyDict_Copy(G.left);
  PyObject* found = left ? Py_BuildValue("(LN)", G.served, left) : NULL;
  if (found && reset == Py_True) {
    G.served = 0;
    PyDict_Clear(G.left);
  }
  return found;
}

/* forward(ctx, token, ...): torch.autograd.Function's, after everything is computed. */
static PyObject* fast_forward(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  (void)module;
  if (count < 2 || !PyTuple_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "fovea's fast path: called by itself");
    return NULL;
  }
  PyObject *ctx = arguments[0], *token = arguments[1];
  if (PyObject_SetAttr(ctx, G.names[k_to_save], PyTuple_GetItem(token, 0)) != 0 ||
      PyObject_SetAttr(ctx, G.names[k_call], PyTuple_GetItem(token, 1)) != 0 ||
      PyObject_SetAttr(ctx, G.names[k_materialize_grads], Py_False) != 0)
    return NULL;
  return Py_XNewRef(PyTuple_GetItem(token, 2));
}

static int read_options(PyObject* bytes, Options* options) {
  if (!PyBytes_Check(bytes) || PyBytes_Size(bytes) != (Py_ssize_t)sizeof *options) return 0;
  memcpy(options, PyBytes_AsString(bytes), sizeof *options);
  return 1;
}

/* Whether biases' gradients behind the lengths are not written: on the CPU, and on a device where nothing is launched.
 */
static int leaves_parts(const Call* call) {
  if (call->problem.device == FOVEA_CPU) return 1;
  for (int name = 0; name < kFields; ++name) {
    if (!has(call, name) || (name > k_v && name != k_cu_seqlens_q && name != k_cu_seqlens_k)) continue;
    const View* x = &call->tensors[name];
    int64_t numbers = name > k_v ? x->shape[0] - 1 : 1;
    for (int i = 0; name <= k_v && i < x->rank; ++i) numbers *= x->shape[i];
    if (numbers <= 0) return 1;
  }
  return 0;
}

/* The gradients, and how many there are; 0 where Python has to look. */
static int gradients(Call* call, PyObject* saved, View* grad_out, View* grad_lse, PyObject* need, PyObject** grads) {
  Py_ssize_t at = 0;
  for (int name = 0; name < kTensors; ++name)
    if (has(call, name) && !read_tensor(PyTuple_GetItem(saved, at++), &call->tensors[name])) return 0;
  View out, lse, of_grads[kGrads];
  if (!read_tensor(PyTuple_GetItem(saved, at), &out) || !read_tensor(PyTuple_GetItem(saved, at + 1), &lse)) return 0;
  if (!build(call)) return 0;
  fovea_problem* p = &call->problem;
  const View* others[] = {&out, &lse, grad_out, grad_lse};
  for (int i = 0; i < 4; ++i)
    if (others[i] && (others[i]->device != p->device || others[i]->index != call->tensors[k_q].index)) return 0;
  if (out.rank < 3 || grad_out->rank < 3) return 0;
  put(call, &p->grad_out, grad_out, 1);
  put(call, &p->out, &out, 1);
  put(call, &p->lse, &lse, 0);
  if (grad_lse) put(call, &p->grad_lse, grad_lse, 0);
  const fovea_tensor** slots[kGrads] = {&p->grad_q,    &p->grad_k,     &p->grad_v,
                                        &p->grad_bias, &p->grad_bias2, &p->grad_sink};
  const Py_ssize_t count = PyTuple_Size(need) - 1;
  if (count > kGrads) return 0;
  for (int i = 0; i < count; ++i) {
    if (PyTuple_GetItem(need, i + 1) != Py_True) continue;
    const int name = kDifferentiable[i], in_rows = name <= k_v;
    if (!has(call, name)) return 0;
    const int cleared = !in_rows && (call->options.flags & FOVEA_CLEAR_ROWS) && leaves_parts(call);
    grads[i] = new_grad(&call->tensors[name], in_rows, cleared, &of_grads[i]);
    if (!grads[i]) return 0;
    put(call, slots[i], &of_grads[i], in_rows);
  }
  return compute(call, FOVEA_BACKWARD) ? (int)count : 0;
}

/* The gradients of forward()'s arguments, or None. */
static PyObject* backward(PyObject* ctx, PyObject* saved, PyObject* given, PyObject* given_lse) {
  Call call;
  View grad_out, grad_lse;
  int learns = 0;
  if (given == Py_None || ask(G.compiling) != 0 || grad_enabled() != 0 || is_watched() ||
      !read_plain(given, &grad_out, &learns))
    return decline();
  const int with_lse = given_lse != Py_None;
  if (with_lse && !read_plain(given_lse, &grad_lse, &learns)) return decline();
  PyObject* moved = NULL;
  if (grad_out.device != FOVEA_CPU && grad_out.rank > 0 && grad_out.stride[grad_out.rank - 1] != 1) {
    moved = method(given, k_contiguous);
    if (!moved || !read_tensor(moved, &grad_out)) {
      Py_XDECREF(moved);
      return decline();
    }
  }
  PyObject* grads[kGrads] = {NULL};
  int found = 0;
  PyObject* options = PyObject_GetAttr(ctx, G.names[k_call]);
  PyObject* need = options ? PyObject_GetAttr(ctx, G.names[k_needs_input_grad]) : NULL;
  if (need && PyTuple_Check(saved) && PyTuple_Check(need) && read_options(options, &call.options)) {
    int there = 2;
    for (int name = 0; name < kTensors; ++name) there += has(&call, name);
    if (PyTuple_Size(saved) == there)
      found = gradients(&call, saved, &grad_out, with_lse ? &grad_lse : NULL, need, grads);
  }
  PyObject* all[1 + kGrads] = {Py_None};
  for (int i = 0; i < found; ++i) all[1 + i] = grads[i] ? grads[i] : Py_None;
  PyObject* result = found ? tuple_of(all, found + 1) : NULL;
  for (int i = 0; i < kGrads; ++i) Py_XDECREF(grads[i]);
  Py_XDECREF(need);
  Py_XDECREF(options);
  Py_XDECREF(moved);
  return result ? result : decline();
}

/* apply(ctx, grad_out, grad_lse, if there is one): what the engine calls of a node of the graph. Python's apply() does
 * nothing else than to look for backward() and to call it. */
static PyObject* fast_apply(PyObject* ctx, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 1 && count != 2) {
    PyErr_SetString(PyExc_TypeError, "fovea's fast path: accepted: the gradients of out, or of out and lse");
    return NULL;
  }
  PyObject* saved = PyObject_GetAttr(ctx, G.names[k_saved_tensors]); /* once: hooks see it */
  if (!saved) return NULL;
  PyObject* given_lse = count == 2 ? arguments[1] : Py_None;
  PyObject* found = backward(ctx, saved, arguments[0], given_lse);
  if (found == Py_None) {
    Py_DECREF(found);
    found = PyObject_CallFunctionObjArgs(G.backward, ctx, saved, arguments[0], given_lse, (PyObject*)NULL);
  }
  Py_DECREF(saved);
  return found;
}

static PyMethodDef apply_method = {"apply", (PyCFunction)(void (*)(void))fast_apply, METH_FASTCALL, NULL};

/* unpack(bytes): which tensors a call has, and the operator's arguments from the seed on. */
static PyObject* fast_unpack(PyObject* module, PyObject* bytes) {
  (void)module;
  Options o;
  if (!read_options(bytes, &o)) {
    PyErr_SetString(PyExc_TypeError, "fovea's fast path: not its options");
    return NULL;
  }
  const char* aligns[] = {NULL, "bottom_right", "top_left"};
  PyObject* scale = o.flags & FOVEA_SCALE ? PyFloat_FromDouble(o.scale) : Py_NewRef(Py_None);
  if (!scale) return NULL;
  return Py_BuildValue("I(LLNOLLzddsLLLsiO)", o.given, (long long)o.seed, (long long)o.offset, scale,
                       o.flags & FOVEA_CAUSAL ? Py_True : Py_False, (long long)o.window_left, (long long)o.window_right,
                       aligns[o.align + 1], o.softcap, o.dropout_p, o.rng ? "torch_mem_efficient" : "fovea",
                       (long long)o.max_seqlen_q, (long long)o.max_seqlen_k, 0LL, o.swapped ? "bhsd" : "bshd",
                       o.flags & FOVEA_DETERMINISTIC ? 1 : 0, Py_None);
}

/* The address by this name as a pointer to a function of any type: whether there is one. */
static int take_address(PyObject* addresses, const char* name, void* function) {
  PyObject* number = PyDict_GetItemString(addresses, name);
  void* address = number ? PyLong_AsVoidPtr(number) : NULL;
  memcpy(function, &address, sizeof address);
  return address != NULL;
}

/* start(objects, addresses): whether DLPack's exchange API reads tensors, and whether libtorch's stable functions make
 * them. Called before everything else. */
static PyObject* fast_start(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  (void)module;
  if (count != 2 || !PyDict_Check(arguments[0]) || !PyDict_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "start: accepted: two dictionaries");
    return NULL;
  }
  PyObject* one;
#define OBJECT(name)                                          \
  one = PyDict_GetItemString(arguments[0], #name);            \
  if (!one) return PyErr_Format(PyExc_KeyError, "%s", #name); \
  Py_INCREF(one);                                             \
  Py_XDECREF(G.name);                                         \
  G.name = one;
  OBJECTS(OBJECT)
#undef OBJECT
#define FUNCTION(name, result, types) \
  if (!take_address(arguments[1], #name, &G.name)) return PyErr_Format(PyExc_KeyError, "%s", #name);
  LIBRARY(FUNCTION)
#undef FUNCTION
  int stable = take_address(arguments[1], "torch_tensor_to_pyobject", &G.torch_tensor_to_pyobject);
  stable |= take_address(arguments[1], "THPVariable_Wrap", &G.THPVariable_Wrap);
#define FUNCTION(name, result, types) stable &= take_address(arguments[1], #name, &G.name);
  STABLE(FUNCTION)
#undef FUNCTION
  if (PyErr_Occurred()) return NULL;
  G.dlpack = NULL;
  if (G.exchange != Py_None) {
    const Exchange* exchange = PyCapsule_GetPointer(G.exchange, "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->version.major == 1 && exchange->read) G.dlpack = exchange;
  }
  if (stable) {
    G.cpu = G.aoti_torch_device_type_cpu();
    G.cuda = G.aoti_torch_device_type_cuda();
    G.types[FOVEA_FP32] = G.aoti_torch_dtype_float32();
    G.types[FOVEA_FP16] = G.aoti_torch_dtype_float16();
    G.types[FOVEA_BF16] = G.aoti_torch_dtype_bfloat16();
    G.types[FOVEA_FP64] = G.aoti_torch_dtype_float64();
    G.types[kUint8] = G.aoti_torch_dtype_uint8();
  }
  G.stable = stable;
  memset(sizes, 0, sizeof sizes); /* perhaps of another library */
  PyObject* apply = PyDescr_NewMethod((PyTypeObject*)G.node, &apply_method);
  const int failed = apply ? PyObject_SetAttrString(G.node, "apply", apply) : -1;
  Py_XDECREF(apply);
  return failed ? NULL : Py_BuildValue("(OO)", G.dlpack ? Py_True : Py_False, stable ? Py_True : Py_False);
}

static PyMethodDef functions[] = {
    {"start", (PyCFunction)(void (*)(void))fast_start, METH_FASTCALL, NULL},
    {"attention", (PyCFunction)(void (*)(void))fast_attention, METH_FASTCALL, NULL},
    {"forward", (PyCFunction)(void (*)(void))fast_forward, METH_FASTCALL, NULL},
    {"unpack", fast_unpack, METH_O, NULL},
    {"sdpa", (PyCFunction)(void (*)(void))fast_sdpa, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"connect", (PyCFunction)(void (*)(void))fast_connect, METH_FASTCALL, NULL},
    {"counts", fast_counts, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_fast",
    .m_doc = "fovea.torch's fast path in C; fovea/torch/_fast.py describes it.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__fast(void) {
  static const char* const texts[kNames] = {
#define NAME(name) #name,
      NAMES(NAME)
#undef NAME
  };
  if (pthread_key_create(&G.scratch, free_scratch) != 0) return PyErr_NoMemory();
  G.zero = PyFloat_FromDouble(0);
  if (!G.left) G.left = PyDict_New();
  if (!G.zero || !G.left) return NULL;
  for (int i = 0; i < kNames; ++i) {
    G.names[i] = PyUnicode_InternFromString(texts[i]);
    if (!G.names[i]) return NULL;
  }
  PyObject* module = PyModule_Create(&definition);
  PyObject* stable = PyList_New(0);
  if (!module || !stable) return NULL;
#define FUNCTION(name, result, types)                      \
  {                                                        \
    PyObject* text = PyUnicode_FromString(#name);          \
    if (!text || PyList_Append(stable, text)) return NULL; \
    Py_DECREF(text);                                       \
  }
  STABLE(FUNCTION)
#undef FUNCTION
  PyObject* version = PyUnicode_FromFormat("%d.%d.%d", FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH);
  if (!version || PyModule_AddObject(module, "STABLE", stable) != 0 ||
      PyModule_AddObject(module, "VERSION", version) != 0 ||
      PyModule_AddIntConstant(module, "PROBLEM", sizeof(fovea_problem)) != 0)
    return NULL;
  return module;
}
