"Wrong calls, one test a row; and what the page does not show: that the judge notices, that gradients change nothing, that nothing is left behind."
import sys
from collections import Counter

import pytest
import torch

from tensorplay_attn.evidence import refusals as R
from tensorplay_attn.routing import permitted_backends


def named(r): return f"{r.door}: {r.name}"


@pytest.mark.parametrize("refusal", R.REFUSALS, ids=named)
def test_refused(refusal):
    row = R.check_refusal(refusal)
    assert row.faults == (), f"{row.error}: {row.message}"


@pytest.mark.parametrize("backend", R.BACKENDS)
@pytest.mark.parametrize("door", R.DOORS)
def test_good_calls_work(door, backend):
    "So a row is refused for its mistake, under every backend, and for nothing else. One backend has no packed sequences, and says so."
    said = R.attempt(R.Refusal("nothing", door, dict, ValueError, ()), backend)
    if door in (R.VARLEN, R.VARLEN_OUT) and backend == R.SDPBackend.EFFICIENT_ATTENTION:
        assert said.error == "RuntimeError" and "EFFICIENT_ATTENTION has no attention of packed sequences" in said.message
    else: assert said[:2] == ("", "")


def test_rows_say_what_they_ask_for():
    assert len(R.REFUSALS) >= 60 and max(Counter(map(named, R.REFUSALS)).values()) == 1
    assert {r.error for r in R.REFUSALS} == {TypeError, ValueError, RuntimeError, IndexError, AttributeError}
    for r in R.REFUSALS:
        assert r.words and all(r.words) and len(r.changes()) >= 1, named(r)
        if r.door == R.SDPA: assert any(n in w for n in r.changes() for w in r.words), f"{named(r)}: no argument of {r.words}"
        if r.error is ValueError and r.door in (R.SDPA, R.PROBLEM) and "beyond any float" not in r.name:
            assert any(c in w for w in r.words for c in "=('") or "device" in "".join(r.words), f"{named(r)}: no value in {r.words}"


def wanting(x):
    "The same argument, with a gradient asked for where there can be one."
    fit = isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout == torch.strided and not x.is_nested and x.dtype.itemsize > 1
    return x.requires_grad_() if fit else x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_change_nothing(mode):
    for r in R.REFUSALS:
        if r.door not in (R.SDPA, R.PROBLEM): continue
        with mode():
            arguments = {n: wanting(x) for n, x in r.arguments().items()}
            with pytest.raises(r.error) as e: R.DOORS[r.door].function(**arguments)
        assert type(e.value) is r.error and all(w in str(e.value) for w in r.words), f"{named(r)}: {e.value}"


def test_nothing_is_left_behind():
    "Neither in torch's generator, nor in what may run, nor in the row's own arguments."
    before, permitted = torch.get_rng_state(), permitted_backends()
    for r in R.REFUSALS: R.attempt(r)
    assert torch.equal(torch.get_rng_state(), before) and permitted_backends() == permitted


@pytest.mark.parametrize("name", ["head sizes differ", "mask is integer", "alignment is a number"])
def test_compiled_calls_are_refused_alike(name):
    r = next(r for r in R.REFUSALS if r.door == R.SDPA and r.name == name)
    torch._dynamo.reset()
    with pytest.raises(r.error) as e: torch.compile(lambda kwargs: R.DOORS[r.door].function(**kwargs), backend="eager")(r.arguments())
    assert all(w in str(e.value) for w in r.words)


# ---------------------------------------------------------------- the judge

def bad(x, raises=ValueError, text="x must be positive: x=-1", before=lambda x: None):
    "A door with a fault of choice."
    before(x)
    if raises: raise raises(text)


def under_math(x):
    "Another error under one backend."
    raise ValueError(f"x must be positive: x=-1, {permitted_backends()[0].name}")


def compute(x): x * 2


def draw(x): torch.rand(2)


def write(x): x.add_(1)


def stack(x): torch.cat([x, x])


@pytest.mark.parametrize("kwargs, fault", [
    ({}, None), (dict(raises=None), "nothing instead of ValueError"), (dict(raises=TypeError), "TypeError instead of ValueError"),
    (dict(text="bad input"), "does not say x=-1"), (dict(before=compute), "work was done: aten.mul"), (dict(before=draw), "work was done: aten.rand"),
    (dict(before=stack), "work was done: aten.cat"), (dict(before=write), "changed: x"), (dict(before=lambda x: x[:1].expand(3).shape), None)])
def test_the_judge_notices(monkeypatch, kwargs, fault):
    monkeypatch.setitem(R.DOORS, "trial", R.Door(lambda x: bad(x, **kwargs), lambda: dict(x=R.floats(1))))
    faults = R.check_refusal(R.Refusal("trial", "trial", dict, ValueError, ("x=-1",))).faults
    assert fault in "; ".join(faults) if fault else faults == ()


def test_the_judge_notices_a_subclass_and_a_difference(monkeypatch):
    monkeypatch.setitem(R.DOORS, "trial", R.Door(under_math, lambda: dict(x=R.floats(1))))
    assert "another error under MATH" in R.check_refusal(R.Refusal("trial", "trial", dict, ValueError, ("x=-1",))).faults[0]
    monkeypatch.setitem(R.DOORS, "trial", R.Door(lambda x: bad(x, raises=UnicodeError), lambda: dict(x=R.floats(1))))
    assert R.check_refusal(R.Refusal("trial", "trial", dict, ValueError, ("x=-1",))).faults[0] == "UnicodeError instead of ValueError"


# ---------------------------------------------------------------- unusual calls

@pytest.fixture(scope="module")
def strange(): return {name: (said, fault) for name, said, fault in R.run_strange()}


@pytest.mark.parametrize("name", [s.name for s in R.STRANGE])
def test_unusual_calls_end_well(strange, name):
    said, fault = strange[name]
    assert fault == "", said


def test_a_crash_names_its_call(tmp_path, monkeypatch):
    source = ("import os\nfrom tensorplay_attn.evidence import refusals as R\n"
              "R.STRANGE[:] = [R.Strange('lives', dict), R.Strange('dies', os.abort), R.Strange('never', dict)]\ntell_strange = R.tell_strange\n")
    (tmp_path / "deadly.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (name, said, fault), *more = R.run_strange("deadly")
    assert (name, fault) == ("lives", "") and len(more) == 1 and more[0][0] == "dies" and "-6" in more[0][1] and more[0][2]
