/* Stubs for the CUDA driver functions that NIXL 0.9's UCX plug-in is linked with, on machines
   without CUDA: each returns "no device". */

#define NO_DEVICE(call) int call(void) { return 100; }

NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxPopCurrent_v2)
NO_DEVICE(cuCtxPushCurrent_v2)
NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDevicePrimaryCtxRelease_v2)
NO_DEVICE(cuDevicePrimaryCtxRetain)
NO_DEVICE(cuPointerGetAttributes)
