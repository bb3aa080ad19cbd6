/* The files of /proc and /sys that vital signs are read from. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include "common/clock.h"
#include "worker/vitals.h"

enum { FILE_SIZE = 64 * 1024, NAME_SIZE = 512, RDMA_WORD_BYTES = 4 };

/* The file's text in `text`; "" when there is none. */
static const char *slurp(const char *root, const char *path, char text[FILE_SIZE])
{
    char name[NAME_SIZE];
    size_t size = 0;
    snprintf(name, sizeof name, "%s%s", root, path);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    for (ssize_t got = 1; fd >= 0 && got > 0 && size < FILE_SIZE - 1;) {
        got = read(fd, text + size, FILE_SIZE - 1 - size);
        size += got > 0 ? (size_t)got : 0;
    }
    if (fd >= 0)
        close(fd);
    text[size] = 0;
    return text;
}

/* The number after `word`; 0: it is not there. */
static uint64_t number_after(const char *text, const char *word)
{
    const char *found = strstr(text, word);
    return found ? strtoull(found + strlen(word), NULL, 10) : 0;
}

static void read_own(const char *root, char text[FILE_SIZE], uint64_t *values)
{
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) == 0)
        values[MU_VITAL_CPU_US] = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
                                  (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    const char *pages = strchr(slurp(root, "/proc/self/statm", text), ' ');
    if (pages)
        values[MU_VITAL_MEMORY_BYTES] = strtoull(pages, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
    slurp(root, "/proc/self/io", text);
    values[MU_VITAL_READ_BYTES] = number_after(text, "\nread_bytes: ");
    values[MU_VITAL_WRITTEN_BYTES] = number_after(text, "\nwrite_bytes: ");
}

/* Of "cpu  user nice system idle iowait irq softirq steal ...": all but idle and iowait, mean over the processors. */
static void read_processors(const char *root, char text[FILE_SIZE], uint64_t *values)
{
    uint64_t busy = 0, count = 0;
    const char *at = slurp(root, "/proc/stat", text);
    if (strncmp(at, "cpu ", 4) != 0)
        return;
    char *end = (char *)(uintptr_t)at + 4;
    for (int column = 0; column < 8; column++) {
        uint64_t ticks = strtoull(end, &end, 10);
        busy += column == 3 || column == 4 ? 0 : ticks;
    }
    for (at = strstr(at, "\ncpu"); at; at = strstr(at + 1, "\ncpu"))
        count++;
    if (count > 0)
        values[MU_VITAL_HOST_CPU_US] = busy * 1000000 / (uint64_t)sysconf(_SC_CLK_TCK) / count;
}

static void read_memory(const char *root, char text[FILE_SIZE], uint64_t *values)
{
    slurp(root, "/proc/meminfo", text);
    uint64_t total = number_after(text, "MemTotal:"), available = number_after(text, "MemAvailable:");
    if (total > 0 && available <= total)
        values[MU_VITAL_HOST_MEMORY_PPM] = (total - available) * 1000000 / total;
}

/* Interfaces that a device stands behind; where there are none (in a container), all but the loopback. What bridges and
 * bonds pass on is counted once that way. */
static void read_network(const char *root, char text[FILE_SIZE], uint64_t *values)
{
    uint64_t real[3] = {0}, all[3] = {0};
    bool any_real = false;
    char *save = NULL;
    slurp(root, "/proc/net/dev", text);
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *colon = strchr(line, ':'), *name = line + strspn(line, " "), path[NAME_SIZE];
        uint64_t columns[16], own[3];
        if (!colon || strncmp(name, "lo:", 3) == 0)
            continue;
        char *at = colon + 1;
        for (int i = 0; i < 16; i++)
            columns[i] = strtoull(at, &at, 10);
        own[0] = columns[0];
        own[1] = columns[8];
        own[2] = columns[2] + columns[3] + columns[10] + columns[11];
        snprintf(path, sizeof path, "%s/sys/class/net/%.*s/device", root, (int)(colon - name), name);
        bool is_real = access(path, F_OK) == 0;
        any_real = any_real || is_real;
        for (int i = 0; i < 3; i++) {
            all[i] += own[i];
            real[i] += is_real ? own[i] : 0;
        }
    }
    const uint64_t *sum = any_real ? real : all;
    values[MU_VITAL_RECEIVED_BYTES] = sum[0];
    values[MU_VITAL_SENT_BYTES] = sum[1];
    values[MU_VITAL_NETWORK_ERRORS] = sum[2];
}

static void read_pressure(const char *root, char text[FILE_SIZE], uint64_t *values)
{
    static const struct {
        const char *path;
        enum mu_vital vital;
    } files[] = {{"/proc/pressure/cpu", MU_VITAL_STALL_CPU_US},
                 {"/proc/pressure/memory", MU_VITAL_STALL_MEMORY_US},
                 {"/proc/pressure/io", MU_VITAL_STALL_IO_US}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        values[files[i].vital] = number_after(slurp(root, files[i].path, text), " total="); /* the first: "some" */
}

static void read_port(const char *root, const char *device, const char *port, char text[FILE_SIZE], uint64_t *values)
{
    static const struct {
        const char *name;
        enum mu_vital vital;
        uint64_t factor;
    } counters[] = {
        {"port_rcv_data", MU_VITAL_RDMA_RECEIVED_BYTES, RDMA_WORD_BYTES},
        {"port_xmit_data", MU_VITAL_RDMA_SENT_BYTES, RDMA_WORD_BYTES},
        {"port_rcv_errors", MU_VITAL_RDMA_ERRORS, 1},
        {"port_xmit_discards", MU_VITAL_RDMA_ERRORS, 1},
        {"symbol_error", MU_VITAL_RDMA_ERRORS, 1},
        {"link_error_recovery", MU_VITAL_RDMA_ERRORS, 1},
        {"link_downed", MU_VITAL_RDMA_ERRORS, 1},
        {"local_link_integrity_errors", MU_VITAL_RDMA_ERRORS, 1},
    };
    for (size_t i = 0; i < sizeof counters / sizeof counters[0]; i++) {
        char path[NAME_SIZE];
        snprintf(path, sizeof path, "/sys/class/infiniband/%.100s/ports/%.100s/counters/%s", device, port,
                 counters[i].name);
        values[counters[i].vital] += strtoull(slurp(root, path, text), NULL, 10) * counters[i].factor;
    }
}

static void read_rdma(const char *root, char text[FILE_SIZE], uint64_t *values)
{
    char path[NAME_SIZE];
    snprintf(path, sizeof path, "%s/sys/class/infiniband", root);
    DIR *devices = opendir(path);
    for (struct dirent *device; devices && (device = readdir(devices));) {
        if (device->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/sys/class/infiniband/%.100s/ports", root, device->d_name);
        DIR *ports = opendir(path);
        for (struct dirent *port; ports && (port = readdir(ports));) {
            if (port->d_name[0] != '.')
                read_port(root, device->d_name, port->d_name, text, values);
        }
        if (ports)
            closedir(ports);
    }
    if (devices)
        closedir(devices);
}

static void read_clock(uint64_t *values)
{
    struct timex now = {.modes = 0};
    int state = ntp_adjtime(&now);
    values[MU_VITAL_CLOCK_SYNCHRONISED] = state >= 0 && state != TIME_ERROR;
    values[MU_VITAL_CLOCK_ERROR_US] = now.esterror > 0 ? (uint64_t)now.esterror : 0;
}

/* Of the nearest directory above that is there. */
static void read_disk(const char *disk, uint64_t *values)
{
    char path[MU_PATH_SIZE];
    struct statvfs fs;
    snprintf(path, sizeof path, "%s", disk);
    while (path[0] && statvfs(path, &fs) != 0) {
        char *slash = strrchr(path, '/');
        if (!slash) {
            strcpy(path, path[0] == '.' && !path[1] ? "" : ".");
            continue;
        }
        slash[slash == path && path[1]] = 0;
    }
    if (path[0])
        values[MU_VITAL_DISK_FREE_BYTES] = (uint64_t)fs.f_bavail * fs.f_frsize;
}

void mu_vitals_read(const char *root, const char *disk, struct mu_vitals *ret_vitals)
{
    char *text = malloc(FILE_SIZE);
    memset(ret_vitals, 0, sizeof *ret_vitals);
    ret_vitals->mono_us = mu_clock_mono_us();
    if (!text)
        return;
    uint64_t *values = ret_vitals->values;
    read_own(root, text, values);
    read_processors(root, text, values);
    read_memory(root, text, values);
    read_network(root, text, values);
    read_pressure(root, text, values);
    read_rdma(root, text, values);
    read_clock(values);
    read_disk(disk, values);
    free(text);
}
