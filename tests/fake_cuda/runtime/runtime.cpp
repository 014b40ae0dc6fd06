// The CUDA runtime: devices, memory, streams, events, captures.
#include "node.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <dlfcn.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

static const size_t GiB = 1ull << 30;
static const Kind KINDS[] = {
    {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 80 * GiB, 227, false},
    {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 * GiB, 163, false},
    {"L40", "NVIDIA L40S", 8, 9, 142, 45 * GiB, 99, false},
    {"B200", "NVIDIA B200", 10, 0, 148, 178 * GiB, 227, false},
    {"RTX6000", "NVIDIA RTX PRO 6000 Blackwell", 12, 0, 188, 96 * GiB, 99, false},
    {"T4", "Tesla T4", 7, 5, 40, 15 * GiB, 64, false},
    {"MIG", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0, 60, 40 * GiB, 227, true},
};
static const size_t CONTEXT_BYTES = 534ull << 20;

static std::string variable(const char* name, const char* otherwise = "") {
    const char* found = getenv((std::string("FAKE_CUDA_") + name).c_str());
    return found ? found : otherwise;
}

// ---- The node

static std::vector<std::string> parts(const std::string& text, char mark) {
    std::vector<std::string> found;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, mark);)
        if (!part.empty()) found.push_back(part);
    return found;
}

static Node make_node() {
    Node made;
    std::vector<const Kind*> all;
    for (const std::string& part : parts(variable("GPUS", "8xH100"), ',')) {
        size_t x = part.find('x');
        std::string name = x == std::string::npos ? part : part.substr(x + 1);
        int count = x == std::string::npos ? 1 : atoi(part.c_str());
        const Kind* kind = nullptr;
        for (const Kind& one : KINDS)
            if (name == one.word) kind = &one;
        if (!kind) fprintf(stderr, "FAKE_CUDA_GPUS has no kind %s\n", name.c_str()), abort();
        all.insert(all.end(), count, kind);
    }
    made.counted = (int)all.size();
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !visible && i < made.counted; i++) made.numbers.push_back(i);
    if (visible)
        for (const std::string& part : parts(visible, ',')) {
            int number = isdigit(part[0]) ? atoi(part.c_str()) : -1;
            if (number < 0 || number >= made.counted) break;  // as CUDA does: those before it are visible
            made.numbers.push_back(number);
        }
    for (int number : made.numbers) made.kinds.push_back(all[number]);
    std::string driver = variable("DRIVER");
    if (!driver.empty()) made.driver = (int)(atof(driver.c_str()) * 1000 + 0.5) / 10 * 10;
    made.free_bytes = (size_t)(atof(variable("FREE_GIB", "0").c_str()) * GiB);
    made.is_lazy = variable("LAZY", "0") == "1";
    return made;
}

const Node& node() { static Node& made = *new Node(make_node()); return made; }

// "1" (the default) and "0" are for all pairs; "0-1,2-3" names those that can.
bool Node::reaches(const char* name, int a, int b) const {
    std::string text = variable(name, "1");
    if (text == "0" || text == "1") return text == "1";
    for (const std::string& pair : parts(text, ',')) {
        int one = -1, other = -1;
        sscanf(pair.c_str(), "%d-%d", &one, &other);
        if ((one == numbers[a] && other == numbers[b]) || (one == numbers[b] && other == numbers[a])) return true;
    }
    return false;
}

bool strikes(const char* fault, int device) {
    static std::mutex lock;
    static std::map<std::string, long> counts;
    static const std::vector<std::string> given = parts(variable("FAULTS"), ' ');
    for (const std::string& one : given) {
        char name[16];
        int on;
        long from;
        if (sscanf(one.c_str(), "%15[a-z]@%d:%ld", name, &on, &from) != 3 || strcmp(name, fault)) continue;
        if (on != node().numbers[device]) continue;
        std::lock_guard<std::mutex> guard(lock);
        if (++counts[one] < from) return false;
        if (counts[one] == from) say("fault", ",\"fault\":\"%s\"", fault);
        return true;
    }
    return false;
}

// ---- The log

static thread_local int current = 0;
static long thread_id() { return syscall(SYS_gettid); }

void say(const char* event, const char* format, ...) {
    static FILE* file = [] {
        std::string folder = variable("LOG");
        return folder.empty() ? nullptr : fopen((folder + "/" + std::to_string(getpid()) + ".jsonl").c_str(), "a");
    }();
    if (!file) return;
    char rest[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rest, sizeof rest, format, arguments);
    va_end(arguments);
    int device = current < (int)node().numbers.size() ? node().numbers[current] : current;
    bool is_main = thread_id() == getpid();
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    fprintf(file, "{\"thread\":%ld,\"main\":%s,\"device\":%d,\"event\":\"%s\"%s}\n", thread_id(),
            is_main ? "true" : "false", device, event, rest);
    fflush(file);
}

// ---- Python's lock: who holds it and waits for another thread lets that one have it

void nap() {
    static auto holds = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    void* state = holds && save && restore && holds() ? save() : nullptr;
    usleep(100);
    if (state) restore(state);
}

// ---- Devices

static std::atomic<bool> contexts[64];
static std::atomic<bool> is_lost[64];
static auto& lock = *new std::recursive_mutex;
using Guard = std::lock_guard<std::recursive_mutex>;

int current_device() { return current; }
bool has_context(int device) { return contexts[device]; }

void need_context(const char* function) {
    char thread[16] = "";  // torch names its own
    if (contexts[current].exchange(true)) return;
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    say("context", ",\"by\":\"%s\",\"name\":\"%s\"", function, thread);
}

// Devices that are gone fail every call, as after an Xid.
static cudaError_t state() {
    if (!is_lost[current] && strikes("lost", current)) is_lost[current] = true;
    return is_lost[current] ? cudaErrorLaunchFailure : cudaSuccess;
}

static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t error) { return last_error = error; }
static cudaError_t ready(const char* function) {
    if (node().driver < 13000) return fail(cudaErrorInsufficientDriver);
    if (node().kinds.empty()) return fail(cudaErrorNoDevice);
    need_context(function);
    cudaError_t found = state();
    return found == cudaSuccess ? found : fail(found);
}
#define READY(function) \
    if (cudaError_t error = ready(function)) return error

static std::atomic<int> global_captures{0};
static thread_local int own_captures = 0;
static thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

static void forbid(const char* call, bool is_own) {
    say("forbidden", ",\"call\":\"%s\",\"own\":%s", call, is_own ? "true" : "false");
}
bool is_unsafe(const char* function) {
    bool is_own = own_captures && capture_mode != cudaStreamCaptureModeRelaxed;
    bool is_beside = !own_captures && global_captures && capture_mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_beside) forbid(function, is_own);
    return is_own || is_beside;
}
#define SAFE(function) \
    if (is_unsafe(function)) return fail(cudaErrorStreamCaptureUnsupported)

// ---- Streams

static auto& streams = *new std::set<Stream*>;  // never destroyed, as all that go_on() reads

Stream* stream_of(void* handle) {
    static auto& defaults = *new std::map<int, Stream*>;
    if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
    Guard guard(lock);
    if (!defaults[current]) streams.insert(defaults[current] = new Stream{current});
    return defaults[current];
}
static std::vector<Stream*> streams_of(int device) {  // -1: of all
    std::vector<Stream*> found;
    Guard guard(lock);
    for (Stream* stream : streams)
        if ((device < 0 || stream->device == device) && !stream->graph) found.push_back(stream);
    return found;
}

bool advance(Stream* stream, uint64_t target) {
    std::unique_lock<std::recursive_mutex> guard(lock);
    while (stream->done < target && !stream->is_running && !stream->queue.empty()) {
        Operation& operation = stream->queue.front();  // a deque keeps its place while others are added
        stream->is_running = true;
        guard.unlock();
        bool is_done = operation();
        guard.lock();
        stream->is_running = false;
        if (!is_done) return false;
        stream->queue.pop_front();
        stream->done++;
    }
    return stream->done >= target;
}

void drain(Stream* stream, uint64_t target) { while (!advance(stream, target)) nap(); }


bool advance_device() {
    bool is_done = true;
    for (Stream* stream : streams_of(current)) is_done &= advance(stream, stream->given);
    return is_done;
}
static void drain_device() {
    while (!advance_device()) nap();
}

// A device goes on though nobody waits, so that other ranks are not held up; a lazy one a moment later.
static void go_on() {
    for (;;) {
        usleep(node().is_lazy ? 30000 : 1000);
        for (Stream* stream : streams_of(-1)) advance(stream, stream->given);
    }
}

void give(Stream* stream, Operation operation) {
    if (stream->graph) {
        Guard guard(lock);
        stream->recorded++;
        stream->graph->nodes.push_back(std::move(operation));
        return;
    }
    static bool goes_on = (std::thread(go_on).detach(), true);
    (void)goes_on;
    uint64_t target;
    {
        Guard guard(lock);
        stream->queue.push_back(std::move(operation));
        target = ++stream->given;
    }
    if (node().is_lazy) return;
    for (int tries = 0; tries < 2000 && !advance(stream, target); tries++) nap();
}

struct Event {
    Stream* stream = nullptr;
    uint64_t position = 0;
    std::shared_ptr<Graph> graph;
    uint64_t recorded = 0;
};

#define OK return cudaSuccess

// The block of a map of addresses that holds one.
template <typename Map, typename Size>
static typename Map::const_iterator holder(const Map& map, char* address, Size size) {
    auto found = map.upper_bound(address);
    if (found == map.begin()) return map.end();
    --found;
    return found->first + size(found->second) > address ? found : map.end();
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 0;
    if (node().driver < 13000) return fail(cudaErrorInsufficientDriver);
    *count = (int)node().kinds.size();
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) { *device = current; OK; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= (int)node().kinds.size()) return fail(cudaErrorInvalidDevice);
    current = device;
    return ready("cudaSetDevice");
}
cudaError_t cudaDriverGetVersion(int* version) { *version = node().driver; OK; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; OK; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
    const Kind& kind = *node().kinds.at(device);
    int number = node().numbers[device];
    memset(found, 0, sizeof *found);
    strcpy(found->name, kind.name);
    found->major = kind.major, found->minor = kind.minor, found->multiProcessorCount = kind.processors;
    found->totalGlobalMem = kind.memory;
    found->warpSize = 32, found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048;
    found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = kind.shared_kib << 10;
    found->sharedMemPerMultiprocessor = (kind.shared_kib + 1) << 10;
    found->regsPerMultiprocessor = found->regsPerBlock = 65536;
    found->l2CacheSize = 50 << 20, found->textureAlignment = 512;
    for (int i = 0; i < 3; i++)
        found->maxGridSize[i] = i ? 65535 : 2147483647, found->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    found->pciBusID = kind.is_slice ? 1 : number + 1;
    memset(found->uuid.bytes, number + 1, 16);
    OK;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    const Kind& kind = *node().kinds.at(device);
    static const std::map<int, int> fixed = {{cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32},
                                             {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10}};
    auto it = fixed.find(attribute);
    *value = it != fixed.end()                                        ? it->second
             : attribute == cudaDevAttrComputeCapabilityMajor         ? kind.major
             : attribute == cudaDevAttrComputeCapabilityMinor         ? kind.minor
             : attribute == cudaDevAttrMultiProcessorCount            ? kind.processors
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin   ? kind.shared_kib << 10
                                                                      : 0;
    OK;
}
cudaError_t cudaDeviceCanAccessPeer(int* value, int a, int b) { *value = node().reaches("P2P", a, b); OK; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { OK; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", node().kinds[device]->is_slice ? 1 : node().numbers[device] + 1);
    OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    OK;
}

// ---- Memory

struct Block {
    size_t bytes;
    int device;
    bool is_mapped;  // by the driver's functions, whose handles own it
};
static auto& blocks = *new std::map<char*, Block>;  // never destroyed: end() reads it
static auto &pinned = *new std::map<char*, size_t>, &registered = *new std::map<char*, size_t>;
static size_t used_bytes[64];

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    READY("cudaMemGetInfo");
    Guard guard(lock);
    *total = node().kinds[current]->memory;
    size_t room = node().free_bytes ? node().free_bytes : *total - CONTEXT_BYTES;
    *free_bytes = room > used_bytes[current] ? room - used_bytes[current] : 0;
    OK;
}
cudaError_t cudaMalloc(void** address, size_t bytes) {
    *address = nullptr;
    SAFE("cudaMalloc");
    READY("cudaMalloc");
    size_t free_bytes, total;
    cudaMemGetInfo(&free_bytes, &total);
    if (strikes("alloc", current) || bytes > free_bytes) return fail(cudaErrorMemoryAllocation);
    if (posix_memalign(address, 2 << 20, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
    memset(*address, 0xff, bytes < (64u << 20) ? bytes : 0);  // no number, as far as a read could tell
    Guard guard(lock);
    blocks[(char*)*address] = {bytes, current, false};
    used_bytes[current] += bytes;
    OK;
}
cudaError_t cudaFree(void* address) {
    if (!address) return ready("cudaFree");
    SAFE("cudaFree");
    READY("cudaFree");
    drain_device();
    Guard guard(lock);
    auto found = blocks.find((char*)address);
    if (found == blocks.end()) return fail(cudaErrorInvalidValue);
    used_bytes[found->second.device] -= found->second.bytes;
    blocks.erase(found);
    free(address);
    OK;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    SAFE("cudaHostAlloc");
    READY("cudaHostAlloc");
    if (posix_memalign(address, 4096, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
    Guard guard(lock);
    pinned[(char*)*address] = bytes;
    OK;
}
cudaError_t cudaFreeHost(void* address) {
    drain_device();
    Guard guard(lock);
    if (!pinned.erase((char*)address)) return fail(cudaErrorInvalidValue);
    free(address);
    OK;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    READY("cudaHostRegister");
    Guard guard(lock);
    registered[(char*)address] = bytes;
    OK;
}
cudaError_t cudaHostUnregister(void* address) {
    drain_device();
    Guard guard(lock);
    return registered.erase((char*)address) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

static bool is_pinned(const void* address) {
    Guard guard(lock);
    auto itself = [](size_t bytes) { return bytes; };
    return holder(pinned, (char*)address, itself) != pinned.end() ||
           holder(registered, (char*)address, itself) != registered.end();
}
static int device_holding(const void* address) {  // -1: memory of the host
    Guard guard(lock);
    auto found = holder(blocks, (char*)address, [](const Block& block) { return block.bytes; });
    return found == blocks.end() ? -1 : found->second.device;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    memset(found, 0, sizeof *found);
    found->device = device_holding(address);
    bool is_known = found->device >= 0 || is_pinned(address);
    found->type = found->device >= 0 ? cudaMemoryTypeDevice
                  : is_known         ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
    if (is_known) found->devicePointer = (void*)address;
    if (found->type == cudaMemoryTypeHost) found->hostPointer = (void*)address;
    OK;
}

// Copies from pageable memory have read it when they return; copies to pageable memory have ended.
static cudaError_t copy(void* target, const void* source, size_t bytes, void* handle) {
    Stream* stream = stream_of(handle);
    bool from_pageable = device_holding(source) < 0 && !is_pinned(source);
    bool to_pageable = device_holding(target) < 0 && !is_pinned(target);
    if ((from_pageable || to_pageable) && stream->graph) forbid("a copy of pageable memory", true);
    if (from_pageable) {
        auto kept = std::make_shared<std::string>((const char*)source, bytes);
        give(stream, [=] { memcpy(target, kept->data(), bytes); return true; });
    } else { give(stream, [=] { memmove(target, source, bytes); return true; }); }
    if (to_pageable && !stream->graph) drain(stream, stream->given);
    OK;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    SAFE("cudaMemcpy");
    READY("cudaMemcpy");
    copy(target, source, bytes, nullptr);
    drain(stream_of(nullptr), stream_of(nullptr)->given);
    OK;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    READY("cudaMemcpyAsync");
    return copy(target, source, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpyAsync((char*)target + row * target_pitch, (const char*)source + row * pitch, width, kind, stream);
    OK;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
    READY("cudaMemsetAsync");
    give(stream_of(stream), [=] { memset(target, value, bytes); return true; });
    OK;
}
cudaError_t cudaMemset(void* target, int value, size_t bytes) { return cudaMemsetAsync(target, value, bytes, nullptr); }

// ---- Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    READY("cudaStreamCreate");
    Stream* made = new Stream{current, priority};
    Guard guard(lock);
    streams.insert(made);
    *stream = (cudaStream_t)made;
    OK;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = stream_of(stream)->priority; OK; }
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    READY("cudaStreamQuery");
    SAFE("cudaStreamQuery");
    Stream* stream = stream_of(handle);
    return advance(stream, stream->given) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    READY("cudaStreamSynchronize");
    SAFE("cudaStreamSynchronize");
    Stream* stream = stream_of(handle);
    drain(stream, stream->given);
    return ready("cudaStreamSynchronize");
}
cudaError_t cudaDeviceSynchronize() {
    READY("cudaDeviceSynchronize");
    SAFE("cudaDeviceSynchronize");
    drain_device();
    return ready("cudaDeviceSynchronize");
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    READY("cudaEventCreate");
    *event = (cudaEvent_t) new Event;
    OK;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
    READY("cudaEventRecord");
    Stream* stream = stream_of(handle);
    Guard guard(lock);
    *(Event*)event = {stream, stream->given, stream->graph, stream->recorded};
    OK;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) { return cudaEventRecordWithFlags(event, on, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    READY("cudaEventQuery");
    SAFE("cudaEventQuery");
    Event event = *(Event*)handle;
    return !event.stream || advance(event.stream, event.position) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    READY("cudaEventSynchronize");
    SAFE("cudaEventSynchronize");
    Event event = *(Event*)handle;
    if (event.stream) drain(event.stream, event.position);
    return ready("cudaEventSynchronize");
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 1; OK; }

// A stream that waits for an event of a capture joins it; its first stream takes others back in the same way.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned) {
    Stream* stream = stream_of(handle);
    Event event = *(Event*)waited;
    if (!event.stream || event.stream == stream) OK;
    if (event.graph) {
        Guard guard(lock);
        if (!stream->graph) stream->graph = event.graph, stream->recorded = stream->joined = 0;
        if (event.stream->joined < event.recorded) event.stream->joined = event.recorded;
    } else if (!stream->graph) { give(stream, [event] { return advance(event.stream, event.position); }); }
    OK;
}

// ---- Captures

using Held = std::shared_ptr<Graph>;  // what handles of graphs point to

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    static std::atomic<int> number{0};
    Stream* stream = stream_of(handle);
    stream->graph = std::make_shared<Graph>();
    stream->graph->number = number++;
    stream->recorded = stream->joined = 0;
    own_captures++;
    if (mode == cudaStreamCaptureModeGlobal) global_captures++;
    say("capture", ",\"graph\":%d", stream->graph->number);
    OK;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Stream* stream = stream_of(handle);
    Guard guard(lock);
    Held made = stream->graph;
    own_captures--, global_captures = global_captures > 0 ? global_captures - 1 : 0;
    for (Stream* other : streams) {
        if (other->graph != made) continue;
        if (other != stream && other->joined < other->recorded) forbid("the end without a stream that joined", true);
        other->graph = nullptr;
    }
    *graph = (cudaGraph_t) new Held(made);
    say("captured", ",\"graph\":%d,\"nodes\":%zu", made->number, made->nodes.size());
    OK;
}
static cudaStreamCaptureStatus status_of(cudaStream_t stream) {
    return stream_of(stream)->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t on, cudaStreamCaptureStatus* status) { *status = status_of(on); OK; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
    *status = status_of(stream);
    if (id) *id = stream_of(stream)->graph ? stream_of(stream)->graph->number + 1 : 0;
    if (graph) *graph = (cudaGraph_t)stream_of(stream)->graph.get();
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, capture_mode); OK; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = (cudaGraphExec_t) new Held(*(Held*)graph);
    OK;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    READY("cudaGraphLaunch");
    Held launched = *(Held*)graph;
    say("replay", ",\"graph\":%d", launched->number);
    for (const Operation& operation : launched->nodes) give(stream_of(stream), operation);
    OK;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    *count = (*(Held*)graph)->nodes.size();
    OK;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Held*)graph; OK; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { delete (Held*)graph; OK; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned, unsigned) {
    *made = (cudaUserObject_t)malloc(8);
    OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    give(stream_of(stream), [=] { function(data); return true; });
    OK;
}

// ---- Errors

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    static thread_local char text[24];
    snprintf(text, 24, "cudaError %d", error);
    return text;
}
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorLaunchFailure: return "unspecified launch failure";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorNotReady: return "device not ready";
        default: return cudaGetErrorName(error);
    }
}

// ---- Kernels: compiled ones do nothing, and are in the log once, because their results are missing

static std::unordered_map<const void*, const char*>& kernels() {
    static std::unordered_map<const void*, const char*> names;
    return names;
}
static cudaError_t launch(const void* kernel) {
    READY("cudaLaunchKernel");
    static std::unordered_set<const void*> seen;
    Guard guard(lock);
    if (seen.insert(kernel).second) say("kernel", ",\"name\":\"%.400s\"", kernels()[kernel] ? kernels()[kernel] : "?");
    OK;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launch(kernel); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* kernel) { *found = (cudaKernel_t)kernel; OK; }
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void**)stream = configuration.stream;
    OK;
}
void** __cudaRegisterFatBinary(void*) { static void* handle[2]; return handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name) {  // and what says how it is called
    kernels()[function] = name;
}
void __cudaRegisterVar() {}
char __cudaInitModule(void**) { return 0; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->binaryVersion = found->ptxVersion = 90;
    OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
    *count = 2;
    OK;
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) { static char room[1 << 16]; *address = room; OK; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    *found = library ? dlsym(library, name) : nullptr;
    if (!*found) *found = (void*)+[] { return CUDA_ERROR_NOT_SUPPORTED; };
    if (result) *result = cudaDriverEntryPointSuccess;
    OK;
}

// ---- For Python (../device.py), whose closures are operations too

int fake_cuda_defers(void* handle) {
    Stream* stream = stream_of(handle);
    Guard guard(lock);
    return stream->graph ? 2 : node().is_lazy || !stream->queue.empty();
}
void fake_cuda_give(void* handle, int (*function)(long), long number) {  // 0: it waits for another rank
    if (own_captures && !stream_of(handle)->graph) forbid("an operation of another stream", true);
    give(stream_of(handle), [=] { return function(number) != 0; });
}
void fake_cuda_say(const char* event, const char* text) { say(event, ",\"name\":\"%.400s\"", text); }
}

size_t bytes_of_device(int device) { return CONTEXT_BYTES + used_bytes[device]; }
void own_memory(void* address, size_t bytes, int device) {
    Guard guard(lock);
    blocks[(char*)address] = {bytes, device, true};
}
void disown_memory(void* address) { Guard guard(lock); blocks.erase((char*)address); }

// What is left when the process ends, if it ends by itself.
__attribute__((destructor)) static void end() {
    size_t device = 0, host = 0, mapped = 0, mappings = 0;
    for (auto& [address, block] : blocks) (block.is_mapped ? mapped : device) += block.bytes;
    for (auto& [address, bytes] : pinned) host += bytes;
    for (auto& [address, bytes] : registered) mappings += bytes;
    bool has_any = false;
    for (auto& one : contexts) has_any |= one;
    const char* format = ",\"device_bytes\":%zu,\"pinned_bytes\":%zu,\"registered_bytes\":%zu,\"mapped_bytes\":%zu";
    if (has_any) say("end", format, device, host, mappings, mapped);
}
