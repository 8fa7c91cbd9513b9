#define _GNU_SOURCE /* dlinfo, dl_iterate_phdr, RTLD_NOLOAD */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/jit/nvrtc.h"

static const int majors[] = {13, 12}; /* best first */
enum { MAJORS = sizeof majors / sizeof majors[0], MOST_ROOTS = 8, LOOKED_BYTES = 3072 };

typedef struct search {
    rf__nvrtc_library *library;
    char looked[LOOKED_BYTES]; /* folders without it, a line each */
    char roots[MOST_ROOTS][RF__PATH_BYTES]; /* folders that Python packages are in */
    int n_roots;
    int shortage; /* errno if a folder could not be opened because too many files are open; else 0 */
} search;

/* Cuts the last `parts` parts off a path. */
static bool path_up(char *path, int parts) {
    for (int i = 0; i < parts; i++) {
        char *slash = strrchr(path, '/');
        if (slash == NULL) return false;
        *slash = '\0';
    }
    return path[0] != '\0';
}

static void note(search *where, const char *folder) {
    const size_t used = strlen(where->looked);
    snprintf(where->looked + used, sizeof where->looked - used, "\n  %s", folder);
}

/* Finds the builtins that belong to a libnvrtc.so.<major>: their name has the minor version too. */
static void find_builtins(search *where, const char *folder) {
    rf__nvrtc_library *library = where->library;
    DIR *files = opendir(folder);
    if (files == NULL && rf__file_shortage(errno)) where->shortage = errno;
    if (files == NULL) return;
    const struct dirent *file;
    while ((file = readdir(files)) != NULL) {
        int major = 0, minor = 0, end = 0;
        if (sscanf(file->d_name, "libnvrtc-builtins.so.%d.%d%n", &major, &minor, &end) != 2) continue;
        if (file->d_name[end] != '\0' || major != library->major || minor < library->minor) continue;
        if (rf__path_set(library->builtins, "%s/%s", folder, file->d_name)) library->minor = minor;
    }
    closedir(files);
}

static bool try_folder(search *where, const char *named) {
    rf__nvrtc_library *library = where->library;
    char folder[RF__PATH_BYTES];
    if (!rf__path_set(folder, "%s", named) || !rf__path_make_absolute(folder)) return false;
    for (int i = 0; i < MAJORS; i++) {
        if (!rf__path_set(library->path, "%s/libnvrtc.so.%d", folder, majors[i])) continue;
        if (access(library->path, R_OK) != 0) continue;
        library->major = majors[i];
        library->minor = -1;
        find_builtins(where, folder);
        if (library->minor >= 0) return true;
    }
    note(where, folder);
    return false;
}

/* Opens it by name (RTLD_NOLOAD: only if the process has it already), to look in the folder it came from. */
static bool try_loader(search *where, int flags) {
    for (int i = 0; i < MAJORS; i++) {
        char name[32], folder[RF__PATH_BYTES];
        snprintf(name, sizeof name, "libnvrtc.so.%d", majors[i]);
        void *handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL | flags);
        if (handle == NULL) continue;
        const struct link_map *map = NULL;
        const bool found = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 &&
                           rf__path_set(folder, "%s", map->l_name) && path_up(folder, 1) &&
                           try_folder(where, folder);
        dlclose(handle);
        if (found) return true;
    }
    return false;
}

static void add_root(search *where, const char *file, int parts) {
    char root[RF__PATH_BYTES];
    if (where->n_roots == MOST_ROOTS || !rf__path_set(root, "%s", file) || !rf__path_make_absolute(root) ||
        !path_up(root, parts))
        return;
    for (int i = 0; i < where->n_roots; i++)
        if (strcmp(where->roots[i], root) == 0) return;
    rf__path_set(where->roots[where->n_roots++], "%s", root);
}

/* site-packages/torch/lib/libtorch_cpu.so is next to site-packages/nvidia. */
static int add_root_of_torch(struct dl_phdr_info *info, size_t bytes, void *context) {
    static const char *const names[] = {"/torch/lib/libtorch_cpu.so", "/torch/lib/libc10.so"};
    (void)bytes;
    const size_t length = strlen(info->dlpi_name);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const size_t tail = strlen(names[i]);
        if (length > tail && strcmp(info->dlpi_name + length - tail, names[i]) == 0)
            add_root(context, info->dlpi_name, 3);
    }
    return 0;
}

static bool try_packages(search *where) {
    static const char *const folders[] = {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"};
    char folder[RF__PATH_BYTES];
    dl_iterate_phdr(add_root_of_torch, where);
    /* site-packages/recfuse/librecfuse.so does as well. */
    add_root(where, rf__library_file(), 2);
    for (int i = 0; i < where->n_roots; i++)
        for (size_t f = 0; f < sizeof folders / sizeof folders[0]; f++)
            if (rf__path_set(folder, "%s/%s", where->roots[i], folders[f]) && try_folder(where, folder))
                return true;
    return false;
}

static bool try_toolkits(search *where) {
    const char *toolkits[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"};
    char folder[RF__PATH_BYTES];
    for (size_t i = 0; i < sizeof toolkits / sizeof toolkits[0]; i++) {
        if (toolkits[i] == NULL || toolkits[i][0] == '\0') continue;
        if (rf__path_set(folder, "%s/lib64", toolkits[i]) && try_folder(where, folder)) return true;
    }
    return false;
}

rf_status rf__nvrtc_search(rf__nvrtc_library *library) {
    rf_status status = RF_OK;
    search *where = calloc(1, sizeof *where);
    RF_FAIL_IF(where == NULL, RF_ERR_MEMORY, "no memory to look for NVRTC");
    where->library = library;
    if (!try_loader(where, RTLD_NOLOAD) && !try_packages(where) && !try_toolkits(where) &&
        !try_loader(where, 0)) {
        if (where->shortage != 0)
            status = rf__fail(RF_ERR_COMPILE,
                              "the folder of NVRTC, which compiles GPU kernels, cannot be opened (%s). Close "
                              "files, or raise the limit on open files (ulimit -n), and call again.",
                              strerror(where->shortage));
        else
            status = rf__fail(RF_ERR_UNSUPPORTED,
                              "NVRTC (libnvrtc.so.13 or .12 with its libnvrtc-builtins.so), which compiles "
                              "GPU kernels, is in no place that was searched:%s\n  the loader's search "
                              "path\nInstall it with `pip install nvidia-cuda-nvrtc` into the environment of "
                              "torch, or a CUDA toolkit whose folder CUDA_HOME names.",
                              where->looked);
    }
    free(where);
    return status;
}
