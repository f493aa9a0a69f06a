/* kvdepot: KV caches and conversations of language models, kept. docs/c.md tells how to build,
 * link and use it.
 *
 * Results. Every function that can fail answers a kvd_status; kvd_last_error() says the rest, with
 * the field, its value and what is allowed. A miss is no error.
 *
 * Pointers. What a function reads is the caller's, and read until the function returns, but for the
 * memory of a put or get, which is used until its task has let go of it. Texts are UTF-8 and end
 * with a zero; NULL is no text where that is allowed. An array of no elements may be NULL. What is
 * answered by a pointer says below how long it is there.
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
    KVD_CLOSED = 6,     /* the depot was closed, or is of the process this one is a fork of */
    KVD_TIMEOUT = 7,    /* the time given is over; what was waited for goes on */
    KVD_UNKNOWN = 8,    /* no session has this name */
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

/* Gives back a text that was answered by a char **. NULL is none. */
void kvd_string_free(char *text);

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

#ifdef __cplusplus
}
#endif

#endif
