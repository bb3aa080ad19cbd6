/* Runs a fuzz target over files, and over all files of directories: the seeds, where there is no libFuzzer. Something
 * of a seed named good-... must be taken: a target that refuses all it is given tests nothing. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

enum { INPUT_BYTES_MAX = 1 << 20, PATH_SIZE = 4096 };

static unsigned run_count;

static bool run_file(const char *path)
{
    FILE *file = fopen(path, "re");
    uint8_t *bytes = file ? malloc(INPUT_BYTES_MAX) : NULL;
    if (!bytes) {
        fprintf(stderr, "replay: cannot read '%s': %s\n", path, strerror(errno));
        return false;
    }
    size_t size_bytes = fread(bytes, 1, INPUT_BYTES_MAX, file);
    bool is_read = !ferror(file);
    fclose(file);
    uint8_t *exact = realloc(bytes, size_bytes ? size_bytes : 1);
    MU_ASSERT(exact);
    fprintf(stderr, "%s\n", path); /* the last line before a crash */
    unsigned accepted_before = fuzz_accepted;
    LLVMFuzzerTestOneInput(exact, size_bytes);
    free(exact);
    run_count++;
    if (fuzz_accepted == accepted_before && strstr(path, "/good-")) {
        fprintf(stderr, "replay: nothing of this seed is taken: make it anew (tests/fuzz/make_seeds.c)\n");
        return false;
    }
    return is_read;
}

static bool run_path(const char *path)
{
    struct stat facts;
    if (stat(path, &facts) != 0 || !S_ISDIR(facts.st_mode))
        return run_file(path);
    DIR *dir = opendir(path);
    bool ok = dir != NULL;
    for (struct dirent *entry; ok && (entry = readdir(dir));) {
        char name[PATH_SIZE];
        if (entry->d_name[0] == '.')
            continue;
        ok = (size_t)snprintf(name, sizeof name, "%s/%s", path, entry->d_name) < sizeof name && run_file(name);
    }
    if (dir)
        closedir(dir);
    return ok;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (!run_path(argv[i]))
            return 1;
    printf("%u inputs\n", run_count);
    return run_count > 0 ? 0 : 1;
}
