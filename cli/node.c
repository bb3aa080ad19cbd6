/* `muster node`: hosts, as an operator sees them. */
#include "cli/cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

enum { DEADLINE_MAX_S = 30 * 24 * 3600 };

/* "90", "30m", "2h": seconds. */
static bool parse_duration(const char *text, uint32_t *ret_s)
{
    static const struct {
        const char *unit;
        uint32_t seconds;
    } units[] = {{"", 1}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}};
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(end, units[i].unit) != 0 || text[0] < '0' || text[0] > '9' || errno || value == 0 ||
            value > DEADLINE_MAX_S / units[i].seconds)
            continue;
        *ret_s = (uint32_t)value * units[i].seconds;
        return true;
    }
    return false;
}

static int order(struct mu_cli *cli, const char *verb, Muster__V1__NodeOrder order, int argc, char **argv)
{
    const char *reason = "", *deadline = NULL, *revision = NULL;
    char by[192];
    bool wants_reason = order != MUSTER__V1__NODE_ORDER__NODE_ORDER_RESUME;
    bool is_drain = order == MUSTER__V1__NODE_ORDER__NODE_ORDER_DRAIN;
    const struct mu_cli_option options[] = {
        {"--expected-revision", &revision, NULL}, {"--reason", &reason, NULL}, {"--deadline", &deadline, NULL}};
    Muster__V1__OrderNodeRequest request = MUSTER__V1__ORDER_NODE_REQUEST__INIT;
    if (mu_cli_parse(verb, argc, argv, options, 1 + wants_reason + is_drain, 1, 1) < 0 ||
        (revision && !mu_cli_number(verb, "--expected-revision", revision, 0, INT64_MAX, &request.expected_revision)))
        return MU_EXIT_USAGE;
    if (wants_reason && !reason[0])
        return mu_cli_usage(verb, "--reason TEXT is required: whoever finds the node so wants to know why");
    if (deadline && !parse_duration(deadline, &request.deadline_s))
        return mu_cli_usage(verb, "--deadline '%s' is not allowed: seconds, or as in 30m, 2h, 1d; at most 30d",
                            deadline);
    mu_cli_whoami(by, sizeof by);
    if (revision)
        request.optional_expected_revision_case =
            MUSTER__V1__ORDER_NODE_REQUEST__OPTIONAL_EXPECTED_REVISION_EXPECTED_REVISION;
    request.node = argv[0];
    request.order = order;
    request.reason = (char *)(uintptr_t)reason;
    request.by = by;
    const Muster__V1__OrderNodeResponse *reply;
    int code = mu_cli_change_or_exit(cli, "OrderNode", &request.base, &request.request_id,
                                     &muster__v1__order_node_response__descriptor, &reply);
    if (code == MU_EXIT_OK && cli->json)
        mu_cli_print_json(&reply->base, false);
    else if (code == MU_EXIT_OK && !wants_reason)
        printf("node %s may work again\n", argv[0]);
    else if (code == MU_EXIT_OK)
        printf("node %s is %s; it is taken back by: muster node resume %s\n", argv[0],
               is_drain ? "being drained" : "cordoned", argv[0]);
    return code;
}

/* Calls `each` for every node; `each` returns false to stop. */
static int for_each(struct mu_cli *cli, bool (*each)(void *arg, const Muster__V1__Node *node), void *arg)
{
    Muster__V1__ListNodesRequest request = MUSTER__V1__LIST_NODES_REQUEST__INIT;
    request.page_size = 1000;
    do {
        const Muster__V1__ListNodesResponse *reply;
        int code =
            mu_cli_call_or_exit(cli, "ListNodes", &request, &muster__v1__list_nodes_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            return code;
        for (size_t i = 0; i < reply->n_nodes; i++)
            if (!each(arg, reply->nodes[i]))
                return MU_EXIT_OK;
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    return MU_EXIT_OK;
}

static const char *state_of(const Muster__V1__Node *node, char out[48])
{
    snprintf(out, 48, "%s%s", mu_cli_enum(&muster__v1__node_state__descriptor, (int)node->state),
             node->cordoned ? ", cordoned" : "");
    return out;
}

struct listing {
    struct mu_cli *cli;
    struct mu_cli_table *table;
};

static bool list_one(void *arg, const Muster__V1__Node *node)
{
    struct listing *listing = arg;
    char state[48], age[16] = "-";
    if (listing->cli->json) {
        mu_cli_print_json(&node->base, true);
        return true;
    }
    if (node->since_wall_us)
        mu_cli_age(node->since_wall_us, age);
    mu_cli_table_add(listing->table, "%s", node->name);
    mu_cli_table_add(listing->table, "%s", state_of(node, state));
    mu_cli_table_add(listing->table, "%u", node->workers);
    mu_cli_table_add(listing->table, "%u", node->busy);
    mu_cli_table_add(listing->table, "%s", age);
    mu_cli_table_add(listing->table, "%s", node->by[0] ? node->by : "-");
    mu_cli_table_add(listing->table, "%s", node->reason);
    return true;
}

static int list(struct mu_cli *cli, int argc, char **argv)
{
    static const char *const heading[] = {"NODE", "STATE", "WORKERS", "BUSY", "SINCE", "BY", "REASON"};
    enum { COLUMNS = sizeof heading / sizeof heading[0] };
    struct listing listing = {.cli = cli};
    if (mu_cli_parse("node ls", argc, argv, NULL, 0, 0, 0) < 0)
        return MU_EXIT_USAGE;
    listing.table = cli->json ? NULL : mu_cli_table_new(COLUMNS);
    for (int i = 0; i < COLUMNS && listing.table; i++)
        mu_cli_table_add(listing.table, "%s", heading[i]);
    int code = for_each(cli, list_one, &listing);
    mu_cli_table_end(listing.table, code);
    return code;
}

struct search {
    const char *name;
    const Muster__V1__Node *found; /* in the arena of the command */
};

static bool find_one(void *arg, const Muster__V1__Node *node)
{
    struct search *search = arg;
    if (strcmp(node->name, search->name) == 0)
        search->found = node;
    return !search->found;
}

static void print_node(const Muster__V1__Node *node)
{
    char state[48], when[32];
    printf("node         %s\nstate        %s\nworkers      %u, %u of them busy, %u quarantined\n", node->name,
           state_of(node, state), node->workers, node->busy, node->quarantined);
    if (node->reason[0])
        printf("reason       %s\n", node->reason);
    if (node->since_wall_us) {
        mu_clock_format(node->since_wall_us, when);
        printf("ordered      %s by %s (revision %" PRIu64 ")\n", when, node->by, node->revision);
    }
    if (node->deadline_wall_us) {
        mu_clock_format(node->deadline_wall_us, when);
        printf("deadline     %s\n", when);
    }
}

static int describe(struct mu_cli *cli, int argc, char **argv)
{
    struct search search = {0};
    if (mu_cli_parse("node describe", argc, argv, NULL, 0, 1, 1) < 0)
        return MU_EXIT_USAGE;
    search.name = argv[0];
    int code = for_each(cli, find_one, &search);
    if (code != MU_EXIT_OK)
        return code;
    if (!search.found) {
        fprintf(stderr, "muster: there is no node '%s' (see: muster node ls)\n", argv[0]);
        return MU_EXIT_NOT_FOUND;
    }
    if (cli->json) {
        mu_cli_print_json(&search.found->base, false);
        return MU_EXIT_OK;
    }
    print_node(search.found);
    return mu_cli_print_workers(cli, "", argv[0]);
}

int mu_cmd_node(struct mu_cli *cli, int argc, char **argv)
{
    static const struct {
        const char *verb;
        Muster__V1__NodeOrder order;
    } orders[] = {{"cordon", MUSTER__V1__NODE_ORDER__NODE_ORDER_CORDON},
                  {"drain", MUSTER__V1__NODE_ORDER__NODE_ORDER_DRAIN},
                  {"uncordon", MUSTER__V1__NODE_ORDER__NODE_ORDER_RESUME},
                  {"resume", MUSTER__V1__NODE_ORDER__NODE_ORDER_RESUME}};
    if (argc < 1)
        return mu_cli_usage("node", "which verb? ls, describe, cordon, uncordon, drain or resume");
    if (strcmp(argv[0], "ls") == 0)
        return list(cli, argc - 1, argv + 1);
    if (strcmp(argv[0], "describe") == 0)
        return describe(cli, argc - 1, argv + 1);
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        char command[32];
        snprintf(command, sizeof command, "node %s", orders[i].verb);
        if (strcmp(argv[0], orders[i].verb) == 0)
            return order(cli, command, orders[i].order, argc - 1, argv + 1);
    }
    return mu_cli_usage("node", "'%s' is not a verb: ls, describe, cordon, uncordon, drain or resume", argv[0]);
}
