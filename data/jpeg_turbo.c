/* jpeg_turbo.c: JPEG through libjpeg-turbo. */
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <jpeglib.h>
#include <jerror.h>

#include "data.h"

#define SCANS_MAX                                                                                  \
    500           /* a small file may hold any number of scans, each as slow as a whole picture */
#define PADDING 8 /* bytes after a scan that raise no suspicion */
#define REPLACE "replace or remove the file, or set data.on_error = skip"

typedef struct job {
    struct jpeg_decompress_struct c;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf back;
    char message[JMSG_LENGTH_MAX];
} job;

static void on_error(j_common_ptr c)
{
    job *j = c->client_data;
    c->err->format_message(c, j->message);
    longjmp(j->back, 1);
}

/* Warnings that leave the picture whole pass; the others mean that pixels are made up. libjpeg-turbo's fast
 * path says nothing of a bad Huffman code, but much coded data left over tells of one; a few bytes of
 * padding are common. */
static void on_message(j_common_ptr c, int level)
{
    int code = c->err->msg_code;
    bool padding = code == JWRN_EXTRANEOUS_DATA && (((j_decompress_ptr)c)->input_scan_number == 0 ||
                                                    c->err->msg_parm.i[0] <= PADDING);
    if (level < 0 && !padding && code != JWRN_ADOBE_XFORM && code != JWRN_JFIF_MAJOR)
        on_error(c);
}

static void on_progress(j_common_ptr c)
{
    job *j = c->client_data;
    if (((j_decompress_ptr)c)->input_scan_number > SCANS_MAX) {
        snprintf(j->message, sizeof j->message, "more than %d scans", SCANS_MAX);
        longjmp(j->back, 1);
    }
}

/* CMYK as files hold it, inverted (Adobe's custom, which Pillow assumes of all), to RGB. */
static void from_cmyk(const uint8_t *in, uint8_t *out, int n)
{
    for (int i = 0; i < n; i++, in += 4)
        for (int k = 0; k < 3; k++)
            *out++ = (uint8_t)((in[k] * in[3] + 127) / 255);
}

static void read_rows(job *j, dnri_picture *out)
{
    j_decompress_ptr c = &j->c;
    size_t stride = (size_t)out->w * 3;
    bool cmyk = c->out_color_space == JCS_CMYK;
    JSAMPARRAY row = NULL;
    if (cmyk)
        row = c->mem->alloc_sarray((j_common_ptr)c, JPOOL_IMAGE, c->output_width * 4, 1);
    while (c->output_scanline < c->output_height) {
        uint8_t *dst = out->rgb + c->output_scanline * stride;
        if (cmyk) {
            jpeg_read_scanlines(c, row, 1);
            from_cmyk(row[0], dst, out->w);
        } else
            jpeg_read_scanlines(c, &dst, 1);
    }
}

/* 0: decoded; 1: libjpeg gave up, see message; 2: another failure, recorded by DNR_FAIL. */
static int decode(job *j, const uint8_t *bytes, size_t size, int64_t max_pixels, dnri_picture *out)
{
    j_decompress_ptr c = &j->c;
    if (setjmp(j->back))
        return 1;
    jpeg_create_decompress(c);
    c->progress = &j->progress;
    jpeg_mem_src(c, bytes, (unsigned long)size);
    jpeg_read_header(c, TRUE);
    if (dnri_decode_check(c->image_width, c->image_height, max_pixels) != DNR_OK ||
        dnri_picture_fit(out, (int)c->image_width, (int)c->image_height) != DNR_OK)
        return 2;
    c->out_color_space = c->num_components == 4 ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(c);
    read_rows(j, out);
    jpeg_finish_decompress(c);
    return 0;
}

dnr_status dnri_decode_jpeg(const uint8_t *bytes, size_t size, int64_t max_pixels,
                            dnri_picture *out)
{
    job *j = calloc(1, sizeof *j);
    if (!j)
        return DNR_FAIL_NOMEM();
    j->c.err = jpeg_std_error(&j->errors);
    j->errors.error_exit = on_error;
    j->errors.emit_message = on_message;
    j->progress.progress_monitor = on_progress;
    j->c.client_data = j;
    dnr_status st = DNR_OK;
    switch (decode(j, bytes, size, max_pixels, out)) {
    case 1:
        st = DNR_FAIL(DNR_EDATA, REPLACE, "damaged JPEG: %s", j->message);
        break;
    case 2:
        st = dnr_last_error()->status;
        break;
    }
    jpeg_destroy_decompress(&j->c);
    free(j);
    return st;
}
