"Adapters that translate and do not correct, a command that survives whoever it asks, a record that is whole."
import json
import os
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tensorplay_attn.evidence import conformance as judge, peers
from tensorplay_attn.evidence.cases import make_call
from tensorplay_attn.functional import scaled_dot_product_attention as ours
from tensorplay_attn.problem import everything, make_problem, visible

ROOT = Path(__file__).parents[1]
KEPT = json.loads((ROOT / "nbs/peers.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- adapters

ONNX = [dict(), dict(is_causal=True), dict(is_causal=True, alignment="lower_right"), dict(window_size=(2, 1)),
        dict(window_size=(2, 1), alignment="lower_right"), dict(softcap=1.5), dict(scale=0.3), dict(mask="bool:B,H,L,S"), dict(mask="bias:L,S"),
        dict(is_causal=True, mask="bias:L,S", softcap=2.0, window_size=(3, -1))]


@pytest.mark.parametrize("function", [peers.onnx_reference, peers.onnx_runtime])
@pytest.mark.parametrize("words", ONNX, ids=str)
@pytest.mark.parametrize("heads", [{}, dict(H=4, Hkv=2, enable_gqa=True)], ids=["", "gqa"])
def test_onnx_is_told_the_same(function, words, heads):
    call = make_call("adapters", L=5, S=9, **words, **heads)
    with torch.no_grad(): got = function(call.query, call.key, call.value, **call.words)
    assert torch.allclose(got, ours(call.query, call.key, call.value, **call.words), atol=1e-5)


def seen(L, S, w=0, is_causal=False):  # Core AI's words, as its page defines them
    p, j = torch.arange(L)[:, None] + S - L, torch.arange(S)
    near = (p - j < w) if is_causal else (p - j).abs() < w
    return (near if w else torch.ones(L, S, dtype=torch.bool)) & ((j <= p) if is_causal else True)


@pytest.mark.parametrize("L, S", [(4, 4), (3, 6)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (2, 2), (0, 0), (-1, 0), (3, 1), (2, -1), (-1, 2)])
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_core_ai_is_told_the_same_or_nothing(L, S, is_causal, window, alignment):
    q, kv = torch.zeros(1, 1, L, 4), torch.zeros(1, 1, S, 4)
    problem = make_problem(q, kv, kv, is_causal=is_causal, window_size=window, alignment=alignment)
    want = visible(problem, *everything(problem))
    want = torch.ones(L, S, dtype=torch.bool) if want is None else want.expand(1, 1, L, S)[0, 0]
    try: told = peers.coreai_attributes(q, kv, is_causal, False, alignment, window)
    except NotImplementedError:
        sayable = [seen(L, S, w, c) for w in range(8) for c in (False, True)]
        assert not any(s.equal(want) for s in sayable) or alignment == "upper_left" or (not is_causal and window[1] not in (0, window[0]))
    else: assert seen(L, S, told.get("window_size", 0), told.get("is_causal", False)).equal(want)


@pytest.mark.parametrize("function, change, why", [
    (peers.onnx_reference, dict(query=torch.zeros(5, 8)), "four dimensions"), (peers.onnx_reference, dict(is_causal="yes"), "no such word"),
    (peers.onnx_reference, dict(key=torch.zeros(2, 1, 7, 8)), "shares heads"), (peers.onnx_runtime, dict(scale=-1.0), "scale must be greater"),
    (peers.onnx_reference, dict(is_causal=True, kv_lengths=torch.tensor([1, 2])), "cache's queries"),
    (peers.transformers_eager, dict(attn_mask=torch.ones(5, 7, dtype=torch.bool)), "masks are added"),
    (peers.transformers_eager, dict(softcap=1.0, sinks=torch.zeros(2)), "softcap and sinks")])
def test_what_cannot_be_said_is_not_said(function, change, why):
    call = dict(query=torch.zeros(2, 2, 5, 8), key=torch.zeros(2, 2, 7, 8), value=torch.zeros(2, 2, 7, 8)) | change
    with pytest.raises(NotImplementedError, match=why): function(**call)


def test_no_gradient_and_no_autocast_are_not_asked():
    x = torch.zeros(1, 1, 2, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no backward"): peers.onnx_reference(x, x, x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="autocast"): peers.onnx_reference(*[x.detach()] * 3)


# ---------------------------------------------------------------- the command

def right(query, key, value, is_causal=False): return ours(query, key, value, is_causal=is_causal)
def wrong(query, key, value, is_causal=False): return ours(query, key, value, is_causal=not is_causal)
def deadly(query, key, value, is_causal=False): os.abort()


@pytest.fixture
def strangers(monkeypatch):
    "Three of this file beside one that is not installed."
    here = {n: peers.Peer(n, ("torch",), f"impl:{__file__}:{n}") for n in ("right", "wrong", "deadly")}
    monkeypatch.setattr(peers, "PEERS", here | {"absent": peers.Peer("absent", ("no-such-package",), "impl:nobody:nothing")})


def call(*words): return CliRunner().invoke(peers.compare_command, list(words))


def test_right_wrong_and_deadly(strangers, tmp_path):
    done = call("--case", "R3/*/L1-S8/*forward", "--case", "R13/*", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.split("\n") if line.startswith("R3"))
    assert re.split("  +", row) == ["R3", "1 right", "1 wrong of 1", "1 died of 1"]
    assert re.split("  +", next(line for line in done.output.split("\n") if line.startswith("R13"))) == ["R13", "-", "-", "-"]
    assert "wrong, R3: R3/default/causal/L1-S8/float32/forward\n    out: got " in done.output and "the process died of SIGABRT" in done.output
    assert "query=float32 (2, 2, 1, 8)" in done.output and "absent was not asked: no-such-package not found" in done.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["cells"]["R3"] == {"right": "1 right", "wrong": "1 wrong of 1", "deadly": "1 died of 1"}
    assert [(f["peer"], f["does"], f["rows"]) for f in found["found"]] == [("wrong", "", ["R3"]), ("deadly", "", ["R3"])]


def test_wrong_options(strangers):
    done = call("--case", "nothing")
    assert done.exit_code == 2 and "no case matches nothing" in done.output
    monkey = peers.Peer("absent", ("no-such-package",), "")
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-package"): peers.peer_columns(["absent"])
    assert monkey.lacks() == ["no-such-package"]


def test_slow_ones_are_asked_less(strangers, monkeypatch):
    some = dict(peers.PEERS)
    some["wrong"] = peers.Peer("wrong", ("torch",), some["wrong"].spec, slow=True)
    monkeypatch.setattr(peers, "PEERS", some)
    few = [c for c in peers.plain_cases(False) if c.row == "R3"]
    monkeypatch.setattr(peers, "plain_cases", lambda quick: few[:2] if quick else few)
    results = peers.compare(["wrong", "right"], quick=False, globs=())
    n = {c.name: len(results.of(None, c.name)) for c in results.columns}
    assert n == {"wrong": 2, "right": 8}
    assert "died" not in peers.matrix(peers.cells_of(results))


def test_slow_ones_are_asked_their_own_cases_too():
    quick, named = {c.id for c in peers.plain_cases(True)}, "R10/value-batch-1/B3/float32/forward"
    assert named not in quick and [c.id for c in peers.asked_cases("flex-compiled", False, ()) if c.id not in quick] == [named]
    assert {c.id for c in peers.asked_cases("coreai-run", False, ())} == quick
    assert len(peers.asked_cases("flex-compiled", True, ("R3/*",))) == len(peers.plain_cases(False))


def test_without_a_compiler(monkeypatch):
    "Absent, and why; what pip cannot install it is not asked to."
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr(peers, "PEERS", {n: peers.PEERS[n] for n in ("flex-compiled", "torch-flex")})
    assert peers.present() == ["torch-flex"]
    assert "flex-compiled was not asked: a C++ compiler" in call("--case", "R10/rank-2/*").output
    with pytest.raises(ModuleNotFoundError, match=r"^flex-compiled needs a C\+\+ compiler[^:]*$"): peers.peer_columns(["flex-compiled"])
    done = call("--peer", "flex-compiled")
    assert done.exit_code == 2 and "needs a C++ compiler" in done.output


@pytest.mark.parametrize("text, kind, said", [
    ("Unsupported\n  Developer debug context: raised exception ValueError('a, b (c=None).')\n\n For more", ValueError, "a, b (c=None)."),
    ('Developer debug context: raised exception KeyError("it\'s")\n', KeyError, "it's"),
    ("LoweringException: NotImplementedError: `x` is not supported.\n  target: flex_attention\n", NotImplementedError, "`x` is not supported."),
    ("LoweringException: OddError: (1) of 'a'\n  target", RuntimeError, "(1) of 'a'"), ("CppCompileError: C++ compile error", OSError, None)])
def test_errors_are_told_as_they_were_raised(text, kind, said):
    error = OSError(text)
    got = peers.unwrapped(error)
    assert type(got) is kind and (got is error if said is None else got.args == (said,))


def test_messages_carry_no_paths():
    assert peers.plain("at /a/b.py:3\n in  q/k/v: no") == "at in q/k/v: no" and peers.plain('no: at loc("/a/b") x') == "no"
    assert peers.plain('x ("/a/b.py":4) 1/2') == 'x (" 1/2'


# ---------------------------------------------------------------- the record

def test_the_record_is_whole():
    assert list(next(iter(KEPT["cells"].values()))) == list(peers.PEERS) and not KEPT["quick"]
    assert {r for r in KEPT["cells"]} == {c.row for c in peers.plain_cases(False)}
    does = {(n, c.does) for c in peers.CAUSES for n in c.peers.split(",")}
    assert {(f["peer"], f["does"]) for f in KEPT["found"]} <= does
    assert set(KEPT["said"]) == {p.name for p in peers.PROBES} and len(peers.PROBES) == len(KEPT["said"])


def test_it_is_about_the_versions_that_are_pinned():
    pins = {}
    for file in ("constraints.txt", "constraints-peers.txt"):
        for n, v in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.M): assert pins.setdefault(n.lower(), v) == v, n
    assert {n: v for n, v in KEPT["versions"].items() if n not in ("tensorplay_attn", "python") and pins[n] != v} == {}


@pytest.mark.parametrize("probe", peers.PROBES, ids=[p.name for p in peers.PROBES])
def test_ours_still_says_so(probe):
    assert peers.answer(probe.name, "ours") == KEPT["said"][probe.name][0]


def test_rows_are_the_contract_s():
    rows = {c.row for c in judge_rows()}
    for text in [c.right for c in peers.CAUSES]:
        row = text.split(":")[0]
        assert row in rows or row in ("section 1", "section 3"), text


def judge_rows(): return peers.plain_cases(False)


def test_an_answer_in_words():
    assert peers.in_words(torch.tensor([[1.00001, 2]])) == "float32 [[1.0, 2.0]]" and peers.in_words([True, (1, None)]) == "[True, [1, None]]"
    assert judge.versions()["torch"].startswith(KEPT["versions"]["torch"])
