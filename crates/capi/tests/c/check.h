/* Checks that say their line, and what kvdepot said last. */
#ifndef CHECK_H
#define CHECK_H

#include <dirent.h>
#include <kvdepot.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                  \
    do {                                                                             \
        if (!(what)) {                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what,            \
                    kvd_last_error());                                               \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

#define OK(call) CHECK((call) == KVD_STATUS_OK)
/* Refused with this status, and the message says this. */
#define REFUSED(call, status, says) CHECK((call) == (status) && strstr(kvd_last_error(), says))

/* Whether all other threads sleep; in `seen`, which they are and how often each has gone to sleep. */
static inline int all_sleep(char *seen, size_t len) {
    char me[32], line[256];
    snprintf(me, sizeof me, "%ld", (long)getpid());
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads);
    size_t at = 0;
    int sleeps = 1;
    seen[0] = 0;
    for (struct dirent *one; sleeps && (one = readdir(threads));) {
        /* The thread that asks is the first one. */
        if (one->d_name[0] == '.' || strcmp(one->d_name, me) == 0)
            continue;
        snprintf(line, sizeof line, "/proc/self/task/%.20s/status", one->d_name);
        FILE *status = fopen(line, "r");
        sleeps = 0;
        while (status && fgets(line, sizeof line, status)) {
            if (strncmp(line, "State:\tS", 8) == 0)
                sleeps = 1;
            if (strncmp(line, "voluntary", 9) == 0)
                at += (size_t)snprintf(seen + at, len - at, "%.20s %s", one->d_name, line);
            CHECK(at < len);
        }
        if (status)
            fclose(status);
    }
    closedir(threads);
    return sleeps;
}

/* Forks while all other threads sleep. A child has the locks of a sanitizer's allocator as they are,
 * and waits for ever for one that another thread holds: forks beside threads that work are for
 * programs without. */
static inline pid_t fork_beside_sleepers(void) {
    static char seen[2][1 << 14];
    for (;;) {
        /* Those that have slept both times, and have not gone to sleep between, have not worked. */
        if (all_sleep(seen[0], sizeof seen[0]) && all_sleep(seen[1], sizeof seen[1]) &&
            strcmp(seen[0], seen[1]) == 0)
            return fork();
        usleep(1000);
    }
}

#endif
