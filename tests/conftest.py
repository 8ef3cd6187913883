"Triton's kernels run in its interpreter where there is no GPU. It is asked for at import only: routing looks at the environment at each call."
import importlib
import importlib.util
import os
import pkgutil
from unittest.mock import patch

import pytest
import torch

from tensorplay_attn import registry

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import tensorplay_attn.kernels
    import triton.experimental.gluon  # noqa: F401  Triton imports it at the first launch, and it must agree
    for module in pkgutil.iter_modules(tensorplay_attn.kernels.__path__):
        importlib.import_module(f"tensorplay_attn.kernels.{module.name}")
    if before is None: del os.environ["TRITON_INTERPRET"]
    else: os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True)
def registered_as_before():
    "What a test registers is forgotten after it: names have no other way to go, and tests run in any order."
    with patch.dict(registry._IMPLS): yield


@pytest.fixture
def one_thread():
    "What is small takes longer on two threads."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
