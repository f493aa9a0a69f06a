/* kvdepot: KV caches and conversations of language models, kept. docs/c.md tells how to build,
 * link and use it.
 *
 * Results. Every function that can fail answers a kvd_status; kvd_last_error() says the rest, with
 * the field, its value and what is allowed. A miss is no error.
 *
 * Pointers. What a function reads is the caller's, and read until the function returns, but for the
 * memory of a put or get, which is used until its task has let go of it, and that of a region or a
 * segment, which is until that is closed. Texts are UTF-8 and end with a zero; NULL is no text where
 * that is allowed. An array of no elements may be NULL. What is answered by a pointer says below how
 * long it is there.
 *
 * Handles. What kvd_x_open and the like answer ends by its kvd_x_close or kvd_x_free, once; of NULL
 * that does nothing. All functions may be called by several threads on one handle at a time, but
 * for the one that ends it. A handle that a child process has from before a fork answers
 * KVD_CLOSED there, and its end does nothing.
 *
 * Growth. A struct that begins with struct_size has that set by its user, to its sizeof; KVD_INIT
 * does it. Later versions add fields at the end, of which zero is what there was before.
 */
#ifndef KVDEPOT_H
#define KVDEPOT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header: kvd_version() of the library has the same upper 16 bits. */
#define KVD_VERSION_MAJOR 1
#define KVD_VERSION_MINOR 0
#define KVD_VERSION ((uint32_t)KVD_VERSION_MAJOR << 16 | KVD_VERSION_MINOR)

/* For ever, nothing, unknown. */
#define KVD_NONE UINT64_MAX

/* Hexadecimal digits of a session's name, and the zero behind them. */
#define KVD_ID_LEN 33

/* Sets the struct_size of a struct and zeroes the rest: kvd_space space; KVD_INIT(&space); */
#define KVD_INIT(at) (memset((at), 0, sizeof *(at)), (void)((at)->struct_size = sizeof *(at)))

typedef enum kvd_status {
    KVD_OK = 0,
    KVD_CONFIG = 1,     /* an option does not exist, or cannot have that value */
    KVD_INPUT = 2,      /* an argument is wrong; no byte has moved */
    KVD_LOCKED = 3,     /* another process owns the arena */
    KVD_FULL = 4,       /* no room, and nothing left to evict */
    KVD_CORRUPT = 5,    /* a medium or a file is not what it should be */
    KVD_CLOSED = 6,     /* what it is of was closed, or is another process's, which has forked */
    KVD_TIMEOUT = 7,    /* the time given is over; what was waited for goes on */
    KVD_UNKNOWN = 8,    /* nothing has this name */
    KVD_NOT_STORED = 9, /* a part of a session was not stored: there is no such session */
    KVD_NOT_WHOLE = 10, /* a part of a session is not there, or does not verify */
    KVD_ABORTED = 11,   /* the caller's function has ended the call */
    KVD_SYSTEM = 12,    /* the system, a medium or another process has refused */
    KVD_BUG = 13        /* a fault of kvdepot's own */
} kvd_status;

/* The library's version, as KVD_VERSION is made. */
uint32_t kvd_version(void);

/* What the last call of this thread that has failed says; "" before one has. There until the next
 * call of this thread. */
const char *kvd_last_error(void);

/* The name of a status, which may be any number. There for ever. */
const char *kvd_status_name(int32_t status);

/* Hexadecimal digits of a digest, and the zero behind them. */
#define KVD_DIGEST_LEN 65

/* The BLAKE3 of all of a file, as 64 digits: of a model's weights, it tells them from others of the
 * same shape. digest has room for KVD_DIGEST_LEN bytes. */
kvd_status kvd_file_digest(const char *path, char *digest);

/* Gives back a text that was answered by a char **. NULL is none. */
void kvd_string_free(char *text);

/* ---- log --------------------------------------------------------------------------------- */

typedef enum kvd_log_level {
    KVD_LOG_OFF = 0,
    KVD_LOG_ERROR = 1,
    KVD_LOG_WARN = 2,
    KVD_LOG_INFO = 3,
    KVD_LOG_DEBUG = 4,
    KVD_LOG_TRACE = 5
} kvd_log_level;

/* What is told of: one line, and where in kvdepot it is from ("kvdepot_arena::open"), both there
 * until the function returns. It is called in any thread, by several at once, also by those of
 * kvdepot's own that others wait for: it must not wait for any call of kvdepot, throw or jump out.
 * What it calls here is not told. */
typedef void (*kvd_log_fn)(void *user, uint32_t level, const char *target, const char *line);

/* Has all that is of this level or graver told, for all of the process; nothing is until then.
 * KVD_LOG_OFF, with log NULL, ends it. When this returns nobody is in the function that was told
 * before. KVD_SYSTEM where the program is in Rust and has a log of its own. */
kvd_status kvd_log(kvd_log_fn log, void *user, uint32_t level);

/* ---- depots -------------------------------------------------------------------------------- */

typedef struct kvd_depot kvd_depot;

/* An option as text: "cache.capacity" and "8GiB" (docs/configuration.md has all). */
typedef struct kvd_option {
    const char *name;
    const char *value;
} kvd_option;

/* Opens a pipeline ("Cache|Dax"), a configuration file (a path with a '/', or one that ends in
 * .yaml, .yml or .json), whose options the given ones override, or the depot that another process
 * of this host serves ("unix:/run/kvdepot.sock", with the options lanes and timeout at most). */
kvd_status kvd_depot_open(const char *where, const kvd_option *options, size_t options_len,
                          kvd_depot **depot);

/* Opens what a text in YAML or JSON says, as a file would have it. */
kvd_status kvd_depot_open_text(const char *text, const kvd_option *options, size_t options_len,
                               kvd_depot **depot);

/* Waits until the far tier has everything that was stored before. */
kvd_status kvd_depot_drain(kvd_depot *depot, uint64_t timeout_ms);

/* Counters and fill as JSON, or in Prometheus' format (docs/metrics.md). */
kvd_status kvd_depot_stats(kvd_depot *depot, char **json);
kvd_status kvd_depot_metrics(kvd_depot *depot, char **text);

/* Refuses new calls, waits for those under way, and lets the next owner in. Namespaces and sessions
 * of it answer KVD_CLOSED then, and are still to be closed. */
kvd_status kvd_depot_close(kvd_depot *depot);

/* ---- blocks -------------------------------------------------------------------------------- */

typedef struct kvd_namespace kvd_namespace;
typedef struct kvd_task kvd_task;

/* What has to be the same for bytes to be used again. model, dtype and block_tokens are needed; the
 * rest may be NULL. */
typedef struct kvd_space {
    size_t struct_size;
    const char *model;
    const char *dtype;
    uint64_t block_tokens; /* of sessions the tokens of a piece */
    const char *weights;
    const char *layout;
    const char *group; /* NULL for sessions, which have their own */
    const char *world;
    const char *hash;
    const char *salt;
} kvd_space;

/* Some memory of this process. It is not written where it is a source. */
typedef struct kvd_buffer {
    void *data;
    size_t len; /* bytes, at least 1 */
} kvd_buffer;

/* A block's bytes, one piece behind the other. */
typedef struct kvd_block {
    const kvd_buffer *pieces;
    size_t pieces_len;
} kvd_block;

typedef struct kvd_key {
    uint8_t bytes[32];
} kvd_key;

/* What became of one key; a byte each in the arrays below. */
typedef enum kvd_outcome {
    KVD_DONE = 0,
    KVD_PENDING = 1,
    KVD_MISS = 2,
    KVD_ROTTEN = 3,     /* it did not verify, and is gone */
    KVD_LENGTH = 4,     /* the memory has another length than the block */
    KVD_NO_ROOM = 5,
    KVD_DROPPED = 6,    /* a queue is full, or a tier could not take it */
    KVD_UNWANTED = 7,   /* it is not worth what would have to go */
    KVD_WAS_CLOSED = 8, /* the depot closed before */
    KVD_OTHER = 9
} kvd_outcome;

kvd_status kvd_namespace_open(kvd_depot *depot, const kvd_space *space,
                              kvd_namespace **kv_namespace);
kvd_status kvd_namespace_close(kvd_namespace *kv_namespace);

/* The keys of a prompt, one for each full block of its tokens. keys has room for keys_len of them,
 * at least tokens_len / block_tokens. */
kvd_status kvd_keys_of_tokens(const uint32_t *tokens, size_t tokens_len, size_t block_tokens,
                              const uint8_t *salt, size_t salt_len, kvd_key *keys,
                              size_t keys_len);

/* Stores blocks, in the order of the prompt, and answers at once. blocks is one for each key. The
 * bytes (not the arrays) are read until kvd_task_wait_released or kvd_task_free has returned. */
kvd_status kvd_put(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                   const kvd_block *blocks, kvd_task **task);

#define KVD_GET_PREFIX 1u /* only the consecutive hits from the first key on */
#define KVD_GET_STAGED 2u /* through the slab, for memory that is slow to copy into */

/* Fills memory with blocks. What the bytes of a key are that is not KVD_DONE nobody says. */
kvd_status kvd_get(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                   const kvd_block *blocks, uint32_t flags, kvd_task **task);

/* Asks which are there, without waiting for tiers that answer late. */
kvd_status kvd_lookup(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                      kvd_task **task);

/* Brings the consecutive hits from the first key into the near tier. */
kvd_status kvd_prefetch(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                        kvd_task **task);

/* How many of the first keys are stored without a gap. */
kvd_status kvd_prefix(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                      size_t *count);

/* Whether each is stored: a byte for each key, 1 or 0. */
kvd_status kvd_contains(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                        uint8_t *there);

/* Removes blocks from every tier. count, which may be NULL, gets how many were in one. */
kvd_status kvd_remove(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                      size_t *count);

/* Waits until every key has its outcome. outcomes has a byte for each key, a kvd_outcome; where the
 * time is over what is known so far. */
kvd_status kvd_task_wait(kvd_task *task, uint64_t timeout_ms, uint8_t *outcomes,
                         size_t outcomes_len);

/* Waits until the memory is the caller's again. */
kvd_status kvd_task_wait_released(kvd_task *task, uint64_t timeout_ms);

/* Waits for the memory, and frees the task. It cancels nothing. */
kvd_status kvd_task_free(kvd_task *task);

/* Pins and reservations, for engines where one process decides and others move the bytes. They end
 * by their verb or with the process that has made them, never by time. A placement says where the
 * bytes are: opaque, to be sent to whoever has a mover, and valid as long as what it is of. */
typedef struct kvd_pinned kvd_pinned;
typedef struct kvd_reserved kvd_reserved;

typedef struct kvd_place {
    size_t struct_size;
    const uint8_t *placement; /* there until the pin or the reservation is ended, as is the tier */
    size_t placement_len;
    const char *tier; /* that has the block; "" of a reservation */
    uint64_t bytes;
    kvd_key key;
} kvd_place;

/* The XXH3-128 of a part, low half first, as movers answer it. */
typedef struct kvd_sum {
    uint8_t bytes[16];
} kvd_sum;

#define KVD_PIN_PREFIX 1u /* nothing behind the first miss */

/* Keeps blocks where they are nearest. pins has room for a handle for each key, NULL for a miss. */
kvd_status kvd_pin(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                   uint32_t flags, kvd_pinned **pins);
kvd_status kvd_pinned_look(const kvd_pinned *pin, kvd_place *place);

/* Ends pins and their handles, in the order of the prompt; NULLs are passed over. served: 1 where
 * their bytes were used, which counts as hits, and brings far blocks near. */
kvd_status kvd_unpin(kvd_pinned *const *pins, size_t pins_len, uint32_t served);

/* Has pinned blocks let go of that did not verify. The pins remain. count may be NULL. */
kvd_status kvd_discard(kvd_pinned *const *pins, size_t pins_len, size_t *count);

#define KVD_RESERVE_PREFIX 1u /* nothing from the first block on that finds no room */
#define KVD_RESERVE_STRICT 2u /* KVD_FULL, and nothing, where one finds none */

/* Reserves room for blocks, in the order of the prompt, all of parts of these lengths. reserved has
 * room for a handle for each key, NULL for one that is stored or being written already, is not
 * worth it, or finds no room. */
kvd_status kvd_reserve(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                       const uint64_t *parts, size_t parts_len, uint32_t flags,
                       kvd_reserved **reserved);
kvd_status kvd_reserved_look(const kvd_reserved *reserved, kvd_place *place);

/* Publishes blocks whose bytes are in place, and ends their handles; NULLs are passed over. sums is
 * one for each part of each, in their order. stored has room for a byte for each handle, 1 where it
 * is there now. With KVD_INPUT nothing was ended. */
kvd_status kvd_commit(kvd_reserved *const *reserved, size_t reserved_len, const kvd_sum *sums,
                      size_t sums_len, uint8_t *stored);

/* Gives room back, and ends the handles. Every mover that writes there must have stopped. */
kvd_status kvd_abort(kvd_reserved *const *reserved, size_t reserved_len);

/* ---- movers -------------------------------------------------------------------------------- */

typedef struct kvd_mover kvd_mover;
typedef struct kvd_job kvd_job;

typedef struct kvd_placement {
    const uint8_t *bytes;
    size_t len;
} kvd_placement;

/* Attaches to the depot that listens at a socket ("/run/kvdepot.sock", with unix: or without), of
 * this process or another of this host. lanes: threads that move, 0 for as many as the owner says.
 * writes: 1 where it is to store. */
kvd_status kvd_mover_open(const char *socket, uint64_t lanes, uint32_t writes, kvd_mover **mover);

/* Waits for what is under way. */
kvd_status kvd_mover_close(kvd_mover *mover);

/* Moves a part of blocks, and answers at once: into reservations, or out of pins, verified. blocks
 * is the memory of each placement, used until kvd_job_free has returned. */
kvd_status kvd_mover_store(kvd_mover *mover, const kvd_placement *placements,
                           size_t placements_len, const kvd_block *blocks, uint32_t part,
                           kvd_job **job);
kvd_status kvd_mover_load(kvd_mover *mover, const kvd_placement *placements,
                          size_t placements_len, const kvd_block *blocks, uint32_t part,
                          kvd_job **job);

/* Waits until nothing of it moves. outcomes has a byte for each placement: KVD_DONE, KVD_ROTTEN
 * where it does not verify, KVD_OTHER where nothing was moved, as of another owner's. sums, which
 * may be NULL, has room for as many, of which those that are KVD_DONE are told. len: of both. */
kvd_status kvd_job_wait(kvd_job *job, uint64_t timeout_ms, kvd_sum *sums, uint8_t *outcomes,
                        size_t len);

/* Waits for the memory, and frees the job. */
kvd_status kvd_job_free(kvd_job *job);

/* ---- sessions ------------------------------------------------------------------------------ */

typedef struct kvd_sessions kvd_sessions;
typedef struct kvd_found kvd_found;
typedef struct kvd_list kvd_list;

typedef enum kvd_reason {
    KVD_ASKED = 0,
    KVD_COLD = 1,
    KVD_CONTINUED = 2,
    KVD_EVICT = 3,
    KVD_SHUTDOWN = 4
} kvd_reason;

/* Tokens from first to before end. */
typedef struct kvd_run {
    size_t first;
    size_t end;
} kvd_run;

/* A part that does not grow with the tokens. */
typedef struct kvd_object {
    const char *name;
    kvd_buffer bytes;
} kvd_object;

/* A state that is to be kept. */
typedef struct kvd_checkpoint {
    size_t struct_size;
    const uint32_t *tokens; /* all of them */
    size_t tokens_len;
    const uint8_t *text; /* what they were rendered from, or NULL */
    size_t text_len;
    const kvd_object *objects;
    size_t objects_len;
    const char *note;  /* or NULL */
    uint64_t created;  /* Unix seconds; 0 is now */
    uint32_t reason;   /* a kvd_reason */
    uint32_t context_tokens;
    uint32_t exact;    /* 1: it comes back to the bit (docs/sessions.md) */
    uint32_t reserved; /* 0 */
} kvd_checkpoint;

typedef struct kvd_saved {
    size_t struct_size;
    size_t cached_tokens;      /* whose pieces were there already */
    size_t cache_write_tokens; /* whose pieces were written */
    uint64_t bytes_written;
    char id[KVD_ID_LEN];
    uint8_t reserved[7];
} kvd_saved;

/* Says where the rows of runs of tokens lie: sets pieces and pieces_len of blocks[i] for runs[i].
 * What it says, arrays and bytes, stays as it is until the save has returned. Nonzero ends the
 * save, of which nothing is left. It runs in the thread that saves, and may call any function here;
 * it must not throw or jump out. */
typedef int (*kvd_rows_fn)(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks);

/* One piece of a session: its tokens, and the bytes of their rows. */
typedef struct kvd_piece {
    size_t first;
    size_t end;
    uint64_t bytes;
} kvd_piece;

typedef struct kvd_named {
    const char *name;
    uint64_t bytes;
} kvd_named;

/* What a session is. The pointers are there until the kvd_found is freed. */
typedef struct kvd_found_about {
    size_t struct_size;
    const char *id;
    const uint32_t *tokens;
    size_t tokens_len;
    const void *text; /* not ended by a zero */
    size_t text_len;
    const kvd_piece *pieces;
    size_t pieces_len;
    const kvd_named *objects;
    size_t objects_len;
    const char *note;
    uint64_t context_tokens;
} kvd_found_about;

typedef struct kvd_restored {
    size_t struct_size;
    size_t cached_tokens; /* whose rows have come, from the first on */
    uint64_t whole;       /* 1: everything has */
} kvd_restored;

typedef struct kvd_listed {
    size_t struct_size;
    const char *id; /* there until the list is freed, as is the note */
    const char *note;
    uint64_t tokens;
    uint64_t text_bytes;
    uint64_t bytes;
    uint64_t created; /* Unix seconds */
    uint32_t reason;  /* a kvd_reason */
    uint32_t bad;     /* 1: it did not verify, or was not whole */
} kvd_listed;

typedef struct kvd_checked {
    size_t struct_size;
    uint64_t blocks;
    uint64_t bytes;
    uint64_t missing; /* of the blocks */
} kvd_checked;

/* A session's file: kvdepot's own, or ds4's. */
typedef enum kvd_file { KVD_FILE_KVDEPOT = 0, KVD_FILE_DS4 = 1 } kvd_file;

/* The sessions of a depot for one model, weights and layout. */
kvd_status kvd_sessions_open(kvd_depot *depot, const kvd_space *space, kvd_sessions **sessions);
kvd_status kvd_sessions_close(kvd_sessions *sessions);

/* Looks which there are: others may have saved or removed some. */
kvd_status kvd_sessions_refresh(kvd_sessions *sessions);

/* Saves a state. rows is called once, for the pieces that are not there (all with exact), or not at
 * all where everything is. saved may be NULL. */
kvd_status kvd_sessions_save(kvd_sessions *sessions, const kvd_checkpoint *checkpoint,
                             kvd_rows_fn rows, void *user, kvd_saved *saved);

/* Sessions that these tokens, or this text, begin with, of which all is there, the longest first.
 * found has room for most handles; count gets how many there are, each to be freed. */
kvd_status kvd_sessions_lookup(kvd_sessions *sessions, const uint32_t *tokens, size_t tokens_len,
                               kvd_found **found, size_t most, size_t *count);
kvd_status kvd_sessions_lookup_text(kvd_sessions *sessions, const uint8_t *text, size_t text_len,
                                    kvd_found **found, size_t most, size_t *count);

/* How many of these tokens have their rows here, whatever session they are of. */
kvd_status kvd_sessions_prefix(kvd_sessions *sessions, const uint32_t *tokens, size_t tokens_len,
                               size_t *count);

/* The session whose name begins with these digits. */
kvd_status kvd_sessions_named(kvd_sessions *sessions, const char *session, kvd_found **found);

kvd_status kvd_found_look(const kvd_found *found, kvd_found_about *about);
kvd_status kvd_found_free(kvd_found *found);

/* Brings a session back: a block for each of its pieces and objects, in their order, of their
 * lengths. KVD_NOT_WHOLE where a part has not come or does not verify: restored, which may be NULL,
 * says how many tokens' rows are good then. A session that does not verify is found no more. What
 * the other bytes are nobody says. */
kvd_status kvd_sessions_restore(kvd_sessions *sessions, const kvd_found *found,
                                const kvd_block *rows, size_t rows_len, const kvd_block *objects,
                                size_t objects_len, kvd_restored *restored);

/* Brings one object back, by its place in kvd_found_about, for engines that have to look at it
 * before they can say where the rest goes. KVD_NOT_WHOLE as above. */
kvd_status kvd_sessions_object(kvd_sessions *sessions, const kvd_found *found, size_t at,
                               const kvd_block *into);

/* All sessions, the newest first, as they are now. */
kvd_status kvd_sessions_list(kvd_sessions *sessions, kvd_list **list);
kvd_status kvd_list_len(const kvd_list *list, size_t *len);
kvd_status kvd_list_row(const kvd_list *list, size_t at, kvd_listed *row);
kvd_status kvd_list_free(kvd_list *list);

/* Reads all of a session. KVD_NOT_WHOLE where something is missing; kvd_last_error() names it.
 * checked may be NULL. */
kvd_status kvd_sessions_verify(kvd_sessions *sessions, const char *session, kvd_checked *checked);

/* Removes a session, and what no other one here is made of. */
kvd_status kvd_sessions_remove(kvd_sessions *sessions, const char *session);

/* Writes a session to one file, or saves what one has. format is a kvd_file. bytes and id may be
 * NULL; id has room for KVD_ID_LEN bytes. */
kvd_status kvd_sessions_export(kvd_sessions *sessions, const char *session, const char *path,
                               uint32_t format, uint64_t *bytes);
kvd_status kvd_sessions_import(kvd_sessions *sessions, const char *path, uint32_t format,
                               char *id);

/* ---- when to save -------------------------------------------------------------------------- */

typedef struct kvd_policy kvd_policy;

/* kvd_policy_defaults fills them with ds4's. */
typedef struct kvd_policy_settings {
    size_t struct_size;
    uint64_t disk_space; /* bytes */
    uint64_t min_tokens;
    uint64_t cold_max_tokens;           /* 0: no cold checkpoints */
    uint64_t continued_interval_tokens; /* 0: no continued ones */
    uint64_t boundary_trim_tokens;
    uint64_t boundary_align_tokens;
    uint64_t write_budget_hour; /* bytes, KVD_NONE for no bound */
    uint64_t write_budget_day;
    uint64_t fixed_bytes; /* of every checkpoint, at most */
    uint64_t token_bytes; /* of one token, at most */
    uint32_t saves_prefixes;
    uint32_t writes_whole;
} kvd_policy_settings;

typedef enum kvd_origin { KVD_EMPTY = 0, KVD_RESTORED = 1, KVD_LIVE = 2 } kvd_origin;

typedef enum kvd_event {
    KVD_PREFILL = 0, /* prefill, or decoding, has come so far */
    KVD_DECODE = 1,
    KVD_SWITCH = 2, /* another conversation is about to take the place of these tokens */
    KVD_END = 3     /* the engine ends with them */
} kvd_event;

typedef enum kvd_due { KVD_NOTHING = 0, KVD_SAVE = 1, KVD_DECLINED = 2 } kvd_due;

typedef struct kvd_answer {
    size_t struct_size;
    uint32_t what;   /* a kvd_due */
    uint32_t reason; /* a kvd_reason, of a save, as all up to bytes */
    uint64_t save;   /* names it to the policy */
    uint64_t tokens;
    uint64_t base;  /* the first so many are saved already */
    uint64_t bytes; /* that it may write */
    const char *declined; /* why not, there for ever; else NULL */
} kvd_answer;

kvd_status kvd_policy_defaults(kvd_policy_settings *settings);
kvd_status kvd_policy_open(const kvd_policy_settings *settings, kvd_policy **policy);
kvd_status kvd_policy_close(kvd_policy *policy);

/* A prompt starts in a slot, of which origin_tokens were restored or are live. anchor: the tokens
 * before the last user's word that comes before the first answer, or KVD_NONE. */
kvd_status kvd_policy_start(kvd_policy *policy, uint32_t slot, uint64_t tokens, uint32_t origin,
                            uint64_t origin_tokens, uint64_t anchor);

/* Where prefill should next stop and tell; KVD_NONE for nowhere. */
kvd_status kvd_policy_next_stop(kvd_policy *policy, uint32_t slot, uint64_t *stop);

/* Something has happened (a kvd_event), and what is due. at_ms: since 1970, 0 for now. A save that
 * is due ends by kvd_policy_saved or kvd_policy_failed, with the bytes that were written. */
kvd_status kvd_policy_tell(kvd_policy *policy, uint32_t event, uint32_t slot, uint64_t tokens,
                           uint64_t at_ms, kvd_answer *answer);
kvd_status kvd_policy_saved(kvd_policy *policy, uint64_t save, uint64_t bytes, uint64_t at_ms);
kvd_status kvd_policy_failed(kvd_policy *policy, uint64_t save, uint64_t bytes, uint64_t at_ms);

/* What was saved of a slot behind so many tokens is gone. */
kvd_status kvd_policy_lost(kvd_policy *policy, uint32_t slot, uint64_t tokens);

/* What is on disk where each checkpoint is written whole, and what goes where that is short: what
 * saves the least compute a byte, superseded ones first. It moves nothing itself. */
typedef struct kvd_catalogue kvd_catalogue;

/* A checkpoint on disk. */
typedef struct kvd_entry {
    size_t struct_size;
    uint64_t id;
    uint64_t parent; /* the longest whose tokens are a proper prefix of its own, or KVD_NONE */
    uint64_t tokens;
    uint64_t bytes;   /* that its removal gives back */
    uint64_t hits;    /* restores from it */
    uint64_t used_ms; /* when it was last saved or restored, since 1970; 0 is now */
    uint32_t reason;  /* a kvd_reason, but not KVD_ASKED */
    uint32_t pins;    /* who needs it now */
} kvd_entry;

kvd_status kvd_catalogue_open(kvd_catalogue **catalogue);
kvd_status kvd_catalogue_close(kvd_catalogue *catalogue);

/* It is on disk, in place of one of the same id. */
kvd_status kvd_catalogue_insert(kvd_catalogue *catalogue, const kvd_entry *entry);

/* It was removed; those that grew from it grow from its parent. These answer KVD_UNKNOWN where it
 * is not there, and kvd_catalogue_unpin where it is not pinned. */
kvd_status kvd_catalogue_remove(kvd_catalogue *catalogue, uint64_t id);
kvd_status kvd_catalogue_look(kvd_catalogue *catalogue, uint64_t id, kvd_entry *entry);

/* A conversation was restored from it. */
kvd_status kvd_catalogue_hit(kvd_catalogue *catalogue, uint64_t id, uint64_t at_ms);

/* It stays until it is unpinned as often. */
kvd_status kvd_catalogue_pin(kvd_catalogue *catalogue, uint64_t id);
kvd_status kvd_catalogue_unpin(kvd_catalogue *catalogue, uint64_t id);

/* Something else has so many bytes there, by a number of the caller's: a save under way, an
 * orphan. With 0 it is gone. */
kvd_status kvd_catalogue_set_other(kvd_catalogue *catalogue, uint64_t id, uint64_t bytes);

/* Bytes of everything. */
kvd_status kvd_catalogue_bytes(kvd_catalogue *catalogue, uint64_t *bytes);

/* What to remove so that everything and incoming bytes fit into disk_space, the first to go first.
 * KVD_FULL where that cannot be: then nothing should go, nor come. ids has room for ids_len; count
 * gets how many there are, and with fewer of room it is KVD_INPUT. */
kvd_status kvd_catalogue_make_room(kvd_catalogue *catalogue, uint64_t incoming,
                                   uint64_t disk_space, uint64_t at_ms, uint64_t *ids,
                                   size_t ids_len, size_t *count);

/* ---- llama.cpp ----------------------------------------------------------------------------- */

/* llama.cpp's state of one sequence, as llama_state_seq_get_data writes it, cut by tokens:
 * kvdepot_llama.hpp does all of this. A layout says where the rows of tokens lie in a state. */
typedef struct kvd_llama kvd_llama;

typedef struct kvd_llama_about {
    size_t struct_size;
    size_t tokens;
    size_t state_len;  /* bytes, of which all are rows, rest or head */
    size_t rest;       /* where the part lies that does not grow by appending, at the end: sliding */
    size_t rest_len;   /* windows and recurrent layers; 0 where there is none */
    size_t token_len;  /* bytes of a token's rows */
    size_t pieces_len; /* that the rows of any run of tokens lie in */
    int32_t sequence;
    uint32_t layers;     /* with attention */
    uint32_t transposed; /* 1: values lie transposed, in many small pieces (no flash attention) */
    uint32_t reserved;
} kvd_llama_about;

/* Reads a state. KVD_INPUT for one that cannot be cut, or is torn: positions other than 0 to n - 1
 * in this order, several streams, M-RoPE, no attention at all. The state is not kept. */
kvd_status kvd_llama_open(const uint8_t *state, size_t state_len, kvd_llama **layout);

/* The layout of a state of the same context with so many tokens, at least 1, a rest of so many
 * bytes, and for this sequence. */
kvd_status kvd_llama_resized(const kvd_llama *of, size_t tokens, size_t rest_len,
                             int32_t sequence, kvd_llama **layout);
kvd_status kvd_llama_look(const kvd_llama *layout, kvd_llama_about *about);
kvd_status kvd_llama_close(kvd_llama *layout);

/* Where the rows of a run of tokens lie in a state at this address: pieces of it, to be saved out
 * of, or restored into. Nothing of it is read. pieces has room for pieces_len, at least those of
 * kvd_llama_about; count, which may be NULL, gets how many there are. */
kvd_status kvd_llama_rows(const kvd_llama *layout, void *state, size_t state_len, kvd_run run,
                          kvd_buffer *pieces, size_t pieces_len, size_t *count);

/* The same rows, copied out of a state, or into one. piece has as many bytes as the run's tokens
 * have, and lies apart from the state. */
kvd_status kvd_llama_gather(const kvd_llama *layout, const uint8_t *state, size_t state_len,
                            kvd_run run, uint8_t *piece, size_t piece_len);
kvd_status kvd_llama_scatter(const kvd_llama *layout, const uint8_t *piece, size_t piece_len,
                             kvd_run run, uint8_t *state, size_t state_len);

/* Writes all of a state that is neither rows nor rest. */
kvd_status kvd_llama_head(const kvd_llama *layout, uint8_t *state, size_t state_len);

/* ---- transfer ------------------------------------------------------------------------------ */

/* Batches of many small pieces between processes and hosts: docs/transfer.md says what may be
 * relied on. A process registers memory as regions and publishes some as segments, each under a
 * name; another opens a segment by the address of the engine and the name, as a remote, and submits
 * batches that read and write it. The target's program does nothing for that. */
typedef struct kvd_engine kvd_engine;
typedef struct kvd_region kvd_region;
typedef struct kvd_segment kvd_segment;
typedef struct kvd_remote kvd_remote;
typedef struct kvd_batch kvd_batch;

typedef enum kvd_rights { KVD_READ = 1, KVD_WRITE = 2, KVD_BOTH = 3 } kvd_rights;

typedef enum kvd_op {
    KVD_FETCH = 0, /* from the remote to local memory */
    KVD_SEND = 1   /* from local memory to the remote */
} kvd_op;

typedef enum kvd_priority { KVD_NORMAL = 0, KVD_URGENT = 1, KVD_BACKGROUND = 2 } kvd_priority;

/* How a remote's bytes go now: over connections, by a mapping or the other process's memory of this
 * host, or by RDMA devices. */
typedef enum kvd_way { KVD_CONNECTED = 0, KVD_NEAR = 1, KVD_RDMA = 2 } kvd_way;

/* What became of a request; a byte each in the arrays below. Of one that has failed some bytes may
 * have moved. */
typedef enum kvd_moved {
    KVD_MOVING = 0,
    KVD_MOVED = 1,
    KVD_NOT_LOCAL = 2,  /* its local memory lies in no region, or in one that is not written */
    KVD_BEYOND = 3,     /* it reaches beyond what was granted */
    KVD_FORBIDDEN = 4,  /* what was granted does not allow it */
    KVD_NO_GRANT = 5,   /* nothing is granted there any more */
    KVD_BAD_SUM = 6,    /* its checksum did not match, again and again */
    KVD_NOT_MOVED = 7,  /* the target's memory could not be read or written */
    KVD_LOST = 8,       /* the peer is gone or silent, and retries are used up */
    KVD_TIMED_OUT = 9,  /* the batch's time was over */
    KVD_CANCELLED = 10, /* the batch was cancelled */
    KVD_ENDED = 11      /* the engine was closed */
} kvd_moved;

/* One range to move. */
typedef struct kvd_request {
    uint32_t op;              /* a kvd_op */
    uint32_t reserved;        /* 0 */
    void *local;              /* in a region; not written by KVD_SEND */
    const kvd_remote *remote; /* of the same engine */
    uint64_t offset;          /* in the remote */
    uint64_t len;             /* bytes, at least 1 */
} kvd_request;

typedef struct kvd_remote_about {
    size_t struct_size;
    uint64_t len;      /* bytes */
    uint64_t lasts_ms; /* from when it was opened; KVD_NONE until it is closed */
    uint32_t rights;   /* kvd_rights */
    uint32_t way;      /* a kvd_way, which may change */
} kvd_remote_about;

/* Starts an engine. Options are those of docs/transfer.md, as texts: "listen" ("127.0.0.1:0" unless
 * given, "none" for nobody), "token", "tls_certificate", "tls_key", "tls_ca", "tls_name",
 * "allow_unauthenticated", "streams", "slice_size" ("512KiB"), "tail_merge", "watermark", "window",
 * "local", "rdma" (names with commas between them, or "none"), "checksum", "retries", "timeout"
 * ("5s"), "connections_max". Flags are "true" or "false". */
kvd_status kvd_engine_open(const kvd_option *options, size_t options_len, kvd_engine **engine);

/* Where peers connect to, "127.0.0.1:40123"; "" where nobody can. */
kvd_status kvd_engine_address(kvd_engine *engine, char **address);

/* Counters as JSON. */
kvd_status kvd_engine_stats(kvd_engine *engine, char **json);

/* Ends all that is under way, for this engine and for its peers: when it returns nothing touches
 * any memory. Its regions, segments, remotes and batches are still to be closed. */
kvd_status kvd_engine_close(kvd_engine *engine);

/* Lets batches of this engine use memory, each byte of which is in one region at a time;
 * is_written: 1 where batches may fetch into it. The buffers are one for each range; the array is
 * not kept. */
kvd_status kvd_region_open(kvd_engine *engine, const kvd_buffer *buffers, size_t buffers_len,
                           uint32_t is_written, kvd_region **region);

/* No new batch uses the memory, and those that do are waited for: cancel them where that is too
 * long. The memory is the caller's again when it returns. */
kvd_status kvd_region_close(kvd_region *region);

/* Lets peers use memory under a name of 1 to 1024 bytes, one buffer after the other as one range,
 * for so long, or with KVD_NONE until it is closed. A name of NULL and 0 is one that nobody can
 * guess: who is told it has the right. rights is what peers may do, a kvd_rights. */
kvd_status kvd_segment_open(kvd_engine *engine, const uint8_t *name, size_t name_len,
                            const kvd_buffer *buffers, size_t buffers_len, uint32_t rights,
                            uint64_t lasts_ms, kvd_segment **segment);

/* The name, which is there until the segment is closed. */
kvd_status kvd_segment_name(const kvd_segment *segment, const uint8_t **name, size_t *name_len);

/* Withdraws it. No peer uses the memory any more when it returns. */
kvd_status kvd_segment_close(kvd_segment *segment);

/* Opens what the engine at an address has published under a name. KVD_SYSTEM where nobody answers
 * there, or nothing is published under it. */
kvd_status kvd_remote_open(kvd_engine *engine, const char *address, const uint8_t *name,
                           size_t name_len, kvd_remote **remote);

kvd_status kvd_remote_look(const kvd_remote *remote, kvd_remote_about *about);

/* Lets it go; batches that use it go on. */
kvd_status kvd_remote_close(kvd_remote *remote);

/* Moves bytes, and answers at once: at most 1,000,000 requests, in any order among them. What is
 * not done after timeout_ms has failed; KVD_NONE is an hour. priority is a kvd_priority. The
 * requests are not kept, their remotes may be closed. */
kvd_status kvd_engine_submit(kvd_engine *engine, const kvd_request *requests, size_t requests_len,
                             uint64_t timeout_ms, uint32_t priority, kvd_batch **batch);

/* The same, and waits until nothing of it moves. moved has room for a byte for each request, a
 * kvd_moved. KVD_OK says that all are told, not that they are done. */
kvd_status kvd_engine_run(kvd_engine *engine, const kvd_request *requests, size_t requests_len,
                          uint64_t timeout_ms, uint32_t priority, uint8_t *moved,
                          size_t moved_len);

/* Waits until nothing of the batch moves any more; KVD_TIMEOUT where it still does after so long,
 * and 0 asks without waiting. moved has room for a byte for each request, a kvd_moved, and gets
 * what is known so far where the time is over. */
kvd_status kvd_batch_wait(kvd_batch *batch, uint64_t timeout_ms, uint8_t *moved,
                          size_t moved_len);

/* Ends a batch before it is over, and waits for that. What was done stays done. */
kvd_status kvd_batch_cancel(kvd_batch *batch);

/* Frees the handle: the batch goes on, and its regions wait for it. */
kvd_status kvd_batch_free(kvd_batch *batch);

/* The name of a kvd_moved, which may be any number. There for ever. */
const char *kvd_moved_name(int32_t moved);

#ifdef __cplusplus
}
#endif

#endif
