/* Blocks that one decides about and another moves: reserved, filled, committed, pinned, read. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/wait.h>
#include <unistd.h>

enum { KEYS = 3, PART = 4096 };

static unsigned char from[KEYS][2 * PART], into[KEYS][2 * PART];

struct all {
    kvd_buffer buffers[KEYS];
    kvd_block blocks[KEYS];
};

/* One part of each block's memory. */
static struct all *part_of(struct all *all, unsigned char memory[KEYS][2 * PART], size_t part) {
    for (size_t i = 0; i < KEYS; i++) {
        all->buffers[i] = (kvd_buffer){memory[i] + part * PART, PART};
        all->blocks[i] = (kvd_block){&all->buffers[i], 1};
    }
    return all;
}

static void stored_and_loaded(kvd_namespace *blocks, const kvd_key *keys, const char *socket) {
    uint64_t parts[2] = {PART, PART};
    kvd_reserved *reserved[KEYS];
    REFUSED(kvd_reserve(blocks, keys, KEYS, parts, 2, 4, reserved), KVD_STATUS_INPUT, "flags: 0x4");
    REFUSED(kvd_reserve(blocks, keys, KEYS, NULL, 2, 0, reserved), KVD_STATUS_INPUT, "parts: NULL");
    REFUSED(kvd_reserve(blocks, keys, KEYS, parts, 2, 0, NULL), KVD_STATUS_INPUT, "reserved: NULL");
    OK(kvd_reserve(blocks, keys, KEYS, parts, 2, KVD_RESERVE_STRICT, reserved));
    kvd_reserved *again[KEYS];
    OK(kvd_reserve(blocks, keys, KEYS, parts, 2, 0, again));
    kvd_placement placements[KEYS];
    kvd_place place;
    KVD_INIT(&place);
    for (size_t i = 0; i < KEYS; i++) {
        CHECK(reserved[i] && !again[i]);
        OK(kvd_reserved_info(reserved[i], &place));
        CHECK(place.bytes == 2 * PART && memcmp(&place.key, &keys[i], sizeof keys[i]) == 0);
        placements[i] = (kvd_placement){place.placement, place.placement_len};
    }
    kvd_mover *mover, *reader;
    REFUSED(kvd_mover_open("/nonexistent/socket", 0, 1, &mover), KVD_STATUS_SYSTEM, "/nonexistent");
    REFUSED(kvd_mover_open(socket, 257, 1, &mover), KVD_STATUS_INPUT, "lanes: 257");
    OK(kvd_mover_open(socket, 2, 1, &mover));
    OK(kvd_mover_open(socket, 0, 0, &reader));
    kvd_sum sums[KEYS][2], moved[KEYS];
    uint8_t outcomes[KEYS];
    struct all all;
    kvd_job *job;
    REFUSED(kvd_mover_store(reader, placements, KEYS, part_of(&all, from, 0)->blocks, 0, &job),
            KVD_STATUS_INPUT, "write");
    REFUSED(kvd_mover_store(mover, placements, KEYS, part_of(&all, from, 0)->blocks, 2, &job),
            KVD_STATUS_INPUT, "part");
    for (uint32_t part = 0; part < 2; part++) {
        OK(kvd_mover_store(mover, placements, KEYS, part_of(&all, from, part)->blocks, part, &job));
        REFUSED(kvd_job_wait(job, KVD_NONE, moved, outcomes, KEYS - 1), KVD_STATUS_INPUT, "len: 2");
        OK(kvd_job_wait(job, KVD_NONE, moved, outcomes, KEYS));
        for (size_t i = 0; i < KEYS; i++) {
            CHECK(outcomes[i] == KVD_OUTCOME_DONE);
            sums[i][part] = moved[i];
        }
        OK(kvd_job_free(job));
    }
    uint8_t stored[KEYS];
    REFUSED(kvd_commit(reserved, KEYS, sums[0], 2 * KEYS - 1, stored), KVD_STATUS_INPUT,
            "sums_len: 5");
    REFUSED(kvd_commit(reserved, KEYS, sums[0], 2 * KEYS, NULL), KVD_STATUS_INPUT, "stored: NULL");
    /* The last one is given back. */
    kvd_reserved *both[KEYS] = {reserved[0], NULL, reserved[1]};
    OK(kvd_commit(both, KEYS, sums[0], 4, stored));
    CHECK(stored[0] == 1 && stored[1] == 0 && stored[2] == 1);
    OK(kvd_abort(&reserved[2], 1));

    kvd_pinned *pins[KEYS];
    REFUSED(kvd_pin(blocks, keys, KEYS, 2, pins), KVD_STATUS_INPUT, "flags: 0x2");
    OK(kvd_pin(blocks, keys, KEYS, KVD_PIN_PREFIX, pins));
    CHECK(pins[0] && pins[1] && !pins[2]);
    for (size_t i = 0; i < 2; i++) {
        OK(kvd_pinned_info(pins[i], &place));
        CHECK(place.bytes == 2 * PART && strcmp(place.tier, "Cache") == 0);
        placements[i] = (kvd_placement){place.placement, place.placement_len};
    }
    for (uint32_t part = 0; part < 2; part++) {
        OK(kvd_mover_load(reader, placements, 2, part_of(&all, into, part)->blocks, part, &job));
        OK(kvd_job_wait(job, KVD_NONE, NULL, outcomes, 2));
        OK(kvd_job_free(job));
        CHECK(outcomes[0] == KVD_OUTCOME_DONE && outcomes[1] == KVD_OUTCOME_DONE);
    }
    CHECK(memcmp(from, into, 2 * sizeof from[0]) == 0);
    /* What is pinned stays, also where it is removed. */
    OK(kvd_remove(blocks, keys, 1, NULL));
    memset(into, 0, sizeof into);
    OK(kvd_mover_load(reader, placements, 1, part_of(&all, into, 0)->blocks, 0, &job));
    OK(kvd_job_free(job));
    CHECK(memcmp(from[0], into[0], PART) == 0);
    size_t count;
    OK(kvd_discard(&pins[1], 1, &count));
    CHECK(count == 1);
    uint8_t there[KEYS];
    OK(kvd_contains(blocks, keys, KEYS, there));
    CHECK(there[0] == 0 && there[1] == 0 && there[2] == 0);

    pid_t child = fork_beside_sleepers();
    if (child == 0) {
        REFUSED(kvd_pinned_info(pins[0], &place), KVD_STATUS_CLOSED, "forked");
        OK(kvd_mover_close(mover));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(kvd_unpin(pins, KEYS, 1));
    OK(kvd_unpin(NULL, 0, 0));
    OK(kvd_mover_close(mover));
    OK(kvd_mover_close(reader));
    OK(kvd_mover_close(NULL));
    OK(kvd_job_free(NULL));
}

int main(int count, char **words) {
    CHECK(count == 2);
    kvd_option options[] = {{"cache.capacity", "16MiB"}, {"socket", words[1]}};
    kvd_depot *depot;
    OK(kvd_depot_open("Cache", options, 2, &depot));
    kvd_space space;
    KVD_INIT(&space);
    space.model = space.dtype = "m";
    space.block_tokens = 4;
    kvd_namespace *blocks;
    OK(kvd_namespace_open(depot, &space, &blocks));
    uint32_t tokens[4 * KEYS] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    kvd_key keys[KEYS];
    OK(kvd_keys_of_tokens(tokens, 4 * KEYS, 4, NULL, 0, keys, KEYS));
    for (size_t i = 0; i < KEYS; i++)
        for (size_t j = 0; j < sizeof from[i]; j++)
            from[i][j] = (unsigned char)(i * 100 + j * 7 + j / 256);
    stored_and_loaded(blocks, keys, words[1]);
    OK(kvd_depot_close(depot));
    kvd_pinned *pins[KEYS];
    REFUSED(kvd_pin(blocks, keys, KEYS, 0, pins), KVD_STATUS_CLOSED, "closed");
    OK(kvd_namespace_close(blocks));
    puts("done");
    return 0;
}
