/* picture.h: small pictures on a terminal. */
#ifndef PICTURE_H
#define PICTURE_H

#include <stdint.h>
#include <stdio.h>

/* Draws side x side RGB pixels at most 32 columns wide: each character is two pixels, one above the other, in 24-bit
 * colours. Small pictures are enlarged by whole factors. */
void picture_draw(const uint8_t *rgb, int side, FILE *out);

#endif
