#define _GNU_SOURCE /* O_CLOEXEC, O_NOFOLLOW, dladdr */
#include "core/file.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_BYTES = 64 << 20 };

bool rf__path_set(char *path, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(path, RF__PATH_BYTES, format, arguments);
    va_end(arguments);
    if (length >= 0 && length < RF__PATH_BYTES) return true;
    path[0] = '\0';
    return false;
}

/* Written once, by the constructor. */
static char folder_at_load[RF__PATH_BYTES], library_file[RF__PATH_BYTES];

bool rf__path_make_absolute(char *path) {
    char relative[RF__PATH_BYTES];
    if (path[0] == '/') return true;
    memcpy(relative, path, sizeof relative);
    if (folder_at_load[0] == '\0') path[0] = '\0';
    return folder_at_load[0] != '\0' && rf__path_set(path, "%s/%s", folder_at_load, relative);
}

const char *rf__library_file(void) { return library_file; }

/* Before the other constructors, which may call it. */
__attribute__((constructor(101))) static void record_paths(void) {
    Dl_info self;
    if (getcwd(folder_at_load, sizeof folder_at_load) == NULL) folder_at_load[0] = '\0';
    if (dladdr(folder_at_load, &self) != 0 && self.dli_fname != NULL &&
        rf__path_set(library_file, "%s", self.dli_fname))
        (void)rf__path_make_absolute(library_file);
}

bool rf__file_trusted(const struct stat *about) {
    return (about->st_uid == geteuid() || about->st_uid == 0) && (about->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool rf__file_read(const char *path, bool trusted, char **data, size_t *bytes) {
    struct stat about;
    size_t bytes_read = 0;
    char *text = NULL;
    /* Not blocking: a pipe instead of a file must not block this call. */
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | (trusted ? O_NOFOLLOW : 0));
    if (file < 0) return false;
    if (fstat(file, &about) != 0) goto out;
    if (!S_ISREG(about.st_mode) || about.st_size > MOST_BYTES) {
        errno = S_ISDIR(about.st_mode) ? EISDIR : EFBIG;
        goto out;
    }
    if (trusted && !rf__file_trusted(&about)) {
        errno = EPERM;
        goto out;
    }
    text = malloc((size_t)about.st_size + 1);
    if (text == NULL) goto out;
    while (bytes_read < (size_t)about.st_size) {
        const ssize_t count = read(file, text + bytes_read, (size_t)about.st_size - bytes_read);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) { /* shorter than it was a moment ago, or not readable */
            if (count == 0) errno = EIO;
            free(text);
            text = NULL;
            goto out;
        }
        bytes_read += (size_t)count;
    }
    text[bytes_read] = '\0';
    *data = text;
    *bytes = bytes_read;
out:;
    const int reason = errno;
    close(file);
    errno = reason;
    return text != NULL;
}

bool rf__file_shortage(int reason) { return reason == EMFILE || reason == ENFILE; }

bool rf__file_write(int descriptor, const void *data, size_t bytes) {
    const char *from = data;
    while (bytes > 0) {
        const ssize_t written = write(descriptor, from, bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        from += written;
        bytes -= (size_t)written;
    }
    return true;
}
