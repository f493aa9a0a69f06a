/* A double of CUDA's driver, for machines without a device.

   An address of a "device" is a host address with a bit that no host address has, and another one
   for the second of the two devices: whoever touches it directly faults. What a stream is asked for
   runs on a thread of its own, some time after it was asked for, and reads its source then; streams
   overtake each other. The one kernel is a function of the host. Errors are injected, and streams
   held, by the double_ functions. */

#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICE_BIT ((uint64_t)1 << 56)
#define SECOND_BIT ((uint64_t)1 << 57)
#define HOST(at) ((void *)((at) & ~(DEVICE_BIT | SECOND_BIT)))
#define DEVICES 2
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NO_DEVICE 101
#define INVALID_CONTEXT 201
#define NOT_READY 600
#define ILLEGAL_ADDRESS 700
#define LAUNCH_FAILED 719
#define NOT_PERMITTED 800

/* What a kernel of pages.ptx is given. */
#define PAGES 250
struct table {
    uint64_t ring;
    uint32_t gathers, unused;
    struct {
        uint64_t at;
        uint32_t offset, len;
    } pages[PAGES];
};

struct event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long recorded, reached;
    int error, users;
};

enum kind { COPY, KERNEL, RECORD, WAIT, GATE, END };

struct work {
    struct work *next;
    enum kind kind;
    uint64_t dst, src;
    size_t bytes;
    struct table *table;
    unsigned columns;
    int error;
    struct event *event;
    long generation;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *head, **tail;
    long asked, done;
    int error, held;
    unsigned number;
};

static long copies, fail_at, sync_fail_at, kernels, batches;
static int refuse_register, refuse_memory, refuse_kernel, refuse_batch, registered, streams;
static unsigned made_streams;
static int lost, moves = 1, jitter, delay = 200;
static long taken, entered;
static int retained[DEVICES], used[DEVICES], need_context;
static __thread int depth;
static __thread void *contexts[16];
static pthread_mutex_t counters = PTHREAD_MUTEX_INITIALIZER;

/* The copy with this number, from 1, is refused when it is asked for; 0 for none. */
void double_fail_copy(long number) { copies = 0, fail_at = number; }
/* The copy with this number fails when it runs, which its stream's synchronisation tells. */
void double_fail_run(long number) { copies = 0, sync_fail_at = number; }
void double_refuse_register(int refuse) { refuse_register = refuse; }
void double_refuse_memory(int refuse) { refuse_memory = refuse; }
void double_refuse_kernel(int refuse) { refuse_kernel = refuse; }
void double_refuse_batch(int refuse) { refuse_batch = refuse; }
/* Everything fails from now on, as after a kernel that has touched what is not there. */
void double_lose(int is_lost) { lost = is_lost; }
/* How long each copy takes, in microseconds; below 0, all is done in the call that asks for it. */
void double_delay(int us) { delay = us; }
/* And up to so much longer, so that streams overtake each other. */
void double_jitter(int us) { jitter = us; }
/* Whether copies and kernels move anything: where they do not, what is left is its callers' time. */
void double_moves(int does) { moves = does; }
int double_registered(void) { return registered; }
long double_copies(void) { return copies; }
long double_kernels(void) { return kernels; }
long double_batches(void) { return batches; }
/* Bytes of the devices that were taken. */
long double_taken(void) { return taken; }
/* Contexts that are current in the calling thread. */
int double_contexts(void) { return depth; }
/* How often a thread has made one its own. */
long double_entered(void) { return entered; }
int double_streams(void) { return streams; }
/* How often the primary context of a device was taken. */
int double_retained(long ordinal) { return retained[ordinal]; }
/* Somebody else in this process uses a device. */
void double_use(long ordinal) { used[ordinal] = 1; }
/* Pointers are told to threads with a context only. */
void double_need_context(long need) { need_context = need; }

/* For who measures its callers: all at once, and nothing moved. */
__attribute__((constructor)) static void begin(void) {
    const char *how = getenv("KVDEPOT_CUDA_DOUBLE");
    if (how && !strcmp(how, "instant"))
        delay = -1, moves = 0;
}

static void forget(struct event *event) {
    pthread_mutex_lock(&event->lock);
    int users = --event->users;
    pthread_mutex_unlock(&event->lock);
    if (!users)
        free(event);
}

static void keep(struct event *event) {
    pthread_mutex_lock(&event->lock);
    event->users++;
    pthread_mutex_unlock(&event->lock);
}

static void spread(const struct table *table, unsigned columns) {
    for (unsigned n = 0; n < columns; n++) {
        void *page = HOST(table->pages[n].at), *ring = HOST(table->ring + table->pages[n].offset);
        memcpy(table->gathers ? ring : page, table->gathers ? page : ring, table->pages[n].len);
    }
}

static void take_time(struct stream *stream) {
    if (delay < 0)
        return;
    stream->number = stream->number * 1103515245 + 12345;
    usleep(delay + (jitter ? (stream->number >> 8) % jitter : 0));
}

static void perform(struct stream *stream, struct work *work) {
    struct event *event = work->event;
    switch (work->kind) {
    case COPY:
        take_time(stream);
        if (work->error || lost)
            stream->error = lost ? ILLEGAL_ADDRESS : work->error;
        else if (moves)
            memcpy(HOST(work->dst), HOST(work->src), work->bytes);
        break;
    case KERNEL:
        if (moves && !lost)
            spread(work->table, work->columns);
        free(work->table);
        break;
    case RECORD:
        pthread_mutex_lock(&event->lock);
        event->reached = work->generation;
        event->error = lost ? ILLEGAL_ADDRESS : stream->error;
        stream->error = 0;
        pthread_cond_broadcast(&event->changed);
        pthread_mutex_unlock(&event->lock);
        forget(event);
        break;
    case WAIT:
        pthread_mutex_lock(&event->lock);
        while (event->reached < work->generation)
            pthread_cond_wait(&event->changed, &event->lock);
        pthread_mutex_unlock(&event->lock);
        forget(event);
        break;
    case GATE:
        pthread_mutex_lock(&stream->lock);
        while (stream->held)
            pthread_cond_wait(&stream->changed, &stream->lock);
        pthread_mutex_unlock(&stream->lock);
        break;
    case END:
        break;
    }
}

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
        if (work->kind == END) {
            __atomic_sub_fetch(&streams, 1, __ATOMIC_SEQ_CST);
            free(work);
            free(stream);
            return NULL;
        }
        perform(stream, work);
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
    }
    return NULL;
}

static void push(struct stream *stream, struct work work) {
    if (delay < 0 && work.kind != GATE && work.kind != END) {
        perform(stream, &work);
        return;
    }
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

static struct stream *make(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->tail = &stream->head;
    stream->number = __atomic_add_fetch(&made_streams, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&streams, 1, __ATOMIC_SEQ_CST);
    pthread_t thread;
    pthread_create(&thread, NULL, run, stream);
    pthread_detach(thread);
    return stream;
}

/* A stream of somebody else's, which computes until it is released. */
int64_t double_busy_stream(void) {
    struct stream *stream = make();
    stream->held = 1;
    push(stream, (struct work){.kind = GATE});
    return (intptr_t)stream;
}

void double_release(int64_t handle) {
    struct stream *stream = (struct stream *)(intptr_t)handle;
    pthread_mutex_lock(&stream->lock);
    stream->held = 0;
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

int cuDeviceGetName(char *name, int len, int device) {
    strncpy(name, "double", len);
    return device < DEVICES && len > 6 ? 0 : INVALID_VALUE;
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

int cuCtxGetCurrent(void **context) {
    *context = depth ? contexts[depth - 1] : NULL;
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    if (!context || depth == 16)
        return INVALID_VALUE;
    contexts[depth++] = context;
    __atomic_add_fetch(&entered, 1, __ATOMIC_SEQ_CST);
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = NULL;
    if (depth == 0)
        return INVALID_VALUE;
    depth--;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current_mode;
    int before = current_mode;
    if (*mode < 0 || *mode > 2)
        return INVALID_VALUE;
    current_mode = *mode;
    *mode = before;
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

int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
    if (!depth || !bytes)
        return INVALID_VALUE;
    if (refuse_memory)
        return OUT_OF_MEMORY;
    void *memory = malloc(bytes);
    *at = (uintptr_t)memory | DEVICE_BIT;
    __atomic_add_fetch(&taken, malloc_usable_size(memory), __ATOMIC_SEQ_CST);
    return 0;
}

int cuMemFree_v2(uint64_t at) {
    __atomic_sub_fetch(&taken, malloc_usable_size(HOST(at)), __ATOMIC_SEQ_CST);
    free(HOST(at));
    return depth ? 0 : INVALID_VALUE;
}

int cuMemAllocHost_v2(void **at, size_t bytes) {
    *at = depth ? malloc(bytes) : NULL;
    return *at ? 0 : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *at) {
    free(at);
    return 0;
}

int cuModuleLoadData(void **module, const void *image) {
    if (!depth || !strstr(image, ".visible .entry kvdepot_pages(.param .align 8 .b8 table[4016])"))
        return INVALID_VALUE;
    *module = (void *)image;
    return refuse_kernel ? NOT_PERMITTED : 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return strcmp(name, "kvdepot_pages") ? INVALID_VALUE : 0;
}

int cuStreamCreate(void **made, unsigned flags) {
    if (!depth || flags != 1)
        return INVALID_VALUE;
    *made = make();
    return 0;
}

int cuStreamDestroy_v2(void *handle) {
    if (!depth)
        return INVALID_VALUE;
    push(handle, (struct work){.kind = END});
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

/* Which copy this is, and whether it is refused. */
static int count(int *error) {
    pthread_mutex_lock(&counters);
    long number = ++copies;
    pthread_mutex_unlock(&counters);
    *error = number == sync_fail_at ? LAUNCH_FAILED : 0;
    return number == fail_at ? LAUNCH_FAILED : lost ? ILLEGAL_ADDRESS : 0;
}

static int copy(uint64_t dst, uint64_t src, size_t bytes, void *stream) {
    int error, refused = count(&error);
    if (!depth || !bytes)
        return INVALID_VALUE;
    if (!refused)
        push(stream, (struct work){
            .kind = COPY, .dst = dst, .src = src, .bytes = bytes, .error = error});
    return refused;
}

int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t bytes, void *stream) {
    uint64_t from = (uintptr_t)src;
    return dst & DEVICE_BIT && !(from & DEVICE_BIT) ? copy(dst, from, bytes, stream) : INVALID_VALUE;
}

int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t bytes, void *stream) {
    uint64_t to = (uintptr_t)dst;
    return src & DEVICE_BIT && !(to & DEVICE_BIT) ? copy(to, src, bytes, stream) : INVALID_VALUE;
}

int cuMemcpyBatchAsync_v2(const uint64_t *dsts, const uint64_t *srcs, const size_t *bytes,
                          size_t count, const int *attributes, const size_t *firsts,
                          size_t kinds, void *stream) {
    if (refuse_batch || !count || kinds != 1 || firsts[0] || attributes[0] != 1 || !stream)
        return INVALID_VALUE;
    __atomic_add_fetch(&batches, 1, __ATOMIC_SEQ_CST);
    for (size_t n = 0; n < count; n++) {
        if (!(dsts[n] & DEVICE_BIT) == !(srcs[n] & DEVICE_BIT))
            return INVALID_VALUE;
        int refused = copy(dsts[n], srcs[n], bytes[n], stream);
        if (refused)
            return refused;
    }
    return 0;
}

int cuLaunchKernel(void *function, unsigned columns, unsigned rows, unsigned z, unsigned threads,
                   unsigned y, unsigned tz, unsigned shared, void *stream, void **parameters,
                   void **extra) {
    if (!depth || !function || !columns || columns > PAGES || !rows || z != 1 || !threads || y != 1)
        return INVALID_VALUE;
    if (tz != 1 || shared || extra || lost)
        return lost ? ILLEGAL_ADDRESS : INVALID_VALUE;
    __atomic_add_fetch(&kernels, 1, __ATOMIC_SEQ_CST);
    struct table *table = malloc(sizeof *table);
    memcpy(table, parameters[0], sizeof *table);
    push(stream, (struct work){.kind = KERNEL, .table = table, .columns = columns});
    return 0;
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
    event->users = 1;
    *made = event;
    return depth && flags == 3 ? 0 : INVALID_VALUE;
}

int cuEventDestroy_v2(void *handle) {
    forget(handle);
    return depth ? 0 : INVALID_VALUE;
}

int cuEventRecord(void *handle, void *stream) {
    struct event *event = handle;
    if (lost)
        return ILLEGAL_ADDRESS;
    keep(event);
    pthread_mutex_lock(&event->lock);
    long generation = ++event->recorded;
    pthread_mutex_unlock(&event->lock);
    struct work work = {.kind = RECORD, .event = event, .generation = generation};
    /* The default stream has nothing to do. */
    struct stream none = {0};
    if (stream)
        push(stream, work);
    else
        perform(&none, &work);
    return 0;
}

int cuStreamWaitEvent(void *stream, void *handle, unsigned flags) {
    struct event *event = handle;
    if (!depth || flags || lost)
        return lost ? ILLEGAL_ADDRESS : INVALID_VALUE;
    keep(event);
    push(stream, (struct work){.kind = WAIT, .event = event, .generation = event->recorded});
    return 0;
}

int cuEventQuery(void *handle) {
    struct event *event = handle;
    if (!depth)
        return INVALID_VALUE;
    pthread_mutex_lock(&event->lock);
    int reached = event->reached >= event->recorded, error = event->error;
    pthread_mutex_unlock(&event->lock);
    return reached ? error : NOT_READY;
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
    *name = code == LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
            : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
            : code == NO_DEVICE     ? "CUDA_ERROR_INVALID_DEVICE"
                                    : NULL;
    return *name ? 0 : INVALID_VALUE;
}
