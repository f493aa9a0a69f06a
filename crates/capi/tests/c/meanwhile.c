/* What an engine may do in the middle of a save, at the end, and in a child. */
#define _DEFAULT_SOURCE
#include "check.h"
#include <pthread.h>

enum { PIECE = 16, ROW = 8, TOKENS = 40 };

struct rows {
    unsigned char bytes[TOKENS * ROW];
    kvd_buffer pieces[TOKENS / PIECE + 1];
    kvd_depot *depot;
    kvd_sessions *sessions;
    const uint32_t *tokens;
    /* Done in the middle of the save. */
    void (*meanwhile)(struct rows *rows);
};

static int ask(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks) {
    struct rows *rows = user;
    for (size_t i = 0; i < runs_len; i++) {
        rows->pieces[i].data = rows->bytes + runs[i].first * ROW;
        rows->pieces[i].len = (runs[i].end - runs[i].first) * ROW;
        blocks[i].pieces = &rows->pieces[i];
        blocks[i].pieces_len = 1;
    }
    if (rows->meanwhile)
        rows->meanwhile(rows);
    return 0;
}

static void fill(uint32_t *tokens, struct rows *rows, uint32_t from) {
    memset(rows, 0, sizeof *rows);
    rows->tokens = tokens;
    for (size_t i = 0; i < TOKENS; i++)
        tokens[i] = from + (uint32_t)i;
    for (size_t i = 0; i < sizeof rows->bytes; i++)
        rows->bytes[i] = (unsigned char)(from + i);
}

static kvd_status save(kvd_sessions *sessions, struct rows *rows) {
    kvd_checkpoint checkpoint;
    KVD_INIT(&checkpoint);
    checkpoint.tokens = rows->tokens;
    checkpoint.tokens_len = TOKENS;
    return kvd_sessions_save(sessions, &checkpoint, ask, rows, NULL);
}

/* Whether it comes back, byte for byte. */
static int comes_back(kvd_sessions *sessions, const struct rows *rows) {
    kvd_found *found;
    size_t count;
    OK(kvd_sessions_lookup(sessions, rows->tokens, TOKENS, &found, 1, &count));
    if (count == 0)
        return 0;
    kvd_block blocks[TOKENS / PIECE + 1];
    kvd_run runs[] = {{0, 16}, {16, 32}, {32, 40}};
    struct rows back;
    memset(&back, 0, sizeof back);
    ask(&back, runs, 3, blocks);
    kvd_status status = kvd_sessions_restore(sessions, found, blocks, 3, NULL, 0, NULL);
    OK(kvd_found_free(found));
    CHECK(status == KVD_STATUS_OK || status == KVD_STATUS_NOT_WHOLE);
    CHECK(status != KVD_STATUS_OK || memcmp(back.bytes, rows->bytes, sizeof back.bytes) == 0);
    return status == KVD_STATUS_OK;
}

static void save_other(struct rows *outer) {
    uint32_t tokens[TOKENS];
    struct rows rows;
    fill(tokens, &rows, 7000);
    OK(save(outer->sessions, &rows));
    CHECK(comes_back(outer->sessions, &rows));
}

/* The same tokens, while they are being saved, and away again. */
static void save_and_remove_same(struct rows *outer) {
    struct rows rows = *outer;
    rows.meanwhile = NULL;
    OK(save(outer->sessions, &rows));
    OK(kvd_sessions_refresh(outer->sessions));
    kvd_list *list;
    kvd_listed row;
    KVD_INIT(&row);
    size_t len;
    OK(kvd_sessions_list(outer->sessions, &list));
    OK(kvd_list_len(list, &len));
    for (size_t i = 0; i < len; i++) {
        OK(kvd_list_row(list, i, &row));
        OK(kvd_sessions_remove(outer->sessions, row.id));
    }
    OK(kvd_list_free(list));
}

static void close_depot(struct rows *rows) { OK(kvd_depot_close(rows->depot)); }

static kvd_depot *opened(void) {
    kvd_depot *depot;
    OK(kvd_depot_open_text("pipeline: Cache\ncache:\n  capacity: 16MiB\nsocket: off\n", NULL, 0,
                           &depot));
    return depot;
}

static kvd_sessions *sessions_of(kvd_depot *depot) {
    kvd_space space;
    KVD_INIT(&space);
    space.model = "m";
    space.dtype = "f16";
    space.block_tokens = PIECE;
    kvd_sessions *sessions;
    OK(kvd_sessions_open(depot, &space, &sessions));
    return sessions;
}

static void in_a_save(void) {
    kvd_depot *depot = opened();
    kvd_sessions *sessions = sessions_of(depot);
    uint32_t tokens[TOKENS];
    struct rows rows;
    fill(tokens, &rows, 1000);
    rows.depot = depot;
    rows.sessions = sessions;
    rows.meanwhile = save_other;
    OK(save(sessions, &rows));
    CHECK(comes_back(sessions, &rows));
    fill(tokens, &rows, 2000);
    rows.depot = depot;
    rows.sessions = sessions;
    rows.meanwhile = save_and_remove_same;
    /* It is whole, or there is none. */
    kvd_status status = save(sessions, &rows);
    CHECK(status == KVD_STATUS_OK || status == KVD_STATUS_NOT_STORED);
    CHECK(comes_back(sessions, &rows) == (status == KVD_STATUS_OK));
    fill(tokens, &rows, 3000);
    rows.depot = depot;
    rows.sessions = sessions;
    rows.meanwhile = close_depot;
    REFUSED(save(sessions, &rows), KVD_STATUS_CLOSED, "closed");
    OK(kvd_sessions_close(sessions));
}

/* Tasks of a depot that was closed before. */
static void tasks_behind_a_close(void) {
    kvd_depot *depot = opened();
    kvd_space space;
    KVD_INIT(&space);
    space.model = space.dtype = "m";
    space.block_tokens = 4;
    kvd_namespace *blocks;
    OK(kvd_namespace_open(depot, &space, &blocks));
    kvd_key key = {{1}};
    char bytes[64] = "bytes", back[64];
    kvd_buffer from = {bytes, sizeof bytes}, into = {back, sizeof back};
    kvd_block one = {&from, 1}, to = {&into, 1};
    kvd_task *put, *get;
    OK(kvd_put(blocks, &key, 1, &one, &put));
    OK(kvd_depot_drain(depot, KVD_NONE));
    OK(kvd_depot_drain(depot, KVD_NONE - 1));
    OK(kvd_depot_drain(depot, 0));
    OK(kvd_get(blocks, &key, 1, &to, 0, &get));
    uint8_t outcome = 99;
    REFUSED(kvd_task_wait(get, KVD_NONE, NULL, 1), KVD_STATUS_INPUT, "outcomes");
    OK(kvd_task_wait(get, KVD_NONE - 1, &outcome, 1));
    CHECK(outcome == KVD_OUTCOME_DONE && strcmp(back, bytes) == 0);
    OK(kvd_depot_close(depot));
    OK(kvd_task_wait(put, KVD_NONE, &outcome, 1));
    OK(kvd_task_wait_released(put, 0));
    OK(kvd_task_free(put));
    OK(kvd_task_free(get));
    REFUSED(kvd_get(blocks, &key, 1, &to, 0, &get), KVD_STATUS_CLOSED, "closed");
    CHECK(get == NULL);
    OK(kvd_namespace_close(blocks));
}

/* Memory that cannot be. */
static void memory(void) {
    kvd_depot *depot = opened();
    kvd_sessions *sessions = sessions_of(depot);
    uint32_t tokens[TOKENS];
    struct rows rows;
    fill(tokens, &rows, 1000);
    OK(save(sessions, &rows));
    kvd_found *found;
    size_t count;
    OK(kvd_sessions_lookup(sessions, tokens, TOKENS, &found, SIZE_MAX, &count));
    CHECK(count == 1);
    /* Their sum is the length that is wanted, beyond 64 bits. */
    kvd_buffer huge[] = {{(void *)8, SIZE_MAX / 2}, {(void *)8, SIZE_MAX / 2 + 2 + 128}};
    kvd_block blocks[TOKENS / PIECE + 1];
    kvd_run runs[] = {{0, 16}, {16, 32}, {32, 40}};
    ask(&rows, runs, 3, blocks);
    blocks[0].pieces = huge;
    blocks[0].pieces_len = 2;
    REFUSED(kvd_sessions_restore(sessions, found, blocks, 3, NULL, 0, NULL), KVD_STATUS_INPUT,
            "rows");
    OK(kvd_found_free(found));
    kvd_space space;
    KVD_INIT(&space);
    space.model = space.dtype = "m";
    space.block_tokens = 4;
    kvd_namespace *others;
    OK(kvd_namespace_open(depot, &space, &others));
    kvd_key keys[2] = {{{1}}, {{2}}};
    kvd_block all[2] = {{huge, 2}, {huge, 2}};
    kvd_task *task;
    REFUSED(kvd_put(others, keys, 2, all, &task), KVD_STATUS_INPUT, "buffers[0]");
    REFUSED(kvd_get(others, keys, 2, all, 0, &task), KVD_STATUS_INPUT, "buffers[0]");
    OK(kvd_namespace_close(others));
    OK(kvd_sessions_close(sessions));
    OK(kvd_depot_close(depot));
}

static void huge_numbers(void) {
    const uint64_t numbers[] = {0, 1, 511, 512, 10000, UINT64_MAX / 2, UINT64_MAX - 1, UINT64_MAX};
    enum { COUNT = sizeof numbers / sizeof *numbers };
    kvd_policy_settings settings;
    KVD_INIT(&settings);
    OK(kvd_policy_defaults(&settings));
    kvd_answer answer;
    KVD_INIT(&answer);
    uint64_t stop, seed = 1;
    for (int round = 0; round < 4000; round++) {
        uint64_t drawn[16];
        for (int i = 0; i < 16; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            drawn[i] = numbers[(seed >> 33) % COUNT];
        }
        kvd_policy_settings odd = settings;
        odd.min_tokens = drawn[0];
        odd.cold_max_tokens = drawn[1];
        odd.continued_interval_tokens = drawn[2];
        odd.boundary_trim_tokens = drawn[3];
        odd.boundary_align_tokens = drawn[4];
        odd.write_budget_hour = drawn[5];
        odd.write_budget_day = drawn[6];
        odd.fixed_bytes = drawn[7];
        odd.token_bytes = drawn[8];
        odd.disk_space = drawn[9];
        odd.saves_prefixes = round & 1;
        odd.writes_whole = round >> 1 & 1;
        kvd_policy *policy;
        kvd_status status = kvd_policy_open(&odd, &policy);
        CHECK(status == KVD_STATUS_OK || status == KVD_STATUS_INPUT);
        if (status != KVD_STATUS_OK)
            continue;
        OK(kvd_policy_start(policy, 0, drawn[10], (uint32_t)round % 3, drawn[11], drawn[12]));
        OK(kvd_policy_next_stop(policy, 0, &stop));
        for (uint32_t event = 0; event < 4; event++) {
            uint64_t tokens = event % 2 ? drawn[13] : drawn[10];
            OK(kvd_policy_event(policy, event, 0, tokens, drawn[14], &answer));
            if (answer.action == KVD_ACTION_SAVE && round % 5 == 0)
                OK(kvd_policy_failed(policy, answer.save, drawn[15], drawn[14]));
            else if (answer.action == KVD_ACTION_SAVE)
                OK(kvd_policy_saved(policy, answer.save, drawn[15], drawn[14]));
        }
        OK(kvd_policy_truncate(policy, 0, drawn[11]));
        OK(kvd_policy_next_stop(policy, 0, &stop));
        OK(kvd_policy_close(policy));
    }
}

/* What other threads do while one forks. */
struct work {
    kvd_depot *depot;
    kvd_sessions *sessions;
    int ends;
    int begun;
};

static int goes_on(struct work *work, uint32_t round) {
    if (round == 1)
        __atomic_add_fetch(&work->begun, 1, __ATOMIC_SEQ_CST);
    return !__atomic_load_n(&work->ends, __ATOMIC_SEQ_CST);
}

static void *save_all_the_time(void *user) {
    struct work *work = user;
    for (uint32_t round = 0; goes_on(work, round); round++) {
        uint32_t tokens[TOKENS];
        struct rows rows;
        fill(tokens, &rows, 100000 + round % 50 * 100);
        OK(save(work->sessions, &rows));
        CHECK(comes_back(work->sessions, &rows));
    }
    return NULL;
}

static void *put_and_get_all_the_time(void *user) {
    struct work *work = user;
    kvd_space space;
    KVD_INIT(&space);
    space.model = space.dtype = "n";
    space.block_tokens = 4;
    kvd_namespace *blocks;
    OK(kvd_namespace_open(work->depot, &space, &blocks));
    for (uint32_t round = 0; goes_on(work, round); round++) {
        kvd_key key = {{(uint8_t)round, 1}};
        char bytes[64] = {(char)round}, back[64];
        kvd_buffer from = {bytes, sizeof bytes}, into = {back, sizeof back};
        kvd_block one = {&from, 1}, to = {&into, 1};
        kvd_task *task;
        uint8_t outcome;
        OK(kvd_put(blocks, &key, 1, &one, &task));
        OK(kvd_task_wait(task, KVD_NONE, &outcome, 1));
        OK(kvd_task_free(task));
        OK(kvd_get(blocks, &key, 1, &to, 0, &task));
        OK(kvd_task_wait(task, KVD_NONE, &outcome, 1));
        OK(kvd_task_free(task));
        CHECK(outcome != KVD_OUTCOME_DONE || memcmp(bytes, back, sizeof bytes) == 0);
        OK(kvd_remove(blocks, &key, 1, NULL));
    }
    OK(kvd_namespace_close(blocks));
    return NULL;
}

/* A depot from its opening to its end. */
static void own_depot(void) {
    uint32_t tokens[TOKENS];
    struct rows rows;
    fill(tokens, &rows, 1);
    kvd_depot *depot = opened();
    kvd_sessions *sessions = sessions_of(depot);
    OK(save(sessions, &rows));
    CHECK(comes_back(sessions, &rows));
    OK(kvd_sessions_close(sessions));
    OK(kvd_depot_close(depot));
}

static void *open_and_close_all_the_time(void *user) {
    struct work *work = user;
    for (uint32_t round = 0; goes_on(work, round); round++)
        own_depot();
    return NULL;
}

/* A child whose depot is its parent's, which it does not have. */
static void ends_well(pid_t child, kvd_depot *depot, kvd_sessions *sessions, int opens) {
    CHECK(child >= 0);
    if (child == 0) {
        /* One that hangs is said to, long after a machine may have stood still. */
        alarm(600);
        uint32_t tokens[TOKENS];
        struct rows rows;
        fill(tokens, &rows, 1);
        REFUSED(save(sessions, &rows), KVD_STATUS_CLOSED, "forked");
        OK(kvd_sessions_close(sessions));
        OK(kvd_depot_close(depot));
        if (opens)
            own_depot();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Children of a process whose other threads work: what they have is not theirs. Of one where nobody
 * does, which may open their own. */
static void children(int beside) {
    struct work work = {.depot = opened(), .ends = 0, .begun = 0};
    work.sessions = sessions_of(work.depot);
    void *(*const works[])(void *) = {save_all_the_time, save_all_the_time,
                                      put_and_get_all_the_time, open_and_close_all_the_time};
    enum { THREADS = sizeof works / sizeof *works };
    pthread_t threads[THREADS];
    if (beside > 0) {
        for (size_t i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, works[i], &work) == 0);
        while (__atomic_load_n(&work.begun, __ATOMIC_SEQ_CST) < THREADS)
            usleep(1000);
        for (int round = 0; round < beside; round++)
            ends_well(fork(), work.depot, work.sessions, 0);
        __atomic_store_n(&work.ends, 1, __ATOMIC_SEQ_CST);
        for (size_t i = 0; i < THREADS; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
    }
    for (int round = 0; round < 10; round++)
        ends_well(fork_beside_sleepers(), work.depot, work.sessions, 1);
    OK(kvd_sessions_close(work.sessions));
    OK(kvd_depot_close(work.depot));
}

/* With a number, so many children of a process whose threads work. */
int main(int count, char **words) {
    in_a_save();
    tasks_behind_a_close();
    memory();
    huge_numbers();
    children(count > 1 ? atoi(words[1]) : 0);
    puts("done");
    return 0;
}
