/* A double of 3FS's USRBIO (libhf3fs_api_shared.so), for machines without a 3FS.

   The folder that KVDEPOT_DOUBLE_3FS names, or double_mount(), is the mounted 3FS: files below
   it can be registered, and its 3fs-virt/iovs is where memory is made known, by links as the
   daemon has them. It has the library's functions that move bytes, and no others. Threads of the
   double are the daemon: they read and write the files some time after they were told to, and
   complete in any order. What the daemon would refuse is refused: memory whose link is gone, or
   leads to another file than the one that is mapped there. What nobody may do, as preparing for
   one ring in two threads at once, is counted by double_misused(). Errors are injected by the
   double_ functions, and in other processes by variables of the environment (see `configure`).
   */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define FDS_MAX 65536
#define ENTRIES_MAX 4096
/* What any file system takes past the page cache. */
#define PAGE 4096

struct hf3fs_iov {
    uint8_t *base;
    void *iovh;
    char id[16];
    char mount_point[256];
    size_t size, block_size;
    int numa;
};

struct hf3fs_ior {
    struct hf3fs_iov iov;
    void *iorh;
    char mount_point[256];
    bool for_read;
    int io_depth, priority, timeout;
    uint64_t flags;
};

struct hf3fs_cqe {
    int32_t index, reserved;
    int64_t result;
    const void *userdata;
};

_Static_assert(sizeof(struct hf3fs_iov) == 312, "as in 3FS's header");
_Static_assert(sizeof(struct hf3fs_ior) == 600, "as in 3FS's header");
_Static_assert(sizeof(struct hf3fs_cqe) == 24, "as in 3FS's header");

/* A file that is registered: the double's own descriptor of it, and one past the page cache. */
struct file {
    int fd, own, past, status, users;
};

struct io {
    struct io *next;
    struct ring *ring;
    struct file *file;
    char link[512];
    uint8_t *at;
    size_t block, from;
    off_t off;
    size_t len;
    int32_t index;
    int64_t result;
    const void *userdata;
};

struct ring {
    int entries, used, depth, prepared;
    bool for_read, taken[ENTRIES_MAX];
    struct io *first, **last;
    struct io *done;
    pthread_cond_t completed;
    int preparing, waiting;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, released = PTHREAD_COND_INITIALIZER;
static struct io *queue, *lost;
static struct file *files[FDS_MAX];
static char mount[256];
static long started;

static long ios, fail_at, fail_errno, short_at, short_all, lose_at, lose_all, full, delay_us;
static long reorder, direct, refuse, hang, registered, iovs, rings, misused, workers = 4;

/* The counts begin anew with each of these; numbers are from 1, and 0 is for none. */
EXPORT void double_fail(long number) { ios = 0, fail_at = number; }
EXPORT void double_fail_with(long number) { fail_errno = number; }
/* This one moves half of what it was asked for; all do. */
EXPORT void double_short(long number) { ios = 0, short_at = number; }
EXPORT void double_short_all(long all) { short_all = all; }
/* This one does not complete, or none does, before double_answer(). */
EXPORT void double_lose(long number) { ios = 0, lose_at = number; }
EXPORT void double_lose_all(long all) { lose_all = all; }
/* So many more are refused because the ring has no room. */
EXPORT void double_full(long count) { full = count; }
EXPORT void double_delay(long us) { delay_us = us; }
EXPORT void double_reorder(long on) { reorder = on; }
/* Past the page cache of the file system below, as far as it takes what was asked for. */
EXPORT void double_direct(long on) { direct = on; }
/* The sum of 1: memory of others, 2: memory of its own, 4: rings, 8: descriptors. */
EXPORT void double_refuse(long what) { refuse = what; }
/* The mount hangs: whatever asks the daemon waits until it no longer does. */
EXPORT void double_hang(long on) {
    pthread_mutex_lock(&lock);
    hang = on;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}
EXPORT long double_ios(void) { return ios; }
EXPORT long double_registered(void) { return registered; }
EXPORT long double_iovs(void) { return iovs; }
EXPORT long double_rings(void) { return rings; }
EXPORT long double_misused(void) { return misused; }

EXPORT long double_lost(void) {
    pthread_mutex_lock(&lock);
    long count = 0;
    for (struct io *io = lost; io; io = io->next)
        count++;
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT long double_mount(const char *path) {
    char below[300];
    if (!path || !realpath(path, mount))
        return -1;
    snprintf(below, sizeof below, "%s/3fs-virt", mount);
    mkdir(below, 0700);
    strcat(below, "/iovs");
    mkdir(below, 0700);
    return 0;
}

static long number(const char *name) {
    const char *value = getenv(name);
    return value ? atol(value) : 0;
}

__attribute__((constructor)) static void configure(void) {
    double_mount(getenv("KVDEPOT_DOUBLE_3FS"));
    fail_at = number("KVDEPOT_DOUBLE_3FS_FAIL");
    fail_errno = number("KVDEPOT_DOUBLE_3FS_ERRNO");
    short_at = number("KVDEPOT_DOUBLE_3FS_SHORT");
    short_all = number("KVDEPOT_DOUBLE_3FS_SHORT_ALL");
    lose_at = number("KVDEPOT_DOUBLE_3FS_LOSE");
    lose_all = number("KVDEPOT_DOUBLE_3FS_LOSE_ALL");
    full = number("KVDEPOT_DOUBLE_3FS_FULL");
    delay_us = number("KVDEPOT_DOUBLE_3FS_DELAY_US");
    reorder = number("KVDEPOT_DOUBLE_3FS_REORDER");
    direct = number("KVDEPOT_DOUBLE_3FS_DIRECT");
    refuse = number("KVDEPOT_DOUBLE_3FS_REFUSE");
    if (number("KVDEPOT_DOUBLE_3FS_WORKERS") > 0)
        workers = number("KVDEPOT_DOUBLE_3FS_WORKERS");
}

static void daemon_answers(void) {
    pthread_mutex_lock(&lock);
    while (hang)
        pthread_cond_wait(&released, &lock);
    pthread_mutex_unlock(&lock);
}

static void misuse(const char *what) {
    fprintf(stderr, "double of USRBIO: %s\n", what);
    __atomic_add_fetch(&misused, 1, __ATOMIC_SEQ_CST);
}

EXPORT bool hf3fs_is_hf3fs(int fd) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(name, path, sizeof path - 1);
    size_t prefix = strlen(mount);
    return prefix && len > (ssize_t)prefix && !strncmp(path, mount, prefix) && path[prefix] == '/';
}

EXPORT int hf3fs_extract_mount_point(char *out, int size, const char *path) {
    char real[PATH_MAX];
    size_t prefix = strlen(mount);
    if (!prefix || !realpath(path, real) || strncmp(real, mount, prefix) ||
        (real[prefix] && real[prefix] != '/'))
        return -1;
    if ((int)prefix < size)
        strcpy(out, mount);
    return (int)prefix + 1;
}

/* Where memory is linked: by its number, with and without dashes. */
static void link_of(char *out, size_t size, const char *at, const char id[16], bool dashes) {
    char hex[40], *to = hex;
    for (int byte = 0; byte < 16; byte++) {
        if (dashes && (byte == 4 || byte == 6 || byte == 8 || byte == 10))
            *to++ = '-';
        to += sprintf(to, "%02x", (uint8_t)id[byte]);
    }
    snprintf(out, size, "%s/3fs-virt/iovs/%s", at, hex);
}

/* Whether a file is what is mapped at an address. */
static bool is_mapped(const void *at, const struct stat *file) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    bool found = false;
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long begin, end, inode;
        unsigned major, minor;
        if (sscanf(line, "%lx-%lx %*s %*x %x:%x %lu", &begin, &end, &major, &minor, &inode) == 5)
            found = (uintptr_t)at >= begin && (uintptr_t)at < end && inode == file->st_ino &&
                    makedev(major, minor) == file->st_dev;
    }
    if (maps)
        fclose(maps);
    return found;
}

static int create(struct hf3fs_iov *iov, const char *at, size_t size, size_t block,
                  const char *kind) {
    if (!iov || !at || !*at || strlen(at) >= sizeof iov->mount_point || strcmp(at, mount))
        return -EINVAL;
    daemon_answers();
    char link[512], shm[64];
    memset(iov, 0, sizeof *iov);
    if (getrandom(iov->id, sizeof iov->id, 0) != sizeof iov->id)
        return -EIO;
    link_of(link, sizeof link, at, iov->id, true);
    snprintf(shm, sizeof shm, "/dev/shm/hf3fs-iov-%s", strrchr(link, '/') + 1);
    if (block)
        sprintf(link + strlen(link), ".b%zu", block);
    strcat(link, kind);
    int fd = open(shm, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return -EIO;
    void *base = ftruncate(fd, (off_t)size) || fallocate(fd, 0, 0, (off_t)size)
                     ? MAP_FAILED
                     : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED || symlink(shm, link)) {
        int error = base == MAP_FAILED ? EIO : errno;
        unlink(shm);
        return -error;
    }
    if (*kind)
        unlink(shm);
    iov->base = base;
    iov->iovh = strdup(link);
    strcpy(iov->mount_point, at);
    iov->size = size;
    iov->block_size = block;
    iov->numa = -1;
    __atomic_add_fetch(*kind ? &rings : &iovs, 1, __ATOMIC_SEQ_CST);
    return 0;
}

EXPORT int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *at, size_t size, size_t block,
                           int numa) {
    (void)numa;
    return refuse & 2 ? -ENOMEM : create(iov, at, size, block, "");
}

/* Unlike the library, which looks at nothing, this says at once what its daemon would say of the
   link: so late, nobody would know why. */
EXPORT int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const uint8_t id[16], const char *at,
                         size_t size, size_t block, int numa) {
    char link[512], target[PATH_MAX];
    struct stat file;
    if (!iov || !base || strlen(at) >= sizeof iov->mount_point || refuse & 1)
        return -EINVAL;
    ssize_t len = -1;
    for (int dashes = 1; dashes >= 0 && len < 0; dashes--) {
        link_of(link, sizeof link, at, (const char *)id, dashes);
        if (block)
            sprintf(link + strlen(link), ".b%zu", block);
        len = readlink(link, target, sizeof target - 1);
    }
    target[len < 0 ? 0 : len] = 0;
    if (strncmp(target, "/dev/shm/", 9) || stat(target, &file) || !S_ISREG(file.st_mode) ||
        (size_t)file.st_size < size || !is_mapped(base, &file)) {
        misuse("memory was wrapped that has no link to it");
        return -EINVAL;
    }
    *iov = (struct hf3fs_iov){.base = base, .size = size, .block_size = block, .numa = numa};
    memcpy(iov->id, id, sizeof iov->id);
    strcpy(iov->mount_point, at);
    return 0;
}

static void unlink_target(const char *link) {
    char target[PATH_MAX];
    ssize_t len = readlink(link, target, sizeof target - 1);
    if (len > 0) {
        target[len] = 0;
        unlink(target);
    }
}

EXPORT void hf3fs_iovunlink(struct hf3fs_iov *iov) {
    if (iov && iov->iovh)
        unlink_target(iov->iovh);
}

static void destroy(struct hf3fs_iov *iov, long *count) {
    if (!iov || !iov->iovh) {
        misuse("memory was given back that is not the library's");
        return;
    }
    daemon_answers();
    unlink_target(iov->iovh);
    unlink(iov->iovh);
    free(iov->iovh);
    munmap(iov->base, iov->size);
    iov->iovh = NULL;
    __atomic_sub_fetch(count, 1, __ATOMIC_SEQ_CST);
}

EXPORT void hf3fs_iovdestroy(struct hf3fs_iov *iov) { destroy(iov, &iovs); }

EXPORT size_t hf3fs_ior_size(int entries) { return 4096 + 128 * (size_t)(entries + 1); }

EXPORT int hf3fs_io_entries(const struct hf3fs_ior *ior) {
    return ((struct ring *)ior->iorh)->entries;
}

EXPORT int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *at, int entries, bool for_read,
                            int io_depth, int timeout, int numa, uint64_t flags) {
    (void)numa;
    char kind[64];
    if (!ior || timeout < 0 || entries <= 0 || entries > ENTRIES_MAX)
        return -EINVAL;
    if (refuse & 4)
        return -EIO;
    memset(ior, 0, sizeof *ior);
    snprintf(kind, sizeof kind, ".%c%d.t%d", for_read ? 'r' : 'w', io_depth, timeout);
    int created = create(&ior->iov, at, hf3fs_ior_size(entries), 0, kind);
    if (created)
        return created;
    struct ring *ring = calloc(1, sizeof *ring);
    ring->entries = entries;
    ring->depth = io_depth;
    ring->for_read = for_read;
    ring->last = &ring->first;
    pthread_cond_init(&ring->completed, NULL);
    ior->iorh = ring;
    strcpy(ior->mount_point, at);
    ior->for_read = for_read;
    ior->io_depth = io_depth;
    ior->timeout = timeout;
    ior->flags = flags;
    return 0;
}

EXPORT void hf3fs_iordestroy(struct hf3fs_ior *ior) {
    if (!ior || !ior->iorh)
        return;
    struct ring *ring = ior->iorh;
    pthread_mutex_lock(&lock);
    if (ring->used)
        misuse("a ring was given back that has something under way");
    else
        free(ring);
    pthread_mutex_unlock(&lock);
    ior->iorh = NULL;
    destroy(&ior->iov, &rings);
}

static void locked_let_go(struct file *file) {
    if (--file->users == 0) {
        close(file->own);
        if (file->past >= 0)
            close(file->past);
        free(file);
    }
}

EXPORT int hf3fs_reg_fd(int fd, uint64_t flags) {
    (void)flags;
    daemon_answers();
    if (refuse & 8 || fd < 0 || fd >= FDS_MAX || !hf3fs_is_hf3fs(fd))
        return EBADF;
    pthread_mutex_lock(&lock);
    int own = files[fd] ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0), error = files[fd] ? EINVAL : errno;
    if (own >= FDS_MAX || (own >= 0 && files[own])) {
        close(own);
        own = -1, error = EINVAL;
    }
    if (own >= 0) {
        struct file *file = malloc(sizeof *file);
        int status = fcntl(fd, F_GETFL);
        char name[64];
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        *file = (struct file){.fd = fd, .own = own, .past = -1, .status = status, .users = 1};
        if (direct)
            file->past = open(name, (status & O_ACCMODE) | O_DIRECT | O_CLOEXEC);
        files[fd] = files[own] = file;
        registered++;
    }
    pthread_mutex_unlock(&lock);
    return own < 0 ? error : -own;
}

EXPORT void hf3fs_dereg_fd(int fd) {
    daemon_answers();
    if (fd < 0 || fd >= FDS_MAX || !hf3fs_is_hf3fs(fd))
        return;
    pthread_mutex_lock(&lock);
    struct file *file = files[fd];
    if (file) {
        files[file->fd] = files[file->own] = NULL;
        registered--;
        locked_let_go(file);
    }
    pthread_mutex_unlock(&lock);
}

/* What the daemon does with one of them. */
static int64_t perform(struct io *io, long half) {
    struct stat link;
    if (lstat(io->link, &link))
        return -EINVAL;
    if (io->block && io->from / io->block != (io->from + io->len - 1) / io->block)
        return -EINVAL;
    size_t done = 0, len = half && io->len > 1 ? io->len / 2 : io->len;
    while (done < len) {
        off_t off = io->off + (off_t)done;
        uint8_t *at = io->at + done;
        size_t rest = len - done;
        bool past = io->file->past >= 0 && !(((uintptr_t)at | (size_t)off | rest) % PAGE);
        int fd = past ? io->file->past : io->file->own;
        ssize_t moved = io->ring->for_read ? pread(fd, at, rest, off) : pwrite(fd, at, rest, off);
        if (moved < 0)
            return -errno;
        if (!moved)
            break;
        done += (size_t)moved;
    }
    return (int64_t)done;
}

static void complete(struct io *io, int64_t result) {
    pthread_mutex_lock(&lock);
    io->result = result;
    struct io **at = &io->ring->done;
    while (*at && !reorder)
        at = &(*at)->next;
    io->next = *at;
    *at = io;
    locked_let_go(io->file);
    pthread_cond_broadcast(&io->ring->completed);
    pthread_mutex_unlock(&lock);
}

static void *worker(void *none) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!queue)
            pthread_cond_wait(&work, &lock);
        struct io **at = &queue;
        while (reorder && (*at)->next)
            at = &(*at)->next;
        struct io *io = *at;
        *at = io->next;
        long number = ++ios, error = number == fail_at ? (fail_errno ? fail_errno : EIO) : 0;
        long half = number == short_at || short_all;
        bool loses = number == lose_at || lose_all;
        if (loses)
            io->next = lost, lost = io;
        pthread_mutex_unlock(&lock);
        if (loses)
            continue;
        /* A disk takes its time by itself. */
        long us = delay_us || direct ? delay_us : 50;
        if (us)
            usleep((useconds_t)us * (useconds_t)(reorder ? 1 + number % 3 : 1));
        complete(io, error ? -error : perform(io, half));
    }
    return none;
}

/* What was lost is done now, and completes. */
EXPORT void double_answer(void) {
    pthread_mutex_lock(&lock);
    struct io *io = lost;
    lost = NULL;
    pthread_mutex_unlock(&lock);
    while (io) {
        struct io *next = io->next;
        complete(io, perform(io, 0));
        io = next;
    }
}

EXPORT int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read,
                         void *ptr, int fd, size_t off, uint64_t len, const void *userdata) {
    if (!ior || !ior->iorh || read != ior->for_read || !iov || !iov->base || !ptr || !len ||
        fd == INT_MIN)
        return -EINVAL;
    size_t from = (uintptr_t)ptr - (uintptr_t)iov->base;
    if ((uintptr_t)ptr < (uintptr_t)iov->base || from > iov->size || len > iov->size - from)
        return -EINVAL;
    fd = fd < 0 ? -fd : fd;
    struct ring *ring = ior->iorh;
    if (__atomic_exchange_n(&ring->preparing, 1, __ATOMIC_SEQ_CST))
        misuse("two threads prepare for one ring");
    pthread_mutex_lock(&lock);
    struct file *file = fd < FDS_MAX ? files[fd] : NULL;
    int mode = file ? file->status & O_ACCMODE : 0, index = 0;
    if (!file)
        index = -EBADF;
    else if (mode == (read ? O_WRONLY : O_RDONLY))
        index = -EACCES;
    else if (ring->used == ring->entries || full > 0)
        full -= full > 0, index = -EAGAIN;
    if (!index) {
        while (ring->taken[index])
            index++;
        ring->taken[index] = true;
        ring->used++;
        ring->prepared++;
        file->users++;
        struct io *io = calloc(1, sizeof *io);
        *io = (struct io){.ring = ring, .file = file, .at = ptr, .from = from};
        io->block = iov->block_size;
        io->off = (off_t)off, io->len = len, io->index = index, io->userdata = userdata;
        link_of(io->link, sizeof io->link, iov->mount_point, iov->id, true);
        if (io->block)
            sprintf(io->link + strlen(io->link), ".b%zu", io->block);
        *ring->last = io;
        ring->last = &io->next;
    }
    pthread_mutex_unlock(&lock);
    __atomic_store_n(&ring->preparing, 0, __ATOMIC_SEQ_CST);
    return index;
}

EXPORT int hf3fs_submit_ios(const struct hf3fs_ior *ior) {
    if (!ior || !ior->iorh)
        return -EINVAL;
    struct ring *ring = ior->iorh;
    pthread_mutex_lock(&lock);
    for (; started < workers; started++) {
        pthread_t thread;
        if (!pthread_create(&thread, NULL, worker, NULL))
            pthread_detach(thread);
    }
    struct io **last = &queue;
    while (*last)
        last = &(*last)->next;
    while (ring->first && (ring->depth <= 0 || ring->prepared >= ring->depth)) {
        int count = ring->depth > 0 ? ring->depth : ring->prepared;
        ring->prepared -= count;
        for (; count; count--) {
            struct io *io = ring->first;
            ring->first = io->next;
            io->next = NULL;
            *last = io;
            last = &io->next;
            pthread_cond_signal(&work);
        }
    }
    if (!ring->first)
        ring->last = &ring->first;
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec,
                              int min_results, const struct timespec *abs_timeout) {
    if (cqec <= 0 || !ior || !ior->iorh)
        return -EINVAL;
    struct ring *ring = ior->iorh;
    if (__atomic_exchange_n(&ring->waiting, 1, __ATOMIC_SEQ_CST))
        misuse("two threads wait for one ring");
    int filled = 0, error = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (ring->done && filled < cqec) {
            struct io *io = ring->done;
            ring->done = io->next;
            cqes[filled++] = (struct hf3fs_cqe){io->index, 0, io->result, io->userdata};
            ring->taken[io->index] = false;
            ring->used--;
            free(io);
        }
        if (filled == cqec || filled >= min_results || error == ETIMEDOUT)
            break;
        error = abs_timeout ? pthread_cond_timedwait(&ring->completed, &lock, abs_timeout)
                            : pthread_cond_wait(&ring->completed, &lock);
    }
    pthread_mutex_unlock(&lock);
    __atomic_store_n(&ring->waiting, 0, __ATOMIC_SEQ_CST);
    return filled;
}
