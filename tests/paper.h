/* paper.h: the CUDA back end on a machine without a GPU, for the device that golden/cudnn_h200.json describes. Needs
 * cuDNN, and the toolkit's stand-in for the driver where there is none. */
#ifndef DNR_PAPER_H
#define DNR_PAPER_H

#include "rig.h"

const char *paper_properties(void); /* cuDNN's JSON of the device */
void *
paper_symbol(const char *name); /* of the CUDA module; NULL, with a message: this build has none */
bool paper_open(size_t memory,
                dnr_device **out); /* a device of so many bytes; false: see paper_symbol */

#endif
