#define _GNU_SOURCE /* scandir, strdup */
#include "cuda/source.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/file.h"

static bool kernels_folder(char *folder) {
    const char *library = rf__library_file(), *slash = strrchr(library, '/');
    return slash != NULL && rf__path_set(folder, "%.*s/kernels", (int)(slash - library), library);
}

static rf_status text_read(const char *folder, const char *name, char **text) {
    char path[RF__PATH_BYTES] = "";
    size_t bytes = 0;
    errno = ENAMETOOLONG;
    if (rf__path_set(path, "%s/%s", folder, name) && rf__file_read(path, false, text, &bytes)) return RF_OK;
    return rf__fail(RF_ERR_INTERNAL,
                    "the source of a GPU kernel, %s/%s, cannot be read (%s); it belongs to the package: "
                    "install recfuse again",
                    folder, name, strerror(errno));
}

static int is_header(const struct dirent *file) {
    const char *ending = strrchr(file->d_name, '.');
    return file->d_name[0] != '.' && ending != NULL && strcmp(ending, ".cuh") == 0;
}

rf_status rf__source_read(const char *file, rf__source *source) {
    rf_status status = RF_OK;
    char folder[RF__PATH_BYTES];
    struct dirent **headers = NULL;
    int n_headers = 0;
    memset(source, 0, sizeof *source);
    if (!kernels_folder(folder)) {
        return rf__fail(RF_ERR_INTERNAL,
                        "the folder of the GPU kernels, kernels/ beside this library, has "
                        "a path that is longer than %d bytes",
                        RF__PATH_BYTES - 1);
    }
    RF_TRY(text_read(folder, file, &source->text));
    n_headers = scandir(folder, &headers, is_header, alphasort);
    if (n_headers < 0 || n_headers > RF__MOST_HEADERS) {
        status = rf__fail(RF_ERR_INTERNAL, "%s has %d headers (*.cuh); allowed are 0 to %d", folder,
                          n_headers, RF__MOST_HEADERS);
        goto out;
    }
    for (int i = 0; i < n_headers; i++) {
        char *name = strdup(headers[i]->d_name);
        source->header_names[i] = name;
        source->n_headers = i + 1;
        if (name == NULL) {
            status = rf__fail(RF_ERR_MEMORY, "no memory for the source of %s", file);
            goto out;
        }
        RF_TRY(text_read(folder, name, &source->headers[i]));
    }
out:
    for (int i = 0; i < n_headers; i++) free(headers[i]);
    free(headers);
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
