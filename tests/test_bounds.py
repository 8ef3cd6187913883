"Honest engines keep the bounds on random problems; planted faults do not."
import math
import random
from dataclasses import replace
import pytest
import torch
from tensorplay_attn.accuracy import form, judge
from tensorplay_attn.bounds import Allowed, allowed_backward, allowed_forward, growth, judge_backward, judge_forward, spread, weigh
from tensorplay_attn.gradients import Gradients, dense_backward, recompute_weights, row_delta, sink_gradient
from tensorplay_attn.problem import everything, make_problem
from tensorplay_attn.reference import dense_forward, dense_scores, dropout_factor, mask_scores, raw_scores

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


@pytest.mark.parametrize("engine", HONEST)
@pytest.mark.parametrize("block", range(8))
def test_honest_engines_pass_on_random_problems(engine, block):
    forward, backward = HONEST[engine]
    for seed in range(block * 25, block * 25 + 25):
        problem = some_problem(seed)
        loss, answer = some_loss(problem, seed), forward(problem)
        gradients = backward(problem, *answer[:2], *loss)
        for probabilistic in (True, False):
            knobs = dict(probabilistic=probabilistic)
            for name, verdict in (judge_forward(problem, *answer, **knobs) | judge_backward(problem, gradients, *loss, **knobs)).items():
                assert verdict, f"{seed=} {probabilistic=} {name}: {verdict}"


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
