/* decode.c: encoded bytes to RGB, by their first bytes and never by the name. stb_image does PNG and BMP (and,
 * in jpeg_stb.c, JPEG); it forgives much, so that they are checked to be whole before. */
#include <stdlib.h>
#include <string.h>

#include "data.h"

#define STBI_ONLY_PNG
#define STBI_ONLY_BMP
#define STBI_NO_STDIO
#define STBI_NO_HDR
#define STBI_NO_LINEAR
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function" /* gcc reports at the file's end: no pop */
#include <stb/stb_image.h>

#define SIDE_MAX 65535
#define REPLACE  "replace or remove the file, or set data.on_error = skip"

dnr_status dnri_decode_check(int64_t w, int64_t h, int64_t max_pixels)
{
    if (w < 1 || h < 1)
        return DNR_FAIL(DNR_EDATA, REPLACE, "%lld×%lld pixels", (long long)w, (long long)h);
    if (w > SIDE_MAX || h > SIDE_MAX)
        return DNR_FAIL(DNR_EDATA, "shrink the picture",
                        "%lld×%lld pixels: a side may have %d at most", (long long)w, (long long)h,
                        SIDE_MAX);
    if (w * h > max_pixels)
        return DNR_FAIL(DNR_EDATA, "shrink the picture, or raise data.max_pixels",
                        "%lld×%lld pixels, more than %lld", (long long)w, (long long)h,
                        (long long)max_pixels);
    return DNR_OK;
}

static uint32_t be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static uint32_t le32(const uint8_t *p)
{
    return (uint32_t)p[3] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[1] << 8 | p[0];
}

/* CRC-32 of PNG chunks, four bits at a time. */
static uint32_t crc32(const uint8_t *p, size_t n)
{
    static const uint32_t nibble[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                        0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    uint32_t c = ~0u;
    for (size_t i = 0; i < n; i++) {
        c ^= p[i];
        c = nibble[c & 15] ^ c >> 4;
        c = nibble[c & 15] ^ c >> 4;
    }
    return ~c;
}

/* Every chunk up to IEND is there and has the right checksum. */
static dnr_status check_png(const uint8_t *p, size_t size)
{
    for (size_t at = 8; size - at >= 12;) {
        size_t length = be32(p + at);
        if (length > size - at - 12)
            break;
        if (crc32(p + at + 4, length + 4) != be32(p + at + 8 + length))
            return DNR_FAIL(DNR_EDATA, REPLACE, "damaged PNG: wrong checksum at byte %zu", at);
        if (!memcmp(p + at + 4, "IEND", 4))
            return DNR_OK;
        at += length + 12;
    }
    return DNR_FAIL(DNR_EDATA, REPLACE, "truncated PNG: its end is missing after %zu bytes", size);
}

/* The rows of an uncompressed BMP are all there. */
static dnr_status check_bmp(const uint8_t *p, size_t size, int w, int h)
{
    const uint8_t *depth =
        p + (le32(p + 14) == 12 ? 24 : 28); /* OS/2's short header, or the usual one */
    uint64_t bits = depth[0] | (uint32_t)depth[1] << 8, start = le32(p + 10);
    uint64_t row = ((uint64_t)w * bits + 31) / 32 * 4;
    if (start + row * (uint64_t)h > size)
        return DNR_FAIL(DNR_EDATA, REPLACE, "truncated BMP: %zu bytes of %llu", size,
                        (unsigned long long)(start + row * (uint64_t)h));
    return DNR_OK;
}

static dnr_status decode_stb(const char *kind, const uint8_t *bytes, size_t size,
                             int64_t max_pixels, dnri_picture *out)
{
    int w, h, channels, n = (int)size; /* below 2^31: see dnri_decode */
    if (!stbi_info_from_memory(bytes, n, &w, &h, &channels))
        return DNR_FAIL(DNR_EDATA, REPLACE, "damaged %s: %s", kind, stbi_failure_reason());
    DNR_TRY(dnri_decode_check(w, h, max_pixels));
    if (kind[0] == 'B')
        DNR_TRY(check_bmp(bytes, size, w, h));
    uint8_t *rgb = stbi_load_from_memory(bytes, n, &w, &h, &channels, 3);
    if (!rgb)
        return DNR_FAIL(DNR_EDATA, REPLACE, "damaged %s: %s", kind, stbi_failure_reason());
    free(out->rgb);
    *out = (dnri_picture){rgb, w, h, (size_t)w * (size_t)h * 3};
    return DNR_OK;
}

/* What the bytes are, where they are none of ours. */
static const char *other_kind(const uint8_t *p, size_t n)
{
    if (n >= 12 && !memcmp(p, "RIFF", 4) && !memcmp(p + 8, "WEBP", 4))
        return "WebP";
    if (n >= 4 && !memcmp(p, "GIF8", 4))
        return "GIF";
    if (n >= 4 && (!memcmp(p, "II*\0", 4) || !memcmp(p, "MM\0*", 4)))
        return "TIFF";
    if (n >= 12 && !memcmp(p + 4, "ftyp", 4))
        return "HEIF or AVIF";
    if (n >= 2 && p[0] == 'P' && p[1] >= '1' && p[1] <= '6')
        return "PNM";
    return NULL;
}

dnr_status dnri_decode(const uint8_t *bytes, size_t size, int64_t max_pixels, dnri_picture *out)
{
    static const uint8_t png[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    if (!size)
        return DNR_FAIL(DNR_EDATA, REPLACE, "empty file");
    if (size > (size_t)1 << 30)
        return DNR_FAIL(DNR_EDATA, REPLACE, "%zu bytes in one picture", size);
    if (size >= 3 && bytes[0] == 0xff && bytes[1] == 0xd8 && bytes[2] == 0xff)
        return dnri_decode_jpeg(bytes, size, max_pixels, out);
    if (size >= 8 && !memcmp(bytes, png, 8)) {
        DNR_TRY(check_png(bytes, size));
        return decode_stb("PNG", bytes, size, max_pixels, out);
    }
    if (size >= 30 && bytes[0] == 'B' && bytes[1] == 'M')
        return decode_stb("BMP", bytes, size, max_pixels, out);
    const char *kind = other_kind(bytes, size);
    if (kind)
        return DNR_FAIL(DNR_EDATA, "convert it to JPEG or PNG", "a %s picture, which is not read",
                        kind);
    return DNR_FAIL(DNR_EDATA, REPLACE, "not a picture: begins with bytes %02x %02x %02x %02x",
                    bytes[0], size > 1 ? bytes[1] : 0, size > 2 ? bytes[2] : 0,
                    size > 3 ? bytes[3] : 0);
}
