/* SPDX-License-Identifier: Apache-2.0
 *
 * include/fovea/c.h in strict C99: it compiles without a warning, enums and structs are what a C caller makes of
 * them, and a call from C works. tests/cpp/capi_test.cpp runs it.
 */
#include <string.h>

#include "fovea/c.h"

int fovea_c99_forward(float* output);
size_t fovea_c99_sizeof_problem(void);
size_t fovea_c99_sizeof_tensor(void);

size_t fovea_c99_sizeof_problem(void) { return sizeof(fovea_problem); }
size_t fovea_c99_sizeof_tensor(void) { return sizeof(fovea_tensor); }

/* One query, two keys of equal score, values 1 and 3: 2. */
int fovea_c99_forward(float* output) {
  float zeros[4] = {0, 0, 0, 0};
  float values[2] = {1, 3};
  fovea_tensor q, k, v, out;
  fovea_problem problem;
  memset(&q, 0, sizeof q);
  q.size = sizeof q;
  q.dtype = FOVEA_FP32;
  q.rank = 4;
  q.shape[0] = q.shape[1] = q.shape[2] = 1;
  q.shape[3] = 2;
  q.data = zeros;
  k = q;
  k.shape[1] = 2;
  v = k;
  v.shape[3] = 1;
  v.data = values;
  out = q;
  out.shape[3] = 1;
  out.data = output;
  memset(&problem, 0, sizeof problem);
  problem.size = sizeof problem;
  problem.backend = "reference";
  problem.q = &q;
  problem.k = &k;
  problem.v = &v;
  problem.out = &out;
  return (int)fovea_forward(&problem, NULL, 0);
}
