/* Instances, their connections, and when each connection writes next. */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_INSTANCES 64

struct instance {
    char id[65];
    int port, listener;
    bool has_key;
    uint8_t key[32];
    char key_id[17];
    char *info, *load;
};

enum kind { NOTHING, STREAM, WHOLE, LOAD_WATCH, BEAT_WATCH };
enum proof { UNPROVEN, CLAIMED, OPEN };

struct connection {
    int fd;
    struct instance *instance;
    enum proof proof;
    uint8_t expected_mac[32];
    struct buffer in, out;
    bool wants_out;
    enum kind kind; /* What it writes next, at `due_ns`. */
    int64_t due_ns, interval_ns;
    int heap_index; /* -1: not in the heap. */
    int sequence, tokens, burst, cmpl;
    bool begun, gives_ids, in_steps, is_chat, by_hand;
    int text;     /* Section of the texts; 0: tokens are numbered. */
    int64_t turn; /* By which what is written by hand takes its turn. */
    char name[72];
    struct buffer answer;
    struct connection *previous, *next;
};

static struct instance instances[MAX_INSTANCES];
static int instance_count, epoll_fd;
static struct connection *connections; /* All open ones. */
static struct connection *closed;      /* Freed after the events of one wait. */
static struct connection **heap;       /* By `due_ns`. */
static int heap_size, heap_room;

static void heap_set(int i, struct connection *c)
{
    heap[i] = c;
    c->heap_index = i;
}

static void heap_sift(int i)
{
    struct connection *c = heap[i];
    for (; i > 0 && heap[(i - 1) / 2]->due_ns > c->due_ns; i = (i - 1) / 2)
        heap_set(i, heap[(i - 1) / 2]);
    for (int child; (child = 2 * i + 1) < heap_size; i = child) {
        if (child + 1 < heap_size && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (heap[child]->due_ns >= c->due_ns)
            break;
        heap_set(i, heap[child]);
    }
    heap_set(i, c);
}

static void unschedule(struct connection *c)
{
    int i = c->heap_index;
    if (i < 0)
        return;
    c->heap_index = -1;
    struct connection *last = heap[--heap_size];
    if (last != c) {
        heap_set(i, last);
        heap_sift(i);
    }
}

static void schedule(struct connection *c, int64_t due_ns)
{
    c->due_ns = due_ns;
    if (c->heap_index < 0) {
        if (heap_size == heap_room) {
            heap_room = heap_room * 2 + 64;
            if (!(heap = realloc(heap, heap_room * sizeof *heap)))
                fail("realloc");
        }
        heap_set(heap_size++, c);
    }
    heap_sift(c->heap_index);
}

static void end_connection(struct connection *c, bool reset)
{
    if (c->fd < 0)
        return;
    if (reset) {
        struct linger hard = {1, 0};
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    }
    close(c->fd);
    c->fd = -1;
    unschedule(c);
    drop(&c->in);
    drop(&c->out);
    drop(&c->answer);
    if (c->previous)
        c->previous->next = c->next;
    else
        connections = c->next;
    if (c->next)
        c->next->previous = c->previous;
    c->next = closed;
    closed = c;
}

static void want(struct connection *c, bool out)
{
    if (c->wants_out == out)
        return;
    c->wants_out = out;
    struct epoll_event e = {EPOLLIN | (out ? EPOLLOUT : 0), {.ptr = c}};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

/* False: the connection has ended. */
static bool flush(struct connection *c)
{
    size_t sent = 0;
    while (sent < c->out.size) {
        ssize_t n = send(c->fd, c->out.at + sent, c->out.size - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) {
            end_connection(c, true);
            return false;
        }
        sent += n;
    }
    c->out.size -= sent;
    memmove(c->out.at, c->out.at + sent, c->out.size);
    want(c, c->out.size > 0);
    return true;
}

static void put_chunk(struct connection *c, const char *data, size_t size)
{
    char line[24];
    put(&c->out, line, sprintf(line, "%zx\r\n", size));
    put(&c->out, data, size);
    put(&c->out, "\r\n", 2);
}
