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
