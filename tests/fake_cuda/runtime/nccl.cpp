// NCCL through a file that all ranks map: a place per rank, in which it leaves what the others take.
//
// A rank counts what it has posted.  It posts the next but one only after all have posted the next, so two places per
// rank are enough.  Sends have two places per pair.  ../logs.py compares the ranks' calls.
#include "node.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

// As in nccl.h, which needs more of CUDA's headers than torch brings.
typedef void* ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
enum ncclResult_t { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };

static const size_t PLACE = 64 << 20, HEAD = 1 << 20, MAX_RANKS = 16;

struct Segment {
    std::atomic<uint64_t> joined, posted[MAX_RANKS], sent[MAX_RANKS][MAX_RANKS], taken[MAX_RANKS][MAX_RANKS];
};
struct Comm {
    int rank, size;
    unsigned name;
    Segment* segment;
    std::atomic<bool> is_aborted{false};
    uint64_t number = 0;
    char* place(size_t index) { return (char*)segment + HEAD + index * PLACE; }
    char* shared(int from, uint64_t nth) { return place(from * 2 + nth % 2); }
    char* letterbox(int from, int to, uint64_t nth) { return place(2 * size + (from * size + to) * 2 + nth % 2); }
};

static size_t bytes_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ../logs.py has their names
    return sizes[type];
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
static ncclResult_t leave(Comm* comm, const char* op, bool is_aborted = true) {
    comm->is_aborted = comm->is_aborted || is_aborted;
    say("nccl", ",\"op\":\"%s\",\"comm\":%u,\"count\":0,\"type\":0,\"peer\":-1,\"graph\":-1", op, comm->name);
    return ncclSuccess;
}

// A collective: every rank posts `count` elements, and when all have, `finish(places)` takes what it wants.
static ncclResult_t collect(const char* op, const void* source, size_t count, int type, ncclComm_t handle,
                            cudaStream_t on, std::function<void(const std::vector<char*>&)> finish) {
    Comm* comm = (Comm*)handle;
    if (auto error = note(comm, op, count, type, -1, stream_of(on))) return error;
    size_t bytes = count * bytes_of(type);
    bool hangs = strikes("hang");
    give(stream_of(on), [=, number = (uint64_t)0]() mutable {
        if (comm->is_aborted) return true;
        if (hangs) return false;
        if (!number) {
            number = ++comm->number;
            memcpy(comm->shared(comm->rank, number), source, bytes);
            comm->segment->posted[comm->rank] = number;
        }
        std::vector<char*> places;
        for (int rank = 0; rank < comm->size; rank++) {
            if (comm->segment->posted[rank] < number) return false;
            places.push_back(comm->shared(rank, number));
        }
        finish(places);
        return true;
    });
    return ncclSuccess;
}

static ncclResult_t end_group() {
    if (--group_depth) return ncclSuccess;
    for (auto* all : {&sends, &receipts})
        for (auto& [stream, operation] : std::exchange(*all, {})) give(stream, operation);
    return ncclSuccess;
}
static ncclResult_t mail(Comm* comm, bool is_sent, void* memory, size_t count, int type, int peer, Stream* stream) {
    if (auto error = note(comm, is_sent ? "Send" : "Recv", count, type, peer, stream)) return error;
    int from = is_sent ? comm->rank : peer, to = is_sent ? peer : comm->rank;
    group_depth++;
    (is_sent ? sends : receipts).emplace_back(stream, [=] {
        std::atomic<uint64_t>&sent = comm->segment->sent[from][to], &taken = comm->segment->taken[from][to];
        if (comm->is_aborted) return true;
        if (is_sent ? sent - taken >= 2 : sent <= taken) return false;
        char* letter = comm->letterbox(from, to, is_sent ? sent : taken);
        memcpy(is_sent ? letter : memory, is_sent ? memory : letter, count * bytes_of(type));
        (is_sent ? sent : taken)++;
        return true;
    });
    return end_group();
}

extern "C" {
// Python's sum, maximum or minimum of what all ranks have posted (../device.py).
void (*fake_cuda_reduce)(char* const* places, int ranks, void* target, size_t count, int type, int op);

ncclResult_t ncclGetVersion(int* version) { *version = 22907; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    return getentropy(id->internal, 16) ? ncclSystemError : ncclSuccess;
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess; }
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
    size_t bytes = HEAD + PLACE * 2 * (size + size * size);  // a file with holes: only what is used has pages
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
// Finalizing waits for what was given; what waits for ranks that have gone ends with the communicator.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    for (int tries = 0; tries < 20000 && !advance_device(); tries++) nap();
    return leave((Comm*)comm, "CommFinalize", false);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return leave((Comm*)comm, "CommAbort"); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return leave((Comm*)comm, "CommDestroy"); }

ncclResult_t ncclAllReduce(const void* source, void* target, size_t count, int type, int op, ncclComm_t comm,
                           cudaStream_t on) {
    return collect("AllReduce", source, count, type, comm, on, [=](const std::vector<char*>& places) {
        if (count) fake_cuda_reduce(places.data(), (int)places.size(), target, count, type, op);
    });
}
ncclResult_t ncclAllGather(const void* source, void* target, size_t count, int type, ncclComm_t comm, cudaStream_t on) {
    return collect("AllGather", source, count, type, comm, on, [=](const std::vector<char*>& places) {
        size_t bytes = count * bytes_of(type), rank = 0;
        for (char* place : places) memcpy((char*)target + rank++ * bytes, place, bytes);
    });
}

ncclResult_t ncclGroupStart() { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return end_group(); }
ncclResult_t ncclSend(const void* source, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t on) {
    return mail((Comm*)comm, true, (void*)source, count, type, peer, stream_of(on));
}
ncclResult_t ncclRecv(void* target, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t on) {
    return mail((Comm*)comm, false, target, count, type, peer, stream_of(on));
}
}
