/* Codes of types and of pooling.
 *
 * Kernels include these headers too (`recfuse/codes.h`, `recfuse/X_codes.h`), so such a header includes no header of another
 * kind. A list has an entry for each code, X(name, text): codes count from 0, and the enum comes from the list. */
#ifndef RECFUSE_API_CODES_H
#define RECFUSE_API_CODES_H

/* The enumerator of an entry. */
#define RF_CODE_NAME(name, ...) name,

/* The field of an entry of a record, a struct of integers of one size. A list X(type, name) has its fields in
 * order, so that an array of integers [n, fields] is an array of records. */
#define RF_FIELD(type, name) type name;

/* Tables have one of the first three; quantised tables have one of the last two: codes of 8 or 4 bits without a sign, which a
 * scale and a bias of their row turn into values. */
#define RF_DTYPE_LIST(X)       \
    X(RF_FLOAT32, "float32")   \
    X(RF_FLOAT16, "float16")   \
    X(RF_BFLOAT16, "bfloat16") \
    X(RF_FLOAT64, "float64")   \
    X(RF_INT8_ROWS, "int8")    \
    X(RF_INT4_ROWS, "int4")
typedef enum rf_dtype { RF_DTYPE_LIST(RF_CODE_NAME) } rf_dtype;

#define RF_INT_TYPE_LIST(X) \
    X(RF_INT32, "int32")    \
    X(RF_INT64, "int64")
typedef enum rf_int_type { RF_INT_TYPE_LIST(RF_CODE_NAME) } rf_int_type;

/* The numbers are those of ATen's _embedding_bag. */
#define RF_POOLING_LIST(X) \
    X(RF_SUM, "sum")       \
    X(RF_MEAN, "mean")     \
    X(RF_MAX, "max")
typedef enum rf_pooling { RF_POOLING_LIST(RF_CODE_NAME) } rf_pooling;

#endif
