/* LD_PRELOAD: the wall clock of a process stands so many seconds off as the first eight bytes of the file
 * $MU_CLOCK_SHIFT say (a signed number, least byte first), from the moment that they say so. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void open_shift(void)
{
    const char *path = getenv("MU_CLOCK_SHIFT");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    shift = page == MAP_FAILED ? NULL : page;
}

int clock_gettime(clockid_t id, struct timespec *out)
{
    long result = syscall(SYS_clock_gettime, id, out);
    if (result == 0 && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        out->tv_sec += *shift;
    return (int)result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *out = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
