"Core AI's SDPA beside ours, row by row of one grid, and the line that its converter writes for the module beside the line of page 38."
import re

import coreai_torch
import pytest
import torch
from coreai_grid import Ours, Theirs, compare, rows
from torch import nn

from tensorplay_attn.evidence.peers import silence
from tensorplay_attn.externalize import ExternalizeSpec, declaration, export_composite

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:coreai-torch has only been validated")
GRID = list(rows())
SPEC = dict(composite_op_name="scaled_dot_product_attention", composite_attrs=["scale", "is_causal", "window_size"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_grid(dtype):
    "Ours is within what the arithmetic allows on every row; theirs in fp32, and on most rows in 16 bits, where it rounds scores and weights."
    found = {str(row): compare(row) for row in GRID if row["dtype"] == dtype}
    assert len(found) == len(GRID) / 3 == 128
    assert [row for row, f in found.items() if not f["ours"][1]] == []
    beyond = [row for row, f in found.items() if not f["theirs"][1]]
    assert beyond == [] if dtype == "float32" else 0 < len(beyond) < 64, beyond


def test_masks_replace_what_they_should_join():
    "As page 37 says it: a boolean mask alone is right, and with causal or a window both are lost; a floating one is read as True."
    axes = dict(heads=((4, 2),), scale=(None,), is_causal=(False, True), window_size=(0, 2), sinks=("none",), dtype=("float32",))
    for row in rows(axes, ("bool", "bias")):
        found, plain = compare(row), row["mask"] == "bool" and not row["is_causal"] and not row["window_size"]
        assert found["ours"][1] and found["theirs"][1] == plain, (row, found)


class Model(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, query, key, value, attn_mask=None, sinks=None): return self.attn(query, key, value, attn_mask, sinks)


@pytest.mark.parametrize("words, extra", [({}, ""), (dict(is_causal=True, window_size=4), "sinks"), (dict(scale=1.5, window_size=11), "attn_mask"),
    (dict(scale=-0.5, is_causal=True), "attn_mask sinks")], ids=str)
def test_the_declaration(words, extra):
    "The same text, but for eight random digits after the name, and the name of the result."
    given = dict(query=torch.randn(2, 8, 5, 16), key=torch.randn(2, 2, 7, 16), value=torch.randn(2, 2, 7, 16))
    more = dict(attn_mask=torch.ones(5, 7, dtype=torch.bool), sinks=torch.zeros(8))
    given |= {n: more[n] for n in extra.split()}
    export = lambda m: torch.export.export(m, (), given).run_decompositions(coreai_torch.get_decomp_table())
    with silence():
        spec = coreai_torch.ExternalizeSpec(target_class=Theirs, **SPEC)
        model = Model(Theirs(**words)).eval()
        text = str(coreai_torch.TorchConverter().add_pytorch_module(model, export_fn=export, externalize_modules=[spec]).to_coreai())
    theirs, = (line.strip() for line in text.split("\n") if "composite_decl" in line)
    theirs = re.sub(r'@attn_[0-9a-f]{8}\(', "@attn(", re.sub(r'(\) -> \(tensor<[^>]*> \{coreai.name = )"\w+"', r'\1"output"', theirs))
    program = export_composite(Model(Ours(**words)), (), given, externalize=[ExternalizeSpec(target_class=Ours, **SPEC)])
    assert declaration(program.declarations["attn"]) == theirs
