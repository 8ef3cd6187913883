"Somebody else's kernels: the registry's every sentence, what FA3 and FA4 are asked, and who answers when one is active."
import gc
import inspect
import math
import random
import sys
import threading
import types
import warnings
import weakref
from functools import partial

import pytest
import torch

from problems import random_problem
from tensorplay_attn import registry
from tensorplay_attn.autograd import attend
from tensorplay_attn.bias import causal_lower_right
from tensorplay_attn.engines import ENGINES, MATH, TILED, Engine
from tensorplay_attn.evidence import conformance as judge
from tensorplay_attn.evidence.suites import select, suite
from tensorplay_attn.functional import AuxRequest, scaled_dot_product_attention
from tensorplay_attn.problem import make_problem
from tensorplay_attn.registry import (FA3, FA4, WORDS, FlashHandle, activate_flash_attention_impl as activate, active_engine,
                                      current_flash_attention_impl as current, flash_kernel, list_flash_attention_impls as names,
                                      register_flash_attention_impl as register, restore_flash_attention_impl as restore, words_of)
from tensorplay_attn.routing import (SDPAParams, SDPBackend, backend_engine, can_use_flash_attention, choose, explain_routing, permitted_backends,
                                     pose, sdpa_kernel)

FLASH = SDPBackend.FLASH_ATTENTION


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    "A registry of its own for each test, and no seats left behind."
    torch.manual_seed(0)
    for name, value in dict(_ACTIVE=None, _IMPLS=dict(registry._IMPLS), _SEATS={}).items(): monkeypatch.setattr(registry, name, value)
    seats = set(ENGINES)
    yield
    for name in set(ENGINES) - seats: del ENGINES[name]


def qkv(L=6, S=6, B=2, H=2, E=8, dtype=torch.float32, **kwargs):
    return [torch.randn(B, H, n, E, dtype=dtype, requires_grad=True, **kwargs) for n in (L, S, S)]


def dense(problem): return MATH.forward(problem)[:2]


class Counting:
    "A kernel that knows everything, and how often it was asked."
    def __init__(self, **kwargs):
        self.forward = self.backward = 0
        self.engine = flash_kernel(self.answer, knows=WORDS, backward=self.pull, **kwargs)

    def answer(self, problem):
        self.forward += 1
        return dense(problem)

    def pull(self, *args):
        self.backward += 1
        return MATH.backward(*args)


def use(engine, name="mine", **kwargs):
    register(name, register_fn=lambda: FlashHandle(engine, **kwargs))
    return activate(name)


# ---------------------------------------------------------------- the registry

def test_the_start():
    assert names() == ["FA3", "FA4"] and current() is None and active_engine() is None


def test_activate_returns_the_handle_and_restore_removes_it():
    log = []

    class Handle:  # of PyTorch's protocol, no more
        def remove(self): log.append(current())

    handle = Handle()
    register("theirs", register_fn=lambda: handle)
    assert current() is None and names() == ["FA3", "FA4", "theirs"]
    assert activate("theirs") is handle and current() == "theirs" and log == []
    restore()
    assert current() is None and len(log) == 1


def test_no_handle_is_current_all_the_same():
    register("bare", register_fn=lambda: None)
    assert activate("bare") is None and current() == "bare"
    q, k, v = qkv()
    want = MATH.forward(make_problem(q, k, v))[0]
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), want)  # ours answers, and says why
    told = explain_routing(SDPAParams(q, k, v, None, 0.0, False, False))[FLASH]
    assert told == [] and told.notes == ("bare: its handle carries no engine for the FLASH route",)
    restore()
    assert current() is None


def test_restore_with_nothing_active_warns():
    with pytest.warns(UserWarning, match="nothing to restore") as caught: restore()
    assert caught[0].filename == __file__
    use(Counting().engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore()
    with pytest.warns(UserWarning): restore()


@pytest.mark.parametrize("impl, register_fn, words", [("x", None, ["register_fn", "NoneType"]), ("x", "f", ["register_fn", "str"]),
                                                      (3, lambda: None, ["impl", "int"]), (None, lambda: None, ["impl", "NoneType"])])
def test_register_refuses(impl, register_fn, words):
    with pytest.raises(TypeError) as e: register(impl, register_fn=register_fn)
    assert all(w in str(e.value) for w in words) and names() == ["FA3", "FA4"]
    with pytest.raises(TypeError): register("x", lambda: None)


@pytest.mark.parametrize("name", ["FA2", "fa3", "", 3, None, ["FA3"]])
def test_unknown_names(name):
    use(Counting().engine)
    with pytest.raises(ValueError, match="FA3, FA4, mine") as e: activate(name)
    assert f"impl={name!r}" in str(e.value) and current() == "mine"


def raising(error): return lambda: (_ for _ in ()).throw(error)


@pytest.mark.parametrize("register_fn, error", [
    (raising(OSError("no library")), OSError), (raising(KeyboardInterrupt()), KeyboardInterrupt), (lambda: "a word", TypeError),
    (lambda: 3, TypeError),
    (lambda: FlashHandle("an engine"), TypeError), (lambda x: None, TypeError), (lambda: dense, TypeError)])
def test_a_failed_activation_changes_nothing(register_fn, error):
    kernel, log = Counting(), []
    handle = use(kernel.engine, undo=lambda: log.append("removed"))
    engine = active_engine()
    register("other", register_fn=register_fn)
    with pytest.raises(error): activate("other")
    assert current() == "mine" and active_engine() is engine and log == [] and handle.engine is kernel.engine
    scaled_dot_product_attention(*qkv())
    assert kernel.forward == 1


def test_a_failed_activation_undoes_what_it_began():
    log = []
    register("bad", register_fn=lambda: FlashHandle("an engine", undo=lambda: log.append("bad")))
    with pytest.raises(TypeError): activate("bad")
    assert log == ["bad"] and current() is None
    use(Counting().engine, "stuck", undo=raising(RuntimeError("it stays")))
    engine = active_engine()
    register("next", register_fn=lambda: FlashHandle(Counting().engine, undo=lambda: log.append("next")))
    with pytest.raises(RuntimeError, match="it stays"): activate("next")
    assert log == ["bad", "next"] and current() == "stuck" and active_engine() is engine
    with pytest.raises(RuntimeError, match="it stays"): restore()
    assert current() is None and active_engine() is None  # the default, whatever a handle says


def test_the_new_one_comes_before_the_old_one_goes():
    log = []
    for name in "ab": register(name, register_fn=partial(lambda n: log.append(f"+{n}") or FlashHandle(undo=lambda: log.append(f"-{n}")), name))
    for name in "abb": activate(name)
    restore()
    assert log == ["+a", "+b", "-a", "+b", "-b", "-b"]


def test_a_handle_that_comes_back_is_not_removed():
    log, handle = [], FlashHandle(Counting().engine)
    handle.undo = lambda: log.append("removed")
    register("one", register_fn=lambda: handle)
    assert activate("one") is activate("one") is handle and log == []
    restore()
    assert log == ["removed"]


def test_a_register_fn_may_use_the_registry():
    log = []
    register("inner", register_fn=lambda: FlashHandle(Counting().engine, undo=lambda: log.append("inner")))
    register("outer", register_fn=lambda: (activate("inner"), FlashHandle(Counting().engine))[1])
    activate("outer")
    assert current() == "outer" and log == ["inner"]


def test_registering_again_replaces_and_leaves_the_active_one():
    first, second = Counting(), Counting()
    use(first.engine)
    register("mine", register_fn=lambda: FlashHandle(second.engine))
    scaled_dot_product_attention(*qkv())
    assert (first.forward, second.forward) == (1, 0) and names() == ["FA3", "FA4", "mine"]
    activate("mine")
    scaled_dot_product_attention(*qkv())
    assert (first.forward, second.forward) == (1, 1) and active_engine().name == "mine (2)"


def test_seats():
    "One for an engine and a name; a name that an engine of ours has is not taken from it."
    kernel, before = Counting().engine, list(ENGINES)
    for _ in range(5): use(kernel)
    use(kernel, "tiled")
    assert active_engine().name == "tiled (2)" and ENGINES["tiled"] is TILED and list(ENGINES) == [*before, "mine", "tiled (2)"]
    for _ in range(3): use(Counting().engine)
    assert list(ENGINES)[len(before):] == ["mine", "tiled (2)", "mine (2)", "mine (3)", "mine (4)"]


def test_a_handle_is_let_go():
    register("mine", register_fn=FlashHandle)
    alive = weakref.ref(activate("mine"))
    gc.collect()
    assert alive() is not None  # kept while it is active
    restore()
    gc.collect()
    assert alive() is None


def test_threads():
    "Activated for all threads; whoever asks meanwhile is answered by one or the other, and rightly."
    kernels = {name: Counting().engine for name in ("a", "b")}
    for name, kernel in kernels.items(): register(name, register_fn=partial(FlashHandle, kernel))
    q, k, v = qkv(L=3, S=4)
    want, faults, stop = scaled_dot_product_attention(q, k, v), [], threading.Event()

    def ask():
        while not stop.is_set():
            out = scaled_dot_product_attention(q, k, v)
            grad, = torch.autograd.grad(out.sum(), v)
            if not torch.allclose(out, want, atol=1e-6) or grad.shape != v.shape or current() not in (None, "a", "b"): faults.append(out)

    def switch(seed):
        rng = random.Random(seed)
        for _ in range(60):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rng.choice([lambda: activate("a"), lambda: activate("b"), restore])()

    def watched(f, *args):
        try: f(*args)
        except BaseException as e: faults.append(e)

    askers = [threading.Thread(target=watched, args=(ask,)) for _ in range(2)]
    switchers = [threading.Thread(target=watched, args=(switch, n)) for n in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in askers + switchers: t.start()
        for t in switchers: t.join(30)
        stop.set()
        for t in askers: t.join(30)
    assert faults == [] and not any(t.is_alive() for t in askers + switchers)
    activate("a")
    seen = []
    (thread := threading.Thread(target=lambda: seen.append(current()))).start()
    thread.join()
    assert seen == ["a"]


# ---------------------------------------------------------------- a kernel as an engine

@pytest.mark.parametrize("make, error, words", [
    (lambda: flash_kernel(None), TypeError, ["NoneType"]), (lambda: flash_kernel(dense, reasons="no"), TypeError, ["str"]),
    (lambda: flash_kernel(dense, backward=3), TypeError, ["int"]), (lambda: flash_kernel(dense, knows=["mask"]), ValueError, ["'mask'", "attn_mask"]),
    (lambda: flash_kernel(dense, knows="is_causal"), ValueError, ["attn_mask"])])
def test_wrong_kernels(make, error, words):
    with pytest.raises(error) as e: make()
    assert all(w in str(e.value) for w in words)


@pytest.mark.parametrize("kernel, words", [
    (lambda p: (p.q[:, :, :1], p.q[..., 0]), ["out", "(2, 2, 1, 8)", "(2, 2, 6, 8)"]), (lambda p: (p.q.double(), p.q[..., 0]), ["out", "float64"]),
    (lambda p: (p.q, p.q), ["lse", "(2, 2, 6, 8)"]), (lambda p: (p.q, p.q[..., 0].half()), ["lse", "float16"]),
    (lambda p: (p.q, None), ["lse", "None"])])
def test_a_kernel_is_held_to_its_shapes(kernel, words):
    use(flash_kernel(kernel))
    with pytest.raises(RuntimeError) as e: scaled_dot_product_attention(*qkv())
    assert all(w in str(e.value) for w in ["mine", *words])


@pytest.mark.parametrize("field, wrong", [
    ("dq", lambda g: g.dq.double()), ("dk", lambda g: g.dk[:1]), ("dbias", lambda g: None), ("dsinks", lambda g: None)])
def test_gradients_are_held_too(field, wrong):
    def backward(*args): return (g := MATH.backward(*args))._replace(**{field: wrong(g)})
    use(flash_kernel(dense, knows=WORDS, backward=backward))
    bias, sinks = torch.randn(6, 6, requires_grad=True), torch.randn(2, requires_grad=True)
    out = scaled_dot_product_attention(*qkv(), bias, sinks=sinks)
    with pytest.raises(RuntimeError, match=f"mine promised {field}"): out.sum().backward()


@pytest.mark.parametrize("word, words", {
    "attn_mask": dict(attn_mask=torch.ones(6, 6, dtype=torch.bool)), "is_causal": dict(is_causal=True), "window_size": dict(window_size=(2, 1)),
    "softcap": dict(softcap=2.0), "sinks": dict(sinks=torch.zeros(2)), "dropout_p": dict(dropout_p=0.5)}.items())
def test_a_word_it_does_not_know_goes_to_ours(word, words):
    kernel, answers, tensors = Counting(), [], qkv()
    for knows in ((), WORDS):
        use(flash_kernel(kernel.answer, knows=knows), f"knows {len(knows)}")
        torch.manual_seed(1)
        answers.append(scaled_dot_product_attention(*tensors, **words))
        assert kernel.forward == (1 if knows else 0)
    torch.testing.assert_close(*answers)
    assert words_of(make_problem(*tensors, **words, **(dict(seed=torch.zeros(2, dtype=torch.int64)) if word == "dropout_p" else {}))) == [word]


def test_max_scores_and_lse_come_with_it():
    use(Counting().engine)
    q, k, v = qkv()
    out, aux = scaled_dot_product_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    want = MATH.forward(make_problem(q, k, v))
    for a, b in zip((out, aux.lse, aux.max_scores), want): torch.testing.assert_close(a, b)
    (out.sum() + aux.lse.sum()).backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("seed", range(60))
def test_any_problem_with_our_backward(seed):
    "A forward from elsewhere and a backward of ours are one answer."
    problem, d_out, d_lse = random_problem(seed)
    engine = flash_kernel(dense, knows=WORDS)
    out, lse, top = engine.forward(problem, True)
    want = MATH.backward(problem, out, lse, d_out, d_lse)
    torch.testing.assert_close(top, MATH.forward(problem)[2], equal_nan=True, rtol=1e-4, atol=1e-4)
    loose = {torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(problem.q.dtype, 1e-4)
    for a, b in zip(engine.backward(problem, out, lse, d_out, d_lse, True)[:5], want): torch.testing.assert_close(a, b, rtol=loose, atol=loose)


# ---------------------------------------------------------------- in routing

def test_the_backward_asks_who_answered():
    "Whatever is active by then."
    first, second = Counting(), Counting()
    use(first.engine, "first")
    q, k, v = qkv()
    out = scaled_dot_product_attention(q, k, v)
    use(second.engine, "second")
    out.sum().backward()
    later = scaled_dot_product_attention(q, k, v)
    restore()
    later.sum().backward()
    assert (first.forward, first.backward, second.forward, second.backward) == (1, 1, 1, 1)


def test_only_behind_flash():
    kernel = Counting()
    use(kernel.engine)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend): scaled_dot_product_attention(*qkv())
    assert kernel.forward == 0
    with sdpa_kernel(FLASH): scaled_dot_product_attention(*qkv(), torch.ones(6, 6))  # a mask tensor, which ours would not take there
    assert kernel.forward == 1


def test_compiled_and_exported_programs_obey():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v): return scaled_dot_product_attention(q, k, v, causal_lower_right(6, 6))
    torch._dynamo.reset()
    tensors, kernel = qkv(), Counting()
    program = torch.export.export(Layer(), tuple(tensors)).run_decompositions().module()
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    want = [f(*tensors) for f in (compiled, program)]
    for turn in range(2):
        use(kernel.engine)
        for f, w in zip((compiled, program), want): torch.testing.assert_close(f(*tensors), w)
        assert kernel.forward == 2 * turn + 2
        torch.autograd.grad(compiled(*tensors).sum(), tensors)
        assert kernel.backward == turn + 1
        kernel.forward -= 1
        restore()
        for f, w in zip((compiled, program), want): assert f(*tensors).equal(w)


def test_vmap_and_functional_gradients():
    kernel = Counting()
    q, k, v = (t.detach() for t in qkv(B=4))
    f = lambda q: scaled_dot_product_attention(q[None], k[:1], v[:1]).square().sum()
    want = torch.vmap(torch.func.grad(f))(q)
    use(kernel.engine)
    torch.testing.assert_close(torch.vmap(torch.func.grad(f))(q), want)
    assert kernel.forward >= 1 and kernel.backward >= 1


def test_attend_by_name():
    use(flash_kernel(dense, knows=["is_causal"]))
    q, k, v = qkv()
    assert attend(make_problem(q, k, v, is_causal=True), "mine")[0].equal(MATH.forward(make_problem(q, k, v, is_causal=True))[0])
    with pytest.raises(RuntimeError, match="the mine engine cannot run this problem: it does not know softcap"):
        attend(make_problem(q, k, v, softcap=1.0), "mine")


@pytest.mark.parametrize("seed", range(40))
def test_who_answers_is_who_was_told(seed):
    rng = random.Random(seed)
    knows = rng.sample(list(WORDS), rng.randint(0, len(WORDS)))
    asked, mine = [], flash_kernel(lambda p: asked.append("mine") or dense(p), knows=knows)
    if rng.random() < 0.8: use(mine)
    problem, *_ = random_problem(seed)
    order = rng.sample([SDPBackend.MATH, FLASH, SDPBackend.EFFICIENT_ATTENTION], rng.randint(1, 3))
    with sdpa_kernel(order):
        told = {b: backend_engine(b, problem) for b in permitted_backends()}
        able = next((b for b, (_, reasons) in told.items() if not reasons), None)
        if able is None:
            with pytest.raises(RuntimeError) as e: attend(problem)
            assert all(r in str(e.value) for _, reasons in told.values() for r in reasons)
            return
        assert choose(problem) == (able, told[able][0])
        attend(problem)
    assert asked == ["mine"] * (told[able][0].name == "mine")
    if FLASH in told and current() and told[FLASH][0].name != "mine":
        notes = told[FLASH][1].notes
        assert notes and all(n.startswith("mine: ") for n in notes) and (not told[FLASH][1] or set(notes) <= set(told[FLASH][1]))


def test_the_questions_say_it_too():
    q, k, v = qkv()
    plain, masked = (SDPAParams(q, k, v, m, 0.0, True, False) for m in (None, torch.ones(6, 6)))
    use(flash_kernel(dense))
    assert can_use_flash_attention(plain) and not can_use_flash_attention(masked)
    for params, said in ((plain, ["mine: it does not know is_causal"]), (masked, ["attn_mask is a tensor", "mine: it does not know attn_mask"])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            can_use_flash_attention(params, debug=True)
        assert all(any(s in str(w.message) for w in caught) for s in said)
    use(flash_kernel(dense, knows=WORDS), "all")
    assert can_use_flash_attention(masked) and choose(pose(masked))[1].name == "all"


# ---------------------------------------------------------------- judged

def judged(engine, monkeypatch, *globs):
    "The cases of the contract and of others' faults before an implementation behind FLASH."
    use(engine, "judged")
    monkeypatch.setitem(judge.ENGINE_BACKENDS, name := active_engine().name, [FLASH])
    cases = select([c for name in ("contract", "faults") for c in suite(name, quick=not globs)], globs)
    return judge.run(cases, [judge.engine_column(name)])


def test_a_good_kernel_is_found_good(monkeypatch):
    results = judged(flash_kernel(dense, knows=WORDS), monkeypatch)
    assert [(r.case, r.what, r.message) for r in results.failures] == []
    assert {r.row for r in results.of(status="pass")} >= {f"R{n}" for n in range(1, 18)}, "a row was never put to it"
    asked = [r for r in results.records if r.row.startswith("R")]  # the other rows speak of other doors
    assert sum(r.status == "pass" for r in asked) > 4 * sum(r.status == "cannot" for r in asked)


def forgets_the_corner(problem):
    s = problem.q @ problem.k.mT * problem.scale
    if problem.window == (-1, 0): s = s + torch.full_like(s[0, 0], -math.inf).triu(1)  # always upper left
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp() @ problem.v, lse[..., 0]


def lse_in_bits(problem): return (found := dense(problem))[0], found[1] / math.log(2)


def test_faulty_kernels_are_found_out(monkeypatch):
    failures = judged(flash_kernel(forgets_the_corner, knows=["is_causal"]), monkeypatch, "R2/*").failures
    assert failures and all("lower_right" in r.case for r in failures)
    failures = judged(flash_kernel(lse_in_bits, knows=WORDS), monkeypatch, "R12/*").failures
    assert {"lse"} <= {r.what for r in failures} and any(r.case.endswith("/backward") for r in failures)


# ---------------------------------------------------------------- FlashAttention 3 and 4

def fa3_fwd(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
            seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None,
            rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
            window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
            num_splits=1, pack_gqa=None, sm_margin=0): return locals()


def fa3_bwd(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
            max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
            softcap=0.0, deterministic=False, sm_margin=0): return locals()


def fa4_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
            min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
            learnable_sink=None, num_splits=1, pack_gqa=None, score_mod=None, mask_mod=None, return_lse=False, out=None, lse=None): return locals()


def fa4_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None,
            cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, mask_mod=None, dlse=None,
            learnable_sink=None): return locals()


def lies_as_wanted(name, t, rows, B, heads):
    "What the packages' own checks and their loads need."
    assert t.shape[:1] + t.shape[2:3] == (B, heads) and t.shape[1] == rows, (name, t.shape)
    assert t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(s % 8 == 0 for s, n in zip(t.stride()[:-1], t.shape) if n > 1), (name, t.stride())


class Stand:
    "A package of FA3's or FA4's signatures that checks what it is asked and computes with the dense engine."
    def __init__(self, name, sizes):
        self.fourth, self.sizes, self.log = name == "FA4", sizes, []
        self.none = None if self.fourth else -1

    def problem(self, a):
        B, H, Hkv, L, S, *_ = self.sizes
        for name, rows, heads in (("q", L, H), ("k", S, Hkv), ("v", S, Hkv)): lies_as_wanted(name, a[name], rows, B, heads)
        left, right, causal = a["window_size_left"], a["window_size_right"], a.get("causal", a.get("is_causal"))
        assert all(w == self.none or type(w) is int and 0 <= w < 2**31 for w in (left, right)) and type(causal) is bool
        assert causal == ((left, right) == (self.none, 0)) and a["softmax_scale"] > 0 and type(a["softcap"]) is float
        window = tuple(-1 if w == self.none else w for w in (left, right))
        return make_problem(*(a[n].transpose(1, 2) for n in "qkv"), window_size=window, is_causal=causal, softcap=a["softcap"],
            scale=a["softmax_scale"], alignment="lower_right")

    def forward(self, a):
        assert a["num_splits"] == 1 and a.get("return_lse", True)
        out, lse, _ = MATH.forward(self.problem(a))
        self.log.append("forward")
        return (out.transpose(1, 2).contiguous(), lse, None, None, None)[:5 if self.fourth else 4]

    def backward(self, a):
        problem, lse = self.problem(a), a["lse" if self.fourth else "softmax_lse"]
        B, H, _, L, *_ = self.sizes
        for n in ("out", "dout"): lies_as_wanted(n, a[n], L, B, H)
        assert a["deterministic"] is True and lse.is_contiguous() and lse.dtype == torch.float32 and a["dout"].dtype == a["q"].dtype
        dlse = a.get("dlse")
        grads = MATH.backward(problem, a["out"].transpose(1, 2), lse, a["dout"].transpose(1, 2), dlse)[:3]
        self.log.append("backward" if dlse is None else "backward of lse")
        if self.fourth: return tuple(g.transpose(1, 2).contiguous() for g in grads)
        for n, g in zip(("dq", "dk", "dv"), grads):
            assert a[n].shape == a[n[1]].shape and a[n].is_contiguous() and a[n].dtype == a["q"].dtype
            a[n].copy_(g.transpose(1, 2))
        return torch.empty(0)


@pytest.fixture
def stand(monkeypatch):
    "Puts a stand-in in the package's place, and lets it run on a CPU."
    def put(name, sizes):
        package = Stand(name, sizes)
        def wrapped(signature, f):  # the published signature in front
            def call(*args, **kwargs): return f(signature(*args, **kwargs))
            call.__signature__ = inspect.signature(signature)
            return call
        if name == "FA3":
            module = types.ModuleType("flash_attn_interface")
            module._flash_attn_forward, module._flash_attn_backward = wrapped(fa3_fwd, package.forward), wrapped(fa3_bwd, package.backward)
            monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
        else:
            module = types.ModuleType("flash_attn.cute.interface")
            module._flash_attn_fwd, module._flash_attn_bwd = wrapped(fa4_fwd, package.forward), wrapped(fa4_bwd, package.backward)
            for part in ("flash_attn", "flash_attn.cute"): monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
            monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
        monkeypatch.setattr(registry, "_machine_reasons", lambda *args: [])
        return package
    return put


ASKED = [{}, dict(is_causal=True), dict(window_size=(3, -1)), dict(window_size=(3, 2)), dict(window_size=(-1, 2)),
         dict(is_causal=True, window_size=(4, -1)), dict(softcap=3.0, is_causal=True), dict(scale=0.3),
         dict(window_size=(2**62, 0)), dict(window_size=(100, 100)), dict(window_size=(0, 0))]


@pytest.mark.parametrize("knobs", ASKED, ids=str)
@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_what_they_are_asked(name, knobs, stand):
    for L, S, H, Hkv, dtype in ((7, 7, 2, 2, torch.float16), (5, 12, 4, 2, torch.bfloat16), (1, 9, 4, 1, torch.float16), (1, 1, 2, 2, torch.float16)):
        problem = make_problem(*(torch.randn(2, h, n, 16).to(dtype) for h, n in ((H, L), (Hkv, S), (Hkv, S))), alignment="lower_right", **knobs)
        package = stand(name, problem.sizes)
        activate(name)
        engine = active_engine()
        assert engine.name == name and engine.reasons(problem) == [], engine.reasons(problem)
        out, lse, top = engine.forward(problem, True)
        d_out, d_lse, want = torch.randn_like(out), torch.randn_like(lse), MATH.forward(problem)
        assert out.equal(want[0]) and lse.equal(want[1])
        torch.testing.assert_close(top, want[2])
        loose = dict(rtol=3e-2, atol=3e-2)
        for loss in (None, d_lse):
            got, want = (e.backward(problem, out, lse, d_out, loss)[:3] for e in (engine, MATH))
            torch.testing.assert_close(got, want, **loose)
        assert package.log == ["forward", "backward", *(["backward of lse"] if name == "FA4" else [])]


def broken_up(t): return torch.stack([torch.full_like(t, math.nan), t], -1).flatten(-2)[..., 1::2]
def shifted(t): return torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view(t.shape)


LAYOUTS = {"plain": torch.clone, "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
           "expanded": lambda t: t[:1].expand(t.shape), "every second": broken_up, "odd address": shifted,
           "transposed": lambda t: t.mT.contiguous().mT}


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_however_tensors_lie(name, lay, stand):
    q, k, v = (lay(torch.randn(3, 2, 5, 16).half()).detach().requires_grad_() for _ in range(3))
    package = stand(name, (3, 2, 2, 5, 5, 16, 16))
    activate(name)
    with sdpa_kernel(FLASH): out = scaled_dot_product_attention(q, k, v, is_causal=True)
    d_out = lay(torch.randn_like(out))
    got, want = torch.autograd.grad(out, (q, k, v), d_out), MATH.backward(p := make_problem(q, k, v, is_causal=True), *MATH.forward(p)[:2], d_out)
    assert package.log == ["forward", "backward"]
    for a, b in zip(got, want): torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_through_the_door_compiled_and_with_a_loss_on_lse(name, stand):
    torch._dynamo.reset()
    package = stand(name, (2, 4, 2, 5, 9, 16, 16))
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.bfloat16, requires_grad=True) for h, n in ((4, 5), (2, 9), (2, 9)))
    def call(q, k, v): return scaled_dot_product_attention(q, k, v, causal_lower_right(5, 9), enable_gqa=True, return_aux=AuxRequest(lse=True))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    def loss(f): return (a := f(q, k, v))[0].float().square().sum() + a[1].lse.sum()
    want = torch.autograd.grad(loss(compiled), (q, k, v))
    assert package.log == []
    activate(name)
    got = torch.autograd.grad(loss(compiled), (q, k, v))
    assert package.log == ["forward", *(["backward of lse"] if name == "FA4" else [])]
    for a, b in zip(got, want): torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
    restore()
    call(q, k, v)
    assert package.log[1:] == (["backward of lse"] if name == "FA4" else [])


half = partial(torch.zeros, dtype=torch.float16)


@pytest.mark.parametrize("sizes, knobs, said", [
    ((5, 5, 16, 16), dict(mask=(5, 5)), "attn_mask"), ((5, 5, 16, 16), dict(sinks=torch.zeros(2)), "sinks"),
    ((5, 5, 16, 16), dict(kv_lengths=torch.tensor([3])), "kv_lengths"),
    ((5, 5, 16, 16), dict(dropout_p=0.5, seed=torch.zeros(2, dtype=torch.int64)), "dropout_p"),
    ((5, 5, 16, 16), dict(dtype=torch.float32), "torch.float32"), ((5, 5, 16, 16), dict(dtype=torch.float64), "torch.float64"),
    ((5, 5, 12, 12), {}, "E=12"), ((5, 5, 16, 8), {}, "Ev=8"), ((5, 5, 264, 264), {}, "E=264"),
    ((5, 0, 16, 16), {}, "nothing empty"), ((0, 5, 16, 16), {}, "nothing empty"),
    ((5, 5, 0, 0), {}, "nothing empty"), ((5, 5, 16, 16), dict(scale=0.0), "p.scale=0.0"), ((5, 5, 16, 16), dict(scale=-1.0), "p.scale=-1.0"),
    ((5, 9, 16, 16), dict(is_causal=True), "lower right"), ((5, 9, 16, 16), dict(window_size=(1, 1)), "lower right"),
    ((9, 5, 16, 16), dict(is_causal=True, alignment="lower_right"), "without keys"),
    ((9, 5, 16, 16), dict(window_size=(2, 3), alignment="lower_right"), "without keys")])
@pytest.mark.parametrize("engine", [FA3, FA4], ids=lambda e: e.name)
def test_what_they_are_not_asked(engine, sizes, knobs, said, monkeypatch):
    monkeypatch.setattr(registry, "_machine_reasons", lambda *args: [])
    (L, S, E, Ev), knobs = sizes, dict(knobs)
    dtype, mask = knobs.pop("dtype", torch.float16), knobs.pop("mask", None)
    q, k, v = torch.zeros(1, 2, L, E, dtype=dtype), torch.zeros(1, 2, S, E, dtype=dtype), torch.zeros(1, 2, S, Ev, dtype=dtype)
    (reason,) = engine.reasons(make_problem(q, k, v, None if mask is None else torch.zeros(mask), **knobs))
    assert said in reason and reason.startswith(engine.name)


LOWER = dict(alignment="lower_right")


@pytest.mark.parametrize("sizes, knobs", [
    ((5, 9), {}), ((9, 5), {}), ((9, 5), dict(window_size=(20, 20))), ((9, 5), dict(window_size=(-1, 4), **LOWER)),
    ((5, 9), dict(window_size=(0, 0), **LOWER)), ((9, 5), dict(window_size=(2, -1), **LOWER)), ((1, 9), dict(is_causal=True, **LOWER)),
    ((7, 7), dict(is_causal=True))], ids=str)
def test_what_leaves_no_query_without_keys_is_asked(sizes, knobs, monkeypatch):
    monkeypatch.setattr(registry, "_machine_reasons", lambda *args: [])
    L, S = sizes
    problem = make_problem(half(1, 2, L, 16), half(1, 2, S, 16), half(1, 2, S, 16), **knobs)
    assert FA3.reasons(problem) == FA4.reasons(problem) == []
    lse = MATH.forward(problem)[1]
    assert torch.isfinite(lse).all()


def test_head_sizes_and_counts(monkeypatch):
    monkeypatch.setattr(registry, "_machine_reasons", lambda *args: [])
    wide = make_problem(*3 * [half(1, 2, 3, 256)])
    assert FA3.reasons(wide) == [] and "128" in FA4.reasons(wide)[0]
    many = half(1, 1, 1, 8).expand(70000, 1, 1, 8)
    assert "65535" in FA3.reasons(make_problem(many, many, many))[0]


@pytest.mark.parametrize("capability, fit", [((8, 0), ""), ((9, 0), "FA3 FA4"), ((10, 0), "FA4"), ((10, 3), "FA4"), ((11, 0), "FA4"), ((12, 0), "")])
def test_machines(capability, fit, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name, majors in (("FA3", (9,)), ("FA4", (9, 10, 11))):
        reasons = registry._machine_reasons(name, majors, torch.device("cuda"))
        assert (reasons == []) == (name in fit) and (name in fit or str(capability) in reasons[0])
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in registry._machine_reasons("FA3", (9,), torch.device("cuda"))[0]
    assert "cpu" in registry._machine_reasons("FA3", (9,), torch.device("cpu"))[0]


def test_on_a_cpu_they_leave_the_call_to_ours(stand, monkeypatch):
    machine = registry._machine_reasons
    stand("FA3", ())
    monkeypatch.setattr(registry, "_machine_reasons", machine)
    activate("FA3")
    q, k, v = qkv(dtype=torch.float16, E=16)
    assert scaled_dot_product_attention(q, k, v).shape == q.shape and choose(make_problem(q, k, v))[1] is TILED
    assert explain_routing(SDPAParams(q, k, v, None, 0.0, False, False))[FLASH].notes == ("FA3: FA3 runs on CUDA tensors, and query is on cpu",)


# ---------------------------------------------------------------- packages that are missing, or others

@pytest.mark.parametrize("name, missing, said", [("FA3", "flash_attn_interface", "hopper"), ("FA4", "flash_attn", "flash-attn-4")])
def test_missing_packages(name, missing, said, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    use(Counting().engine)
    with pytest.raises(ModuleNotFoundError, match=missing) as e: activate(name)
    assert e.value.name.startswith(missing) and said in str(e.value) and name in str(e.value) and current() == "mine"


def test_flash_attn_without_cute(monkeypatch):
    package = types.ModuleType("flash_attn")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    with pytest.raises(ModuleNotFoundError, match="flash-attn-4") as e: activate("FA4")
    assert e.value.name == "flash_attn.cute"


def test_what_the_package_itself_lacks_is_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text("import flash_attn_3_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_3_that_is_not_there") as e: activate("FA3")
    assert e.value.name == "flash_attn_3_that_is_not_there" and "hopper" not in str(e.value) and current() is None


def test_another_release_is_told_what_it_lacks(monkeypatch):
    module = types.ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    with pytest.raises(RuntimeError, match="_flash_attn_forward"): activate("FA3")
    module._flash_attn_forward = fa3_fwd
    module._flash_attn_backward = lambda dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, \
        deterministic=False: None
    with pytest.raises(RuntimeError, match="_flash_attn_backward.*is_causal, window_size_left, window_size_right"): activate("FA3")
    assert current() is None


def test_operators_of_torch_library_show_their_words(monkeypatch):
    "FA3's two functions are such operators."
    module = types.ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                window_size_left: int = -1, window_size_right: int = -1,
                softcap: float = 0.0, num_splits: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return q.clone(), q[..., 0].float()

    module._flash_attn_forward = torch.library.custom_op("tensorplay_trial::fa3_forward", forward, mutates_args=())
    module._flash_attn_backward = fa3_bwd
    activate("FA3")
    assert registry._lacks(module._flash_attn_forward, {"num_splits", "sinks"}) == {"sinks"}
    assert registry._lacks(lambda **words: None, {"anything"}) == set()


def test_engines_are_engines():
    for engine in (FA3, FA4): assert isinstance(engine, Engine) and engine.reasons(make_problem(*3 * [torch.zeros(1, 1, 2, 8)]))
