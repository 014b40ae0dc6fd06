// What torch and the engine ask of libcuda.so.1 and libnvidia-ml.so.1 themselves: places and facts of devices, and
// memory with handles (memfd) that other processes can map.
#include "node.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using Shared = CUmemGenericAllocationHandle;
struct Handle { int file; size_t bytes; int device; };
static auto& mappings = *new std::map<CUdeviceptr, Handle*>;
static const size_t STEP = 2 << 20;

#define OK return CUDA_SUCCESS

extern "C" {
CUresult cuInit(unsigned) { OK; }
CUresult cuDriverGetVersion(int* version) { *version = node().driver; OK; }
CUresult cuDeviceGet(CUdevice* device, int index) { *device = index; OK; }
CUresult cuDeviceGetCount(int* count) { *count = (int)node().gpus.size(); OK; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ||
             attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    OK;
}
CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice a, CUdevice b) {
    bool is_atomic = attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    *value = node().reaches("P2P", a, b) && (!is_atomic || node().reaches("ATOMICS", a, b));
    OK;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned*, int* active) { *active = has_context(device); OK; }
CUresult cuCtxGetCurrent(CUcontext* context) { *context = (CUcontext)(size_t)has_context(current_device()); OK; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the driver that does not exist"; OK; }

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = STEP;
    OK;
}
CUresult cuMemCreate(Shared* made, size_t bytes, const CUmemAllocationProp* how, unsigned long long) {
    if (how->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    int file = strikes("alloc") ? -1 : memfd_create("fake_cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (Shared) new Handle{file, bytes, how->location.id};
    OK;
}
CUresult cuMemExportToShareableHandle(void* shared, Shared handle, CUmemAllocationHandleType, unsigned long long) {
    *(int*)shared = dup(((Handle*)handle)->file);
    OK;
}
CUresult cuMemImportFromShareableHandle(Shared* made, void* shared, CUmemAllocationHandleType) {
    struct stat found;
    int file = dup((int)(uintptr_t)shared);
    if (file < 0 || fstat(file, &found)) return CUDA_ERROR_INVALID_VALUE;
    *made = (Shared) new Handle{file, (size_t)found.st_size, current_device()};
    OK;
}
CUresult cuMemRelease(Shared handle) { close(((Handle*)handle)->file); OK; }  // mappings go on without it
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uintptr_t room = (uintptr_t)mmap(nullptr, bytes + STEP, PROT_NONE, flags, -1, 0);
    *address = (room + STEP - 1) / STEP * STEP;
    OK;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { munmap((void*)address, bytes); OK; }
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, Shared handle, unsigned long long) {
    Handle* from = (Handle*)handle;
    void* found = mmap((void*)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, from->file, offset);
    if (found == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    own(found, bytes, from->device, MAPPED);
    mappings[address] = from;
    OK;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    disown((void*)address);
    mappings.erase(address);
    mmap((void*)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    OK;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { OK; }
CUresult cuMemRetainAllocationHandle(Shared* found, void* address) {
    auto it = mappings.find((CUdeviceptr)address);
    *found = it == mappings.end() ? 0 : (Shared)it->second;
    return *found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- The library of nvidia-smi, whose handles are numbers from 1; it counts devices whatever the driver takes

int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = node().driver; return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = node().counted; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { *handle = (void*)(uintptr_t)(index + 1); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) { *handle = (void*)1; return 0; }
int nvmlDeviceGetHandleByUUID(const char* text, void** handle) {
    unsigned first = 0;
    sscanf(text, "GPU-%2x", &first);
    *handle = (void*)(uintptr_t)first;
    return first ? 0 : 6;  // not found
}
struct ProcessInfo { unsigned pid; unsigned long long bytes; unsigned instances[2]; };
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, ProcessInfo* found) {
    *count = 0;
    for (size_t device = 0; device < node().gpus.size(); device++)
        if (node().gpus[device].number + 1 == (int)(uintptr_t)handle && has_context(device))
            found[(*count)++] = {(unsigned)getpid(), bytes_of_device(device), {}};
    return 0;
}
// What it does not support; torch wants them to exist.
#define REFUSED(name) int name(void*, unsigned, void*) { return 3; }
REFUSED(nvmlDeviceGetClockInfo)
REFUSED(nvmlDeviceGetComputeRunningProcesses)
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // "not supported", as torch has filled it in
}
