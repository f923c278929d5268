// SPDX-License-Identifier: Apache-2.0
//
// The numbers in the tensors of a case: N(0, 1), or what its Values say (cases.h). First those that depend on an
// element alone, then those that depend on its coordinates. Random numbers are a function of (seed, tensor, place), so
// that a case is the same wherever and however often it is made.
#include <cmath>
#include <limits>
#include <set>

#include "check/materialise.h"
#include "check/numbers.h"
#include "core/element.h"

namespace fovea::check {
namespace {

double lowest_of(DType type) {
  switch (type) {
    case DType::kFp16:
      return Half::to_double(0xFBFF);
    case DType::kBf16:
      return Bfloat16::to_double(0xFF7F);
    case DType::kFp32:
      return std::numeric_limits<float>::lowest();
    default:
      return std::numeric_limits<double>::lowest();
  }
}

// So that biases of keys or of queries alone have elements of which no pair takes part: every fifth key and the last of
// several batch entries, as far as the mask has them.
bool is_hidden_by_family(const Problem& p, std::int64_t b, std::int64_t j) {
  const bool by_batch = p.mask.extents.batch1 || p.mask.extents.batch2;
  return (p.mask.extents.key && j % 5 == 2) || (by_batch && b > 0 && b == p.batch() - 1);
}

}  // namespace

void Tensors::fill(const Tensor& tensor) const {
  const Values values = case_.values;
  Random random(case_.seed, tensor.name);
  for (const std::int64_t element : tensor.existing) {
    double value = random.normal();
    if (tensor.name == "mask") {
      value = random.uniform() < 0.7 ? 1 : 0;
    } else if (tensor.name == "alibi_slopes") {
      value = random.uniform() / 4;
    } else if ((tensor.name == "q" || tensor.name == "k") && values == Values::kLargeScores) {
      value *= 30;
    } else if (values == Values::kDenormal &&
               (tensor.name == "v" || (tensor.name == "grad_out" && case_.seed % 2 == 0))) {
      value *= tensor.type() == DType::kFp64 ? 1e-310 : tensor.type() == DType::kFp16 ? 1e-6 : 1e-39;
    } else if (tensor.name == "bias" && values == Values::kMinusInfinity && random.uniform() < 1.0 / 3) {
      value = -std::numeric_limits<double>::infinity();
    } else if (tensor.name == "bias" && values == Values::kHuge && random.uniform() < 1.0 / 3) {
      value = std::copysign(tensor.type() == DType::kFp16 ? 6e4 : 1e30, value);
    }
    tensor.set(element, value);
  }
}

// NaN in every element of a bias of which no pair takes part.
void Tensors::fill_unused(const Tensor& bias) const {
  const Problem& p = case_.problem;
  const Tensor* mask = find("mask");
  std::set<std::int64_t> used;
  for (std::int64_t b = 0; b < p.batch(); ++b) {
    const math::Sequence s = sequence_of(p, b);
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < s.q_len; ++i) {
        for (std::int64_t j = 0; j < s.k_len; ++j) {
          if (takes_part(p, mask, b, h, i, j)) {
            used.insert(plane_element(p, bias, b, h, i, j));
          }
        }
      }
    }
  }
  for (const std::int64_t element : bias.existing) {
    if (!used.contains(element)) {
      bias.set(element, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

// What depends on coordinates.
void Tensors::fill_family() const {
  const Problem& p = case_.problem;
  const Tensor* bias = find("bias");
  const Tensor* mask = find("mask");
  const bool mask_by_query = mask != nullptr && p.mask.extents.query;
  for (std::int64_t b = 0; b < p.batch(); ++b) {
    const math::Sequence s = sequence_of(p, b);
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < s.q_len; ++i) {
        for (std::int64_t j = 0; j < s.k_len; ++j) {
          const bool third = i % 3 == 0;
          const bool is_masked = case_.values == Values::kNanWhereMasked
                                     ? mask != nullptr && is_hidden_by_family(p, b, j)
                                     : case_.values == Values::kDeadRows && third && mask_by_query;
          if (is_masked) {
            mask->set(plane_element(p, *mask, b, h, i, j), 0);
          } else if (case_.values == Values::kDeadRows && third) {
            bias->set(plane_element(p, *bias, b, h, i, j), -std::numeric_limits<double>::infinity());
          } else if (case_.values == Values::kLowest && third) {
            bias->set(plane_element(p, *bias, b, h, i, j), lowest_of(bias->type()));
          }
        }
        if (case_.values == Values::kOneHot && s.k_len > 0) {
          // q_i six times the key i mod Sk, so that this one stands out.
          const Tensor& q = *find("q");
          const Tensor& k = *find("k");
          const std::int64_t b1 = p.two_level ? b / p.batch2 : b;
          const std::int64_t b2 = b % p.batch2;
          const std::int64_t h_k = h / (p.heads_q / p.heads_k);
          for (std::int64_t d = 0; d < p.head_dim; ++d) {
            const std::int64_t i_all = s.q_begin + i;
            const std::int64_t j_all = s.k_begin + i % s.k_len;
            const Index at_q = p.packed      ? Index{i_all, h, d}
                               : p.two_level ? Index{b1, b2, i_all, h, d}
                                             : Index{b1, i_all, h, d};
            const Index at_k = p.packed      ? Index{j_all, h_k, d}
                               : p.two_level ? Index{b1, b2, j_all, h_k, d}
                                             : Index{b1, j_all, h_k, d};
            q.set(q.element(at_q), 6 * k.get(k.element(at_k)));
          }
        }
      }
    }
  }
  for (const char* name : {"bias", "bias2"}) {
    if (const Tensor* plane = find(name); plane != nullptr && case_.values == Values::kNanWhereMasked) {
      fill_unused(*plane);
    }
  }
}

}  // namespace fovea::check
