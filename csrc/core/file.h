/* Paths, and whole files into memory. */
#ifndef RECFUSE_CUDA_FILE_H
#define RECFUSE_CUDA_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

enum { RF__PATH_BYTES = 1024 };

/* snprintf into path [RF__PATH_BYTES]; false, and "", when it does not fit. */
bool rf__path_set(char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Makes path [RF__PATH_BYTES] absolute: a relative one is taken from the folder that the process was in when this
 * library was loaded, so that a later chdir moves nothing. False, and "", when it does not fit. */
bool rf__path_make_absolute(char *path);

/* The file that this library was loaded from, an absolute path; "" where the loader does not say. */
const char *rf__library_file(void);

/* May code from here be run? Only if nobody but this user and root can have written it: one of them owns it, and no
 * other may write. */
bool rf__file_trusted(const struct stat *about);

/* Reads a regular file of at most 64 MiB: *data [*bytes] and a zero behind it, the caller's to free. False,
 * with errno set, when it cannot be read. `trusted`: it must be rf__file_trusted and no link (EPERM, ELOOP). */
bool rf__file_read(const char *path, bool trusted, char **data, size_t *bytes);

/* Whether an errno says that the process, or the system, has too many files open. */
bool rf__file_shortage(int reason);

/* Writes all; false when the system does not take it. */
bool rf__file_write(int descriptor, const void *data, size_t bytes);

#endif
