/* A host-backed stand-in for the part of CANN that torch_npu needs to load, allocate, copy and time; it computes
 * nothing. Written against the public prototypes of acl_rt.h. Streams and events are in fake_streams.c,
 * collectives in fake_hccl.c; everything else is a generated stub that returns 0 (see fake_cann.py).
 *
 * FAKE_SOC      name of the chip, for example Ascend310P3; unset: no device, and aclInit fails
 * FAKE_DEVICES  number of devices, 1 when unset
 */
#include "fake_streams.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NO_DEVICE = 507033, BAD_DEVICE = 107001, NO_CONTEXT = 107002, NO_MEMORY = 207001 };

static const size_t TOTAL_BYTES = (size_t)4 << 30; /* of all devices together */
static _Thread_local int current_device = -1;
static char contexts[64];
static atomic_size_t used_bytes;

static uint32_t num_devices(void) {
    const char *count = getenv("FAKE_DEVICES");
    if (getenv("FAKE_SOC") == NULL) return 0;
    return count ? (uint32_t)atoi(count) : 1;
}

/* Initialisation and shutdown. */
int aclInit(const char *config) { (void)config; return num_devices() ? OK : NO_DEVICE; }
const char *aclGetRecentErrMsg(void) { return num_devices() ? "" : "fake CANN: no device, FAKE_SOC is not set"; }
const char *aclrtGetSocName(void) { return getenv("FAKE_SOC"); }

/* Devices and contexts. */
int aclrtGetDeviceCount(uint32_t *count) { *count = num_devices(); return OK; }
int aclrtSetDevice(int32_t device) {
    if (device < 0 || (uint32_t)device >= num_devices()) return BAD_DEVICE;
    current_device = device;
    return OK;
}
int aclrtGetDevice(int32_t *device) {
    if (current_device < 0) return NO_CONTEXT;
    *device = current_device;
    return OK;
}
int aclrtResetDevice(int32_t device) { (void)device; current_device = -1; return OK; }
int aclrtGetCurrentContext(void **context) {
    if (current_device < 0) return NO_CONTEXT;
    *context = &contexts[current_device];
    return OK;
}
int aclrtSetCurrentContext(void *context) { current_device = (int)((char *)context - contexts); return OK; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = device == current_device;
    return OK;
}
int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) { *logic = user; return OK; }
int aclGetDeviceCapability(uint32_t device, int info, int64_t *value) { (void)device; (void)info; *value = 8; return OK; }
int aclrtGetDeviceInfo(uint32_t device, int info, int64_t *value) { (void)device; (void)info; *value = 8; return OK; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { (void)device; (void)peer; *can = 0; return OK; }

/* Device memory is host memory, so that a test can read through a device pointer. */
static int take(void **pointer, size_t size) {
    if (atomic_load(&used_bytes) + size > TOTAL_BYTES) return NO_MEMORY;
    if (posix_memalign(pointer, 512, size ? size : 512)) return NO_MEMORY;
    memset(*pointer, 0xA5, size); /* memory that was never written must not contain zeros */
    atomic_fetch_add(&used_bytes, malloc_usable_size(*pointer));
    return OK;
}
static int give(void *pointer) {
    if (pointer) atomic_fetch_sub(&used_bytes, malloc_usable_size(pointer));
    free(pointer);
    return OK;
}
int aclrtMalloc(void **pointer, size_t size, int policy) { (void)policy; return take(pointer, size); }
int aclrtMallocAlign32(void **pointer, size_t size, int policy) { (void)policy; return take(pointer, size); }
int aclrtFree(void *pointer) { return give(pointer); }
int aclrtMallocHost(void **pointer, size_t size) { return posix_memalign(pointer, 64, size ? size : 64) ? NO_MEMORY : OK; }
int aclrtMallocHostWithCfg(void **pointer, uint64_t size, void *config) { (void)config; return aclrtMallocHost(pointer, size); }
int aclrtFreeHost(void *pointer) { free(pointer); return OK; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
    (void)kind;
    size_t used = atomic_load(&used_bytes);
    *total = TOTAL_BYTES;
    *free_bytes = used < *total ? *total - used : 0;
    return OK;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    (void)room; (void)kind;
    memmove(to, from, size);
    return OK;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    int code = stream_wait(stream);
    return code ? code : aclrtMemcpy(to, room, from, size, kind);
}
int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    return aclrtMemcpyAsync(to, room, from, size, kind, stream);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t size) { (void)room; memset(to, value, size); return OK; }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *stream) {
    int code = stream_wait(stream);
    return code ? code : aclrtMemset(to, room, value, size);
}

/* Graphs: each capture ends with its own handle, which is empty. */
struct graph { uint32_t id; };
static _Thread_local struct graph *capturing;
int aclmdlRICaptureBegin(void *stream, int mode) {
    static atomic_uint last;
    (void)stream; (void)mode;
    if (!(capturing = malloc(sizeof *capturing))) return NO_MEMORY;
    capturing->id = ++last;
    return OK;
}
int aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
    (void)stream;
    *status = capturing != NULL;
    if (model) *model = capturing;
    return OK;
}
int aclmdlRIGetId(void *model, uint32_t *id) { *id = ((struct graph *)model)->id; return OK; }
int aclmdlRICaptureEnd(void *stream, void **model) { (void)stream; *model = capturing; capturing = NULL; return OK; }
int aclmdlRIDestroy(void *model) { free(model); return OK; }

/* Settings that torch_npu reads back. */
size_t aclGetCompileoptSize(int option) { (void)option; return 16; }
int aclGetCompileopt(int option, char *value, size_t size) { (void)option; snprintf(value, size, "0"); return OK; }
int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return OK; }
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return OK; }
int aclGetCannAttributeList(const int **list, size_t *count) { static const int none; *list = &none; *count = 0; return OK; }
int aclGetCannAttribute(int attribute, int32_t *value) { (void)attribute; *value = 0; return OK; }
