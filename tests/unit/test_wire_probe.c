/* links: mu_wire */
/* Orders and answers of probes that must not come through. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <string.h>
#include <cmocka.h>

#include "proto/wire_pb.h"

static struct mu_wire_arena arena;

static Muster__V1__ProbeOrder *good_order(enum mu_probe_kind kind, uint32_t world, uint32_t peers)
{
    struct mu_probe_order order = {
        .number = MU_FEED_BIT | 5, .kind = kind, .limit_ms = 1000, .world = world, .peer_count = peers};
    Muster__V1__ProbeOrder *pb = NULL;
    struct mu_error err;
    for (uint32_t i = 0; i < peers; i++) {
        order.peers[i] = (struct mu_probe_peer){.rank = i + 1, .incarnation = {.low = i + 1}};
        strcpy(order.peers[i].address, "host=h;tcp=10.0.0.1:4000");
    }
    mu_wire_arena_reset(&arena);
    assert_int_equal(mu_wire_probe_to_pb(&arena, &order, &pb, &err), MU_OK);
    assert_int_equal(mu_wire_probe_from_pb(pb, &order, &err), MU_OK);
    return pb;
}

static void refuses(const Muster__V1__ProbeOrder *pb, const char *field)
{
    struct mu_probe_order order;
    struct mu_error err;
    assert_int_not_equal(mu_wire_probe_from_pb(pb, &order, &err), MU_OK);
    assert_memory_equal(err.text, field, strlen(field));
}

static void test_bad_orders_are_refused_by_field(void **state)
{
    (void)state;
    Muster__V1__ProbeOrder *pb = good_order(MU_PROBE_ALONE, 0, 0);
    pb->number = 5;
    refuses(pb, "ProbeOrder.number");
    pb = good_order(MU_PROBE_ALONE, 0, 0);
    pb->kind = (Muster__V1__ProbeKind)MU_PROBE_KIND_END;
    refuses(pb, "ProbeOrder.kind");
    pb = good_order(MU_PROBE_STORAGE, 0, 0);
    pb->bytes = MU_PROBE_STORAGE_BYTES_MAX + 1;
    refuses(pb, "ProbeOrder.bytes");
    pb = good_order(MU_PROBE_PAIR, 2, 1);
    pb->n_peers = 0;
    refuses(pb, "ProbeOrder.peers");
    pb = good_order(MU_PROBE_PAIR, 2, 1);
    pb->secret.len = 31;
    refuses(pb, "ProbeOrder.secret");
    pb = good_order(MU_PROBE_PAIR, 2, 1);
    pb->world = 3;
    refuses(pb, "ProbeOrder.rank");
    pb = good_order(MU_PROBE_PAIR, 2, 1);
    pb->peers[0]->rank = 0; /* itself */
    refuses(pb, "ProbePeer.rank");
    pb = good_order(MU_PROBE_PAIR, 2, 1);
    pb->peers[0]->incarnation.len = 3;
    refuses(pb, "ProbePeer.incarnation");
    pb = good_order(MU_PROBE_TOGETHER, 5, 4);
    pb->peers[1]->rank = 1; /* twice */
    refuses(pb, "ProbePeer.rank");
    pb = good_order(MU_PROBE_TOGETHER, 5, 4);
    pb->peers[3]->rank = 5;
    refuses(pb, "ProbePeer.rank");
    pb = good_order(MU_PROBE_TOGETHER, 5, 4);
    pb->world = MU_PROBE_MEMBERS_MAX + 1;
    refuses(pb, "ProbeOrder.rank");
    pb = good_order(MU_PROBE_TOGETHER, 5, 4);
    pb->n_peers = MU_PROBE_NEIGHBOURS_MAX + 1;
    refuses(pb, "ProbeOrder.peers");
}

static void test_numbers_that_are_none_are_refused_by_field(void **state)
{
    (void)state;
    static const double bad[] = {-1, 1e19, INFINITY, NAN};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        Muster__V1__Probed pb = MUSTER__V1__PROBED__INIT;
        Muster__V1__ProbeAlone alone = MUSTER__V1__PROBE_ALONE__INIT;
        Muster__V1__ProbePair pair = MUSTER__V1__PROBE_PAIR__INIT;
        double flops[MU_PROBE_SIZES] = {1, 2, bad[i], 4, 5};
        struct mu_probe_report report;
        struct mu_error err;
        pb.kind = MUSTER__V1__PROBE_KIND__PROBE_KIND_PAIR;
        pb.pair = &pair;
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_OK);
        pair.in_rate = bad[i];
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
        assert_memory_equal(err.text, "ProbePair.in_rate", 17);
        pair.in_rate = 0;
        pb.alone = &alone;
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
        assert_string_equal(err.text, "Probed.alone: is not allowed with kind 3");
        pb.kind = MUSTER__V1__PROBE_KIND__PROBE_KIND_ALONE;
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
        assert_string_equal(err.text, "Probed.pair: is not allowed with kind 1");
        pb.pair = NULL;
        alone.slice_cost = bad[i];
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
        alone.slice_cost = 0;
        alone.flops = flops;
        alone.n_flops = MU_PROBE_SIZES;
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
        assert_memory_equal(err.text, "ProbeAlone.flops", 16);
        flops[2] = 3;
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_OK);
        alone.n_flops = MU_PROBE_SIZES - 1;
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
        alone.n_flops = 0;
        pb.ring_rate = bad[i];
        assert_int_equal(mu_wire_probed_from_pb(&pb, &report, &err), MU_ERR_INVALID);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_orders_are_refused_by_field),
        cmocka_unit_test(test_numbers_that_are_none_are_refused_by_field),
    };
    mu_wire_arena_init(&arena);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mu_wire_arena_fini(&arena);
    return failed;
}
