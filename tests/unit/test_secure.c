/* links: mu_comm */
/* An encrypted connection: what is read is what was sent, whatever the sizes; nobody without the key gets in; nothing
 * of it can be read or changed on the way. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/secure.h"

static const uint8_t the_key[MU_SECURE_KEY_SIZE] = "a key of thirty-two bytes, a key", other_key[32] = "another one";

/* Two ends, and what lies between them: [0] -- [1] ... [2] -- [3]; without a middle [1] and [2] are -1. */
struct pair {
    int fds[4];
    struct mu_secure *dialler, *acceptor;
};

static void set_up(struct pair *pair, bool has_middle, const uint8_t *key_there)
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair->fds), 0);
    if (has_middle)
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair->fds + 2), 0);
    int far = has_middle ? pair->fds[3] : pair->fds[1];
    pair->dialler = mu_secure_new(pair->fds[0], false, the_key);
    pair->acceptor = mu_secure_new(far, true, key_there);
    assert_true(pair->dialler && pair->acceptor);
    if (!has_middle)
        pair->fds[2] = pair->fds[3] = -1;
}

static void tear_down(struct pair *pair)
{
    mu_secure_free(pair->dialler);
    mu_secure_free(pair->acceptor);
    for (int i = 0; i < 4; i++)
        if (pair->fds[i] >= 0)
            close(pair->fds[i]);
}

/* Carries what has come to either side of the middle over to the other; `seen` gets a copy of it. */
static size_t carry(int from, int to, uint8_t *seen, size_t *seen_size, int flip_at)
{
    uint8_t bytes[65536];
    ssize_t got = recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got <= 0)
        return 0;
    if (flip_at >= 0 && flip_at < got)
        bytes[flip_at] ^= 1;
    if (seen) {
        memcpy(seen + *seen_size, bytes, (size_t)got);
        *seen_size += (size_t)got;
    }
    assert_int_equal(send(to, bytes, (size_t)got, 0), got);
    return (size_t)got;
}

/* 0: both sides are through; else the first trouble. */
static int shake(struct pair *pair)
{
    int here = EAGAIN, there = EAGAIN;
    for (int turn = 0; turn < 50; turn++) {
        here = here == EAGAIN ? mu_secure_shake(pair->dialler) : here;
        there = there == EAGAIN ? mu_secure_shake(pair->acceptor) : there;
        if (here != EAGAIN && there != EAGAIN)
            return here ? here : there;
        if (pair->fds[2] >= 0) {
            carry(pair->fds[1], pair->fds[2], NULL, NULL, -1);
            carry(pair->fds[2], pair->fds[1], NULL, NULL, -1);
        }
    }
    return here != EAGAIN && here ? here : there;
}

static void fill(uint8_t *bytes, size_t size, unsigned seed)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)((i * 2654435761u + seed) >> 13);
}

/* Sends all of it in parts of odd sizes, in odd groups, while the other end reads into parts of other sizes. */
static void pass(struct mu_secure *from, struct mu_secure *to, size_t size)
{
    uint8_t *out = malloc(size + 1), *in = calloc(1, size + 1);
    size_t sent = 0, got = 0, full = 0;
    fill(out, size, (unsigned)size);
    for (int turn = 0; got < size && turn < 1000000; turn++) {
        struct iovec iov[3];
        size_t at = sent, count = 0;
        for (; count < 3 && at < size; count++) { /* the same parts until something is taken */
            size_t part = (at * 7919 + 48) % (count == 2 ? 300000 : 70) + 1;
            part = part < size - at ? part : size - at;
            iov[count] = (struct iovec){out + at, part};
            at += part;
        }
        ssize_t n = count ? mu_secure_send(from, iov, count) : 0;
        assert_true(n >= 0 || errno == EAGAIN);
        full += n < 0;
        sent += n > 0 ? (size_t)n : 0;
        size_t first = (got * 31 + 5) % 9000, left = size - got;
        first = first < left ? first : left;
        struct iovec into[2] = {{in + got, first}, {in + got + first, left - first}};
        if (turn % 40 && n >= 0)
            continue; /* let the socket fill up */
        while ((n = mu_secure_receive(to, into, 2)) > 0) {
            got += (size_t)n;
            into[0] = (struct iovec){in + got, 0};
            into[1] = (struct iovec){in + got, size - got};
            if (got == size)
                break;
        }
        assert_true(n > 0 || (n < 0 && errno == EAGAIN));
    }
    assert_int_equal(got, size);
    assert_memory_equal(in, out, size);
    assert_true(size < 1000000 || full > 0); /* sends that found the socket full were among them */
    free(out);
    free(in);
}

static void test_what_is_sent_arrives_in_both_directions(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 47, 16383, 16384, 16385, 100000, 3000001};
    struct pair pair;
    set_up(&pair, false, the_key);
    assert_int_equal(shake(&pair), 0);
    assert_string_equal(mu_secure_kernel(pair.dialler), "not in use"); /* a Unix socket */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        pass(pair.dialler, pair.acceptor, sizes[i]);
        pass(pair.acceptor, pair.dialler, sizes[i]);
    }
    close(pair.fds[0]);
    pair.fds[0] = -1;
    uint8_t byte;
    assert_int_equal(mu_secure_receive(pair.acceptor, &(struct iovec){&byte, 1}, 1), 0);
    tear_down(&pair);
}

static void test_keys_are_replaced_under_way(void **state)
{
    (void)state;
    struct pair pair;
    set_up(&pair, false, the_key);
    assert_int_equal(shake(&pair), 0);
    mu_secure_set_rekey(pair.dialler, 20000);
    pass(pair.dialler, pair.acceptor, 3000001);
    pass(pair.acceptor, pair.dialler, 50000);
    pass(pair.dialler, pair.acceptor, 50000);
    tear_down(&pair);
}

static void test_without_the_key_nobody_gets_in(void **state)
{
    (void)state;
    struct pair pair;
    set_up(&pair, false, other_key);
    assert_int_equal(shake(&pair), EPROTO);
    tear_down(&pair);

    set_up(&pair, false, the_key); /* whoever speaks no TLS */
    assert_int_equal(send(pair.fds[0], "MUCM in the clear, as if nothing were", 37, 0), 37);
    assert_int_equal(mu_secure_shake(pair.acceptor), EPROTO);
    tear_down(&pair);

    set_up(&pair, false, the_key);
    close(pair.fds[0]);
    pair.fds[0] = -1;
    assert_int_equal(mu_secure_shake(pair.acceptor), ECONNRESET);
    tear_down(&pair);
}

static bool contains(const uint8_t *bytes, size_t size, const char *word)
{
    return memmem(bytes, size, word, strlen(word)) != NULL;
}

static void test_on_the_way_nothing_can_be_read_and_nothing_changed(void **state)
{
    (void)state;
    static const char secret[] = "the weights of the model";
    static uint8_t seen[1 << 17];
    char in[sizeof secret];
    for (int flip = 0; flip < 2; flip++) {
        size_t size = 0;
        struct pair pair;
        set_up(&pair, true, the_key);
        assert_int_equal(shake(&pair), 0);
        struct iovec out = {(void *)(uintptr_t)secret, sizeof secret}, into = {in, sizeof in};
        assert_int_equal(mu_secure_send(pair.dialler, &out, 1), sizeof secret);
        assert_true(carry(pair.fds[1], pair.fds[2], seen, &size, flip ? 11 : -1) > sizeof secret);
        assert_false(contains(seen, size, "weights"));
        ssize_t got = mu_secure_receive(pair.acceptor, &into, 1);
        assert_int_equal(got, flip ? -1 : (ssize_t)sizeof secret);
        assert_true(flip ? errno == EBADMSG : memcmp(in, secret, sizeof secret) == 0);
        tear_down(&pair);
    }
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_sent_arrives_in_both_directions),
        cmocka_unit_test(test_keys_are_replaced_under_way),
        cmocka_unit_test(test_without_the_key_nobody_gets_in),
        cmocka_unit_test(test_on_the_way_nothing_can_be_read_and_nothing_changed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
