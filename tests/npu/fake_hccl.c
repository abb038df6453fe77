/* A stand-in for HCCL between processes on one machine. Collectives are passed to a stream and run there, over sockets
 * to rank 0, which adds in the order of the ranks. Written against the public prototypes of hccl.h.
 *
 * If a rank's partner has gone, HcclGetCommAsyncError reports it, and the rank continues to wait like a device: until
 * the communicator is destroyed, or for HCCL_EXEC_TIMEOUT seconds.
 *
 * FAKE_HCCL_LOG  file that gets a line for each communicator and collective
 */
#include "fake_streams.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, E_PARA = 1, E_SYSCALL = 8, E_TIMEOUT = 9, E_NOT_SUPPORT = 5, E_REMOTE = 21 }; /* values of HcclResult */
enum { TASK_TIMEOUT = 107020, STREAM_ABORT = 107023, AICPU_EXCEPTION = 507018 };            /* codes of the runtime */
enum { FP32 = 4, NUM_TYPES = 12 };
enum { MOST_RANKS = 16, INFO_BYTES = 4108, POLL_MS = 10 };
static const size_t WIDTHS[NUM_TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

struct comm {
    uint32_t rank, size;
    int peers[MOST_RANKS]; /* rank 0: sockets to all others; other ranks: a socket to rank 0 */
    atomic_int async_error, is_closed;
};

enum kind { ALL_REDUCE, ALL_GATHER, BROADCAST };
static const char *const NAMES[] = {"allreduce", "allgather", "broadcast"};

struct head { /* must be equal on all ranks */
    int32_t kind, type;
    uint32_t root;
    uint64_t count;
};

struct call {
    struct comm *comm;
    struct head head;
    const char *send;
    char *receive;
};

int aclrtGetDevice(int32_t *device);

static void note(const char *format, ...) {
    const char *path = getenv("FAKE_HCCL_LOG");
    char line[300];
    va_list values;
    if (!path) return;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file >= 0 && write(file, line, length) == length) close(file);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static double seconds_of(const char *variable, double otherwise) {
    const char *given = getenv(variable);
    return given ? atof(given) : otherwise;
}

static const char *shown(const char *variable) {
    const char *given = getenv(variable);
    return given ? given : "unset";
}

/* Communicators. The root's information is the name of a socket and, for rank 0, its descriptor. */

static struct sockaddr_un address_of(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX}; /* a name with a leading zero is in no file system */
    snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%s", name);
    return address;
}

int HcclGetRootInfo(void *given) {
    static atomic_int last;
    char *info = given;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(info, 0, INFO_BYTES);
    memcpy(info, &listener, sizeof listener);
    snprintf(info + sizeof listener, 100, "fake-hccl-%d-%d", getpid(), ++last);
    struct sockaddr_un address = address_of(info + sizeof listener);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, MOST_RANKS)) return E_SYSCALL;
    return OK;
}

static int meet(struct comm *comm, const char *info) {
    int listener;
    memcpy(&listener, info, sizeof listener);
    if (comm->rank) {
        struct sockaddr_un address = address_of(info + sizeof listener);
        comm->peers[0] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(comm->peers[0], (struct sockaddr *)&address, sizeof address)) return E_SYSCALL;
        return write(comm->peers[0], &comm->rank, sizeof comm->rank) == sizeof comm->rank ? OK : E_SYSCALL;
    }
    for (uint32_t met = 1; met < comm->size; met++) {
        struct pollfd coming = {.fd = listener, .events = POLLIN};
        uint32_t rank;
        if (poll(&coming, 1, (int)(1000 * seconds_of("HCCL_CONNECT_TIMEOUT", 120))) < 1) return E_TIMEOUT;
        int peer = accept(listener, NULL, NULL);
        if (read(peer, &rank, sizeof rank) != sizeof rank || rank >= comm->size) return E_PARA;
        comm->peers[rank] = peer;
    }
    close(listener);
    return OK;
}

int HcclCommInitRootInfoConfig(uint32_t size, const void *info, uint32_t rank, const void *config, void **made) {
    struct comm *comm = calloc(1, sizeof *comm);
    int32_t device = -1;
    (void)config;
    if (size > MOST_RANKS) return E_NOT_SUPPORT;
    comm->rank = rank;
    comm->size = size;
    aclrtGetDevice(&device);
    note("communicator rank %u of %u on device %d; connect %s, exec %s, async errors %s\n", rank, size, device,
         shown("HCCL_CONNECT_TIMEOUT"), shown("HCCL_EXEC_TIMEOUT"), shown("TORCH_HCCL_ASYNC_ERROR_HANDLING"));
    *made = comm;
    return meet(comm, info);
}
int HcclCommInitRootInfo(uint32_t size, const void *info, uint32_t rank, void **made) {
    return HcclCommInitRootInfoConfig(size, info, rank, NULL, made);
}
int HcclGetCommName(void *comm, char *name) { (void)comm; strcpy(name, "fake"); return OK; }
int HcclGetCommAsyncError(void *comm, int *error) { *error = ((struct comm *)comm)->async_error; return OK; }
int HcclCommDestroy(void *given) {
    ((struct comm *)given)->is_closed = 1; /* not freed, because a stream may still use it */
    return OK;
}

/* Collectives. */

static int give_up(struct comm *comm, double until) {
    if (comm->is_closed) return STREAM_ABORT;
    return now_s() > until ? TASK_TIMEOUT : OK;
}

static int transfer(struct comm *comm, int peer, void *data, size_t size, int is_sent) {
    double until = now_s() + seconds_of("HCCL_EXEC_TIMEOUT", 1836);
    char *place = data;
    while (size) {
        struct pollfd ready = {.fd = peer, .events = is_sent ? POLLOUT : POLLIN};
        int code = give_up(comm, until);
        if (code) return code;
        if (poll(&ready, 1, POLL_MS) < 1) continue;
        ssize_t moved = is_sent ? send(peer, place, size, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(peer, place, size, MSG_DONTWAIT);
        if (moved < 0 && errno == EAGAIN) continue;
        if (moved <= 0) { /* the partner has gone, and the device continues to wait */
            comm->async_error = E_REMOTE;
            while (!(code = give_up(comm, until))) poll(NULL, 0, POLL_MS);
            return code;
        }
        place += moved;
        size -= (size_t)moved;
    }
    return OK;
}

static int add(void *total, const void *part, uint64_t count, int type) {
    if (type != FP32) return AICPU_EXCEPTION; /* all sums of this project are float32 */
    for (uint64_t i = 0; i < count; i++) ((float *)total)[i] += ((const float *)part)[i];
    return OK;
}

/* Rank 0 receives every other rank's part, and sends all of them the result. */
static int lead(struct call *call, char *parts, size_t size) {
    struct comm *comm = call->comm;
    struct head head;
    int code;
    memcpy(parts, call->send, size);
    for (uint32_t rank = 1; rank < comm->size; rank++) {
        char *part = parts + rank * size;
        if ((code = transfer(comm, comm->peers[rank], &head, sizeof head, 0))) return code;
        if (memcmp(&head, &call->head, sizeof head)) return AICPU_EXCEPTION; /* the ranks make different calls */
        if ((code = transfer(comm, comm->peers[rank], part, size, 0))) return code;
        if (call->head.kind == ALL_REDUCE && (code = add(parts, part, call->head.count, call->head.type))) return code;
    }
    char *result = call->head.kind == BROADCAST ? parts + call->head.root * size : parts;
    size_t all = call->head.kind == ALL_GATHER ? comm->size * size : size;
    for (uint32_t rank = 1; rank < comm->size; rank++)
        if ((code = transfer(comm, comm->peers[rank], result, all, 1))) return code;
    memcpy(call->receive, result, all);
    return OK;
}

static int follow(struct call *call, size_t size) {
    struct comm *comm = call->comm;
    int code;
    size_t all = call->head.kind == ALL_GATHER ? comm->size * size : size;
    if ((code = transfer(comm, comm->peers[0], &call->head, sizeof call->head, 1))) return code;
    if ((code = transfer(comm, comm->peers[0], (void *)call->send, size, 1))) return code;
    return transfer(comm, comm->peers[0], call->receive, all, 0);
}

static int run(void *given) {
    struct call *call = given;
    size_t size = call->head.count * WIDTHS[call->head.type];
    char *parts = call->comm->rank ? NULL : malloc(call->comm->size * size + 1);
    int code = parts ? lead(call, parts, size) : follow(call, size);
    free(parts);
    free(call);
    return code;
}

static int hand(struct head head, const void *send, void *receive, void *comm, void *stream) {
    struct call *call = malloc(sizeof *call);
    if (head.type < 0 || head.type >= NUM_TYPES) return E_NOT_SUPPORT;
    memset(call, 0, sizeof *call);
    call->comm = comm;
    call->head.kind = head.kind; /* set one by one, because ranks also compare the padding bytes */
    call->head.type = head.type;
    call->head.root = head.root;
    call->head.count = head.count;
    call->send = send;
    call->receive = receive;
    note("%s rank %u count %llu type %d\n", NAMES[head.kind], call->comm->rank, (unsigned long long)head.count, head.type);
    stream_hand(stream, run, call);
    return OK;
}

int HcclAllReduce(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream) {
    if (op) return E_NOT_SUPPORT; /* sums only */
    return hand((struct head){.kind = ALL_REDUCE, .type = type, .count = count}, send, receive, comm, stream);
}
int HcclAllGather(void *send, void *receive, uint64_t count, int type, void *comm, void *stream) {
    return hand((struct head){.kind = ALL_GATHER, .type = type, .count = count}, send, receive, comm, stream);
}
int HcclBroadcast(void *data, uint64_t count, int type, uint32_t root, void *comm, void *stream) {
    return hand((struct head){.kind = BROADCAST, .type = type, .root = root, .count = count}, data, data, comm, stream);
}
