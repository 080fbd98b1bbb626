/* fuzz_safetensors.c: any bytes as a file of weights; what its header promises is read. */
#include "fuzz.h"

#include "../../runtime/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dnri_st_file *f;
    if (dnri_st_open(fuzz_file(data, size, ".safetensors"), &f) != DNR_OK)
        return 0;
    for (int i = 0; i < dnri_st_count(f); i++) {
        const dnri_st_tensor *t = dnri_st_at(f, i);
        if (t->count < 0 || t->bytes > size)
            abort(); /* more than the file has */
        double *host = malloc((size_t)t->count * sizeof *host + 1);
        if (host && t->type != DNRI_ST_OTHER)
            dnri_st_read(f, t, host);
        free(host);
        dnri_st_find(f, t->name);
    }
    dnri_st_metadata(f, "architecture");
    dnri_st_close(f);
    return 0;
}
