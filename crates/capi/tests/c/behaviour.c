/* What an engine may do, and what it must not: each check says its line. */
#define _DEFAULT_SOURCE
#include "check.h"
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PIECE = 16, ROW = 8, TOKENS = 40 };

struct rows {
    unsigned char bytes[TOKENS * ROW];
    kvd_buffer pieces[TOKENS / PIECE + 1];
    int calls;
    int answer;
};

static int ask(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks) {
    struct rows *rows = user;
    rows->calls++;
    for (size_t i = 0; i < runs_len; i++) {
        rows->pieces[i].data = rows->bytes + runs[i].first * ROW;
        rows->pieces[i].len = (runs[i].end - runs[i].first) * ROW;
        blocks[i].pieces = &rows->pieces[i];
        blocks[i].pieces_len = 1;
    }
    return rows->answer;
}

static int ask_nothing(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks) {
    (void)user, (void)runs, (void)runs_len, (void)blocks;
    return 0;
}

static void fill(uint32_t *tokens, struct rows *rows, uint32_t from) {
    memset(rows, 0, sizeof *rows);
    for (size_t i = 0; i < TOKENS; i++)
        tokens[i] = from + (uint32_t)i;
    for (size_t i = 0; i < sizeof rows->bytes; i++)
        rows->bytes[i] = (unsigned char)(from + i);
}

static kvd_checkpoint of(const uint32_t *tokens) {
    kvd_checkpoint checkpoint;
    KVD_INIT(&checkpoint);
    checkpoint.tokens = tokens;
    checkpoint.tokens_len = TOKENS;
    return checkpoint;
}

static void bad_inputs(kvd_depot *depot, kvd_sessions *sessions) {
    kvd_depot *other;
    kvd_option wrong = {"cache.capactiy", "1MiB"}, unnamed = {NULL, "1"};
    REFUSED(kvd_depot_open("Cache", &wrong, 1, &other), KVD_STATUS_CONFIG, "capactiy");
    CHECK(other == NULL);
    REFUSED(kvd_depot_open("Cache", &unnamed, 1, &other), KVD_STATUS_INPUT, "options[0].name");
    REFUSED(kvd_depot_open("Cache", NULL, 1, &other), KVD_STATUS_INPUT, "options: NULL");
    REFUSED(kvd_depot_open("Tape", NULL, 0, &other), KVD_STATUS_CONFIG, "Tape");
    REFUSED(kvd_depot_open("unix:", NULL, 0, &other), KVD_STATUS_CONFIG, "unix:");
    REFUSED(kvd_depot_open("\xff", NULL, 0, &other), KVD_STATUS_INPUT, "UTF-8");
    REFUSED(kvd_depot_open(NULL, NULL, 0, &other), KVD_STATUS_INPUT, "where");
    REFUSED(kvd_depot_open("Cache", NULL, 0, NULL), KVD_STATUS_INPUT, "depot");
    REFUSED(kvd_depot_open_text("- lanes", NULL, 0, &other), KVD_STATUS_CONFIG, "a list");

    kvd_space space;
    KVD_INIT(&space);
    kvd_sessions *none;
    REFUSED(kvd_sessions_open(NULL, &space, &none), KVD_STATUS_INPUT, "depot");
    REFUSED(kvd_sessions_open(depot, NULL, &none), KVD_STATUS_INPUT, "space");
    REFUSED(kvd_sessions_open(depot, &space, &none), KVD_STATUS_INPUT, "model");
    space.model = space.dtype = "m";
    REFUSED(kvd_sessions_open(depot, &space, &none), KVD_STATUS_INPUT, "block_tokens");
    space.block_tokens = PIECE;
    space.group = "g";
    REFUSED(kvd_sessions_open(depot, &space, &none), KVD_STATUS_INPUT, "group");
    space.struct_size = 7;
    REFUSED(kvd_sessions_open(depot, &space, &none), KVD_STATUS_INPUT, "space.struct_size: 7");
    struct { kvd_space space; uint64_t later; } grown;
    memset(&grown, 0, sizeof grown);
    grown.space.struct_size = sizeof grown;
    grown.space.model = grown.space.dtype = "m";
    grown.space.block_tokens = PIECE;
    OK(kvd_sessions_open(depot, &grown.space, &none));
    OK(kvd_sessions_close(none));
    grown.later = 1;
    REFUSED(kvd_sessions_open(depot, &grown.space, &none), KVD_STATUS_INPUT, "later version");

    uint32_t tokens[TOKENS];
    struct rows rows;
    fill(tokens, &rows, 5000);
    kvd_checkpoint checkpoint = of(tokens);
    REFUSED(kvd_sessions_save(sessions, &checkpoint, NULL, NULL, NULL), KVD_STATUS_INPUT, "rows");
    checkpoint.reason = 99;
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL), KVD_STATUS_INPUT,
            "reason: 99");
    checkpoint = of(tokens);
    checkpoint.exact = 2;
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL), KVD_STATUS_INPUT,
            "exact: 2");
    checkpoint = of(tokens);
    checkpoint.tokens_len = SIZE_MAX;
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL), KVD_STATUS_INPUT,
            "tokens_len");
    checkpoint.tokens_len = 0;
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL), KVD_STATUS_INPUT, "tokens");
    checkpoint = of(tokens);
    kvd_object object = {"logits", {NULL, 4}};
    checkpoint.objects = &object;
    checkpoint.objects_len = 1;
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL), KVD_STATUS_INPUT,
            "objects[0]");
    CHECK(rows.calls == 0);
    checkpoint = of(tokens);
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask_nothing, NULL, NULL), KVD_STATUS_INPUT,
            "rows");

    size_t count;
    kvd_found *found;
    REFUSED(kvd_sessions_lookup(sessions, tokens, 1, &found, 1, NULL), KVD_STATUS_INPUT, "count");
    REFUSED(kvd_sessions_prefix(sessions, NULL, 3, &count), KVD_STATUS_INPUT, "tokens");
    REFUSED(kvd_sessions_named(sessions, "abc", &found), KVD_STATUS_UNKNOWN, "abc");
    REFUSED(kvd_sessions_export(sessions, "a", "x", 9, NULL), KVD_STATUS_UNKNOWN, "a");
    REFUSED(kvd_sessions_import(sessions, "/nonexistent", 0, NULL), KVD_STATUS_SYSTEM,
            "/nonexistent");
    REFUSED(kvd_sessions_import(sessions, "x", 9, NULL), KVD_STATUS_INPUT, "format: 9");
    CHECK(strcmp(kvd_status_name(99), "unknown status") == 0);
    OK(kvd_depot_close(NULL));
    OK(kvd_sessions_close(NULL));
    OK(kvd_found_free(NULL));
    OK(kvd_task_free(NULL));
    kvd_string_free(NULL);
}

static void aborted(kvd_sessions *sessions) {
    uint32_t tokens[TOKENS];
    struct rows rows;
    fill(tokens, &rows, 1000);
    rows.answer = 3;
    kvd_checkpoint checkpoint = of(tokens);
    size_t count;
    REFUSED(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL), KVD_STATUS_ABORTED,
            "returned 3");
    CHECK(rows.calls == 1);
    OK(kvd_sessions_prefix(sessions, tokens, TOKENS, &count));
    CHECK(count == 0);
    kvd_found *found;
    OK(kvd_sessions_lookup(sessions, tokens, TOKENS, &found, 1, &count));
    CHECK(count == 0);
}

static void *one_of_many(void *user) {
    kvd_sessions *sessions = user;
    static uint32_t next = 10000;
    uint32_t from = __atomic_fetch_add(&next, 10000, __ATOMIC_SEQ_CST);
    for (uint32_t round = 0; round < 5; round++) {
        uint32_t tokens[TOKENS];
        struct rows rows, back;
        fill(tokens, &rows, from + round * 100);
        kvd_checkpoint checkpoint = of(tokens);
        OK(kvd_sessions_save(sessions, &checkpoint, ask, &rows, NULL));
        kvd_found *found;
        size_t count;
        OK(kvd_sessions_lookup(sessions, tokens, TOKENS, &found, 1, &count));
        CHECK(count == 1);
        kvd_block blocks[TOKENS / PIECE + 1];
        kvd_run runs[] = {{0, 16}, {16, 32}, {32, 40}};
        memset(&back, 0, sizeof back);
        ask(&back, runs, 3, blocks);
        OK(kvd_sessions_restore(sessions, found, blocks, 3, NULL, 0, NULL));
        CHECK(memcmp(back.bytes, rows.bytes, sizeof rows.bytes) == 0);
        REFUSED(kvd_sessions_restore(sessions, found, blocks, 2, NULL, 0, NULL), KVD_STATUS_INPUT,
                "rows");
        OK(kvd_found_free(found));
    }
    return NULL;
}

static void many(kvd_sessions *sessions) {
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, one_of_many, sessions) == 0);
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    kvd_list *list;
    size_t len;
    OK(kvd_sessions_list(sessions, &list));
    OK(kvd_list_len(list, &len));
    CHECK(len == 20);
    kvd_listed row;
    KVD_INIT(&row);
    OK(kvd_list_row(list, 0, &row));
    CHECK(row.tokens == TOKENS && row.bad == 0);
    REFUSED(kvd_list_row(list, len, &row), KVD_STATUS_INPUT, "at: 20");
    kvd_checked checked;
    KVD_INIT(&checked);
    OK(kvd_sessions_verify(sessions, row.id, &checked));
    CHECK(checked.blocks == 3 && checked.missing == 0);
    OK(kvd_sessions_remove(sessions, row.id));
    REFUSED(kvd_sessions_remove(sessions, row.id), KVD_STATUS_UNKNOWN, row.id);
    OK(kvd_list_free(list));
}

static void blocks_of(kvd_depot *depot) {
    kvd_space space;
    KVD_INIT(&space);
    space.model = space.dtype = "m";
    space.block_tokens = 4;
    kvd_namespace *blocks;
    OK(kvd_namespace_open(depot, &space, &blocks));
    uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    kvd_key keys[2];
    REFUSED(kvd_keys_of_tokens(tokens, 8, 4, NULL, 0, keys, 1), KVD_STATUS_INPUT, "keys_len");
    OK(kvd_keys_of_tokens(tokens, 8, 4, NULL, 0, keys, 2));
    char one[] = "first", two[] = "second", back[2][16];
    kvd_buffer from[2] = {{one, sizeof one}, {two, sizeof two}};
    kvd_buffer into[2] = {{back[0], sizeof one}, {back[1], sizeof two}};
    kvd_block each[2] = {{&from[0], 1}, {&from[1], 1}}, to[2] = {{&into[0], 1}, {&into[1], 1}};
    kvd_task *task;
    uint8_t outcomes[2];
    size_t count;
    OK(kvd_put(blocks, keys, 2, each, &task));
    OK(kvd_task_wait(task, 10000, outcomes, 2));
    CHECK(outcomes[0] == KVD_OUTCOME_DONE && outcomes[1] == KVD_OUTCOME_DONE);
    OK(kvd_task_free(task));
    OK(kvd_prefix(blocks, keys, 2, &count));
    CHECK(count == 2);
    REFUSED(kvd_get(blocks, keys, 2, to, 8, &task), KVD_STATUS_INPUT, "flags: 0x8");
    OK(kvd_get(blocks, keys, 2, to, KVD_GET_PREFIX, &task));
    REFUSED(kvd_task_wait(task, KVD_NONE, outcomes, 1), KVD_STATUS_INPUT, "outcomes_len");
    OK(kvd_task_wait(task, KVD_NONE, outcomes, 2));
    OK(kvd_task_free(task));
    CHECK(strcmp(back[0], one) == 0 && strcmp(back[1], two) == 0);
    OK(kvd_remove(blocks, keys, 1, &count));
    CHECK(count == 1);
    OK(kvd_contains(blocks, keys, 2, outcomes));
    CHECK(outcomes[0] == 0 && outcomes[1] == 1);
    OK(kvd_get(blocks, keys, 2, to, 0, &task));
    OK(kvd_task_wait(task, KVD_NONE, outcomes, 2));
    CHECK(outcomes[0] == KVD_OUTCOME_MISS && outcomes[1] == KVD_OUTCOME_DONE);
    OK(kvd_task_free(task));
    OK(kvd_namespace_close(blocks));
    char *json;
    OK(kvd_depot_stats(depot, &json));
    CHECK(strstr(json, "\"tiers\""));
    kvd_string_free(json);
}

static void forked(kvd_depot *depot, kvd_sessions *sessions) {
    pid_t child = fork_beside_sleepers();
    if (child == 0) {
        size_t count;
        uint32_t token = 1;
        REFUSED(kvd_sessions_prefix(sessions, &token, 1, &count), KVD_STATUS_CLOSED, "forked");
        OK(kvd_sessions_close(sessions));
        OK(kvd_depot_close(depot));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void policy(void) {
    kvd_policy_settings settings;
    KVD_INIT(&settings);
    OK(kvd_policy_defaults(&settings));
    CHECK(settings.min_tokens == 512 && settings.write_budget_day == KVD_NONE);
    kvd_policy *policy;
    kvd_answer answer;
    KVD_INIT(&answer);
    OK(kvd_policy_open(&settings, &policy));
    REFUSED(kvd_policy_start(policy, 0, 4000, 7, 0, KVD_NONE), KVD_STATUS_INPUT, "origin: 7");
    OK(kvd_policy_start(policy, 0, 4000, KVD_ORIGIN_EMPTY, 0, KVD_NONE));
    OK(kvd_policy_event(policy, KVD_EVENT_PREFILL, 0, 4000, 1000, &answer));
    OK(kvd_policy_event(policy, KVD_EVENT_END, 0, 4100, 2000, &answer));
    CHECK(answer.action == KVD_ACTION_SAVE && answer.reason == KVD_REASON_SHUTDOWN);
    CHECK(answer.tokens == 4100);
    OK(kvd_policy_saved(policy, answer.save, 1, 3000));
    REFUSED(kvd_policy_saved(policy, answer.save, 1, 3000), KVD_STATUS_INPUT, "not in progress");
    REFUSED(kvd_policy_event(policy, 9, 0, 1, 1, &answer), KVD_STATUS_INPUT, "event: 9");
    OK(kvd_policy_close(policy));
}

int main(void) {
    kvd_depot *depot;
    OK(kvd_depot_open_text("pipeline: Cache\ncache:\n  capacity: 16MiB\nsocket: off\n", NULL, 0,
                           &depot));
    kvd_space space;
    KVD_INIT(&space);
    space.model = "m";
    space.dtype = "f16";
    space.block_tokens = PIECE;
    kvd_sessions *sessions;
    OK(kvd_sessions_open(depot, &space, &sessions));
    bad_inputs(depot, sessions);
    aborted(sessions);
    many(sessions);
    blocks_of(depot);
    policy();
    forked(depot, sessions);
    OK(kvd_depot_close(depot));
    size_t count;
    uint32_t token = 1;
    REFUSED(kvd_sessions_prefix(sessions, &token, 1, &count), KVD_STATUS_CLOSED, "closed");
    OK(kvd_sessions_close(sessions));
    puts("done");
    return 0;
}
