"User functions as Triton functions: every word of the vocabulary, random graphs, tensors of any rank, type and layout, against torch."
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorplay_attn.kernels.lowering import (compiled, evaluate, fits, lower, lower_gradient, lower_reasons, lower_sites, lower_source,
    span_of)
from tensorplay_attn.mods import DTYPES, VOCABULARY, derivative, parse, retyped, run, trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = math.inf, math.nan
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.25, 1e-4, -1e-4, 30.0, -30.0, 100.0, 1e20, -1e20, INF, -INF, NAN]
WHOLE = [0, 1, -1, 2, -2, 3, -3, 7, -7, 10, -10, 63, 100, -100, 127, -128]


def grid(L, S): return torch.arange(L, device=DEVICE)[:, None], torch.arange(S, device=DEVICE)[None, :]


def both(graph, tensors, L, S, b=0, h=0, s=None, dtype=None):
    "A graph run by torch, and lowered: upright and on its side."
    tensors = tuple(t.to(DEVICE) for t in tensors)
    if s is None: s = torch.zeros(L, S, device=DEVICE)
    at = torch.tensor(b, device=DEVICE), torch.tensor(h, device=DEVICE), *grid(L, S)
    want = run(graph, *([s] if graph.kind == "score_mod" else []), *at, tensors=tensors)[0].expand(L, S)
    got = [evaluate(lower(graph), graph.kind, s, s, tensors, dtype or want.dtype, b, h, upright=up) for up in (True, False)]
    assert torch.equal(got[0].nan_to_num(9e9), got[1].nan_to_num(9e9))
    return got[0], want


def words(op, x, y, dtype, out=None, kind="score_mod", args="x0, x1"):
    "The graph of one word."
    head = "mask_mod(b: i64" if kind == "mask_mod" else "score_mod(s: f32, b: i64"
    return parse(f"{head}, h: i64, i: i64, j: i64, t0: {dtype}[:], t1: {dtype}[:])\nx0: {dtype} = index(t0, i)\n"
        f"x1: {dtype} = index(t1, j)\nx2: {out or dtype} = {op}({args})\nreturn x2")


FLOAT_WORDS = {"two": ["add", "sub", "mul", "div", "floor_div", "remainder", "trunc_div", "fmod", "minimum", "maximum", "pow"],
    "one": ["neg", "abs", "sign", "floor", "ceil", "round", "trunc", "exp", "exp2", "log", "log2", "log1p", "expm1", "tanh", "sigmoid", "sqrt",
        "rsqrt",
        "reciprocal", "sin", "cos", "erf", "square"], "truth": ["isnan", "isinf"]}
WHOLE_WORDS = {"two": ["add", "sub", "mul", "floor_div", "remainder", "trunc_div", "fmod", "minimum", "maximum", "and", "or", "xor", "lshift",
    "rshift", "pow"],
    "one": ["neg", "abs", "sign", "square", "not"]}
COMPARE = ["lt", "le", "gt", "ge", "eq", "ne"]


def close(got, want, dtype, op):
    "Alike where not finite, and within a few units in the last place (more where a GPU's exponential is)."
    wide = {torch.float32: 2.0**-21, torch.float64: 2.0**-44}[dtype]
    scale = want.abs().clamp(min=1.0 if op in ("sin", "cos") else 1e-30)
    same = (got == want) | (got.isnan() & want.isnan())
    finite = got.isfinite() & want.isfinite()
    return bool((same | finite & ((got - want).abs() <= wide * scale + (1e-37 if dtype == torch.float32 else 0))).all())


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", FLOAT_WORDS["two"] + FLOAT_WORDS["one"])
def test_floating_words(op, dtype):
    x = torch.tensor(FLOATS, dtype=DTYPES[dtype])
    if op in ("sin", "cos", "exp", "exp2", "pow", "expm1", "remainder", "fmod", "floor_div", "trunc_div"): x = x[(x.abs() < 1e10) | ~x.isfinite()]
    got, want = both(words(op, x, x, dtype, args="x0" if op in FLOAT_WORDS["one"] else "x0, x1"), (x, x), len(x), len(x))
    assert close(got, want, DTYPES[dtype], op), (op, [(a.item(), b.item(), g.item(), w.item()) for (a, b), g, w in
        zip(itertools.product(x, x), got.flatten(), want.flatten()) if not (g == w or g.isnan() and w.isnan())][:8])


@pytest.mark.parametrize("op", COMPARE + FLOAT_WORDS["truth"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "i64", "i32", "u8", "bool"])
def test_comparisons(op, dtype):
    x = torch.tensor(FLOATS if dtype[0] == "f" else WHOLE).to(DTYPES[dtype])
    got, want = both(words(op, x, x, dtype, "bool", "mask_mod", "x0" if op in FLOAT_WORDS["truth"] else "x0, x1"), (x, x), len(x), len(x))
    assert torch.equal(got, want)


@pytest.mark.parametrize("op", ["and", "or", "xor", "not", "add", "mul", "minimum", "maximum", "where"])
def test_logic(op):
    x = torch.tensor([True, False, False, True])
    args = dict(where="x0, x1, x0").get(op, "x0" if op == "not" else "x0, x1")
    got, want = both(words(op, x, x, "bool", "bool", "mask_mod", args), (x, x), 4, 4)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8"])
@pytest.mark.parametrize("op", WHOLE_WORDS["two"] + WHOLE_WORDS["one"])
def test_whole_words(op, dtype):
    "Signs, overflow and shifts as in torch."
    x = torch.tensor(WHOLE + ([2**31 - 1, -2**31, 2**62] if dtype == "i64" else [])).to(DTYPES[dtype])
    y = x
    if "div" in op or op in ("remainder", "fmod"): y = x[x != 0]
    if op == "pow": y = x[(x >= 0) & (x < 120)]
    if op in ("lshift", "rshift"): y = x[(x >= 0) & (x < 8)] if dtype in ("i16", "i8", "u8") else x[x.abs() < 70]
    if dtype == "u8" and op in ("lshift", "rshift"): y = y[:5]
    got, want = both(words(op, x, y, dtype, args="x0" if op in WHOLE_WORDS["one"] else "x0, x1"), (x, y), len(x), len(y))
    assert torch.equal(got, want), [(a.item(), b.item(), g.item(), w.item())
        for (a, b), g, w in zip(itertools.product(x, y), got.flatten(), want.flatten()) if g != w][:8]


@pytest.mark.parametrize("old", ["f32", "f64", "i64", "i32", "i16", "i8", "u8", "bool"])
@pytest.mark.parametrize("new", ["f32", "f64", "i64", "i32", "i16", "i8", "u8", "bool"])
def test_casts(old, new):
    x = torch.tensor([0.0, -0.5, 0.99, 1.0, 3.7, -3.7, 100.0]) if old[0] == "f" else torch.tensor(WHOLE)
    if old[0] == "f" and new == "u8": x = x.abs()
    x = x.to(DTYPES[old])
    got, want = both(words("cast", x, x, old, new, args="x0"), (x, x), len(x), len(x))
    assert torch.equal(got, want)


def test_the_vocabulary_is_covered():
    tried = {w for group in (*FLOAT_WORDS.values(), *WHOLE_WORDS.values()) for w in group} | {*COMPARE, "where", "cast", "index", "full"}
    assert tried == VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool])
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_captured_tensors(rank, dtype):
    "Any rank, any type, any layout."
    torch.manual_seed(rank)
    t = (torch.randn((6, 5, 4, 7)[:rank]) * 3).to(dtype)
    layouts = [t, t.mT.contiguous().mT if rank > 1 else t, torch.stack([t, t], -1)[..., 1], t[:1].expand(t.shape) if rank else t]
    reads = {0: lambda t: lambda s, b, h, i, j: s + t, 1: lambda t: lambda s, b, h, i, j: s + t[i % 6],
        2: lambda t: lambda s, b, h, i, j: s + t[i % 6, j % 5],
        3: lambda t: lambda s, b, h, i, j: s + t[-1, h, j % 4] * t[b, (i - j) % 5, 3],
        4: lambda t: lambda s, b, h, i, j: s * t[b, h, i % 4 - 4, j % 7]}
    s = torch.randn(20, 17, device=DEVICE)
    for x in layouts:
        graph, captured = trace(reads[rank](x.to(DEVICE)), device=DEVICE)
        got, _ = both(graph, captured, 20, 17, b=1, h=2, s=s)
        wide = tuple(t.float() if t.is_floating_point() else t for t in captured)  # halves are computed in fp32
        want = run(retyped(graph, "f32"), s, *(torch.tensor(n, device=DEVICE) for n in (1, 2)), *grid(20, 17), tensors=wide)[0]
        torch.testing.assert_close(got, want.expand(20, 17), rtol=2e-6, atol=1e-6)


def test_out_of_range():
    "Nothing is read there: NaN, or 0."
    t, n = torch.randn(8, device=DEVICE), torch.arange(1, 9, device=DEVICE)
    for fn, sign in ((lambda s, b, h, i, j: s + t[i - j], 0), (lambda s, b, h, i, j: s + n[i - j], 1)):
        graph, captured = trace(fn, device=DEVICE)
        got = evaluate(lower(graph), graph.kind, s := torch.zeros(20, 20, device=DEVICE), s, captured)
        i, j = grid(20, 20)
        inside = (i - j >= -8) & (i - j < 8)
        assert torch.equal(got[inside], captured[0][(i - j)[inside]].float())
        assert (got[~inside] == 0).all() if sign else got[~inside].isnan().all()
    empty = torch.randn(0, device=DEVICE)
    graph, captured = trace(lambda s, b, h, i, j: s + empty[i], device=DEVICE)
    assert evaluate(lower(graph), graph.kind, s, s, captured).isnan().all()


def test_nothing_beside_a_table_is_read():
    whole = torch.full((64,), NAN, device=DEVICE)
    whole[20:28] = 1.0
    t = whole[20:28]
    graph, captured = trace(lambda s, b, h, i, j: torch.where((i >= j) & (i - j < 8), s + t[i - j], 0.0), device=DEVICE)
    got, _ = evaluate(lower(graph), graph.kind, s := torch.zeros(20, 20, device=DEVICE), s, captured), None
    i, j = grid(20, 20)
    assert torch.equal(got, ((i >= j) & (i - j < 8)).float())


def test_large_integers():
    "Products of indices pass 32 bits: counted in 64."
    graph, _ = trace(lambda s, b, h, i, j: s + ((i * 100_000_007 + j * 31) * (j + 1) % 1009), device=DEVICE)
    got, want = both(graph, (), 20, 20)
    assert torch.equal(got, want)
    graph, _ = trace(lambda b, h, i, j: (i.int() * 2_000_000_011 + j.int() * 7) % 3 == 0, device=DEVICE)
    got, want = both(graph, (), 20, 20)
    assert torch.equal(got, want)
    assert "int64" not in lower_source(trace(lambda b, h, i, j: (i - j) // 16 + (i % 7) * 8 >= 0)[0])
    assert "int64" in lower_source(trace(lambda b, h, i, j: i * j >= 10)[0])


def test_ranges_hold():
    "What an operation on integers gives lies in the range foretold."
    rng, torches = random.Random(0), {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "floor_div": lambda a, b: a // b,
        "remainder": lambda a, b: a % b, "trunc_div": lambda a, b: int(a / b), "fmod": lambda a, b: int(math.fmod(a, b)), "and": lambda a, b: a & b,
        "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "minimum": min, "maximum": max, "lshift": lambda a, b: a << b,
        "rshift": lambda a, b: a >> b,
        "neg": lambda a, b: -a, "abs": lambda a, b: abs(a), "square": lambda a, b: a * a, "not": lambda a, b: ~a,
        "sign": lambda a, b: (a > 0) - (a < 0)}
    for op, f in torches.items():
        for _ in range(200):
            a, b = (sorted(rng.choice([0, 1, -1, rng.randint(-30, 30), rng.randint(-30, 30)]) for _ in range(2)) for _ in range(2))
            if op.endswith("shift"): b = [abs(b[0]) % 8, abs(b[0]) % 8 + 2]
            span = span_of(op, tuple(a), tuple(b))
            for x in {a[0], a[1], rng.randint(*a)}:
                for y in {b[0], b[1], rng.randint(*b)} - ({0} if "div" in op or op in ("remainder", "fmod") else set()):
                    assert span[0] <= f(x, y) <= span[1], (op, a, b, x, y, span)
    assert fits((-2**31, 2**31 - 1)) and not fits((0, 2**31))


def random_graph(rng, kind="score_mod"):
    "The text of a random graph."
    lines, floats, whole, truth = [], ["s"] if kind == "score_mod" else [], ["h", "i", "j", "i", "j"], []
    def emit(dtype, text):
        lines.append(f"x{len(lines)}: {dtype} = {text}")
        {"f32": floats, "i64": whole, "bool": truth}[dtype].append(f"x{len(lines) - 1}")
    pick = lambda names: rng.choice(names)
    some = lambda names, constant: pick(names) if rng.random() < 0.7 else repr(constant)
    emit("f32", "index(t0, h)"), emit("f32", "cast(i)"), emit("i64", "remainder(i, 5)"), emit("i64", "index(t2, j)"), emit("bool", "ge(i, j)")
    for _ in range(rng.randint(3, 9)):
        kind_of = rng.random()
        if kind_of < 0.35: emit("f32", f"{pick(['add', 'sub', 'mul', 'minimum', 'maximum'])}({pick(floats)}, {some(floats, rng.uniform(-2, 2))})")
        elif kind_of < 0.5: emit("f32",
            f"{pick(['tanh', 'neg', 'abs', 'sigmoid', 'square', 'sin', 'floor', 'round', 'trunc', 'erf'])}({pick(floats)})")
        elif kind_of < 0.7: emit("i64",
            f"{pick(['add', 'sub', 'mul', 'minimum', 'maximum', 'and', 'xor'])}({pick(whole)}, {some(whole, rng.randint(-9, 9))})")
        elif kind_of < 0.8: emit("i64", f"{pick(['floor_div', 'remainder', 'trunc_div', 'fmod'])}({pick(whole)}, {rng.choice([-7, -3, 2, 5, 16])})")
        elif kind_of < 0.9: emit("bool", f"{pick(COMPARE)}({pick(whole)}, {some(whole, rng.randint(-3, 20))})")
        elif kind_of < 0.95: emit("f32", f"where({pick(truth)}, {pick(floats)}, {some(floats, rng.uniform(-2, 2))})")
        else:
            emit("i64", f"remainder({pick(whole)}, 7)")
            emit("f32", f"index(t1, {whole[-1]}, h)")
    out = floats[-1] if kind == "score_mod" else truth[-1]
    head = "score_mod(s: f32, b: i64" if kind == "score_mod" else "mask_mod(b: i64"
    return "\n".join([f"{head}, h: i64, i: i64, j: i64, t0: f32[:], t1: f32[:, :], t2: i64[:])", *lines, f"return {out}"])


@pytest.mark.parametrize("part", range(4))
def test_random_graphs(part):
    for seed in range(12 * part, 12 * part + 12):
        rng, kind = random.Random(seed), "score_mod" if seed % 4 else "mask_mod"
        torch.manual_seed(seed)
        graph = parse(random_graph(rng, kind))
        tensors = torch.randn(4), torch.randn(7, 4), torch.randint(-50, 50, (40,))
        got, want = both(graph, tensors, 17, 30, h=2, s=torch.randn(17, 30, device=DEVICE))
        if kind == "mask_mod": assert torch.equal(got, want), str(graph)
        else: torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda m, graph=graph: f"{graph}\n{m}")


DERIVED = {"slopes": lambda s, b, h, i, j: s + S1[h] * (j - i), "product": lambda s, b, h, i, j: s * S2[i, j % 5] * S1[h],
    "scalar": lambda s, b, h, i, j: torch.tanh(s * S0) / (1 + S0 * S0),
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, s + S1[(i - j) % 4], -INF),
    "nested": lambda s, b, h, i, j: s * S1[S3[i]] + S2[j, S3[i]], "clamped": lambda s, b, h, i, j: s.clamp(-1.0, 1.0) + (s * S1[h]).exp().log1p(),
    "used twice": lambda s, b, h, i, j: s + S1[i % 4] * S1[j % 4], "half": lambda s, b, h, i, j: s * S4[h] + S4[i % 4] ** 2,
    "min": lambda s, b, h, i, j: torch.minimum(s, S2[j, 1])}
torch.manual_seed(0)
S0, S1, S2, S3 = (x.to(DEVICE) for x in (torch.tensor(0.7), torch.randn(4), torch.randn(20, 5), torch.tensor([0, 1, 2, 3, 0] * 4)))
S4 = torch.randn(4).half().to(DEVICE)


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives(name):
    "The lowered derivative is torch's, and what was read gets its gradient at its address."
    graph, captured = trace(DERIVED[name], device=DEVICE)
    s, g = torch.randn(20, 18, device=DEVICE), torch.randn(20, 18, device=DEVICE)
    leaves = [s.double().requires_grad_(), *(t.double().requires_grad_() if t.is_floating_point() else t for t in captured)]
    at = torch.tensor(1, device=DEVICE), torch.tensor(2, device=DEVICE), *grid(20, 18)
    out = run(retyped(graph, "f64"), leaves[0], *at, tensors=leaves[1:])[0]
    want = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], g.double())
    ds = evaluate(lower_gradient(graph), "score_grad", s, g, captured, b=1, h=2)
    torch.testing.assert_close(ds.double(), want[0], rtol=1e-4, atol=1e-5)
    sums = [torch.zeros(t.shape, dtype=torch.float64, device=DEVICE) for t in captured]
    for site, where in zip(lower_sites(graph), derivative(graph).sites):
        value = evaluate(site.function, "site_grad", s, g, captured, b=1, h=2)
        places = [x.expand(20, 18) for x in run(where.address, s, *at, tensors=captured)]
        sums[site.tensor].index_put_(tuple(places), value.double(), accumulate=True) if places else sums[site.tensor].add_(value.double().sum())
    for total, expected in zip([x for x, t in zip(sums, captured) if t.is_floating_point()], want[1:]):
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_which_way_an_address_moves():
    move = lambda fn: [(x.rows, x.cols) for x in lower_sites(trace(fn, device=DEVICE)[0])]
    assert move(DERIVED["slopes"]) == [(False, False)] and move(DERIVED["hidden"]) == [(True, True)]
    assert sorted(move(DERIVED["used twice"])) == [(False, True), (True, False)]


def test_what_cannot_be_lowered():
    graph, _ = trace(lambda s, b, h, i, j: torch.nn.functional.softplus(s), device=DEVICE)
    reason, = lower_reasons(graph)
    assert "softplus" in reason and "test_lowering.py" in reason and "softplus(s)" in reason
    assert lower_reasons(trace(DERIVED["slopes"], device=DEVICE)[0], gradient=True) == [] and lower_reasons(None) == []


def test_one_function_for_one_graph():
    make = lambda c: trace(lambda s, b, h, i, j: s * c, device=DEVICE)[0]
    assert lower(make(2.0)) is lower(make(2.0)) and lower(make(2.0)) is not lower(make(3.0))
    before = compiled.cache_info().currsize
    for _ in range(20): lower(trace(DERIVED["slopes"], device=DEVICE)[0])
    assert compiled.cache_info().currsize <= before + 1


def test_where_sources_are_kept(tmp_path, monkeypatch):
    from tensorplay_attn.kernels import lowering
    monkeypatch.setenv("TENSORPLAY_ATTN_CACHE", str(tmp_path / "deep" / "er"))
    text = lower_source(trace(lambda s, b, h, i, j: s * 1.25, device=DEVICE)[0])
    path = lowering.keep_source(text, "score_mod")
    assert path.parent == tmp_path / "deep" / "er" and path.read_text() == text and len(list(path.parent.iterdir())) == 1
    path.write_text("spoilt")
    assert lowering.keep_source(text, "score_mod").read_text() == text
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TENSORPLAY_ATTN_CACHE", str(tmp_path / "file"))
    assert lowering.keep_source(text, "score_mod").read_text() == text


def all_words(dtype):
    "One graph with every word for a type."
    lines, kinds = [f"x0: {dtype} = index(t0, i)", f"x1: {dtype} = index(t1, j)"], FLOAT_WORDS if dtype[0] == "f" else WHOLE_WORDS
    for op in kinds["two"] + kinds["one"]: lines.append(f"x{len(lines)}: {dtype} = {op}({'x0' if op in kinds['one'] else 'x0, x1'})")
    for n in range(3, len(lines)): lines.append(f"x{len(lines)}: {dtype} = add(x{n}, x{len(lines) - 1})")
    lines.append(f"x{len(lines)}: f32 = cast(x{len(lines) - 1})")
    return parse("\n".join([f"score_mod(s: f32, b: i64, h: i64, i: i64, j: i64, t0: {dtype}[:], t1: {dtype}[:])", *lines,
        f"return x{len(lines) - 1}"]))


def compile_words():
    "In a process of its own, where nothing is interpreted."
    from tensorplay_attn.evidence.compile_report import compile_call
    from tensorplay_attn.kernels.launch import recorded
    for target, dtype in itertools.product(("sm_80", "sm_90", "gfx942"), ("f32", "f64", "i64", "i8")):
        s, t = torch.empty(16, 16, device="meta"), torch.empty(16, dtype=DTYPES[dtype], device="meta")
        with recorded(target) as calls: evaluate(lower(all_words(dtype)), "score_mod", s, s, (t, t))
        compile_call(calls[0], target)
        print("compiled")


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the tests above compile them")
def test_every_word_compiles():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_lowering; test_lowering.compile_words()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0 and done.stdout.count("compiled") == 12, done.stderr[-3000:]
