/* picture.c: half blocks: the upper half has the foreground's colour, the lower the background's. */
#include "picture.h"

enum { COLUMNS = 32, LEAST = 16 };

/* Mean colour of the picture's part that cell (x, y) of a grid of `cells` covers. */
static void cell_colour(const uint8_t *rgb, int side, int cells, int x, int y, int colour[3])
{
    int x0 = x * side / cells, x1 = (x + 1) * side / cells, y0 = y * side / cells,
        y1 = (y + 1) * side / cells;
    x1 = x1 > x0 ? x1 : x0 + 1;
    y1 = y1 > y0 ? y1 : y0 + 1;
    for (int c = 0; c < 3; c++) {
        long sum = 0;
        for (int j = y0; j < y1; j++)
            for (int i = x0; i < x1; i++)
                sum += rgb[((long)j * side + i) * 3 + c];
        colour[c] = (int)(sum / ((long)(y1 - y0) * (x1 - x0)));
    }
}

void picture_draw(const uint8_t *rgb, int side, FILE *out)
{
    int cells = side < COLUMNS ? side : COLUMNS;
    while (cells < LEAST)
        cells += side;
    for (int y = 0; y < cells; y += 2) {
        for (int x = 0; x < cells; x++) {
            int up[3], down[3];
            cell_colour(rgb, side, cells, x, y, up);
            fprintf(out, "\033[38;2;%d;%d;%dm", up[0], up[1], up[2]);
            if (y + 1 < cells) { /* an odd last row has nothing below it */
                cell_colour(rgb, side, cells, x, y + 1, down);
                fprintf(out, "\033[48;2;%d;%d;%dm", down[0], down[1], down[2]);
            }
            fputs("▀", out);
        }
        fputs("\033[0m\n", out);
    }
}
