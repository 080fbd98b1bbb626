/* fuzz_tar.c: any bytes as a tar of pictures, opened as a source and read. */
#include "fuzz.h"

#include "../../data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static dnri_buffer buffer;
    dnr_source *s;
    if (dnr_source_open(fuzz_file(data, size, ".tar"), NULL, &s) != DNR_OK)
        return 0;
    for (int64_t i = 0; i < dnr_source_count(s) && i < 8; i++) {
        if (dnr_source_label(s, i) < 0 || dnr_source_label(s, i) >= dnr_source_classes(s) ||
            !dnr_source_sample_name(s, i))
            abort();
        s->ops->read(s, i, &buffer);
    }
    dnr_source_close(s);
    return 0;
}
