"""Requirements of the tests of whole engines on their device."""

import pytest
import torch

ON_GPU = torch.cuda.is_available()
HAS_TWO = not ON_GPU or torch.cuda.device_count() >= 2
on_gpu_only = pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
on_cpu_only = pytest.mark.skipif(ON_GPU, reason="on a GPU SGLang has kernels of its own")
two_devices = pytest.mark.skipif(not HAS_TWO, reason="two ranks need two GPUs")
_TWO = {"variables": {} if ON_GPU else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "tp_size": 2}
TWO_RANKS = {"tp": ("modelopt", _TWO), "ep": ("modelopt", _TWO | {"ep_size": 2})} if HAS_TWO else {}
OTHER_ROUTER = {"variables": {"NVFP4_MOE_ROUTER": "own"}}


def selects(log):
    """Returns whether the plugin selected experts, by the log of an engine."""
    assert "nvfp4_moe leaves the selection of experts" not in log
    return "nvfp4_moe selects the experts of layer" in log
