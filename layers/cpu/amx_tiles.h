/* amx_tiles.h: packing bf16 for AMX's tile products, and what their files share. HAVE_AMX: the compiler knows them. */
#ifndef DNR_CPU_AMX_TILES_H
#define DNR_CPU_AMX_TILES_H

#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>) || defined(__clang__) && __has_include(<amxintrin.h>)
#define HAVE_AMX
#endif
#endif

#ifdef HAVE_AMX
#include <immintrin.h>
#include <stdint.h>

#define AMX __attribute__((target("avx512f,avx512bw,avx512bf16,amx-tile,amx-bf16")))

/* A product of tiles is 16 rows × 16 columns, summed over 32. A (left): 16 rows of 32; B (right): 16 pairs × 16 columns × 2. */
enum {
    TILE = 16 * 32, /* bf16 of a tile */
    STEP = 32,      /* what a product sums over */
    PANEL = 32,     /* channels of two tiles side by side */
};

typedef uint16_t bf16;

typedef struct tile_config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

static const tile_config all_full = {.palette = 1,
                                     .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                     .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* in[16][16] of 32 bits, turned */
AMX static inline void turn(const __m512i in[16], __m512i out[16])
{
    __m512i t[16], u[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* 128 bits l of u[4i + j] are column 4l + j of rows 4i … 4i + 3 */
    for (int j = 0; j < 4; j++) {
        const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        out[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        out[j + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        out[j + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        out[j + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* 32 channels, from `at` on, of 32 rows: pairs of rows side by side, as two B tiles of 16 channels */
AMX static inline void pair_up(const bf16 *const row[STEP], int64_t at, __m512i lo[16],
                               __m512i hi[16])
{
    static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i first = _mm512_loadu_si512(order[0]), second = _mm512_loadu_si512(order[1]);
    for (int i = 0; i < 16; i++) {
        const __m512i v = _mm512_loadu_si512(row[2 * i] + at);
        const __m512i w = _mm512_loadu_si512(row[2 * i + 1] + at);
        lo[i] = _mm512_permutex2var_epi16(v, first, w);
        hi[i] = _mm512_permutex2var_epi16(v, second, w);
    }
}

AMX static inline void put(bf16 *tile, const __m512i v[16])
{
    for (int i = 0; i < 16; i++)
        _mm512_storeu_si512(tile + 32 * i, v[i]);
}

#endif
#endif
