// SPDX-License-Identifier: Apache-2.0
//
// The yardstick of the CPU benchmarks: the best rate of an n x n x n fp32 product that a library reaches on this
// machine. One library an executable, because each brings its own threads, and OpenBLAS chooses its kernels when
// it is loaded (OPENBLAS_CORETYPE). Prints GFLOP/s.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#ifdef FOVEA_MATMUL_OPENBLAS
#include <cblas.h>
#else
#include <oneapi/dnnl/dnnl.h>
#endif

namespace {

void multiply(int n, const float* a, const float* b, float* c) {
#ifdef FOVEA_MATMUL_OPENBLAS
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0F, a, n, b, n, 0.0F, c, n);
#else
  if (dnnl_sgemm('N', 'N', n, n, n, 1.0F, a, n, b, n, 0.0F, c, n) != dnnl_success) {
    std::fprintf(stderr, "dnnl_sgemm failed\n");
    std::exit(1);
  }
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 2048;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  if (n < 1 || seconds <= 0) {
    std::fprintf(stderr, "usage: matmul [n = 2048] [seconds = 1]\n");
    return 2;
  }
  const std::size_t elements = static_cast<std::size_t>(n) * static_cast<std::size_t>(n);
  std::vector<float> a(elements);
  std::vector<float> b(elements);
  std::vector<float> c(elements);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::generate(a.begin(), a.end(), [&] { return normal(random); });
  std::generate(b.begin(), b.end(), [&] { return normal(random); });
  multiply(n, a.data(), b.data(), c.data());

  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  double best = 0;
  while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    const auto start = Clock::now();
    multiply(n, a.data(), b.data(), c.data());
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, 2.0 * n * n * n / elapsed * 1e-9);
  }
  std::printf("%.1f\n", best);
  return 0;
}
