/* SPDX-License-Identifier: Apache-2.0
 *
 * An NVRTC that compiles nothing: a kernel's machine code is four letters, its symbol the expression that was asked
 * for. See cuda.c. */
#define _POSIX_C_SOURCE 200809L /* strdup */
#include <stdlib.h>
#include <string.h>

struct program {
  char* expression;
};

const char* nvrtcGetErrorString(int result) { return result == 0 ? "none" : "played"; }
int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int nvrtcCreateProgram(struct program** program) {
  *program = calloc(1, sizeof(struct program));
  return *program == NULL;
}
int nvrtcDestroyProgram(struct program** program) {
  free((*program)->expression);
  free(*program);
  return 0;
}
int nvrtcAddNameExpression(struct program* program, const char* expression) {
  program->expression = strdup(expression);
  return 0;
}
int nvrtcCompileProgram(void) { return 0; }
int nvrtcGetLoweredName(struct program* program, const char* expression, const char** name) {
  (void)expression;
  *name = program->expression;
  return 0;
}
static int size(struct program* program, size_t* bytes) {
  (void)program;
  *bytes = 4;
  return 0;
}
static int text(struct program* program, char* text) {
  (void)program;
  memcpy(text, "ABC", 4);
  return 0;
}
int nvrtcGetProgramLogSize(struct program* program, size_t* bytes) { return size(program, bytes); }
int nvrtcGetProgramLog(struct program* program, char* log) { return text(program, log); }
int nvrtcGetCUBINSize(struct program* program, size_t* bytes) { return size(program, bytes); }
int nvrtcGetCUBIN(struct program* program, char* code) { return text(program, code); }
int nvrtcGetPTXSize(struct program* program, size_t* bytes) { return size(program, bytes); }
int nvrtcGetPTX(struct program* program, char* ptx) { return text(program, ptx); }
