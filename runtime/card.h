/* card.h: what a file of weights says of its model, so that it can be used without a cfg. */
#ifndef DNR_CARD_H
#define DNR_CARD_H

#include "trainer.h"

/* Pairs of key and text, as dnri_st_write takes them. The notes are the trainer's. */
typedef struct dnri_card {
    const char *pairs[2 * (DNRI_NOTES + 8) + 1];
    char classes[16], image[16], mean[80], std[80];
} dnri_card;

/* Fills in the model and dnr_trainer_note's notes. */
void dnri_card_make(const dnr_trainer *t, dnri_card *out);

#endif
