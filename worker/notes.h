/* What a worker tells the supervisor that started it (worker/supervisor.h): one datagram each, over a socket whose
 * number is in the environment. No threads of its own; sending never blocks, and a note that finds no room is lost. */
#ifndef MU_WORKER_NOTES_H
#define MU_WORKER_NOTES_H

#include <stdbool.h>

#include "common/id.h"
#include "plan/session.h"

#define MU_NOTES_VARIABLE "MUSTER_SUPERVISOR_FD"

enum mu_note_kind {
    MU_NOTE_INCARNATION = 1, /* the one under which it is known from now on */
    MU_NOTE_ATTACHED,
    MU_NOTE_TROUBLE, /* why it is not attached, or ends */
    MU_NOTE_STUCK,   /* it cannot go on, nor end what it is doing: to be killed, and started again */
};

struct mu_note {
    enum mu_note_kind kind;
    struct mu_id incarnation;
    char text[MU_TEXT_SIZE];
};

/* The worker's end; -1: nobody supervises it. Children of the worker do not see it. */
int mu_notes_open(void);
void mu_notes_send(int fd, enum mu_note_kind kind, struct mu_id incarnation, const char *text); /* fd -1: nothing */
/* This process is stuck: its supervisor kills it (or, if that does not come, it kills itself). Without a supervisor it
 * ends with `code`. */
_Noreturn void mu_notes_stuck(int fd, int code, const char *text);
/* False: none waits. */
bool mu_notes_take(int fd, struct mu_note *ret_note);

#endif
