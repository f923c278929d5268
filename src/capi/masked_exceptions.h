// SPDX-License-Identifier: Apache-2.0
//
// While it lives, no floating-point exception traps in this thread: softmax of a row without keys, a NaN among the
// inputs or an underflow are ordinary here, and a caller that unmasked exceptions would get SIGFPE. At its end the
// caller's masks and flags are as they were. Rounding and denormals stay the caller's choice throughout.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace fovea {

class MaskedExceptions {
 public:
  MaskedExceptions(const MaskedExceptions&) = delete;
  MaskedExceptions& operator=(const MaskedExceptions&) = delete;
#if defined(__x86_64__)
  // <cfenv> sees to the x87 unit, too, which nothing here uses: that takes 10 times as long.
  MaskedExceptions() : saved_(_mm_getcsr()) {
    _mm_setcsr((saved_ | static_cast<unsigned>(_MM_MASK_MASK)) & ~static_cast<unsigned>(_MM_EXCEPT_MASK));
  }
  ~MaskedExceptions() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  MaskedExceptions() { std::feholdexcept(&saved_); }
  ~MaskedExceptions() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_{};
#endif
};

}  // namespace fovea
