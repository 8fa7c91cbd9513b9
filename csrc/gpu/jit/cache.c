#define _GNU_SOURCE /* mkostemp, utimensat, st_mtim */
#include "gpu/jit/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HASH_DIGITS = 32, STALE_SECONDS = 3600 };
static const char entry_ending[] = ".cubin";
static const char temporary_ending[] = ".tmp"; /* after an entry's name; six random characters follow */

bool rf__cache_folder(char *path) {
    const char *configured = getenv("RECFUSE_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    if (configured != NULL && configured[0] != '\0')
        return rf__path_set(path, "%s", configured) && rf__path_make_absolute(path);
    if (xdg != NULL && xdg[0] == '/') return rf__path_set(path, "%s/recfuse", xdg);
    if (home != NULL && home[0] == '/') return rf__path_set(path, "%s/.cache/recfuse", home);
    path[0] = '\0';
    return false;
}

/* Returns true if it is the name of an entry or of a temporary file. Other files in the folder are never
 * touched. */
static bool name_is_ours(const char *name, bool *temporary) {
    if (strspn(name, "0123456789abcdef") != HASH_DIGITS || name[HASH_DIGITS] != '-') return false;
    const char *ending = strstr(name, entry_ending);
    if (ending == NULL) return false;
    ending += strlen(entry_ending);
    *temporary = strncmp(ending, temporary_ending, strlen(temporary_ending)) == 0;
    return *temporary || *ending == '\0';
}

static int newest_first(const void *left, const void *right) {
    const struct timespec a = ((const rf__cache_file *)left)->used, b = ((const rf__cache_file *)right)->used;
    if (a.tv_sec != b.tv_sec) return a.tv_sec < b.tv_sec ? 1 : -1;
    return (a.tv_nsec < b.tv_nsec) - (a.tv_nsec > b.tv_nsec);
}

bool rf__cache_folder_trusted(const char *folder, char *reason) {
    struct stat about;
    reason[0] = '\0';
    if (stat(folder, &about) != 0) return true;
    if (!S_ISDIR(about.st_mode)) {
        snprintf(reason, RF__CACHE_REASON_BYTES, "it is no folder");
    } else if (!rf__file_trusted(&about)) {
        const bool ours = about.st_uid == geteuid() || about.st_uid == 0;
        snprintf(
            reason, RF__CACHE_REASON_BYTES,
            ours ? "others may write there (mode %03o, user %ld), and could plant code: run chmod go-w on it"
                 : "it belongs to another user (mode %03o, user %ld), and its owner could plant code: use a "
                   "folder of your own",
            (unsigned)about.st_mode & 0777u, (long)about.st_uid);
    }
    return reason[0] == '\0';
}

size_t rf__cache_list(const char *folder, const char *hash, rf__cache_file **files) {
    size_t count = 0, capacity = 0;
    *files = NULL;
    DIR *directory = opendir(folder);
    if (directory == NULL) return 0;
    const struct dirent *item;
    while ((item = readdir(directory)) != NULL) {
        rf__cache_file file;
        struct stat about;
        char path[RF__PATH_BYTES];
        const size_t length = strlen(item->d_name);
        if (!name_is_ours(item->d_name, &file.temporary) || length >= sizeof file.name) continue;
        if (hash != NULL && strncmp(item->d_name, hash, HASH_DIGITS) != 0) continue;
        if (!rf__path_set(path, "%s/%s", folder, item->d_name) || lstat(path, &about) != 0) continue;
        if (!S_ISREG(about.st_mode)) continue;
        memcpy(file.name, item->d_name, length + 1);
        file.bytes = about.st_size;
        file.trusted = rf__file_trusted(&about);
        file.used = about.st_mtim;
        if (count == capacity) {
            capacity = capacity == 0 ? 64 : 2 * capacity;
            rf__cache_file *grown = realloc(*files, capacity * sizeof **files);
            if (grown == NULL) break;
            *files = grown;
        }
        (*files)[count++] = file;
    }
    closedir(directory);
    if (count > 1) qsort(*files, count, sizeof **files, newest_first);
    return count;
}

void rf__cache_trim(const char *folder, int64_t most_bytes) {
    rf__cache_file *files = NULL;
    char path[RF__PATH_BYTES];
    const size_t count = rf__cache_list(folder, NULL, &files);
    const time_t now = time(NULL);
    int64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bool is_removed = now - files[i].used.tv_sec > STALE_SECONDS;
        if (!files[i].temporary) {
            bytes += files[i].bytes;
            is_removed = bytes > most_bytes && i > 0;
        }
        if (is_removed && rf__path_set(path, "%s/%s", folder, files[i].name)) (void)unlink(path);
    }
    free(files);
}

/* The head of an entry; the key follows, then the cubin. In this machine's byte order: an entry of another
 * byte order counts as damaged. */
typedef struct entry_head {
    char magic[8];
    uint64_t checksum; /* of the whole file with this field zero */
    uint64_t key_bytes, cubin_bytes;
    rf__cache_report report;
} entry_head;

static const char entry_magic[8] = "RFCUBIN1"; /* the last digit is the version of this format */

static uint64_t checksum_add(uint64_t sum, const void *data, size_t bytes) {
    const unsigned char *from = data;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ from[i]) * 0x100000001b3u; /* FNV-1a */
    return sum;
}

static uint64_t entry_checksum(const entry_head *head, const void *key, const void *cubin) {
    entry_head plain = *head;
    plain.checksum = 0;
    uint64_t sum = checksum_add(0xcbf29ce484222325u, &plain, sizeof plain);
    sum = checksum_add(sum, key, (size_t)head->key_bytes);
    return checksum_add(sum, cubin, (size_t)head->cubin_bytes);
}

/* FNV-1a of 128 bits over the format and the key, in hexadecimal digits. */
static void key_hash(const rf__cache_key *key, char digits[HASH_DIGITS + 1]) {
    const __uint128_t prime = (__uint128_t)1 << 88 | 0x13b;
    __uint128_t hash = (__uint128_t)0x6c62272e07bb0142u << 64 | 0x62b821756295c58du;
    for (size_t i = 0; i < sizeof entry_magic; i++) hash = (hash ^ (unsigned char)entry_magic[i]) * prime;
    for (size_t i = 0; i < key->bytes; i++) hash = (hash ^ (unsigned char)key->text[i]) * prime;
    snprintf(digits, HASH_DIGITS + 1, "%016llx%016llx", (unsigned long long)(hash >> 64),
             (unsigned long long)hash);
}

/* The folder, if it may be used. */
static bool trusted_folder(char *path) {
    char reason[RF__CACHE_REASON_BYTES];
    return rf__cache_folder(path) && rf__cache_folder_trusted(path, reason);
}

/* Reads a file. Removes it if it is not an entry for `key`: it is damaged, or has another key with the same
 * hash. */
static bool entry_read(const char *path, const rf__cache_key *key, rf__cache_entry *entry) {
    char *file = NULL;
    size_t bytes = 0;
    entry_head head;
    if (!rf__file_read(path, true, &file, &bytes)) {
        if (errno == EISDIR) (void)remove(path);
        return false;
    }
    if (bytes < sizeof head + key->bytes) goto damaged;
    const char *file_key = file + sizeof head, *cubin = file_key + key->bytes;
    memcpy(&head, file, sizeof head);
    if (memcmp(head.magic, entry_magic, sizeof head.magic) != 0 || head.key_bytes != key->bytes ||
        head.cubin_bytes != bytes - sizeof head - key->bytes || head.cubin_bytes == 0 ||
        head.checksum != entry_checksum(&head, file_key, cubin) ||
        memcmp(file_key, key->text, key->bytes) != 0) {
        goto damaged;
    }
    entry->cubin = malloc(head.cubin_bytes);
    if (entry->cubin == NULL) {
        free(file);
        return false;
    }
    memcpy(entry->cubin, cubin, head.cubin_bytes);
    entry->cubin_bytes = (int64_t)head.cubin_bytes;
    entry->report = head.report;
    free(file);
    (void)utimensat(AT_FDCWD, path, NULL, 0); /* used now */
    return true;
damaged:
    free(file);
    (void)remove(path);
    return false;
}

bool rf__cache_read(const rf__cache_key *key, const char *compiler, rf__cache_entry *entry, char *path) {
    char folder[RF__PATH_BYTES], hash[HASH_DIGITS + 1];
    bool found = false;
    key_hash(key, hash);
    if (!trusted_folder(folder)) return false;
    if (compiler != NULL) {
        return rf__path_set(path, "%s/%s-%s%s", folder, hash, compiler, entry_ending) &&
               entry_read(path, key, entry);
    }
    rf__cache_file *files = NULL;
    const size_t count = rf__cache_list(folder, hash, &files);
    for (size_t i = 0; i < count && !found; i++)
        found = !files[i].temporary && rf__path_set(path, "%s/%s", folder, files[i].name) &&
                entry_read(path, key, entry);
    free(files);
    return found;
}

/* Makes a folder with those above it. */
static void make_folders(const char *folder) {
    char path[RF__PATH_BYTES];
    if (!rf__path_set(path, "%s", folder)) return;
    for (char *at = path + 1; *at != '\0'; at++) {
        if (*at != '/') continue;
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
    (void)mkdir(path, 0700);
}

/* Writing beyond the limit on the size of files would end the process with a signal. */
static bool size_allowed(size_t bytes) {
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           (limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur);
}

bool rf__cache_write(const rf__cache_key *key, const char *compiler, const rf__cache_entry *entry,
                     char *path) {
    char folder[RF__PATH_BYTES], temporary[RF__PATH_BYTES], hash[HASH_DIGITS + 1];
    entry_head head = {
        .key_bytes = key->bytes, .cubin_bytes = (uint64_t)entry->cubin_bytes, .report = entry->report};
    memcpy(head.magic, entry_magic, sizeof head.magic);
    head.checksum = entry_checksum(&head, key->text, entry->cubin);
    key_hash(key, hash);
    if (!trusted_folder(folder) || !size_allowed(sizeof head + key->bytes + (size_t)entry->cubin_bytes) ||
        !rf__path_set(path, "%s/%s-%s%s", folder, hash, compiler, entry_ending) ||
        !rf__path_set(temporary, "%s%sXXXXXX", path, temporary_ending)) {
        path[0] = '\0';
        return false;
    }
    make_folders(folder);
    const int file = mkostemp(temporary, O_CLOEXEC);
    bool is_written = file >= 0;
    if (is_written) {
        is_written = rf__file_write(file, &head, sizeof head) &&
                     rf__file_write(file, key->text, key->bytes) &&
                     rf__file_write(file, entry->cubin, (size_t)entry->cubin_bytes);
        (void)fchmod(file, 0644); /* a folder may be filled by one user and read by others */
        is_written = close(file) == 0 && is_written; /* a full disk may first show here */
        is_written = is_written && rename(temporary, path) == 0;
        if (!is_written) (void)unlink(temporary);
    }
    if (is_written)
        rf__cache_trim(folder, RF__CACHE_MOST_BYTES);
    else
        path[0] = '\0';
    return is_written;
}
