// Declares functions that nvcc compiles for both hosts and devices.
#pragma once

#ifdef __CUDACC__
#define NVFP4_MOE_HOST_DEVICE __host__ __device__
#else
#define NVFP4_MOE_HOST_DEVICE
#endif
