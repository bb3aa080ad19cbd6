#include "bench/attach_musterd.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"

enum { START_LIMIT_US = 60 * 1000000, CALL_LIMIT_MS = 30000, LOOK_NS = 1000000 };

/* One that is free now. */
static enum mu_status choose_http(struct musterd *musterd, struct mu_error *err)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&address, size) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &size) != 0)
        return mu_fail_errno(err, errno, "no free port");
    close(fd);
    snprintf(musterd->http, sizeof musterd->http, "127.0.0.1:%u", ntohs(address.sin_port));
    return MU_OK;
}

enum mu_status musterd_make_dir(struct musterd *musterd, struct mu_error *err)
{
    const char *parent = getenv("TMPDIR");
    enum mu_status status = choose_http(musterd, err);
    if (status)
        return status;
    snprintf(musterd->dir, sizeof musterd->dir, "%s/muster-bench-XXXXXX", parent ? parent : "/tmp");
    mu_wire_arena_init(&musterd->arena);
    if (mkdtemp(musterd->dir))
        return MU_OK;
    musterd->dir[0] = 0;
    return mu_fail_errno(err, errno, "cannot make a temporary directory");
}

/* ---- the process ---- */

static void exec_musterd(const struct musterd *musterd, const char *address_file)
{
    char store[300], log[300], workers[16], heartbeat[16];
    snprintf(store, sizeof store, "%s/store", musterd->dir);
    snprintf(log, sizeof log, "%s/musterd.log", musterd->dir);
    snprintf(workers, sizeof workers, "%u", musterd->max_workers);
    snprintf(heartbeat, sizeof heartbeat, "%u", musterd->heartbeat_ms ? musterd->heartbeat_ms : 1000);
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0 || dup2(fd, STDERR_FILENO) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        _exit(127);
    execl(musterd->program, musterd->program, "--data-dir", store, "--listen",
          musterd->address[0] ? musterd->address : "127.0.0.1:0", "--address-file", address_file, "--max-workers",
          workers, "--http", musterd->http, "--connections-per-host", "0", "--heartbeat-ms", heartbeat, "--log-level",
          "warn", (char *)NULL);
    fprintf(stderr, "cannot run '%s': %s\n", musterd->program, strerror(errno));
    _exit(127);
}

static bool read_line(const char *path, char *line, size_t size)
{
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    bool got = fgets(line, (int)size, file) != NULL;
    fclose(file);
    line[got ? strcspn(line, "\n") : 0] = 0;
    return got;
}

static enum mu_status await_address(struct musterd *musterd, const char *path, struct mu_error *err)
{
    uint64_t until_us = mu_clock_mono_us() + START_LIMIT_US;
    while (!read_line(path, musterd->address, sizeof musterd->address)) {
        int status;
        if (waitpid(musterd->pid, &status, WNOHANG) == musterd->pid) {
            musterd->pid = 0;
            return mu_fail(err, MU_ERR_UNAVAILABLE, "musterd ended at once (see %s/musterd.log)", musterd->dir);
        }
        if (mu_clock_mono_us() > until_us)
            return mu_fail(err, MU_ERR_TIMEOUT, "musterd does not serve within %d s", START_LIMIT_US / 1000000);
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    return MU_OK;
}

static enum mu_status open_client(struct musterd *musterd, struct mu_error *err)
{
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.address = musterd->address;
    if (musterd->client)
        return MU_OK;
    enum mu_status status = musterd->pool ? MU_OK : mu_rpc_pool_new(1, err, &musterd->pool);
    return status ? status : mu_rpc_client_new(musterd->pool, &config, err, &musterd->client);
}

enum mu_status musterd_start(struct musterd *musterd, struct mu_error *err)
{
    char address_file[300];
    snprintf(address_file, sizeof address_file, "%s/address", musterd->dir);
    unlink(address_file);
    musterd->pid = fork();
    if (musterd->pid == 0)
        exec_musterd(musterd, address_file);
    if (musterd->pid < 0) {
        musterd->pid = 0;
        return mu_fail_errno(err, errno, "cannot start a process");
    }
    enum mu_status status = await_address(musterd, address_file, err);
    return status ? status : open_client(musterd, err);
}

void musterd_kill(struct musterd *musterd)
{
    if (musterd->pid == 0)
        return;
    kill(musterd->pid, SIGKILL);
    while (waitpid(musterd->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    musterd->pid = 0;
}

void musterd_show_log(const struct musterd *musterd, int lines)
{
    enum { TAIL_BYTES = 8192 };
    char path[300], tail[TAIL_BYTES + 1];
    snprintf(path, sizeof path, "%s/musterd.log", musterd->dir);
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    if (fseek(file, -TAIL_BYTES, SEEK_END) != 0)
        rewind(file);
    tail[fread(tail, 1, TAIL_BYTES, file)] = 0;
    fclose(file);
    const char *from = tail + strlen(tail);
    for (int ends = 0; from > tail; from--) {
        ends += from[-1] == '\n';
        if (ends > lines)
            break;
    }
    fprintf(stderr, "%s", from);
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *at)
{
    (void)status;
    (void)kind;
    (void)at;
    return remove(path);
}

void musterd_end(struct musterd *musterd)
{
    musterd_kill(musterd);
    mu_rpc_client_free(musterd->client);
    mu_rpc_pool_free(musterd->pool);
    mu_wire_arena_fini(&musterd->arena);
    musterd->client = NULL;
    musterd->pool = NULL;
    if (musterd->dir[0])
        nftw(musterd->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    musterd->dir[0] = musterd->address[0] = 0;
}

/* ---- what it costs ---- */

double musterd_cpu_s(const struct musterd *musterd)
{
    char path[64], text[1024];
    unsigned long long user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)musterd->pid);
    if (!read_line(path, text, sizeof text))
        return 0;
    const char *rest = strrchr(text, ')'); /* the name may contain anything; fields 14 and 15 follow it */
    if (!rest || sscanf(rest + 1, "%*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu %llu", &user, &system) != 2)
        return 0;
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

uint64_t musterd_rss_bytes(const struct musterd *musterd)
{
    char path[64], text[256];
    unsigned long long pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)musterd->pid);
    if (!read_line(path, text, sizeof text) || sscanf(text, "%*s %llu", &pages) != 1)
        return 0;
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- its service ---- */

static enum mu_status call(struct musterd *musterd, const char *method, const ProtobufCMessage *request,
                           const ProtobufCMessageDescriptor *reply_type, const ProtobufCMessage **ret_reply,
                           struct mu_error *err)
{
    const void *data;
    size_t size_bytes;
    struct mu_rpc_bytes *bytes = NULL, *reply = NULL;
    enum mu_status status = mu_wire_pack(&musterd->arena, request, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err);
    if (status == MU_OK) {
        bytes = mu_rpc_bytes_copy(data, size_bytes);
        status = mu_rpc_client_call(musterd->client, method, bytes, CALL_LIMIT_MS, err, &reply);
    }
    if (status == MU_OK)
        status = mu_wire_unpack(&musterd->arena, reply_type, mu_rpc_bytes_data(reply), mu_rpc_bytes_size(reply),
                                MU_WIRE_REPLY_BYTES_MAX, ret_reply, err);
    mu_rpc_bytes_unref(bytes);
    mu_rpc_bytes_unref(reply);
    return status;
}

static enum mu_status read_reply(int fd, size_t *ret_bytes, struct mu_error *err)
{
    char buffer[65536];
    ssize_t got;
    for (*ret_bytes = 0; (got = read(fd, buffer, sizeof buffer)) > 0; *ret_bytes += (size_t)got) {
        if (*ret_bytes == 0 && strncmp(buffer, "HTTP/1.1 200", 12) != 0)
            return mu_fail(err, MU_ERR_UNAVAILABLE, "/metrics: %.40s", buffer);
    }
    return got == 0 ? MU_OK : mu_fail_errno(err, errno, "/metrics");
}

enum mu_status musterd_scrape(const struct musterd *musterd, double *ret_seconds, size_t *ret_bytes,
                              struct mu_error *err)
{
    static const char request[] = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)atoi(strrchr(musterd->http, ':') + 1));
    uint64_t begin_us = mu_clock_mono_us();
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&to, sizeof to) != 0 ||
        write(fd, request, sizeof request - 1) != (ssize_t)sizeof request - 1) {
        enum mu_status status = mu_fail_errno(err, errno, "cannot ask for /metrics");
        if (fd >= 0)
            close(fd);
        return status;
    }
    enum mu_status status = read_reply(fd, ret_bytes, err);
    close(fd);
    *ret_seconds = (double)(mu_clock_mono_us() - begin_us) * 1e-6;
    return status;
}

enum mu_status musterd_submit(struct musterd *musterd, const struct mu_job_spec *spec, struct mu_error *err)
{
    Muster__V1__SubmitJobRequest request = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    const ProtobufCMessage *reply;
    mu_wire_arena_reset(&musterd->arena);
    enum mu_status status = mu_wire_spec_to_pb(&musterd->arena, spec, &request.spec, err);
    return status ? status
                  : call(musterd, "/muster.v1.MusterService/SubmitJob", &request.base,
                         &muster__v1__submit_job_response__descriptor, &reply, err);
}

enum mu_status musterd_get_job(struct musterd *musterd, const char *name, const Muster__V1__Job **ret_job,
                               struct mu_error *err)
{
    Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
    const ProtobufCMessage *reply;
    mu_wire_arena_reset(&musterd->arena);
    request.name = (char *)(uintptr_t)name;
    enum mu_status status = call(musterd, "/muster.v1.MusterService/GetJob", &request.base,
                                 &muster__v1__get_job_response__descriptor, &reply, err);
    if (status == MU_OK)
        *ret_job = ((const Muster__V1__GetJobResponse *)reply)->job;
    return status;
}
