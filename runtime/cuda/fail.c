/* fail.c: statuses of CUDA, cuDNN and cuBLAS as errors with a likely cause and a remedy. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct advice {
    int code;
    dnr_status status;
    const char *cause, *remedy;
} advice;

#define REBOOT "look at dmesg for Xid messages and at nvidia-smi; run again"

static const advice cuda_advice[] = {
    {cudaErrorMemoryAllocation, DNR_EMEM, "the device's or the host's memory is exhausted",
     "lower train.batch, set memory.recompute=block, or stop other programs on the GPU"},
    {cudaErrorInsufficientDriver, DNR_EDEVICE, "no NVIDIA driver, or one older than this CUDA",
     "install a newer NVIDIA driver (nvidia-smi shows its CUDA version), or use device=cpu"},
    {cudaErrorNoDevice, DNR_EDEVICE, "the driver sees no GPU",
     "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device=cpu"},
    {cudaErrorInvalidDevice, DNR_EDEVICE, "there is no GPU of that number",
     "use a number that nvidia-smi -L lists"},
    {cudaErrorInitializationError, DNR_EDEVICE, "the driver did not start",
     "check that nvidia-smi works for this user, and that the process was not forked after start"},
    {cudaErrorSystemDriverMismatch, DNR_EDEVICE, "kernel and user parts of the driver differ",
     "reboot after the driver's update"},
    {cudaErrorDevicesUnavailable, DNR_EDEVICE, "another process holds the GPU exclusively",
     "wait for it, or choose another GPU with device=cuda:N"},
    {cudaErrorNoKernelImageForDevice, DNR_EDEVICE, "this build has no code for that GPU",
     "build with -DCMAKE_CUDA_ARCHITECTURES=native"},
    {cudaErrorInvalidValue, DNR_EFAIL, "an argument or address is wrong",
     "report this as a bug, with the line above"},
    {cudaErrorInvalidConfiguration, DNR_EFAIL, "a launch asks for an impossible grid",
     "report this as a bug, with the line above"},
    {cudaErrorIllegalAddress, DNR_EFAIL, "a kernel launched earlier touched foreign memory",
     "run under compute-sanitizer and report what it says"},
    {cudaErrorMisalignedAddress, DNR_EFAIL, "a kernel launched earlier used a misaligned address",
     "run under compute-sanitizer and report what it says"},
    {cudaErrorLaunchFailure, DNR_EFAIL, "a kernel launched earlier crashed",
     "run under compute-sanitizer and report what it says"},
    {cudaErrorLaunchTimeout, DNR_EDEVICE, "the display's watchdog stopped a kernel",
     "use a GPU without a display, or lower train.batch"},
    {cudaErrorECCUncorrectable, DNR_EDEVICE, "the GPU's memory has a fault", REBOOT},
    {cudaErrorHardwareStackError, DNR_EDEVICE, "the GPU failed", REBOOT},
    {cudaErrorUnknown, DNR_EDEVICE, "the driver failed", REBOOT},
    {0, DNR_EDEVICE, "an earlier asynchronous error, or the driver",
     "run again with CUDA_LAUNCH_BLOCKING=1 to see which launch fails"},
};

static const advice cudnn_advice[] = {
    {CUDNN_STATUS_NOT_INITIALIZED, DNR_EDEVICE, "cuDNN could not start on this GPU",
     "check that the driver is new enough and that LD_LIBRARY_PATH finds one whole cuDNN 9"},
    {CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH, DNR_EDEVICE,
     "the libcudnn_*.so files found are of several versions",
     "let LD_LIBRARY_PATH name the folder of one cuDNN only"},
    {CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, DNR_EDEVICE, "a libcudnn_*.so file is missing",
     "install all of cuDNN 9 and let LD_LIBRARY_PATH name its folder"},
    {CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, DNR_EMEM,
     "the device's memory is exhausted", "lower train.batch or memory.fraction"},
    {CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, DNR_EMEM, "the host's memory is exhausted",
     "free some host memory"},
    {CUDNN_STATUS_BAD_PARAM, DNR_EFAIL, "shapes, strides or types do not fit together",
     "check the model's shapes; report this as a bug, with the line above"},
    {CUDNN_STATUS_NOT_SUPPORTED, DNR_EDEVICE,
     "no engine of this cuDNN version takes these shapes and types on this GPU",
     "use a newer cuDNN, channels in multiples of 8, or another train.precision"},
    {CUDNN_STATUS_EXECUTION_FAILED, DNR_EDEVICE,
     "a launch failed, or an earlier asynchronous error surfaced here",
     "run again with CUDA_LAUNCH_BLOCKING=1; set cudnn.benchmark=false to take another engine"},
    {0, DNR_EDEVICE, "cuDNN failed inside",
     "use another cuDNN 9 release; CUDNN_LOGLEVEL_DBG=2 tells more"},
};

static const advice cublas_advice[] = {
    {CUBLAS_STATUS_NOT_INITIALIZED, DNR_EDEVICE, "cuBLAS could not start on this GPU",
     "check the driver, and that LD_LIBRARY_PATH finds the cuBLAS of this CUDA"},
    {CUBLAS_STATUS_ALLOC_FAILED, DNR_EMEM, "memory is exhausted",
     "lower train.batch or memory.fraction"},
    {CUBLAS_STATUS_INVALID_VALUE, DNR_EFAIL, "shapes, strides or types do not fit together",
     "report this as a bug, with the line above"},
    {CUBLAS_STATUS_ARCH_MISMATCH, DNR_EDEVICE, "this GPU is too old for the type",
     "use another train.precision"},
    {CUBLAS_STATUS_NOT_SUPPORTED, DNR_EDEVICE, "no algorithm takes these shapes and types",
     "use another train.precision or a newer cuBLAS"},
    {CUBLAS_STATUS_EXECUTION_FAILED, DNR_EDEVICE,
     "a launch failed, or an earlier asynchronous error surfaced here",
     "run again with CUDA_LAUNCH_BLOCKING=1 to see which launch fails"},
    {0, DNR_EDEVICE, "cuBLAS failed inside", "use another release of the CUDA toolkit"},
};

/* The row of `code`, else of the category `general` of which it is a special case, else the last. */
static const advice *find(const advice *table, int code, int general)
{
    const advice *row = table, *of_general = NULL;
    for (; row->code; row++) {
        if (row->code == code)
            return row;
        if (row->code == general)
            of_general = row;
    }
    return of_general ? of_general : row;
}

static dnr_status fail(const char *where, const advice *a, const char *name, const char *text,
                       const char *fmt, va_list ap)
{
    char doing[360];
    vsnprintf(doing, sizeof doing, fmt, ap);
    return dnri_fail(a->status, where, a->remedy, "%s: %s (%s): %s", doing, name, text, a->cause);
}

dnr_status dnri_cuda_fail(const char *where, cudaError_t e, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    (void)cudaGetLastError(); /* told here: the next launch is not to blame */
    dnr_status st = fail(where, find(cuda_advice, (int)e, 0), cudaGetErrorName(e),
                         cudaGetErrorString(e), fmt, ap);
    va_end(ap);
    return st;
}

dnr_status dnri_cudnn_fail(const char *where, cudnnStatus_t s, const char *fmt, ...)
{
    /* cuDNN's own words say most; they come in several lines */
    char text[200] = "";
    cudnnGetLastErrorString(text, sizeof text);
    for (char *c = text; *c; c++)
        if (*c == '\n')
            *c = ' ';
    va_list ap;
    va_start(ap, fmt);
    dnr_status st = fail(where, find(cudnn_advice, (int)s, (int)s / 1000 * 1000),
                         cudnnGetErrorString(s), text[0] ? text : "no further word", fmt, ap);
    va_end(ap);
    return st;
}

dnr_status dnri_cublas_fail(const char *where, cublasStatus_t s, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    dnr_status st = fail(where, find(cublas_advice, (int)s, 0), cublasLtGetStatusName(s),
                         cublasLtGetStatusString(s), fmt, ap);
    va_end(ap);
    return st;
}
