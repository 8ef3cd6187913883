"User functions as graphs: what they say, how they are run, differentiated, refused, and what engines make of them."
import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from tensorplay_attn import mods
from tensorplay_attn.gradients import dense_backward
from tensorplay_attn.masks import CATALOGUE, and_masks, causal_mask, create_mask, index_tensors, noop_mask, window_mask
from tensorplay_attn.mods import VOCABULARY, Blocks, Mods, add_at, derivative, parse, retyped, run, trace, window_of
from tensorplay_attn.problem import make_problem, restrict
from tensorplay_attn.reference import dense_forward, loops_forward
from tensorplay_attn.scores import SCORES
from tensorplay_attn.tiled import tiled_backward, tiled_forward

inf = float("inf")
table, vector, number = torch.linspace(-1, 1, 36).view(6, 6), torch.linspace(0.5, 1.5, 6), torch.tensor(0.75)

EXPRESSIONS = {  # a score_mod each
    "arithmetic": lambda s, b, h, i, j: (s + 2) * 3 - s / 4 + (1 - s) * -s + torch.add(s, i, alpha=2) - torch.sub(s, j, alpha=3),
    "a number first": lambda s, b, h, i, j: s + 7 // (i + 1) + torch.div(7, i + 1, rounding_mode="trunc") + 2.5 % (s.abs() + 1) + 2.0 ** s +
    3 / (j + 1) + 5 % (j + 1),
    "integers": lambda s, b, h, i, j: s + (i - j) // 3 + (i - j) % 3 + (7 - i) % 4 + (j - i).abs() + torch.div(i - j, 2, rounding_mode="trunc"),
    "shifts and bits": lambda s, b, h, i, j: s + (i << 1) + (j >> 1) + (i & 3) + (j | 4) + (i ^ j) + ~i,
    "a divisor that may be zero": lambda s, b, h, i, j: s + (i + 3) // ((i - j).abs() + 1) + (s * 7) % torch.where(i == j, 2, i - j) + 5 // (i + 1),
    "true division": lambda s, b, h, i, j: s + i / (j + 1),
    "rounding": lambda s, b, h, i, j: s + s.floor() + s.ceil() + s.round() + s.trunc() + torch.sign(s),
    "powers": lambda s, b, h, i, j: s**2 + s.abs() ** 0.5 + s**3 + 2.0**s + s.abs().sqrt() + (s.abs() + 1).rsqrt() + torch.reciprocal(s.abs() + 1),
    "exponentials": lambda s, b, h, i, j: s.exp() + torch.exp2(s) + torch.expm1(s) + (s.abs() + 1).log() + torch.log2(s.abs() + 1) +
    torch.log1p(s.abs()),
    "logarithm to 10": lambda s, b, h, i, j: torch.log10(s.abs() + 1),
    "waves": lambda s, b, h, i, j: torch.sin(s) + torch.cos(s) + torch.tanh(s) + torch.sigmoid(s) + torch.erf(s) + s.square(),
    "choices": lambda s, b, h, i, j: torch.where(i >= j, s, -inf) + torch.where(s > 0, 1.0, -1.0),
    "ends": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + s.clamp(min=0.1) + s.clamp(max=0.2) + torch.relu(s) + torch.minimum(s, vector[h]) +
    torch.maximum(s, number),
    "integer ends": lambda s, b, h, i, j: s + (i - j).clamp(-2, 2) + torch.minimum(i, j) + torch.maximum(i, j + 1),
    "logic": lambda s, b, h, i, j: s.masked_fill(~((i >= j) & (j > 1) | (i == j) ^ (i != 3)), -inf) + torch.logical_and(i, j),
    "remainders": lambda s, b, h, i, j: s * torch.div(s, 0.7, rounding_mode="floor") + torch.div(s, vector[h], rounding_mode="trunc") + s % 0.7 +
    torch.fmod(s, 0.7) + s % vector[h],
    "kinds": lambda s, b, h, i, j: s + torch.isnan(s) + torch.isinf(s) * 2 + torch.isneginf(s) + (i > j).float() + i.to(torch.int32) +
    s.to(torch.float16),
    "tables": lambda s, b, h, i, j: s * vector[j] + table[h, i] + table[i, j] + table[:, 0][j] + table[1][i] + table[..., 2][h] + table[2, 3] +
    vector[-1 - h],
    "tables of indices": lambda s, b, h, i, j: s + vector[torch.tensor([5, 4, 3, 2, 1, 0])[i]] + table[0, j],
    "relative": lambda s, b, h, i, j: s + table[h % 6, torch.clamp(j - i + 3, 0, 5)],
    "numbers": lambda s, b, h, i, j: s * number + torch.ones(1) * 2 + torch.tensor(3) + s.new_tensor(0.5) + torch.zeros_like(s) + s.new_full((), 2.0),
    "a device": lambda s, b, h, i, j: s + torch.tensor(1.5, device=s.device) + torch.arange(6, device=i.device)[i],
    "an own step in place": lambda s, b, h, i, j: (s * 1).add_(1).mul_(2),
    "no word for it": lambda s, b, h, i, j: nn.functional.softplus(s) + torch.atan(s),
}


def same(a, b): return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_says_what_the_function_says(name, dtype):
    "The graph, and the graph of its text, give the function's own bits on a tile, also for scores that are no numbers; and one element its value."
    f, at = EXPRESSIONS[name], index_tensors(1, 2, 6, 6)
    graph, tensors = trace(f, dtype)
    assert parse(str(graph)) == graph and mods._parse(str(graph)) == graph and (name == "no word for it" or {n.op for n in graph.nodes} <= VOCABULARY)
    s = torch.randn(1, 2, 6, 6, dtype=dtype)
    s[0, 0, 0, :3] = torch.tensor([inf, -inf, math.nan])
    want = f(s, *at)
    for g in (graph, mods._parse(str(graph))):
        got = run(g, s, *at, tensors=tensors)[0].expand(s.shape)
        torch.testing.assert_close(got, want.to(dtype).expand(s.shape), rtol=3e-7 if name == "logarithm to 10" else 0, atol=0, equal_nan=True)
    one = [torch.tensor(n) for n in (0, 1, 2, 5)]
    torch.testing.assert_close(run(graph, s[0, 1, 2, 5], *one, tensors=tensors)[0], want[0, 1, 2, 5].to(dtype))


@pytest.mark.parametrize("name", [n for n in EXPRESSIONS if n not in ("kinds", "a number first", "no word for it")])
def test_the_way_back_is_autograds(name):
    f, at = EXPRESSIONS[name], index_tensors(1, 2, 6, 6)
    graph, tensors = trace(f, torch.float64)
    tensors = [t.double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    s, g = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True), torch.randn(1, 2, 6, 6, dtype=torch.float64)
    graph = retyped(graph, "f64")
    y, = run(graph, s, *at, tensors=tensors)
    wanted = [s, *(t for t in tensors if t.requires_grad)]
    want = torch.autograd.grad(y.expand(s.shape), wanted, g, allow_unused=True, materialize_grads=True)
    back, sums = derivative(graph), [torch.zeros_like(t) if t.requires_grad else None for t in tensors]
    with torch.no_grad():
        ds, *parts = run(back.graph, s, *at, g, tensors=tensors)
        for site, part in zip(back.sites, parts): add_at(sums[site.tensor], run(site.address, s, *at, tensors=tensors), part.expand(s.shape))
    torch.testing.assert_close([ds.expand(s.shape), *(x for x in sums if x is not None)], list(want))


def test_ties_and_hidden_infinities_go_back_as_in_torch():
    f = lambda s, b, h, i, j: torch.maximum(s, number) + torch.minimum(s, number) + s.clamp(-1, 1) + torch.relu(s) + torch.where(i >= j, s, -inf)
    s, at = torch.tensor([0.75, -1.0, 1.0, 0.0]).view(1, 1, 1, 4).requires_grad_(), index_tensors(1, 1, 1, 4)
    g = torch.ones(1, 1, 1, 4)
    want, = torch.autograd.grad(f(s, *at), s, g)
    graph, tensors = trace(f)
    assert run(derivative(graph).graph, s.detach(), *at, g, tensors=tensors)[0].equal(want)


def test_parts_add_up_in_the_sums_own_type():
    "Many small parts for one entry: fp32 parts would be lost beside one another in fp64 sums, half ones in fp32 sums."
    for low, high in ((torch.float32, torch.float64), (torch.float16, torch.float32)):
        g = torch.full((1, 1, 64, 64), 0.1, dtype=high)
        total = torch.zeros(3, dtype=high)
        add_at(total, (torch.ones((), dtype=torch.int64),), g.clone())
        assert total.tolist() == [0, g.sum().item(), 0] and total[1] != g.to(low).sum().to(high)
    graph, (t,) = trace(lambda s, b, h, i, j, t=torch.ones(2): s * t[h], torch.float64)
    assert derivative(graph).graph.types[derivative(graph).graph.output[1]] == "f64"


class Method:
    def __init__(self): self.weight = torch.tensor([1.0, 2.0])
    def mod(self, s, b, h, i, j): return s + self.weight[h]


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    def forward(self, s, b, h, i, j): return s + self.weight[h]


def test_every_way_to_hold_a_tensor_is_one_graph():
    held = torch.tensor([1.0, 2.0])
    ways = [lambda s, b, h, i, j: s + held[h], lambda s, b, h, i, j, t=held: s + t[h], functools.partial(lambda t, s, b, h, i, j: s + t[h], held),
        Method().mod, Module(), eval("lambda s, b, h, i, j: s + t[h]", {"t": held}), lambda s, b, h, i, j: s + torch.stack([held, held])[1][h]]
    traced = [trace(f) for f in ways]
    assert len({g for g, _ in traced}) == 1 and all(torch.equal(t, held) for _, (t,) in traced)
    assert traced[0][1][0] is held and traced[4][1][0] is ways[4].weight
    def own(s, b, h, i, j):
        t = torch.zeros(2)
        t[1] = 2
        t += 1
        return s + t.mul_(2)[h]
    assert trace(own)[1][0].tolist() == [2, 6]  # into what it made itself it may write
    (more,) = trace(lambda s, b, h, i, j: s + 3 * Module.forward.__globals__["number"])[1]
    assert more.item() == 2.25  # what is done to captured tensors alone is done before


def test_a_captured_number_is_an_input_and_a_changed_closure_is_seen():
    by = 1.0
    def f(s, b, h, i, j): return s + by
    first, _ = trace(f)
    by = 2.0
    second, _ = trace(f)
    assert first != second and str(second).count("2.0") == 1
    graphs = {trace(lambda s, b, h, i, j, x=x: s * x)[0] for x in map(torch.tensor, map(float, range(200)))}
    assert len(graphs) == 1


def test_what_is_remembered_is_bounded():
    for f in (lambda s, b, h, i, j, n=n: s + n for n in range(600)): trace(f)
    assert len(mods._KNOWN) <= 256


long = torch.arange(6)
REFUSED = {
    "branches on": lambda b, h, i, j: i >= j if h == 0 else j >= i,
    "branches": lambda b, h, i, j: i >= max(j, i),
    "values of indices": lambda b, h, i, j: long[int(i.sum())] >= j,
    "mixes elements": lambda s, b, h, i, j: s.softmax(-1),
    "uses sum": lambda s, b, h, i, j: s.sum(),
    "uses cumsum": lambda b, h, i, j: torch.cumsum(i, 2) >= j,
    "uses sort": lambda s, b, h, i, j: s.sort(-1)[0],
    "uses view": lambda s, b, h, i, j: s.reshape(-1)[0],
    "whole": lambda s, b, h, i, j: s + long,
    "1 indices": lambda s, b, h, i, j: s + table[h],
    "2 axes": lambda s, b, h, i, j: s + table[i][j],
    "indexes an index": lambda b, h, i, j: i[j] >= 0,
    "torch.bool": lambda b, h, i, j: long[i >= j] >= 0,
    "torch.float32": lambda b, h, i, j: long[i.float()] >= j,
    "writes into": lambda s, b, h, i, j: s.add_(1),
    "captured tensor": lambda s, b, h, i, j: long.add_(i),
    "captured tensor: __setitem__": lambda s, b, h, i, j: (long.__setitem__(0, 1), s)[1],
    "captured tensor: mul_": lambda s, b, h, i, j: s + long.mul_(2)[j],
    "captured tensor: __iadd__": lambda s, b, h, i, j: s + long.__iadd__(2)[j],
    "captured tensor: add": lambda s, b, h, i, j: s + torch.add(long, 1, out=long)[j],
    "bool tensor": lambda b, h, i, j: i - j,
    "returned bool": lambda b, h, i, j: True,
    "floating scores": lambda s, b, h, i, j: i - j,
    "NoneType": lambda s, b, h, i, j: None,
    "complex": lambda s, b, h, i, j: torch.complex(s, s),
    "sparse": lambda s, b, h, i, j: s + torch.eye(6).to_sparse()[0, 0] if False else s + table.to_sparse()[i, j],
    "3 positional": lambda b, h, i: i,
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_words(words):
    with pytest.raises(TypeError, match=words): trace(REFUSED[words])


def test_the_users_line_is_named():
    with pytest.raises(TypeError, match=r"test_mods.py:\d+: .*softmax"): trace(REFUSED["mixes elements"])
    assert any("test_mods.py" in n.where for n in trace(EXPRESSIONS["no word for it"])[0].nodes)


def test_whatever_is_around(tmp_path):
    "Autocast, no_grad, inference, fake tensors, transforms: the same graph, and the user's own tensors."
    from torch._subclasses import FakeTensorMode
    held = nn.Parameter(torch.ones(6))
    f = lambda s, b, h, i, j: s + held[j] * (i - j)
    graph, _ = trace(f)
    with torch.autocast("cpu", torch.bfloat16): assert trace(f)[0] == graph
    with torch.no_grad(): assert trace(f)[0] == graph and trace(f)[1][0] is held
    with torch.inference_mode(): assert trace(f)[0] == graph
    with FakeTensorMode(allow_non_fake_inputs=True): assert trace(f)[0] == graph
    seen = []
    def inner(w):
        g, (t,) = trace(lambda s, b, h, i, j: s + w[j] * (i - j))
        seen.append(g == graph and t is w)
        return (t * 2).sum()
    assert torch.func.grad(inner)(torch.ones(6)).equal(torch.full((6,), 2.0)) and torch.vmap(inner)(torch.ones(3, 6)).shape == (3,) and all(seen)


def test_every_catalogue_entry_in_words():
    for name, make in CATALOGUE.items(): assert {n.op for n in trace(make(2, 3, 10, 12))[0].nodes} <= VOCABULARY, name
    for name, make in SCORES.items():
        graph, tensors = trace(make(2, 3, 10, 12)[0])
        assert {n.op for n in graph.nodes} <= VOCABULARY and derivative(graph).graph.output, name


lines = st.builds(lambda which, c, strict: [lambda b, h, i, j: j <= i + c, lambda b, h, i, j: i - j < c, lambda b, h, i, j: j - c >= i,
    lambda b, h, i, j: -i <= c - j, lambda b, h, i, j: j > i - c][which], st.integers(0, 4), st.integers(-9, 9), st.booleans())


@settings(max_examples=80, deadline=None)
@given(st.lists(lines, min_size=1, max_size=4))
def test_windows_are_found(masks):
    mask = and_masks(*masks)
    found, keep = window_of(trace(mask)[0]), create_mask(mask, 1, 1, 14, 17, device="cpu")
    if found is None: return  # an empty one has no words
    (left, right), shift = found
    assert keep.equal(create_mask(window_mask(left, right, shift), 1, 1, 14, 17, device="cpu"))


def test_what_is_no_window():
    for name in ("prefix", "document", "padding", "dilated", "tree", "natten"):
        assert window_of(trace(CATALOGUE[name](2, 2, 9, 9))[0]) is None, name
    assert window_of(trace(noop_mask)[0]) is None and window_of(trace(causal_mask())[0]) == ((-1, 0), 0)


# --- engines ---

def blocks_of(mask_mod, B, H, L, S, m, n):
    "Lists of a mask that is there in full."
    keep = create_mask(mask_mod, B, H, L, S, device="cpu")
    whole = nn.functional.pad(keep, (0, -S % n, 0, -L % m)).unflatten(-1, (-1, n)).unflatten(2, (-1, m)).transpose(3, 4).flatten(-2)
    some, every = whole.any(-1), whole.all(-1)
    lists = lambda g: (g.sum(-1).int(), g.int().argsort(dim=-1, descending=True, stable=True).int())
    return Blocks(*lists(some & ~every), *lists(every), *lists((some & ~every).mT), *lists(every.mT), (m, n), (L, S))


def random_user_problem(seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda xs: xs[torch.randint(len(xs), (), generator=g).item()]
    torch.manual_seed(seed)
    L, S, B, Hkv, G = pick([1, 5, 16, 33, 60]), pick([1, 7, 16, 40, 61]), pick([1, 2]), pick([1, 2]), pick([1, 2])
    H, E = Hkv * G, pick([4, 8])
    mask_mod = CATALOGUE[pick(list(CATALOGUE))](B, H, L, S, seed)
    score, read = trace(SCORES[pick(list(SCORES))](B, H, L, S, seed)[0]) if pick([True, True, False]) else (None, ())
    mask, asked = trace(mask_mod)
    size = pick([None, (16, 16), (32, 16), (16, 48), (7, 10)])
    blocks = size and blocks_of(mask_mod, B, H, L, S, *size)
    problem = make_problem(torch.randn(B, H, L, E), torch.randn(B, Hkv, S, E), torch.randn(B, Hkv, S, E), softcap=pick([0.0, 0.0, 2.0]),
        sinks=pick([None, None, torch.randn(H)]), dropout_p=pick([0.0, 0.0, 0.3]), seed=torch.tensor([seed, 1]), is_causal=pick([False, False, True]),
        window_size=pick([(-1, -1), (-1, -1), (5, 3)]), kv_lengths=pick([None, None, torch.randint(0, S + 1, (B,), generator=g)]))
    tensors = tuple(t.detach() for t in (*read, *asked))
    return replace(problem, mods=Mods(score, mask, tensors, blocks)), torch.randn(B, H, L, E), pick([None, torch.randn(B, H, L)])


def close(a, b, scale=1.0): torch.testing.assert_close(a, b.to(a.dtype), atol=2e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_tiled_is_dense(seed):
    "Every knob together with user functions; gradients of what they read too."
    problem, d_out, d_lse = random_user_problem(seed)
    wide = problem.to(torch.float64)
    want, got = dense_forward(wide), tiled_forward(problem, True)
    for a, b in zip(got, want): close(a, b)
    grads = tiled_backward(problem, *got[:2], d_out, d_lse)
    truth = dense_backward(wide, *want[:2], d_out.double(), None if d_lse is None else d_lse.double())
    for a, b in zip(grads[:5], truth[:5]): assert (a is None) == (b is None) and (a is None or close(a, b, 5) is None)
    assert len(grads.dtensors) == len(problem.mods.tensors)
    for a, b in zip(grads.dtensors, truth.dtensors): assert (a is None) == (b is None) and (a is None or close(a, b, 50) is None)


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_loops_and_parts_are_dense(seed):
    problem, _, _ = random_user_problem(seed)
    if problem.q.shape[2] > 20: problem = restrict(problem, rows=slice(3, 12))
    out, lse, _ = dense_forward(problem)
    for a, b in zip((out, lse), loops_forward(problem)): close(a, b)
    B, H, Hkv, L, S, _, _ = problem.sizes
    part = restrict(problem, batch=slice(B - 1, B), kv_heads=slice(Hkv - 1, Hkv), rows=slice(L // 2, L))
    for a, b in zip(dense_forward(part)[:2], (out, lse)): close(a, b[B - 1:, H - H // Hkv:, L // 2:])


def test_hidden_values_never_leak():
    "NaN behind a mask_mod or a score_mod's -inf reaches neither output nor gradient; a table is read only where the mask lets it."
    q, k, v = (torch.randn(1, 1, 16, 4) for _ in range(3))
    k[0, 0, 9:], v[0, 0, 9:] = math.nan, inf
    window = torch.randn(8)
    score, read = trace(lambda s, b, h, i, j: torch.where(j < 9, s, -inf) + window[i - j])
    mask, _ = trace(lambda b, h, i, j: (i - j >= 0) & (i - j < 8))
    problem = replace(make_problem(q, k, v), mods=Mods(score, mask, read))
    for forward, backward in ((dense_forward, dense_backward), (tiled_forward, tiled_backward)):
        out, lse = forward(problem)[:2]
        grads = backward(problem, out, lse, torch.ones_like(out), torch.ones_like(lse))
        assert out.isfinite().all() and lse[..., :16].isfinite().all() and all(g.isfinite().all() for g in (*grads[:3], grads.dtensors[0]))
        assert grads.dv[0, 0, 9:].eq(0).all() and grads.dk[0, 0, 9:].eq(0).all()


def test_functions_without_a_rule_run_and_come_back():
    held = torch.randn(6)
    f = lambda s, b, h, i, j: nn.functional.softplus(s) + torch.atan(held[j]) * s
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    score, read = trace(f, torch.float64)
    problem = replace(make_problem(q, k, v), mods=Mods(retyped(score, "f64"), trace(causal_mask())[0], (held.double(),)))
    q, k, v, held = (x.clone().requires_grad_() for x in (q, k, v, held.double()))
    s = f(q @ k.mT / 2, *index_tensors(1, 2, 6, 6)) if False else nn.functional.softplus(q @ k.mT / 2) + torch.atan(held) * (q @ k.mT / 2)
    want = s.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -inf).softmax(-1) @ v
    grads = torch.autograd.grad(want.sum(), (q, k, v, held))
    for forward, backward in ((dense_forward, dense_backward), (tiled_forward, tiled_backward)):
        out, lse = forward(problem)[:2]
        got = backward(problem, out, lse, torch.ones_like(out))
        torch.testing.assert_close((out, *got[:3], got.dtensors[0]), (want.detach(), *grads))


def test_the_same_bits_twice_and_alone():
    problem, d_out, d_lse = next(p for p in map(random_user_problem, range(100)) if p[0].q.shape[0] == 2 and p[0].mods.score and p[0].dropout_p == 0)
    answers = [tiled_forward(problem) for _ in range(2)]
    assert all(same(a, b) for a, b in zip(answers[0][:2], answers[1][:2]))
    grads = [tiled_backward(problem, *answers[0][:2], d_out, d_lse) for _ in range(2)]
    assert all(a is None or same(a, b) for a, b in zip((*grads[0][:5], *grads[0].dtensors), (*grads[1][:5], *grads[1].dtensors)))
    alone = tiled_forward(restrict(problem, batch=slice(1, 2)))
    assert same(alone[0], answers[0][0][1:]) and same(alone[1], answers[0][1][1:])
