/* extend.h: layers and models of your own, from a program or library beside libdnnrun; share/dnnrun/examples/layer.c
 * adds both. A layer is a dnri_op_def (graph.h) and, for each back end that shall run it, a dnri_lowering (backend.h);
 * a model is a function that calls layers (model.h, layers/layers.h).
 *
 * What these headers show is the engine's inside: unlike dnnrun.h it may change with every version, so build against
 * the version that you run. Registrations last for the life of the process; make them before a trainer is created,
 * from one thread. What is handed over is borrowed and must last as long. For C, not C++. */
#ifndef DNR_EXTEND_H
#define DNR_EXTEND_H

#include "backend.h"
#include "model.h"

/* dnr_trainer_create knows the model `name` from now on. A name that is taken is DNR_EUSAGE. */
dnr_status dnr_extend_model(const char *name, dnri_model_fn model);

dnr_status dnri_extend_lowering(int abi, const char *backend, const dnri_lowering *row);
/* The back end ("cpu", "cuda") lowers the op row->def by `row` from now on, whether it has it or not. */
static inline dnr_status dnr_extend_lowering(const char *backend, const dnri_lowering *row)
{
    return dnri_extend_lowering(DNRI_BACKEND_ABI, backend, row);
}

/* NULL: there is none. */
dnri_model_fn dnri_extended_model(const char *name);
#endif
