// The instructions that the kernels use by name. No header of CUDA is needed, so that the sources
// can be compiled wherever NVRTC is.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

__device__ __forceinline__ u16 float_to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

/// Two numbers rounded to 16 bits each, `low` in the low half.
template <bool bf16>
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 packed;
  if (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <bool bf16>
__device__ __forceinline__ float unpack_low(u32 packed) {
  return bf16 ? __uint_as_float(packed << 16) : half_to_float(u16(packed));
}

template <bool bf16>
__device__ __forceinline__ float unpack_high(u32 packed) {
  return bf16 ? __uint_as_float(packed & 0xffff0000u) : half_to_float(u16(packed >> 16));
}

/// 2^x, to about 2 ulp.
__device__ __forceinline__ float exp2_fast(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return u32(__cvta_generic_to_shared(pointer));
}

/// Starts a copy of 16 bytes to shared memory; zeros where `take` is false, and then `from` is not
/// read.
__device__ __forceinline__ void copy16_async(u32 to, u64 from, bool take) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(take ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all but the newest `n` closed groups have arrived.
template <int n>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

/// Four 8x8 matrices of 16-bit numbers; each lane gives the address of one row.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

__device__ __forceinline__ void store_shared_half(u32 address, u16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ uint2 load_shared2(u32 address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
  return words;
}

__device__ __forceinline__ uint4 load_shared4(u32 address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address));
  return words;
}

/// sum += a [16 x 16] * b [16 x 8]
template <bool bf16>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// sum += a [16 x 8] * b [8 x 8], of fp16
__device__ __forceinline__ void multiply8(float (&sum)[4], const u32 (&a)[2], u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

/// The transpose of an 8x8 matrix of 16-bit numbers.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

__device__ __forceinline__ u64 load_global(u64 address) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

/// Keeps a value in a register: the compiler would work it out again at each use.
__device__ __forceinline__ int kept(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ u64 kept(u64 value) {
  asm volatile("" : "+l"(value));
  return value;
}

/// Adds to a counter; what the CTA wrote before a barrier is seen by who sees the sum, and the other
/// way round.
__device__ __forceinline__ u32 add_ordered(u32* counter, u32 value) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}
