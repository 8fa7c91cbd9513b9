/* recfuse: embedding operators for recommendation models. The public C API: this file includes all of it.
 *
 * C99, independent of torch and of Python: raw pointers in, a status code out. No function prints, exits, or
 * keeps a pointer after it returns, unless stated otherwise. Every function is thread-safe. A family of
 * operators has a header of its name in recfuse/, which documents shapes, types, units, alignment and
 * ownership; a function that may block states the reason.
 *
 *   rf_   public names       rf__  internal names (no promise)
 */
#ifndef RECFUSE_H
#define RECFUSE_H

#include "recfuse/cpu.h"
#include "recfuse/cuda.h"
#include "recfuse/embedding_bag.h"
#include "recfuse/embedding_columns.h"
#include "recfuse/fused_embedding.h"
#include "recfuse/fused_embedding_bag.h"
#include "recfuse/fused_embedding_bag_backward.h"
#include "recfuse/fused_embedding_bag_update.h"
#include "recfuse/ikbo.h"
#include "recfuse/ikbo_attention.h"
#include "recfuse/pin_rows.h"
#include "recfuse/quantize_rows.h"
#include "recfuse/status.h"
#include "recfuse/types.h"

#define RECFUSE_VERSION "0.1.0"

#endif
