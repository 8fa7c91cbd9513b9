/* Codes of embedding columns. */
#ifndef RECFUSE_API_EMBEDDING_COLUMNS_CODES_H
#define RECFUSE_API_EMBEDDING_COLUMNS_CODES_H

#include "recfuse/codes.h"

/* The steps on a value, which is a float32 or an int64: name, text. A step on a float first rounds an integer
 * to the nearest float; a step on an integer refuses a float (RF_ERR_TYPE): cast it first.
 *
 *   affine          float: v * a + b, rounded after each of the two
 *   log1p           float: log(1 + v), computed in float64 and then rounded
 *   clip            float: at least a, at most b; a NaN stays NaN
 *   cast            to an integer, toward zero; beyond int64 the nearest one; a NaN is INT64_MIN
 *   clip_integer    integer: at least a, at most b
 *   modulo          integer: the remainder of the division by a >= 1, in [0, a)
 *   bucketize       float: the number of the b boundaries from boundaries[a] on that are less than it; NaN: b
 *   bucketize_right float: the number of those that are not greater than it; NaN: b
 *   hash            integer: rf_hash_integer(v, b) * a / 2^64, in [0, a), 1 <= a < 2^31
 *   vocabulary      integer: its position among the b words from vocabulary[a] on; -1: not a word
 *
 * a and b of affine and clip are float32: their bits are the low half of the int64.
 */
#define RF_COLUMN_STEP_LIST(X)                      \
    X(RF_COLUMN_AFFINE, "affine")                   \
    X(RF_COLUMN_LOG1P, "log1p")                     \
    X(RF_COLUMN_CLIP, "clip")                       \
    X(RF_COLUMN_CAST, "cast")                       \
    X(RF_COLUMN_CLIP_INTEGER, "clip_integer")       \
    X(RF_COLUMN_MODULO, "modulo")                   \
    X(RF_COLUMN_BUCKETIZE, "bucketize")             \
    X(RF_COLUMN_BUCKETIZE_RIGHT, "bucketize_right") \
    X(RF_COLUMN_HASH, "hash")                       \
    X(RF_COLUMN_VOCABULARY, "vocabulary")

typedef enum rf_column_operation { RF_COLUMN_STEP_LIST(RF_CODE_NAME) } rf_column_operation;

/* Weighted mean: the sum divided by the sum of weights. sqrtn: divided by the square root of the number of
 * rows or, weighted, of the sum of squared weights. A sum of weights of 0 gives infinities or NaNs, which may
 * differ between a call of columns, which divides the sum, and factors of lookups, which are divided
 * separately. */
#define RF_COLUMN_POOLING_LIST(X) \
    X(RF_COLUMN_SUM, "sum")       \
    X(RF_COLUMN_MEAN, "mean")     \
    X(RF_COLUMN_MAX, "max")       \
    X(RF_COLUMN_SQRTN, "sqrtn")
typedef enum rf_column_pooling { RF_COLUMN_POOLING_LIST(RF_CODE_NAME) } rf_column_pooling;

/* The treatment of an invalid index; these codes end at -1. A number >= 0: that row is read instead. */
#define RF_COLUMN_INVALID_LIST(X)       \
    X(RF_COLUMN_INVALID_ERROR, "error") \
    X(RF_COLUMN_INVALID_DROPPED, "drop")
typedef enum rf_column_invalid {
    RF_COLUMN_INVALID_BEFORE = -3,
    RF_COLUMN_INVALID_LIST(RF_CODE_NAME)
} rf_column_invalid;

/* The result of a sample without an index, where dropped indices do not count; these codes end at -1. A number
 * >= 0: that row's values. */
#define RF_COLUMN_EMPTY_LIST(X) X(RF_COLUMN_EMPTY_FILL, "fill")
typedef enum rf_column_empty {
    RF_COLUMN_EMPTY_BEFORE = -2,
    RF_COLUMN_EMPTY_LIST(RF_CODE_NAME)
} rf_column_empty;

/* Types of values. */
#define RF_COLUMN_TYPE_LIST(X)      \
    X(RF_COLUMN_FLOAT32, "float32") \
    X(RF_COLUMN_INT32, "int32")     \
    X(RF_COLUMN_INT64, "int64")
typedef enum rf_column_type { RF_COLUMN_TYPE_LIST(RF_CODE_NAME) } rf_column_type;

#endif
