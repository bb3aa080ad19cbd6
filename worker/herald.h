/* Calls WorkerService.ReportExit for a supervisor: one letter at a time, on a thread of its own, so that a coordinator
 * that does not answer holds nobody up. All functions from one thread; `answered` runs on the herald's. */
#ifndef MU_WORKER_HERALD_H
#define MU_WORKER_HERALD_H

#include <stdbool.h>
#include <stdint.h>

#include "common/id.h"
#include "common/status.h"
#include "plan/session.h"
#include "rpc/tls.h"

struct mu_exit_letter {
    struct mu_id incarnation; /* zero: it had none yet */
    uint64_t pid;
    uint32_t signal, code;
    bool again;
    char text[MU_TEXT_SIZE];
};

enum mu_herald_verdict { MU_HERALD_START, MU_HERALD_ASK_AGAIN, MU_HERALD_STAY_AWAY };

struct mu_exit_answer {
    bool failed; /* nobody answered: `text` says why; tell it again later */
    enum mu_herald_verdict verdict;
    uint32_t after_ms;
    char text[MU_TEXT_SIZE];
};

struct mu_herald_config {
    const char *coordinator;
    struct mu_rpc_tls_files tls;
    const char *job, *host;
    void (*answered)(void *ctx);
    void *ctx;
};

struct mu_herald;
enum mu_status mu_herald_new(const struct mu_herald_config *config, struct mu_herald **ret_herald,
                             struct mu_error *err) MU_WARN_UNUSED;
void mu_herald_free(struct mu_herald *herald); /* waits for the call in progress; NULL is fine */

/* Only when the answer to the one before was taken. */
void mu_herald_tell(struct mu_herald *herald, const char *worker, const struct mu_exit_letter *letter);
/* False: not yet. */
bool mu_herald_answer(struct mu_herald *herald, struct mu_exit_answer *ret_answer);

#endif
