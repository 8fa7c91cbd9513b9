/* Paths, and whole files into memory. */
#ifndef RECFUSE_CUDA_FILE_H
#define RECFUSE_CUDA_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

enum { RF__PATH_BYTES = 1024 };

/* snprintf into path [RF__PATH_BYTES]; false, and "", when it does not fit. */
bool rf__path_set(char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Makes path [RF__PATH_BYTES] absolute. A relative path is relative to the folder of the process when this
 * library was loaded, so a later chdir has no effect. Returns false, and "", if it does not fit. */
bool rf__path_make_absolute(char *path);

/* Returns the absolute path of the file from which this library was loaded; "" if the loader does not report
 * it. */
const char *rf__library_file(void);

/* Returns true if code from this file may run: only its owner may write it, and the owner is this user or
 * root. */
bool rf__file_trusted(const struct stat *about);

/* Reads a regular file of at most 64 MiB into *data [*bytes], with a zero after it; the caller frees it.
 * Returns false, with errno set, on failure. `trusted`: requires rf__file_trusted and no link (EPERM,
 * ELOOP). */
bool rf__file_read(const char *path, bool trusted, char **data, size_t *bytes);

/* Returns true if an errno means that the process, or the system, has too many open files. */
bool rf__file_shortage(int reason);

/* Writes all; false when the system does not take it. */
bool rf__file_write(int descriptor, const void *data, size_t bytes);

#endif
