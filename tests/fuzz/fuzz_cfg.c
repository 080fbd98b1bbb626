/* fuzz_cfg.c: any bytes as a cfg; the first line also as an assignment of the command line. */
#include "fuzz.h"

#include <string.h>

#include "../../tools/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static cfg c;
    dnr_error err = {0};
    char line[256];
    FILE *f = size ? fmemopen((void *)(uintptr_t)data, size, "r") : NULL;
    if (!f)
        return 0;
    cfg_init(&c);
    dnr_status st = cfg_read(&c, f, "folder/some.cfg", &err);
    fclose(f);
    snprintf(line, sizeof line, "%.*s", (int)(size < 255 ? size : 255), (const char *)data);
    line[strcspn(line, "\n")] = 0;
    if (st == DNR_OK)
        st = cfg_set(&c, line, &err);
    if (st == DNR_OK)
        st = cfg_check(&c, &err);
    if (st != DNR_OK && (!err.what[0] || !err.remedy[0]))
        abort(); /* an error must say what and what to do */
    return 0;
}
