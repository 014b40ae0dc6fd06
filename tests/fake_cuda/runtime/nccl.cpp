// NCCL through a file that all ranks map: a place per rank, in which it leaves what the others take.
//
// A rank counts what it has posted.  It posts the next but one only after all have posted the next, so two places per
// rank are enough.  Sends have two places per pair.  Sums are made in the order of the ranks, on each rank.
#include "node.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

// As in nccl.h, which needs more of CUDA's headers than torch brings.
typedef void* ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
enum ncclResult_t { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
enum Type {
    ncclUint8 = 1, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16
};

static const size_t PLACE = 64 << 20, MAX_RANKS = 16;

struct Letter { int kind; int type; size_t count; };
struct Segment {
    std::atomic<uint64_t> joined, posted[MAX_RANKS], sent[MAX_RANKS][MAX_RANKS], taken[MAX_RANKS][MAX_RANKS];
    Letter letters[MAX_RANKS][2];
};
struct Comm {
    int rank, size;
    unsigned name;
    Segment* segment;
    std::atomic<bool> is_aborted{false};
    uint64_t number = 0, sent[MAX_RANKS] = {}, taken[MAX_RANKS] = {};
    char* place(size_t index) { return (char*)segment + (1 << 20) + index * PLACE; }
    char* shared(int from, uint64_t nth) { return place(from * 2 + nth % 2); }
    char* letterbox(int from, int to, uint64_t nth) { return place(2 * size + (from * size + to) * 2 + nth % 2); }
};

static size_t bytes_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float found;
    memcpy(&found, &wide, 4);
    return found;
}
static uint16_t to_bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

template <typename T, typename Wide, typename Load, typename Store>
static void add_as(Comm* comm, void* target, size_t count, int op, uint64_t number, Load load, Store store) {
    for (size_t i = 0; i < count; i++) {
        Wide total = load(((T*)comm->shared(0, number))[i]);
        for (int rank = 1; rank < comm->size; rank++) {
            Wide one = load(((T*)comm->shared(rank, number))[i]);
            total = op == ncclMax ? std::max(one, total) : op == ncclMin ? std::min(one, total) : total + one;
        }
        ((T*)target)[i] = store(op == ncclAvg ? total / comm->size : total);
    }
}

// Adds up `count` elements of what all ranks have posted.
static void add(Comm* comm, void* target, size_t count, int type, int op, uint64_t number) {
    auto same = [](auto value) { return value; };
    if (type == ncclFloat32) return add_as<float, float>(comm, target, count, op, number, same, same);
    if (type == ncclFloat64) return add_as<double, double>(comm, target, count, op, number, same, same);
    if (type == ncclInt32) return add_as<int32_t, int32_t>(comm, target, count, op, number, same, same);
    if (type == ncclInt64) return add_as<int64_t, int64_t>(comm, target, count, op, number, same, same);
    if (type == ncclUint8) return add_as<uint8_t, int>(comm, target, count, op, number, same, same);
    if (type == ncclFloat16) return add_as<_Float16, float>(comm, target, count, op, number, same, same);
    if (type == ncclBfloat16)
        return add_as<uint16_t, float>(comm, target, count, op, number, from_bfloat16, to_bfloat16);
    say("unmodelled", ",\"name\":\"a sum of NCCL's type %d\"", type);
}

static thread_local int group_depth = 0;
static thread_local std::vector<std::pair<Stream*, Operation>> sends, receipts;

static ncclResult_t note(Comm* comm, const char* op, size_t count, int type, int peer, Stream* stream) {
    if (comm->is_aborted) return ncclInvalidUsage;
    say("nccl", ",\"op\":\"%s\",\"comm\":%u,\"count\":%zu,\"type\":%d,\"peer\":%d,\"graph\":%d", op, comm->name, count,
        type, peer, stream->graph ? stream->graph->number : -1);
    if (count * bytes_of(type) > PLACE) fprintf(stderr, "%s of %zu: too much for a place\n", op, count), abort();
    return ncclSuccess;
}

// A collective: every rank posts `count` elements, and when all have, `finish(number)` takes what it wants.
static ncclResult_t collect(const char* op, int kind, const void* source, size_t count, Type type,
                            ncclComm_t handle, cudaStream_t on, std::function<void(Comm*, uint64_t)> finish) {
    Comm* comm = (Comm*)handle;
    if (auto error = note(comm, op, count, type, -1, stream_of(on))) return error;
    size_t bytes = count * bytes_of(type);
    bool hangs = strikes("hang", current_device());
    give(stream_of(on), [=, number = (uint64_t)0]() mutable {
        if (comm->is_aborted) return true;
        if (hangs) return false;
        Segment& all = *comm->segment;
        if (!number) {
            number = ++comm->number;
            all.letters[comm->rank][number % 2] = {kind, (int)type, count};
            memcpy(comm->shared(comm->rank, number), source, bytes);
            all.posted[comm->rank] = number;
        }
        for (int rank = 0; rank < comm->size; rank++)
            if (all.posted[rank] < number) return false;
        for (int rank = 0; rank < comm->size; rank++) {
            Letter theirs = all.letters[rank][number % 2];
            if (theirs.kind == kind && theirs.type == (int)type && theirs.count == count) continue;
            say("mismatch", ",\"op\":\"%s\",\"comm\":%u,\"count\":%zu,\"rank\":%d,\"theirs\":%zu", op, comm->name,
                count, rank, theirs.count);
        }
        finish(comm, number);
        return true;
    });
    return ncclSuccess;
}

extern "C" {
ncclResult_t ncclGetVersion(int* version) { *version = 22907; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    FILE* random = fopen("/dev/urandom", "r");
    bool is_read = fread(id->internal, 1, 16, random) == 16;
    fclose(random);
    return is_read ? ncclSuccess : ncclSystemError;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the NCCL that does not exist"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { *count = ((Comm*)comm)->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = ((Comm*)comm)->rank; return ncclSuccess; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, void*) {
    if (size > (int)MAX_RANKS) return ncclInvalidArgument;
    need_context("ncclCommInit");
    Comm* comm = new Comm{rank, size};
    memcpy(&comm->name, id.internal, 4);
    const char* folder = getenv("FAKE_CUDA_LOG");
    char path[400];
    snprintf(path, sizeof path, "%s/nccl-%08x", folder ? folder : "/tmp", comm->name);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    size_t bytes = (1 << 20) + PLACE * 2 * (size + size * size);  // a file with holes: only what is used has pages
    if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
    comm->segment = (Segment*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    say("nccl", ",\"op\":\"CommInit\",\"comm\":%u,\"rank\":%d,\"size\":%d,\"count\":0,\"type\":0,\"peer\":-1,"
        "\"graph\":-1", comm->name, rank, size);
    comm->segment->joined++;
    while (comm->segment->joined < (uint64_t)size) nap();
    if (rank == 0) unlink(path);
    *made = (ncclComm_t)comm;
    return ncclSuccess;
}
static ncclResult_t leave(ncclComm_t handle, const char* op) {
    Comm* comm = (Comm*)handle;
    say("nccl", ",\"op\":\"%s\",\"comm\":%u,\"count\":0,\"type\":0,\"peer\":-1,\"graph\":-1", op, comm->name);
    return ncclSuccess;
}
// Finalizing waits for what was given; what waits for ranks that have gone ends with the communicator.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    for (int tries = 0; tries < 20000 && !advance_device(); tries++) nap();
    return leave(comm, "CommFinalize");
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { ((Comm*)comm)->is_aborted = true; return leave(comm, "CommAbort"); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { ((Comm*)comm)->is_aborted = true; return leave(comm, "CommDestroy"); }

ncclResult_t ncclAllReduce(const void* source, void* target, size_t count, Type type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t on) {
    return collect("AllReduce", 1, source, count, type, comm, on,
                   [=](Comm* of, uint64_t number) { add(of, target, count, type, op, number); });
}
ncclResult_t ncclAllGather(const void* source, void* target, size_t count, Type type,
                           ncclComm_t comm, cudaStream_t on) {
    size_t bytes = count * bytes_of(type);
    return collect("AllGather", 3, source, count, type, comm, on, [=](Comm* of, uint64_t number) {
        for (int rank = 0; rank < of->size; rank++)
            memcpy((char*)target + rank * bytes, of->shared(rank, number), bytes);
    });
}

ncclResult_t ncclGroupStart() { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd() {
    if (--group_depth) return ncclSuccess;
    sends.insert(sends.end(), receipts.begin(), receipts.end());
    for (auto& [stream, operation] : std::exchange(sends, {})) give(stream, operation);
    receipts.clear();
    return ncclSuccess;
}
ncclResult_t ncclSend(const void* source, size_t count, Type type, int peer, ncclComm_t handle, cudaStream_t on) {
    Comm* comm = (Comm*)handle;
    if (auto error = note(comm, "Send", count, type, peer, stream_of(on))) return error;
    ncclGroupStart();
    sends.emplace_back(stream_of(on), [=] {
        Segment& all = *comm->segment;
        uint64_t nth = comm->sent[peer];
        if (comm->is_aborted) return true;
        if (nth - all.taken[comm->rank][peer] >= 2) return false;
        memcpy(comm->letterbox(comm->rank, peer, nth), source, count * bytes_of(type));
        all.sent[comm->rank][peer] = ++comm->sent[peer];
        return true;
    });
    return ncclGroupEnd();
}
ncclResult_t ncclRecv(void* target, size_t count, Type type, int peer, ncclComm_t handle, cudaStream_t on) {
    Comm* comm = (Comm*)handle;
    if (auto error = note(comm, "Recv", count, type, peer, stream_of(on))) return error;
    ncclGroupStart();
    receipts.emplace_back(stream_of(on), [=] {
        Segment& all = *comm->segment;
        uint64_t nth = comm->taken[peer];
        if (comm->is_aborted) return true;
        if (all.sent[peer][comm->rank] <= nth) return false;
        memcpy(target, comm->letterbox(peer, comm->rank, nth), count * bytes_of(type));
        all.taken[peer][comm->rank] = ++comm->taken[peer];
        return true;
    });
    return ncclGroupEnd();
}
}
