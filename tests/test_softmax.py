"The online state and its merge: wide grids of what the page shows once."
import itertools
import warnings

import pytest
import torch

from tensorplay_attn.softmax import add_sink, empty_state, finish, merge_states, online_update, share

INF, NAN = torch.inf, torch.nan
LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
ENDS = [-INF, LOWEST, -1000.0, 0.0, 3.5, 1000.0, HIGHEST, INF, NAN]


def run(s, v, cuts, dtype=None):
    "The state after the tiles between the cuts."
    state = empty_state(s.shape[:-1], v.shape[-1], dtype or s.dtype)
    for i, j in itertools.pairwise((0, *cuts, s.shape[-1])):
        state = online_update(*state, s[..., i:j], v[..., i:j, :])
    return state


def truth(s, v):
    s, v = s.double(), v.double()
    return s.softmax(-1) @ v, s.logsumexp(-1)


def bound(s, v, tiles, dtype):
    "Worst case of the online row: numerator and denominator of n terms, exponents, rescalings, one division; lse likewise."
    u, n = torch.finfo(dtype).eps / 2, s.shape[-1]
    finite = s.double().masked_fill(~s.isfinite(), 0)
    rel = (2 * (n + finite.abs().max() * 2 + 2 + 2 * tiles) + 1) * u
    return rel * v.double().abs().max(), rel + finite.abs().max() * 2 * u


def same(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_any_tiling(seed, dtype):
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(2, 3, 5, 40, generator=g, dtype=torch.float64).mul(6).to(dtype)
    s[torch.rand(s.shape, generator=g) < 0.3] = -INF
    s[0, 0, 2] = -INF
    s[..., 0, 0] = 1.0
    v = torch.randn(2, 3, 40, 7, generator=g, dtype=torch.float64).to(dtype)
    cuts = sorted(torch.randint(0, 41, (seed,), generator=g).tolist())  # empty tiles among them
    out, lse = finish(*run(s, v, cuts))
    want_out, want_lse = truth(s, v)
    dead = (s == -INF).all(-1)
    out_bound, lse_bound = bound(s, v, len(cuts) + 1, dtype)
    assert dead.any() and (out[dead] == 0).all() and (lse[dead] == -INF).all()
    assert ((out - want_out).abs() <= out_bound)[~dead].all()
    assert ((lse - want_lse).abs() <= lse_bound)[~dead].all()
    assert out.dtype == lse.dtype == dtype


@pytest.mark.parametrize("seed", range(6))
def test_any_merge_tree(seed):
    "Random trees over random splits give the answer over all keys."
    g = torch.Generator().manual_seed(seed)
    s, v = torch.randn(4, 30, generator=g) * 5, torch.randn(30, 3, generator=g)
    keys, parts = torch.randperm(30, generator=g), []
    for part in keys.split(1 + seed): parts.append(finish(*run(s[:, part], v[part], ())))
    tiles = len(parts)
    while len(parts) > 1:
        a = parts.pop(int(torch.randint(len(parts), (), generator=g)))
        b = parts.pop(int(torch.randint(len(parts), (), generator=g)))
        parts.append(merge_states(*a, *b))
    (out, lse), (want_out, want_lse) = parts[0], truth(s, v)
    out_bound, lse_bound = bound(s, v, 8 * tiles, torch.float32)  # a merge rounds: difference, sigmoid, product, sum, lse
    assert (out - want_out).abs().max() <= out_bound and (lse - want_lse).abs().max() <= lse_bound


@pytest.mark.parametrize("a,b", [*itertools.product(ENDS, ENDS)])
def test_share_at_the_ends(a, b):
    got = share(torch.tensor(a), torch.tensor(b)).item()
    if a != a or b != b: assert got != got
    elif a == b: assert got == 0.5
    elif max(a, b) == INF or min(a, b) == -INF: assert got == float(a > b)
    else: assert abs(got - torch.tensor(a - b, dtype=torch.float64).sigmoid().item()) <= 2**-22


def test_share_does_not_lose_digits_with_size():
    "The relative error of a weight does not grow with lse."
    base = torch.arange(-2000.0, 2000.0, 8)
    a, b = base + 0.5, base - 0.25
    want = (a.double() - b.double()).sigmoid()
    assert ((share(a, b) - want).abs() <= 4 * 2**-24 * want).all()
    assert (((a - torch.logaddexp(a, b)).exp() - want).abs() > 64 * 2**-24 * want).any(), "the direct way does"


@pytest.mark.parametrize("lse", ENDS)
def test_empty_answer_is_the_identity(lse):
    out = torch.tensor([[0.0, -1.5, 1e30]]) * (0 if lse == -INF else 1)
    if lse != lse: out = out * NAN
    a, e = (out, torch.tensor([lse])), (torch.zeros(1, 3), torch.tensor([-INF]))
    for got in (merge_states(*a, *e), merge_states(*e, *a)): same(got, a)


@pytest.mark.parametrize("a,b", [*itertools.product(ENDS[:-1], ENDS[:-1])])
def test_merge_invents_no_nan(a, b):
    out_a, out_b = torch.full((1, 2), 0.0 if a == -INF else 2.0), torch.full((1, 2), 0.0 if b == -INF else -4.0)
    out, lse = merge_states(out_a, torch.tensor([a]), out_b, torch.tensor([b]))
    assert not out.isnan().any() and not lse.isnan().any()
    assert min(out_a[0, 0], out_b[0, 0]) <= out[0, 0] <= max(out_a[0, 0], out_b[0, 0])
    assert lse.item() >= max(a, b)


@pytest.mark.parametrize("lse,sink", [*itertools.product(ENDS, ENDS)])
def test_sink_at_the_ends(lse, sink):
    out = torch.tensor([[NAN if lse != lse else 0.0 if lse == -INF else 3.0]])
    got, new = add_sink(out, torch.tensor([lse]), torch.tensor([sink]))
    if lse != lse or sink != sink: assert got.isnan().all() and new.isnan().all()
    else:
        assert not got.isnan().any() and not new.isnan().any()
        assert new.item() >= max(lse, sink)
        if sink == -INF: assert got.item() == out.item() and new.item() == lse
        if sink == INF: assert new.item() == INF and (got.item() == 0 or lse == INF)
        if lse == -INF: assert got.item() == 0 and new.item() == sink


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_sink_is_one_more_key(dtype):
    torch.manual_seed(0)
    s, v, sink = torch.randn(2, 4, 5, 9), torch.randn(2, 4, 9, 3), torch.randn(4).to(dtype)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    s, v = s.to(state), v.to(state)
    out, lse = add_sink(*finish(*run(s, v, (4,))), sink[:, None])
    more = torch.cat((s, sink.to(state)[:, None, None].expand(2, 4, 5, 1)), -1)
    zero = torch.cat((v, torch.zeros_like(v[..., :1, :])), -2)
    out_bound, lse_bound = bound(more, v, 4, state)
    want_out, want_lse = truth(more, zero)
    assert (out - want_out).abs().max() <= out_bound and (lse - want_lse).abs().max() <= lse_bound
    assert out.dtype == lse.dtype == state


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 3, 4, 5, 6, 7)])
def test_a_broken_score_reaches_its_row_only(bad, at, cuts):
    torch.manual_seed(0)
    s, v = torch.randn(3, 8), torch.randn(8, 2)
    clean = finish(*run(s, v, cuts))
    s[1, at] = bad
    out, lse = finish(*run(s, v, cuts))
    assert out[1].isnan().all()
    same(lse[1], torch.tensor(bad))
    for row in (0, 2): same((out[row], lse[row]), (clean[0][row], clean[1][row]))
    merged, _ = merge_states(out, lse, *clean)
    assert merged[1].isnan().all() and merged[::2].isfinite().all()


def test_nan_value_reaches_out():
    v = torch.ones(4, 2)
    v[2, 1] = NAN
    out, lse = finish(*run(torch.zeros(1, 4), v, (2,)))
    assert out[0, 0] == 1 and out[0, 1].isnan() and lse.isfinite()


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 3, 4)])
@pytest.mark.parametrize("score", [LOWEST, -1e38, 1e38, HIGHEST])
def test_huge_finite_scores_are_scores(score, cuts):
    "A row of equal scores is a mean, however large or small they are; masked keys stay out of it."
    s, v = torch.full((2, 5), score), torch.tensor([[1.0], [2.0], [3.0], [4.0], [10.0]])
    s[1, ::2] = -INF
    out, lse = finish(*run(s, v, cuts))
    same(out[:, 0], torch.tensor([4.0, 3.0]))
    same(lse, torch.tensor([score, score]))


def test_the_sink_does_not_decide_the_dtype():
    out, lse = add_sink(torch.ones(2, 3), torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert out.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    state = run(torch.randn(2, 6).to(dtype), torch.randn(6, 3).to(dtype), (2,), torch.float32)
    assert {x.dtype for x in state} == {torch.float32}
    out, lse = finish(*state)
    for merged in (merge_states(out.to(dtype), lse, out.to(dtype), lse), add_sink(out.to(dtype), lse, lse[:1].to(dtype))):
        assert merged[0].dtype == dtype and merged[1].dtype == torch.float32


def test_half_answers_are_rounded_once():
    torch.manual_seed(0)
    (a, b), (x, y) = torch.randn(2, 50, 8).half(), torch.randn(2, 50)
    out, lse = merge_states(a, x, b, y)
    assert torch.equal(out, merge_states(a.float(), x, b.float(), y)[0].half())


def test_broadcasting():
    "Values shared by a group of heads, and one sink a head."
    torch.manual_seed(0)
    s, v = torch.randn(2, 2, 3, 4, 10), torch.randn(2, 2, 1, 10, 5)  # (B, Hkv, G, L, S), (B, Hkv, 1, S, Ev)
    out, lse = finish(*run(s, v, (3,)))
    want = finish(*run(s, v.expand(2, 2, 3, 10, 5), (3,)))
    same((out, lse), want)
    sink = torch.randn(6).view(2, 3, 1)
    same(add_sink(out, lse, sink), add_sink(out, lse, sink.expand_as(lse)))


def test_pure_and_silent():
    torch.manual_seed(0)
    s, v = torch.randn(3, 8), torch.randn(8, 2)
    s[1] = -INF
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = run(s, v, (3,))
        args = [x.clone() for x in (*state, s, v)]
        out, lse = finish(*online_update(*args))
        for x, y in zip(args, (*state, s, v)): same(x, y)
        kept = out.clone(), lse.clone()
        merge_states(out, lse, out, lse), add_sink(out, lse, lse)
        same((out, lse), kept)


@pytest.mark.parametrize("rows,n,Ev", [((0,), 4, 2), ((2, 0), 4, 2), ((3,), 0, 2), ((3,), 4, 0)])
def test_nothing(rows, n, Ev):
    out, lse = finish(*run(torch.zeros(*rows, n), torch.zeros(n, Ev), ()))
    assert out.shape == (*rows, Ev) and lse.shape == rows
    assert n > 0 or ((out == 0).all() and (lse == -INF).all())
