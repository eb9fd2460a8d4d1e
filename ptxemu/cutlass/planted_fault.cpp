// planted_fault NAME: runs CUTLASS's kernels of this compute capability on the emulator with a
// fault of runtime/planted.def, or with "none". Prints each kernel and order before it runs. If a
// result is wrong it prints the reason and exits with status 1.
#include <cstdio>
#include <cstring>
#include <exception>

#include "check.h"

extern "C" bool ptxemu_plant(const char* name);

using namespace cutlass_oracle;

namespace {

constexpr Order kOrders[] = {{"at-once", "1"}, {"late", "1"}};

// Enough to see what the kernels can see: a ragged launch, and one of several tiles and steps of K.
std::vector<std::vector<Size>> some_launches(const Kernel& kernel) {
  const auto all = launches(kernel);
  return {all[1], all[kernel.grouped ? 2 : 3]};
}

int run_all() {
  for (const Order& order : kOrders) {
    set_order(order);
    std::mt19937 random(17);
    for (const Kernel* kernel : kernels()) {
      if (!fits_device(*kernel)) continue;
      std::printf("%s %s\n", kernel->name, order.name);
      std::fflush(stdout);
      for (const std::vector<Size>& sizes : some_launches(*kernel))
        for (const Data data : {Data::kExact, Data::kAny})
          if (const std::string wrong = check(*kernel, sizes, data, random); !wrong.empty()) {
            std::printf("wrong: %s\n", wrong.c_str());
            return 1;
          }
    }
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2 || !ptxemu_plant(std::strcmp(arguments[1], "none") ? arguments[1] : "")) {
    std::fprintf(stderr, "planted_fault: expected none or a fault of planted.def\n");
    return 2;
  }
  try {
    return run_all();
  } catch (const std::exception& error) {
    std::printf("wrong: %s\n", error.what());
    return 1;
  }
}
