"""NVFP4 mixture-of-experts models in transformers. Importing this module registers it; nvfp4_moe never imports it.

    import nvfp4_moe.transformers
    model = AutoModelForCausalLM.from_pretrained(ID)                              # ModelOpt: found by its quant_method

    from nvfp4_moe.transformers import Nvfp4MoeConfig, enable
    model = AutoModelForCausalLM.from_pretrained(ID, quantization_config=Nvfp4MoeConfig())  # any other, and for options
    print(enable(model))                                                          # a bf16 or fp16 model in memory

Experts never become torch tensors: MoeLayer.from_checkpoint reads each layer from the files and packs it. Linears that
the files hold in NVFP4 run through Nvfp4Linear. transformers loads everything else as usual.
docs/how-to/transformers.md lists the tested versions and the limits.
"""

from __future__ import annotations

from . import requirements

requirements.check()

from .. import torch_op  # noqa: E402, F401  registers torch.ops.nvfp4_moe
from .config import Nvfp4MoeConfig  # noqa: E402
from .enable import Enabled, EnabledLayer, enable  # noqa: E402
from .experts import Nvfp4Experts  # noqa: E402
from .linear import Nvfp4LinearModule  # noqa: E402
from .quantizer import Nvfp4MoeQuantizer  # noqa: E402
from .registration import register  # noqa: E402

__all__ = [
    "Enabled",
    "EnabledLayer",
    "Nvfp4Experts",
    "Nvfp4LinearModule",
    "Nvfp4MoeConfig",
    "Nvfp4MoeQuantizer",
    "enable",
    "register",
]


def __dir__() -> list[str]:
    return __all__


register()
