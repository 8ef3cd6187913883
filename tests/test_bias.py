"A causal mask as a value: at every door, beside every knob, in programs; PyTorch's own as the same."
import copy
import io
import pickle
import random
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import bias as theirs

from tensorplay_attn.bias import CausalBias, CausalVariant, add_causal_bias, as_causal_bias, causal_lower_right, causal_upper_left
from tensorplay_attn.functional import AuxRequest, scaled_dot_product_attention
from tensorplay_attn.problem import make_problem, everything, visible
from tensorplay_attn.routing import SDPAParams, SDPBackend, can_use_efficient_attention, can_use_flash_attention, explain_routing, pose, sdpa_kernel

CORNERS = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}
FLASH = SDPBackend.FLASH_ATTENTION


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


def qkv(L, S, lead=(2, 3), E=8, **kwargs): return [torch.randn(*lead, n, E, requires_grad=True, **kwargs) for n in (L, S, S)]


def same(call, other, tensors):
    "Two calls with the same bits, and gradients with the same bits."
    a, b = call(*tensors), other(*tensors)
    assert a.equal(b) and a.dtype == b.dtype
    d_out = torch.randn_like(a)
    for x, y in zip(*(torch.autograd.grad(o, tensors, d_out) for o in (a, b))): assert x.equal(y)


# ---------------------------------------------------------------- the value

def test_the_enum_is_pytorchs():
    assert {m.name: int(m) for m in CausalVariant} == {m.name: int(m) for m in theirs.CausalVariant} == {"UPPER_LEFT": 1, "LOWER_RIGHT": 2}
    assert CausalVariant.UPPER_LEFT == theirs.CausalVariant.UPPER_LEFT
    assert CausalBias(theirs.CausalVariant.LOWER_RIGHT, 3, 5) == causal_lower_right(3, 5)


@pytest.mark.parametrize("L, S", [(0, 0), (0, 4), (3, 0), (1, 5), (4, 4), (3, 5), (5, 3)])
def test_it_is_pytorchs_mask(L, S):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of NaNs
        for ours, their in ((causal_upper_left, theirs.causal_upper_left), (causal_lower_right, theirs.causal_lower_right)):
            want = their(L, S)
            assert ours(L, S).materialize().equal(want._materialize()) and as_causal_bias(want) == ours(L, S)


def test_it_is_a_value():
    bias = causal_lower_right(3, 5)
    for again in (copy.copy(bias), copy.deepcopy(bias), pickle.loads(pickle.dumps(bias)), eval(repr(bias).replace("<", "").replace(": 2>", ""))):
        assert again == bias and hash(again) == hash(bias) and repr(again) == repr(bias)
    assert len({bias, causal_lower_right(3, 5), causal_upper_left(3, 5), causal_lower_right(5, 3)}) == 3 and bias != bias.materialize
    torch.save({"bias": bias}, buffer := io.BytesIO())
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == {"bias": bias}
    with pytest.raises(AttributeError): bias.seq_len_q = 4
    layer = torch.nn.Module()
    layer.bias = bias
    assert copy.deepcopy(layer).bias == bias and bias.materialize("meta").device.type == "meta"


@pytest.mark.parametrize("make, error, words", [
    (lambda: CausalBias(1, 3, 5), TypeError, ["variant", "int"]), (lambda: CausalBias("UPPER_LEFT", 3, 5), TypeError, ["variant", "str"]),
    (lambda: CausalBias(CausalVariant.UPPER_LEFT, -1, 5), ValueError, ["seq_len_q=-1"]),
    (lambda: CausalBias(CausalVariant.UPPER_LEFT, 3, 5.0), TypeError, ["seq_len_kv", "float"]),
    (lambda: CausalBias(CausalVariant.UPPER_LEFT, True, 5), TypeError, ["seq_len_q", "bool"]),
    (lambda: causal_upper_left(3), ValueError, ["size=(3,)"]), (lambda: causal_lower_right(1, 2, 3), ValueError, ["size=(1, 2, 3)"]),
    (lambda: causal_lower_right((3, 5)), ValueError, ["size=((3, 5),)"]), (lambda: causal_lower_right("3", 5), TypeError, ["seq_len_q", "str"])])
def test_wrong_values(make, error, words):
    with pytest.raises(error) as e: make()
    assert all(w in str(e.value) for w in words)


# ---------------------------------------------------------------- at the door

@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("alignment", CORNERS)
def test_the_same_bits_as_is_causal(alignment, lead):
    for L, S in ((5, 9), (9, 5), (1, 7), (6, 6)):
        def door(**words): return lambda q, k, v: scaled_dot_product_attention(q, k, v, **words)
        same(door(attn_mask=CORNERS[alignment](L, S)), door(is_causal=True, alignment=alignment), qkv(L, S, lead))


@pytest.mark.parametrize("backend", [SDPBackend.MATH, FLASH, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize("alignment", CORNERS)
def test_on_every_backend_and_as_pytorch(alignment, backend):
    for L, S in ((5, 9), (6, 6)):  # with more queries than keys PyTorch gives NaN
        q, k, v = qkv(L, S)
        with sdpa_kernel(backend):
            got = scaled_dot_product_attention(q, k, v, CORNERS[alignment](L, S))
            assert got.equal(scaled_dot_product_attention(q, k, v, getattr(theirs, f"causal_{alignment}")(L, S)))
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, getattr(theirs, f"causal_{alignment}")(L, S)))


def test_queries_without_keys_are_zero_and_nobody_is_warned():
    q, k, v = qkv(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, aux = scaled_dot_product_attention(q, k, v, causal_lower_right(5, 3), return_aux=AuxRequest(lse=True))
    assert (out[..., :2, :] == 0).all() and (aux.lse[..., :2] == -torch.inf).all() and out[..., 2:, :].abs().min() > 0


@pytest.mark.parametrize("seed", range(40))
def test_beside_every_knob_it_is_its_own_tensor(seed):
    "The window keeps the door's alignment, the bias its own."
    rng = random.Random(seed)
    L, S, Hkv = rng.choice([1, 5, 9, 33]), rng.choice([1, 4, 9, 40]), rng.choice([1, 2])
    q, k, v = (torch.randn(2, h, n, 8, requires_grad=True, dtype=torch.float64) for h, n in ((4, L), (Hkv, S), (Hkv, S)))
    bias = rng.choice(list(CORNERS.values()))(L, S)
    words = dict(enable_gqa=True, alignment=rng.choice(list(CORNERS)), window_size=(rng.choice([-1, 0, 2, 50]), rng.choice([-1, 0, 2, 50])),
        softcap=rng.choice([0.0, 2.0]), sinks=rng.choice([None, torch.randn(4)]), scale=rng.choice([None, -0.4]), dropout_p=rng.choice([0.0, 0.3]))
    def door(mask):
        def call(*tensors):
            torch.manual_seed(seed)
            return scaled_dot_product_attention(*tensors, mask, **words)
        return call
    answers = [door(mask)(q, k, v) for mask in (bias, bias.materialize())]
    torch.testing.assert_close(*answers, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in answers), rtol=1e-10, atol=1e-10)


def test_distances_beyond_any_length():
    for window in ((2**62, -1), (2**62, 2**62), (-1, 2**62)):
        for alignment, bias in (("upper_left", causal_lower_right(3, 7)), ("lower_right", causal_upper_left(3, 7))):
            q, k, v = qkv(3, 7)
            got = scaled_dot_product_attention(q, k, v, bias, window_size=window, alignment=alignment)
            torch.testing.assert_close(got, scaled_dot_product_attention(q, k, v, bias.materialize()))


def test_autocast_takes_pytorchs_too():
    q, k, v = qkv(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for bias in (causal_lower_right(3, 5), theirs.causal_lower_right(3, 5)):
            out = scaled_dot_product_attention(q, k, v, bias)
            assert out.dtype == torch.bfloat16 and out.equal(scaled_dot_product_attention(q, k, v, is_causal=True, alignment="lower_right"))


@pytest.mark.parametrize("their", [False, True])
def test_wrong_calls(their):
    make = theirs.causal_lower_right if their else causal_lower_right
    q, k, v = qkv(3, 5)
    for words, said in ((dict(attn_mask=make(3, 6)), ["attn_mask=", "seq_len_kv=6", "5 keys"]),
                        (dict(attn_mask=make(4, 5)), ["seq_len_q=4", "3 queries"]),
                        (dict(attn_mask=make(3, 5), is_causal=True), ["is_causal=True", "attn_mask="])):
        for backend in (SDPBackend.MATH, FLASH):
            with sdpa_kernel(backend), pytest.raises(ValueError) as e: scaled_dot_product_attention(q, k, v, **words)
            assert all(w in str(e.value) for w in said)
        params = SDPAParams(q, k, v, words["attn_mask"], 0.0, words.get("is_causal", False), False)
        with pytest.raises(ValueError): explain_routing(params)
        assert not can_use_flash_attention(params)
    with pytest.raises(TypeError, match="is_causal"): scaled_dot_product_attention(q, k, v, make(3, 5), is_causal=1)
    with pytest.raises(TypeError, match="attn_mask"): make_problem(q, k, v, causal_lower_right(3, 5))
    with pytest.raises(TypeError, match="attn_mask.*lost"): scaled_dot_product_attention(q, k, v, theirs.causal_lower_right(3, 5).detach())


# ---------------------------------------------------------------- no tensor anywhere

@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left, theirs.causal_lower_right])
def test_routing_sees_structure(make):
    q, k, v = qkv(3, 5)
    params = SDPAParams(q, k, v, make(3, 5), 0.0, False, False)
    assert explain_routing(params)[FLASH] == [] and can_use_flash_attention(params) and can_use_efficient_attention(params)
    problem = pose(params)
    assert problem.mask is None and problem.bias is None and problem.window == (-1, 0)


def test_nothing_of_size_queries_times_keys():
    n, largest = 4096, [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest[0] = max([largest[0], *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))])
            return out

    q = torch.randn(1, 1, n, 8)
    with Watch(), sdpa_kernel(FLASH): scaled_dot_product_attention(q, q, q, causal_lower_right(n, n))
    assert 0 < largest[0] <= n * n // 8


def test_every_small_problem():
    for L in range(1, 6):
        for S in range(6):
            q, k = torch.zeros(1, 1, L, 4), torch.zeros(1, 1, S, 4)
            for left in range(-1, 4):
                for right in range(-1, 4):
                    for alignment in CORNERS:
                        before = make_problem(q, k, k, window_size=(left, right), alignment=alignment)
                        for bias in (causal_upper_left(L, S), causal_lower_right(L, S)):
                            seen, after = visible(before, *everything(before)), add_causal_bias(before, bias)
                            want = bias.materialize() if seen is None else bias.materialize() & seen
                            assert visible(after, *everything(after)).equal(want.expand(1, 1, L, S)), (L, S, left, right, alignment, bias)


# ---------------------------------------------------------------- in programs

def causal(q, k, v, bias): return scaled_dot_product_attention(q, k, v, bias)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_an_argument(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for L, S in ((3, 5), (4, 4), (5, 3)):
        for make in CORNERS.values():
            bias = make(L, S)
            same(partial(compiled, bias=bias), partial(causal, bias=bias), qkv(L, S))
    torch._dynamo.reset()
    partly = torch.compile(causal, backend="eager")  # with fullgraph a compiler's error stands in front of ours
    with pytest.raises(ValueError, match="seq_len_kv=6"): partly(*qkv(3, 5), causal_lower_right(3, 6))


def test_compiles_where_it_is_made_of_lengths():
    torch._dynamo.reset()
    def f(q, k, v): return scaled_dot_product_attention(q, k, v, causal_lower_right(q.shape[-2], k.shape[-2]))
    compiled, graphs = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True), []
    for L, S in ((3, 5), (7, 20), (12, 12), (9, 4)): same(compiled, f, qkv(L, S))
    counting = torch.compile(f, fullgraph=True, backend=lambda g, _: graphs.append(g) or g.forward, dynamic=True)
    for L, S in ((3, 5), (7, 20), (6, 9)): counting(*qkv(L, S))
    assert len(graphs) == 1


def test_compiles_with_pytorchs():
    torch._dynamo.reset()
    bias = theirs.causal_lower_right(3, 5)
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    same(lambda *t: compiled(*t, bias), lambda *t: causal(*t, bias), qkv(3, 5))


class Layer(torch.nn.Module):
    def __init__(self, bias=None):
        super().__init__()
        self.bias = bias

    def forward(self, q, k, v, bias=None): return causal(q, k, v, self.bias or bias or causal_lower_right(q.shape[-2], k.shape[-2]))


def nodes(program): return [str(n.target) for n in program.graph.nodes].count("tensorplay_attn.forward.default")


@pytest.mark.parametrize("strict", [False, True])
def test_exports_as_an_attribute_and_as_an_argument(strict, tmp_path):
    tensors, bias = qkv(3, 5), causal_lower_right(3, 5)
    for layer, more in ((Layer(bias), ()), (copy.deepcopy(Layer(bias)), ()), (Layer(), (bias,))):
        program = torch.export.export(layer, (*tensors, *more), strict=strict).run_decompositions()
        assert nodes(program) == 1 and program.module()(*tensors, *more).equal(causal(*tensors, bias))
    with pytest.raises(ValueError): program.module()(*tensors, causal_lower_right(3, 6))  # a program of another bias
    for layer, more in ((Layer(bias), ()), (Layer(), (bias,))):
        torch.export.save(torch.export.export(layer, (*tensors, *more), strict=strict), tmp_path / "program.pt2")
        assert torch.export.load(tmp_path / "program.pt2").module()(*tensors, *more).equal(causal(*tensors, bias))


def test_exports_with_dynamic_lengths():
    L, S = torch.export.Dim("L", max=512), torch.export.Dim("S", max=512)
    program = torch.export.export(Layer(), tuple(qkv(3, 5)), dynamic_shapes=[{2: L}, {2: S}, {2: S}]).run_decompositions()
    assert nodes(program) == 1
    for sizes in ((3, 5), (20, 31), (9, 4)):
        tensors = qkv(*sizes)
        assert program.module()(*tensors).equal(causal(*tensors, causal_lower_right(*sizes)))


def test_vmap_and_functional_gradients():
    q, k, v = (torch.randn(4, 1, 2, n, 8) for n in (3, 5, 5))
    bias = causal_lower_right(3, 5)
    f = lambda q, k, v: causal(q, k, v, bias).square().sum()
    got = torch.vmap(torch.func.grad(f))(q, k, v)
    for n in range(4): torch.testing.assert_close(got[n], torch.func.grad(f)(q[n], k[n], v[n]))
