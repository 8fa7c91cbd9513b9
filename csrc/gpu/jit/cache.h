/* Compiled kernels on disk. No function fails: an unreadable entry is a miss, and an entry that cannot be
 * written is dropped.
 *
 * The folder is $RECFUSE_CACHE_DIR, else $XDG_CACHE_HOME/recfuse, else ~/.cache/recfuse. An entry's name is
 * <hash of the key>-<compiler>.cubin. It holds the whole key, so that equal hashes are harmless, and a
 * checksum, so that a damaged entry is removed and compiled again.
 *
 * Entries run on the GPU. So the folder and each entry must belong to this user or to root, and only they may
 * have write access; another folder is not used, and another file is ignored.
 */
#ifndef RECFUSE_CUDA_CACHE_H
#define RECFUSE_CUDA_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "core/file.h"
#include "core/status.h"

/* The least recently used entries go when the folder holds more than this. */
#define RF__CACHE_MOST_BYTES ((int64_t)256 << 20)

/* The key of a kernel: everything that may change its code except the compiler. */
typedef struct rf__cache_key {
    const char *text; /* [bytes] */
    size_t bytes;
} rf__cache_key;

/* The compiler's report of a kernel; -1: not reported. */
typedef struct rf__cache_report {
    int32_t registers, spill_bytes, stack_bytes, static_shared;
} rf__cache_report;

typedef struct rf__cache_entry {
    void *cubin; /* [cubin_bytes] */
    int64_t cubin_bytes;
    rf__cache_report report;
} rf__cache_entry;

/* Returns the absolute path of the folder [RF__PATH_BYTES]; a relative path is relative to the folder of the
 * process when this library was loaded. False, and "", without a folder (no home). */
RF__SHARED bool rf__cache_folder(char *path);

enum { RF__CACHE_REASON_BYTES = 512 };

/* Returns true if the folder may be used; otherwise reason [RF__CACHE_REASON_BYTES] is the reason, else "". A
 * folder that does not exist may be used. */
RF__SHARED bool rf__cache_folder_trusted(const char *folder, char *reason);

/* Reads the entry of `key` by `compiler` ("nvrtc13.0"), or by any compiler if that is NULL, the newest first.
 * On success the caller frees entry->cubin, and `path` [RF__PATH_BYTES] names the file. */
bool rf__cache_read(const rf__cache_key *key, const char *compiler, rf__cache_entry *entry, char *path);

/* Publishes an entry by an atomic rename, then removes old entries as needed. On success `path`
 * [RF__PATH_BYTES] names the file; else it is "". */
bool rf__cache_write(const rf__cache_key *key, const char *compiler, const rf__cache_entry *entry,
                     char *path);

/* A file of the cache. */
typedef struct rf__cache_file {
    char name[128];
    int64_t bytes;
    struct timespec used;
    bool temporary, trusted;
} rf__cache_file;

/* Lists the files of one hash, or all if it is NULL, the most recently used first; returns their number. The
 * caller frees *files. */
RF__SHARED size_t rf__cache_list(const char *folder, const char *hash, rf__cache_file **files);

/* Removes abandoned temporary files, and the least recently used entries beyond `most_bytes`. */
void rf__cache_trim(const char *folder, int64_t most_bytes);

#endif
