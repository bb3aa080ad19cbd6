/* Answers of the HTTP listener. One serves everybody who asks the same within MU_HTTP_PAGE_AGE_MS, and all who read it
 * share its bytes. However many read however slowly, what is kept has a bound: beyond it the oldest answers are
 * withdrawn, and who still reads one of those is cut off. Listener's thread. */
#ifndef MU_COORDINATOR_HTTP_PAGES_H
#define MU_COORDINATOR_HTTP_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    MU_HTTP_PAGE_AGE_MS = 500,
    MU_HTTP_PAGES = 64, /* found by their keys */
    MU_HTTP_KEY_SIZE = 512,
    MU_HTTP_PAGES_BYTES_MAX = 64 << 20, /* of all answers that anybody still needs */
};

struct mu_http_reply {
    unsigned status;  /* of HTTP */
    const char *type; /* of its content */
    char *body;       /* from malloc; NULL: no memory */
    size_t size_bytes;
};

struct mu_http_pages;
struct mu_http_page;

struct mu_http_pages *mu_http_pages_new(void);        /* NULL: no memory */
void mu_http_pages_free(struct mu_http_pages *pages); /* after all readers have released theirs; NULL is fine */
size_t mu_http_pages_bytes(const struct mu_http_pages *pages); /* kept now */

/* Both give a reference of the caller's own. NULL: there is none, or it is too old. */
struct mu_http_page *mu_http_pages_find(struct mu_http_pages *pages, const char *key, uint64_t now_us);
/* Takes reply->body. NULL: no memory. */
struct mu_http_page *mu_http_pages_keep(struct mu_http_pages *pages, const char *key, const struct mu_http_reply *reply,
                                        uint64_t now_us);

/* Body NULL: it was withdrawn. */
const struct mu_http_reply *mu_http_page_reply(const struct mu_http_page *page);
/* Copies what lies at `offset`, at most `most` bytes; returns how many. -1: it was withdrawn. */
ssize_t mu_http_page_read(const struct mu_http_page *page, uint64_t offset, char *out, size_t most);
void mu_http_page_release(struct mu_http_page *page);

#endif
