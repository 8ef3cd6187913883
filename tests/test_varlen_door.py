"The packed door, sentence by sentence of T14, against each sequence alone; and the paged cache against a plain model of it."
import contextlib
import inspect
import random
from functools import partial

import pytest
import torch
import torch.nn.attention.varlen as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorplay_attn.accuracy import judge
from tensorplay_attn.bounds import allowed_backward, judge_backward, judge_forward
from tensorplay_attn.functional import scaled_dot_product_attention
from tensorplay_attn.omni_attention import omni_attention
from tensorplay_attn.packed import equal_sequences, make_packed, packed_loop, packed_loop_backward, rows_of, sequence
from tensorplay_attn.paged_cache import Books, PagedCache
from tensorplay_attn import registry
from tensorplay_attn.registry import (FlashHandle, activate_flash_attention_impl as activate, flash_kernel,
                                      register_flash_attention_impl as register, restore_flash_attention_impl as restore)
from tensorplay_attn.reference import dense_forward
from tensorplay_attn.routing import SDPBackend, choose, reasons_by_backend, sdpa_kernel
from tensorplay_attn.varlen import AuxRequest, pack, varlen_attn, varlen_attn_out

NAN = float("nan")
FLASH, MATH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION
WAYS = {"kernels": ("1", FLASH), "tiled": ("0", FLASH), "math": ("0", MATH)}  # what the environment says, what may run
LSE = AuxRequest(lse=True)


def offsets(lengths): return torch.tensor([0, *lengths]).cumsum(0).int()


def ints(*x): return torch.tensor(x, dtype=torch.int32)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    interpret, backend = WAYS[request.param]
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with sdpa_kernel(backend): yield request.param


def turn(x): return x.transpose(0, 1)[None]


def tensors(lengths_q, lengths_k, H=4, Hkv=2, E=16, Ev=16, dtype=torch.float32, spare=0):
    "q, k, v that want gradients, with rows of NaN at their ends; offsets; longest."
    nobody = lambda x: torch.cat([x.to(dtype), x.new_full((spare, *x.shape[1:]), NAN, dtype=dtype)]).requires_grad_()
    q, k, v = (torch.randn(sum(n), heads, size) for n, heads, size in ((lengths_q, H, E), (lengths_k, Hkv, E), (lengths_k, Hkv, Ev)))
    return *map(nobody, (q, k, v)), offsets(lengths_q), offsets(lengths_k), max([0, *lengths_q]), max([0, *lengths_k])


def judged(args, d_lse=True, **knobs):
    "Ask the door, and judge out, lse and every gradient of each sequence within its own bounds, against float64; what nobody owns is 0."
    q, k, v, cu_q, _, _, _ = args
    end = cu_q[-1].item()
    out, lse = varlen_attn(*args, return_aux=LSE, enable_gqa=True, **knobs)
    d_out, dz = torch.randn_like(out), torch.randn_like(lse) if d_lse else None
    d_out[end:] = NAN
    if dz is not None: dz[:, end:] = NAN
    dq, dk, dv = torch.autograd.grad((out, lse) if d_lse else out, (q, k, v), (d_out, dz) if d_lse else d_out)
    problem = make_packed(*(x.detach() for x in args[:3]), *args[3:], **knobs)
    assert not out[end:].any() and (lse[:, end:] == -torch.inf).all() and not dq[end:].any()
    owned = torch.zeros(k.shape[0], dtype=torch.bool)
    for n in range(len(cu_q) - 1):
        (i, j), one = rows_of(problem, n), sequence(problem, n)
        owned[j] = True
        z = None if dz is None else dz[None, :, i]
        grads = packed_loop_backward(problem, out.detach(), lse.detach(), d_out, dz)._replace(dq=turn(dq[i]), dk=turn(dk[j]), dv=turn(dv[j]))
        verdicts = judge_forward(one, turn(out[i]).detach(), lse[None, :, i].detach()) | judge_backward(one, grads, turn(d_out[i]), z)
        assert all(verdicts.values()), (n, [(name, str(v)) for name, v in verdicts.items() if not v])
    assert not dk[~owned].any() and not dv[~owned].any()
    return out, lse


# what the contract says

def test_the_signature_is_pytorchs():
    for ours, other in ((varlen_attn, theirs.varlen_attn), (varlen_attn_out, theirs.varlen_attn_out)):
        a, b = (inspect.signature(f).parameters.values() for f in (ours, other))
        assert [(p.name, p.kind, p.default) for p in a] == [(p.name, p.kind, p.default) for p in b]
    assert AuxRequest._fields == theirs.AuxRequest._fields and AuxRequest() == theirs.AuxRequest()


LENGTHS = [([3, 7, 1], [5, 4, 9]), ([0, 1, 0, 1], [0, 1, 0, 1]), ([4, 0, 2], [0, 3, 2]), ([20, 1, 17], [40, 18, 3])]


@pytest.mark.parametrize("knobs", [{}, dict(window_size=(-1, 0)), dict(window_size=(3, 1)), dict(scale=-0.4)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_sequence_is_its_own_problem(way, lengths, knobs):
    torch.manual_seed(0)
    judged(tensors(*lengths, spare=2), **knobs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype(way, dtype):
    if way == "kernels" and dtype == torch.float64:
        with pytest.raises(RuntimeError, match="compute in float32, and query is float64"): judged(tensors([3], [3], dtype=dtype))
        return
    torch.manual_seed(1)
    out, lse = judged(tensors([8, 8, 3, 8], [8, 8, 3, 8], Ev=24, dtype=dtype, spare=1), window_size=(-1, 0))
    assert out.dtype == dtype and lse.dtype == (dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)], ids=str)
def test_heads(way, heads):
    torch.manual_seed(2)
    judged(tensors([5, 2], [6, 6], *heads), d_lse=False, window_size=(2, 0))


def test_keys_in_use(way):
    "Keys past seqused_k are not read, have no gradient, and the last query stands at the last key in use."
    torch.manual_seed(3)
    args = tensors([3, 2, 1], [9, 4, 5], spare=1)
    with torch.no_grad():
        for t in args[1:3]: t[6:9], t[13:] = NAN, NAN
    judged(args, window_size=(-1, 0), seqused_k=ints(6, 4, 0))


def test_lower_right_by_hand(way):
    "Two queries on three keys, causal: the first sees two, the second three. And three on two: the first sees none."
    q, k, v = torch.zeros(5, 1, 4), torch.zeros(5, 1, 4), torch.arange(1.0, 6)[:, None, None].expand(5, 1, 4)
    out, lse = varlen_attn(q, k, v, ints(0, 2, 5), ints(0, 3, 5), 3, 3, window_size=(-1, 0), return_aux=LSE)
    assert torch.allclose(out[:, 0, 0], torch.tensor([1.5, 2, 0, 4, 4.5]))
    assert torch.allclose(lse[0].exp(), torch.tensor([2.0, 3, 0, 1, 2]))


def test_gradients_are_those_of_the_loop_over_sequences():
    "In float64, within the derived bound of float64."
    torch.manual_seed(4)
    args = tensors([3, 0, 5, 5], [4, 2, 1, 5], dtype=torch.float64)
    out, lse = varlen_attn(*args, return_aux=LSE, enable_gqa=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), args[:3], (d_out, d_lse))
    problem = make_packed(*(x.detach() for x in args[:3]), *args[3:])
    for n in range(4):
        i, j = rows_of(problem, n)
        leaves = [x.detach()[r].transpose(0, 1).requires_grad_() for x, r in zip(args, (i, j, j))]
        s = leaves[0] @ leaves[1].repeat_interleave(2, 0).mT / 4
        o, z = s.softmax(-1) @ leaves[2].repeat_interleave(2, 0), s.logsumexp(-1)
        want = torch.autograd.grad((o, z), leaves, (d_out[i].transpose(0, 1), d_lse[:, i]))
        bounds = allowed_backward(sequence(problem, n), turn(d_out[i]), d_lse[None, :, i])
        for name, g, r, w in zip(("dq", "dk", "dv"), got, (i, j, j), want):
            verdict = judge(turn(g[r]), w[None], getattr(bounds, name), torch.float64)
            assert verdict, (n, name, str(verdict))


@pytest.mark.parametrize("backend", [FLASH, MATH])
def test_gradcheck(backend):
    torch.manual_seed(5)
    q, k, v, *rest = tensors([2, 3], [3, 2], E=3, Ev=2, dtype=torch.float64)
    f = lambda *x: varlen_attn(*x, *rest, window_size=(1, 1), enable_gqa=True, return_aux=LSE)
    with sdpa_kernel(backend): assert torch.autograd.gradcheck(f, (q, k, v))


def test_lse_alone_has_a_gradient(way):
    "d lse / d q of one key is scale * k."
    q, k = torch.randn(2, 1, 4, requires_grad=True), torch.randn(2, 1, 4)
    _, lse = varlen_attn(q, k, k, ints(0, 1, 2), ints(0, 1, 2), 1, 1, scale=0.25, return_aux=LSE)
    assert torch.allclose(torch.autograd.grad(lse.sum(), q)[0], 0.25 * k)


def test_empty(way):
    for N, T in ((0, 0), (0, 3), (3, 0), (3, 2)):
        q = torch.randn(T, 2, 8, requires_grad=True)
        cu = torch.zeros(N + 1, dtype=torch.int32)
        out, lse = varlen_attn(q, q, q, cu, cu, 0, 0, return_aux=LSE)
        assert out.shape == (T, 2, 8) and not out.any() and lse.shape == (2, T) and (lse == -torch.inf).all()
        assert not torch.autograd.grad(out.sum(), q)[0].any()
    for shape in ((3, 0, 8), (3, 2, 0)):
        q = torch.randn(shape)
        assert varlen_attn(q, q, q, offsets([3]), offsets([3]), 3, 3).shape == shape
    q, v = torch.randn(3, 2, 0), torch.randn(3, 2, 4)  # E = 0: the mean of what is seen
    assert torch.allclose(varlen_attn(q, q, v, offsets([3]), offsets([3]), 3, 3), v.mean(0).expand(3, 2, 4))


def test_nan_stays_in_its_sequence(way):
    torch.manual_seed(6)
    q, k, v, *rest = tensors([8, 8, 8], [8, 8, 8])
    with torch.no_grad(): k[9, 0] = NAN
    out = varlen_attn(q, k, v, *rest, window_size=(-1, 0), enable_gqa=True)
    assert out.isnan().any(-1).nonzero().tolist() == [[t, h] for t in range(9, 16) for h in (0, 1)]
    dq, dk, _ = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq[:9].isnan().any() and not dq[16:].isnan().any() and not dk[:8].isnan().any() and not dk[16:].isnan().any()


def test_alone_in_company_twice_and_for_every_num_splits(way):
    torch.manual_seed(7)
    lengths = [3, 17, 3, 1, 3]
    args = tensors(lengths, lengths)
    def answer(*args, **kwargs):
        out, lse = varlen_attn(*args, window_size=(-1, 0), enable_gqa=True, return_aux=LSE, **kwargs)
        return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), args[:3])
    whole = answer(*args)
    for other in (answer(*args), answer(*args, num_splits=1), answer(*args, num_splits=7)): assert all(map(torch.equal, whole, other))
    for n, at in enumerate(offsets(lengths).tolist()[:-1]):
        i = slice(at, at + lengths[n])
        alone = answer(*(x.detach()[i].requires_grad_() for x in args[:3]), *[offsets(lengths[n:n + 1])] * 2, 17, 17)
        assert all(map(torch.equal, (whole[0][i], whole[1][:, i], *(g[i] for g in whole[2:])), alone))


def test_layouts(way):
    "Heads outermost, every second number, an expanded head, offsets cut out of more: as contiguous copies."
    torch.manual_seed(8)
    q, k = torch.randn(4, 9, 8).transpose(0, 1).requires_grad_(), torch.randn(9, 4, 16, requires_grad=True)
    v, cu = torch.randn(9, 1, 8, requires_grad=True), torch.tensor([0, 99, 4, 99, 9], dtype=torch.int32)[::2]
    answers = []
    for copy in (lambda x: x, torch.Tensor.contiguous):
        out = varlen_attn(copy(q), copy(k[..., ::2]), copy(v.expand(9, 4, 8)), copy(cu), copy(cu), 5, 5, window_size=(-1, 0))
        answers.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(map(torch.equal, *answers))


# pages

def paged(args, page, extra=2):
    "The keys of a pack in shuffled pages of NaN, and the table."
    _, k, v, _, cu, _, _ = args
    lengths = cu.diff().tolist()
    need = [-(-n // page) for n in lengths]
    free = random.Random(0).sample(range(sum(need) + extra), sum(need) + extra)
    pages = [torch.full((len(free), page, *x.shape[1:]), NAN, dtype=x.dtype) for x in (k, v)]
    table = torch.full((len(lengths), max(need, default=0) + 1), -1, dtype=torch.int32)
    for n, at in enumerate(cu.tolist()[:-1]):
        for slot in range(need[n]):
            table[n, slot] = p = free.pop()
            for pool, x in zip(pages, (k, v)):
                rows = x.detach()[at + slot * page:at + min(lengths[n], (slot + 1) * page)]
                pool[p, :len(rows)] = rows
    return *(p.requires_grad_() for p in pages), cu.diff(), table


@pytest.mark.parametrize("page", [1, 4, 16])
def test_pages_are_keys_elsewhere(way, page):
    torch.manual_seed(9)
    args = tensors([3, 1, 0, 4], [10, 1, 5, 17])
    k, v, used, table = paged(args, page)
    knobs = dict(window_size=(12, 0), enable_gqa=True, return_aux=LSE)
    plain, other = varlen_attn(*args, **knobs), varlen_attn(args[0], k, v, args[3], None, 4, 17, seqused_k=used, block_table=table, **knobs)
    assert all(map(torch.equal, plain, other))
    d_out, d_lse = torch.randn_like(plain[0]), torch.randn_like(plain[1])
    want = torch.autograd.grad(plain, args[:3], (d_out, d_lse))
    got = torch.autograd.grad(other, (args[0], k, v), (d_out, d_lse))
    assert got[0].equal(want[0]) and not any(g.isnan().any() for g in got)
    for n in range(4):
        j, (a, b) = torch.arange(used[n]), args[4][n:n + 2].tolist()
        for g, w in zip(got[1:], want[1:]): assert torch.allclose(g[table[n, j // page].long(), j % page], w[a:b], atol=1e-6)
    assert sum(g.abs().sum((1, 2, 3)).count_nonzero() for g in got[1:]) <= 2 * (table >= 0).sum()


def test_a_shared_page_sums_its_readers(way):
    torch.manual_seed(10)
    pool, q = torch.randn(3, 4, 1, 8, requires_grad=True), torch.randn(5, 2, 8)
    table, used, cu = torch.tensor([[2, 0], [2, 2]], dtype=torch.int32), ints(6, 8), offsets([2, 3])
    out = varlen_attn(q, pool, pool, cu, None, 3, 8, seqused_k=used, block_table=table, enable_gqa=True)
    flat = pool[[2, 0, 2, 2]].flatten(0, 1)
    want = varlen_attn(q, flat, flat, cu, ints(0, 8, 16), 3, 8, seqused_k=used, enable_gqa=True)
    assert torch.allclose(*(torch.autograd.grad(x.square().sum(), pool)[0] for x in (out, want)), atol=1e-5)


# what may run, and how it is one node

def test_backends(monkeypatch):
    q, cu = torch.randn(4, 2, 8), offsets([4])
    problem = make_packed(q, q, q, cu, cu, 4, 4)
    for interpret, name in (("1", "flash"), ("0", "tiled")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert choose(problem)[1].name == name
        with sdpa_kernel(MATH): assert choose(problem)[1].name == "math"
    with sdpa_kernel([EFFICIENT, SDPBackend.CUDNN_ATTENTION]):
        reasons = reasons_by_backend(problem)
        with pytest.raises(RuntimeError) as e: varlen_attn(q, q, q, cu, cu, 4, 4)
    assert all(f"{b.name}: {'; '.join(r)}" in str(e.value) for b, r in reasons.items()) and all(reasons.values())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = torch.randn(4, 1, 264)
    assert choose(make_packed(wide, wide, wide, cu, cu, 4, 4))[1].name == "math"
    many = torch.zeros(5000, dtype=torch.int32)
    assert "interpreter" in reasons_by_backend(make_packed(q, q, q, many, many, 4, 4))[FLASH][0]


def test_backward_is_the_forwards_engine(monkeypatch):
    "Also where another backend may run by then."
    q, cu = torch.randn(4, 2, 8, requires_grad=True), offsets([4])
    with sdpa_kernel(MATH): out = varlen_attn(q, q, q, cu, cu, 4, 4)
    with sdpa_kernel(EFFICIENT): assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("pages", [False, True])
def test_opcheck(way, pages):
    args = tensors([3, 2], [4, 5])
    if pages:
        k, v, used, table = paged(args, 4)
        args = args[0], k.detach().nan_to_num().requires_grad_(), v.detach().nan_to_num().requires_grad_(), args[3], None, *args[5:]
    problem = make_packed(*args, **(dict(seqused_k=used, block_table=table) if pages else {}))
    verdicts = torch.library.opcheck(torch.ops.tensorplay_attn.varlen_forward, pack(problem))
    assert set(verdicts.values()) == {"SUCCESS"}


class Layer(torch.nn.Module):
    def forward(self, q, k, cu): return varlen_attn(q, k, k, cu, cu, 4096, 4096, window_size=(-1, 0), enable_gqa=True, return_aux=LSE)


def packs(*lengths): return torch.randn(sum(lengths), 4, 8, requires_grad=True), torch.randn(sum(lengths), 2, 8), offsets(lengths)


def test_compile():
    torch._dynamo.reset()
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((3, 4), (5, 1, 1, 9)):
        inputs = packs(*lengths)
        answers = [f(*inputs) for f in (compiled, Layer())]
        assert all(map(torch.equal, *answers))
        assert torch.equal(*(torch.autograd.grad(out.square().sum() + lse.sum(), inputs[0])[0] for out, lse in answers))
    with pytest.raises(ValueError, match="cu_seq_q must not go past the 16 rows"): compiled(*packs(5, 1, 1, 9)[:2], offsets([5, 20]))
    with sdpa_kernel(EFFICIENT), pytest.raises(RuntimeError, match="no permitted backend"): compiled(*inputs)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export():
    tokens, ends = torch.export.Dim("tokens", max=2**20), torch.export.Dim("ends", max=2**20)
    program = torch.export.export(Layer(), packs(3, 4), dynamic_shapes=({0: tokens}, {0: tokens}, {0: ends})).run_decompositions()
    assert [str(n.target) for n in program.graph.nodes if "tensorplay" in str(n.target)] == ["tensorplay_attn.varlen_forward.default"]
    inputs = packs(7, 0, 1, 20)
    assert all(map(torch.equal, program.module()(*inputs), Layer()(*inputs)))
    with pytest.raises(ValueError, match="cu_seq_q must not decrease"): program.module()(*inputs[:2], ints(0, 5, 3))


def test_meta_fake_autocast_and_twice():
    args = tensors([3, 2], [4, 5])
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    out, lse = varlen_attn(*meta, enable_gqa=True, return_aux=LSE)
    assert out.shape == (5, 4, 16) and lse.shape == (4, 5) and out.is_meta
    with torch.autocast("cpu", dtype=torch.bfloat16): assert varlen_attn(*args, enable_gqa=True).dtype == torch.bfloat16
    with torch.inference_mode(): assert varlen_attn(*args, enable_gqa=True).shape == (5, 4, 16)
    for backend in (FLASH, MATH):
        with sdpa_kernel(backend): grad, = torch.autograd.grad(varlen_attn(*args, enable_gqa=True).sum(), args[0], create_graph=True)
        with pytest.raises(RuntimeError, match="derivatives are taken once"): torch.autograd.grad(grad.sum(), args[0])


def test_somebody_elses_kernel_is_not_asked():
    "And says so beside the answer; what packed sequences were told without it, they are told with it."
    asked = []
    register("packed test", register_fn=lambda: FlashHandle(flash_kernel(lambda problem: asked.append(problem))))
    q, cu = torch.randn(4, 2, 8), offsets([4])
    problem, want = make_packed(q, q, q, cu, cu, 4, 4), varlen_attn(q, q, q, cu, cu, 4, 4)
    before = reasons_by_backend(problem)
    activate("packed test")
    try:
        told = reasons_by_backend(problem)
        assert told == before and ["packed test: it is not asked for packed sequences" in n for n in told[FLASH].notes] == [True]
        assert varlen_attn(q, q, q, cu, cu, 4, 4).equal(want) and not asked
        wide = torch.randn(4, 2, 8, device="meta")
        with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="it is not asked for packed sequences"): choose(make_packed(wide, wide, wide,
            cu.to("meta"), cu.to("meta"), 4, 4))
    finally:
        restore()
        registry._IMPLS.pop("packed test")


def test_torch_func(way):
    "Its gradients are autograd's; under vmap each member has its own answer; chunked, nested, and with offsets of its own."
    torch.manual_seed(13)
    q, k, v, cu_q, cu_k, *most = tensors([3, 0, 4], [4, 1, 5], spare=1)
    def loss(q, k, v, cu=cu_q):
        out, lse = varlen_attn(q, k, v, cu, cu_k, *most, window_size=(-1, 0), enable_gqa=True, return_aux=LSE)
        return out[:7].square().sum() + lse[:, :7].nan_to_num(neginf=0).sum()
    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    plain = [x.detach() for x in (q, k, v)]
    assert all(map(torch.equal, torch.func.grad(loss, (0, 1, 2))(*plain), want))
    assert all(map(torch.equal, torch.func.vjp(loss, *plain)[1](torch.ones(())), want))
    qs, cus = torch.stack([plain[0], 2 * plain[0], -plain[0]]), torch.stack([cu_q, offsets([1, 1, 4]), cu_q])
    for chunk in (None, 2):
        got = torch.func.vmap(torch.func.grad(loss, (0, 2)), (0, None, None, 0), chunk_size=chunk)(qs, *plain[1:], cus)
        assert all(torch.equal(a[n], b) for n in range(3) for a, b in zip(got, torch.func.grad(loss, (0, 2))(qs[n], *plain[1:], cus[n])))
    none = torch.func.vmap(torch.func.grad(loss, (0, 2)), (0, None, None, 0))(qs[:0], *plain[1:], cus[:0])
    assert [g.shape for g in none] == [(0, 8, 4, 16), (0, *v.shape)]
    inner = torch.vmap(torch.vmap(loss, (0, None, None)), (None, 0, None))(qs, torch.stack([plain[1], 2 * plain[1]]), plain[2])
    torch.testing.assert_close(inner, torch.stack([torch.stack([loss(x, y, plain[2]) for x in qs]) for y in (plain[1], 2 * plain[1])]))
    with pytest.raises(RuntimeError, match="derivatives are taken once"): torch.func.grad(lambda x: torch.func.grad(loss)(x, *plain[1:]).sum())(qs[0])
    with pytest.raises(ValueError, match="cu_seq_q must start at 0"): torch.vmap(loss, (None, None, None, 0))(*plain, cus.flip(1))


# into a tensor that is there

def test_out(way):
    torch.manual_seed(11)
    args = tensors([3, 0, 4], [4, 1, 5], spare=1)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    want, z = varlen_attn(*plain, enable_gqa=True, return_aux=LSE)
    out = torch.full((4, 8, 16), NAN).transpose(0, 1)
    got, lse = varlen_attn_out(out, *plain, enable_gqa=True, return_aux=LSE)
    assert got is out and out.equal(want) and lse.equal(z)
    same = varlen_attn_out(plain[0], *plain, enable_gqa=True)  # over the query
    assert same is plain[0] and same.equal(want)
    a, b = varlen_attn(*args, enable_gqa=True), varlen_attn_out(torch.zeros(8, 4, 16), *args, enable_gqa=True)
    grads = [torch.autograd.grad(x[:7].square().sum(), args[:3]) for x in (a, b)]
    assert all(map(torch.equal, *grads))


# what is refused

def call(door=varlen_attn, **change):
    args = dict(zip(("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"), tensors([2, 4], [5, 3], E=8, Ev=8)))
    return door(**{"enable_gqa": True, **args, **{n: x(args[n]) if callable(x) else x for n, x in change.items()}})


def paged_call(**change):
    pages = torch.randn(3, 4, 2, 8)
    table = torch.tensor([[0, 2], [1, -7]], dtype=torch.int32)
    return call(**{**dict(key=pages, value=pages, cu_seq_k=None, seqused_k=ints(5, 3), block_table=table), **change})


def out_call(out, **change): return call(varlen_attn_out, out=out, **change)


fits = lambda **kwargs: torch.zeros(6, 4, 8, **kwargs)
WRONG = [
    (call, dict(cu_seq_q=ints(1, 2, 6)), ValueError, "cu_seq_q must start at 0"),
    (call, dict(cu_seq_q=ints(0, 7, 6)), ValueError, "cu_seq_q must not decrease"),
    (call, dict(cu_seq_q=ints(0, 2**31 - 1, -2**31), max_q=2**40), ValueError, "cu_seq_q must not decrease"),  # whose differences wrap
    (call, dict(cu_seq_q=ints(0, 2, 7)), ValueError, "cu_seq_q must not go past the 6 rows"),
    (call, dict(cu_seq_k=ints(0, 5, 9)), ValueError, "cu_seq_k must not go past the 8 rows"),
    (call, dict(cu_seq_k=ints(0, -1, 8)), ValueError, "cu_seq_k must not decrease"),
    (call, dict(cu_seq_q=torch.tensor([0, 2, 6])), ValueError, "cu_seq_q must be int32: cu_seq_q.dtype=torch.int64"),
    (call, dict(cu_seq_k=lambda t: t.float()), ValueError, "cu_seq_k must be int32"),
    (call, dict(cu_seq_k=lambda t: t.to("meta")), ValueError, "cu_seq_k is on another device"),
    (call, dict(cu_seq_q=[0, 2, 6]), TypeError, "cu_seq_q must be a tensor"),
    (call, dict(cu_seq_k=None), TypeError, "cu_seq_k must be a tensor"),
    (call, dict(cu_seq_k=ints(0, 8)), ValueError, "cu_seq_k must have shape"),
    (call, dict(max_q=3), ValueError, "max_q is less than the longest sequence, 4: max_q=3"),
    (call, dict(max_k=4), ValueError, "max_k is less than the longest sequence, 5: max_k=4"),
    (call, dict(max_k=-2), ValueError, "max_k must not be negative"),
    (call, dict(max_q=True), TypeError, "max_q must be an int"),
    (call, dict(seqused_k=ints(5, 4)), ValueError, "seqused_k goes past its sequence's keys"),
    (call, dict(query=lambda t: t[None]), ValueError, "query must have 3 dimensions"),
    (call, dict(query=lambda t: t.half()), ValueError, "differ in dtype"),
    (call, dict(query=lambda t: t.int()), TypeError, "not supported"),
    (call, dict(query=lambda t: t[:, :3]), ValueError, "multiple of key heads"),
    (call, dict(enable_gqa=False), ValueError, "needs enable_gqa=True"),
    (call, dict(enable_gqa=1), TypeError, "enable_gqa must be a bool"),
    (call, dict(window_size=(-2, 0)), ValueError, "window_size"),
    (call, dict(window_size=3), TypeError, "window_size"),
    (call, dict(scale=NAN), ValueError, "scale must be finite"),
    (call, dict(return_aux=True), TypeError, "return_aux must be a varlen.AuxRequest, not bool"),
    (call, dict(return_aux=AuxRequest(1)), TypeError, "return_aux.lse must be a bool"),
    (call, dict(num_splits=0), ValueError, "num_splits must be at least 1"),
    (call, dict(num_splits=1.5), TypeError, "num_splits must be an int"),
    (call, dict(block_table=ints(0)), ValueError, "4 dimensions"),
    (paged_call, dict(seqused_k=None), ValueError, "block_table needs seqused_k"),
    (paged_call, dict(seqused_k=ints(9, 3), max_k=9), ValueError, "seqused_k goes past"),
    (paged_call, dict(seqused_k=ints(5, 5)), ValueError, r"block_table\[1, 1\]=-7"),
    (paged_call, dict(block_table=torch.tensor([[0, 3], [1, 0]], dtype=torch.int32)), ValueError,
     r"block_table\[0, 1\]=3"),
    (paged_call, dict(block_table=torch.tensor([[0, 2], [1, 0]])), ValueError, "block_table must be int32"),
    (paged_call, dict(cu_seq_k=ints(0, 5)), ValueError, "cu_seq_k must have shape"),
    (out_call, dict(out=torch.zeros(6, 4, 7)), ValueError, r"out must have shape \(6, 4, 8\)"),
    (out_call, dict(out=fits(dtype=torch.float64)), ValueError, "out must have the answer's dtype"),
    (out_call, dict(out=fits(device="meta")), ValueError, "out is on another device"),
    (out_call, dict(out=torch.zeros(1, 4, 8).expand(6, 4, 8)), ValueError, "out has elements that share memory"),
    (out_call, dict(out=fits(requires_grad=True)), ValueError, "out must not be a leaf"),
    (out_call, dict(out=[0.0]), TypeError, "out must be a tensor"),
]


def test_right_calls_pass():
    assert call().shape == (6, 4, 8) and paged_call().shape == (6, 4, 8) and out_call(fits()).shape == (6, 4, 8)
    assert call(max_q=2**70, max_k=2**31 + 1).shape == (6, 4, 8)  # more than any length
    assert paged_call(cu_seq_k=ints(0, 5, 8)).shape == (6, 4, 8)


@pytest.mark.parametrize("make, change, error, words", WRONG)
def test_wrong_calls(make, change, error, words):
    "On every backend the same, before any work."
    said = set()
    for backend in (None, MATH, FLASH, EFFICIENT):
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend), pytest.raises(error, match=words) as e: make(**change)
        said.add(str(e.value))
    assert len(said) == 1


def test_many_tiny_sequences_are_one_call():
    calls, x, cu = [], torch.randn(8000, 2, 8), offsets([8] * 1000)
    problem = make_packed(x, x, x, cu, cu, 8, 8)
    out, _ = packed_loop(problem, lambda one: calls.append(one.sizes) or dense_forward(one))
    assert calls == [(1000, 2, 2, 8, 8, 8, 8)]
    batch = x.unflatten(0, (1000, 8)).transpose(1, 2)
    assert torch.allclose(out.unflatten(0, (1000, 8)).transpose(1, 2), scaled_dot_product_attention(batch, batch, batch), atol=1e-6)


def test_equal_sequences():
    rng = random.Random(0)
    for most in (1, 50, 2**22):
        L, S = ([rng.choice([0, 1, 2, 5]) for _ in range(40)] for _ in range(2))
        q, k = torch.randn(sum(L), 2, 4), torch.randn(sum(S), 1, 4)
        groups = list(equal_sequences(make_packed(q, k, k, offsets(L), offsets(S), 5, 5), most))
        assert sorted(n for g in groups for n in g) == [n for n in range(40) if L[n]]
        for g in groups:
            assert len({(L[n], S[n]) for n in g}) == 1 and (len(g) == 1 or len(g) * 2 * L[g[0]] * S[g[0]] <= most or S[g[0]] == 0)


# the paged cache

def tokens(cache, n): return [cache.keys[cache.owned[n][j // cache.page_size], j % cache.page_size, 0, 0].item() for j in range(cache.length(n))]


def whole(cache, model):
    "Every page in one place, every token where its sequence finds it, and no more pages than promised or needed."
    assert sorted(cache.idle + [p for pages in cache.owned.values() for p in pages]) == list(range(cache.pages))
    assert {n: tokens(cache, n) for n in cache.owned} == {n: kept for n, (kept, _) in model.items()}
    assert {n: len(pages) for n, pages in cache.owned.items()} == {n: -(-room // cache.page_size) for n, (_, room) in model.items()}


STEP = st.tuples(st.sampled_from(["open", "room", "append", "append", "append", "free"]), st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=3, max_size=3))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(1, 5), st.lists(STEP, max_size=30))
def test_the_cache_is_its_model(pages, page_size, steps):
    "Random calls, right and wrong, against lists in a dict: {sequence: (tokens, room)}. An error changes nothing."
    cache, model, count, opened = PagedCache(pages, page_size, 1, 1, dtype=torch.float64), {}, 0, 0
    need = lambda rooms: sum(-(-room // page_size) for room in rooms.values())
    for what, names, lengths in steps:
        n, rooms = names[0], {m: room for m, (_, room) in model.items()}
        if what == "append":
            sizes = lengths[:len(names)]
            new = torch.arange(count, count + sum(sizes), dtype=torch.float64)[:, None, None]
            good = len(set(names)) == len(names) and all(m in model for m in names)
            rooms |= {m: max(rooms[m], len(model[m][0]) + more) for m, more in zip(names, sizes)} if good else {}
            act = partial(cache.append, names, new, new, sizes)
        elif what == "free": good, act = n in model, partial(cache.free, n)
        else:
            n = opened if what == "open" else n
            good = what == "open" or n in model
            if good: rooms[n] = max(rooms.get(n, 0), lengths[0])
            act = partial(cache.reserve, lengths[0], None if what == "open" else n)
        if not good or need(rooms) > pages:
            with pytest.raises(ValueError): act()
        else:
            act()
            if what == "open": model[n], opened = ([], rooms[n]), opened + 1
            elif what == "room": model[n] = model[n][0], rooms[n]
            elif what == "free": del model[n]
            else:
                for m, more in zip(names, sizes):
                    model[m] = model[m][0] + [float(count + x) for x in range(more)], rooms[m]
                    count += more
        whole(cache, model)


@pytest.mark.parametrize("page_size", [16, 5])
def test_sequences_decode_together_as_alone(page_size):
    "Both doors, with prompts, windows, several queries at once, pages that were others' before and held NaN."
    torch.manual_seed(12)
    cache, kept = PagedCache(8, page_size, 2, 8, 4), {}
    cache.keys.fill_(NAN), cache.values.fill_(NAN)
    def write(numbers, lengths):
        k, v = torch.randn(sum(lengths), 2, 8), torch.randn(sum(lengths), 2, 4)
        cache.append(numbers, k, v, lengths)
        for n, x, y in zip(numbers, k.split(lengths), v.split(lengths)):
            old = kept.get(n, (x[:0], y[:0]))
            kept[n] = torch.cat([old[0], x]), torch.cat([old[1], y])
    batch = [cache.reserve(), cache.reserve(2), cache.reserve()]
    write(batch, [page_size + 1, 3, 2 * page_size])
    for L, window in ((1, (-1, 0)), (3, (-1, 0)), (3, (4, 0)), (3, (-1, -1)), (2, (1, 1))):
        write(batch, [L] * 3)
        q = torch.randn(3, 4, L, 8)
        knobs = dict(window_size=window, enable_gqa=True)
        packed = varlen_attn(q.transpose(1, 2).flatten(0, 1), cu_seq_q=offsets([L] * 3), max_q=L, **cache.varlen(batch), **knobs)
        blocks = omni_attention(q, *cache.pool(), block_mask=cache.block_mask(batch, L, window), enable_gqa=True)
        for b, n in enumerate(batch):
            k, v = (x.transpose(0, 1)[None] for x in kept[n])
            want = scaled_dot_product_attention(q[b:b + 1], k, v, alignment="lower_right", **knobs)[0]
            assert torch.allclose(packed[b * L:b * L + L].transpose(0, 1), want, atol=1e-5) and torch.allclose(blocks[b], want, atol=1e-5)
        cache.free(gone := batch.pop(0))
        batch.append(cache.reserve())
        write(batch[2:], [L])
        with pytest.raises(ValueError, match="it was freed"): cache.varlen([gone])


def test_cache_takes_its_own_rows_and_none_of_ours():
    cache = PagedCache(2, 4, 1, 2)
    n = cache.reserve(8)
    cache.append([n], torch.ones(3, 1, 2), torch.ones(3, 1, 2), [3])
    cache.append([n], cache.keys[0, :3], cache.values[0, :3], [3])
    assert cache.keys.sum() == 12 and cache.length(n) == 6
    with torch.no_grad(): cache.append([n], torch.ones(1, 1, 2, requires_grad=True), torch.ones(1, 1, 2))
    assert not cache.keys.requires_grad
    assert cache.varlen([])["block_table"].shape == (0, 0) and cache.append([], torch.ones(0, 1, 2), torch.ones(0, 1, 2)) is None


@pytest.mark.parametrize("wrong, error, words", [
    (lambda c: PagedCache(-1, 4, 1, 2), ValueError, "pages must be at least 0"), (lambda c: PagedCache(1, 0, 1, 2), ValueError, "page_size must be"),
    (lambda c: PagedCache(1, 1.5, 1, 2), TypeError, "page_size must be an int"), (lambda c: PagedCache(1, 4, 0, 2), ValueError, "heads must be"),
    (lambda c: PagedCache(1, 4, 1, 2, dtype=torch.int32), TypeError, "dtype=torch.int32"), (lambda c: Books(1, True), TypeError, "page_size"),
    (lambda c: c.append(0, c.keys[0], c.values[0]), TypeError, "sequences must be a list"),
    (lambda c: c.append([[0]], c.keys[0], c.values[0]), TypeError, "sequence must be an int"),
    (lambda c: c.append([0], [1.0], c.values[0]), TypeError, "key must be a tensor"),
    (lambda c: c.append([0], c.keys[0], c.values[0], 4), TypeError, "lengths must be a list"),
    (lambda c: c.append([0], c.keys[0], c.values[0], [-4]), ValueError, "lengths must be at least 0"),
    (lambda c: c.append([0], c.keys[0].to("meta"), c.values[0]), ValueError, "key is on another device"),
    (lambda c: c.reserve(1, 5), ValueError, "never reserved"), (lambda c: c.reserve("1"), TypeError, "tokens must be an int"),
    (lambda c: c.block_mask([0], 0), ValueError, "q_len must be at least 1"), (lambda c: c.block_mask([0], 1, (-3, 0)), ValueError, "window_size"),
    (lambda c: c.free(True), TypeError, "sequence must be an int")])
def test_wrong_uses_of_the_cache(wrong, error, words):
    cache = PagedCache(2, 4, 1, 2)
    cache.reserve()
    with pytest.raises(error, match=words): wrong(cache)
    assert str(cache) == "PagedCache(2 of 2 pages of 4 are free, tokens={0: 0})"
