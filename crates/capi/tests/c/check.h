/* Checks that say their line, and what kvdepot said last. */
#ifndef CHECK_H
#define CHECK_H

#include <kvdepot.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                  \
    do {                                                                             \
        if (!(what)) {                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what,            \
                    kvd_last_error());                                               \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

#define OK(call) CHECK((call) == KVD_OK)
/* Refused with this status, and the message says this. */
#define REFUSED(call, status, says) CHECK((call) == (status) && strstr(kvd_last_error(), says))

#endif
