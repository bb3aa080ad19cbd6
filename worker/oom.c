#include "worker/oom.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static bool read_count(const char *path, uint64_t *ret_count)
{
    char line[256];
    bool found = false;
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof line, file))
        found = sscanf(line, "oom_kill %" SCNu64, ret_count) == 1;
    fclose(file);
    return found;
}

/* The line of /proc/self/cgroup of the controller ("" of the second version); its path without the newline. */
static bool find_cgroup(const char *root, const char *controller, char ret_path[MU_OOM_PATH_SIZE])
{
    char line[MU_OOM_PATH_SIZE];
    bool found = false;
    snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
    FILE *file = fopen(line, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof line, file)) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path = 0;
        path[1 + strcspn(path + 1, "\n")] = 0;
        found = strcmp(controllers + 1, controller) == 0;
        if (found)
            snprintf(ret_path, MU_OOM_PATH_SIZE, "%s", path + 1);
    }
    fclose(file);
    return found;
}

/* A file with one number. UINT64_MAX: another word ("max"), or no such file. */
static uint64_t read_limit(const char *path)
{
    uint64_t limit = UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (!file)
        return limit;
    if (fscanf(file, "%" SCNu64, &limit) != 1)
        limit = UINT64_MAX;
    fclose(file);
    return limit;
}

/* Pages of files that the kernel takes away first when somebody needs memory. */
static uint64_t read_idle_pages(const char *path)
{
    char line[256];
    uint64_t here = 0, below = 0;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        (void)sscanf(line, "inactive_file %" SCNu64, &here);
        (void)sscanf(line, "total_inactive_file %" SCNu64, &below); /* first version: of those in it, too */
    }
    if (file)
        fclose(file);
    return below > here ? below : here;
}

/* The files of one version of cgroups. */
struct version {
    const char *controller, *folder, *limit, *used;
};
static const struct version versions[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current"},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"},
};

static uint64_t used_of(const struct version *version, const char *folder)
{
    char path[3 * MU_OOM_PATH_SIZE];
    snprintf(path, sizeof path, "%s/%s", folder, version->used);
    uint64_t used = read_limit(path);
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    uint64_t idle = read_idle_pages(path);
    return used == UINT64_MAX || used < idle ? 0 : used - idle;
}

/* The least of a cgroup and those that it lies in, up to the root: limits, or what is left of them. */
static uint64_t least_of(const char *root, const struct version *version, const char *cgroup, bool left)
{
    uint64_t least = UINT64_MAX;
    for (size_t length = strcmp(cgroup, "/") == 0 ? 0 : strlen(cgroup);;) {
        char folder[2 * MU_OOM_PATH_SIZE], path[3 * MU_OOM_PATH_SIZE];
        snprintf(folder, sizeof folder, "%s%s%.*s", root, version->folder, (int)length, cgroup);
        snprintf(path, sizeof path, "%s/%s", folder, version->limit);
        uint64_t limit = read_limit(path), used = left && limit < UINT64_MAX ? used_of(version, folder) : 0;
        limit = limit == UINT64_MAX ? limit : limit > used ? limit - used : 0;
        least = limit < least ? limit : least;
        if (length == 0)
            return least;
        do
            length--;
        while (length > 0 && cgroup[length] != '/');
    }
}

static uint64_t least_of_all(const char *root, bool left)
{
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        char cgroup[MU_OOM_PATH_SIZE];
        uint64_t here =
            find_cgroup(root, versions[i].controller, cgroup) ? least_of(root, &versions[i], cgroup, left) : UINT64_MAX;
        least = here < least ? here : least;
    }
    return least;
}

uint64_t mu_oom_limit_bytes(const char *root)
{
    return least_of_all(root, false);
}

uint64_t mu_oom_left_bytes(const char *root)
{
    return least_of_all(root, true);
}

static bool try_path(struct mu_oom *oom, const char *root, const char *folder, const char *cgroup, const char *name)
{
    int length =
        snprintf(oom->path, sizeof oom->path, "%s%s%s/%s", root, folder, strcmp(cgroup, "/") == 0 ? "" : cgroup, name);
    return length < (int)sizeof oom->path && read_count(oom->path, &oom->seen);
}

void mu_oom_init(struct mu_oom *oom, const char *root)
{
    char cgroup[MU_OOM_PATH_SIZE];
    *oom = (struct mu_oom){0};
    if (find_cgroup(root, "", cgroup) && try_path(oom, root, "/sys/fs/cgroup", cgroup, "memory.events"))
        return;
    if (find_cgroup(root, "memory", cgroup) &&
        try_path(oom, root, "/sys/fs/cgroup/memory", cgroup, "memory.oom_control"))
        return;
    oom->whole_machine = true;
    if (!try_path(oom, root, "/proc", "", "vmstat"))
        oom->path[0] = 0;
}

bool mu_oom_explains(struct mu_oom *oom)
{
    uint64_t count;
    if (!oom->path[0] || !read_count(oom->path, &count) || count <= oom->seen)
        return false;
    oom->seen++;
    return true;
}
