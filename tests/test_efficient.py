"The efficient engine's kernels, interpreted (on a GPU where there is one): random problems, every mask, any head size, numbers that are not tame."
import math
from dataclasses import replace

import pytest
import torch

from problems import random_problem
from tensorplay_attn.bounds import judge_backward, judge_forward
from tensorplay_attn.gradients import row_delta
from tensorplay_attn.problem import make_problem, restrict
from tensorplay_attn.tiled import walk_backward, walk_forward

pytest.importorskip("triton")
from tensorplay_attn.kernels.efficient_backward import efficient_backward, folded, own_and_loop, parts_of
from tensorplay_attn.kernels.efficient_forward import chunk, efficient_forward
from tensorplay_attn.kernels.launch import Config, guarded

SMALL, MIDDLE, LARGE = Config(16, 16, 4, 1), Config(32, 32, 4, 1), Config(64, 64, 4, 1)


def run(problem, d_out, d_lse=None, config=MIDDLE):
    "Forward and backward, with guard bands around every output."
    with guarded():
        answer = efficient_forward(problem, True, config)
        return answer, efficient_backward(problem, *answer[:2], d_out, d_lse, config=config)


def check(problem, d_out, d_lse=None, config=MIDDLE, note=""):
    "Every output and gradient within its bound; inputs are left as they were."
    tensors = [x for x in (problem.q, problem.k, problem.v, problem.mask, problem.bias, problem.sinks, d_out, d_lse) if x is not None]
    before = [x.clone() for x in tensors]
    answer, grads = run(problem, d_out, d_lse, config)
    for name, verdict in (judge_forward(problem, *answer) | judge_backward(problem, grads, d_out, d_lse)).items():
        assert verdict, f"{note} {name}: {verdict}"
    assert all(same(a, b) for a, b in zip(before, tensors)), f"{note} inputs were written"
    return answer, grads


def same(a, b): return (a is None and b is None) or a.equal(b) or a.nan_to_num(7).equal(b.nan_to_num(7)) and a.isnan().equal(b.isnan())


def qkv(B, H, Hkv, L, S, E, Ev, dtype=torch.float32):
    torch.manual_seed(L * S + E)
    return [torch.randn(*size).to(dtype) for size in ((B, H, L, E), (B, Hkv, S, E), (B, Hkv, S, Ev), (B, H, L, Ev))]


@pytest.mark.parametrize("block", range(4))
def test_random_problems(block):
    tried = 0
    for seed in range(300 + block * 6, 306 + block * 6):
        problem, d_out, d_lse = random_problem(seed)
        if problem.q.dtype == torch.float64: continue
        check(problem, d_out, d_lse, (MIDDLE, LARGE)[seed % 2], f"{seed=}")
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("axes", range(16))
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_masks_broadcast_over_any_axes(kind, axes):
    q, k, v, do = qkv(2, 4, 2, 20, 40, 8, 8)
    shape = [n if axes >> x & 1 else 1 for x, n in enumerate((2, 4, 20, 40))]
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape)
    if kind == "bias" and axes & 8: mask = mask.masked_fill(torch.rand(shape) < 0.2, -math.inf)
    problem = make_problem(q, k, v, mask)
    _, grads = check(problem, do, torch.randn(2, 4, 20), LARGE)
    if kind == "bias": assert (grads.dbias[problem.bias == -math.inf] == 0).all()


KNOBS = dict(causal=dict(is_causal=True), right=dict(is_causal=True, alignment="lower_right"), window=dict(window_size=(9, 5)), cap=dict(softcap=2.0),
    sinks=dict(sinks=torch.tensor([0.5, -math.inf])), dropout=dict(dropout_p=0.4, seed=torch.tensor([7, 3])), scale=dict(scale=-0.3),
    lengths=dict(kv_lengths=torch.tensor([0, 29])), ends=dict(kv_lengths=torch.tensor([17, 40]), is_causal=True, alignment="lower_right"))


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("kind", ["none", "mask", "bias"])
def test_every_knob_with_every_mask(kind, knob):
    q, k, v, do = qkv(2, 2, 1, 35, 40, 8, 8)
    mask = {"none": None, "mask": torch.rand(2, 1, 35, 40) < 0.6, "bias": torch.randn(2, 35, 40)}[kind]
    check(make_problem(q, k, v, mask, **KNOBS[knob]), do, torch.randn(2, 2, 35), LARGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("E, Ev", [(1, 17), (16, 1), (80, 129), (129, 80), (256, 16), (300, 300), (16, 513)])
def test_any_head_size(E, Ev, dtype):
    q, k, v, do = qkv(1, 2, 1, 19, 33, E, Ev, dtype)
    check(make_problem(q, k, v, torch.randn(19, 33).to(dtype), is_causal=True, alignment="lower_right"), do, None, LARGE)


def test_chunks_are_constant_from_512_bytes_on():
    assert [chunk(n, 2) for n in (1, 16, 17, 128, 129, 256, 257, 513, 100_000)] == [16, 16, 32, 128, 256, 256, 128, 128, 128]
    assert [chunk(n, 4) for n in (64, 128, 129, 256, 100_000)] == [64, 128, 128, 128, 128]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("finite", [torch.float16, torch.float32])
def test_the_lowest_finite_number_is_a_number(dtype, finite):
    q, k, v, do = qkv(1, 1, 1, 20, 40, 8, 8)
    bias = torch.zeros(20, 40, dtype=dtype)
    bias[3], bias[4, :33] = -math.inf, max(torch.finfo(finite).min, torch.finfo(dtype).min)  # a row of nothing; a row whose first tiles are low
    bias[5], bias[6] = bias[4, 0], -bias[4, 0]  # a row that is low everywhere, one that is high
    (out, lse, top), grads = check(make_problem(q, k, v, bias), do)
    assert (out[..., 3, :] == 0).all() and (lse[..., 3] == -math.inf).all()
    assert (grads.dq[..., 3, :] == 0).all() and (grads.dbias[..., 3, :] == 0).all()
    if bias[5, 0] < -1e30: assert torch.allclose(out[..., 5, :], v.mean(2), atol=1e-6) and lse[0, 0, 5] == bias[5, 0].float()


def test_rows_whose_first_tiles_are_hidden():
    q, k, v, do = qkv(1, 1, 1, 40, 80, 8, 8)
    mask = torch.ones(40, 80, dtype=torch.bool)
    mask[:, :64], mask[7] = False, False
    for m in (mask, torch.zeros(40, 80).masked_fill(~mask, -math.inf)):
        (out, lse, _), grads = check(make_problem(q * 30, k, v, m), do, None, SMALL)
        assert (out[:, :, 7] == 0).all() and (lse[:, :, 7] == -math.inf).all() and (grads.dq[:, :, 7] == 0).all()
        assert (grads.dk[:, :, :64] == 0).all() and (grads.dv[:, :, :64] == 0).all()


@pytest.mark.parametrize("scale", [6e4, -6e4])
def test_large_scores_and_sinks_of_infinity(scale):
    q, k, v, do = qkv(1, 2, 2, 17, 33, 16, 16)
    for sinks in (None, torch.tensor([math.inf, -math.inf]), torch.tensor([-6e4, 6e4])):
        check(make_problem(torch.ones_like(q), torch.ones_like(k), v, torch.randn(17, 33), scale=scale / 16, sinks=sinks), do, None, LARGE)


@pytest.mark.parametrize("by", ["mask", "bias", "lengths", "causal"])
def test_what_is_hidden_is_never_felt(by):
    "NaN and infinities in keys and values that nobody sees, in fp16 too, where weights are rounded before they meet values."
    for dtype in (torch.float32, torch.float16):
        q, k, v, do = qkv(1, 2, 1, 20, 40, 8, 8, dtype)
        hidden = torch.arange(40) >= 20 if by in ("lengths", "causal") else torch.rand(40) < 0.4
        knob = dict(mask=dict(attn_mask=~hidden), bias=dict(attn_mask=torch.zeros(40, dtype=dtype).masked_fill(hidden, -math.inf)),
            lengths=dict(kv_lengths=torch.tensor([20])), causal=dict(is_causal=True))[by]
        clean = run(make_problem(q, k, v, **knob), do, None, LARGE)
        bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)[torch.randint(3, (40, 8))]
        k, v = (torch.where(hidden[:, None], bad, x) for x in (k, v))
        (out, lse, top), grads = run(make_problem(q, k, v, **knob), do, None, LARGE)
        u = torch.finfo(dtype).eps
        for a, b in zip((out, lse, top, *grads), (*clean[0], *clean[1])): assert b is None or torch.allclose(a, b, atol=8 * u, rtol=8 * u)
        for x in (grads.dk, grads.dv): assert (x[:, :, hidden] == 0).all()


@pytest.mark.parametrize("where, bad", [(x, math.nan) for x in ("q", "k", "v", "do", "bias")] + [(x, math.inf) for x in ("v", "do", "bias")])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_is_seen_reaches_exactly_those_who_see_it(where, bad, softcap):
    "A number of query 6 or key 11 is not tame: which queries and keys feel it is told by the mask alone."
    q, k, v, do = qkv(1, 1, 1, 20, 40, 8, 8)
    seen = torch.rand(20, 40) < 0.5
    seen[6, 11] = True
    bias = torch.randn(20, 40).masked_fill(~seen, -math.inf)
    clean = run(make_problem(q, k, v, bias, softcap=softcap), do, config=LARGE)
    dict(q=q[..., 6, 2:3], k=k[..., 11, 2:3], v=v[..., 11, 2:3], do=do[..., 6, 2:3], bias=bias[6, 11:12])[where].fill_(bad)
    dirty = run(make_problem(q, k, v, bias, softcap=softcap), do, config=LARGE)
    rows = seen[:, 11] if where in ("k", "v") else torch.arange(20) == 6
    keys, nobody = seen[rows].any(0), torch.zeros(20, dtype=torch.bool)
    felt = dict(out=nobody if where == "do" else rows, dq=rows, dk=keys, dv=keys)
    if where == "v": felt["dv"] = torch.zeros(40, dtype=torch.bool)
    if where == "bias" and bad == math.inf: felt["dv"] = torch.arange(40) == 11  # the others have weight 0 beside an infinite one
    named = lambda result: dict(out=result[0][0], dq=result[1].dq, dk=result[1].dk, dv=result[1].dv)
    for name, x in named(dirty).items():
        assert (~x[0, 0].isfinite()).any(-1).equal(felt[name]), name
        still = ~rows if name in ("out", "dq") else ~keys
        assert torch.allclose(x[0, 0][still], named(clean)[name][0, 0][still], atol=1e-5), name
    assert (dirty[1].dbias[0, 0].isfinite() | seen & rows[:, None]).all() and (dirty[1].dbias[0, 0][~seen] == 0).all()


def test_a_bias_of_nan_where_nothing_is_seen_is_nothing():
    q, k, v, do = qkv(1, 1, 1, 20, 40, 8, 8)
    bias = torch.randn(20, 40)
    clean = run(make_problem(q, k, v, bias, is_causal=True), do)
    bias[:, 20:] = math.nan
    dirty = run(make_problem(q, k, v, bias, is_causal=True), do)
    assert all(same(a, b) for a, b in zip((*clean[0], *clean[1]), (*dirty[0], *dirty[1])))


def alone(problem, d_out, d_lse, config=MIDDLE):
    "The same bits twice, and for each batch entry by itself."
    answer, grads = run(problem, d_out, d_lse, config)
    again = run(problem, d_out, d_lse, config)
    assert all(map(same, (*answer, *grads), (*again[0], *again[1])))
    for b in range(problem.q.shape[0]):
        s = slice(b, b + 1)
        own, own_grads = run(restrict(problem, batch=s), d_out[s], None if d_lse is None else d_lse[s], config)
        assert all(same(a, x[s]) for a, x in zip((*own, *own_grads[:3]), (*answer, *grads[:3])))
        if problem.bias is not None and problem.bias.shape[0] > 1: assert same(own_grads.dbias, grads.dbias[s])


@pytest.mark.parametrize("seed", [105, 111, 127, 138])
def test_the_same_bits_twice_and_alone(seed):
    problem, d_out, d_lse = random_problem(seed)
    alone(replace(problem, dropout_p=0.0), d_out, d_lse)  # where a weight lies is part of its dropout


@pytest.mark.parametrize("shape", [(2, 4, 20, 40), (2, 1, 20, 1), (2, 4, 1, 1), (2, 1, 1, 40)])
def test_the_gradient_of_an_entrys_own_bias_is_its_own(shape):
    q, k, v, do = qkv(2, 4, 2, 20, 40, 8, 8)
    alone(make_problem(q, k, v, torch.randn(shape)), do, None, LARGE if shape[1] == 4 else MIDDLE)


@pytest.mark.parametrize("kind", ["none", "mask", "bias"])
def test_a_few_ulp_from_the_twin(kind):
    q, k, v, do = qkv(1, 2, 2, 64, 96, 32, 32)
    mask = {"none": None, "mask": torch.rand(64, 96) < 0.6, "bias": torch.randn(64, 96)}[kind]
    problem = make_problem(q, k, v, mask, is_causal=True, alignment="lower_right")
    (out, lse, top), grads = run(problem, do)
    twin = walk_forward(problem, 32, 32)
    want = walk_backward(problem, lse, row_delta(out, do, None, torch.float32), do, True, 32, 32)
    ulp = torch.finfo(torch.float32).eps
    for name, a, b in zip(("out", "lse", "top", "dq", "dk", "dv", "dbias"), (out, lse, top, *grads), (*twin, *want)):
        if a is None: continue
        assert (a - b).abs().max() <= 16 * ulp * b.abs().max(), f"{name}: {(a - b).abs().max() / b.abs().max() / ulp} ulp of the largest"


@pytest.mark.parametrize("L", [1, 15, 16, 17, 31, 33, 63, 65, 127, 129])
def test_ragged_sizes(L):
    q, k, v, do = qkv(1, 1, 1, L, 130 - L, 16, 16)
    check(make_problem(q, k, v, torch.rand(L, 130 - L) < 0.7, is_causal=True), do, None, LARGE)


@pytest.mark.parametrize("size", range(7))
def test_sizes_of_0_and_1(size):
    for n in (0, 1):
        sizes = [2, 2, 1, 5, 6, 8, 8]
        sizes[size] = n
        if n == 0 and size == 2: sizes[1] = 0
        B, H, _, L, S, E, Ev = sizes
        q, k, v, do = qkv(*sizes)
        for mask in (torch.randn(1, H, L, S), torch.randn(1, 1, 1, 1), torch.rand(1, 1, 1, S) < 0.5):
            _, grads = check(make_problem(q, k, v, mask, sinks=torch.randn(H)), do, torch.randn(B, H, L), LARGE)
            if mask.dtype != torch.bool: assert grads.dbias.shape == mask.shape


def test_many_small_heads():
    q, k, v, do = qkv(8, 3, 3, 3, 5, 4, 4)
    check(make_problem(q, k, v, torch.randn(3, 3, 5)), do, None, SMALL)


def test_layouts():
    q, k, v, do = qkv(2, 2, 2, 20, 40, 8, 8)
    wide = torch.randn(2, 2, 80, 60)
    for bias in (wide[:, :, :40, :20].mT, wide[..., 1:41, 3:43:2].mT, wide[:1, :1, :20, :40].expand(2, 2, 20, 40),
                 wide[0, 0, 3, 5:45].expand(20, 40)):
        given = make_problem(q.transpose(1, 2).contiguous().transpose(1, 2), k, v.mT.contiguous().mT, bias)
        plain = make_problem(q, k, v, bias.contiguous())
        a, b = run(given, do.mT.contiguous().mT, None, LARGE), run(plain, do, None, LARGE)
        assert all(map(same, (*a[0], *a[1]), (*b[0], *b[1])))


def test_a_bias_that_needs_no_gradient_costs_none():
    q, k, v, do = qkv(1, 1, 1, 20, 40, 8, 8)
    problem = make_problem(q, k, v, torch.randn(20, 40))
    out, lse, _ = efficient_forward(problem, config=MIDDLE)
    assert efficient_backward(problem, out, lse, do, need_dbias=False, config=MIDDLE).dbias is None


def test_the_bias_gradient_is_divided_without_the_batch_having_a_say():
    q, k, v, _ = qkv(2, 4, 2, 100, 70, 8, 8)
    shape = lambda *size: own_and_loop(make_problem(q, k, v, torch.zeros(size)), 32, 32)
    assert shape(2, 4, 100, 70) == ((2, 4, 4, 3), (1, 1, 1, 1))
    assert shape(1, 4, 100, 1) == ((1, 4, 4, 1), (2, 1, 1, 3))
    assert shape(1) == ((1, 1, 1, 1), (2, 4, 4, 3)) and parts_of(*shape(1)) == 64
    assert parts_of(*shape(2, 4, 1, 1)) == parts_of(*own_and_loop(make_problem(q[:1], k[:1], v[:1], torch.zeros(1, 4, 1, 1)), 32, 32)) == 8
    x = torch.randn(8, 3)
    assert folded(x).allclose(x.sum(0)) and folded(x[:1]) is not None
