// FP8 quantization on the CPU, with the bits of the GPU's (float64 is rounded to float32 first):
//   scale = max(amax(|x|) / max, 2^-126), q = round(x * (1 / scale)), saturated.
// And what comes before and after a product of FP8 matrices: widening, and y = acc x_scale weight_scale + bias.
#include "cpu/fp8.h"

#include <algorithm>

#include "cpu/convert.h"
#include "cpu/rows.h"
#include "fp8_arithmetic.h"

namespace llmk::cpu {
namespace {

// A format: the bits of its mantissa, the bias of its exponent, and in float32 how far it is from there and its
// smallest normal number.
template <Fp8Format kFormat_, int32_t kMantissa_, int32_t kBias_>
struct Format {
  static constexpr Fp8Format kFormat = kFormat_;
  static constexpr int32_t kMantissa = kMantissa_, kBias = kBias_;
  static constexpr int32_t kShift = 23 - kMantissa, kSmallestNormal = (127 - kBias + 1) << 23;
};
using E4M3 = Format<Fp8Format::kE4M3, 3, 7>;
using E5M2 = Format<Fp8Format::kE5M2, 2, 15>;

// Rounds to nearest even, saturated; NaN stays NaN.
template <typename F>
inline uint8_t to_fp8(float x) {
  constexpr int32_t kOne = 1;
  // Adding a power of two whose last bit is the smallest subnormal aligns the bits of a subnormal result.
  constexpr int32_t kAligned = (127 + 23 - (F::kBias - 1 + F::kMantissa)) << 23;
  const int32_t bits = bit_cast<int32_t>(x), given = bits & INT32_MAX;
  const int32_t magnitude = std::min(given, bit_cast<int32_t>(fp8::max_of(F::kFormat)));
  const int32_t last_bit = (magnitude >> F::kShift) & 1, almost_half = (kOne << (F::kShift - 1)) - 1;
  const int32_t nearest = (magnitude + almost_half + last_bit) >> F::kShift;
  const int32_t normal = nearest - ((127 - F::kBias) << F::kMantissa);
  const int32_t subnormal = bit_cast<int32_t>(bit_cast<float>(magnitude) + bit_cast<float>(kAligned)) - kAligned;
  int32_t code = magnitude < F::kSmallestNormal ? subnormal : normal;
  code = given > 0x7f800000 ? 0x7f : code;
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80));
}

// As half_to_float().
template <typename F>
inline float from_fp8(uint8_t x) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - F::kBias) << 23;
  const uint32_t code = x & 0x7fu, magnitude = code << F::kShift;
  const float normal = bit_cast<float>(magnitude + kRebias);
  const float subnormal = bit_cast<float>(magnitude + kRebias + 0x00800000u) - bit_cast<float>(F::kSmallestNormal);
  float value = magnitude < 0x00800000u ? subnormal : normal;
  if constexpr (F::kFormat == Fp8Format::kE4M3) {
    value = code == 0x7fu ? bit_cast<float>(0x7fc00000u) : value;
  } else {
    value = code >= 0x7cu ? bit_cast<float>(magnitude + 2 * kRebias) : value;
  }
  return bit_cast<float>(bit_cast<uint32_t>(value) | (static_cast<uint32_t>(x & 0x80u) << 24));
}

template <typename T>
inline int32_t magnitude_bits(LoopType<T> x) {
  return bit_cast<int32_t>(static_cast<float>(widen(x))) & INT32_MAX;
}

// The largest magnitude. As integers, magnitudes are in the order of their values, with NaN above all.
template <typename T>
inline float amax_of(const T* x, int64_t cols) {
  constexpr int kLanes = 16;
  LoopType<T> buffer[kBlock];
  int32_t lanes[kLanes] = {};
  for_blocks<kBlock>(cols, [&](int64_t begin, int64_t count) {
    const LoopType<T>* v = load(x + begin, count, buffer);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::max(lanes[lane], magnitude_bits<T>(v[i + lane]));
    }
    for (; i < count; ++i) lanes[0] = std::max(lanes[0], magnitude_bits<T>(v[i]));
  });
  return bit_cast<float>(*std::max_element(lanes, lanes + kLanes));
}

template <typename F, typename T>
inline void convert(const T* x, int64_t cols, float inverse, uint8_t* q) {
  LoopType<T> buffer[kBlock];
  for_blocks<kBlock>(cols, [&](int64_t begin, int64_t count) {
    const LoopType<T>* v = load(x + begin, count, buffer);
    uint8_t* const target = q + begin;
    for (int64_t i = 0; i < count; ++i) target[i] = to_fp8<F>(static_cast<float>(widen(v[i])) * inverse);
  });
}

template <typename F, typename T>
inline void quantize_rows(const Fp8QuantizeParams& p, bool of_tensor, int64_t row_begin, int64_t row_end) {
  const Fp8Output& out = p.out;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
    uint8_t* const q = static_cast<uint8_t*>(out.q) + row * out.cols;
    float* scale = out.scale + (of_tensor ? 0 : row * out.scale_row_stride);
    for (int64_t begin = 0; begin < out.cols; begin += out.group, scale += out.scale_group_stride) {
      const int64_t count = std::min(out.group, out.cols - begin);
      if (!of_tensor) *scale = fp8::scale_of(amax_of(x + begin, count), out.format, out.power_of_two);
      convert<F>(x + begin, count, 1.f / *scale, q + begin);
    }
  }
}

template <typename Body>
inline void dispatch_format(Fp8Format format, Body&& body) {
  format == Fp8Format::kE4M3 ? body(TypeTag<E4M3>{}) : body(TypeTag<E5M2>{});
}

inline void quantize(const Fp8QuantizeParams& params, Dtype dtype, bool of_tensor, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    dispatch_format(params.out.format, [&](auto format) {
      quantize_rows<typename decltype(format)::type, typename decltype(tag)::type>(params, of_tensor, row_begin,
                                                                                   row_end);
    });
  });
}

}  // namespace

void fp8_quantize(const Fp8QuantizeParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  quantize(params, dtype, false, row_begin, row_end);
}

void fp8_quantize_tensor(const Fp8QuantizeParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  quantize(params, dtype, true, row_begin, row_end);
}

void fp8_amax(const Fp8QuantizeParams& params, Dtype dtype, float* amax, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t row = row_begin; row < row_end; ++row) {
      amax[row] = amax_of(static_cast<const T*>(params.x) + row * params.x_stride, params.out.cols);
    }
  });
}

void fp8_widen(const void* source, Fp8Format format, int64_t count, float* target) {
  dispatch_instruction_set([&] {
    dispatch_format(format, [&](auto tag) {
      const uint8_t* const bytes = static_cast<const uint8_t*>(source);
      float* const floats = target;
      const int64_t size = count;
      for (int64_t i = 0; i < size; ++i) floats[i] = from_fp8<typename decltype(tag)::type>(bytes[i]);
    });
  });
}

void fp8_epilogue(const Fp8EpilogueParams& p, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LoopType<T> out_buffer[kBlock];
    Operand<T> bias(static_cast<const T*>(p.bias), 0);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const float x_scale = p.x_scale[row];
      const float* const acc = p.acc + row * p.acc_stride;
      T* const y = static_cast<T*>(p.y) + row * p.y_stride;
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        const LoopType<T>* b = bias.load(begin, count);
        LoopType<T>* out = output_buffer(y + begin, out_buffer);
        for (int64_t i = 0; i < count; ++i) {
          out[i] = narrow<T>(acc[begin + i] * x_scale * p.weight_scale[begin + i] + widen(b[i]));
        }
        store(out, count, y + begin);
      });
    }
  });
}

}  // namespace llmk::cpu
