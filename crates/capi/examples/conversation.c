/* Saves a conversation, saves it again after it has grown, and restores it in another process.
 *
 *   conversation DIRECTORY save 1000      saves the first 1,000 tokens
 *   conversation DIRECTORY restore 1500   restores the longest saved prefix of 1,500 tokens, and
 *                                         compares each byte
 */
#include <kvdepot.h>
#include <stdio.h>
#include <stdlib.h>

enum { PIECE_TOKENS = 256, LAYERS = 2, ROW_BYTES = 64 };

/* The KV cache of an engine: one array of rows per layer. */
struct engine {
    size_t tokens_len;
    uint32_t *tokens;
    unsigned char *layers[LAYERS];
    kvd_buffer *pieces; /* memory of rows, valid until the save has returned */
};

static void check(kvd_status status, const char *what) {
    if (status != KVD_STATUS_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, kvd_status_name(status), kvd_last_error());
        exit(1);
    }
}

static void *memory(size_t bytes) {
    void *got = malloc(bytes);
    if (got == NULL)
        exit(1);
    return got;
}

static unsigned char row_byte(size_t token, size_t layer, size_t at) {
    return (unsigned char)(token * 31 + layer * 7 + at);
}

static void compute(struct engine *engine, size_t tokens_len) {
    engine->tokens_len = tokens_len;
    engine->tokens = memory(tokens_len * sizeof *engine->tokens);
    engine->pieces = memory((tokens_len / PIECE_TOKENS + 1) * LAYERS * sizeof *engine->pieces);
    for (size_t token = 0; token < tokens_len; token++)
        engine->tokens[token] = (uint32_t)token;
    for (size_t layer = 0; layer < LAYERS; layer++) {
        engine->layers[layer] = memory(tokens_len * ROW_BYTES);
        for (size_t token = 0; token < tokens_len; token++)
            for (size_t at = 0; at < ROW_BYTES; at++)
                engine->layers[layer][token * ROW_BYTES + at] = row_byte(token, layer, at);
    }
}

static void forget(struct engine *engine) {
    free(engine->tokens);
    free(engine->pieces);
    for (size_t layer = 0; layer < LAYERS; layer++)
        free(engine->layers[layer]);
}

/* Returns the memory of the rows of runs of tokens: one buffer per layer. */
static int rows(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks) {
    struct engine *engine = user;
    for (size_t i = 0; i < runs_len; i++) {
        kvd_buffer *pieces = engine->pieces + i * LAYERS;
        for (size_t layer = 0; layer < LAYERS; layer++) {
            pieces[layer].data = engine->layers[layer] + runs[i].first * ROW_BYTES;
            pieces[layer].len = (runs[i].end - runs[i].first) * ROW_BYTES;
        }
        blocks[i].pieces = pieces;
        blocks[i].pieces_len = LAYERS;
    }
    return 0;
}

static void save(kvd_sessions *sessions, size_t tokens_len) {
    struct engine engine;
    compute(&engine, tokens_len);
    char logits[] = "the last token's logits";
    kvd_object object = {"logits", {logits, sizeof logits}};
    kvd_checkpoint checkpoint;
    KVD_INIT(&checkpoint);
    checkpoint.tokens = engine.tokens;
    checkpoint.tokens_len = engine.tokens_len;
    checkpoint.objects = &object;
    checkpoint.objects_len = 1;
    checkpoint.note = "an example";
    checkpoint.reason = KVD_REASON_COLD;
    kvd_saved saved;
    KVD_INIT(&saved);
    check(kvd_sessions_save(sessions, &checkpoint, rows, &engine, &saved), "save");
    printf("cached %zu written %zu\n", saved.cached_tokens, saved.cache_write_tokens);
    forget(&engine);
}

/* Restores one session into memory of the same layout. Returns the number of its tokens, or 0 if a
 * part is missing or failed verification. */
static size_t bring(kvd_sessions *sessions, kvd_found *found) {
    kvd_found_about about;
    KVD_INIT(&about);
    check(kvd_found_info(found, &about), "look");
    struct engine engine;
    compute(&engine, about.tokens_len);
    for (size_t layer = 0; layer < LAYERS; layer++)
        memset(engine.layers[layer], 0, engine.tokens_len * ROW_BYTES);
    /* The pieces are runs of tokens, as in a save. */
    kvd_run *runs = memory(about.pieces_len * sizeof *runs);
    kvd_block *blocks = memory(about.pieces_len * sizeof *blocks);
    for (size_t i = 0; i < about.pieces_len; i++) {
        runs[i].first = about.pieces[i].first;
        runs[i].end = about.pieces[i].end;
    }
    rows(&engine, runs, about.pieces_len, blocks);
    char logits[64];
    kvd_buffer into = {logits, (size_t)about.objects[0].bytes};
    kvd_block object = {&into, 1};
    kvd_status status =
        kvd_sessions_restore(sessions, found, blocks, about.pieces_len, &object, 1, NULL);
    if (status != KVD_STATUS_NOT_WHOLE)
        check(status, "restore");
    for (size_t layer = 0; status == KVD_STATUS_OK && layer < LAYERS; layer++)
        for (size_t token = 0; token < engine.tokens_len; token++)
            for (size_t at = 0; at < ROW_BYTES; at++)
                if (engine.layers[layer][token * ROW_BYTES + at] != row_byte(token, layer, at)) {
                    fprintf(stderr, "wrong bytes at token %zu\n", token);
                    exit(1);
                }
    size_t come = status == KVD_STATUS_OK ? engine.tokens_len : 0;
    free(runs);
    free(blocks);
    forget(&engine);
    return come;
}

/* Restores the longest session that is a prefix of the tokens, or the next one if that fails. */
static void restore(kvd_sessions *sessions, size_t tokens_len) {
    enum { MOST = 4 };
    uint32_t *tokens = memory(tokens_len * sizeof *tokens);
    for (size_t token = 0; token < tokens_len; token++)
        tokens[token] = (uint32_t)token;
    kvd_found *found[MOST];
    size_t count, come = 0;
    check(kvd_sessions_lookup(sessions, tokens, tokens_len, found, MOST, &count), "lookup");
    for (size_t i = 0; i < count; i++) {
        if (come == 0)
            come = bring(sessions, found[i]);
        check(kvd_found_free(found[i]), "free");
    }
    printf("restored %zu\n", come);
    free(tokens);
}

int main(int argc, char **argv) {
    if (argc != 4 || (strcmp(argv[2], "save") != 0 && strcmp(argv[2], "restore") != 0)) {
        fprintf(stderr, "usage: conversation DIRECTORY save|restore TOKENS\n");
        return 2;
    }
    if (kvd_version() >> 16 != KVD_VERSION_MAJOR) {
        fprintf(stderr, "the library is of another version\n");
        return 1;
    }
    kvd_option options[] = {
        {"posix.path", argv[1]}, {"posix.capacity", "64MiB"}, {"socket", "off"}};
    kvd_depot *depot;
    check(kvd_depot_open("Posix", options, sizeof options / sizeof *options, &depot), "open");
    kvd_space space;
    KVD_INIT(&space);
    space.model = "example";
    space.dtype = "f16";
    space.block_tokens = PIECE_TOKENS;
    space.weights = "8f2c";
    kvd_sessions *sessions;
    check(kvd_sessions_open(depot, &space, &sessions), "sessions");
    size_t tokens_len = (size_t)strtoul(argv[3], NULL, 10);
    if (strcmp(argv[2], "save") == 0)
        save(sessions, tokens_len);
    else
        restore(sessions, tokens_len);
    check(kvd_sessions_close(sessions), "close");
    check(kvd_depot_close(depot), "close");
    return 0;
}
