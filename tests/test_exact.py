"Engines over a finite field: equal integers, faults seen, what is no algebra refused, and Triton's interpreter left as it was."
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from tensorplay_attn import tiled
from tensorplay_attn.engines import ENGINES, MATH, Engine
from tensorplay_attn.evidence import exact as page
from tensorplay_attn.evidence.exact import (FIRST, KERNEL_FAULTS, Field, InField, NoAlgebra, answered, difference, exact, exact_command, kernel_with,
                                            kernels, killed, posed, question, survey, truth, ways, within_reach)
from tensorplay_attn.evidence.mutants import planted

small = torch.float32


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available(): pytest.skip("Triton was imported for the GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


# ---------------------------------------------------------------- the field

@pytest.mark.parametrize("p", [23, 4079, 1048343])
def test_every_value_but_0_is_a_power(p):
    F = Field(p)
    assert F.powers.sort().values.equal(torch.arange(1, p).double())
    assert F.log(F.powers).equal(torch.arange(F.q).double()) and F.log(torch.zeros(1)) == -math.inf


def test_arithmetic_is_that_of_integers_modulo_N():
    F, g = Field(1048343), torch.Generator().manual_seed(1)
    x, y = torch.randint(0, F.N, (2, 200), generator=g).double()
    pairs = list(zip(map(int, x.tolist()), map(int, y.tolist())))
    assert F.mul(x, y).tolist() == [a * b % F.N for a, b in pairs] and F.sub(x, y).tolist() == [(a - b) % F.N for a, b in pairs]
    a, b = torch.randint(0, F.N, (2, 20, 20), generator=g).double()
    want = [[sum(int(m) * int(n) for m, n in zip(row, col)) % F.N for col in b.mT.tolist()] for row in a.tolist()]
    with InField(F): assert (a @ b).tolist() == want and a.sum().item() == sum(map(int, a.flatten().tolist())) % F.N


def test_carriers_hold_every_element():
    for dtype, p in page.FIELDS.items(): assert p * (p - 1) < 2**{torch.float64: 53, torch.float32: 24}[dtype]


@pytest.mark.parametrize("p", [1, 13, 1048341, 2**22 + 15])
def test_other_numbers_are_refused(p):
    with pytest.raises(ValueError, match=f"p={p}"): Field(p)


def test_log2_e_and_ln_2_are_inverse_and_other_constants_unknowns():
    F = Field(4079)
    assert F.mul(F.number(page.LOG2E), F.number(math.log(2))) == 1 and F.number(-3.0) == F.N - 3 and F.number(0.1) == F.number(0.1) != F.number(1.1)
    with InField(F):
        x = torch.tensor([5.0, 7.0], dtype=torch.float64)
        power, e, log, ln = (x * page.LOG2E).exp2(), x.exp(), x.log2() * math.log(2), x.log()
    assert (power % F.p).equal(e) and (log % F.q).equal(ln)


def test_infinities_and_nan_go_the_usual_way():
    with InField(Field(4079)):
        x = torch.tensor([-math.inf, math.nan, 3.0], dtype=torch.float64)
        assert x.exp()[0] == 0 and x.exp()[1].isnan() and (x - 5)[0] == -math.inf and x.sum().isnan() and x.amax().isnan()
        assert (torch.zeros(1, 3, dtype=torch.float64) @ x[:, None]).isnan().all()


@pytest.mark.parametrize("f", [torch.tanh, torch.sin, torch.sqrt, lambda x: x.cumsum(0), lambda x: x.long()])
def test_what_is_no_algebra_is_refused(f):
    with InField(Field(4079)), pytest.raises(NoAlgebra): f(torch.ones(3, dtype=torch.float64))


def test_sums_that_floats_cannot_hold_are_refused():
    x = torch.ones(1, 2**14, dtype=torch.float64)
    with InField(Field(1048343)), pytest.raises(ValueError, match="16384 products"): x @ x.mT


def test_memory_without_values_is_nan():
    with InField(Field(4079)):
        assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
        assert torch.empty(2, dtype=torch.int64).shape == (2,)


# ---------------------------------------------------------------- engines

@pytest.mark.parametrize("way", list(ways()))
def test_the_tiled_engine_equals_the_reference(way):
    assert survey(ways()[way], range(100, 150)) == (50, {})


@pytest.mark.parametrize("name, seeds", [("flash", range(100, 106)), ("efficient", range(100, 104)), ("omni", (99, 109))])
def test_kernels_equal_the_reference(name, seeds, interpreted):
    asked, differing = survey(kernels(ENGINES[name]), seeds, small)
    assert asked and not differing


def test_questions_turn_every_knob():
    asked = [question(seed) for seed in range(60)]
    for knob in ("is_causal", "dropout_p"): assert {bool(q.knobs[knob]) for q in asked} == {True, False}
    for knob in ("sinks", "kv_lengths"): assert {q.knobs[knob] is None for q in asked} == {True, False}
    masks = [q.tensors[3] for q in asked]
    assert {None if m is None else m.dtype for m in masks} == {None, torch.bool, torch.float64}
    assert any((truth(q) or {}).get("lse", torch.zeros(1)).min() == -math.inf for q in asked), "a row that sees nothing"


def test_draws_share_a_structure():
    a, b = question(3), question(3, draw=1)
    shapes = lambda q: [None if t is None else t.shape for t in q.tensors]
    plain = lambda q: {n: x for n, x in q.knobs.items() if not isinstance(x, torch.Tensor)}
    assert not a.tensors[0].equal(b.tensors[0]) and shapes(a) == shapes(b) and plain(a) == plain(b)


# ---------------------------------------------------------------- faults

def test_a_difference_names_the_first_element():
    def forward(problem):
        out, lse, top = MATH.forward(problem)
        out[0, 0, 0, 0] += 1
        return out, lse, top
    seed = next(s for s in range(60) if question(s).mask_mod is None and question(s).d_lse is None)
    found = exact(MATH._replace(forward=forward), seed)
    assert (found.what, found.index, found.count) == ("out", (0, 0, 0, 0), 1) and (found.got - found.want) % Field(1048343).p == 1


def test_a_missing_gradient_differs():
    q = next(question(seed) for seed in range(60) if question(seed).knobs["sinks"] is not None and truth(question(seed)))
    got = answered(MATH, posed(q), q) if q.mask_mod is None else dict(truth(q))
    del got["dsinks"]
    assert difference(got, truth(q)).what == "dsinks"


def test_every_fault_of_the_list_is_one_of_todays():
    assert FIRST.keys() <= {m.name for m in within_reach()} and len(FIRST) >= 40
    for m in KERNEL_FAULTS: planted(m, m.file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["acc not rescaled", "window one short", "dq without scale", "bits by tile"])
def test_faults_are_seen(name):
    mutant = next(m for m in within_reach() if m.name == name)
    assert killed(mutant, [FIRST[name]])


@pytest.mark.parametrize("fault", KERNEL_FAULTS[::3], ids=lambda m: m.name)
def test_faults_in_kernels_are_seen(fault, interpreted):
    with kernel_with(fault) as engine: assert exact(engine, int(fault.case), small)


def test_rounding_is_not_seen():
    half = Engine("half", lambda problem: tuple(x.half().double() for x in MATH.forward(problem)), MATH.backward, lambda problem: [])
    assert survey(half, range(4)) == (4, {})


def test_a_softcap_is_refused():
    with pytest.raises(NoAlgebra, match="tanh"): answered(MATH, replace(posed(question(0)), softcap=2.0), question(0))


# ---------------------------------------------------------------- around

def test_nothing_stays_changed(interpreted):
    from triton.runtime import interpreter
    now = lambda: (dict(vars(interpreter.InterpreterBuilder)), interpreter.ReduceOps.sum, tiled.walk_forward, tiled.fused_plan)
    before = now()
    exact(kernels(ENGINES["flash"]), next(s for s in range(60) if not ENGINES["flash"].reasons(posed(question(s, small)))), small)
    for engine in ways().values(): exact(engine, 1)
    assert now() == before


def test_the_command():
    ask = lambda *words: CliRunner().invoke(exact_command, words)
    good = ask("--engine", "walk", "--problems", "3")
    assert good.exit_code == 0 and "3 questions, 0 answers differ" in good.output
    with patch.object(tiled, "_is_linear", lambda problem: False), patch.object(tiled, "finish", lambda m, l, acc: (acc, m)):
        bad = ask("--engine", "tiled", "--problems", "3", "--first", "1")
    assert bad.exit_code == 1 and "question 1: out[" in bad.output
    assert ask("--engine", "nobody").exit_code == 2


def test_kernels_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answer = CliRunner().invoke(exact_command, ["--engine", "flash"])
    assert answer.exit_code == 1 and "TRITON_INTERPRET=1" in answer.output
