"Triton's kernels and cuDNN behind the doors: who answers, who refuses and why, and that what dispatch does is what it says."
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tensorplay_attn import SDPAParams, SDPBackend, can_use_cudnn_attention, can_use_flash_attention, explain_routing, sdpa_kernel
from tensorplay_attn import engines
from tensorplay_attn.autograd import attend, pack
from tensorplay_attn.bounds import judge_backward, judge_forward
from tensorplay_attn.engines import CUDNN, EFFICIENT, FLASH, MATH, TILED, cudnn_problem_reasons, decodes
from tensorplay_attn.evidence.suites import answering
from tensorplay_attn.functional import AuxRequest, scaled_dot_product_attention
from tensorplay_attn.kernels import launch as launching
from tensorplay_attn.kernels.launch import recorded
from tensorplay_attn.problem import make_problem
from tensorplay_attn.reference import dense_forward
from tensorplay_attn.gradients import dense_backward
from tensorplay_attn.routing import DEFAULT_ORDER, backend_engine, choose, pose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CUDNN = SDPBackend.CUDNN_ATTENTION
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def rand(*shape, dtype=torch.float32, **kwargs): return torch.randn(*shape, **kwargs).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.fixture
def interpreted(monkeypatch):
    "Triton's kernels answer; conftest has imported them for the interpreter where there is no GPU."
    if DEVICE == "cpu": monkeypatch.setenv("TRITON_INTERPRET", "1")


def example(L=5, S=7, E=8, Ev=None, B=2, H=2, Hkv=1, dtype=torch.float32, device=DEVICE, **knobs):
    return make_problem(*(torch.randn(B, h, n, e).to(device, dtype) for h, n, e in ((H, L, E), (Hkv, S, E), (Hkv, S, Ev or E))), **knobs)


# ---------------------------------------------------------------- the environment

def python(code, **env):
    "What a fresh Python prints."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={"PATH": "/usr/bin:/bin", **env})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CALL = """
import sys, os, torch
import tensorplay_attn
from tensorplay_attn import SDPBackend, sdpa_kernel
from tensorplay_attn.engines import ENGINES
from tensorplay_attn.functional import scaled_dot_product_attention as attention
print('triton' in sys.modules, end=' ')
x, names = torch.randn(1, 1, 5, 8, requires_grad=True), []
def noted(engine): return engine._replace(forward=lambda *args: names.append(engine.name) or engine.forward(*args))
ENGINES.update({n: noted(e) for n, e in ENGINES.items()})
def ask(*backends):
    with sdpa_kernel(list(backends)): attention(x, x, x).sum().backward()
"""
FLASH_ONLY = "SDPBackend.FLASH_ATTENTION"


@pytest.mark.skipif(DEVICE != "cpu", reason="about a machine without a GPU")
def test_who_computes_on_a_cpu_imports_no_kernels():
    "Our kernels wait until they are asked."
    ask, loaded = f"ask({FLASH_ONLY}); ask(SDPBackend.EFFICIENT_ATTENTION); print(*names,", "'tensorplay_attn.kernels.tile' in sys.modules)"
    assert python(f"{CALL}{ask}{loaded}") == "False tiled tiled False\n"
    assert python(f"{CALL}{ask}{loaded}", TRITON_INTERPRET="1") == "False flash efficient True\n"


def test_an_environment_may_be_set_between_calls():
    "The tiled engine imports no Triton."
    assert python(f"""{CALL}ask({FLASH_ONLY})
os.environ["TRITON_INTERPRET"] = "1"
ask({FLASH_ONLY})
print(*names)""") == "False tiled flash\n"


@pytest.mark.parametrize("before", ["import triton", "import tensorplay_attn.kernels.tile"])
def test_an_environment_set_too_late_says_so(before):
    code = f"""{CALL}{before}
os.environ["TRITON_INTERPRET"] = "1"
try: ask({FLASH_ONLY})
except RuntimeError as e: print(e)
ask({FLASH_ONLY}, SDPBackend.MATH)
print(*names)"""
    said = python(code)
    assert "FLASH_ATTENTION: Triton was imported before TRITON_INTERPRET=1 was set" in said and said.endswith("\nmath\n")


def test_triton_missing_or_too_old(interpreted, monkeypatch):
    import triton
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert FLASH.reasons(example()) == ["Triton 3.5.1 is too old: pip install 'triton>=3.6'"]
    for new in ("3.6.0", "3.10.0+git1234", "4.0"):
        monkeypatch.setattr(triton, "__version__", new)
        assert EFFICIENT.reasons(example()) == []
    monkeypatch.setitem(sys.modules, "triton", None)
    (reason,) = EFFICIENT.reasons(example())
    assert "Triton cannot be imported" in reason and "pip install 'triton>=3.6'" in reason


def test_old_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    assert engines.kernel_reasons(torch.device("cuda")) == ["Triton needs compute capability 8.0, and this device has 7.5"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert engines.kernel_reasons(torch.device("cuda")) == engines.kernel_reasons(torch.device("xpu")) == []


# ---------------------------------------------------------------- reasons

MASK = dict(attn_mask=torch.ones(5, 7, dtype=torch.bool, device=DEVICE))
REASONS = {  # of flash, and whether efficient has it too
    "float64": (dict(dtype=torch.float64), True, "compute in float32, and query is float64"),
    "a mask": (MASK, False, "structural masks only, and attn_mask is a tensor"),
    "a bias": (dict(attn_mask=torch.zeros(7, device=DEVICE)), False, "structural masks only, and attn_mask is a tensor"),
    "a wide head": (dict(E=257), False, "FLASH_ATTENTION takes head sizes to 256: E=257, Ev=257"),
    "a wide value": (dict(E=8, Ev=300), False, "FLASH_ATTENTION takes head sizes to 256: E=8, Ev=300"),
}


@pytest.mark.parametrize("case", REASONS)
def test_reasons_in_words(interpreted, case):
    knobs, shared, words = REASONS[case]
    p = example(**knobs)
    (reason,) = FLASH.reasons(p)
    assert words in reason and EFFICIENT.reasons(p) == ([reason] if shared else [])
    with pytest.raises(RuntimeError, match="the flash engine cannot run this problem"): attend(p, "flash")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError) as e: choose(p)
    assert f"FLASH_ATTENTION: {reason}" in str(e.value)


def test_lengths_and_parts(interpreted):
    p, far = example(), engines.LONGEST + 1
    wide = replace(p, k=p.k[:, :, :1].expand(-1, -1, far, -1), v=p.v[:, :, :1].expand(-1, -1, far, -1))
    assert FLASH.reasons(wide) == EFFICIENT.reasons(wide) == [f"Triton's kernels count in 32 bits, to {far - 1} queries and keys: L=5, S={far}"]
    part = replace(p, dropout_p=0.5, seed=torch.tensor([1, 2]), origin=(0, 0, 4, 0))
    assert "drop weights of whole problems" in FLASH.reasons(part)[0] and FLASH.reasons(replace(part, dropout_p=0.0)) == []


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's limit")
def test_the_interpreter_gives_up_before_hours(interpreted):
    x = torch.zeros(engines.INTERPRETED_HEADS + 1, 1, 1, 2)
    assert FLASH.reasons(make_problem(x[1:], x[1:], x[1:])) == []
    assert FLASH.reasons(make_problem(x, x, x)) == EFFICIENT.reasons(make_problem(x, x, x)) == [
        "Triton's interpreter takes heads one by one, here at most 4096: batch times heads is 4097"]
    assert choose(make_problem(x, x, x)) == (SDPBackend.MATH, MATH)


def test_tiles_too_large_for_a_device(monkeypatch):
    "As the table says, and whatever it says: a device with less shared memory refuses, in words."
    monkeypatch.setattr(launching, "shared_memory", lambda device: 1000)
    monkeypatch.setattr(launching, "target_of", lambda device: "sm_90")
    needs = lambda kernel, target, width, itemsize: 2000 if kernel.endswith(("dbias", "merge")) else 900
    monkeypatch.setattr(launching, "shared_memory_needed", needs)
    monkeypatch.setattr(engines, "kernel_reasons", lambda device: [])
    engines.memory_reasons.cache_clear()
    assert FLASH.reasons(example()) == EFFICIENT.reasons(example()) == []
    few = "takes 2000 bytes of shared memory, and this device has 1000"
    assert EFFICIENT.reasons(example(attn_mask=torch.zeros(7, device=DEVICE))) == [f"efficient_backward_dbias {few}"]
    assert FLASH.reasons(example(L=1, S=300)) == [f"decode_merge {few}"]
    engines.memory_reasons.cache_clear()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_has_its_row(target, monkeypatch):
    "A device without any shared memory refuses all whose need is known; a need that nobody has compiled refuses nothing."
    monkeypatch.setattr(launching, "shared_memory", lambda device: 0)
    monkeypatch.setattr(launching, "target_of", lambda device: target)
    for kernels, names in engines.KERNELS.items():
        for width, itemsize in itertools.product((1, 64, 128, 256, 300), (2, 4)):
            engines.memory_reasons.cache_clear()
            said = engines.memory_reasons(torch.device("cuda"), kernels, width, itemsize)
            needed = {k: launching.shared_memory_needed(k, target, width, itemsize) for k in names}
            assert [r.split()[0] for r in said] == [k for k, n in needed.items() if n]
            assert width > 128 or itemsize > 2 or target not in ("sm_80", "sm_90") or None not in needed.values()
    engines.memory_reasons.cache_clear()


def test_a_device_without_kernels():
    p = example(device="meta")
    for engine in (FLASH, EFFICIENT, TILED): assert "query is on meta" in engine.reasons(p)[0]
    assert choose(p)[1] is MATH


def params(mask=None, dtype=torch.float32, E=8, **kwargs):
    x = rand(1, 2, 4, E, dtype=dtype)
    return SDPAParams(x, x, x, mask, kwargs.get("dropout", 0.0), kwargs.get("is_causal", False), False)


ASKED = {"plain": {}, "causal": dict(is_causal=True), "mask": dict(mask=torch.ones(4, 4, dtype=torch.bool, device=DEVICE)),
         "float64": dict(dtype=torch.float64), "wide": dict(E=264), "half": dict(dtype=torch.float16, dropout=0.3)}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("allowed", [[b] for b in DEFAULT_ORDER] + [list(DEFAULT_ORDER)], ids=str)
def test_dispatch_does_what_explain_says(interpreted, asked, allowed):
    p = params(**ASKED[asked])
    with sdpa_kernel(allowed):
        may = [b for b, reasons in explain_routing(p).items() if not reasons]
        assert can_use_flash_attention(p) == (SDPBackend.FLASH_ATTENTION in may) and can_use_cudnn_attention(p) == (ON_CUDNN in may)
        call = lambda: scaled_dot_product_attention(p.query, p.key, p.value, p.attn_mask, p.dropout, p.is_causal)
        if not may:
            with pytest.raises(RuntimeError) as e: call()
            for b, reasons in explain_routing(p).items(): assert all(r in str(e.value) for r in reasons), b
            return
        with answering() as names: call()
        assert names == [backend_engine(may[0], pose(p))[0].name] == [choose(pose(p))[1].name]


@pytest.mark.parametrize("engine", BACKENDS)
def test_opcheck(interpreted, engine):
    q, k, v = (rand(1, 2, n, 8).requires_grad_() for n in (5, 20, 20))
    more = [rand(5, 20).requires_grad_()] if engine == "efficient" else []
    p = make_problem(q, k, v, *more, is_causal=True, sinks=rand(2).requires_grad_())
    torch.library.opcheck(torch.ops.tensorplay_attn.forward, (engine, True, *pack(p)))


@pytest.mark.parametrize("engine", BACKENDS)
def test_a_compiled_program_and_its_gradients(interpreted, engine):
    def f(q, k, v): return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True, window_size=(3, 0))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for L in (9, 18):
        q, k, v = (rand(1, h, L, 8).requires_grad_() for h in (4, 2, 2))
        with sdpa_kernel(BACKENDS[engine]), answering() as names: a, b = f(q, k, v), compiled(q, k, v)
        assert names == [engine] * 2 and a.equal(b)
        for x, y in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (a, b))): assert x.equal(y)


# ---------------------------------------------------------------- few queries, many keys

def ran(problem):
    "Names of the kernels that flash's forward would start."
    with recorded("sm_90") as calls: FLASH.forward(problem)
    return {c.kernel.__name__.lstrip("_").split("_")[0] for c in calls}


@pytest.mark.parametrize("L,G,S,want", [
    (1, 1, 256, False), (1, 1, 257, True), (1, 16, 257, True), (1, 17, 512, False), (2, 16, 513, True), (128, 1, 2048, False),
    (128, 1, 2049, True), (129, 1, 9999, False), (1, 129, 9999, False), (0, 1, 999, False)])
def test_the_rule_of_decoding(L, G, S, want):
    "By lengths and group; whatever it says, the decoding kernels take."
    from tensorplay_attn.kernels.decode import decode_reasons, plan_decode
    for B in (1, 64):
        p = example(L=L, S=S, E=16, B=B, H=2 * G, Hkv=2, device="meta", dtype=torch.float16)
        assert decodes(p) == want and ran(p) <= {"decode" if want else "flash"}
        if want: assert decode_reasons(p) == [] and plan_decode(p.sizes, p.window, 128, 132).chunks > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decoding_through_the_door(interpreted, dtype):
    "Forward, gradients through out and lse, largest scores; and an entry alone as in company."
    q, k, v = (rand(2, h, n, 16, dtype=dtype).requires_grad_() for h, n in ((2, 2), (1, 300), (1, 300)))
    knobs = dict(is_causal=True, enable_gqa=True, alignment="lower_right", window_size=(280, -1), sinks=rand(2), return_aux=AuxRequest(True, True))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), answering() as names:
        out, aux = scaled_dot_product_attention(q, k, v, **knobs)
        one, aux_one = scaled_dot_product_attention(q[1:], k[1:], v[1:], **knobs)
    p = make_problem(q.detach(), k.detach(), v.detach(), is_causal=True, alignment="lower_right", window_size=(280, -1), sinks=knobs["sinks"])
    assert names == ["flash"] * 2 and decodes(p)
    do, d_lse = torch.randn_like(out), torch.randn_like(aux.lse)
    dq, dk, dv = torch.autograd.grad((out, aux.lse), (q, k, v), (do, d_lse), retain_graph=True)
    grads = FLASH.backward(p, out.detach(), aux.lse.detach(), do, d_lse)
    assert all(a.equal(b) for a, b in zip((dq, dk, dv), grads[:3]))
    verdicts = judge_forward(p, out, aux.lse, aux.max_scores) | judge_backward(p, grads, do, d_lse)
    assert all(verdicts.values()), {n: str(v) for n, v in verdicts.items() if not v}
    assert one.equal(out[1:]) and aux_one.lse.equal(aux.lse[1:])


# ---------------------------------------------------------------- launches

@pytest.mark.parametrize("engine", [FLASH, EFFICIENT], ids=lambda e: e.name)
@pytest.mark.parametrize("knobs", [dict(L=40, S=5), dict(L=1, S=300)], ids=str)
def test_many_launches_are_one(interpreted, monkeypatch, engine, knobs):
    "A small limit on the programs of a launch stands for the real one."
    p = example(B=3, **knobs)
    do = torch.randn_like(p.q)
    def answer():
        out, lse, top = engine.forward(p, True)
        return out, lse, top, *engine.backward(p, out, lse, do)[:3]
    want = answer()
    monkeypatch.setattr(launching, "MAX_PROGRAMS", 4)
    for a, b in zip(answer(), want): assert a.equal(b)


@pytest.mark.parametrize("engine", [FLASH, EFFICIENT], ids=lambda e: e.name)
@pytest.mark.parametrize("B,H,L,S", [(65536, 1, 1, 3), (16, 4096, 100, 70), (4096, 16, 1, 300), (2**23, 1, 1, 2)], ids=str)
def test_heads_beyond_a_grid(engine, B, H, L, S):
    "Planned on the meta device, forward and backward: each launch below every limit, programs for all heads."
    x = torch.empty(B, H, 1, 8, device="meta", dtype=torch.float16)
    p = make_problem(x.expand(-1, -1, L, -1), x.expand(-1, -1, S, -1), x.expand(-1, -1, S, -1))
    with recorded("sm_90") as calls:
        out, lse, _ = engine.forward(p)
        engine.backward(p, out, lse, out)
    assert len(calls) >= 4
    for call in calls:
        assert call.programs % (B * H) == 0 and call.programs > 0
        plan = launching.launches(call.programs)
        assert sum(n for _, n in plan) == call.programs and all(0 < n < 2**31 and n * 1024 <= 2**32 for _, n in plan)


# ---------------------------------------------------------------- cuDNN

def half(**knobs): return example(**dict(L=10, S=10, E=16, H=4, Hkv=2, dtype=torch.float16, device="cpu") | knobs)


CUDNN_REASONS = {
    "is not asked for attn_mask": dict(attn_mask=torch.ones(10, 10, dtype=torch.bool)),
    "is not asked for sinks": dict(sinks=torch.zeros(4)),
    "is not asked for kv_lengths": dict(kv_lengths=torch.tensor([3, 4])),
    "is not asked for softcap": dict(softcap=2.0),
    "is not asked for dropout_p": dict(dropout_p=0.1, seed=torch.tensor([0, 0])),
    "is not asked for window_size": dict(window_size=(3, 0)),
    "takes float16 and bfloat16: p.q.dtype=torch.float32": dict(dtype=torch.float32),
    "head sizes to 128 in steps of 8: E=136, Ev=136": dict(E=136),
    "head sizes to 128 in steps of 8: E=16, Ev=12": dict(Ev=12),
    "nothing empty, and more than one key": dict(S=0),
    "nothing empty, and more than one key: p.sizes=(2": dict(S=1),
    "nothing empty, and more than one key: p.sizes=(0": dict(B=0),
    "positive scales only: p.scale=-1.0": dict(scale=-1.0),
    "positive scales only: p.scale=0.0": dict(scale=0.0),
    "where the first query stands at the first key": dict(S=12, is_causal=True),
    "and the last at the last: L=10, S=12": dict(S=12, is_causal=True, alignment="lower_right"),
    "and the last at the last: L=12, S=10": dict(L=12, is_causal=True),
}


@pytest.mark.parametrize("words", CUDNN_REASONS)
def test_what_cudnn_is_not_asked(words):
    (reason,) = cudnn_problem_reasons(half(**CUDNN_REASONS[words]))
    assert words in reason


def test_what_cudnn_is_asked():
    x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="meta")
    for knobs in ({}, dict(is_causal=True), dict(is_causal=True, alignment="lower_right"), dict(S=12), dict(S=12, alignment="lower_right"),
                  dict(dtype=torch.bfloat16, E=128, Ev=64, scale=0.3), dict(L=1)): assert cudnn_problem_reasons(half(**knobs)) == []
    assert "65535" in cudnn_problem_reasons(make_problem(*3 * [x.expand(65536, 1, 2, 8)]))[0]
    assert "2**31" in cudnn_problem_reasons(make_problem(*3 * [x.expand(2, 1, 2**27, 8)]))[0]
    assert CUDNN.reasons(half()) == ["cuDNN attention needs CUDA tensors, and query is on cpu"]


@pytest.fixture
def modern(monkeypatch):
    "A machine as cuDNN wants it."
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


@pytest.mark.parametrize("where,name,value,words", [
    (torch.backends.cudnn, "is_available", lambda: False, "this PyTorch has no cuDNN"), (torch.version, "hip", "6.2", "this PyTorch has no cuDNN"),
    (torch.backends.cudnn, "version", lambda: 8907, "needs cuDNN 9, and there is 8907"),
    (torch.backends.cuda, "cudnn_sdp_enabled", lambda: False, "enable_cudnn_sdp"),
    (torch.cuda, "get_device_capability", lambda device: (7, 5), "capability=(7, 5)"),
    (torch, "are_deterministic_algorithms_enabled", lambda: True, "no deterministic backward")])
def test_machines_without_cudnn(modern, where, name, value, words):
    device = torch.device("cuda")
    assert engines.cudnn_machine_reasons(device) == []
    modern.setattr(where, name, value)
    (reason,) = engines.cudnn_machine_reasons(device)
    assert words in reason


def arguments(op): return [a.name for a in op.default._schema.arguments]


def test_operators_schema():
    assert arguments(torch.ops.aten._scaled_dot_product_cudnn_attention) == [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert arguments(torch.ops.aten._scaled_dot_product_cudnn_attention_backward) == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", "cum_seq_q", "cum_seq_k",
        "max_q", "max_k", "dropout_p", "is_causal", "scale"]


def laid_out(*tensors):
    for t in tensors: assert (t.is_contiguous() or t.mT.is_contiguous() or t.transpose(1, 2).is_contiguous()) and t.data_ptr() % 16 == 0


@pytest.fixture
def stand_in():
    "The dense engine behind PyTorch's cuDNN operators, on CPU tensors, with what theirs asks of its arguments."
    library, asked = torch.library.Library("aten", "IMPL"), []
    def forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        laid_out(query, key, value)
        assert attn_bias is None and compute_log_sumexp and dropout_p == 0 and not return_debug_mask
        asked.append("forward")
        out, lse, _ = dense_forward(make_problem(query, key, value, is_causal=is_causal, scale=scale))
        none = torch.empty((), dtype=torch.int64)
        return out, lse[..., None], None, None, query.shape[2], key.shape[2], none, none, None
    def backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                 is_causal, *, scale=None):
        laid_out(grad_out, query, key, value, out)
        assert attn_bias is cum_seq_q is cum_seq_k is None and dropout_p == 0 and (max_q, max_k) == (query.shape[2], key.shape[2])
        assert logsumexp.shape == (*out.shape[:3], 1) and logsumexp.dtype == torch.float32
        asked.append("backward")
        return dense_backward(make_problem(query, key, value, is_causal=is_causal, scale=scale), out, logsumexp[..., 0], grad_out)[:3]
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    yield asked
    library._destroy()


ODD = {"plain": lambda t: t, "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "batch 1": lambda t: t[:1].expand(t.shape),
       "sliced": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
       "an odd offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("knobs", [{}, dict(is_causal=True), dict(S=14, scale=0.7, dtype=torch.bfloat16)], ids=str)
def test_cudnn_is_asked_in_its_words(stand_in, odd, knobs):
    p = half(**knobs)
    p = replace(p, q=ODD[odd](p.q), k=ODD[odd](p.k), v=ODD[odd](p.v))
    out, lse, top = CUDNN.forward(p, need_max=False)
    do, d_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = CUDNN.backward(p, out, lse, do)
    assert stand_in == ["forward", "backward"] and top is None
    verdicts = judge_forward(p, out, lse, dense_forward(p)[2]) | judge_backward(p, grads, do, None)
    assert all(verdicts.values()), {n: str(v) for n, v in verdicts.items() if not v}
    assert CUDNN.forward(p, need_max=True)[2].equal(dense_forward(p)[2])  # what it does not give is ours
    grads = CUDNN.backward(p, out, lse, do, d_lse)
    assert stand_in.count("backward") == 1 and all(judge_backward(p, grads, do, d_lse).values())
