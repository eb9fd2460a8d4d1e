/* MPI as the communication between ranks: what `nvfp4-moe verify --ep` and `bench --ep` load under
 * mpirun or srun, and an example of nvfp4_moe_exchange_callbacks for your own program. */
#ifndef NVFP4_MOE_MPI_H_
#define NVFP4_MOE_MPI_H_

#include <nvfp4_moe/nvfp4_moe.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Initializes MPI if the program has not, and fills the callbacks, this process's rank in
 * MPI_COMM_WORLD, the number of ranks, and the rank's number on its host. Returns 0, or another
 * number with the cause in error (less than error_bytes). Once. */
__attribute__((visibility("default"))) int32_t nvfp4_moe_mpi_connect(
    nvfp4_moe_exchange_callbacks* callbacks, int32_t* rank, int32_t* world, int32_t* local_rank,
    char* error, size_t error_bytes);

#ifdef __cplusplus
}
#endif
#endif /* NVFP4_MOE_MPI_H_ */
