"Triton's kernels run in its interpreter where there is no GPU. It is asked for at import only: routing looks at the environment at each call."
import importlib
import importlib.util
import os
import pkgutil

import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import tensorplay_attn.kernels
    import triton.experimental.gluon  # noqa: F401  Triton imports it at the first launch, and it must agree
    for module in pkgutil.iter_modules(tensorplay_attn.kernels.__path__):
        importlib.import_module(f"tensorplay_attn.kernels.{module.name}")
    if before is None: del os.environ["TRITON_INTERPRET"]
    else: os.environ["TRITON_INTERPRET"] = before
