/* Load client: N streams at a time from one epoll loop, each checked to its last byte.
 *
 *     load OPTION VALUE ...          see `options` below; the result is one JSON object on stdout
 *
 * A slot sends a request, reads its events, and with `restart` sends the next one on the same
 * connection until the window ends; then all streams run to their end. In the first round with
 * `restart` the streams have lengths spread over 1..tokens, so that later starts are spread evenly.
 *
 * A stream is whole when its answer is 200, its token numbers are 0, 1, ... without gap or repeat,
 * it has a finish reason at the last token, [DONE], and the end of the HTTP body. Within the
 * window, which begins after the warm-up, the times of tokens and requests and the CPU of the
 * processes `pids` are counted. A line {"open":N} is printed when all slots have their burst.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_PIDS 64
#define MAX_EVENT_BYTES (1 << 20)
#define SECOND 1000000000ll

static long port, streams = 1, tokens = 16, rate = 20000, burst = 1, prefill_us, prompt_bytes = 256;
static long warm_ms = 1000, window_ms = 5000, spread_ms, pause_us, limit_ms = 120000, restart = 1;
static long keyed, sources = 1, seed, steps, model;

static const struct {
    const char *name;
    long *value;
} options[] = {
    {"port", &port},                 /* of the server on 127.0.0.1 */
    {"streams", &streams},           /* at a time */
    {"tokens", &tokens},             /* max_tokens of each */
    {"rate", &rate},                 /* tokens per 1,000 s that the engine sends */
    {"burst", &burst},               /* tokens that it sends at once at the start */
    {"prefill_us", &prefill_us},     /* until it begins */
    {"prompt_bytes", &prompt_bytes}, /* of text */
    {"warm_ms", &warm_ms},           /* until the window */
    {"window_ms", &window_ms},       /* its length */
    {"spread_ms", &spread_ms},       /* over which the first streams start */
    {"pause_us", &pause_us},         /* of a slot between two streams */
    {"limit_ms", &limit_ms},         /* streams that are open then count as broken */
    {"restart", &restart},           /* 0: each slot has one stream */
    {"keyed", &keyed},               /* 1: each stream has an Idempotency-Key */
    {"sources", &sources},           /* local addresses, 127.0.0.1 and so on */
    {"steps", &steps},               /* 1: tokens of all streams come together */
    {"model", &model},               /* 0: bench; else bench-N */
    {"seed", &seed},                 /* of prompts and keys */
};

enum part { HEAD, SIZE, DATA, DATA_END, TRAILER, PLAIN, IDLE };

struct slot {
    int fd, number;
    enum part part;
    bool reused, was_burst, said_done, finished, closes, waits;
    int64_t at_ns, sent_ns; /* When it is to start; when it did. */
    int64_t chunk_left;
    int tokens, next_token;
    char *text; /* The head, or an event, until it is whole. */
    size_t size, room;
};

static struct slot *slots;
static int epoll_fd, pid_count, open_bursts, waiting_first;
static int pids[MAX_PIDS];
static int64_t begun_ns, window_ns, window_end_ns;
static long whole, broken, started, reconnects, window_tokens, window_whole;
static char first_fault[400];
static uint64_t cpu_before_ns[MAX_PIDS], cpu_after_ns[MAX_PIDS];
static long rss_before_kb[MAX_PIDS], rss_after_kb[MAX_PIDS];
static long held_after;

struct samples {
    uint32_t *at; /* In units of 100 ns. */
    size_t size, room;
};
static struct samples ttft, transit;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static void sample(struct samples *s, int64_t ns)
{
    if (s->size == s->room) {
        s->room = s->room * 2 + 1024;
        if (!(s->at = realloc(s->at, s->room * sizeof *s->at)))
            fail("realloc");
    }
    s->at[s->size++] = ns < 0 ? 0 : (uint32_t)(ns / 100);
}

/* Processes. */

static uint64_t cpu_ns_of(int pid)
{
    char path[64], line[128];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        char stat[400];
        snprintf(stat, sizeof stat, "%s/%s/schedstat", path, task->d_name);
        FILE *file = isdigit((unsigned char)*task->d_name) ? fopen(stat, "r") : NULL;
        if (file && fgets(line, sizeof line, file))
            sum += strtoull(line, NULL, 10);
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return sum;
}

static long rss_kb_of(int pid)
{
    char path[64], line[256];
    long kb = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, "VmRSS:", 6))
            kb = strtol(line + 6, NULL, 10);
    if (file)
        fclose(file);
    return kb;
}

/* Streams. */

static void shut(struct slot *s)
{
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
    s->reused = false;
}

static void wait_for_start(struct slot *s, int64_t at_ns)
{
    s->part = IDLE;
    s->waits = restart ? at_ns < window_end_ns : !s->sent_ns;
    s->at_ns = at_ns;
    free(s->text);
    s->text = NULL;
    s->size = s->room = 0;
}

static void end_stream(struct slot *s, const char *fault)
{
    if (!s->was_burst && !fault)
        fault = "ended before its first tokens";
    if (fault) {
        if (!broken++)
            snprintf(first_fault, sizeof first_fault, "stream %d at token %d of %d: %s", s->number,
                     s->next_token, s->tokens, fault);
        shut(s);
    } else {
        whole++;
        window_whole += now_ns() >= window_ns && now_ns() < window_end_ns;
        s->reused = true;
        if (s->closes)
            shut(s);
    }
    open_bursts -= s->was_burst;
    wait_for_start(s, now_ns() + pause_us * 1000);
}

static bool connect_slot(struct slot *s)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct epoll_event e = {EPOLLIN, {.ptr = s}};
    int on = 1;
    if ((s->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0)
        fail("socket");
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (sources > 1) {
        setsockopt(s->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
        address.sin_addr.s_addr = htonl(0x7f000001 + s->number % sources);
        if (bind(s->fd, (struct sockaddr *)&address, sizeof address))
            fail("bind");
    }
    address.sin_addr.s_addr = htonl(0x7f000001);
    address.sin_port = htons(port);
    if (connect(s->fd, (struct sockaddr *)&address, sizeof address)) {
        shut(s);
        return false;
    }
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, s->fd, &e);
    return true;
}

static void send_request(struct slot *s)
{
    static char body[1 << 16], request[1 << 17];
    static uint64_t random_state;
    int n = model ? sprintf(body, "{\"model\":\"bench-%ld\",\"prompt\":\"", model)
                  : sprintf(body, "{\"model\":\"bench\",\"prompt\":\"");
    if (!random_state)
        random_state = 88172645463325252ull + seed * 7919;
    for (long i = 0; i < prompt_bytes; i++) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        body[n++] = i % 5 == 4 ? ' ' : 'a' + random_state % 26;
    }
    n += sprintf(body + n,
                 "\",\"max_tokens\":%d,\"temperature\":0,\"stream\":true,\"ignore_eos\":true,"
                 "\"user\":\"%ld,%ld,%ld,%ld\"}",
                 s->tokens, rate, burst, prefill_us, steps);
    char key[64] = "";
    if (keyed)
        sprintf(key, "Idempotency-Key: \"%lx-%lx-%llx\"\r\n", seed, started,
                (unsigned long long)random_state);
    int size = sprintf(request,
                       "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%ld\r\n"
                       "Content-Type: application/json\r\n%sContent-Length: %d\r\n\r\n",
                       port, key, n);
    memcpy(request + size, body, n);
    size += n;
    s->part = HEAD;
    s->next_token = 0;
    s->chunk_left = 0;
    s->was_burst = s->said_done = s->finished = s->closes = s->waits = false;
    if (s->fd < 0 && !connect_slot(s)) {
        started++;
        end_stream(s, "no connection");
        return;
    }
    s->sent_ns = now_ns();
    started++;
    if (send(s->fd, request, size, MSG_NOSIGNAL) != size)
        end_stream(s, "request not sent");
}

static void take_tokens(struct slot *s, const char *text, int64_t now)
{
    /* k7+1.NS; once or several times, as joined events have it. */
    char *at = strstr(text, "\"text\":\"");
    if (!at) {
        end_stream(s, "an event without text");
        return;
    }
    for (at += 8; *at == 'k';) {
        long first = strtol(at + 1, &at, 10), count = *at == '+' ? strtol(at + 1, &at, 10) : 0;
        int64_t stamp = *at == '.' ? strtoll(at + 1, &at, 10) : 0;
        if (*at++ != ';' || first != s->next_token || count < 1) {
            end_stream(s, "a token is missing, repeated or damaged");
            return;
        }
        if (!s->next_token && s->sent_ns >= window_ns && s->sent_ns < window_end_ns)
            sample(&ttft, now - s->sent_ns);
        s->next_token += count;
        if (now >= window_ns && now < window_end_ns) {
            window_tokens += count;
            sample(&transit, now - stamp);
        }
    }
    if (strstr(at, "\"finish_reason\":\"length\""))
        s->finished = true;
    if (!s->was_burst && s->next_token >= (burst < s->tokens ? burst : s->tokens)) {
        s->was_burst = true;
        if (++open_bursts == streams && waiting_first) {
            waiting_first = 0;
            printf("{\"open\":%d}\n", open_bursts);
            fflush(stdout);
        }
    }
}

/* One event, without the empty line at its end. */
static void take_event(struct slot *s, char *event, int64_t now)
{
    char *data = !strncmp(event, "data:", 5) ? event : strstr(event, "\ndata:");
    if (!data)
        return; /* A comment. */
    data += *data == '\n' ? 6 : 5;
    data += *data == ' ';
    if (!strcmp(data, "[DONE]"))
        s->said_done = true;
    else if (strstr(data, "\"error\""))
        end_stream(s, data);
    else
        take_tokens(s, data, now);
}

static void append(struct slot *s, const char *data, size_t size)
{
    if (s->size + size + 1 > s->room) {
        s->room = (s->size + size) * 3 / 2 + 64;
        if (!(s->text = realloc(s->text, s->room)))
            fail("realloc");
    }
    memcpy(s->text + s->size, data, size);
    s->size += size;
    s->text[s->size] = 0;
}

/* Bytes of the body; false: the stream has ended. */
static bool take_body(struct slot *s, const char *data, size_t size, int64_t now)
{
    append(s, data, size);
    char *at = s->text;
    for (char *end; (end = memmem(at, s->text + s->size - at, "\n\n", 2)); at = end + 2) {
        *end = 0;
        take_event(s, at, now);
        if (s->part == IDLE)
            return false;
    }
    s->size -= at - s->text;
    memmove(s->text, at, s->size + 1);
    if (s->size > MAX_EVENT_BYTES) {
        end_stream(s, "an event without an end");
        return false;
    }
    return true;
}

static void end_body(struct slot *s)
{
    const char *fault = NULL;
    if (s->size)
        fault = "the body ends within an event";
    else if (s->next_token != s->tokens)
        fault = "tokens are missing at the end";
    else if (!s->finished)
        fault = "no finish reason";
    else if (!s->said_done)
        fault = "no [DONE]";
    end_stream(s, fault);
}

/* False: the stream has ended. `body` is what has come of it, `size` bytes. */
static bool take_head(struct slot *s, const char *body, size_t size)
{
    char *end = strstr(s->text, "\r\n\r\n");
    end[2] = 0;
    s->closes = strcasestr(s->text, "\r\nconnection: close") || !strncmp(s->text, "HTTP/1.0", 8);
    if (strncmp(s->text, "HTTP/1.1 200", 12)) {
        char fault[300];
        snprintf(fault, sizeof fault, "%.40s %.*s", s->text + 9, size < 250 ? (int)size : 250,
                 body);
        end_stream(s, fault);
        return false;
    }
    if (strcasestr(s->text, "\r\ncontent-length:")) {
        end_stream(s, "an answer that is no stream");
        return false;
    }
    s->part = strcasestr(s->text, "\r\ntransfer-encoding: chunked") ? SIZE : PLAIN;
    s->size = 0;
    return true;
}

/* Keeps a line of the head, of which the beginning may have come before; its end, NULL: not yet. */
static const char *line_end(struct slot *s, const char *at, const char *end)
{
    const char *newline = memchr(at, '\n', end - at);
    append(s, at, (newline ? newline + 1 : end) - at);
    return newline ? newline + 1 : NULL;
}

static void take(struct slot *s, const char *at, const char *end, int64_t now)
{
    while (at < end && s->part != IDLE) {
        switch (s->part) {
        case HEAD:
            if (!(at = line_end(s, at, end)))
                return;
            if (s->size >= 4 && !memcmp(s->text + s->size - 4, "\r\n\r\n", 4) &&
                !take_head(s, at, end - at))
                return;
            break;
        case SIZE:
        case TRAILER: {
            const char *newline = memchr(at, '\n', end - at);
            size_t size = (newline ? newline : end) - at;
            /* A size that is cut off by the end of a read goes on in `chunk_left`. */
            for (size_t i = 0; i < size && s->part == SIZE; i++)
                if (isxdigit((unsigned char)at[i]))
                    s->chunk_left =
                        s->chunk_left * 16 +
                        (isdigit((unsigned char)at[i]) ? at[i] - '0' : (at[i] | 32) - 'a' + 10);
                else
                    break;
            at += size + (newline != NULL);
            if (!newline)
                return;
            if (s->part == TRAILER)
                end_body(s);
            else
                s->part = s->chunk_left ? DATA : TRAILER;
            break;
        }
        case DATA: {
            size_t size = end - at < s->chunk_left ? (size_t)(end - at) : (size_t)s->chunk_left;
            s->chunk_left -= size;
            if (!take_body(s, at, size, now))
                return;
            at += size;
            if (!s->chunk_left)
                s->part = DATA_END;
            break;
        }
        case DATA_END:
            if (*at++ == '\n')
                s->part = SIZE;
            break;
        case PLAIN:
            take_body(s, at, end - at, now);
            return;
        case IDLE:
            break;
        }
    }
}

static void receive(struct slot *s)
{
    static char chunk[1 << 17];
    ssize_t n = recv(s->fd, chunk, sizeof chunk, MSG_DONTWAIT);
    int64_t now = now_ns();
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0 && s->part != IDLE) {
        take(s, chunk, chunk + n, now);
    } else if (n > 0) {
        broken++;
        shut(s);
    } else if (s->part == IDLE) {
        shut(s); /* A kept connection was closed. */
    } else if (s->part == PLAIN && n == 0) {
        s->closes = true;
        end_body(s);
    } else if (s->part == HEAD && s->reused && !s->size) {
        reconnects++; /* It was closed while the request was on its way. */
        started--;
        shut(s);
        send_request(s);
    } else {
        end_stream(s, n < 0 ? strerror(errno) : "the connection ended");
    }
}

/* Result. */

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void print_samples(const char *name, struct samples *s)
{
    static const double shares[] = {0.5, 0.9, 0.99, 0.999};
    static const char *const names[] = {"p50", "p90", "p99", "p999"};
    if (s->size)
        qsort(s->at, s->size, sizeof *s->at, compare);
    printf("\"%s\":{\"count\":%zu", name, s->size);
    for (int i = 0; i < 4 && s->size; i++)
        printf(",\"%s\":%.1f", names[i], s->at[(size_t)((s->size - 1) * shares[i])] / 10.0);
    if (s->size)
        printf(",\"max\":%.1f", s->at[s->size - 1] / 10.0);
    printf("},");
}

static void print_result(void)
{
    printf("{\"started\":%ld,\"whole\":%ld,\"broken\":%ld,\"reconnects\":%ld,", started, whole,
           broken, reconnects);
    printf("\"fault\":\"");
    for (char *p = first_fault; *p; p++)
        putchar(*p == '"' || *p == '\\' || (unsigned char)*p < 32 ? '\'' : *p);
    printf("\",\"window_s\":%.6f,\"window_tokens\":%ld,\"window_whole\":%ld,\"held\":%ld,",
           window_ms / 1e3, window_tokens, window_whole, held_after);
    print_samples("ttft_us", &ttft);
    print_samples("transit_us", &transit);
    printf("\"processes\":[");
    for (int i = 0; i < pid_count; i++)
        printf("%s{\"pid\":%d,\"cpu_s\":%.6f,\"rss_before_kb\":%ld,\"rss_kb\":%ld}", i ? "," : "",
               pids[i], (cpu_after_ns[i] - cpu_before_ns[i]) / 1e9, rss_before_kb[i],
               rss_after_kb[i]);
    printf("]}\n");
}

static void read_arguments(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        size_t n = 0, count = sizeof options / sizeof *options;
        if (!strcmp(argv[i], "pids")) {
            for (char *at = argv[i + 1]; *at && pid_count < MAX_PIDS; at += *at == ',')
                pids[pid_count++] = (int)strtol(at, &at, 10);
            continue;
        }
        while (n < count && strcmp(options[n].name, argv[i]))
            n++;
        char *end = argv[i + 1];
        if (n < count)
            *options[n].value = strtol(argv[i + 1], &end, 10);
        if (end == argv[i + 1] || *end) {
            fprintf(stderr, "load: not an option and a number: %s %s\n", argv[i], argv[i + 1]);
            exit(2);
        }
    }
    if (argc % 2 == 0 || !port || streams < 1 || tokens < 1 || prompt_bytes > 60000) {
        fprintf(stderr, "load: needs pairs of option and value, port among them\n");
        exit(2);
    }
}

static void start_slots(void)
{
    if (!(slots = calloc(streams, sizeof *slots)))
        fail("calloc");
    waiting_first = 1;
    for (long i = 0; i < streams; i++) {
        slots[i].fd = -1;
        slots[i].number = (int)i;
        slots[i].tokens = restart && streams > 1 ? (int)(1 + i * 7919 % streams * tokens / streams)
                                                 : (int)tokens;
        wait_for_start(&slots[i], begun_ns + spread_ms * 1000000 * i / streams);
    }
}

/* Sends what is due; the time of the next start, 0 if no slot waits. */
static int64_t start_due(bool *is_busy)
{
    int64_t next_ns = 0, now = now_ns();
    *is_busy = false;
    for (long i = 0; i < streams; i++) {
        struct slot *s = &slots[i];
        if (s->waits && s->at_ns <= now) {
            if (restart && now >= window_end_ns) {
                s->waits = false;
                continue;
            }
            if (s->sent_ns)
                s->tokens = (int)tokens;
            send_request(s);
        }
        if (s->waits && (!next_ns || s->at_ns < next_ns))
            next_ns = s->at_ns;
        *is_busy |= s->part != IDLE || s->waits;
    }
    return next_ns;
}

static void mark_window(int64_t now)
{
    static int marks;
    if (!marks && now >= window_ns) {
        marks = 1;
        for (int i = 0; i < pid_count; i++)
            cpu_before_ns[i] = cpu_ns_of(pids[i]);
    }
    if (marks == 1 && now >= window_end_ns) {
        marks = 2;
        for (int i = 0; i < pid_count; i++)
            cpu_after_ns[i] = cpu_ns_of(pids[i]), rss_after_kb[i] = rss_kb_of(pids[i]);
        held_after = open_bursts;
    }
}

int main(int argc, char **argv)
{
    struct epoll_event events[512];
    struct rlimit limit;
    bool is_busy = true;
    read_arguments(argc, argv);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int i = 0; i < pid_count; i++)
        rss_before_kb[i] = rss_kb_of(pids[i]);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    begun_ns = now_ns();
    window_ns = begun_ns + warm_ms * 1000000;
    window_end_ns = window_ns + window_ms * 1000000;
    start_slots();
    int64_t limit_ns = begun_ns + limit_ms * 1000000, look_ns = 0, next_ns = 0, now;
    while ((now = now_ns()) < limit_ns) {
        mark_window(now);
        /* All slots are looked at when one may start, or to see the end. */
        if (now >= look_ns || (next_ns && now >= next_ns)) {
            next_ns = start_due(&is_busy);
            look_ns = now_ns() + 20000000;
        }
        if (!is_busy && now >= window_end_ns)
            break;
        int64_t until_ns = next_ns && next_ns < look_ns ? next_ns : look_ns;
        int64_t left_ns = until_ns - now_ns();
        struct timespec left = {0, left_ns > 0 ? left_ns : 0};
        int count = epoll_pwait2(epoll_fd, events, 512, &left, NULL);
        for (int i = 0; i < count; i++) {
            struct slot *s = events[i].data.ptr;
            if (s->fd < 0)
                continue;
            receive(s);
            if (s->waits && (!next_ns || s->at_ns < next_ns))
                next_ns = s->at_ns;
        }
    }
    mark_window(now_ns());
    for (long i = 0; i < streams; i++)
        if (slots[i].part != IDLE)
            end_stream(&slots[i], "still open at the limit of time");
    print_result();
    return 0;
}
