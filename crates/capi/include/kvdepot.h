/* kvdepot: storage for KV caches and conversations of language models, for C11 and C++17.
 * docs/c.md explains how to build and link the library.
 *
 * Results. Each function that can fail returns a kvd_status. KVD_STATUS_OK means success. After an
 * error, kvd_last_error() returns the message, with the argument, its value and the allowed values.
 * A missing block is an outcome of its key, not an error.
 *
 * The comment of a function lists its own status codes. In addition, most functions return:
 *   KVD_STATUS_INPUT    an argument is not allowed, for example NULL for a required pointer
 *   KVD_STATUS_CLOSED   the depot or engine of the handle was closed, or the process was forked
 *   KVD_STATUS_SYSTEM   the operating system, a medium or another process returned an error
 *   KVD_STATUS_BUG      kvdepot itself failed
 *
 * Arguments. A function reads and writes the caller's memory only until it returns. Exceptions are
 * the memory of a put, get or job, and the memory of a region or segment: their comments name the
 * call that releases it. Strings are UTF-8 and end with a zero byte. NULL instead of a string is
 * allowed only if the comment says that it is optional. An array of length 0 may be NULL.
 *
 * Results by pointer. After an error, a new handle is NULL. Optional result pointers may be NULL.
 * A pointer into a handle is valid until that handle is closed or freed, except as noted.
 *
 * Handles. Call the matching kvd_..._close or kvd_..._free exactly once for each handle. NULL is
 * allowed there and does nothing. The library does not detect use of a handle after its end.
 *
 * Threads. All functions are thread-safe. Several threads may use one handle at the same time,
 * except while a thread closes or frees it.
 *
 * Blocking. Comments state which functions wait for copies, asynchronous tiers, files or other
 * processes. Other functions can evict blocks and write index records of an arena. If another
 * process serves the depot ("unix:..."), each call also waits for a response, for at most the
 * option `timeout`.
 *
 * Time. Durations are in milliseconds. `timeout_ms` 0 checks without waiting, and KVD_NONE waits
 * without a limit. Points in time (`..._ms`) are milliseconds since 1970, and 0 means now.
 *
 * Fork. In a child process, functions return KVD_STATUS_CLOSED for handles of the parent, and
 * ending such a handle has no effect.
 *
 * Versions. A struct that begins with `struct_size` may get more fields at its end in later
 * versions. KVD_INIT sets `struct_size` and zeroes the other fields. Zero in a later field keeps
 * the behavior of the version before.
 *
 * Flags of type uint32_t are 0 or 1. Fields named `reserved` are 0.
 *
 * Each group of functions below begins with an example. The tests compile and run all examples.
 */
#ifndef KVDEPOT_H
#define KVDEPOT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors and versions ------------------------------------------------------------------- */

/* Example: a check that prints the error and ends the program. Later examples use it.
 *
 *     static void check(kvd_status status) {
 *         if (status != KVD_STATUS_OK) {
 *             fprintf(stderr, "%s: %s\n", kvd_status_name(status), kvd_last_error());
 *             exit(1);
 *         }
 *     }
 *
 *     static void check_version(void) {
 *         if (kvd_version() >> 16 != KVD_VERSION_MAJOR) {
 *             fprintf(stderr, "libkvdepot has another major version than kvdepot.h\n");
 *             exit(1);
 *         }
 *     }
 */

/* Version of this header. A library is compatible if kvd_version() has the same upper 16 bits. */
#define KVD_VERSION_MAJOR 1
#define KVD_VERSION_MINOR 0
#define KVD_VERSION ((uint32_t)KVD_VERSION_MAJOR << 16 | KVD_VERSION_MINOR)

/* No limit, no value, or unknown, as the comment of the parameter or field states. */
#define KVD_NONE UINT64_MAX

/* Size of a session ID in bytes: 32 hexadecimal digits and a zero byte. */
#define KVD_ID_LEN 33

/* Size of a file digest in bytes: 64 hexadecimal digits and a zero byte. */
#define KVD_DIGEST_LEN 65

/* Zeroes the struct at `at` and sets its struct_size: kvd_space space; KVD_INIT(&space); */
#define KVD_INIT(at) (memset((at), 0, sizeof *(at)), (void)((at)->struct_size = sizeof *(at)))

/* Result of a call. */
typedef enum kvd_status {
    KVD_STATUS_OK = 0,
    KVD_STATUS_CONFIG = 1,     /* an option is unknown, or its value is not allowed */
    KVD_STATUS_INPUT = 2,      /* an argument is not allowed; no byte was copied */
    KVD_STATUS_LOCKED = 3,     /* another process owns the arena */
    KVD_STATUS_FULL = 4,       /* not enough space, and nothing left to evict */
    KVD_STATUS_CORRUPT = 5,    /* a medium or file does not have the expected content */
    KVD_STATUS_CLOSED = 6,     /* the depot or engine was closed, or the process was forked */
    KVD_STATUS_TIMEOUT = 7,    /* the time-out expired; the operation continues */
    KVD_STATUS_UNKNOWN = 8,    /* no session or checkpoint has this ID */
    KVD_STATUS_NOT_STORED = 9, /* a part of a session was not stored; the session does not exist */
    KVD_STATUS_NOT_WHOLE = 10, /* a part of a session is missing or failed verification */
    KVD_STATUS_ABORTED = 11,   /* the caller's callback ended the call */
    KVD_STATUS_SYSTEM = 12,    /* error of the operating system, a medium or another process */
    KVD_STATUS_BUG = 13        /* internal error of kvdepot */
} kvd_status;

/* Returns the version of the library, encoded like KVD_VERSION. */
uint32_t kvd_version(void);

/* Returns the error message of the last call that failed in the calling thread, or "" if no call
 * failed. The string is valid until the next call of this thread. Do not free it. */
const char *kvd_last_error(void);

/* Returns the name of a kvd_status, for example "timeout", as a static string. Any number is
 * allowed. */
const char *kvd_status_name(int32_t status);

/* Computes the BLAKE3 digest of a whole file. Use the digest of a model's weights as
 * kvd_space.weights, to distinguish weights of the same shape.
 *
 *   path     file to read
 *   digest   array of KVD_DIGEST_LEN bytes for the hexadecimal digits and a zero byte
 *
 * Blocks while it reads the file. Returns KVD_STATUS_SYSTEM if the file cannot be read. */
kvd_status kvd_file_digest(const char *path, char *digest);

/* Frees a string that a function returned through a `char **` parameter. NULL is allowed. */
void kvd_string_free(char *text);

/* ---- log ----------------------------------------------------------------------------------- */

/* Example: warnings and errors of kvdepot on a stream.
 *
 *     static void print_line(void *user, uint32_t level, const char *target, const char *line) {
 *         fprintf((FILE *)user, "%u %s: %s\n", (unsigned)level, target, line);
 *     }
 *
 *     static void log_warnings(FILE *stream) {
 *         check(kvd_log(print_line, stream, KVD_LOG_WARN));
 *     }
 */

/* Level of a log message. */
typedef enum kvd_log_level {
    KVD_LOG_OFF = 0,
    KVD_LOG_ERROR = 1,
    KVD_LOG_WARN = 2,
    KVD_LOG_INFO = 3,
    KVD_LOG_DEBUG = 4,
    KVD_LOG_TRACE = 5
} kvd_log_level;

/* Callback that receives one log message.
 *
 *   user     pointer that was passed to kvd_log
 *   level    a kvd_log_level
 *   target   module of kvdepot, for example "kvdepot_arena::open"; valid during the call
 *   line     message and fields on one line; valid during the call
 *
 * Any thread may call it, and several threads at the same time. Internal threads of kvdepot wait
 * for it: it must not wait for a call of kvdepot, throw an exception or use longjmp. Messages of
 * calls that it makes itself are discarded. */
typedef void (*kvd_log_fn)(void *user, uint32_t level, const char *target, const char *line);

/* Sets the log callback of the process. Until then the library logs nothing.
 *
 *   log     callback, or NULL with KVD_LOG_OFF to stop logging
 *   user    pointer for the callback
 *   level   a kvd_log_level: messages of this level and of more severe levels are passed on
 *
 * Blocks until no thread runs the previous callback. Returns KVD_STATUS_SYSTEM in a Rust program
 * that has set its own log, and KVD_STATUS_INPUT if the callback itself makes this call. */
kvd_status kvd_log(kvd_log_fn log, void *user, uint32_t level);

/* ---- depots -------------------------------------------------------------------------------- */

/* Example: a depot in memory. Workers can connect to `socket`; "off" opens none.
 *
 *     static kvd_depot *open_depot(const char *socket) {
 *         kvd_option options[] = {{"cache.capacity", "64MiB"}, {"socket", socket}};
 *         kvd_depot *depot;
 *         check(kvd_depot_open("Cache", options, 2, &depot));
 *         return depot;
 *     }
 *
 *     static void close_depot(kvd_depot *depot) {
 *         check(kvd_depot_drain(depot, KVD_NONE));
 *         check(kvd_depot_close(depot));
 *     }
 */

/* A handle to a depot: a pipeline of storage tiers that this process opened, or a connection to a
 * depot of another process. */
typedef struct kvd_depot kvd_depot;

/* An option, for example "cache.capacity" with the value "8GiB". docs/configuration.md lists all
 * options. */
typedef struct kvd_option {
    const char *name;
    const char *value;
} kvd_option;

/* Opens a depot.
 *
 *   where         one of:
 *                 - a pipeline, for example "Cache|Dax"
 *                 - a configuration file: a path that contains '/' or ends in .yaml, .yml or .json
 *                 - "unix:" and the socket of a depot that another process of this host serves
 *   options       array of options_len options. They override those of a configuration file. For
 *                 "unix:", only `lanes` and `timeout` are allowed.
 *   depot         receives the handle; end it with kvd_depot_close
 *
 * Blocks until the depot is ready: while it reads the index of an arena, and for at most the option
 * `lock_wait` while another process owns the arena. Returns KVD_STATUS_CONFIG for a wrong option,
 * KVD_STATUS_LOCKED if another process owns the arena, and KVD_STATUS_CORRUPT if a medium contains
 * no valid arena. */
kvd_status kvd_depot_open(const char *where, const kvd_option *options, size_t options_len,
                          kvd_depot **depot);

/* Opens a depot from the text of a configuration file.
 *
 *   text      configuration in YAML or JSON
 *
 * The other parameters, waits and status codes are those of kvd_depot_open. */
kvd_status kvd_depot_open_text(const char *text, const kvd_option *options, size_t options_len,
                               kvd_depot **depot);

/* Waits until all blocks that were stored before have been written back to the last tier.
 *
 * Blocks for at most `timeout_ms`. Returns KVD_STATUS_TIMEOUT if blocks are still in the write-back
 * queue. For a depot of another process, it also returns KVD_STATUS_TIMEOUT while the server is
 * unreachable, and once after blocks of this process were dropped or lost. */
kvd_status kvd_depot_drain(kvd_depot *depot, uint64_t timeout_ms);

/* Returns the counters and sizes of a depot as JSON. Free the string with kvd_string_free. */
kvd_status kvd_depot_stats(kvd_depot *depot, char **json);

/* Returns the metrics of a depot in the Prometheus text format (docs/metrics.md). Free the string
 * with kvd_string_free. */
kvd_status kvd_depot_metrics(kvd_depot *depot, char **text);

/* Closes a depot and frees the handle.
 *
 * Blocks until calls in progress have ended and the write-back queue is empty, for at most the
 * option `close_timeout`; then only until the copies end that a medium has begun. Afterwards another
 * process may own the arena. Namespaces and sessions of the depot then return KVD_STATUS_CLOSED and
 * must still be closed. */
kvd_status kvd_depot_close(kvd_depot *depot);

/* ---- blocks -------------------------------------------------------------------------------- */

/* Example: stores the block of 16 tokens, and reads it into other memory.
 *
 *     static kvd_namespace *open_namespace(kvd_depot *depot) {
 *         kvd_space space;
 *         KVD_INIT(&space);
 *         space.model = "Qwen/Qwen3-14B";
 *         space.dtype = "bfloat16";
 *         space.block_tokens = 16;
 *         kvd_namespace *blocks;
 *         check(kvd_namespace_open(depot, &space, &blocks));
 *         return blocks;
 *     }
 *
 *     static int put_and_get(kvd_namespace *blocks, const uint32_t tokens[16], kvd_buffer from,
 *                            kvd_buffer into) {
 *         kvd_key key;
 *         check(kvd_keys_of_tokens(tokens, 16, 16, NULL, 0, &key, 1));
 *         kvd_block source = {&from, 1}, target = {&into, 1};
 *         kvd_task *task;
 *         uint8_t outcome;
 *         check(kvd_put(blocks, &key, 1, &source, &task));
 *         check(kvd_task_wait(task, KVD_NONE, &outcome, 1));
 *         check(kvd_task_free(task)); // kvdepot no longer reads `from`
 *         check(kvd_get(blocks, &key, 1, &target, 0, &task));
 *         check(kvd_task_wait(task, KVD_NONE, &outcome, 1));
 *         check(kvd_task_free(task));
 *         return outcome == KVD_OUTCOME_DONE; // for example, KVD_OUTCOME_MISS is a cache miss
 *     }
 */

/* A handle to a namespace: the blocks of one model, data type and layout. */
typedef struct kvd_namespace kvd_namespace;

/* A handle to a put, get, lookup or prefetch in progress. */
typedef struct kvd_task kvd_task;

/* Description of a namespace. Namespaces that differ in any field share no block. `model`, `dtype`
 * and `block_tokens` are required; the other fields are optional and may be NULL. */
typedef struct kvd_space {
    size_t struct_size;
    const char *model;     /* model ID, as the engine names it */
    const char *dtype;     /* element type of the KV cache, for example "bfloat16" */
    uint64_t block_tokens; /* tokens per block, at least 1; for sessions, tokens per piece */
    const char *weights;   /* fingerprint of the weights and their configuration */
    const char *layout;    /* layout and geometry of the bytes */
    const char *group;     /* group of layers; must be NULL for sessions */
    const char *world;     /* tensor and pipeline parallel sizes, without the rank */
    const char *hash;      /* hash algorithm and seed of the keys */
    const char *salt;      /* secret or label that separates tenants */
} kvd_space;

/* A range of memory of this process. A source is not written. */
typedef struct kvd_buffer {
    void *data;
    size_t len; /* bytes, at least 1 */
} kvd_buffer;

/* The memory of one block: the concatenation of its pieces. */
typedef struct kvd_block {
    const kvd_buffer *pieces;
    size_t pieces_len; /* at least 1 */
} kvd_block;

/* The name of a block in its namespace. */
typedef struct kvd_key {
    uint8_t bytes[32];
} kvd_key;

/* Outcome of one key. Arrays of outcomes have one byte per key. */
typedef enum kvd_outcome {
    KVD_OUTCOME_DONE = 0,
    KVD_OUTCOME_PENDING = 1,  /* not known yet */
    KVD_OUTCOME_MISS = 2,     /* no tier has the block */
    KVD_OUTCOME_CORRUPT = 3,  /* the block failed checksum verification and was removed */
    KVD_OUTCOME_LENGTH = 4,   /* the memory and the block differ in length */
    KVD_OUTCOME_NO_SPACE = 5, /* no space could be freed */
    KVD_OUTCOME_DROPPED = 6,  /* a queue is full, or a tier could not store the block */
    KVD_OUTCOME_DECLINED = 7, /* rejected by the admission policy or another rule of a tier */
    KVD_OUTCOME_CLOSED = 8,   /* the depot closed before the block was stored or promoted */
    KVD_OUTCOME_OTHER = 9     /* an outcome without a number in this version */
} kvd_outcome;

/* Opens a namespace.
 *
 *   depot          depot that has the blocks
 *   space          description of the namespace
 *   kv_namespace   receives the handle; end it with kvd_namespace_close
 */
kvd_status kvd_namespace_open(kvd_depot *depot, const kvd_space *space,
                              kvd_namespace **kv_namespace);

/* Closes a namespace and frees the handle. Its tasks, pins and reservations stay valid. */
kvd_status kvd_namespace_close(kvd_namespace *kv_namespace);

/* Computes the keys of a prompt: one key for each full block of its tokens. A key depends on all
 * tokens up to the end of its block.
 *
 *   tokens         array of tokens_len tokens
 *   block_tokens   tokens per block, at least 1
 *   salt           salt_len bytes for all else that the blocks depend on, for example an image or
 *                  an adapter; NULL and 0 for none
 *   keys           array for keys_len keys, at least tokens_len / block_tokens
 */
kvd_status kvd_keys_of_tokens(const uint32_t *tokens, size_t tokens_len, size_t block_tokens,
                              const uint8_t *salt, size_t salt_len, kvd_key *keys,
                              size_t keys_len);

/* Starts to store blocks and returns immediately.
 *
 *   keys     array of keys_len keys, in the order of the prompt
 *   blocks   array of keys_len blocks: the memory to read for each key
 *   task     receives the handle; free it with kvd_task_free
 *
 * A key has the outcome KVD_OUTCOME_DONE when its block is acknowledged: stored in a tier that
 * survives the process, if the pipeline has one. kvdepot copies the arrays before the function
 * returns. It reads the bytes until kvd_task_wait_released or kvd_task_free has returned. */
kvd_status kvd_put(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                   const kvd_block *blocks, kvd_task **task);

#define KVD_GET_PREFIX 1u /* stop at the first miss or wrong length; later keys are misses */
#define KVD_GET_STAGED 2u /* copy through the staging buffer, for memory that is slow to write */

/* Starts to read blocks and returns immediately.
 *
 *   keys     array of keys_len keys, in the order of the prompt
 *   blocks   array of keys_len blocks: the memory to fill, of the length of each block
 *   flags    KVD_GET_PREFIX, KVD_GET_STAGED, both, or 0
 *   task     receives the handle; free it with kvd_task_free
 *
 * kvdepot verifies the checksum of each block. If the outcome of a key is not KVD_OUTCOME_DONE, the
 * content of its memory is unspecified. kvdepot writes the memory until kvd_task_wait_released or
 * kvd_task_free has returned. */
kvd_status kvd_get(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                   const kvd_block *blocks, uint32_t flags, kvd_task **task);

/* Starts to look up blocks and returns immediately, also if a tier responds later.
 *
 *   keys     array of keys_len keys
 *   task     receives the handle; free it with kvd_task_free
 *
 * A key has the outcome KVD_OUTCOME_DONE if some tier has the block. It has KVD_OUTCOME_MISS if no
 * tier has it, or if a tier did not respond within the option `lookup_timeout`. */
kvd_status kvd_lookup(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                      kvd_task **task);

/* Starts to promote blocks into the first tier and returns immediately. It promotes the consecutive
 * hits from the first key on.
 *
 *   keys     array of keys_len keys, in the order of the prompt
 *   task     receives the handle; free it with kvd_task_free
 *
 * A key has the outcome KVD_OUTCOME_DONE when its block is in the first tier. Prefetched blocks
 * that were not read yet use at most half of that tier. Keys beyond have KVD_OUTCOME_DROPPED:
 * prefetch them again later. */
kvd_status kvd_prefetch(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                        kvd_task **task);

/* Counts the leading keys that are stored without a gap.
 *
 *   keys     array of keys_len keys, in the order of the prompt
 *   count    receives the number of keys
 *
 * Blocks until asynchronous tiers have responded, or for at most the option `lookup_timeout`. */
kvd_status kvd_prefix(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                      size_t *count);

/* Checks for each key if a tier has the block.
 *
 *   keys     array of keys_len keys
 *   stored   array for keys_len bytes: 1 if the block is stored, else 0
 *
 * Blocks like kvd_prefix. */
kvd_status kvd_contains(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                        uint8_t *stored);

/* Removes blocks from all tiers.
 *
 *   keys     array of keys_len keys
 *   count    receives the number of keys that were stored in at least one tier; a repeated key
 *            counts once; optional
 *
 * Blocks until all tiers have responded. */
kvd_status kvd_remove(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                      size_t *count);

/* Waits until each key of a task has its outcome.
 *
 *   timeout_ms     longest wait
 *   outcomes       array for outcomes_len bytes, at least one per key: a kvd_outcome each
 *
 * Returns KVD_STATUS_TIMEOUT if a key has no outcome yet. `outcomes` is filled then too, and the
 * task continues. */
kvd_status kvd_task_wait(kvd_task *task, uint64_t timeout_ms, uint8_t *outcomes,
                         size_t outcomes_len);

/* Waits until kvdepot has released the memory of a put or get. For a put this can be earlier than
 * its outcomes. Returns KVD_STATUS_TIMEOUT if the memory is still in use after `timeout_ms`. */
kvd_status kvd_task_wait_released(kvd_task *task, uint64_t timeout_ms);

/* Frees a task. For a put or get, blocks until kvdepot has released the memory. The operation is
 * not cancelled: for example, a put continues to the lower tiers. */
kvd_status kvd_task_free(kvd_task *task);

/* ---- pins, reservations and movers --------------------------------------------------------- */

/* Use these functions if one process (the scheduler) decides which blocks are stored or loaded, and
 * other processes (workers) copy the bytes. The scheduler pins stored blocks or reserves space, and
 * sends a *placement* of each block to a worker. The worker opens a mover and copies one part of
 * the blocks, for example the part of its rank. The scheduler then ends the pins, or commits the
 * reservations. Pins and reservations end by these functions or with the process that made them;
 * they do not expire.
 *
 * Example: a store and a load of one block with one part. A real scheduler sends `place.placement`
 * to a worker, and receives the checksum from it.
 *
 *     static int reserve_and_commit(kvd_namespace *blocks, kvd_mover *mover, kvd_key key,
 *                                   kvd_buffer from) {
 *         uint64_t part = from.len;
 *         kvd_reserved *reserved;
 *         check(kvd_reserve(blocks, &key, 1, &part, 1, 0, &reserved));
 *         if (reserved == NULL)
 *             return 0; // stored already, rejected by the admission policy, or no space
 *         kvd_place place;
 *         KVD_INIT(&place);
 *         check(kvd_reserved_info(reserved, &place));
 *         kvd_placement placement = {place.placement, place.placement_len};
 *         kvd_block source = {&from, 1};
 *         kvd_job *job;
 *         kvd_sum sum;
 *         uint8_t outcome, stored;
 *         check(kvd_mover_store(mover, &placement, 1, &source, 0, &job));
 *         check(kvd_job_wait(job, KVD_NONE, &sum, &outcome, 1));
 *         check(kvd_job_free(job));
 *         if (outcome != KVD_OUTCOME_DONE) {
 *             check(kvd_abort(&reserved, 1));
 *             return 0;
 *         }
 *         check(kvd_commit(&reserved, 1, &sum, 1, &stored));
 *         return stored;
 *     }
 *
 *     static int pin_and_load(kvd_namespace *blocks, kvd_mover *mover, kvd_key key,
 *                             kvd_buffer into) {
 *         kvd_pinned *pin;
 *         check(kvd_pin(blocks, &key, 1, 0, &pin));
 *         if (pin == NULL)
 *             return 0; // a miss
 *         kvd_place place;
 *         KVD_INIT(&place);
 *         check(kvd_pinned_info(pin, &place));
 *         kvd_placement placement = {place.placement, place.placement_len};
 *         kvd_block target = {&into, 1};
 *         kvd_job *job;
 *         uint8_t outcome;
 *         check(kvd_mover_load(mover, &placement, 1, &target, 0, &job));
 *         check(kvd_job_wait(job, KVD_NONE, NULL, &outcome, 1));
 *         check(kvd_job_free(job));
 *         if (outcome == KVD_OUTCOME_CORRUPT)
 *             check(kvd_discard(&pin, 1, NULL));
 *         check(kvd_unpin(&pin, 1, outcome == KVD_OUTCOME_DONE));
 *         return outcome == KVD_OUTCOME_DONE;
 *     }
 */

/* A handle to a pin: the block cannot be evicted until the pin ends. */
typedef struct kvd_pinned kvd_pinned;

/* A handle to a reservation: space for a block that is being written. */
typedef struct kvd_reserved kvd_reserved;

/* Description of a pin or reservation. */
typedef struct kvd_place {
    size_t struct_size;
    const uint8_t *placement; /* opaque bytes for movers; valid until the pin or reservation ends */
    size_t placement_len;     /* bytes */
    const char *tier;         /* name of the tier that has the block, valid as long as `placement`;
                                 "" for a reservation */
    uint64_t bytes;           /* size of the block */
    kvd_key key;
} kvd_place;

/* The XXH3-128 checksum of a part, low half first. */
typedef struct kvd_sum {
    uint8_t bytes[16];
} kvd_sum;

#define KVD_PIN_PREFIX 1u /* pin only the blocks before the first miss */

/* Pins blocks, each in the uppermost tier that has it.
 *
 *   keys     array of keys_len keys, in the order of the prompt
 *   flags    KVD_PIN_PREFIX or 0
 *   pins     array for keys_len handles; NULL for a miss. End them with kvd_unpin.
 *
 * Blocks until asynchronous tiers have responded. */
kvd_status kvd_pin(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                   uint32_t flags, kvd_pinned **pins);

/* Returns the placement, tier, size and key of a pinned block in `place`. */
kvd_status kvd_pinned_info(const kvd_pinned *pin, kvd_place *place);

/* Ends pins and frees their handles.
 *
 *   pins     array of pins_len handles, in the order of the prompt; NULLs are skipped
 *   served   1 if the bytes of the blocks were used: they count as hits, and blocks of lower tiers
 *            are promoted
 */
kvd_status kvd_unpin(kvd_pinned *const *pins, size_t pins_len, uint32_t served);

/* Removes pinned blocks that failed checksum verification, each from the tier in which it is
 * pinned. The pins stay valid.
 *
 *   pins     array of pins_len handles; NULLs are skipped
 *   count    receives the number of blocks that were removed; optional
 *
 * Blocks until the tiers have responded. */
kvd_status kvd_discard(kvd_pinned *const *pins, size_t pins_len, size_t *count);

#define KVD_RESERVE_PREFIX 1u /* stop at the first block that is rejected or has no space */
#define KVD_RESERVE_STRICT 2u /* if one block has no space: KVD_STATUS_FULL, no reservation */

/* Reserves space for blocks.
 *
 *   keys        array of keys_len keys, in the order of the prompt
 *   parts       array of parts_len sizes in bytes: the parts of each block, the same for all blocks
 *   flags       KVD_RESERVE_PREFIX, KVD_RESERVE_STRICT, or 0
 *   reserved    array for keys_len handles. NULL if the block is stored or being written already,
 *               if the admission policy rejects it, or if there is no space. End the others with
 *               kvd_commit or kvd_abort.
 *
 * Returns KVD_STATUS_FULL with KVD_RESERVE_STRICT. */
kvd_status kvd_reserve(kvd_namespace *kv_namespace, const kvd_key *keys, size_t keys_len,
                       const uint64_t *parts, size_t parts_len, uint32_t flags,
                       kvd_reserved **reserved);

/* Returns the placement, size and key of a reservation in `place`. */
kvd_status kvd_reserved_info(const kvd_reserved *reserved, kvd_place *place);

/* Publishes reserved blocks after all of their parts were written, and frees the handles.
 *
 *   reserved   array of reserved_len handles; NULLs are skipped
 *   sums       array of sums_len checksums: one for each part of each block, in order, as
 *              kvd_job_wait returned them
 *   stored     array for reserved_len bytes: 1 if the block is stored now, else 0
 *
 * If it returns KVD_STATUS_INPUT, all handles are still valid. */
kvd_status kvd_commit(kvd_reserved *const *reserved, size_t reserved_len, const kvd_sum *sums,
                      size_t sums_len, uint8_t *stored);

/* Releases reserved space without storing the blocks, and frees the handles. Call it only after all
 * movers have stopped writing to these reservations. NULLs in the array are skipped. */
kvd_status kvd_abort(kvd_reserved *const *reserved, size_t reserved_len);

/* A handle to a mover: copy threads that read and write the blocks of a depot on this host. */
typedef struct kvd_mover kvd_mover;

/* A handle to a store or load in progress. */
typedef struct kvd_job kvd_job;

/* A placement that another process received from kvd_pinned_info or kvd_reserved_info. */
typedef struct kvd_placement {
    const uint8_t *bytes;
    size_t len; /* bytes */
} kvd_placement;

/* Opens a mover.
 *
 *   socket   socket of the depot, for example "/run/kvdepot.sock", with or without "unix:". The
 *            depot may be in this process or in another process of this host.
 *   lanes    number of copy threads, 1 to 256; 0 for the server's option `lanes`, or its default
 *   writes   1 if the mover stores blocks, 0 if it only loads. With 1, the next owner of a
 *            persistent arena waits for the end of this process before it stores blocks.
 *   mover    receives the handle; end it with kvd_mover_close
 *
 * Blocks until the server has responded, for a few seconds at most. Returns KVD_STATUS_SYSTEM if no
 * server responds at the socket or if it rejects the mover. */
kvd_status kvd_mover_open(const char *socket, uint64_t lanes, uint32_t writes, kvd_mover **mover);

/* Closes a mover and frees the handle. Blocks until its jobs have ended. */
kvd_status kvd_mover_close(kvd_mover *mover);

/* Starts to copy memory into one part of reserved blocks, and returns immediately.
 *
 *   placements   array of placements_len placements of reservations
 *   blocks       array of placements_len blocks: the memory to read, of the length of the part
 *   part         number of the part, from 0
 *   job          receives the handle; free it with kvd_job_free
 *
 * The mover reads the memory until kvd_job_free has returned. Returns KVD_STATUS_INPUT if a
 * placement, length or part is wrong, or if the mover was opened with `writes` 0. */
kvd_status kvd_mover_store(kvd_mover *mover, const kvd_placement *placements,
                           size_t placements_len, const kvd_block *blocks, uint32_t part,
                           kvd_job **job);

/* Starts to copy one part of pinned blocks into memory, and returns immediately. The mover verifies
 * the checksum of the part.
 *
 *   placements   array of placements_len placements of pins
 *   blocks       array of placements_len blocks: the memory to fill, of the length of the part
 *
 * The other parameters and rules are those of kvd_mover_store. */
kvd_status kvd_mover_load(kvd_mover *mover, const kvd_placement *placements,
                          size_t placements_len, const kvd_block *blocks, uint32_t part,
                          kvd_job **job);

/* Waits until all copies of a job have ended.
 *
 *   timeout_ms   longest wait
 *   sums         array for `len` checksums, valid where the outcome is KVD_OUTCOME_DONE; optional
 *   outcomes     array for `len` bytes, a kvd_outcome each: KVD_OUTCOME_DONE; KVD_OUTCOME_CORRUPT
 *                if the part failed verification; KVD_OUTCOME_OTHER if it was not copied, for
 *                example for a placement of another server; KVD_OUTCOME_PENDING after a time-out
 *   len          length of both arrays, at least one per placement
 *
 * Returns KVD_STATUS_TIMEOUT if copies are still in progress. */
kvd_status kvd_job_wait(kvd_job *job, uint64_t timeout_ms, kvd_sum *sums, uint8_t *outcomes,
                        size_t len);

/* Frees a job. Blocks until its copies have ended and the memory is released. */
kvd_status kvd_job_free(kvd_job *job);

/* ---- sessions ------------------------------------------------------------------------------ */

/* A session is the saved state of one conversation: all of its tokens, pieces with the KV rows of a
 * fixed number of tokens, and objects that do not grow with the tokens (docs/sessions.md).
 *
 * Example: an engine with 64 bytes of KV rows per token in one array. examples/conversation.c is a
 * complete program.
 *
 *     enum { ROW_BYTES = 64, PIECES_MAX = 64 };
 *
 *     struct engine {
 *         unsigned char *rows;             // ROW_BYTES per token
 *         kvd_buffer buffers[PIECES_MAX];  // must stay valid until the save has returned
 *     };
 *
 *     static int rows_of(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks) {
 *         struct engine *engine = (struct engine *)user;
 *         if (runs_len > PIECES_MAX)
 *             return 1; // ends the save
 *         for (size_t i = 0; i < runs_len; i++) {
 *             engine->buffers[i].data = engine->rows + runs[i].first * ROW_BYTES;
 *             engine->buffers[i].len = (runs[i].end - runs[i].first) * ROW_BYTES;
 *             blocks[i].pieces = &engine->buffers[i];
 *             blocks[i].pieces_len = 1;
 *         }
 *         return 0;
 *     }
 *
 *     static kvd_sessions *open_sessions(kvd_depot *depot) {
 *         kvd_space space;
 *         KVD_INIT(&space);
 *         space.model = "my-model";
 *         space.dtype = "f16";
 *         space.block_tokens = 256;
 *         space.weights = "8f2c";
 *         kvd_sessions *sessions;
 *         check(kvd_sessions_open(depot, &space, &sessions));
 *         return sessions;
 *     }
 *
 *     static void save_session(kvd_sessions *sessions, struct engine *engine,
 *                              const uint32_t *tokens, size_t tokens_len) {
 *         kvd_checkpoint checkpoint;
 *         KVD_INIT(&checkpoint);
 *         checkpoint.tokens = tokens;
 *         checkpoint.tokens_len = tokens_len;
 *         kvd_saved saved;
 *         KVD_INIT(&saved);
 *         check(kvd_sessions_save(sessions, &checkpoint, rows_of, engine, &saved));
 *         printf("session %s: wrote %llu bytes\n", saved.id,
 *                (unsigned long long)saved.bytes_written);
 *     }
 *
 *     // Restores the longest session that is a prefix of the tokens. Returns its length.
 *     static size_t restore_session(kvd_sessions *sessions, struct engine *engine,
 *                                   const uint32_t *tokens, size_t tokens_len) {
 *         kvd_found *found;
 *         size_t count;
 *         check(kvd_sessions_lookup(sessions, tokens, tokens_len, &found, 1, &count));
 *         if (count == 0)
 *             return 0;
 *         kvd_found_about about;
 *         KVD_INIT(&about);
 *         check(kvd_found_info(found, &about));
 *         kvd_run runs[PIECES_MAX];
 *         kvd_block blocks[PIECES_MAX];
 *         size_t restored = 0;
 *         if (about.pieces_len <= PIECES_MAX) {
 *             for (size_t i = 0; i < about.pieces_len; i++) {
 *                 runs[i].first = about.pieces[i].first;
 *                 runs[i].end = about.pieces[i].end;
 *             }
 *             rows_of(engine, runs, about.pieces_len, blocks);
 *             kvd_status status = kvd_sessions_restore(sessions, found, blocks, about.pieces_len,
 *                                                      NULL, 0, NULL);
 *             if (status != KVD_STATUS_NOT_WHOLE) {
 *                 check(status);
 *                 restored = about.tokens_len;
 *             }
 *         }
 *         check(kvd_found_free(found));
 *         return restored;
 *     }
 */

/* A handle to the sessions of a depot for one model, weights and layout. */
typedef struct kvd_sessions kvd_sessions;

/* A handle to a session that a lookup found. */
typedef struct kvd_found kvd_found;

/* A handle to a list of sessions. */
typedef struct kvd_list kvd_list;

/* Reason for which a session was saved. */
typedef enum kvd_reason {
    KVD_REASON_ASKED = 0,     /* the user or the program requested it */
    KVD_REASON_COLD = 1,      /* beginning of a new prompt that others may share */
    KVD_REASON_CONTINUED = 2, /* a conversation has grown by an interval */
    KVD_REASON_EVICT = 3,     /* another conversation replaces it in the engine */
    KVD_REASON_SHUTDOWN = 4   /* the engine stops */
} kvd_reason;

/* A range of tokens: from `first` up to, but without, `end`. */
typedef struct kvd_run {
    size_t first;
    size_t end;
} kvd_run;

/* A part of a session that does not grow with the tokens, for example logits. */
typedef struct kvd_object {
    const char *name;
    kvd_buffer bytes;
} kvd_object;

/* A state to save. */
typedef struct kvd_checkpoint {
    size_t struct_size;
    const uint32_t *tokens;    /* all tokens of the conversation */
    size_t tokens_len;         /* at least 1 */
    const uint8_t *text;       /* text from which the tokens were rendered; optional */
    size_t text_len;           /* bytes */
    const kvd_object *objects;
    size_t objects_len;
    const char *note;          /* optional */
    uint64_t created;          /* seconds since 1970; 0: now */
    uint32_t reason;           /* a kvd_reason */
    uint32_t context_tokens;   /* capacity of the engine's context in tokens */
    uint32_t exact;            /* 1: restores return exactly these bits (docs/sessions.md) */
    uint32_t reserved;         /* 0 */
} kvd_checkpoint;

/* Result of a save. */
typedef struct kvd_saved {
    size_t struct_size;
    size_t cached_tokens;      /* tokens of pieces that were stored before */
    size_t cache_write_tokens; /* tokens of pieces that were written */
    uint64_t bytes_written;
    char id[KVD_ID_LEN];       /* the session's ID */
    uint8_t reserved[7];
} kvd_saved;

/* Callback that returns the memory of rows to save.
 *
 *   user       pointer that was passed to kvd_sessions_save
 *   runs       array of runs_len ranges of tokens
 *   runs_len   number of ranges
 *   blocks     array for runs_len blocks: set pieces and pieces_len of blocks[i] to the rows of
 *              runs[i]
 *
 * The arrays and bytes that it returns must stay valid and unchanged until the save has returned.
 * Return 0 for success. Another value ends the save, and nothing of the session is kept. It runs in
 * the thread that saves and may call any function of this header. It must not throw an exception or
 * use longjmp. */
typedef int (*kvd_rows_fn)(void *user, const kvd_run *runs, size_t runs_len, kvd_block *blocks);

/* A piece of a session: a range of tokens, and the size of their rows. */
typedef struct kvd_piece {
    size_t first;
    size_t end;     /* the token after the last one */
    uint64_t bytes;
} kvd_piece;

/* Name and size of an object. */
typedef struct kvd_named {
    const char *name;
    uint64_t bytes;
} kvd_named;

/* Description of a session. The pointers are valid until its kvd_found is freed. */
typedef struct kvd_found_about {
    size_t struct_size;
    const char *id;
    const uint32_t *tokens;
    size_t tokens_len;
    const void *text;        /* text_len bytes, without a zero byte at the end */
    size_t text_len;
    const kvd_piece *pieces;
    size_t pieces_len;
    const kvd_named *objects;
    size_t objects_len;
    const char *note;        /* "" if there is none */
    uint64_t context_tokens; /* capacity of the context that saved it, in tokens */
} kvd_found_about;

/* Result of a restore. */
typedef struct kvd_restored {
    size_t struct_size;
    size_t cached_tokens; /* leading tokens whose rows were restored */
    uint64_t whole;       /* 1 if all pieces and objects were restored */
} kvd_restored;

/* Entry of a list of sessions. The pointers are valid until the list is freed. */
typedef struct kvd_listed {
    size_t struct_size;
    const char *id;
    const char *note;    /* "" if there is none */
    uint64_t tokens;
    uint64_t text_bytes;
    uint64_t bytes;      /* size of all pieces and objects */
    uint64_t created;    /* seconds since 1970 */
    uint32_t reason;     /* a kvd_reason */
    uint32_t bad;        /* 1 if it is incomplete or failed verification */
} kvd_listed;

/* Result of a verification. */
typedef struct kvd_checked {
    size_t struct_size;
    uint64_t blocks;  /* pieces and objects of the session */
    uint64_t bytes;   /* their size */
    uint64_t missing; /* blocks that are missing or failed verification */
} kvd_checked;

/* Format of a session file: kvdepot's own, or that of the engine ds4. */
typedef enum kvd_file { KVD_FILE_KVDEPOT = 0, KVD_FILE_DS4 = 1 } kvd_file;

/* Opens the sessions of a depot.
 *
 *   depot      depot that has the sessions
 *   space      model, weights and layout; block_tokens is the number of tokens per piece, at most
 *              1,048,576; group must be NULL
 *   sessions   receives the handle; end it with kvd_sessions_close
 *
 * Blocks while it reads which sessions exist. */
kvd_status kvd_sessions_open(kvd_depot *depot, const kvd_space *space, kvd_sessions **sessions);

/* Closes the sessions and frees the handle. Handles of found sessions and lists stay valid. */
kvd_status kvd_sessions_close(kvd_sessions *sessions);

/* Reads which sessions exist now. Other processes may have saved or removed some since the last
 * call. Blocks while it reads from the depot. */
kvd_status kvd_sessions_refresh(kvd_sessions *sessions);

/* Saves a state as a session.
 *
 *   checkpoint   the state
 *   rows         callback for the rows of pieces that are not stored yet (with `exact`: of all
 *                pieces). It is called at most once, and not if all pieces are stored.
 *   user         pointer for the callback
 *   saved        receives the result; optional
 *
 * Blocks until the session is complete and acknowledged. Returns KVD_STATUS_NOT_STORED if a part
 * could not be stored, and KVD_STATUS_ABORTED if `rows` returned another value than 0. In both
 * cases the session does not exist. */
kvd_status kvd_sessions_save(kvd_sessions *sessions, const kvd_checkpoint *checkpoint,
                             kvd_rows_fn rows, void *user, kvd_saved *saved);

/* Finds complete sessions whose tokens are a prefix of `tokens`, the longest first.
 *
 *   tokens      array of tokens_len tokens
 *   found       array for found_len handles; free each one with kvd_found_free
 *   found_len   most sessions to return
 *   count       receives the number of sessions, at most found_len
 *
 * Blocks until asynchronous tiers have responded. */
kvd_status kvd_sessions_lookup(kvd_sessions *sessions, const uint32_t *tokens, size_t tokens_len,
                               kvd_found **found, size_t found_len, size_t *count);

/* Finds complete sessions whose text is a prefix of `text`, the longest first.
 *
 *   text        text_len bytes
 *
 * The other parameters and the wait are those of kvd_sessions_lookup. */
kvd_status kvd_sessions_lookup_text(kvd_sessions *sessions, const uint8_t *text, size_t text_len,
                                    kvd_found **found, size_t found_len, size_t *count);

/* Counts the leading tokens whose rows are stored as whole pieces, from any session.
 *
 *   tokens      array of tokens_len tokens
 *   count       receives the number of tokens
 *
 * Blocks until asynchronous tiers have responded. */
kvd_status kvd_sessions_prefix(kvd_sessions *sessions, const uint32_t *tokens, size_t tokens_len,
                               size_t *count);

/* Finds a session by its ID. The session may be incomplete.
 *
 *   session   the ID, or a unique prefix of it
 *   found     receives the handle; free it with kvd_found_free
 *
 * Blocks while it reads from the depot. Returns KVD_STATUS_UNKNOWN if no session has this ID, and
 * KVD_STATUS_INPUT if several IDs begin with `session`. */
kvd_status kvd_sessions_named(kvd_sessions *sessions, const char *session, kvd_found **found);

/* Returns the description of a found session in `about`. */
kvd_status kvd_found_info(const kvd_found *found, kvd_found_about *about);

/* Frees the handle of a found session. */
kvd_status kvd_found_free(kvd_found *found);

/* Restores a session into memory.
 *
 *   found      the session
 *   rows       array of rows_len blocks: one for each piece of kvd_found_about, in order, of the
 *              same length
 *   objects    array of objects_len blocks: one for each object, in order, of the same length
 *   restored   receives the result; optional
 *
 * Blocks until all bytes were read and verified. Returns KVD_STATUS_NOT_WHOLE if a part is missing
 * or failed verification. `restored` then has the number of leading tokens whose rows are valid;
 * the content of the other memory is unspecified. Lookups skip a session that failed verification
 * until it is saved again or kvd_sessions_refresh is called. */
kvd_status kvd_sessions_restore(kvd_sessions *sessions, const kvd_found *found,
                                const kvd_block *rows, size_t rows_len, const kvd_block *objects,
                                size_t objects_len, kvd_restored *restored);

/* Restores one object of a session. Use it if the engine needs an object to compute the addresses
 * of the other parts.
 *
 *   found   the session
 *   at      position of the object in kvd_found_about.objects
 *   into    memory to fill, of the object's length
 *
 * Waits and status codes are those of kvd_sessions_restore. */
kvd_status kvd_sessions_object(kvd_sessions *sessions, const kvd_found *found, size_t at,
                               const kvd_block *into);

/* Lists all sessions as they are now, the newest first, also incomplete ones.
 *
 *   list    receives the handle; end it with kvd_list_free
 */
kvd_status kvd_sessions_list(kvd_sessions *sessions, kvd_list **list);

/* Returns the number of sessions of a list in `len`. */
kvd_status kvd_list_len(const kvd_list *list, size_t *len);

/* Returns entry `at` of a list, from 0, in `row`. */
kvd_status kvd_list_row(const kvd_list *list, size_t at, kvd_listed *row);

/* Frees a list. */
kvd_status kvd_list_free(kvd_list *list);

/* Reads and verifies all parts of a session.
 *
 *   session   the ID, or a unique prefix of it
 *   checked   receives the result; optional
 *
 * Blocks while it reads. Returns KVD_STATUS_NOT_WHOLE if parts are missing or failed verification;
 * kvd_last_error() names them. Returns KVD_STATUS_UNKNOWN if no session has this ID. */
kvd_status kvd_sessions_verify(kvd_sessions *sessions, const char *session, kvd_checked *checked);

/* Removes a session, and its parts that no other session uses.
 *
 *   session   the ID, or a unique prefix of it
 *
 * Blocks until the depot has removed the parts. Returns KVD_STATUS_UNKNOWN if no session has this
 * ID. */
kvd_status kvd_sessions_remove(kvd_sessions *sessions, const char *session);

/* Writes a session to one file.
 *
 *   session   the ID, or a unique prefix of it
 *   path      file to write
 *   format    a kvd_file
 *   bytes     receives the size of the file; optional
 *
 * Blocks until the file is complete. Returns KVD_STATUS_UNKNOWN if no session has this ID. */
kvd_status kvd_sessions_export(kvd_sessions *sessions, const char *session, const char *path,
                               uint32_t format, uint64_t *bytes);

/* Saves the session of a file.
 *
 *   path      file to read
 *   format    a kvd_file
 *   id        array of KVD_ID_LEN bytes for the session's ID; optional
 *
 * Blocks until the session is complete and acknowledged. Returns KVD_STATUS_CORRUPT if the file is
 * damaged or has another format, and KVD_STATUS_NOT_STORED like kvd_sessions_save. */
kvd_status kvd_sessions_import(kvd_sessions *sessions, const char *path, uint32_t format,
                               char *id);

/* ---- checkpoint policy --------------------------------------------------------------------- */

/* A policy decides when an engine saves its conversations. The engine reports its progress in
 * tokens; the policy returns a save that is due. It does no I/O.
 * docs/design/sessions.md#checkpoint-policy describes the rules.
 *
 * Example: a report after each step of prefill. `save_now` saves the first `tokens` tokens, and
 * returns the number of bytes that it wrote, or KVD_NONE if the save failed.
 *
 *     static uint64_t after_prefill(kvd_policy *policy, uint32_t slot, uint64_t tokens,
 *                                   uint64_t (*save_now)(uint64_t tokens)) {
 *         kvd_answer answer;
 *         KVD_INIT(&answer);
 *         check(kvd_policy_event(policy, KVD_EVENT_PREFILL, slot, tokens, 0, &answer));
 *         if (answer.action == KVD_ACTION_DECLINED)
 *             fprintf(stderr, "no checkpoint: %s\n", answer.declined);
 *         if (answer.action == KVD_ACTION_SAVE) {
 *             uint64_t bytes = save_now(answer.tokens);
 *             if (bytes == KVD_NONE)
 *                 check(kvd_policy_failed(policy, answer.save, 0, 0));
 *             else
 *                 check(kvd_policy_saved(policy, answer.save, bytes, 0));
 *         }
 *         uint64_t stop; // the next number of tokens at which prefill should report
 *         check(kvd_policy_next_stop(policy, slot, &stop));
 *         return stop;
 *     }
 *
 *     static void prefill(uint64_t prompt, uint64_t (*save_now)(uint64_t tokens)) {
 *         kvd_policy_settings settings;
 *         KVD_INIT(&settings);
 *         check(kvd_policy_defaults(&settings));
 *         settings.write_budget_hour = UINT64_C(2) << 30;
 *         kvd_policy *policy;
 *         check(kvd_policy_open(&settings, &policy));
 *         check(kvd_policy_start(policy, 0, prompt, KVD_ORIGIN_EMPTY, 0, KVD_NONE));
 *         uint64_t stop;
 *         check(kvd_policy_next_stop(policy, 0, &stop));
 *         while (stop < prompt)
 *             stop = after_prefill(policy, 0, stop, save_now); // and compute up to `stop`
 *         after_prefill(policy, 0, prompt, save_now);
 *         check(kvd_policy_close(policy));
 *     }
 */

/* A handle to a policy for all slots of one engine. A slot is a place for one conversation. */
typedef struct kvd_policy kvd_policy;

/* Settings of a policy. kvd_policy_defaults sets the defaults of ds4, in parentheses. */
typedef struct kvd_policy_settings {
    size_t struct_size;
    uint64_t disk_space;                /* bytes; larger checkpoints are declined (4 GiB) */
    uint64_t min_tokens;                /* shorter states are not saved (512) */
    uint64_t cold_max_tokens;           /* longest cold checkpoint; 0: none are saved (30,000) */
    uint64_t continued_interval_tokens; /* tokens between continued checkpoints, rounded up to a
                                           multiple of boundary_align_tokens; 0: none (10,000) */
    uint64_t boundary_trim_tokens;      /* tokens at the end of a prompt that a cold checkpoint
                                           omits (32) */
    uint64_t boundary_align_tokens;     /* cold checkpoints are multiples of it; 0: any (2,048) */
    uint64_t write_budget_hour;         /* most bytes written in any hour; KVD_NONE: no limit
                                           (KVD_NONE) */
    uint64_t write_budget_day;          /* most bytes written in any day; KVD_NONE: no limit
                                           (KVD_NONE) */
    uint64_t fixed_bytes;               /* most bytes of a checkpoint that do not depend on its
                                           length (23 MiB) */
    uint64_t token_bytes;               /* most bytes of one token (13,800) */
    uint32_t saves_prefixes;            /* 1: the engine can save and restore the first tokens of a
                                           state (0) */
    uint32_t writes_whole;              /* 1: each save writes the whole state; 0: only new parts
                                           (0) */
} kvd_policy_settings;

/* Origin of the tokens that a new prompt reuses. */
typedef enum kvd_origin {
    KVD_ORIGIN_EMPTY = 0,    /* none are reused */
    KVD_ORIGIN_RESTORED = 1, /* restored from a checkpoint */
    KVD_ORIGIN_LIVE = 2      /* still in the slot's memory */
} kvd_origin;

/* Event of an engine. */
typedef enum kvd_event {
    KVD_EVENT_PREFILL = 0, /* prefill has computed the slot up to `tokens` */
    KVD_EVENT_DECODE = 1,  /* decoding has computed the slot up to `tokens` */
    KVD_EVENT_SWITCH = 2,  /* another conversation is about to replace these `tokens` */
    KVD_EVENT_END = 3      /* the engine stops with `tokens` in the slot */
} kvd_event;

/* Action that a policy requests. */
typedef enum kvd_policy_action {
    KVD_ACTION_NONE = 0,    /* nothing is due */
    KVD_ACTION_SAVE = 1,    /* save now, then call kvd_policy_saved or kvd_policy_failed */
    KVD_ACTION_DECLINED = 2 /* a checkpoint was due and is not taken */
} kvd_policy_action;

/* Response of a policy to an event. */
typedef struct kvd_answer {
    size_t struct_size;
    uint32_t action;      /* a kvd_policy_action */
    uint32_t reason;      /* a kvd_reason; this field to `bytes`: only with KVD_ACTION_SAVE */
    uint64_t save;        /* number of the save, for kvd_policy_saved and kvd_policy_failed */
    uint64_t tokens;      /* tokens to save, from the first one on */
    uint64_t base;        /* leading tokens that are saved already */
    uint64_t bytes;       /* most bytes that the save may write */
    const char *declined; /* reason as a static string with KVD_ACTION_DECLINED, else NULL */
} kvd_answer;

/* Sets all fields of `settings`, except struct_size, to their defaults. */
kvd_status kvd_policy_defaults(kvd_policy_settings *settings);

/* Creates a policy.
 *
 *   settings   settings; the policy copies them
 *   policy     receives the handle; end it with kvd_policy_close
 */
kvd_status kvd_policy_open(const kvd_policy_settings *settings, kvd_policy **policy);

/* Frees a policy. */
kvd_status kvd_policy_close(kvd_policy *policy);

/* Reports that a prompt starts in a slot. First report KVD_EVENT_SWITCH if it replaces another
 * conversation.
 *
 *   slot            number of the slot, chosen by the engine
 *   tokens          tokens of the prompt, with those that are reused
 *   origin          a kvd_origin
 *   origin_tokens   tokens that are reused; ignored with KVD_ORIGIN_EMPTY
 *   anchor          tokens before the last user message that precedes the first answer. Other
 *                   conversations may share them. KVD_NONE if unknown.
 */
kvd_status kvd_policy_start(kvd_policy *policy, uint32_t slot, uint64_t tokens, uint32_t origin,
                            uint64_t origin_tokens, uint64_t anchor);

/* Returns in `stop` the number of tokens at which prefill should next stop and report its progress;
 * KVD_NONE if there is none. An engine that does not stop there saves a little later. */
kvd_status kvd_policy_next_stop(kvd_policy *policy, uint32_t slot, uint64_t *stop);

/* Reports an event, and returns the action that is due.
 *
 *   event    a kvd_event
 *   slot     number of the slot
 *   tokens   tokens in the slot now. A smaller number than before means that the conversation was
 *            cut.
 *   at_ms    time of the event
 *   answer   receives the response
 */
kvd_status kvd_policy_event(kvd_policy *policy, uint32_t event, uint32_t slot, uint64_t tokens,
                            uint64_t at_ms, kvd_answer *answer);

/* Reports that a save succeeded.
 *
 *   save    number of the save, from kvd_answer
 *   bytes   bytes that were written
 *   at_ms   time at which the save ended
 *
 * Returns KVD_STATUS_INPUT if the save has ended already. */
kvd_status kvd_policy_saved(kvd_policy *policy, uint64_t save, uint64_t bytes, uint64_t at_ms);

/* Reports that a save failed after it wrote `bytes`. Other parameters and status codes are those of
 * kvd_policy_saved. */
kvd_status kvd_policy_failed(kvd_policy *policy, uint64_t save, uint64_t bytes, uint64_t at_ms);

/* Reports that checkpoints of a slot's conversation were removed or failed verification: only its
 * first `tokens` tokens are still saved. */
kvd_status kvd_policy_truncate(kvd_policy *policy, uint32_t slot, uint64_t tokens);

/* ---- catalogue of checkpoints -------------------------------------------------------------- */

/* A catalogue orders the checkpoints on disk for deletion, for engines that write each checkpoint
 * whole. Continued checkpoints that a longer one supersedes come first, then those that save the
 * least compute per byte. It does no I/O.
 *
 * Example: checkpoints to delete before a new one is written.
 *
 *     static void add_checkpoint(kvd_catalogue *catalogue, uint64_t id, uint64_t tokens,
 *                                uint64_t bytes) {
 *         kvd_entry entry;
 *         KVD_INIT(&entry);
 *         entry.id = id;
 *         entry.parent = KVD_NONE;
 *         entry.tokens = tokens;
 *         entry.bytes = bytes;
 *         entry.reason = KVD_REASON_COLD;
 *         check(kvd_catalogue_insert(catalogue, &entry));
 *     }
 *
 *     // Returns 0 if the new checkpoint does not fit.
 *     static int make_space(kvd_catalogue *catalogue, uint64_t incoming, uint64_t disk_space,
 *                           void (*delete_file)(uint64_t id)) {
 *         uint64_t ids[16];
 *         size_t count;
 *         kvd_status status =
 *             kvd_catalogue_make_room(catalogue, incoming, disk_space, 0, ids, 16, &count);
 *         if (status == KVD_STATUS_FULL)
 *             return 0;
 *         check(status);
 *         for (size_t i = 0; i < count; i++) {
 *             delete_file(ids[i]);
 *             check(kvd_catalogue_remove(catalogue, ids[i]));
 *         }
 *         return 1;
 *     }
 */

/* A handle to a catalogue. */
typedef struct kvd_catalogue kvd_catalogue;

/* A checkpoint on disk. */
typedef struct kvd_entry {
    size_t struct_size;
    uint64_t id;      /* chosen by the caller */
    uint64_t parent;  /* ID of the longest checkpoint whose tokens are a proper prefix of this
                         one's; KVD_NONE if there is none */
    uint64_t tokens;
    uint64_t bytes;   /* bytes that its removal frees */
    uint64_t hits;    /* number of restores from it */
    uint64_t used_ms; /* time of the last save or restore */
    uint32_t reason;  /* a kvd_reason, except KVD_REASON_ASKED */
    uint32_t pins;    /* number of pins; a pinned checkpoint is not chosen for deletion */
} kvd_entry;

/* Creates an empty catalogue.
 *
 *   catalogue   receives the handle; end it with kvd_catalogue_close
 */
kvd_status kvd_catalogue_open(kvd_catalogue **catalogue);

/* Frees a catalogue. */
kvd_status kvd_catalogue_close(kvd_catalogue *catalogue);

/* Adds a checkpoint that is on disk. It replaces an entry with the same ID. */
kvd_status kvd_catalogue_insert(kvd_catalogue *catalogue, const kvd_entry *entry);

/* Removes the entry of a checkpoint that was deleted. Its children become children of its parent.
 * Returns KVD_STATUS_UNKNOWN if there is no such entry. */
kvd_status kvd_catalogue_remove(kvd_catalogue *catalogue, uint64_t id);

/* Returns the entry with this ID in `entry`. Returns KVD_STATUS_UNKNOWN if there is none. */
kvd_status kvd_catalogue_info(kvd_catalogue *catalogue, uint64_t id, kvd_entry *entry);

/* Counts a restore from a checkpoint at `at_ms`. Returns KVD_STATUS_UNKNOWN if there is no such
 * entry. */
kvd_status kvd_catalogue_hit(kvd_catalogue *catalogue, uint64_t id, uint64_t at_ms);

/* Adds a pin to a checkpoint, for example while it is being loaded. Returns KVD_STATUS_UNKNOWN if
 * there is no such entry. */
kvd_status kvd_catalogue_pin(kvd_catalogue *catalogue, uint64_t id);

/* Ends one pin of a checkpoint. Returns KVD_STATUS_UNKNOWN if there is no such entry or it has no
 * pin. */
kvd_status kvd_catalogue_unpin(kvd_catalogue *catalogue, uint64_t id);

/* Sets the size of other data on the same disk, for example a save in progress or an orphaned file.
 *
 *   id      number of the data, chosen by the caller; separate from the IDs of checkpoints
 *   bytes   size; 0 if the data no longer exists
 */
kvd_status kvd_catalogue_set_other(kvd_catalogue *catalogue, uint64_t id, uint64_t bytes);

/* Returns the size of all checkpoints and other data in `bytes`. */
kvd_status kvd_catalogue_bytes(kvd_catalogue *catalogue, uint64_t *bytes);

/* Chooses the checkpoints to delete so that all data and `incoming` bytes fit into `disk_space`.
 *
 *   incoming     bytes to write next
 *   disk_space   bytes that all data may use
 *   at_ms        time of the call
 *   ids          array for ids_len IDs, in the order in which to delete them
 *   count        receives the number of IDs
 *
 * The catalogue does not change: call kvd_catalogue_remove after each deletion. Returns
 * KVD_STATUS_FULL if the deletion of all unpinned checkpoints would not suffice. Then delete
 * nothing, and do not write the new data. Returns KVD_STATUS_INPUT if ids_len is too small; `count`
 * is set then too. */
kvd_status kvd_catalogue_make_room(kvd_catalogue *catalogue, uint64_t incoming,
                                   uint64_t disk_space, uint64_t at_ms, uint64_t *ids,
                                   size_t ids_len, size_t *count);

/* ---- llama.cpp ----------------------------------------------------------------------------- */

/* These functions split the state of one sequence of llama.cpp, as llama_state_seq_get_data writes
 * it, by tokens. C++ programs can use kvdepot_llama.hpp instead, which does all of this.
 *
 * A state has three parts: the KV *rows* of the tokens; the *rest*, which does not grow with the
 * tokens (sliding windows and recurrent layers); and the *head*, which is all else.
 *
 * Example: copies the rows of some tokens of a state into memory of their own.
 *
 *     static size_t copy_rows(const uint8_t *state, size_t state_len, kvd_run run, uint8_t *piece,
 *                             size_t piece_len) {
 *         kvd_llama *layout;
 *         check(kvd_llama_open(state, state_len, &layout));
 *         kvd_llama_about about;
 *         KVD_INIT(&about);
 *         check(kvd_llama_info(layout, &about));
 *         size_t bytes = (run.end - run.first) * about.token_len;
 *         if (bytes <= piece_len)
 *             check(kvd_llama_gather(layout, state, state_len, run, piece, bytes));
 *         check(kvd_llama_close(layout));
 *         return bytes;
 *     }
 */

/* A handle to the layout of a state: the positions of rows, rest and head in its bytes. */
typedef struct kvd_llama kvd_llama;

/* Description of a layout. */
typedef struct kvd_llama_about {
    size_t struct_size;
    size_t tokens;
    size_t state_len;    /* bytes of the state */
    size_t rest;         /* offset of the rest, which reaches to the end of the state */
    size_t rest_len;     /* bytes of the rest; 0 if there is none */
    size_t token_len;    /* bytes of the rows of one token */
    size_t pieces_len;   /* buffers that the rows of any run of tokens consist of */
    int32_t sequence;    /* sequence ID */
    uint32_t layers;     /* layers with attention */
    uint32_t transposed; /* 1: values are transposed (no flash attention), in many small buffers */
    uint32_t reserved;
} kvd_llama_about;

/* Reads the layout of a state.
 *
 *   state    state_len bytes; the library keeps no reference to them
 *   layout   receives the handle; end it with kvd_llama_close
 *
 * Returns KVD_STATUS_INPUT for a state that is damaged or cannot be split: positions other than 0
 * to n - 1 in this order, several streams, M-RoPE, or models without attention. */
kvd_status kvd_llama_open(const uint8_t *state, size_t state_len, kvd_llama **layout);

/* Computes the layout of another state of the same context.
 *
 *   of         layout of a state of the context
 *   tokens     tokens of the other state, at least 1
 *   rest_len   bytes of its rest
 *   sequence   its sequence ID
 *   layout     receives the handle; end it with kvd_llama_close
 */
kvd_status kvd_llama_resized(const kvd_llama *of, size_t tokens, size_t rest_len,
                             int32_t sequence, kvd_llama **layout);

/* Returns the description of a layout in `about`. */
kvd_status kvd_llama_info(const kvd_llama *layout, kvd_llama_about *about);

/* Frees a layout. */
kvd_status kvd_llama_close(kvd_llama *layout);

/* Returns the addresses of the rows of some tokens in a state, to save from or restore into. It
 * does not access the state.
 *
 *   state        address of a state of state_len bytes with this layout
 *   run          range of tokens, at least one
 *   pieces       array for pieces_len buffers, at least kvd_llama_about.pieces_len
 *   count        receives the number of buffers; optional
 */
kvd_status kvd_llama_rows(const kvd_llama *layout, void *state, size_t state_len, kvd_run run,
                          kvd_buffer *pieces, size_t pieces_len, size_t *count);

/* Copies the rows of some tokens from a state into a piece.
 *
 *   state    state_len bytes with this layout
 *   run      range of tokens, at least one
 *   piece    piece_len bytes: token_len for each token of the run. It must not overlap the state.
 */
kvd_status kvd_llama_gather(const kvd_llama *layout, const uint8_t *state, size_t state_len,
                            kvd_run run, uint8_t *piece, size_t piece_len);

/* Copies the rows of some tokens from a piece into a state. The parameters are those of
 * kvd_llama_gather. */
kvd_status kvd_llama_scatter(const kvd_llama *layout, const uint8_t *piece, size_t piece_len,
                             kvd_run run, uint8_t *state, size_t state_len);

/* Writes the head of a state: all bytes that are neither rows nor rest. */
kvd_status kvd_llama_head(const kvd_llama *layout, uint8_t *state, size_t state_len);

/* ---- transfer engine ----------------------------------------------------------------------- */

/* The transfer engine reads and writes many small ranges of memory of other processes and hosts.
 * docs/transfer.md lists its guarantees. The *target* publishes memory as segments, each with a
 * name. The *initiator* registers its own memory as regions, opens a segment as a remote by the
 * target's address and the name, and submits batches. The target makes no other call.
 *
 * Example: a target that publishes memory, and an initiator that reads it. The target's program
 * sends the address to the initiator.
 *
 *     static kvd_segment *publish(kvd_engine *engine, kvd_buffer memory, char **address) {
 *         kvd_segment *segment;
 *         check(kvd_segment_open(engine, (const uint8_t *)"pages", 5, &memory, 1,
 *                                KVD_RIGHTS_READ, KVD_NONE, &segment));
 *         check(kvd_engine_address(engine, address)); // free it with kvd_string_free
 *         return segment;
 *     }
 *
 *     static int read_pages(const char *address, void *into, size_t len) {
 *         kvd_option options[] = {{"listen", "none"}}; // peers cannot connect to the initiator
 *         kvd_engine *engine;
 *         check(kvd_engine_open(options, 1, &engine));
 *         kvd_buffer memory = {into, len};
 *         kvd_region *region;
 *         check(kvd_region_open(engine, &memory, 1, 1, &region));
 *         kvd_remote *remote;
 *         check(kvd_remote_open(engine, address, (const uint8_t *)"pages", 5, &remote));
 *         kvd_request request = {KVD_OP_READ, 0, into, remote, 0, len};
 *         kvd_batch *batch;
 *         uint8_t status;
 *         check(kvd_engine_submit(engine, &request, 1, 30000, KVD_PRIORITY_NORMAL, &batch));
 *         check(kvd_batch_wait(batch, KVD_NONE, &status, 1));
 *         if (status != KVD_TRANSFER_DONE)
 *             fprintf(stderr, "request 0: %s\n", kvd_transfer_status_name(status));
 *         check(kvd_batch_free(batch));
 *         check(kvd_remote_close(remote));
 *         check(kvd_region_close(region));
 *         check(kvd_engine_close(engine));
 *         return status == KVD_TRANSFER_DONE;
 *     }
 */

/* A handle to a transfer engine. A process needs one. */
typedef struct kvd_engine kvd_engine;

/* A handle to registered memory of this process, which batches may use. */
typedef struct kvd_region kvd_region;

/* A handle to published memory of this process, which peers may use. */
typedef struct kvd_segment kvd_segment;

/* A handle to a segment of a peer. */
typedef struct kvd_remote kvd_remote;

/* A handle to a submitted batch. */
typedef struct kvd_batch kvd_batch;

/* Operations that a segment allows to peers. */
typedef enum kvd_rights {
    KVD_RIGHTS_READ = 1,
    KVD_RIGHTS_WRITE = 2,
    KVD_RIGHTS_BOTH = 3
} kvd_rights;

/* Operation of a request. */
typedef enum kvd_op {
    KVD_OP_READ = 0, /* copy from the remote into local memory */
    KVD_OP_WRITE = 1 /* copy from local memory to the remote */
} kvd_op;

/* Priority of a batch. */
typedef enum kvd_priority {
    KVD_PRIORITY_NORMAL = 0,
    KVD_PRIORITY_URGENT = 1,    /* highest, for example if a model waits for the batch */
    KVD_PRIORITY_BACKGROUND = 2 /* lowest, if no caller waits for the batch */
} kvd_priority;

/* Path by which the bytes of a remote are copied. */
typedef enum kvd_path {
    KVD_PATH_TCP = 0,   /* TCP connections, with TLS if it is configured */
    KVD_PATH_LOCAL = 1, /* on this host: shared memory, or the memory of the other process */
    KVD_PATH_RDMA = 2   /* RDMA devices of both hosts */
} kvd_path;

/* Status of a request. Arrays of statuses have one byte per request. If a request failed, some of
 * its bytes may have been copied. */
typedef enum kvd_transfer_status {
    KVD_TRANSFER_PENDING = 0,
    KVD_TRANSFER_DONE = 1,
    KVD_TRANSFER_NOT_REGISTERED = 2,    /* the local memory is in no region, or in a region that
                                           batches may not write */
    KVD_TRANSFER_OUT_OF_RANGE = 3,      /* the range exceeds the segment */
    KVD_TRANSFER_NO_PERMISSION = 4,     /* the segment does not allow this operation */
    KVD_TRANSFER_NOT_GRANTED = 5,       /* the segment was closed or has expired */
    KVD_TRANSFER_CHECKSUM_MISMATCH = 6, /* the checksum did not match in any try */
    KVD_TRANSFER_FAILED = 7,            /* the target's memory could not be read or written */
    KVD_TRANSFER_LOST = 8,              /* the peer does not respond, and all retries are used up */
    KVD_TRANSFER_TIMED_OUT = 9,         /* the batch's time-out expired */
    KVD_TRANSFER_CANCELLED = 10,        /* the batch was cancelled */
    KVD_TRANSFER_CLOSED = 11            /* the engine was closed */
} kvd_transfer_status;

/* One range to copy. */
typedef struct kvd_request {
    uint32_t op;              /* a kvd_op */
    uint32_t reserved;        /* 0 */
    void *local;              /* memory in a region; not written by KVD_OP_WRITE */
    const kvd_remote *remote; /* a remote of the same engine */
    uint64_t offset;          /* bytes from the beginning of the remote */
    uint64_t len;             /* bytes, at least 1 */
} kvd_request;

/* Description of a remote. */
typedef struct kvd_remote_about {
    size_t struct_size;
    uint64_t len;      /* bytes */
    uint64_t lasts_ms; /* remaining lifetime when it was opened; KVD_NONE: until the target closes
                          it */
    uint32_t rights;   /* a kvd_rights */
    uint32_t path;     /* a kvd_path, which may change */
} kvd_remote_about;

/* Starts a transfer engine.
 *
 *   options     array of options_len options of docs/transfer.md, with values as text:
 *               - listen: address for peers, "127.0.0.1:0" by default; "none": peers cannot connect
 *               - token, tls_certificate, tls_key, tls_ca, tls_name: authentication
 *               - slice_size, tail_merge: sizes, for example "512KiB"
 *               - timeout: a duration, for example "5s"
 *               - streams, watermark, window, retries, connections_max: numbers
 *               - local, checksum, allow_unauthenticated: "true" or "false"
 *               - rdma: device names, separated by commas, or "none"
 *   engine      receives the handle; end it with kvd_engine_close
 *
 * Returns KVD_STATUS_CONFIG for a wrong option, and KVD_STATUS_SYSTEM if it cannot listen. */
kvd_status kvd_engine_open(const kvd_option *options, size_t options_len, kvd_engine **engine);

/* Returns the address for peers, for example "127.0.0.1:40123", or "" if peers cannot connect. Free
 * the string with kvd_string_free. */
kvd_status kvd_engine_address(kvd_engine *engine, char **address);

/* Returns the counters of an engine as JSON. Free the string with kvd_string_free. */
kvd_status kvd_engine_stats(kvd_engine *engine, char **json);

/* Closes an engine and frees the handle. Batches of this engine and batches of peers that use its
 * memory end. Blocks until no thread and no peer accesses the memory. Regions, segments, remotes
 * and batches of the engine must still be closed or freed. */
kvd_status kvd_engine_close(kvd_engine *engine);

/* Registers memory of this process for batches. A byte can be in one region at a time.
 *
 *   buffers      array of buffers_len ranges; the array is copied
 *   is_written   1 if batches may write the memory (KVD_OP_READ), 0 if they only read it
 *   region       receives the handle; end it with kvd_region_close
 *
 * The memory must stay valid until kvd_region_close has returned. */
kvd_status kvd_region_open(kvd_engine *engine, const kvd_buffer *buffers, size_t buffers_len,
                           uint32_t is_written, kvd_region **region);

/* Ends a registration and frees the handle. New batches cannot use the memory. Blocks until batches
 * that use it have ended; cancel them to shorten the wait. */
kvd_status kvd_region_close(kvd_region *region);

/* Publishes memory of this process for peers.
 *
 *   name         1 to 1024 bytes, unique in this engine. With NULL and name_len 0, the engine
 *                chooses a random name: only peers that receive the name can open the segment.
 *   buffers      array of buffers_len ranges, which form one range in this order
 *   rights       a kvd_rights: the operations that peers may use
 *   lasts_ms     lifetime, at least 1; KVD_NONE: until it is closed
 *   segment      receives the handle; end it with kvd_segment_close
 *
 * The memory must stay valid until kvd_segment_close has returned, also if the lifetime ends
 * earlier. */
kvd_status kvd_segment_open(kvd_engine *engine, const uint8_t *name, size_t name_len,
                            const kvd_buffer *buffers, size_t buffers_len, uint32_t rights,
                            uint64_t lasts_ms, kvd_segment **segment);

/* Returns the name of a segment, as name_len bytes. The pointer is valid until the segment is
 * closed. */
kvd_status kvd_segment_name(const kvd_segment *segment, const uint8_t **name, size_t *name_len);

/* Withdraws a segment and frees the handle. Blocks until no peer accesses the memory. */
kvd_status kvd_segment_close(kvd_segment *segment);

/* Opens a segment of a peer.
 *
 *   address    address of the peer's engine, from its kvd_engine_address
 *   name       name_len bytes
 *   remote     receives the handle; end it with kvd_remote_close
 *
 * Blocks for at most the engine's option `timeout`. Returns KVD_STATUS_SYSTEM if no engine responds
 * at the address, if it rejects this engine, or if it has no such segment. */
kvd_status kvd_remote_open(kvd_engine *engine, const char *address, const uint8_t *name,
                           size_t name_len, kvd_remote **remote);

/* Returns the description of a remote in `about`. */
kvd_status kvd_remote_info(const kvd_remote *remote, kvd_remote_about *about);

/* Closes a remote and frees the handle. Batches that use it continue. */
kvd_status kvd_remote_close(kvd_remote *remote);

/* Submits a batch and returns immediately.
 *
 *   requests       array of requests_len requests, at most 1,000,000; they run in any order. The
 *                  array is copied, and the remotes may be closed at once.
 *   timeout_ms     time after which requests fail that are not done; KVD_NONE: an hour
 *   priority       a kvd_priority
 *   batch          receives the handle; free it with kvd_batch_free
 *
 * A request that cannot be executed fails alone, with its own kvd_transfer_status. */
kvd_status kvd_engine_submit(kvd_engine *engine, const kvd_request *requests, size_t requests_len,
                             uint64_t timeout_ms, uint32_t priority, kvd_batch **batch);

/* Submits a batch and waits until it has ended.
 *
 *   statuses       array for statuses_len bytes, at least one per request: a kvd_transfer_status
 *                  each
 *
 * The other parameters are those of kvd_engine_submit. Returns KVD_STATUS_OK also if requests
 * failed. */
kvd_status kvd_engine_run(kvd_engine *engine, const kvd_request *requests, size_t requests_len,
                          uint64_t timeout_ms, uint32_t priority, uint8_t *statuses,
                          size_t statuses_len);

/* Waits until a batch has ended: the engine has then stopped using its memory.
 *
 *   timeout_ms     longest wait
 *   statuses       array for statuses_len bytes, at least one per request: a kvd_transfer_status
 *                  each
 *
 * Returns KVD_STATUS_TIMEOUT if the batch is still in progress. `statuses` is filled then too. */
kvd_status kvd_batch_wait(kvd_batch *batch, uint64_t timeout_ms, uint8_t *statuses,
                          size_t statuses_len);

/* Cancels a batch. Blocks until it has ended. Requests that are done stay done. */
kvd_status kvd_batch_cancel(kvd_batch *batch);

/* Frees the handle of a batch. The batch continues, and closing its regions waits for it. */
kvd_status kvd_batch_free(kvd_batch *batch);

/* Returns the name of a kvd_transfer_status, for example "timed out", as a static string. Any
 * number is allowed. */
const char *kvd_transfer_status_name(int32_t status);

#ifdef __cplusplus
}
#endif

#endif
