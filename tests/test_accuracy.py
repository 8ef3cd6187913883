"The judge and the bounds of sums, on more than a page has room for."
import math
from fractions import Fraction
from itertools import permutations
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensorplay_attn.accuracy import (WORST, Verdict, bound, confidence, form, gamma, judge, poison, shuffle_factor, smallest, sum_error,
    unit_roundoff)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan


def one(got, want, allowed, dtype=torch.float64):
    return judge(torch.tensor([got], dtype=torch.float64).to(dtype), torch.tensor([want], dtype=torch.float64), allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_units(dtype):
    u, eta = unit_roundoff(dtype), smallest(dtype)
    one_ = torch.ones((), dtype=dtype)
    assert one_ + torch.tensor(2 * u, dtype=dtype) > 1 and one_ + torch.tensor(u, dtype=dtype) == 1  # a tie goes to even
    assert torch.tensor(eta, dtype=dtype) > 0 and torch.tensor(eta / 2, dtype=dtype) == 0


def test_gamma_is_the_exact_constant():
    n, u = 50, Fraction(1, 2**11)
    assert Fraction(gamma(n, float(u))).limit_denominator(10**9) == n * u / (1 - n * u)
    assert gamma(2048, 2.0**-11) == INF


@pytest.mark.parametrize("failure", [0.5, 1e-3, 1e-9, 1e-15])
def test_confidence(failure):
    assert math.isclose(2 * math.exp(-confidence(failure) ** 2 / 2), failure)
    assert 1 < shuffle_factor(failure) < 4


def test_confidence_holds_for_the_largest_roundings():
    torch.manual_seed(0)  # +-1 with random signs is the worst that Hoeffding's inequality allows
    w = torch.rand(30, dtype=torch.float64)
    error = ((torch.rand(200_000, 30) < 0.5).double() * 2 - 1) @ w
    for failure in (0.1, 0.01, 0.001):
        assert (error.abs() > confidence(failure) * w.norm()).double().mean() <= failure


def test_shuffle_factor_holds_for_the_largest_roundings():
    torch.manual_seed(0)  # partial sums that wander and return, each off by +-1 times itself
    n, trials = 64, 100_000
    x = torch.randn(n, dtype=torch.float64)
    x = x - x.mean()
    walks = x[torch.rand(trials, n).argsort(1)].cumsum(1)
    error = (walks * ((torch.rand(trials, n) < 0.5).double() * 2 - 1)).sum(1)
    norm = (n * (x**2).sum() / 6) ** 0.5
    for failure in (0.1, 0.01, 0.001):
        assert (error.abs() > confidence(failure) * shuffle_factor(failure) * norm).double().mean() <= failure


@pytest.mark.parametrize("n", range(1, 7))
def test_partial_sums_over_all_orders(n):
    x = [Fraction(k * k - 5 * k + 1, 3) for k in range(n)]
    total, squares, count, mean = sum(x), sum(t * t for t in x), 0, 0
    for order in permutations(x):
        s, count = 0, count + 1
        for t in order: s += t; mean += s * s
    assert mean / Fraction(count) == (n + 1) * (total**2 / 3 + squares / 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positive", [True, False])
def test_sums_keep_their_bounds(dtype, positive):
    torch.manual_seed(0)
    x = (torch.rand if positive else torch.randn)(300, 100, dtype=torch.float64).to(dtype).double()
    acc = torch.zeros(300, dtype=dtype)
    for t in range(100): acc = acc + x[:, t].to(dtype)
    for f in (form(), form(failure=1e-6), WORST):
        allowed = unit_roundoff(dtype) * bound(f, sum_error(f, 100, x.sum(1), (x**2).sum(1), x.abs().sum(1)))
        verdict = judge(acc, x.sum(1), allowed, dtype)
        assert verdict and verdict.share > (0.05 if f.r == 2 else 0.001)


def test_sum_error_never_exceeds_any_order():
    torch.manual_seed(0)
    x, f = torch.randn(50, 7, dtype=torch.float64), form()
    T, Q, a = x.sum(1), (x**2).sum(1), x.abs().sum(1)
    assert (sum_error(f, 7, T, Q, a) <= 7 * a**2 + Q).all()
    assert (sum_error(f, 7, T, Q, a)**0.5 <= sum_error(WORST, 7, T, Q, a)).all()


SPECIAL = [NAN, INF, -INF, 0.0, 1.0, -1.0, 1e30]


@pytest.mark.parametrize("allowed", [0.0, 1e-3, INF])
@pytest.mark.parametrize("want", SPECIAL)
@pytest.mark.parametrize("got", SPECIAL)
def test_kinds_of_numbers(got, want, allowed):
    same = got == want or (math.isnan(got) and math.isnan(want))
    unbounded = allowed == INF and math.isfinite(got) and math.isfinite(want)
    assert bool(one(got, want, allowed)) == (same or unbounded)


def test_a_bound_of_nan_allows_nothing():
    assert not one(1.0, 1.1, NAN) and one(1.1, 1.1, NAN)


@pytest.mark.parametrize("dtype", HALF)
def test_overflow(dtype):
    largest, u = torch.finfo(dtype).max, unit_roundoff(dtype)
    border = largest + 2.0 ** (math.frexp(largest)[1] - 1) * u
    rounded = lambda x: torch.tensor(x, dtype=torch.float64).to(dtype)  # conversion goes through fp32
    assert rounded(border).isinf() and rounded(border * (1 - 1e-6)) == largest
    slack = largest * u / 4
    for sign in (1, -1):
        assert one(sign * INF, sign * 1.1 * border, slack, dtype) and one(sign * INF, sign * border, 0, dtype)
        assert not one(sign * largest, sign * 1.1 * border, slack, dtype)
        assert one(sign * INF, sign * (border - slack / 2), slack, dtype) and one(sign * largest, sign * largest, slack, dtype)
        assert not one(sign * INF, sign * (border - 2 * slack), slack, dtype) and not one(-sign * INF, sign * 1.1 * border, slack, dtype)


@given(st.floats(-100, 100), st.floats(-1, 1), st.floats(1e-6, 1))
@settings(max_examples=200, deadline=None)
def test_verdict_is_the_inequality(want, off, allowed):
    verdict = one(want + off, want, allowed)
    error = abs((want + off) - want)
    assert verdict.ok == (error / allowed <= 1) and verdict.share == error / allowed and bool(verdict) is verdict.ok


def test_the_worst_element_is_named():
    want = torch.zeros(2, 3, 4, dtype=torch.float64)
    got, allowed = want.clone().float(), torch.ones(1, 3, 1)
    got[1, 2, 3], got[0, 0, 0], allowed[0, 0] = 0.5, 0.4, 0.1
    verdict = judge(got, want, allowed)
    assert verdict.index == (0, 0, 0) and not verdict and math.isclose(verdict.share, 4, rel_tol=1e-6) and verdict.want == 0
    assert math.isclose(verdict.got, 0.4, rel_tol=1e-6) and "(0, 0, 0)" in str(verdict) and verdict.median == 0


def test_shape_dtype_and_kind_come_first():
    z = torch.zeros(2, 1, dtype=torch.float64)
    assert "shape" in judge(torch.zeros(2), z, INF).reason and "shape" in judge(torch.zeros(2, 2), z, INF).reason
    assert "dtype" in judge(torch.zeros(2, 1).half(), z, INF, torch.float32).reason
    assert "tensor" in judge([[0.0], [0.0]], z, INF).reason and not judge([[0.0], [0.0]], z, INF)
    assert isinstance(judge(torch.zeros(0), torch.zeros(0), 1), Verdict)


def test_zero_dimensional():
    assert judge(torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), 0).index == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison(dtype):
    p = poison(2, 3, dtype=dtype)
    assert p.shape == (2, 3) and p.dtype == dtype and p.isnan().all() and not judge(p, torch.zeros(2, 3), INF)
