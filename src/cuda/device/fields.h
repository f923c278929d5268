// SPDX-License-Identifier: Apache-2.0
//
// FOVEA_FIELDS(Struct, a, b, ...) makes for_each_field(of, visit), which calls visit(name, value, value by default) for
// every field. They are named in the order in which they are declared: the one in which a compiler takes designated
// initialisers. Tests compare the list with the struct. For the host: kernels have no use for it.
#pragma once

#if defined(__CUDACC_RTC__)
#define FOVEA_FIELDS(...)
#else
#define FOVEA_FIELDS(Struct, ...)                                \
  template <class Visit>                                         \
  constexpr void for_each_field(const Struct& of, Visit visit) { \
    constexpr Struct usual;                                      \
    FOVEA_EXPAND(FOVEA_VISIT(__VA_ARGS__))                       \
  }
// One field, then the rest, as often as FOVEA_EXPAND looks at the text again: for up to 64 fields.
#define FOVEA_VISIT(field, ...)         \
  visit(#field, of.field, usual.field); \
  __VA_OPT__(FOVEA_AGAIN FOVEA_PARENTHESES(__VA_ARGS__))
#define FOVEA_AGAIN() FOVEA_VISIT
#define FOVEA_PARENTHESES ()
#define FOVEA_EXPAND(...) FOVEA_16(FOVEA_16(FOVEA_16(FOVEA_16(__VA_ARGS__))))
#define FOVEA_16(...) FOVEA_4(FOVEA_4(FOVEA_4(FOVEA_4(__VA_ARGS__))))
#define FOVEA_4(...) FOVEA_1(FOVEA_1(FOVEA_1(FOVEA_1(__VA_ARGS__))))
#define FOVEA_1(...) __VA_ARGS__
#endif
