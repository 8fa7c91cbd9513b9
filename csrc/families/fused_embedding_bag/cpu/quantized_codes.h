/* Codes of quantised rows as vectors of RF__W floats. Included after vector.h with the same RF__W.
 *
 * Compilers split conversions of GNU vectors into single elements, so those of AVX are the instruction set's.
 */
typedef uint8_t RF__N(bvec) __attribute__((vector_size(RF__W)));
typedef uint8_t RF__N(nvec) __attribute__((vector_size(RF__W / 2)));
typedef uint16_t RF__N(pvec) __attribute__((vector_size(RF__W)));

#if defined(__AVX2__)
#undef RF__OF_SET
#if RF__W == 16 && defined(__AVX512F__)
#define RF__OF_SET(name) _mm512_##name
typedef __m512i rf__ints16;
#elif RF__W == 8
#define RF__OF_SET(name) _mm256_##name
typedef __m256i rf__ints8;
#else
#define RF__OF_SET(name) _mm_##name
typedef __m128i rf__ints4;
#endif

/* The bytes of RF__W adjacent codes. */
static RF__INLINE __m128i RF__N(code_bytes)(const char *from, const rf_dtype dtype) {
    const int bytes = dtype == RF_INT4_ROWS ? RF__W / 2 : RF__W;
    if (bytes == 16) return _mm_loadu_si128((const __m128i *)from);
    if (bytes == 8) return _mm_loadl_epi64((const __m128i *)from);
    int low = 0;
    memcpy(&low, from, bytes == 4 ? 4 : 2);
    return _mm_cvtsi32_si128(low);
}

/* As above, of the first n codes; zeros after them. Nothing past them is read. */
static RF__INLINE __m128i RF__N(code_bytes_part)(const char *from, int64_t n, const rf_dtype dtype) {
    const int64_t bytes = rf__elements_bytes(dtype, n);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return _mm_maskz_loadu_epi8((__mmask16)((1u << bytes) - 1), from);
#else
    char part[16] = {0};
    memcpy(part, from, (size_t)bytes);
    return _mm_loadu_si128((const __m128i *)part);
#endif
}

/* Of int4 the low half of a byte comes first. */
static RF__INLINE RF__N(vec) RF__N(codes_of)(__m128i bytes, const rf_dtype dtype) {
    if (dtype != RF_INT4_ROWS) return (RF__N(vec))RF__OF_SET(cvtepi32_ps)(RF__OF_SET(cvtepu8_epi32)(bytes));
    RF__N(uvec) shifts; /* 32 bits have 8 codes, of which each element takes another */
    for (int i = 0; i < RF__W; i++) shifts[i] = i % 8 * 4u;
#if RF__W == 16 && defined(__AVX512F__)
    const uvec16 halves = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const uvec16 spread = (uvec16)_mm512_permutexvar_epi32((__m512i)halves, _mm512_castsi128_si512(bytes));
#elif RF__W == 8
    const uvec8 spread = (uvec8)_mm256_broadcastd_epi32(bytes);
#else
    const uvec4 spread = (uvec4)_mm_broadcastd_epi32(bytes);
#endif
    return (RF__N(vec))RF__OF_SET(cvtepi32_ps)((RF__N(rf__ints))(spread >> shifts & 15u));
}

static RF__INLINE RF__N(vec) RF__N(codes)(const char *from, const rf_dtype dtype) {
    return RF__N(codes_of)(RF__N(code_bytes)(from, dtype), dtype);
}

static RF__INLINE RF__N(vec) RF__N(codes_part)(const char *from, int64_t n, const rf_dtype dtype) {
    return RF__N(codes_of)(RF__N(code_bytes_part)(from, n, dtype), dtype);
}
#else
static RF__INLINE RF__N(vec) RF__N(codes)(const char *from, const rf_dtype dtype) {
    RF__N(bvec) codes;
    if (dtype == RF_INT4_ROWS) {
        RF__N(nvec) bytes;
        memcpy(&bytes, from, sizeof bytes);
        const RF__N(pvec) pairs = __builtin_convertvector(bytes, RF__N(pvec));
        codes = (RF__N(bvec))((pairs | pairs << 4) & 0x0f0f);
    } else {
        memcpy(&codes, from, sizeof codes);
    }
    return __builtin_convertvector(__builtin_convertvector(codes, RF__N(ivec)), RF__N(vec));
}

/* Of the first n codes; zeros after them. Nothing past them is read. */
static RF__INLINE RF__N(vec) RF__N(codes_part)(const char *from, int64_t n, const rf_dtype dtype) {
    char part[RF__W] = {0};
    memcpy(part, from, (size_t)rf__elements_bytes(dtype, n));
    return RF__N(codes)(part, dtype);
}
#endif

/* The even and the odd ones of 2 * RF__W codes of int4: the halves of RF__W bytes need not be spread. */
static RF__INLINE void RF__N(even_and_odd)(const char *from, RF__N(vec) * even, RF__N(vec) * odd) {
#if RF__W == 16 && defined(__AVX512F__)
    /* A permutation of the 16 values looks at 4 bits of an element, so it needs no mask and no conversion. */
    const vec16 values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    *even = (vec16)_mm512_permutexvar_ps(bytes, (__m512)values);
    *odd = (vec16)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), (__m512)values);
#elif defined(__AVX2__)
    const RF__N(rf__ints) bytes = RF__OF_SET(cvtepu8_epi32)(RF__N(code_bytes)(from, RF_INT8_ROWS));
    const RF__N(uvec) low = (RF__N(uvec))bytes & 15u, high = (RF__N(uvec))bytes >> 4;
    *even = (RF__N(vec))RF__OF_SET(cvtepi32_ps)((RF__N(rf__ints))low);
    *odd = (RF__N(vec))RF__OF_SET(cvtepi32_ps)((RF__N(rf__ints))high);
#else
    RF__N(bvec) bytes;
    memcpy(&bytes, from, sizeof bytes);
    *even = __builtin_convertvector(__builtin_convertvector(bytes & 15, RF__N(ivec)), RF__N(vec));
    *odd = __builtin_convertvector(__builtin_convertvector(bytes >> 4, RF__N(ivec)), RF__N(vec));
#endif
}

/* Sums of even and of odd columns, in the order of the columns. */
static RF__INLINE void RF__N(interleave)(RF__N(vec) * first, RF__N(vec) * second) {
    const RF__N(vec) even = *first, odd = *second;
#if defined(__clang__)
    for (int i = 0; i < RF__W; i++) {
        (*first)[i] = i % 2 == 0 ? even[i / 2] : odd[i / 2];
        (*second)[i] = i % 2 == 0 ? even[RF__W / 2 + i / 2] : odd[RF__W / 2 + i / 2];
    }
#else
    RF__N(ivec) low, high;
    for (int i = 0; i < RF__W; i++) {
        low[i] = i / 2 + i % 2 * RF__W;
        high[i] = low[i] + RF__W / 2;
    }
    *first = __builtin_shuffle(even, odd, low);
    *second = __builtin_shuffle(even, odd, high);
#endif
}

/* sum + scale * codes. */
static RF__INLINE RF__N(vec) RF__N(add_codes)(RF__N(vec) sum, float scale, RF__N(vec) codes) {
#if defined(__AVX2__) && defined(__FMA__)
    return (RF__N(vec))RF__OF_SET(fmadd_ps)(RF__OF_SET(set1_ps)(scale), codes, sum);
#else
    return sum + scale * codes;
#endif
}
