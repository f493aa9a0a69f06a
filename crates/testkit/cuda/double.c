/* A double of CUDA's driver, for machines without a device.

   An address of a "device" is a host address with a bit that no host address has, and another one
   for the second of the two devices: whoever touches it directly faults. Copies, either way, run on
   a thread of each stream, some time after they were asked for, and read their source then. Errors
   are injected by the double_ functions. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICE_BIT ((uint64_t)1 << 56)
#define SECOND_BIT ((uint64_t)1 << 57)
#define HOST(at) ((at) & ~(DEVICE_BIT | SECOND_BIT))
#define DEVICES 2
#define INVALID_VALUE 1
#define NO_DEVICE 101
#define INVALID_CONTEXT 201
#define LAUNCH_FAILED 719
#define NOT_PERMITTED 800

enum kind { COPY, RECORD };

struct work {
    struct work *next;
    enum kind kind;
    uint64_t dst, src;
    size_t bytes;
    int error;
    struct event *event;
    long generation;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *head, **tail;
    long asked, done;
    int error;
};

struct event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long recorded, reached;
    int error;
};

static long copies, fail_at, sync_fail_at;
static int refuse_register, registered, current, streams;
static int retained[DEVICES], used[DEVICES], need_context;
static pthread_mutex_t counters = PTHREAD_MUTEX_INITIALIZER;

/* The copy with this number, from 1, is refused when it is asked for; 0 for none. */
void double_fail_copy(long number) { copies = 0, fail_at = number; }
/* The copy with this number fails when it runs, which its stream's synchronisation tells. */
void double_fail_run(long number) { copies = 0, sync_fail_at = number; }
void double_refuse_register(int refuse) { refuse_register = refuse; }
int double_registered(void) { return registered; }
long double_copies(void) { return copies; }
int double_contexts(void) { return current; }
int double_streams(void) { return streams; }
/* How often the primary context of a device was taken. */
int double_retained(long ordinal) { return retained[ordinal]; }
/* Somebody else in this process uses a device. */
void double_use(long ordinal) { used[ordinal] = 1; }
/* Pointers are told to threads with a context only. */
void double_need_context(long need) { need_context = need; }

static void *run(void *argument) {
    struct stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (!stream->head)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct work *work = stream->head;
        stream->head = work->next;
        if (!stream->head)
            stream->tail = &stream->head;
        pthread_mutex_unlock(&stream->lock);
        if (work->kind == COPY) {
            usleep(200);
            if (!work->error)
                memcpy((void *)HOST(work->dst), (void *)HOST(work->src), work->bytes);
            else
                stream->error = work->error;
        } else {
            pthread_mutex_lock(&work->event->lock);
            work->event->reached = work->generation;
            work->event->error = stream->error;
            stream->error = 0;
            pthread_cond_broadcast(&work->event->changed);
            pthread_mutex_unlock(&work->event->lock);
        }
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
    }
    return NULL;
}

static void push(struct stream *stream, struct work work) {
    struct work *item = malloc(sizeof *item);
    *item = work;
    item->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *stream->tail = item;
    stream->tail = &item->next;
    stream->asked++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? 0 : NO_DEVICE;
}

int cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = retained[device] || used[device];
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(device + 1);
    retained[device]++;
    return 0;
}

static __thread int depth;

int cuCtxPushCurrent_v2(void *context) {
    depth++;
    __atomic_add_fetch(&current, 1, __ATOMIC_SEQ_CST);
    return context ? 0 : INVALID_VALUE;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = NULL;
    if (depth == 0)
        return INVALID_VALUE;
    depth--;
    __atomic_sub_fetch(&current, 1, __ATOMIC_SEQ_CST);
    return 0;
}

int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    if (!depth || !at || !bytes || flags != 1)
        return INVALID_VALUE;
    if (refuse_register)
        return NOT_PERMITTED;
    registered++;
    return 0;
}

int cuMemHostUnregister(void *at) {
    registered--;
    return at && depth ? 0 : INVALID_VALUE;
}

int cuStreamCreate(void **made, unsigned flags) {
    if (!depth || flags != 1)
        return INVALID_VALUE;
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->tail = &stream->head;
    pthread_t thread;
    pthread_create(&thread, NULL, run, stream);
    pthread_detach(thread);
    __atomic_add_fetch(&streams, 1, __ATOMIC_SEQ_CST);
    *made = stream;
    return 0;
}

int cuStreamSynchronize(void *handle) {
    struct stream *stream = handle;
    pthread_mutex_lock(&stream->lock);
    while (stream->done < stream->asked)
        pthread_cond_wait(&stream->changed, &stream->lock);
    int error = stream->error;
    stream->error = 0;
    pthread_mutex_unlock(&stream->lock);
    return error;
}

static int copy(uint64_t dst, uint64_t src, size_t bytes, void *stream) {
    pthread_mutex_lock(&counters);
    long number = ++copies;
    pthread_mutex_unlock(&counters);
    if (!depth || !bytes)
        return INVALID_VALUE;
    if (number == fail_at)
        return LAUNCH_FAILED;
    int error = number == sync_fail_at ? LAUNCH_FAILED : 0;
    push(stream, (struct work){.kind = COPY, .dst = dst, .src = src, .bytes = bytes, .error = error});
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t bytes, void *stream) {
    uint64_t from = (uintptr_t)src;
    return dst & DEVICE_BIT && !(from & DEVICE_BIT) ? copy(dst, from, bytes, stream) : INVALID_VALUE;
}

int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t bytes, void *stream) {
    uint64_t to = (uintptr_t)dst;
    return src & DEVICE_BIT && !(to & DEVICE_BIT) ? copy(to, src, bytes, stream) : INVALID_VALUE;
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
    if (need_context && !depth)
        return INVALID_CONTEXT;
    if (attribute != 9 || !(pointer & DEVICE_BIT))
        return INVALID_VALUE;
    *(int *)data = pointer & SECOND_BIT ? 1 : 0;
    return 0;
}

int cuEventCreate(void **made, unsigned flags) {
    struct event *event = calloc(1, sizeof *event);
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    *made = event;
    return depth && flags == 3 ? 0 : INVALID_VALUE;
}

int cuEventRecord(void *handle, void *stream) {
    struct event *event = handle;
    event->recorded++;
    push(stream, (struct work){.kind = RECORD, .event = event, .generation = event->recorded});
    return 0;
}

int cuEventSynchronize(void *handle) {
    struct event *event = handle;
    pthread_mutex_lock(&event->lock);
    while (event->reached < event->recorded)
        pthread_cond_wait(&event->changed, &event->lock);
    int error = event->error;
    pthread_mutex_unlock(&event->lock);
    return error;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : NULL;
    return code == LAUNCH_FAILED ? 0 : INVALID_VALUE;
}
