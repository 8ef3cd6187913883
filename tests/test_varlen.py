"Packed kernels in the interpreter against one sequence after another: random packs, pages, bits, what is not read, what is refused."
import random

import pytest
import torch
import triton
import triton.language as tl

from tensorplay_attn.accuracy import judge
from tensorplay_attn.bounds import allowed_backward, judge_backward, judge_forward
from tensorplay_attn.kernels.launch import Config, guarded
from tensorplay_attn.kernels.varlen import depth, owner, packed_backward, packed_forward, tile_owners
from tensorplay_attn.packed import make_packed, packed_loop, packed_loop_backward, rows_of, sequence

CONFIG = Config(32, 64, 4, 1)
NAN = float("nan")


@pytest.fixture(autouse=True)
def on_the_device():
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"): yield


def offsets(lengths): return torch.tensor([0, *lengths]).cumsum(0).int()


def spoil(x, good):
    "NaN in rows that nobody may read; good: what rows are read, as indices."
    y = torch.full_like(x, NAN)
    for rows in good: y[rows] = x[rows]
    return y


def pages_of(rng, keys, values, page):
    "Pages in shuffled order, more than needed, full ones shared with later sequences, also with their ends: k, v, table."
    need = [-(-k.shape[0] // page) for k in keys]
    count, width = sum(need) + 2, max([*need, 0]) + 1
    free = rng.sample(range(count), count)
    k = torch.full((count, page, *keys[0].shape[1:]), NAN, dtype=keys[0].dtype)
    v = torch.full((count, page, *values[0].shape[1:]), NAN, dtype=keys[0].dtype)
    table = torch.tensor([[rng.choice([-1, 2**31 - 1, count]) for _ in range(width)] for _ in keys], dtype=torch.int32)
    for n, (x, y) in enumerate(zip(keys, values)):
        full = [p for p in table[:n].flatten().tolist() if 0 <= p < count and not k[p].isnan().any()]
        for slot in range(need[n]):
            rows, shared = slice(slot * page, (slot + 1) * page), full and rng.random() < 0.4
            table[n, slot] = p = rng.choice(full) if shared else free.pop()
            if not shared: k[p, :x[rows].shape[0]], v[p, :x[rows].shape[0]] = x[rows], y[rows]
    return k, v, table


def random_pack(seed, dtype=None):
    "A packed problem, a gradient for out, and one for lse or None."
    rng = random.Random(seed)
    torch.manual_seed(seed)
    N, Hkv, G = rng.choice([1, 2, 3, 5]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    dtype = dtype or rng.choice([torch.float32, torch.float16, torch.bfloat16])
    length = lambda: rng.choice([0, 1, rng.randint(1, 16), 16, 17, rng.randint(1, 70)])
    E, same = rng.choice([8, 16, 20, 33]), rng.random() < 0.5
    Ev, Lq = E if same else rng.choice([8, 24, 40]), [length() for _ in range(N)]
    room = list(Lq) if rng.random() < 0.4 else [length() for _ in range(N)]
    used = [rng.randint(0, n) for n in room] if rng.random() < 0.4 else None
    keys = room if used is None else used
    spare, edge = rng.choice([0, 2]), lambda: rng.choice([-1, 0, 3, rng.randint(0, 60)])
    q = torch.randn(sum(Lq) + spare, Hkv * G, E).to(dtype)
    k, v = torch.randn(sum(room) + spare, Hkv, E).to(dtype), torch.randn(sum(room) + spare, Hkv, Ev).to(dtype)
    cu_q, cu_k = offsets(Lq), offsets(room)
    read = [slice(a, a + n) for a, n in zip(cu_k.tolist(), keys)]
    q, k, v = spoil(q, [slice(0, sum(Lq))]), spoil(k, read), spoil(v, read)
    table, seqused = None, None if used is None else torch.tensor(used, dtype=torch.int32)
    if rng.random() < 0.4:
        seqused = torch.tensor(keys, dtype=torch.int32)
        k, v, table = pages_of(rng, [k[r] for r in read], [v[r] for r in read], rng.choice([4, 16, 20]))
        cu_k = None
    problem = make_packed(q, k, v, cu_q, cu_k, max(Lq), max(keys), is_causal=rng.random() < 0.4,
        window_size=(edge(), edge()) if rng.random() < 0.4 else (-1, -1), softcap=rng.choice([0.0, 0.0, 2.0]),
        scale=rng.choice([None, None, -0.3]), sinks=torch.randn(Hkv * G) if rng.random() < 0.4 else None, seqused_k=seqused, block_table=table)
    d_out = spoil(torch.randn(q.shape[0], Hkv * G, Ev).to(dtype), [slice(0, sum(Lq))])
    d_lse = spoil(torch.randn(q.shape[0], Hkv * G), [slice(0, sum(Lq))]).T if rng.random() < 0.5 else None
    return problem, d_out, d_lse


def same(a, b): return a is b or a.equal(b) or a.nan_to_num(7).equal(b.nan_to_num(7)) and a.isnan().equal(b.isnan())


def parts(problem, d_out, d_lse):
    "Of each sequence: its number, its own problem, where its rows lie, its part of the gradients."
    for n in range(problem.sizes[0]):
        (i, j), turn = rows_of(problem, n), lambda x: x.transpose(0, 1)[None]
        yield n, sequence(problem, n), i, j, turn(d_out[i]), None if d_lse is None else d_lse[None, :, i]


def check(problem, d_out, d_lse, out, lse, grads):
    "Outputs sequence by sequence within their own bounds; what belongs to nobody 0; sums over sequences within the sum of bounds."
    end, turn = problem.cu_q[-1].item(), lambda x: x.transpose(0, 1)[None]
    assert not out[end:].any() and (lse[:, end:] == -torch.inf).all() and not grads.dq[end:].any()
    paged = problem.block_table is not None
    tensors = [("dk", problem.k), ("dv", problem.v), *([] if problem.sinks is None else [("dsinks", problem.sinks)])]
    allowed = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in tensors}
    for n, alone, i, j, do, dz in parts(problem, d_out, d_lse):
        verdicts = judge_forward(alone, turn(out[i]), lse[None, :, i])
        mine = grads._replace(dq=turn(grads.dq[i]), dk=turn(grads.dk[j]), dv=turn(grads.dv[j]), dsinks=None)
        verdicts |= {k: v for k, v in judge_backward(alone, mine, do, dz).items() if k == "dq" or not paged}
        assert all(verdicts.values()), (n, [(k, str(v)) for k, v in verdicts.items() if not v])
        bounds = allowed_backward(alone, do, dz)
        where = j if paged else (torch.arange(j.start, j.stop),)
        for name in ("dk", "dv"): allowed[name].index_put_(where, getattr(bounds, name)[0].transpose(0, 1), accumulate=True)
        if problem.sinks is not None: allowed["dsinks"] += bounds.dsinks
    wide = make_packed(*(x.double() for x in (problem.q, problem.k, problem.v)), problem.cu_q, problem.cu_k, problem.max_q, problem.max_k,
        scale=problem.scale, window_size=problem.window, softcap=problem.softcap, sinks=problem.sinks, seqused_k=problem.seqused_k,
        block_table=problem.block_table)
    want = packed_loop_backward(wide, *packed_loop(wide), d_out.double(), None if d_lse is None else d_lse.double())
    for name, t in tensors:
        extra = 0 if name == "dsinks" else 2.0**-22 * getattr(want, name).abs()  # the sum over sequences, in fp32
        verdict = judge(getattr(grads, name), getattr(want, name), allowed[name] + extra, t.dtype)
        assert verdict, (name, str(verdict))


@pytest.mark.parametrize("block", range(8))
def test_random_packs(block):
    for seed in range(block * 4, block * 4 + 4):
        problem, d_out, d_lse = random_pack(seed)
        inputs = [problem.q, problem.k, problem.v, problem.cu_q, problem.cu_k, problem.seqused_k, problem.block_table, d_out]
        inputs = [x for x in inputs if x is not None]
        before = [x.clone() for x in inputs]
        with guarded():
            out, lse, top = packed_forward(problem, need_max=True, config=CONFIG)
            grads = packed_backward(problem, out, lse, d_out, d_lse, config=CONFIG)
        assert all(map(same, before, inputs)), f"{seed=}: inputs were written"
        check(problem, d_out, d_lse, out, lse, grads)
        for n, alone, i, *_ in parts(problem, d_out, d_lse):
            assert judge_forward(alone, out[i].transpose(0, 1)[None], None, top[None, :, i])["max_scores"], (seed, n)


@pytest.mark.parametrize("seed", range(100, 104))
def test_the_loop_is_right_too(seed):
    problem, d_out, d_lse = random_pack(seed)
    out, lse = packed_loop(problem)
    check(problem, d_out, d_lse, out, lse, packed_loop_backward(problem, out, lse, d_out, d_lse))


def answer(problem, d_out, d_lse):
    out, lse = packed_forward(problem, config=CONFIG)
    return (out, lse, *packed_backward(problem, out, lse, d_out, d_lse, config=CONFIG))


def only(problem, n):
    "The packed problem of one sequence, and where its keys lie."
    i, j = rows_of(problem, n)
    one, paged = [None if t is None else t[n:n + 1] for t in (problem.seqused_k, problem.block_table)], problem.block_table is not None
    if not paged: j = slice(*problem.cu_k[n:n + 2].tolist())  # all there are, also those not in use
    q, (k, v) = problem.q[i], (problem.k, problem.v) if paged else (problem.k[j], problem.v[j])
    return j, make_packed(q, k, v, offsets([q.shape[0]]), None if paged else offsets([k.shape[0]]), q.shape[0],
        problem.lengths_k[n].item(), scale=problem.scale, window_size=problem.window, softcap=problem.softcap, sinks=problem.sinks,
        seqused_k=one[0], block_table=one[1])


@pytest.mark.parametrize("seed", (200, 201, 202, 203, 204, 208))
def test_the_same_bits_twice_and_alone(seed):
    problem, d_out, d_lse = random_pack(seed)
    whole = answer(problem, d_out, d_lse)
    assert all(map(same, whole, answer(problem, d_out, d_lse)))
    for n in range(problem.sizes[0]):
        (j, alone), (i, _) = only(problem, n), rows_of(problem, n)
        got = answer(alone, d_out[i], None if d_lse is None else d_lse[:, i].contiguous())
        want = whole[0][i], whole[1][:, i], whole[2][i], *(() if problem.block_table is not None else (whole[3][j], whole[4][j]))
        assert all(map(same, got, want)), (seed, n)


@pytest.mark.parametrize("lengths_q, lengths_k", [([0, 1, 0, 1], [0, 1, 0, 1]), ([0, 0], [0, 3]), ([3, 2], [0, 0]), ([], []), ([16, 17], [17, 16])])
def test_small_and_empty(lengths_q, lengths_k):
    torch.manual_seed(0)
    q, k, v = torch.randn(sum(lengths_q), 2, 8), torch.randn(sum(lengths_k), 1, 8), torch.randn(sum(lengths_k), 1, 8)
    for sinks in (None, torch.randn(2)):
        problem = make_packed(q, k, v, offsets(lengths_q), offsets(lengths_k), max([0, *lengths_q]), max([0, *lengths_k]), sinks=sinks)
        out, lse = packed_forward(problem, config=CONFIG)
        d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
        check(problem, d_out, d_lse, out, lse, packed_backward(problem, out, lse, d_out, d_lse, config=CONFIG))
        if not k.shape[0]: assert not out.any() and (lse == (-torch.inf if sinks is None else sinks[:, None])).all()


@pytest.mark.parametrize("shape", [(3, 0, 0, 8, 8), (3, 2, 1, 0, 8), (3, 2, 1, 8, 0), (0, 2, 1, 8, 8)])
def test_sizes_of_zero(shape):
    T, H, Hkv, E, Ev = shape
    q, k, v, cu = torch.randn(T, H, E), torch.randn(T, Hkv, E), torch.randn(T, Hkv, Ev), torch.tensor([0, T], dtype=torch.int32)
    problem = make_packed(q, k, v, cu, cu, T, T)
    out, lse = packed_forward(problem, config=CONFIG)
    grads = packed_backward(problem, out, lse, torch.ones_like(out), config=CONFIG)
    assert out.shape == (T, H, Ev) and lse.shape == (H, T)
    assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape] and not any(x.isnan().any() for x in (out, lse, *grads[:3]))


def test_layouts():
    "Heads outermost, every second column, an expanded axis, offsets and a table cut out of something larger."
    torch.manual_seed(0)
    cu = torch.tensor([0, 99, 20, 99, 37], dtype=torch.int32)[::2]
    q, k = torch.randn(2, 40, 8).transpose(0, 1), torch.randn(40, 2, 16)[..., ::2]
    v = torch.randn(40, 1, 8).expand(40, 2, 8)
    answers = []
    for x, y, z, c in ((q, k, v, cu), tuple(t.contiguous() for t in (q, k, v, cu))):
        problem = make_packed(x, y, z, c, c, 20, 20, is_causal=True)
        out, lse = packed_forward(problem, config=CONFIG)
        answers.append((out, lse, *packed_backward(problem, out, lse, x, lse.masked_fill(lse.isinf(), 0), config=CONFIG)[:3]))
    assert all(map(same, *answers))
    table = torch.tensor([[1, 7, 0, 7], [2, 7, 7, 7]], dtype=torch.int32)[:, ::2]
    pages, used = torch.randn(4, 2, 3, 8).transpose(1, 2), torch.tensor([5, 2], dtype=torch.int32)  # heads before rows
    paged = make_packed(q, pages, pages, cu, None, 20, 5, seqused_k=used, block_table=table)
    copied = make_packed(q, pages.contiguous(), pages.contiguous(), cu, None, 20, 5, seqused_k=used, block_table=table.contiguous())
    assert all(map(same, packed_forward(paged, config=CONFIG), packed_forward(copied, config=CONFIG)))


def test_a_nan_stays_in_its_row():
    "A key that later queries see and earlier ones do not; a query; one sequence only."
    torch.manual_seed(0)
    q, k, v = (torch.randn(60, 2, 8) for _ in range(3))
    cu = offsets([20, 40])
    k[30, 0], q[25, 1] = NAN, NAN
    problem = make_packed(q, k, v, cu, cu, 40, 40, is_causal=True)
    out, lse = packed_forward(problem, config=CONFIG)
    want = packed_loop(problem)
    assert out.isnan().equal(want[0].isnan()) and lse.isnan().equal(want[1].isnan())
    assert out.isnan().any(-1).nonzero()[:, 0].unique().tolist() == [25, *range(30, 60)]
    got = packed_backward(problem, out, lse, torch.ones_like(out), config=CONFIG)
    for a, b in zip(got[:3], packed_loop_backward(problem, *want, torch.ones_like(out))): assert a.isnan().equal(b.isnan())


I32 = dict(dtype=torch.int32)
def call(**change):
    "A right call, changed."
    change = {n: x.to(torch.get_default_device()) if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    q, k = torch.randn(6, 4, 8), torch.randn(8, 2, 8)
    args = dict(query=q, key=k, value=k, cu_seq_q=torch.tensor([0, 2, 6], **I32), cu_seq_k=torch.tensor([0, 5, 8], **I32), max_q=4, max_k=5)
    return make_packed(**{**args, **{n: x(args[n]) if callable(x) else x for n, x in change.items()}})


def paged_call(**change):
    pages = torch.randn(3, 4, 2, 8)
    return call(**{**dict(key=pages, value=pages, cu_seq_k=None, seqused_k=torch.tensor([5, 3], **I32),
        block_table=torch.tensor([[0, 2], [1, -7]], **I32)), **change})


WRONG = [
    (call, dict(cu_seq_q=torch.tensor([1, 2, 6], **I32)), ValueError, "cu_seq_q must start at 0"),
    (call, dict(cu_seq_q=torch.tensor([0, 7, 6], **I32)), ValueError, "cu_seq_q must not decrease"),
    (call, dict(cu_seq_q=torch.tensor([0, 2, 7], **I32), max_q=9), ValueError, "cu_seq_q must not go past the 6 rows"),
    (call, dict(cu_seq_k=torch.tensor([0, 5, 9], **I32)), ValueError, "cu_seq_k must not go past the 8 rows"),
    (call, dict(cu_seq_k=torch.tensor([0, 5, 4], **I32)), ValueError, "cu_seq_k must not decrease"),
    (call, dict(cu_seq_q=torch.tensor([0, 2, 6])), ValueError, "cu_seq_q must be int32"),
    (call, dict(cu_seq_k=torch.tensor([0., 5, 8])), ValueError, "cu_seq_k must be int32"),
    (call, dict(cu_seq_q=[0, 2, 6]), TypeError, "cu_seq_q must be a tensor"),
    (call, dict(cu_seq_k=None), TypeError, "cu_seq_k must be a tensor"),
    (call, dict(cu_seq_q=torch.zeros(0, **I32)), ValueError, "cu_seq_q must have shape"),
    (call, dict(cu_seq_q=torch.zeros(3, 1, **I32)), ValueError, "cu_seq_q must have shape"),
    (call, dict(cu_seq_k=torch.tensor([0, 8], **I32)), ValueError, "cu_seq_k must have shape"),
    (call, dict(max_q=3), ValueError, "max_q is less than the longest sequence, 4"),
    (call, dict(max_k=4), ValueError, "max_k is less than the longest sequence, 5"),
    (call, dict(max_q=-1), ValueError, "max_q must not be negative"),
    (call, dict(max_q=4.0), TypeError, "max_q must be an int"),
    (call, dict(seqused_k=torch.tensor([5, 4], **I32)), ValueError, "seqused_k goes past"),
    (call, dict(seqused_k=torch.tensor([-1, 3], **I32)), ValueError, "seqused_k must not be negative"),
    (call, dict(seqused_k=torch.tensor([5, 3])), ValueError, "seqused_k must be int32"),
    (call, dict(seqused_k=torch.tensor([5], **I32)), ValueError, "seqused_k must have shape"),
    (call, dict(query=lambda t: t[None]), ValueError, "query must have 3 dimensions"),
    (call, dict(key=lambda t: t[..., :4]), ValueError, "head size"),
    (call, dict(value=lambda t: t[:5]), ValueError, "rows or heads"),
    (call, dict(query=lambda t: t[:, :3]), ValueError, "multiple of key heads"),
    (call, dict(query=lambda t: t.half()), ValueError, "differ in dtype"),
    (call, dict(query=lambda t: t.int()), TypeError, "not supported"),
    (call, dict(query=None), TypeError, "query must be a tensor"),
    (call, dict(sinks=torch.zeros(3)), ValueError, "sinks must have shape"),
    (call, dict(window_size=(-2, 0)), ValueError, "window_size"),
    (call, dict(scale=float("inf")), ValueError, "scale must be finite"),
    (call, dict(softcap=-1.0), ValueError, "softcap must not be negative"),
    (paged_call, dict(seqused_k=None), ValueError, "block_table needs seqused_k"),
    (paged_call, dict(seqused_k=torch.tensor([9, 3], **I32), max_k=9), ValueError, "seqused_k goes past"),
    (paged_call, dict(seqused_k=torch.tensor([5, 5], **I32)), ValueError, r"block_table\[1, 1\]=-7"),
    (paged_call, dict(block_table=torch.tensor([[0, 3], [1, 0]], **I32)), ValueError, r"block_table\[0, 1\]=3"),
    (paged_call, dict(block_table=torch.tensor([[0, 2], [1, 0]])), ValueError, "block_table must be int32"),
    (paged_call, dict(block_table=torch.tensor([[0, 2]], **I32)), ValueError, "block_table must have shape"),
    (paged_call, dict(block_table=[[0, 2], [1, 0]]), TypeError, "block_table must be a tensor"),
    (paged_call, dict(max_k=4), ValueError, "max_k is less"),
    (paged_call, dict(key=lambda t: t[0], value=lambda t: t[0]), ValueError, "4 dimensions"),
]


def test_right_calls_pass():
    assert call().sizes == (2, 4, 2, 4, 5, 8, 8) and paged_call().page_size == 4
    assert call(max_k=3, seqused_k=torch.tensor([3, 2], **I32)).max_k == 3  # counts the keys in use


@pytest.mark.parametrize("make, change, error, words", WRONG)
def test_wrong_calls(make, change, error, words):
    with pytest.raises(error, match=words): make(**change)


def test_no_device_is_waited_for_where_values_cannot_be_read():
    meta = lambda *shape, **kind: torch.empty(shape, device="meta", **kind)
    make_packed(meta(6, 4, 8), meta(8, 2, 8), meta(8, 2, 8), meta(3, **I32), meta(3, **I32), 4, 5)


@pytest.mark.parametrize("height", [16, 32, 128])
def test_every_tile_has_its_program(height):
    "Ids of neighbours do not overlap, no more are planned than needed at most, and the search finds the owner of each."
    rng = random.Random(height)
    for _ in range(50):
        lengths = [rng.choice([0, 1, 15, 16, 17, rng.randint(0, 300)]) for _ in range(rng.randint(1, 40))]
        cu = offsets(lengths)
        ids = [cu[n].item() // height + n + t for n, length in enumerate(lengths) for t in range(-(-length // height))]
        assert len(set(ids)) == len(ids) and max([0, *ids]) < tile_owners(cu[-1].item(), len(lengths), height)
        begin = (cu[:-1] // height + torch.arange(len(lengths))).tolist()
        owners = [max(n for n in range(len(lengths)) if begin[n] <= i) for i in ids]
        assert owners == [n for n, length in enumerate(lengths) for _ in range(-(-length // height))]


with triton.knobs.runtime.scope():
    triton.knobs.runtime.interpret = not torch.cuda.is_available()

    @triton.jit
    def find(tile, cu, got, N, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
        tl.store(got, owner(cu, N, tile, BLOCK, DEPTH))


@pytest.mark.parametrize("N", [1, 5, 128, 129, 1000, 16384, 20000])
def test_the_search(N):
    lengths = torch.randint(0, 3, (N,)) * torch.randint(0, 20, (N,))
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    begin = (cu[:-1] // 16 + torch.arange(N)).contiguous()
    for tile in {0, 1, N // 2, N - 1, tile_owners(cu[-1].item(), N, 16) - 1, *torch.randint(0, N, (20,)).tolist()}:
        got = torch.full((1,), -1)
        find[(1,)](tile, cu, got, N, 16, depth(N))
        assert got.item() == torch.searchsorted(begin, tile, right=True).item() - 1
