/* Takes the place of runtime/kernels/amx.h on processors without AMX: the same instructions in C, as the pseudocode of the
 * manual describes them, except that subnormal numbers are not flushed to zero. The environment variable NO_MATRICES
 * stands for a system that does not let the process use the registers. A wrong shape ends the process. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
    matrix_shapes_t shapes;
    char data[8][16][64];
} amx;

static _Atomic int64_t num_products; /* of matrices */
__attribute__((visibility("default"))) int64_t emulated_products(void) { return num_products; }

static void require(bool is_right) {
    if (!is_right) abort();
}

static void set_shapes(const matrix_shapes_t *shapes) {
    require(shapes->palette == 1 && !amx.shapes.palette); /* the job before has released the registers */
    for (int n = 0; n < 8; n++) {
        require(shapes->row_bytes[n] <= 64 && shapes->num_rows[n] <= 16);
        require(!shapes->row_bytes[n] == !shapes->num_rows[n]);
    }
    memset(&amx, 0, sizeof amx);
    amx.shapes = *shapes;
}

static void release_matrices(void) { memset(&amx, 0, sizeof amx); }

static void move(int n, char *at, int64_t apart, bool stores) {
    require(amx.shapes.palette == 1);
    if (!stores) memset(amx.data[n], 0, sizeof amx.data[n]);
    for (int row = 0; row < amx.shapes.num_rows[n]; row++) {
        char *own = amx.data[n][row], *other = at + row * apart;
        memcpy(stores ? other : own, stores ? own : other, amx.shapes.row_bytes[n]);
    }
}

static float widened_bfloat16(const char *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static void add_products_of(int n, int a, int w, bool is_bfloat16) {
    const matrix_shapes_t *shapes = &amx.shapes;
    num_products++;
    int num_steps = shapes->row_bytes[a] / 4, num_outputs = shapes->row_bytes[n] / 4;
    require(shapes->palette == 1 && shapes->num_rows[n] == shapes->num_rows[a]);
    require(shapes->num_rows[w] == num_steps && shapes->row_bytes[w] == shapes->row_bytes[n]);
    for (int row = 0; row < shapes->num_rows[n]; row++)
        for (int o = 0; o < num_outputs; o++) {
            char *sum = amx.data[n][row] + 4 * o;
            float even = 0.0f, odd = 0.0f;
            int32_t total = 0;
            for (int k = 0; k < num_steps; k++) {
                const char *x = amx.data[a][row] + 4 * k, *y = amx.data[w][k] + 4 * o;
                for (int byte = 0; byte < 4; byte++) total += (int8_t)x[byte] * (uint8_t)y[byte];
                even = __builtin_fmaf(widened_bfloat16(x), widened_bfloat16(y), even);
                odd = __builtin_fmaf(widened_bfloat16(x + 2), widened_bfloat16(y + 2), odd);
            }
            float real;
            uint32_t whole;
            memcpy(&real, sum, 4);
            memcpy(&whole, sum, 4);
            real += even + odd;
            whole += (uint32_t)total;
            memcpy(sum, is_bfloat16 ? (void *)&real : (void *)&whole, 4);
        }
}

#define LOAD(n, at, apart) move(n, (char *)(at), apart, false)
#define STORE(n, at, apart) move(n, (char *)(at), apart, true)
#define CLEAR(n) memset(amx.data[n], 0, sizeof amx.data[n])
#define ADD_BFLOAT16(n, a, w) add_products_of(n, a, w, true)
#define ADD_INTEGERS(n, a, w) add_products_of(n, a, w, false)

static bool may_use_matrices(void) { return getenv("NO_MATRICES") == NULL; }
