/* muster token: join tokens, with which workers that have no certificate get one; tokens for reading over HTTP. */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "common/clock.h"
#include "muster/v1/token.pb-c.h"

enum { VALID_MOST_S = 366 * 86400 };

/* The token alone, so that it can be written into a file: it is never told again. */
static int create(struct mu_cli *cli, char *role, char *worker, const char *valid, bool is_reusable)
{
    Muster__V1__CreateTokenRequest request = MUSTER__V1__CREATE_TOKEN_REQUEST__INIT;
    Muster__V1__CreateTokenResponse *reply;
    request.worker = worker ? worker : request.worker;
    request.role = role ? role : request.role;
    request.reusable = is_reusable;
    bool reads = strcmp(request.role, "viewer") == 0;
    if (role && !reads && strcmp(role, "worker") != 0)
        return mu_cli_usage("token", "--role: value '%s' is not allowed: worker or viewer", role);
    if (!mu_cli_duration("token", "--valid", valid ? valid : reads ? "30d" : "1h", VALID_MOST_S, &request.valid_s))
        return MU_EXIT_USAGE;
    int code = mu_cli_call_or_exit(cli, "TokenService/CreateToken", &request,
                                   &muster__v1__create_token_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json)
        mu_cli_print_json(&reply->base, false);
    else
        printf("%s\n", reply->token);
    return MU_EXIT_OK;
}

static void add_row(struct mu_cli_table *table, const Muster__V1__Token *token)
{
    char made[16], used[16] = "-";
    uint64_t left_s = token->expires_wall_us / 1000000;
    uint64_t now_s = mu_clock_wall_us() / 1000000;
    left_s = left_s > now_s ? left_s - now_s : 0;
    mu_cli_age(token->created_wall_us, made);
    if (token->used_count)
        mu_cli_age(token->used_wall_us, used);
    mu_cli_table_add(table, "%s", token->id);
    mu_cli_table_add(table, "%s", token->role[0] ? token->role : "worker");
    mu_cli_table_add(table, "%s", strcmp(token->role, "viewer") == 0 ? "-" : token->worker[0] ? token->worker : "any");
    mu_cli_table_add(table, "%s", token->reusable ? "many" : "one");
    mu_cli_table_add(table, "%s", made);
    mu_cli_table_add(table, "%lluh%02llum", (unsigned long long)(left_s / 3600),
                     (unsigned long long)(left_s / 60 % 60));
    mu_cli_table_add(table, "%u", token->used_count);
    mu_cli_table_add(table, "%s", used);
    mu_cli_table_add(table, "%s", token->used_by[0] ? token->used_by : "-");
    mu_cli_table_add(table, "%s", token->created_by);
}

static int list(struct mu_cli *cli)
{
    static const char *const heads[] = {"ID",   "ROLE", "FOR",  "USES",      "MADE",
                                        "LEFT", "USED", "LAST", "BY WORKER", "MADE BY"};
    enum { COLUMNS = sizeof heads / sizeof heads[0] };
    Muster__V1__ListTokensRequest request = MUSTER__V1__LIST_TOKENS_REQUEST__INIT;
    Muster__V1__ListTokensResponse *reply;
    int code = mu_cli_call_or_exit(cli, "TokenService/ListTokens", &request,
                                   &muster__v1__list_tokens_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json) {
        mu_cli_print_json(&reply->base, false);
        return MU_EXIT_OK;
    }
    struct mu_cli_table *table = mu_cli_table_new(COLUMNS);
    for (int i = 0; i < COLUMNS; i++)
        mu_cli_table_add(table, "%s", heads[i]);
    for (size_t i = 0; i < reply->n_tokens; i++)
        add_row(table, reply->tokens[i]);
    mu_cli_table_print_free(table);
    return MU_EXIT_OK;
}

static int revoke(struct mu_cli *cli, char *id)
{
    Muster__V1__RevokeTokenRequest request = MUSTER__V1__REVOKE_TOKEN_REQUEST__INIT;
    Muster__V1__RevokeTokenResponse *reply;
    request.id = id;
    return mu_cli_call_or_exit(cli, "TokenService/RevokeToken", &request,
                               &muster__v1__revoke_token_response__descriptor, &reply);
}

int mu_cmd_token(struct mu_cli *cli, int argc, char **argv)
{
    const char *role = NULL, *worker = NULL, *valid = NULL;
    bool is_reusable = false;
    struct mu_cli_option options[] = {{"--role", &role, NULL},
                                      {"--worker", &worker, NULL},
                                      {"--valid", &valid, NULL},
                                      {"--reusable", NULL, &is_reusable}};
    int words = mu_cli_parse("token", argc, argv, options, 4, 1, 2);
    if (words < 0)
        return MU_EXIT_USAGE;
    bool has_options = role || worker || valid || is_reusable;
    if (strcmp(argv[0], "create") == 0 && words == 1)
        return create(cli, (char *)(uintptr_t)role, (char *)(uintptr_t)worker, valid, is_reusable);
    if (strcmp(argv[0], "ls") == 0 && words == 1 && !has_options)
        return list(cli);
    if (strcmp(argv[0], "revoke") == 0 && words == 2 && !has_options)
        return revoke(cli, argv[1]);
    return mu_cli_usage(
        "token", "'create', 'ls' or 'revoke ID' is allowed; --role, --worker, --valid, --reusable go with create");
}
