/* Compiled kernels on disk. Nothing here fails: what cannot be read is a miss, what cannot be written is
 * not kept.
 *
 * The folder is $RECFUSE_CACHE_DIR, else $XDG_CACHE_HOME/recfuse, else ~/.cache/recfuse. An entry's name is
 * <hash of the key>-<compiler>.cubin; it holds the whole key, so that equal hashes are no danger, and a
 * checksum, so that a damaged one is removed and made again.
 *
 * What is read here runs on the GPU. So the folder and each entry must belong to this user or to root, and nobody else
 * may write there; another folder is not used, another file is left alone.
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

/* What a kernel is made from: all that may change its code but the compiler. */
typedef struct rf__cache_key {
    const char *text; /* [bytes] */
    size_t bytes;
} rf__cache_key;

/* What the compiler said about a kernel; -1: it did not say. */
typedef struct rf__cache_report {
    int32_t registers, spill_bytes, stack_bytes, static_shared;
} rf__cache_report;

typedef struct rf__cache_entry {
    void *cubin; /* [cubin_bytes] */
    int64_t cubin_bytes;
    rf__cache_report report;
} rf__cache_entry;

/* The folder's path [RF__PATH_BYTES], absolute: a relative one is taken from where the process was when this library was
 * loaded. False, and "", when there is none (no home). */
RF__SHARED bool rf__cache_folder(char *path);

enum { RF__CACHE_REASON_BYTES = 512 };

/* May the folder be used? If not, why: reason [RF__CACHE_REASON_BYTES]; else "". One that is not there may be. */
RF__SHARED bool rf__cache_folder_trusted(const char *folder, char *reason);

/* Reads the entry of `key` by `compiler` ("nvrtc13.0"), or by any compiler where that is NULL, the newest
 * first. True: entry->cubin is the caller's to free, and `path` [RF__PATH_BYTES] names the file. */
bool rf__cache_read(const rf__cache_key *key, const char *compiler, rf__cache_entry *entry, char *path);

/* Publishes an entry by an atomic rename, then removes old ones as needed. True: it is there, and `path`
 * [RF__PATH_BYTES] names the file; else `path` is "". */
bool rf__cache_write(const rf__cache_key *key, const char *compiler, const rf__cache_entry *entry,
                     char *path);

/* A file of the cache. */
typedef struct rf__cache_file {
    char name[128];
    int64_t bytes;
    struct timespec used;
    bool temporary, trusted;
} rf__cache_file;

/* Lists the files of one hash, or all where that is NULL, the last used first; returns their number. *files
 * is the caller's to free. */
RF__SHARED size_t rf__cache_list(const char *folder, const char *hash, rf__cache_file **files);

/* Removes temporary files that nobody will finish, and the least recently used entries beyond `most_bytes`. */
void rf__cache_trim(const char *folder, int64_t most_bytes);

#endif
