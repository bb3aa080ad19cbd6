#include "rpc/tcp_bytes.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>

bool mu_rpc_tcp_bytes(int fd, uint64_t *ret_received, uint64_t *ret_acknowledged)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
        size < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received)
        return false;
    *ret_received = info.tcpi_bytes_received;
    *ret_acknowledged = info.tcpi_bytes_acked;
    return true;
}
