/* Static shared memory: variables of kernels that are `static thread_local` here. Their addresses are taken from the
 * program's symbol table, so that every block finds them full of NaN, as nothing in CUDA clears them either. */
#include "tests/cudasim/engine.h"

#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace cudasim
{

struct shared_variable {
    size_t offset, size; /* in the program's thread-local storage */
};

/* Variables of functions, by C++'s rules for names: _ZZ<function>E<variable>. */
static void collect(const char *file, std::vector<shared_variable> *into)
{
    const auto *header = reinterpret_cast<const ElfW(Ehdr) *>(file);
    const auto *sections = reinterpret_cast<const ElfW(Shdr) *>(file + header->e_shoff);
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB)
            continue;
        const auto *symbols = reinterpret_cast<const ElfW(Sym) *>(file + sections[s].sh_offset);
        const char *names = file + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++)
            if (ELF64_ST_TYPE(symbols[i].st_info) == STT_TLS && strncmp(names + symbols[i].st_name, "_ZZ", 3) == 0)
                into->push_back({symbols[i].st_value, symbols[i].st_size});
    }
}

static std::vector<shared_variable> find_variables()
{
    std::vector<shared_variable> found;
    const int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd >= 0 && fstat(fd, &status) == 0) {
        const size_t size = static_cast<size_t>(status.st_size);
        void *file = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (file != MAP_FAILED) {
            collect(static_cast<const char *>(file), &found);
            munmap(file, size);
        }
    }
    if (fd >= 0)
        close(fd);
    return found;
}

/* The first object that is told of is the program itself. */
static int take_first(struct dl_phdr_info *info, size_t, void *ret)
{
    *static_cast<char **>(ret) = static_cast<char *>(info->dlpi_tls_data);
    return 1;
}

/* Not a variable of a function: it would be found, and poisoned. */
static __thread char *storage;

void shared_memory_poison()
{
    static const std::vector<shared_variable> variables = find_variables();
    if (variables.empty())
        return;
    if (!storage)
        dl_iterate_phdr(take_first, &storage);
    for (const shared_variable &v : variables)
        memset(storage + v.offset, POISON, v.size);
}

} // namespace cudasim
