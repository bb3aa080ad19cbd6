#include "worker/notes.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { KILL_PATIENCE_S = 5 };

int mu_notes_open(void)
{
    const char *text = getenv(MU_NOTES_VARIABLE);
    char *end = NULL;
    long fd = text && text[0] >= '0' && text[0] <= '9' ? strtol(text, &end, 10) : -1;
    bool is_open = end && *end == 0 && fd <= INT32_MAX && fcntl((int)fd, F_SETFD, FD_CLOEXEC) == 0;
    unsetenv(MU_NOTES_VARIABLE);
    return is_open ? (int)fd : -1;
}

void mu_notes_send(int fd, enum mu_note_kind kind, struct mu_id incarnation, const char *text)
{
    struct mu_note note = {.kind = kind, .incarnation = incarnation};
    if (fd < 0)
        return;
    snprintf(note.text, sizeof note.text, "%.*s", (int)sizeof note.text - 1, text ? text : "");
    ssize_t ignored = send(fd, &note, sizeof note, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)ignored;
}

_Noreturn void mu_notes_stuck(int fd, int code, const char *text)
{
    mu_notes_send(fd, MU_NOTE_STUCK, (struct mu_id){0}, text);
    if (fd >= 0) {
        sleep(KILL_PATIENCE_S);
        raise(SIGKILL);
    }
    _exit(code);
}

bool mu_notes_take(int fd, struct mu_note *ret_note)
{
    if (recv(fd, ret_note, sizeof *ret_note, MSG_DONTWAIT) != (ssize_t)sizeof *ret_note)
        return false;
    ret_note->text[sizeof ret_note->text - 1] = 0;
    return true;
}
