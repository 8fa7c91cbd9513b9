/* rf_advise_huge_pages. Rows of a large table lie on as many pages: with pages of 4 KiB most lookups miss
 * the TLB as well as the caches. */
#define _DEFAULT_SOURCE /* madvise */
#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "core/huge_pages.h"
#include "recfuse.h"
#include "core/status.h"

enum {
    HUGE_PAGE = 2 << 20,
    COLLAPSE = 25,            /* MADV_COLLAPSE, which older headers lack */
    LEAST_BYTES = 4 << 20,   /* bytes */
};

#ifdef MADV_HUGEPAGE
/* Finds the whole huge pages inside the buffer; its neighbours may belong to others. Returns false without
 * any. */
static bool pages_inside(const void *data, int64_t bytes, uintptr_t *first, uintptr_t *end) {
    *first = ((uintptr_t)data + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
    *end = ((uintptr_t)data + (uintptr_t)bytes) & ~(uintptr_t)(HUGE_PAGE - 1);
    return *end > *first;
}
#endif

void rf__huge_pages_ask(void *data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t first, end;
    if (bytes >= LEAST_BYTES && pages_inside(data, bytes, &first, &end))
        (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

rf_status rf_advise_huge_pages(void *data, int64_t bytes) {
    RF_FAIL_IF(bytes < 0 || (data == NULL && bytes > 0), RF_ERR_VALUE,
               "recfuse.advise_huge_pages: %" PRId64 " bytes are at %p; expected a buffer", bytes, data);
#ifdef MADV_HUGEPAGE
    uintptr_t first, end;
    if (!pages_inside(data, bytes, &first, &end)) return RF_OK;
    RF_FAIL_IF(madvise((void *)first, end - first, MADV_HUGEPAGE) != 0 && errno != EINVAL, RF_ERR_INTERNAL,
               "recfuse.advise_huge_pages: madvise failed: %s", strerror(errno));
    /* For pages that are there already; only newer kernels (6.1) know it, and it may find no free memory. */
    (void)madvise((void *)first, end - first, COLLAPSE);
#endif
    return RF_OK;
}
