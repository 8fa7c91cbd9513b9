/* The error words of a device (device/error_word.h): their memory, and which one is a table's. cuda/driver/check.h raises
 * what is in them. */
#ifndef RECFUSE_CUDA_DRIVER_ERROR_WORD_H
#define RECFUSE_CUDA_DRIVER_ERROR_WORD_H

#include "cuda/driver/driver.h"
#include "device/error_word.h"

enum { RF__CUDA_ERROR_WORDS = 4096 };

/* Those of one device. They are never moved: a captured CUDA graph has their addresses. */
typedef struct rf__cuda_error_words {
    rf_error_word first; /* of the arrays [RF__CUDA_ERROR_WORDS], by their addresses on the device */
    rf_error_record *records; /* the same records for the host; pinned */
    uint64_t *owners; /* [RF__CUDA_ERROR_WORDS] hashes of tables, 0: nobody's; atomic */
} rf__cuda_error_words;

/* Makes them, zeroed, in the current context; waits for its own memset. RF_ERR_MEMORY, RF_ERR_OUT_OF_MEMORY. */
rf_status rf__cuda_error_words_new(const rf__cuda_driver *driver, rf__cuda_error_words *words);
/* Frees what there is of them. */
void rf__cuda_error_words_free(const rf__cuda_driver *driver, rf__cuda_error_words *words);

/* One word: what kernels get, and the host's view of its record. */
typedef struct rf__cuda_error_word {
    rf_error_word on_device;
    rf_error_record *record;
} rf__cuda_error_word;

/* The word of a table at `weight` (of a fused call: the first one), told from others there by `shape`: rows, or what
 * else does. The same for ever. Where thousands are in use already, some share theirs. Takes no lock. */
rf__cuda_error_word rf__cuda_error_word_of(const rf__cuda_error_words *words, const void *weight,
                                           uint64_t shape);

#endif
