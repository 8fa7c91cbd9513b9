/* Forks during work of other threads. */
#ifndef RECFUSE_CUDA_FORK_H
#define RECFUSE_CUDA_FORK_H

#include <stdbool.h>

/* Surrounds work that would hang or break a child if interrupted: opening libraries, compiling. A fork waits
 * until no thread is inside, so locks taken only inside are free in a child. May be nested. A thread inside
 * may fork without waiting, as the driver does to start a helper; that child must only exec. */
void rf__fork_guard_begin(void);
void rf__fork_guard_end(void);

/* CUDA runs in this process from now on; it will not in children. */
void rf__fork_cuda_started(void);
/* Is this a child of a process in which CUDA ran? */
bool rf__fork_cuda_lost(void);

#endif
