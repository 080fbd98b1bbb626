/* events.c: the few protobuf fields and the framing that TensorBoard reads. */
#include "events.h"

#include <jansson.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A message being written; large enough for the longest of ours. */
typedef struct message {
    uint8_t data[2048];
    size_t n;
} message;

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 }; /* wire types */

/* Numbers of the fields that are written. */
enum {
    EVENT_WALL_TIME = 1,
    EVENT_STEP = 2,
    EVENT_FILE_VERSION = 3,
    EVENT_SUMMARY = 5,
    EVENT_SESSION_LOG = 7,
    SUMMARY_VALUE = 1,
    VALUE_TAG = 1,
    VALUE_SIMPLE = 2,
    SESSION_STATUS = 1
};
enum { SESSION_START = 1 };

static void put(message *m, const void *bytes, size_t n)
{
    if (m->n + n <= sizeof m->data)
        memcpy(m->data + m->n, bytes, n);
    m->n += n;
}

static void put_little(message *m, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        put(m, &(uint8_t){(uint8_t)(v >> (8 * i))}, 1);
}

static void put_varint(message *m, uint64_t v)
{
    for (; v >= 128; v >>= 7)
        put(m, &(uint8_t){(uint8_t)(v | 128)}, 1);
    put(m, &(uint8_t){(uint8_t)v}, 1);
}

static void put_key(message *m, int field, int wire)
{
    put_varint(m, (uint64_t)field << 3 | (uint64_t)wire);
}

static void put_bytes(message *m, int field, const void *bytes, size_t n)
{
    put_key(m, field, BYTES);
    put_varint(m, n);
    put(m, bytes, n);
}

static uint32_t crc32c(const uint8_t *p, size_t n)
{
    uint32_t c = ~0u;
    for (size_t i = 0; i < n; i++) {
        c ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            c = c >> 1 ^ (c & 1 ? 0x82f63b78u : 0);
    }
    return ~c;
}

/* A checksum of data that hold their own checksum would be weak, so TFRecord rotates it and adds a constant. */
static uint32_t masked(const uint8_t *p, size_t n)
{
    uint32_t c = crc32c(p, n);
    return (c >> 15 | c << 17) + 0xa282ead8u;
}

/* length, its checksum, data, their checksum */
static int write_event(FILE *f, const message *m)
{
    message head = {.n = 0}, tail = {.n = 0};
    put_little(&head, m->n, 8);
    put_little(&head, masked(head.data, 8), 4);
    put_little(&tail, masked(m->data, m->n), 4);
    bool good = m->n <= sizeof m->data && fwrite(head.data, 1, head.n, f) == head.n &&
                fwrite(m->data, 1, m->n, f) == m->n && fwrite(tail.data, 1, tail.n, f) == tail.n;
    return good ? 0 : -1;
}

static message begin_event(int64_t step)
{
    message m = {.n = 0};
    struct timespec t;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &t);
    double now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    memcpy(&bits, &now, sizeof bits);
    put_key(&m, EVENT_WALL_TIME, FIXED64);
    put_little(&m, bits, 8);
    put_key(&m, EVENT_STEP, VARINT);
    put_varint(&m, (uint64_t)step);
    return m;
}

FILE *events_open(const char *folder, int64_t step)
{
    static const char version[] = "brain.Event:2";
    char path[2048], host[128] = "";
    gethostname(host, sizeof host - 1);
    snprintf(path, sizeof path, "%.1500s/events.out.tfevents.%lld.%s.%d", folder,
             (long long)time(NULL), host, (int)getpid());
    FILE *f = fopen(path, "w");
    if (!f)
        return NULL;
    message m = begin_event(0);
    put_bytes(&m, EVENT_FILE_VERSION, version, strlen(version));
    int bad = write_event(f, &m);
    if (step >= 0 && !bad) {
        message log = {.n = 0};
        m = begin_event(step + 1); /* from here on, what older files say is void */
        put_key(&log, SESSION_STATUS, VARINT);
        put_varint(&log, SESSION_START);
        put_bytes(&m, EVENT_SESSION_LOG, log.data, log.n);
        bad = write_event(f, &m);
    }
    if (bad || fflush(f) != 0) {
        fclose(f);
        return NULL;
    }
    return f;
}

static void put_scalar(message *summary, const char *group, const char *name, double v)
{
    message value = {.n = 0};
    char tag[128];
    float single = (float)v;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    snprintf(tag, sizeof tag, "%s/%s", group, name);
    put_bytes(&value, VALUE_TAG, tag, strlen(tag));
    put_key(&value, VALUE_SIMPLE, FIXED32);
    put_little(&value, bits, 4);
    put_bytes(summary, SUMMARY_VALUE, value.data, value.n);
}

int events_write(FILE *f, const json_t *record)
{
    const char *event = json_string_value(json_object_get(record, "event")), *key;
    json_t *v;
    message summary = {.n = 0};
    if (!event || (strcmp(event, "train") && strcmp(event, "eval")))
        return 0;
    json_object_foreach((json_t *)record, key, v)
    {
        if (json_is_number(v) && strcmp(key, "step"))
            put_scalar(&summary, event, key, json_number_value(v));
    }
    if (summary.n > sizeof summary.data / 2) /* so that it fits into the event */
        summary.n = 0;
    message m = begin_event(json_integer_value(json_object_get(record, "step")));
    put_bytes(&m, EVENT_SUMMARY, summary.data, summary.n);
    return write_event(f, &m) == 0 && fflush(f) == 0 ? 0 : -1;
}
