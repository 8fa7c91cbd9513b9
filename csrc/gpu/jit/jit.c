/* From a kernel's source to a cubin: from the cache on disk, or through the compiler and into the cache. */
#define _GNU_SOURCE /* clock_gettime, strtok_r */
#include "gpu/jit/jit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "gpu/jit/cache.h"
#include "gpu/jit/nvrtc.h"
#include "gpu/jit/source.h"

bool rf__jit_allowed(void) {
    const char *value = getenv("RECFUSE_JIT");
    static const char *const forbidding[] = {"off", "0", "no", "false"};
    for (size_t i = 0; value != NULL && i < sizeof forbidding / sizeof forbidding[0]; i++) {
        if (strcasecmp(value, forbidding[i]) == 0) return false;
    }
    return true;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The options of a compilation, split. */
typedef struct option_list {
    char text[9216]; /* each option ends with a zero */
    const char *options[RF__NVRTC_MOST_OPTIONS];
    int32_t count;
} option_list;

static rf_status options_set(option_list *list, const char *file, const char *arch, const char *defines) {
    const int length = snprintf(list->text, sizeof list->text,
                                "-arch=%s --std=c++17 -default-device --ptxas-options=-v %s", arch, defines);
    bool is_valid = length >= 0 && (size_t)length < sizeof list->text;
    char *position = NULL, *word = strtok_r(list->text, " ", &position);
    for (list->count = 0; is_valid && word != NULL; word = strtok_r(NULL, " ", &position)) {
        is_valid = list->count < RF__NVRTC_MOST_OPTIONS;
        if (is_valid) list->options[list->count++] = word;
    }
    RF_FAIL_IF(!is_valid, RF_ERR_VALUE, "%s: too many options for the compiler: %s", file, defines);
    return RF_OK;
}

/* All that the code depends on as one text: the parts, each with the zero at its end. */
static rf_status key_new(const rf__kernel_source *kernel, const rf__source *source,
                         const option_list *options, rf__cache_key *key) {
    const char *texts[3 + RF__NVRTC_MOST_OPTIONS + 2 * RF__MOST_HEADERS];
    int32_t count = 0;
    texts[count++] = kernel->file;
    texts[count++] = kernel->entry;
    for (int32_t i = 0; i < options->count; i++) texts[count++] = options->options[i];
    for (int32_t i = 0; i < source->n_headers; i++) {
        texts[count++] = source->header_names[i];
        texts[count++] = source->headers[i];
    }
    texts[count++] = source->text;
    key->bytes = 0;
    for (int32_t i = 0; i < count; i++) key->bytes += strlen(texts[i]) + 1;
    char *text = malloc(key->bytes);
    RF_FAIL_IF(text == NULL, RF_ERR_MEMORY, "no memory for the source of %s", kernel->file);
    key->text = text;
    for (int32_t i = 0; i < count; i++) {
        const size_t bytes = strlen(texts[i]) + 1;
        memcpy(text, texts[i], bytes);
        text += bytes;
    }
    return RF_OK;
}

/* Returns the number before `words` in [from, to), on the same line and of the same kernel, or -1. */
static int32_t number_before(const char *from, const char *to, const char *words) {
    const char *at = strstr(from, words);
    if (at == NULL || at >= to) return -1;
    while (at > from && at[-1] >= '0' && at[-1] <= '9') at--;
    return (int32_t)strtol(at, NULL, 10);
}

/* The assembler's report of a kernel of the file:
 *     ... Function properties for NAME
 *     ... 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
 *     ... Used 18 registers, used 1 barriers, 256 bytes smem
 */
static void report_read(const char *log, const char *entry, rf__cache_report *report) {
    static const char head[] = "Function properties for ";
    *report = (rf__cache_report){-1, -1, -1, -1};
    const char *from = log;
    while ((from = strstr(from, head)) != NULL) {
        from += strlen(head);
        const size_t length = strcspn(from, "\r\n");
        if (length == strlen(entry) && strncmp(from, entry, length) == 0) break;
    }
    if (from == NULL) return;
    const char *used = strstr(from, "Used ");
    const char *next = strstr(from, head);
    if (used == NULL || (next != NULL && used > next)) return;
    const char *end = used + strcspn(used, "\r\n");
    const int32_t stores = number_before(from, end, " bytes spill stores");
    const int32_t loads = number_before(from, end, " bytes spill loads");
    report->registers = number_before(used, end, " registers");
    report->stack_bytes = number_before(from, end, " bytes stack frame");
    if (stores >= 0 && loads >= 0) report->spill_bytes = stores + loads;
    report->static_shared = number_before(used, end, " bytes smem");
    if (report->static_shared < 0 && report->registers >= 0) report->static_shared = 0; /* absent if 0 */
}

static rf_status compile(const rf__kernel_source *kernel, const rf__source *source,
                         const option_list *options, rf__cache_entry *entry) {
    rf__nvrtc_output output;
    RF_CHECK(rf__nvrtc_compile(kernel->file, source, options->options, options->count, &output));
    report_read(output.log, kernel->entry, &entry->report);
    entry->cubin = output.cubin;
    entry->cubin_bytes = output.cubin_bytes;
    output.cubin = NULL; /* the entry's now */
    rf__nvrtc_output_free(&output);
    return RF_OK;
}

static rf_status fail_forbidden(const rf__kernel_source *kernel, const char *arch, const char *defines) {
    char folder[RF__PATH_BYTES], reason[RF__CACHE_REASON_BYTES];
    const bool has = rf__cache_folder(folder), refused = has && !rf__cache_folder_trusted(folder, reason);
    return rf__fail(RF_ERR_UNSUPPORTED,
                    "the GPU kernel %s of %s for %s is not in the cache (%s%s%s), and RECFUSE_JIT=off "
                    "forbids to compile it with the options %s. Fill that folder by `recfuse compile --arch "
                    "%s` and the plan in use, or unset RECFUSE_JIT.",
                    kernel->entry, kernel->file, arch,
                    has ? folder
                        : "no folder, since RECFUSE_CACHE_DIR and HOME are not set or their path is too long",
                    refused ? ", which is not used: " : "", refused ? reason : "", defines, arch);
}

/* `compiles`: compiles a kernel that is not in the cache; otherwise *info says that it is missing. */
static rf_status get(const rf__kernel_source *kernel, const rf__kernel_options *options, const char *arch,
                     bool compiles, void **cubin, int64_t *cubin_bytes, rf__kernel_info *info) {
    const double start = seconds_now();
    const bool allowed = rf__jit_allowed();
    rf_status status = RF_OK, found = RF_ERR_UNSUPPORTED;
    rf__source source = {0};
    option_list list;
    rf__cache_key key = {0};
    rf__cache_entry entry = {0};
    const rf__nvrtc_library *library = NULL;
    char compiler[32], path[RF__PATH_BYTES] = "";
    bool cached = false;
    RF_TRY(options_set(&list, kernel->file, arch, options->defines));
    RF_TRY(rf__source_read(kernel->file, &source));
    RF_TRY(key_new(kernel, &source, &list, &key));
    if (allowed) found = rf__nvrtc_find(&library);
    if (found == RF_OK)
        snprintf(compiler, sizeof compiler, "nvrtc%d.%d", (int)library->major, (int)library->minor);
    /* A machine without a compiler accepts entries of any compiler. */
    cached = rf__cache_read(&key, found == RF_OK ? compiler : NULL, &entry, path);
    if (!cached && compiles) {
        RF_TRY(allowed ? found : fail_forbidden(kernel, arch, options->defines));
        RF_TRY(compile(kernel, &source, &list, &entry));
        (void)rf__cache_write(&key, compiler, &entry, path);
    }
    if (info != NULL) {
        *info = (rf__kernel_info){.registers = entry.report.registers,
                                  .spill_bytes = entry.report.spill_bytes,
                                  .stack_bytes = entry.report.stack_bytes,
                                  .shared_bytes = entry.report.static_shared,
                                  .cubin_bytes = entry.cubin_bytes,
                                  .cached = cached};
        if (strlen(path) < sizeof info->path) memcpy(info->path, path, strlen(path) + 1);
        info->seconds = seconds_now() - start;
    }
    if (cubin != NULL) {
        *cubin = entry.cubin;
        *cubin_bytes = entry.cubin_bytes;
        entry.cubin = NULL; /* the caller's now */
    }
out:
    free(entry.cubin);
    free((char *)key.text);
    rf__source_free(&source);
    return status;
}

rf_status rf__jit_compile(const rf__kernel_source *kernel, const rf__kernel_options *options,
                          const char *arch, void **cubin, int64_t *cubin_bytes, rf__kernel_info *info) {
    return get(kernel, options, arch, true, cubin, cubin_bytes, info);
}

bool rf__jit_is_cached(const rf__kernel_source *kernel, const rf__kernel_options *options, const char *arch,
                       rf__kernel_info *info) {
    return get(kernel, options, arch, false, NULL, NULL, info) == RF_OK && info->cached;
}

const char *rf__kernel_integer(int32_t int_type) { return int_type == RF_INT64 ? "rf_i64" : "int"; }
