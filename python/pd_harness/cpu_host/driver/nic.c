/* A stand-in for an NPU's network card and for HCCP, the library that drives it (ra_*), as far as
 * MemFabric uses them for DEVICE_RDMA, A2's protocol.
 *
 * Two processes find each other by sockets, connect one queue pair each, and address each other's
 * regions by keys.  A write is posted to the pair's send queue, and runs after a task of a stream
 * has rung the pair's doorbell.  After the writes MemFabric posts a read of a value of the peer's
 * into one of its own notifies, for which the stream's next task waits: then all writes are done.
 * Here the doorbell's task itself runs the posted entries by process_vm_writev, and checks, as a
 * card does, that both ends are in regions of the given keys.  A failure breaks the pair: no later
 * entry runs, and the wait for the notify fails after its 5 s.  A pair does not recover.
 *
 * A device's address is derived from its process's pid.  It only names Unix sockets of this host,
 * and uses none of its ports.
 *
 *   PD_DRIVER_SEND_QUEUE   depth of each send queue, instead of MemFabric's (32,767).  Entries are
 *                          then freed at a notify, or 1 s after the last post, so that a longer
 *                          batch always fails; without the variable every 10 ms, as by HCCP. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

/* The card */

union address { struct in_addr v4; struct in6_addr v6; };
struct device { uint32_t number; int family; union address address; };
struct device_options { int mode; uint32_t notify; bool lite_910a, without_thread, lite; };
struct interface_query { uint32_t device, position; bool all; };
struct interface { int family, scope; union address address; struct in_addr mask; char name[256]; };
static void *card; /* its handle, NULL until the card is opened */

static struct in_addr address_of(pid_t pid) { return (struct in_addr){htonl(0x7f400000u | pid)}; }

int ra_get_ifnum(const struct interface_query *asked, uint32_t *count) { *count = 1; return 0; }
int ra_get_ifaddrs(const struct interface_query *asked, struct interface *found, uint32_t *count) {
    *found = (struct interface){.family = AF_INET, .address.v4 = address_of(getpid())};
    snprintf(found->name, sizeof found->name, "eth%u", asked->device);
    *count = 1;
    return 0;
}

int ra_rdev_get_handle(uint32_t device, void **handle) { *handle = card; return 0; }
int ra_rdev_init_v2(struct device_options options, struct device device, void **handle) {
    *handle = card = &card;
    return 0;
}

/* Sockets */

struct endpoint { struct in_addr address; int listener; };
struct link {
    struct link *next;
    struct endpoint *endpoint;
    struct in_addr peer;
    uint32_t port;
    int fd; /* -1 until it is connected */
    bool is_taken;
};
struct listening { struct endpoint *endpoint; uint32_t port, phase, error; };
struct connecting { struct endpoint *endpoint; union address peer; uint16_t port; char tag[192]; };
struct connected { struct endpoint *endpoint; struct link *link; union address peer; int status; char tag[192]; };
struct closing { struct endpoint *endpoint; struct link *link; int linger; };
static struct link *links;
static pthread_mutex_t link_lock = PTHREAD_MUTEX_INITIALIZER;

/* Returns a socket that listens at an address, or is connected to it; -1 on failure. */
static int open_socket(struct in_addr address, uint32_t port, bool is_listener) {
    struct sockaddr_un name = {.sun_family = AF_UNIX}; /* abstract: its path starts with 0 */
    int size = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "pd_driver/%08x:%u",
                        ntohl(address.s_addr), port);
    socklen_t length = sizeof name.sun_family + 1 + size;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int status = is_listener ? bind(fd, (void *)&name, length) : connect(fd, (void *)&name, length);
    if (status == 0 && (!is_listener || listen(fd, 1024) == 0))
        return fd;
    close(fd);
    return -1;
}

static pid_t process_at(int fd) {
    struct ucred peer = {0};
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &(socklen_t){sizeof peer});
    return peer.pid;
}

static void add_link(struct endpoint *endpoint, struct in_addr peer, uint32_t port, int fd) {
    struct link *link = malloc(sizeof *link);
    *link = (struct link){links, endpoint, peer, port, fd, false};
    links = link;
}

int ra_socket_init(int mode, struct device device, struct endpoint **endpoint) {
    *endpoint = malloc(sizeof **endpoint);
    **endpoint = (struct endpoint){device.address.v4, -1};
    return 0;
}

int ra_socket_listen_start(struct listening *asked, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if ((asked[i].endpoint->listener = open_socket(asked[i].endpoint->address, asked[i].port, true)) < 0)
            return FAILED;
    return 0;
}

int ra_socket_listen_stop(struct listening *asked, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        close(asked[i].endpoint->listener);
    return 0;
}

/* The peer may not listen yet, so ra_get_sockets connects. */
int ra_socket_batch_connect(struct connecting *asked, uint32_t count) {
    pthread_mutex_lock(&link_lock);
    for (uint32_t i = 0; i < count; i++)
        add_link(asked[i].endpoint, asked[i].peer.v4, asked[i].port, -1);
    pthread_mutex_unlock(&link_lock);
    return 0;
}

int ra_get_sockets(uint32_t is_client, struct connected *asked, uint32_t count, uint32_t *found) {
    *found = 0;
    pthread_mutex_lock(&link_lock);
    for (struct connected *one = asked; one < asked + count; one++) {
        if (!is_client)
            for (int fd; (fd = accept4(one->endpoint->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;)
                add_link(one->endpoint, address_of(process_at(fd)), 0, fd);
        for (struct link *link = links; link && one->status != 1; link = link->next) {
            if (link->is_taken || link->endpoint != one->endpoint || link->peer.s_addr != one->peer.v4.s_addr)
                continue;
            if (is_client)
                link->fd = open_socket(link->peer, link->port, false);
            if (link->fd >= 0)
                link->is_taken = true, one->link = link, one->status = 1, ++*found;
        }
    }
    pthread_mutex_unlock(&link_lock);
    return 0;
}

int ra_socket_batch_close(struct closing *asked, uint32_t count) {
    pthread_mutex_lock(&link_lock);
    for (uint32_t i = 0; i < count; i++)
        for (struct link **at = &links, *link; (link = *at); at = &link->next)
            if (link == asked[i].link) {
                *at = link->next;
                close(link->fd);
                free(link);
                break;
            }
    pthread_mutex_unlock(&link_lock);
    return 0;
}

/* Regions.  A peer reads a region's entry in this table before it writes to the region. */

enum { REGIONS = 1 << 14 };
struct region { uint64_t key; uintptr_t start; size_t size; };
struct region_info { uintptr_t start; unsigned long long size; int access; uint32_t local_key, remote_key; };
static struct region regions[REGIONS];
static pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER;

int ra_register_mr(const void *handle, struct region_info *info, struct region **region) {
    static uint32_t last_key;
    *region = NULL;
    pthread_mutex_lock(&region_lock);
    for (int tried = 0; *region == NULL && tried < REGIONS; tried++)
        if (regions[++last_key % REGIONS].key == 0 && last_key != 0)
            *region = &regions[last_key % REGIONS];
    if (*region)
        **region = (struct region){info->local_key = info->remote_key = last_key, info->start, info->size};
    pthread_mutex_unlock(&region_lock);
    log_call("region", info->start, info->size, info->local_key);
    return *region ? 0 : FAILED;
}

int ra_deregister_mr(const void *handle, struct region *region) { region->key = 0; return 0; }

static bool holds(const struct region *region, uint32_t key, uintptr_t start, size_t size) {
    return region->key == key && start >= region->start && start + size <= region->start + region->size;
}

/* Notifies */

enum { NOTIFIES = 8192 };
static volatile uint64_t notifies[NOTIFIES];
struct resource { uint32_t kind, ts, id; };
struct detail { uint32_t kind, value; };
struct notify_info { uint32_t ts, id; uint64_t offset; };

/* A notify's offset: the first function is MemFabric 1.0's, the second later releases'. */
int drvNotifyIdAddrOffset(uint32_t device, struct notify_info *info) {
    info->offset = info->id * sizeof *notifies;
    return 0;
}

int halResourceDetailQuery(uint32_t device, const struct resource *notify, struct detail *detail) {
    detail->value = notify->id * sizeof *notifies;
    return 0;
}

int ra_get_notify_base_addr(void *handle, uintptr_t *start, uint64_t *size) {
    *start = (uintptr_t)notifies, *size = sizeof notifies;
    return 0;
}

int ra_get_notify_mr_info(void *handle, struct region_info *info) {
    struct region *region;
    *info = (struct region_info){.start = (uintptr_t)notifies, .size = sizeof notifies};
    return ra_register_mr(handle, info, &region);
}

/* Queue pairs */

enum { DEFAULT_DEPTH = 32767, PAIRS = 4096, READ = 4 };
struct piece { uintptr_t start; uint32_t size, key; };
struct wanted {
    uint64_t id;
    struct piece *here;
    uint16_t count; /* of pieces: 1 */
    uintptr_t there;
    uint32_t there_key, operation;
    int flags;
};
struct entry { struct piece here; uintptr_t there; uint32_t there_key, operation; };
struct doorbell { uint32_t index; unsigned long value; };
struct pair_options { int mode, completions[4]; void *verbs[4]; uint32_t depth; }; /* fields up to the depth */

struct pair {
    char hccps[2048]; /* MemFabric 1.0 writes to HCCP's own fields: a mutex, lists of regions */
    pthread_mutex_t lock;
    struct entry *queue;
    int socket;
    pid_t peer; /* 0 until it is connected */
    struct region *peers_regions;
    uint32_t number, depth, posted, done, polled;
    bool is_broken, is_known_broken; /* known: HCCP has polled the pair's completions */
    int64_t polled_at;
};
static struct pair *pairs[PAIRS]; /* never freed: a doorbell may ring after its pair is destroyed */
static uint32_t pair_count;
static pthread_mutex_t pair_lock = PTHREAD_MUTEX_INITIALIZER;

static int add_pair(uint32_t depth, struct pair **pair) {
    const char *forced = getenv("PD_DRIVER_SEND_QUEUE");
    *pair = calloc(1, sizeof **pair);
    (*pair)->depth = forced ? (uint32_t)atoi(forced) : depth;
    (*pair)->queue = calloc((*pair)->depth, sizeof *(*pair)->queue);
    pthread_mutex_init(&(*pair)->lock, NULL);
    pthread_mutex_lock(&pair_lock);
    bool is_added = pair_count < PAIRS;
    if (is_added)
        pairs[(*pair)->number = pair_count++] = *pair;
    pthread_mutex_unlock(&pair_lock);
    log_call("pair", (*pair)->number, (*pair)->depth, depth);
    return is_added ? 0 : FAILED;
}

int ra_qp_create(void *handle, int flag, int mode, struct pair **pair) { return add_pair(DEFAULT_DEPTH, pair); }
int ra_qp_create_with_attrs(void *handle, const struct pair_options *options, struct pair **pair) {
    return add_pair(options->depth, pair);
}

int ra_qp_destroy(struct pair *pair) {
    pthread_mutex_lock(&pair->lock);
    pair->is_broken = pair->is_known_broken = true;
    free(pair->queue);
    pair->queue = NULL;
    pthread_mutex_unlock(&pair->lock);
    return 0;
}

/* Sends the other end the address of this end's table of regions. */
int ra_qp_connect_async(struct pair *pair, const struct link *link) {
    struct region *ours = regions;
    pair->socket = link->fd;
    return send(link->fd, &ours, sizeof ours, MSG_NOSIGNAL) == sizeof ours ? 0 : FAILED;
}

int ra_get_qp_status(struct pair *pair, int *status) {
    struct region *theirs;
    if (!pair->peer && recv(pair->socket, &theirs, sizeof theirs, 0) == sizeof theirs) {
        pair->peers_regions = theirs;
        pair->peer = process_at(pair->socket);
    }
    *status = pair->peer != 0;
    return 0;
}

static void poll_completions(struct pair *pair) {
    pair->polled = pair->done;
    pair->is_known_broken = pair->is_broken;
}

/* HCCP leaves two entries empty, and rejects posts to a pair that it knows to be broken. */
int ra_send_wr_v2(struct pair *pair, const struct wanted *wanted, struct doorbell *doorbell) {
    bool is_forced = getenv("PD_DRIVER_SEND_QUEUE") != NULL;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    int64_t now = time.tv_sec * 1000LL + time.tv_nsec / 1000000;
    pthread_mutex_lock(&pair->lock);
    if (now - pair->polled_at >= (is_forced ? 1000 : 10))
        poll_completions(pair), pair->polled_at = now;
    bool is_full = pair->posted - pair->polled + 2 >= pair->depth;
    int status = pair->is_known_broken ? -EINVAL : is_full ? -ENOMEM : 0;
    if (status == 0) {
        pair->queue[pair->posted++ % pair->depth] =
            (struct entry){*wanted->here, wanted->there, wanted->there_key, wanted->operation};
        *doorbell = (struct doorbell){0, (unsigned long)pair->number << 32 | pair->posted};
        pair->polled_at = is_forced ? now : pair->polled_at;
    }
    pthread_mutex_unlock(&pair->lock);
    return status;
}

static bool is_done(const struct pair *pair, const struct entry *entry) {
    struct piece here = entry->here;
    struct region there;
    struct iovec copy = {&there, sizeof there};
    struct iovec original = {&pair->peers_regions[entry->there_key % REGIONS], sizeof there};
    log_call(entry->operation == READ ? "read" : "write", entry->there, here.start, here.size);
    return holds(&regions[here.key % REGIONS], here.key, here.start, here.size) &&
           process_vm_readv(pair->peer, &copy, 1, &original, 1, 0) == sizeof there &&
           holds(&there, entry->there_key, entry->there, here.size) &&
           (entry->operation == READ || is_copy_allowed()) &&
           copy_process_memory(pair->peer, (void *)here.start, entry->there, here.size, entry->operation != READ) == 0;
}

static void ring(uint32_t number, uint32_t posted) {
    struct pair *pair = pairs[number];
    pthread_mutex_lock(&pair->lock);
    while ((int32_t)(posted - pair->done) > 0 && pair->queue) {
        const struct entry *entry = &pair->queue[pair->done++ % pair->depth];
        pair->is_broken = pair->is_broken || !is_done(pair, entry);
        if (entry->operation == READ) /* the read into the notify, a batch's last entry */
            poll_completions(pair);
    }
    pthread_mutex_unlock(&pair->lock);
}

static int wait_for(uint32_t notify, uint32_t seconds) {
    if (notifies[notify] == 0)
        sleep(seconds);
    if (notifies[notify] == 0)
        return FAILED;
    notifies[notify] = 0;
    return 0;
}

int nic_task(const uint32_t *task) {
    enum { NOTIFY_WAIT = 7, WRITE_VALUE = 8 };
    if ((task[0] & 0x3f) == NOTIFY_WAIT)
        return wait_for(task[2] & 0x1fff, task[4]);
    if ((task[0] & 0x3f) == WRITE_VALUE)
        ring(task[9], task[8]);
    return 0;
}

/* Host memory that the card may access, at the same address as on the host. */

int halHostRegister(void *start, uint64_t size, uint32_t flag, uint32_t device, void **on_device) {
    *on_device = start;
    return 0;
}

int halMemAlloc(void **start, unsigned long long size, unsigned long long flag) {
    return posix_memalign(start, 1 << 21, size);
}

int halMemFree(void *start) { free(start); return 0; }
