// IEEE half precision in software: every conversion rounds once, to nearest, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

namespace emulate {

// A number rounded to `mantissa` fraction bits and `exponent` exponent bits, as the bits of that format.
template <int mantissa, int exponent>
uint16_t round_to(double value) {
  constexpr int bias = (1 << (exponent - 1)) - 1, top = (1 << exponent) - 1;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(0x7fff);
  value = std::fabs(value);
  if (value == 0) return sign;
  int power = std::isinf(value) ? bias + 1 : std::ilogb(value);
  if (power > bias) return static_cast<uint16_t>(sign | top << mantissa);
  power = power < 1 - bias ? 1 - bias : power;  // subnormals share the least exponent
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(value, mantissa - power)));
  // units has the leading one that the format leaves out; a carry out of the fraction moves on into the exponent
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(power + bias - 1) << mantissa) + units));
}

inline float half_to_float(uint16_t bits) {
  static const float* const table = [] {
    auto* values = new float[1 << 16];
    for (int b = 0; b < 1 << 16; ++b) {
      const int exponent = b >> 10 & 31, fraction = b & 1023;
      const double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(fraction, -24)
                                          : std::ldexp(1024 + fraction, exponent - 25);
      values[b] = static_cast<float>(b & 0x8000 ? -size : size);
    }
    return values;
  }();
  return table[bits];
}

}  // namespace emulate

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float value) : bits(emulate::round_to<10, 5>(value)) {}
};
struct alignas(4) __half2 { __half x, y; };

inline float __half2float(__half v) { return emulate::half_to_float(v.bits); }
inline __half __float2half_rn(float v) { return __half(v); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
