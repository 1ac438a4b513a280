/* A stand-in for the Ascend driver, with which the real MemFabric runs on a host without NPUs.
 *
 * MemFabric itself provides the store, ranks, registration, 2 MiB pages, translation of addresses,
 * and queues of SDMA tasks.  This file simulates only the driver.  "Device memory" is the process's
 * own memory.  A peer's memory, which MemFabric opens by a name or a share handle, becomes a
 * window: a reserved, inaccessible range of addresses.  SDMA tasks write to it by
 * process_vm_writev.
 *
 * Variables:
 *   PD_DRIVER_LOG    a file to which each call is written, one per line
 *   PD_DRIVER_FAULT  a file that tests write and remove while servers run.  While it exists, its
 *                    first word selects a fault of copies between processes:
 *                      fail N     N copies succeed, and all later ones fail
 *                      slow N     each copy takes N microseconds longer
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "driver.h"

void log_call(const char *call, uint64_t a, uint64_t b, uint64_t c) {
    static FILE *log;
    const char *path = getenv("PD_DRIVER_LOG");
    if (path == NULL || (log == NULL && (log = fopen(path, "a")) == NULL))
        return;
    fprintf(log, "%d %s %lx %lx %lx\n", getpid(), call, (long)a, (long)b, (long)c);
    fflush(log);
}

/* Functions that MemFabric looks up but no transfer needs: each returns success. */
#define SUCCEEDS(name)                                                                             \
    long name(long a, long b, long c) {                                                            \
        log_call(#name, a, b, c);                                                                      \
        return 0;                                                                                  \
    }
#include "succeeds.h"
int g_devmm_mem_dev = -1;

/* Allow all processes to access this one's memory, even if Yama restricts access to ancestors. */
__attribute__((constructor)) static void be_reachable(void) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

/* MemFabric reads the driver's version from a file with a fixed path.  scripts/setup.sh makes its
 * copy of the library call this instead: version.info is next to this library's folder. */
char *pd_driver_realpath(const char *path, char *out) {
    char ours[PATH_MAX];
    Dl_info self;
    if (path && strcmp(path, "/usr/local/Ascend/driver/version.info") == 0 &&
        dladdr(pd_driver_realpath, &self)) {
        snprintf(ours, sizeof ours, "%s", self.dli_fname);
        for (int up = 0; up < 2; up++)
            *strrchr(ours, '/') = 0;
        strncat(ours, "/version.info", sizeof ours - strlen(ours) - 1);
        path = ours;
    }
    return realpath(path, out);
}

char *pd_driver_realpath_chk(const char *path, char *out, size_t size) {
    return pd_driver_realpath(path, out);
}

/* The device: one per process */

int aclrtGetDevice(int *device) { return *device = 0; }
const char *aclrtGetSocName(void) { return "Ascend910_9391"; }
int aclrtGetCurrentContext(void **context) { *context = (void *)1; return 0; }
int rtGetLogicDevIdByUserDevId(int user, int *logic) { *logic = user; return 0; }
int aclrtGetPhyDevIdByLogicDevId(int logic, int *physical) { *physical = logic; return 0; }
int rtDeviceGetBareTgid(uint32_t *pid) { *pid = getpid(); return 0; }
int rtGetP2PStatus(uint32_t device, uint32_t peer, uint32_t *status) { *status = 1; return 0; }

int rtGetDeviceInfo(uint32_t device, int module, int kind, int64_t *value) {
    enum { SUPER_POD_DEVICE_ID = 26 };
    *value = kind == SUPER_POD_DEVICE_ID ? device : 1;
    return 0;
}

int aclrtGetVersion(int *major, int *minor, int *patch) {
    *major = 1, *minor = 15, *patch = 0;
    return 0;
}

int aclsysGetVersionStr(const char *package, char *version) {
    strcpy(version, "8.5.0");
    return 0;
}

/* The device's memory, which is the process's */

int aclrtMalloc(void **address, size_t size, int policy) { return posix_memalign(address, 4096, size); }
int aclrtMallocHost(void **address, size_t size) { return posix_memalign(address, 4096, size); }
int aclrtFree(void *address) { free(address); return 0; }
int aclrtFreeHost(void *address) { free(address); return 0; }
int aclrtCreateStream(void **stream) { *stream = malloc(8); return 0; }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return aclrtCreateStream(stream); }
int aclrtMemset(void *address, size_t most, int value, size_t size) { memset(address, value, size); return 0; }

int drvMemGetAttribute(uint64_t address, uint32_t *attribute) {
    enum { DEVICE_MEMORY = 4 };
    memset(attribute, 0, 20);
    attribute[0] = DEVICE_MEMORY;
    return 0;
}

/* Windows to peers' memory */

struct window { uintptr_t start; size_t size; int pid; uintptr_t there; };
static struct window *windows;
static size_t window_count, window_space;
static pthread_mutex_t window_lock = PTHREAD_MUTEX_INITIALIZER;

static void *reserve(void *wanted, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (wanted ? MAP_FIXED_NOREPLACE : 0);
    void *start = mmap(wanted, size, PROT_NONE, flags, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static int open_window(void *start, size_t size, int pid, uintptr_t there) {
    pthread_mutex_lock(&window_lock);
    if (window_count == window_space) {
        window_space = window_space ? 2 * window_space : 256;
        windows = realloc(windows, window_space * sizeof *windows);
    }
    windows[window_count++] = (struct window){(uintptr_t)start, size, pid, there};
    pthread_mutex_unlock(&window_lock);
    log_call("open_window", (uintptr_t)start, size, there);
    return 0;
}

/* Returns the window's size, 0 if there is none.  A range that is not mapped yet has no process. */
static size_t close_window(const void *start, int is_mapped) {
    size_t size = 0;
    pthread_mutex_lock(&window_lock);
    for (size_t i = 0; i < window_count; i++)
        if (windows[i].start == (uintptr_t)start && (windows[i].pid != 0) == is_mapped) {
            size = windows[i].size;
            windows[i] = windows[--window_count];
            break;
        }
    pthread_mutex_unlock(&window_lock);
    log_call("close_window", (uintptr_t)start, size, 0);
    return size;
}

static int window_at(const void *address, size_t size, struct window *found) {
    uintptr_t at = (uintptr_t)address;
    int is_found = 0;
    pthread_mutex_lock(&window_lock);
    for (size_t i = 0; i < window_count && !is_found; i++)
        if (windows[i].pid && at >= windows[i].start && at + size <= windows[i].start + windows[i].size)
            *found = windows[i], is_found = 1;
    pthread_mutex_unlock(&window_lock);
    return is_found;
}

/* Windows by name */

int rtIpcSetMemoryName(const void *start, uint64_t size, char *name, uint32_t most) {
    log_call("export", (uintptr_t)start, size, 0);
    snprintf(name, most, "%d:%lx:%lx", getpid(), (long)start, (long)size);
    return 0;
}

int rtIpcOpenMemory(void **start, const char *name) {
    int pid;
    long there, size;
    if (sscanf(name, "%d:%lx:%lx", &pid, &there, &size) != 3 || !(*start = reserve(NULL, size)))
        return FAILED;
    return open_window(*start, size, pid, there);
}

int rtIpcCloseMemory(const void *start) {
    size_t size = close_window(start, 1);
    return size ? munmap((void *)start, size) : 0;
}

/* Windows by share handle */

struct share { int pid; uintptr_t start; };

int halMemRetainAllocationHandle(struct share **handle, void *start) {
    log_call("export", (uintptr_t)start, 0, 0);
    *handle = malloc(sizeof **handle);
    **handle = (struct share){getpid(), (uintptr_t)start};
    return 0;
}

int halMemExportToShareableHandleV2(struct share *handle, int kind, uint64_t flags, uint8_t *name) {
    memset(name, 0, 128);
    memcpy(name, handle, sizeof *handle);
    return 0;
}

int halMemTransShareableHandle(int kind, void *name, uint32_t *server, uint64_t *id) {
    *server = 1, *id = 1;
    return 0;
}

int halMemImportFromShareableHandleV2(int kind, uint8_t *name, uint32_t device, struct share **handle) {
    *handle = malloc(sizeof **handle);
    memcpy(*handle, name, sizeof **handle);
    return 0;
}

int halMemAddressReserve(void **start, size_t size, size_t align, void *wanted, uint64_t flags) {
    return (*start = reserve(wanted, size)) ? open_window(*start, size, 0, 0) : FAILED;
}

int halMemAddressFree(void *start) {
    size_t size = close_window(start, 0);
    return size ? munmap(start, size) : 0;
}

int halMemMap(void *start, size_t size, size_t offset, struct share *handle, uint64_t flags) {
    return open_window(start, size, handle->pid, handle->start);
}

int halMemUnmap(void *start) { close_window(start, 1); return 0; }

/* Copies */

int copy_process_memory(int pid, void *here, uintptr_t there, size_t size, int is_write) {
    for (size_t done = 0; done < size;) {
        struct iovec own = {(char *)here + done, size - done};
        struct iovec peers = {(void *)(there + done), size - done};
        ssize_t some = is_write ? process_vm_writev(pid, &own, 1, &peers, 1, 0)
                                : process_vm_readv(pid, &own, 1, &peers, 1, 0);
        if (some <= 0) {
            int why = errno;
            fprintf(stderr,
                    "pd_harness driver: process_vm_%s of %zu bytes with process %d failed: %s%s\n",
                    is_write ? "writev" : "readv", size - done, pid, strerror(why),
                    why == EPERM || why == ENOSYS
                        ? "; a container must allow that call (seccomp, or the capability SYS_PTRACE)"
                        : "");
            return FAILED;
        }
        done += some;
    }
    return 0;
}

int is_copy_allowed(void) {
    static atomic_long done;
    const char *path = getenv("PD_DRIVER_FAULT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char word[8] = "";
    long number = 0;
    if (file == NULL) {
        done = 0;
        return 1;
    }
    int read = fscanf(file, "%7s %ld", word, &number);
    fclose(file);
    if (read == 2 && strcmp(word, "slow") == 0)
        usleep(number);
    return read != 2 || strcmp(word, "fail") != 0 || done++ < number;
}

static int copy(void *to, const void *from, size_t size) {
    struct window peer;
    log_call("copy", (uintptr_t)to, (uintptr_t)from, size);
    int is_write = window_at(to, size, &peer);
    if (!is_write && !window_at(from, size, &peer))
        return copy_process_memory(getpid(), (void *)from, (uintptr_t)to, size, 1);
    if (!is_copy_allowed())
        return FAILED;
    if (is_write)
        return copy_process_memory(peer.pid, (void *)from, peer.there + ((uintptr_t)to - peer.start), size, 1);
    return copy_process_memory(peer.pid, to, peer.there + ((uintptr_t)from - peer.start), size, 0);
}

int aclrtMemcpy(void *to, size_t most, const void *from, size_t size, int kind) { return copy(to, from, size); }
int aclrtMemcpyAsync(void *to, size_t most, const void *from, size_t size, int kind, void *stream) { return copy(to, from, size); }
int rtMemcpyAsyncWithoutCheckKind(void *to, uint64_t most, const void *from, uint64_t size, int kind, void *stream) { return copy(to, from, size); }

int aclrtMemcpyBatch(void **to, size_t *most, void **from, size_t *size, size_t count, void *attributes,
                     size_t *indices, size_t attribute_count, size_t *failed) {
    for (size_t i = 0; i < count; i++)
        if (copy(to[i], from[i], size[i])) {
            *failed = i;
            return FAILED;
        }
    return 0;
}

/* Queues of the SDMA engine: each task runs when it is sent.  A failed task is reported to its
 * stream, as by the real engine. */

enum { QUEUES = 4096, DEPTH = 2048, SDMA_TASK = 11, ADDRESS_ERROR = 6 };
struct queue { uint32_t stream, head, failed_count; uint16_t failed[DEPTH]; };
static struct queue *queues[QUEUES];
static uint32_t next_stream, next_queue;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;

int halResourceIdAlloc(uint32_t device, void *wanted, uint32_t *id) {
    pthread_mutex_lock(&queue_lock);
    *id = next_stream++ % QUEUES;
    pthread_mutex_unlock(&queue_lock);
    return 0;
}

/* wanted: if word 0 is 0 it is a task queue, whose stream is word 10; else a report queue. */
int halSqCqAllocate(uint32_t device, uint32_t *wanted, uint32_t *ids) {
    pthread_mutex_lock(&queue_lock);
    uint32_t id = next_queue++ % QUEUES;
    if (queues[id] == NULL)
        queues[id] = malloc(sizeof *queues[id]);
    if (queues[id] != NULL) {
        uint32_t stream = wanted[0] == 0 ? wanted[10] : UINT32_MAX;
        *queues[id] = (struct queue){.stream = stream};
    }
    ids[0] = ids[1] = id;
    pthread_mutex_unlock(&queue_lock);
    return queues[id] ? 0 : FAILED;
}

struct sent { uint32_t kind, ts, queue; int32_t timeout; uint8_t *tasks; uint32_t count, position; };

int halSqTaskSend(uint32_t device, struct sent *sent) {
    struct queue *queue = queues[sent->queue];
    for (uint32_t i = 0; i < sent->count; i++) {
        uint32_t *task = (uint32_t *)(sent->tasks + 64 * i);
        int status = 0;
        if ((task[0] & 0x3f) == SDMA_TASK) {
            const void *from = (void *)((uintptr_t)task[9] << 32 | task[8]);
            status = copy((void *)((uintptr_t)task[11] << 32 | task[10]), from, task[7]);
        } else {
            status = nic_task(task);
        }
        pthread_mutex_lock(&queue_lock);
        if (status && queue->failed_count < DEPTH)
            queue->failed[queue->failed_count++] = task[1] >> 16;
        queue->head = (queue->head + 1) % DEPTH;
        pthread_mutex_unlock(&queue_lock);
    }
    return 0;
}

struct query { uint32_t kind, ts, queue, reports, what, value[8]; };

int halSqCqQuery(uint32_t device, struct query *query) {
    enum { HEAD = 1, HAS_REPORTS = 4 };
    pthread_mutex_lock(&queue_lock);
    struct queue *queue = queues[query->queue];
    query->value[0] = query->what == HEAD ? queue->head : query->what == HAS_REPORTS ? queue->failed_count != 0 : 0;
    pthread_mutex_unlock(&queue_lock);
    return 0;
}

struct received { uint32_t kind, ts, reports; int32_t timeout; uint8_t *found; uint32_t most, count, stream; };
struct report { uint16_t stream, task; uint32_t error; uint8_t kind, task_kind, rest[22]; };

int halCqReportRecv(uint32_t device, struct received *wanted) {
    pthread_mutex_lock(&queue_lock);
    wanted->count = 0;
    for (int id = 0; id < QUEUES; id++) {
        struct queue *queue = queues[id];
        if (queue == NULL || queue->stream != wanted->stream || queue->failed_count == 0)
            continue;
        uint32_t count = queue->failed_count < wanted->most ? queue->failed_count : wanted->most;
        struct report *reports = (struct report *)wanted->found;
        for (uint32_t i = 0; i < count; i++)
            reports[i] = (struct report){queue->stream, queue->failed[i], ADDRESS_ERROR, 0, SDMA_TASK, {0}};
        memmove(queue->failed, queue->failed + count, (queue->failed_count - count) * sizeof *queue->failed);
        queue->failed_count -= count;
        wanted->count = count;
        break;
    }
    pthread_mutex_unlock(&queue_lock);
    return 0;
}
