#include "coordinator/http_pages.h"

#include <stdlib.h>
#include <string.h>

struct mu_http_page {
    struct mu_http_pages *pages;
    struct mu_http_page *older, *newer;
    struct mu_http_reply reply;
    uint64_t made_us;
    unsigned references; /* the table's and the readers' */
};

struct place {
    char key[MU_HTTP_KEY_SIZE];
    struct mu_http_page *page; /* NULL: free */
};

struct mu_http_pages {
    struct place places[MU_HTTP_PAGES];
    struct mu_http_page *oldest, *newest; /* of all that have a body */
    size_t bytes;
};

struct mu_http_pages *mu_http_pages_new(void)
{
    return calloc(1, sizeof(struct mu_http_pages));
}

void mu_http_pages_free(struct mu_http_pages *pages)
{
    for (int i = 0; pages && i < MU_HTTP_PAGES; i++)
        mu_http_page_release(pages->places[i].page);
    free(pages);
}

size_t mu_http_pages_bytes(const struct mu_http_pages *pages)
{
    return pages->bytes;
}

/* ---- bodies ---- */

static void append(struct mu_http_pages *pages, struct mu_http_page *page)
{
    page->older = pages->newest;
    *(pages->newest ? &pages->newest->newer : &pages->oldest) = page;
    pages->newest = page;
    pages->bytes += page->reply.size_bytes;
}

static void withdraw(struct mu_http_page *page)
{
    struct mu_http_pages *pages = page->pages;
    if (!page->reply.body)
        return;
    *(page->older ? &page->older->newer : &pages->oldest) = page->newer;
    *(page->newer ? &page->newer->older : &pages->newest) = page->older;
    pages->bytes -= page->reply.size_bytes;
    free(page->reply.body);
    page->reply.body = NULL;
}

void mu_http_page_release(struct mu_http_page *page)
{
    if (!page || --page->references > 0)
        return;
    withdraw(page);
    free(page);
}

const struct mu_http_reply *mu_http_page_reply(const struct mu_http_page *page)
{
    return &page->reply;
}

ssize_t mu_http_page_read(const struct mu_http_page *page, uint64_t offset, char *out, size_t most)
{
    if (!page->reply.body)
        return -1;
    size_t left = offset < page->reply.size_bytes ? page->reply.size_bytes - (size_t)offset : 0;
    size_t size = left < most ? left : most;
    memcpy(out, page->reply.body + offset, size);
    return (ssize_t)size;
}

/* ---- the table ---- */

/* The place of that key, else the one that is free or whose page is oldest. */
static struct place *place_of(struct mu_http_pages *pages, const char *key)
{
    struct place *found = &pages->places[0];
    for (int i = 0; i < MU_HTTP_PAGES; i++) {
        struct place *place = &pages->places[i];
        if (place->page && strcmp(place->key, key) == 0)
            return place;
        if (found->page && (!place->page || place->page->made_us < found->page->made_us))
            found = place;
    }
    return found;
}

struct mu_http_page *mu_http_pages_find(struct mu_http_pages *pages, const char *key, uint64_t now_us)
{
    const struct place *place = place_of(pages, key);
    struct mu_http_page *page = place->page;
    if (!page || strcmp(place->key, key) != 0 || !page->reply.body ||
        now_us - page->made_us >= MU_HTTP_PAGE_AGE_MS * 1000ull)
        return NULL;
    page->references++;
    return page;
}

struct mu_http_page *mu_http_pages_keep(struct mu_http_pages *pages, const char *key, const struct mu_http_reply *reply,
                                        uint64_t now_us)
{
    struct mu_http_page *page = calloc(1, sizeof *page);
    if (!page) {
        free(reply->body);
        return NULL;
    }
    *page = (struct mu_http_page){.pages = pages, .reply = *reply, .made_us = now_us, .references = 2};
    struct place *place = place_of(pages, key);
    mu_http_page_release(place->page);
    strcpy(place->key, key);
    place->page = page;
    append(pages, page);
    while (pages->bytes > MU_HTTP_PAGES_BYTES_MAX && pages->oldest != page)
        withdraw(pages->oldest);
    return page;
}
