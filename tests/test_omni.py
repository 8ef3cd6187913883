"omni_attention from outside: every mask and score of the catalogue against the truth, and every way a program can hold the call."
import functools
import gc
import itertools
import math
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

from tensorplay_attn import AuxRequest, BlockMask, SDPBackend, create_block_mask, omni_attention, sdpa_kernel
from tensorplay_attn.autograd import attend
from tensorplay_attn.bounds import judge_backward, judge_forward
from tensorplay_attn.engines import ENGINES
from tensorplay_attn.functional import scaled_dot_product_attention
from tensorplay_attn.masks import CATALOGUE, and_masks, causal_mask, create_mask, document_mask, or_masks, padding_mask, window_mask
from tensorplay_attn.omni_attention import with_mods
from tensorplay_attn.problem import make_problem, restrict
from tensorplay_attn.routing import pose_call
from tensorplay_attn.scores import SCORES, chain_scores

SIZES = (1, 16, 100, 128, 129, 257)
BLOCKS = (16, 64, 128, (32, 128))


def heads(B=2, H=2, Hkv=2, L=40, S=40, E=8, Ev=None, dtype=torch.float32, grad=True):
    return [torch.randn(B, h, n, e, dtype=dtype, requires_grad=grad) for h, n, e in ((H, L, E), (Hkv, S, E), (Hkv, S, Ev or E))]


def posed(q, k, v, score_mod, block_mask):
    return with_mods(pose_call(q, k, v, None, True)[0], score_mod, block_mask, {})


def held(engine, problem, seed=0):
    "An engine's answer and all its gradients before the judge."
    torch.manual_seed(seed)
    engine = ENGINES["tiled" if engine == "tiled" or problem.mods is None else engine]
    with torch.no_grad():
        out, lse, top = engine.forward(problem, True)
        d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
        grads = engine.backward(problem, out, lse, d_out, d_lse)
    verdicts = judge_forward(problem, out, lse, top) | judge_backward(problem, grads, d_out, d_lse)
    wrong = {name: str(verdict) for name, verdict in verdicts.items() if not verdict}
    assert not wrong, wrong
    return verdicts


def combinations(name, n):
    "So many of all (L, S, block, heads), another choice for each name, each size and block in turn."
    every = list(itertools.product(SIZES, SIZES, BLOCKS, ((2, 2), (4, 2), (3, 1))))
    start = sum(map(ord, name)) * 37 % len(every)
    return [every[(start + step * 157) % len(every)] for step in range(n)]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mask_is_right(name):
    for at, (L, S, block, (H, Hkv)) in enumerate(combinations(name, 5)):
        torch.manual_seed(at)
        mask_mod = CATALOGUE[name](2, H, L, S, at)
        by_head, by_batch = name == "by_head", name != "by_head"
        mask = create_block_mask(mask_mod, 2 if by_batch else None, H if by_head else None, L, S, device="cpu", BLOCK_SIZE=block)
        assert mask.to_mask().equal(create_mask(mask_mod, 2 if by_batch else None, H if by_head else None, L, S, device="cpu"))
        problem = posed(*heads(2, H, Hkv, L, S, 8, 4 if at else 8, grad=False), None, mask)
        held("tiled", problem)


@pytest.mark.parametrize("name", SCORES)
def test_every_score_is_right(name):
    for at, (L, S, block, (H, Hkv)) in enumerate(combinations(name, 4)):
        torch.manual_seed(at)
        score_mod, learned = SCORES[name](2, H, L, S, at)
        mask = None if at == 1 else create_block_mask(CATALOGUE["prefix"](2, H, L, S, at), 2, None, L, S, device="cpu", BLOCK_SIZE=block)
        problem = posed(*heads(2, H, Hkv, L, S, 8, grad=False), score_mod, mask)
        if learned: assert len(problem.mods.score_tensors) > 0
        held("tiled", problem)


def together(seed):
    "Some masks and scores of the catalogue at once."
    g = torch.Generator().manual_seed(seed)
    pick = lambda xs: xs[torch.randint(len(xs), (), generator=g).item()]
    L, S, (H, Hkv) = pick(SIZES), pick(SIZES), pick(((2, 2), (4, 2)))
    masks = [CATALOGUE[pick(list(CATALOGUE))](2, H, L, S, seed + n) for n in range(pick((1, 2, 3)))]
    scores = [SCORES[pick(list(SCORES))](2, H, L, S, seed + n)[0] for n in range(pick((1, 2)))]
    mask = create_block_mask(pick((and_masks, or_masks))(*masks), 2, H, L, S, device="cpu", BLOCK_SIZE=pick(BLOCKS))
    torch.manual_seed(seed)
    return posed(*heads(2, H, Hkv, L, S, 8, grad=False), chain_scores(*scores), mask)


@pytest.mark.parametrize("seed", range(24))
def test_combined_they_are_right(seed): held("tiled", together(seed))


@pytest.fixture
def interpreted(monkeypatch): monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("name", [*CATALOGUE, *SCORES])
def test_kernels_are_right(name, interpreted):
    "Each entry once in Triton's interpreter, ragged, with grouped heads."
    L, S, H = 33, 50, 2
    is_mask = name in CATALOGUE
    mask_mod = CATALOGUE[name if is_mask else "causal_document"](1, H, L, S, 3)
    score_mod = None if is_mask else SCORES[name](1, H, L, S, 3)[0]
    mask = create_block_mask(mask_mod, 1, H, L, S, device="cpu", BLOCK_SIZE=(16, 32))
    torch.manual_seed(0)
    problem = posed(*heads(1, H, 1, L, S, 8, grad=False), score_mod, mask)
    if problem.mods is not None: assert not ENGINES["omni"].reasons(problem)
    held("omni", problem)


@pytest.mark.parametrize("seed", range(100, 112))
def test_kernels_are_right_combined(seed, interpreted):
    "All sizes and blocks of the list, masks and scores together."
    problem = together(seed)
    assert not ENGINES["omni"].reasons(problem)
    held("omni", restrict(problem, batch=slice(0, 1)))


@pytest.mark.parametrize("name", [*CATALOGUE, *SCORES])
def test_as_flex_attention_where_that_is_right(name):
    "PyTorch's, eager, in fp64. Rows that see nothing are NaN or a mean there when masked by -inf in a score_mod; they are left out."
    L, S, H = 20, 33, 2
    is_mask = name in CATALOGUE
    mask_mod = CATALOGUE[name if is_mask else "prefix"](2, H, L, S, 1)
    score_mod = None if is_mask else SCORES[name](2, H, L, S, 1, dtype=torch.float64)[0]
    q, k, v = heads(2, H, H, L, S, 8, dtype=torch.float64, grad=False)
    theirs = flex.create_block_mask(mask_mod, 2, H, L, S, device="cpu", BLOCK_SIZE=16)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        want, z = flex.flex_attention(q, k, v, score_mod, theirs, return_lse=True)
        out, lse = omni_attention(q, k, v, score_mod, create_block_mask(mask_mod, 2, H, L, S, device="cpu", BLOCK_SIZE=16), return_lse=True)
        taken = omni_attention(q, k, v, score_mod, theirs)  # PyTorch's block mask itself
    rows = lse.isfinite()
    torch.testing.assert_close(out[rows], want[rows])
    torch.testing.assert_close(lse[rows], z[rows])
    assert out[~rows].eq(0).all() and taken.equal(out) or torch.allclose(taken, out)


# --- what a call gives ---

def learned_mod(H=2):
    table, scale = torch.randn(H, 79, requires_grad=True), torch.nn.Parameter(torch.tensor(1.2))
    return (lambda s, b, h, i, j: s * scale + table[h, j - i + 39]), [table, scale]


def test_gradcheck():
    score_mod, learned = learned_mod()
    learned = [t.detach().double().requires_grad_() for t in learned]
    mask = create_block_mask(document_mask(torch.arange(9) // 4), None, None, 9, 9, device="cpu", BLOCK_SIZE=16)
    def f(q, k, v, table, scale): return omni_attention(q, k, v, lambda s, b, h, i, j: s * scale + table[h, j - i + 39], mask, return_lse=True,
        enable_gqa=True)
    inputs = *heads(1, 2, 1, 9, 9, 3, 4, dtype=torch.float64), *learned
    assert torch.autograd.gradcheck(f, inputs)
    with sdpa_kernel(SDPBackend.MATH): assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16))
def test_types_and_what_is_returned(dtype):
    q, k, v = heads(2, 4, 2, 20, 30, 8, 6, dtype=dtype)
    score_mod, learned = learned_mod(4)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    out = omni_attention(q, k, v, score_mod, enable_gqa=True)
    out2, lse = omni_attention(q, k, v, score_mod, enable_gqa=True, return_lse=True)
    out3, aux = omni_attention(q, k, v, score_mod, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.dtype == dtype and out.shape == (2, 4, 20, 6) and out.equal(out2) and torch.allclose(out, out3)
    assert lse.dtype == aux.max_scores.dtype == state
    assert torch.allclose(lse, aux.lse) and (aux.max_scores <= lse).all()
    assert omni_attention(q, k, v, return_aux=AuxRequest(), enable_gqa=True)[1] == (None, None)
    grads = torch.autograd.grad(out.sum() + lse.sum().to(dtype), (q, k, v, *learned))
    assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(grads, (q, k, v, *learned)))


def test_without_functions_it_is_attention():
    q, k, v = heads(2, 2, 2, 20, 30)
    assert omni_attention(q, k, v).equal(scaled_dot_product_attention(q, k, v))
    assert omni_attention(q, k, v, lambda s, b, h, i, j: s, scale=0.3).equal(scaled_dot_product_attention(q, k, v, scale=0.3))
    wide = omni_attention(q, k[:1], v[:1], lambda s, b, h, i, j: s + b)
    assert torch.allclose(wide, scaled_dot_product_attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)), atol=1e-6)


@pytest.mark.parametrize("L, S", ((0, 5), (5, 0), (1, 1), (1, 300)))
def test_lengths_at_the_edge(L, S):
    q, k, v = heads(1, 2, 2, L, S)
    mask = create_block_mask(causal_mask(S - L), None, None, L, S, device="cpu")
    w = torch.ones(2, requires_grad=True)
    def score_mod(s, b, h, i, j): return s * w[h]

    out, lse = omni_attention(q, k, v, score_mod, mask, return_lse=True)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, alignment="lower_right")
    assert out.shape == (1, 2, L, 8) and torch.allclose(out, want, atol=1e-6) and (S > 0 or lse.eq(-torch.inf).all())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v, w)))


def test_empty_rows_are_zero():
    q, k, v = heads(1, 2, 2, 16, 16)
    bias = torch.randn(16, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: (i % 3 > 0) & (j < i), None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    out, lse = omni_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], mask, return_lse=True)
    assert out[:, :, ::3].eq(0).all() and lse[:, :, ::3].eq(-torch.inf).all()
    with warnings.catch_warnings(action="error"): grads = torch.autograd.grad(out.sum() + lse[:, :, 1::3].sum(), (q, k, v, bias))
    assert all(g.isfinite().all() for g in grads) and grads[0][:, :, ::3].eq(0).all()


def test_a_table_is_read_only_where_it_is_seen():
    "A table of 8 distances, a window of 8: as pytorch#150321."
    table = torch.randn(8, requires_grad=True)
    q, k, v = heads(1, 1, 1, 16, 16)
    mask = create_block_mask(and_masks(causal_mask(), window_mask(7, 0)), None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    out = omni_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j], mask)
    at = torch.arange(16)[:, None] - torch.arange(16)
    bias = torch.where((at >= 0) & (at < 8), table[at.clamp(0, 7)], -torch.inf)
    want = scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close((out, *torch.autograd.grad(out.sum(), (q, table))), (want, *torch.autograd.grad(want.sum(), (q, table))))
    with pytest.raises(IndexError): omni_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j + 8], mask)


def test_lists_are_honoured_and_a_window_needs_none():
    q, k, v = heads(1, 2, 2, 64, 64, grad=False)
    number, which = torch.full((1, 1, 4), 1, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    for part in (dict(), dict(mask_mod=causal_mask())):
        lists = BlockMask.from_kv_blocks(number, which, BLOCK_SIZE=16, **part)
        torch.testing.assert_close(omni_attention(q, k, v, block_mask=lists), scaled_dot_product_attention(q, k, v, lists.to_mask()))
    made = create_block_mask(causal_mask(), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    given = BlockMask.from_kv_blocks(*(getattr(made, n) for n in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")), 16,
        causal_mask())
    assert posed(q, k, v, None, made).mods is None and posed(q, k, v, None, given).mods is not None
    torch.testing.assert_close(omni_attention(q, k, v, block_mask=made), omni_attention(q, k, v, block_mask=given))


def test_strides_of_everything():
    table = torch.randn(40, 2, 3).transpose(0, 1)[..., 1]
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads(grad=False))
    mask = create_block_mask(CATALOGUE["document"](2, 2, 40, 40), 2, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    f = lambda t, q, k, v: omni_attention(q, k, v, lambda s, b, h, i, j: s + t[h, j], mask)
    assert torch.allclose(f(table, q, k, v), f(table.contiguous(), *(x.contiguous() for x in (q, k, v))), atol=1e-6)


# --- who calls ---

class Layer(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.slopes, self.mask = torch.nn.Parameter(torch.tensor([0.5, 0.1])), mask

    def forward(self, q, k, v): return omni_attention(q, k, v, lambda s, b, h, i, j: s - self.slopes[h] * (i - j).abs(), self.mask)


@pytest.fixture
def layer(): return Layer(create_block_mask(document_mask(torch.arange(40) // 15), None, None, 40, 40, device="cpu", BLOCK_SIZE=16))


def same_grads(a, b, inputs):
    assert a.equal(b)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), inputs, retain_graph=True) for o in (a, b))): assert x.equal(y)


def test_compiled_without_a_break(layer):
    "One program for many masks and tables; a padded batch; captured gradients."
    torch._dynamo.reset()
    inputs = heads()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same_grads(compiled(*inputs), layer(*inputs), [*inputs, layer.slopes])
    f = lambda q, k, v, mask: omni_attention(q, k, v, None, mask, return_lse=True)[0]
    g = torch.compile(f, fullgraph=True, backend="aot_eager")
    for lengths in ([40, 7], [1, 39]):
        mask = create_block_mask(padding_mask(torch.tensor(lengths)), 2, None, 40, 40, device="cpu", BLOCK_SIZE=16)
        same_grads(g(*inputs, mask), f(*inputs, mask), inputs)


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_exported_saved_and_loaded_elsewhere(layer, strict, tmp_path):
    inputs = heads(grad=False)
    program = torch.export.export(layer, tuple(inputs), strict=strict).run_decompositions()
    assert [str(n.target) for n in program.graph.nodes if "tensorplay" in str(n.target)] == ["tensorplay_attn.omni_forward.default"]
    want = layer(*inputs)
    assert program.module()(*inputs).equal(want)
    torch.export.save(program, tmp_path / "p.pt2")
    torch.save((inputs, want), tmp_path / "t.pt")
    code = ("import sys, torch, tensorplay_attn; d = sys.argv[1]; inputs, want = torch.load(d + '/t.pt'); "
            "assert torch.export.load(d + '/p.pt2').module()(*inputs).equal(want)")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_autocast_checkpoints_and_transforms(layer):
    inputs = heads()
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(*inputs)
        assert low.dtype == torch.bfloat16 and torch.allclose(low.float(), layer(*inputs).float())
    assert torch.allclose(low.float(), layer(*inputs), atol=0.1)
    same_grads(checkpoint(layer, *inputs, use_reentrant=False), layer(*inputs), [*inputs, layer.slopes])
    q, k, v = (x.detach() for x in inputs)
    loss = lambda q: layer(q, k, v).square().sum()
    want, = torch.autograd.grad(loss(x := q.clone().requires_grad_()), x)
    assert torch.func.grad(loss)(q).equal(want)
    many = torch.stack([q, q + 1, 2 * q])
    assert torch.vmap(layer, in_dims=(0, None, None))(many, k, v)[2].equal(layer(2 * q, k, v))
    assert torch.vmap(torch.func.grad(loss))(many)[0].equal(want)
    assert torch.vmap(torch.func.grad(loss))(many[:0]).shape == (0, *q.shape)  # a batch without members
    params = {"slopes": layer.slopes.detach()}
    by_params = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (q, k, v)).square().sum())(params)
    assert by_params["slopes"].equal(torch.autograd.grad(layer(q, k, v).square().sum(), layer.slopes)[0])


@pytest.mark.parametrize("count", ("b", "lengths", "dropout of nothing"))
def test_vmap_over_what_counts_batch_entries(count):
    mask = create_block_mask(padding_mask(torch.tensor([9, 40])), 2, None, 40, 40, device="cpu", BLOCK_SIZE=16) if count == "lengths" else None
    weight = torch.rand(2)
    mod = (lambda s, b, h, i, j: s * weight[b]) if count == "b" else None
    q, k, v = heads(grad=False)
    f = lambda q: omni_attention(q, k, v, mod, mask)
    many = torch.stack([q, -q])
    assert torch.vmap(f)(many).equal(torch.stack([f(q), f(-q)]))


def test_gradients_of_half_of_what_is_read():
    "Only what wants a gradient gets one; the order of tensors does not matter; one that mask and score share is two readers of one tensor."
    a, b, ids = torch.randn(40, requires_grad=True), torch.randn(40), torch.arange(40) // 9
    q, k, v = heads(grad=False)
    mask = create_block_mask(document_mask(ids), None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    f = lambda a, b: omni_attention(q, k, v, lambda s, _, h, i, j: s * b[i] + a[j] + ids[j], mask).square().sum()
    g, = torch.autograd.grad(f(a, b), a)
    both = torch.autograd.grad(f(a, c := b.clone().requires_grad_()), (c, a))
    assert g.equal(both[1]) and both[0].abs().sum() > 0


def test_a_hundred_masks_and_lengths_in_a_loop():
    "Nothing piles up: neither tensors nor remembered graphs."
    from tensorplay_attn import mods
    def one(n):
        L = 17 + n % 40
        mask = create_block_mask(document_mask(torch.arange(L) // (3 + n % 7)), None, None, L, L, device="cpu", BLOCK_SIZE=16)
        w = torch.full((L,), 0.1, requires_grad=True)
        q, k, v = heads(1, 1, 1, L, L)
        torch.autograd.grad(omni_attention(q, k, v, lambda s, b, h, i, j: s + w[j] * n, mask).sum(), (q, w))
    def tensors():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    for n in range(5): one(n)
    before = tensors()
    for n in range(100): one(n)
    assert tensors() <= before + 3 and len(mods._KNOWN) <= 256 and mods._parse.cache_info().maxsize and mods.derivative.cache_info().maxsize


def test_permitted_backends():
    q, k, v = heads(grad=False)
    mod = lambda s, b, h, i, j: s + h
    with sdpa_kernel(SDPBackend.MATH): dense = omni_attention(q, k, v, mod)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION): assert torch.allclose(dense, omni_attention(q, k, v, mod), atol=1e-6)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend), pytest.raises(RuntimeError, match="user functions"): omni_attention(q, k, v, mod)
    assert torch.allclose(attend(posed(q, k, v, mod, None), "tiled")[0], dense, atol=1e-6)
    with pytest.raises(RuntimeError, match="efficient engine"): attend(posed(q, k, v, mod, None), "efficient")


def test_partials_methods_and_modules():
    q, k, v = heads(grad=False)
    w = torch.rand(2)
    class Held(torch.nn.Module):
        def __init__(self): super().__init__(); self.w = torch.nn.Parameter(w.clone())
        def forward(self, s, b, h, i, j): return s * self.w[h]
        def mod(self, s, b, h, i, j): return self(s, b, h, i, j)
    module = Held()
    want = omni_attention(q, k, v, lambda s, b, h, i, j: s * w[h])
    for mod in (module, module.mod, functools.partial(lambda w, s, b, h, i, j: s * w[h], w)): assert omni_attention(q, k, v, mod).equal(want)
    assert torch.autograd.grad(omni_attention(q, k, v, module).square().sum(), module.w)[0].abs().sum() > 0


@pytest.mark.parametrize("window", [(-1, 3), (3, -1), (2, 2)])
def test_a_window_and_a_mask_that_is_a_window_both_hold(window):
    q, distance = torch.randn(1, 2, 40, 8), torch.arange(40)[:, None] - torch.arange(40)
    causal = create_block_mask(causal_mask(), None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    left, right = (math.inf if n < 0 else n for n in window)
    problem = with_mods(make_problem(q, q, q, window_size=window), None, causal, {})
    want = make_problem(q, q, q, (distance >= 0) & (distance <= left) & (-distance <= right))
    out, lse, _ = attend(problem)
    assert all(v.ok for v in judge_forward(want, out, lse).values())
