/* Buffers, hexadecimal numbers, and what the mock engines read of JSON: keys are searched for,
 * since all bodies come from the bench. */
#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void to_hex(const uint8_t *b, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++)
        sprintf(out + 2 * i, "%02x", b[i]);
}

static bool from_hex(const char *s, uint8_t *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isxdigit((unsigned char)s[2 * i]) || sscanf(s + 2 * i, "%2hhx", b + i) != 1)
            return false;
    return true;
}

/* Buffers. */

struct buffer {
    char *at;
    size_t size, room;
};

static char *reserve(struct buffer *b, size_t more)
{
    if (b->size + more > b->room) {
        b->room = (b->size + more) * 3 / 2 + 512;
        if (!(b->at = realloc(b->at, b->room)))
            fail("realloc");
    }
    return b->at + b->size;
}

static void put(struct buffer *b, const char *s, size_t n)
{
    memcpy(reserve(b, n), s, n);
    b->size += n;
}

__attribute__((format(printf, 2, 3))) static void print(struct buffer *b, const char *form, ...)
{
    va_list list;
    va_start(list, form);
    int n = vsnprintf(reserve(b, 512), 512, form, list);
    va_end(list);
    if (n < 0 || n >= 512)
        abort();
    b->size += n;
}

static void drop(struct buffer *b)
{
    free(b->at);
    *b = (struct buffer){0};
}

/* JSON. */

static const char *value_of(const char *json, const char *key)
{
    const char *at = strstr(json, key);
    if (!at)
        return NULL;
    at += strlen(key);
    while (*at == ' ' || *at == ':')
        at++;
    return at;
}

/* Anywhere: an object within may have the key as well, with another kind of value. */
static bool is_true(const char *json, const char *key)
{
    const char *value = json;
    while ((value = value_of(value, key)))
        if (!strncmp(value, "true", 4))
            return true;
    return false;
}

/* The first string under the key, which may be a value too, as of a message's role. */
static const char *string_of(const char *json, const char *key)
{
    const char *value = json;
    while ((value = value_of(value, key)) && *value != '"')
        ;
    return value;
}

static long number_of(const char *json, const char *key, long otherwise)
{
    const char *value = value_of(json, key);
    return value && isdigit((unsigned char)*value) ? strtol(value, NULL, 10) : otherwise;
}

/* The prompt's ids as a JSON list, and how many: a text, of a chat its first message, has one per
 * four bytes. */
static int put_prompt_ids(struct buffer *b, const char *body)
{
    const char *prompt = value_of(body, "\"prompt\"");
    int count = 0;
    if (!prompt)
        prompt = value_of(body, "\"content\"");
    put(b, "[", 1);
    if (prompt && *prompt == '[') {
        const char *end = strchr(prompt, ']');
        size_t size = end ? (size_t)(end - prompt - 1) : 0;
        put(b, prompt + 1, size);
        count = size > 0;
        for (size_t i = 0; i < size; i++)
            count += prompt[1 + i] == ',';
    } else if (prompt && *prompt == '"') {
        for (prompt++; *prompt && *prompt != '"'; count++) {
            uint32_t id = 0;
            for (int i = 0; i < 4 && *prompt && *prompt != '"'; i++)
                id = id * 31 + (unsigned char)*prompt++;
            char text[16];
            put(b, text, sprintf(text, count ? ",%u" : "%u", id % 50000 + 3));
        }
    }
    put(b, "]", 1);
    return count;
}
