"Score functions, wider than the page: each against Python numbers, its gradients against differences, the table against PyTorch."
import itertools
import math

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch.fx.experimental.proxy_tensor import make_fx

from tensorplay_attn import masks as M
from tensorplay_attn import scores as S

SIZE = (2, 3, 4, 5)
SHIFT = torch.tensor([2, -3])
ULPS = dict(rtol=1e-6, atol=1e-6)  # vector and scalar tanh may differ: eight units in the last place of fp32, of numbers above 1


def learned(*size, positive=False):
    t = torch.randn(size, generator=torch.Generator().manual_seed(len(size)), dtype=torch.float64)
    return (1 + t.tanh() / 2 if positive else t).requires_grad_()


def clamp(x, low, high): return min(max(x, low), high)


def bucket(d, n, D, both):
    "T5's bucket in whole numbers: bucket t begins where (r / e)^(n - e) reaches (D / e)^(t - e)."
    behind = n // 2 if both and d > 0 else 0
    n, r = (n // 2, abs(d)) if both else (n, max(-d, 0))
    e = n // 2
    if r < e: return behind + r
    return behind + max(t for t in range(e, n) if r ** (n - e) * e ** (t - e) >= D ** (t - e) * e ** (n - e))


# name: learned tensors, the factory, and the same on Python numbers (x: the tensors as lists)
CASES = {
    "alibi": ([], lambda: S.alibi_score(3), lambda s, b, h, i, j: s - [0.0625, 0.00390625, 0.25][h] * abs(i - j)),
    "alibi by head": ([learned(3)], lambda t: S.alibi_score(t, 1), lambda s, b, h, i, j, x: s - x[h] * abs(i + 1 - j)),
    "alibi by batch": ([learned(2, 3)], lambda t: S.alibi_score(t, SHIFT), lambda s, b, h, i, j, x: s - x[b][h] * abs(i + [2, -3][b] - j)),
    "relative": ([learned(3, 5)], lambda t: S.relative_score(t), lambda s, b, h, i, j, x: s + x[h][clamp(j - i, -2, 2) + 2]),
    "relative shared": ([learned(3)], lambda t: S.relative_score(t, SHIFT), lambda s, b, h, i, j, x: s + x[clamp(j - i - [2, -3][b], -1, 1) + 1]),
    "relative of one": ([learned(3, 1)], lambda t: S.relative_score(t, 1), lambda s, b, h, i, j, x: s + x[h][0]),
    "t5": ([learned(3, 8)], lambda t: S.t5_score(t, 3), lambda s, b, h, i, j, x: s + x[h][bucket(j - i, 8, 3, True)]),
    "t5 backward": ([learned(3, 4)], lambda t: S.t5_score(t, 5, False, SHIFT),
        lambda s, b, h, i, j, x: s + x[h][bucket(j - i - [2, -3][b], 4, 5, False)]),
    "softcap": ([], lambda: S.softcap_score(1.5), lambda s, b, h, i, j: 1.5 * math.tanh(s / 1.5)),
    "softcap learned": ([learned(positive=True)], S.softcap_score, lambda s, b, h, i, j, x: x * math.tanh(s / x)),
    "temperature": ([learned(3, positive=True)], S.temperature_score, lambda s, b, h, i, j, x: s / x[h]),
    **{f"bias {n}": ([learned(*n)], S.bias_score, lambda s, b, h, i, j, x, n=n: s + at(x, [k if size > 1 else 0 for k, size in
        zip((b, h, i, j)[4 - len(n):], n)])) for n in ((4, 5), (1, 5), (4, 1), (3, 4, 5), (1, 4, 5), (2, 3, 4, 5), (2, 1, 1, 5), (1, 1, 1, 1))},
    "hiding": ([], lambda: S.hiding_score(M.window_mask(1, 0)), lambda s, b, h, i, j: s if i - 1 <= j <= i else -math.inf),
    "nothing": ([], S.chain_scores, lambda s, b, h, i, j: s),
    "chain": ([learned(3, positive=True), learned(4, 5)], lambda t, u: S.chain_scores(S.softcap_score(2.), S.temperature_score(t), S.bias_score(u)),
        lambda s, b, h, i, j, x, y: 2 * math.tanh(s / 2) / x[h] + y[i][j]),
}


def at(x, place):
    for n in place: x = x[n]
    return x


SCORE = torch.randn(SIZE, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def by_loops(formula, tensors, score=SCORE):
    lists = [t.tolist() for t in tensors]
    return torch.tensor([formula(score[n].item(), *n, *lists) for n in itertools.product(*map(range, SIZE))], dtype=torch.float64).view(SIZE)


@pytest.mark.parametrize("name", CASES)
def test_against_python(name):
    tensors, make, formula = CASES[name]
    mod, want = make(*tensors), by_loops(formula, tensors)
    # a handful of fp64 operations on numbers below 10; the slopes of the paper are exact here
    torch.testing.assert_close(mod(SCORE, *M.index_tensors(*SIZE)).detach(), want, rtol=0, atol=1e-14)
    b, h, i, j = (x.expand(SIZE).flatten() for x in M.index_tensors(*SIZE))
    torch.testing.assert_close(torch.vmap(mod)(SCORE.flatten(), b, h, i, j).detach(), want.flatten(), rtol=0, atol=1e-14)
    alone = torch.stack([mod(*element).detach() for element in zip(SCORE.flatten(), b, h, i, j)])
    torch.testing.assert_close(alone, want.flatten(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [n for n, (tensors, _, _) in CASES.items() if tensors])
def test_gradients(name):
    "Of the score and of every entry of every learned tensor, against differences of the Python numbers."
    tensors, make, formula = CASES[name]
    weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    score = SCORE.clone().requires_grad_()
    grads = torch.autograd.grad((make(*tensors)(score, *M.index_tensors(*SIZE)) * weight).sum(), [score, *tensors])
    step = 1e-6
    def moved(k, place, x):
        now = [t.detach().clone() for t in (SCORE, *tensors)]
        now[k][place] += x
        return (by_loops(formula, now[1:], now[0]) * weight).sum().item()
    for k, g in enumerate(grads):
        if k == 0: places = [(0, 0, 0, 0), (1, 2, 3, 4)]
        else: places = list(itertools.product(*map(range, g.shape)))
        for place in places[:6] + places[-6:]:
            # the formulas' second and third derivatives are of size 10 at most; rounding is 1e-15 / step
            assert abs((moved(k, place, step) - moved(k, place, -step)) / (2 * step) - g[place].item()) < 1e-6 * max(1, abs(g[place].item()))


def test_slopes():
    "The rule as the paper's authors wrote it: recursion for head counts that are no power of two."
    def slopes(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**k for k in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return slopes(closest) + slopes(2 * closest)[0::2][:n - closest]
    for H in range(1, 130):
        torch.testing.assert_close(S.alibi_slopes(H).double(), torch.tensor(slopes(H), dtype=torch.float64), rtol=1e-6, atol=0)
        assert S.alibi_slopes(H).shape == (H,) and S.alibi_slopes(H).unique().numel() == H


@pytest.mark.parametrize("both", [True, False])
def test_buckets(both):
    for n, D in ((32, 128), (32, 64), (8, 16), (64, 256), (16, 1000), (4, 5), (6, 9), (32, 17), (40, 800)):
        d = torch.arange(-D - 3, D + 4)
        assert S.t5_bucket(d, n, D, both).tolist() == [bucket(x, n, D, both) for x in d.tolist()], (n, D)


@pytest.mark.parametrize("name", S.SCORES)
def test_table(name):
    "Every example fits every size, is the same for the same seed, and says of one element alone what it says among others."
    make = S.SCORES[name]
    for n, (L, N) in enumerate(((1, 16), (16, 1), (1, 257), (100, 128), (129, 129), (257, 128), (1, 1))):
        size = (2, 3, L, N)
        (mod, tensors), (again, same) = make(*size, seed=n), make(*size, seed=n)
        assert all(t.requires_grad and t.is_leaf and t.dtype == torch.float32 for t in tensors)
        assert all(torch.equal(t, u) for t, u in zip(tensors, same, strict=True))
        g = torch.Generator().manual_seed(n)
        score = torch.randn(size, generator=g)
        whole = mod(score, *M.index_tensors(*size))
        assert whole.shape == size and whole.dtype == torch.float32 and torch.equal(whole, again(score, *M.index_tensors(*size)))
        place = [torch.randint(k, (32,), generator=g) for k in size]
        alone = torch.stack([mod(*element) for element in zip(score[tuple(place)], *place)])
        torch.testing.assert_close(alone, whole[tuple(place)], **ULPS)
        if tensors:
            grads = torch.autograd.grad(whole.masked_fill(whole.isneginf(), 0).sum(), tensors)
            no_distance = name == "alibi_learned" and L == N == 1  # the only key is the query's own: slopes have no say
            assert all(t.isfinite().all() and t.any() != no_distance for t in grads), size
    assert all(t.dtype == torch.float64 for t in make(*SIZE, dtype=torch.float64)[1])


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("name", S.SCORES)
def test_table_against_pytorch(name):
    "flex_attention, run eagerly, and the definition; alone, and with a mask beside it."
    size = B, H, L, N = 2, 3, 9, 13
    mod, _ = S.SCORES[name](*size, dtype=torch.float64)
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, H, n, 8, generator=g, dtype=torch.float64) for n in (L, N, N))
    for mask_name in ("noop", "document", "by_head"):
        mask = M.CATALOGUE[mask_name](*size)
        s = mod(q @ k.mT / 8**0.5, *M.index_tensors(*size)).detach()
        s = s.masked_fill(~M.create_mask(mask, *size, device="cpu"), -torch.inf)
        want = torch.where(s.isneginf().all(-1, keepdim=True), 0, s.softmax(-1)) @ v
        blocks = flex.create_block_mask(mask, *size, device="cpu", BLOCK_SIZE=16)
        with torch.no_grad(): got = flex.flex_attention(q, k, v, mod, blocks)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert torch.equal(M.create_mask(mod, *size, device="cpu"), flex.create_mask(mod, *size, device="cpu"))


@pytest.mark.parametrize("name", S.SCORES)
def test_table_any_shapes(name):
    size = (2, 3, 9, 13)
    mod, _ = S.SCORES[name](*size)
    score = torch.randn(size, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        whole = mod(score, *M.index_tensors(*size))
        for order in ((3, 2, 1, 0), (2, 0, 3, 1)):
            got = mod(score.permute(order), *(x.permute(order) for x in M.index_tensors(*size)))
            torch.testing.assert_close(got, whole.permute(order), **ULPS)
        odd = torch.tensor([[1], [0]]), torch.tensor(2), torch.arange(9)[:, None, None], torch.tensor([[[0, 12]]])
        place = tuple(torch.broadcast_tensors(*odd))
        torch.testing.assert_close(mod(score[place], *odd), whole[place], **ULPS)
    graph = make_fx(mod)(score[0, 0, :2, :3], torch.tensor([[1]]), torch.tensor([[2]]), torch.tensor([[3], [8]]), torch.tensor([[0, 5, 12]])).graph
    names = {n.target.overloadpacket.__name__ for n in graph.nodes if n.op == "call_function"}
    assert names <= set("add sub mul div abs clamp tanh where le ge bitwise_and index select new_ones scalar_tensor detach".split())


@pytest.mark.parametrize("make, error", [
    (lambda: S.alibi_slopes(0), ValueError), (lambda: S.alibi_slopes(2.0), TypeError), (lambda: S.alibi_score(0), ValueError),
    (lambda: S.alibi_score(torch.ones(2).long()), TypeError), (lambda: S.alibi_score(torch.ones(1, 2, 3)), ValueError),
    (lambda: S.alibi_score([0.5]), TypeError), (lambda: S.alibi_score(2, 1.5), TypeError), (lambda: S.relative_score(torch.zeros(4)), ValueError),
    (lambda: S.relative_score(torch.zeros(0)), ValueError), (lambda: S.relative_score(torch.zeros(1, 1, 3)), ValueError),
    (lambda: S.relative_score(torch.zeros(3).long()), TypeError), (lambda: S.relative_score(torch.zeros(3), "1"), TypeError),
    (lambda: S.t5_score(torch.zeros(8)), ValueError), (lambda: S.t5_score(torch.zeros(2, 3)), ValueError),
    (lambda: S.t5_score(torch.zeros(2, 1), 8, False), ValueError), (lambda: S.t5_score(torch.zeros(2, 32), 8), ValueError),
    (lambda: S.t5_score(torch.zeros(2, 32), 8.0), TypeError), (lambda: S.t5_score(torch.zeros(2, 32), 64, 1), TypeError),
    (lambda: S.t5_score(torch.zeros(2, 32).int()), TypeError), (lambda: S.t5_score(torch.zeros(2, 32), shift=None), TypeError),
    (lambda: S.softcap_score(0), ValueError), (lambda: S.softcap_score(-1.), ValueError), (lambda: S.softcap_score(math.nan), ValueError),
    (lambda: S.softcap_score(torch.tensor(0.)), ValueError), (lambda: S.softcap_score(torch.tensor(2)), TypeError),
    (lambda: S.softcap_score(torch.ones(2)), ValueError), (lambda: S.softcap_score("1"), TypeError), (lambda: S.softcap_score(True), TypeError),
    (lambda: S.temperature_score(torch.tensor([1., -1.])), ValueError), (lambda: S.temperature_score(torch.tensor([math.nan])), ValueError),
    (lambda: S.temperature_score(torch.ones(())), ValueError), (lambda: S.temperature_score(torch.ones(2).long()), TypeError),
    (lambda: S.temperature_score(1.), TypeError), (lambda: S.bias_score(torch.zeros(3)), ValueError),
    (lambda: S.bias_score(torch.zeros(1, 1, 1, 1, 1)), ValueError), (lambda: S.bias_score(torch.ones(2, 2).bool()), TypeError),
    (lambda: S.bias_score([[0.]]), TypeError), (lambda: S.hiding_score(S.softcap_score(1.)), TypeError), (lambda: S.hiding_score(None), TypeError),
    (lambda: S.chain_scores(M.causal_mask()), TypeError), (lambda: S.chain_scores(S.softcap_score(1.), 3), TypeError),
])
def test_factories_refuse(make, error):
    with pytest.raises(error): make()
