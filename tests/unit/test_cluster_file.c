/* links: mu_plan mu_job_file */
/* cluster.yaml: what arrives, what profiles say, and that nonsense is refused with its line. */
#include "cli/cluster_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "plan/search.h"

static struct mu_cluster cluster_from(const char *text)
{
    struct mu_cluster c;
    struct mu_error err = {0};
    if (mu_cluster_file_parse("c.yaml", "/", text, strlen(text), &c, &err) != MU_OK)
        fail_msg("%s", err.text);
    return c;
}

static void refused(const char *text, const char *want)
{
    struct mu_cluster c = {.nodes = 77};
    struct mu_error err = {0};
    enum mu_status status = mu_cluster_file_parse("c.yaml", "/", text, strlen(text), &c, &err);
    if (status == MU_OK || !strstr(err.text, want))
        fail_msg("'%s' is not in '%s'", want, status == MU_OK ? "accepted" : err.text);
    assert_null(strchr(err.text, '\n'));
    assert_int_equal(c.nodes, 77);
}

static void test_cluster_file_every_field_arrives(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from("cluster: x\n"
                                       "device: {type: b200-sxm, per_node: 4, nic_rate: 1e11}\n"
                                       "nodes: 300\nspare_nodes: 7\n"
                                       "fabric: {nodes: [8, 64], oversubscription: [2, 1.5], routing: static, "
                                       "flows_per_pair: 16}\n"
                                       "storage: {write_rate: 5e9, read_rate: 6e9}\n"
                                       "failures: {device_mtbf_hours: 100, restart_s: 9}\n");
    assert_string_equal(c.name, "x");
    assert_string_equal(c.device.name, "b200-sxm");
    assert_int_equal(c.device.per_node, 4);
    assert_true(c.device.nic_bytes_per_second == 1e11 && c.device.flops_bf16 == 2250e12);
    assert_int_equal(mu_cluster_devices(&c), 293 * 4);
    assert_int_equal(c.level_count, 2);
    assert_int_equal(c.levels[1].nodes, 64);
    assert_true(c.levels[1].oversubscription == 1.5);
    assert_int_equal(c.routing, MU_ROUTING_STATIC);
    assert_int_equal(c.flows_per_pair, 16);
    assert_true(c.storage_write_bytes_per_second == 5e9 && c.storage_read_bytes_per_second == 6e9);
    assert_true(c.device_mtbf_hours == 100 && c.restart_s == 9);
}

static void test_cluster_file_nonsense_is_refused_with_its_line(void **state)
{
    (void)state;
    refused("", "c.yaml: empty; a cluster file has at least device and nodes");
    refused("nodes: 3\n", "c.yaml: device: is missing");
    refused("device: {type: h100-sxm}\n", "c.yaml: nodes: is missing");
    refused("device: {type: h100}\nnodes: 3\n", "c.yaml:1: device.type: value h100 is not allowed: a100-80g");
    refused("device: {per_node: 3}\nnodes: 3\n", "c.yaml:1: device.type: is missing");
    refused("device: {type: h100-sxm}\nnodes: 1000000000\n", "c.yaml:2: nodes: value 1e+09");
    refused("device: {type: h100-sxm}\nnodes: 3\nfabric: {nodes: [8, 4], oversubscription: [1, 1]}\n",
            "c.yaml:3: fabric.nodes[1]: value 4 is not allowed: levels ascend");
    refused("device: {type: h100-sxm}\nnodes: 3\nfabric: {nodes: [8, 64]}\n", "fabric.oversubscription: is missing");
    refused("device: {type: h100-sxm, nic_rate: 0}\nnodes: 3\n", "c.yaml:1: device.nic_rate: value 0 is not allowed");
    refused("device: {type: h100-sxm}\nnodes: 3\nfailures: {device_mtbf_hours: -1}\n",
            "c.yaml:3: failures.device_mtbf_hours: value -1 is not allowed");
    refused("device: {type: h100-sxm}\nnodez: 3\n", "c.yaml:2: nodez: unknown key; did you mean nodes?");
    refused("device: {type: h100-sxm}\nnodes: 3\nspare_nodes: 3\n", "c.yaml:3: spare_nodes: value 3 is not allowed");
    refused("device: {type: h100-sxm}\nnodes: 3\nfabric: {nodes: [1, 2, 3, 4, 5], oversubscription: [1]}\n",
            "a list of 1 to 4 numbers");
}

static void test_cluster_file_fat_tree(void **state)
{
    (void)state;
    struct mu_cluster c =
        cluster_from("device: {type: h100-sxm}\nnodes: 1024\nfabric: {fat_tree: 16, routing: static}\n");
    assert_int_equal(c.level_count, 2);
    assert_int_equal(c.levels[0].nodes, 8);
    assert_int_equal(c.levels[1].nodes, 64);
    refused("device: {type: h100-sxm}\nnodes: 1025\nfabric: {fat_tree: 16}\n",
            "c.yaml:3: fabric.fat_tree: value 16 is not allowed: a tree of such switches joins 1024 nodes");
    refused("device: {type: h100-sxm}\nnodes: 1\nfabric: {fat_tree: 7}\n", "c.yaml:3: fabric.fat_tree: value 7");
    refused("device: {type: h100-sxm}\nnodes: 1\nfabric: {fat_tree: 8, nodes: [1], oversubscription: [1]}\n",
            "c.yaml:3: fabric.fat_tree: value 8");
}

/* ---- numbers ---- */

/* Every number of the file, in a file whose other lines are good; `zero`: 0 means something. */
static const struct {
    const char *before, *field, *after;
    uint32_t line;
    bool zero;
} numbers[] = {
    {"device: {type: h100-sxm, per_node: ", "device.per_node", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, flops_bf16: ", "device.flops_bf16", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, flops_fp32: ", "device.flops_fp32", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, memory: ", "device.memory", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, memory_rate: ", "device.memory_rate", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, link_rate: ", "device.link_rate", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, nic_rate: ", "device.nic_rate", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm, host_rate: ", "device.host_rate", "}\nnodes: 4\n", 1, false},
    {"device: {type: h100-sxm}\nnodes: ", "nodes", "\n", 2, false},
    {"device: {type: h100-sxm}\nnodes: 4\nspare_nodes: ", "spare_nodes", "\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nfabric: {nodes: [", "fabric.nodes[0]", "], oversubscription: [1]}\n", 3,
     false},
    {"device: {type: h100-sxm}\nnodes: 4\nfabric: {nodes: [2], oversubscription: [", "fabric.oversubscription[0]",
     "]}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nfabric: {fat_tree: ", "fabric.fat_tree", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nfabric: {flows_per_pair: ", "fabric.flows_per_pair", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nfabric: {type: ib-ndr, cards: ", "fabric.cards", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nstorage: {write_rate: ", "storage.write_rate", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nstorage: {read_rate: ", "storage.read_rate", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {device_mtbf_hours: ", "failures.device_mtbf_hours", "}\n", 3,
     false},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {restart_s: ", "failures.restart_s", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {weibull_shape: ", "failures.weibull_shape", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {repair_hours: ", "failures.repair_hours", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {transient_share: ", "failures.transient_share", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {switch_mtbf_hours: ", "failures.switch_mtbf_hours", "}\n", 3,
     true},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {power_mtbf_hours: ", "failures.power_mtbf_hours", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nfailures: {power_nodes: ", "failures.power_nodes", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {flops: ", "worker.flops", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {memory_rate: ", "worker.memory_rate", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {rows_rate: ", "worker.rows_rate", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {link_rate: ", "worker.link_rate", "}\n", 3, false},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {latency_s: ", "worker.latency_s", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {fixed_s: ", "worker.fixed_s", "}\n", 3, true},
    {"device: {type: h100-sxm}\nnodes: 4\nworker: {slice_cost: ", "worker.slice_cost", "}\n", 3, true},
};

static void test_cluster_file_no_number_may_be_nonsense(void **state)
{
    (void)state;
    static const char *const nonsense[] = {"-1",  "-0.5", "nan",  "NaN",  "inf",   "-inf", ".inf", "1e999", "1e30",
                                           "0x8", "''",   "many", "'4 '", "'1 2'", "~",    "+-3",  "1e"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        char text[256], want[128];
        snprintf(want, sizeof want, "c.yaml:%u: %s: ", numbers[i].line, numbers[i].field);
        for (size_t k = 0; k < sizeof nonsense / sizeof nonsense[0]; k++) {
            snprintf(text, sizeof text, "%s%s%s", numbers[i].before, nonsense[k], numbers[i].after);
            refused(text, want);
        }
        snprintf(text, sizeof text, "%s0%s", numbers[i].before, numbers[i].after);
        if (numbers[i].zero)
            (void)cluster_from(text);
        else
            refused(text, want);
    }
}

static void test_cluster_file_what_is_said_twice_or_wrongly_shaped_is_refused(void **state)
{
    (void)state;
    static const char head[] = "device: {type: h100-sxm}\nnodes: 4\n";
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"nodes: 5\n", "c.yaml:3: nodes: given twice, first at line 2; keep one of the two"},
        {"device: {type: a100-80g}\n", "c.yaml:3: device: given twice, first at line 1"},
        {"fabric:\n  routing: static\n  routing: adaptive\n", "c.yaml:5: fabric.routing: given twice, first at line 4"},
        {"fabric: [1, 2]\n", "c.yaml:3: fabric: a list is not allowed: a group of fields"},
        {"fabric: {nodes: 16, oversubscription: [1]}\n", "c.yaml:3: fabric.nodes: a single value is not allowed"},
        {"fabric: {nodes: [], oversubscription: []}\n", "a list of 1 to 4 numbers"},
        {"fabric: {nodes: [4, 4], oversubscription: [1, 1]}\n",
         "c.yaml:3: fabric.nodes[1]: value 4 is not allowed: levels ascend"},
        {"fabric: {routing: random}\n", "c.yaml:3: fabric.routing: value random is not allowed: adaptive or static"},
        {"fabric: {type: ndr}\n", "c.yaml:3: fabric.type: value ndr is not allowed: ib-hdr, ib-ndr"},
        {"fabric: {cards: 8}\n", "c.yaml:3: fabric.type: is missing"},
        {"fabric: {type: ib-ndr, cards: 129}\n", "c.yaml:3: fabric.cards: value 129 is not allowed"},
        {"failures: {mtbf: 3}\n", "c.yaml:3: failures.mtbf: unknown key"},
        {"storage: 5\n", "c.yaml:3: storage: a single value is not allowed: a group of fields"},
        {"cluster: {a: b}\n", "c.yaml:3: cluster: a group is not allowed"},
        {"a: &x 3\nb: *x\n", "c.yaml:"},
        {"fabric: {nodes: [\n", "c.yaml:"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, "%s%s", head, cases[i].text);
        refused(text, cases[i].want);
    }
    refused(
        "device: {type: h100-sxm, per_node: 1}\nnodes: 1000000\nfabric: {nodes: [1, 64], oversubscription: [1, 1]}\n",
        "c.yaml:3: fabric.nodes[0]: value 1 is not allowed: 1000000 nodes make more than 65536 switches");
    refused("device: {type: h100-sxm}\nnodes: 524289\n",
            "c.yaml:2: nodes: value 524289 is not allowed: of 8 devices each, they have more than 4194304");
}

/* ---- profiles ---- */

static struct mu_cluster with_fabric(const char *fabric)
{
    char text[256];
    snprintf(text, sizeof text, "device: {type: h100-sxm}\nnodes: 64\nfabric: {%s}\n", fabric);
    return cluster_from(text);
}

static void test_cluster_file_fabric_profiles(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double line;
        enum mu_routing routing;
    } types[] = {{"ib-hdr", 25e9, MU_ROUTING_ADAPTIVE},  {"ib-ndr", 50e9, MU_ROUTING_ADAPTIVE},
                 {"ib-xdr", 100e9, MU_ROUTING_ADAPTIVE}, {"roce-100", 12.5e9, MU_ROUTING_STATIC},
                 {"roce-200", 25e9, MU_ROUTING_STATIC},  {"roce-400", 50e9, MU_ROUTING_STATIC},
                 {"roce-800", 100e9, MU_ROUTING_STATIC}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        char text[64];
        snprintf(text, sizeof text, "type: %s", types[i].name);
        struct mu_cluster c = with_fabric(text);
        double share = c.device.nic_bytes_per_second / types[i].line;
        assert_true(share > 0.97 && share < 1); /* never above the line */
        assert_true(c.switch_s > 0 && c.switch_s < 1e-6);
        assert_int_equal(c.routing, types[i].routing);
        assert_non_null(strstr(mu_fabric_type_names(), types[i].name));
    }
    struct mu_cluster half = with_fabric("type: ib-ndr, cards: 4"), whole = with_fabric("type: ib-ndr");
    assert_true(half.device.nic_bytes_per_second == whole.device.nic_bytes_per_second / 2);
    struct mu_cluster told = with_fabric("type: roce-400, routing: adaptive");
    assert_int_equal(told.routing, MU_ROUTING_ADAPTIVE);
    struct mu_cluster own =
        cluster_from("device: {type: h100-sxm, nic_rate: 30e9}\nnodes: 4\nfabric: {type: ib-ndr}\n");
    assert_true(own.device.nic_bytes_per_second == 30e9); /* the field says it better */
}

/* At the same rate InfiniBand is no slower than RoCE; a faster generation is faster; switches on the way count. */
static void test_cluster_file_fabric_profiles_order_as_they_should(void **state)
{
    (void)state;
    static const char *const order[] = {"roce-100", "roce-200", "ib-hdr", "roce-400", "ib-ndr", "roce-800", "ib-xdr"};
    const struct mu_forecast_model model = {.config = {.family = MU_FAMILY_LLAMA,
                                                       .layers = 32,
                                                       .heads = 32,
                                                       .kv_heads = 8,
                                                       .channels = 4096,
                                                       .hidden = 14336,
                                                       .context = 2048,
                                                       .vocab = 128256,
                                                       .slices = 1},
                                            .sequences = 1024,
                                            .length = 2048};
    struct mu_search_limits limits;
    struct mu_forecast_rates rates;
    double before = 1e9;
    mu_search_limits_init(&limits);
    mu_forecast_rates_init(&rates);
    const struct mu_forecast_plan plan = mu_search_plan(&limits, 8, 1, 64, 1, MU_RECOMPUTE_NONE);
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        char text[96];
        snprintf(text, sizeof text, "type: %s, nodes: [16, 64], oversubscription: [1, 1]", order[i]);
        struct mu_cluster c = with_fabric(text), flat = c;
        double step_s = mu_forecast_of(&model, &c, &plan, &rates, NULL).step_s;
        if (!(step_s < before))
            fail_msg("%s: %g s, before %g s", order[i], step_s, before);
        before = step_s;
        flat.level_count = 0;
        assert_true(mu_forecast_of(&model, &flat, &plan, &rates, NULL).step_s < step_s);
        flat.switch_s = c.switch_s = 0;
        assert_true(mu_forecast_of(&model, &c, &plan, &rates, NULL).step_s < step_s);
        assert_true(mu_cluster_switches_s(&c, 64, 1) == 0);
    }
}

/* A tensor group of 64 stays inside NVLink of an NVL72, and pays for the network where nodes are of 8. */
static void test_cluster_file_nvlink_domains(void **state)
{
    (void)state;
    struct mu_cluster rack = cluster_from("device: {type: gb200-nvl72}\nnodes: 4\n");
    struct mu_cluster nodes = cluster_from("device: {type: b200-sxm}\nnodes: 36\n");
    assert_int_equal(mu_cluster_devices(&rack), mu_cluster_devices(&nodes));
    assert_int_equal(mu_forecast_in_node(&rack.device, 64, 1), 64);
    assert_int_equal(mu_forecast_in_node(&nodes.device, 64, 1), 8);
    assert_true(cluster_from("device: {type: gb300-nvl72}\nnodes: 2\n").device.memory_bytes > rack.device.memory_bytes);
    refused("device: {type: gb200}\nnodes: 3\n", "b200-sxm, gb200-nvl72, gb300-nvl72");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cluster_file_every_field_arrives),
        cmocka_unit_test(test_cluster_file_nonsense_is_refused_with_its_line),
        cmocka_unit_test(test_cluster_file_no_number_may_be_nonsense),
        cmocka_unit_test(test_cluster_file_what_is_said_twice_or_wrongly_shaped_is_refused),
        cmocka_unit_test(test_cluster_file_fat_tree),
        cmocka_unit_test(test_cluster_file_fabric_profiles),
        cmocka_unit_test(test_cluster_file_fabric_profiles_order_as_they_should),
        cmocka_unit_test(test_cluster_file_nvlink_domains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
