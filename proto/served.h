/* The FileDescriptorSet of everything that musterd serves, made by protoc when the program was built. */
#ifndef MU_PROTO_SERVED_H
#define MU_PROTO_SERVED_H

#include <stddef.h>
#include <stdint.h>

extern const uint8_t mu_served_set[];
size_t mu_served_set_bytes(void);

#endif
