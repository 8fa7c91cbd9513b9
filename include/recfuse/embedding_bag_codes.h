/* Codes of the schedules of the embedding bag. */
#ifndef RECFUSE_API_EMBEDDING_BAG_CODES_H
#define RECFUSE_API_EMBEDDING_BAG_CODES_H

#include "recfuse/codes.h"

/* The station of rows in flight until they are added (Jain et al., MICRO'24, section IV-B): name, text. */
#define RF_STATION_LIST(X)             \
    X(RF_STATION_DEFAULT, "")          \
    X(RF_STATION_NONE, "none")         \
    X(RF_STATION_REGISTER, "register") \
    X(RF_STATION_SHARED, "shared")     \
    X(RF_STATION_LOCAL, "local")       \
    X(RF_STATION_L1, "l1")

typedef enum rf_station { RF_STATION_LIST(RF_CODE_NAME) } rf_station;

#endif
