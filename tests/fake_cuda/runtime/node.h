// A node of GPUs that do not exist: what its three libraries (runtime.cpp, driver.cpp, nccl.cpp) share.
//
// Memory is the host's.  A stream is a queue of operations.  They run as soon as they can, or, with FAKE_CUDA_LAZY, as
// late as a program may rely on: when somebody waits, or the process has nothing else to do.  A collective that waits
// for another rank holds its stream back.  The environment describes the node: ../node.py lists the variables.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

struct Gpu {
    char name[64];
    int major, minor, processors, gib, shared_kib;  // shared_kib: what a block can have when it asks
    int bus;                                        // its place; slices of one GPU (MIG) have the same
    int number = 0;                                 // on the host
};

// The node as this process sees it.
struct Node {
    std::vector<Gpu> gpus;  // those that are visible
    int counted, driver;    // GPUs on the host, as the driver's library counts them; the newest CUDA that it takes
    size_t free_bytes;      // of each GPU before anybody allocates; 0: all
    int lazy;  // FAKE_CUDA_LAZY
    bool reaches(const char* variable, int a, int b) const;  // FAKE_CUDA_P2P, FAKE_CUDA_ATOMICS
};
const Node& node();

// Whether a fault of FAKE_CUDA_FAULTS ("alloc@1:30 hang@0:12 lost@1:200") strikes now: the n-th call on the current
// GPU, and all later ones.
bool strikes(const char* fault);

// Writes a line of JSON: the thread, the device and `event`, then what the format gives, such as ",\"count\":%zu".
void say(const char* event, const char* format = "", ...) __attribute__((format(printf, 2, 3)));

int current_device();
void need_context(const char* function);  // makes one if the current device has none
bool has_context(int device);

// Memory, by who gives it back: the last is mapped by the driver's functions, whose handles own it.
enum Owner { DEVICE, PINNED, REGISTERED, MAPPED };
void own(void* address, size_t bytes, int device, Owner owner);
void disown(void* address);
size_t bytes_of_device(int device);  // that this process has there, with its context

// An operation; true when it is done, else it is tried again.
using Operation = std::function<bool()>;

struct Graph {
    int number;
    size_t bytes_before = 0;  // of the device's memory
    std::vector<Operation> nodes;
};

struct Stream {
    int device, priority = 0;
    std::deque<Operation> queue;
    uint64_t given = 0, done = 0;       // operations
    bool is_running = false;            // one of them, in some thread
    std::shared_ptr<Graph> graph;       // that it records
    uint64_t recorded = 0, joined = 0;  // operations of the capture, and those that its first stream waits for
};

Stream* stream_of(void* handle);
void give(Stream* stream, Operation operation);  // records it, or puts it into the queue and runs what can run
bool advance(Stream* stream, uint64_t target);   // runs what can run; whether `target` operations are done
bool advance_device();                           // the same of all streams of the current one
void nap();                                      // waits a moment, without Python's lock
