/* SPDX-License-Identifier: Apache-2.0
 *
 * A libcuda.so.1 that computes nothing: two GPUs of compute capability 9.0 (or $FAKE_CAPABILITY, 7 say), kernels that
 * are names, launches that are counted. cuda_call_test.cpp starts itself anew with this in LD_LIBRARY_PATH. */
#define _POSIX_C_SOURCE 200809L /* strdup */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the test sets and reads. */
int fake_capturing = 0;
int fake_result_of_launch = 0;
int fake_no_context = 0; /* 1: threads come without one */
int fake_loads = 0;
void* fake_context_of_streams = 0; /* of every stream but the default one; null: the only context */
int fake_synchronised = 0;         /* streams that were waited for */
void* fake_loaded_into[1 << 16];   /* by each cuKernelGetFunction: the current context */
int fake_loaded_count = 0;
void* fake_host = 0; /* an address of the host: everything else is of a device */
int fake_launches = 0;
struct {
  const char* name; /* the kernel's */
  unsigned grid_x, block_x, shared_bytes;
  void* stream;
} fake_launched[256];
/* The first argument of the latest launch of a kernel whose name has this in it: so many bytes, which only the test
 * knows. */
const char* fake_kept_kernel = 0;
size_t fake_kept_bytes = 0;
unsigned char fake_kept[4096];
/* Memory of a device, which is the host's here: how many allocations live, how many bytes were copied each way. */
int fake_allocations = 0;
uint64_t fake_bytes_up = 0, fake_bytes_down = 0;
int fake_result_of_copy = 0; /* of copies to the host: a fault of a kernel is seen there */
int fake_maps = 0;
struct tensor_map { /* what one was encoded from */
  void* address;
  int type, swizzle;
  unsigned rank, box[5];
  uint64_t dims[5], strides[4];
} fake_map[256];

struct config { /* CUlaunchConfig's beginning */
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
};

static _Thread_local int pushed = 0; /* contexts */
static _Thread_local void* contexts[8];

static int succeed(void) { return 0; }
static int version(int* value) {
  *value = 13000;
  return 0;
}
static int two(int* value) {
  *value = 2;
  return 0;
}
static int get_device(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
static int get_name(char* name, int bytes, int device) {
  (void)device;
  strncpy(name, "played", (size_t)bytes);
  return 0;
}
static int get_attribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: /* multiprocessors */
      *value = 132;
      break;
    case 75: /* compute capability */
      *value = getenv("FAKE_CAPABILITY") != NULL ? atoi(getenv("FAKE_CAPABILITY")) : 9;
      break;
    case 76:
      *value = 0;
      break;
    case 81: /* shared memory of a multiprocessor */
      *value = 228 * 1024;
      break;
    case 88: /* the host's memory is the host's */
      *value = 0;
      break;
    case 97: /* of a block */
      *value = 227 * 1024;
      break;
    default:
      *value = 1;
  }
  return 0;
}
static int context(void** value) {
  *value = &fake_launches;
  return 0;
}
static int context_of_device(void** value, int device) {
  (void)device;
  return context(value);
}
static int context_of_stream(void* stream, void** value) {
  context(value);
  if (stream != NULL && fake_context_of_streams != NULL) {
    *value = fake_context_of_streams;
  }
  return 0;
}
static int current(void** value) {
  *value = pushed > 0 ? contexts[pushed - 1] : fake_no_context ? NULL : (void*)&fake_launches;
  return 0;
}
static int push(void* value) {
  contexts[pushed++] = value;
  return 0;
}
static int pop(void** value) {
  --pushed;
  return context(value);
}
static int current_device(int* device) {
  *device = 0;
  return 0;
}
/* As if another stream captured all the time: code is loaded in the relaxed mode, or not at all. */
static __thread int capture_mode = 0;
static int load(void** library) {
  if (capture_mode != 2) {
    return 900; /* CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED */
  }
  __atomic_add_fetch(&fake_loads, 1, __ATOMIC_RELAXED);
  return context(library);
}
static int get_kernel(void** kernel, void* library, const char* name) {
  (void)library;
  *kernel = strdup(name); /* kept, as kernels are */
  return 0;
}
static int get_function(void** function, void* kernel) {
  *function = kernel;
  current(&fake_loaded_into[__atomic_fetch_add(&fake_loaded_count, 1, __ATOMIC_RELAXED) % (1 << 16)]);
  return 0;
}
static int kernel_attribute(int* value) {
  *value = 0;
  return 0;
}
static int encode_tensor_map(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                             const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                             int swizzle, int promotion, int fill) {
  for (unsigned n = 0; n < rank; ++n) {
    const int is_stride = n + 1 < rank;
    if (dims[n] - 1 >= 1ull << 32 || box[n] - 1 >= 256 ||
        (is_stride && (strides[n] % 16 != 0 || strides[n] >= 1ull << 40))) {
      return 1; /* CUDA_ERROR_INVALID_VALUE */
    }
  }
  if ((uintptr_t)address % 16 != 0 || rank - 1 >= 5) {
    return 1;
  }
  const int number = __atomic_fetch_add(&fake_maps, 1, __ATOMIC_RELAXED) % 256;
  struct tensor_map* kept = &fake_map[number];
  kept->address = address;
  kept->type = type;
  kept->swizzle = swizzle;
  kept->rank = rank;
  memcpy(kept->box, box, rank * sizeof *box);
  memcpy(kept->dims, dims, rank * sizeof *dims);
  memcpy(kept->strides, strides, (rank - 1) * sizeof *strides);
  (void)steps;
  (void)interleave;
  (void)promotion;
  (void)fill;
  memset(map, 0, 128);
  return 0;
}
/* A number of blocks or threads that no driver takes. */
static int is_out_of(unsigned x, unsigned y, unsigned z, unsigned most_x, unsigned most_yz) {
  return x - 1 >= most_x || y - 1 >= most_yz || z - 1 >= most_yz;
}
static int launch(const struct config* config, void* function, void** parameters, void** extra) {
  if (is_out_of(config->grid_x, config->grid_y, config->grid_z, 0x7FFFFFFF, 65535) ||
      is_out_of(config->block_x, config->block_y, config->block_z, 1024, 1024) || config->shared_bytes > 227 * 1024) {
    return 1; /* CUDA_ERROR_INVALID_VALUE */
  }
  if (fake_kept_kernel != NULL && strstr(function, fake_kept_kernel) != NULL) {
    memcpy(fake_kept, parameters[0], fake_kept_bytes);
  }
  (void)extra;
  if (fake_result_of_launch != 0) {
    return fake_result_of_launch;
  }
  const int number = __atomic_fetch_add(&fake_launches, 1, __ATOMIC_RELAXED) % 256;
  fake_launched[number].name = function;
  fake_launched[number].grid_x = config->grid_x;
  fake_launched[number].block_x = config->block_x;
  fake_launched[number].shared_bytes = config->shared_bytes;
  fake_launched[number].stream = config->stream;
  return 0;
}
static int capturing(void* stream, int* status) {
  if (stream == NULL && fake_no_context && pushed == 0) {
    return 201; /* CUDA_ERROR_INVALID_CONTEXT: the default stream is a context's */
  }
  *status = fake_capturing;
  return 0;
}
static int exchange_capture_mode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
static int places(unsigned count, const int* attributes, void** values, uint64_t address) {
  for (unsigned n = 0; n < count; ++n) {
    if (attributes[n] == 2) { /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE: of none, or of a device */
      *(unsigned*)values[n] = address == (uint64_t)(uintptr_t)fake_host ? 0 : 2;
    }
  }
  return 0;
}
static int copy_to_host(void* to, uint64_t from, size_t bytes, void* stream) {
  (void)stream;
  memcpy(to, (const void*)(uintptr_t)from, bytes); /* of what the test put there */
  __atomic_add_fetch(&fake_bytes_down, bytes, __ATOMIC_RELAXED);
  return getenv("FAKE_FAULT") != NULL ? atoi(getenv("FAKE_FAULT")) : fake_result_of_copy;
}
static int copy_to_device(uint64_t to, const void* from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)(uintptr_t)to, from, bytes);
  __atomic_add_fetch(&fake_bytes_up, bytes, __ATOMIC_RELAXED);
  return 0;
}
static int allocate(uint64_t* memory, size_t bytes) {
  void* begin = NULL;
  if (posix_memalign(&begin, 256, bytes) != 0) {
    begin = NULL;
  }
  *memory = (uint64_t)(uintptr_t)begin;
  __atomic_add_fetch(&fake_allocations, begin != NULL, __ATOMIC_RELAXED);
  return begin != NULL ? 0 : 2; /* CUDA_ERROR_OUT_OF_MEMORY */
}
static int free_memory(uint64_t memory) {
  free((void*)(uintptr_t)memory);
  __atomic_sub_fetch(&fake_allocations, 1, __ATOMIC_RELAXED);
  return 0;
}
static int synchronise(void* stream) {
  (void)stream;
  ++fake_synchronised;
  if (getenv("FAKE_SECONDS") != NULL) { /* a kernel that does not end */
    sleep((unsigned)atoi(getenv("FAKE_SECONDS")));
  }
  return 0;
}
static int error_text(int error, const char** text) {
  (void)error;
  *text = "PLAYED_ERROR";
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int cuda_version, uint64_t flags, int* found) {
  static const struct {
    const char* name;
    void* function;
  } functions[] = {
      {"cuDriverGetVersion", version},
      {"cuDeviceGetCount", two},
      {"cuDeviceGet", get_device},
      {"cuDeviceGetName", get_name},
      {"cuDeviceGetAttribute", get_attribute},
      {"cuDevicePrimaryCtxRetain", context_of_device},
      {"cuCtxGetCurrent", current},
      {"cuCtxGetDevice", current_device},
      {"cuCtxPushCurrent", push},
      {"cuCtxPopCurrent", pop},
      {"cuLibraryLoadData", load},
      {"cuLibraryGetKernel", get_kernel},
      {"cuKernelGetFunction", get_function},
      {"cuKernelGetAttribute", kernel_attribute},
      {"cuLaunchKernelEx", launch},
      {"cuTensorMapEncodeTiled", encode_tensor_map},
      {"cuOccupancyMaxActiveBlocksPerMultiprocessor", two},
      {"cuOccupancyMaxActiveClusters", two},
      {"cuPointerGetAttributes", places},
      {"cuStreamIsCapturing", capturing},
      {"cuThreadExchangeStreamCaptureMode", exchange_capture_mode},
      {"cuStreamGetCtx", context_of_stream},
      {"cuMemcpyDtoHAsync", copy_to_host},
      {"cuMemcpyHtoDAsync", copy_to_device},
      {"cuMemAlloc", allocate},
      {"cuMemFree", free_memory},
      {"cuStreamSynchronize", synchronise},
      {"cuGetErrorName", error_text},
      {"cuGetErrorString", error_text},
  };
  (void)cuda_version;
  (void)flags;
  *function = succeed;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i) {
    if (strcmp(name, functions[i].name) == 0) {
      *function = functions[i].function;
    }
  }
  if (found != NULL) {
    *found = 0;
  }
  return 0;
}
