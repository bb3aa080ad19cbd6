/* The command line: what its commands share. One thread, except that `watch` reads events on a second one.
 *
 * Exit codes are part of the interface: scripts depend on them. */
#ifndef MU_CLI_CLI_H
#define MU_CLI_CLI_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/wire_pb.h"
#include "rpc/client.h"

enum mu_cli_exit {
    MU_EXIT_OK = 0,
    MU_EXIT_FAILURE = 1,
    MU_EXIT_USAGE = 2,
    MU_EXIT_CONNECT = 3,
    MU_EXIT_NOT_FOUND = 4,
    MU_EXIT_CONFLICT = 5, /* it exists already, or the state does not permit it now */
    MU_EXIT_REFUSED = 6,  /* a limit, a full disk or missing permission on the coordinator's side */
};
int mu_cli_exit_of(enum mu_status status);

struct mu_cli {
    const char *address;
    bool is_named; /* the coordinator's address was given, it is not the usual one */
    struct mu_rpc_tls_files tls;
    bool json;
    unsigned timeout_ms;
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct mu_wire_arena arena; /* replies live here until the command ends */
};

/* Connects lazily; errors are printed as one line "muster: ..." and turned into an exit code. */
int mu_cli_open(struct mu_cli *cli);
void mu_cli_close(struct mu_cli *cli);

/* "/muster.v1.MusterService/<method>", or "/muster.v1.<Service>/<method>". `ret_reply` is unpacked into cli->arena. */
enum mu_status mu_cli_call(struct mu_cli *cli, const char *method, const void *request,
                           const ProtobufCMessageDescriptor *reply_type, const ProtobufCMessage **ret_reply,
                           struct mu_error *err) MU_WARN_UNUSED;
/* The same, printing the error: MU_EXIT_OK or the exit code. */
int mu_cli_call_or_exit(struct mu_cli *cli, const char *method, const void *request,
                        const ProtobufCMessageDescriptor *reply_type, const void *ret_reply_pointer);
/* The same for a request that changes something: draws its id, and asks again, with the same id, when the answer was
 * lost on the way or the coordinator is stopping. One that cannot be reached at all is given up at once. */
int mu_cli_change_or_exit(struct mu_cli *cli, const char *method, const void *request, ProtobufCBinaryData *request_id,
                          const ProtobufCMessageDescriptor *reply_type, const void *ret_reply_pointer);
enum mu_status mu_cli_watch_events(struct mu_cli *cli, const Muster__V1__WatchEventsRequest *request,
                                   struct mu_rpc_reader **ret_reader, struct mu_error *err) MU_WARN_UNUSED;
int mu_cli_fail(const struct mu_error *err);
/* The same for an answer of the coordinator; with -o json as an object. */
int mu_cli_refused(const struct mu_cli *cli, const struct mu_error *err);
int mu_cli_usage(const char *command, const char *fmt, ...) MU_PRINTF(2, 3);

/* Options of one command: `--name VALUE`, `--name=VALUE`, flags, and positional words. */
struct mu_cli_option {
    const char *name;   /* with its dashes, e.g. "--job" */
    const char **value; /* takes a value */
    bool *flag;         /* or is a flag */
};
/* Returns the number of positional words (moved to the front of argv), or -1 after a usage error was printed. */
int mu_cli_parse(const char *command, int argc, char **argv, const struct mu_cli_option *options, int option_count,
                 int least, int most);
bool mu_cli_number(const char *command, const char *option, const char *text, uint64_t least, uint64_t most,
                   uint64_t *ret_value);
/* "90d", "12h", "30m", "5s" */
bool mu_cli_duration(const char *command, const char *option, const char *text, uint32_t most_s, uint32_t *ret_seconds);

/* Who sits here; a certificate's identity takes its place where there are certificates. */
void mu_cli_whoami(char *out, size_t size);

/* show.c */
void mu_cli_print_json(const ProtobufCMessage *message, bool one_line);
/* Columns separated by two spaces, as wide as their widest cell. cells[row * columns + column]; row 0 is the heading.
 */
struct mu_cli_table;
struct mu_cli_table *mu_cli_table_new(int columns);
void mu_cli_table_add(struct mu_cli_table *table, const char *fmt, ...) MU_PRINTF(2, 3); /* the next cell */
void mu_cli_table_print_free(struct mu_cli_table *table);
void mu_cli_table_end(struct mu_cli_table *table,
                      int code); /* prints it when code is MU_EXIT_OK; frees it; NULL is fine */
void mu_cli_bytes(uint64_t bytes, char out[16]);
void mu_cli_count(double value, char out[16]); /* 1234567 -> "1.23M" */
void mu_cli_age(uint64_t wall_us, char out[16]);
enum { MU_CLI_LAYOUT_SIZE = 64 };
/* "tp2 pp2 dp1", "dp3" when nothing else is split, with "sharded", "buddies" and "+1 idle"; "-": none. */
void mu_cli_layout(const Muster__V1__Layout *layout, char out[MU_CLI_LAYOUT_SIZE]);
const char *mu_cli_enum(const ProtobufCEnumDescriptor *descriptor, int value); /* "JOB_STATE_RUNNING" -> "running" */

/* commands.c: the table of workers, of one job ("": of all) and of one host (NULL: of all). */
int mu_cli_print_workers(struct mu_cli *cli, const char *job, const char *host);

/* Commands: words after the command's name; return the exit code. */
int mu_cmd_submit(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_status(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_workers(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_events(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_checkpoint(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_checkpoints(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_timings(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_describe(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_top(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_report(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_diagnose(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_trace(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_logs(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_debug(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_drain(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_undrain(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_catalog(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_snapshot(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_scale(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_job(struct mu_cli *cli, int argc, char **argv);
void mu_cli_print_amendments(const Muster__V1__JobSpec *spec);
int mu_cmd_cancel(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_watch(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_up(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_generate(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_export(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_import(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_cert(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_token(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_node(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_launch(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_plan(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_probe(struct mu_cli *cli, int argc, char **argv);
int mu_cmd_simulate(struct mu_cli *cli, int argc, char **argv);

/* watch.c: follows a job until it is over; survives restarts of the coordinator. `stop` (may be NULL) ends it early. */
int mu_cli_follow(struct mu_cli *cli, const char *job, uint64_t after_event, const atomic_bool *stop);

#endif
