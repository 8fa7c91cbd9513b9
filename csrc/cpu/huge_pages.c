/* rf_advise_huge_pages. Rows of a large table lie on as many pages: with pages of 4 KiB most lookups miss
 * the TLB as well as the caches. */
#define _DEFAULT_SOURCE /* madvise */
#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "recfuse.h"
#include "status.h"

enum { HUGE_PAGE = 2 << 20, COLLAPSE = 25 /* MADV_COLLAPSE, which older headers lack */ };

rf_status rf_advise_huge_pages(void *data, int64_t bytes) {
    if (bytes < 0 || (data == NULL && bytes > 0)) {
        return rf__fail(RF_ERR_VALUE,
                        "recfuse.advise_huge_pages: %" PRId64 " bytes at %p; a buffer is allowed", bytes,
                        data);
    }
#ifdef MADV_HUGEPAGE
    /* Whole huge pages inside the buffer only: its neighbours are somebody else's. */
    uintptr_t first = ((uintptr_t)data + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
    uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) & ~(uintptr_t)(HUGE_PAGE - 1);
    if (end > first && madvise((void *)first, end - first, MADV_HUGEPAGE) != 0 && errno != EINVAL) {
        return rf__fail(RF_ERR_INTERNAL, "recfuse.advise_huge_pages: madvise failed: %s", strerror(errno));
    }
    /* For pages that are there already; only newer kernels (6.1) know it, and it may find no free memory. */
    if (end > first) (void)madvise((void *)first, end - first, COLLAPSE);
#endif
    return RF_OK;
}
