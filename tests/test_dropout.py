"Philox against its published answers, Python's integers and Triton; the mask as a function of position alone."
import math
import os
import subprocess
import sys

import pytest
import torch

from tensorplay_attn import dropout
from tensorplay_attn.dropout import (
    A, B, WORD, _product, derive_key, dropout_scale, fold, keep_mask, keep_tile, new_seed, philox, philox_int, rand, threshold, uniform)

EDGES = [0, 1, 2, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**31 + 1, WORD - 1, WORD]
KNOWN = [  # Salmon et al. (2011), the vectors published with their code
    ((0, 0), (0, 0, 0, 0), (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
    ((WORD, WORD), (WORD,) * 4, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
    ((0xa4093822, 0x299f31d0), (0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1)),
]


def stray(n, q, delta=1e-9):
    "How far a share of n coins strays from q, but for a chance of delta (Bernstein)."
    lam = math.log(2 / delta) / (3 * n)
    return lam + math.sqrt(lam**2 + 6 * q * (1 - q) * lam)


def full_mask(seed, p, nb, nh, m, n):
    b, h, i, j = (torch.arange(x) for x in (nb, nh, m, n))
    return keep_mask(seed, p, b[:, None, None, None], h[:, None, None], i[:, None], j)


@pytest.mark.parametrize("key,counter,words", KNOWN)
def test_known_answers(key, counter, words):
    assert philox_int(*key, *counter) == words
    assert tuple(x.item() for x in philox(*key, *counter)) == words
    many = philox(*(torch.full((3, 2), x) for x in (*key, *counter)))
    assert all(x.dtype == torch.int64 and (x == w).all() for x, w in zip(many, words))


@pytest.mark.parametrize("C", [A, B])
def test_product_is_exact(C):
    c = torch.cat((torch.tensor(EDGES), torch.randint(0, 2**32, (10_000,), generator=torch.Generator().manual_seed(0))))
    x = _product(c - 2**31, C)
    assert x.tolist() == [C * n - 2**63 for n in c.tolist()]


@pytest.mark.parametrize("place", range(6))
def test_every_argument_at_its_edges(place):
    args = torch.randint(0, 2**32, (6,), generator=torch.Generator().manual_seed(place)).tolist()
    tensors = [*args]
    tensors[place] = torch.tensor(EDGES)
    got = torch.stack(philox(*tensors), -1).tolist()
    assert got == [list(philox_int(*args[:place], e, *args[place + 1:])) for e in EDGES]


@pytest.mark.parametrize("shapes", [
    [(), (), (5,), (4, 1), (3, 1, 1), (2, 1, 1, 1)], [(2, 1, 1, 1), (3, 1, 1), (4, 1), (5,), (), ()],
    [(), (), (2, 3, 4, 5), (), (), ()], [(2, 3, 4, 5)] * 6, [(), (), (0,), (4, 1), (), ()]])
def test_broadcasting_and_purity(shapes):
    g = torch.Generator().manual_seed(0)
    args = [torch.randint(0, 2**32, s, generator=g) for s in shapes]
    kept = [x.clone() for x in args]
    got, wide = philox(*args), torch.broadcast_tensors(*args)
    assert all(torch.equal(x, y) for x, y in zip(args, kept)), "arguments are not written to"
    rows = list(zip(*(x.flatten().tolist() for x in wide)))
    assert torch.stack(got, -1).shape == (*wide[0].shape, 4)
    assert torch.stack(got, -1).view(-1, 4).tolist() == [list(philox_int(*r)) for r in rows]
    for x, y in zip(philox(*wide), got): assert torch.equal(x, y)  # stride 0


def test_words_are_taken_modulo():
    for x, y in zip(philox(-1, 2**40 + 3, torch.tensor([-1]), torch.tensor([2**35 + 7]), -2, 0), philox(WORD, 3, WORD, 7, WORD - 1, 0)):
        assert x.item() == y.item()
    assert torch.equal(philox(1, 2, torch.tensor([5], dtype=torch.int32), 0, 0, 0)[0], philox(1, 2, torch.tensor([5]), 0, 0, 0)[0])


@pytest.mark.parametrize("bad", [torch.ones(2), torch.ones(2).bool(), torch.ones(2, dtype=torch.complex64)])
def test_wrong_types(bad):
    with pytest.raises(TypeError, match="integers.*dtype"): philox(0, 0, bad, 0, 0, 0)
    with pytest.raises(TypeError, match="offset must be"): rand(0, bad)
    with pytest.raises(TypeError, match="offset must be"): rand(0, 3)


def test_uniform():
    word = torch.cat((torch.tensor(EDGES), torch.randint(0, 2**32, (10**5,), generator=torch.Generator().manual_seed(0))))
    x = word.to(torch.int32)
    want = torch.where(x < 0, -x - 1, x)
    assert torch.equal(fold(word), want.long()) and torch.equal(uniform(word), want.float() * 4.6566127342e-10)
    assert 0 <= uniform(word).min() and uniform(word).max() < 1 and uniform(word).dtype == torch.float32


def test_seed_comes_from_torch():
    torch.manual_seed(5); a, b = new_seed(), new_seed("cpu")
    torch.manual_seed(5); assert torch.equal(a, new_seed()) and torch.equal(b, new_seed())
    assert a.shape == (2,) and a.dtype == torch.int64 and not torch.equal(a, b)
    many = torch.stack([new_seed() for _ in range(64)])
    assert (many < 0).any() and (many > 2**62).any(), "all 64 bits are in use"


def test_seed_is_traced():
    class Draw(torch.nn.Module):
        def forward(self, x): return x + new_seed(x.device)
    program, x = torch.export.export(Draw(), (torch.zeros(2, dtype=torch.int64),)), torch.zeros(2, dtype=torch.int64)
    compiled = torch.compile(Draw(), backend="aot_eager", fullgraph=True)
    torch.manual_seed(1); want = new_seed()
    for fn in (program.module(), compiled):
        torch.manual_seed(1)
        assert torch.equal(fn(x), want)
        assert not torch.equal(fn(x), want), "drawn at each call, not once when traced"


@pytest.mark.parametrize("seed", [(0, 0), (-1, -1), (2**62 + 12345, -2**63), (5, 1), (5, 2**32), (5 + 2**32, 0)])
def test_key(seed):
    seed = torch.tensor(seed)
    k0, k1 = derive_key(seed)
    (a, c0), (b, c1) = (seed & WORD).unbind(), (seed >> 32).unbind()
    assert (k0, k1) == tuple(x.item() for x in philox(a, b, c0, c1, 0, 0)[:2])
    s, o = (x & (2**64 - 1) for x in seed.tolist())
    assert (k0, k1) == philox_int(s & WORD, s >> 32, o & WORD, o >> 32, 0, 0)[:2]


def test_the_rule_word_for_word():
    "keep_mask against the sentence that defines it, in Python's integers."
    seed, p = torch.tensor([123456789012345, -987654321]), 0.4
    key = derive_key(seed)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 3, 5), (65536, 7, 2**31, 2**33 + 3), (2, 1, 2**20, 6), (9, 9, 9, 9)]:
        x = philox_int(*key, j // 4 & WORD, i, h, b)[j % 4]
        x = x - 2**32 if x >= 2**31 else x
        want = (-x - 1 if x < 0 else x) >= math.ceil(p * 2**31)
        assert keep_mask(seed, p, *(torch.tensor([n]) for n in (b, h, i, j))).item() == want
        assert keep_tile(seed, p, range(b, b + 1), torch.tensor([h]), range(i, i + 1), j, j + 1).item() == want


@pytest.mark.parametrize("p", [0.0, 2.0**-40, 2.0**-31, 1e-3, 0.1, 0.5, 0.9, 1 - 2.0**-31, 1 - 2.0**-53, 1.0])
def test_probabilities(p):
    seed = torch.tensor([17, 4])
    want, got = full_mask(seed, p, 1, 2, 30, 64), keep_tile(seed, p, range(1), range(2), range(30), 0, 64)
    assert torch.equal(got, want) and got.dtype == torch.bool
    if p == 0: assert got.all()
    if p == 1: assert not got.any()
    assert 0 <= threshold(p) < 2**31 and abs(threshold(p) / 2**31 - p) <= 2**-31


@pytest.mark.parametrize("t", [1, 2, 2**30, 2**31 - 1])
@pytest.mark.parametrize("lowbits", [0, WORD])
def test_comparison_at_its_edges(t, lowbits):
    "The packed comparison on words just inside and outside the range, whatever lies below them."
    x = torch.tensor([-2**31, -2**31 + 1, -t - 1, -t, -t + 1, -1, 0, 1, t - 1, t, t + 1, 2**31 - 1])
    x = x[(x >= -2**31) & (x < 2**31)]
    assert dropout._inside(x << 32 | lowbits, t).bool().tolist() == [-t <= n < t for n in x.tolist()]


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_wrong_probability(p):
    for call in (lambda: threshold(p), lambda: dropout_scale(p), lambda: keep_tile(torch.tensor([0, 0]), p, range(1), range(1), range(1), 0, 1)):
        with pytest.raises(ValueError, match="dropout_p"): call()


def test_scale():
    assert dropout_scale(0) == 1 and dropout_scale(0.75) == 4 and dropout_scale(1) == 0


@pytest.mark.parametrize("piece", [1, 64, 1 << 15])
def test_any_tiling_same_bits(piece, monkeypatch):
    monkeypatch.setattr(dropout, "PIECE", piece)
    seed, (nb, nh, m, n) = torch.tensor([-5, 2**40]), (3, 2, 33, 47)
    want = full_mask(seed, 0.35, nb, nh, m, n)
    assert torch.equal(keep_tile(seed, 0.35, range(nb), range(nh), range(m), 0, n), want)
    g = torch.Generator().manual_seed(piece)
    for _ in range(40):
        cuts = [sorted(torch.randint(0, size + 1, (2,), generator=g).tolist()) for size in (nb, nh, m, n)]
        (b0, b1), (h0, h1), (i0, i1), (j0, j1) = cuts
        got = keep_tile(seed, 0.35, range(b0, b1), torch.arange(h0, h1), range(i0, i1), j0, j1)
        assert torch.equal(got, want[b0:b1, h0:h1, i0:i1, j0:j1])


def test_rows_in_any_order():
    "Positions are given, not implied: a gathered batch and every second row are the gathered mask."
    seed, want = torch.tensor([1, 2]), full_mask(torch.tensor([1, 2]), 0.5, 4, 4, 20, 16)
    b, h, i = torch.tensor([3, 0, 0]), torch.tensor([2, 1]), range(1, 20, 2)
    assert torch.equal(keep_tile(seed, 0.5, b, h, i, 0, 16), want[b][:, h][:, :, 1::2])


def test_inside_a_custom_operator():
    @torch.library.custom_op("tensorplay_attn_test::drop", mutates_args=())
    def drop(x: torch.Tensor, seed: torch.Tensor, dropout_p: float) -> torch.Tensor:
        m, n = x.shape
        return x * keep_tile(seed, dropout_p, range(1), range(1), range(m), 0, n)[0, 0]
    drop.register_fake(lambda x, seed, dropout_p: torch.empty_like(x))
    fn = torch.compile(lambda x: drop(x, new_seed(x.device), 0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(3); want = full_mask(new_seed(), 0.5, 1, 1, 9, 13)[0, 0]
    torch.manual_seed(3); assert torch.equal(fn(torch.ones(9, 13)), want.float())


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share(p):
    keep, q = keep_tile(torch.tensor([9, 9]), p, range(2), range(5), range(250), 1, 401), 1 - threshold(p) / 2**31
    assert abs(keep.double().mean().item() - q) < stray(keep.numel(), q)
    for r in range(4):  # and of each of the four words
        part = keep[..., r::4]
        assert abs(part.double().mean().item() - q) < stray(part.numel(), q)


def test_bits_of_words():
    words = torch.stack(philox(11, 12, torch.arange(50_000), 3, 4, 5))
    for bit in range(32):
        one = words >> bit & 1
        for w in range(4): assert abs(one[w].double().mean().item() - 0.5) < stray(50_000, 0.5)
        for w in range(3):
            for other in range(w + 1, 4):
                assert abs((one[w] == one[other]).double().mean().item() - 0.5) < stray(50_000, 0.5)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("step", [1, 2, 3, 4, 8])
def test_neighbours(axis, step):
    x = keep_tile(torch.tensor([3, 1]), 0.5, range(16), range(16), range(32), 0, 64).movedim(axis, 0)
    pairs = torch.arange(len(x)).split(step)
    first, second = torch.cat(pairs[0:-1:2]), torch.cat(pairs[1::2])[: len(torch.cat(pairs[0:-1:2]))]
    first = first[: len(second)]
    both = (x[first] == x[second]).double().mean().item()
    assert abs(both - 0.5) < stray(x[first].numel(), 0.5)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (2**32, 0), (0, 2**32), (-2**63, 0), (0, -2**63)])
def test_streams_differ(other):
    seed = torch.tensor([77, 78])
    x, y = (keep_tile(s, 0.5, range(8), range(8), range(32), 0, 64) for s in (seed, seed ^ torch.tensor(other)))
    assert abs((x == y).double().mean().item() - 0.5) < stray(x.numel(), 0.5)


# The rest runs in a process of its own, where Triton's interpreter is on before Triton is imported.

def test_triton_agrees():
    pytest.importorskip("triton")
    home = os.path.dirname(os.path.dirname(dropout.__file__))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((home, os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["rand", "mask"]


if __name__ == "__main__":
    import triton
    import triton.language as tl

    @triton.jit
    def rand_kernel(offset_ptr, u_ptr, w_ptr, seed, n: tl.constexpr):
        at = tl.arange(0, n)
        offset = tl.load(offset_ptr + at)
        tl.store(u_ptr + at, tl.rand(seed, offset))
        w0, w1, w2, w3 = tl.randint4x(seed, offset)
        tl.store(w_ptr + at, w0.to(tl.int64) & 0xFFFFFFFF)
        tl.store(w_ptr + n + at, w1.to(tl.int64) & 0xFFFFFFFF)
        tl.store(w_ptr + 2 * n + at, w2.to(tl.int64) & 0xFFFFFFFF)
        tl.store(w_ptr + 3 * n + at, w3.to(tl.int64) & 0xFFFFFFFF)

    @triton.jit
    def mask_kernel(out_ptr, key_ptr, t, b, h, i0, j0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        "One evaluation a weight, the word chosen by j % 4: the rule, not the fast form."
        i, j = i0 + tl.arange(0, BLOCK_M), j0 + tl.arange(0, BLOCK_N)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.uint32)
        key = tl.load(key_ptr).to(tl.uint64) | tl.load(key_ptr + 1).to(tl.uint64) << 32
        w0, w1, w2, w3 = tl.philox(key, zero + (j // 4)[None, :].to(tl.uint32), zero + i[:, None].to(tl.uint32),
                                   zero + h.to(tl.uint32), zero + b.to(tl.uint32))
        r = zero + (j % 4)[None, :].to(tl.uint32)
        x = tl.where(r == 0, w0, tl.where(r == 1, w1, tl.where(r == 2, w2, w3))).to(tl.int32, bitcast=True)
        keep = tl.where(x < 0, -x - 1, x) >= t
        tl.store(out_ptr + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], keep.to(tl.int8))

    torch.manual_seed(0)
    n = 256
    for seed in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62 + 12345):
        for offset in (torch.arange(n, dtype=torch.int32), torch.randint(-2**31, 2**31 - 1, (n,), dtype=torch.int32),
                       torch.arange(n) + 2**32 - 100, torch.randint(-2**63, 2**63 - 1, (n,))):
            u, w = torch.full((n,), torch.nan), torch.full((4, n), -1)
            rand_kernel[(1,)](offset, u, w, seed, n)
            assert torch.equal(u, rand(seed, offset)), (seed, offset.dtype)
            assert torch.equal(u, rand(torch.tensor(seed), offset))
            high = offset >> 32 if offset.dtype == torch.int64 else 0
            assert torch.equal(w, torch.stack(philox(seed, seed >> 32, offset, high, 0, 0)))
    print("rand")

    for p in (0.0, 2**-31, 0.1, 0.5, 0.9, 1 - 2**-53):
        for b, h, i0, j0 in ((0, 0, 0, 0), (3, 2, 5, 7), (70000, 100, 2**20 + 1, 2**22 + 2)):
            seed, out = new_seed(), torch.full((16, 32), -1, dtype=torch.int8)
            mask_kernel[(1,)](out, torch.tensor(derive_key(seed)), threshold(p), b, h, i0, j0, 16, 32)
            want = keep_tile(seed, p, range(b, b + 1), range(h, h + 1), range(i0, i0 + 16), j0, j0 + 32)[0, 0]
            assert torch.equal(out.bool(), want), (p, b, h, i0, j0)
    print("mask")
