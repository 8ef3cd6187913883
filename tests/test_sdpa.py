"SDPA, Core AI's module: each table and sentence of its page, and every combination before the judge."
import copy
import inspect
import itertools
import pickle

import pytest
import torch

from tensorplay_attn.bounds import judge_forward
from tensorplay_attn.functional import scaled_dot_product_attention
from tensorplay_attn.problem import make_problem
from tensorplay_attn.routing import SDPBackend, sdpa_kernel
from tensorplay_attn.sdpa import SDPA, window_pair


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


def tensors(heads=(4, 2), L=5, S=7, D=11, D_v=13, B=3, dtype=torch.float32):
    return [torch.randn(B, h, n, d).to(dtype) for h, n, d in zip((heads[0], heads[1], heads[1]), (L, S, S), (D, D, D_v))]


def distances(L, S): return (torch.arange(L)[:, None] + S - L) - torch.arange(S)


def test_constructor_table():
    parameters = inspect.signature(SDPA).parameters
    assert {n: p.default for n, p in parameters.items()} == {"scale": None, "is_causal": False, "window_size": 0}
    assert list(inspect.signature(SDPA.forward).parameters) == ["self", "query", "key", "value", "attn_mask", "sinks"]
    m = SDPA(0.5, True, 3)
    assert (m.scale, m.is_causal, m.window_size) == (0.5, True, 3) and not list(m.parameters()) and not list(m.buffers())
    q, k, v = tensors()
    assert SDPA()(q, k, v).equal(SDPA(scale=11**-0.5)(q, k, v))


@pytest.mark.parametrize("L, S", [(5, 7), (5, 5), (7, 5), (1, 9)])
def test_lower_right_causal(L, S):
    q, k, v = tensors(L=L, S=S)
    torch.testing.assert_close(SDPA(is_causal=True)(q, k, v), SDPA()(q, k, v, distances(L, S) >= 0))


@pytest.mark.parametrize("w", [0, 1, 2, 4, 5, 7, 11, 2**62])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("L, S", [(5, 7), (5, 5), (7, 5), (1, 9)])
def test_window_counts_keys(w, is_causal, L, S):
    q, k, v = tensors(L=L, S=S)
    d = distances(L, S)
    sees = torch.ones_like(d, dtype=torch.bool) if w == 0 else (d < w if is_causal else d.abs() < w)
    if is_causal: sees &= d >= 0
    torch.testing.assert_close(SDPA(is_causal=is_causal, window_size=w)(q, k, v), SDPA()(q, k, v, sees))
    assert window_pair(w, is_causal) == ((w - 1, min(w - 1, 0)) if is_causal else (w - 1, w - 1))


HEADS = {"multi-head": (32, 32), "grouped-query": (32, 8), "multi-query": (32, 1)}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_schema_table(heads):
    q, k, v = tensors(heads)
    tiled = [t.repeat_interleave(heads[0] // heads[1], 1) for t in (k, v)]
    out = SDPA(is_causal=True)(q, k, v)
    torch.testing.assert_close(out, SDPA(is_causal=True)(q, *tiled))
    assert out.shape == (3, 32, 5, 13)


@pytest.mark.parametrize("heads", [(4, 3), (4, 8), (4, 0)])
def test_other_head_counts_are_refused(heads):
    with pytest.raises(ValueError, match="multiple"): SDPA()(*tensors(heads))



@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_everything_composes(dtype):
    "Every combination within what its arithmetic allows, and the same bits as the front door gives."
    axes = ((4, 4), (4, 2)), (False, True), (0, 1, 2, 11), (None, "bool", "bias"), (False, True)
    for heads, is_causal, w, mask, with_sinks in itertools.product(*axes):
        scale = None if with_sinks == (mask == "bool") else -1.5
        q, k, v = tensors(heads, dtype=dtype)
        m = None if mask is None else torch.rand(4, 5, 7) < 0.7 if mask == "bool" else torch.randn(3, 1, 5, 7)
        sinks = torch.randn(4) if with_sinks else None
        out = SDPA(scale, is_causal, w)(q, k, v, m, sinks)
        knobs = dict(is_causal=is_causal, scale=scale, alignment="lower_right", sinks=sinks,
            window_size=(-1, -1) if w == 0 else (w - 1, -1 if is_causal else w - 1))
        assert out.equal(scaled_dot_product_attention(q, k, v, m, enable_gqa=True, **knobs)), (heads, scale, is_causal, w, mask, with_sinks)
        verdict = judge_forward(make_problem(q, k, v, m, **knobs), out)["out"]
        assert verdict.ok, (heads, scale, is_causal, w, mask, with_sinks, verdict)


def test_gradients():
    m = SDPA(scale=-0.7, is_causal=True, window_size=3)
    leaves = [t.double().requires_grad_() for t in (*tensors((4, 2), B=2, D=3, D_v=2), torch.randn(2, 1, 5, 7), torch.randn(4))]
    assert torch.autograd.gradcheck(m, leaves)


def test_backends_and_autocast():
    q, k, v = tensors()
    m = SDPA(is_causal=True, window_size=3)
    answers = []
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend): answers.append(m(q, k, v))
    torch.testing.assert_close(*answers)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError, match="CUDNN_ATTENTION"): m(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16): assert m(q, k, v).dtype == torch.bfloat16


def test_a_module_among_modules():
    "It copies, pickles, prints, sits in a Sequential's state and obeys a changed attribute."
    m, (q, k, v) = SDPA(0.3, True, 2), tensors()
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))): assert other(q, k, v).equal(m(q, k, v))
    assert repr(m) == "SDPA(scale=0.3, is_causal=True, window_size=2)" and not torch.nn.Sequential(m).state_dict()
    assert m.train()(q, k, v).equal(m.eval()(q, k, v))
    m.window_size = 0
    assert m(q, k, v).equal(SDPA(0.3, True)(q, k, v))


def test_compiled_and_vmapped():
    m, (q, k, v) = SDPA(is_causal=True, window_size=3), tensors()
    assert torch.compile(m, fullgraph=True, backend="aot_eager")(q, k, v).equal(m(q, k, v))
    stacked = torch.func.vmap(m)(*(torch.stack([t, t + 1]) for t in (q, k, v)))
    torch.testing.assert_close(stacked[1], m(q + 1, k + 1, v + 1))


REFUSED = [
    (dict(window_size=-1), ValueError, "window_size=-1"), (dict(window_size=1.5), TypeError, "window_size must be an int"),
    (dict(window_size=True), TypeError, "bool"), (dict(is_causal=None), TypeError, "is_causal must be a bool"),
    (dict(scale="x"), TypeError, "scale must be a float"), (dict(scale=float("inf")), ValueError, "scale=inf"),
]


@pytest.mark.parametrize("arguments, error, words", REFUSED, ids=str)
def test_refused_when_made(arguments, error, words):
    with pytest.raises(error, match=words): SDPA(**arguments)
    m = SDPA()
    for name, x in arguments.items(): setattr(m, name, x)
    with pytest.raises(error, match=words): m(*tensors())


def test_refused_when_called():
    q, k, v = tensors()
    for n in (0, 1, 2):  # ranks 3 and 5
        for change in (lambda t: t[0], lambda t: t[None]):
            with pytest.raises(ValueError, match="must have 4 dimensions"): SDPA()(*[change(t) if i == n else t for i, t in enumerate((q, k, v))])
    with pytest.raises(ValueError, match="sinks must have shape"): SDPA()(q, k, v, sinks=torch.zeros(2))
    with pytest.raises(TypeError, match="attn_mask must be bool"): SDPA()(q, k, v, torch.ones(5, 7).int())
    with pytest.raises(ValueError, match="does not broadcast"): SDPA()(q, k, v, torch.ones(5, 6))
    with pytest.raises(TypeError, match="query must be a tensor"): SDPA()(None, k, v)
