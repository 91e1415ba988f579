/* Mock engines: all instances of a cluster in one process and one epoll loop.
 *
 *     engine INSTANCES [TEXTS]
 *
 * INSTANCES is a file with three lines per instance:
 *
 *     instance ID PORT KEY KEY_ID     the key of its door in hexadecimal; "-": it is a vLLM and has
 *                                     none; port 0 is any free one, "later" waits for "listen ID"
 *     info JSON                       answer of GET /kvrs/v1/instance
 *     load JSON                       answer of GET /kvrs/v1/load
 *
 * Each instance serves completions as prefill instance, decode instance and plain engine: a request
 * with "stream":true gets events, any other a whole answer with prompt ids and kv_transfer_params.
 * The field "user" of a request sets its pace: "RATE,BURST,PREFILL,STEPS,TEXT", tokens per 1,000 s,
 * tokens sent at once at the start (100 to an event), microseconds until an answer begins; STEPS is 1
 * where the tokens of all streams come together after that, as of an engine that computes batches. A
 * negative RATE leaves them to the commands "answer" and "step". A token's text is kSEQ+COUNT.NS; :
 * its number in the stream, how many tokens the event has, when it was sent on the monotonic clock in
 * ns. With TEXT above 0 it is the next line of that section of TEXTS, a file of sections that empty
 * lines separate: each line is the part of a choice that a token adds, as JSON.
 *
 * Commands on stdin, each answered by one line on stdout:
 *
 *     listen ID     take connections at its port
 *     kill ID       reset all its connections and take no more, as by SIGKILL
 *     calls         calls of later attempts than the first, since the start or the last kill
 *     wait A S      answer when A whole answers and S streams wait for a step
 *     answer N      write the whole answers of the N requests that have waited for longest
 *     step N        write a token of each of the N streams that have waited for longest
 *     end           end the process; so does the end of stdin
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Each stands on the ones before it. */
#include "text.h"
#include "connections.h"
#include "sha256.h"

#define MAX_REQUEST_BYTES (64u << 20)
#define IDS_PER_EVENT 100
#define PREFIX "KVRS-PROOF/1 "
#define JSON_HEAD "HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"

#define MAX_TEXTS 16

static int completions;

/* Lines of the sections of TEXTS; the first section is 1. */
static struct { char **lines; int count; } texts[MAX_TEXTS + 1];
static time_t created;

/* Calls with an attempt above 1, since the last kill. */
static uint64_t *recovered;
static int64_t *recovered_ns;
static int recovered_count, recovered_room;

/* What "wait" waits for; -1: nothing. And how often anything was left to the other two. */
static int awaited_answers = -1, awaited_streams;
static int64_t turns;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool answer_json(struct connection *c, const char *body, size_t size)
{
    char head[160];
    int n = sprintf(head, JSON_HEAD "Content-Length: %zu\r\n\r\n", size);
    put(&c->out, head, n);
    put(&c->out, body, size);
    return flush(c);
}

static bool answer_status(struct connection *c, const char *status)
{
    char head[160];
    int n = sprintf(head, "HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n", status);
    put(&c->out, head, n);
    return flush(c);
}

/* Events. */

static int token_id(int sequence)
{
    return (int)((uint32_t)sequence * 2654435761u >> 8) % 50000 + 3;
}

static void put_event_head(struct buffer *b, struct connection *c, const char *object)
{
    bool is_vllm = !c->instance->has_key;
    print(b, "data: {\"id\":\"%s\",", c->name);
    if (is_vllm)
        print(b, "\"object\":\"%s\",", object);
    print(b, "\"created\":%lld,\"model\":\"bench\",\"choices\":[{%s", (long long)created,
          is_vllm ? "\"index\":0," : "");
}

/* As the embedded engine writes it, or a vLLM, which names the prompt's ids in the first one. */
static void put_event(struct buffer *b, struct connection *c, int count, bool is_last)
{
    bool is_vllm = !c->instance->has_key;
    const char *object = c->is_chat ? "chat.completion.chunk" : "text_completion";
    put_event_head(b, c, object);
    if (c->is_chat && c->sequence == 0) {
        print(b, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                 "\"finish_reason\":null}]");
        if (c->gives_ids && c->answer.size) {
            print(b, ",\"prompt_token_ids\":");
            put(b, c->answer.at, c->answer.size);
        }
        print(b, is_vllm ? "}\n\n" : ",\"object\":\"%s\"}\n\n", object);
        put_event_head(b, c, object);
    }
    if (c->text) {
        const char *line = texts[c->text].lines[c->sequence % texts[c->text].count];
        put(b, line, strlen(line));
    } else {
        print(b, "\"text\":\"k%d+%d.%lld;\"", c->sequence, count, (long long)now_ns());
    }
    print(b, ",%s\"logprobs\":null,\"finish_reason\":%s%s", is_vllm ? "" : "\"index\":0,",
          is_last ? "\"length\"" : "null", c->is_chat ? "" : ",\"stop_reason\":null");
    if (c->gives_ids && is_vllm && !c->is_chat) {
        print(b, ",\"prompt_token_ids\":");
        if (c->answer.size)
            put(b, c->answer.at, c->answer.size);
        else
            print(b, "null");
        drop(&c->answer);
    }
    if (c->gives_ids) {
        print(b, ",\"token_ids\":[%d", token_id(c->sequence));
        for (int i = 1; i < count; i++)
            print(b, ",%d", token_id(c->sequence + i));
        print(b, "]");
    }
    print(b, is_vllm ? "}]}\n\n" : "}],\"object\":\"%s\"}\n\n", object);
    if (is_last)
        print(b, "data: [DONE]\n\n");
}

/* Each event in a chunk of its own, as servers in Python write them. */
static void put_events(struct connection *c, const char *at, size_t size)
{
    for (const char *end = at + size, *next; at < end; at = next) {
        next = memmem(at, end - at, "\n\n", 2) + 2;
        put_chunk(c, at, next - at);
    }
}

/* Leave the next thing to "step", behind everything that waits for it. */
static void leave_to_step(struct connection *c)
{
    unschedule(c);
    c->turn = ++turns;
}

static bool write_tokens(struct connection *c)
{
    static struct buffer event;
    int count = c->sequence == 0 && c->burst > 1 ? c->burst : 1;
    if (!c->begun) {
        static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                                   "Cache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n";
        put(&c->out, head, sizeof head - 1);
        c->begun = true;
    }
    while (count > 0 && c->sequence < c->tokens) {
        int some = count < IDS_PER_EVENT ? count : IDS_PER_EVENT;
        if (some > c->tokens - c->sequence)
            some = c->tokens - c->sequence;
        event.size = 0;
        put_event(&event, c, some, c->sequence + some == c->tokens);
        put_events(c, event.at, event.size);
        c->sequence += some;
        count -= some;
    }
    if (c->sequence >= c->tokens) {
        put(&c->out, "0\r\n\r\n", 5);
        c->kind = NOTHING;
        unschedule(c);
    } else if (c->by_hand) {
        leave_to_step(c);
    } else {
        int64_t next_ns = c->due_ns + c->interval_ns;
        schedule(c, c->in_steps ? next_ns / c->interval_ns * c->interval_ns : next_ns);
    }
    return flush(c);
}

static bool write_report(struct connection *c)
{
    if (!c->begun) {
        static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n"
                                   "Transfer-Encoding: chunked\r\n\r\n";
        put(&c->out, head, sizeof head - 1);
        c->begun = true;
    }
    put_chunk(c, c->answer.at, c->answer.size);
    schedule(c, now_ns() + c->interval_ns);
    return flush(c);
}

/* What is due; false: the connection has ended. */
static bool write_due(struct connection *c)
{
    if (c->kind == STREAM)
        return write_tokens(c);
    if (c->kind != WHOLE)
        return write_report(c);
    c->kind = NOTHING;
    unschedule(c);
    bool is_open = answer_json(c, c->answer.at, c->answer.size);
    drop(&c->answer);
    return is_open;
}

/* Requests. */

static void name_stream(struct connection *c, const char *body)
{
    const char *kvrs = value_of(body, "\"kvrs\"");
    const char *name = kvrs ? value_of(kvrs, "\"stream\"") : NULL;
    int n = 0;
    if (name && *name == '"')
        for (name++; name[n] && name[n] != '"' && n < 60; n++)
            ;
    c->cmpl = ++completions;
    if (n)
        sprintf(c->name, "cmpl-%.*s", n, name);
    else
        sprintf(c->name, "cmpl-%d", c->cmpl);
}

static void note_recovery(struct connection *c, const char *body)
{
    const char *kvrs = value_of(body, "\"kvrs\"");
    if (!kvrs || number_of(kvrs, "\"attempt\"", 1) < 2)
        return;
    uint64_t hash = 14695981039346656037u;
    for (const char *p = c->name; *p; p++)
        hash = (hash ^ (unsigned char)*p) * 1099511628211u;
    if (recovered_count == recovered_room) {
        recovered_room = recovered_room * 2 + 64;
        recovered = realloc(recovered, recovered_room * sizeof *recovered);
        recovered_ns = realloc(recovered_ns, recovered_room * sizeof *recovered_ns);
        if (!recovered || !recovered_ns)
            fail("realloc");
    }
    recovered[recovered_count] = hash;
    recovered_ns[recovered_count++] = now_ns();
}

/* The answer of a prefill instance. */
static void put_whole(struct buffer *b, struct connection *c, const struct buffer *ids, int count)
{
    bool is_vllm = !c->instance->has_key;
    print(b, "{\"id\":\"%s\",\"created\":%lld,\"model\":\"bench\",\"choices\":[{\"text\":\" k\",",
          c->name, (long long)created);
    print(b, "\"index\":0,\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,"
             "\"prompt_token_ids\":");
    put(b, ids->at, ids->size);
    print(b, ",\"token_ids\":[%d]}],\"object\":\"text_completion\",\"usage\":{\"prompt_tokens\":%d,"
             "\"completion_tokens\":1,\"total_tokens\":%d},",
          token_id(0), count, count + 1);
    print(b, "\"kv_transfer_params\":{\"do_remote_decode\":false,\"do_remote_prefill\":true,"
             "\"remote_engine_id\":\"%s\",\"remote_host\":\"127.0.0.1\",\"remote_port\":1,"
             "\"remote_request_id\":\"%s\",\"remote_block_ids\":[%s",
          c->instance->id, c->name + 5, is_vllm ? "[" : "");
    /* Blocks of 16 tokens, the last one partial; or tags of the full pages. */
    for (int i = 0; i < (is_vllm ? (count + 15) / 16 : count / 16); i++) {
        print(b, i ? "," : "");
        if (is_vllm)
            print(b, "%d", i + 1);
        else
            print(b, "\"%016x%016x\"", c->cmpl, i);
    }
    print(b, is_vllm ? "]],\"tp_size\":1}}" : "]}}");
}

static bool complete(struct connection *c, const char *body, bool is_chat)
{
    const char *user = string_of(body, "\"user\""), *kvrs = value_of(body, "\"kvrs\"");
    long rate = 20000, burst = 1, prefill_us = 0, steps = 0, text = 0;
    struct buffer ids = {0};
    if (user)
        sscanf(user + 1, "%ld,%ld,%ld,%ld,%ld", &rate, &burst, &prefill_us, &steps, &text);
    name_stream(c, body);
    note_recovery(c, body);
    c->begun = false;
    c->is_chat = is_chat;
    c->by_hand = rate < 0;
    c->text = text > 0 && text <= MAX_TEXTS && texts[text].count ? text : 0;
    c->answer.size = 0;
    int history = put_prompt_ids(&ids, body);
    if (is_true(body, "\"stream\"")) {
        long prompt = kvrs ? number_of(kvrs, "\"prompt_tokens\"", 0) : 0;
        c->kind = STREAM;
        c->sequence = prompt > 0 && history > prompt ? history - (int)prompt : 0;
        c->tokens = (int)number_of(body, "\"max_tokens\"", 16);
        c->burst = (int)burst;
        c->gives_ids = is_true(body, "\"return_token_ids\"");
        c->interval_ns = rate > 0 ? 1000000000000 / rate : 0;
        c->in_steps = steps && c->interval_ns;
        if (!c->instance->has_key)
            put(&c->answer, ids.at, ids.size);
    } else {
        c->kind = WHOLE;
        put_whole(&c->answer, c, &ids, history);
    }
    drop(&ids);
    if (c->by_hand) {
        leave_to_step(c);
        return true;
    }
    schedule(c, now_ns() + prefill_us * 1000);
    return prefill_us > 0 || write_due(c);
}

static bool watch(struct connection *c, enum kind kind, const char *query, const char *line)
{
    c->kind = kind;
    c->begun = false;
    c->interval_ns = (int64_t)(atof(query) * 1e9);
    c->answer.size = 0;
    put(&c->answer, line, strlen(line));
    put(&c->answer, "\n", 1);
    return write_report(c);
}

/* Those of a vLLM that a proxy reads. */
static bool answer_metrics(struct connection *c)
{
    struct buffer b = {0};
    int running = 0;
    for (struct connection *each = connections; each; each = each->next)
        running += each->instance == c->instance && each->kind == STREAM;
    print(&b, "# started\nprocess_start_time_seconds %lld.0\n", (long long)created);
    print(&b, "vllm:num_requests_running{engine=\"0\"} %d.0\n", running);
    print(&b, "vllm:num_requests_waiting{engine=\"0\"} 0.0\nvllm:kv_cache_usage_perc 0.1\n");
    print(&b, "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000000\","
              "enable_prefix_caching=\"True\"} 1.0\n");
    print(&b, "vllm:request_prefill_time_seconds_sum 1.0\n"
              "vllm:request_prefill_time_seconds_count 1000.0\n"
              "vllm:nixl_num_failed_transfers_total 0.0\nvllm:nixl_bytes_transferred_sum 0.0\n");
    bool is_open = answer_json(c, b.at, b.size);
    drop(&b);
    return is_open;
}

static bool serve(struct connection *c, const char *method, const char *path, const char *body)
{
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":"
                                 "\"model\",\"owned_by\":\"bench\",\"root\":\"bench\","
                                 "\"parent\":null,\"max_model_len\":131072}]}";
    struct instance *i = c->instance;
    const char *query;
    if (!strcmp(method, "POST") && !strncmp(path, "/v1/completions", 15))
        return complete(c, body, false);
    if (!strcmp(method, "POST") && !strncmp(path, "/v1/chat/completions", 20))
        return complete(c, body, true);
    if (!i->has_key && !strncmp(path, "/kvrs/", 6))
        return answer_status(c, "404 Not Found");
    if (!strncmp(path, "/kvrs/v1/load", 13))
        return (query = strstr(path, "watch=")) ? watch(c, LOAD_WATCH, query + 6, i->load)
                                                : answer_json(c, i->load, strlen(i->load));
    if ((query = strstr(path, "/kvrs/v1/heartbeat?watch=")))
        return watch(c, BEAT_WATCH, query + 25, "{\"loop_age_s\":0.0}");
    if (!strncmp(path, "/kvrs/v1/instance", 17) || !strncmp(path, "/kvrs/v1/fence", 14))
        return answer_json(c, i->info, strlen(i->info));
    if (!strncmp(path, "/kvrs/v1/leases", 15))
        return answer_json(c, "{\"unknown\":[]}", 14);
    if (!strncmp(path, "/v1/models", 10))
        return answer_json(c, models, sizeof models - 1);
    if (!strncmp(path, "/version", 8))
        return answer_json(c, "{\"version\":\"0.32.0\"}", 20);
    if (!strncmp(path, "/metrics", 8))
        return answer_metrics(c);
    if (!strncmp(path, "/health", 7))
        return answer_status(c, "200 OK");
    return answer_status(c, "404 Not Found");
}

/* The head at the start of the input, and its body; false: not all of it has come, or the
 * connection has ended. */
static bool read_one(struct connection *c)
{
    char *end = memmem(c->in.at, c->in.size, "\r\n\r\n", 4);
    if (!end)
        return false;
    size_t head = end + 4 - c->in.at, size = 0;
    char method[8] = "", path[256] = "";
    *end = 0;
    const char *length = strcasestr(c->in.at, "\r\ncontent-length:");
    bool is_chunked = strcasestr(c->in.at, "\r\ntransfer-encoding:") != NULL;
    bool expects = strcasestr(c->in.at, "\r\nexpect:") != NULL;
    if (length)
        size = strtoul(length + 17, NULL, 10);
    sscanf(c->in.at, "%7s %255s", method, path);
    *end = '\r';
    if (is_chunked || expects || size > MAX_REQUEST_BYTES) {
        answer_status(c, "501 Not Implemented");
        if (c->fd >= 0)
            end_connection(c, false);
        return false;
    }
    if (c->in.size < head + size)
        return false;
    *reserve(&c->in, 1) = 0;
    char *body = c->in.at + head, after = body[size];
    body[size] = 0;
    if (!serve(c, method, path, body))
        return false;
    body[size] = after;
    c->in.size -= head + size;
    memmove(c->in.at, c->in.at + head + size, c->in.size);
    return true;
}

/* A message of the proof at the start of the input; false: as `read_one`. */
static bool read_proof(struct connection *c)
{
    char *end = memmem(c->in.at, c->in.size, "\r\n\r\n", 4);
    size_t prefix = sizeof PREFIX - 1;
    struct instance *i = c->instance;
    if (c->proof == UNPROVEN && c->in.size && c->in.at[0] != PREFIX[0]) {
        c->proof = OPEN; /* A stranger; its requests are served all the same. */
        return true;
    }
    if (!end)
        return false;
    *end = 0;
    if (c->proof == UNPROVEN) {
        uint8_t message[70], mac[32], *nonces = message + 6;
        char reply[160], *hello = c->in.at + prefix;
        bool is_known = i->has_key && !strncmp(hello, i->key_id, 16) && hello[16] == ' ' &&
                        from_hex(hello + 17, nonces, 32) &&
                        getrandom(nonces + 32, 32, 0) == 32;
        if (!is_known) {
            put(&c->out, PREFIX "refused\r\n\r\n", prefix + 11);
            if (flush(c))
                end_connection(c, false);
            return false;
        }
        memcpy(message, "client", 6);
        hmac(i->key, message, 70, c->expected_mac);
        memcpy(message, "server", 6);
        hmac(i->key, message, 70, mac);
        memcpy(reply, PREFIX, prefix);
        to_hex(nonces + 32, 32, reply + prefix);
        reply[prefix + 64] = ' ';
        to_hex(mac, 32, reply + prefix + 65);
        memcpy(reply + prefix + 129, "\r\n\r\n", 4);
        put(&c->out, reply, prefix + 133);
        c->proof = CLAIMED;
    } else {
        uint8_t mac[32];
        if (strncmp(c->in.at, PREFIX, prefix) || !from_hex(c->in.at + prefix, mac, 32) ||
            memcmp(mac, c->expected_mac, 32)) {
            end_connection(c, false);
            return false;
        }
        c->proof = OPEN;
    }
    size_t used = end + 4 - c->in.at;
    c->in.size -= used;
    memmove(c->in.at, c->in.at + used, c->in.size);
    return flush(c);
}

static struct connection *new_connection(int fd, struct instance *i)
{
    struct connection *c = calloc(1, sizeof *c);
    if (!c)
        fail("calloc");
    c->fd = fd;
    c->instance = i;
    c->heap_index = -1;
    if ((c->next = connections))
        connections->previous = c;
    connections = c;
    return c;
}

static void read_requests(struct connection *c)
{
    while (c->fd >= 0 && c->in.size && c->kind == NOTHING)
        if (!(c->proof == OPEN ? read_one(c) : read_proof(c)))
            break;
    if (c->fd >= 0 && !c->in.size && c->kind != NOTHING)
        drop(&c->in); /* Ten thousand idle ones would hold it. */
}

static void receive(struct connection *c)
{
    static char chunk[1 << 18];
    ssize_t n = recv(c->fd, chunk, sizeof chunk, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        end_connection(c, false);
        return;
    }
    put(&c->in, chunk, n);
    read_requests(c);
}

static void listen_at(struct instance *i)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(i->port), .sin_addr.s_addr = htonl(0x7f000001)};
    socklen_t size = sizeof address;
    int on = 1;
    if (i->listener < 0) {
        if ((i->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) < 0)
            fail("socket");
        setsockopt(i->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(i->listener, (struct sockaddr *)&address, size))
            fail("bind");
        getsockname(i->listener, (struct sockaddr *)&address, &size);
        i->port = ntohs(address.sin_port);
    }
}

static void take_connections(struct instance *i)
{
    struct epoll_event e = {EPOLLIN, {.ptr = i}};
    if (listen(i->listener, 4096))
        fail("listen");
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, i->listener, &e);
}

static void accept_all(struct instance *i)
{
    int fd, on = 1;
    while ((fd = accept4(i->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *c = new_connection(fd, i);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        c->proof = i->has_key ? UNPROVEN : OPEN;
        struct epoll_event e = {EPOLLIN, {.ptr = c}};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
    if (errno == EMFILE || errno == ENFILE)
        fail("accept");
}

/* Commands. */

static void kill_instance(struct instance *i)
{
    int64_t begun_ns = now_ns();
    int streams = 0;
    close(i->listener);
    i->listener = -1;
    for (struct connection *c = connections; c; c = c->next)
        streams += c->instance == i && c->kind == STREAM;
    for (struct connection *c = connections, *next; c; c = next) {
        next = c->next;
        if (c->instance == i)
            end_connection(c, true);
    }
    recovered_count = 0;
    printf("{\"begun_ns\":%lld,\"ended_ns\":%lld,\"streams\":%d}\n", (long long)begun_ns,
           (long long)now_ns(), streams);
}

static void tell_calls(void)
{
    /* The first call of each stream counts; a hand-off has a second one. */
    int streams = 0;
    int64_t first_ns = 0, last_first_ns = 0, last_ns = 0;
    for (int i = 0; i < recovered_count; i++) {
        bool is_first = true;
        for (int j = 0; j < i && is_first; j++)
            is_first = recovered[j] != recovered[i];
        if (is_first) {
            streams++;
            last_first_ns = recovered_ns[i];
        }
        first_ns = first_ns ? first_ns : recovered_ns[i];
        last_ns = recovered_ns[i];
    }
    printf("{\"calls\":%d,\"streams\":%d,\"first_ns\":%lld,\"last_first_ns\":%lld,"
           "\"last_ns\":%lld}\n",
           recovered_count, streams, (long long)first_ns, (long long)last_first_ns,
           (long long)last_ns);
}

/* Whether it waits for a command. */
static bool is_left(const struct connection *c, enum kind kind)
{
    return c->by_hand && c->kind == kind;
}

static void tell_if_awaited(void)
{
    int answers = 0, streams = 0;
    if (awaited_answers < 0)
        return;
    for (struct connection *c = connections; c; c = c->next) {
        answers += is_left(c, WHOLE);
        streams += is_left(c, STREAM);
    }
    if (answers < awaited_answers || streams < awaited_streams)
        return;
    awaited_answers = -1;
    printf("{\"answers\":%d,\"streams\":%d}\n", answers, streams);
    fflush(stdout);
}

static void step(int count, enum kind kind)
{
    int written = 0;
    for (struct connection *first; written < count; written++) {
        first = NULL;
        for (struct connection *c = connections; c; c = c->next)
            if (is_left(c, kind) && (!first || c->turn < first->turn))
                first = c;
        if (!first)
            break;
        if (write_due(first))
            read_requests(first);
    }
    printf("{\"written\":%d}\n", written);
}

static void obey(char *line)
{
    char word[16] = "", name[65] = "";
    int streams = 0;
    sscanf(line, "%15s %64s %d", word, name, &streams);
    struct instance *i = NULL;
    for (int n = 0; n < instance_count; n++)
        if (!strcmp(instances[n].id, name))
            i = &instances[n];
    if (!strcmp(word, "calls")) {
        tell_calls();
    } else if (!strcmp(word, "wait")) {
        awaited_answers = atoi(name);
        awaited_streams = streams;
    } else if (!strcmp(word, "step")) {
        step(atoi(name), STREAM);
    } else if (!strcmp(word, "answer")) {
        step(atoi(name), WHOLE);
    } else if (!strcmp(word, "end")) {
        exit(0);
    } else if (i && !strcmp(word, "listen")) {
        listen_at(i);
        take_connections(i);
        printf("{}\n");
    } else if (i && !strcmp(word, "kill")) {
        kill_instance(i);
    } else {
        printf("{\"error\":\"unknown command\"}\n");
    }
    fflush(stdout);
}

static void read_commands(void)
{
    static char line[256];
    static size_t size;
    ssize_t n = read(0, line + size, sizeof line - 1 - size);
    if (n <= 0)
        exit(0);
    line[size += n] = 0;
    for (char *end; (end = strchr(line, '\n'));) {
        *end = 0;
        obey(line);
        size -= end + 1 - line;
        memmove(line, end + 1, size + 1);
    }
}

static void read_instances(const char *path)
{
    FILE *file = fopen(path, "r");
    char *line = NULL, key[80], key_id[80], port[16];
    size_t room = 0;
    struct instance *i = NULL;
    if (!file)
        fail(path);
    while (getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "instance ", 9) && instance_count < MAX_INSTANCES) {
            i = &instances[instance_count++];
            i->listener = -1;
            if (sscanf(line, "instance %64s %15s %79s %79s", i->id, port, key, key_id) != 4)
                break;
            i->has_key = from_hex(key, i->key, 32);
            snprintf(i->key_id, sizeof i->key_id, "%.16s", key_id);
            i->port = atoi(port);
            listen_at(i);
            if (strcmp(port, "later"))
                take_connections(i);
        } else if (i && !strncmp(line, "info ", 5)) {
            i->info = strdup(line + 5);
        } else if (i && !strncmp(line, "load ", 5)) {
            i->load = strdup(line + 5);
        } else {
            i = NULL;
            break;
        }
    }
    if (!i || !feof(file)) {
        fprintf(stderr, "%s: not a list of instances: %s\n", path, line);
        exit(1);
    }
    fclose(file);
    free(line);
}

static void read_texts(const char *path)
{
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    int section = 1;
    if (!file)
        fail(path);
    while (getline(&line, &room, file) > 0 && section <= MAX_TEXTS) {
        line[strcspn(line, "\n")] = 0;
        if (!*line) {
            section++;
            continue;
        }
        int n = texts[section].count++;
        texts[section].lines = realloc(texts[section].lines, (n + 1) * sizeof(char *));
        if (!texts[section].lines || !(texts[section].lines[n] = strdup(line)))
            fail("realloc");
    }
    fclose(file);
    free(line);
}

int main(int argc, char **argv)
{
    struct epoll_event events[256], e = {EPOLLIN, {.ptr = NULL}};
    struct rlimit limit;
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: engine INSTANCES [TEXTS]\n");
        return 2;
    }
    if (argc == 3)
        read_texts(argv[2]);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    created = time(NULL);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    read_instances(argv[1]);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, 0, &e);
    for (int n = 0; n < instance_count; n++)
        printf("%s %d\n", instances[n].id, instances[n].port);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t left_ns = heap_size ? heap[0]->due_ns - now_ns() : 0;
        left_ns = left_ns > 0 ? left_ns : 0;
        struct timespec left = {left_ns / 1000000000, left_ns % 1000000000};
        int count = epoll_pwait2(epoll_fd, events, 256, heap_size ? &left : NULL, NULL);
        for (int n = 0; n < count; n++) {
            void *subject = events[n].data.ptr;
            struct connection *c = subject;
            if (!subject)
                read_commands();
            else if ((char *)subject >= (char *)instances &&
                     (char *)subject < (char *)(instances + MAX_INSTANCES))
                accept_all(subject);
            else if (c->fd >= 0) {
                if (events[n].events & EPOLLOUT && !flush(c))
                    continue;
                if (events[n].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                    receive(c);
            }
        }
        for (int64_t now = now_ns(); heap_size && heap[0]->due_ns <= now;) {
            struct connection *c = heap[0];
            if (write_due(c))
                read_requests(c);
        }
        tell_if_awaited();
        for (struct connection *next; closed; closed = next) {
            next = closed->next;
            free(closed);
        }
    }
}
