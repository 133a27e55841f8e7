/* Two error paths of CuTe DSL's runtime library, so that exported kernels link without that library of 43 MB. */
#include <stdio.h>

extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);
extern const char *cudaGetErrorString(int error);

void CuteDSLRT_TVMFFISetRaisedCudaError(int error) {
  char message[256];
  snprintf(message, sizeof message, "CUDA error %d: %s", error, cudaGetErrorString(error));
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(int error) { CuteDSLRT_TVMFFISetRaisedCudaError(error); }
