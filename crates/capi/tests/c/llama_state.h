/* A state of llama.cpp with three tokens and two layers, and rows of four bytes. */
#ifndef LLAMA_STATE_H
#define LLAMA_STATE_H

#include <stddef.h>
#include <stdint.h>

enum { TOKENS = 3, LAYERS = 2, ROW = 4 };

static inline uint8_t *number(uint8_t *at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        *at++ = (uint8_t)(value >> 8 * i);
    return at;
}

static inline size_t state_of(uint8_t *state, uint8_t first) {
    uint8_t *at = number(number(number(number(state, 0xaf143cd8, 4), 5, 4), 1, 4), TOKENS, 4);
    for (uint64_t token = 0; token < TOKENS; token++)
        at = number(number(number(at, token, 4), 1, 4), 5, 4);
    at = number(number(at, 0, 4), LAYERS, 4);
    for (size_t table = 0; table < 2 * LAYERS; table++) {
        at = number(number(at, 1, 4), ROW, 8);
        for (size_t i = 0; i < TOKENS * ROW; i++)
            *at++ = (uint8_t)(first + 16 * table + i);
    }
    return (size_t)(at - state);
}

#endif
