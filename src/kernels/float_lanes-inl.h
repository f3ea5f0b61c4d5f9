// Vectors of fp32 from and to numbers of the float formats. Included once a target.
#if defined(KVPOOL_FLOAT_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPOOL_FLOAT_LANES_INL_H_
#undef KVPOOL_FLOAT_LANES_INL_H_
#else
#define KVPOOL_FLOAT_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "kvpool/base/half.h"
#include "kvpool/formats/format.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Each has the stored type, the way of a vector in and out (to nearest even, as base/half.h), and
// the same for one number.

struct Fp32Lanes {
  using Number = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Number* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, Number* to) {
    hn::StoreU(v, d, to);
  }
  static float widen(Number number) { return number; }
  static Number narrow(float number) { return number; }
};

struct Fp16Lanes {
  using Number = std::uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Number* from) {
    const hn::Rebind<hwy::float16_t, D> narrow_tag;
    return hn::PromoteTo(d, hn::LoadU(narrow_tag, reinterpret_cast<const hwy::float16_t*>(from)));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, Number* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint16_t, D> narrow_tag;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
    const auto signed_magnitude = hn::BitCast(di, magnitude);
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0xfffu)), odd);
    auto half = hn::BitCast(di, hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23))));
    // Below 2^-14: adding 0.5 lets the FPU round to a multiple of 2^-24, a subnormal's unit.
    const auto shifted = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
    const auto tiny = hn::Lt(signed_magnitude, hn::Set(di, 0x38800000));
    half = hn::IfThenElse(tiny, hn::Sub(hn::BitCast(di, shifted), hn::Set(di, 0x3f000000)), half);
    const auto large = hn::Gt(signed_magnitude, hn::Set(di, 0x477fefff));
    half = hn::IfThenElse(large, hn::Set(di, 0x7c00), half);
    const auto nan = hn::Gt(signed_magnitude, hn::Set(di, 0x7f800000));
    half = hn::IfThenElse(nan, hn::Set(di, 0x7e00), half);
    half = hn::Or(half, hn::BitCast(di, sign));
    hn::StoreU(hn::DemoteTo(narrow_tag, half), narrow_tag, to);
  }
  static float widen(Number number) { return half_to_float(number); }
  static Number narrow(float number) { return float_to_half(number); }
};

struct Bf16Lanes {
  using Number = std::uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Number* from) {
    const hn::Rebind<hwy::bfloat16_t, D> narrow_tag;
    return hn::PromoteTo(d, hn::LoadU(narrow_tag, reinterpret_cast<const hwy::bfloat16_t*>(from)));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, Number* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint16_t, D> narrow_tag;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
    const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
    const auto nan = hn::MaskFromVec(hn::BitCast(du, hn::VecFromMask(d, hn::IsNaN(v))));
    const auto top = hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
    hn::StoreU(hn::DemoteTo(narrow_tag, hn::BitCast(di, top)), narrow_tag, to);
  }
  static float widen(Number number) { return bfloat16_to_float(number); }
  static Number narrow(float number) { return float_to_bfloat16(number); }
};

/// Calls use(Fp32Lanes()) or the like for a float format.
template <class Use>
HWY_INLINE void with_float_lanes(formats::Format format, Use use) {
  switch (format) {
    case formats::Format::kFp16:
      return use(Fp16Lanes());
    case formats::Format::kBf16:
      return use(Bf16Lanes());
    default:
      return use(Fp32Lanes());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#endif
