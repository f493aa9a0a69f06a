/* Engines that move bytes: between two processes over TCP and over memory of this host, and what
 * becomes of requests that cannot be. With an argument this is the other process. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 1000, ROW = 96, BYTES = ROWS * ROW };

static const uint8_t NAME[] = {'h', 'o', 'm', 'e'};

static unsigned char byte_of(size_t at, unsigned char of) {
    return (unsigned char)(at * 31 + at / ROW + of);
}

static void fill(unsigned char *bytes, unsigned char of) {
    for (size_t i = 0; i < BYTES; i++)
        bytes[i] = byte_of(i, of);
}

static kvd_engine *started(const char *listen, const char *local) {
    kvd_option options[] = {
        {"listen", listen}, {"local", local},   {"rdma", "none"},
        {"retries", "1"},   {"timeout", "6s"}, {"token", "shared"},
    };
    kvd_engine *engine;
    OK(kvd_engine_open(options, sizeof options / sizeof *options, &engine));
    return engine;
}

/* ---- the other process ---- */

/* Publishes its memory, and looks in the end what was written there: each odd row. */
static int target(const char *local) {
    static unsigned char home[BYTES], theirs[BYTES];
    fill(home, 1);
    fill(theirs, 2);
    kvd_engine *engine = started("127.0.0.1:0", local);
    /* Two buffers that are one range. */
    kvd_buffer buffers[] = {{home, 700}, {home + 700, BYTES - 700}};
    kvd_segment *segment;
    OK(kvd_segment_open(engine, NAME, sizeof NAME, buffers, 2, KVD_RIGHTS_BOTH, KVD_NONE,
                        &segment));
    char *address;
    OK(kvd_engine_address(engine, &address));
    printf("%s\n", address);
    fflush(stdout);
    kvd_string_free(address);
    char was_written = (char)getchar();
    OK(kvd_segment_close(segment));
    for (size_t row = 0; row < ROWS; row++) {
        const unsigned char *is = was_written == 'w' && row % 2 ? theirs : home;
        for (size_t i = row * ROW; i < (row + 1) * ROW; i++)
            CHECK(home[i] == (is == theirs ? theirs[i] : byte_of(i, 1)));
    }
    OK(kvd_engine_close(engine));
    return 0;
}

struct other {
    pid_t pid;
    int in;
    char address[64];
};

static struct other start_other(const char *program, const char *local) {
    int in[2], out[2];
    CHECK(pipe(in) == 0 && pipe(out) == 0);
    struct other other;
    other.pid = fork();
    CHECK(other.pid >= 0);
    if (other.pid == 0) {
        /* It ends with this one, stopped or not. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(in[0], 0);
        dup2(out[1], 1);
        close(in[0]), close(in[1]), close(out[0]), close(out[1]);
        execl(program, program, local, (char *)NULL);
        _exit(127);
    }
    close(in[0]), close(out[1]);
    other.in = in[1];
    FILE *said = fdopen(out[0], "r");
    CHECK(said && fgets(other.address, sizeof other.address, said));
    other.address[strcspn(other.address, "\n")] = 0;
    fclose(said);
    return other;
}

/* It looks at its memory, and finds that right. */
static void end_other(struct other other, char was_written) {
    CHECK(write(other.in, &was_written, 1) == 1);
    close(other.in);
    int status;
    CHECK(waitpid(other.pid, &status, 0) == other.pid && WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}

/* When this returns it does nothing any more. */
static void stop_other(struct other other) {
    int status;
    CHECK(kill(other.pid, SIGSTOP) == 0);
    CHECK(waitpid(other.pid, &status, WUNTRACED) == other.pid && WIFSTOPPED(status));
}

static void kill_other(struct other other) {
    CHECK(kill(other.pid, SIGKILL) == 0);
    CHECK(waitpid(other.pid, NULL, 0) == other.pid);
    close(other.in);
}

/* ---- this one ---- */

static unsigned char mine[BYTES];

static kvd_region *region_of_mine(kvd_engine *engine) {
    kvd_buffer all = {mine, BYTES};
    kvd_region *region;
    OK(kvd_region_open(engine, &all, 1, 1, &region));
    return region;
}

static kvd_request request(uint32_t op, void *local, const kvd_remote *remote, uint64_t offset,
                           uint64_t len) {
    kvd_request one;
    memset(&one, 0, sizeof one);
    one.op = op;
    one.local = local;
    one.remote = remote;
    one.offset = offset;
    one.len = len;
    return one;
}

/* Rows go both ways between two processes; how, is answered. */
static uint32_t both_ways(const char *program, const char *local) {
    struct other other = start_other(program, local);
    kvd_engine *engine = started("none", local);
    char *address;
    OK(kvd_engine_address(engine, &address));
    CHECK(strcmp(address, "") == 0);
    kvd_string_free(address);
    kvd_remote *remote;
    OK(kvd_remote_open(engine, other.address, NAME, sizeof NAME, &remote));
    kvd_remote_about about;
    KVD_INIT(&about);
    OK(kvd_remote_info(remote, &about));
    CHECK(about.len == BYTES && about.rights == KVD_RIGHTS_BOTH && about.lasts_ms == KVD_NONE);
    kvd_region *region = region_of_mine(engine);

    /* Even rows come, each to where the last but so many lies; then the odd ones go. */
    static kvd_request requests[ROWS / 2];
    static uint8_t statuses[ROWS / 2];
    memset(mine, 0, sizeof mine);
    for (size_t i = 0; i < ROWS / 2; i++) {
        unsigned char *to = mine + (ROWS / 2 - 1 - i) * ROW;
        requests[i] = request(KVD_OP_READ, to, remote, 2 * i * ROW, ROW);
    }
    kvd_batch *batch;
    OK(kvd_engine_submit(engine, requests, ROWS / 2, 30000, KVD_PRIORITY_URGENT, &batch));
    REFUSED(kvd_batch_wait(batch, KVD_NONE, statuses, ROWS / 2 - 1), KVD_STATUS_INPUT,
            "statuses_len: 499");
    OK(kvd_batch_wait(batch, KVD_NONE, statuses, ROWS / 2));
    OK(kvd_batch_wait(batch, 0, statuses, ROWS / 2));
    OK(kvd_batch_cancel(batch));
    OK(kvd_batch_free(batch));
    for (size_t i = 0; i < ROWS / 2; i++) {
        CHECK(statuses[i] == KVD_TRANSFER_DONE);
        for (size_t j = 0; j < ROW; j++)
            CHECK(mine[(ROWS / 2 - 1 - i) * ROW + j] == byte_of(2 * i * ROW + j, 1));
    }
    fill(mine, 2);
    for (size_t i = 0; i < ROWS / 2; i++) {
        size_t at = (2 * i + 1) * ROW;
        requests[i] = request(KVD_OP_WRITE, mine + at, remote, at, ROW);
    }
    memset(statuses, 0, sizeof statuses);
    OK(kvd_engine_run(engine, requests, ROWS / 2, 30000, KVD_PRIORITY_NORMAL, statuses, ROWS / 2));
    for (size_t i = 0; i < ROWS / 2; i++)
        CHECK(statuses[i] == KVD_TRANSFER_DONE);
    char *json;
    OK(kvd_engine_stats(engine, &json));
    CHECK(strstr(json, "\"requests\":1000") && strstr(json, "\"bytes\":96000"));
    kvd_string_free(json);
    OK(kvd_remote_close(remote));
    OK(kvd_region_close(region));
    OK(kvd_engine_close(engine));
    end_other(other, 'w');
    return about.path;
}

/* Each request of a batch has an outcome of its own. */
static void failed(void) {
    kvd_engine *home = started("127.0.0.1:0", "false"), *engine = started("none", "false");
    static unsigned char bytes[BYTES], unwritten[ROW], nowhere[ROW];
    fill(bytes, 3);
    kvd_buffer all = {bytes, BYTES}, read_only = {unwritten, ROW};
    kvd_segment *segment, *guarded, *again;
    OK(kvd_segment_open(home, NAME, sizeof NAME, &all, 1, KVD_RIGHTS_READ, 60000, &segment));
    OK(kvd_segment_open(home, NULL, 0, &all, 1, KVD_RIGHTS_WRITE, KVD_NONE, &guarded));
    REFUSED(kvd_segment_open(home, NAME, sizeof NAME, &all, 1, KVD_RIGHTS_READ, KVD_NONE, &again),
            KVD_STATUS_INPUT, "home");
    CHECK(again == NULL);
    char *address;
    OK(kvd_engine_address(home, &address));
    kvd_remote *remote, *written, *gone;
    OK(kvd_remote_open(engine, address, NAME, sizeof NAME, &remote));
    const uint8_t *name;
    size_t name_len;
    OK(kvd_segment_name(guarded, &name, &name_len));
    CHECK(name_len == 32);
    OK(kvd_remote_open(engine, address, name, name_len, &written));
    kvd_remote_about about;
    KVD_INIT(&about);
    OK(kvd_remote_info(remote, &about));
    CHECK(about.lasts_ms <= 60000 && about.rights == KVD_RIGHTS_READ && about.path == KVD_PATH_TCP);
    kvd_region *region = region_of_mine(engine), *source;
    OK(kvd_region_open(engine, &read_only, 1, 0, &source));
    kvd_request requests[] = {
        request(KVD_OP_READ, mine, remote, 0, ROW),
        request(KVD_OP_READ, mine + 2 * ROW, remote, BYTES - 8, 9),
        request(KVD_OP_WRITE, mine + 4 * ROW, remote, 0, ROW),
        request(KVD_OP_READ, mine + 6 * ROW, written, 0, ROW),
        request(KVD_OP_READ, nowhere, remote, 0, ROW),
        request(KVD_OP_READ, unwritten, remote, 0, ROW),
        request(KVD_OP_WRITE, unwritten, written, ROW, ROW),
        request(KVD_OP_READ, mine + 8 * ROW, remote, 8 * ROW, UINT64_MAX),
        request(KVD_OP_READ, mine + 10 * ROW, remote, 8 * ROW, ROW),
    };
    const uint8_t expected[] = {
        KVD_TRANSFER_DONE,           KVD_TRANSFER_OUT_OF_RANGE,   KVD_TRANSFER_NO_PERMISSION,
        KVD_TRANSFER_NO_PERMISSION,  KVD_TRANSFER_NOT_REGISTERED, KVD_TRANSFER_NOT_REGISTERED,
        KVD_TRANSFER_DONE,           KVD_TRANSFER_NOT_REGISTERED, KVD_TRANSFER_DONE,
    };
    enum { COUNT = sizeof expected };
    uint8_t statuses[COUNT];
    OK(kvd_engine_run(engine, requests, COUNT, 30000, KVD_PRIORITY_BACKGROUND, statuses, COUNT));
    for (size_t i = 0; i < COUNT; i++)
        if (statuses[i] != expected[i]) {
            fprintf(stderr, "request %zu: %s\n", i, kvd_transfer_status_name(statuses[i]));
            exit(1);
        }
    CHECK(memcmp(bytes + ROW, unwritten, ROW) == 0);
    CHECK(mine[10 * ROW] == byte_of(8 * ROW, 3));
    OK(kvd_segment_close(guarded));
    kvd_request late = request(KVD_OP_WRITE, mine, written, 0, ROW);
    OK(kvd_engine_run(engine, &late, 1, 30000, KVD_PRIORITY_NORMAL, statuses, 1));
    CHECK(statuses[0] == KVD_TRANSFER_NOT_GRANTED);
    OK(kvd_engine_close(home));
    REFUSED(kvd_remote_open(engine, address, NAME, sizeof NAME, &gone), KVD_STATUS_SYSTEM, address);
    CHECK(gone == NULL);
    kvd_string_free(address);
    OK(kvd_engine_close(engine));
    OK(kvd_region_close(region));
    OK(kvd_region_close(source));
    OK(kvd_remote_close(remote));
    OK(kvd_remote_close(written));
    OK(kvd_segment_close(segment));
}

/* A peer that says nothing, and one that is gone. */
static void silent(const char *program) {
    struct other other = start_other(program, "false");
    kvd_engine *engine = started("none", "false");
    kvd_remote *remote;
    OK(kvd_remote_open(engine, other.address, NAME, sizeof NAME, &remote));
    kvd_region *region = region_of_mine(engine);
    kvd_request one = request(KVD_OP_READ, mine, remote, 0, BYTES);
    uint8_t statuses;
    OK(kvd_engine_run(engine, &one, 1, 30000, KVD_PRIORITY_NORMAL, &statuses, 1));
    CHECK(statuses == KVD_TRANSFER_DONE);
    stop_other(other);
    kvd_batch *batch;
    /* Longer than a machine stands still. */
    OK(kvd_engine_submit(engine, &one, 1, 5000, KVD_PRIORITY_NORMAL, &batch));
    REFUSED(kvd_batch_wait(batch, 1, &statuses, 1), KVD_STATUS_TIMEOUT, "1 ms");
    CHECK(statuses == KVD_TRANSFER_PENDING);
    OK(kvd_batch_wait(batch, KVD_NONE, &statuses, 1));
    CHECK(statuses == KVD_TRANSFER_TIMED_OUT);
    OK(kvd_batch_free(batch));
    OK(kvd_engine_submit(engine, &one, 1, KVD_NONE, KVD_PRIORITY_NORMAL, &batch));
    OK(kvd_batch_cancel(batch));
    OK(kvd_batch_wait(batch, 0, &statuses, 1));
    CHECK(statuses == KVD_TRANSFER_CANCELLED);
    OK(kvd_batch_free(batch));
    /* The handle is gone, the batch is not: its region waits until its time is over. */
    OK(kvd_engine_submit(engine, &one, 1, 400, KVD_PRIORITY_NORMAL, &batch));
    kvd_batch *watched;
    OK(kvd_engine_submit(engine, &one, 1, 400, KVD_PRIORITY_NORMAL, &watched));
    OK(kvd_batch_free(batch));
    OK(kvd_region_close(region));
    (void)kvd_batch_wait(watched, 0, &statuses, 1);
    CHECK(statuses == KVD_TRANSFER_TIMED_OUT);
    OK(kvd_batch_wait(watched, KVD_NONE, &statuses, 1));
    OK(kvd_batch_free(watched));
    region = region_of_mine(engine);
    OK(kvd_engine_submit(engine, &one, 1, KVD_NONE, KVD_PRIORITY_NORMAL, &batch));
    kill_other(other);
    OK(kvd_batch_wait(batch, KVD_NONE, &statuses, 1));
    CHECK(statuses == KVD_TRANSFER_LOST);
    OK(kvd_batch_free(batch));

    other = start_other(program, "false");
    kvd_remote *second;
    OK(kvd_remote_open(engine, other.address, NAME, sizeof NAME, &second));
    stop_other(other);
    one.remote = second;
    OK(kvd_engine_submit(engine, &one, 1, KVD_NONE, KVD_PRIORITY_NORMAL, &batch));
    OK(kvd_engine_close(engine));
    OK(kvd_batch_wait(batch, 0, &statuses, 1));
    CHECK(statuses == KVD_TRANSFER_CLOSED);
    OK(kvd_batch_free(batch));
    OK(kvd_region_close(region));
    OK(kvd_remote_close(remote));
    OK(kvd_remote_close(second));
    CHECK(kill(other.pid, SIGCONT) == 0);
    end_other(other, '-');
}

static void bad_inputs(void) {
    kvd_engine *engine, *other;
    kvd_option wrong = {"steams", "2"}, none = {"streams", "0"}, flag = {"checksum", "maybe"};
    kvd_option open_to_all = {"listen", "0.0.0.0:0"}, half = {"tls_key", "key.pem"};
    REFUSED(kvd_engine_open(&wrong, 1, &engine), KVD_STATUS_CONFIG, "\"streams\"");
    CHECK(engine == NULL);
    REFUSED(kvd_engine_open(&none, 1, &engine), KVD_STATUS_CONFIG, "streams");
    REFUSED(kvd_engine_open(&flag, 1, &engine), KVD_STATUS_CONFIG, "true or false");
    REFUSED(kvd_engine_open(&open_to_all, 1, &engine), KVD_STATUS_CONFIG, "allow_unauthenticated");
    REFUSED(kvd_engine_open(&half, 1, &engine), KVD_STATUS_CONFIG, "tls_certificate");
    REFUSED(kvd_engine_open(NULL, 1, &engine), KVD_STATUS_INPUT, "options: NULL");
    REFUSED(kvd_engine_open(NULL, 0, NULL), KVD_STATUS_INPUT, "engine: NULL");
    OK(kvd_engine_open(NULL, 0, &engine));
    other = started("127.0.0.1:0", "false");
    kvd_buffer all = {mine, BYTES}, empty = {mine, 0}, again = {mine + 1, 1};
    kvd_region *region, *second;
    REFUSED(kvd_region_open(engine, NULL, 1, 1, &region), KVD_STATUS_INPUT, "buffers: NULL");
    REFUSED(kvd_region_open(engine, &empty, 1, 1, &region), KVD_STATUS_INPUT, "buffers[0]");
    REFUSED(kvd_region_open(engine, &all, 1, 2, &region), KVD_STATUS_INPUT, "is_written: 2");
    OK(kvd_region_open(engine, &all, 1, 1, &region));
    REFUSED(kvd_region_open(engine, &again, 1, 1, &second), KVD_STATUS_INPUT, "registered");
    kvd_segment *segment;
    REFUSED(kvd_segment_open(other, NAME, 0, &all, 1, KVD_RIGHTS_READ, KVD_NONE, &segment),
            KVD_STATUS_INPUT, "1 to 1024 bytes");
    REFUSED(kvd_segment_open(other, NULL, 3, &all, 1, KVD_RIGHTS_READ, KVD_NONE, &segment),
            KVD_STATUS_INPUT, "name: NULL");
    REFUSED(kvd_segment_open(other, NAME, 4, &all, 1, 0, KVD_NONE, &segment),
            KVD_STATUS_INPUT, "rights: 0");
    REFUSED(kvd_segment_open(other, NAME, 4, &all, 1, 4, KVD_NONE, &segment),
            KVD_STATUS_INPUT, "rights: 4");
    REFUSED(kvd_segment_open(other, NAME, 4, &all, 1, KVD_RIGHTS_READ, 0, &segment),
            KVD_STATUS_INPUT, "lasts_ms");
    REFUSED(kvd_segment_open(other, NAME, 4, NULL, 0, KVD_RIGHTS_READ, KVD_NONE, &segment),
            KVD_STATUS_INPUT, "buffers");
    OK(kvd_segment_open(other, NAME, 4, &all, 1, KVD_RIGHTS_READ, KVD_NONE, &segment));
    char *address;
    OK(kvd_engine_address(other, &address));
    kvd_remote *remote;
    REFUSED(kvd_remote_open(engine, "nowhere", NAME, 4, &remote), KVD_STATUS_INPUT, "address");
    /* It knows no token. */
    REFUSED(kvd_remote_open(engine, address, NAME, 4, &remote), KVD_STATUS_SYSTEM, address);
    kvd_engine *third = started("none", "false");
    REFUSED(kvd_remote_open(third, address, NAME, 3, &remote), KVD_STATUS_SYSTEM,
            "nothing is published");
    CHECK(remote == NULL);
    OK(kvd_remote_open(third, address, NAME, 4, &remote));
    kvd_request one = request(KVD_OP_READ, mine, remote, 0, ROW);
    kvd_batch *batch;
    uint8_t statuses;
    REFUSED(kvd_engine_submit(engine, &one, 1, 1000, 0, &batch), KVD_STATUS_INPUT,
            "requests[0].remote");
    REFUSED(kvd_engine_submit(third, &one, 1, 1000, 3, &batch), KVD_STATUS_INPUT, "priority: 3");
    REFUSED(kvd_engine_run(third, &one, 1, 1000, 0, &statuses, 0), KVD_STATUS_INPUT,
            "statuses_len: 0");
    REFUSED(kvd_engine_run(third, &one, 1, 1000, 0, NULL, 1), KVD_STATUS_INPUT, "statuses: NULL");
    one.len = 0;
    REFUSED(kvd_engine_submit(third, &one, 1, 1000, 0, &batch), KVD_STATUS_INPUT,
            "requests[0].len");
    one.len = 1, one.op = 2;
    REFUSED(kvd_engine_submit(third, &one, 1, 1000, 0, &batch), KVD_STATUS_INPUT,
            "requests[0].op: 2");
    one.op = 0, one.reserved = 1;
    REFUSED(kvd_engine_submit(third, &one, 1, 1000, 0, &batch), KVD_STATUS_INPUT, "reserved");
    one.reserved = 0, one.remote = NULL;
    REFUSED(kvd_engine_submit(third, &one, 1, 1000, 0, &batch), KVD_STATUS_INPUT, "remote: NULL");
    CHECK(batch == NULL);
    /* An empty batch is over at once. */
    OK(kvd_engine_submit(third, NULL, 0, 1000, 0, &batch));
    OK(kvd_batch_wait(batch, 0, NULL, 0));
    OK(kvd_batch_free(batch));
    CHECK(strcmp(kvd_transfer_status_name(KVD_TRANSFER_LOST), "lost") == 0);
    CHECK(strcmp(kvd_transfer_status_name(-1), "unknown outcome") == 0);
    OK(kvd_engine_close(NULL));
    OK(kvd_region_close(NULL));
    OK(kvd_segment_close(NULL));
    OK(kvd_remote_close(NULL));
    OK(kvd_batch_free(NULL));

    pid_t child = fork_beside_sleepers();
    if (child == 0) {
        one.remote = remote;
        REFUSED(kvd_engine_submit(third, &one, 1, 1000, 0, &batch), KVD_STATUS_CLOSED, "forked");
        REFUSED(kvd_engine_address(other, &address), KVD_STATUS_CLOSED, "forked");
        OK(kvd_remote_close(remote));
        OK(kvd_region_close(region));
        OK(kvd_segment_close(segment));
        OK(kvd_engine_close(third));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(kvd_engine_close(engine));
    OK(kvd_region_close(region));
    OK(kvd_segment_close(segment));
    OK(kvd_engine_close(other));
    OK(kvd_engine_close(third));
    OK(kvd_remote_close(remote));
    kvd_string_free(address);
}

struct shared {
    kvd_engine *engine;
    kvd_remote *remote;
    size_t first;
};

static void *one_of_many(void *user) {
    struct shared *shared = user;
    for (size_t round = 0; round < 20; round++) {
        unsigned char *to = mine + shared->first * ROW;
        memset(to, 0, 8 * ROW);
        kvd_request one = request(KVD_OP_READ, to, shared->remote, shared->first * ROW, 8 * ROW);
        kvd_batch *batch;
        uint8_t statuses;
        OK(kvd_engine_submit(shared->engine, &one, 1, 30000, KVD_PRIORITY_NORMAL, &batch));
        OK(kvd_batch_wait(batch, KVD_NONE, &statuses, 1));
        OK(kvd_batch_free(batch));
        CHECK(statuses == KVD_TRANSFER_DONE);
        for (size_t i = 0; i < 8 * ROW; i++)
            CHECK(to[i] == byte_of(shared->first * ROW + i, 1));
    }
    return NULL;
}

static void many(const char *program) {
    struct other other = start_other(program, "true");
    kvd_engine *engine = started("none", "true");
    kvd_remote *remote;
    OK(kvd_remote_open(engine, other.address, NAME, sizeof NAME, &remote));
    kvd_region *region = region_of_mine(engine);
    pthread_t threads[4];
    struct shared shared[4];
    for (size_t i = 0; i < 4; i++) {
        shared[i] = (struct shared){engine, remote, 100 * i};
        CHECK(pthread_create(&threads[i], NULL, one_of_many, &shared[i]) == 0);
    }
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    OK(kvd_region_close(region));
    OK(kvd_remote_close(remote));
    OK(kvd_engine_close(engine));
    end_other(other, '-');
}

int main(int count, char **words) {
    if (count == 2)
        return target(words[1]);
    CHECK(both_ways(words[0], "false") == KVD_PATH_TCP);
    uint32_t way = both_ways(words[0], "true");
    CHECK(way == KVD_PATH_LOCAL || way == KVD_PATH_TCP);
    failed();
    silent(words[0]);
    bad_inputs();
    many(words[0]);
    puts(way == KVD_PATH_LOCAL ? "done near" : "done");
    return 0;
}
