"""Formulas of page 54 held to what is counted, over more problems than the page has."""
import json
import math
from pathlib import Path
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from tensorplay_attn.evidence import cost as page
from tensorplay_attn.evidence.cost import Visits, along_keys, along_queries, cost, plan_visits
from tensorplay_attn.kernels import decode, efficient_backward, efficient_forward, flash_backward, flash_forward, tile, varlen
from tensorplay_attn.packed import make_packed
from tensorplay_attn.problem import everything, make_problem, visible
from tensorplay_attn.tiled import _fused_backward, _fused_forward, tiled_backward, tiled_forward

ROOT = Path(__file__).parents[1]

def posed(B=1, H=4, Hkv=2, L=70, S=110, E=16, Ev=16, **knobs):
    gen = torch.Generator().manual_seed(0)
    return make_problem(*(torch.randn(size, generator=gen) for size in ((B, H, L, E), (B, Hkv, S, E), (B, Hkv, S, Ev))), **knobs)

def seen_by(problem):  # bool (B, L, S)
    B, _, _, L, S, _, _ = problem.sizes
    seen = visible(problem, *everything(problem))
    return torch.ones(B, L, S, dtype=torch.bool) if seen is None else seen.expand(B, 1, L, S)[:, 0]

def tiles_in(seen, m, n):  # for each run of m rows: tiles of n columns from the first that is seen to the last
    counts = []
    for rows in seen.split(m, -2):
        at = rows.any(-2).nonzero().flatten() // n
        counts.append(0 if at.numel() == 0 else int(at.max() - at.min()) + 1)
    return counts

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (12, 0), (7, 20), (-1, 5), (40, -1)]
SIZES = [(1, 1), (70, 110), (110, 70), (64, 64), (33, 200)]

@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_walks_along_keys_and_along_queries_visit_what_is_seen(window, alignment):
    for L, S in SIZES:
        problem = posed(B=2, L=L, S=S, window_size=window, alignment=alignment, kv_lengths=torch.tensor([S, S // 2]))
        for m, n in ((16, 16), (32, 64)):
            for walk, seen, size in ((along_keys, seen_by(problem), (m, n)), (along_queries, seen_by(problem).mT, (n, m))):
                counts = [c for one in seen for c in tiles_in(one, *size)]
                least, most = (4 * m * n * sum(c + spare * (c == 0) for c in counts) for spare in (0, 1))
                assert least <= walk(problem, m, n).scores <= most  # a walk that has nothing to see may take one step

@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_tiled_engine_visits_at_least_what_is_seen(window):
    for L, S in SIZES:
        problem = posed(L=L, S=S, window_size=window, alignment="lower_right")
        assert plan_visits(problem).scores >= 4 * seen_by(problem).sum().item()

def flops_of(run):
    def scores(q, k, is_causal): return q[0] * q[1] * (q[2] * (q[2] + 1) // 2 if is_causal else q[2] * k[2])
    def forward(q, k, v, p=0.0, is_causal=False, **knobs): return scores(q, k, is_causal) * 2 * (q[3] + v[3])
    def backward(do, q, k, v, out, lse, p, is_causal, **knobs): return scores(q, k, is_causal) * 2 * (3 * q[3] + 2 * v[3])
    with FlopCounterMode(display=False, custom_mapping={_fused_forward: forward, _fused_backward: backward}) as counter: run()
    return counter.get_total_flops()

KNOBS = {"dense": {}, "causal": dict(is_causal=True), "longer": dict(L=33, S=200, is_causal=True, alignment="lower_right"),
    "window": dict(L=300, S=300, window_size=(20, 5)), "softcap": dict(softcap=3.0, is_causal=True), "wide": dict(Ev=40), "mask": dict(mask=True),
    "lengths": dict(B=2, kv_lengths=torch.tensor([110, 30]))}

@pytest.mark.parametrize("name", KNOBS)
def test_the_tiled_engine_multiplies_what_is_said(name):
    knobs = dict(KNOBS[name])
    if knobs.pop("mask", False): knobs["attn_mask"] = torch.arange(110) < 60
    problem = posed(**knobs)
    assert flops_of(lambda: tiled_forward(problem)) == cost(problem, "tiled").flops
    out, lse, _ = tiled_forward(problem)
    assert flops_of(lambda: tiled_backward(problem, out, lse, torch.ones_like(out))) == cost(problem, "tiled", backward=True).flops

@pytest.fixture
def multiplied(monkeypatch):  # operations that kernels have done
    counts, real = [], tile.product
    def product(a, b, acc=None):
        counts.append(2 * math.prod(map(int, (*a.shape, b.shape[1]))))
        return real(a, b, acc)
    for module in (tile, flash_forward, flash_backward, efficient_forward, efficient_backward, decode, varlen):
        if hasattr(module, "product"): monkeypatch.setattr(module, "product", product)
    def flops(run, *args):
        counts.clear()
        run(*args)
        return sum(counts)
    return flops

@pytest.mark.parametrize("name", ["dense", "longer", "wide", "lengths"])
def test_kernels_multiply_what_is_said(name, multiplied):
    problem = posed(**KNOBS[name])
    for engine, forward, backward in (("flash", flash_forward.flash_forward, flash_backward.flash_backward),
                                      ("efficient", efficient_forward.efficient_forward, efficient_backward.efficient_backward)):
        out, lse, _ = tiled_forward(problem)
        assert multiplied(forward, problem) == cost(problem, engine).flops
        assert multiplied(backward, problem, out, lse, torch.ones_like(out)) == cost(problem, engine, backward=True).flops

@pytest.mark.parametrize("knobs", [{}, dict(window_size=(300, 0)), dict(is_causal=True, kv_lengths=torch.tensor([700, 90]))], ids=str)
def test_decoding_multiplies_what_is_said(knobs, multiplied):
    problem = posed(B=2, L=3, S=700, alignment="lower_right", **knobs)
    assert multiplied(decode.decode_forward, problem) == cost(problem, "decode").flops

@pytest.mark.parametrize("H", [2, 6])
def test_packed_sequences_multiply_what_is_said(H, multiplied):
    cu = torch.tensor([0, 3, 60, 60, 76, 77], dtype=torch.int32)
    packed = make_packed(torch.randn(77, H, 16), *torch.randn(2, 77, 2, 16), cu, cu, 57, 57, is_causal=True)
    assert multiplied(varlen.packed_forward, packed) == cost(packed, "varlen").flops

def test_what_is_refused():
    for wrong, why in ((dict(engine="fast"), "none of"), (dict(engine="varlen"), "another kind"), (dict(engine="decode", backward=True), "backward"),
                       (dict(engine="omni"), "has none"), (dict(engine="efficient"), "E=160")):
        with pytest.raises(ValueError, match=why): cost(posed(E=160), **wrong)
    assert page.add_visits() == Visits(0, 0, 0)

def test_roofs_and_the_file_beside_the_page(monkeypatch, tmp_path):
    assert len({roof.name for roof in page.PUBLISHED}) == len(page.PUBLISHED) and all(roof.source for roof in page.PUBLISHED)
    found = json.loads((ROOT / "nbs/cost.json").read_text(encoding="utf-8"))
    assert set(found["seconds"]) == set(page.POINTS) and found["machine"]["date"] and found["flops"] > found["bandwidth"] > 0
    monkeypatch.setattr(page, "measure", lambda budget: found)
    result = CliRunner().invoke(page.cost_command, ["--json", str(tmp_path / "x.json")])
    assert result.exit_code == 0 and found["machine"]["cpu"] in result.output
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == found
