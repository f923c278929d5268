/* SPDX-License-Identifier: Apache-2.0
 *
 * What an XLA FFI handler reads and writes. XLA's typed FFI is a protocol of C structs; these are our own declarations
 * of those that are used, so no header of jaxlib is needed to build. tests/jax compares their layouts with jaxlib's
 * header. Every struct that crosses the border begins with its size, and only grows at its end.
 */
#ifndef FOVEA_PYTHON_XLA_FFI_H
#define FOVEA_PYTHON_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum { kXlaMajor = 0, kXlaNewestMinor = 3, kXlaOldestMinor = 1 };

/* xla::PrimitiveType, those of which fovea has a type. */
enum { kXlaPred = 1, kXlaS32 = 4, kXlaS64 = 5, kXlaF16 = 10, kXlaF32 = 11, kXlaF64 = 12, kXlaBf16 = 16 };

/* Codes of errors, absl::StatusCode. */
enum { kXlaInvalidArgument = 3, kXlaResourceExhausted = 8, kXlaUnimplemented = 12, kXlaInternal = 13 };

enum { kXlaMetadataExtension = 1 };
enum { kXlaCommandBufferCompatible = 1 };

typedef struct XlaExtension {
  size_t struct_size;
  int32_t type;
  struct XlaExtension* next;
} XlaExtension;

typedef struct XlaVersion {
  size_t struct_size;
  XlaExtension* extension;
  int32_t major;
  int32_t minor;
} XlaVersion;

/* XLA asks for it when a handler is registered: which version the handler is for, and what it promises. */
typedef struct XlaMetadata {
  size_t struct_size;
  XlaVersion version;
  uint32_t traits;
} XlaMetadata;

typedef struct XlaMetadataExtension {
  XlaExtension base;
  XlaMetadata* metadata;
} XlaMetadataExtension;

typedef struct XlaErrorArgs {
  size_t struct_size;
  XlaExtension* extension;
  const char* message;
  int32_t code;
} XlaErrorArgs;

typedef struct XlaStreamArgs {
  size_t struct_size;
  XlaExtension* extension;
  void* context;
  void* stream; /* written */
} XlaStreamArgs;

typedef struct XlaOrdinalArgs {
  size_t struct_size;
  XlaExtension* extension;
  void* context;
  int32_t ordinal; /* written */
} XlaOrdinalArgs;

typedef struct XlaError XlaError;

typedef struct XlaApi {
  size_t struct_size;
  XlaExtension* extension;
  XlaVersion version;
  const void* internal;
  XlaError* (*error_create)(XlaErrorArgs*);
  void (*others[3])(void);
  XlaError* (*stream_get)(XlaStreamArgs*);
  void (*more[12])(void);
  XlaError* (*device_ordinal_get)(XlaOrdinalArgs*);
} XlaApi;

typedef struct XlaBuffer {
  size_t struct_size;
  XlaExtension* extension;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
} XlaBuffer;

typedef struct XlaBuffers { /* arguments or results */
  size_t struct_size;
  XlaExtension* extension;
  int64_t size;
  int32_t* types; /* 1: a buffer */
  void** items;
} XlaBuffers;

typedef struct XlaSpan {
  const char* data;
  size_t size;
} XlaSpan;

typedef struct XlaArray {
  int32_t dtype;
  size_t size;
  void* data;
} XlaArray;

typedef struct XlaAttributes {
  size_t struct_size;
  XlaExtension* extension;
  int64_t size;
  int32_t* types; /* 1: an XlaArray, 4: an XlaSpan */
  XlaSpan** names;
  void** values;
} XlaAttributes;

typedef struct XlaCallFrame {
  size_t struct_size;
  XlaExtension* extension;
  const XlaApi* api;
  void* context;
  int32_t stage;
  XlaBuffers arguments;
  XlaBuffers results;
  XlaAttributes attributes;
} XlaCallFrame;

#endif /* FOVEA_PYTHON_XLA_FFI_H */
