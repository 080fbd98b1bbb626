/* store.h: all that outlives a step. Plans own no state; a store is shared by all programs of a
 * run.
 *
 * dnri_params is the table of what the model owns, filled while its graph is built and shared by
 * the graphs of all programs. dnri_store is the memory behind it on one device:
 *
 *     MASTER    fp32 (fp64 on ref), flat, all trainable parameters
 *     GRAD      the same layout: gradients of one micro-batch, scaled by the loss scale
 *     GSUM      the same layout: sums over micro-batches (only where accumulate > 1)
 *     MOMENTUM  the same layout
 *     WEIGHT    the same layout in the compute type (an alias of MASTER where the types agree)
 *     BUFFER    running statistics, master type, flat
 *     EMA, EMA_BUFFER   moving averages of MASTER and BUFFER (only where train.ema is set)
 *     STATE     dnri_state       HEADER  dnri_header       CELL  the fed slot's device address
 *
 * Flat slabs are in the order in which backward completes the gradients (the reverse of the order
 * of use), each parameter aligned to DNRI_PARAM_ALIGN elements; the padding stays zero. */
#ifndef DNR_STORE_H
#define DNR_STORE_H

#include "tensor.h"
#include "state.h"

#define DNRI_PARAM_ALIGN 64
#define DNRI_NAME        96

typedef enum dnri_role {
    DNRI_MASTER,
    DNRI_GRAD,
    DNRI_GSUM,
    DNRI_MOMENTUM,
    DNRI_WEIGHT,
    DNRI_BUFFER,
    DNRI_EMA,
    DNRI_EMA_BUFFER,
    DNRI_STATE,
    DNRI_HEADER,
    DNRI_CELL,
    DNRI_ROLES
} dnri_role;

typedef enum dnri_param_kind {
    DNRI_CONV_W,  /* [K,R,S,C]; OIHW in files */
    DNRI_DENSE_W, /* [K,1,1,C]; [K,C] in files */
    DNRI_BIAS,    /* [1,1,1,K] */
    DNRI_NORM_W,  /* [1,1,1,C] */
    DNRI_NORM_B,  /* [1,1,1,C] */
    DNRI_RUNNING, /* a buffer: running_mean, running_var */
} dnri_param_kind;

typedef enum dnri_init {
    DNRI_INIT_ZERO,
    DNRI_INIT_ONE,
    DNRI_INIT_FAN_OUT, /* normal, std = sqrt(2 / (K·R·S)): He et al. 2015, as torchvision's ResNet
                        */
    DNRI_INIT_LINEAR,  /* uniform in ±1/sqrt(fan_in): PyTorch's nn.Linear; for its bias fan_in is
                          `fan` */
} dnri_init;

typedef struct dnri_param {
    char name[DNRI_NAME]; /* torchvision's: "layer1.0.conv1.weight" */
    dnri_param_kind kind;
    dnri_init init;
    int64_t fan;
    int64_t dim[4];
    int64_t count;  /* elements */
    int64_t offset; /* elements from the start of its slab (flat slabs, or BUFFER); set by _seal */
} dnri_param;

typedef struct dnri_params dnri_params;

dnri_params *dnri_params_new(void); /* NULL: out of memory */
void dnri_params_free(dnri_params *p);
/* Finds the parameter `proto->name` or adds it. The same name with other dims is DNR_EUSAGE, and so
 * is a new one after _seal. `*index` is its index in the table, in order of first use. */
dnr_status dnri_params_add(dnri_params *p, const dnri_param *proto, int *index);
int dnri_params_count(const dnri_params *p);
const dnri_param *dnri_params_at(const dnri_params *p, int index); /* valid until the next add */
int dnri_params_find(const dnri_params *p, const char *name);      /* -1: none */
/* Lays out the slabs (sets offsets); before it they have no elements. Idempotent. */
void dnri_params_seal(dnri_params *p);
int64_t dnri_params_flat(const dnri_params *p);    /* elements of a flat slab */
int64_t dnri_params_buffers(const dnri_params *p); /* elements of BUFFER */
/* Is the parameter weight-decayed? Norm weights and biases only where `decay_norm_bias`. */
bool dnri_param_decays(const dnri_param *p, bool decay_norm_bias);

/* Types of one run. */
typedef struct dnri_numerics {
    dnr_dtype compute; /* activations and low-precision weights */
    dnr_dtype master;  /* weights, gradients, statistics: F32, or F64 on ref */
    bool tf32;         /* F32 tensors may be multiplied in TF32 */
    bool scaled;       /* dynamic loss scaling (fp16) */
} dnri_numerics;

typedef struct dnri_store dnri_store;

/* What a store holds beside weights, running statistics and the small blocks. */
enum {
    DNRI_STORE_TRAIN = 1, /* GRAD and MOMENTUM */
    DNRI_STORE_SUMS = 2,  /* GSUM */
    DNRI_STORE_EMA = 4,   /* EMA and EMA_BUFFER */
};

/* Seals `params` and takes the memory, zeroed. Borrows both. */
dnr_status dnri_store_new(dnr_device *dev, dnri_params *params, const dnri_numerics *num,
                          unsigned holds, dnri_store **out);
void dnri_store_free(dnri_store *s);
size_t dnri_store_size(dnri_params *params, const dnri_numerics *num, unsigned holds);
/* Bytes of a slab; 0: there is none, or WEIGHT is an alias of MASTER. */
size_t dnri_store_bytes(const dnri_store *s, dnri_role role);
/* Device address of a parameter in a slab; param = -1: of the whole slab. NULL where the slab is
 * absent.
 * Norms work in the master type: as WEIGHT, their parameters are found in MASTER. */
void *dnri_store_ptr(const dnri_store *s, dnri_role role, int param);

/* Initial weights (He-normal …), zero momentum, fresh state. A pure function of (seed, name). */
dnr_status dnri_store_init(dnri_store *s, uint64_t seed);
/* The averages start anew at the weights and running statistics. Nothing to do without averages. */
dnr_status dnri_store_start_ema(dnri_store *s);
/* Exchanges the averages with the weights and running statistics; GRAD is overwritten. A second call
 * undoes the first, bit for bit. */
dnr_status dnri_store_swap_ema(dnri_store *s);
/* One parameter to and from the host, as doubles in the store's order [K,R,S,C]. Writing MASTER
 * renews WEIGHT. These wait for the device. */
dnr_status dnri_store_read(dnri_store *s, dnri_role role, int param, double *host);
dnr_status dnri_store_write(dnri_store *s, dnri_role role, int param, const double *host);
dnr_status dnri_store_read_state(dnri_store *s, dnri_state *out);
dnr_status dnri_store_write_state(dnri_store *s, const dnri_state *in);
dnri_params *dnri_store_params(const dnri_store *s);
/* Grows with each of these calls that changes weights or running statistics. */
uint64_t dnri_store_changes(const dnri_store *s);

#endif
