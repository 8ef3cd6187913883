"Masks, wider than the page: every catalogue mask against Python integers and against PyTorch, arities, bad mods."
import functools
import itertools
import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch.fx.experimental.proxy_tensor import make_fx
from tensorplay_attn import masks as M

SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (2, 3, 7, 5), (1, 2, 9, 9), (0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)]
SHIFT, LENGTHS, Q_LENGTHS = torch.tensor([2, -3]), torch.tensor([4, 0]), torch.tensor([0, 5])
IDS, KV_IDS = (torch.randint(0, 3, size, generator=torch.Generator().manual_seed(0)) for size in ((2, 9), (9,)))


def window(i, j, left, right): return (left < 0 or j >= i - left) and (right < 0 or j <= i + right)


OFFSETS, KV_OFFSETS = [0, 3, 3, 4, 8], [0, 2, 4, 4, 7]  # documents of 3, 0, 1, 4 queries and 2, 2, 0, 3 keys; one token is behind the last
PARENTS = [[-1, 0, 0, 2, -1, 4, 2, 6, 1], [-1, 0, 1, 2, 3, 4, 5, 6, 7]]
GLOBALS = [[0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]


def document_of(offsets, t): return next((d for d in range(len(offsets) - 1) if offsets[d] <= t < offsets[d + 1]), None)


def own(i, j, offsets=OFFSETS, kv_offsets=KV_OFFSETS, alignment=None):
    "Query and key in one document; aligned: and causal, counted within the document."
    d = document_of(offsets, i)
    if d is None or j < 0 or document_of(kv_offsets, j) != d: return False
    L, S = (x[d + 1] - x[d] for x in (offsets, kv_offsets))
    shift = {None: 1000, "upper_left": 0, "lower_right": S - L}[alignment]
    return j - kv_offsets[d] <= i - offsets[d] + shift


def descends(parents, i, a):
    "Whether node i is node a or below it."
    while i not in (a, -1): i = parents[i]
    return i == a


def in_tree(b, i, j, cache, parents=PARENTS):
    return j < cache or j - cache < len(parents[b]) and descends(parents[b], i, j - cache)


def frame(x, y, kernel, size):
    "Whether y is in the frame of kernel places whose middle is nearest to x."
    start = min(range(size - kernel + 1), key=lambda s: abs(s + kernel // 2 - x))
    return start <= y < start + kernel


def natten(i, j, height, width, ky, kx):
    return max(i, j) < height * width and frame(i // width, j // width, ky, height) and frame(i % width, j % width, kx, width)


# name: the mask_mod, and the same question on Python integers
CATALOGUE = {
    "causal": (M.causal_mask(), lambda b, h, i, j: j <= i),
    "causal +2": (M.causal_mask(2), lambda b, h, i, j: j <= i + 2),
    "causal -4": (M.causal_mask(-4), lambda b, h, i, j: j <= i - 4),
    "causal per batch": (M.causal_mask(SHIFT), lambda b, h, i, j: j <= i + [2, -3][b]),
    **{f"window {w} {s}": (M.window_mask(*w, s), lambda b, h, i, j, w=w, s=s: window(i + s, j, *w))
       for w in ((-1, -1), (0, 0), (2, 1), (-1, 0), (1, -1), (0, 3)) for s in (0, 2, -3)},
    "window per batch": (M.window_mask(1, 0, SHIFT), lambda b, h, i, j: window(i + [2, -3][b], j, 1, 0)),
    **{f"aligned {a} {L} {S}": (M.aligned_causal_mask(a, L, S), lambda b, h, i, j, n=(S - L) * (a == "lower_right"): j <= i + n)
       for a in ("upper_left", "lower_right") for L, S in ((5, 7), (7, 5), (0, 2))},
    "aligned per batch": (M.aligned_causal_mask("lower_right", 3, LENGTHS), lambda b, h, i, j: j <= i + [1, -3][b]),
    "prefix": (M.prefix_mask(3), lambda b, h, i, j: j < 3 or j <= i),
    "prefix per batch, shifted": (M.prefix_mask(LENGTHS, 1), lambda b, h, i, j: j < [4, 0][b] or j <= i + 1),
    "document": (M.document_mask(IDS), lambda b, h, i, j: bool(IDS[b, i] == IDS[b, j])),
    "document, one row": (M.document_mask(KV_IDS), lambda b, h, i, j: bool(KV_IDS[i] == KV_IDS[j])),
    "document, two lists": (M.document_mask(IDS, KV_IDS), lambda b, h, i, j: bool(IDS[b, i] == KV_IDS[j])),
    "document, offsets": (M.document_offsets_mask(torch.tensor(OFFSETS)), lambda b, h, i, j: own(i, j, kv_offsets=OFFSETS)),
    "document, two offsets": (M.document_offsets_mask(torch.tensor(OFFSETS), torch.tensor(KV_OFFSETS, dtype=torch.int32)),
        lambda b, h, i, j: own(i, j)),
    "document, no documents": (M.document_offsets_mask(torch.tensor([0])), lambda b, h, i, j: False),
    "document, causal": (M.causal_document_mask(IDS), lambda b, h, i, j: bool(IDS[b, i] == IDS[b, j]) and j <= i),
    **{f"document, offsets {a}": (M.causal_document_offsets_mask(torch.tensor(OFFSETS).int(), torch.tensor(KV_OFFSETS), a),
        lambda b, h, i, j, a=a: own(i, j, alignment=a)) for a in ("upper_left", "lower_right")},
    "document, offsets causal": (M.causal_document_offsets_mask(torch.tensor(OFFSETS)),
        lambda b, h, i, j: own(i, j, kv_offsets=OFFSETS) and j <= i),
    "shared prefix": (M.shared_prefix_mask(2, torch.tensor(OFFSETS)),
        lambda b, h, i, j: document_of(OFFSETS, i) is not None and (j < 2 or own(i, j - 2, kv_offsets=OFFSETS) and j - 2 <= i)),
    "shared prefix, own keys": (M.shared_prefix_mask(1, torch.tensor(OFFSETS), torch.tensor(KV_OFFSETS), "upper_left"),
        lambda b, h, i, j: document_of(OFFSETS, i) is not None and (j < 1 or own(i, j - 1, alignment="upper_left"))),
    "block-diagonal": (M.block_diagonal_mask(2), lambda b, h, i, j: i // 2 == j // 2),
    "block-diagonal, other keys": (M.block_diagonal_mask(2, 3), lambda b, h, i, j: i // 2 == j // 3),
    "strided": (M.strided_mask(3), lambda b, h, i, j: j <= i and (i - j <= 3 or (i - j) % 3 == 0)),
    "strided per batch": (M.strided_mask(2, SHIFT), lambda b, h, i, j: (d := i + [2, -3][b] - j) >= 0 and (d <= 2 or d % 2 == 0)),
    "by head": (M.by_head_mask(M.causal_mask(), M.padding_mask(LENGTHS)), lambda b, h, i, j: j < [4, 0][b] if h % 2 else j <= i),
    "by head, one": (M.by_head_mask(M.causal_mask()), lambda b, h, i, j: j <= i),
    "global, count": (M.global_mask(2, -1), lambda b, h, i, j: 0 <= i - 1 < 2 or j < 2),
    "global, none": (M.global_mask(0), lambda b, h, i, j: False),
    "global, positions": (M.global_mask(torch.tensor([4, 1], dtype=torch.int32), SHIFT),
        lambda b, h, i, j: i + [2, -3][b] in (1, 4) or j in (1, 4)),
    "global, no positions": (M.global_mask(torch.tensor([], dtype=torch.long)), lambda b, h, i, j: False),
    "global, table": (M.global_mask(torch.tensor(GLOBALS[0]).bool(), -7), lambda b, h, i, j: i - 7 in (1, 4) or j in (1, 4)),
    "global, table per batch": (M.global_mask(torch.tensor(GLOBALS).bool()), lambda b, h, i, j: b == 0 and (i in (1, 4) or j in (1, 4))),
    "local-global": (M.local_global_mask(1, torch.tensor([3]), 1), lambda b, h, i, j: abs(i + 1 - j) <= 1 or i + 1 == 3 or j == 3),
    "natten": (M.natten_mask(3, 3, (3, 2)), lambda b, h, i, j: natten(i, j, 3, 3, 3, 2)),
    "natten, less than the sizes": (M.natten_mask(2, 3, (1, 2)), lambda b, h, i, j: natten(i, j, 2, 3, 1, 2)),
    "natten, all": (M.natten_mask(1, 9, (1, 9)), lambda b, h, i, j: True),
    "tree": (M.tree_mask(torch.tensor(PARENTS[0]).int(), 2), lambda b, h, i, j: in_tree(0, i, j, 2)),
    "tree per batch": (M.tree_mask(torch.tensor(PARENTS), LENGTHS), lambda b, h, i, j: in_tree(b, i, j, [4, 0][b])),
    "tree, less than the sizes": (M.tree_mask(torch.tensor(PARENTS[0][:4]), 1),
        lambda b, h, i, j: i < 4 and in_tree(0, i, j, 1, [PARENTS[0][:4]])),
    "tree, no node": (M.tree_mask(torch.tensor([], dtype=torch.long), 3), lambda b, h, i, j: False),
    "dilated": (M.dilated_mask(3, 1), lambda b, h, i, j: (i + 1 - j) % 3 == 0),
    "sink tokens": (M.sink_token_mask(2), lambda b, h, i, j: j < 2),
    "neighbourhood": (M.neighbourhood_mask(3, (0, 1)), lambda b, h, i, j: i // 3 == j // 3 and abs(i % 3 - j % 3) <= 1),
    "padding": (M.padding_mask(LENGTHS), lambda b, h, i, j: j < [4, 0][b]),
    "padding, queries too": (M.padding_mask(torch.tensor([3, 4]), Q_LENGTHS), lambda b, h, i, j: j < [3, 4][b] and i < [0, 5][b]),
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
    (lambda: M.sink_token_mask(torch.tensor(2)), TypeError), (lambda: M.neighbourhood_mask(0, 1), ValueError),
    (lambda: M.neighbourhood_mask(3, -1), ValueError), (lambda: M.neighbourhood_mask(3, (1, 2, 3)), TypeError),
    (lambda: M.aligned_causal_mask("lower", 1, 1), ValueError), (lambda: M.aligned_causal_mask(0, 1, 1), TypeError),
    (lambda: M.aligned_causal_mask("upper_left", -1, 1), ValueError), (lambda: M.aligned_causal_mask("upper_left", 1, 1.0), TypeError),
    (lambda: M.document_offsets_mask([0, 1]), TypeError), (lambda: M.document_offsets_mask(torch.tensor([], dtype=torch.long)), ValueError),
    (lambda: M.document_offsets_mask(torch.tensor([1, 2])), ValueError), (lambda: M.document_offsets_mask(torch.tensor([0, 2, 1])), ValueError),
    (lambda: M.document_offsets_mask(torch.tensor([[0, 2]])), ValueError), (lambda: M.document_offsets_mask(torch.tensor([0., 2])), TypeError),
    (lambda: M.document_offsets_mask(torch.tensor([0, 2]), torch.tensor([0, 1, 2])), ValueError),
    (lambda: M.causal_document_offsets_mask(torch.tensor([0, 2]), None, "middle"), ValueError),
    (lambda: M.causal_document_offsets_mask(torch.tensor([0, 2]), None, None), TypeError),
    (lambda: M.causal_document_mask([0, 1]), TypeError), (lambda: M.shared_prefix_mask(-1, torch.tensor([0, 2])), ValueError),
    (lambda: M.shared_prefix_mask(1, torch.tensor([0, 2]), torch.tensor([1, 2])), ValueError),
    (lambda: M.block_diagonal_mask(0), ValueError), (lambda: M.block_diagonal_mask(2, -1), ValueError),
    (lambda: M.block_diagonal_mask(2.0), TypeError),
    (lambda: M.strided_mask(0), ValueError), (lambda: M.strided_mask(2, 1.5), TypeError), (lambda: M.by_head_mask(), ValueError),
    (lambda: M.by_head_mask(M.causal_mask(), 1), TypeError), (lambda: M.global_mask(-1), ValueError), (lambda: M.global_mask("1"), TypeError),
    (lambda: M.global_mask(torch.tensor([1, -1])), ValueError), (lambda: M.global_mask(torch.tensor([[1]])), ValueError),
    (lambda: M.global_mask(torch.tensor([1.])), TypeError), (lambda: M.global_mask(torch.tensor(True)), ValueError),
    (lambda: M.global_mask(1, None), TypeError), (lambda: M.local_global_mask(-1, 1), ValueError),
    (lambda: M.natten_mask(3, 3, 4), ValueError), (lambda: M.natten_mask(0, 3, 1), ValueError), (lambda: M.natten_mask(3, 3, 0), ValueError),
    (lambda: M.natten_mask(3, 3, (1, 4)), ValueError), (lambda: M.natten_mask(3, 3.0, 1), TypeError),
    (lambda: M.tree_mask([-1]), TypeError), (lambda: M.tree_mask(torch.tensor([0])), ValueError),
    (lambda: M.tree_mask(torch.tensor([-1, -2])), ValueError),
    (lambda: M.tree_mask(torch.tensor([[-1, 0], [-1, 1]])), ValueError), (lambda: M.tree_mask(torch.tensor(-1)), ValueError),
    (lambda: M.tree_mask(torch.tensor([-1.])), TypeError), (lambda: M.tree_mask(torch.tensor([-1]), -1), ValueError),
    (lambda: M.padding_mask(torch.tensor([1]), 4), TypeError),
    (lambda: M.padding_mask(4), TypeError), (lambda: M.padding_mask(torch.ones(2)), TypeError),
    (lambda: M.show_mask(torch.ones(2, 2)), TypeError), (lambda: M.show_mask(torch.ones(2).bool()), ValueError),
])
def test_factories_refuse(make, error):
    with pytest.raises(error): make()


def test_show():
    assert M.show_mask(M.causal_mask(1), 2, 3) == "■■·\n■■■"
    assert M.show_mask(torch.tensor([[[True, False]], [[False, False]]])) == "■·"
    assert M.show_mask(M.noop_mask, 0, 3) == ""


# ---------------------------------------------------------------- the public table

LENGTH_PAIRS = [(1, 16), (16, 1), (1, 257), (100, 128), (128, 100), (129, 129), (257, 129), (128, 257), (1, 1)]


@pytest.mark.parametrize("name", M.CATALOGUE)
def test_table(name):
    "Every example answers at every size, is the same for the same seed, and says of one element alone what it says among others."
    make = M.CATALOGUE[name]
    for n, (L, S) in enumerate(LENGTH_PAIRS):
        size = (2, 3, L, S)
        mod = make(*size, seed=n)
        whole = M.create_mask(mod, *size, device="cpu")
        assert whole.shape == size and torch.equal(whole, M.create_mask(make(*size, seed=n), *size, device="cpu")), size
        g = torch.Generator().manual_seed(n)
        at = [torch.randint(k, (64,), generator=g) for k in size]
        alone = torch.stack([M.ask(mod, *indices).reshape(()) for indices in zip(*at)])
        assert torch.equal(alone, whole[tuple(at)]), size
    if name in ("noop", "nothing"): return
    size = (2, 3, 100, 129)
    masks = [M.create_mask(make(*size, seed=seed), *size, device="cpu") for seed in (0, 1)]
    assert 0 < masks[0].float().mean() < 1
    by_batch, by_head = (any(not torch.equal(m, m.flip(d)) for m in masks) for d in (0, 1))
    assert by_head == (name == "by_head")
    assert by_batch == (name in ("causal_by_batch", "prefix_by_batch", "padding", "padding_both", "document", "document_unsorted", "causal_document",
        "global_table", "tree"))


@pytest.mark.parametrize("name", M.CATALOGUE)
def test_table_any_shapes_and_vmap(name):
    "Indices of any broadcastable shapes, and PyTorch's way to ask: single numbers under vmap."
    size = (2, 3, 9, 13)
    mod = M.CATALOGUE[name](*size)
    whole = M.create_mask(mod, *size, device="cpu")
    assert torch.equal(whole, flex.create_mask(mod, *size, device="cpu"))
    b, h, i, j = M.index_tensors(*size)
    for order in ((3, 2, 1, 0), (2, 0, 3, 1)):
        got = M.ask(mod, *(x.permute(order) for x in (b, h, i, j)))
        assert torch.equal(got.expand([size[d] for d in order]), whole.permute(order))
    odd = torch.tensor([[1], [0]]), torch.tensor(2), torch.arange(9)[:, None, None], torch.tensor([[[0, 12]]])
    assert torch.equal(M.ask(mod, *odd).expand(9, 2, 2), whole[tuple(torch.broadcast_tensors(*odd))])
    flat = [x.expand(size).flatten() for x in (b, h, i, j)]
    assert torch.equal(M.ask(mod, *flat).expand(whole.numel()), whole.flatten())
    assert torch.equal(torch.vmap(mod)(*flat), whole.flatten())


WORDS = """add sub mul div floor_divide remainder abs clamp minimum maximum lt le gt ge eq ne where tanh
    bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not index new_ones scalar_tensor detach select""".split()


def words(graph):
    "The operations of a traced mod; indexing must name an integer for every axis."
    for n in graph.nodes:
        if n.op != "call_function": continue
        yield n.target.overloadpacket.__name__
        if n.target.overloadpacket.__name__ == "index": assert None not in n.args[1] and len(n.args[1]) == n.args[0].meta["val"].ndim


@pytest.mark.parametrize("name", M.CATALOGUE)
def test_table_keeps_to_the_words(name):
    indices = torch.tensor([[1]]), torch.tensor([[2]]), torch.tensor([[3], [8]]), torch.tensor([[0, 5, 12]])
    graph = make_fx(M.CATALOGUE[name](2, 3, 9, 13), tracing_mode="real")(*indices).graph
    for n in graph.nodes:
        if n.op == "get_attr": n.meta["val"] = getattr(graph.owning_module, n.target)
    assert set(words(graph)) <= set(WORDS)


def test_table_in_pairs():
    size = (2, 3, 7, 12)
    mods = {name: make(*size) for name, make in M.CATALOGUE.items()}
    dense = {name: M.create_mask(m, *size, device="cpu") for name, m in mods.items()}
    for a, b in itertools.combinations(mods, 2):
        for combine, tensors in ((M.and_masks, torch.logical_and), (M.or_masks, torch.logical_or)):
            assert torch.equal(M.ask(combine(mods[a], mods[b]), *M.index_tensors(*size)).expand(size), tensors(dense[a], dense[b])), (a, b)


def test_table_of_nothing():
    "Examples of no batch entry, no head, no query or no key are made and answer with nothing."
    for name, make in M.CATALOGUE.items():
        for size in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
            assert M.create_mask(make(*size), *size, device="cpu").shape == size, (name, size)


def test_factories_leave_what_they_were_given():
    ids, offsets, parents = torch.tensor([0, 0, 1]), torch.tensor([0, 2, 3]), torch.tensor([-1, 0, 1])
    for make, t in ((M.document_mask, ids), (M.document_offsets_mask, offsets), (M.tree_mask, parents)):
        before = t.clone()
        M.create_mask(make(t), 1, 1, 3, 3, device="cpu")
        assert torch.equal(t, before)


def test_documents_say_the_same():
    "Ids, offsets and blocks, with one another and with a window over everything."
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(0, 6, (5,), generator=g)
        offsets, L = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum())
        ids = torch.repeat_interleave(torch.arange(5), lengths)
        def dense(m, L=L): return M.create_mask(m, 1, 1, L, L, device="cpu")
        assert torch.equal(dense(M.document_offsets_mask(offsets)), dense(M.document_mask(ids)))
        assert torch.equal(dense(M.causal_document_offsets_mask(offsets)), dense(M.causal_document_mask(ids)))
        assert torch.equal(dense(M.shared_prefix_mask(0, offsets)), dense(M.causal_document_mask(ids)))
