// Kernels from CUTLASS's builders, and their launch. A kernel is a `Config`: tiles, types and
// schedules.
#ifndef PTXEMU_CUTLASS_GEMM_CUH_
#define PTXEMU_CUTLASS_GEMM_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "kernels.h"

namespace cutlass_oracle {

using Nvfp4 = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using Bf16 = cutlass::bfloat16_t;
using E2m1 = cutlass::float_e2m1_t;
using Ue4m3 = cutlass::float_ue4m3_t;
using Auto = cutlass::gemm::collective::KernelScheduleAuto;
using EpilogueAuto = cutlass::epilogue::collective::EpilogueScheduleAuto;

// An output in E2M1 with scales over 16 columns, as quantize makes them, or a plain one.
template <class D>
using Fusion =
    std::conditional_t<std::is_same_v<D, E2m1>,
                       cutlass::epilogue::fusion::LinCombBlockScaleFactor<
                           16, E2m1, float, Ue4m3, cutlass::layout::RowMajor, Bf16>,
                       cutlass::epilogue::fusion::LinearCombination<D, float, Bf16, float>>;

// The defaults of a Config.
struct Sm100Config {
  using Arch = cutlass::arch::Sm100;
  using Operand = Nvfp4;
  using D = Bf16;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Schedule = Auto;
  using EpilogueSchedule = EpilogueAuto;
  static constexpr bool kGrouped = false;
};
struct Sm120Config : Sm100Config {
  using Arch = cutlass::arch::Sm120;
};

template <class Config>
struct Built {
  using Arch = typename Config::Arch;
  using Operand = typename Config::Operand;
  using D = typename Config::D;
  using Tile = typename Config::Tile;
  using Cluster = typename Config::Cluster;
  static constexpr bool kNvfp4 = std::is_same_v<Operand, Nvfp4>;
  static constexpr bool kGrouped = Config::kGrouped;
  using Class = std::conditional_t<kNvfp4, cutlass::arch::OpClassBlockScaledTensorOp,
                                   cutlass::arch::OpClassTensorOp>;
  using EpilogueClass = std::conditional_t<std::is_same_v<Arch, cutlass::arch::Sm120>,
                                           cutlass::arch::OpClassBlockScaledTensorOp, Class>;
  // Layouts are passed by pointer, one a group, to grouped kernels.
  template <class Layout>
  using Passed = std::conditional_t<kGrouped, Layout*, Layout>;
  using RowMajor = Passed<cutlass::layout::RowMajor>;
  using ColumnMajor = Passed<cutlass::layout::ColumnMajor>;
  static constexpr int kAlignment = kNvfp4 ? 32 : 8;
  static constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<D>::value;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, EpilogueClass, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float,
      float, Bf16, RowMajor, 8, D, RowMajor, kAlignmentD, typename Config::EpilogueSchedule,
      Fusion<D>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, Class, Operand, RowMajor, kAlignment, Operand, ColumnMajor, kAlignment, float, Tile,
      Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Config::Schedule>::CollectiveOp;
  using Shape =
      std::conditional_t<kGrouped, cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>,
                         cute::Shape<int, int, int, int>>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<Shape, Mainloop, Epilogue, void>>;
};

// The stride of a row-major (rows, columns) matrix as CUTLASS names it.
template <class Stride>
Stride row_stride(int columns) {
  Stride stride{};
  cute::get<0>(stride) = columns;
  return stride;
}

// A copy of an array on the device. It is never freed: a test is a process.
template <class T>
T* on_device(const std::vector<T>& host) {
  void* device = nullptr;
  if (cudaMalloc(&device, host.size() * sizeof(T)) != cudaSuccess) return nullptr;
  cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  return static_cast<T*>(device);
}

template <class Device>
std::string launch(const typename Device::Arguments& arguments) {
  Device gemm;
  cutlass::Status status = gemm.can_implement(arguments);
  if (status != cutlass::Status::kSuccess)
    return std::string("can_implement: ") + cutlass::cutlassGetStatusString(status);
  const size_t bytes = Device::get_workspace_size(arguments);
  void* workspace = nullptr;
  if (bytes && cudaMalloc(&workspace, bytes) != cudaSuccess) return "no memory for the workspace";
  status = gemm.initialize(arguments, workspace);
  if (status == cutlass::Status::kSuccess) status = gemm.run();
  return status == cutlass::Status::kSuccess
             ? ""
             : std::string("run: ") + cutlass::cutlassGetStatusString(status);
}

inline cutlass::KernelHardwareInfo hardware() {
  cutlass::KernelHardwareInfo info;
  info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
  return info;
}

template <class Config>
std::string run_dense(const std::vector<Gemm>& gemms) {
  using B = Built<Config>;
  using Kernel = typename B::Device::GemmKernel;
  const Gemm& x = gemms.front();
  typename B::Device::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {x.m, x.n, x.k, 1};
  auto& main = arguments.mainloop;
  main.ptr_A = static_cast<decltype(main.ptr_A)>(x.a);
  main.ptr_B = static_cast<decltype(main.ptr_B)>(x.b);
  main.dA = row_stride<typename Kernel::StrideA>(x.k);
  main.dB = row_stride<typename Kernel::StrideB>(x.k);
  if constexpr (B::kNvfp4) {
    using Scales = typename Kernel::CollectiveMainloop::Sm1xxBlkScaledConfig;
    main.ptr_SFA = static_cast<decltype(main.ptr_SFA)>(x.a_scales);
    main.ptr_SFB = static_cast<decltype(main.ptr_SFB)>(x.b_scales);
    main.layout_SFA = Scales::tile_atom_to_shape_SFA(cute::make_shape(x.m, x.n, x.k, 1));
    main.layout_SFB = Scales::tile_atom_to_shape_SFB(cute::make_shape(x.m, x.n, x.k, 1));
  }
  auto& end = arguments.epilogue;
  end.ptr_C = static_cast<decltype(end.ptr_C)>(x.c);
  end.ptr_D = static_cast<decltype(end.ptr_D)>(x.d);
  end.dC = row_stride<typename Kernel::StrideC>(x.n);
  end.dD = row_stride<typename Kernel::StrideD>(x.n);
  end.thread.alpha_ptr = x.alpha;
  end.thread.beta = x.beta;
  if constexpr (std::is_same_v<typename Config::D, E2m1>) {
    end.thread.block_scale_factor_ptr = static_cast<Ue4m3*>(x.d_scales);
    end.thread.norm_constant_ptr = x.norm;
  }
  arguments.hw_info = hardware();
  return launch<typename B::Device>(arguments);
}

template <class Config>
std::string run_grouped(const std::vector<Gemm>& gemms) {
  using B = Built<Config>;
  using Kernel = typename B::Device::GemmKernel;
  using Main = typename Kernel::CollectiveMainloop;
  using Scales = typename Main::Sm1xxBlkScaledConfig;
  using A = typename Main::ArrayElementA;
  using D = typename Kernel::ElementD;
  std::vector<cute::Shape<int, int, int>> shapes;
  std::vector<const A*> a, b;
  std::vector<const Ue4m3*> a_scales, b_scales;
  std::vector<const float*> alphas;
  std::vector<const Bf16*> c;
  std::vector<D*> d;
  std::vector<typename Kernel::InternalStrideA> a_strides;
  std::vector<typename Kernel::InternalStrideB> b_strides;
  std::vector<typename Kernel::InternalStrideC> c_strides;
  std::vector<typename Kernel::InternalStrideD> d_strides;
  std::vector<typename Main::InternalLayoutSFA> a_layouts;
  std::vector<typename Main::InternalLayoutSFB> b_layouts;
  for (const Gemm& x : gemms) {
    shapes.push_back(cute::make_shape(x.m, x.n, x.k));
    a.push_back(static_cast<const A*>(x.a));
    b.push_back(static_cast<const A*>(x.b));
    a_scales.push_back(static_cast<const Ue4m3*>(x.a_scales));
    b_scales.push_back(static_cast<const Ue4m3*>(x.b_scales));
    alphas.push_back(x.alpha);
    c.push_back(static_cast<const Bf16*>(x.c));
    d.push_back(static_cast<D*>(x.d));
    a_strides.push_back(row_stride<typename Kernel::InternalStrideA>(x.k));
    b_strides.push_back(row_stride<typename Kernel::InternalStrideB>(x.k));
    c_strides.push_back(row_stride<typename Kernel::InternalStrideC>(x.n));
    d_strides.push_back(row_stride<typename Kernel::InternalStrideD>(x.n));
    a_layouts.push_back(Scales::tile_atom_to_shape_SFA(cute::make_shape(x.m, x.n, x.k, 1)));
    b_layouts.push_back(Scales::tile_atom_to_shape_SFB(cute::make_shape(x.m, x.n, x.k, 1)));
  }
  typename B::Device::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  // No shapes on the host: only the kernel knows them, as in a mixture of experts.
  arguments.problem_shape = {static_cast<int>(gemms.size()), on_device(shapes), nullptr};
  auto& main = arguments.mainloop;
  main.ptr_A = on_device(a);
  main.ptr_B = on_device(b);
  main.dA = on_device(a_strides);
  main.dB = on_device(b_strides);
  main.ptr_SFA = on_device(a_scales);
  main.ptr_SFB = on_device(b_scales);
  main.layout_SFA = on_device(a_layouts);
  main.layout_SFB = on_device(b_layouts);
  auto& end = arguments.epilogue;
  end.ptr_C = on_device(c);
  end.ptr_D = on_device(d);
  end.dC = on_device(c_strides);
  end.dD = on_device(d_strides);
  end.thread.alpha_ptr_array = on_device(alphas);
  end.thread.dAlpha = {cute::_0{}, cute::_0{}, 1};
  end.thread.beta = 0;
  arguments.hw_info = hardware();
  return launch<typename B::Device>(arguments);
}

// The entry of the list.
template <class Config>
constexpr Kernel entry() {
  using D = typename Config::D;
  Kernel kernel{};
  kernel.name = Config::kName;
  kernel.capability = std::is_same_v<typename Config::Arch, cutlass::arch::Sm100> ? 100 : 120;
  kernel.nvfp4 = std::is_same_v<typename Config::Operand, Nvfp4>;
  kernel.grouped = Config::kGrouped;
  kernel.output = std::is_same_v<D, float>  ? Output::kF32
                  : std::is_same_v<D, Bf16> ? Output::kBf16
                                            : Output::kNvfp4;
  if constexpr (Config::kGrouped)
    kernel.run = run_grouped<Config>;
  else
    kernel.run = run_dense<Config>;
  return kernel;
}

}  // namespace cutlass_oracle

#endif  // PTXEMU_CUTLASS_GEMM_CUH_
