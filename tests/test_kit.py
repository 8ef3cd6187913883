"The kit: what is declared, what can be seen again, what pytest is given."
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import tensorplay_attn.evidence as evidence
from tensorplay_attn.evidence import SUITE_VERSION, conformance_tests, find, reproduce
from tensorplay_attn.evidence import conformance as judge
from tensorplay_attn.evidence.cases import Cannot, make_call
from tensorplay_attn.evidence.cli import main
from tensorplay_attn.evidence.kit import chosen
from tensorplay_attn.evidence.report import to_html
from tensorplay_attn.evidence.suites import SUITES, select, suite

STRANGER = '''
import random
import torch
import torch.nn.functional as F
from tensorplay_attn.functional import scaled_dot_product_attention as ours

def right(query, key, value, attn_mask=None, is_causal=False, window_size=(-1, -1), sinks=None, return_aux=None):
    return ours(query, key, value, attn_mask, is_causal=is_causal, window_size=window_size, sinks=sinks, return_aux=return_aux)

def short_window(query, key, value, is_causal=False, window_size=(-1, -1)):
    left, right = window_size
    return ours(query, key, value, is_causal=is_causal, window_size=(left - 1 if left > 0 else left, right))

def half_bias(query, key, value, attn_mask=None, is_causal=False):
    if attn_mask is not None and attn_mask.requires_grad: attn_mask = (attn_mask + attn_mask.detach()) / 2
    return ours(query, key, value, attn_mask, is_causal=is_causal)

def base_two(query, key, value, is_causal=False, return_lse=False):
    out, aux = ours(query, key, value, is_causal=is_causal, return_aux=evidence_aux(lse=True))
    return (out, aux.lse / 0.6931471805599453) if return_lse else out

def forgets_lse(query, key, value, is_causal=False, return_aux=None):
    answer = ours(query, key, value, is_causal=is_causal, return_aux=return_aux)
    return answer if return_aux is None else (answer[0], answer[1]._replace(lse=answer[1].lse + 0.25 * (answer[1].lse - answer[1].lse.detach())))

def double(query, key, value, is_causal=False):
    return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=is_causal)

def no_gradient(query, key, value, is_causal=False): return ours(query.detach(), key, value, is_causal=is_causal)
def raises(query, key, value, is_causal=False): raise IndexError("tile 7 of 7")
def restless(query, key, value, is_causal=False): return ours(query, key, value, is_causal=is_causal) + random.random() * 1e-3

from tensorplay_attn.functional import AuxRequest as evidence_aux
class Kernels: causal = staticmethod(lambda query, key, value, is_causal=False: ours(query, key, value, is_causal=not is_causal))
'''
FAULTS = {  # function: the cases in which it is wrong, and what its lines hold
    "short_window": ("R2/window-left-3*forward", "window_size=(", "case.compare(\"out\""),
    "half_bias": ("faults/pytorch#148476/*", "attn_mask=case.inputs[\"attn_mask\"]", "case.compare(\"dbias\", dbias)"),
    "base_two": ("R12/float*forward", "return_lse=True", "case.compare(\"lse\", lse)"),
    "forgets_lse": ("R12/*d_lse*backward", "[out, aux.lse]", "case.d_lse]"),
    "double": ("R3/*", "case.compare(\"out\", out)"),
    "no_gradient": ("R3/*backward", "case.check(attention)"),
    "raises": ("R3/*", "case.check(attention)"),
    "restless": ("R17/*", "case.check(attention)"),
    "Kernels.causal": ("R3/*", "attention = Kernels.causal", "is_causal="),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "Somebody's module, to be imported from where one stands."
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("stranger", None)
    yield tmp_path
    sys.modules.pop("stranger", None)


def failures(name, glob, **words):
    column = judge.impl_column(find(name), origin=name, **words)
    return judge.run(select([c for n in ("contract", "faults") for c in suite(n)], (glob,)), [column]).failures


# ---------------------------------------------------------------- a failure, alone

DRIVER = """
import contextlib, io, json, runpy, sys
for name in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()):
        try: said = runpy.run_path(name) and None
        except Exception as e: said = f"{type(e).__name__}: {e}"
    print(json.dumps([name, said]))
"""


def test_lines_fail_alone_and_pass_when_it_is_right(folder):
    "Every kind of lines, as programs in another process; then the same cases with a right function."
    records = {}
    for name, (glob, *holds) in FAULTS.items():
        found = failures(f"stranger:{name}", glob)
        assert found and all(h in found[0].snippet for h in holds), (name, found[:1])
        records[name] = min(found, key=lambda r: r.size)
        assert len(records[name].snippet.splitlines()) <= 11
    for name, record in records.items():
        (folder / f"{name}.py").write_text(record.snippet)
        if name not in ("base_two", "Kernels.causal"):  # what is right returns no lse so, and is in no class
            (folder / f"{name}.right.py").write_text(re.sub(r"from stranger import .*", "from stranger import right as attention", record.snippet))
    names = [p.name for p in folder.glob("*.py") if p.name != "stranger.py"]
    done = subprocess.run([sys.executable, "-c", DRIVER, *names], cwd=folder, capture_output=True, text=True, timeout=300)
    said = dict(map(json.loads, done.stdout.splitlines()))
    assert len(said) == 2 * len(FAULTS) - 2, done.stderr
    assert {n: x for n, x in said.items() if n.endswith(".right.py") and x is not None} == {}
    for name, record in records.items():
        words = f"{record.what}: {record.message}" if record.what not in ("call", "out") or "got" in record.message else record.message
        assert words in said[f"{name}.py"] or "bits differ" in words and "bits differ" in said[f"{name}.py"], (record, said[f"{name}.py"])


def test_printed_lines_are_programs(folder):
    "What `verify` prints, saved and run."
    shown = CliRunner().invoke(main, ["verify", "--impl", "stranger.py:short_window", "--no-torch", "--in-process", "--suite", "contract", "--case",
                                      "R2/window-left-3*forward"])
    assert shown.exit_code == 1, shown.output
    (text, *_) = re.findall(r"^# out: got .*?\n\n.*?compare\(.*?\n", shown.output, re.M | re.S)
    (folder / "alone.py").write_text(text)
    done = subprocess.run([sys.executable, "alone.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip().endswith(f"AssertionError: {re.match(r'# (.*)', text)[1]}"), done.stderr


def test_a_case_by_its_id():
    case = reproduce("R3/default/causal/L5-S9/float32/backward")
    query, key, value = case.tensors
    assert query.requires_grad and key.shape[-2] == 9 and set(case.wanted) == {"out", "lse", "max_scores", "dq", "dk", "dv"}
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    case.compare("out", out)
    with pytest.raises(AssertionError, match=r"^out: got .* right .* allowed .* at \("): case.compare("out", out * 1.01)
    with pytest.raises(ValueError, match="--list"): reproduce("R3/nothing")
    with pytest.raises(Cannot, match="has no word for is_causal"): case.check(lambda query, key, value: query)
    case.check(judge.engine_column("math"))
    reproduce("errors/query-is-integer").check(judge.engine_column("math"))


def test_the_report_and_the_machine_have_the_lines(folder):
    column = judge.impl_column(find("stranger:short_window"), origin="stranger:short_window", unsupported={"float64": "sums are single"})
    results = judge.run(select(suite("contract"), ("R2/window-left-3*forward",)), [column])
    report, page = json.loads(judge.to_json(results)), to_html(results)
    assert report["versions"]["suites"] == SUITE_VERSION and report["columns"][0]["unsupported"] == {"float64": "sums are single"}
    assert f"suites {SUITE_VERSION}" in page and page.count("case = reproduce(") == len(results.failures)
    assert all("snippet" in r for r in report["records"])


# ---------------------------------------------------------------- what is declared

CALLS = {  # declaration: calls that it is about, calls that it is not about
    "sinks": (dict(sinks=torch.float32), {}), "float64": (dict(dtype=torch.float64), {}), "gradients": ({}, None),
    "dbias": (dict(mask="bias:L,S"), dict(mask="bool:L,S")), "dq": ({}, None), "cuda": (None, {}),
    "E > 64": (dict(E=65, L=1), dict(E=64)), "E % 16": (dict(E=24), dict(E=32)), "L != S": (dict(L=5, S=7), dict(L=5, S=5)),
    "H != Hkv": (dict(H=4, Hkv=2), dict(H=4)), "S == 0": (dict(S=0), dict(S=1)), "rank>=5": (None, {}), "lse": (dict(d_lse=True), {}),
    "R14": (None, {}), "R14/*": (None, {}), "B<=2": (dict(B=2), dict(B=3)), "score_mod": (dict(score="alibi"), {})}


@pytest.mark.parametrize("what", CALLS)
def test_what_a_declaration_is_about(what):
    concerns, (yes, no) = judge.concerns(what), CALLS[what]
    call = lambda words: replace(make_call("declared"), d_out=None) if words is None else make_call("declared", **words)
    if yes is not None: assert concerns(call(yes), "cpu")
    assert not concerns(call(no), "cpu")
    if what == "cuda": assert concerns(call({}), "cuda:0")


def test_declarations_are_checked():
    assert judge.declared({torch.bfloat16: "none"}) == {"bfloat16": "none"} and judge.declared(None) == {}
    for wrong in {"sink": "a slip"}, {"E": "no size"}, {"E = 4": "one sign"}, {"sinks": ""}, {"sinks": None}, {"random": "no dtype"}:
        with pytest.raises(ValueError, match="unsupported="): judge.declared(wrong)
    with pytest.raises(ValueError, match="unsupported="): conformance_tests(lambda q, k, v: q, rows="R3", unsupported={"sink": "a slip"})


@pytest.mark.parametrize("what", ["is_causal", "float32", "gradients", "dq", "E == 8", "cpu", "R3", "R3/*"])
def test_what_is_unsupported_is_never_passed(what):
    "Although the function has the word and would be right."
    column = judge.impl_column(torch.nn.functional.scaled_dot_product_attention, unsupported={what: "because"})
    cases = select(suite("contract"), ("R3/*causal*backward",))
    records = judge.run(cases, [column]).records
    asked = [r for c, r in zip(cases, records, strict=True) if what != "is_causal" or c.make().words.get("is_causal")]
    assert asked and {(r.status, r.message) for r in asked} == {("cannot", f"declared unsupported: {what}, because")}


def test_every_case_can_be_declared(folder):
    "Whatever a case does beside calling: a declaration of all is a cannot in all."
    rows = {c.row for c in suite("contract")} - {"errors"}
    column = judge.impl_column(find("stranger:right"), unsupported=dict.fromkeys([*rows, "errors/*"], "no"))
    assert {r.status for r in judge.run(suite("contract", quick=True), [column]).records} == {"cannot"}


def test_aux_that_is_unsupported_is_not_asked(folder):
    def attention(query, key, value, is_causal=False, return_aux=None):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        assert return_aux is None
        return out
    attention.unsupported = {"lse": "later", "max_scores": "later"}
    results = judge.run(select(suite("contract"), ("R3/*", "R12/*causal*")), [judge.impl_column(attention)])
    assert not results.failures and results.of(status="pass") and any("lse, later" in r.message for r in results.of(status="cannot"))


def test_declared_by_attribute_and_by_option(folder):
    with open(folder / "stranger.py", "a") as f: f.write("right.unsupported = {'sinks': 'not written yet'}\n")
    options = "--no-torch", "--suite", "contract", "--case", "R13/*", "--case", "R3/*", "--unsupported", "gradients: forward only"
    done = CliRunner().invoke(main, ["verify", "--impl", "stranger.py:right", *options])
    said = done.output.replace("\n", " ")
    assert done.exit_code == 0 and "declared unsupported: sinks, not written yet" in said and "gradients, forward only" in said
    assert CliRunner().invoke(main, ["verify", *options]).exit_code == 2
    few = CliRunner().invoke(main, ["verify", "--list", "--forward-only", "--suite", "contract"]).output.split()
    assert few and not [i for i in few if i.endswith("/backward")]


# ---------------------------------------------------------------- in pytest

TESTS = '''
from stranger import half_bias, right, short_window
from tensorplay_attn.evidence import conformance_tests

test_right = conformance_tests(right, rows=("R3", "R13/plain*", "R6"), quick=True, unsupported={"float64": "sums are single"})
test_window = conformance_tests(short_window, rows="R2/window-left-3*", backward=False)
test_apart = conformance_tests("stranger.py:right", rows="R3/*causal*")
'''


def test_pytest_gets_readable_items(folder):
    (folder / "test_mine.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rs", "--color=no", "test_mine.py"], cwd=folder,
                          capture_output=True, text=True, timeout=240)
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert re.search(r"^test_mine.py::test_right\[R3/default/causal/\S+/backward\] PASSED", said, re.M)
    assert re.search(r"^test_mine.py::test_apart\[R3/default/causal/\S+/forward\] PASSED", said, re.M)
    assert re.search(r"^test_mine.py::test_window\[R2/window-left-3\S+/forward\] FAILED", said, re.M)
    assert "test_right" not in said[said.index("FAILURES"):]
    assert re.search(r"out: got \S+, right \S+, allowed \S+ at \(", said) and "from stranger import short_window as attention" in said
    assert "/backward" not in "".join(line for line in said.splitlines() if "test_window" in line)


def test_wrong_rows_and_a_world_without_pytest(monkeypatch):
    with pytest.raises(ValueError, match="--list"): conformance_tests(lambda q, k, v: q, rows="R99")
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pytest"): conformance_tests(lambda q, k, v: q, rows="R3")


def test_quick_has_every_row():
    cases, quick = chosen(), chosen(quick=True)
    assert {c.row for c in cases} == {c.row for c in quick} and len(quick) < len(cases) / 3
    assert not [c for c in chosen("R3", backward=False) if c.id.endswith("/backward")]


# ---------------------------------------------------------------- the public names

def test_public_names():
    names = {"conformance_tests", "reproduce", "find", "SUITE_VERSION"}
    assert names <= {*dir(evidence)} and all(getattr(evidence, n) for n in names) and not hasattr(evidence, "nothing")
    done = subprocess.run([sys.executable, "-c", "import sys, tensorplay_attn.evidence; print('torch' in sys.modules, 'pytest' in sys.modules)"],
                          capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1] == "False", done.stderr


def test_the_version_changes_with_the_cases(monkeypatch):
    assert re.fullmatch(r"\d+\.[0-9a-f]{8}", SUITE_VERSION) and SUITE_VERSION == judge.suite_version()
    judge.suite_version.cache_clear()
    monkeypatch.setitem(SUITES, "faults", lambda: [])
    assert judge.suite_version() != SUITE_VERSION
    judge.suite_version.cache_clear()
