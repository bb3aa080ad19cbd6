#include "common/id.h"

#include <sys/random.h>

#include "common/status.h"

struct mu_id mu_id_random(void)
{
    struct mu_id id;
    do
        MU_ASSERT(getrandom(&id, sizeof id, 0) == (ssize_t)sizeof id);
    while (mu_id_is_zero(id));
    return id;
}
