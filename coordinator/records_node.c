/* Records of nodes: see records.c, whose part this is. */
#include "coordinator/records.h"

_Static_assert(MUSTER__V1__NODE_ORDER__NODE_ORDER_RESUME == (int)MU_NODE_ORDER_COUNT, "order");

enum mu_status mu_record_put_node(struct mu_wire_arena *arena, const struct mu_node_record *node,
                                  Muster__V1__NodeRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__NodeRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a record");
    muster__v1__node_record__init(pb);
    pb->order = (Muster__V1__NodeOrder)((int)node->order + 1);
    pb->since_wall_us = node->since_wall_us;
    pb->deadline_wall_us = node->deadline_wall_us;
    pb->reason = mu_wire_put_text(arena, node->reason, sizeof node->reason);
    pb->by = mu_wire_put_text(arena, node->by, sizeof node->by);
    *ret_pb = pb;
    return mu_wire_put_string(node->name, MU_WIRE_TEXT, "NodeRecord.name", sizeof node->name, &pb->name, err);
}

enum mu_status mu_record_get_node(const Muster__V1__NodeRecord *pb, struct mu_node_record *out, struct mu_error *err)
{
    int order = 0;
    enum mu_status status;
    if ((status = mu_wire_get_enum((int)pb->order, 1, MU_NODE_DRAIN + 1, "NodeRecord.order", &order, err)) ||
        (status = mu_wire_get_string(pb->name, MU_WIRE_TEXT, "NodeRecord.name", out->name, sizeof out->name, err)) ||
        (status =
             mu_wire_get_string(pb->reason, MU_WIRE_TEXT, "NodeRecord.reason", out->reason, sizeof out->reason, err)))
        return status;
    out->order = (enum mu_node_order)(order - 1);
    out->since_wall_us = pb->since_wall_us;
    out->deadline_wall_us = pb->deadline_wall_us;
    return mu_wire_get_string(pb->by, MU_WIRE_TEXT, "NodeRecord.by", out->by, sizeof out->by, err);
}
