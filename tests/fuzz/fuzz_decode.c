/* fuzz_decode.c: any bytes as a picture: JPEG, PNG, BMP, and what is none of them. */
#include "fuzz.h"

#include "../../data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static dnri_picture p;
    static volatile uint8_t sink;
    if (dnri_decode(data, size, 1 << 16, &p) != DNR_OK)
        return 0;
    if (p.w < 1 || p.h < 1 || (int64_t)p.w * p.h > 1 << 16)
        abort();
    sink = (uint8_t)(p.rgb[0] ^ p.rgb[(size_t)p.w * (size_t)p.h * 3 - 1]); /* it is all there */
    (void)sink;
    return 0;
}
