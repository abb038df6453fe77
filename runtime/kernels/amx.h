/* Instructions of AMX (Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18). Its 8
 * registers hold matrices of up to 16 rows of 64 bytes, which the manual calls tiles. GCC's own functions do not say
 * which memory they read, so these are assembler. */
#pragma once

#include <cpuid.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void set_shapes(const matrix_shapes_t *shapes) { asm volatile("ldtilecfg %0" ::"m"(*shapes)); }
static inline void release_matrices(void) { asm volatile("tilerelease" ::: "memory"); }

/* `n`, `a` and `w` are numbers of registers. Rows in memory are `apart` bytes apart. */
#define LOAD(n, at, apart) asm volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(at), "r"((int64_t)(apart)) : "memory")
#define STORE(n, at, apart) asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(apart)) : "memory")
#define CLEAR(n) asm volatile("tilezero %%tmm" #n ::)
#define ADD_BFLOAT16(n, a, w) asm volatile("tdpbf16ps %%tmm" #w ", %%tmm" #a ", %%tmm" #n ::)
#define ADD_INTEGERS(n, a, w) asm volatile("tdpbsud %%tmm" #w ", %%tmm" #a ", %%tmm" #n ::) /* signed a, unsigned w */

/* Whether this processor has the instructions, and Linux lets this process use the registers. It wants to be asked
 * (Documentation/arch/x86/xstate.rst). */
static bool may_use_matrices(void) {
    const unsigned int needed = 1 << 22 | 1 << 24 | 1 << 25; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    unsigned int a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed) return false;
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */);
}
