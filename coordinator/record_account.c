#include "coordinator/record_account.h"

#include <string.h>

_Static_assert(MUSTER__V1__TIME_CLASS__TIME_CLASS_UNREPORTED == (int)MU_TIME_CLASS_COUNT, "time class");

enum mu_status mu_account_record_put(struct mu_wire_arena *arena, const struct mu_account_record *account,
                                     Muster__V1__AccountRecord **ret_pb, struct mu_error *err)
{
    struct {
        Muster__V1__AccountRecord account;
        uint64_t us[MU_TIME_CLASS_COUNT];
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return mu_fail(err, MU_ERR_NO_MEMORY, "StoredRecord: no memory");
    muster__v1__account_record__init(&pb->account);
    pb->account.job_uid = mu_wire_put_id(arena, account->job_uid);
    pb->account.now = account->open ? (Muster__V1__TimeClass)((int)account->now + 1) : 0;
    pb->account.began_wall_us = account->began_wall_us;
    pb->account.wall_us = account->wall_us;
    pb->account.mono_us = account->mono_us;
    memcpy(pb->us, account->us, sizeof pb->us);
    pb->account.us = pb->us;
    pb->account.n_us = MU_TIME_CLASS_COUNT;
    *ret_pb = &pb->account;
    enum mu_status status =
        mu_wire_put_string(account->job, MU_WIRE_NAME, "AccountRecord.job", sizeof account->job, &pb->account.job, err);
    return status ? status
                  : mu_wire_put_string(account->worker, MU_WIRE_NAME_EMPTY, "AccountRecord.worker",
                                       sizeof account->worker, &pb->account.worker, err);
}

enum mu_status mu_account_record_get(const Muster__V1__AccountRecord *pb, struct mu_account_record *out,
                                     struct mu_error *err)
{
    int now = 0;
    enum mu_status status = MU_OK;
    *out =
        (struct mu_account_record){.began_wall_us = pb->began_wall_us, .wall_us = pb->wall_us, .mono_us = pb->mono_us};
    if (pb->n_us > MU_TIME_CLASS_COUNT)
        return mu_fail(err, MU_ERR_INVALID, "AccountRecord.us: %zu of them are not allowed: up to %d", pb->n_us,
                       MU_TIME_CLASS_COUNT);
    if ((status = mu_wire_get_id(pb->job_uid, "AccountRecord.job_uid", &out->job_uid, err)) ||
        (status = mu_wire_get_string(pb->job, MU_WIRE_NAME, "AccountRecord.job", out->job, sizeof out->job, err)) ||
        (status = mu_wire_get_string(pb->worker, MU_WIRE_NAME_EMPTY, "AccountRecord.worker", out->worker,
                                     sizeof out->worker, err)) ||
        (status = mu_wire_get_enum((int)pb->now, 0, MU_TIME_CLASS_COUNT, "AccountRecord.now", &now, err)))
        return status;
    out->open = now > 0;
    out->now = now > 0 ? (enum mu_time_class)(now - 1) : MU_TIME_USEFUL;
    if (pb->n_us)
        memcpy(out->us, pb->us, pb->n_us * sizeof out->us[0]);
    return MU_OK;
}
