#include "cuda/driver/error_word.h"

#include <stdlib.h>
#include <string.h>

rf_status rf__cuda_error_words_new(const rf__cuda_driver *driver, rf__cuda_error_words *words) {
    rf_status status = RF_OK;
    rf__cu_stream stream = NULL;
    rf__cu_pointer claimed = 0, records = 0;
    const size_t bytes = RF__CUDA_ERROR_WORDS * sizeof *words->records;
    memset(words, 0, sizeof *words);
    words->owners = calloc(RF__CUDA_ERROR_WORDS, sizeof *words->owners);
    RF_FAIL_IF(words->owners == NULL, RF_ERR_MEMORY, "no memory for the errors of a GPU");
    RF__CUDA_TRY(driver->cuMemHostAlloc((void **)&words->records, bytes,
                                        RF__CU_MEMHOSTALLOC_PORTABLE | RF__CU_MEMHOSTALLOC_DEVICEMAP));
    memset(words->records, 0, bytes);
    RF__CUDA_TRY(driver->cuMemHostGetDevicePointer_v2(&records, words->records, 0));
    RF__CUDA_TRY(driver->cuMemAlloc_v2(&claimed, RF__CUDA_ERROR_WORDS * sizeof *words->first.claimed));
    words->first = (rf_error_word){(rf_u32 *)(uintptr_t)claimed, (rf_error_record *)(uintptr_t)records};
    /* A stream of its own: the default one must not be used while others are captured. */
    RF__CUDA_TRY(driver->cuStreamCreate(&stream, RF__CU_STREAM_NON_BLOCKING));
    RF__CUDA_TRY(driver->cuMemsetD32Async(claimed, 0, RF__CUDA_ERROR_WORDS, stream));
    RF__CUDA_TRY(driver->cuStreamSynchronize(stream));
out:
    if (stream != NULL) (void)driver->cuStreamDestroy_v2(stream);
    if (status != RF_OK) rf__cuda_error_words_free(driver, words);
    return status;
}

void rf__cuda_error_words_free(const rf__cuda_driver *driver, rf__cuda_error_words *words) {
    if (words->first.claimed != NULL) (void)driver->cuMemFree_v2((uintptr_t)words->first.claimed);
    if (words->records != NULL) (void)driver->cuMemFreeHost(words->records);
    free(words->owners);
    memset(words, 0, sizeof *words);
}

/* Spreads every bit over all (the finaliser of a 64-bit hash). */
static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 32)) * 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9u;
    return value ^ (value >> 32);
}

/* Number of the word of a table, which is taken where it is new. */
static uint32_t word_number(const rf__cuda_error_words *words, uint64_t table) {
    enum { PROBES = 64 };
    const uint32_t first = (uint32_t)(table % RF__CUDA_ERROR_WORDS);
    for (uint32_t i = 0; i < PROBES; i++) {
        const uint32_t at = (first + i) % RF__CUDA_ERROR_WORDS;
        uint64_t owner = __atomic_load_n(&words->owners[at], __ATOMIC_RELAXED);
        if (owner == 0 && __atomic_compare_exchange_n(&words->owners[at], &owner, table, false,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            owner = table;
        if (owner == table) return at;
    }
    return first;
}

rf__cuda_error_word rf__cuda_error_word_of(const rf__cuda_error_words *words, const void *weight,
                                           uint64_t shape) {
    const uint64_t table = mix((uintptr_t)weight ^ mix(shape + 1));
    const uint32_t at = word_number(words, table != 0 ? table : 1);
    return (rf__cuda_error_word){{words->first.claimed + at, words->first.record + at}, &words->records[at]};
}
