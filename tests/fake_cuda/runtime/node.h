// A node of GPUs that do not exist: what its three libraries (runtime.cpp, driver.cpp, nccl.cpp) share.
//
// Memory is the host's.  A stream is a queue of operations.  They run as soon as they can, or, with FAKE_CUDA_LAZY, as
// late as a program may rely on: when somebody waits.  A collective that waits for another rank holds its stream back.
// The environment describes the node: ../node.py lists the variables.
#pragma once
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

struct Kind {
    const char *word, *name;
    int major, minor, processors;
    size_t memory;
    int shared_kib;  // that a block can have when it asks
    bool is_slice;   // of one GPU (MIG): all have its place on the bus
};

// The node as this process sees it: `kinds` and `numbers` of the visible devices.
struct Node {
    std::vector<const Kind*> kinds;
    std::vector<int> numbers;  // on the host
    int counted;               // by the driver's library, whatever is visible
    int driver = 13000;
    size_t free_bytes = 0;     // of each device before anybody allocates; 0: all
    bool is_lazy = false;
    bool reaches(const char* variable, int a, int b) const;  // FAKE_CUDA_P2P, FAKE_CUDA_ATOMICS
};
const Node& node();

// Whether a fault of FAKE_CUDA_FAULTS ("alloc@1:30 hang@0:12 lost@1:200") strikes now: the n-th call on that device,
// and all later ones.
bool strikes(const char* fault, int device);

// Writes a line of JSON: the thread, the device and `event`, then what the format gives, such as ",\"count\":%zu".
void say(const char* event, const char* format = "", ...) __attribute__((format(printf, 2, 3)));

int current_device();
void need_context(const char* function);  // makes one if the current device has none
bool has_context(int device);
size_t bytes_of_device(int device);       // that this process has there, with its context
bool is_unsafe(const char* function);     // whether a capture forbids a call of this thread; says so

// An operation; true when it is done, else it is tried again.
using Operation = std::function<bool()>;

struct Graph {
    int number;
    std::vector<Operation> nodes;
};

struct Stream {
    int device, priority = 0;
    std::deque<Operation> queue;
    uint64_t given = 0, done = 0;     // operations
    bool is_running = false;          // one of them, in some thread
    std::shared_ptr<Graph> graph;     // that it records
    uint64_t recorded = 0, joined = 0;  // operations of the capture, and those that its first stream waits for
};

Stream* stream_of(void* handle);
void give(Stream* stream, Operation operation);  // records it, or puts it into the queue and runs what can run
bool advance(Stream* stream, uint64_t target);   // runs what can run; whether `target` operations are done
void drain(Stream* stream, uint64_t target);     // waits for them
bool advance_device();                           // the same of all streams of the current one
void own_memory(void* address, size_t bytes, int device);  // mapped by the driver's functions
void disown_memory(void* address);

// Waits a moment, without Python's lock.
void nap();
