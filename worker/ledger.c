#include "worker/ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"

enum mu_status mu_ledger_open(const char *path, int *ret_fd, struct mu_error *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        return mu_fail_errno(err, errno, "--ledger: cannot open '%s'", path);
    *ret_fd = fd;
    return MU_OK;
}

static void write_line(int fd, const char *line, int length)
{
    if (write(fd, line, (size_t)length) != length)
        MU_LOGE("ledger: %s", strerror(errno));
}

void mu_ledger_leaf(int fd, uint64_t generation, uint64_t step, uint32_t leaf, uint64_t first_sequence, uint64_t count)
{
    char line[160];
    int length = snprintf(line, sizeof line, "leaf generation=%llu step=%llu leaf=%u first=%llu count=%llu\n",
                          (unsigned long long)generation, (unsigned long long)step, leaf,
                          (unsigned long long)first_sequence, (unsigned long long)count);
    write_line(fd, line, length);
}

void mu_ledger_applied(int fd, uint64_t generation, uint64_t step)
{
    char line[128];
    int length =
        snprintf(line, sizeof line, "applied generation=%llu step=%llu mono_us=%llu\n", (unsigned long long)generation,
                 (unsigned long long)step, (unsigned long long)mu_clock_mono_us());
    write_line(fd, line, length);
}
