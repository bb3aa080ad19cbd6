/* LD_PRELOAD: what this process sends over connections that it makes to the IPv4 address $MU_PACED_TO goes at
 * $MU_PACED_RATE bytes per second: a link that is slow one way, while all others are as ever. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    const char *to = getenv("MU_PACED_TO"), *rate_text = getenv("MU_PACED_RATE");
    const struct sockaddr_in *in = (const struct sockaddr_in *)address;
    struct in_addr paced;
    if (to && rate_text && address->sa_family == AF_INET && inet_aton(to, &paced) &&
        in->sin_addr.s_addr == paced.s_addr) {
        unsigned rate = (unsigned)strtoul(rate_text, NULL, 10);
        (void)setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
    }
    return (int)syscall(SYS_connect, fd, address, size);
}
