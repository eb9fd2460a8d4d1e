// Declares functions that nvcc compiles for hosts and devices alike.
#pragma once

#ifdef __CUDACC__
#define NVFP4_MOE_HOST_DEVICE __host__ __device__
#else
#define NVFP4_MOE_HOST_DEVICE
#endif
