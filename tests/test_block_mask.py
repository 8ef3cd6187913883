"""Block masks against the dense mask: every size, every way to cut, crop, shift, pick and print."""
import copy
import itertools
import pickle
import subprocess
import sys
import pytest
import torch
import torch.nn.attention.flex_attention as flex
from hypothesis import given, settings, strategies as st
from torch.utils._pytree import tree_flatten, tree_unflatten
from tensorplay_attn import block_mask as bm, masks
from tensorplay_attn.block_mask import (EMPTY, PARTIAL, WHOLE, BlockMask, Grid, block_kinds, create_block_mask, lists_of,
    tile_kinds)
from tensorplay_attn.masks import and_masks, causal_mask, create_mask, document_mask, or_masks, window_mask
from tensorplay_attn.mods import trace

SIZES = [(0, 0), (0, 16), (16, 0), (1, 1), (1, 257), (16, 16), (100, 100), (128, 129), (129, 100), (257, 128)]
BLOCKS = [(16, 16), (64, 64), (128, 128), (32, 128), (100, 100)]

def own_masks(B, H, L, S):
    "name -> mask_mod, beside page 02's own table."
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (max(L, S, 1),), generator=g)
    per_batch = torch.randint(0, 3, (B, max(L, S, 1)), generator=g).sort(-1).values
    dense = torch.rand(L, S, generator=g) < 0.1
    bias = torch.randn(H, L + S + 1, generator=g)
    lengths = torch.randint(0, S + 1, (B,), generator=g)
    return {
        "noop": masks.noop_mask, "nothing": or_masks(), "causal": causal_mask(), "causal at the end": causal_mask(S - L),
        "window": window_mask(17, 3), "random ids": document_mask(ids), "sorted ids": document_mask(ids.sort().values),
        "ids of a batch": and_masks(document_mask(per_batch), causal_mask()), "padding": masks.padding_mask(lengths),
        "prefix": masks.prefix_mask(lengths), "dilated": masks.dilated_mask(3), "image": masks.neighbourhood_mask(10, 2),
        "dense": lambda b, h, i, j: dense[i, j], "table": lambda b, h, i, j: bias[h, i - j + S] > 0.3,
        "head": lambda b, h, i, j: (i - j) % (h + 2) == 0, "not": lambda b, h, i, j: ~((i // 8) == (j // 8)),
        "floats": lambda b, h, i, j: (i * 0.1 - j * 0.3).abs() < 2.5, "where": lambda b, h, i, j: torch.where(i < 40, j < 10, i > j),
    }

def catalogue(B, H, L, S):
    "Page 02's table if it has one, and ours."
    table = getattr(masks, "CATALOGUE", {})
    return own_masks(B, H, L, S) | {f"02 {name}": make(B, H, L, S) for name, make in table.items()}

def check(mask: BlockMask, dense, exact=True):
    "Lists both ways, kinds and elements say what the dense mask says."
    B, H, L, S = dense.shape
    assert mask.shape == (B, H, L, S) and mask.numel() == dense.numel()
    assert torch.equal(mask.to_mask(), dense)
    if exact:
        kinds = tile_kinds(dense, mask.BLOCK_SIZE)
        if mask.full_kv_indices is None: kinds = kinds.clamp(max=PARTIAL)
        assert torch.equal(mask.kinds(), kinds)
    kinds = mask.kinds()
    for at, kind in ((0, PARTIAL), (2, WHOLE)):
        rows, columns = ([getattr(mask, n) for n in bm.LISTS[x:x + 2]] for x in (at, at + 4))
        assert (rows[0] is None) == (columns[0] is None)
        if rows[0] is None: continue
        assert all(x.dtype == torch.int32 for x in (*rows, *columns))
        assert torch.equal(bm.grid_of(*rows, mask.grid.cols), kinds == kind)
        assert torch.equal(bm.grid_of(*columns, mask.grid.rows), (kinds == kind).transpose(-1, -2))
    assert torch.equal(mask.to_dense(), (kinds != EMPTY).int())
    seen = (kinds != EMPTY)[:, :, torch.arange(L) // mask.BLOCK_SIZE[0]][..., torch.arange(S) // mask.BLOCK_SIZE[1]]
    assert mask.sparsity() == pytest.approx(100 * (~seen).float().mean().item() if seen.numel() else 0.0, abs=1e-3)
    for text in (str(mask), repr(mask), mask.to_string(-1), mask.to_string((1, 3), limit=1)): assert isinstance(text, str)

@pytest.mark.parametrize("L,S", SIZES)
def test_equals_the_dense_mask(L, S):
    for (name, mod), block in zip(catalogue(2, 3, L, S).items(), itertools.cycle(BLOCKS)):
        check(create_block_mask(mod, 2, 3, L, S, device="cpu", BLOCK_SIZE=block), create_mask(mod, 2, 3, L, S, device="cpu"))

@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_size(block):
    for name, mod in catalogue(2, 3, 129, 100).items():
        check(create_block_mask(mod, 2, 3, 129, 100, device="cpu", BLOCK_SIZE=block), create_mask(mod, 2, 3, 129, 100, device="cpu"))

@pytest.mark.parametrize("B,H", [(None, None), (None, 2), (2, None), (1, 1), (0, 2), (2, 0)])
def test_batch_and_heads(B, H):
    mask = create_block_mask(causal_mask(), B, H, 40, 50, device="cpu", BLOCK_SIZE=16)
    check(mask, create_mask(causal_mask(), B, H, 40, 50, device="cpu"))
    assert mask.built_for == (B, H)
    assert all(x is None or x.shape[:2] == mask.shape[:2] for x in mask.as_tuple(False)[1:9])

def test_shared_lists_are_held_once():
    mask = create_block_mask(causal_mask(), 64, 32, 4096, 4096, device="cpu")
    assert mask.kv_indices.shape == (64, 32, 32, 32) and mask.kv_indices.stride()[:2] == (0, 0)
    assert mask.blocks().kv_indices.shape == (1, 1, 32, 32) and mask.to("cpu").kv_indices.stride()[:2] == (0, 0)

def test_lists_are_pytorchs():
    for name, mod in own_masks(2, 3, 128, 100).items():
        ours = create_block_mask(mod, 2, 3, 128, 100, device="cpu", BLOCK_SIZE=32)
        theirs = flex.create_block_mask(mod, 2, 3, 128, 100, device="cpu", BLOCK_SIZE=32)
        for n in bm.LISTS:
            assert torch.equal(getattr(ours, n), getattr(theirs, n)), (name, n)
        assert ours.shape == theirs.shape and torch.equal(ours.to_dense(), theirs.to_dense())
        assert ours.as_tuple(False)[0] == theirs.as_tuple(False)[0] and ours.as_tuple(False)[-2] == theirs.BLOCK_SIZE
        assert ours.as_tuple()[:2] == (128, 100) and ours.as_tuple()[-3:] == (32, 32, mod)

def test_without_full_blocks():
    mask = create_block_mask(causal_mask(), 1, 1, 100, 100, device="cpu", BLOCK_SIZE=16, separate_full_blocks=False)
    assert mask.full_kv_indices is None and mask.full_q_indices is None
    dense = create_mask(causal_mask(), 1, 1, 100, 100, device="cpu")
    check(mask, dense)
    check(mask.crop(50, 60), dense[:, :, :50, :60])
    check(mask.shift(5), dense[:, :, 5:])

# ---- ranges

LEAVES = st.sampled_from(["b", "h", "i", "j", "i - j", "ids[i]", "ids[j]", "rows[b, i]", "rows[b, j]", "table[i - j + 40]", "small[i // 4]", "0-d"])

@st.composite
def numbers(draw, depth=2):
    "An integer expression of the indices."
    if depth == 0 or draw(st.booleans()): return draw(LEAVES | st.integers(-3, 40).map(str))
    op = draw(st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "abs", "where", "neg", "clamp", "int", "trunc", "fmod", "i32", "i8", "u8"]))
    x, y, n = draw(numbers(depth - 1)), draw(numbers(depth - 1)), draw(st.integers(1, 9))
    return {"+": f"({x} + {y})", "-": f"({x} - {y})", "*": f"({x} * {y})", "//": f"({x} // {n})", "%": f"({x} % {n})",
        "min": f"T({x}).minimum(T({y}))", "max": f"T({x}).maximum(T({y}))", "abs": f"T({x}).abs()", "neg": f"(-T({x}))",
        "where": f"torch.where(T({x}) < T({y}), T({y}), T({x}))", "clamp": f"T({x}).clamp(-2, {n})", "int": f"(T({x}) / {n}).floor().long()",
        "trunc": f"torch.div(T({x}), {-n if n % 2 else n}, rounding_mode='trunc')", "fmod": f"torch.fmod(T({x}), {n})",
        "i32": f"(T({x}).int() + 3).long()", "i8": f"T({x}).to(torch.int8).long()", "u8": f"(T({x}).to(torch.uint8) - 3).long()"}[op]

@st.composite
def truths(draw, depth=2):
    "A condition on the indices."
    plain, composed = ["<", "<=", ">", ">=", "==", "!=", "flags", "float", "half", "cast"], ["&", "|", "^", "~", "where"]
    op = draw(st.sampled_from(plain + composed * (depth > 0)))
    if op in ("&", "|", "^"): return f"({draw(truths(depth - 1))} {op} {draw(truths(depth - 1))})"
    if op == "~": return f"(~{draw(truths(depth - 1))})"
    if op == "where": return f"torch.where({', '.join(draw(truths(depth - 1)) for _ in range(3))})"
    x, y = draw(numbers()), draw(numbers())
    if op == "flags": return "flags[i] " if draw(st.booleans()) else "flags[j]"
    if op == "float": return f"(T({x}) * 0.3 - T({y}) / 7 <= {draw(st.floats(-9, 9, width=32))})"
    if op == "half": return f"(T({x}).half() * T({y}).bfloat16().half() > 20)"
    if op == "cast": return f"T({x}).bool()"
    return f"(T({x}) {op} T({y}))"

def written(text):
    "A mask_mod of an expression."
    g = torch.Generator().manual_seed(1)
    names = {"torch": torch, "T": lambda x: x if isinstance(x, torch.Tensor) else torch.tensor(x),
        "ids": torch.randint(0, 4, (41,), generator=g).sort().values, "rows": torch.randint(-2, 3, (2, 41), generator=g),
        "table": torch.randint(-5, 50, (81,), generator=g), "small": torch.randint(0, 99, (11,), generator=g, dtype=torch.int32),
        "flags": torch.rand(41, generator=g) < 0.5, "zero": torch.tensor(7)}
    return eval(f"lambda b, h, i, j: {text.replace('0-d', 'zero')}", names)

@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=truths(), L=st.integers(1, 41), S=st.integers(1, 41), block=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_any_expression_is_exact(text, L, S, block):
    mod = written(text)
    try: dense = create_mask(mod, 2, 2, L, S, device="cpu")
    except TypeError: return  # a condition on nothing but numbers
    kinds, looked = block_kinds(mod, 2, 2, Grid(L, S, *block))
    assert torch.equal(kinds.expand(2, 2, -1, -1), tile_kinds(dense, block))

@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=truths(), L=st.integers(1, 41), S=st.integers(1, 41), block=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_what_ranges_tell_is_true(text, L, S, block):
    "EMPTY and WHOLE found without looking, before anything is looked at."
    mod = written(text)
    try: dense, (graph, tensors) = create_mask(mod, 2, 2, L, S, device="cpu"), trace(mod)
    except TypeError: return
    grid = Grid(L, S, *block)
    some = tile_kinds(dense, block) != EMPTY
    every = tile_kinds(~dense, block) == EMPTY  # ragged ones too
    for at, kinds in bm.range_kinds(graph, tensors, 2, 2, grid):
        assert not (some[at] & (kinds == EMPTY)).any()
        assert not (~every[at] & (kinds == WHOLE)).any()

@pytest.mark.parametrize("name", ["causal", "window", "sorted ids", "prefix", "noop", "nothing"])
def test_only_boundaries_are_looked_at(name):
    mod, grid = own_masks(1, 1, 1024, 1024)[name], Grid(1024, 1024, 32, 32)
    kinds, looked = block_kinds(mod, 1, 1, grid)
    assert looked <= (kinds == PARTIAL).sum()

def test_untraceable_functions_are_looked_at():
    def peeks(b, h, i, j): return i >= j if i.flatten()[0].item() >= 0 else j < 0
    def viewed(b, h, i, j): return i.reshape(-1).view(i.shape) >= j
    for f in (peeks, viewed):
        with pytest.raises(TypeError): trace(f)
        kinds, looked = block_kinds(f, 1, 1, Grid(50, 60, 16, 16))
        assert looked == kinds.numel()
        assert torch.equal(kinds, tile_kinds(create_mask(causal_mask(), 1, 1, 50, 60, device="cpu"), (16, 16)))

def test_numbers_that_do_not_fit_are_not_believed():
    big = torch.arange(64) + 2**62
    hashes = (torch.randint(-2**62, 2**62, (8,)) * 2).repeat_interleave(8)
    near, ids = torch.arange(64) + 2**62 - 32, torch.arange(64) // 8
    nan = torch.linspace(-1, 1, 64)
    nan[20] = torch.nan
    for mod in (lambda b, h, i, j: big[i] + big[j] > 0, lambda b, h, i, j: big[i] * big[j] > 7, lambda b, h, i, j: hashes[i] == hashes[j],
                lambda b, h, i, j: nan[i] < 2, lambda b, h, i, j: ~(nan[j] >= 2), lambda b, h, i, j: (i.int() << 28) > (j.int() << 28),
                lambda b, h, i, j: i * 2.0**120 - j * 2.0**126 >= 0, lambda b, h, i, j: (i - 30) % (j - 70) == 0,
                lambda b, h, i, j: i // (j + 1) > 2, lambda b, h, i, j: i / (j - 3) > 2, lambda b, h, i, j: near[i] + near[j] <= -2**63 + 3,
                lambda b, h, i, j: i.to(torch.int8) * 3 > 100, lambda b, h, i, j: ids[i - 5] >= 5,
                lambda b, h, i, j: torch.where(j >= 0, ids[i - 5], 0) >= 5):
        check(create_block_mask(mod, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=8), create_mask(mod, 1, 1, 64, 64, device="cpu"))

    wraps = lambda b, h, i, j: (i + 15) * 2**26 * 2**32 < -2**62
    check(create_block_mask(wraps, 1, 1, 35, 35, device="cpu", BLOCK_SIZE=35), create_mask(wraps, 1, 1, 35, 35, device="cpu"))

def test_pieces_smaller_than_a_block(monkeypatch):
    monkeypatch.setattr(bm, "ELEMENTS", 50)
    monkeypatch.setattr(bm, "BLOCKS", 7)
    for name, mod in own_masks(2, 3, 60, 50).items():
        dense = create_mask(mod, 2, 3, 60, 50, device="cpu")
        for block in ((16, 16), (100, 9), (2**30, 2**30)):
            check(create_block_mask(mod, 2, 3, 60, 50, device="cpu", BLOCK_SIZE=block), dense, exact=block[0] < 2**30)

def test_wide_grids_keep_the_columns_in_use(monkeypatch):
    monkeypatch.setattr(bm, "WIDE", 100)
    mask = create_block_mask(window_mask(5, 0), 1, 1, 200, 200, device="cpu", BLOCK_SIZE=4)
    assert mask.kv_indices.shape[-1] < 50
    dense = create_mask(window_mask(5, 0), 1, 1, 200, 200, device="cpu")
    check(mask, dense)
    check(mask[:, :, 3:7], dense[:, :, 12:28])
    check(mask.crop(101, 70), dense[:, :, :101, :70])

# ---- the same mask elsewhere

@pytest.mark.parametrize("block", [(16, 16), (32, 64), (7, 100)])
def test_crop_and_shift_equal_fresh_masks(block):
    for name, mod in own_masks(2, 3, 100, 90).items():
        dense = create_mask(mod, 2, 3, 100, 90, device="cpu")
        mask = create_block_mask(mod, 2, 3, 100, 90, device="cpu", BLOCK_SIZE=block)
        for q, k in ((100, 90), (64, 64), (50, 17), (1, 1), (0, 5), (99, 0), (100, 33)):
            check(mask.crop(q, k), dense[:, :, :q, :k])
        for o in (0, 1, 16, 50, 99, 100): check(mask.shift(o), dense[:, :, o:])
        check(mask.shift(33).crop(30, 40).shift(3), dense[:, :, 36:63, :40])

EVERY = slice(None)

@pytest.mark.parametrize("index", [0, -1, (1, 2), (EVERY, slice(1, 3)), (EVERY, -2), (EVERY, EVERY, 2), (0, 0, slice(1, 4)), (slice(0, 0),),
    (EVERY, EVERY, slice(0, None, 3)), torch.tensor([1, 0, 1]), (EVERY, torch.tensor([2, 0])), (EVERY, EVERY, torch.tensor([3, 1])),
    (EVERY, EVERY, slice(2, 2)), torch.tensor(1), slice(None, None, -1)])
def test_picking_equals_the_part_of_the_mask(index):
    full = index if isinstance(index, tuple) else (index,)
    numbers = [x.item() if isinstance(x, torch.Tensor) and x.ndim == 0 else x for x in full]
    keep = [[x] if isinstance(x, int) else x for x in numbers] + [slice(None)] * (3 - len(numbers))
    for name, mod in own_masks(2, 3, 64, 90).items():
        dense = create_mask(mod, 2, 3, 64, 90, device="cpu")
        part = dense.unflatten(2, (4, 16))
        for axis, x in enumerate(keep):
            n = part.shape[axis]
            at = list(range(*x.indices(n))) if isinstance(x, slice) else [y % n for y in (x.tolist() if isinstance(x, torch.Tensor) else x)]
            part = part.index_select(axis, torch.tensor(at, dtype=torch.int64))
        mask = create_block_mask(mod, 2, 3, 64, 90, device="cpu", BLOCK_SIZE=16)[index]
        check(mask, part.flatten(2, 3))
        check(mask.shift(min(3, mask.shape[2])), part.flatten(2, 3)[:, :, 3:])

def test_ragged_rows_are_picked_last():
    mask, dense = (f(causal_mask(), 1, 1, 40, 40, device="cpu", **kw) for f, kw in ((create_block_mask, {"BLOCK_SIZE": 16}), (create_mask, {})))
    check(mask[0, 0, torch.tensor([1, 2])], dense[:, :, 16:])
    check(mask[0, 0, torch.tensor([0, 2])], torch.cat([dense[:, :, :16], dense[:, :, 32:]], 2))
    with pytest.raises(ValueError, match="picked last"): mask[0, 0, torch.tensor([2, 1])]

def test_one_entry_serves_a_whole_batch():
    lengths = torch.tensor([3, 20, 40])
    one = create_block_mask(masks.padding_mask(lengths), 3, None, 40, 40, device="cpu", BLOCK_SIZE=16)[1]
    assert one.shape[0] == 1 and "b" not in trace(one.mask_mod)[0].uses
    assert torch.equal(create_mask(one.mask_mod, 5, 1, 40, 40, device="cpu"), one.to_mask().expand(5, 1, 40, 40))

def given_lists(L=100, S=90, block=(16, 16), seed=0, **kw):
    "Lists that no mask_mod makes: full blocks where it says no, in no order, not contiguous."
    g = torch.Generator().manual_seed(seed)
    grid = Grid(L, S, *block)
    kinds = torch.randint(0, 3, (2, 3, grid.rows, grid.cols), generator=g, dtype=torch.int8)
    lists = []
    for kind in (PARTIAL, WHOLE):
        number, indices = lists_of(kinds == kind)
        at = torch.arange(grid.cols)
        turn = torch.where(at < number[..., None], number[..., None] - 1 - at, at)
        indices = indices.gather(-1, turn.long())
        lists += [number, torch.stack([indices, indices], -1)[..., 0]]
    mod = lambda b, h, i, j: (i + j + b) % 3 == 0
    allowed = create_mask(mod, 2, 3, L, S, device="cpu")
    spread = kinds[:, :, torch.arange(L) // block[0]][..., torch.arange(S) // block[1]]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mod, seq_lengths=(L, S), **kw)
    return mask, (spread == WHOLE) | (spread == PARTIAL) & allowed

def test_given_lists():
    mask, dense = given_lists()
    check(mask, dense, exact=False)
    assert mask.built_for is None and not mask.kv_indices.is_contiguous()
    for q, k in ((64, 64), (50, 17), (1, 1), (0, 5)): check(mask.crop(q, k), dense[:, :, :q, :k], exact=False)
    for o in (1, 16, 50, 99, 100): check(mask.shift(o), dense[:, :, o:], exact=False)
    check(mask[1, :, 2:5], dense[1:, :, 32:80], exact=False)
    check(mask.shift(5).to("cpu").shift(7).crop(20, 70), dense[:, :, 12:32, :70], exact=False)

def test_given_lists_one_way():
    mask, dense = given_lists(compute_q_blocks=False)
    assert mask.q_indices is None and mask.full_q_indices is None
    for x in (mask, mask.crop(20, 20), mask.shift(16), mask[0]): assert x.q_indices is None
    both, _ = given_lists()
    for x, y in zip(mask.blocks().tensors(), both.blocks().tensors()): assert torch.equal(x, y)

def test_given_lists_of_low_rank():
    number, indices = lists_of(torch.eye(4, dtype=torch.bool))
    mask = BlockMask.from_kv_blocks(number, indices.long(), BLOCK_SIZE=8)
    assert mask.shape == (1, 1, 32, 32) and mask.kv_indices.dtype == torch.int32
    assert torch.equal(mask.to_mask()[0, 0], torch.kron(torch.eye(4), torch.ones(8, 8)).bool())

def test_given_lists_are_checked():
    number, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    ok = dict(kv_num_blocks=number, kv_indices=indices, BLOCK_SIZE=16)
    BlockMask.from_kv_blocks(**ok)
    none = dict(full_kv_num_blocks=number * 0, full_kv_indices=indices)
    BlockMask.from_kv_blocks(**ok, **none)
    for error, change in (
        (ValueError, {"kv_num_blocks": number + 1}), (ValueError, {"kv_num_blocks": number - 2}), (ValueError, {"kv_indices": indices + 1}),
        (ValueError, {"kv_indices": indices - 1}), (ValueError, {"kv_indices": indices * 0}), (ValueError, {"full_kv_num_blocks": number}),
        (ValueError, {"full_kv_indices": indices}), (ValueError, {"full_kv_num_blocks": number, "full_kv_indices": indices}),
        (ValueError, {"full_kv_num_blocks": number[0, 0, :1], "full_kv_indices": indices[0, 0, :1]}),
        (ValueError, {"kv_num_blocks": number[..., :1]}), (ValueError, {"kv_num_blocks": number[0]}), (ValueError, {"BLOCK_SIZE": 0}),
        (ValueError, {"BLOCK_SIZE": (16, 16, 16)}), (TypeError, {"BLOCK_SIZE": 16.0}), (TypeError, {"BLOCK_SIZE": True}),
        (TypeError, {"kv_num_blocks": number.float()}), (TypeError, {"kv_indices": indices.bool()}), (TypeError, {"kv_indices": [[0]]}),
        (TypeError, {"mask_mod": lambda s, b, h, i, j: s}), (TypeError, {"mask_mod": 3}), (ValueError, {"seq_lengths": (33, 32)}),
        (ValueError, {"seq_lengths": (-1, 32)}), (ValueError, {"seq_lengths": (32, 16)}), (TypeError, {"seq_lengths": (32.0, 32)}),
    ):
        with pytest.raises(error): BlockMask.from_kv_blocks(**{**ok, **change})

@pytest.mark.parametrize("error,call", [
    (TypeError, (lambda s, b, h, i, j: s, 1, 1, 8, 8)), (TypeError, (None, 1, 1, 8, 8)), (TypeError, (lambda b, h, i, j: i - j, 1, 1, 8, 8)),
    (TypeError, (lambda b, h, i, j: True, 1, 1, 8, 8)), (TypeError, (lambda b, h, i, j: i >= j if i > 3 else j < 2, 1, 1, 8, 8)),
    (ValueError, (causal_mask(), -1, 1, 8, 8)), (ValueError, (causal_mask(), 1, 1, -8, 8)), (TypeError, (causal_mask(), 1, 1, 8.0, 8)),
    (TypeError, (causal_mask(), True, 1, 8, 8)), (ValueError, (causal_mask(), 1, 1, 8, 8, "cpu", -16)),
    (ValueError, (causal_mask(), 1, 1, 8, 8, "cpu", (16, 0))),
    (IndexError, (lambda b, h, i, j: torch.ones(4)[j] > 0, 1, 1, 8, 8)), (ValueError, (lambda b, h, i, j: (i == j).any(), 1, 1, 8, 8)),
    (TypeError, (and_masks(lambda b, h, i, j: i - j, causal_mask()), 1, 1, 8, 8)),
])
def test_refusals(error, call):
    with pytest.raises(error): create_block_mask(*call)

def test_moves_are_refused():
    mask = create_block_mask(causal_mask(), 2, 3, 40, 40, device="cpu", BLOCK_SIZE=16)
    for index in (2, -3, (0, 3), (0, 0, 3), (0, 0, 0, 0), torch.tensor([0, 2])):
        with pytest.raises(IndexError): mask[index]
    for index in (1.0, None, True, ..., torch.tensor([0.5]), torch.tensor([True, False])):
        with pytest.raises(TypeError): mask[index]
    with pytest.raises(ValueError): mask[torch.tensor([0]), torch.tensor([0])]
    for call in (lambda: mask.crop(41, 40), lambda: mask.crop(40, -1), lambda: mask.shift(41), lambda: mask.shift(-1), lambda: mask.to_string(0)):
        with pytest.raises(ValueError): call()
    for call in (lambda: mask.crop(4.0, 4), lambda: mask.shift(None)):
        with pytest.raises(TypeError): call()

def test_copies():
    for mask in (create_block_mask(document_mask(torch.arange(40) // 7), 2, 1, 40, 40, device="cpu", BLOCK_SIZE=16), given_lists()[0]):
        for new in (copy.copy(mask), copy.deepcopy(mask), tree_unflatten(*tree_flatten(mask))):
            assert torch.equal(new.to_mask(), mask.to_mask()) and new is not mask and new.built_for == mask.built_for
    mask = create_block_mask(masks.noop_mask, 1, 1, 40, 40, device="cpu", BLOCK_SIZE=16).shift(3)
    assert torch.equal(pickle.loads(pickle.dumps(mask)).to_mask(), mask.to_mask())
    assert tree_flatten(mask)[1] == tree_flatten(mask)[1] and len(tree_flatten(mask)[0]) == 8

def test_compiles_and_exports_as_an_argument():
    mask, x = create_block_mask(window_mask(20, 3), None, None, 100, 100, device="cpu", BLOCK_SIZE=16), torch.arange(5.)
    class Reads(torch.nn.Module):
        def forward(self, x, mask): return x + mask.kv_indices.sum() + mask.shape[2]
    right = Reads()(x, mask)
    assert torch.equal(torch.compile(Reads(), backend="eager", fullgraph=True)(x, mask), right)
    assert torch.equal(torch.export.export(Reads(), (x, mask)).module()(x, mask), right)

def test_fits():
    mod = masks.padding_mask(torch.tensor([3, 5]))
    mask = create_block_mask(mod, None, None, 40, 40, device="cpu")
    mask.check_fits(1, 4, 40, 40, trace(mod)[0].uses)
    create_block_mask(mod, 2, None, 40, 40, device="cpu").check_fits(2, 4, 40, 40, trace(mod)[0].uses)
    with pytest.raises(ValueError, match="B=None"): mask.check_fits(2, 4, 40, 40, trace(mod)[0].uses)
    with pytest.raises(ValueError, match=r"crop\(20, 30\)"): mask.check_fits(1, 4, 20, 30)
    with pytest.raises(ValueError, match="create_block_mask"): mask.check_fits(1, 4, 41, 40)
    with pytest.raises(ValueError, match="batch"): create_block_mask(causal_mask(), 2, 1, 8, 8, device="cpu").check_fits(3, 1, 8, 8)
    given_lists()[0].check_fits(2, 3, 100, 90, frozenset("bhij"))

# ---- what others stumbled on

def test_known_faults():
    full = create_block_mask(masks.noop_mask, 1, 1, 100, 100, device="cpu")  # attention-gym#93
    tiny = create_block_mask(causal_mask(), 1, 1, 16, 16, device="cpu")
    assert full.sparsity() == tiny.sparsity() == 0.0
    seen = []  # pytorch#137801
    def spied(b, h, i, j): seen.append((i, j)); return i >= j
    create_block_mask(spied, 1, 1, 2046, 2046, device="cpu")
    assert all(x.numel() == 0 or x.device.type == "meta" or x.max() <= 2045 for pair in seen for x in pair)
    blocks = create_block_mask(causal_mask(), 1, 1, 300, 300, device="cpu")  # bd3lms#23
    assert blocks.to_dense().shape == (1, 1, 3, 3) and blocks.to_mask().shape == (1, 1, 300, 300)
    check(create_block_mask(causal_mask(), 1, 1, 130, 77, device="cpu", BLOCK_SIZE=(33, 20)),  # attention-gym#71
        create_mask(causal_mask(), 1, 1, 130, 77, device="cpu"))
    with pytest.raises(TypeError): create_block_mask(and_masks(lambda b, h, i, j: j - i, causal_mask()), 1, 1, 16, 16)

BIG = """
import resource, time, torch
from tensorplay_attn.block_mask import *
from tensorplay_attn.masks import *
torch.set_num_threads(1)
ids = torch.repeat_interleave(torch.arange(64), 2048)
create_block_mask(causal_mask(), 1, 1, 300, 300, device="cpu")
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
mask = create_block_mask(and_masks(causal_mask(), document_mask(ids)), None, None, 131072, 131072, device="cpu", BLOCK_SIZE={block})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.process_time() - start, mask.sparsity())
"""

def test_a_document_mask_of_131072():  # pytorch#134756
    out = subprocess.run([sys.executable, "-c", BIG.format(block=128)], capture_output=True, text=True, check=True).stdout
    mib, seconds, sparsity = map(float, out.split())
    assert mib < 256 and seconds < 2 and sparsity > 99


def test_another_mask_mod_is_taken_at_its_word():
    "As code that decodes does: lists of one mask, a function of another; nothing is concluded from where the lists came."
    mask = create_block_mask(causal_mask(), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert mask.built_for == (None, None)
    mask.mask_mod = lambda b, h, i, j: j <= i - 2
    assert mask.built_for is None and mask.to_mask()[0, 0, 20].sum() == 16 + 3  # one full block; three more in the partial one


def test_lists_without_values_print():
    mask = create_block_mask(causal_mask(), None, None, 64, 64, device="cpu", BLOCK_SIZE=16).to("meta")
    assert "sparsity unknown" in str(mask) and "sparsity unknown" in repr(mask)


@pytest.mark.parametrize("wrong, error, words", ((dict(seq_lengths=3), TypeError, "seq_lengths must be a pair"),
    (dict(seq_lengths=(20,)), ValueError, "pair"),
    (dict(compute_q_blocks=3), TypeError, "compute_q_blocks")))
def test_words_for_wrong_lists(wrong, error, words):
    with pytest.raises(error, match=words):
        BlockMask.from_kv_blocks(torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32), BLOCK_SIZE=16, **wrong)
