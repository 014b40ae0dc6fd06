// What torch and the engine ask of libcuda.so.1 and libnvidia-ml.so.1 themselves: places and facts of devices, and
// memory with handles (memfd) that other processes can map.
#include "node.h"

#include <cstdio>
#include <cstring>
#include <map>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct Handle { int file; size_t bytes; int device; };
static std::map<CUdeviceptr, Handle*>& mappings() {
    static auto& all = *new std::map<CUdeviceptr, Handle*>;
    return all;
}

using Shared = CUmemGenericAllocationHandle;

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { *version = node().driver; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { *count = (int)node().kinds.size(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice a, CUdevice b) {
    bool is_atomic = attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    *value = node().reaches("P2P", a, b) && (!is_atomic || node().reaches("ATOMICS", a, b));
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
    if (flags) *flags = 0;
    *is_active = has_context(device);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = has_context(current_device()) ? (CUcontext)1 : nullptr;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the driver that does not exist";
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(Shared* made, size_t bytes, const CUmemAllocationProp* how, unsigned long long) {
    if (how->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    if (strikes("alloc", current_device())) return CUDA_ERROR_OUT_OF_MEMORY;
    int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (Shared) new Handle{file, bytes, how->location.id};
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void* shared, Shared handle, CUmemAllocationHandleType, unsigned long long) {
    *(int*)shared = dup(((Handle*)handle)->file);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(Shared* made, void* shared, CUmemAllocationHandleType) {
    struct stat found;
    int file = dup((int)(uintptr_t)shared);
    if (file < 0 || fstat(file, &found)) return CUDA_ERROR_INVALID_VALUE;
    *made = (Shared) new Handle{file, (size_t)found.st_size, current_device()};
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(Shared handle) {
    close(((Handle*)handle)->file);  // mappings go on without it
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
    size_t step = alignment > (2 << 20) ? alignment : 2 << 20;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uintptr_t room = (uintptr_t)mmap(nullptr, bytes + step, PROT_NONE, flags, -1, 0);
    *address = (room + step - 1) / step * step;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { munmap((void*)address, bytes); return CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, Shared handle, unsigned long long) {
    Handle* from = (Handle*)handle;
    void* found = mmap((void*)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, from->file, offset);
    if (found == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    own_memory(found, bytes, from->device);
    mappings()[address] = from;
    say("mapped", ",\"bytes\":%zu", bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    disown_memory((void*)address);
    mappings().erase(address);
    mmap((void*)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemRetainAllocationHandle(Shared* found, void* address) {
    auto it = mappings().find((CUdeviceptr)address);
    if (it == mappings().end()) return CUDA_ERROR_INVALID_VALUE;
    *found = (Shared)it->second;
    return CUDA_SUCCESS;
}

// ---- The library of nvidia-smi; it counts devices whatever the driver can do with them

int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = node().counted; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { *handle = (void*)(uintptr_t)(index + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char* text, void** handle) {
    unsigned byte = 0;
    sscanf(text, "GPU-%2x", &byte);
    *handle = (void*)(uintptr_t)byte;
    return byte ? 0 : 6;  // not found
}
struct ProcessInfo { unsigned pid; unsigned long long bytes; unsigned instances[2]; };
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, ProcessInfo* found) {
    *count = 0;
    for (size_t device = 0; device < node().numbers.size(); device++)
        if (node().numbers[device] + 1 == (int)(uintptr_t)handle && has_context(device))
            found[(*count)++] = {(unsigned)getpid(), bytes_of_device(device), {}};
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = node().driver; return 0; }
// What it does not support; torch wants them to exist.
#define REFUSED(name) int name(void*, unsigned, void*) { return 3; }
REFUSED(nvmlDeviceGetComputeRunningProcesses)
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSED(nvmlDeviceGetGpuFabricInfoV)
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) { *handle = (void*)1; return 0; }
int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
    const char* format = "GPU-%1$02x%1$02x%1$02x%1$02x-%1$02x%1$02x-%1$02x%1$02x-%1$02x%1$02x-"
                         "%1$02x%1$02x%1$02x%1$02x%1$02x%1$02x";
    snprintf(text, size, format, (int)(uintptr_t)handle);
    return 0;
}
}
