/* Copies and fills. As in CUDA, ordinary host memory makes a copy half synchronous: it is read before the call returns,
 * or written before. */
#include "tests/cudasim/runtime.h"

#include <cstring>
#include <memory>

namespace cudasim
{

struct area {
    const char *at;
    size_t pitch, width, height;
    size_t span() const
    {
        return height == 0 || width == 0 ? 0 : pitch * (height - 1) + width;
    }
};

static bool matches(enum cudaMemcpyKind kind, const area &to, const area &from)
{
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return (!to_device || is_device_range(to.at, to.span())) &&
           (!from_device || is_device_range(from.at, from.span())) && is_sound_range(to.at, to.span()) &&
           is_sound_range(from.at, from.span());
}

static void copy_area(char *to, size_t to_pitch, const area &from)
{
    for (size_t row = 0; row < from.height; row++)
        memmove(to + row * to_pitch, from.at + row * from.pitch, from.width);
}

static cudaError_t copy(char *to, size_t to_pitch, area from, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const area target = {to, to_pitch, from.width, from.height};
    if (from.span() == 0)
        return cudaSuccess;
    if (from.width > from.pitch || from.width > to_pitch || !matches(kind, target, from))
        return cudaErrorInvalidValue;
    CUstream_st *s = stream_of(stream);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    const bool pageable_from = region_of(from.at).kind == region_kind::none;
    const bool pageable_to = region_of(to).kind == region_kind::none;
    std::shared_ptr<std::vector<char>> staged;
    if (pageable_from && !s->capture) {
        staged = std::make_shared<std::vector<char>>(from.width * from.height);
        copy_area(staged->data(), from.width, from);
        from.at = staged->data();
        from.pitch = from.width;
    }
    const cudaError_t error = enqueue(stream, [=] {
        (void)staged;
        copy_area(to, to_pitch, from);
        return cudaSuccess;
    });
    if (error || !pageable_to || s->capture)
        return error;
    return stream_wait(s);
}

static cudaError_t fill(char *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream)
{
    const area target = {to, pitch, width, height};
    if (target.span() == 0)
        return cudaSuccess;
    if (!is_device_range(to, target.span()))
        return cudaErrorInvalidValue;
    return enqueue(stream, [=] {
        for (size_t row = 0; row < height; row++)
            memset(to + row * pitch, value, width);
        return cudaSuccess;
    });
}

static cudaError_t then_wait(cudaError_t error)
{
    return error ? error : stream_wait(device_here().null_stream);
}

} // namespace cudasim

using namespace cudasim;

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (const cudaError_t error = enter("cudaMemcpyAsync"))
        return error;
    return leave(copy(static_cast<char *>(to), to_pitch, {static_cast<const char *>(from), from_pitch, width, height},
                      kind, stream));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, size, from, size, size, 1, kind, stream);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind)
{
    return leave(then_wait(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr)));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    return leave(then_wait(cudaMemcpyAsync(to, from, size, kind, nullptr)));
}

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream)
{
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream)
{
    if (const cudaError_t error = enter("cudaMemsetAsync"))
        return error;
    return leave(fill(static_cast<char *>(to), pitch, value, width, height, stream));
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream)
{
    return cudaMemset2DAsync(to, size, value, size, 1, stream);
}

cudaError_t cudaMemset(void *to, int value, size_t size)
{
    return leave(then_wait(cudaMemsetAsync(to, value, size, nullptr)));
}
