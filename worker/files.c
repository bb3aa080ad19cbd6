#include "worker/files.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "common/fault.h"
#include "common/hash.h"
#include "common/log.h"
#include "storage/catalog.h"
#include "storage/manifest.h"
#include "worker/secure.h"

enum { NONCE_BYTES = 32, MAC_BYTES = 32, POLL_MS = 100 };
static const char TLS_WORD[] = "tls:";

struct request {
    char magic[8];
    char directory[MU_CATALOG_NAME_SIZE], file[MU_PIECE_FILE_SIZE]; /* padded with zeros */
    uint8_t mac[MAC_BYTES];
};
static const char MAGIC[8] = "MUFILE1";

struct answer {
    uint64_t status, size_bytes; /* as this machine writes them: both sides are of one build */
};

/* One side of a connection. */
struct wire {
    int fd;
    struct mu_secure *secure; /* NULL: in the clear */
    const atomic_bool *abort; /* NULL: nobody breaks it off */
};

struct served {
    struct mu_files *files;
    int fd; /* -1: free */
    uint32_t index;
};

struct mu_files {
    char root[MU_PATH_SIZE], address[MU_ADDRESS_SIZE];
    uint8_t secret[32];
    bool encrypted;
    int listener, stop_fd;
    pthread_t acceptor;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct served served[MU_FILES_CONNECTIONS_MAX]; /* under lock */
    uint32_t served_count;
};

/* ---- both sides ---- */

static void sign(const uint8_t *secret, const uint8_t nonce[NONCE_BYTES], const struct request *request,
                 uint8_t out[MAC_BYTES])
{
    struct {
        uint8_t nonce[NONCE_BYTES];
        char directory[sizeof request->directory], file[sizeof request->file];
    } text;
    memcpy(text.nonce, nonce, NONCE_BYTES);
    memcpy(text.directory, request->directory, sizeof text.directory);
    memcpy(text.file, request->file, sizeof text.file);
    mu_hmac_sha256(secret, 32, &text, sizeof text, out);
}

static bool same_mac(const uint8_t *a, const uint8_t *b)
{
    uint8_t differ = 0;
    for (int i = 0; i < MAC_BYTES; i++)
        differ |= a[i] ^ b[i];
    return differ == 0;
}

/* Waits until the socket is ready; false: silent for too long, or aborted. */
static bool await_socket(int fd, short events, const atomic_bool *abort)
{
    for (int waited_ms = 0; waited_ms < MU_FILES_SILENCE_MS; waited_ms += POLL_MS) {
        struct pollfd poll_fd = {.fd = fd, .events = events};
        if (abort && atomic_load(abort))
            return false;
        int ready = poll(&poll_fd, 1, POLL_MS);
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR)
            return false;
    }
    errno = ETIMEDOUT;
    return false;
}

static bool await(const struct wire *wire, short events)
{
    return await_socket(wire->fd, events, wire->abort);
}

static bool send_all(const struct wire *wire, const void *data, size_t size_bytes)
{
    struct iovec rest = {(void *)(uintptr_t)data, size_bytes};
    while (rest.iov_len > 0) {
        ssize_t sent = wire->secure ? mu_secure_send(wire->secure, &rest, 1)
                                    : send(wire->fd, rest.iov_base, rest.iov_len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            rest.iov_base = (char *)rest.iov_base + sent;
            rest.iov_len -= (size_t)sent;
        } else if ((errno != EAGAIN && errno != EINTR) || !await(wire, POLLOUT)) {
            return false;
        }
    }
    return true;
}

/* Exactly size_bytes; false: broken off (errno 0 when the other side closed). */
static bool receive_all(const struct wire *wire, void *data, size_t size_bytes)
{
    struct iovec rest = {data, size_bytes};
    while (rest.iov_len > 0) {
        ssize_t got = wire->secure ? mu_secure_receive(wire->secure, &rest, 1)
                                   : recv(wire->fd, rest.iov_base, rest.iov_len, MSG_DONTWAIT);
        if (got > 0) {
            rest.iov_base = (char *)rest.iov_base + got;
            rest.iov_len -= (size_t)got;
        } else if (got == 0) {
            errno = 0;
            return false;
        } else if ((errno != EAGAIN && errno != EINTR) || !await(wire, POLLIN)) {
            return false;
        }
    }
    return true;
}

/* The hand-shake of TLS. False: errno says why. */
static bool secure(struct wire *wire, bool accepts, const uint8_t *secret)
{
    uint8_t key[MU_SECURE_KEY_SIZE];
    mu_hmac_sha256(secret, 32, "MUFILE1 tls", strlen("MUFILE1 tls"), key);
    wire->secure = mu_secure_new(wire->fd, accepts, key);
    explicit_bzero(key, sizeof key);
    int reason = wire->secure ? EAGAIN : ENOMEM;
    bool is_patient = true;
    while (reason == EAGAIN && is_patient && (reason = mu_secure_shake(wire->secure)) == EAGAIN)
        is_patient = await(wire, POLLIN); /* a hand-shake's messages always find room */
    errno = is_patient ? reason : errno;
    return is_patient && reason == 0;
}

/* ---- the service ---- */

static bool allowed(const struct request *request)
{
    uint64_t seq, step;
    struct mu_id nonce;
    bool ended =
        memchr(request->directory, 0, sizeof request->directory) && memchr(request->file, 0, sizeof request->file);
    return ended && mu_catalog_parse_name(request->directory, &seq, &step, &nonce) &&
           (strcmp(request->file, MU_MANIFEST_FILE) == 0 || mu_piece_file_name_is_valid(request->file));
}

static bool send_file_encrypted(const struct wire *wire, int file, uint64_t size_bytes)
{
    char *block = malloc(MU_FILES_BLOCK_BYTES);
    bool ok = block != NULL;
    while (ok && size_bytes > 0) {
        MU_FAULT("worker.files.send");
        ssize_t got = read(file, block, size_bytes < MU_FILES_BLOCK_BYTES ? (size_t)size_bytes : MU_FILES_BLOCK_BYTES);
        ok = got > 0 && send_all(wire, block, (size_t)got); /* 0: it became shorter */
        size_bytes -= got > 0 ? (uint64_t)got : 0;
    }
    free(block);
    return ok;
}

static bool send_file(const struct wire *wire, int file, uint64_t size_bytes)
{
    off_t offset = 0;
    if (wire->secure)
        return send_file_encrypted(wire, file, size_bytes);
    while ((uint64_t)offset < size_bytes) {
        uint64_t left = size_bytes - (uint64_t)offset;
        MU_FAULT("worker.files.send");
        ssize_t sent =
            sendfile(wire->fd, file, &offset, left < MU_FILES_BLOCK_BYTES ? (size_t)left : MU_FILES_BLOCK_BYTES);
        if (sent == 0)
            return false; /* it became shorter */
        if (sent < 0 && ((errno != EAGAIN && errno != EINTR) || !await(wire, POLLOUT)))
            return false;
    }
    return true;
}

static void serve(const struct mu_files *files, const struct wire *wire)
{
    uint8_t nonce[NONCE_BYTES], mac[MAC_BYTES];
    struct request request;
    struct answer answer = {.status = MU_ERR_DENIED};
    char path[MU_PATH_SIZE + sizeof request.directory + sizeof request.file + 2];
    struct stat st;
    int file = -1;
    if (getrandom(nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce || !send_all(wire, nonce, sizeof nonce) ||
        !receive_all(wire, &request, sizeof request))
        return;
    sign(files->secret, nonce, &request, mac);
    if (memcmp(request.magic, MAGIC, sizeof MAGIC) == 0 && same_mac(mac, request.mac) && allowed(&request)) {
        snprintf(path, sizeof path, "%s/%s/%s", files->root, request.directory, request.file);
        file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        answer.status = file < 0 ? (errno == ENOENT || errno == ENOTDIR ? MU_ERR_NOT_FOUND : MU_ERR_IO) : MU_OK;
        if (file >= 0 && (fstat(file, &st) != 0 || !S_ISREG(st.st_mode)))
            answer.status = MU_ERR_IO;
        if (answer.status == MU_OK)
            answer.size_bytes = (uint64_t)st.st_size;
    }
    if (send_all(wire, &answer, sizeof answer) && answer.status == MU_OK)
        send_file(wire, file, answer.size_bytes);
    if (file >= 0)
        close(file);
}

static void *serve_thread(void *arg)
{
    struct served *served = arg;
    struct mu_files *files = served->files;
    struct wire wire = {.fd = served->fd};
    if (!files->encrypted || secure(&wire, true, files->secret))
        serve(files, &wire);
    mu_secure_free(wire.secure);
    pthread_mutex_lock(&files->lock);
    close(served->fd);
    served->fd = -1;
    if (--files->served_count == 0)
        pthread_cond_signal(&files->idle);
    pthread_mutex_unlock(&files->lock);
    return NULL;
}

/* Takes the descriptor. Whoever comes when all places are taken is sent away and tries the other holder. */
static void start_serving(struct mu_files *files, int fd)
{
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_mutex_lock(&files->lock);
    struct served *place = NULL;
    for (uint32_t i = 0; i < MU_FILES_CONNECTIONS_MAX && !place; i++)
        place = files->served[i].fd < 0 ? &files->served[i] : NULL;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (place)
        place->fd = fd;
    if (place && pthread_create(&thread, &attributes, serve_thread, place) == 0) {
        files->served_count++;
    } else {
        if (place)
            place->fd = -1;
        close(fd);
    }
    pthread_attr_destroy(&attributes);
    pthread_mutex_unlock(&files->lock);
}

static void *accept_thread(void *arg)
{
    struct mu_files *files = arg;
    for (;;) {
        struct pollfd fds[2] = {{.fd = files->listener, .events = POLLIN}, {.fd = files->stop_fd, .events = POLLIN}};
        if (poll(fds, 2, -1) < 0 && errno != EINTR)
            return NULL;
        if (fds[1].revents)
            return NULL;
        int fd = accept4(files->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            start_serving(files, fd);
        else if (errno == EMFILE || errno == ENFILE)
            poll(&fds[1], 1, POLL_MS); /* somebody gives descriptors back, or nobody does */
    }
}

static enum mu_status listen_on(struct mu_files *files, const char *ip, struct mu_error *err)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *found = NULL;
    struct sockaddr_storage bound;
    socklen_t bound_size = sizeof bound;
    char host[128], port[8];
    if (getaddrinfo(ip, "0", &hints, &found) != 0)
        return mu_fail(err, MU_ERR_INVALID, "'%s' is not an address to give checkpoint files out on", ip);
    files->listener = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool ok = files->listener >= 0 && bind(files->listener, found->ai_addr, found->ai_addrlen) == 0 &&
              listen(files->listener, MU_FILES_CONNECTIONS_MAX) == 0 &&
              getsockname(files->listener, (struct sockaddr *)&bound, &bound_size) == 0;
    int reason = errno;
    freeaddrinfo(found);
    if (!ok)
        return mu_fail_errno(err, reason, "cannot listen on %s to give checkpoint files out", ip);
    if (getnameinfo((struct sockaddr *)&bound, bound_size, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return mu_fail(err, MU_ERR_INTERNAL, "the address of %s has no text", ip);
    snprintf(files->address, sizeof files->address, bound.ss_family == AF_INET6 ? "%s[%s]:%s" : "%s%s:%s",
             files->encrypted ? TLS_WORD : "", host, port);
    return MU_OK;
}

enum mu_status mu_files_new(const char *ip, bool encrypted, const char *root, struct mu_files **ret_files,
                            struct mu_error *err)
{
    struct mu_files *files = calloc(1, sizeof *files);
    if (!files)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to give checkpoint files out");
    files->listener = files->stop_fd = -1;
    files->encrypted = encrypted;
    for (uint32_t i = 0; i < MU_FILES_CONNECTIONS_MAX; i++)
        files->served[i] = (struct served){.files = files, .fd = -1, .index = i};
    pthread_mutex_init(&files->lock, NULL);
    pthread_cond_init(&files->idle, NULL);
    snprintf(files->root, sizeof files->root, "%s", root);
    enum mu_status status = listen_on(files, ip, err);
    if (status == MU_OK && getrandom(files->secret, sizeof files->secret, 0) != (ssize_t)sizeof files->secret)
        status = mu_fail_errno(err, errno, "no randomness for a secret");
    if (status == MU_OK && (files->stop_fd = eventfd(0, EFD_CLOEXEC)) < 0)
        status = mu_fail_errno(err, errno, "no descriptor to give checkpoint files out");
    if (status == MU_OK) {
        int reason = pthread_create(&files->acceptor, NULL, accept_thread, files);
        status = reason ? mu_fail_errno(err, reason, "no thread to give checkpoint files out") : MU_OK;
    }
    if (status == MU_OK) {
        *ret_files = files;
        return MU_OK;
    }
    if (files->listener >= 0)
        close(files->listener);
    if (files->stop_fd >= 0)
        close(files->stop_fd);
    free(files);
    return status;
}

void mu_files_free(struct mu_files *files)
{
    if (!files)
        return;
    uint64_t one = 1;
    ssize_t ignored = write(files->stop_fd, &one, sizeof one);
    (void)ignored;
    pthread_join(files->acceptor, NULL);
    pthread_mutex_lock(&files->lock);
    for (uint32_t i = 0; i < MU_FILES_CONNECTIONS_MAX; i++) {
        if (files->served[i].fd >= 0)
            shutdown(files->served[i].fd, SHUT_RDWR);
    }
    while (files->served_count > 0)
        pthread_cond_wait(&files->idle, &files->lock);
    pthread_mutex_unlock(&files->lock);
    close(files->listener);
    close(files->stop_fd);
    pthread_mutex_destroy(&files->lock);
    pthread_cond_destroy(&files->idle);
    free(files);
}

const char *mu_files_address(const struct mu_files *files)
{
    return files->address;
}

const uint8_t *mu_files_secret(const struct mu_files *files)
{
    return files->secret;
}

/* ---- who asks ---- */

static enum mu_status broken(const struct mu_holder *holder, const char *directory, const char *file,
                             const atomic_bool *abort, struct mu_error *err)
{
    int reason = errno;
    if (abort && atomic_load(abort))
        return mu_fail(err, MU_ERR_CANCELLED, "fetching '%s/%s' was aborted", directory, file);
    return mu_fail(err, MU_ERR_UNAVAILABLE, "'%s/%s' cannot be fetched from host %s at %s: %s", directory, file,
                   holder->host, holder->address[0] ? holder->address : "(no worker there)",
                   reason ? strerror(reason) : "it broke the connection off");
}

/* -1: errno says why. */
static int dial(const char *address, const atomic_bool *abort)
{
    char host[MU_ADDRESS_SIZE];
    const char *colon = strrchr(address, ':');
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *found = NULL;
    errno = EADDRNOTAVAIL;
    if (!colon)
        return -1;
    bool v6 = address[0] == '[' && colon > address + 1 && colon[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(colon - address) - (v6 ? 2 : 0), address + v6);
    if (getaddrinfo(host, colon + 1, &hints, &found) != 0)
        return -1;
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), failure = 0;
    socklen_t size = sizeof failure;
    bool ok = fd >= 0 && (connect(fd, found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS) &&
              await_socket(fd, POLLOUT, abort) && getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &size) == 0 &&
              failure == 0;
    int reason = failure ? failure : errno;
    freeaddrinfo(found);
    if (!ok && fd >= 0) {
        close(fd);
        fd = -1;
    }
    errno = reason;
    return fd;
}

static enum mu_status receive_file(const struct wire *wire, const struct mu_holder *holder, const char *directory,
                                   const char *file, uint64_t size_bytes, mu_files_take_fn *take, void *ctx,
                                   struct mu_error *err)
{
    void *block = malloc(MU_FILES_BLOCK_BYTES);
    enum mu_status status =
        block ? take(ctx, size_bytes, NULL, 0, err) : mu_fail(err, MU_ERR_NO_MEMORY, "no memory to fetch '%s'", file);
    for (uint64_t done = 0; done < size_bytes && status == MU_OK;) {
        size_t part = size_bytes - done < MU_FILES_BLOCK_BYTES ? (size_t)(size_bytes - done) : MU_FILES_BLOCK_BYTES;
        MU_FAULT("worker.files.receive");
        if (!receive_all(wire, block, part))
            status = broken(holder, directory, file, wire->abort, err);
        else
            status = take(ctx, size_bytes, block, part, err);
        done += part;
    }
    free(block);
    return status;
}

enum mu_status mu_files_fetch(const struct mu_holder *holder, const char *directory, const char *file,
                              mu_files_take_fn *take, void *ctx, const atomic_bool *abort, struct mu_error *err)
{
    uint8_t nonce[NONCE_BYTES];
    struct request request = {.magic = "MUFILE1"};
    struct answer answer;
    bool encrypted = strncmp(holder->address, TLS_WORD, strlen(TLS_WORD)) == 0;
    const char *address = holder->address + (encrypted ? strlen(TLS_WORD) : 0);
    errno = EHOSTUNREACH;
    struct wire wire = {.fd = address[0] ? dial(address, abort) : -1, .abort = abort};
    if (wire.fd < 0)
        return broken(holder, directory, file, abort, err);
    snprintf(request.directory, sizeof request.directory, "%s", directory);
    snprintf(request.file, sizeof request.file, "%s", file);
    enum mu_status status;
    bool ok = (!encrypted || secure(&wire, false, holder->secret)) && receive_all(&wire, nonce, sizeof nonce);
    if (ok) {
        sign(holder->secret, nonce, &request, request.mac);
        ok = send_all(&wire, &request, sizeof request) && receive_all(&wire, &answer, sizeof answer);
    }
    if (!ok)
        status = broken(holder, directory, file, abort, err);
    else if (answer.status == MU_OK)
        status = receive_file(&wire, holder, directory, file, answer.size_bytes, take, ctx, err);
    else
        status =
            mu_fail(err, answer.status == MU_ERR_NOT_FOUND ? MU_ERR_NOT_FOUND : MU_ERR_UNAVAILABLE,
                    "'%s/%s' is not given out by host %s at %s: %s", directory, file, holder->host, holder->address,
                    answer.status <= MU_ERR_INTERNAL ? mu_status_name((enum mu_status)answer.status) : "?");
    mu_secure_free(wire.secure);
    close(wire.fd);
    return status;
}
