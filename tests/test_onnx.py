"""The ONNX operator: every case of the installed onnx, nodes nobody wrote a case for, and the judge itself."""
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tensorplay_attn.engines import ENGINES
from tensorplay_attn.interop.onnx import (NodeCase, attention_node, check_case, compare, node_cases, node_problem, onnx_answer, to_numpy, to_torch)
from tensorplay_attn.reference import dense_forward

ALL = ("Y", "present_key", "present_value", "qk_matmul_output")
engines = pytest.mark.parametrize("engine", ("math", "tiled"))


def failures(cases, attend):
    """Names, outputs and verdicts of what does not pass."""
    return [(c.name, name, x) for c in cases for name, x in check_case(c, attend).items() if not x.passed]


@engines
def test_every_case(engine):
    cases = node_cases()
    assert len(cases) >= 93 and {c.opset for c in cases} >= {23, 24, 25}
    assert not any("expanded" in c.name for c in cases)
    reasons = {c.name: ENGINES[engine].reasons(node_problem(c.attributes, c.inputs, c.opset)) for c in cases}
    assert not {name: why for name, why in reasons.items() if why}
    assert failures(cases, ENGINES[engine].forward) == []


def test_cases_of_1_23_2():
    import onnx
    if onnx.__version__ != "1.23.2": pytest.skip(f"counts are those of onnx 1.23.2, this is {onnx.__version__}")
    assert Counter(c.opset for c in node_cases()) == {23: 69, 24: 13, 25: 11}
    assert Counter(str(c.inputs["Q"].dtype) for c in node_cases()) == {"torch.float32": 82, "torch.float16": 6, "torch.bfloat16": 5}
    assert {name for c in node_cases() for name in c.outputs} == set(ALL)


def random_node(seed):
    """A node with every knob left to chance, where reference and schema agree."""
    rng = np.random.default_rng(seed)
    pick, few = lambda *xs: xs[rng.integers(len(xs))], lambda hi: int(rng.integers(1, hi + 1))
    opset, rank, cache = int(rng.integers(23, 26)), pick(3, 4), pick("none", "inside", "outside")
    if opset == 23 and cache == "outside": cache = "none"
    B, Hkv, G, L, n, E, Ev = few(3), few(2), few(3), few(5), few(7), few(5), few(5)
    dtype = pick(np.float32, np.float32, np.float16, np.float64)
    make = lambda *shape: rng.standard_normal(shape).astype(dtype)
    P = few(4) if cache == "inside" else 0
    size = lambda heads, length, e: (B, heads, length, e) if rank == 4 else (B, length, heads * e)
    x = {"Q": make(*size(Hkv * G, L, E)), "K": make(*size(Hkv, n, E)), "V": make(*size(Hkv, n, Ev))}
    a = {} if rank == 4 else {"q_num_heads": Hkv * G, "kv_num_heads": Hkv}
    if cache == "inside": x |= {"past_key": make(B, Hkv, P, E), "past_value": make(B, Hkv, P, Ev)}
    if cache == "outside": x["nonpad_kv_seqlen"] = rng.integers(0, n + 1, B)
    S = P + n
    if pick(True, False):
        short = opset >= 24 and pick(True, False)
        width = int(rng.integers(max([1, *x.get("nonpad_kv_seqlen", [])]), S + 1)) if short else S
        shape = pick((L, width), (1, width), (Hkv * G, L, width), (B, 1, L, width), (B, Hkv * G, 1, width))
        x["attn_mask"] = rng.random(shape) < 0.7 if pick(True, False) else make(*shape)
        if x["attn_mask"].dtype != bool and pick(True, False): x["attn_mask"][rng.random(shape) < 0.3] = -np.inf
    # the reference makes one causal row of a mask with one row, and uses it for every query
    if pick(True, False) and not (L > 1 and "attn_mask" in x and x["attn_mask"].shape[-2] == 1): a["is_causal"] = 1
    if pick(True, False): a["scale"] = float(np.float32(rng.uniform(0.05, 1.5)))
    if pick(True, False): a["softcap"] = pick(0.5, 2.0, 10.0)
    if opset == 25 and pick(True, False): a |= {"left_window_size": int(rng.integers(-1, 4)), "right_window_size": int(rng.integers(-1, 4))}
    a["qk_matmul_output_mode"] = pick(1, 2, 3) if "softcap" in a else pick(0, 1, 2, 3)  # the reference shows capped scores in mode 0
    if pick(True, False): a["softmax_precision"] = pick(1, 11)
    inputs = {name: to_torch(np.asarray(t)) for name, t in x.items()}
    return a, inputs, opset


@engines
def test_random_nodes_against_the_reference(engine):
    cases, seen = [], Counter()
    for seed in range(150):
        a, inputs, opset = random_node(seed)
        seen.update([f"opset {opset}", *inputs, *a])
        expected = onnx_answer(a, inputs, opset, ALL)
        cases.append(NodeCase(f"seed {seed}", opset, a, inputs, expected))  # judged by the derived bound
    assert min(seen.values()) > 10, seen
    assert failures(cases, ENGINES[engine].forward) == []


@pytest.mark.parametrize("what,change", [
    ("softcap", lambda p: replace(p, softcap=0.0)),
    ("bias", lambda p: replace(p, bias=None)),
    ("mask", lambda p: replace(p, mask=None)),
    ("lengths", lambda p: replace(p, kv_lengths=None)),
    ("shift", lambda p: replace(p, shift=p.shift + 1)),
    ("window", lambda p: replace(p, window=(-1, p.window[1]))),
    ("scale", lambda p: replace(p, scale=p.scale * 1.0005)),
    ("heads", lambda p: replace(p, k=p.k.flip(1)))])
def test_a_wrong_engine_is_noticed(what, change):
    assert failures(node_cases(), lambda problem: dense_forward(change(problem)))


@pytest.mark.parametrize("spoil", [
    lambda y: y.index_fill(2, torch.tensor(0), 0.0), lambda y: y * (1 + 1e-4), lambda y: y.half().float(),
    lambda y: y.masked_fill(y == y.max(), torch.nan), lambda y: y[:, :, :-1]])
def test_a_spoilt_answer_is_noticed(spoil):
    case = next(c for c in node_cases() if c.name == "attention_4d_gqa")

    def attend(problem):
        out, lse, top = dense_forward(problem)
        return spoil(out), lse, top
    assert check_case(case, dense_forward)["Y"].passed and not check_case(case, attend)["Y"].passed


def test_compare():
    t = lambda *xs: torch.tensor(xs)
    nan, inf, tiny = float("nan"), float("inf"), torch.full((2,), 1e-3, dtype=torch.float64)
    assert compare(t(1.0, nan), t(1.0, nan), tiny).passed
    assert compare(t(-inf, 1.0), t(-inf, 1.0), torch.zeros(2, dtype=torch.float64)).passed
    assert compare(t(1.0, 1.0005), t(1.0, 1.0), tiny).share == pytest.approx(0.5, rel=1e-3)
    for got, want in ((nan, 1.0), (1.0, nan), (inf, -inf), (0.0, -inf), (1.002, 1.0)):
        assert not compare(t(got, 1.0), t(want, 1.0), tiny).passed
    assert not compare(t(0.0, 0.0), t(0.0, 0.0), tiny).share
    assert not compare(t(1.0, 1.0).half(), t(1.0, 1.0), tiny).passed and not compare(t(1.0), t(1.0, 1.0), tiny).passed
    assert not compare(t(nan, 1.0), t(1.0, 1.0), torch.full((2,), nan, dtype=torch.float64)).passed
    empty = torch.empty(0)
    assert compare(empty, empty, empty.double()).passed


def test_bfloat16_travels_bit_by_bit():
    x = torch.arange(-32768, 32767, 7, dtype=torch.int16).view(torch.bfloat16)
    assert to_numpy(x).dtype.name == "bfloat16" and to_torch(to_numpy(x)).view(torch.int16).equal(x.view(torch.int16))


def test_one_output_costs_no_scores():
    q = torch.randn(1, 1, 3, 4)
    assert list(attention_node({}, {"Q": q, "K": q, "V": q}, 25, outputs=("Y",))) == ["Y"]
    with pytest.raises(ValueError, match="no output 'lse'"): attention_node({}, {"Q": q, "K": q, "V": q}, 25, outputs=("lse",))


def test_empty_sizes():
    e = torch.empty
    out = attention_node({"is_causal": 1}, {"Q": e(2, 2, 0, 4), "K": e(2, 1, 3, 4), "V": e(2, 1, 3, 5)}, 24)
    assert out["Y"].shape == (2, 2, 0, 5) and out["qk_matmul_output"].shape == (2, 2, 0, 3)
    out = attention_node({}, {"Q": torch.ones(1, 1, 2, 4), "K": e(1, 1, 0, 4), "V": e(1, 1, 0, 5), "nonpad_kv_seqlen": torch.tensor([0])}, 24)
    assert out["Y"].equal(torch.zeros(1, 1, 2, 5))


def run(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_without_onnx():
    done = run("import sys; sys.modules['onnx'] = None\n"
               "import torch; from tensorplay_attn.interop.onnx import attention_node, node_cases\n"
               "q = torch.ones(1, 1, 1, 1); assert attention_node({}, dict(Q=q, K=q, V=q), 25)['Y'] == 1\n"
               "node_cases()")
    assert done.stderr.strip().endswith("ModuleNotFoundError: onnx is not installed: pip install 'tensorplay_attn[onnx]'"), done.stderr


def test_cases_after_another_operator_was_asked_for():
    done = run("from onnx.backend.test.case.node import collect_testcases; collect_testcases('Cast')\n"
               "import numpy as np; np.random.seed(5); a = np.random.rand(); np.random.seed(5)\n"
               "from tensorplay_attn.interop.onnx import node_cases; cases = node_cases()\n"
               "assert np.random.rand() == a; print(len(cases), len({c.name for c in cases}), cases is node_cases())")
    count = len(node_cases())
    assert done.stdout.split() == [str(count), str(count), "True"], done.stderr
