/* augment.c: how a picture is seen: torchvision's RandomResizedCrop, RandomCrop with padding,
 * Resize + CenterCrop and RandomHorizontalFlip as one view, so that only pixels that are used are made. */
#include <math.h>

#include "data.h"

/* Python's round(n / 2): halves go to the even neighbour. */
static int64_t half_even(int64_t n)
{
    int64_t q = n >> 1; /* floor, for negative n too */
    return n & 1 ? q + (q & 1) : q;
}

/* Shorter side to `size`, the longer one in proportion, rounded down. */
static void resize_shorter(dnri_view *v, int size)
{
    int shorter = v->w < v->h ? v->w : v->h;
    v->rw = v->w == shorter ? size : (int64_t)((double)size * v->w / shorter);
    v->rh = v->h == shorter ? size : (int64_t)((double)size * v->h / shorter);
}

static dnri_view random_resized(const dnr_loader_opts *o, int w, int h, dnri_rng *r)
{
    double area = (double)w * h, lo = log(o->aspect_min), hi = log(o->aspect_max);
    dnri_view v = {0, 0, w, h, o->image, o->image, 0, 0, false};
    for (int i = 0; i < 10; i++) {
        double target = area * (o->area_min + (o->area_max - o->area_min) * dnri_rng_uniform(r));
        double aspect = exp(lo + (hi - lo) * dnri_rng_uniform(r));
        int64_t cw = llrint(sqrt(target * aspect)), ch = llrint(sqrt(target / aspect));
        if (cw > 0 && ch > 0 && cw <= w && ch <= h) {
            v.w = (int)cw;
            v.h = (int)ch;
            v.y = (int)dnri_rng_below(r, (uint64_t)(h - ch + 1));
            v.x = (int)dnri_rng_below(r, (uint64_t)(w - cw + 1));
            return v;
        }
    }
    /* as much as the allowed aspects take, from the middle */
    double aspect = (double)w / h;
    if (aspect < o->aspect_min)
        v.h = (int)llrint(w / o->aspect_min);
    else if (aspect > o->aspect_max)
        v.w = (int)llrint(h * o->aspect_max);
    v.w = v.w < 1 ? 1 : v.w > w ? w : v.w;
    v.h = v.h < 1 ? 1 : v.h > h ? h : v.h;
    v.x = (w - v.w) / 2;
    v.y = (h - v.h) / 2;
    return v;
}

dnri_view dnri_augment(const dnr_loader_opts *o, int w, int h, int64_t epoch, int64_t sample)
{
    dnri_rng r = DNRI_RNG(DNRI_DRAW_AUGMENT, o->seed, (uint64_t)epoch, (uint64_t)sample);
    bool flip = o->train && o->flip && dnri_rng_below(&r, 2);
    dnri_view v = {0, 0, w, h, w, h, 0, 0, false};
    if (o->crop == DNR_CROP_RANDOM)
        v = random_resized(o, w, h, &r);
    else {
        resize_shorter(&v, o->resize);
        if (o->crop == DNR_CROP_PAD) {
            v.oy =
                (int64_t)dnri_rng_below(&r, (uint64_t)(v.rh + 2 * o->pad - o->image + 1)) - o->pad;
            v.ox =
                (int64_t)dnri_rng_below(&r, (uint64_t)(v.rw + 2 * o->pad - o->image + 1)) - o->pad;
        } else {
            v.oy = half_even(v.rh - o->image);
            v.ox = half_even(v.rw - o->image);
        }
    }
    v.flip = flip;
    return v;
}
