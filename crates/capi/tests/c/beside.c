/* What stands beside depots: the catalogue, the log, a file's digest, and llama.cpp's states. */
#define _GNU_SOURCE
#include "check.h"
#include "llama_state.h"
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static void catalogue(void) {
    kvd_catalogue *catalogue;
    OK(kvd_catalogue_open(&catalogue));
    kvd_entry entry;
    KVD_INIT(&entry);
    for (uint64_t id = 1; id <= 3; id++) {
        entry.id = id;
        entry.parent = id > 1 ? id - 1 : KVD_NONE;
        entry.tokens = 10000 * id;
        entry.bytes = 100;
        entry.reason = KVD_REASON_CONTINUED;
        entry.used_ms = 1000;
        OK(kvd_catalogue_insert(catalogue, &entry));
    }
    entry.reason = KVD_REASON_ASKED;
    REFUSED(kvd_catalogue_insert(catalogue, &entry), KVD_STATUS_INPUT, "entry.reason: 0");
    uint64_t bytes, ids[3];
    size_t count;
    OK(kvd_catalogue_set_other(catalogue, 7, 50));
    OK(kvd_catalogue_bytes(catalogue, &bytes));
    CHECK(bytes == 350);
    OK(kvd_catalogue_make_room(catalogue, 50, 400, 2000, ids, 3, &count));
    CHECK(count == 0);
    OK(kvd_catalogue_pin(catalogue, 1));
    OK(kvd_catalogue_make_room(catalogue, 50, 300, 2000, ids, 3, &count));
    CHECK(count == 1 && ids[0] == 2);
    REFUSED(kvd_catalogue_make_room(catalogue, 50, 300, 2000, ids, 0, &count), KVD_STATUS_INPUT,
            "ids_len: 0");
    CHECK(count == 1);
    REFUSED(kvd_catalogue_make_room(catalogue, 400, 300, 2000, ids, 3, &count), KVD_STATUS_FULL,
            "400");
    OK(kvd_catalogue_unpin(catalogue, 1));
    REFUSED(kvd_catalogue_unpin(catalogue, 1), KVD_STATUS_UNKNOWN, "1");
    OK(kvd_catalogue_hit(catalogue, 3, 5000));
    OK(kvd_catalogue_remove(catalogue, 2));
    REFUSED(kvd_catalogue_remove(catalogue, 2), KVD_STATUS_UNKNOWN, "2");
    OK(kvd_catalogue_info(catalogue, 3, &entry));
    CHECK(entry.parent == 1 && entry.hits == 1 && entry.used_ms == 5000 && entry.pins == 0);
    OK(kvd_catalogue_close(catalogue));
    OK(kvd_catalogue_close(NULL));
}

struct told {
    int lines;
    char last[512];
    kvd_status within;
};

static void tell(void *user, uint32_t level, const char *target, const char *line) {
    struct told *told = user;
    told->lines++;
    snprintf(told->last, sizeof told->last, "%u %s %s", level, target, line);
    /* It cannot take its own place while it is being told. */
    told->within = kvd_log(NULL, NULL, KVD_LOG_OFF);
}

/* A block whose file was written over, behind its head, is told of. */
static void damage(const char *at) {
    kvd_option options[] = {{"posix.path", at}, {"posix.capacity", "16MiB"}, {"socket", "off"}};
    kvd_depot *depot;
    OK(kvd_depot_open("Posix", options, 3, &depot));
    kvd_space space;
    KVD_INIT(&space);
    space.model = space.dtype = "m";
    space.block_tokens = 4;
    kvd_namespace *blocks;
    OK(kvd_namespace_open(depot, &space, &blocks));
    kvd_key key;
    memset(&key, 7, sizeof key);
    static char bytes[8192];
    /* A get that fails has left there what it has read. */
    memset(bytes, 0, sizeof bytes);
    kvd_buffer buffer = {bytes, sizeof bytes};
    kvd_block block = {&buffer, 1};
    kvd_task *task;
    uint8_t outcome;
    OK(kvd_put(blocks, &key, 1, &block, &task));
    OK(kvd_task_wait(task, 10000, &outcome, 1));
    OK(kvd_task_free(task));
    CHECK(outcome == KVD_OUTCOME_DONE);
    char command[512];
    snprintf(command, sizeof command,
             "for f in $(find %s -type f -size +8k); do printf x | dd of=$f bs=1 seek=6000 "
             "conv=notrunc status=none; done", at);
    CHECK(system(command) == 0);
    OK(kvd_get(blocks, &key, 1, &block, 0, &task));
    OK(kvd_task_wait(task, 10000, &outcome, 1));
    OK(kvd_task_free(task));
    CHECK(outcome == KVD_OUTCOME_CORRUPT);
    OK(kvd_namespace_close(blocks));
    OK(kvd_depot_close(depot));
}

static void logged(const char *at) {
    struct told told;
    memset(&told, 0, sizeof told);
    REFUSED(kvd_log(tell, &told, 6), KVD_STATUS_INPUT, "level: 6");
    REFUSED(kvd_log(NULL, NULL, KVD_LOG_WARN), KVD_STATUS_INPUT, "log: NULL");
    OK(kvd_log(tell, &told, KVD_LOG_WARN));
    damage(at);
    CHECK(told.lines > 0 && strstr(told.last, "kvdepot") && told.within == KVD_STATUS_INPUT);
    int lines = told.lines;
    OK(kvd_log(NULL, NULL, KVD_LOG_OFF));
    damage(at);
    CHECK(told.lines == lines);
    pid_t child = fork_beside_sleepers();
    if (child == 0) {
        REFUSED(kvd_log(tell, &told, KVD_LOG_WARN), KVD_STATUS_CLOSED, "forked");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void digest(const char *at) {
    char path[512], said[KVD_DIGEST_LEN];
    snprintf(path, sizeof path, "%s/file", at);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs("abc", file) >= 0 && fclose(file) == 0);
    OK(kvd_file_digest(path, said));
    CHECK(strcmp(said, "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85") == 0);
    REFUSED(kvd_file_digest("/nonexistent", said), KVD_STATUS_SYSTEM, "/nonexistent");
    REFUSED(kvd_file_digest(path, NULL), KVD_STATUS_INPUT, "digest: NULL");
}

enum { REST = 16 };

static void llama(void) {
    uint8_t state[512], other[512], piece[64];
    size_t len = state_of(state, 1);
    kvd_llama *layout, *same;
    REFUSED(kvd_llama_open(state, len - 1, &layout), KVD_STATUS_INPUT, "llama.cpp state");
    CHECK(layout == NULL);
    REFUSED(kvd_llama_open(NULL, len, &layout), KVD_STATUS_INPUT, "state: NULL");
    OK(kvd_llama_open(state, len, &layout));
    kvd_llama_about about;
    KVD_INIT(&about);
    OK(kvd_llama_info(layout, &about));
    CHECK(about.tokens == TOKENS && about.state_len == len && about.rest_len == 0);
    CHECK(about.token_len == 2 * LAYERS * ROW && about.pieces_len == 2 * LAYERS);
    CHECK(about.layers == LAYERS && about.transposed == 0 && about.sequence == 5);
    kvd_buffer rows[2 * LAYERS];
    size_t count, piece_len = 2 * about.token_len;
    kvd_run run = {1, 3};
    REFUSED(kvd_llama_rows(layout, state, len, run, rows, 3, &count), KVD_STATUS_INPUT,
            "pieces_len: 3");
    OK(kvd_llama_rows(layout, state, len, run, rows, 4, &count));
    CHECK(count == 4);
    OK(kvd_llama_gather(layout, state, len, run, piece, piece_len));
    for (size_t i = 0; i < 4; i++)
        CHECK(rows[i].len == 2 * ROW && memcmp(rows[i].data, piece + i * 2 * ROW, 2 * ROW) == 0);
    kvd_run none = {1, 1}, beyond = {2, 4};
    REFUSED(kvd_llama_gather(layout, state, len, none, piece, 0), KVD_STATUS_INPUT, "run: 1 to 1");
    REFUSED(kvd_llama_gather(layout, state, len, beyond, piece, piece_len), KVD_STATUS_INPUT,
            "tokens");
    REFUSED(kvd_llama_gather(layout, state, len, run, piece, 1), KVD_STATUS_INPUT, "piece");
    REFUSED(kvd_llama_gather(layout, state, len - 1, run, piece, piece_len), KVD_STATUS_INPUT,
            "state");
    /* Put together from its head and its rows, it is the same to the byte. */
    OK(kvd_llama_resized(layout, TOKENS, 0, 5, &same));
    memset(other, 0, sizeof other);
    OK(kvd_llama_head(same, other, len));
    OK(kvd_llama_scatter(same, piece, piece_len, run, other, len));
    CHECK(memcmp(state, other, len) != 0);
    run = (kvd_run){0, 1};
    OK(kvd_llama_gather(layout, state, len, run, piece, about.token_len));
    OK(kvd_llama_scatter(same, piece, about.token_len, run, other, len));
    CHECK(memcmp(state, other, len) == 0);
    OK(kvd_llama_close(same));
    REFUSED(kvd_llama_resized(layout, 0, 0, 0, &same), KVD_STATUS_INPUT, "tokens");
    OK(kvd_llama_resized(layout, 1, REST, 2, &same));
    OK(kvd_llama_info(same, &about));
    CHECK(about.tokens == 1 && about.rest_len == REST && about.sequence == 2);
    CHECK(about.rest + REST == about.state_len);
    OK(kvd_llama_close(same));
    OK(kvd_llama_close(layout));
    OK(kvd_llama_close(NULL));
}

int main(int count, char **words) {
    CHECK(count == 2);
    catalogue();
    logged(words[1]);
    digest(words[1]);
    llama();
    puts("done");
    return 0;
}
