/* Prevents NVRTC from changing the program's signals.
 *
 * In the first compilation of a process, NVRTC 12 and 13 set handlers of SIGINT and SIGTERM by signal() and
 * restore the former handlers about 35 ms later, without their flags. Until then a signal on any thread ends
 * the process by exit(4). Masks do not help, because a signal to the process goes to any thread that accepts
 * it. So the library's slot for signal() in its table of imported functions gets a function without effect;
 * other libraries and the program are not affected.
 */
#define _GNU_SOURCE /* dladdr, dlinfo */
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gpu/jit/nvrtc.h"

typedef void (*signal_handler)(int number);

static const void
    *nvrtc_image; /* begin of the library; written before its slot, under the lock of opening it */

/* Replaces signal() for NVRTC: reports signals as ignored, so that it does not change them. It may replace
 * only its own handler, of a compilation that another library began earlier. */
static signal_handler signal_left(int number, signal_handler handler) {
    struct sigaction present;
    Dl_info owner;
    if (sigaction(number, NULL, &present) != 0 || present.sa_handler == SIG_IGN ||
        present.sa_handler == SIG_DFL || dladdr(*(void **)&present.sa_handler, &owner) == 0 ||
        owner.dli_fbase != nvrtc_image)
        return SIG_IGN;
    return signal(number, handler);
}

static ElfW(Addr) value_of(const struct link_map *map, ElfW(Sxword) tag) {
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == tag) return entry->d_un.d_val;
    return 0;
}

/* Returns the address of the import `name`, or NULL. */
static void **slot_of(const struct link_map *map, const char *name) {
    const ElfW(Rela) *imports = (const ElfW(Rela) *)value_of(map, DT_JMPREL);
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)value_of(map, DT_SYMTAB);
    const char *names = (const char *)value_of(map, DT_STRTAB);
    const size_t count = value_of(map, DT_PLTRELSZ) / sizeof *imports;
    if (imports == NULL || symbols == NULL || names == NULL || value_of(map, DT_PLTREL) != DT_RELA)
        return NULL;
    for (size_t i = 0; i < count; i++)
        if (strcmp(names + symbols[ELF64_R_SYM(imports[i].r_info)].st_name, name) == 0)
            return (void **)(map->l_addr + imports[i].r_offset);
    return NULL;
}

bool rf__nvrtc_leave_signals(void *handle) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    signal_handler (*const replacement)(int, signal_handler) = signal_left;
    struct link_map *map = NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) return false;
    void **slot = slot_of(map, "signal");
    if (slot == NULL || mprotect((void *)((uintptr_t)slot / page * page), page, PROT_READ | PROT_WRITE) != 0)
        return false;
    nvrtc_image = (const void *)map->l_addr;
    __atomic_store_n(slot, *(void *const *)&replacement, __ATOMIC_RELEASE);
    return true;
}
