"The tiled engine against the dense one: 2000 random problems, bits, plans, numbers that are not tame."
import math
from dataclasses import replace

import pytest
import torch

from problems import random_problem
from tensorplay_attn.autograd import attend
from tensorplay_attn.bounds import judge_backward, judge_forward
from tensorplay_attn.engines import MATH, TILED
from tensorplay_attn.gradients import dense_backward
from tensorplay_attn.problem import everything, make_problem, restrict, visible
from tensorplay_attn.reference import dense_forward, loops_forward
from tensorplay_attn.tiled import CORNER, FULL, fused_plan, plan, tiled_backward, tiled_forward, walk_backward, walk_forward


POSITIONS = (5225, 5342, 5362, 5754, 6025)  # where torch's sigmoid and logaddexp once gave a number other bits in another place of the batch


def same(a, b): return (a is None and b is None) or a.equal(b) or a.nan_to_num(7).equal(b.nan_to_num(7)) and a.isnan().equal(b.isnan())


def copies(problem): return [x.clone() for x in (problem.q, problem.k, problem.v)]


@pytest.mark.parametrize("block", range(40))
def test_2000_random_problems(block):
    for seed in range(block * 50, block * 50 + 50):
        problem, d_out, d_lse = random_problem(seed)
        before = copies(problem)
        out, lse, top = tiled_forward(problem, need_max=seed % 4 == 0)
        grads = tiled_backward(problem, out, lse, d_out, d_lse)
        verdicts = judge_forward(problem, out, lse, top) | judge_backward(problem, grads, d_out, d_lse)
        for name, verdict in verdicts.items(): assert verdict, f"{seed=} {name}: {verdict}"
        assert all(same(a, b) for a, b in zip(before, copies(problem))), f"{seed=}: inputs were written"


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("engine", [MATH, TILED], ids=["math", "tiled"])
def test_the_same_bits_twice_and_alone(engine, block):
    for seed in (*range(5000 + block * 60, 5060 + block * 60), *POSITIONS):
        problem, d_out, d_lse = random_problem(seed)
        out, lse, _ = engine.forward(problem)
        grads = engine.backward(problem, out, lse, d_out, d_lse)
        again, lse_again, _ = engine.forward(problem)
        assert same(out, again) and same(lse, lse_again) and all(map(same, grads, engine.backward(problem, out, lse, d_out, d_lse))), seed
        for b in range(problem.q.shape[0]):
            s = slice(b, b + 1)
            part = restrict(problem, batch=s)
            alone, lse_alone, _ = engine.forward(part)
            own = engine.backward(part, alone, lse_alone, d_out[s], None if d_lse is None else d_lse[s])
            assert same(alone, out[s]) and same(lse_alone, lse[s]) and all(map(same, own[:3], (g[s] for g in grads[:3]))), (seed, b)


@pytest.mark.parametrize("block", range(4))
def test_any_layout_gives_the_bits_of_contiguous_copies(block):
    for seed in range(7000 + block * 60, 7060 + block * 60):
        problem, d_out, d_lse = random_problem(seed)
        plain = replace(problem, q=problem.q.contiguous().clone(), k=problem.k.contiguous().clone(), v=problem.v.contiguous().clone())
        for engine in (MATH, TILED):
            answers = [engine.forward(p) for p in (problem, plain)]
            assert same(answers[0][0], answers[1][0]) and same(answers[0][1], answers[1][1]), (seed, engine.name)
            grads = [engine.backward(p, *answers[0][:2], d_out, d_lse) for p in (problem, plain)]
            assert all(map(same, *grads)), (seed, engine.name)


@pytest.mark.parametrize("block", range(4))
def test_loops_and_matrices_agree(block):
    for seed in range(9000 + block * 25, 9025 + block * 25):
        problem, _, _ = random_problem(seed)
        B, H, Hkv, L, S, E, Ev = problem.sizes
        small = restrict(problem, rows=slice(max(0, L - 5), L), cols=slice(max(0, S - 6), S)).to(torch.float64)
        for got, want in zip(dense_forward(small), loops_forward(small)): assert torch.allclose(got, want, atol=1e-11), seed


@pytest.mark.parametrize("block_m, block_n", [(16, 16), (16, 64), (32, 48), (128, 256)])
def test_any_tiling_gives_the_same_answer(block_m, block_n):
    for seed in range(11000, 11060):
        problem, d_out, _ = random_problem(seed)
        if 0 in problem.sizes or problem.kv_lengths is not None: continue
        problem = replace(problem, sinks=None)
        out, lse, top = walk_forward(problem, block_m, block_n)
        verdicts = judge_forward(problem, out.to(problem.q.dtype), lse, top)
        delta = (d_out.to(out.dtype) * out).sum(-1)
        grads = walk_backward(problem, lse, delta, d_out, block_m=block_m, block_n=block_n)
        grads = type(grads)(*(g if g is None else g.to(x.dtype) for g, x in zip(grads, (problem.q, problem.k, problem.v, problem.bias, None))))
        for name, verdict in (verdicts | judge_backward(problem, grads, d_out)).items(): assert verdict, f"{seed=} {name}: {verdict}"


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (5, -1), (30, 40), (100, 0), (-1, 7)])
@pytest.mark.parametrize("L, S", [(1, 1), (1, 100), (100, 1), (16, 16), (33, 64), (300, 290), (129, 500), (500, 129)])
def test_plans_cover_what_is_visible_and_fill_only_what_is_full(L, S, window):
    for shift in (0, S - L, 16, -16, 5, -7):
        problem = replace(make_problem(torch.zeros(1, 1, L, 1), *[torch.zeros(1, 1, S, 1)] * 2, window_size=window), shift=shift)
        seen = visible(problem, *everything(problem))
        seen = torch.ones(L, S, dtype=torch.bool) if seen is None else seen[0, 0]
        for tiles in (fused_plan(problem), plan(L, S, window, shift, 16, 32), plan(L, S, window, shift, 256, 2048, 2048)):
            visits, full = torch.zeros(L, S, dtype=torch.int64), torch.zeros(L, S, dtype=torch.bool)
            for rows, pieces in tiles:
                for cols, kind in pieces:
                    assert all(x % 16 == 0 or x in (L, S) for x in (rows.start, rows.stop, cols.start, cols.stop))
                    assert kind != FULL or cols.stop <= S
                    visits[rows, cols] += 1
                    if kind == FULL: full[rows, cols] = True
                    if kind == CORNER:
                        corner = torch.ones(L, S)[rows, cols].tril().bool()
                        assert corner.equal(seen[rows, cols])
            assert visits.max() <= 1 and not (seen & (visits == 0)).any() and not (full & ~seen).any()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_nan_and_infinity_go_where_they_are_seen(softcap):
    torch.manual_seed(0)
    base = [torch.randn(2, 2, 40, 16) for _ in range(3)]
    for which in range(3):
        for value in (math.nan, math.inf, -math.inf):
            tensors = [x.clone() for x in base]
            tensors[which][1, 0, 20, 3] = value
            problem = make_problem(*tensors, is_causal=True, window_size=(7, 0), sinks=torch.zeros(2), softcap=softcap)
            d_out = torch.randn(2, 2, 40, 16)
            (out, lse, _), (want, want_lse, _) = tiled_forward(problem), dense_forward(problem)
            assert same(out.isfinite(), want.isfinite()) and torch.allclose(out, want, atol=1e-5, equal_nan=True)
            assert torch.allclose(lse, want_lse, atol=1e-5, equal_nan=True)
            rows = torch.zeros(40, dtype=torch.bool)
            rows[20 if which == 0 else slice(20, 28)] = True  # the query itself, or the queries that see the key
            assert out[0].isfinite().all() and out[1, 1].isfinite().all() and out[1, 0][~rows].isfinite().all()
            if value != value: assert out[1, 0][rows].isnan().any(-1).all()
            grads, want = tiled_backward(problem, out, lse, d_out), dense_backward(problem, want, want_lse, d_out)
            for a, b in zip(grads, want): assert (a is None and b is None) or torch.allclose(a, b, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("S", [1, 5, 16, 40])
@pytest.mark.parametrize("knobs", [{}, dict(is_causal=True), dict(is_causal=True, alignment="lower_right"), dict(window_size=(0, 0)),
                                   dict(scale=-1.0)], ids=str)
def test_nan_is_never_turned_into_a_number(S, knobs):
    for which in ("query", "key", "all"):
        q, k, v = torch.zeros(1, 2, 40, 8), torch.zeros(1, 2, S, 8), torch.ones(1, 2, S, 8)
        if which != "key": q[0, 0, 0], q[0, 0, 39] = math.nan, math.nan
        if which != "query": k[0, 1] = math.nan
        problem = make_problem(q, k, v, **knobs)
        (out, lse, _), (want, want_lse, _) = tiled_forward(problem), dense_forward(problem)
        assert same(out, want) and same(lse.isnan(), want_lse.isnan())


def test_a_bad_sequence_leaves_its_neighbour_its_bits():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 50, 16) for _ in range(3))
    clean = tiled_forward(make_problem(q, k, v))[0]
    k[0, 0, 5, 0] = math.nan
    assert tiled_forward(make_problem(q, k, v))[0][1].equal(clean[1])


def test_keys_past_the_length_are_never_read():
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    lengths = torch.tensor([7, 0])
    k[0, :, 7:], v[0, :, 7:], k[1], v[1] = math.nan, math.nan, math.nan, math.nan
    for engine in (MATH, TILED):
        problem = make_problem(q, k, v, kv_lengths=lengths, alignment="lower_right", is_causal=True)
        out, lse, _ = engine.forward(problem)
        grads = engine.backward(problem, out, lse, torch.ones_like(out), torch.ones_like(lse))
        assert out.isfinite().all() and (out[1] == 0).all() and (lse[1] == -math.inf).all()
        assert all(g.isfinite().all() for g in grads[:3]) and (grads.dk[0, :, 7:] == 0).all() and (grads.dq[1] == 0).all()


def test_a_row_of_nan_that_sees_nothing_and_has_no_values():
    q, k = torch.tensor([[1.0], [math.nan]])[None, None], torch.ones(1, 1, 1, 1)
    problem = make_problem(q, k, k[..., :0], torch.tensor([[True], [False]]))
    for engine in ("math", "tiled"): assert attend(problem, engine)[1].flatten().tolist() == [1, -math.inf]


def test_a_scale_of_zero_times_nan_is_nan():
    q, k, v = torch.ones(3, 1, 1, 1, 1).mul(torch.tensor([1, 1, math.nan]).view(3, 1, 1, 1, 1)).unbind()
    for engine in ("math", "tiled"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(attend(make_problem(*leaves, scale=0.0), engine)[0].sum(), leaves)
        assert dq.isnan().all() and dk.isnan().all() and dv.item() == 1
