/* What the driver's error numbers mean for a job.
 *
 * Numbers, meanings and what to do at once are those of NVIDIA's catalog for data-center GPUs since Ampere
 * (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, column "immediate action"):
 *
 *   fatal        RESET_GPU, RESTART_BM, CHECK_MECHANICALS, and the workflows of double-bit ECC errors (48) and of
 * NVLink up to its fourth generation (74), which end in a reset application  RESTART_APP notice       IGNORE, and what
 * only comments on another error (45, 154). For NVLink 5 (144 to 150) it depends on details that are not in the event:
 * there the recovery action that the driver reports decides
 *
 * NVIDIA's plugin for Kubernetes (github.com/NVIDIA/k8s-device-plugin, internal/rm/health.go) takes 13, 31, 43, 45 and
 * 68 for harmless too; it does so with 109, which the catalog answers with a reset: the catalog is followed. */
#include "worker/nvml.h"

#include <stddef.h>

static const struct mu_xid table[] = {
    {8, MU_XID_APPLICATION, "GPU stopped processing"},
    {11, MU_XID_APPLICATION, "invalid push buffer stream"},
    {13, MU_XID_APPLICATION, "exception in a kernel"},
    {25, MU_XID_APPLICATION, "illegal push buffer stream"},
    {31, MU_XID_APPLICATION, "memory page fault"},
    {32, MU_XID_APPLICATION, "corrupted push buffer stream"},
    {37, MU_XID_NOTICE, "driver firmware error"},
    {38, MU_XID_NOTICE, "driver firmware error"},
    {39, MU_XID_APPLICATION, "copy engine exception"},
    {40, MU_XID_APPLICATION, "copy engine exception"},
    {41, MU_XID_APPLICATION, "copy engine exception"},
    {43, MU_XID_NOTICE, "GPU stopped processing"},
    {44, MU_XID_NOTICE, "fault during a context switch"},
    {45, MU_XID_NOTICE, "clean-up after another error"},
    {46, MU_XID_FATAL, "GPU stopped processing"},
    {48, MU_XID_FATAL, "double-bit ECC error"},
    {54, MU_XID_FATAL, "auxiliary power is not connected"},
    {62, MU_XID_FATAL, "internal micro-controller halt"},
    {63, MU_XID_NOTICE, "memory row remapped"},
    {64, MU_XID_FATAL, "memory row remapping failed"},
    {66, MU_XID_NOTICE, "illegal access by the driver"},
    {67, MU_XID_NOTICE, "illegal access by the driver"},
    {68, MU_XID_APPLICATION, "video decoder exception"},
    {69, MU_XID_APPLICATION, "graphics engine class error"},
    {74, MU_XID_FATAL, "NVLink error"},
    {79, MU_XID_FATAL, "GPU has fallen off the bus"},
    {80, MU_XID_APPLICATION, "corrupted data sent to the GPU"},
    {92, MU_XID_NOTICE, "high rate of single-bit ECC errors"},
    {93, MU_XID_NOTICE, "InfoROM wear limit"},
    {94, MU_XID_APPLICATION, "contained memory error"},
    {95, MU_XID_FATAL, "uncontained memory error"},
    {109, MU_XID_FATAL, "context switch timed out"},
    {110, MU_XID_FATAL, "security fault"},
    {119, MU_XID_FATAL, "GPU system processor does not answer"},
    {120, MU_XID_FATAL, "GPU system processor error"},
    {121, MU_XID_NOTICE, "chip-to-chip link error"},
    {136, MU_XID_FATAL, "link training failed"},
    {137, MU_XID_NOTICE, "NVLink privilege error"},
    {140, MU_XID_FATAL, "unrecovered ECC error"},
    {141, MU_XID_NOTICE, "CUDA fast path error"},
    {143, MU_XID_FATAL, "GPU initialization error"},
    {144, MU_XID_NOTICE, "NVLink SAW error"},
    {145, MU_XID_NOTICE, "NVLink RLW error"},
    {146, MU_XID_NOTICE, "NVLink TLW error"},
    {147, MU_XID_NOTICE, "NVLink TREX error"},
    {148, MU_XID_NOTICE, "NVLink NVLPW_CTRL error"},
    {149, MU_XID_NOTICE, "NVLink NETIR error"},
    {150, MU_XID_NOTICE, "NVLink MSE error"},
    {154, MU_XID_NOTICE, "recovery action changed"},
    {155, MU_XID_FATAL, "NVLink error defined by software"},
    {156, MU_XID_FATAL, "resource retired"},
    {157, MU_XID_NOTICE, "resource retirement failed"},
    {158, MU_XID_FATAL, "GPU fatal timeout"},
    {160, MU_XID_NOTICE, "channel retired"},
    {161, MU_XID_NOTICE, "channel retirement failed"},
};

const struct mu_xid *mu_xid_find(uint32_t number)
{
    static const struct mu_xid unknown = {0, MU_XID_UNKNOWN, "not in the table"};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].number == number)
            return &table[i];
    return &unknown;
}
