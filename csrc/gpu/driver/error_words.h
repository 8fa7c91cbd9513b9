/* The error words of a device (gpu/device/error_word.h): their memory, the word of a table, and errors that
 * kernels and threads leave in them. error_check.h raises these errors. */
#ifndef RECFUSE_CUDA_DRIVER_ERROR_WORD_H
#define RECFUSE_CUDA_DRIVER_ERROR_WORD_H

#include "gpu/driver/driver.h"
#include "gpu/device/error_word.h"

enum { RF__CUDA_ERROR_WORDS = 4096 };

/* Those of one device. They are never moved: a captured CUDA graph has their addresses. */
typedef struct rf__cuda_error_words {
    rf_error_word first; /* of the arrays [RF__CUDA_ERROR_WORDS], by their addresses on the device */
    rf_error_record *records; /* the same records for the host; pinned */
    uint64_t *owners; /* [RF__CUDA_ERROR_WORDS] hashes of tables, 0: free; atomic */
} rf__cuda_error_words;

/* Allocates zeroed words, in the current context. Waits for its own copy. RF_ERR_MEMORY,
 * RF_ERR_OUT_OF_MEMORY. */
rf_status rf__cuda_error_words_new(const rf__cuda_driver *driver, rf__cuda_error_words *words);

/* A word: the argument of kernels, and the host's view of its record. */
typedef struct rf__cuda_error_word {
    rf_error_word on_device;
    rf_error_record *record;
} rf__cuda_error_word;

/* Returns the word of a table at `weight` (for a fused call: the first table); `shape` (for example rows)
 * distinguishes tables with one address. Always returns the same word. If thousands are in use, tables share
 * words. Takes no lock. */
rf__cuda_error_word rf__cuda_error_word_of(const rf__cuda_error_words *words, const void *weight,
                                           uint64_t shape);

/* An error, with its message, that threads of the host have found for a call whose work is in a stream;
 * treated like an error of a word. Allocated by malloc. */
typedef struct rf__cuda_note {
    struct rf__cuda_note *next; /* error_words.c's, as the second */
    const rf_error_record *of;
    rf_status status;
    char text[1024];
} rf__cuda_note;

/* Leaves a note for the thread that raises the word's errors; the first of several stays. Takes the ownership
 * of the note. Callable from any thread; makes no driver call, cannot fail. */
void rf__cuda_note_leave(rf__cuda_error_word word, rf__cuda_note *note);

/* Returns true if a kernel has left an error in the word, or a thread a note in any word. Reads host memory
 * once or twice. */
bool rf__cuda_error_is_left(rf__cuda_error_word word);
/* Raises the error or the note of a word, once: RF_ERR_INDEX or RF_ERR_VALUE with its message; of two threads
 * one raises it. */
rf_status rf__cuda_error_raise(rf__cuda_error_word word);
/* Raises the first error or note of all words. Its message has the number of the others. */
rf_status rf__cuda_errors_raise(const rf__cuda_error_words *words);

#endif
