"Attention with user functions and block lists in Triton, forward and backward: interpreted where there is no GPU."
import math
import random
from dataclasses import replace

import pytest
import torch

from tensorplay_attn.bounds import judge_backward, judge_forward
from tensorplay_attn.engines import ENGINES
from tensorplay_attn.kernels import launch as launching
from tensorplay_attn.kernels import omni_backward as backward
from tensorplay_attn.kernels.decode import decode_lists_forward, decode_lists_reasons, plan_lists
from tensorplay_attn.kernels.launch import Config, guarded, recorded
from tensorplay_attn.kernels.omni_backward import across, omni_backward
from tensorplay_attn.kernels.omni_forward import omni_forward, omni_reasons
from tensorplay_attn.mods import Blocks, Mods, trace
from tensorplay_attn.problem import make_problem, restrict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(64, 64, 4, 1)
INF = math.inf
torch.manual_seed(0)
SLOPES, SCALAR, ROWS, COLS = (x.to(DEVICE) for x in (torch.tensor([0.5, 0.25, 0.1, 0.3]), torch.tensor(0.7), torch.randn(300), torch.randn(2, 300)))
RELATIVE, PAIR, HALF = (x.to(DEVICE) for x in (torch.randn(4, 601), torch.randn(129, 140), torch.randn(4, 3, 2).half()))
IDS = torch.tensor([0] * 20 + [1] * 33 + [2] * 247, device=DEVICE)
HIDDEN = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]], device=DEVICE)

SCORES = {"none": None, "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i) / 8,
    "relative": lambda s, b, h, i, j: s * SCALAR + RELATIVE[h, i - j + 300],
    "softcap": lambda s, b, h, i, j: torch.tanh(s / 3) * 3, "lines": lambda s, b, h, i, j: s * ROWS[i] + COLS[b, j] * SCALAR,
    "hides": lambda s, b, h, i, j: torch.where((i + j) % 3 > 0, s + HALF[h, i % 3, (j // 2) % 2], -INF),
    "pairs": lambda s, b, h, i, j: s + PAIR[i, j] * PAIR[-1, h]}
MASKS = {"none": None, "causal": lambda b, h, i, j: i >= j, "documents": lambda b, h, i, j: (IDS[i] == IDS[j]) & (i >= j),
    "window": lambda b, h, i, j: (i - j).abs() <= 9, "by head": lambda b, h, i, j: (HIDDEN[b, h] == 0) & (j % (h + 2) < 2),
    "prefix": lambda b, h, i, j: (j < 24) | (i >= j),
    "nothing": lambda b, h, i, j: (i < 40) & (i > j + 300)}


def to_blocks(keep, Q, KV, sides=True):
    "Block lists of a dense mask (B or 1, H or 1, L, S); entries past a list's end name no block."
    B, H, L, S = keep.shape
    nQ, nK = -(-L // Q), -(-S // KV)
    count = lambda x: torch.nn.functional.pad(x, (0, nK * KV - S, 0, nQ * Q - L)).view(*x.shape[:2], nQ, Q, nK, KV).sum((3, 5))
    n, size = count(keep.int()), count(torch.ones(1, 1, L, S, dtype=torch.int32, device=keep.device))
    lists = []
    for grid in ((n > 0) & (n < size), n == size):
        for x in (grid, grid.mT):
            number, at = x.sum(-1, dtype=torch.int32), x.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()
            at[torch.arange(at.shape[-1], device=at.device) >= number[..., None]] = 10**6
            lists.append((number, at))
    (a, b), (c, d), (e, f), (g, k) = lists
    return Blocks(a, b, e, f, *((c, d, g, k) if sides else (None,) * 4), (Q, KV), (L, S))


def dense_mask(mask, L, S, B=1, H=2):
    at = [torch.arange(n, device=DEVICE).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate((B, H, L, S))]
    return (torch.ones(1, 1, L, S, dtype=torch.bool, device=DEVICE) if mask is None else mask(*at)).expand(-1, -1, L, S)


def mods_of(score=None, mask=None, blocks=None):
    (score, a), (mask, b) = (trace(f, device=DEVICE) if f else (None, ()) for f in (score, mask))
    return Mods(score, mask, (*a, *b), blocks)


def example(L, S, score=None, mask=None, block=None, E=16, Ev=24, B=1, H=2, Hkv=1, dtype=torch.float32, start=0, **knobs):
    "A problem, d_out and d_lse."
    torch.manual_seed(start)
    size = lambda *shape: torch.randn(shape).to(DEVICE, dtype)
    knobs = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in knobs.items()}
    problem = make_problem(size(B, H, L, E), size(B, Hkv, S, E), size(B, Hkv, S, Ev), **knobs)
    score, mask = SCORES.get(score, score), MASKS.get(mask, mask)
    blocks = block if block is None or isinstance(block, Blocks) else to_blocks(dense_mask(mask, L, S, B, H), *block)
    return replace(problem, mods=mods_of(score, mask, blocks)), size(B, H, L, Ev), torch.randn(B, H, L, device=DEVICE)


def solve(problem, do, d_lse=None, config=SMALL, **knobs):
    "Forward and backward between guard bands."
    with guarded():
        out, lse, top = omni_forward(problem, need_max=True, config=config)
        grads = omni_backward(problem, out, lse, do, d_lse, config=config, **knobs)
    return out, lse, top, grads


def judge(problem, do, d_lse=None, config=SMALL):
    out, lse, top, grads = solve(problem, do, d_lse, config)
    verdicts = {**judge_forward(problem, out, lse, top), **judge_backward(problem, grads, do, d_lse)}
    wanted = [t for t in problem.mods.score_tensors if t.is_floating_point()]
    assert len(verdicts) >= 6 + len(wanted) + (problem.sinks is not None), "something was not judged"
    assert all(verdicts.values()), {n: str(v) for n, v in verdicts.items() if not v}
    return out, lse, top, grads


def same(a, b):
    flat = lambda x: [*x[:3], *x[3][:3], *[t for t in (x[3].dsinks, *x[3].dtensors) if t is not None]]
    return all(torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7)) for x, y in zip(flat(a), flat(b)))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("block", [None, (16, 16), (32, 128), (64, 64)])
def test_every_score(score, block):
    rng = random.Random(f"{score}{block}")
    L, S = rng.choice([(33, 48), (40, 17)]) if block == (16, 16) else rng.choice([(100, 100), (70, 129), (129, 64)])
    judge(*example(L, S, score, rng.choice([*MASKS]), block, start=rng.randint(0, 99)))


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask):
    rng = random.Random(mask)
    for L, S in ((1, 1), (17, 100), (100, 16), (128, 129)):
        block = rng.choice([(32, 128), (64, 64), (128, 128), (48, 64)] if L > 100 else [(16, 16), (32, 128), (64, 64), (16, 48)])
        judge(*example(L, S, rng.choice([*SCORES]), mask, block, B=2 if L == 1 else 1, start=rng.randint(0, 99)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    for score, mask, block in (("relative", "causal", (32, 32)), ("hides", "prefix", (16, 64))):
        judge(*example(60, 75, score, mask, block, dtype=dtype))


KNOBS = {"softcap": dict(softcap=2.0), "sinks": dict(sinks=torch.tensor([0.5, -INF])), "window": dict(window_size=(20, 7)),
    "causal, lower right": dict(is_causal=True, alignment="lower_right"), "lengths": dict(kv_lengths=torch.tensor([33])),
    "lengths, lower right": dict(kv_lengths=torch.tensor([41]), alignment="lower_right", is_causal=True), "scale": dict(scale=-0.4),
    "dropout": dict(dropout_p=0.3, seed=torch.tensor([5, 6])), "scale 0": dict(scale=0.0)}


@pytest.mark.parametrize("name", KNOBS)
def test_knobs(name):
    "What else a problem may have goes on meaning what it meant."
    judge(*example(50, 64, "alibi", "prefix", (32, 32), **KNOBS[name]))
    judge(*example(64, 64, "hides", None, None, **KNOBS[name]))


@pytest.mark.parametrize("E,Ev,H,Hkv", [(1, 1, 2, 1), (80, 64, 2, 2), (128, 16, 3, 1), (256, 256, 1, 1), (16, 40, 4, 2)])
def test_heads(E, Ev, H, Hkv): judge(*example(40, 50, lambda s, b, h, i, j: s + RELATIVE[h % 4, i - j + 300], "causal", (32, 32), E=E, Ev=Ev, H=H,
    Hkv=Hkv, B=1))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_nothing(sizes):
    for block in (None, (16, 16)): judge(*example(*sizes, "alibi", "causal", block))
    judge(*example(20, 20, "alibi", "causal", (16, 16), Ev=0))
    judge(*example(20, 20, "alibi", "causal", None, E=0))
    judge(*example(20, 20, "alibi", "causal", None, B=0))


def test_lists_decide():
    "Without a mask_mod, attention is what the lists say, block by block; full and partial blocks are the same then."
    torch.manual_seed(1)
    grid = (torch.rand(1, 2, 4, 3, device=DEVICE) < 0.5).repeat_interleave(16, 2).repeat_interleave(32, 3)[..., :60, :90]
    full = to_blocks(grid, 16, 32)
    assert full.full_kv_num_blocks.sum() > 0
    whole = lambda x: x.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()
    coarse = torch.nn.functional.pad(grid, (0, 6, 0, 4))[:, :, ::16, ::32]
    partial = Blocks(coarse.sum(-1, dtype=torch.int32), whole(coarse), *(None,) * 6, (16, 32), (60, 90))
    answers = [judge(*example(60, 90, "alibi", None, blocks)) for blocks in (full, partial)]
    dense, do, d_lse = example(60, 90, "alibi", None, None)
    hidden = solve(replace(dense, mods=replace(dense.mods, mask=None)), do, d_lse)[0]
    assert not torch.allclose(answers[0][0], hidden)
    torch.testing.assert_close(answers[0][0], answers[1][0])


def test_lists_in_odd_places():
    "Strided lists, lists for one batch entry or head, lists without the side of keys: the same bits."
    problem, do, d_lse = example(40, 90, "relative", "documents", (16, 32))
    blocks = problem.mods.blocks
    first = solve(problem, do, d_lse)
    spread = lambda t: None if t is None else torch.stack([torch.full_like(t, 10**6), t], -1)[..., 1]
    turned = lambda t: None if t is None else t.expand(1, 2, *t.shape[2:]).transpose(0, 1).contiguous().transpose(0, 1)
    for change in (spread, turned):
        lists = [change(t) for t in blocks.tensors()]
        assert same(first, solve(replace(problem, mods=replace(problem.mods, blocks=Blocks(*lists, blocks.block_size, blocks.lengths))), do, d_lse))
    alone = Blocks(*blocks.tensors()[:4], *(None,) * 4, blocks.block_size, blocks.lengths)
    assert same(first, solve(replace(problem, mods=replace(problem.mods, blocks=alone)), do, d_lse))


def test_lists_from_the_other_side():
    blocks = to_blocks(dense_mask(MASKS["by head"], 70, 90, 2, 4), 16, 32)
    for at in (0, 2):
        number, index = across(*blocks.tensors()[at:at + 2], 3)
        want, where = blocks.tensors()[4 + at:6 + at]
        assert torch.equal(number, want)
        listed = torch.arange(where.shape[-1], device=DEVICE) < want[..., None]
        assert torch.equal(index[listed], where[listed])
    assert across(None, None, 3) == (None, None)


def test_lists_that_name_no_block():
    "Nothing outside the tensors is read, whatever a list holds."
    problem, do, _ = example(60, 90, "alibi", None, (64, 64))
    wild = [None if t is None else torch.full_like(t, n) for t, n in zip(problem.mods.blocks.tensors(), (9, -7, 9, 10**9) * 2)]
    solve(replace(problem, mods=replace(problem.mods, blocks=Blocks(*wild, (64, 64), (60, 90)))), do)


@pytest.mark.parametrize("block", [None, (32, 32)])
def test_nan_stays_behind_a_mask(block):
    clean, do, d_lse = example(40, 40, "alibi", "causal", block, B=2, Hkv=2)
    before = solve(clean, do, d_lse)
    k, v = clean.k.clone(), clean.v.clone()
    k[0, 0, 30], v[0, 1, 20, 3] = math.nan, INF
    out, lse, _, grads = judge(replace(clean, k=k, v=v), do, d_lse)
    assert torch.equal(out[1], before[0][1]) and out[0, 0, :30].isfinite().all() and out[0, 0, 30:].isnan().all() and lse[0, 0, 30:].isnan().all()
    assert out[0, 1, :20].isfinite().all() and not out[0, 1, 20:, 3].isfinite().any() and grads.dq[0, 0, :30].isfinite().all()


def test_nan_stays_behind_a_score():
    "A score_mod's -inf hides a key as a bias of -inf does."
    clean, do, d_lse = example(40, 40, lambda s, b, h, i, j: torch.where(i - j < 5, s + SLOPES[h], -INF), None, None)
    v = clean.v.clone()
    v[0, 0, 7] = math.nan
    out, *_ = judge(replace(clean, v=v), do, d_lse)
    assert out[0, 0, 12:].isfinite().all() and out[0, 0, :12].isnan().all()


def test_finite_minus_infinity():
    least = torch.finfo(torch.float32).min
    for mask in (None, "prefix"):
        out, lse, _, _ = judge(*example(40, 40, lambda s, b, h, i, j: torch.where(i < 9, least, s), mask, (32, 32)))
        assert out.isfinite().all() and (lse[:, :, :9] < -3e38).all() and lse.isfinite().all()


def test_tables_are_read_where_the_mask_lets_them():
    "A window of 8 and a table of 8: hidden pairs have no entry there."
    table = torch.randn(8, device=DEVICE)
    for block in (None, (16, 16)):
        judge(*example(40, 40, lambda s, b, h, i, j: s + table[i - j], lambda b, h, i, j: (i >= j) & (i - j < 8), block))
    problem, do, _ = example(40, 40, lambda s, b, h, i, j: s + table[i - j], "causal", None)
    out = omni_forward(problem, config=SMALL)[0]
    assert out[:, :, :8].isfinite().all() and out[:, :, 8:].isnan().all()


def test_rows_that_see_nothing():
    out, lse, top, grads = judge(*example(50, 60, "alibi", "nothing", (16, 16), sinks=torch.zeros(2)))
    assert (out == 0).all() and (lse == 0).all() and (top == -INF).all() and (grads.dq == 0).all() and (grads.dv == 0).all()


def test_what_is_not_wanted():
    problem, do, d_lse = example(40, 40, "lines", "documents", (16, 16))
    whole = solve(problem, do, d_lse)[3].dtensors
    names = [t.dim() for t in problem.mods.tensors]
    assert [t is None for t in whole] == [False, False, False, True], names
    some = solve(problem, do, d_lse, need_tensors=(False, True, False, False))[3].dtensors
    assert [t is None for t in some] == [True, False, True, True] and torch.equal(some[1], whole[1])
    wish = solve(replace(problem, mods=replace(problem.mods, wanted=(True, False, False))), do, d_lse)[3].dtensors
    assert [t is None for t in wish] == [False, True, True, True] and torch.equal(wish[0], whole[0])


def test_one_strip_after_another(monkeypatch):
    "A small workspace is filled and emptied often; sums differ by their order at most."
    for score in ("pairs", "lines", "relative"):
        problem, do, d_lse = example(70, 50, score, "prefix", (32, 32))
        one = solve(problem, do, d_lse)
        monkeypatch.setattr(backward, "WORKSPACE", 30000)
        many = judge(problem, do, d_lse)
        assert same((*one[:3], one[3]._replace(dtensors=())), (*many[:3], many[3]._replace(dtensors=())))
        monkeypatch.undo()


def test_same_bits():
    for score, mask, block in (("relative", "causal", (32, 32)), ("pairs", "by head", None)):
        problem, do, d_lse = example(60, 70, score, mask, block, sinks=torch.randn(2))
        assert same(solve(problem, do, d_lse), solve(problem, do, d_lse))
    problem, do, d_lse = example(60, 70, "alibi", "causal", (64, 64), B=2)
    alone = replace(problem, **{n: getattr(problem, n)[1:] for n in "qkv"})
    for a, b in zip(solve(problem, do, d_lse)[3][:3], solve(alone, do[1:], d_lse[1:])[3][:3]): assert torch.equal(a[1:], b)


def test_a_part_of_a_problem():
    "Indices count from the whole problem's first element."
    problem, do, _ = example(60, 70, "relative", "by head", None, B=2, H=4, Hkv=2)
    whole = omni_forward(problem, config=SMALL)[0]
    part = restrict(problem, batch=slice(1, 2), kv_heads=slice(1, 2), rows=slice(16, 40))
    out, lse, top, grads = solve(part, do[1:, 2:, 16:40])
    torch.testing.assert_close(out, whole[1:, 2:, 16:40])
    assert all(judge_forward(part, out, lse, top).values()) and all(judge_backward(part, grads, do[1:, 2:, 16:40], None).values())


def test_captured_layouts():
    "A table at strides, one element for all, a scalar of another type."
    wide = torch.stack([torch.full_like(RELATIVE, math.nan), RELATIVE], -1)
    layouts = [wide[..., 1], RELATIVE.mT.contiguous().mT, RELATIVE[:1].expand(4, -1)]
    for t in layouts:
        t = t.detach()
        problem, do, d_lse = example(33, 40, lambda s, b, h, i, j, t=t: s + t[h, i - j + 300], "causal", (16, 16))
        judge(problem, do, d_lse)
    whole, empty = torch.tensor(3, device=DEVICE), torch.randn(0, device=DEVICE)
    judge(*example(33, 40, lambda s, b, h, i, j: s * whole, "causal", (16, 16)))
    judge(*example(33, 40, lambda s, b, h, i, j: torch.where(i < 0, s + empty[j], s), lambda b, h, i, j: i < 0, None))


def test_many_small_launches_are_one(monkeypatch):
    problem, do, d_lse = example(70, 40, "alibi", "causal", (32, 32))
    one = solve(problem, do, d_lse)
    monkeypatch.setattr(launching, "MAX_PROGRAMS", 5)
    assert same(one, solve(problem, do, d_lse))


def test_random_problems():
    for seed in range(14):
        rng = random.Random(seed)
        size = lambda rng=rng: rng.choice([1, 2, 15, 16, 17, 31, 64, 65, rng.randint(1, 128)])
        knobs = {}
        if rng.random() < 0.3: knobs["sinks"] = torch.randn(2)
        if rng.random() < 0.3: knobs["softcap"] = rng.choice([1.0, 20.0])
        if rng.random() < 0.3: knobs["window_size"] = rng.choice([(5, 5), (-1, 0), (40, -1)])
        if rng.random() < 0.2: knobs |= dict(dropout_p=0.4, seed=torch.tensor([seed, 1]))
        judge(*example(size(), size(), rng.choice([*SCORES]), rng.choice([*MASKS]), rng.choice([None, (16, 16), (32, 16), (64, 128), (80, 48)]),
            E=rng.choice([8, 16, 33]), Ev=rng.choice([8, 16, 24]), start=seed, **knobs), config=rng.choice([SMALL, Config(32, 64, 4, 1)]))


DECODE = {"shared lists": ("alibi", lambda b, h, i, j: (j % 7 < 4) | (j > 500), (16, 64), dict(L=2)),
    "no lists": ("relative", "causal", None, dict(L=3)),
    "lists by head": ("alibi", lambda b, h, i, j: j % (h + 2) < 2, (16, 32), dict(L=2, B=2)), "many rows": ("lines", "window", (16, 64), dict(L=40)),
    "one chunk": ("softcap", "prefix", (16, 64), dict(L=2, S=100)),
    "sinks, softcap": ("alibi", "documents", (32, 128), dict(L=4, softcap=2.0, sinks=torch.tensor([0.5, -1.0]))),
    "lengths, lower right": ("alibi", None, None, dict(L=2, kv_lengths=torch.tensor([261]), alignment="lower_right", is_causal=True)),
    "dropout": ("alibi", "prefix", (16, 64), dict(L=2, dropout_p=0.4, seed=torch.tensor([3, 4]))),
    "nothing seen": ("alibi", lambda b, h, i, j: j < 0, (16, 64), dict(L=2)),
    "no keys": (None, None, None, dict(L=2, S=0)), "hides": ("hides", lambda b, h, i, j: j > 150, (16, 64), dict(L=3))}


@pytest.mark.parametrize("name", DECODE)
def test_few_queries(name):
    "Walks cut into chunks: what page 27's kernel says, the same bits whoever shares them."
    score, mask, block, knobs = DECODE[name]
    knobs = {"S": 290, **knobs}
    problem, _, _ = example(knobs.pop("L"), knobs.pop("S"), score, mask, block, **knobs)
    assert decode_lists_reasons(problem) == []
    with guarded(): answers = [decode_lists_forward(problem, True, Config(16, 32, 4, 1), n) for n in (None, 1, 2)]
    assert all(judge_forward(problem, *answers[0]).values())
    for other in answers[1:]: assert all(torch.equal(a, b) for a, b in zip(answers[0], other))


def test_few_queries_and_nan():
    "What no query of a head may see stays behind the mask."
    problem, _, _ = example(2, 290, "alibi", lambda b, h, i, j: j % 2 == i, None)
    problem.k[0, 0, 40], problem.v[0, 0, 101, 3] = math.nan, math.nan
    out, lse, top = decode_lists_forward(problem, True)
    assert all(judge_forward(problem, out, lse, top).values()) and out[0, :, 0].isnan().all()
    assert out[0, :, 1, 3].isnan().all() and out[0, :, 1, :3].isfinite().all()


def test_plans_of_few_queries():
    "Heads of a group share a tile where they share a list."
    plan = lambda problem: plan_lists(problem, Config(16, 32, 4, 1), 132)
    assert plan(example(2, 600, "alibi", "causal", (16, 64))[0]).pack == 2 and plan(example(2, 600, None, None, None)[0]).chunks == 3
    assert plan(example(2, 600, "alibi", "by head", (16, 64), B=2)[0]).pack == 1 and plan(example(40, 600, "alibi", "causal", (16, 64))[0]).pack == 1
    assert "128" in decode_lists_reasons(example(80, 20, "alibi", "causal", None)[0])[0]


@pytest.mark.parametrize("options", [{}, {"BACKEND": "TRITON"}, {"BACKEND": "TRITON_DECODE"}, {"fwd_BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 8},
    {"bwd_BLOCK_N1": 16, "BLOCK_M2": 32, "bwd_num_stages": 2}], ids=str)
@pytest.mark.parametrize("L", (2, 33))
def test_options_reach_the_kernels(L, options, monkeypatch):
    "Which kernels the engine starts, in which tiles; the answer is right whatever they are."
    if DEVICE == "cpu": monkeypatch.setenv("TRITON_INTERPRET", "1")
    problem, do, d_lse = example(L, 290, "relative", "causal", (32, 64), dtype=torch.float32)
    problem = replace(problem, mods=replace(problem.mods, options=tuple(options.items())))
    assert ENGINES["omni"].reasons(problem) == []
    with recorded("sm_90") as calls: ENGINES["omni"].forward(problem)
    few = options.get("BACKEND") == "TRITON_DECODE" or (L == 2 and options.get("BACKEND") != "TRITON")
    assert calls[0].kernel.__name__ == ("_decode_listed" if few else "_omni_fwd")
    if "BLOCK_N" in options: assert [calls[0].constants[n] for n in ("BLOCK_N", "num_warps")] == [16, 8]
    out, lse, top = ENGINES["omni"].forward(problem, True)
    assert all(judge_forward(problem, out, lse, top).values())
    assert all(judge_backward(problem, ENGINES["omni"].backward(problem, out, lse, do, d_lse), do, d_lse).values())


def test_plans_stay_within_limits():
    x = torch.empty(1, 1, 1, 64, device="meta").expand(2**16, 2**10, 5000, 64)
    score, mask = trace(lambda s, b, h, i, j: s + SLOPES[h % 4], device=DEVICE)[0], trace(MASKS["causal"], device=DEVICE)[0]
    at = lambda *shape: torch.empty(1, 1, *shape, dtype=torch.int32, device="meta")
    blocks = Blocks(at(40), at(40, 40), at(40), at(40, 40), at(40), at(40, 40), at(40), at(40, 40), (128, 128), (5000, 5000))
    problem = make_problem(x[:1, :1], x[:1, :1], x[:1, :1])
    problem = replace(problem, q=x, k=x, v=x, mods=Mods(score, mask, (torch.empty(4, device="meta"),), blocks))
    stats = torch.empty(1, device="meta").expand(x.shape[:3])
    for target in ("sm_80", "sm_90", "gfx942"):
        with recorded(target) as calls:
            omni_forward(problem)
            omni_backward(problem, x, stats, x, need_tensors=(False,))
        assert len(calls) == 4
        for call in calls: assert call.programs >= 2**26 and sum(n for _, n in launching.launches(call.programs)) == call.programs


def test_reasons():
    problem, _, _ = example(20, 20, "alibi", "causal", (16, 16))
    assert omni_reasons(problem) == []
    assert "no user function" in omni_reasons(replace(problem, mods=None))[0]
    reason = lambda **change: " ".join(omni_reasons(replace(problem, **change)))
    assert "float64" in reason(q=problem.q.double(), k=problem.k.double(), v=problem.v.double())
    assert "attn_mask" in reason(mask=torch.ones(1, 1, 20, 20, dtype=torch.bool, device=DEVICE))
    assert "multiples of 16" in reason(mods=replace(problem.mods, blocks=replace(problem.mods.blocks, block_size=(24, 16))))
    wide = torch.zeros(1, 4, 20, 264, device=DEVICE)
    assert "256" in reason(q=wide, k=wide, v=wide)
    odd = mods_of(lambda s, b, h, i, j: torch.nn.functional.softplus(s) + torch.special.erfcx(s))
    reasons = omni_reasons(replace(problem, mods=odd))
    assert any("softplus" in x and "test_omni_kernels.py" in x for x in reasons) and any("erfcx" in x for x in reasons)
