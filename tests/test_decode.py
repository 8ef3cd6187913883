"Decoding against the fp64 truth, against flash, and against itself: other splits, other machines, other batch-mates, pages instead of rows."
import math
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from problems import random_problem
from tensorplay_attn.bounds import judge_forward
from tensorplay_attn.kernels import decode
from tensorplay_attn.kernels.decode import decode_forward, decode_paged, decode_reasons, plan_decode, splits_for
from tensorplay_attn.kernels.flash_forward import flash_forward
from tensorplay_attn.kernels.launch import Config, guarded, launches
from tensorplay_attn.problem import make_problem, restrict

SMALL = Config(16, 16, 4, 1)


def same(*answers): return all(x.equal(y) or x.isnan().equal(y.isnan()) and x.nan_to_num(7).equal(y.nan_to_num(7))
    for x, y in zip(*answers) if x is not None)


@pytest.fixture
def small(monkeypatch): monkeypatch.setattr(decode, "KEYS", 1)  # chunks of 16 keys: short problems have several


def problems(seeds, most=200):  # rows of the answer, each a program of the merge
    for seed in seeds:
        problem, _, _ = random_problem(seed)
        if not decode_reasons(problem) and math.prod(problem.q.shape[:3]) <= most: yield seed, problem


def cached(seed, B=2, Hkv=2, G=2, L=1, S=100, E=16, Ev=16, dtype=torch.float32, **knobs):
    torch.manual_seed(seed)
    x = [torch.randn(s).to(dtype) for s in ((B, Hkv * G, L, E), (B, Hkv, S, E), (B, Hkv, S, Ev))]
    return make_problem(*x, **{"is_causal": True, "alignment": "lower_right", **knobs})


def check(problem, *answer):
    for name, verdict in judge_forward(problem, *answer).items(): assert verdict, f"{name}: {verdict}"


@pytest.mark.parametrize("block", range(4))
def test_random_problems(small, block):
    for seed, problem in problems(range(block * 40, block * 40 + 40)):
        before = [x.clone() for x in (problem.q, problem.k, problem.v)]
        with guarded(): answer = decode_forward(problem, True, SMALL, random.Random(seed).choice([None, 1, 2, 3]))
        assert same(before, (problem.q, problem.k, problem.v)), f"{seed=}: inputs were written"
        for name, verdict in judge_forward(problem, *answer).items(): assert verdict, f"{seed=} {name}: {verdict}"


def test_close_to_flash(small):
    for seed, problem in problems(range(300, 360)):
        if problem.q.dtype != torch.float32: continue
        for x, y in zip(decode_forward(problem, True, SMALL), flash_forward(problem, True, SMALL)):
            if x.numel() == 0: continue
            ulp = torch.finfo(x.dtype).eps * y.nan_to_num(0, 0, 0).abs().amax().clamp(min=1)
            far = (x - y).nan_to_num(0, 0, 0).abs() / ulp
            assert far.max() <= 8, (seed, far.max())
            assert x.isnan().equal(y.isnan()) and x.isinf().equal(y.isinf()), seed


def test_the_same_bits_whoever_computes_them(small, monkeypatch):
    for seed, problem in problems(range(400, 424), 40):
        answer = decode_forward(problem, True, SMALL)
        assert same(answer, decode_forward(problem, True, SMALL)), seed
        for n in (1, 3): assert same(answer, decode_forward(problem, True, SMALL, n)), (seed, n)
        with monkeypatch.context() as m:
            m.setattr(decode, "multiprocessors", lambda device: 1)
            assert same(answer, decode_forward(problem, True, SMALL)), seed
        if problem.dropout_p > 0: continue  # whose bits name the batch entry
        for b in range(problem.q.shape[0]):
            alone = decode_forward(restrict(problem, batch=slice(b, b + 1)), True, SMALL)
            assert same(alone, [x[b:b + 1] for x in answer]), (seed, b)


@pytest.mark.parametrize("knobs", [{}, dict(window_size=(500, 0)), dict(Hkv=1, G=8, L=2)], ids=str)
def test_a_long_cache(knobs):
    problem = cached(0, S=3000, E=8, Ev=8, kv_lengths=torch.tensor([3000, 1234]), **{"G": 1, **knobs})
    answer = decode_forward(problem, True, Config(16, 128, 4, 1))
    check(problem, *answer)
    assert same(answer, decode_forward(problem, True, Config(16, 128, 4, 1), num_splits=3))
    for b, n in enumerate((3000, 1234)):  # alone, in a cache of its own length
        part = restrict(problem, batch=slice(b, b + 1))
        part = replace(part, k=part.k[:, :, :n], v=part.v[:, :, :n], kv_lengths=None, shift=n - problem.q.shape[2])
        assert same(decode_forward(part, True, Config(16, 128, 4, 1)), [x[b:b + 1] for x in answer])


def test_one_chunk_is_the_same_in_a_longer_cache(small):
    long = cached(1, S=80, kv_lengths=torch.tensor([13, 0]))
    short = cached(1, S=80, kv_lengths=torch.tensor([13, 0]))
    short = replace(short, k=short.k[:, :, :16], v=short.v[:, :, :16])
    a, b = decode_forward(long, True, SMALL), decode_forward(short, True, SMALL)
    assert same(a, b)
    assert (a[0][1] == 0).all() and (a[1][1] == -math.inf).all() and (a[2][1] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("G", [1, 3, 8])
def test_groups(small, G, dtype):
    problem = cached(G, G=G, L=3, S=70, dtype=dtype, sinks=torch.randn(2 * G), softcap=5.0, kv_lengths=torch.tensor([70, 2]))
    check(problem, *decode_forward(problem, True, SMALL))


def test_lonely_sizes(small):
    for sizes in (dict(S=0), dict(L=0), dict(B=0), dict(E=0), dict(Ev=0), dict(Hkv=0), dict(S=1, B=1, G=1), dict(E=1, Ev=3),
                  dict(L=12, G=3)):
        problem = cached(2, **{"S": 40, "Hkv": 1, **sizes})
        assert not decode_reasons(problem)
        with guarded(): check(problem, *decode_forward(problem, True, SMALL))


@pytest.mark.parametrize("where", [3, 40])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_tame(small, what, where):
    for poisoned in ("q", "k", "v"):
        problem = cached(3, S=60, kv_lengths=torch.tensor([60, 30]), sinks=torch.tensor([0.0, math.inf, -math.inf, 1.0]), scale=1.0)
        getattr(problem, poisoned)[:, 0, min(where, getattr(problem, poisoned).shape[2] - 1), 3] = what
        check(problem, *decode_forward(problem, True, SMALL))


def test_far_logits(small):
    for size in (6e4, -6e4):
        problem = cached(4, S=60, scale=1.0, window_size=(40, 0))
        problem.k[..., 0], problem.q[..., 0] = size, 1.0
        check(problem, *decode_forward(problem, True, SMALL))
    problem = cached(5, S=60, scale=1.0)
    problem.k[:, :, :32] = problem.q[:, ::2] * -1000  # the first chunks weigh nothing
    check(problem, *decode_forward(problem, True, SMALL))


def paged(problem, page, seed=0):
    "A problem's keys on shuffled pages; NaN on pages nobody owns and past the lengths; -1 where no page is."
    torch.manual_seed(seed)
    (B, _, Hkv, _, S, E, Ev), lengths = problem.sizes, problem.kv_lengths
    wide = -(-S // page)
    order, table = torch.randperm(B * wide + 3), torch.full((B, wide), -1, dtype=torch.int32)
    k_pages, v_pages = (torch.full((B * wide + 3, page, Hkv, n), math.nan, dtype=problem.q.dtype) for n in (E, Ev))
    for b in range(B):
        for j in range(int(lengths[b])):
            if problem.window[0] >= 0 and j // page < (int(problem.shift[b]) - problem.window[0]) // page: continue  # given back
            table[b, j // page] = order[b * wide + j // page]
            k_pages[table[b, j // page], j % page], v_pages[table[b, j // page], j % page] = problem.k[b, :, j], problem.v[b, :, j]
    return k_pages, v_pages, table


@pytest.mark.parametrize("window", [(-1, 0), (20, 0)])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_pages(small, page, window):
    problem = cached(6, B=3, S=70, L=2, kv_lengths=torch.tensor([70, 0, 41]), window_size=window, sinks=torch.randn(4), softcap=9.0)
    k_pages, v_pages, table = paged(problem, page)
    knobs = dict(window_size=window, sinks=problem.sinks, softcap=9.0, config=SMALL)
    with guarded(): answer = decode_paged(problem.q, k_pages, v_pages, table, problem.kv_lengths, **knobs)
    check(problem, *answer)
    assert same(answer, decode_forward(problem, config=SMALL)[:2])
    assert same(answer, decode_paged(problem.q, k_pages, v_pages, table, problem.kv_lengths.int(), num_splits=1, **knobs))


def test_refusals():
    q, pages = torch.zeros(1, 2, 1, 4), torch.zeros(3, 8, 1, 4)
    table, lengths = torch.tensor([[0, 5]], dtype=torch.int32), torch.tensor([12])
    with pytest.raises(ValueError, match=r"block_table\[0, 1\]=5"): decode_paged(q, pages, pages, table, lengths)
    with pytest.raises(ValueError, match="kv_lengths must be from 0 to the 16 keys"): decode_paged(q, pages, pages, table, lengths + 9)
    with pytest.raises(TypeError, match="int32"): decode_paged(q, pages, pages, table.long(), lengths)
    with pytest.raises(ValueError, match="alike"): decode_paged(q, pages, pages[:2], table, lengths)
    with pytest.raises(ValueError, match="a row for each"): decode_paged(q, pages, pages, table[0], lengths)
    with pytest.raises(ValueError, match="num_splits must be at least 1"): decode_forward(cached(0), num_splits=0)
    assert "129" in decode_reasons(cached(0, L=129, G=1, S=200))[0] and not decode_reasons(cached(0, L=128, G=1, S=200))
    for problem in (cached(0, dtype=torch.float64), cached(0, E=257), replace(cached(0), bias=torch.zeros(1, 1, 1, 1))):
        assert len(decode_reasons(problem)) == 1


def test_plans():
    sizes = (65_536, 8, 8, 1, 100_000, 128, 128)
    plan = plan_decode(sizes, (-1, 0), 32, 132)
    assert plan.splits == 1 and sum(n for _, n in launches(plan.programs)) == plan.programs == 65_536 * 8
    for B in (1, 2, 7, 64):
        for S in (0, 1, 256, 257, 100_000):
            plan = plan_decode((B, 64, 8, 1, S, 128, 128), (-1, 0), 32, 132)
            assert (plan.rows, plan.block_m, plan.tiles, plan.chunk, plan.chunks) == (8, 16, 1, 256, max(1, -(-S // 256)))
            assert 1 <= plan.splits <= plan.chunks and plan.programs == B * 8 * plan.splits
    assert plan_decode((1, 64, 8, 1, 10**6, 128, 128), (1000, 0), 32, 132).chunks == 5


def test_splits_end_nearly_as_early_as_any():
    for groups in (0, 1, 8, 100, 263, 264, 265, 10_000):
        for chunks in (0, 1, 7, 64):
            n = splits_for(132, groups, chunks)
            def rounds(n, groups=groups, chunks=chunks): return -(-groups * n // 264) * -(-chunks // n)
            assert 1 <= n <= max(1, chunks) and rounds(n) * 32 <= 33 * min(map(rounds, range(1, max(chunks, 1) + 1)))
