/* extend.c: what programs add to the tables of models and lowerings. */
#include "extend.h"
#include "comm.h"

#include <string.h>

enum { MODELS = 64, ROWS = 256 };

static struct {
    const char *name;
    dnri_model_fn fn;
} models[MODELS];
static int n_models;

static struct {
    const char *backend;
    const dnri_lowering *row;
} rows[ROWS];
static int n_rows;

dnr_status dnr_extend_model(const char *name, dnri_model_fn model)
{
    dnri_model_fn taken;
    if (dnri_model_find(name, &taken) == DNR_OK)
        return DNR_FAIL(DNR_EUSAGE, "choose another name", "there is a model \"%s\" already", name);
    if (n_models == MODELS)
        return DNR_FAIL(DNR_EUSAGE, "register fewer models", "%d models were added already",
                        MODELS);
    models[n_models].name = name;
    models[n_models++].fn = model;
    return DNR_OK;
}

dnri_model_fn dnri_extended_model(const char *name)
{
    for (int i = 0; i < n_models; i++)
        if (strcmp(models[i].name, name) == 0)
            return models[i].fn;
    return NULL;
}

dnr_status dnri_extend_lowering(int abi, const char *backend, const dnri_lowering *row)
{
    if (abi != DNRI_BACKEND_ABI)
        return DNR_FAIL(DNR_EUSAGE, "build the program anew against this version's headers",
                        "the lowering of %s was built for another version of dnnrun",
                        row->def->name);
    if (n_rows == ROWS)
        return DNR_FAIL(DNR_EUSAGE, "register fewer ops", "%d lowerings were added already", ROWS);
    rows[n_rows].backend = backend;
    rows[n_rows++].row = row;
    return DNR_OK;
}

static const dnri_lowering *find(const dnr_device *dev, const dnri_op_def *def)
{
    for (int i = 0; i < n_rows; i++)
        if (rows[i].row->def == def && strcmp(rows[i].backend, dev->be->name) == 0)
            return rows[i].row;
    return NULL;
}

bool dnri_device_supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    if (dnri_comm_owns(op))
        return true;
    const dnri_lowering *row = find(dev, op->def);
    return row ? !row->supports || row->supports(dev, g, op) : dev->be->supports(dev, g, op);
}

bool dnri_device_prefers(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return dnri_device_supports(dev, g, op) &&
           (find(dev, op->def) || !dev->be->pays || dev->be->pays(dev, g, op));
}

dnr_status dnri_device_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    if (dnri_comm_owns(op))
        return dnri_comm_lower(o->comm, dev, op, out);
    const dnri_lowering *row = find(dev, op->def);
    return row ? row->lower(dev, g, op, o, out) : dev->be->lower(dev, g, op, o, out);
}
