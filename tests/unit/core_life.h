/* The beginning and the end of a box: included by core_testing.h. */
#ifndef TESTS_CORE_LIFE_H
#define TESTS_CORE_LIFE_H

static void box_spec(struct mu_job_spec *spec, uint32_t tp, uint32_t pp)
{
    mu_job_spec_init(spec);
    strcpy(spec->name, "job");
    spec->model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 4, .channels = 64, .context = 16, .vocab = 256, .slices = 2};
    mu_model_config_resolve(&spec->model);
    strcpy(spec->data.path, "/data/text");
    spec->batch.sequences = 8, spec->batch.micro = 1, spec->batch.length = 16;
    spec->steps = 1000;
    spec->parallel.tp = tp;
    spec->parallel.pp = pp;
}

static void box_init(struct box *box, const struct mu_job_spec *spec)
{
    struct mu_error err;
    memset(box, 0, sizeof *box);
    box->last = &box->first;
    box->now_us = 1000000;
    mu_coord_config_init(&box->config);
    box->config.max_workers = box->config.max_members = 64;
    box->config.max_jobs = 4;
    box->config.settle_ms = 50;
    box->store = mu_store_memory_new();
    mu_wire_arena_init(&box->arena);
    mu_wire_arena_init(&box->out);
    snprintf(box->name, sizeof box->name, "%s", spec->name);
    box->leaves = mu_job_leaves(spec);
    box_start_coord(box);
    assert_int_equal(mu_job_spec_check(spec, &err), MU_OK);
    box_step(box, &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = spec}});
    if (box->reply != MU_OK)
        fail_msg("%s", box->reply_text);
    box_settle(box);
}

/* Two workers train a job that keeps so many checkpoints, and takes one when it is asked to. */
static inline void box_begin(struct box *box, uint32_t keep)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    strcpy(spec.checkpoint.path, "/ckpt");
    spec.checkpoint.keep = keep;
    box_init(box, &spec);
    box_add_worker(box, 0);
    box_add_worker(box, 1);
    box_settle(box);
    box_advance(box, 300);
    assert_true(box_train(box, 1000));
}

/* Orders one and trains until it is committed. */
static inline void box_save(struct box *box)
{
    struct mu_coord_event event = {.kind = MU_CE_CHECKPOINT};
    uint64_t before = box->published;
    event.request.cookie = 5;
    event.request.job = box->name;
    box_step(box, &event);
    if (box->reply != MU_OK)
        fail_msg("%s", box->reply_text);
    box_settle(box);
    for (int i = 0; i < 5 && box->published == before; i++)
        assert_true(box_train(box, 1000));
    assert_true(box->published > before);
    box_settle(box);
}

static void box_fini(struct box *box)
{
    while (box->first) {
        struct box_item *item = box->first;
        box->first = item->next;
        box_free_item(item);
    }
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++)
        mu_worker_free(box->workers[i].core);
    mu_coord_free(box->coord);
    mu_store_free(box->store);
    mu_wire_arena_fini(&box->arena);
    mu_wire_arena_fini(&box->out);
}

#endif
