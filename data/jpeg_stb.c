/* jpeg_stb.c: JPEG through stb_image, where libjpeg-turbo is not built in (CMake takes one of the two). It
 * knows no arithmetic coding. */
#include <stdlib.h>
#include <string.h>

#include "data.h"

#define STBI_ONLY_JPEG
#define STBI_NO_STDIO
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wunused-function" /* gcc reports at the file's end: no pop */
#include <stb/stb_image.h>

#define REPLACE "replace or remove the file, or set data.on_error = skip"

/* Do the code lengths of each Huffman table of a segment's body add up to at most 256 codes? stb_image 2.27
 * writes them past their array before it looks. */
static bool huffman_fits(const uint8_t *p, size_t n)
{
    while (n >= 17) {
        size_t codes = 0;
        for (int i = 1; i <= 16; i++)
            codes += p[i];
        if (codes > 256 || codes + 17 > n)
            return false;
        p += codes + 17;
        n -= codes + 17;
    }
    return n == 0;
}

/* Walks the markers to the end of the picture: stb_image fills what is missing with gray. */
static dnr_status check_jpeg(const uint8_t *p, size_t size)
{
    for (size_t at = 2; size - at >= 2;) {
        if (p[at] != 0xff) /* coded data, or padding */
            at++;
        else if (p[at + 1] == 0xd9)
            return DNR_OK;
        else if (p[at + 1] == 0xff)
            at++;
        else if (p[at + 1] == 0 || (p[at + 1] >= 0xd0 && p[at + 1] <= 0xd8) || p[at + 1] == 1)
            at += 2;
        else {
            size_t length = size - at >= 4 ? (size_t)p[at + 2] << 8 | p[at + 3] : 0;
            if (length < 2 || length + 2 > size - at)
                break;
            if (p[at + 1] == 0xc4 && !huffman_fits(p + at + 4, length - 2))
                return DNR_FAIL(DNR_EDATA, REPLACE, "damaged JPEG: impossible Huffman table");
            at += length + 2;
        }
    }
    return DNR_FAIL(DNR_EDATA, REPLACE, "truncated JPEG: its end is missing after %zu bytes", size);
}

dnr_status dnri_decode_jpeg(const uint8_t *bytes, size_t size, int64_t max_pixels,
                            dnri_picture *out)
{
    DNR_TRY(check_jpeg(bytes, size));
    int w, h, channels, n = (int)size; /* below 2^31: see dnri_decode */
    if (!stbi_info_from_memory(bytes, n, &w, &h, &channels))
        return DNR_FAIL(DNR_EDATA, REPLACE, "damaged JPEG: %s", stbi_failure_reason());
    DNR_TRY(dnri_decode_check(w, h, max_pixels));
    uint8_t *rgb = stbi_load_from_memory(bytes, n, &w, &h, &channels, 3);
    if (!rgb)
        return DNR_FAIL(DNR_EDATA, REPLACE, "damaged JPEG: %s", stbi_failure_reason());
    free(out->rgb);
    *out = (dnri_picture){rgb, w, h, (size_t)w * (size_t)h * 3};
    return DNR_OK;
}
