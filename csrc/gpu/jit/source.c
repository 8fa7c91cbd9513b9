#define _GNU_SOURCE /* strndup */
#include "gpu/jit/source.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"

/* The folder, next to this library, of a file of kernels: its public headers, or kernels/. */
static bool folder_of(const char *name, char *folder) {
    static const char public[] = "recfuse/";
    const char *library = rf__library_file(), *slash = strrchr(library, '/');
    const char *room = strncmp(name, public, sizeof public - 1) == 0 ? "include" : "kernels";
    return slash != NULL && rf__path_set(folder, "%.*s/%s", (int)(slash - library), library, room);
}

static rf_status text_read(const char *name, char **text) {
    char folder[RF__PATH_BYTES], path[RF__PATH_BYTES] = "";
    size_t bytes = 0;
    RF_FAIL_IF(!folder_of(name, folder), RF_ERR_INTERNAL,
               "the folder of the GPU kernels, kernels/ in the folder of this library, has a path that is "
               "longer than %d bytes",
               RF__PATH_BYTES - 1);
    errno = ENAMETOOLONG;
    if (rf__path_set(path, "%s/%s", folder, name) && rf__file_read(path, false, text, &bytes)) return RF_OK;
    RF_FAIL_IF(errno == ENOMEM, RF_ERR_MEMORY, "no memory to read the source of a GPU kernel, %s", path);
    RF_FAIL_IF(rf__file_shortage(errno), RF_ERR_COMPILE,
               "the source of a GPU kernel, %s, cannot be opened (%s). Close files, or raise the limit on "
               "open files (ulimit -n), and call again.",
               path, strerror(errno));
    return rf__fail(RF_ERR_INTERNAL,
                    "the source of a GPU kernel, %s/%s, cannot be read (%s), but is a part of the package. "
                    "Install recfuse again.",
                    folder, name, strerror(errno));
}

static bool has_header(const rf__source *source, const char *name, size_t length) {
    for (int32_t i = 0; i < source->n_headers; i++) {
        if (strlen(source->header_names[i]) == length && memcmp(source->header_names[i], name, length) == 0) {
            return true;
        }
    }
    return false;
}

/* Adds the headers that `text` names and `source` lacks. */
static rf_status headers_add(const char *file, const char *text, rf__source *source) {
    static const char word[] = "#include \"";
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += strspn(line, "\n\r\t ");
        if (strncmp(line, word, sizeof word - 1) != 0) continue;
        const char *name = line + sizeof word - 1;
        const size_t length = strcspn(name, "\"\n");
        if (name[length] != '"' || has_header(source, name, length)) continue;
        RF_FAIL_IF(source->n_headers == RF__MOST_HEADERS, RF_ERR_INTERNAL,
                   "%s: a kernel has more than %d headers", file, RF__MOST_HEADERS);
        char *copy = strndup(name, length);
        RF_FAIL_IF(copy == NULL, RF_ERR_MEMORY, "no memory for the name of a header");
        const int32_t added = source->n_headers++;
        source->header_names[added] = copy;
        RF_CHECK(text_read(copy, &source->headers[added]));
    }
    return RF_OK;
}

rf_status rf__source_read(const char *file, rf__source *source) {
    rf_status status = RF_OK;
    memset(source, 0, sizeof *source);
    RF_TRY(text_read(file, &source->text));
    RF_TRY(headers_add(file, source->text, source));
    for (int32_t i = 0; i < source->n_headers; i++) { /* n_headers grows during the loop */
        RF_TRY(headers_add(file, source->headers[i], source));
    }
out:
    if (status != RF_OK) rf__source_free(source);
    return status;
}

void rf__source_free(rf__source *source) {
    free(source->text);
    for (int32_t i = 0; i < source->n_headers; i++) {
        free(source->headers[i]);
        free(source->header_names[i]);
    }
    memset(source, 0, sizeof *source);
}
