/* The functions that Python calls through ctypes. `library.py` declares these functions, `structs.py` the structures.
 *
 * Functions that compute take `scratch`: `scratch_bytes` bytes at an address that is a multiple of 64. If that is too
 * little, they do nothing and return the number of bytes that they need. They return 0 when they have finished. No
 * function here allocates memory. Starting a thread may fail; the job then runs on the threads that exist.
 */

#include <sys/mman.h>

#include "decoder.h"
#include "encoder.h"
#include "rounding.h"
#include "training.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *kernels_instruction_set(void) { return INSTRUCTION_SET; }

/* What the layout of packed weights depends on. Kernels use a file of packed weights only if all of these are equal. */
EXPORT int32_t kernels_layout_version(void) { return LAYOUT_VERSION; }
EXPORT int32_t kernels_block(void) { return BLOCK; }
EXPORT int32_t kernels_int8_added(void) { return INT8_ADDED; }

/* Whether products are computed by AMX. The system may refuse that to a process. */
EXPORT int32_t kernels_has_matrices(void) { return has_matrices; }

/* The type of activations that weights of a kind take. It is BFLOAT16 only if the instruction set multiplies bfloat16. */
EXPORT int32_t kernels_input_type(int32_t kind) { return input_type(kind); }

EXPORT int64_t kernels_packed_bytes(int32_t kind, int64_t num_out, int64_t num_in) {
    return packed_bytes(kind, num_out, num_in);
}

/* Memory in large pages causes fewer page faults at first, and fewer TLB misses later. */
static void ask_for_large_pages(void *memory, int64_t num_bytes) {
    uintptr_t page = 2 << 20, first = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + num_bytes) / page * page;
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
}

/* Lay out plain (num_out, num_in) weights for the kernels. `scales` is read for INT4 only. `packed` has packed_bytes
 * bytes. */
EXPORT void kernels_pack(int32_t kind, int64_t num_out, int64_t num_in, const void *plain, const void *scales,
                         void *packed, int32_t num_threads) {
    packing_t job = {kind, num_out, num_in, plain, scales, packed};
    run_items(pack_task, &job, round_up(num_out, BLOCK) / BLOCK, 1, num_threads);
}

/* Round plain (num_out, num_in) weights, FLOAT32 or BFLOAT16, to 4 bits. Results: codes (num_out, groups, GROUP / 2),
 * two in a byte with the even input in the low half, and scales (num_out, groups), which are exact in float16. The
 * caller must round the groups whose byte in `undecided` (num_out, groups) is 1. */
EXPORT void kernels_round_int4(int32_t type, int64_t num_out, int64_t num_in, const void *plain, uint8_t *codes,
                               float *scales, uint8_t *undecided, int32_t num_threads) {
    rounding_t job = {type, plain, num_in, round_up(num_in, GROUP) / GROUP, codes, scales, undecided};
    run_items(round_task, &job, num_out, 1 + SMALL / num_in, num_threads);
}

/* out (num_rows, num_out) = x (num_rows, num_in) W^T + bias; x and out are both FLOAT32 or both BFLOAT16. */
EXPORT int64_t kernels_linear(const linear_t *linear, const void *x, int32_t type, int64_t num_rows, void *out,
                              int32_t num_threads, void *scratch, int64_t scratch_bytes) {
    int64_t needed = reads_directly(linear, type) ? 0 : converted_bytes(linear, num_rows);
    if (needed > scratch_bytes) return needed;
    int how = type == FLOAT32 ? STORE_FLOAT32 : STORE_BFLOAT16;
    apply(linear, x, type, GROUP, num_rows, how, out, scratch, num_threads);
    return 0;
}

/* For training: rows that are all FLOAT32 or all BFLOAT16, see training.h. Forward if `grad` is NULL, else backward. */
EXPORT void kernels_swiglu(int32_t type, int64_t num_rows, int64_t width, const void *gate_up, const void *grad,
                           void *out, int32_t num_threads) {
    swiglu_t job = {type, width, gate_up, grad, out};
    run_items(grad ? swiglu_back_task : swiglu_task, &job, num_rows, 1 + SMALL / width, num_threads);
}

EXPORT void kernels_rms_norm(int32_t type, int64_t num_rows, int64_t width, float eps, const void *x, const void *grad,
                             const float *weight, float *inverse, void *out, int32_t num_threads) {
    rms_norm_t job = {type, width, eps, x, grad, weight, inverse, out};
    run_items(grad ? rms_norm_back_task : rms_norm_task, &job, num_rows, 1 + SMALL / width, num_threads);
}

/* Forward pass of the decoder; see decoder.h. Returns -1 if a sum over ranks failed. */
EXPORT int64_t kernels_forward(const decoder_t *decoder, const batch_t *batch, int32_t num_threads, void *scratch,
                               int64_t scratch_bytes) {
    return forward(decoder, batch, (scratch_t){scratch, scratch_bytes, 0}, num_threads);
}

/* The blocks of an encoder; see encoder.h. x (num_pictures, num_tokens, width) float32 is changed in place and becomes
 * (num_pictures, num_kept, width). */
EXPORT int64_t kernels_blocks(const stack_t *stack, float *x, int64_t num_pictures, int64_t num_tokens,
                              int64_t num_kept, int32_t num_threads, void *scratch, int64_t scratch_bytes) {
    ask_for_large_pages(scratch, scratch_bytes);
    return run_blocks(stack, x, num_pictures, num_tokens, num_kept, (scratch_t){scratch, scratch_bytes, 0}, num_threads);
}
