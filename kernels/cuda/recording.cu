/* Recordings of kernels/device.h: captured graphs in a table by key.
 *
 * Captured in relaxed mode: the calls that are not in the graph (looks at events, copies on other streams) stay
 * allowed. A GPU that cannot make a graph, for memory for instance, makes none from then on; nothing else comes of it.
 */
#include "kernels/cuda/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"

enum {
    RECORDINGS_MAX = 8192, /* of a net of 128 layers in every place of a leaf; what is more is given as ever */
    TABLE_SIZE = 2 * RECORDINGS_MAX,
    RECORD_AT = 2, /* the first time makes what is made once: algorithms, connections, attributes of kernels */
};

struct recording {
    struct mu_device_key key;
    uint32_t seen;
    cudaGraphExec_t graph; /* NULL: not recorded yet */
};

struct mu_cuda_recordings {
    bool off, capturing;
    uint32_t count;
    uint64_t replays;
    struct recording *open;  /* being given; NULL: none, or there is no room for it */
    struct recording *table; /* [TABLE_SIZE]; free: seen is 0 */
};

static struct mu_cuda_recordings *recordings_of(struct mu_cuda *cuda)
{
    if (!cuda->recordings)
        cuda->recordings = (struct mu_cuda_recordings *)calloc(1, sizeof *cuda->recordings);
    if (cuda->recordings && !cuda->recordings->table)
        cuda->recordings->table = (struct recording *)calloc(TABLE_SIZE, sizeof *cuda->recordings->table);
    return cuda->recordings && cuda->recordings->table ? cuda->recordings : NULL;
}

/* Fowler-Noll-Vo, by words. */
static uint64_t hash_of(const struct mu_device_key *key)
{
    uint64_t hash = 14695981039346656037ull;
    for (const void *array : key->arrays)
        hash = (hash ^ (uint64_t)(uintptr_t)array) * 1099511628211ull;
    for (uint64_t number : key->numbers)
        hash = (hash ^ number) * 1099511628211ull;
    return hash ^ hash >> 32;
}

/* NULL: there is no room. */
static struct recording *find(struct mu_cuda_recordings *all, const struct mu_device_key *key)
{
    struct recording *at = &all->table[hash_of(key) % TABLE_SIZE];
    while (at->seen > 0 && memcmp(&at->key, key, sizeof *key) != 0)
        at = at + 1 < all->table + TABLE_SIZE ? at + 1 : all->table;
    if (at->seen == 0 && all->count == RECORDINGS_MAX)
        return NULL;
    all->count += at->seen == 0;
    at->key = *key;
    return at;
}

static void launch(struct mu_cuda *cuda, const struct recording *one, enum mu_status *status)
{
    cudaError_t error = cudaGraphLaunch(one->graph, cuda->stream);
    cuda->recordings->replays++;
    if (error == cudaSuccess)
        return;
    (void)cudaGetLastError();
    *status = mu_fail(cuda->error.status == MU_OK ? &cuda->error : NULL, MU_ERR_IO, "GPU %d, recorded kernels: %s",
                      cuda->device, cudaGetErrorString(error));
}

bool mu_cuda_replay(struct mu_device *device, const struct mu_device_key *key)
{
    struct mu_cuda *cuda = (struct mu_cuda *)device;
    struct mu_cuda_recordings *all = recordings_of(cuda);
    enum mu_status status = MU_OK;
    if (!all || all->off)
        return false;
    struct recording *one = all->open = find(all, key);
    if (!one)
        return false;
    if (one->graph) {
        launch(cuda, one, &status); /* a failure stays with the device */
        return true;
    }
    if (++one->seen < RECORD_AT)
        return false;
    all->capturing = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeRelaxed) == cudaSuccess;
    if (!all->capturing) {
        (void)cudaGetLastError();
        all->off = true;
    }
    return false;
}

bool mu_cuda_record_end(struct mu_device *device, enum mu_status *status)
{
    struct mu_cuda *cuda = (struct mu_cuda *)device;
    struct mu_cuda_recordings *all = cuda->recordings;
    cudaGraph_t graph = NULL;
    if (!all || !all->capturing)
        return false;
    MU_ASSERT(all->open);
    all->capturing = false;
    cudaError_t error = cudaStreamEndCapture(cuda->stream, &graph);
    if (error == cudaSuccess && *status == MU_OK)
        error = cudaGraphInstantiate(&all->open->graph, graph, 0);
    if (graph)
        (void)cudaGraphDestroy(graph);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        all->open->graph = NULL;
        all->off = true;
        return *status == MU_OK;
    }
    if (*status == MU_OK)
        launch(cuda, all->open, status);
    return false;
}

void mu_cuda_forget(struct mu_device *device)
{
    struct mu_cuda_recordings *all = ((struct mu_cuda *)device)->recordings;
    if (!all || all->count == 0)
        return;
    MU_ASSERT(!all->capturing);
    all->open = NULL;
    for (uint32_t i = 0; i < TABLE_SIZE; i++)
        if (all->table[i].graph)
            (void)cudaGraphExecDestroy(all->table[i].graph); /* one that runs does so to its end */
    memset(all->table, 0, TABLE_SIZE * sizeof *all->table);
    all->count = 0;
}

void mu_cuda_recordings_fini(struct mu_cuda *cuda)
{
    mu_cuda_forget(&cuda->base);
    if (cuda->recordings)
        free(cuda->recordings->table);
    free(cuda->recordings);
    cuda->recordings = NULL;
}

bool mu_cuda_records(const struct mu_device *device)
{
    const struct mu_cuda_recordings *all = ((const struct mu_cuda *)device)->recordings;
    return !all || !all->off;
}

void mu_cuda_set_recording(struct mu_device *device, bool on)
{
    struct mu_cuda_recordings *all = recordings_of((struct mu_cuda *)device);
    if (all)
        all->off = !on;
}

uint64_t mu_cuda_replays(const struct mu_cuda *cuda)
{
    return cuda->recordings ? cuda->recordings->replays : 0;
}
