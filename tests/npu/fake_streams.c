/* Streams and events of the fake CANN; see fake_streams.h. Copies and kernels run immediately, after the tasks that
 * their stream waits for. Collectives (fake_hccl.c) are queued and run later.
 *
 * FAKE_ERROR  code with which every wait for the device ends, 0 if unset
 */
#include "fake_streams.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { OK = 0, NO_MEMORY = 207001 };

struct task {
    int (*run)(void *);
    void *argument;
    struct task *next;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct task *first, *last;
    unsigned long handed;
    atomic_ulong done;
    int code, has_thread;
    struct stream *next; /* in the list of all streams */
};

struct event {
    double ms;
    struct stream *stream;
    unsigned long after; /* reached when the stream has run this number of tasks */
};

static struct stream *all_streams;
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;

static void *work(void *given) {
    struct stream *stream = given;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&stream->changed, &stream->lock);
        struct task *task = stream->first;
        pthread_mutex_unlock(&stream->lock);
        int code = stream->code ? stream->code : task->run(task->argument);
        pthread_mutex_lock(&stream->lock);
        stream->first = task->next;
        stream->code = code;
        stream->done++;
        free(task);
        pthread_cond_broadcast(&stream->changed);
    }
    return NULL;
}

void stream_hand(void *handle, int (*run)(void *), void *argument) {
    struct stream *stream = handle;
    struct task *task = calloc(1, sizeof *task);
    pthread_t thread;
    task->run = run;
    task->argument = argument;
    pthread_mutex_lock(&stream->lock);
    if (stream->first) stream->last->next = task;
    else stream->first = task;
    stream->last = task;
    stream->handed++;
    if (!stream->has_thread) {
        stream->has_thread = 1;
        pthread_create(&thread, NULL, work, stream);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

static int wait_until(struct stream *stream, unsigned long after) {
    if (!stream) return OK;
    pthread_mutex_lock(&stream->lock);
    while (stream->done < after) pthread_cond_wait(&stream->changed, &stream->lock);
    int code = stream->code;
    pthread_mutex_unlock(&stream->lock);
    return code;
}

int stream_wait(void *handle) {
    struct stream *stream = handle;
    return stream ? wait_until(stream, stream->handed) : OK;
}

int streams_wait(void) {
    int code = OK;
    for (struct stream *stream = all_streams; stream; stream = stream->next) {
        int own = stream_wait(stream);
        if (!code) code = own;
    }
    return code;
}

static int waited(int code) {
    const char *given = getenv("FAKE_ERROR");
    return given && atoi(given) ? atoi(given) : code;
}

int aclrtCreateStream(void **handle) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NO_MEMORY;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_mutex_lock(&all_lock);
    stream->next = all_streams;
    all_streams = stream;
    pthread_mutex_unlock(&all_lock);
    *handle = stream;
    return OK;
}
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority; (void)flag;
    return aclrtCreateStream(stream);
}
/* A stream stays in the list, because events may still refer to it. */
int aclrtDestroyStream(void *stream) { return stream_wait(stream); }
int aclrtDestroyStreamForce(void *stream) { (void)stream; return OK; }
int aclrtSynchronizeDevice(void) { return waited(streams_wait()); }
int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { (void)ms; return waited(streams_wait()); }
int aclrtSynchronizeStream(void *stream) { return waited(stream_wait(stream)); }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t ms) { (void)ms; return waited(stream_wait(stream)); }
int aclrtStreamQuery(void *handle, int *status) {
    struct stream *stream = handle;
    *status = stream && stream->done < stream->handed;
    return OK;
}
int aclrtStreamGetId(void *stream, int32_t *id) { (void)stream; *id = 0; return OK; }
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) { (void)stream; *flag = 0; return OK; }

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}
static int is_reached(const struct event *event) { return !event->stream || event->stream->done >= event->after; }
static int wait_for_event(void *given) {
    struct event event = *(struct event *)given;
    free(given);
    return wait_until(event.stream, event.after);
}

int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    (void)flag;
    return (*event = calloc(1, sizeof(struct event))) ? OK : NO_MEMORY;
}
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }
int aclrtDestroyEvent(void *event) { free(event); return OK; }
int aclrtRecordEvent(void *handle, void *stream) {
    struct event *event = handle;
    event->ms = now_ms();
    event->stream = stream;
    event->after = stream ? ((struct stream *)stream)->handed : 0;
    return OK;
}
int aclrtStreamWaitEvent(void *stream, void *handle) {
    struct event *event = handle;
    if (!stream || is_reached(event) || event->stream == stream) return OK;
    struct event *copy = malloc(sizeof *copy);
    *copy = *event;
    stream_hand(stream, wait_for_event, copy);
    return OK;
}
int aclrtSynchronizeEvent(void *handle) {
    struct event *event = handle;
    return waited(wait_until(event->stream, event->after));
}
int aclrtQueryEventStatus(void *event, int *status) { *status = is_reached(event); return OK; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = !is_reached(event); return OK; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) {
    *ms = (float)(((struct event *)end)->ms - ((struct event *)start)->ms);
    return OK;
}
int aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
    *microseconds = (uint64_t)(((struct event *)event)->ms * 1e3);
    return OK;
}
