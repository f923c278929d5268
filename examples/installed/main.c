/* SPDX-License-Identifier: Apache-2.0
 *
 * The same library from C: which backend would compute a problem.
 */
#include <fovea/c.h>
#include <stdio.h>

int main(int argc, char** argv) {
  const char* line = argc > 1 ? argv[1] : "bwd b=2 hq=8 hk=2 sq=512 sk=512 d=64 bf16 causal bias=1,h,q,k";
  char text[2048] = "";
  const fovea_status status = fovea_explain_line(line, text, sizeof text, NULL);
  fputs(status == FOVEA_OK || status == FOVEA_UNSUPPORTED ? text : fovea_last_error(), stdout);
  return status == FOVEA_OK ? 0 : 1;
}
