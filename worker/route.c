#include "worker/route.h"

#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/notify.h"
#include "worker/comm.h"
#include "worker/notes.h"

enum { PAUSE_MS = 500 };

enum mu_status mu_route_find(const char *coordinator, uint32_t give_up_ms, int note_fd, char *out, size_t size,
                             struct mu_error *err)
{
    uint64_t began_us = mu_clock_mono_us();
    char told[MU_ERROR_TEXT_SIZE] = "";
    for (;;) {
        enum mu_status status = mu_comm_route_to(coordinator, out, size, err);
        if (status != MU_ERR_UNAVAILABLE || (give_up_ms && mu_clock_mono_us() - began_us >= give_up_ms * 1000ull))
            return status;
        if (!told[0])
            mu_notify("READY=1"); /* it waits, as for a coordinator that is not there yet */
        if (strcmp(told, err->text) != 0) {
            MU_LOGW("no coordinator: %s; tried again", err->text);
            mu_notes_send(note_fd, MU_NOTE_TROUBLE, (struct mu_id){0}, err->text);
        }
        memcpy(told, err->text, sizeof told);
        mu_notify_alive(mu_clock_mono_us());
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_MS * 1000000l}, NULL);
    }
}
