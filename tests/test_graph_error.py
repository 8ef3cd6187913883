"Errors walked along a graph hold for any engine, and stay zero where nothing is uncertain."
import math
import random
import pytest
import torch
from tensorplay_attn.graph_error import Course, follow
from tensorplay_attn.mods import NotDerived, derivative, retyped, run, trace

INF = math.inf
SIZES = 2, 3, 5, 11
INDICES = [torch.arange(n).view([-1 if k == axis else 1 for k in range(4)]) for axis, n in enumerate(SIZES)]
ZERO = torch.zeros((), dtype=torch.float64)


def wide(tensors): return tuple(t.double() if t.is_floating_point() else t for t in tensors)


# --- random functions ---

FUNCTIONS = {**{name: getattr(torch, name) for name in ("tanh", "sigmoid", "exp", "exp2", "expm1", "reciprocal", "sin", "cos",
        "erf", "abs", "square", "neg", "floor", "ceil", "round", "trunc", "sign")},
    "log": lambda x: torch.log(x.abs() + 0.1), "log2": lambda x: torch.log2(x * x + 0.3), "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.01), "rsqrt": lambda x: torch.rsqrt(x * x + 0.1), "cube": lambda x: x**3,
    "power": lambda x: (x.abs() + 0.05) ** -1.5, "base": lambda x: 1.7**x, "affine": lambda x: 0.1 * x - 1.7, "quotient": lambda x: 0.3 / x,
    "remainder": lambda x: x % 0.7, "fmod": lambda x: torch.fmod(x, 1.1), "floor_div": lambda x: torch.div(x, 0.4, rounding_mode="floor"),
    "half": lambda x: (x.half() * 0.7 + 0.1).to(x.dtype), "bfloat16": lambda x: (x.bfloat16() * x.bfloat16()).to(x.dtype),
    "whole": lambda x: (2 * x).long().to(x.dtype)}
PAIRS = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "minimum": torch.minimum,
    "maximum": torch.maximum, "where": lambda x, y: torch.where(x > 0.3, x, y), "either": lambda x, y: torch.where((x < 0) | (y > 0), y, -INF)}


def some_function(rng):
    "A score_mod of up to fifteen operations."
    slopes, table, halves = torch.randn(3), torch.randn(9), torch.randn(8).half()
    leaves = [lambda s, h, i, j: s, lambda s, h, i, j: s, lambda s, h, i, j: slopes[h], lambda s, h, i, j: (i - j).to(s.dtype),
        lambda s, h, i, j: table[(j - i).clamp(-4, 4) + 4], lambda s, h, i, j: halves[j % 8].to(s.dtype) * 0.3]

    def part(depth):
        if depth == 0 or rng.random() < 0.15: return rng.choice(leaves)
        x = part(depth - 1)
        if rng.random() < 0.6:
            f = FUNCTIONS[rng.choice(list(FUNCTIONS))]
            return lambda *at: f(x(*at))
        y, f = part(depth - 1), PAIRS[rng.choice(list(PAIRS))]
        return lambda *at: f(x(*at), y(*at))
    f = part(rng.randint(1, 4))
    return lambda s, b, h, i, j: f(s, h, i, j) + 0 * s


def holds(graph, state, off, inputs, tensors, seed):
    "Does an engine in the state dtype keep the walk's promise? Gives the largest share used."
    torch.manual_seed(seed)
    moved = [(x + o * (2 * torch.rand_like(x) - 1)).to(state) for x, o in zip(inputs, off)]
    delta = [y.double() - x for x, y in zip(inputs, moved)]
    course = Course(state, *(torch.maximum(o, d.abs()) for o, d in zip((*off, ZERO)[:2], (*delta, ZERO)[:2])))
    at = lambda xs: (xs[0], *INDICES, *xs[1:])
    got, worst = run(graph, *at(moved), tensors=tensors), 0.0
    for x, v in zip(got, follow(graph, course, *at(inputs), tensors=wide(tensors))):
        first = sum(d * o for d, o in zip((v.ds, v.dg), delta) if d is not None)
        x, want, allowed, first = torch.broadcast_tensors(x.double(), v.x, v.error, torch.as_tensor(first, dtype=torch.float64))
        error = torch.where(x == want + first, 0, (x - want - first).abs())
        error = torch.where(want.isinf() & (x == want) | allowed.isinf(), 0, error)  # an infinity is exact; nothing is known is no promise
        assert (error <= allowed * (1 + 1e-9)).all(), f"{graph}\n{error.max()}"
        share = (error / allowed)[(allowed > 0) & allowed.isfinite()]
        worst = max(worst, share.max().item() if share.numel() else 0.0)
    return worst


@pytest.mark.parametrize("block", range(4))
def test_random_functions_and_their_derivatives(block):
    worst = []
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        graph, tensors = trace(some_function(rng))
        s, g = torch.randn(2, *SIZES, dtype=torch.float64)
        if rng.random() < 0.2: s = s.round()
        off = s.abs() * rng.choice([0.0, 2.0**-24, 2.0**-20, 1e-4]), g.abs() * 1e-5
        worst.append(holds(graph, torch.float32, off[:1], (s,), tensors, seed))
        try: back = derivative(graph).graph
        except NotDerived: continue
        worst.append(holds(back, torch.float32, off, (s, g), tensors, seed))
    assert sorted(worst)[len(worst) // 2] > 1e-3  # and is not just wide


@pytest.mark.parametrize("name", [*FUNCTIONS, *PAIRS])
def test_every_word(name):
    f = FUNCTIONS.get(name) or (lambda x: PAIRS[name](x, 0.5 - x * x))
    graph, tensors = trace(lambda s, b, h, i, j: f(s))
    s = 3 * torch.randn(SIZES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for size in (2.0**-24, 1e-3): holds(graph, torch.float32, (size * s.abs(),), (s,), tensors, 5)
    halves = retyped(graph, "f32")
    if halves != graph: holds(halves, torch.float32, (2.0**-24 * s.abs(),), (s,), tensors, 5)  # fp32 in place of a half type


# --- what is certain ---

def walk(f, s, off=0.0, state=torch.float32, keep=None):
    graph, tensors = trace(f, state)
    s = torch.as_tensor(s, dtype=torch.float64)
    at = [torch.arange(n).view([-1 if k == axis else 1 for k in range(4)]) for axis, n in enumerate(s.shape)]
    return follow(graph, Course(state, torch.full_like(s, off) if isinstance(off, float) else off, ZERO), s, *at, tensors=wide(tensors), keep=keep)[0]


@pytest.mark.parametrize("state", [torch.float32, torch.float64])
def test_what_is_exact_stays_exact(state):
    steps = lambda s, b, h, i, j: torch.where(((i - j).to(s.dtype) / 4).floor() >= 1, s, -INF)
    v = walk(steps, torch.randn(1, 1, 20, 30), 1e-6, state)
    assert (v.error == 0).all() and v.x.isinf().any()
    v = walk(lambda s, b, h, i, j: (i.to(s.dtype) * 0.5 + j.to(s.dtype) * 3).fmod(8.0) - 0 * s, torch.zeros(1, 1, 9, 9), 0.0, state)
    assert (v.error == 0).all()


def test_constants_are_rounded():
    v = walk(lambda s, b, h, i, j: torch.where((i.float() * 0.1).floor() > j, 1.0, 2.0) + 0 * s, torch.zeros(1, 1, 21, 4))
    assert (v.error[0, 0, [10, 20], [0, 1]] >= 1).all()  # 10 * 0.1 and 20 * 0.1 may fall short of a whole number
    assert (v.error.sum(-1) > 0.1).nonzero()[:, 2].tolist() == [10, 20]
    less = lambda c: walk(lambda s, b, h, i, j: s - c, torch.ones(1, 1, 1, 1)).error.item()
    assert less(0.5) == 0 < less(0.1)


def test_logic_of_uncertain_questions():
    off = torch.tensor([0.1, 0.1, 0.1]).double().view(1, 1, 1, 3)
    v = walk(lambda s, b, h, i, j: torch.where((s > 0) & (j > 0), 1.0, 0.0), torch.tensor([0.05, 0.05, 5.0]).view(1, 1, 1, 3), off)
    assert v.error.flatten().tolist() == [0, 1, 0]
    v = walk(lambda s, b, h, i, j: torch.where((s > 0) | (j > 0), 1.0, 0.0), torch.tensor([0.05, 0.05, 5.0]).view(1, 1, 1, 3), off)
    assert v.error.flatten().tolist() == [1, 0, 0]


def test_infinity_nan_and_overflow():
    v = walk(lambda s, b, h, i, j: torch.where(s > 0, s, -INF), torch.tensor([-1.0, 1e-9, 1.0]).view(1, 1, 1, 3), 1e-6)
    assert v.error[0, 0, 0].tolist() == [0, INF, 0] and v.x[0, 0, 0, 0] == -INF
    assert walk(lambda s, b, h, i, j: s.exp(), torch.tensor([80.0, 89.0]).view(1, 1, 1, 2)).error.isinf().flatten().tolist() == [False, True]
    assert walk(lambda s, b, h, i, j: s.half().float(), torch.tensor([6e4, 7e4]).view(1, 1, 1, 2)).error.isinf().flatten().tolist() == [False, True]
    assert walk(lambda s, b, h, i, j: s.log(), torch.tensor([-1.0, 1.0]).view(1, 1, 1, 2), 1e-6).error.isinf().flatten().tolist() == [True, False]
    low = torch.tensor([torch.finfo(torch.float32).min])
    assert walk(lambda s, b, h, i, j: s + low[0], torch.ones(1, 1, 1, 1)).error.isfinite().all()


def test_tables_at_uncertain_places():
    table = torch.tensor([0.0, 1.0, 4.0, 9.0, 1000.0])
    read = lambda s, b, h, i, j: s + table[s.long()]
    assert walk(read, torch.full((1, 1, 1, 1), 2.5), 0.1).error < 1e-5
    assert abs(walk(read, torch.full((1, 1, 1, 1), 2.0), 0.1).error.item() - 5) < 1e-5  # 4 or 9 are its neighbours' 1 and 9
    assert walk(read, torch.full((1, 1, 1, 1), 2.0), 1.5).error > 900
    keep = torch.tensor([True, False]).view(1, 1, 1, 2)
    assert walk(lambda s, b, h, i, j: s + table[4 + j], torch.zeros(1, 1, 1, 2), keep=keep).error[..., 0] < 1e-3


def test_no_rule_no_bound():
    with pytest.raises(ValueError, match="aten.asinh.default.*asinh"): walk(lambda s, b, h, i, j: torch.asinh(s), torch.zeros(1, 1, 1, 1))
