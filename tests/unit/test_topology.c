/* links: mu_plan mu_job_file */
#include "plan/topology.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "cli/cluster_file.h"
#include "cli/topology_file.h"
#include "common/rng.h"

static struct mu_topology *parsed(enum mu_topology_format format, const char *text)
{
    struct mu_topology *t = NULL;
    struct mu_error err = {0};
    if (mu_topology_file_parse("t", format, text, strlen(text), &t, &err) != MU_OK ||
        mu_topology_finish(t, &err) != MU_OK)
        fail_msg("%s", err.text);
    return t;
}

static void refused(enum mu_topology_format format, const char *text, const char *want)
{
    struct mu_topology *t = NULL;
    struct mu_error err = {0};
    enum mu_status status = mu_topology_file_parse("t", format, text, strlen(text), &t, &err);
    if (status == MU_OK) {
        status = mu_topology_finish(t, &err);
        if (status != MU_OK)
            topology_located("t", &err);
        mu_topology_free(t);
    }
    if (status == MU_OK || !strstr(err.text, want))
        fail_msg("'%s' is not in '%s'", want, status == MU_OK ? "accepted" : err.text);
    assert_null(strchr(err.text, '\n'));
}

static const char *switch_above(const struct mu_topology *t, const char *node, uint32_t levels)
{
    uint32_t at = mu_topology_find_node(t, node);
    assert_true(at != MU_TOPOLOGY_NONE);
    at = t->nodes[at].parent;
    for (; levels > 0 && at != MU_TOPOLOGY_NONE; levels--)
        at = t->switches[at].parent;
    return at == MU_TOPOLOGY_NONE ? NULL : t->switch_names.names[at];
}

static bool noted(const struct mu_topology *t, const char *want)
{
    for (uint32_t i = 0; i < t->note_count; i++)
        if (strstr(t->notes[i], want))
            return true;
    return false;
}

/* ---- what the formats say ---- */

static void test_slurm_tree_with_ranges_comments_and_joined_lines(void **state)
{
    (void)state;
    struct mu_topology *t = parsed(MU_TOPOLOGY_SLURM, "# three leaves\n"
                                                      "SwitchName=top Switches=s[0-2] LinkSpeed=100 # all of them\n"
                                                      "\n"
                                                      "switchname=s0 nodes=dev[0-5]\r\n"
                                                      "SwitchName=s1 \\\n  Nodes=dev[06-08,11],r[1-2]n[1-2]\n"
                                                      "SwitchName=s2 Nodes=login");
    assert_int_equal(t->node_count, 6 + 4 + 4 + 1);
    assert_int_equal(t->switch_count, 4);
    assert_int_equal(t->level_count, 2);
    assert_string_equal(switch_above(t, "dev5", 0), "s0");
    assert_string_equal(switch_above(t, "dev06", 0), "s1");
    assert_string_equal(switch_above(t, "r2n1", 0), "s1");
    assert_string_equal(switch_above(t, "login", 1), "top");
    assert_int_equal(mu_topology_find_node(t, "dev6"), MU_TOPOLOGY_NONE);
    assert_true(noted(t, "LinkSpeed is not read"));
    mu_topology_free(t);
}

static void test_slurm_blocks_are_joined_by_their_sizes(void **state)
{
    (void)state;
    struct mu_topology *t = parsed(MU_TOPOLOGY_SLURM, "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\n"
                                                      "BlockName=b3 Nodes=n[9-12]\nBlockName=b4 Nodes=n[13-15]\n"
                                                      "BlockName=b5 Nodes=n16\nBlockSizes=4,8,16\n");
    assert_int_equal(t->level_count, 3);
    assert_string_equal(switch_above(t, "n8", 1), "b1..b2");
    assert_string_equal(switch_above(t, "n9", 1), "b3..b4");
    assert_string_equal(switch_above(t, "n16", 1), "b5..b5");
    assert_string_equal(switch_above(t, "n1", 2), switch_above(t, "n15", 2));
    assert_true(noted(t, "2 fabrics that nothing joins"));
    mu_topology_free(t);
}

static void test_slurm_yaml_reads_the_default_topology(void **state)
{
    (void)state;
    static const char text[] = "---\n- topology: other\n  cluster_default: false\n  flat: true\n"
                               "- topology: main\n  cluster_default: true\n  tree:\n    switches:\n"
                               "      - switch: root\n        children: s[1-2]\n"
                               "      - switch: s1\n        nodes: node[01-02]\n"
                               "      - {switch: s2, nodes: 'node[03-04]'}\n";
    struct mu_topology *t = parsed(MU_TOPOLOGY_SLURM_YAML, text);
    assert_int_equal(t->node_count, 4);
    assert_string_equal(switch_above(t, "node03", 1), "root");
    mu_topology_free(t);
    t = parsed(MU_TOPOLOGY_SLURM_YAML, "- block:\n    block_sizes: [2, 4]\n    blocks:\n"
                                       "      - {block: b1, nodes: 'a[1-2]'}\n      - {block: b2, nodes: 'a[3-4]'}\n");
    assert_string_equal(switch_above(t, "a1", 1), "b1..b2");
    mu_topology_free(t);
}

static void test_topograph_layers_and_domains(void **state)
{
    (void)state;
    static const char text[] =
        "{\"instances\": [\n"
        "{\"id\":\"I1\",\"network_layers\":[\"leaf-a\",\"spine\"],\"labels\":{\"accelerator.topograph.run/domain\":"
        "\"nvl-1\"}},\n"
        "{\"id\":\"I2\",\"network_layers\":[\"leaf-a\",\"spine\"],\"labels\":{\"accelerator.topograph.run/domain\":"
        "\"nvl-1\"}},\n"
        "{\"id\":\"I3\",\"network_layers\":[\"leaf-a\",\"spine\"]},\n"
        "{\"id\":\"I4\",\"network_layers\":[\"leaf-b\",\"spine\"],\"unknown\":[1]},\n"
        "{\"id\":\"I5\",\"network_layers\":[]}]}";
    struct mu_topology *t = parsed(MU_TOPOLOGY_TOPOGRAPH, text);
    assert_int_equal(t->node_count, 5);
    assert_string_equal(switch_above(t, "I2", 0), "domain:nvl-1");
    assert_string_equal(switch_above(t, "I2", 1), "leaf-a");
    assert_string_equal(switch_above(t, "I3", 0), "leaf-a");
    assert_string_equal(switch_above(t, "I4", 1), "spine");
    assert_null(switch_above(t, "I5", 0));
    assert_true(noted(t, "1 node of the cluster (I5): under no switch"));
    mu_topology_free(t);
}

static const char xml[] =
    "<?xml version=\"1.0\"?>\n<!-- a > b -->\n<system version=\"1\">\n"
    " <cpu numaid=\"0\">\n"
    "  <pci busid=\"0000:0f:00.0\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">\n"
    "   <gpu dev=\"0\" sm=\"90\" rank=\"0\">\n"
    "    <nvlink target=\"0000:ff:00.0\" count=\"18\" tclass=\"0x068000\"/>\n   </gpu>\n  </pci>\n"
    "  <pci busid=\"0000:1f:00.0\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">\n"
    "   <gpu dev=\"1\" sm=\"90\" rank=\"1\">\n"
    "    <nvlink target=\"0000:fe:00.0\" count=\"18\" tclass=\"0x068000\"/>\n   </gpu>\n  </pci>\n"
    "  <nic>\n   <net name=\"mlx5_0\" dev=\"0\" speed=\"400000\"/>\n"
    "   <net name=\"mlx5_1\" dev=\"1\" speed=\"400000\"/>\n  </nic>\n </cpu>\n</system>\n";

static void test_nccl_xml_of_a_node(void **state)
{
    (void)state;
    struct mu_node_file node;
    struct mu_error err = {0};
    if (mu_node_file_parse("n.xml", MU_NODE_NCCL_XML, xml, strlen(xml), &node, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_int_equal(node.devices, 2);
    assert_int_equal(node.islands, 1);
    assert_true(node.link_bytes_per_second == 450e9);
    assert_true(node.nic_bytes_per_second == 50e9);
    assert_true(node.host_bytes_per_second > 51e9 && node.host_bytes_per_second < 52e9);
}

#define HWLOC_GPU                                                                                                      \
    "<object type=\"PCIDev\" gp_index=\"5\" pci_busid=\"0000:01:00.0\" pci_type=\"0302 [10de:2330] a1\" "              \
    "pci_link_speed=\"63.0\"/>"

/* As lstopo writes it: two GPUs on a switch and one that is on none, a card with two devices, a disk, a console. */
static const char hwloc[] =
    "<?xml version=\"1.0\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">\n"
    "<object type=\"Machine\" gp_index=\"1\"><info name=\"DMIProductName\" value=\"node\"/>\n"
    "<object type=\"PCIDev\" gp_index=\"11\" pci_busid=\"0000:34:00.0\" pci_type=\"0302 [10de:2330] [10de:1626] a1\" "
    "pci_link_speed=\"63.015385\"><object type=\"OSDev\" gp_index=\"21\" name=\"nvml0\" osdev_type=\"1\"/></object>\n"
    "<object type=\"PCIDev\" gp_index=\"12\" pci_busid=\"0000:36:00.0\" pci_type=\"0302 [10de:2330] [10de:1626] a1\" "
    "pci_link_speed=\"31.507692\"><object type=\"OSDev\" gp_index=\"22\" name=\"nvml1\" osdev_type=\"1\"/></object>\n"
    "<object type=\"PCIDev\" gp_index=\"15\" pci_busid=\"0000:38:00.0\" pci_type=\"0302 [10de:2330] [10de:1626] a1\" "
    "pci_link_speed=\"63.015385\"><object type=\"OSDev\" gp_index=\"23\" name=\"nvml2\" osdev_type=\"1\"/></object>\n"
    "<object type=\"PCIDev\" gp_index=\"13\" subtype=\"NVSwitch\" pci_busid=\"0000:61:00.0\" pci_type=\"0680 "
    "[10de:22a3]\"/>\n"
    "<object type=\"PCIDev\" gp_index=\"16\" pci_type=\"0300 [1a03:2000] x\"/>\n"
    "<object type=\"PCIDev\" gp_index=\"14\" pci_busid=\"0000:0c:00.0\" pci_type=\"0207 [15b3:1021] x\">"
    "<object type=\"OSDev\" gp_index=\"24\" name=\"ib0\" osdev_type=\"2\"/><object type=\"OSDev\" gp_index=\"25\" "
    "name=\"mlx5_0\" osdev_type=\"3\"/><object type=\"OSDev\" gp_index=\"26\" name=\"mlx5_1\" "
    "osdev_type=\"3\"/></object>\n"
    "</object>\n<distances2 type=\"NUMANode\" nbobjs=\"1\" name=\"NUMALatency\"><indexes>0</indexes>"
    "<u64values>10 10 10</u64values></distances2>\n"
    "<distances2hetero nbobjs=\"3\" name=\"NVLinkBandwidth\"><indexes>OSDev:21 OSDev:22 </indexes><indexes>PCIDev:13 "
    "</indexes>\n<u64values>1000000 0 450000 0 1000000 450000 </u64values><u64values>450000 450000 0</u64values>"
    "</distances2hetero>\n</topology>\n";

static struct mu_node_file hwloc_says(const char *text)
{
    struct mu_node_file node;
    struct mu_error err = {0};
    if (mu_node_file_parse("n.xml", MU_NODE_HWLOC_XML, text, strlen(text), &node, &err) != MU_OK)
        fail_msg("%s", err.text);
    return node;
}

static bool about(double value, double wanted)
{
    return value > wanted * 0.999 && value < wanted * 1.001;
}

static void test_hwloc_xml_of_a_node(void **state)
{
    (void)state;
    struct mu_node_file node = hwloc_says(hwloc);
    assert_int_equal(node.devices, 3);
    assert_int_equal(node.islands, 2);
    assert_int_equal(node.cards, 1);
    assert_true(about(node.host_bytes_per_second, 32e9 * 0.8)); /* the slowest: 16 lanes of PCIe 4 */
    assert_true(about(node.link_bytes_per_second, 64e9 * 0.8)); /* the third one has no NVLink */
    assert_true(node.nic_bytes_per_second == 0);
    /* Two that are linked with each other, in a matrix of one type of objects; version 3 has sets of bits. */
    node =
        hwloc_says("<topology version=\"3.0\"><object type=\"Machine\">"
                   "<object type=\"PCIDev\" gp_index=\"5\" pci_busid=\"a\" pci_type=\"0302 [10de:1db8]\">"
                   "<object type=\"OSDev\" gp_index=\"7\" osdev_type=\"12\"/></object>"
                   "<object type=\"PCIDev\" gp_index=\"6\" pci_busid=\"b\" pci_type=\"0380 [1002:740f]\">"
                   "<object type=\"OSDev\" gp_index=\"8\" osdev_type=\"12\"/></object>"
                   "<object type=\"PCIDev\"><object type=\"OSDev\" osdev_type=\"32\"/></object>"
                   "<object type=\"PCIDev\"><object type=\"OSDev\" osdev_type=\"3\"/></object></object>"
                   "<distances2 type=\"OSDev\" nbobjs=\"2\" name=\"NVLinkBandwidth\" indexing=\"gp\">"
                   "<indexes>7 8 </indexes><u64values>900000 100000 100000 900000</u64values></distances2></topology>");
    assert_true(node.devices == 2 && node.islands == 1 && node.cards == 1);
    assert_true(node.link_bytes_per_second == 100e9 && node.host_bytes_per_second == 0);
}

static void test_node_file_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *want;
        enum mu_node_format format;
    } cases[] = {
        {"", "n.xml:1: no <gpu>", MU_NODE_NCCL_XML},
        {"<node/>", "n.xml:1: <system> is expected, not node", MU_NODE_NCCL_XML},
        {"<system>\n<gpu sm=\"90\"/>", "not closed: system", MU_NODE_NCCL_XML},
        {"<system>\n</cpu></system>", "n.xml:2: not XML: nothing is open that this closes: cpu", MU_NODE_NCCL_XML},
        {"<system>\n\n<net speed=\"0\"/></system>", "n.xml:3: net: speed of the value 0", MU_NODE_NCCL_XML},
        {"<system><net speed=\"nan\"/></system>", "net: speed of the value nan", MU_NODE_NCCL_XML},
        {"<system><gpu sm=\"-1\"/></system>", "gpu: sm of the value -1", MU_NODE_NCCL_XML},
        {"<system><gpu/></system>", "gpu: sm of the value (missing)", MU_NODE_NCCL_XML},
        {"<system><nvlink count=\"2\"/></system>", "nvlink outside of a gpu", MU_NODE_NCCL_XML},
        {"<system><gpu", "a tag or comment does not end", MU_NODE_NCCL_XML},
        {"<system/>", "n.xml:1: <topology> is expected, not system", MU_NODE_HWLOC_XML},
        {"", "n.xml:1: no GPU of NVIDIA's or AMD's", MU_NODE_HWLOC_XML},
        {"<topology/>", "n.xml:1: topology: this version of the format is not read: (none)", MU_NODE_HWLOC_XML},
        {"<topology version=\"1.0\"/>", "this version of the format is not read: 1.0", MU_NODE_HWLOC_XML},
        {"<topology version=\"2.0\">\n<object type=\"PCIDev\" pci_type=\"0300 [1a03:2000]\"/></topology>",
         "n.xml:2: no GPU", MU_NODE_HWLOC_XML},
        {"<topology version=\"2.0\">\n" HWLOC_GPU HWLOC_GPU "</topology>", "n.xml:2: two GPUs have the busid 0000:01",
         MU_NODE_HWLOC_XML},
        {"<topology version=\"2.0\">\n" HWLOC_GPU "\n<distances2 name=\"NVLinkBandwidth\"><indexes>5</indexes>"
         "<u64values>nan</u64values></distances2></topology>",
         "n.xml:3: NVLinkBandwidth: the value nan is not allowed", MU_NODE_HWLOC_XML},
        {"<topology version=\"2.0\">\n" HWLOC_GPU "\n<distances2 name=\"NVLinkBandwidth\"><indexes>5</indexes>"
         "<u64values>-5</u64values></distances2></topology>",
         "n.xml:3: NVLinkBandwidth: the value -5 is not allowed", MU_NODE_HWLOC_XML},
        {"<topology version=\"2.0\">\n" HWLOC_GPU "\n<distances2 name=\"NVLinkBandwidth\"><indexes>5</indexes>\n"
         "<u64values>0 0</u64values></distances2></topology>",
         "n.xml:4: NVLinkBandwidth: more values than pairs", MU_NODE_HWLOC_XML},
        {"<topology version=\"2.0\">\n" HWLOC_GPU, "not closed: topology", MU_NODE_HWLOC_XML},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mu_node_file node;
        struct mu_error err = {0};
        enum mu_status status =
            mu_node_file_parse("n.xml", cases[i].format, cases[i].text, strlen(cases[i].text), &node, &err);
        if (status == MU_OK || !strstr(err.text, cases[i].want))
            fail_msg("'%s' is not in '%s'", cases[i].want, status == MU_OK ? "accepted" : err.text);
    }
}

/* ---- what contradicts itself ---- */

static void test_contradictions_are_refused_with_their_line(void **state)
{
    (void)state;
    enum mu_topology_format conf = MU_TOPOLOGY_SLURM, yaml = MU_TOPOLOGY_SLURM_YAML, json = MU_TOPOLOGY_TOPOGRAPH;
    refused(conf, "", "t: no switch");
    refused(conf, "SwitchName=a Nodes=x\nSwitchName=b Nodes=x\n", "t:2: node x is under b, but at line 1 under a");
    refused(conf, "SwitchName=a Nodes=x\nSwitchName=a Nodes=y\n", "t:2: switch a is described twice, first at line 1");
    refused(conf, "SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "in a circle");
    refused(conf, "SwitchName=a Nodes=x\n\nSwitchName=b Switches=b\n", "t:3: switch b is in a circle");
    refused(conf, "SwitchName=a Switches=c\nSwitchName=b Switches=c\nSwitchName=c Nodes=x\n",
            "t:2: switch c is under b, but also under a");
    refused(conf, "SwitchName=a Nodes=\n", "t:1: an empty list");
    refused(conf, "SwitchName= Nodes=x\n", "t:1: an empty name");
    refused(conf, "SwitchName=a Nodes=x,,y\n", "between commas is empty");
    refused(conf, "SwitchName=a Nodes=x[1-\n", "a bracket is not closed");
    refused(conf, "SwitchName=a Nodes=x[5-1]\n", "a range descends");
    refused(conf, "SwitchName=a Nodes=x1]\n", "a bracket is not opened");
    refused(conf, "SwitchName=a Nodes=x[1-999999999]\n", "t:1: more than 1048576 names");
    refused(conf, "SwitchName=a Nodes=x[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]\n", "t:1: more than 1048576");
    refused(conf, "SwitchName=s Switches=s[1-1000000]\n", "t:1: more than 65536 names of one kind");
    refused(conf, "SwitchName=a Nodes=x LinkSpeed=0\n", "t:1: LinkSpeed=0 is not allowed");
    refused(conf, "SwitchName=a Nodes=x LinkSpeed=nan\n", "LinkSpeed=nan is not allowed");
    refused(conf, "SwitchName=a Nodes=x\nBlockName=b Nodes=y\n", "t:2: switches and blocks in one file");
    refused(conf, "BlockName=a Nodes=x\nBlockSizes=4,6\n", "t:2: a block size of 6 after 4");
    refused(conf, "BlockName=a Nodes=x\nBlockSizes=0\n", "t:2: a block size of 0");
    refused(conf, "Switch=a Nodes=x\n", "t:1: Switch is not allowed here");
    refused(conf, "SwitchName=a Nodes=x Noodles=y\n", "t:1: Noodles is not allowed here");
    refused(conf, "SwitchName=a junk\n", "t:1: junk is not allowed: words are KEY=VALUE");
    refused(conf,
            "SwitchName=1 Switches=2\nSwitchName=2 Switches=3\nSwitchName=3 Switches=4\nSwitchName=4 Switches=5\n"
            "SwitchName=5 Nodes=x\n",
            "t:1: switch 1 stands on 4 levels");
    refused(conf, "SwitchName=a\n", "no node is left");
    refused(yaml, "a: b\n", "t:1: a list of topologies");
    refused(yaml, "- tree: {}\n", "t:1: switches: is missing");
    refused(yaml, "- tree:\n    switches:\n      - nodes: x\n", "t:3: an entry with switch: NAME");
    refused(yaml, "- tree: {switches: [{switch: a, nodes: [x]}]}\n", "a list of names in one text");
    refused(yaml, "- block: {blocks: [{block: a, nodes: x}], block_sizes: [-3]}\n", "a block size of -3");
    refused(yaml, "- [\n", "not YAML");
    refused(yaml, "", "empty");
    refused(json, "{", "t:1: not JSON");
    refused(json, "[]", "{\"instances\": [...]} is expected");
    refused(json, "{\"instances\":[{}]}", "an instance without");
    refused(json, "{\"instances\":[\n{\"id\":\"a\"},\n{\"id\":\"a\"}]}",
            "t:3: instance a is there twice, first at line 2");
    refused(json, "{\"instances\":[{\"id\":\"\"}]}", "t:1: an empty name");
    refused(json, "{\"instances\":[{\"id\":\"a\",\"network_layers\":[\"s\",\"s\"]}]}", "below itself");
    refused(json,
            "{\"instances\":[{\"id\":\"a\",\"network_layers\":[\"l\",\"s\"]},\n{\"id\":\"b\",\"network_layers\":"
            "[\"l\",\"z\"]}]}",
            "t:2: switch l is under z, but also under s");
    refused(json, "{\"instances\":[{\"id\":\"a\",\"network_layers\":7}]}", "a list of names is expected");
}

/* ---- what is tolerated ---- */

static void test_absent_unknown_and_disjoint_are_said(void **state)
{
    (void)state;
    struct mu_topology *t = NULL;
    struct mu_error err;
    static const char text[] = "SwitchName=a Nodes=n[1-10]\nSwitchName=b Nodes=m[1-2]\nSwitchName=c\n";
    assert_int_equal(mu_topology_file_parse("t", MU_TOPOLOGY_SLURM, text, strlen(text), &t, &err), MU_OK);
    assert_int_equal(mu_topology_expect(t, 11, &err), MU_OK);
    assert_int_equal(mu_topology_finish(t, &err), MU_OK);
    assert_int_equal(t->present_count, 11);
    assert_true(t->nodes[mu_topology_find_node(t, "n10")].absent); /* the last by value, not by letters */
    assert_true(noted(t, "1 node of the topology (n10): not in the cluster"));
    assert_true(noted(t, "2 fabrics that nothing joins (a, b)"));
    assert_true(noted(t, "1 switch (c): no node is below"));
    mu_topology_free(t);
    assert_int_equal(mu_topology_file_parse("t", MU_TOPOLOGY_SLURM, text, strlen(text), &t, &err), MU_OK);
    assert_int_equal(mu_topology_expect(t, 14, &err), MU_OK);
    assert_int_equal(mu_topology_finish(t, &err), MU_OK);
    assert_int_equal(t->present_count, 14);
    assert_true(noted(t, "2 nodes of the cluster (unnamed-13, unnamed-14): under no switch"));
    mu_topology_free(t);
    t = parsed(MU_TOPOLOGY_SLURM, "SwitchName=a Nodes=n[1-3],n2\nSwitchName=b Nodes=m1\n");
    assert_true(t->present_count == 4 && noted(t, "1 node (n2): named more than once, counted once"));
    mu_topology_free(t);
}

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void cluster_says(const char *dir, const char *text, const char *want)
{
    struct mu_cluster c;
    struct mu_error err = {0};
    enum mu_status status = mu_cluster_file_parse("c.yaml", dir, text, strlen(text), &c, &err);
    if (status == MU_OK)
        mu_cluster_fini(&c);
    if (status == MU_OK || !strstr(err.text, want))
        fail_msg("'%s' is not in '%s'", want, status == MU_OK ? "accepted" : err.text);
}

static void test_cluster_file_takes_its_files(void **state)
{
    (void)state;
    char dir[] = "/tmp/muster-topology-XXXXXX", file[64];
    static const char *const names[] = {"t.conf", "bad.conf", "n.xml", "h.xml"};
    struct mu_cluster c;
    struct mu_error err = {0};
    assert_non_null(mkdtemp(dir));
    write_file(dir, names[0], "SwitchName=a Nodes=n[1-6]\nSwitchName=b Nodes=n[7-10]\nSwitchName=c Switches=a,b\n");
    write_file(dir, names[1], "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n");
    write_file(dir, names[2], xml);
    write_file(dir, names[3], hwloc);
    static const char good[] = "device: {type: h100-sxm, nic_rate: 25e9}\n"
                               "topology: {slurm: t.conf, nccl: n.xml, hosts: 'n[2-10],late'}\n"
                               "fabric: {oversubscription: [3]}\nspare_nodes: 1\n";
    if (mu_cluster_file_parse("c.yaml", dir, good, strlen(good), &c, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_int_equal(c.nodes, 10);
    assert_int_equal(c.device.per_node, 2);
    assert_true(c.device.nic_bytes_per_second == 25e9); /* the field says it better than the file */
    assert_int_equal(c.level_count, 2);
    assert_int_equal(c.levels[0].nodes, 5);
    assert_true(c.levels[0].oversubscription == 3 && c.levels[1].oversubscription == 1);
    assert_int_equal(c.levels[1].nodes, 10);
    assert_true(noted(c.topology, "(n1): not in the cluster") && noted(c.topology, "(late): under no switch"));
    mu_cluster_fini(&c);
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {slurm: none.conf}\n", "none.conf");
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {slurm: bad.conf}\n", "bad.conf:2: node n1 is under b");
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {slurm: t.conf, topograph: t.conf}\n",
                 "c.yaml:2: topology.t");
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {hosts: a}\nnodes: 1\n", "topology.slurm: is missing");
    cluster_says(dir, "device: {type: h100-sxm}\ntopology:\n  slurm: t.conf\n  hosts: 'a[2-1]'\n",
                 "c.yaml:4: a[2-1]: a range descends");
    cluster_says(dir,
                 "device: {type: h100-sxm}\ntopology: {slurm: t.conf}\nfabric: {nodes: [4], oversubscription: [2]}\n",
                 "c.yaml:3: fabric.nodes");
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {slurm: t.conf}\nfabric: {oversubscription: [2, 2, 2]}\n",
                 "c.yaml:3: fabric.oversubscription: 3 levels are not allowed: the topology has 2");
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {slurm: t.conf}\nfabric: {oversubscription: [0]}\n",
                 "c.yaml:3: fabric.oversubscription[0]: value 0");
    cluster_says(dir, "device: {type: h100-sxm, per_node: 8}\ntopology: {slurm: t.conf, nccl: n.xml}\n",
                 "c.yaml:1: device.per_node: value 8 is not allowed: the file of topology.nccl or topology.hwloc has");
    cluster_says(dir, "device: {type: h100-sxm}\nnodes: 1\ntopology: {nccl: n.xml, hwloc: h.xml}\n",
                 "c.yaml:3: topology.hwloc: value h.xml is not allowed: one of nccl and hwloc");
    cluster_says(dir, "device: {type: h100-sxm}\nnodes: 1\ntopology: {hwloc: n.xml}\n",
                 "n.xml:3: <topology> is expected, not system");
    static const char twice[] = "device: {type: h100-sxm}\ntopology: {slurm: t.conf, hosts: 'n[1-3],n2,late,late'}\n";
    if (mu_cluster_file_parse("c.yaml", dir, twice, strlen(twice), &c, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_true(c.nodes == 4 && noted(c.topology, "2 nodes (n2, late): named more than once, counted once"));
    mu_cluster_fini(&c);
    static const char inside[] = "device: {type: h100-sxm}\nnodes: 2\ntopology: {hwloc: h.xml}\n";
    if (mu_cluster_file_parse("c.yaml", dir, inside, strlen(inside), &c, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_true(c.device.per_node == 3 && c.device.islands == 2 && about(c.device.host_bytes_per_second, 25.6e9));
    mu_cluster_fini(&c);
    cluster_says(dir, "device: {type: h100-sxm}\ntopology: {slurm: t.conf}\nfailures: {device_mtbf_hours: nan}\n",
                 "c.yaml:3: failures.device_mtbf_hours: value nan");
    static const char *const nonsense[] = {
        "weibull_shape: 0",        "weibull_shape: -1",     "repair_hours: -1",        "transient_share: 1.1",
        "switch_mtbf_hours: 1e-9", "switch_mtbf_hours: -2", "power_mtbf_hours: 0.001", "power_nodes: 0",
        "restart_s: inf",          "device_mtbf_hours: -50"};
    for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
        char text[160], want[80];
        snprintf(text, sizeof text, "device: {type: h100-sxm}\nnodes: 1\nfailures: {%s}\n", nonsense[i]);
        snprintf(want, sizeof want, "c.yaml:3: failures.%.*s: value", (int)strcspn(nonsense[i], ":"), nonsense[i]);
        cluster_says(dir, text, want);
    }
    cluster_says(dir, "cluster: ''\ndevice: {type: h100-sxm}\nnodes: 1\n", "c.yaml:1: cluster: value (empty)");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(file, sizeof file, "%s/%s", dir, names[i]);
        assert_int_equal(unlink(file), 0);
    }
    assert_int_equal(rmdir(dir), 0);
}

/* ---- whatever comes ---- */

/* Bytes of good files are changed, dropped and doubled: each is read or refused in one line. */
static void test_mutated_files_are_read_or_refused(void **state)
{
    (void)state;
    static const char *const seeds[] = {
        "SwitchName=s0 Nodes=dev[0-5],x\nSwitchName=s1 Nodes=a[1-2]b[3-4] LinkSpeed=5\nSwitchName=t Switches=s[0-1]\n",
        "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 \\\nNodes=n[5-8]\nBlockSizes=4,8\n",
        "- topology: m\n  tree:\n    switches:\n      - {switch: r, children: 's[1-2]'}\n      - {switch: s1, nodes: "
        "a}\n",
        "{\"instances\":[{\"id\":\"a\",\"network_layers\":[\"l\",\"s\"],\"labels\":{\"accelerator.topograph.run/"
        "domain\":"
        "\"d\"}},{\"id\":\"b\",\"network_layers\":[\"l\"],\"labels\":{\"accelerator.topograph.run/domain\":\"d\"}}]}",
        xml,
        hwloc};
    static const char bytes[] = "[]{},-=0123456789\n\\\"<>/ ab:#\t";
    uint32_t read = 0, not_read = 0;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        uint64_t random = seed;
        size_t which = seed % 6;
        char text[4096];
        size_t length = strlen(seeds[which]);
        memcpy(text, seeds[which], length);
        for (uint32_t changes = 1 + mu_splitmix64(&random) % 4; changes > 0; changes--) {
            size_t at = mu_splitmix64(&random) % length;
            switch (mu_splitmix64(&random) % 3) {
            case 0:
                text[at] = bytes[mu_splitmix64(&random) % (sizeof bytes - 1)];
                break;
            case 1:
                memmove(text + at, text + at + 1, --length - at);
                break;
            default:
                memmove(text + at + 1, text + at, length++ - at);
            }
        }
        struct mu_topology *t = NULL;
        struct mu_node_file node;
        struct mu_error err = {0};
        enum mu_topology_format format =
            which < 2 ? MU_TOPOLOGY_SLURM : (enum mu_topology_format)(MU_TOPOLOGY_SLURM_YAML + which - 2);
        enum mu_status status = which >= 4 ? mu_node_file_parse("f", which == 4 ? MU_NODE_NCCL_XML : MU_NODE_HWLOC_XML,
                                                                text, length, &node, &err)
                                           : mu_topology_file_parse("f", format, text, length, &t, &err);
        if (status == MU_OK && t)
            status = mu_topology_finish(t, &err);
        mu_topology_free(t);
        assert_true(status == MU_OK || (err.text[0] && !strchr(err.text, '\n')));
        ++*(status == MU_OK ? &read : &not_read);
    }
    assert_true(read > 200 && not_read > 200);
}

static void test_names_sort_by_value(void **state)
{
    (void)state;
    static const char *const sorted[] = {"a", "n01", "n1", "n2", "n10", "n10a", "n10b", "n11", "o", "r1n9", "r1n10"};
    enum { COUNT = sizeof sorted / sizeof sorted[0] };
    for (size_t i = 0; i < COUNT; i++)
        for (size_t k = 0; k < COUNT; k++) {
            int order = mu_topology_compare_names(sorted[i], sorted[k]);
            assert_true(i == k ? order == 0 : (order < 0) == (i < k));
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slurm_tree_with_ranges_comments_and_joined_lines),
        cmocka_unit_test(test_slurm_blocks_are_joined_by_their_sizes),
        cmocka_unit_test(test_slurm_yaml_reads_the_default_topology),
        cmocka_unit_test(test_topograph_layers_and_domains),
        cmocka_unit_test(test_nccl_xml_of_a_node),
        cmocka_unit_test(test_node_file_refusals),
        cmocka_unit_test(test_hwloc_xml_of_a_node),
        cmocka_unit_test(test_contradictions_are_refused_with_their_line),
        cmocka_unit_test(test_absent_unknown_and_disjoint_are_said),
        cmocka_unit_test(test_cluster_file_takes_its_files),
        cmocka_unit_test(test_mutated_files_are_read_or_refused),
        cmocka_unit_test(test_names_sort_by_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
