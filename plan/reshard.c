/* Chunks with the same holders and the same receivers are planned together, as one **group** of atoms
 * (plan/share_index.h). A group is cut into portions, so that several sources share the work, and each portion is given
 * out along a tree: first once to every host that has nothing, then inside each host. The next to send is who can do so
 * earliest (a broadcast along a binomial tree), then who has sent least. */
#include "plan/reshard.h"

#include <stdlib.h>

#include "common/hash.h"
#include "common/mutant.h"
#include "plan/share_index.h"

enum {
    PORTIONS_MAX = 8,
    PORTION_CHUNKS_MIN = 4, /* 1 MiB: smaller pieces are not worth another connection */
    SOURCES_WANTED = 16,    /* of one rank, over all its groups */
};

struct atom_key {
    uint64_t hash; /* of the numbers of its sets */
    uint32_t atom;
};

struct node {
    uint32_t rank;
    uint32_t used, limit; /* of this portion: times sent, most times */
    uint32_t time;        /* when it can send next, counted in sends */
};

struct planner {
    const struct mu_layout *layout;
    const struct mu_reshard_holder *holders;
    uint32_t world;
    struct mu_share_index index;
    struct atom_key *keys; /* [atoms]: those of a group side by side */
    bool *set_lacks;       /* some owner needs what it does not have by this very set */
    uint32_t *place;       /* [world]: position in the order by (host, rank) */
    uint32_t *by_place;
    uint8_t *marks;     /* [world]: roles in the present group */
    uint32_t *touched;  /* places, then ranks, that have a role in it */
    uint32_t *degree;   /* [world]: groups it receives in */
    uint64_t *load;     /* [world]: chunks sent so far, moments counted twice */
    struct node *nodes; /* [2 world]: sources, then receivers, each by place */
    uint32_t *heap;     /* [2 world]: nodes that can send */
    uint32_t heap_count, source_count, receiver_count;

    struct mu_chunk_run *runs; /* [atoms]: of the group, merged */
    struct mu_chunk_run *part; /* [atoms]: of the portion */
    uint32_t run_count, part_count;
    uint64_t elements; /* of the group */
    uint32_t chunks, part_chunks;

    struct mu_move *moves;
    uint32_t move_count, move_room;
    uint64_t minimum_bytes;
    uint32_t missing_chunk; /* UINT32_MAX: nothing is missing */
    bool no_memory;
};

static uint32_t weight_of(uint32_t kinds)
{
    return (kinds & MU_MOVE_PARAMS ? 1u : 0u) + (kinds & MU_MOVE_MOMENTS ? 2u : 0u);
}

static int order_of(uint64_t a, uint64_t b)
{
    return a < b ? -1 : a > b;
}

/* The heap of senders */

static bool sends_before(const struct planner *p, uint32_t a, uint32_t b)
{
    const struct node *x = &p->nodes[a], *y = &p->nodes[b];
    if (x->time != y->time)
        return x->time < y->time;
    if (p->load[x->rank] != p->load[y->rank])
        return p->load[x->rank] < p->load[y->rank];
    return p->place[x->rank] < p->place[y->rank];
}

static void heap_down(struct planner *p, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1, node = p->heap[at];
        if (child >= p->heap_count)
            return;
        if (child + 1 < p->heap_count && sends_before(p, p->heap[child + 1], p->heap[child]))
            child++;
        if (!sends_before(p, p->heap[child], node))
            return;
        p->heap[at] = p->heap[child];
        p->heap[child] = node;
        at = child;
    }
}

static void heap_push(struct planner *p, uint32_t node)
{
    uint32_t at = p->heap_count++;
    while (at > 0 && sends_before(p, node, p->heap[(at - 1) / 2])) {
        p->heap[at] = p->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    p->heap[at] = node;
}

static void heap_pop(struct planner *p)
{
    p->heap[0] = p->heap[--p->heap_count];
    if (p->heap_count > 0)
        heap_down(p, 0);
}

/* Moves */

static void emit(struct planner *p, uint32_t from, uint32_t to, uint32_t kinds)
{
    if (MU_MUTANT(MU_MUT_MOVE_FROM_ANYONE))
        from = to > 0 ? to - 1 : p->world - 1;
    if (p->move_room - p->move_count < p->part_count) {
        uint64_t room = 2ull * p->move_room + p->part_count + 64;
        struct mu_move *more = room <= UINT32_MAX ? realloc(p->moves, room * sizeof *more) : NULL;
        if (!more) {
            p->no_memory = true;
            return;
        }
        p->moves = more;
        p->move_room = (uint32_t)room;
    }
    for (uint32_t i = 0; i < p->part_count; i++)
        p->moves[p->move_count++] = (struct mu_move){from, to, kinds, p->part[i]};
}

/* The best sender gives the portion to `receiver`, which can then send itself. */
static void serve(struct planner *p, uint32_t receiver, uint32_t kinds)
{
    MU_ASSERT(p->heap_count > 0);
    struct node *from = &p->nodes[p->heap[0]], *to = &p->nodes[receiver];
    emit(p, from->rank, to->rank, kinds);
    p->load[from->rank] += (uint64_t)p->part_chunks * weight_of(kinds);
    from->used++;
    to->time = ++from->time;
    if (from->used < from->limit)
        heap_down(p, 0);
    else
        heap_pop(p);
    heap_push(p, receiver);
}

static uint32_t host_of(const struct planner *p, uint32_t node)
{
    return p->holders[p->nodes[node].rank].host;
}

/* Nodes of one host. */
struct host {
    uint32_t source, source_count;     /* first node, nodes */
    uint32_t receiver, receiver_count; /* first node, nodes */
};

/* The next host with receivers; `host` is the one before (all zero: none). */
static bool next_host(const struct planner *p, struct host *host)
{
    uint32_t end = p->source_count + p->receiver_count;
    uint32_t source = host->source + host->source_count, receiver = host->receiver + host->receiver_count;
    if (receiver < p->source_count)
        receiver = p->source_count;
    if (receiver >= end)
        return false;
    uint32_t number = host_of(p, receiver);
    while (source < p->source_count && host_of(p, source) < number)
        source++;
    *host = (struct host){.source = source, .receiver = receiver};
    while (source + host->source_count < p->source_count && host_of(p, source + host->source_count) == number)
        host->source_count++;
    while (receiver + host->receiver_count < end && host_of(p, receiver + host->receiver_count) == number)
        host->receiver_count++;
    return true;
}

static uint32_t entry_of(const struct host *host, uint32_t portion)
{
    return host->receiver + portion % host->receiver_count;
}

/* Every host that has nothing gets the portion once. Whoever has receivers on its own host keeps one send for them. */
static void serve_hosts(struct planner *p, uint32_t kinds, uint32_t portion)
{
    struct host host = {0};
    uint32_t remote = 0;
    while (next_host(p, &host)) {
        for (uint32_t i = 0; i < host.source_count; i++)
            p->nodes[host.source + i].limit = MU_FAN_OUT - 1;
        if (host.source_count == 0) {
            p->nodes[entry_of(&host, portion)].limit = MU_FAN_OUT - (host.receiver_count > 1);
            remote++;
        }
    }
    if (remote == 0)
        return;
    p->heap_count = p->source_count;
    for (uint32_t i = 0; i < p->source_count; i++)
        p->heap[i] = i;
    for (uint32_t i = p->heap_count / 2; i-- > 0;)
        heap_down(p, i);
    host = (struct host){0};
    while (next_host(p, &host)) {
        if (host.source_count == 0)
            serve(p, entry_of(&host, portion), kinds);
    }
}

static void serve_inside_hosts(struct planner *p, uint32_t kinds, uint32_t portion)
{
    struct host host = {0};
    while (next_host(p, &host)) {
        p->heap_count = 0;
        for (uint32_t i = 0; i < host.source_count; i++) {
            p->nodes[host.source + i].limit = MU_FAN_OUT;
            heap_push(p, host.source + i);
        }
        uint32_t entry = entry_of(&host, portion);
        if (host.source_count == 0) {
            p->nodes[entry].limit = MU_FAN_OUT;
            heap_push(p, entry);
        }
        for (uint32_t i = 0; i < host.receiver_count; i++) {
            uint32_t receiver = host.receiver + (portion + i) % host.receiver_count;
            if (host.source_count > 0 || receiver != entry)
                serve(p, receiver, kinds);
        }
    }
}

static uint32_t gcd(uint32_t a, uint32_t b)
{
    while (b) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* So many that the sources can share the work evenly, where the group is large enough and its receivers do not have
 * many sources already. */
static uint32_t portions_of(const struct planner *p)
{
    uint32_t degree = 1, portions = p->source_count / gcd(p->source_count, p->receiver_count);
    for (uint32_t i = 0; i < p->receiver_count; i++) {
        uint32_t own = p->degree[p->nodes[p->source_count + i].rank];
        degree = own > degree ? own : degree;
    }
    uint32_t limits[] = {PORTIONS_MAX, p->chunks / PORTION_CHUNKS_MIN, SOURCES_WANTED / degree};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        portions = portions < limits[i] ? portions : limits[i];
    return portions ? portions : 1;
}

/* Chunks [begin, end), counted within the group. */
static void choose_part(struct planner *p, uint32_t begin, uint32_t end)
{
    uint32_t before = 0;
    p->part_count = 0;
    p->part_chunks = end - begin;
    for (uint32_t i = 0; i < p->run_count && before < end; before += p->runs[i++].count) {
        uint32_t low = begin > before ? begin - before : 0, high = end - before;
        high = high < p->runs[i].count ? high : p->runs[i].count;
        if (low < high)
            p->part[p->part_count++] = (struct mu_chunk_run){p->runs[i].first + low, high - low};
    }
}

/* Groups */

static void collect_nodes(struct planner *p, uint32_t touched_count, uint32_t kinds)
{
    uint32_t has = kinds & MU_MOVE_PARAMS ? MU_HAS_PARAMS : MU_HAS_MOMENTS;
    uint32_t holds = kinds & MU_MOVE_PARAMS ? MU_HAS_PARAMS | MU_HAS_COPY : MU_HAS_MOMENTS;
    uint32_t needs = kinds & MU_MOVE_PARAMS ? MU_NEEDS_PARAMS : MU_NEEDS_MOMENTS;
    p->source_count = p->receiver_count = 0;
    for (uint32_t i = 0; i < touched_count; i++) {
        if (p->marks[p->touched[i]] & has)
            p->nodes[p->source_count++] = (struct node){.rank = p->touched[i]};
    }
    for (uint32_t i = 0; i < touched_count; i++) {
        uint32_t marks = p->marks[p->touched[i]];
        if ((marks & needs) && !(marks & holds))
            p->nodes[p->source_count + p->receiver_count++] = (struct node){.rank = p->touched[i]};
    }
}

static void plan_kinds(struct planner *p, uint32_t touched_count, uint32_t kinds, bool counting)
{
    collect_nodes(p, touched_count, kinds);
    if (p->receiver_count == 0)
        return;
    if (counting) {
        for (uint32_t i = 0; i < p->receiver_count; i++)
            p->degree[p->nodes[p->source_count + i].rank]++;
        if (p->source_count == 0 && p->runs[0].first < p->missing_chunk)
            p->missing_chunk = p->runs[0].first;
        p->minimum_bytes += p->elements * sizeof(float) * weight_of(kinds) * p->receiver_count;
        return;
    }
    uint32_t portions = portions_of(p);
    for (uint32_t portion = 0; portion < portions; portion++) {
        choose_part(p, (uint32_t)((uint64_t)p->chunks * portion / portions),
                    (uint32_t)((uint64_t)p->chunks * (portion + 1) / portions));
        for (uint32_t i = 0; i < p->source_count + p->receiver_count; i++)
            p->nodes[i] = (struct node){.rank = p->nodes[i].rank, .limit = MU_FAN_OUT};
        serve_hosts(p, kinds, portion);
        serve_inside_hosts(p, kinds, portion);
    }
}

static int compare_u32(const void *a, const void *b)
{
    return order_of(*(const uint32_t *)a, *(const uint32_t *)b);
}

/* Everybody who has or needs something of the group, by place. Returns how many. */
static uint32_t touch(struct planner *p, const uint32_t *sets, uint32_t set_count)
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < set_count; s++) {
        for (uint32_t i = p->index.set_entries[sets[s]]; i < p->index.set_entries[sets[s] + 1]; i++) {
            const struct mu_share_entry *entry = &p->index.entries[i];
            if (p->marks[entry->owner] == 0)
                p->touched[count++] = p->place[entry->owner];
            p->marks[entry->owner] |= (uint8_t)entry->roles;
        }
    }
    qsort(p->touched, count, sizeof *p->touched, compare_u32);
    for (uint32_t i = 0; i < count; i++)
        p->touched[i] = p->by_place[p->touched[i]];
    return count;
}

/* Parameters and moments take the same way when the same ranks have them and the same ranks need them. */
static bool same_way(const struct planner *p, uint32_t touched_count)
{
    for (uint32_t i = 0; i < touched_count; i++) {
        uint32_t marks = p->marks[p->touched[i]];
        bool params = marks & MU_HAS_PARAMS, moments = marks & MU_HAS_MOMENTS;
        bool lacks_params = (marks & MU_NEEDS_PARAMS) && !(marks & (MU_HAS_PARAMS | MU_HAS_COPY));
        bool lacks_moments = (marks & MU_NEEDS_MOMENTS) && !moments;
        if (params != moments || lacks_params != lacks_moments)
            return false;
    }
    return true;
}

static void choose_runs(struct planner *p, const struct atom_key *atoms, uint32_t atom_count)
{
    p->run_count = p->chunks = 0;
    p->elements = 0;
    for (uint32_t i = 0; i < atom_count; i++) {
        uint32_t first = p->index.bounds[atoms[i].atom], count = p->index.bounds[atoms[i].atom + 1] - first;
        struct mu_chunk_run *last = p->run_count ? &p->runs[p->run_count - 1] : NULL;
        if (last && last->first + last->count == first)
            last->count += count;
        else
            p->runs[p->run_count++] = (struct mu_chunk_run){first, count};
        p->chunks += count;
        p->elements += mu_share_index_elements(&p->index, first, count);
    }
}

static uint32_t sets_of(const struct planner *p, uint32_t atom, const uint32_t **ret_sets)
{
    *ret_sets = p->index.atom_sets + p->index.atom_first[atom];
    return p->index.atom_first[atom + 1] - p->index.atom_first[atom];
}

static void plan_group(struct planner *p, const struct atom_key *atoms, uint32_t atom_count, bool counting)
{
    const uint32_t *sets;
    uint32_t set_count = sets_of(p, atoms[0].atom, &sets);
    bool lacks = false;
    for (uint32_t i = 0; i < set_count; i++)
        lacks = lacks || p->set_lacks[sets[i]];
    if (!lacks)
        return;
    choose_runs(p, atoms, atom_count);
    uint32_t touched_count = touch(p, sets, set_count);
    if (same_way(p, touched_count)) {
        plan_kinds(p, touched_count, MU_MOVE_PARAMS | MU_MOVE_MOMENTS, counting);
    } else {
        plan_kinds(p, touched_count, MU_MOVE_PARAMS, counting);
        plan_kinds(p, touched_count, MU_MOVE_MOMENTS, counting);
    }
    for (uint32_t i = 0; i < touched_count; i++)
        p->marks[p->touched[i]] = 0;
}

static bool same_sets(const struct planner *p, uint32_t a, uint32_t b)
{
    const uint32_t *x, *y;
    uint32_t count = sets_of(p, a, &x);
    if (count != sets_of(p, b, &y))
        return false;
    for (uint32_t i = 0; i < count; i++) {
        if (x[i] != y[i])
            return false;
    }
    return true;
}

static void plan_groups(struct planner *p, bool counting)
{
    for (uint32_t first = 0, end; first < p->index.atom_count && !p->no_memory; first = end) {
        for (end = first + 1; end < p->index.atom_count; end++) {
            if (!same_sets(p, p->keys[first].atom, p->keys[end].atom))
                break;
        }
        plan_group(p, p->keys + first, end - first, counting);
    }
}

/* Preparation */

static int compare_keys(const void *a, const void *b)
{
    const struct atom_key *x = a, *y = b;
    return x->hash != y->hash ? order_of(x->hash, y->hash) : order_of(x->atom, y->atom);
}

static void find_groups(struct planner *p)
{
    for (uint32_t atom = 0; atom < p->index.atom_count; atom++) {
        const uint32_t *sets;
        uint32_t count = sets_of(p, atom, &sets);
        p->keys[atom] = (struct atom_key){mu_xxh3_64(sets, count * sizeof *sets, 0), atom};
    }
    qsort(p->keys, p->index.atom_count, sizeof *p->keys, compare_keys);
    for (uint32_t set = 0; set < p->index.set_count; set++) {
        for (uint32_t i = p->index.set_entries[set]; i < p->index.set_entries[set + 1]; i++) {
            uint32_t roles = p->index.entries[i].roles;
            if (((roles & MU_NEEDS_PARAMS) && !(roles & (MU_HAS_PARAMS | MU_HAS_COPY))) ||
                ((roles & MU_NEEDS_MOMENTS) && !(roles & MU_HAS_MOMENTS)))
                p->set_lacks[set] = true;
        }
    }
}

static int compare_u64(const void *a, const void *b)
{
    return order_of(*(const uint64_t *)a, *(const uint64_t *)b);
}

static bool find_places(struct planner *p)
{
    uint64_t *order = calloc(p->world, sizeof *order);
    if (!order)
        return false;
    for (uint32_t rank = 0; rank < p->world; rank++)
        order[rank] = (uint64_t)p->holders[rank].host << 32 | rank;
    qsort(order, p->world, sizeof *order, compare_u64);
    for (uint32_t place = 0; place < p->world; place++) {
        p->by_place[place] = (uint32_t)order[place];
        p->place[p->by_place[place]] = place;
    }
    free(order);
    return true;
}

static bool prepare(struct planner *p)
{
    size_t world = p->world;
    for (uint32_t rank = 0; rank < p->world; rank++) {
        const struct mu_reshard_holder *holder = &p->holders[rank];
        mu_share_index_add_need(&p->index, p->layout, rank, rank);
        for (uint32_t k = 0; k < holder->share_count; k++)
            mu_share_index_add_held(&p->index, &holder->shares[k], rank, holder->stale_copies);
    }
    if (mu_share_index_build(&p->index))
        return false;
    p->keys = calloc(p->index.atom_count, sizeof *p->keys);
    p->set_lacks = calloc(p->index.set_count, sizeof *p->set_lacks);
    p->place = calloc(world, sizeof *p->place);
    p->by_place = calloc(world, sizeof *p->by_place);
    p->marks = calloc(world, sizeof *p->marks);
    p->touched = calloc(world, sizeof *p->touched);
    p->degree = calloc(world, sizeof *p->degree);
    p->load = calloc(world, sizeof *p->load);
    p->nodes = calloc(2 * world, sizeof *p->nodes);
    p->heap = calloc(2 * world, sizeof *p->heap);
    p->runs = calloc(p->index.atom_count, sizeof *p->runs);
    p->part = calloc(p->index.atom_count, sizeof *p->part);
    if (!p->keys || !p->set_lacks || !p->place || !p->by_place || !p->marks || !p->touched || !p->degree || !p->load ||
        !p->nodes || !p->heap || !p->runs || !p->part || !find_places(p))
        return false;
    find_groups(p);
    return true;
}

static void fini(struct planner *p)
{
    mu_share_index_fini(&p->index);
    free(p->keys);
    free(p->set_lacks);
    free(p->place);
    free(p->by_place);
    free(p->marks);
    free(p->touched);
    free(p->degree);
    free(p->load);
    free(p->nodes);
    free(p->heap);
    free(p->runs);
    free(p->part);
}

/* Merging */

static int compare_by_way(const void *a, const void *b)
{
    const struct mu_move *x = a, *y = b;
    if (x->to != y->to)
        return order_of(x->to, y->to);
    if (x->from != y->from)
        return order_of(x->from, y->from);
    return x->kinds != y->kinds ? order_of(x->kinds, y->kinds) : order_of(x->run.first, y->run.first);
}

static int compare_final(const void *a, const void *b)
{
    const struct mu_move *x = a, *y = b;
    if (x->to != y->to)
        return order_of(x->to, y->to);
    if (x->run.first != y->run.first)
        return order_of(x->run.first, y->run.first);
    if (x->from != y->from)
        return order_of(x->from, y->from);
    if (x->run.count != y->run.count)
        return order_of(x->run.count, y->run.count);
    return order_of(x->kinds, y->kinds);
}

/* Neighbouring chunks on the same way. */
static void merge_neighbours(struct planner *p)
{
    uint32_t kept = 0;
    qsort(p->moves, p->move_count, sizeof *p->moves, compare_by_way);
    for (uint32_t i = 0; i < p->move_count; i++) {
        struct mu_move *last = kept ? &p->moves[kept - 1] : NULL, *move = &p->moves[i];
        if (last && last->to == move->to && last->from == move->from && last->kinds == move->kinds &&
            last->run.first + last->run.count == move->run.first)
            last->run.count += move->run.count;
        else
            p->moves[kept++] = *move;
    }
    p->move_count = kept;
}

/* Parameters and moments of the same chunks. */
static void merge_kinds(struct planner *p)
{
    uint32_t kept = 0;
    qsort(p->moves, p->move_count, sizeof *p->moves, compare_final);
    for (uint32_t i = 0; i < p->move_count; i++) {
        struct mu_move *last = kept ? &p->moves[kept - 1] : NULL, *move = &p->moves[i];
        if (last && last->to == move->to && last->from == move->from && last->run.first == move->run.first &&
            last->run.count == move->run.count)
            last->kinds |= move->kinds;
        else
            p->moves[kept++] = *move;
    }
    p->move_count = kept;
}

static void merge_moves(struct planner *p)
{
    if (p->move_count == 0)
        return;
    merge_neighbours(p);
    merge_kinds(p);
    merge_neighbours(p); /* what now has both kinds next to what had them before */
    qsort(p->moves, p->move_count, sizeof *p->moves, compare_final);
}

static enum mu_status plan_all(struct planner *p, struct mu_reshard *ret_reshard)
{
    plan_groups(p, true);
    ret_reshard->minimum_bytes = p->minimum_bytes;
    if (p->missing_chunk != UINT32_MAX) {
        ret_reshard->missing_chunk = p->missing_chunk;
        return MU_ERR_NOT_FOUND;
    }
    plan_groups(p, false);
    if (p->no_memory)
        return MU_ERR_NO_MEMORY;
    merge_moves(p);
    for (uint32_t i = 0; i < p->move_count; i++)
        ret_reshard->bytes += mu_share_index_elements(&p->index, p->moves[i].run.first, p->moves[i].run.count) *
                              sizeof(float) * weight_of(p->moves[i].kinds);
    ret_reshard->moves = p->moves;
    ret_reshard->move_count = p->move_count;
    p->moves = NULL;
    return MU_OK;
}

enum mu_status mu_reshard_plan(const struct mu_model_spec *model, const struct mu_layout *layout,
                               const struct mu_reshard_holder *holders, struct mu_reshard *ret_reshard)
{
    struct planner p = {
        .layout = layout, .holders = holders, .world = mu_layout_world(layout), .missing_chunk = UINT32_MAX};
    size_t shares = 0;
    for (uint32_t rank = 0; rank < p.world; rank++)
        shares += holders[rank].share_count;
    *ret_reshard = (struct mu_reshard){0};
    enum mu_status status = mu_share_index_init(&p.index, model, shares, p.world);
    if (status)
        return status;
    status = prepare(&p) ? plan_all(&p, ret_reshard) : MU_ERR_NO_MEMORY;
    free(p.moves);
    fini(&p);
    return status;
}

void mu_reshard_fini(struct mu_reshard *reshard)
{
    free(reshard->moves);
    *reshard = (struct mu_reshard){0};
}

bool mu_reshard_complete(const struct mu_model_spec *model, const struct mu_reshard_holder *holders, uint32_t count)
{
    struct mu_coverage coverage;
    if (mu_coverage_init(&coverage, model, holders, count))
        return false;
    bool complete = mu_coverage_complete(&coverage);
    mu_coverage_fini(&coverage);
    return complete;
}
