"Flash attention in Triton, forward and backward: interpreted where there is no GPU."
import math
import random
from dataclasses import replace

import pytest
import torch
from problems import random_problem

from tensorplay_attn.bounds import judge_backward, judge_forward
from tensorplay_attn.kernels import launch as launching
from tensorplay_attn.kernels.flash_backward import flash_backward
from tensorplay_attn.kernels.flash_forward import flash_forward
from tensorplay_attn.kernels.launch import Config, guarded, recorded
from tensorplay_attn.problem import AttentionProblem, make_problem, restrict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, WIDE = Config(32, 32, 4, 1), Config(64, 16, 4, 1)


def on_device(x): return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def moved(problem): return replace(problem, **{n: on_device(x) for n, x in vars(problem).items()})


def run(problem, do, d_lse=None, config=SMALL):
    "Forward and backward between guard bands, inputs unchanged: out, lse, max_scores, gradients."
    tensors = {n: x for n, x in {**vars(problem), "do": do, "d_lse": d_lse}.items() if isinstance(x, torch.Tensor)}
    before = {n: x.clone() for n, x in tensors.items()}
    with guarded():
        out, lse, top = flash_forward(problem, need_max=True, config=config)
        grads = flash_backward(problem, out, lse, do, d_lse, config=config)
    for n, x in tensors.items(): assert torch.equal(x.nan_to_num(7.0), before[n].nan_to_num(7.0)), f"{n} was written to"
    return out, lse, top, grads


def judge(problem, do, d_lse=None, config=SMALL):
    out, lse, top, grads = run(problem, do, d_lse, config)
    verdicts = {**judge_forward(problem, out, lse, top), **judge_backward(problem, grads, do, d_lse)}
    assert all(verdicts.values()), {n: str(v) for n, v in verdicts.items() if not v}
    return out, lse, top, grads


def example(L, S, E=16, Ev=16, B=1, H=2, Hkv=1, dtype=torch.float32, **knobs):
    torch.manual_seed(0)
    size = lambda *shape: torch.randn(shape).to(DEVICE, dtype)
    problem = make_problem(size(B, H, L, E), size(B, Hkv, S, E), size(B, Hkv, S, Ev), **{n: on_device(x) for n, x in knobs.items()})
    return problem, size(B, H, L, Ev), torch.randn(B, H, L, device=DEVICE)


@pytest.mark.parametrize("part", range(4))
def test_random_problems(part):
    done = 0
    for seed in range(100 * part, 100 * part + 40):
        problem, do, d_lse = random_problem(seed)
        if problem.mask is not None or problem.bias is not None or problem.q.dtype == torch.float64: continue
        judge(moved(problem), on_device(do), on_device(d_lse), SMALL if seed % 2 else WIDE)
        done += 1
    assert done > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes_around_a_tile(dtype):
    sizes, rng = (1, 15, 16, 17, 31, 33, 63, 65, 127, 129), random.Random(0)
    for size in sizes:
        other = rng.choice(sizes)
        for L, S in {(size, other), (other, size)}:
            judge(*example(L, S, E=rng.choice((8, 16, 24)), Ev=rng.choice((16, 33)), dtype=dtype, is_causal=rng.random() < 0.5,
                alignment=rng.choice(("upper_left", "lower_right"))), config=rng.choice((SMALL, Config(64, 64, 4, 1))))


@pytest.mark.parametrize("E,Ev", [(1, 1), (80, 64), (128, 16), (256, 256), (192, 128)])
def test_head_sizes(E, Ev): judge(*example(40, 50, E=E, Ev=Ev, is_causal=True))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("E,Ev,B,H", [(0, 3, 1, 2), (3, 0, 1, 2), (3, 3, 0, 2), (3, 3, 1, 0)])
def test_nothing(sizes, E, Ev, B, H):
    for sinks in (None, torch.tensor([0.5, -0.5])[:H]): judge(*example(*sizes, E=E, Ev=Ev, B=B, H=H, sinks=sinks))


HARD = {
    "first tiles hidden": dict(window_size=(5, 0)),
    "last tiles hidden": dict(window_size=(0, 7)),
    "logits of 6e4": dict(scale=6e4 / 4),
    "negative scale": dict(scale=-1.0, is_causal=True),
    "scale 0": dict(scale=0.0, is_causal=True),
    "tiny softcap": dict(softcap=1e-3),
    "huge softcap": dict(softcap=1e30),
    "sinks of infinity": dict(sinks=torch.tensor([math.inf, -math.inf])),
    "large sinks": dict(sinks=torch.tensor([1e4, -1e4]), is_causal=True),
    "rows that see nothing": dict(window_size=(-1, -1), kv_lengths=torch.tensor([0])),
    "far windows": dict(window_size=(2**62, 2**62)),
    "half dropped": dict(dropout_p=0.5, seed=torch.tensor([2**40, 3])),
    "all dropped": dict(dropout_p=1.0, seed=torch.tensor([2**40, 3])),
    "lengths": dict(kv_lengths=torch.tensor([41]), alignment="lower_right", is_causal=True),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hard_rows(name, dtype): judge(*example(70, 75, dtype=dtype, **HARD[name]))


def test_lse_below_the_exponential():
    problem, do, d_lse = example(40, 40)
    problem = replace(problem, q=problem.q.abs(), k=-problem.k.abs(), scale=60.0)
    _, lse, _, _ = judge(problem, do, d_lse)
    assert lse.max() < -88.7


@pytest.mark.parametrize("where,value", [*((where, value) for where in ("q", "k", "v", "do") for value in (math.nan, math.inf)), ("v", -math.inf)])
@pytest.mark.parametrize("knobs", [dict(is_causal=True), dict(window_size=(4, 3), softcap=2.0), dict(kv_lengths=torch.tensor([10])), {}])
def test_what_is_not_finite(where, value, knobs):
    problem, do, _ = example(20, 20, Ev=8, **knobs)
    target = {"q": problem.q, "k": problem.k, "v": problem.v, "do": do}[where]
    target[0, 0, 12, 3] = value
    judge(problem, do, config=Config(16, 16, 4, 1))


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_what_is_dropped_and_not_finite(where):
    "A weight that is dropped is 0 times what it was: NaN stays."
    problem, do, _ = example(20, 20, Ev=8, dropout_p=0.5, seed=torch.tensor([5, 6]), is_causal=True)
    {"q": problem.q, "k": problem.k, "v": problem.v, "do": do}[where][0, 0, 12, 3] = math.nan
    judge(problem, do, config=Config(16, 16, 4, 1))


def test_a_part_of_a_problem():
    "Its dropout bits would be others: refused, where they matter."
    problem, _, _ = example(20, 20, dropout_p=0.5, seed=torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="origin"): flash_forward(restrict(problem, rows=slice(4, 8)))
    part = restrict(replace(problem, dropout_p=0.0, seed=None), rows=slice(4, 8))
    assert torch.equal(flash_forward(part)[0], flash_forward(replace(problem, dropout_p=0.0, seed=None))[0][:, :, 4:8])


def test_two_bad_scores_in_a_row():
    "NaN and +inf in one row of scores, in either order: NaN, whatever a maximum does with NaN."
    problem, _, _ = example(20, 20)
    problem.q[0, 0, 5] = 1.0
    for a, b in ((3, 18), (18, 3)):
        k = problem.k.clone()
        k[0, 0, a], k[0, 0, b] = math.nan, math.inf
        out, lse, top = flash_forward(replace(problem, k=k), need_max=True, config=Config(16, 16, 4, 1))
        assert out[0, 0, 5].isnan().all() and lse[0, 0, 5].isnan() and top[0, 0, 5].isnan()


def test_weights_too_large_for_half():
    "ds beyond the range of fp16, gradients within it."
    problem, do, _ = example(20, 20, dtype=torch.float16)
    judge(replace(problem, k=problem.k * 1e-3, q=problem.q * 1e-3), do * 3000)
    problem = replace(problem, v=problem.v * 300, k=problem.k * 1e-4, q=problem.q * 1e-4)
    judge(problem, do * 300)


def test_same_bits():
    knobs = dict(is_causal=True, sinks=torch.randn(4), softcap=3.0)
    problem, do, d_lse = example(50, 60, B=2, H=4, Hkv=2, **knobs)
    first, second = run(problem, do, d_lse), run(problem, do, d_lse)
    alone = make_problem(problem.q[1:], problem.k[1:], problem.v[1:], is_causal=True, sinks=on_device(knobs["sinks"]), softcap=3.0)
    single = run(alone, do[1:], d_lse[1:])
    for a, b, c in zip((*first[:3], *first[3][:3]), (*second[:3], *second[3][:3]), (*single[:3], *single[3][:3])):
        assert torch.equal(a, b) and torch.equal(a[1:], c)
    assert torch.equal(first[3].dsinks, second[3].dsinks)


def test_vectors_at_strides():
    "Sinks, lengths and the seed as every second element of something longer, or one element for all."
    sinks, lengths, seed = torch.randn(4), torch.tensor([33, 60]), torch.tensor([5, 7])
    spread = lambda t: torch.stack([t, torch.full_like(t, 9)], 1).flatten()[::2]
    knobs = dict(sinks=sinks, kv_lengths=lengths, seed=seed, dropout_p=0.3, is_causal=True, alignment="lower_right")
    problem, do, d_lse = example(30, 60, B=2, H=4, Hkv=2, **knobs)
    apart = replace(problem, **{n: spread(getattr(problem, n)) for n in ("sinks", "kv_lengths", "seed", "shift")})
    first, second = run(problem, do, d_lse), run(apart, do, d_lse)
    for a, b in zip((*first[:3], *first[3][:3], first[3].dsinks), (*second[:3], *second[3][:3], second[3].dsinks)): assert torch.equal(a, b)
    one = replace(problem, sinks=sinks[:1].to(DEVICE).expand(4))
    assert torch.equal(run(one, do)[0], run(replace(one, sinks=one.sinks.contiguous()), do)[0])


def test_a_batch_of_lengths():
    lengths = torch.tensor([33, 0, 60])
    for alignment in ("upper_left", "lower_right"):
        problem, do, d_lse = example(50, 60, B=3, H=2, is_causal=True, kv_lengths=lengths, alignment=alignment)
        out, lse, _, grads = judge(problem, do, d_lse)
        for b in (0, 2):
            keys = slice(b, b + 1), slice(None), slice(0, lengths[b])
            alone = make_problem(problem.q[b:b + 1], problem.k[keys], problem.v[keys], is_causal=True, alignment=alignment)
            o, l, _, g = run(alone, do[b:b + 1], d_lse[b:b + 1])
            assert torch.equal(o[0], out[b]) and torch.equal(l[0], lse[b]) and torch.equal(g.dk[0], grads.dk[b, :, :lengths[b]])


def test_what_lies_past_the_length_is_not_read():
    problem, do, d_lse = example(30, 60, B=2, kv_lengths=torch.tensor([33, 60]), is_causal=True, alignment="lower_right")
    clean = run(problem, do, d_lse)
    k, v = problem.k.clone(), problem.v.clone()
    k[0, :, 33:], v[0, :, 33:] = math.nan, math.inf
    dirty = run(replace(problem, k=k, v=v), do, d_lse)
    for a, b in zip((*clean[:3], *clean[3][:3]), (*dirty[:3], *dirty[3][:3])): assert torch.equal(a, b)


def test_many_small_launches_are_one(monkeypatch):
    problem, do, d_lse = example(70, 40, B=2, H=3, Hkv=3, is_causal=True)
    one = run(problem, do, d_lse)
    monkeypatch.setattr(launching, "MAX_PROGRAMS", 5)
    many = run(problem, do, d_lse)
    for a, b in zip((*one[:3], *one[3][:3]), (*many[:3], *many[3][:3])): assert torch.equal(a, b)


def test_plans_stay_within_limits():
    x = torch.empty(1, 1, 1, 64, device="meta").expand(2**16, 2**10, 5000, 64)  # 2^26 heads of 5000 queries
    problem = AttentionProblem(x, x, x, 1.0)
    stats = torch.empty(1, device="meta").expand(x.shape[:3])
    for target in ("sm_90", "gfx942"):
        with recorded(target) as calls:
            flash_forward(problem)
            flash_backward(problem, x, stats.float(), x)
        assert len(calls) == 4
        for call in calls:
            plan = launching.launches(call.programs)
            assert call.programs >= 2**26 and sum(n for _, n in plan) == call.programs
            assert all(n * 1024 <= 2**32 and n < 2**31 for _, n in plan)


@pytest.mark.skipif(DEVICE != "cpu", reason="asks for memory that is never touched, which a GPU cannot promise")
def test_offsets_beyond_32_bits():
    "Three keys 2^30 elements apart: the last lies past 2^31. The memory in between is never touched."
    whole = torch.empty(2**31 + 64, dtype=torch.float16)
    x = whole.as_strided((1, 1, 3, 16), (2**31 + 64, 2**31 + 64, 2**30, 1))
    torch.manual_seed(0)
    small = torch.randn(1, 1, 3, 16, dtype=torch.float16)
    x.copy_(small)
    do = torch.randn_like(small)
    far, near = run(make_problem(x, x, x), do), run(make_problem(small, small, small), do)
    for a, b in zip((*far[:3], *far[3][:3]), (*near[:3], *near[3][:3])): assert torch.equal(a, b)
