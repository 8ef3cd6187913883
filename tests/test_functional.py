"The front door, routing and the operator behind them."
import asyncio
import contextlib
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tensorplay_attn
from tensorplay_attn import SDPAParams, SDPBackend, can_use_efficient_attention, can_use_flash_attention, explain_routing, sdpa_kernel
from tensorplay_attn.autograd import attend, pack
from tensorplay_attn.functional import AuxOutput, AuxRequest, scaled_dot_product_attention
from tensorplay_attn.problem import make_problem
from tensorplay_attn.routing import DEFAULT_ORDER, choose, permitted_backends, pose

MATH, FLASH, EFFICIENT = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def rand(*shape, **kwargs): return torch.randn(*shape, **kwargs)


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("kwargs", [{}, dict(is_causal=True), dict(scale=0.2), dict(mask="bool"), dict(mask="float")], ids=str)
def test_drop_in(lead, kwargs):
    kwargs, (q, k, v) = dict(kwargs), (rand(*lead, n, 8, requires_grad=True) for n in (5, 7, 7))
    if kind := kwargs.pop("mask", None): kwargs["attn_mask"] = torch.rand(5, 7) < 0.8 if kind == "bool" else rand(5, 7)
    ours, theirs = scaled_dot_product_attention(q, k, v, **kwargs), F.scaled_dot_product_attention(q, k, v, **kwargs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.allclose(ours, theirs, atol=1e-6)
    d_out = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), d_out) for o in (ours, theirs))): assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mask", [(2, 3, 1, 5, 7), (3, 4, 5, 7), (1, 1, 4, 1, 7), (2, 1, 1, 5, 7)], ids=str)
def test_masks_over_several_batch_axes(mask, lead=(2, 3)):
    q, k, v, m = rand(*lead, 4, 5, 8), rand(*lead, 4, 7, 8), rand(*lead, 4, 7, 8), torch.rand(mask) < 0.7
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): want = F.scaled_dot_product_attention(q, k, v, m)
    assert torch.allclose(scaled_dot_product_attention(q, k, v, m), want, atol=1e-6)


def test_batch_axes_broadcast_and_gradients_come_back_summed():
    q, k, v = rand(1, 3, 2, 5, 8, requires_grad=True), rand(4, 1, 2, 7, 8, requires_grad=True), rand(1, 1, 2, 7, 8, requires_grad=True)
    wide = [t.expand(4, 3, *t.shape[2:]) for t in (q, k, v)]
    out, want = scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(*wide)
    assert torch.allclose(out, want, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, want))): assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


def test_aux_is_what_was_asked_for():
    q, k, v = (rand(2, 3, 6, 8) for _ in range(3))
    for lse, top in ((False, False), (True, False), (False, True), (True, True)):
        out, aux = scaled_dot_product_attention(q, k, v, return_aux=AuxRequest(lse, top))
        assert isinstance(aux, AuxOutput) and (aux.lse is not None) == lse and (aux.max_scores is not None) == top
        s = q @ k.mT / 8**0.5
        if lse: assert torch.allclose(aux.lse, s.logsumexp(-1), atol=1e-5)
        if top: assert torch.allclose(aux.max_scores, s.amax(-1), atol=1e-5) and not aux.max_scores.requires_grad


def test_autocast_is_torchs():
    q, k, v = rand(1, 2, 6, 8), rand(1, 2, 6, 8).half(), rand(1, 2, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaled_dot_product_attention(q, k, v).dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert scaled_dot_product_attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
    with pytest.raises(ValueError, match="float16"): scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("backend", [MATH, FLASH, EFFICIENT])
def test_only_the_mask_requires_grad(backend):
    q, k, v, bias = rand(1, 2, 6, 8), rand(1, 2, 6, 8), rand(1, 2, 6, 8), rand(6, 6, requires_grad=True)
    with sdpa_kernel(backend) if backend != FLASH else contextlib.nullcontext():
        scaled_dot_product_attention(q, k, v, bias).square().sum().backward()
    want = bias.detach().clone().requires_grad_()
    (((q @ k.mT / 8**0.5 + want).softmax(-1) @ v).square().sum()).backward()
    assert torch.allclose(bias.grad, want.grad, atol=1e-5)


@pytest.mark.parametrize("knobs", [{}, {"softcap": 2.0}, {"window_size": (1, 0)}], ids=str)
def test_gradients_have_no_silent_second_order(knobs):
    q = rand(1, 1, 4, 8, requires_grad=True)
    for backend in (MATH, FLASH):
        with sdpa_kernel(backend): grad, = torch.autograd.grad(scaled_dot_product_attention(q, q, q, **knobs).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="taken once"): torch.autograd.grad(grad.sum(), q)


def test_checkpoint():
    q, k, v = (rand(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    f = lambda *x: scaled_dot_product_attention(*x, is_causal=True).square().sum()
    want = torch.autograd.grad(f(q, k, v), (q, k, v))
    again = torch.autograd.grad(checkpoint(f, q, k, v, use_reentrant=False), (q, k, v))
    for a, b in zip(want, again): assert a.equal(b)


def test_dropout_repeats_with_the_seed_and_agrees_between_backends():
    q, k, v = (rand(2, 2, 50, 8, requires_grad=True) for _ in range(3))
    def run(backend):
        torch.manual_seed(5)
        with sdpa_kernel(backend): out = scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b, c in zip(run(MATH), run(FLASH), run(EFFICIENT)): assert torch.allclose(a, b, atol=1e-4) and b.equal(c)
    assert run(FLASH)[0].equal(run(FLASH)[0])
    torch.manual_seed(6)
    assert not scaled_dot_product_attention(q, k, v, dropout_p=0.3).equal(run(FLASH)[0])


# ---------------------------------------------------------------- compile and export

def test_compile_sees_one_node_and_explicit_scale_is_kept():
    def f(q, k, v): return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True, window_size=(3, 0))
    q, k, v = rand(1, 4, 9, 8, requires_grad=True), rand(1, 2, 9, 8, requires_grad=True), rand(1, 2, 9, 8, requires_grad=True)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for _ in range(2):
        a, b = f(q, k, v), compiled(q, k, v)
        assert a.equal(b)
        for x, y in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (a, b))): assert x.equal(y)
        q, k, v = (torch.cat([t, t], 2).detach().requires_grad_() for t in (q, k, v))


def test_a_compiled_program_obeys_sdpa_kernel_around_it():
    q = rand(1, 2, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool)
    compiled = torch.compile(lambda q: scaled_dot_product_attention(q, q, q, mask), fullgraph=True, backend="aot_eager")
    compiled(q)
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="attn_mask is a tensor"): compiled(q)
    with sdpa_kernel([MATH]): assert compiled(q).equal(attend(make_problem(q, q, q, mask), "math")[0])


@pytest.mark.parametrize("knobs", [dict(is_causal=True), dict(softcap=2.0), dict(dropout_p=0.1)], ids=str)
def test_export_keeps_one_node_through_the_default_decompositions(knobs):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v): return scaled_dot_product_attention(q, k, v, alignment="lower_right", enable_gqa=True, **knobs)
    L, S = torch.export.Dim("L", max=512), torch.export.Dim("S", max=512)
    args = rand(2, 4, 7, 8), rand(2, 2, 9, 8), rand(2, 2, 9, 8)
    program = torch.export.export(Layer(), args, dynamic_shapes=[{2: L}, {2: S}, {2: S}]).run_decompositions()
    assert [str(n.target) for n in program.graph.nodes].count("tensorplay_attn.forward.default") == 1
    args = rand(2, 4, 20, 8), rand(2, 2, 31, 8), rand(2, 2, 31, 8)
    torch.manual_seed(1)
    got = program.module()(*args)
    torch.manual_seed(1)
    assert got.equal(Layer()(*args))


@pytest.mark.parametrize("engine", ["math", "tiled"])  # the others: test_routing_kernels
@pytest.mark.parametrize("knobs", [{}, dict(is_causal=True), dict(softcap=2.0), dict(window_size=(2, 1), alignment="lower_right")], ids=str)
def test_opcheck(engine, knobs):
    q, k, v = (rand(1, 2, n, 8, requires_grad=True) for n in (5, 20, 20))
    torch.library.opcheck(torch.ops.tensorplay_attn.forward, (engine, False, *pack(make_problem(q, k, v, **knobs))))


# ---------------------------------------------------------------- routing

def params(mask=None, **kwargs):
    x = rand(1, 2, 4, 8)
    return SDPAParams(x, x, x, mask, kwargs.get("dropout", 0.0), kwargs.get("is_causal", False), kwargs.get("enable_gqa", False))


@pytest.mark.parametrize("mask", [None, torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, 4)], ids=["none", "bool", "float"])
@pytest.mark.parametrize("allowed", [[MATH], [FLASH], [EFFICIENT], [FLASH, MATH], [SDPBackend.CUDNN_ATTENTION], list(DEFAULT_ORDER)], ids=str)
def test_dispatch_does_what_explain_says(mask, allowed):
    p = params(mask)
    with sdpa_kernel(allowed):
        may = [b for b, reasons in explain_routing(p).items() if not reasons]
        assert can_use_flash_attention(p) == (FLASH in may) and can_use_efficient_attention(p) == (EFFICIENT in may)
        assert set(may) <= set(allowed)
        if may: assert choose(pose(p))[0] == next(b for b in allowed if b in may)
        else:
            with pytest.raises(RuntimeError) as e: scaled_dot_product_attention(*p[:4])
            for b, reasons in explain_routing(p).items(): assert b.name in str(e.value) and all(r in str(e.value) for r in reasons)


def test_a_list_is_a_preference_unless_said_otherwise():
    for priority, want in ((None, MATH), (True, MATH), (False, FLASH)):
        with sdpa_kernel([MATH, FLASH], set_priority=priority): assert choose(pose(params()))[0] == want
    with sdpa_kernel(torch.nn.attention.SDPBackend.MATH): assert permitted_backends() == (MATH,)  # torch's members are taken too


def test_permission_is_local_to_thread_and_task():
    barrier, seen = threading.Barrier(4), {}
    def work(backend):
        for _ in range(50):
            with sdpa_kernel(backend):
                barrier.wait()
                seen.setdefault(backend, set()).add(permitted_backends())
    threads = [threading.Thread(target=work, args=(b,)) for b in (MATH, FLASH, EFFICIENT, SDPBackend.CUDNN_ATTENTION)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert seen == {b: {(b,)} for b in seen} and len(seen) == 4

    async def task(backend):
        with sdpa_kernel(backend):
            for _ in range(5):
                await asyncio.sleep(0)
                assert permitted_backends() == (backend,)
    async def main(): await asyncio.gather(*(task(b) for b in (MATH, FLASH, EFFICIENT)))
    asyncio.run(main())
    assert permitted_backends() == DEFAULT_ORDER


def test_unfused_calls_warn_when_asked(monkeypatch):
    x = rand(1, 1, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdpa_kernel(MATH): scaled_dot_product_attention(x, x, x)
    monkeypatch.setattr(tensorplay_attn, "WARN_FOR_UNFUSED_KERNELS", True)
    with sdpa_kernel(MATH), pytest.warns(UserWarning) as caught: scaled_dot_product_attention(x, x, x)
    assert "FLASH_ATTENTION was not used: sdpa_kernel does not permit FLASH_ATTENTION" in [str(w.message) for w in caught]


def test_attention_from_many_threads():
    q, k, v = (rand(2, 4, 100, 16) for _ in range(3))
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    results = []
    threads = [threading.Thread(target=lambda: results.append(scaled_dot_product_attention(q, k, v, is_causal=True))) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(results) == 8 and all(torch.allclose(r, want, atol=1e-6) for r in results)


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8), (2, 3, 2, 4, 8)], ids=str)
def test_routing_is_asked_about_tensors_of_any_rank(shape):
    x = rand(*shape)
    p = SDPAParams(x, x, x, None, 0.1, True, False)
    assert can_use_flash_attention(p) and can_use_efficient_attention(p)
    with sdpa_kernel(FLASH): assert scaled_dot_product_attention(*p[:5], is_causal=True).shape == shape
