/* Devices as CUDASIM_DEVICES describes them, errors, and failures on demand. */
#include "tests/cudasim/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <unistd.h>

#include <cudasim/control.h>

extern "C" int mu_gpu_mutant_active;
int mu_gpu_mutant_active; /* common/gpu_mutant.h */

namespace cudasim
{

__thread bool inside_stream;
static __thread int current;
static __thread cudaError_t last_error;

/* ---- randomness ---- */

static std::atomic<uint64_t> seed{[] {
    const char *text = getenv("CUDASIM_SEED");
    return text ? strtoull(text, nullptr, 0) : 1;
}()};
static std::atomic<uint64_t> drawn{0};

uint64_t draw_seed()
{
    random_numbers mixed = {seed.load() * 0x9e3779b97f4a7c15u + drawn.fetch_add(1)};
    return mixed.next();
}

/* ---- devices ---- */

static std::vector<device *> *make_devices()
{
    /* count:name:compute capability:MiB of memory:multiprocessors */
    const char *text = getenv("CUDASIM_DEVICES");
    std::vector<std::string> field = {"1", "Emulated GPU", "9.0", "4096", "4"};
    std::istringstream given(text ? text : "");
    std::string part;
    for (size_t i = 0; i < field.size() && std::getline(given, part, ':'); i++)
        if (!part.empty())
            field[i] = part;
    auto *devices = new std::vector<device *>;
    for (int i = 0; i < atoi(field[0].c_str()); i++) {
        device *d = new device;
        d->index = i;
        d->name = field[1];
        if (sscanf(field[2].c_str(), "%d.%d", &d->major, &d->minor) != 2)
            d->major = 9, d->minor = 0;
        d->bytes = static_cast<size_t>(strtoull(field[3].c_str(), nullptr, 0)) << 20;
        d->multiprocessors = atoi(field[4].c_str());
        d->null_stream = stream_new(i, true);
        devices->push_back(d);
    }
    return devices;
}

static std::vector<device *> &devices()
{
    static std::vector<device *> *all = make_devices();
    return *all;
}

int device_count()
{
    return static_cast<int>(devices().size());
}
device &device_at(int index)
{
    return *devices()[static_cast<size_t>(index)];
}
device &device_here()
{
    return device_at(current);
}
void device_set_here(int index)
{
    current = index;
}

cudaUUID_t device_uuid(int index)
{
    cudaUUID_t uuid;
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    random_numbers mixed = {static_cast<uint64_t>(index) + 1};
    for (const char *c = host; *c; c++)
        mixed.state = mixed.next() ^ static_cast<unsigned char>(*c);
    const uint64_t words[2] = {mixed.next(), mixed.next()};
    memcpy(uuid.bytes, words, sizeof uuid.bytes);
    return uuid;
}

/* ---- failures on demand ---- */

struct failure {
    std::string function;
    unsigned left;
    int code;
};
static std::mutex failures_lock;

/* CUDASIM_FAIL=cudaMalloc:3,kernel:7=214: the third cudaMalloc fails as usual, the seventh kernel with error 214. */
static std::vector<failure> *parse_failures()
{
    auto *list = new std::vector<failure>;
    std::istringstream given(getenv("CUDASIM_FAIL") ? getenv("CUDASIM_FAIL") : "");
    std::string part;
    while (std::getline(given, part, ',')) {
        const size_t colon = part.find(':');
        failure f = {part.substr(0, colon), 1, 0};
        if (colon != std::string::npos && sscanf(part.c_str() + colon + 1, "%u=%d", &f.left, &f.code) < 1) {
            fprintf(stderr, "cudasim: CUDASIM_FAIL: cannot read '%s', write function:number or function:number=code\n",
                    part.c_str());
            abort();
        }
        list->push_back(f);
    }
    return list;
}

static std::vector<failure> &failures()
{
    static std::vector<failure> *list = parse_failures();
    return *list;
}

/* CUDASIM_FAIL_ONCE=PATH: failures are met by one process alone, the first one that meets any and so makes this file. */
static bool may_meet()
{
    const char *path = getenv("CUDASIM_FAIL_ONCE");
    static const int made = path ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644) : 0;
    return made >= 0;
}

int injected(const char *function, int usual)
{
    std::lock_guard<std::mutex> hold(failures_lock);
    for (size_t i = 0; i < failures().size(); i++) {
        failure &f = failures()[i];
        if (f.function != function || --f.left > 0)
            continue;
        const int code = f.code ? f.code : usual;
        failures().erase(failures().begin() + static_cast<ptrdiff_t>(i));
        return may_meet() ? code : 0;
    }
    return 0;
}

cudaError_t enter(const char *function, cudaError_t usual)
{
    if (inside_stream)
        return leave(cudaErrorNotPermitted);
    if (const int code = injected(function, usual))
        return leave(static_cast<cudaError_t>(code));
    if (device_count() == 0)
        return leave(cudaErrorNoDevice);
    return leave(static_cast<cudaError_t>(device_here().sticky.load()));
}

cudaError_t leave(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

} // namespace cudasim

using namespace cudasim;

void cudasim_fail(const char *function, unsigned nth, int code)
{
    std::lock_guard<std::mutex> hold(failures_lock);
    failures().push_back({function, nth, code});
}

void cudasim_fail_none(void)
{
    std::lock_guard<std::mutex> hold(failures_lock);
    failures().clear();
}

void cudasim_seed(uint64_t value)
{
    seed = value;
    drawn = 0;
}

size_t cudasim_device_bytes(int index)
{
    return device_at(index).used;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    if (last_error == cudaSuccess && device_count() > 0)
        return static_cast<cudaError_t>(device_here().sticky.load());
    return last_error;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorNvlinkUncorrectable, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};

const char *cudaGetErrorString(cudaError_t error)
{
    for (const auto &t : error_texts)
        if (t.code == error)
            return t.text;
    return "unknown error";
}

const char *cudaGetErrorName(cudaError_t error)
{
    for (const auto &t : error_texts)
        if (t.code == error)
            return t.name;
    return "cudaErrorUnknown";
}

/* ---- devices ---- */

static int version_from(const char *variable)
{
    const char *text = getenv(variable);
    return text ? atoi(text) : CUDART_VERSION;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = version_from("CUDASIM_DRIVER_VERSION");
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    if (const int code = injected("cudaGetDeviceCount", cudaErrorNoDevice))
        return leave(static_cast<cudaError_t>(code));
    *count = device_count();
    return leave(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int index)
{
    if (const int code = injected("cudaSetDevice", cudaErrorDevicesUnavailable))
        return leave(static_cast<cudaError_t>(code));
    if (index < 0 || index >= device_count())
        return leave(device_count() > 0 ? cudaErrorInvalidDevice : cudaErrorNoDevice);
    if (version_from("CUDASIM_DRIVER_VERSION") < CUDART_VERSION / 1000 * 1000)
        return leave(cudaErrorInsufficientDriver);
    current = index;
    guard_host_thread();
    return leave(static_cast<cudaError_t>(device_here().sticky.load()));
}

cudaError_t cudaInitDevice(int index, unsigned int, unsigned int)
{
    return index >= 0 && index < device_count() ? cudaSuccess : leave(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int *index)
{
    *index = current;
    return device_count() > 0 ? cudaSuccess : leave(cudaErrorNoDevice);
}

cudaError_t cudaSetDeviceFlags(unsigned int)
{
    return cudaSuccess;
}

cudaError_t cudaDeviceReset(void)
{
    if (device_count() == 0)
        return leave(cudaErrorNoDevice);
    device_wait(current);
    device_here().sticky = cudaSuccess;
    last_error = cudaSuccess;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    if (const cudaError_t error = enter("cudaDeviceSynchronize"))
        return error;
    device_wait(current);
    return leave(static_cast<cudaError_t>(device_here().sticky.load()));
}

/* Shared memory that a block may ask for beyond 48 KiB. */
static size_t shared_optin(const device &d)
{
    return d.major >= 9 ? 227 << 10 : d.minor == 0 ? 163 << 10 : 99 << 10;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int index)
{
    if (const int code = injected("cudaGetDeviceProperties", cudaErrorUnknown))
        return leave(static_cast<cudaError_t>(code));
    if (index < 0 || index >= device_count())
        return leave(cudaErrorInvalidDevice);
    const device &d = device_at(index);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", d.name.c_str());
    p->uuid = device_uuid(index);
    p->totalGlobalMem = d.bytes;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = shared_optin(d);
    p->sharedMemPerMultiprocessor = shared_optin(d) + 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = BLOCK_THREADS_MAX;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = d.major;
    p->minor = d.minor;
    p->multiProcessorCount = d.multiprocessors;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->ECCEnabled = 1;
    p->pciBusID = 16 + index;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index)
{
    struct cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, index))
        return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = p.maxThreadsPerBlock;
        break;
    case cudaDevAttrMaxGridDimX:
        *value = p.maxGridSize[0];
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = static_cast<int>(p.sharedMemPerBlock);
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(p.sharedMemPerBlockOptin);
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = static_cast<int>(p.sharedMemPerMultiprocessor);
        break;
    case cudaDevAttrWarpSize:
        *value = p.warpSize;
        break;
    case cudaDevAttrClockRate:
        *value = 1980000;
        break;
    case cudaDevAttrMemoryClockRate:
        *value = 3201000;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = p.multiProcessorCount;
        break;
    case cudaDevAttrEccEnabled:
        *value = p.ECCEnabled;
        break;
    case cudaDevAttrPciBusId:
        *value = p.pciBusID;
        break;
    case cudaDevAttrPciDeviceId:
        *value = p.pciDeviceID;
        break;
    case cudaDevAttrPciDomainId:
        *value = p.pciDomainID;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = p.memoryBusWidth;
        break;
    case cudaDevAttrL2CacheSize:
        *value = p.l2CacheSize;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = p.maxThreadsPerMultiProcessor;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = p.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = p.minor;
        break;
    default:
        return leave(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int index)
{
    if (index < 0 || index >= device_count())
        return leave(cudaErrorInvalidDevice);
    snprintf(text, static_cast<size_t>(size), "0000:%02X:00.0", 16 + index);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int index, int peer)
{
    *can = index != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int)
{
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
