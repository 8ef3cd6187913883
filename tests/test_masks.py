"Masks, wider than the page: every catalogue mask against Python integers and against PyTorch, arities, bad mods."
import functools
import itertools
import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch.fx.experimental.proxy_tensor import make_fx
from tensorplay_attn import masks as M

SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (2, 3, 7, 5), (1, 2, 9, 9), (0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)]
SHIFT, LENGTHS = torch.tensor([2, -3]), torch.tensor([4, 0])
IDS, KV_IDS = (torch.randint(0, 3, size, generator=torch.Generator().manual_seed(0)) for size in ((2, 9), (9,)))


def window(i, j, left, right): return (left < 0 or j >= i - left) and (right < 0 or j <= i + right)


# name: the mask_mod, and the same question on Python integers
CATALOGUE = {
    "causal": (M.causal_mask(), lambda b, h, i, j: j <= i),
    "causal +2": (M.causal_mask(2), lambda b, h, i, j: j <= i + 2),
    "causal -4": (M.causal_mask(-4), lambda b, h, i, j: j <= i - 4),
    "causal per batch": (M.causal_mask(SHIFT), lambda b, h, i, j: j <= i + [2, -3][b]),
    **{f"window {w} {s}": (M.window_mask(*w, s), lambda b, h, i, j, w=w, s=s: window(i + s, j, *w))
       for w in ((-1, -1), (0, 0), (2, 1), (-1, 0), (1, -1), (0, 3)) for s in (0, 2, -3)},
    "window per batch": (M.window_mask(1, 0, SHIFT), lambda b, h, i, j: window(i + [2, -3][b], j, 1, 0)),
    "prefix": (M.prefix_mask(3), lambda b, h, i, j: j < 3 or j <= i),
    "prefix per batch, shifted": (M.prefix_mask(LENGTHS, 1), lambda b, h, i, j: j < [4, 0][b] or j <= i + 1),
    "document": (M.document_mask(IDS), lambda b, h, i, j: bool(IDS[b, i] == IDS[b, j])),
    "document, one row": (M.document_mask(KV_IDS), lambda b, h, i, j: bool(KV_IDS[i] == KV_IDS[j])),
    "document, two lists": (M.document_mask(IDS, KV_IDS), lambda b, h, i, j: bool(IDS[b, i] == KV_IDS[j])),
    "dilated": (M.dilated_mask(3, 1), lambda b, h, i, j: (i + 1 - j) % 3 == 0),
    "sink tokens": (M.sink_token_mask(2), lambda b, h, i, j: j < 2),
    "neighbourhood": (M.neighbourhood_mask(3, (0, 1)), lambda b, h, i, j: i // 3 == j // 3 and abs(i % 3 - j % 3) <= 1),
    "padding": (M.padding_mask(LENGTHS), lambda b, h, i, j: j < [4, 0][b]),
    "noop": (M.noop_mask, lambda b, h, i, j: True),
    "and": (M.and_masks(M.causal_mask(), M.padding_mask(LENGTHS)), lambda b, h, i, j: j <= i and j < [4, 0][b]),
    "or": (M.or_masks(M.sink_token_mask(1), M.window_mask(1, 1)), lambda b, h, i, j: j < 1 or abs(i - j) <= 1),
    "nested": (M.and_masks(M.or_masks(M.causal_mask(), M.and_masks()), M.document_mask(KV_IDS)), lambda b, h, i, j: bool(KV_IDS[i] == KV_IDS[j])),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name):
    mod, question = CATALOGUE[name]
    for size in SIZES:
        got = M.create_mask(mod, *size, device="cpu")
        want = torch.tensor([question(*at) for at in itertools.product(*map(range, size))], dtype=torch.bool).view(size)
        assert got.dtype == torch.bool and got.is_contiguous() and torch.equal(got, want), f"{name} {size}"
        if min(size) > 0: assert torch.equal(got, flex.create_mask(mod, *size, device="cpu")), f"{name} {size}"


@pytest.mark.parametrize("name", CATALOGUE)
def test_any_index_shapes(name):
    "The same answer on a tile, on single elements, and traced on small tiles."
    mod, _ = CATALOGUE[name]
    whole = M.create_mask(mod, 2, 2, 9, 9, device="cpu")
    b, h, i, j = torch.tensor([[1]]), torch.tensor([[0]]), torch.arange(3, 7)[:, None], torch.arange(2, 9)[None]
    assert torch.equal(M.ask(mod, b, h, i, j).expand(4, 7), whole[1, 0, 3:7, 2:9])
    at = tuple(torch.tensor([0, 1, 1]) for _ in range(4))
    assert torch.equal(M.ask(mod, *at).expand(3), whole[at])
    traced = make_fx(mod)(b, h, torch.tensor([[0], [1]]), torch.tensor([[0, 1, 2]]))
    assert torch.equal(traced(b, h, torch.tensor([[5], [8]]), torch.tensor([[3, 4, 6]])).expand(2, 3), whole[1, 0, [5, 8]][:, [3, 4, 6]])


def test_algebra():
    size, mods = (2, 1, 6, 6), [M.causal_mask(), M.window_mask(1, 2), M.padding_mask(LENGTHS)]
    def dense(m): return M.create_mask(m, *size, device="cpu")
    for a, b, c in itertools.permutations(mods):
        assert torch.equal(dense(M.and_masks(a, b, c)), dense(a) & dense(b) & dense(c))
        assert torch.equal(dense(M.or_masks(a, b, c)), dense(a) | dense(b) | dense(c))
        assert torch.equal(dense(M.and_masks(a, M.or_masks(b, c))), dense(M.or_masks(M.and_masks(a, b), M.and_masks(a, c))))
    for m in mods:
        for same in (M.and_masks(m), M.or_masks(m), M.and_masks(m, M.and_masks()), M.or_masks(m, M.or_masks()), M.and_masks(m, m)):
            assert torch.equal(dense(same), dense(m))
        assert dense(M.or_masks(m, M.noop_mask)).all() and not dense(M.and_masks(m, M.or_masks())).any()


class Mods(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(()))

    def forward(self, score, b, h, q_idx, kv_idx): return torch.where(kv_idx <= q_idx, score + self.slope, -torch.inf)
    def method(self, b, h, q_idx, kv_idx): return kv_idx <= q_idx
    @staticmethod
    def static(b, h, q_idx, kv_idx): return kv_idx <= q_idx
    @classmethod
    def of_class(cls, score, b, h, q_idx, kv_idx): return score


def wrapped(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs): return fn(*args, **kwargs)
    return inner


ARITY = {
    "function": (lambda b, h, q, k: k <= q, 4), "score": (lambda s, b, h, q, k: s, 5),
    "default of its own": (lambda b, h, q, k, w=3: k <= q + w, 4), "score with default": (lambda s, b, h, q, k, w=3: s, 5),
    "last with default": (lambda b, h, q, k=None: b, 4), "keyword only with default": (lambda b, h, q, k, *, w=3: k <= q, 4),
    "positional only": (eval("lambda b, h, q, k, /: k <= q"), 4), "extra varargs": (lambda b, h, q, k, *rest: k <= q, 4),
    "keywords taken": (lambda b, h, q, k, **kw: k <= q, 4),
    "partial by name": (functools.partial(lambda b, h, q, k, w: k <= q + w, w=3), 4),
    "partial by position": (functools.partial(lambda w, b, h, q, k: k <= q + w, 3), 4),
    "partial of a score": (functools.partial(lambda s, b, h, q, k, w: s, w=3), 5),
    "bound method": (Mods().method, 4), "static method": (Mods.static, 4), "class method": (Mods.of_class, 5), "module": (Mods(), 5),
    "no_grad": (torch.no_grad()(lambda b, h, q, k: k <= q), 4), "wrapped": (wrapped(lambda s, b, h, q, k: s), 5),
    "compiler.disable": (torch.compiler.disable(lambda b, h, q, k: k <= q), 4),
    "compile": (torch.compile(lambda b, h, q, k: k <= q, backend="eager"), 4),
    "combined": (M.and_masks(M.causal_mask()), 4), "noop": (M.noop_mask, 4),
}


@pytest.mark.parametrize("name", ARITY)
def test_arity(name):
    mod, n = ARITY[name]
    assert M.mod_arity(mod) == n


@pytest.mark.parametrize("mod", [lambda: 1, lambda q, k: q, lambda a, b, c: a, lambda a, b, c, d, e, f: a, lambda *a: a[0], lambda **k: k,
    lambda b, h, q, k, *, must: q, functools.partial(lambda b, h, q, k: q, 1, 2), torch.where, None, 3, "causal", torch.ones(2, 2)],
    ids=["0", "2", "3", "6", "varargs", "kwargs", "keyword only", "partial of 2", "builtin", "None", "int", "str", "tensor"])
def test_wrong_arity(mod):
    with pytest.raises(TypeError): M.create_mask(mod, 1, 1, 4, 4, device="cpu")


TABLE = torch.tensor([[0., 1., -1.], [2., 0., 0.]])  # (B, L) or (B, H) of the mods below
MODS = {
    "t[q]": lambda b, h, q, k: TABLE[0][q] > 0, "t[k]": lambda b, h, q, k: TABLE[1][k] > 0, "t[b, h]": lambda b, h, q, k: TABLE[b, h] == 0,
    "t[b, q] and t[b, k]": lambda b, h, q, k: TABLE[b, q] >= TABLE[b, k], "by head": lambda b, h, q, k: q - k < h,
    "t[q, k]": lambda b, h, q, k: torch.eye(3).bool()[q, k], "constant": lambda b, h, q, k: torch.tensor(False),
    "own axis reduced": lambda b, h, q, k: (torch.stack([q - k, k - q]) < 2).all(0),
    "score t[b, h]": lambda s, b, h, q, k: torch.where(TABLE[b, h] > 0, s, -torch.inf),
    "score masked_fill": lambda s, b, h, q, k: s.masked_fill(k > q, -torch.inf),
    "score in place": lambda s, b, h, q, k: s.masked_fill_(k > q, -torch.inf),
    "score inf and nan": lambda s, b, h, q, k: torch.where(k > q, torch.inf, torch.where(k == q, torch.nan, -torch.inf)),
    "score large": lambda s, b, h, q, k: s - 1e30 * (k > q), "score of indices": lambda s, b, h, q, k: (k - q).float().log(),
}


@pytest.mark.parametrize("name", MODS)
def test_mods_against_pytorch(name):
    got = M.create_mask(MODS[name], 2, 3, 3, 3, device="cpu")
    try: want = flex.create_mask(MODS[name], 2, 3, 3, 3, device="cpu")
    except RuntimeError: assert name in ("score in place",)  # vmap cannot write into what it broadcast; the answer is masked_fill's
    else: return torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(got, M.create_mask(MODS["score masked_fill"], 2, 3, 3, 3, device="cpu"))


@pytest.mark.parametrize("mod, error, words", [
    (lambda b, h, q, k: (q - k), TypeError, "bool"), (lambda b, h, q, k: (q >= k).float(), TypeError, "bool"),
    (lambda b, h, q, k: None, TypeError, "NoneType"), (lambda b, h, q, k: True, TypeError, "bool"),
    (lambda s, b, h, q, k: q >= k, TypeError, "floating"), (lambda s, b, h, q, k: 0.0, TypeError, "float"),
    (lambda b, h, q, k: (q >= k) if q > 1 else (q < k), TypeError, "torch.where"),
    (lambda b, h, q, k: q == q and k < 2, TypeError, "torch.where"),
    (lambda b, h, q, k: torch.ones(2, 3, 4, 5).bool(), ValueError, "broadcast"),
    (lambda b, h, q, k: TABLE[b, q] == 0, IndexError, "out of range"),
    (lambda b, h, q, k: (q >= k).any(), ValueError, "alone"), (lambda b, h, q, k: (q >= k).all(), ValueError, "alone"),
    (lambda b, h, q, k: q == q.max(), ValueError, "alone"), (lambda b, h, q, k: (q >= k).sum(-1, keepdim=True) > 1, ValueError, "alone"),
], ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", None))
def test_bad_mods(mod, error, words):
    with pytest.raises(error, match=words): M.create_mask(mod, 2, 3, 4, 4, device="cpu")


def test_combinators_refuse():
    ok, ints = M.causal_mask(), lambda b, h, q, k: q - k
    for combine in (M.and_masks, M.or_masks):
        for wrong in (None, 1, torch.ones(2, 2).bool(), "x"):
            with pytest.raises(TypeError, match="callable"): combine(ok, wrong)
        for mods in ((ok, ints), (ints, ok), (ints,), (ok, lambda b, h, q, k: 1)):
            with pytest.raises(TypeError, match="bool"): M.create_mask(combine(*mods), 1, 1, 4, 4, device="cpu")


@pytest.mark.parametrize("size, error", [((1, 1, -1, 4), ValueError), ((1, 1, 4, -1), ValueError), ((-1, 1, 4, 4), ValueError),
    ((1, -2, 4, 4), ValueError), ((1, 1, 4.0, 4), TypeError), ((1, 1, 4, "4"), TypeError), ((1, 1, None, 4), TypeError),
    ((1, 1, 4, None), TypeError), ((1, True, 4, 4), TypeError), ((1, 1, torch.tensor(4), 4), TypeError)], ids=str)
def test_sizes(size, error):
    with pytest.raises(error, match="Q_LEN|KV_LEN|B|H"): M.create_mask(M.causal_mask(), *size, device="cpu")


@pytest.mark.parametrize("make, error", [
    (lambda: M.causal_mask(None), TypeError), (lambda: M.causal_mask(True), TypeError), (lambda: M.causal_mask(torch.ones(2)), TypeError),
    (lambda: M.causal_mask(torch.ones(2, 2).long()), ValueError), (lambda: M.window_mask(-2, 0), ValueError),
    (lambda: M.window_mask(1.0, 0), TypeError),
    (lambda: M.prefix_mask(-1), ValueError), (lambda: M.prefix_mask("3"), TypeError), (lambda: M.document_mask(torch.ones(3).bool()), TypeError),
    (lambda: M.document_mask(torch.ones(1, 1, 3).long()), ValueError), (lambda: M.document_mask(torch.ones(3).long(), [1, 2]), TypeError),
    (lambda: M.dilated_mask(0), ValueError), (lambda: M.dilated_mask(torch.tensor(2)), TypeError), (lambda: M.sink_token_mask(-1), ValueError),
    (lambda: M.sink_token_mask(torch.tensor(2)), ValueError), (lambda: M.neighbourhood_mask(0, 1), ValueError),
    (lambda: M.neighbourhood_mask(3, -1), ValueError), (lambda: M.neighbourhood_mask(3, (1, 2, 3)), TypeError),
    (lambda: M.padding_mask(4), TypeError), (lambda: M.padding_mask(torch.ones(2)), TypeError),
    (lambda: M.show_mask(torch.ones(2, 2)), TypeError), (lambda: M.show_mask(torch.ones(2).bool()), ValueError),
])
def test_factories_refuse(make, error):
    with pytest.raises(error): make()


def test_show():
    assert M.show_mask(M.causal_mask(1), 2, 3) == "■■·\n■■■"
    assert M.show_mask(torch.tensor([[[True, False]], [[False, False]]])) == "■·"
    assert M.show_mask(M.noop_mask, 0, 3) == ""
