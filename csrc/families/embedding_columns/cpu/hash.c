/* rf_hash_integer and rf_hash_integers. */
#include "recfuse.h"
#include "families/embedding_columns/device/column_values.h"

uint64_t rf_hash_integer(int64_t value, uint64_t seed) { return rf_column_hash(value, seed); }

uint64_t rf_hash_integers(int64_t left, int64_t right, uint64_t seed) {
    return rf_column_hash_pair(left, right, seed);
}
