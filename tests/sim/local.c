/* Checkpoints of kind local: each host has a disk of its own; what a keeper and a loading rank do with them
 * (worker/keeper.c, worker/holder.c). A disk outlives its processes; its files can be had while a worker of its host
 * that the coordinator has named is alive. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

enum { NO_HOST = UINT32_MAX };

bool mu_sim_is_local(const char *dir)
{
    return strstr(dir, "%h") != NULL;
}

void mu_sim_local_path(const char *dir, uint32_t host, char out[MU_PATH_SIZE])
{
    const char *at = strstr(dir, "%h");
    if (at)
        snprintf(out, MU_PATH_SIZE, "%.*sh%u%s", (int)(at - dir), dir, host, at + 2);
    else
        snprintf(out, MU_PATH_SIZE, "%s", dir);
}

static uint32_t host_number(const char *host)
{
    unsigned number = NO_HOST;
    return sscanf(host, "h%u", &number) == 1 ? number : NO_HOST;
}

/* Whose worker wrote the piece. */
static uint32_t host_of_file(const char *file)
{
    const char *at = strrchr(file, '-');
    return at ? host_number(at + 1) : NO_HOST;
}

static struct mu_sim_directory *directory_on(struct mu_sim *sim, const char *dir, uint32_t host)
{
    char path[MU_PATH_SIZE];
    mu_sim_local_path(dir, host, path);
    return mu_sim_files_find(&sim->files, path);
}

/* Gives out files now: NO_HOST when nobody there does. */
static uint32_t reached(const struct mu_sim *sim, const struct mu_holder *holder)
{
    uint32_t slot;
    uint64_t life;
    if (!mu_sim_worker_address(sim, holder->address, &slot, &life))
        return NO_HOST;
    const struct mu_sim_node *node = &sim->nodes[MU_SIM_NODE_WORKER + slot];
    return node->alive && node->life == life && !node->stopped ? host_number(holder->host) : NO_HOST;
}

/* ---- loading ---- */

/* The good pieces of a disk that its manifest names. False: it has none. */
static bool take_from(struct mu_sim *sim, const char *dir, uint32_t host, struct mu_sim_state *all, uint64_t *step)
{
    struct mu_sim_directory *directory = directory_on(sim, dir, host);
    if (!directory || !directory->manifest)
        return false;
    for (uint32_t i = 0; i < directory->piece_count; i++) {
        const struct mu_sim_piece *piece = &directory->pieces[i];
        if (!piece->listed || piece->corrupt)
            continue;
        mu_sim_state_take(all, &piece->state, piece->state.has);
        *step = piece->step;
    }
    return true;
}

static bool is_whole(const struct mu_sim *sim, const struct mu_sim_state *state)
{
    return state->has.params == sim->all_chunks && state->has.moments == sim->all_chunks;
}

bool mu_sim_local_load_any(struct mu_sim *sim, const char *dir, uint64_t *ret_step, struct mu_sim_values *ret_values)
{
    struct mu_sim_state all = {.has = {0, 0}};
    for (uint32_t host = 0; host < sim->params.slots; host++)
        take_from(sim, dir, host, &all, ret_step);
    *ret_values = all.values;
    return is_whole(sim, &all);
}

enum mu_status mu_sim_local_load(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign, uint64_t *ret_step,
                                 struct mu_sim_values *ret_values)
{
    struct mu_sim_state all = {.has = {0, 0}};
    bool missing = false;
    if (!assign->holders)
        return mu_sim_files_load(sim, assign->checkpoint_dir, ret_step, ret_values) ? MU_OK : MU_ERR_CORRUPT;
    take_from(sim, assign->checkpoint_dir, sim->workers[slot].host, &all, ret_step);
    for (uint32_t i = 0; i < assign->holder_count; i++) {
        uint32_t host = reached(sim, &assign->holders[i]);
        missing = missing || host == NO_HOST;
        if (host != NO_HOST)
            take_from(sim, assign->checkpoint_dir, host, &all, ret_step);
    }
    *ret_values = all.values;
    return is_whole(sim, &all) ? MU_OK : missing ? MU_ERR_UNAVAILABLE : MU_ERR_CORRUPT;
}

/* ---- the invariant of a commit ---- */

static uint32_t copies_of(struct mu_sim *sim, const struct mu_checkpoint_record *record, uint32_t piece)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < record->holder_count; i++) {
        struct mu_sim_directory *directory = directory_on(sim, record->dir, host_number(record->holders[i].host));
        const struct mu_sim_piece *found =
            directory && directory->manifest ? mu_sim_files_piece(directory, record->pieces[piece].file) : NULL;
        count += found && found->listed && found->step == record->step && !found->corrupt;
    }
    return count;
}

bool mu_sim_local_complete(struct mu_sim *sim, const struct mu_checkpoint_record *record, const char **ret_why)
{
    uint32_t wanted = record->holder_count > 1 ? 2 : 1;
    *ret_why = "no host is recorded to have it";
    if (record->holder_count == 0)
        return false;
    for (uint32_t i = 0; i < record->piece_count; i++) {
        *ret_why = "a piece has not been reported";
        if (!record->pieces[i].done)
            return false;
        *ret_why = "a piece is not on two hosts with a manifest";
        if (record->pieces[i].file[0] && copies_of(sim, record, i) < wanted && !sim->disk_lost)
            return false;
    }
    return true;
}

/* ---- orders to keep ---- */

struct keep {
    struct mu_keep_order order;
    struct mu_written_piece pieces[];
};

static enum mu_status copy_piece(struct mu_sim *sim, const struct mu_keep_order *order, uint32_t own,
                                 const struct mu_holder *from, const char *file)
{
    uint32_t host = reached(sim, from);
    struct mu_sim_directory *directory = host == NO_HOST ? NULL : directory_on(sim, order->dir, host);
    const struct mu_sim_piece *source = directory ? mu_sim_files_piece(directory, file) : NULL;
    if (host == NO_HOST)
        return MU_ERR_UNAVAILABLE;
    if (!source || source->corrupt)
        return source ? MU_ERR_CORRUPT : MU_ERR_NOT_FOUND;
    struct mu_sim_piece copy = *source;
    mu_sim_local_path(order->dir, own, copy.dir);
    return mu_sim_files_write(sim, &copy);
}

static enum mu_status publish(struct mu_sim *sim, const struct mu_keep_order *order, uint32_t own)
{
    uint32_t before = host_number(order->before.host);
    char path[MU_PATH_SIZE];
    mu_sim_local_path(order->dir, own, path);
    struct mu_sim_directory *directory = mu_sim_files_make(&sim->files, path);
    for (uint32_t i = 0; i < order->piece_count; i++) {
        const struct mu_written_piece *piece = &order->pieces[i];
        uint32_t host = host_of_file(piece->file);
        if (piece->file[0] == 0 || (host != own && host != before))
            continue;
        if (!mu_sim_files_piece(directory, piece->file)) {
            enum mu_status status =
                host == own ? MU_ERR_NOT_FOUND : copy_piece(sim, order, own, &order->before, piece->file);
            if (status != MU_OK && !MU_MUTANT(MU_MUT_COPY_NOTHING))
                return status;
            directory = mu_sim_files_make(&sim->files, path); /* the list may have moved */
        }
        struct mu_sim_piece *here = mu_sim_files_piece(directory, piece->file);
        struct mu_hash128 sum = here ? mu_sim_piece_checksum(here) : (struct mu_hash128){0, 0};
        if (here && (sum.low != piece->checksum.low || here->step != order->step))
            return MU_ERR_CORRUPT;
        if (here)
            here->listed = true;
    }
    directory->manifest = true;
    return MU_OK;
}

/* Re-reads what is here, and copies again what is not as it should be. What should be here, the manifest of either
 * side says; without one nothing is known. */
static enum mu_status check(struct mu_sim *sim, const struct mu_keep_order *order, uint32_t own)
{
    const struct mu_holder *sides[2] = {&order->before, &order->after};
    struct mu_sim_directory *here = directory_on(sim, order->dir, own);
    if (!here || !here->manifest)
        return MU_ERR_UNAVAILABLE; /* its disk was lost: loading goes round it */
    for (uint32_t i = 0; i < here->piece_count; i++) {
        struct mu_sim_piece *piece = &here->pieces[i];
        if (!piece->listed || !piece->corrupt)
            continue;
        char file[sizeof piece->file];
        memcpy(file, piece->file, sizeof file);
        enum mu_status status = copy_piece(sim, order, own, sides[host_of_file(file) == own], file);
        if (status != MU_OK)
            return status == MU_ERR_NOT_FOUND ? MU_ERR_CORRUPT : status;
        here = directory_on(sim, order->dir, own);
    }
    return MU_OK;
}

static void kept(struct mu_sim *sim, struct mu_sim_event *event)
{
    static const char *const names[] = {"", "publish", "check", "discard"};
    uint32_t slot = (uint32_t)event->a, own = sim->workers[slot].host;
    const struct keep *keep = event->payload;
    const struct mu_keep_order *order = &keep->order;
    struct mu_worker_event out = {.kind = MU_WE_KEPT,
                                  .kept = {.kind = order->kind, .checkpoint = order->checkpoint, .size_bytes = 4096}};
    char path[MU_PATH_SIZE];
    if (order->kind == MU_KEEP_PUBLISH) {
        out.kept.status = publish(sim, order, own);
    } else if (order->kind == MU_KEEP_CHECK) {
        out.kept.status = check(sim, order, own);
    } else {
        mu_sim_oracle_deleted(sim, order->dir);
        mu_sim_local_path(order->dir, own, path);
        out.kept.status = mu_sim_files_delete(sim, path);
    }
    mu_sim_trace(sim, "w%u   keep: %s of checkpoint %" PRIu64 " on h%u: %s", slot, names[order->kind],
                 order->checkpoint, own, mu_status_name(out.kept.status));
    snprintf(out.kept.text, sizeof out.kept.text, "%s", mu_status_name(out.kept.status));
    if (!mu_sim_point(sim, (int32_t)slot, order->kind == MU_KEEP_DISCARD ? MU_SIM_POINT_DELETE : MU_SIM_POINT_PUBLISH))
        mu_sim_worker_post(sim, slot, &out);
}

void mu_sim_local_keep(struct mu_sim *sim, uint32_t slot, const struct mu_keep_order *order)
{
    size_t bytes = order->piece_count * sizeof order->pieces[0];
    struct keep *keep = mu_sim_alloc(sizeof *keep + bytes);
    keep->order = *order;
    if (bytes)
        memcpy(keep->pieces, order->pieces, bytes);
    keep->order.pieces = keep->pieces;
    mu_sim_after(sim, mu_sim_delay(sim, sim->params.io_us), MU_SIM_NODE_WORKER + (int32_t)slot, kept, keep, slot, 0);
}

/* The name of a directory ends in its nonce. */
void mu_sim_local_inventory(struct mu_sim *sim, uint32_t host, struct mu_hello *hello)
{
    char root[32];
    snprintf(root, sizeof root, "/disk-h%u/", host);
    for (uint32_t i = 0; i < sim->files.count && hello->inventory_count < MU_INVENTORY_MAX; i++) {
        const struct mu_sim_directory *directory = &sim->files.directories[i];
        if (directory->manifest && strncmp(directory->path, root, strlen(root)) == 0)
            hello->inventory[hello->inventory_count++] =
                strtoull(directory->path + strlen(directory->path) - 16, NULL, 16);
    }
}

/* ---- a disk is gone ---- */

void mu_sim_local_lose_disk(struct mu_sim *sim, uint32_t host)
{
    char text[32];
    snprintf(text, sizeof text, "/disk-h%u/", host);
    mu_sim_trace(sim, "fault the disk of h%u is lost", host);
    for (uint32_t i = sim->files.count; i-- > 0;) {
        if (strncmp(sim->files.directories[i].path, text, strlen(text)) == 0) {
            free(sim->files.directories[i].pieces);
            sim->files.directories[i] = sim->files.directories[--sim->files.count];
        }
    }
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        if (sim->workers[slot].host == host)
            mu_sim_worker_kill(sim, slot, false);
    }
}
