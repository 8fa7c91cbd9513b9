/* Elements of rows: the bytes of each dtype, and the values of elements. Kernels read and write elements of
 * rows only through this header. A new dtype is a new rf_element; if it needs parameters of the row, its
 * get() takes them. */
#ifndef RECFUSE_ELEMENT_CUH
#define RECFUSE_ELEMENT_CUH

#include "gpu/device/common.cuh"

template <int DTYPE, typename NUMBER = float> struct rf_element_size {
    typedef NUMBER number;
    enum { BYTES = rf_element_bytes(DTYPE), BITS = rf_element_bits(DTYPE) };
};

/* Elements of a dtype. get(from, i) returns element i of a vector as a number, set(to, i, number) rounds to
 * the nearest element. Elements of a vector must be set from the first to the last. */
template <int DTYPE> struct rf_element;

template <> struct rf_element<RF_FLOAT32> : rf_element_size<RF_FLOAT32> {
    template <int SIZE> static RF_INLINE float get(const rf_bytes<SIZE> &from, int i) {
        return __uint_as_float(from.word[i]);
    }
    template <int SIZE> static RF_INLINE void set(rf_bytes<SIZE> &to, int i, float value) {
        to.word[i] = __float_as_uint(value);
    }
};

template <> struct rf_element<RF_FLOAT64> : rf_element_size<RF_FLOAT64, double> {
    template <int SIZE> static RF_INLINE double get(const rf_bytes<SIZE> &from, int i) {
        return __hiloint2double((int)from.word[2 * i + 1], (int)from.word[2 * i]);
    }
    template <int SIZE> static RF_INLINE void set(rf_bytes<SIZE> &to, int i, double value) {
        to.word[2 * i] = (rf_u32)__double2loint(value);
        to.word[2 * i + 1] = (rf_u32)__double2hiint(value);
    }
};

RF_INLINE rf_u32 rf_half_bits(const rf_bytes<2> &from, int i) { return from.word[0]; }
template <int SIZE> RF_INLINE rf_u32 rf_half_bits(const rf_bytes<SIZE> &from, int i) {
    return i % 2 ? from.word[i / 2] >> 16 : from.word[i / 2] & 0xffffu;
}
RF_INLINE void rf_half_bits_set(rf_bytes<2> &to, int i, rf_u16 bits) { to.word[0] = bits; }
template <int SIZE> RF_INLINE void rf_half_bits_set(rf_bytes<SIZE> &to, int i, rf_u16 bits) {
    to.word[i / 2] = i % 2 ? (to.word[i / 2] & 0xffffu) | (rf_u32)bits << 16 : bits;
}

template <> struct rf_element<RF_FLOAT16> : rf_element_size<RF_FLOAT16> {
    template <int SIZE> static RF_INLINE float get(const rf_bytes<SIZE> &from, int i) {
        return rf_float16_number((rf_u16)rf_half_bits(from, i));
    }
    template <int SIZE> static RF_INLINE void set(rf_bytes<SIZE> &to, int i, float value) {
        rf_half_bits_set(to, i, rf_float16_of(value));
    }
};

template <> struct rf_element<RF_BFLOAT16> : rf_element_size<RF_BFLOAT16> {
    template <int SIZE> static RF_INLINE float get(const rf_bytes<SIZE> &from, int i) {
        if (SIZE > 2 && i % 2) return __uint_as_float(from.word[i / 2] & 0xffff0000u);
        return __uint_as_float(rf_half_bits(from, i) << 16);
    }
    template <int SIZE> static RF_INLINE void set(rf_bytes<SIZE> &to, int i, float value) {
        rf_half_bits_set(to, i, rf_bfloat16_of(value));
    }
};

/* Returns a byte of a word as a number: a float of 2^23 and more counts units in its last byte. */
RF_INLINE float rf_byte_number(rf_u32 word, int byte) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u | (rf_u32)byte)) - 8388608.0f;
}

/* Codes, as numbers without their scale and bias. */
template <> struct rf_element<RF_INT8_ROWS> : rf_element_size<RF_INT8_ROWS> {
    template <int SIZE> static RF_INLINE float get(const rf_bytes<SIZE> &from, int i) {
        return rf_byte_number(from.word[i / 4], i % 4);
    }
};

template <> struct rf_element<RF_INT4_ROWS> : rf_element_size<RF_INT4_ROWS> {
    template <int SIZE> static RF_INLINE float get(const rf_bytes<SIZE> &from, int i) {
        const rf_u32 word = from.word[i / 8];
        return rf_byte_number((i % 2 ? word >> 4 : word) & 0x0f0f0f0fu, i % 8 / 2);
    }
};

/* N consecutive elements, moved by one instruction. */
template <int DTYPE, int N> using rf_elements = rf_bytes<N * rf_element<DTYPE>::BYTES>;

template <int DTYPE, int N> RF_INLINE void rf_elements_get(const rf_elements<DTYPE, N> &from, float *to) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = rf_element<DTYPE>::get(from, i);
}
template <int DTYPE, int N> RF_INLINE rf_elements<DTYPE, N> rf_elements_of(const float *numbers) {
    rf_elements<DTYPE, N> to;
#pragma unroll
    for (int i = 0; i < N; i++) rf_element<DTYPE>::set(to, i, numbers[i]);
    return to;
}

/* Returns the bytes of an element of a table whose dtype is known at run time: no table has float64. */
RF_INLINE int rf_table_element_bytes(int dtype) {
    return dtype == RF_FLOAT32 ? rf_element_bytes(RF_FLOAT32) : rf_element_bytes(RF_FLOAT16);
}

#endif
