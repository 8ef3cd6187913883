"Honest engines keep the bounds on random problems; planted faults do not."
import math
import random
from dataclasses import replace
import pytest
import torch
from tensorplay_attn.accuracy import form, judge
from tensorplay_attn.bounds import Allowed, allowed_backward, allowed_forward, copies, growth, judge_backward, judge_forward, spread, weigh
from tensorplay_attn.gradients import Gradients, dense_backward, recompute_weights, row_delta, sink_gradient
from tensorplay_attn.masks import CATALOGUE
from tensorplay_attn.mods import Blocks, Mods, trace
from tensorplay_attn.problem import everything, make_problem
from tensorplay_attn.reference import dense_forward, dense_scores, dropout_factor, mask_scores, raw_scores
from tensorplay_attn.scores import SCORES
from tensorplay_attn.tiled import tiled_backward, tiled_forward

INF, NAN = math.inf, math.nan
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# --- engines that the bounds must hold for ---

def loop_forward(problem, tile=16):
    "A tile loop in the state dtype, weights rounded to the input dtype, every knob."
    s, factor = dense_scores(problem), dropout_factor(problem, *everything(problem))
    v = problem.v.repeat_interleave(problem.G, 1).to(problem.state_dtype)
    l, acc = torch.zeros_like(s[..., :1].sum(-1)), s.new_zeros(*s.shape[:-1], v.shape[-1])
    m = torch.full_like(l, -INF)
    if problem.sinks is not None: m, l = problem.sinks.to(s.dtype)[:, None].expand_as(m), l + 1
    for j in range(0, s.shape[-1], tile):
        m_new = torch.maximum(m, s[..., j:j + tile].amax(-1))
        ref = torch.where(m_new == -INF, 0, m_new)
        alpha, p = (m - ref).exp(), (s[..., j:j + tile] - ref[..., None]).exp()
        l, m = l * alpha + p.sum(-1), m_new
        if factor is not None: p = p * factor[..., j:j + tile]
        acc = acc * alpha[..., None] + p.to(problem.q.dtype).to(s.dtype) @ v[..., j:j + tile, :]
    top = s.amax(-1) if s.shape[-1] else torch.full_like(l, -INF)
    return (acc / torch.where(l == 0, 1, l)[..., None]).to(problem.q.dtype), m + l.log(), top


def rounding_backward(problem, out, lse, d_out, d_lse):
    "Dense, but p and ds are rounded to the input dtype."
    (B, _, Hkv, _, S, *_), st, G = problem.sizes, problem.state_dtype, problem.G
    half, do, q = lambda x: x.to(problem.q.dtype).to(st), d_out.to(st), problem.q.to(st)
    k, v = (x.repeat_interleave(G, 1).to(st) for x in (problem.k, problem.v))
    x, factor = raw_scores(problem), dropout_factor(problem, *everything(problem))
    s = mask_scores(problem, x, *everything(problem))
    p, keep, delta = recompute_weights(s, lse), 1.0 if factor is None else factor, row_delta(out, d_out, d_lse, st)
    ds = torch.where(s != -INF, p * (do @ v.mT * keep - delta[..., None]), 0)
    dx = half(ds if problem.softcap == 0 else ds * (1 - (x / problem.softcap) ** 2))
    over_group = lambda t: t.reshape(B, Hkv, G, S, -1).sum(2) if t.numel() else t.new_zeros(B, Hkv, S, t.shape[-1])
    dk, dv = over_group(dx.mT @ q * problem.scale), over_group(half(p * keep).mT @ do)
    return Gradients(*(t.to(problem.q.dtype) for t in (dx @ k * problem.scale, dk, dv)),
        None if problem.bias is None else ds.sum_to_size(problem.bias.shape).to(problem.bias.dtype),
        None if problem.sinks is None else sink_gradient(problem.sinks, lse, delta).to(problem.sinks.dtype))


HONEST = {"dense": (dense_forward, dense_backward), "loop": (loop_forward, rounding_backward)}


# --- random problems ---

def some_mask(rng, size, dtype):
    shape, kind = [rng.choice((1, n)) for n in size], rng.random()
    if kind < 0.5: return None
    if kind < 0.65: return torch.rand(shape) < 0.6
    mask = torch.randn(shape) * rng.choice((1, 10))
    if rng.random() < 0.3: mask = mask.masked_fill(torch.rand(shape) < 0.3, -INF)
    if rng.random() < 0.3: mask = mask.masked_fill(torch.rand(shape) < 0.3, torch.finfo(rng.choice((torch.float16, torch.float32))).min)
    return mask.to(rng.choice((dtype, torch.float32)))


def some_problem(seed):
    "Sizes 0 to 130, every knob, scores from flat to very peaked."
    rng = random.Random(seed)
    torch.manual_seed(seed)
    one_of = rng.choice
    dtype, sharp = one_of((torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)), one_of((0.1, 1, 1, 4, 30))
    B, Hkv, G = one_of((1, 2)), one_of((1, 2)), one_of((1, 2, 3))
    L, S, E, Ev = (one_of((0, 1, 1, 2, 3, 5, 8, 16, 17, 33, 70, 130)) for _ in range(4))
    draw = one_of((torch.randn, torch.randn, torch.rand))
    q, k, v = draw(B, Hkv * G, L, E) * sharp, draw(one_of((1, B)), Hkv, S, E), draw(B, Hkv, S, Ev) * one_of((1, 1, 0.01, 30))
    if rng.random() < 0.2: q, k = torch.full_like(q, 1.7), torch.full_like(k, -0.3)
    if rng.random() < 0.2 and E == Ev: v = k.expand(B, -1, -1, -1)
    window = (one_of((-1, 0, 1, 5, 40)), one_of((-1, 0, 1, 5, 40))) if rng.random() < 0.3 else (-1, -1)
    dropout_p, (q, k, v) = one_of((0, 0, 0, 0.1, 0.5, 1.0)), (t.to(dtype) for t in (q, k, v))
    return make_problem(q, k, v, some_mask(rng, (B, Hkv * G, L, S), dtype), is_causal=rng.random() < 0.3, window_size=window,
        alignment=one_of(("upper_left", "lower_right")), softcap=one_of((0, 0, 0.5, 2, 15, 50)), scale=one_of((None, None, None, 0.0, -0.3, 1.0)),
        sinks=torch.randn(Hkv * G) * one_of((1, 5)) if rng.random() < 0.3 else None,
        kv_lengths=torch.randint(0, S + 1, (B,)) if rng.random() < 0.2 else None, dropout_p=float(dropout_p), seed=torch.tensor([3, seed]))


def some_loss(problem, seed):
    B, H, _, L, _, _, Ev = problem.sizes
    torch.manual_seed(seed)
    return torch.randn(B, H, L, Ev).to(problem.q.dtype) * (1, 100)[seed % 2], torch.randn(B, H, L, dtype=problem.state_dtype) if seed % 3 else None


def both_ways_pass(problem, seed, forward, backward):
    "An engine's forward and backward keep both forms of the bound."
    loss, answer = some_loss(problem, seed), forward(problem)
    gradients = backward(problem, *answer[:2], *loss)
    for probabilistic in (True, False):
        knobs = dict(probabilistic=probabilistic)
        for name, verdict in (judge_forward(problem, *answer, **knobs) | judge_backward(problem, gradients, *loss, **knobs)).items():
            assert verdict, f"{seed=} {probabilistic=} {name}: {verdict}"


@pytest.mark.parametrize("engine", HONEST)
@pytest.mark.parametrize("block", range(8))
def test_honest_engines_pass_on_random_problems(engine, block):
    for seed in range(block * 25, block * 25 + 25): both_ways_pass(some_problem(seed), seed, *HONEST[engine])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sharp", [0.1, 1, 8, 100])
@pytest.mark.parametrize("L, S, causal", [(40, 7, False), (70, 70, True), (20, 700, False)])
def test_the_fused_cpu_kernel_passes(dtype, sharp, L, S, causal):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, n, 32) for n in (L, S, S, L))
    problem, do = make_problem((q * sharp).to(dtype), k.to(dtype), v.to(dtype), is_causal=causal), do.to(dtype)
    out, lse = flash(problem.q, problem.k, problem.v, 0.0, causal, scale=problem.scale)
    grads = Gradients(*flash_backward(do, problem.q, problem.k, problem.v, out, lse, 0.0, causal, scale=problem.scale))
    for name, verdict in (judge_forward(problem, out, lse) | judge_backward(problem, grads, do)).items(): assert verdict, f"{name}: {verdict}"


@pytest.mark.parametrize("sharp", [0.1, 1, 8])
def test_states_merged_through_lse_pass(sharp):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 40, 32) * sharp, torch.randn(1, 2, 600, 32), torch.randn(1, 2, 600, 32)
    problem, parts = make_problem(q, k, v), []
    for a, b in ((0, 5), (5, 300), (300, 600)): parts.append(flash(q, k[:, :, a:b], v[:, :, a:b], scale=problem.scale))
    (out, lse), *rest = parts
    for x, y in rest:
        both = torch.logaddexp(lse, y)
        out, lse = out * (lse - both).exp()[..., None] + x * (y - both).exp()[..., None], both
    assert all(judge_forward(problem, out, lse).values())


# --- edges ---

def test_rows_without_keys_are_exact():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    for sinks in (None, torch.randn(2)):
        problem = make_problem(q, k, v, is_causal=True, alignment="lower_right", sinks=sinks)
        allowed, grads = allowed_forward(problem), allowed_backward(problem, torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6))
        assert (allowed.out[:, :, :3] == 0).all() and (allowed.out[:, :, 3:] > 0).all() and (grads.dq[:, :, :3] == 0).all()
        assert (allowed.max_scores[:, :, :3] == 0).all() and ((allowed.lse[:, :, :3] == 0).all() if sinks is None else (allowed.lse > 0).all())
    nobody = make_problem(q, k, v, torch.tensor([True, False, True]))
    grads = allowed_backward(nobody, torch.randn(1, 2, 6, 8))
    assert (grads.dk[:, :, 1] == 0).all() and (grads.dv[:, :, 1] == 0).all() and (grads.dk[:, :, 0] > 0).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_bounds_survive_what_is_not_finite(name, bad):
    torch.manual_seed(0)
    problem = make_problem(*(torch.randn(1, 1, 6, 4) for _ in range(3)), is_causal=True)
    getattr(problem, name)[0, 0, 2, 1] = bad
    allowed = allowed_forward(problem)
    assert all(torch.isfinite(t).all() for t in allowed) and (allowed.out < 1e-3).all()
    out, lse, _ = dense_forward(problem)
    assert all(judge_forward(problem, out, lse).values())
    assert not judge_forward(problem, out.nan_to_num(0, 0, 0))["out"]


def test_finfo_min_is_a_bias():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    for part in (slice(0, 20), slice(0, 40)):
        mask = torch.zeros(3, 40)
        mask[1, part] = torch.finfo(torch.float32).min
        problem = make_problem(q, k, v, mask)
        out, lse, top = dense_forward(problem)
        d_out = torch.randn_like(out)
        grads = dense_backward(problem, out, lse, d_out)
        assert all(judge_forward(problem, out, lse, top).values()) and all(judge_backward(problem, grads, d_out).values())
        assert (allowed_forward(problem).out[0, 0, 0] < 1e-4).all()  # other rows keep their tight bound


def test_large_scores_leave_the_span():
    q, k, v = torch.full((1, 1, 5, 1024), 1000.0), torch.full((1, 1, 5, 1024), 1000.0), torch.randn(1, 1, 5, 4)
    problem = make_problem(q, k, v)
    out, lse, _ = dense_forward(problem)
    allowed = allowed_forward(problem)
    assert torch.isfinite(allowed.out).all() and (allowed.out <= 3 * v.abs().max()).all()
    grads = dense_backward(problem, out, lse, torch.ones_like(out))
    verdicts = judge_forward(problem, out, lse) | judge_backward(problem, grads, torch.ones_like(out))
    assert all(verdicts.values())
    assert not judge_backward(problem, grads._replace(dq=grads.dq * NAN), torch.ones_like(out))["dq"]


def test_fp16_overflow_must_come_as_infinity():
    v = torch.full((1, 1, 4, 2), 60000.0).half()
    problem = make_problem(torch.zeros(1, 1, 1, 2).half(), torch.zeros(1, 1, 4, 2).half(), v, dropout_p=0.5, seed=torch.tensor([0, 1]))
    want = dense_forward(problem.to(torch.float64))[0]
    assert all(judge_forward(problem, *dense_forward(problem)).values())
    if (want > 66000).any(): assert not judge_forward(problem, want.clamp(max=65504).half())["out"]


def test_shapes_and_dtypes_are_judged():
    problem = make_problem(*(torch.randn(1, 2, 5, 4) for _ in range(3)))
    out, lse, top = dense_forward(problem)
    assert "shape" in judge_forward(problem, out[:, :1])["out"].reason and "dtype" in judge_forward(problem, out.half())["out"].reason
    assert "dtype" in judge_forward(problem, out, lse.double())["lse"].reason and set(judge_forward(problem, out)) == {"out"}
    assert list(judge_forward(problem, out, lse, top)) == list(Allowed._fields)


# --- parts ---

def test_spread():
    torch.manual_seed(0)
    a, keep = torch.rand(3, 5, dtype=torch.float64), (torch.rand(3, 5) < 0.7).double() / 0.7
    v, out = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    exact = lambda r: (a[..., None] * (keep[..., None] * v - out[:, None]).abs() ** r).sum(1)
    assert torch.allclose(spread(2, a, keep, v, out), exact(2)) and (spread(1, a, keep, v, out) >= exact(1) * (1 - 1e-12)).all()


def test_growth():
    x = torch.logspace(-8, 2, 40, dtype=torch.float64)
    assert torch.allclose(growth(torch.zeros_like(x), x), x.expm1() - x, rtol=2e-3, atol=1e-15)
    assert growth(torch.tensor(-INF, dtype=torch.float64), torch.tensor(1e300, dtype=torch.float64)) == 0
    assert growth(torch.tensor(0.0), torch.tensor(1e4)) == INF


def test_worst_case_is_wider_on_long_rows_and_failure_widens():
    problem = make_problem(*(torch.randn(1, 1, n, 16) for n in (4, 400, 400)))
    tight, sure, worst = (allowed_forward(problem, **k).out for k in ({}, {"failure": 1e-15}, {"probabilistic": False}))
    assert (tight < sure).all() and (sure < 2 * tight).all() and (worst > 5 * tight).all()


@pytest.mark.parametrize("S", [17, 130, 500])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_equal_keys_make_equal_errors(S, softcap):
    assert copies(torch.tensor([[1.0, 2], [2, 1], [1, 2], [0, 0]])).tolist() == [2, 1, 2, 1] and (copies(torch.randn(3, 50, 4)) == 1).all()
    torch.manual_seed(0)
    problem = make_problem(torch.full((1, 2, 3, 130), 1.7), torch.full((1, 1, S, 130), -0.3), torch.randn(1, 1, S, 4), softcap=softcap)
    out, lse, _ = dense_forward(problem)
    loss = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    verdicts = judge_forward(problem, out, lse) | judge_backward(problem, dense_backward(problem, out, lse, *loss), *loss)
    assert all(x and x.share < 0.9 for x in verdicts.values())


def test_scores_bound_covers_any_scaling():
    torch.manual_seed(0)
    problem = make_problem(*(torch.randn(1, 1, n, 64) for n in (50, 200, 200)))
    t, q, k = weigh(problem, form()), problem.q, problem.k
    allowed = t.units(t.score + t.size(t.shared[0])) + t.mc.u * t.s.abs()
    for s in ((q * problem.scale) @ k.mT, q @ k.mT * problem.scale, (q * (problem.scale * math.log2(math.e))) @ k.mT / math.log2(math.e)):
        assert judge(s, t.s, allowed)


# --- faults ---

FAULTS = {
    "a row zeroed": lambda p, o, l: (o.index_fill(2, torch.tensor([3]), 0), l),
    "a row repeated": lambda p, o, l: (o.index_copy(2, torch.tensor([3]), o[:, :, 4:5]), l),
    "one element": lambda p, o, l: ((x := o.clone()).view(-1)[77:78].mul_(1.05) is None or x, l),
    "heads swapped": lambda p, o, l: (o.flip(1), l.flip(1)),
    "lse in base 2": lambda p, o, l: (o, l * math.log2(math.e)),
    "lse without m": lambda p, o, l: (o, l - dense_scores(p).amax(-1)),
    "scale off by 1 percent": lambda p, o, l: dense_forward(replace(p, scale=p.scale * 1.01))[:2],
    "one key dropped": lambda p, o, l: dense_forward(replace(p, mask=torch.arange(500).view(1, 1, 1, -1) != 123))[:2],
    "one key too many": lambda p, o, l: dense_forward(replace(p, k=torch.cat([p.k, p.k[:, :, :1]], 2), v=torch.cat([p.v, p.v[:, :, :1]], 2)))[:2],
    "lse in bf16": lambda p, o, l: (o, l.bfloat16().float()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, dtype):
    torch.manual_seed(1)
    problem = make_problem(*(torch.randn(1, 2, n, 64).to(dtype) for n in (16, 500, 500)))
    out, lse, _ = dense_forward(problem)
    assert all(judge_forward(problem, out, lse).values())
    assert not all(judge_forward(problem, *FAULTS[fault](problem, out, lse)).values())


def every_second_head(x): return x * torch.tensor([1, 0, 1, 0]).view(4, *(1,) * (x.ndim - 2)).to(x.dtype) if x.ndim > 3 else x


BACKWARD_FAULTS = {
    "delta missing": lambda p, o, l, do, dl: dense_backward(p, torch.zeros_like(o), l, do, dl),
    "lse gradient missing": lambda p, o, l, do, dl: dense_backward(p, o, l, do, None),
    "lse gradient negated": lambda p, o, l, do, dl: dense_backward(p, o, l, do, -dl),
    "scale missing": lambda p, *a: (g := dense_backward(p, *a))._replace(dk=g.dk / p.scale),
    "dk of half the group": lambda p, *a: (g := dense_backward(p, *a))._replace(dk=g.dk - dense_backward(p, *map(every_second_head, a)).dk / 2),
    "softcap's slope missing": lambda p, *a: dense_backward(replace(p, softcap=1e6), *a),
    "dropout in dv forgotten": lambda p, *a: (g := dense_backward(p, *a))._replace(dv=g.dv * (1 - p.dropout_p)),
    "dbias of one batch entry": lambda p, *a: (g := dense_backward(p, *a))._replace(dbias=g.dbias / 2),
    "dsinks sign": lambda p, *a: (g := dense_backward(p, *a))._replace(dsinks=-g.dsinks),
    "a row of dq": lambda p, *a: (g := dense_backward(p, *a))._replace(dq=g.dq.index_fill(2, torch.tensor([5]), 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_faults_of_the_backward_are_seen(fault, dtype):
    torch.manual_seed(1)
    rand = lambda *size: torch.randn(*size).to(dtype)
    problem = make_problem(rand(2, 4, 20, 32), rand(2, 2, 60, 32), rand(2, 2, 60, 16), rand(4, 20, 60), softcap=3.0,
        sinks=torch.randn(4), dropout_p=0.1, seed=torch.tensor([5, 6]))
    out, lse, _ = dense_forward(problem)
    loss = rand(2, 4, 20, 16), torch.randn(2, 4, 20)
    assert all(judge_backward(problem, dense_backward(problem, out, lse, *loss), *loss).values())
    assert not all(judge_backward(problem, BACKWARD_FAULTS[fault](problem, out, lse, *loss), *loss).values())


# --- functions of users ---

def with_mods(problem, score_mod=None, mask_mod=None, **more):
    "The problem with functions of a user's, traced."
    graphs = [(None, ()) if f is None else trace(f, problem.state_dtype) for f in (score_mod, mask_mod)]
    return replace(problem, mods=Mods(graphs[0][0], graphs[1][0], tuple(t.detach() for _, ts in graphs for t in ts), **more))


def own_scores(rng, B, H, S, dtype):
    "Functions that the catalogue lacks: kinks, jumps, poles, tables read at scores, tables of half types."
    table = lambda *size: torch.randn(*size).to(rng.choice((torch.float32, dtype, torch.float16)))
    t, pairs, u = table(H), table(B, S), table(5)
    return [lambda s, b, h, i, j: s * torch.sigmoid(t[h]) + torch.log(pairs[b, j].abs() + 0.5),
        lambda s, b, h, i, j: torch.exp(-s.abs()) * 3 - torch.log1p(s * s) * t[h],
        lambda s, b, h, i, j: torch.where(s > 0.1, s, -INF),
        lambda s, b, h, i, j: torch.where(s > 0, s, 0.1 * s) + u[torch.log2((i - j).abs().clamp(min=1).float()).long().clamp(max=4)],
        lambda s, b, h, i, j: torch.maximum(s, t[h]) * u[(i + j) % 5],
        lambda s, b, h, i, j: s - pairs[b, j] * t[h],
        lambda s, b, h, i, j: s + u[(s * 2).long().clamp(0, 4)],
        lambda s, b, h, i, j: s / (1 + (i - j).abs() * 0.1) + torch.sin(i * 0.3) * t[h],
        lambda s, b, h, i, j: torch.where((i - j).abs() < 3, s * u[(j - i).clamp(-2, 2) + 2], s**3 * 0.01)]


def some_mods(seed):
    "A random problem with a score_mod, a mask_mod or both."
    rng, problem = random.Random(seed), some_problem(seed)
    (B, H, _, L, S, _, _), score, mask = problem.sizes, None, None
    if rng.random() < 0.85:
        if rng.random() < 0.5: score = SCORES[rng.choice(list(SCORES))](B, H, L, S, seed=seed)[0]
        else: score = rng.choice(own_scores(rng, B, H, S, problem.q.dtype))
    names = [x for x in CATALOGUE if x not in ("natten", "tree")]
    if score is None or rng.random() < 0.3: mask = CATALOGUE[rng.choice(names)](B, H, L, S, seed=seed)
    return with_mods(problem, score, mask)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("block", range(6))
def test_honest_engines_pass_with_functions_of_users(engine, block):
    engine = {"dense": (dense_forward, dense_backward), "tiled": (tiled_forward, tiled_backward)}[engine]
    for seed in range(block * 15, block * 15 + 15): both_ways_pass(some_mods(seed), seed, *engine)


def capped_and_read(cap, table): return lambda s, b, h, i, j: cap * (s / cap).tanh() + table[h, (j - i).clamp(-20, 20) + 20]

def one_table(dtype=torch.float32, S=300, score_mod=None, **more):
    torch.manual_seed(0)
    score_mod = score_mod or capped_and_read(3.0, torch.randn(4, 41))
    rand = lambda *size: torch.randn(*size).to(dtype)
    problem = make_problem(rand(1, 4, 20, 32), rand(1, 2, S, 32), rand(1, 2, S, 32))
    return with_mods(problem, score_mod, **more), (rand(1, 4, 20, 32), torch.randn(1, 4, 20))


def in_table(p, change):
    t = p.mods.tensors[0].clone()
    change(t)
    return replace(p, mods=replace(p.mods, tensors=(t, *p.mods.tensors[1:])))

def without_query(p, o, l, do, dl):
    do, dl = do.clone(), dl.clone()
    do[0, 0, 7] = dl[0, 0, 7] = 0
    return dense_backward(p, o, l, do, dl)

def without_slope(p, *args):
    plain = replace(p, mods=None, bias=dense_scores(p) - raw_scores(p))
    return dense_backward(plain, *args)._replace(dtensors=None)


FIRST_TWICE = torch.tensor([[2.0], [1], [1], [1]])
MOD_FAULTS = {
    "one entry is the next one": lambda p: in_table(p, lambda t: t[0, 20:21].copy_(t[0, 21:22])),
    "the next head's table": lambda p: in_table(p, lambda t: t.copy_(t.roll(1, 0))),
    "distance off by one": lambda p: in_table(p, lambda t: t.copy_(t.roll(1, 1))),
    "cap off by 1 percent": lambda p: with_mods(p, capped_and_read(3.03, p.mods.tensors[0])),
    "score_mod forgotten": lambda p: replace(p, mods=None),
}
MOD_BACKWARD_FAULTS = {
    "a query does not feed the table": lambda p, *a: dense_backward(p, *a)._replace(dtensors=without_query(p, *a).dtensors),
    "lse gradient missing": lambda p, o, l, do, dl: dense_backward(p, o, l, do, None),
    "slope missing": without_slope,
    "an entry's gradient in the next": lambda p, *a: (g := dense_backward(p, *a))._replace(dtensors=(g.dtensors[0].roll(1, 1),)),
    "gradient of one head twice": lambda p, *a: (g := dense_backward(p, *a))._replace(dtensors=(g.dtensors[0] * FIRST_TWICE,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", [*MOD_FAULTS, *MOD_BACKWARD_FAULTS])
def test_faults_in_functions_of_users_are_seen(fault, dtype):
    problem, loss = one_table(dtype)
    out, lse, _ = dense_forward(problem)
    assert all((judge_forward(problem, out, lse) | judge_backward(problem, dense_backward(problem, out, lse, *loss), *loss)).values())
    if fault in MOD_FAULTS: assert not all(judge_forward(problem, *dense_forward(MOD_FAULTS[fault](problem))[:2]).values())
    else: assert not all(judge_backward(problem, MOD_BACKWARD_FAULTS[fault](problem, out, lse, *loss), *loss).values())


def test_a_thousandth_in_one_score_is_seen():
    problem, _ = one_table()
    s, slip = dense_scores(problem), torch.zeros(1, 4, 20, 300)
    slip[0, 0, 7, s[0, 0, 7].argmax()] = 1e-3 * s[0, 0, 7].max()
    verdicts = judge_forward(problem, *dense_forward(replace(problem, bias=slip))[:2])
    assert not verdicts["out"] and verdicts["out"].index[:3] == (0, 0, 7)


def test_entries_that_nobody_reads_are_exact():
    problem, loss = one_table(S=10)  # distances -19 to 9
    out, lse, _ = dense_forward(problem)
    grads = dense_backward(problem, out, lse, *loss)
    allowed, = allowed_backward(problem, *loss).dtensors
    read = torch.zeros(41, dtype=torch.bool).index_fill(0, torch.arange(1, 30), True)
    assert (allowed[:, read] > 0).all() and (allowed[:, ~read] == 0).all() and all(judge_backward(problem, grads, *loss).values())
    grads.dtensors[0][2, 35] = 1e-30
    assert not judge_backward(problem, grads, *loss)["dtensors0"]


def test_hidden_by_a_score_is_hidden():
    hide = lambda s, b, h, i, j: torch.where((j < 5) | (i == 3) | (j > 200 - 10 * i), -INF, s)
    problem, loss = one_table(score_mod=hide)
    allowed, grads = allowed_forward(problem), allowed_backward(problem, *loss)
    assert (allowed.out[:, :, 3] == 0).all() and (allowed.lse[:, :, 3] == 0).all() and (allowed.out[:, :, 4] > 0).all()
    assert (grads.dk[:, :, :5] == 0).all() and (grads.dv[:, :, :5] == 0).all() and (grads.dk[:, :, 5] > 0).all() and (grads.dq[:, :, 3] == 0).all()
    out, lse, top = tiled_forward(problem)
    assert all((judge_forward(problem, out, lse, top) | judge_backward(problem, tiled_backward(problem, out, lse, *loss), *loss)).values())


def test_only_rows_that_rounding_may_change_lose_their_bound():
    problem, _ = one_table(score_mod=lambda s, b, h, i, j: torch.where((i != 2) & (s < 0), -INF, s))
    below = lambda c: lambda s, b, h, i, j: torch.where(((i != 2) | (j != 4) | (h > 0)) & (s < c), -INF, s)
    near, sharp = (with_mods(problem, below(c)) for c in (raw_scores(problem)[0, 0, 3, 4].item(), 0.123))
    allowed = allowed_forward(near).out.amax(-1)[0]
    assert allowed[0, 3] > 0.5 and (allowed > 0.5).sum() <= 2 and (allowed_forward(sharp).out < 0.01).all()
    assert all(judge_forward(near, *dense_forward(near)).values())


def test_masks_of_floats():
    problem, loss = one_table(score_mod=lambda s, b, h, i, j: s, mask_mod=lambda b, h, i, j: j < (i.float() * 0.1) * 100 + 1)
    allowed = allowed_forward(problem).out.amax(-1)[0, 0]
    assert (allowed[1:] > 0.1).all() and allowed[0] < 0.1  # 10 i + 1 may be a little less, and the key of that number is hidden or not
    exact, _ = one_table(score_mod=lambda s, b, h, i, j: s, mask_mod=lambda b, h, i, j: j < i.float() * 10 + 1)
    assert (allowed_forward(exact).out < 0.01).all()


def test_block_lists():
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    lists = ints([[[1, 0]]]).view(1, 1, 2), ints(0, 0, 0, 0).view(1, 1, 2, 2), ints(1, 1).view(1, 1, 2), ints(1, 0, 0, 0).view(1, 1, 2, 2)
    problem, loss = one_table(S=32, mask_mod=lambda b, h, i, j: i >= j, blocks=Blocks(*lists, None, None, None, None, (16, 16), (20, 32)))
    allowed, grads = allowed_forward(problem), allowed_backward(problem, *loss)
    assert (allowed.out > 0).all() and (grads.dk > 0).all()
    for forward, backward in ((dense_forward, dense_backward), (tiled_forward, tiled_backward)):
        out, lse, top = forward(problem)
        assert all((judge_forward(problem, out, lse, top) | judge_backward(problem, backward(problem, out, lse, *loss), *loss)).values())
    fewer = replace(problem, mods=replace(problem.mods, blocks=replace(problem.mods.blocks, full_kv_num_blocks=ints(1, 0).view(1, 1, 2))))
    assert not judge_forward(problem, *dense_forward(fewer)[:2])["out"]


def test_gradients_that_nobody_wants():
    problem, loss = one_table()
    problem = replace(problem, mods=replace(problem.mods, wanted=(False,)))
    out, lse, _ = dense_forward(problem)
    grads = dense_backward(problem, out, lse, *loss)
    assert allowed_backward(problem, *loss).dtensors == (None,) and list(judge_backward(problem, grads, *loss)) == ["dq", "dk", "dv"]


def test_functions_that_have_no_bound():
    problem, loss = one_table(score_mod=lambda s, b, h, i, j: torch.asinh(s))
    out, lse, _ = dense_forward(problem)
    with pytest.raises(ValueError, match="no bound is known for aten.asinh"): judge_forward(problem, out, lse)
    with pytest.raises(ValueError, match="no bound is known"): judge_backward(problem, dense_backward(problem, out, lse, *loss), *loss)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_tables_with_odd_numbers(bad):
    problem, loss = one_table()
    problem = in_table(problem, lambda t: t[1, 25:26].fill_(bad))
    answer = dense_forward(problem)
    assert all((judge_forward(problem, *answer) | judge_backward(problem, dense_backward(problem, *answer[:2], *loss), *loss)).values())
    assert (allowed_forward(problem).out[0, 0] < 1e-3).all()
