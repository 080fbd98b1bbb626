#include "fakesource.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "../runtime/slot.h"

bool bad_tenth(int64_t i)
{
    return i % 10 == 3;
}

bool bad_all(int64_t i)
{
    return true;
}

bool bad_five(int64_t i)
{
    return i == 5;
}

static dnr_status visit(const dnr_source *s, int64_t i)
{
    fake *f = (fake *)s;
    f->reads++;
    if (f->delay_us)
        usleep((useconds_t)f->delay_us);
    while (f->stuck == i)
        usleep(1000);
    return f->bad && f->bad(i) ? DNR_FAIL(DNR_EDATA, "none: a test", "bad on purpose") : DNR_OK;
}

static dnr_status fake_render(const dnr_source *s, int64_t i, dnri_picture *out)
{
    DNR_TRY(visit(s, i));
    DNR_TRY(dnri_picture_fit(out, 4, 4));
    for (int k = 0; k < 16; k++)
        memcpy(out->rgb + 3 * k, (uint8_t[]){(uint8_t)(i % 251), 1, 2}, 3);
    return DNR_OK;
}

static dnr_status fake_read(const dnr_source *s, int64_t i, dnri_buffer *out)
{
    fake *f = (fake *)s;
    if (f->bad_status && f->bad(i))
        return DNR_FAIL(f->bad_status, "none: a test", "no memory on purpose");
    DNR_TRY(visit(s, i));
    bytes b = rig_bmp(4, 4, (uint8_t)(i % 251), 1, 2);
    DNR_TRY(dnri_buffer_fit(out, b.n));
    memcpy(out->data, b.p, b.n);
    free(b.p);
    return DNR_OK;
}

static const char *fake_name(const dnr_source *s, int64_t i)
{
    static const char *const name[] = {"pic0", "pic1", "pic2", "pic3", "pic4",
                                       "pic5", "pic6", "pic7", "pic8", "pic9"};
    return name[i % 10];
}

static int fake_label(const dnr_source *s, int64_t i)
{
    return (int)(i % 10);
}

fake fake_source(int64_t n, bool encoded)
{
    static const dnri_source_ops render = {NULL, fake_render, fake_name, fake_label, NULL};
    static const dnri_source_ops read = {fake_read, NULL, fake_name, fake_label, NULL};
    return (fake){.base = {.ops = encoded ? &read : &render,
                           .root = (char *)"set/",
                           .count = n,
                           .classes = 10,
                           .bytes = encoded ? 102 * n : 0},
                  .encoded = encoded,
                  .stuck = -1};
}

dnr_loader_opts train(int64_t batch, int threads)
{
    return (dnr_loader_opts){.batch = batch,
                             .image = 4,
                             .train = true,
                             .shuffle = true,
                             .seed = 7,
                             .max_bad = -1,
                             .threads = threads,
                             .timeout_s = 60};
}

dnr_loader_opts pass(int64_t batch, int threads)
{
    dnr_loader_opts o = train(batch, threads);
    o.train = o.shuffle = false;
    return o;
}

uint64_t stream_hash(dnr_source *s, dnr_loader_opts o, int64_t samples)
{
    dnr_loader *l;
    OK(dnr_loader_open(s, NULL, &o, &l));
    XXH3_state_t *h = XXH3_createState();
    XXH3_64bits_reset(h);
    size_t size = (size_t)o.image * (size_t)o.image * 3;
    int64_t position = o.start;
    for (int64_t done = 0; done < samples;) {
        dnr_batch b;
        OK(dnr_loader_next(l, &b, NULL));
        assert_int_equal(b.position, position);
        assert_int_equal(b.count, o.batch);
        assert_ptr_equal(b.labels, (char *)b.slot + dnri_slot_labels());
        assert_ptr_equal(b.pixels, (char *)b.slot + dnri_slot_pixels(o.batch));
        position += o.batch;
        for (int64_t k = 0; k < o.batch && done < samples; k++, done++) {
            XXH3_64bits_update(h, &b.labels[k], 4);
            XXH3_64bits_update(h, b.pixels + (size_t)k * size, size);
        }
        dnr_loader_release(l, &b);
    }
    dnr_loader_close(l);
    uint64_t v = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return v;
}
