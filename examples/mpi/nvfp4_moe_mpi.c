/* all_to_all_v by nonblocking messages, so that a rank that does not come is reported when the time
 * is over. Both ends copy through memory of the adapter: after a failure MPI may still write to it,
 * when the caller's memory is gone. */
#include "nvfp4_moe_mpi.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kChunk = 1 << 30 }; /* bytes of a message at most: MPI counts in int */

static struct {
  MPI_Comm comm;
  int rank, world;
  int initialized_here, failed;
} mpi;

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int mpi_failure(int code, const char* what, char* error, size_t error_bytes) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  snprintf(error, error_bytes, "%s: %s", what, text);
  return 1;
}

static size_t chunks_of(const int64_t* bytes, int world) {
  size_t chunks = 0;
  for (int rank = 0; rank < world; ++rank) chunks += (size_t)((bytes[rank] + kChunk - 1) / kChunk);
  return chunks;
}

static int64_t total_of(const int64_t* bytes, int world) {
  int64_t total = 0;
  for (int rank = 0; rank < world; ++rank) total += bytes[rank];
  return total;
}

/* Starts the messages of one direction; rank_of (requests) gets the other rank of each. */
static int start(int sends, char* data, const int64_t* bytes, MPI_Request* requests, int* rank_of,
                 size_t* count) {
  for (int rank = 0; rank < mpi.world; ++rank) {
    for (int64_t at = 0; at < bytes[rank]; at += kChunk) {
      const int size = (int)(bytes[rank] - at < kChunk ? bytes[rank] - at : kChunk);
      const int code =
          sends ? MPI_Isend(data + at, size, MPI_BYTE, rank, 0, mpi.comm, &requests[*count])
                : MPI_Irecv(data + at, size, MPI_BYTE, rank, 0, mpi.comm, &requests[*count]);
      if (code != MPI_SUCCESS) return code;
      rank_of[(*count)++] = rank;
    }
    data += bytes[rank];
  }
  return MPI_SUCCESS;
}

static int32_t all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                            const int64_t* recv_bytes, int64_t timeout_ms, char* error,
                            size_t error_bytes) {
  (void)user;
  const double end_s = now_s() + 1e-3 * (double)timeout_ms;
  const int64_t sent = total_of(send_bytes, mpi.world), received = total_of(recv_bytes, mpi.world);
  const size_t most = chunks_of(send_bytes, mpi.world) + chunks_of(recv_bytes, mpi.world) + 1;
  char* const memory = malloc((size_t)(sent + received) + 1); /* recv's blocks, then send's */
  MPI_Request* const requests = malloc(most * sizeof(MPI_Request));
  int* const rank_of = malloc(most * sizeof(int));
  if (memory == NULL || requests == NULL || rank_of == NULL) {
    snprintf(error, error_bytes, "out of memory for %lld bytes", (long long)(sent + received));
    mpi.failed = 1;
    free(memory), free(requests), free(rank_of);
    return 1;
  }
  if (sent > 0) memcpy(memory + received, send, (size_t)sent);
  size_t count = 0;
  int code = start(0, memory, recv_bytes, requests, rank_of, &count);
  if (code == MPI_SUCCESS)
    code = start(1, memory + received, send_bytes, requests, rank_of, &count);
  int done = 0;
  while (code == MPI_SUCCESS && !done) {
    code = MPI_Testall((int)count, requests, &done, MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS || done || now_s() < end_s) continue;
    for (size_t i = 0; i < count; ++i) {
      int one = 0;
      if (requests[i] == MPI_REQUEST_NULL || (MPI_Test(&requests[i], &one, MPI_STATUS_IGNORE), one))
        continue;
      snprintf(error, error_bytes, "expected rank %d within %lld ms, got none", rank_of[i],
               (long long)timeout_ms);
      break;
    }
    mpi.failed = 1; /* memory and requests stay: MPI may still use them */
    return 1;
  }
  if (code != MPI_SUCCESS) {
    mpi.failed = 1;
    return mpi_failure(code, "MPI", error, error_bytes);
  }
  if (received > 0) memcpy(recv, memory, (size_t)received);
  free(memory), free(requests), free(rank_of);
  return 0;
}

/* MPI_Finalize waits for all ranks: not after a failure, when mpirun ends those that are left. */
static void finish(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (mpi.initialized_here && !mpi.failed && !finalized) MPI_Finalize();
}

int32_t nvfp4_moe_mpi_connect(nvfp4_moe_exchange_callbacks* callbacks, int32_t* rank,
                              int32_t* world, int32_t* local_rank, char* error,
                              size_t error_bytes) {
  int initialized = 0, provided = MPI_THREAD_SINGLE;
  int code = MPI_Initialized(&initialized);
  if (code == MPI_SUCCESS && !initialized)
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
  if (code == MPI_SUCCESS) code = MPI_Query_thread(&provided);
  if (code != MPI_SUCCESS) return mpi_failure(code, "MPI_Init_thread", error, error_bytes);
  if (provided < MPI_THREAD_SERIALIZED) {
    snprintf(error, error_bytes, "expected MPI_THREAD_SERIALIZED or more, got %d", provided);
    return 1;
  }
  mpi.initialized_here = !initialized;
  if (mpi.initialized_here) atexit(finish);
  MPI_Comm host = MPI_COMM_NULL;
  if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi.comm);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(mpi.comm, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(mpi.comm, &mpi.rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(mpi.comm, &mpi.world);
  if (code == MPI_SUCCESS)
    code = MPI_Comm_split_type(mpi.comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  int number_here = 0;
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(host, &number_here);
  if (code == MPI_SUCCESS) code = MPI_Comm_free(&host);
  if (code != MPI_SUCCESS) return mpi_failure(code, "MPI", error, error_bytes);
  memset(callbacks, 0, sizeof(*callbacks));
  callbacks->struct_size = sizeof(*callbacks);
  callbacks->all_to_all_v = all_to_all_v;
  *rank = mpi.rank, *world = mpi.world, *local_rank = number_here;
  return 0;
}
