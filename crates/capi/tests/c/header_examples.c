/* Runs the examples of kvdepot.h, which the test writes to header_examples.h. */
#define _DEFAULT_SOURCE
#include "check.h"
#include "header_examples.h"
#include "llama_state.h"

enum { BYTES = 4096, LONG = 600 };

static unsigned char from[BYTES], into[BYTES];
static uint64_t saves, deleted;

static uint64_t save_now(uint64_t tokens) {
    saves++;
    return 100 * tokens;
}

static void delete_file(uint64_t id) { deleted = id; }

static void blocks_of(kvd_depot *depot, const char *socket) {
    kvd_namespace *blocks = open_namespace(depot);
    uint32_t tokens[16] = {1, 2, 3};
    kvd_buffer source = {from, BYTES}, target = {into, BYTES};
    CHECK(put_and_get(blocks, tokens, source, target));
    CHECK(memcmp(from, into, BYTES) == 0);
    kvd_mover *mover;
    OK(kvd_mover_open(socket, 1, 1, &mover));
    kvd_key key = {{7}}, other = {{8}};
    CHECK(reserve_and_commit(blocks, mover, key, source));
    CHECK(!reserve_and_commit(blocks, mover, key, source));
    memset(into, 0, BYTES);
    CHECK(pin_and_load(blocks, mover, key, target));
    CHECK(memcmp(from, into, BYTES) == 0);
    CHECK(!pin_and_load(blocks, mover, other, target));
    OK(kvd_mover_close(mover));
    OK(kvd_namespace_close(blocks));
}

static void sessions_of(kvd_depot *depot) {
    static unsigned char rows[LONG * ROW_BYTES], back[LONG * ROW_BYTES];
    static struct engine saved, restored;
    uint32_t tokens[LONG + 1];
    for (uint32_t i = 0; i <= LONG; i++)
        tokens[i] = i;
    for (size_t i = 0; i < sizeof rows; i++)
        rows[i] = (unsigned char)(i * 7);
    saved.rows = rows;
    restored.rows = back;
    kvd_sessions *sessions = open_sessions(depot);
    CHECK(restore_session(sessions, &restored, tokens, LONG + 1) == 0);
    save_session(sessions, &saved, tokens, LONG);
    CHECK(restore_session(sessions, &restored, tokens, LONG + 1) == LONG);
    CHECK(memcmp(rows, back, sizeof rows) == 0);
    OK(kvd_sessions_close(sessions));
}

static void checkpoints(void) {
    prefill(20000, save_now);
    CHECK(saves == 2);
    kvd_catalogue *catalogue;
    OK(kvd_catalogue_open(&catalogue));
    add_checkpoint(catalogue, 1, 10000, 200);
    add_checkpoint(catalogue, 2, 20000, 200);
    CHECK(make_space(catalogue, 100, 500, delete_file) && deleted == 0);
    CHECK(make_space(catalogue, 100, 400, delete_file) && deleted == 1);
    CHECK(!make_space(catalogue, 500, 400, delete_file));
    OK(kvd_catalogue_close(catalogue));
}

static void rows_of_llama(void) {
    uint8_t state[512], piece[64];
    size_t len = state_of(state, 1);
    kvd_run run = {1, 3};
    CHECK(copy_rows(state, len, run, piece, sizeof piece) == 2 * 2 * LAYERS * ROW);
}

static void transfer(void) {
    kvd_engine *engine;
    OK(kvd_engine_open(NULL, 0, &engine));
    kvd_buffer memory = {from, BYTES};
    char *address;
    kvd_segment *segment = publish(engine, memory, &address);
    memset(into, 0, BYTES);
    CHECK(read_pages(address, into, BYTES));
    CHECK(memcmp(from, into, BYTES) == 0);
    kvd_string_free(address);
    OK(kvd_segment_close(segment));
    OK(kvd_engine_close(engine));
}

int main(int count, char **words) {
    CHECK(count == 2);
    check_version();
    log_warnings(stderr);
    for (size_t i = 0; i < BYTES; i++)
        from[i] = (unsigned char)(i * 31 + i / 256);
    kvd_depot *depot = open_depot(words[1]);
    blocks_of(depot, words[1]);
    sessions_of(depot);
    close_depot(depot);
    checkpoints();
    rows_of_llama();
    transfer();
    puts("done");
    return 0;
}
