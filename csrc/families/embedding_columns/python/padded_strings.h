/* The hash of NumPy's strings of a fixed width. */
#ifndef RECFUSE_PADDED_STRINGS_H
#define RECFUSE_PADDED_STRINGS_H

#include "recfuse.h"

typedef struct rf__padded_strings {
    const void
        *data; /* [count, width] of bytes, or of 32-bit code points; zeros at a string's end are padding */
    int64_t count, width;
    bool code_points;
} rf__padded_strings;

/* rf_hash_strings_cpu of the strings without their padding; code points are hashed as UTF-8. RF_ERR_VALUE: a
 * code point that is no character. RF_ERR_MEMORY. */
rf_status rf__hash_padded_strings(const rf__padded_strings *strings, uint64_t seed, int64_t *hashes,
                                  const rf_executor *executor);

#endif
