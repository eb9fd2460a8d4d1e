// Launches a kernel on products of these sizes and checks the result.
#ifndef PTXEMU_CUTLASS_CHECK_H_
#define PTXEMU_CUTLASS_CHECK_H_

#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "problem.h"

namespace cutlass_oracle {

struct Order {
  const char* name;  // PTXEMU_ORDER
  const char* seed;  // PTXEMU_SEED
};

// All kernels, and their launches: a grouped kernel takes several products at once, others take
// one.
const std::vector<const Kernel*>& kernels();
std::vector<std::vector<Size>> launches(const Kernel& kernel);

// Asks the emulator for this order of asynchronous work, and for tcgen05.ld as ptxas compiles it:
// CUTLASS reads registers before tcgen05.wait::ld. The PTX manual forbids that, but ptxas waits for
// the registers, so it works.
void set_order(const Order& order);

// Whether the device is of the generation that the kernel needs.
bool fits_device(const Kernel& kernel);

// Returns "" if every product is right, else what is wrong.
std::string check(const Kernel& kernel, const std::vector<Size>& sizes, Data data,
                  std::mt19937& random);

}  // namespace cutlass_oracle

#endif  // PTXEMU_CUTLASS_CHECK_H_
