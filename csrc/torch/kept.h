/* Memory of large results on the CPU, which stays with the process for the next of its size. */
#ifndef RECFUSE_TORCH_KEPT_H
#define RECFUSE_TORCH_KEPT_H

#include "torch/values.h"

/* As rf__tensor_new on the CPU. The memory of a large tensor is kept when the tensor is freed: malloc would give it back to
 * the system, and each step of a training would wait for all its pages anew. The system may take kept memory whenever it
 * wants some. Safe on several threads and over a fork. */
rf_status rf__tensor_new_kept(int64_t dim, const int64_t *sizes, int32_t dtype, AtenTensorHandle *tensor,
                              void **data);

#endif
