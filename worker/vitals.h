/* How this worker and its host are (struct mu_vitals): read from /proc and /sys by a thread of its own at a low rate,
 * so that neither the engine nor the agent ever waits for a disk that hangs. The agent takes the newest along with
 * whatever it sends next. */
#ifndef MU_WORKER_VITALS_H
#define MU_WORKER_VITALS_H

#include <stdbool.h>

#include "plan/session.h"

enum { MU_VITALS_EVERY_MS = 5000 }; /* default */

/* Reads all that the kernel tells; what it does not tell is 0. `root`: "" (tests: a directory that has proc and sys).
 * `disk`: a path that need not exist yet; "": none. Any thread; may block where the disk does. */
void mu_vitals_read(const char *root, const char *disk, struct mu_vitals *ret_vitals);

struct mu_vitals_watch;

/* Starts the thread. `fill`: adds what others know, on that thread; NULL: nobody. */
enum mu_status mu_vitals_watch_new(uint32_t every_ms, void (*fill)(void *ctx, struct mu_vitals *vitals), void *ctx,
                                   struct mu_vitals_watch **ret_watch, struct mu_error *err) MU_WARN_UNUSED;
void mu_vitals_watch_free(struct mu_vitals_watch *watch); /* NULL is fine */

/* Any thread: where checkpoints will lie. */
void mu_vitals_watch_disk(struct mu_vitals_watch *watch, const char *path);
/* Any thread: the newest, if it was not taken yet or may be taken again. `watch` NULL: never. */
bool mu_vitals_watch_take(struct mu_vitals_watch *watch, bool again, struct mu_vitals *ret_vitals);

#endif
