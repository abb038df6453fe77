/* A thread pool, the crew. A job has items 0..count-1, which the threads share. Items are independent, so results do
 * not depend on which thread computes which item.
 *
 * Each thread has a share: consecutive items, at the same position in every job. So the results of one job are in the
 * thread's own cache in the next job. A thread that has finished its share takes items from other shares. The end of a
 * job therefore waits only for items that a thread has begun, and not, as a barrier of OpenMP does, for threads that
 * the operating system has not scheduled.
 */
#pragma once

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Computes items first..end-1. `thread` is in 0..most_threads-1, and different for all threads that work on a job. */
typedef void (*task_t)(const void *context, int64_t first, int64_t end, int64_t thread);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() asm volatile("yield")
#endif

#define MAX_CREW 256
#define FIELD ((1 << 24) - 1)
#define PATIENCE 20000 /* searches for work before a thread sleeps: some tenths of a millisecond */
#define MAX_SHARES 8   /* in larger crews, several threads have one share, because a search for work reads all shares */

/* One word is the whole state of a share: how many threads may take part, where its chunks end, and the next chunk. */
#define TICKET(limit, end, next) ((uint64_t)(limit) << 48 | (uint64_t)(end) << 24 | (uint64_t)(next))
#define LIMIT_OF(ticket) ((int64_t)((ticket) >> 48))
#define END_OF(ticket) ((int64_t)((ticket) >> 24 & FIELD))
#define NEXT_OF(ticket) ((int64_t)((ticket) & FIELD))

typedef struct {
    _Alignas(64) _Atomic uint64_t ticket;
} share_t;

static struct {
    pthread_mutex_t mutex; /* held by the thread that called run_crew for the current job */
    int64_t num_threads;   /* started so far */
    /* The job. It is written when all chunks of the previous job are done, and read by threads that have
     * taken a chunk. */
    task_t task;
    const void *context;
    int64_t count, chunk;
    share_t shares[MAX_SHARES];
    _Alignas(64) _Atomic int64_t num_done;
    _Alignas(64) _Atomic uint32_t signal;
    _Atomic int32_t num_sleeping;
} crew = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static inline int64_t most_threads(int num_threads) { return most(1, least(num_threads, MAX_CREW)); }

static void run_chunk(int64_t number, int64_t thread) {
    int64_t first = number * crew.chunk;
    crew.task(crew.context, first, least(first + crew.chunk, crew.count), thread);
    atomic_fetch_add_explicit(&crew.num_done, 1, memory_order_release);
}

static inline bool has_chunk(uint64_t ticket, int64_t index) {
    return index < LIMIT_OF(ticket) && NEXT_OF(ticket) < END_OF(ticket);
}

/* Take a chunk and run it, from the thread's own share if that has one left. Returns false if no chunk is left for
 * this thread. */
static bool take_chunk(int64_t index) {
    for (int64_t look = 0; look < MAX_SHARES; look++) {
        share_t *share = &crew.shares[(index + look) % MAX_SHARES];
        uint64_t ticket = atomic_load(&share->ticket);
        /* Not an atomic addition: the ticket may meanwhile be that of another job, which uses fewer threads. */
        while (has_chunk(ticket, index))
            if (atomic_compare_exchange_weak(&share->ticket, &ticket, ticket + 1)) {
                run_chunk(NEXT_OF(ticket), index);
                return true;
            }
    }
    return false;
}

static bool sees_chunk(int64_t index) {
    for (int64_t share = 0; share < MAX_SHARES; share++)
        if (has_chunk(atomic_load(&crew.shares[share].ticket), index)) return true;
    return false;
}

/* Threads sleep in classes of indices, 1, 2-3, 4-7 and so on, so that a job for few threads does not wake
 * all of them. */
static uint32_t class_of(int64_t index) { return 1u << (63 - __builtin_clzll((uint64_t)index)); }

static void *work(void *argument) {
    int64_t index = (int64_t)(intptr_t)argument;
    for (int looks = 0;; looks++) {
        if (take_chunk(index)) {
            looks = 0;
        } else if (looks < PATIENCE) {
            PAUSE();
        } else {
            uint32_t signal = atomic_load(&crew.signal);
            atomic_fetch_add(&crew.num_sleeping, 1);
            if (!sees_chunk(index))
                syscall(SYS_futex, &crew.signal, FUTEX_WAIT_BITSET_PRIVATE, signal, NULL, NULL, class_of(index));
            atomic_fetch_sub(&crew.num_sleeping, 1);
            looks = 0;
        }
    }
    return NULL;
}

static void grow_crew(int64_t num_threads) {
    for (; crew.num_threads < num_threads; crew.num_threads++) {
        pthread_t thread;
        /* Index 0 is the calling thread. A thread that cannot be started is left out of the job. */
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)(crew.num_threads + 1))) return;
        pthread_detach(thread);
    }
}

static void run_crew(task_t task, const void *context, int64_t count, int64_t chunk, int64_t num_threads) {
    if (pthread_mutex_trylock(&crew.mutex)) { /* the crew runs the job of another thread */
        task(context, 0, count, 0);
        return;
    }
    num_threads = most_threads(num_threads);
    grow_crew(num_threads - 1);
    chunk = most(chunk, count / FIELD + 1);
    crew.task = task, crew.context = context, crew.count = count, crew.chunk = chunk;
    int64_t num_chunks = (count + chunk - 1) / chunk, num_shares = least(num_threads, MAX_SHARES);
    atomic_store(&crew.num_done, 0);
    for (int64_t share = 0; share < num_shares; share++) {
        int64_t first = num_chunks * share / num_shares, end = num_chunks * (share + 1) / num_shares;
        atomic_store(&crew.shares[share].ticket, TICKET(num_threads, end, first));
    }
    if (atomic_load(&crew.num_sleeping)) {
        atomic_fetch_add(&crew.signal, 1);
        uint32_t classes = 2 * class_of(num_threads - 1) - 1;
        syscall(SYS_futex, &crew.signal, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, classes);
    }
    while (take_chunk(0)) continue;
    for (int looks = 0; atomic_load_explicit(&crew.num_done, memory_order_acquire) < num_chunks; looks++)
        if (looks < PATIENCE) PAUSE();
        else sched_yield(); /* the thread with the last chunk may be waiting for this core */
    pthread_mutex_unlock(&crew.mutex);
}

/* Run `task` on all items, `chunk` items at a time; returns when all are done. */
static void run_items(task_t task, const void *context, int64_t count, int64_t chunk, int num_threads) {
    if (num_threads <= 1 || count <= chunk) {
        if (count > 0) task(context, 0, count, 0);
    } else {
        run_crew(task, context, count, chunk, num_threads);
    }
}
