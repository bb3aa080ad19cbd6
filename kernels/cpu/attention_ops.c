/* Causal attention of one (sequence, query head), backward of one (sequence, key and value head), in tiles of 64 x 64.
 * Compiled once per instruction set.
 *
 * Operands are first copied into the lane's scratch: rows padded with zeros to whole tiles, channels to whole vectors,
 * so that the inner loops have no edges (the rows of qkv lie far apart, which also maps them to few cache sets).
 * Every product of a tile is an fma chain from +0 over 64 keys or queries, or over the channels of a head; tiles are
 * added in ascending order. Forward: running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention,
 * arXiv 2205.14135). Backward: key tiles outside, query tiles inside, both ascending; P = exp(S - lse) is recomputed.
 */
#include "kernels/cpu/isa.h"

#include "kernels/cpu/transpose.h"

enum { TILE = MU_ATTENTION_TILE, GROUPS_OF_TILE = TILE / VL };
#if MU_ISA_LEVEL == 1
enum { WIDTH_MAX = 1 }; /* vectors side by side in one register block: 16 registers hold 4 x 1 pairs */
#else
enum { WIDTH_MAX = 4 };
#endif
enum { HEIGHT = 4 };

enum product_mode { SET, ADD, SCALE }; /* c = s; c = c + s; c = c * scale of the row + s, fused */

struct product {
    uint32_t width; /* vectors */
    uint32_t depth; /* k */
    const float *a; /* [row * a_row + k * a_k] */
    size_t a_row, a_k;
    const float *b; /* [k * ldb + column] */
    size_t ldb;
    float *c;
    size_t ldc;
    enum product_mode mode;
    const float *scale;
};

MU_INLINE void register_tile(const struct product *p, uint32_t row, uint32_t column, const int width)
{
    vf acc[HEIGHT][WIDTH_MAX];
    const float *a = p->a + row * p->a_row, *b = p->b + column;
    const size_t a_row = p->a_row, a_k = p->a_k, ldb = p->ldb;
    for (int i = 0; i < HEIGHT; i++)
        for (int j = 0; j < width; j++)
            acc[i][j] = v_zero();
    for (uint32_t k = 0; k < p->depth; k++, a += a_k, b += ldb) {
        vf bk[WIDTH_MAX];
        for (int j = 0; j < width; j++)
            bk[j] = v_load(b + j * VL);
        for (int i = 0; i < HEIGHT; i++) {
            vf ai = v_set1(a[(size_t)i * a_row]);
            for (int j = 0; j < width; j++)
                acc[i][j] = v_fma(ai, bk[j], acc[i][j]);
        }
    }
    for (int i = 0; i < HEIGHT; i++)
        for (int j = 0; j < width; j++) {
            float *c = p->c + (row + (uint32_t)i) * p->ldc + column + j * VL;
            vf x = acc[i][j];
            if (p->mode == ADD)
                x = v_add(v_load(c), x);
            else if (p->mode == SCALE)
                x = v_fma(v_load(c), v_set1(p->scale[row + (uint32_t)i]), x);
            v_store(c, x);
        }
}

/* 64 rows of c. */
static void tile_product(const struct product *p)
{
    for (uint32_t g = 0; g < p->width;) {
        uint32_t left = p->width - g, width = left < WIDTH_MAX ? left : WIDTH_MAX;
        for (uint32_t row = 0; row < TILE; row += HEIGHT) {
#if MU_ISA_LEVEL != 1
            if (width == 4)
                register_tile(p, row, g * VL, 4);
            else if (width == 3)
                register_tile(p, row, g * VL, 3);
            else if (width == 2)
                register_tile(p, row, g * VL, 2);
            else
#endif
                register_tile(p, row, g * VL, 1);
        }
        g += width;
    }
}

/* ---- copies ---- */

struct shape {
    uint32_t length, head;  /* tokens, channels of a head */
    uint32_t group;         /* query heads of a key and value head */
    uint32_t tiles, padded; /* tiles of tokens; channels of a head rounded up to whole vectors */
    size_t row, out_row;    /* floats between tokens of qkv, of out */
    size_t keys, values;    /* where the keys and values of a token start in its row of qkv */
    size_t tile_size;       /* floats of one tile [64, padded] */
};

static struct shape shape_of(const struct mu_attention *at)
{
    struct shape s = {.length = at->length, .head = at->head_channels, .group = at->heads / at->kv_heads};
    s.tiles = (s.length + TILE - 1) / TILE;
    s.padded = (s.head + VL - 1) / VL * VL;
    s.row = at->qkv_stride;
    s.out_row = at->out_stride;
    s.keys = (size_t)at->heads * s.head;
    s.values = s.keys + (size_t)at->kv_heads * s.head;
    s.tile_size = (size_t)TILE * s.padded;
    return s;
}

/* out[64][padded] = factor * rows 64 tile .. of x, zeros beyond. */
static void copy_tile(const struct shape *s, const float *x, size_t stride, uint32_t tile, float factor, float *out)
{
    for (uint32_t i = 0; i < TILE; i++, out += s->padded) {
        uint32_t row = tile * TILE + i;
        for (uint32_t c = 0; c < s->padded; c += VL) {
            uint32_t n = row >= s->length ? 0 : s->head - c < VL ? s->head - c : VL;
            v_store(out + c, n ? v_mul(v_load_n(x + row * stride + c, n), v_set1(factor)) : v_zero());
        }
    }
}

/* out[head][64] = the same rows transposed. */
static void transpose_tile(const struct shape *s, const float *x, size_t stride, uint32_t tile, float *out)
{
    for (uint32_t i = 0; i < TILE; i += 8) {
        uint32_t row = tile * TILE + i;
        uint32_t rows = row >= s->length ? 0 : s->length - row < 8 ? s->length - row : 8;
        for (uint32_t c = 0; c < s->head; c += 8)
            transpose_8x8(x + (rows ? row * stride : 0) + c, stride, rows, s->head - c < 8 ? s->head - c : 8,
                          out + (size_t)c * TILE + i, TILE);
    }
}

/* Scratch is handed out from the lane's start. */
static float *take(float **scratch, size_t size)
{
    float *start = *scratch;
    *scratch += (size + VL - 1) / VL * VL;
    return start;
}

/* Where column > row of a diagonal tile the value becomes `masked`. */
MU_INLINE vf mask_future(vf x, uint32_t row, uint32_t column, vf masked)
{
    vi columns = vi_add(vi_lanes(), vi_set1(column));
    return v_select(vi_less(vi_set1(row), columns), masked, x);
}

/* Sequences of further slices follow those of the first. */
static void drop_factors(const struct mu_attention *at, uint32_t sequence, uint32_t head, uint32_t query, uint32_t key,
                         float *keep)
{
    uint32_t number = at->first_head + sequence / at->sequences * at->heads + head;
    mu_isa_ops()->dropout_factors(at->drop, sequence % at->sequences, query, number << 20 | key, TILE, keep);
}

/* ---- forward ---- */

struct softmax_rows {
    float *highest, *sum, *correction; /* [64] */
};

/* Scores of a tile become exp(score - running maximum); the running values and the correction of what was summed
 * before. */
static void softmax_tile(float *score, bool diagonal, struct softmax_rows *rows)
{
    const vf minus_infinity = v_set1(-INFINITY);
    float highest[TILE], sum[TILE];
    for (uint32_t i = 0; i < TILE; i++) {
        vf x[GROUPS_OF_TILE];
        for (uint32_t g = 0; g < GROUPS_OF_TILE; g++) {
            x[g] = v_load(score + i * TILE + g * VL);
            if (diagonal) {
                x[g] = mask_future(x[g], i, g * VL, minus_infinity);
                v_store(score + i * TILE + g * VL, x[g]);
            }
        }
        highest[i] = v_fold_max(v_max(v_max(x[0], x[1]), v_max(x[2], x[3])));
    }
    for (uint32_t i = 0; i < TILE; i += VL) {
        vf before = v_load(rows->highest + i), now = v_max(before, v_load(highest + i));
        v_store(rows->correction + i, v_exp(v_sub(before, now)));
        v_store(rows->highest + i, now);
    }
    for (uint32_t i = 0; i < TILE; i++) {
        vf total = v_zero();
        const vf shift = v_set1(rows->highest[i]);
        for (uint32_t g = 0; g < GROUPS_OF_TILE; g++) {
            vf e = v_exp(v_sub(v_load(score + i * TILE + g * VL), shift));
            v_store(score + i * TILE + g * VL, e);
            total = v_add(total, e);
        }
        sum[i] = v_fold_sum(total);
    }
    for (uint32_t i = 0; i < TILE; i += VL)
        v_store(rows->sum + i, v_fma(v_load(rows->sum + i), v_load(rows->correction + i), v_load(sum + i)));
}

/* Output and log-sum-exp of one query tile. */
static void finish_queries(const struct shape *s, const struct softmax_rows *rows, const float *sums, uint32_t tile,
                           float *out, size_t out_row, float *lse)
{
    float log_sum[TILE];
    for (uint32_t i = 0; i < TILE; i += VL)
        v_store(log_sum + i, v_add(v_load(rows->highest + i), v_log(v_load(rows->sum + i))));
    for (uint32_t i = 0; i < TILE && tile * TILE + i < s->length; i++) {
        uint32_t row = tile * TILE + i;
        const vf inverse = v_set1(1.0f / rows->sum[i]);
        lse[row] = log_sum[i];
        for (uint32_t c = 0; c < s->head; c += VL) {
            uint32_t n = s->head - c < VL ? s->head - c : VL;
            v_store_n(out + row * out_row + c, v_mul(v_load(sums + i * s->padded + c), inverse), n);
        }
    }
}

void MU_ISA_FN(mu_attention_forward)(const struct mu_attention *at, uint32_t sequence, uint32_t head,
                                     const struct mu_lane *lane)
{
    const struct shape s = shape_of(at);
    const float *token = at->qkv + (size_t)sequence * s.length * s.row; /* the first of the sequence */
    const float *q = token + (size_t)head * s.head, *k = token + s.keys + (size_t)(head / s.group) * s.head,
                *v = k + (s.values - s.keys);
    const float factor = 1.0f / sqrtf((float)s.head);
    float *scratch = lane->scratch;
    float *keys = take(&scratch, s.tiles * s.tile_size), *values = take(&scratch, s.tiles * s.tile_size);
    float *queries = take(&scratch, s.tile_size), *sums = take(&scratch, s.tile_size),
          *score = take(&scratch, TILE * TILE);
    struct softmax_rows rows = {take(&scratch, TILE), take(&scratch, TILE), take(&scratch, TILE)};
    for (uint32_t i = 0; i < s.tiles && !mu_lane_pause(lane); i++) {
        copy_tile(&s, q, s.row, i, factor, queries);
        transpose_tile(&s, k, s.row, i, keys + i * s.tile_size);
        copy_tile(&s, v, s.row, i, 1.0f, values + i * s.tile_size);
        memset(sums, 0, s.tile_size * sizeof(float));
        for (uint32_t r = 0; r < TILE; r++) {
            rows.highest[r] = -INFINITY;
            rows.sum[r] = 0.0f;
        }
        for (uint32_t j = 0; j <= i; j++) {
            tile_product(&(struct product){GROUPS_OF_TILE, s.head, queries, s.padded, 1, keys + j * s.tile_size, TILE,
                                           score, TILE, SET, NULL});
            softmax_tile(score, i == j, &rows);
            for (uint32_t r = 0; at->drop && r < TILE; r++) {
                float keep[TILE];
                drop_factors(at, sequence, head, i * TILE + r, j * TILE, keep);
                mu_isa_ops()->multiply(TILE, keep, score + r * TILE);
            }
            tile_product(&(struct product){s.padded / VL, TILE, score, TILE, 1, values + j * s.tile_size, s.padded,
                                           sums, s.padded, SCALE, rows.correction});
        }
        finish_queries(&s, &rows, sums, i, at->out + (size_t)sequence * s.length * s.out_row + (size_t)head * s.head,
                       s.out_row, at->lse + ((size_t)sequence * at->heads + head) * s.length);
    }
}

/* ---- backward ---- */

/* score -> P (dropped), dp -> dS, for one pair of tiles. */
static void gradient_tile(const struct mu_attention *at, uint32_t sequence, uint32_t head, uint32_t query_tile,
                          uint32_t key_tile, const float *lse, const float *delta, float *score, float *dp)
{
    for (uint32_t i = 0; i < TILE; i++) {
        float keep[TILE];
        const vf shift = v_set1(lse[i]), d = v_set1(delta[i]);
        if (at->drop)
            drop_factors(at, sequence, head, query_tile * TILE + i, key_tile * TILE, keep);
        for (uint32_t g = 0; g < GROUPS_OF_TILE; g++) {
            float *s = score + i * TILE + g * VL, *t = dp + i * TILE + g * VL;
            vf p = v_exp(v_sub(v_load(s), shift)), dropped, grad = v_load(t);
            if (query_tile == key_tile)
                p = mask_future(p, i, g * VL, v_zero());
            dropped = p;
            if (at->drop) {
                vf factor = v_load(keep + g * VL);
                dropped = v_mul(p, factor);
                grad = v_mul(grad, factor);
            }
            v_store(s, dropped);
            v_store(t, v_mul(p, v_sub(grad, d)));
        }
    }
}

/* delta[row] = sum over channels of dout * out. */
static void output_dots(const struct shape *s, const float *out, const float *dout, size_t stride, float *delta)
{
    for (uint32_t row = 0; row < s->length; row++) {
        vf sum = v_zero();
        for (uint32_t c = 0; c < s->head; c += VL) {
            uint32_t n = s->head - c < VL ? s->head - c : VL;
            sum = v_fma(v_load_n(out + row * stride + c, n), v_load_n(dout + row * stride + c, n), sum);
        }
        delta[row] = v_fold_sum(sum);
    }
}

/* x rows 64 tile .. = factor * in[64][padded]. */
static void store_tile(const struct shape *s, const float *in, uint32_t tile, float factor, float *x, size_t stride)
{
    for (uint32_t i = 0; i < TILE && tile * TILE + i < s->length; i++)
        for (uint32_t c = 0; c < s->head; c += VL) {
            uint32_t n = s->head - c < VL ? s->head - c : VL;
            v_store_n(x + (tile * TILE + i) * stride + c, v_mul(v_load(in + i * s->padded + c), v_set1(factor)), n);
        }
}

struct backward {
    struct shape s;
    float *queries, *douts, *dqueries;                 /* [tiles][64][padded] */
    float *keys, *keys_t, *values_t, *dkeys, *dvalues; /* one tile */
    float *score, *dp, *lse, *delta;
};

static struct backward backward_scratch(const struct mu_attention *at, float *scratch)
{
    struct backward w = {.s = shape_of(at)};
    size_t all = w.s.tiles * w.s.tile_size, one = w.s.tile_size, rows = (size_t)w.s.tiles * TILE;
    w.queries = take(&scratch, all);
    w.douts = take(&scratch, all);
    w.dqueries = take(&scratch, all);
    w.keys = take(&scratch, one);
    w.keys_t = take(&scratch, one);
    w.values_t = take(&scratch, one);
    w.dkeys = take(&scratch, one);
    w.dvalues = take(&scratch, one);
    w.score = take(&scratch, TILE * TILE);
    w.dp = take(&scratch, TILE * TILE);
    w.lse = take(&scratch, rows);
    w.delta = take(&scratch, rows);
    memset(w.dqueries, 0, all * sizeof(float));
    memset(w.lse, 0, rows * sizeof(float));
    memset(w.delta, 0, rows * sizeof(float));
    return w;
}

/* All that key tile j meets: query tiles j and later. */
static void backward_keys(const struct mu_attention *at, struct backward *w, uint32_t sequence, uint32_t head,
                          uint32_t j)
{
    const struct shape *s = &w->s;
    const uint32_t width = s->padded / VL, wide = GROUPS_OF_TILE;
    for (uint32_t i = j; i < s->tiles; i++) {
        const float *queries = w->queries + i * s->tile_size, *douts = w->douts + i * s->tile_size;
        float *dqueries = w->dqueries + i * s->tile_size;
        tile_product(
            &(struct product){wide, s->head, queries, s->padded, 1, w->keys_t, TILE, w->score, TILE, SET, NULL});
        tile_product(&(struct product){wide, s->head, douts, s->padded, 1, w->values_t, TILE, w->dp, TILE, SET, NULL});
        gradient_tile(at, sequence, head, i, j, w->lse + i * TILE, w->delta + i * TILE, w->score, w->dp);
        tile_product(
            &(struct product){width, TILE, w->score, 1, TILE, douts, s->padded, w->dvalues, s->padded, ADD, NULL});
        tile_product(
            &(struct product){width, TILE, w->dp, 1, TILE, queries, s->padded, w->dkeys, s->padded, ADD, NULL});
        tile_product(
            &(struct product){width, TILE, w->dp, TILE, 1, w->keys, s->padded, dqueries, s->padded, ADD, NULL});
    }
}

/* What query head `head` adds to its key and value head: `first` when nothing has been added yet. */
static void backward_head(const struct mu_attention *at, uint32_t sequence, uint32_t head, bool first,
                          const struct mu_lane *lane)
{
    struct backward w = backward_scratch(at, lane->scratch);
    const struct shape *s = &w.s;
    const size_t token = (size_t)sequence * s->length, query = token * s->row + (size_t)head * s->head,
                 key = token * s->row + s->keys + (size_t)(head / s->group) * s->head,
                 value = key + (s->values - s->keys), result = token * s->out_row + (size_t)head * s->head;
    const float *q = at->qkv + query, *k = at->qkv + key, *v = at->qkv + value;
    const float *out = at->out + result, *dout = at->dout + result;
    float *dq = at->dqkv + query, *dk = at->dqkv + key, *dv = at->dqkv + value;
    const float factor = 1.0f / sqrtf((float)s->head);
    memcpy(w.lse, at->lse + ((size_t)sequence * at->heads + head) * s->length, s->length * sizeof(float));
    output_dots(s, out, dout, s->out_row, w.delta);
    for (uint32_t i = 0; i < s->tiles; i++) {
        copy_tile(s, q, s->row, i, factor, w.queries + i * s->tile_size);
        copy_tile(s, dout, s->out_row, i, 1.0f, w.douts + i * s->tile_size);
    }
    for (uint32_t j = 0; j < s->tiles && !mu_lane_pause(lane); j++) {
        copy_tile(s, k, s->row, j, 1.0f, w.keys);
        transpose_tile(s, k, s->row, j, w.keys_t);
        transpose_tile(s, v, s->row, j, w.values_t);
        if (first) {
            memset(w.dkeys, 0, s->tile_size * sizeof(float));
            memset(w.dvalues, 0, s->tile_size * sizeof(float));
        } else {
            copy_tile(s, dk, s->row, j, 1.0f, w.dkeys);
            copy_tile(s, dv, s->row, j, 1.0f, w.dvalues);
        }
        backward_keys(at, &w, sequence, head, j);
        store_tile(s, w.dkeys, j, 1.0f, dk, s->row);
        store_tile(s, w.dvalues, j, 1.0f, dv, s->row);
        store_tile(s, w.dqueries + j * s->tile_size, j, factor, dq,
                   s->row); /* tile j of dQ is complete: only key tiles <= j */
    }
}

void MU_ISA_FN(mu_attention_backward)(const struct mu_attention *at, uint32_t sequence, uint32_t kv_head,
                                      const struct mu_lane *lane)
{
    uint32_t group = at->heads / at->kv_heads;
    for (uint32_t i = 0; i < group; i++)
        backward_head(at, sequence, kv_head * group + i, i == 0, lane);
}
