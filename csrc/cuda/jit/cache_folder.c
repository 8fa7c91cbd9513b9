/* The folder of the cache as a whole: what is in it, and what has to go. */
#define _GNU_SOURCE /* st_mtim */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cuda/jit/cache.h"
#include "base/file.h"

enum { STALE_SECONDS = 3600 };

/* Is it the name of an entry or of a temporary file? All else in the folder is left alone. */
static bool name_is_ours(const char *name, bool *temporary) {
    if (strspn(name, "0123456789abcdef") != RF__CACHE_HASH_DIGITS || name[RF__CACHE_HASH_DIGITS] != '-')
        return false;
    const char *ending = strstr(name, RF__CACHE_ENDING);
    if (ending == NULL) return false;
    ending += strlen(RF__CACHE_ENDING);
    *temporary = strncmp(ending, RF__CACHE_TEMPORARY, strlen(RF__CACHE_TEMPORARY)) == 0;
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
            ours
                ? "others may write there (mode %03o, user %ld): chmod go-w it, so that nobody can plant code"
                : "it belongs to another user (mode %03o, user %ld), who could plant code there: use a "
                  "folder of "
                  "your own",
            (unsigned)about.st_mode & 0777u, (long)about.st_uid);
    }
    return reason[0] == '\0';
}

size_t rf__cache_list(const char *folder, const char *hash, rf__cache_file **files) {
    size_t count = 0, room = 0;
    *files = NULL;
    DIR *listing = opendir(folder);
    if (listing == NULL) return 0;
    const struct dirent *item;
    while ((item = readdir(listing)) != NULL) {
        rf__cache_file file;
        struct stat about;
        char path[RF__PATH_BYTES];
        const size_t length = strlen(item->d_name);
        if (!name_is_ours(item->d_name, &file.temporary) || length >= sizeof file.name) continue;
        if (hash != NULL && strncmp(item->d_name, hash, RF__CACHE_HASH_DIGITS) != 0) continue;
        if (!rf__path_set(path, "%s/%s", folder, item->d_name) || lstat(path, &about) != 0) continue;
        if (!S_ISREG(about.st_mode)) continue;
        memcpy(file.name, item->d_name, length + 1);
        file.bytes = about.st_size;
        file.trusted = rf__file_trusted(&about);
        file.used = about.st_mtim;
        if (count == room) {
            room = room == 0 ? 64 : 2 * room;
            rf__cache_file *more = realloc(*files, room * sizeof **files);
            if (more == NULL) break;
            *files = more;
        }
        (*files)[count++] = file;
    }
    closedir(listing);
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
        bool goes = now - files[i].used.tv_sec > STALE_SECONDS;
        if (!files[i].temporary) {
            bytes += files[i].bytes;
            goes = bytes > most_bytes && i > 0;
        }
        if (goes && rf__path_set(path, "%s/%s", folder, files[i].name)) (void)unlink(path);
    }
    free(files);
}
