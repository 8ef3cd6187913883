"""The surface of `tensorplay.nn.attention`: its names and signatures beside PyTorch's and, where `make peers` put it, TensorPlay's; and its page:
every snippet, table and sentence that states a behaviour, run with only the import lines changed."""
import ast
import contextlib
import enum
import functools
import importlib.util
import inspect
import io
import json
import re
import textwrap
import threading
import tokenize
import warnings
from pathlib import Path

import pytest
import torch

import tensorplay_attn
from tensorplay_attn.routing import choose, pose
from tensorplay_attn.evidence.peers import SURFACE, Library, listed, unlike, unlike_names

HERE = ["torch"] + ["tensorplay"] * bool(importlib.util.find_spec("tensorplay"))


# ---------------------------------------------------------------- names and signatures

@pytest.mark.parametrize("peer", HERE)
def test_every_difference_is_listed_and_every_listed_one_is_there(peer):
    assert unlike_names(peer) == listed(peer)


def test_each_has_a_reason():
    assert len({(p, name) for peers, name, _, _ in SURFACE for p in peers.split(",")}) == sum(len(s[0].split(",")) for s in SURFACE)
    assert all(len(why) > 8 for *_, why in SURFACE)


@pytest.mark.parametrize("ours, theirs, how", [
    ("lambda a, b=1: 0", "lambda a, b=1: 0", ""),
    ("lambda a: 0", "lambda a, b=1: 0", "lacks b=1"), ("lambda a, *, c=2: 0", "lambda a: 0", "adds *c=2"),
    ("lambda a=1: 0", "lambda a=2: 0", "has a=1 for a=2"), ("lambda a, *, b=0: 0", "lambda a, b=0: 0", "has *b=0 for b=0"),
    ("lambda *m: 0", "lambda m: 0", "has *m for m")])
def test_a_difference_is_noticed(ours, theirs, how):
    assert unlike(eval(ours), eval(theirs)) == how


def test_another_member_is_noticed():
    a, b = enum.IntEnum("A", {"X": 1}), enum.IntEnum("A", {"X": 2, "Y": 3})
    assert unlike(a, b) == "lacks Y=3; has X=1 for X=2"


@pytest.mark.parametrize("peer", HERE)
def test_positions_are_theirs(peer):
    "What stands at the same place in their call means the same in ours: adding and dropping is by name only, or at the end."
    ours, theirs = Library("ours"), Library(peer)
    for name in sorted((ours.names() & theirs.names()) | {"varlen_attn", "varlen_attn_out", "causal_upper_left", "causal_lower_right", "CausalBias"}):
        try: a, b = (inspect.signature(getattr(x, name)).parameters.values() for x in (ours, theirs))
        except (TypeError, ValueError): continue  # no functions, or native ones
        a, b = ([p.name for p in ps if p.kind is p.POSITIONAL_OR_KEYWORD] for ps in (a, b))
        assert a == b[:len(a)] or name == "noop_mask", (name, a, b)


# ---------------------------------------------------------------- the page

ROUTING = """
import tensorplay as tp
import tensorplay.nn.functional as F
from tensorplay.nn.attention import SDPBackend, sdpa_kernel

q = k = v = tp.randn(1, 2, 8, 16)

# restrict routing to the math implementation while experimenting
with sdpa_kernel(SDPBackend.MATH):
    out = F.scaled_dot_product_attention(q, k, v)

# a list means "any of these, in this preference order"
with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
    out = F.scaled_dot_product_attention(q, k, v)
"""
MASKS = """
import tensorplay as tp
from tensorplay.nn.attention import and_masks, create_mask

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 4

mask = create_mask(and_masks(causal, window), B=1, H=1, Q_LEN=6, KV_LEN=6)
print(mask.shape, mask.dtype)   # (1, 1, 6, 6) bool
"""
IMPORTS = [("import tensorplay as tp", "import torch as tp"), ("import tensorplay.nn.functional", "import tensorplay_attn.functional"),
           ("from tensorplay.nn.attention", "from tensorplay_attn")]


def execute(snippet, libraries):
    "What it leaves behind and what it printed, per library."
    for name in libraries:
        code = snippet
        if name == "ours":
            for theirs, ours in IMPORTS: code = code.replace(theirs, ours)
            changed = [a for a, b in zip(snippet.split("\n"), code.split("\n")) if a != b]
            assert changed and all(line.startswith(("import ", "from ")) for line in changed)
        left, said = {}, io.StringIO()
        with contextlib.redirect_stdout(said): exec(compile(code, "the page", "exec"), left)
        yield left, said.getvalue()


LIBRARIES = ["ours"] + HERE[1:]


def test_the_routing_snippet():
    for left, _ in execute(ROUTING, LIBRARIES): assert list(left["out"].shape) == [1, 2, 8, 16]


def test_the_routing_snippet_computes_attention():
    (left, _), = execute(ROUTING, ["ours"])
    assert torch.allclose(left["out"], torch.nn.functional.scaled_dot_product_attention(*[left["q"]] * 3), atol=1e-6)


def test_the_mask_snippet():
    found = list(execute(MASKS, LIBRARIES))
    for left, said in found:
        assert list(left["mask"].shape) == [1, 1, 6, 6] and str(left["mask"].dtype).endswith(".bool") and "1, 1, 6, 6" in said and "bool" in said
        assert left["mask"].tolist() == [[[[j <= i < j + 4 for j in range(6)] for i in range(6)]]]


OURS, TABLE = Library("ours"), (
    "sdpa_kernel SDPBackend BlockMask create_block_mask register_flash_attention_impl activate_flash_attention_impl list_flash_attention_impls "
    "current_flash_attention_impl restore_flash_attention_impl create_mask and_masks or_masks noop_mask").split()
Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))


def params(**more):
    plain = dict(query=Q, key=Q, value=Q, attn_mask=None, dropout=0.0, is_causal=False, enable_gqa=False)
    return tensorplay_attn.SDPAParams(**plain | more)


def sdpa(): return tensorplay_attn.functional.scaled_dot_product_attention(Q, Q, Q)


@pytest.fixture
def registry():
    "The registry, and what was active is left as it was."
    yield OURS
    if OURS.current_flash_attention_impl() is not None: OURS.restore_flash_attention_impl()


@pytest.mark.parametrize("name", TABLE + ["can_use_flash_attention", "can_use_efficient_attention", "omni_attention", "SDPAParams"])
def test_names_of_the_page(name):
    assert callable(getattr(OURS, name)) and getattr(OURS, name).__doc__


@pytest.mark.parametrize("name", ["bias", "varlen", "omni_attention"])
def test_submodules_of_the_page(name):
    assert importlib.util.find_spec(f"tensorplay_attn.{name}")


def test_backends_of_the_page():
    members = tensorplay_attn.SDPBackend.__members__
    assert {"MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"} <= set(members)


def test_routing_is_restricted_from_the_outside():
    B = tensorplay_attn.SDPBackend
    with tensorplay_attn.sdpa_kernel(B.MATH):
        reasons = tensorplay_attn.explain_routing(params())
        assert not reasons[B.MATH] and all(reasons[b] for b in reasons if b != B.MATH)
    with tensorplay_attn.sdpa_kernel(B.CUDNN_ATTENTION), pytest.raises(RuntimeError, match="CUDNN"): sdpa()


def test_eligibility_depends_on_the_inputs():
    B = tensorplay_attn.SDPBackend
    plain, masked = (tensorplay_attn.explain_routing(params(attn_mask=m)) for m in (None, torch.ones(8, 8, dtype=torch.bool)))
    assert not plain[B.FLASH_ATTENTION] and masked[B.FLASH_ATTENTION]


def test_a_list_is_an_order_of_preference():
    B = tensorplay_attn.SDPBackend
    for order in ([B.MATH, B.EFFICIENT_ATTENTION], [B.EFFICIENT_ATTENTION, B.MATH]):
        with tensorplay_attn.sdpa_kernel(order): assert choose(pose(params()))[0] == order[0]


def test_probes_are_what_the_dispatcher_consults():
    B, ask = tensorplay_attn.SDPBackend, {"FLASH_ATTENTION": tensorplay_attn.can_use_flash_attention,
                                          "EFFICIENT_ATTENTION": tensorplay_attn.can_use_efficient_attention}
    for p in (params(), params(attn_mask=torch.ones(8, 8, dtype=torch.bool)), params(dropout=0.5), params(is_causal=True)):
        for name, can_use in ask.items(): assert can_use(p) == (not tensorplay_attn.explain_routing(p)[B[name]])
    with tensorplay_attn.sdpa_kernel(B.MATH): assert not any(can_use(params()) for can_use in ask.values())


def test_registry_knows_two_and_none_is_active(registry):
    assert {"FA3", "FA4"} <= set(registry.list_flash_attention_impls()) and registry.current_flash_attention_impl() is None


@pytest.mark.parametrize("name, module", [("FA3", "flash_attn_interface"), ("FA4", "flash_attn")])
@pytest.mark.skipif(any(map(importlib.util.find_spec, ("flash_attn_interface", "flash_attn"))), reason="about packages that are absent")
def test_activating_needs_the_package(registry, name, module):
    with pytest.raises(ModuleNotFoundError, match=module): registry.activate_flash_attention_impl(name)
    assert registry.current_flash_attention_impl() is None


def test_a_custom_implementation_plugs_in(registry):
    class Handle:
        def remove(self): removed.append(True)
    removed = []
    registry.register_flash_attention_impl("surface test", register_fn=Handle)
    assert "surface test" in registry.list_flash_attention_impls()
    handle = registry.activate_flash_attention_impl("surface test")
    assert isinstance(handle, Handle) and registry.current_flash_attention_impl() == "surface test"
    registry.restore_flash_attention_impl()
    assert removed == [True] and registry.current_flash_attention_impl() is None


def test_restoring_the_default_when_it_is_active_warns(registry):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry.restore_flash_attention_impl()
    assert len(caught) == 1


def test_predicates_become_masks():
    def causal(b, h, q_idx, kv_idx): return q_idx >= kv_idx
    def first(b, h, q_idx, kv_idx): return kv_idx < 1
    make = lambda m: tensorplay_attn.create_mask(m, None, None, 3, 3)[0, 0].int().tolist()
    assert make(tensorplay_attn.and_masks(causal, first)) == [[1, 0, 0]] * 3
    assert make(tensorplay_attn.or_masks(causal, first)) == make(causal) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert make(tensorplay_attn.noop_mask) == [[1, 1, 1]] * 3


def test_a_block_mask_comes_from_a_predicate_and_both_reach_omni_attention():
    def causal(b, h, q_idx, kv_idx): return q_idx >= kv_idx
    mask = tensorplay_attn.create_block_mask(causal, None, None, 8, 8, BLOCK_SIZE=4)
    assert isinstance(mask, tensorplay_attn.BlockMask) and mask.to_dense().tolist() == [[[[1, 0], [1, 1]]]]
    got = tensorplay_attn.omni_attention(Q, Q, Q, score_mod=lambda s, b, h, i, j: s * 2, block_mask=mask)
    want = tensorplay_attn.functional.scaled_dot_product_attention(Q, Q, Q, is_causal=True, scale=2 / 16**0.5)
    assert torch.allclose(got, want, atol=1e-6)


def test_a_switch_does_not_reach_another_thread():
    seen = []
    with tensorplay_attn.sdpa_kernel(tensorplay_attn.SDPBackend.CUDNN_ATTENTION):
        (thread := threading.Thread(target=lambda: seen.append(sdpa().shape))).start()
        thread.join()
    assert seen == [Q.shape]


# ---------------------------------------------------------------- every public name: a lesson that calls it, and words beside each parameter

PUBLIC = {"": tensorplay_attn.__all__,
    "bias": ["CausalVariant", "CausalBias", "causal_upper_left", "causal_lower_right"],
    "functional": ["scaled_dot_product_attention", "AuxRequest", "AuxOutput"],
    "omni_attention": ["omni_attention", "AuxRequest", "AuxOutput"],
    "varlen": ["varlen_attn", "varlen_attn_out", "AuxRequest"],
    "paged_cache": ["Books", "PagedCache"],
    "sdpa": ["SDPA", "window_pair"],
    "externalize": ["ExternalizeSpec", "export_composite", "CompositeProgram", "parse", "show", "to_onnx"],
    "registry": ["FA3", "FlashHandle", "flash_kernel", "activate_flash_attention_impl", "register_flash_attention_impl"],
    "routing": ["SDPAParams", "SDPBackend", "backend_engine", "choose", "explain_routing", "permitted_backends", "pose", "reasons_by_backend",
                "sdpa_kernel"],
    "interop.onnx": ["attention_node", "node_problem", "node_cases"],
    "interop.onnx_flex": ["flex_attention_node", "flex_problem", "evaluator", "run_onnx"],
    "interop.transformers": ["register_with_transformers", "unregister_with_transformers", "attention_problem"]}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in names]


def named(code):
    "Every name that some code uses, in code within its strings too; of an import the module, and not what it brings."
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name): yield node.id
        elif isinstance(node, ast.Attribute): yield node.attr
        elif isinstance(node, ast.ImportFrom): yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            with contextlib.suppress(SyntaxError): yield from named(node.value)


@functools.cache
def lessons():
    cells = [c for nb in (Path(__file__).parents[1] / "nbs").glob("*.ipynb") for c in json.loads(nb.read_text(encoding="utf-8"))["cells"]]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    code = [x for x in code if not re.search(r"^%", x, re.M) and "#| export" not in x and "#| eval: false" not in x]
    return {name for source in code for name in named(source)}


def silent(definition, source):
    "Parameters of a function with no comment in their line."
    lines = {t.start[0] for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}
    a = definition.args
    return [x.arg for x in (*a.args, a.vararg, *a.kwonlyargs, a.kwarg) if x and x.arg != "self" and x.end_lineno not in lines]


@pytest.mark.parametrize("module, name", NAMES, ids=[f"{m}.{n}".lstrip(".") for m, n in NAMES])
def test_every_public_name_is_shown_and_told(module, name):
    x = getattr(importlib.import_module(f"tensorplay_attn.{module}".rstrip(".")), name)
    assert name in lessons(), f"no lesson uses {name}"
    if not callable(x): return
    assert x.__dict__.get("__doc__") if inspect.isclass(x) else x.__doc__, f"{name} has no docstring"
    source = textwrap.dedent(inspect.getsource(x))
    made = ast.parse(source).body
    if inspect.isclass(x): made = [f for f in made[0].body if isinstance(f, ast.FunctionDef) and f.name in ("__init__", "forward")]
    assert [n for f in made for n in silent(f, source)] == [], f"{name} has parameters without a word"
