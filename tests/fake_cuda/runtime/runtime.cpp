// The CUDA runtime: devices, memory, streams, events, captures.  What is not here, torch gets from CUDA's own library,
// which answers that there is no driver.
#include "node.h"

#include <cstdarg>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include <dirent.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

static const size_t GIB = 1ull << 30, CONTEXT_BYTES = 534ull << 20;

// ---- The node

static std::string variable(const char* name, const char* otherwise = "") {
    const char* found = getenv((std::string("FAKE_CUDA_") + name).c_str());
    return found ? found : otherwise;
}
static std::vector<std::string> parts(const std::string& text, char mark) {
    std::vector<std::string> found;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, mark);) found.push_back(part);
    return found;
}

const Node& node() {
    static const Node& made = *new Node([] {
        std::vector<Gpu> all;
        for (const std::string& part : parts(variable("DEVICES"), ';')) {
            Gpu gpu;
            sscanf(part.c_str(), "%63[^,],%d,%d,%d,%d,%d,%d", gpu.name, &gpu.major, &gpu.minor, &gpu.processors,
                   &gpu.gib, &gpu.shared_kib, &gpu.bus);
            gpu.number = (int)all.size();
            all.push_back(gpu);
        }
        Node node{{}, (int)all.size(), atoi(variable("DRIVER", "13000").c_str()),
                  (size_t)(atof(variable("FREE_GIB").c_str()) * GIB), atoi(variable("LAZY").c_str())};
        const char* visible = getenv("CUDA_VISIBLE_DEVICES");
        if (!visible) node.gpus = all;
        for (const std::string& part : parts(visible ? visible : "", ',')) {
            int number = isdigit(part[0]) ? atoi(part.c_str()) : -1;
            if (number < 0 || number >= node.counted) break;  // as CUDA does: those before it are visible
            node.gpus.push_back(all[number]);
        }
        return node;
    }());
    return made;
}

// "1" (the default) and "0" are for all pairs; "0-1,2-3" names those that can.
bool Node::reaches(const char* name, int a, int b) const {
    std::string text = variable(name, "1"), one = std::to_string(gpus[a].number);
    std::string other = std::to_string(gpus[b].number);
    if (text == "0" || text == "1") return text == "1";
    for (const std::string& pair : parts(text, ','))
        if (pair == one + "-" + other || pair == other + "-" + one) return true;
    return false;
}

static thread_local int current = 0;
static int current_number() { return current < (int)node().gpus.size() ? node().gpus[current].number : current; }

bool strikes(const char* fault) {
    static std::mutex lock;
    static std::map<std::string, long> counts;
    static const std::vector<std::string> given = parts(variable("FAULTS"), ' ');
    std::string own = std::string(fault) + "@" + std::to_string(current_number()) + ":";
    for (const std::string& one : given) {
        if (one.compare(0, own.size(), own)) continue;
        std::lock_guard<std::mutex> guard(lock);
        long from = atol(one.c_str() + own.size()), count = ++counts[one];
        if (count == from) say("fault", ",\"fault\":\"%s\"", fault);
        return count >= from;
    }
    return false;
}

// ---- The log

// A log begins with the last word of its process's command line, which in the engine's own processes is their module.
static FILE* begun(const std::string& path) {
    FILE* file = fopen(path.c_str(), "a");
    if (!file) return nullptr;
    std::string last, word;
    std::ifstream words("/proc/self/cmdline", std::ios::binary);
    while (std::getline(words, word, '\0')) last = word;
    for (char& letter : last)
        if (letter < ' ' || letter > '~' || letter == '"' || letter == '\\') letter = ' ';  // a program's options may be JSON
    fprintf(file, "{\"event\":\"process\",\"name\":\"%.100s\"}\n", last.c_str());
    return file;
}
void say(const char* event, const char* format, ...) {
    static const std::string path = variable("LOG", ".") + "/" + std::to_string(getpid()) + ".jsonl";
    static FILE* file = begun(path);
    if (!file) return;
    char rest[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rest, sizeof rest, format, arguments);
    va_end(arguments);
    long thread = syscall(SYS_gettid);
    fprintf(file, "{\"thread\":%ld,\"main\":%s,\"device\":%d,\"event\":\"%s\"%s}\n", thread,  // one call: one line
            thread == getpid() ? "true" : "false", current_number(), event, rest);
    fflush(file);
}

// Who holds Python's lock and waits for another thread lets that one have it.
void nap() {
    static auto holds = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    void* state = holds && save && restore && holds() ? save() : nullptr;
    usleep(100);
    if (state) restore(state);
}

// ---- What each call begins with: a driver, a GPU, a context, and a GPU that is not gone, as after an Xid

static std::atomic<bool> contexts[64], is_lost[64];
static auto& lock = *new std::recursive_mutex;
using Guard = std::lock_guard<std::recursive_mutex>;

static std::string thread_name() {  // torch names its own
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}
int current_device() { return current; }
bool has_context(int device) { return contexts[device]; }
void need_context(const char* function) {
    if (contexts[current].exchange(true)) return;
    say("context", ",\"by\":\"%s\",\"name\":\"%s\"", function, thread_name().c_str());
}

#define OK return cudaSuccess
static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t error) { return last_error = error; }
static cudaError_t count_devices(int* count) {
    *count = node().driver < 13000 ? 0 : (int)node().gpus.size();
    if (*count && strikes("start")) return fail(cudaErrorSystemNotReady);  // as without a fabric manager
    if (*count) OK;
    return fail(node().driver < 13000 ? cudaErrorInsufficientDriver : cudaErrorNoDevice);
}
static cudaError_t ready(const char* function) {
    int count;
    if (cudaError_t error = count_devices(&count)) return error;
    need_context(function);
    if (!is_lost[current] && strikes("lost")) is_lost[current] = true;
    return is_lost[current] ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}
#define READY if (cudaError_t error = ready(__func__)) return error

static std::atomic<int> global_captures{0};
static thread_local int own_captures = 0;
static std::atomic<int> live_graphs{0};
static thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

static void forbid(const char* call, bool is_own) {
    say("forbidden", ",\"call\":\"%s\",\"own\":%s", call, is_own ? "true" : "false");
}
static bool is_unsafe(const char* function) {
    bool is_own = own_captures && capture_mode != cudaStreamCaptureModeRelaxed;
    bool is_beside = !own_captures && global_captures && capture_mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_beside) forbid(function, is_own);
    return is_own || is_beside;
}
// The same for what a capture forbids.
#define SAFE READY; if (is_unsafe(__func__)) return fail(cudaErrorStreamCaptureUnsupported)

// ---- Streams

static auto& streams = *new std::set<Stream*>;  // never destroyed, as all that go_on() reads
static auto& default_streams = *new std::map<int, Stream*>;

Stream* stream_of(void* handle) {
    if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
    Guard guard(lock);
    Stream*& found = default_streams[current];
    if (!found) streams.insert(found = new Stream{current});
    return found;
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
bool advance_device() {
    bool is_done = true;
    for (Stream* stream : streams_of(current)) is_done &= advance(stream, stream->given);
    return is_done;
}
static void drain(Stream* stream, uint64_t target) { while (!advance(stream, target)) nap(); }
static void drain_device() { while (!advance_device()) nap(); }

static bool is_lazy(Stream* stream) {
    if (node().lazy != 2) return node().lazy;
    Guard guard(lock);
    return stream == default_streams[stream->device];
}

// Whether another thread of this process computes, or would if a processor were free.
static bool is_busy() {
    DIR* tasks = opendir("/proc/self/task");
    bool found = false;
    for (dirent* task; tasks && !found && (task = readdir(tasks));) {
        char path[300], line[300] = "";
        if (atol(task->d_name) == 0 || atol(task->d_name) == syscall(SYS_gettid)) continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", task->d_name);
        FILE* file = fopen(path, "r");
        if (!file) continue;
        const char* name_end = fgets(line, sizeof line, file) ? strrchr(line, ')') : nullptr;
        found = name_end && name_end[2] == 'R';
        fclose(file);
    }
    if (tasks) closedir(tasks);
    return found;
}

// A device goes on though nobody waits, so that other ranks are not held up.  A lazy one does when this process has
// nothing else to do: no time is long enough for a thread that is about to forget to wait.
static void go_on() {
    const int patience = 200;  // on a machine with too much to do, whose threads are always about to run
    for (int busy = 0, idle = 0;;) {
        usleep(node().lazy ? 10000 : 1000);
        if (node().lazy) {
            is_busy() ? (busy++, idle = 0) : idle++;
            if (idle < 2 && busy < patience) continue;
        }
        busy = idle = 0;
        for (Stream* stream : streams_of(-1)) advance(stream, stream->given);
    }
}

// Whether work has ended.  Who asks the same again and has done nothing in between waits for it, so it runs; who asks
// once only looks, as NCCL's watchdog always does.
static thread_local uint64_t num_given = 0;  // what this thread has given to streams, or marked in one
static bool has_ended(const void* asked, Stream* stream, uint64_t position) {
    static thread_local std::pair<const void*, uint64_t> before;
    bool waits = before == std::make_pair(asked, num_given) && thread_name() != "pt_nccl_watchdg";
    before = {asked, num_given};
    if (waits || !is_lazy(stream)) return advance(stream, position);
    Guard guard(lock);
    return stream->done >= position;
}

void give(Stream* stream, Operation operation) {
    static std::once_flag goes_on;
    num_given++;
    std::unique_lock<std::recursive_mutex> guard(lock);
    if (stream->graph) {
        stream->recorded++;
        stream->graph->nodes.push_back(std::move(operation));
        return;
    }
    std::call_once(goes_on, [] { std::thread(go_on).detach(); });
    stream->queue.push_back(std::move(operation));
    uint64_t target = ++stream->given;
    guard.unlock();
    for (int tries = 0; !is_lazy(stream) && tries < 2000 && !advance(stream, target); tries++) nap();
}

// ---- Memory

struct Block { size_t bytes; int device; Owner owner; };
static auto& blocks = *new std::map<char*, Block>;  // never destroyed: end() reads it

static const Block* block_of(const void* address) {  // null: pageable memory of the host
    Guard guard(lock);
    auto found = blocks.upper_bound((char*)address);
    if (found == blocks.begin()) return nullptr;
    --found;
    return found->first + found->second.bytes > address ? &found->second : nullptr;
}
static size_t sum_of(Owner owner, int device = -1) {  // -1: of all
    size_t found = 0;
    Guard guard(lock);
    for (auto& [address, block] : blocks)
        if (block.owner == owner && (device < 0 || block.device == device)) found += block.bytes;
    return found;
}
size_t bytes_of_device(int device) { return CONTEXT_BYTES + sum_of(DEVICE, device); }
void own(void* address, size_t bytes, int device, Owner owner) {
    Guard guard(lock);
    blocks[(char*)address] = {bytes, device, owner};
}
void disown(void* address) { Guard guard(lock); blocks.erase((char*)address); }

static cudaError_t allocate(void** address, size_t bytes, Owner owner) {
    if (posix_memalign(address, 2 << 20, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
    own(*address, bytes, current, owner);
    OK;
}
static cudaError_t release(void* address, Owner owner) {
    drain_device();
    Guard guard(lock);
    auto found = blocks.find((char*)address);
    if (found == blocks.end() || found->second.owner != owner) return fail(cudaErrorInvalidValue);
    blocks.erase(found);
    if (owner != REGISTERED) free(address);
    OK;
}

// Copies from pageable memory have read it when they return; copies to pageable memory have ended.
static cudaError_t copy(void* target, const void* source, size_t bytes, void* handle) {
    Stream* stream = stream_of(handle);
    bool from_pageable = !block_of(source), to_pageable = !block_of(target);
    if ((from_pageable || to_pageable) && stream->graph) forbid("a copy of pageable memory", true);
    auto kept = std::make_shared<std::string>((const char*)source, from_pageable ? bytes : 0);
    give(stream, [=] { memmove(target, from_pageable ? kept->data() : source, bytes); return true; });
    if (to_pageable && !stream->graph) drain(stream, stream->given);
    OK;
}

// ---- Events, captures, kernels

struct Event { Stream* stream; uint64_t position; std::shared_ptr<Graph> graph; uint64_t recorded; };
using Held = std::shared_ptr<Graph>;  // what handles of graphs point to

static cudaStreamCaptureStatus status_of(Stream* stream) {
    return stream->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

// Compiled kernels do nothing, and are in the log once, because their results are missing.
static std::unordered_map<const void*, const char*>& kernels() {
    static std::unordered_map<const void*, const char*> names;
    return names;
}
static cudaError_t launch(const void* kernel) {
    static std::unordered_set<const void*> seen;
    Guard guard(lock);
    if (seen.insert(kernel).second) say("kernel", ",\"name\":\"%.400s\"", kernels()[kernel] ? kernels()[kernel] : "?");
    return ready(__func__);
}

extern "C" {
// ---- Devices

cudaError_t cudaGetDeviceCount(int* count) { return count_devices(count); }
cudaError_t cudaGetDevice(int* device) { *device = current; OK; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= (int)node().gpus.size()) return fail(cudaErrorInvalidDevice);
    current = device;
    return ready(__func__);
}
cudaError_t cudaDriverGetVersion(int* version) { *version = node().driver; OK; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
    const Gpu& gpu = node().gpus.at(device);
    memset(found, 0, sizeof *found);
    strcpy(found->name, gpu.name);
    found->major = gpu.major, found->minor = gpu.minor, found->multiProcessorCount = gpu.processors;
    found->totalGlobalMem = gpu.gib * GIB;
    found->warpSize = 32, found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048;
    found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = gpu.shared_kib << 10;
    found->sharedMemPerMultiprocessor = (gpu.shared_kib + 1) << 10;
    found->regsPerMultiprocessor = found->regsPerBlock = 65536;
    found->l2CacheSize = 50 << 20, found->textureAlignment = 512;
    for (int i = 0; i < 3; i++) found->maxGridSize[i] = 65535, found->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    found->pciBusID = gpu.bus, found->uuid.bytes[0] = (char)(gpu.number + 1);
    OK;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    const Gpu& gpu = node().gpus.at(device);
    std::map<int, int> all = {
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrComputeCapabilityMajor, gpu.major}, {cudaDevAttrComputeCapabilityMinor, gpu.minor},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu.shared_kib << 10},
        {cudaDevAttrMultiProcessorCount, gpu.processors},
    };
    *value = all[attribute];  // 0 without one
    OK;
}
cudaError_t cudaDeviceCanAccessPeer(int* value, int a, int b) { *value = node().reaches("P2P", a, b); OK; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { OK; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", node().gpus.at(device).bus);
    OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
    if (least) *least = 0;
    if (most) *most = -5;
    OK;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- Memory

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    READY;
    *total = node().gpus[current].gib * GIB;
    size_t room = node().free_bytes ? node().free_bytes : *total - CONTEXT_BYTES, used = sum_of(DEVICE, current);
    *free_bytes = room > used ? room - used : 0;
    OK;
}
cudaError_t cudaMalloc(void** address, size_t bytes) {
    SAFE;
    size_t free_bytes, total;
    cudaMemGetInfo(&free_bytes, &total);
    if (strikes("alloc") || bytes > free_bytes) return fail(cudaErrorMemoryAllocation);
    cudaError_t found = allocate(address, bytes, DEVICE);
    if (!found && bytes < (64u << 20)) memset(*address, 0xff, bytes);  // no number, as far as a read could tell
    return found;
}
cudaError_t cudaFree(void* address) {
    if (!address) return ready(__func__);
    SAFE;
    return release(address, DEVICE);
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { SAFE; return allocate(address, bytes, PINNED); }
cudaError_t cudaFreeHost(void* address) { return release(address, PINNED); }
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) { READY; own(at, bytes, current, REGISTERED); OK; }
cudaError_t cudaHostUnregister(void* address) { return release(address, REGISTERED); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    const Block* block = block_of(address);
    bool is_host = block && (block->owner == PINNED || block->owner == REGISTERED);
    memset(found, 0, sizeof *found);
    found->device = block && !is_host ? block->device : -1;
    found->type = is_host ? cudaMemoryTypeHost : block ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    if (block) found->devicePointer = (void*)address;
    if (is_host) found->hostPointer = (void*)address;
    OK;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    SAFE;
    copy(target, source, bytes, nullptr);
    drain(stream_of(nullptr), stream_of(nullptr)->given);
    OK;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    READY;
    return copy(target, source, bytes, stream);
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
    READY;
    give(stream_of(stream), [=] { memset(target, value, bytes); return true; });
    OK;
}

// ---- Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    READY;
    Guard guard(lock);
    *stream = (cudaStream_t)*streams.insert(new Stream{current, priority}).first;
    OK;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { OK; }  // events may point to it for ever
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = stream_of(stream)->priority; OK; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    SAFE;
    return has_ended(stream, stream_of(stream), stream_of(stream)->given) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    SAFE;
    drain(stream_of(stream), stream_of(stream)->given);
    return ready(__func__);
}
cudaError_t cudaDeviceSynchronize() {
    SAFE;
    drain_device();
    return ready(__func__);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { READY; *event = (cudaEvent_t) new Event{}; OK; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
    READY;
    Stream* stream = stream_of(handle);
    Guard guard(lock);
    *(Event*)event = {stream, stream->given, stream->graph, stream->recorded};
    num_given++;
    OK;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) { return cudaEventRecordWithFlags(event, on, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    SAFE;
    Event event = *(Event*)handle;
    return !event.stream || has_ended(handle, event.stream, event.position) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    SAFE;
    Event event = *(Event*)handle;
    if (event.stream) drain(event.stream, event.position);
    return ready(__func__);
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

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    static std::atomic<int> number{0};
    Stream* stream = stream_of(handle);
    stream->graph = std::make_shared<Graph>();
    stream->graph->number = number++;
    stream->recorded = stream->joined = 0;
    own_captures++;
    if (mode == cudaStreamCaptureModeGlobal) global_captures++;
    stream->graph->bytes_before = sum_of(DEVICE, current);
    say("capture", ",\"graph\":%d,\"others\":%d", stream->graph->number, (int)live_graphs);
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
    live_graphs++;
    say("captured", ",\"graph\":%d,\"nodes\":%zu,\"bytes\":%zu", made->number, made->nodes.size(),
        sum_of(DEVICE, current) - made->bytes_before);
    OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = status_of(stream_of(stream));
    OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
    Stream* stream = stream_of(handle);
    *status = status_of(stream);
    if (id) *id = stream->graph ? stream->graph->number + 1 : 0;
    if (graph) *graph = (cudaGraph_t)stream->graph.get();
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, capture_mode); OK; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = (cudaGraphExec_t) new Held(*(Held*)graph);
    live_graphs++;
    OK;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    READY;
    Held launched = *(Held*)graph;
    say("replay", ",\"graph\":%d", launched->number);
    for (const Operation& operation : launched->nodes) give(stream_of(stream), operation);
    OK;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    *count = (*(Held*)graph)->nodes.size();
    OK;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Held*)graph; live_graphs--; OK; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { delete (Held*)graph; live_graphs--; OK; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    give(stream_of(stream), [=] { function(data); return true; });
    OK;
}

// ---- Kernels

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launch(kernel); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* kernel) { *found = (cudaKernel_t)kernel; OK; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name) { kernels()[function] = name; }
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
    return stream->graph ? 2 : is_lazy(stream) || !stream->queue.empty();
}
void fake_cuda_give(void* handle, int (*function)(long), long number) {  // 0: it waits for another rank
    if (own_captures && !stream_of(handle)->graph) forbid("an operation of another stream", true);
    give(stream_of(handle), [=] { return function(number) != 0; });
}
void fake_cuda_say_held(int events) { say("held", ",\"events\":%d,\"graphs\":%d", events, (int)live_graphs); }
void fake_cuda_say(const char* event, const char* text) { say(event, ",\"name\":\"%.400s\"", text); }
}

// What is left when the process ends, if it ends by itself.
__attribute__((destructor)) static void end() {
    const char* format = ",\"device_bytes\":%zu,\"pinned_bytes\":%zu,\"registered_bytes\":%zu,\"mapped_bytes\":%zu";
    for (auto& one : contexts)
        if (one) return say("end", format, sum_of(DEVICE), sum_of(PINNED), sum_of(REGISTERED), sum_of(MAPPED));
}
