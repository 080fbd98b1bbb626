/* fuzz_records.c: any bytes as the metrics.jsonl of a killed run, mended for a resume: what is kept is kept again. */
#include "fuzz.h"

#include <string.h>

#include "../../tools/rundir.h"

static char *mend(const char *text, size_t size, size_t *out_size, int *damaged)
{
    char *out = NULL;
    FILE *from = fmemopen((void *)(uintptr_t)text, size, "r"), *to = open_memstream(&out, out_size);
    if (!from || !to)
        abort();
    *damaged = rundir_keep_records(from, to, 1000);
    fclose(from);
    fclose(to);
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t once = 0, twice = 0;
    int damaged;
    if (!size)
        return 0;
    char *a = mend((const char *)data, size, &once, &damaged);
    if (once > size)
        abort();
    if (once) {
        char *b = mend(a, once, &twice, &damaged);
        if (damaged || twice != once || memcmp(a, b, once))
            abort();
        free(b);
    }
    free(a);
    return 0;
}
