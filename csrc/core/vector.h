/* Vectors of RF__W floats: loads and stores of float32, float16 and bfloat16, whole and partial.
 *
 * Included once for each width, with RF__W defined; every name ends in the width. GNU vectors do the
 * arithmetic; conversions of float16 and masked accesses use the instruction set of the compilation. All
 * addresses may be unaligned.
 */
#define RF__JOIN_(name, width) name##width
#define RF__JOIN(name, width) RF__JOIN_(name, width)
#define RF__N(name) RF__JOIN(name, RF__W)

typedef float RF__N(vec) __attribute__((vector_size(4 * RF__W)));
typedef int32_t RF__N(ivec) __attribute__((vector_size(4 * RF__W)));
typedef uint32_t RF__N(uvec) __attribute__((vector_size(4 * RF__W)));
typedef uint16_t RF__N(hvec) __attribute__((vector_size(2 * RF__W)));

static RF__INLINE RF__N(vec) RF__N(from_f16_)(RF__N(hvec) half) {
#if RF__W == 16 && defined(__AVX512F__)
    return (vec16)_mm512_cvtph_ps((__m256i)half);
#elif RF__W == 8 && defined(__F16C__)
    return (vec8)_mm256_cvtph_ps((__m128i)half);
#elif RF__W == 4 && defined(__F16C__)
    __m128i low = _mm_setzero_si128();
    memcpy(&low, &half, sizeof half);
    return (vec4)_mm_cvtph_ps(low);
#elif RF__W == 4 && defined(RF__NEON)
    return (vec4)vcvt_f32_f16((float16x4_t)half);
#else
    RF__N(vec) value;
    for (int i = 0; i < RF__W; i++) value[i] = rf__f16_to_f32(half[i]);
    return value;
#endif
}

static RF__INLINE RF__N(hvec) RF__N(to_f16_)(RF__N(vec) value) {
#if RF__W == 16 && defined(__AVX512F__)
    return (hvec16)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif RF__W == 8 && defined(__F16C__)
    return (hvec8)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#elif RF__W == 4 && defined(__F16C__)
    const __m128i low = _mm_cvtps_ph((__m128)value, _MM_FROUND_TO_NEAREST_INT);
    hvec4 half;
    memcpy(&half, &low, sizeof half);
    return half;
#elif RF__W == 4 && defined(RF__NEON)
    return (hvec4)vcvt_f16_f32((float32x4_t)value);
#else
    RF__N(hvec) half;
    for (int i = 0; i < RF__W; i++) half[i] = rf__f32_to_f16(value[i]);
    return half;
#endif
}

/* Rounds to nearest even; keeps NaN. */
static RF__INLINE RF__N(hvec) RF__N(to_bf16_)(RF__N(vec) value) {
    const RF__N(uvec) bits = (RF__N(uvec))value, quiet = bits >> 16 | 0x40u;
    const RF__N(uvec) rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const RF__N(uvec) nan = (RF__N(uvec))((bits & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((quiet & nan) | (rounded & ~nan), RF__N(hvec));
}

static RF__INLINE RF__N(vec) RF__N(load)(const char *from, rf_dtype dtype) {
    if (dtype == RF_FLOAT32) {
        RF__N(vec) value;
        memcpy(&value, from, sizeof value);
        return value;
    }
    RF__N(hvec) half;
    memcpy(&half, from, sizeof half);
    if (dtype == RF_FLOAT16) return RF__N(from_f16_)(half);
    return (RF__N(vec))(__builtin_convertvector(half, RF__N(ivec)) << 16);
}

#if RF__W == 8 && defined(__AVX2__)
static RF__INLINE __m256i rf__first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

/* The first n floats, n < RF__W; zeros after them. Nothing past them is read. */
static RF__INLINE RF__N(vec) RF__N(load_part)(const char *from, int64_t n, rf_dtype dtype) {
#if RF__W == 16 && defined(__AVX512BW__)
    __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (dtype == RF_FLOAT32) return (vec16)_mm512_maskz_loadu_ps(mask, from);
    hvec16 half = (hvec16)_mm256_maskz_loadu_epi16(mask, from);
    return RF__N(load)((const char *)&half, dtype);
#else
#if RF__W == 8 && defined(__AVX2__)
    if (dtype == RF_FLOAT32) return (vec8)_mm256_maskload_ps((const float *)from, rf__first_lanes(n));
#endif
    char elements[4 * RF__W] = {0};
    memcpy(elements, from, (size_t)rf__elements_bytes(dtype, n));
    return RF__N(load)(elements, dtype);
#endif
}

/* The first n floats, n <= RF__W. */
static RF__INLINE void RF__N(store_part)(char *to, int64_t n, RF__N(vec) value, rf_dtype dtype) {
    if (dtype == RF_FLOAT32) {
        if (n == RF__W) {
            memcpy(to, &value, sizeof value);
        } else {
            memcpy(to, &value, (size_t)rf__elements_bytes(RF_FLOAT32, n));
        }
        return;
    }
    RF__N(hvec) half = dtype == RF_FLOAT16 ? RF__N(to_f16_)(value) : RF__N(to_bf16_)(value);
    if (n == RF__W) {
        memcpy(to, &half, sizeof half);
    } else {
        memcpy(to, &half, (size_t)rf__elements_bytes(dtype, n));
    }
}

static RF__INLINE RF__N(vec) RF__N(square_root)(RF__N(vec) value) {
#if RF__W == 16 && defined(__AVX512F__)
    return (vec16)_mm512_sqrt_ps((__m512)value);
#elif RF__W == 8 && defined(__AVX2__)
    return (vec8)_mm256_sqrt_ps((__m256)value);
#elif RF__W == 4 && defined(RF__NEON)
    return (vec4)vsqrtq_f32((float32x4_t)value);
#else
    for (int i = 0; i < RF__W; i++) value[i] = sqrtf(value[i]);
    return value;
#endif
}

/* Returns the larger, or the older value if either is NaN: torch's maximum pooling. */
static RF__INLINE RF__N(vec) RF__N(larger)(RF__N(vec) candidate, RF__N(vec) older) {
    RF__N(ivec) replace = (RF__N(ivec))(candidate > older);
    return (RF__N(vec))(((RF__N(ivec))candidate & replace) | ((RF__N(ivec))older & ~replace));
}
