/* LD_PRELOAD: connections to the IPv4 address $MU_UNREACHABLE are refused as by a network without a route to it. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int connect(int fd, const struct sockaddr *to, socklen_t size)
{
    const char *given = getenv("MU_UNREACHABLE");
    struct in_addr address;
    bool is_ipv4 = to->sa_family == AF_INET && given && inet_pton(AF_INET, given, &address) == 1;
    if (is_ipv4 && ((const struct sockaddr_in *)(const void *)to)->sin_addr.s_addr == address.s_addr) {
        errno = EHOSTUNREACH;
        return -1;
    }
    return (int)syscall(SYS_connect, fd, to, size);
}
