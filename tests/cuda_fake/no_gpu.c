// What stands for libcuda.so.1 and libcublasLt.so.13 where the true libcudnn plans for a GPU that is not there: modules can be
// "loaded", nothing can be launched. cuDNN looks all of these up by name before it compiles a kernel.
#include <stddef.h>

enum { DONE = 0, NO_DEVICE = 100 };

#define MADE(name) int name(void** made) { return *made = (void*)made, DONE; }
MADE(cuLibraryLoadData) MADE(cuLibraryGetKernel) MADE(cuModuleLoadData) MADE(cuModuleGetFunction)

#define WELL(name) int name(void) { return DONE; }
WELL(cuLibraryUnload) WELL(cuModuleUnload) WELL(cuKernelSetAttribute) WELL(cuKernelGetAttribute) WELL(cuFuncSetAttribute)

#define REFUSED(name) int name(void) { return NO_DEVICE; }
REFUSED(cuInit) REFUSED(cuDriverGetVersion) REFUSED(cuGetErrorName) REFUSED(cuGetErrorString) REFUSED(cuDeviceGet)
REFUSED(cuDeviceGetCount) REFUSED(cuCtxGetCurrent) REFUSED(cuCtxGetLimit) REFUSED(cuCtxPopCurrent) REFUSED(cuCtxPushCurrent)
REFUSED(cuStreamGetCtx) REFUSED(cuLinkCreate) REFUSED(cuLinkAddData) REFUSED(cuLinkComplete) REFUSED(cuLinkDestroy)
REFUSED(cuLaunchKernel) REFUSED(cuLaunchKernelEx) REFUSED(cuLaunchCooperativeKernel) REFUSED(cuLibraryLoadFromFile)
REFUSED(cuFuncGetAttribute) REFUSED(cuOccupancyMaxPotentialClusterSize) REFUSED(cuTensorMapEncodeIm2col)
REFUSED(cuTensorMapEncodeTiled)

size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
