"""Core AI's SDPA and ours on one grid, each before the fp64 truth. Prints a JSON: what differs, on what input, by how much.

For an environment with coreai-torch 0.4.3, coreai-core 1.0.0b3 and torch: PYTHONPATH=. python tests/peers/coreai_grid.py
"""
import itertools
import json
import sys
import warnings
from collections import defaultdict
from importlib.metadata import version

import torch

warnings.filterwarnings("ignore")
from coreai_torch.composite_ops import SDPA as Theirs  # noqa: E402

from tensorplay_attn.bounds import judge_forward  # noqa: E402
from tensorplay_attn.problem import make_problem  # noqa: E402
from tensorplay_attn.reference import dense_forward  # noqa: E402
from tensorplay_attn.sdpa import SDPA as Ours, window_pair  # noqa: E402

B, T_q, T_kv, D, D_v = 3, 5, 7, 11, 13
AXES = dict(heads=((4, 4), (4, 2)), scale=(None, 1.5), is_causal=(False, True), window_size=(0, 1, 2, 11),
    sinks=("none", "zeros", "random", "large"), dtype=("float32", "float16", "bfloat16"))
MASKS = "none", "bool", "one row empty", "bias"


def rows(axes=AXES, masks=("none",), lengths=((T_q, T_kv),)):
    for mask, (L, S), *values in itertools.product(masks, lengths, *axes.values()): yield dict(zip(axes, values), mask=mask, T_q=L, T_kv=S)


def tensors(row):
    torch.manual_seed(0)
    dtype, (H, Hkv), L, S = getattr(torch, row["dtype"]), row["heads"], row["T_q"], row["T_kv"]
    q, k, v = (torch.randn(B, h, n, d).to(dtype) for h, n, d in ((H, L, D), (Hkv, S, D), (Hkv, S, D_v)))
    sinks = {"none": None, "zeros": torch.zeros(H), "random": torch.randn(H), "large": torch.full((H,), 30.0)}[row["sinks"]]
    keep = torch.rand(L, S) < 0.7
    keep[:, -1] = True
    if row["mask"] == "one row empty": keep[2] = False
    mask = None if row["mask"] == "none" else torch.randn(L, S).to(dtype) if row["mask"] == "bias" else keep
    return (q, k, v, mask, None if sinks is None else sinks.to(dtype))


def compare(row):
    q, k, v, mask, sinks = tensors(row)
    knobs = dict(scale=row["scale"], is_causal=row["is_causal"], window_size=row["window_size"])
    problem = make_problem(q, k, v, mask, scale=row["scale"], is_causal=row["is_causal"], sinks=sinks, alignment="lower_right",
        window_size=window_pair(row["window_size"], row["is_causal"]))
    truth, found = dense_forward(problem.to(torch.float64))[0], {}
    for name, module in (("theirs", Theirs), ("ours", Ours)):
        try: out = module(**knobs)(q, k, v, mask, sinks)
        except Exception as e: found[name] = f"{type(e).__name__}: {str(e).splitlines()[0]}"[:120]
        else: found[name] = (out.double() - truth).abs().max().item(), judge_forward(problem, out)["out"].ok
    return found


def summary(grid):
    "By what varies: how many rows of each kind exceed what the contract allows, the worst error, and on which row."
    groups = defaultdict(lambda: dict(rows=0, ours_wrong=0, theirs_wrong=0, theirs_raised=0, ours_worst=0.0, theirs_worst=0.0, on=None, error=None))
    for row in grid:
        found = compare(row)
        causal = "causal" if row["is_causal"] else "not causal"
        lengths = "T_q > T_kv" if row["T_q"] > row["T_kv"] else "T_q < T_kv"
        g = groups[f"{row['dtype']}, mask {row['mask']}, {causal}, window {'yes' if row['window_size'] else 'no'}, {lengths}"]
        g["rows"] += 1
        if isinstance(found["ours"], str): raise SystemExit(f"ours raised on {row}: {found['ours']}")
        g["ours_wrong"] += not found["ours"][1]
        g["ours_worst"] = max(g["ours_worst"], found["ours"][0])
        if isinstance(found["theirs"], str):
            g["theirs_raised"] += 1
            g["error"] = found["theirs"]
            continue
        g["theirs_wrong"] += not found["theirs"][1]
        if not found["theirs"][0] <= g["theirs_worst"]: g["theirs_worst"], g["on"] = found["theirs"][0], row
    return dict(groups)


def main():
    masked = dict(AXES, scale=(None,), sinks=("none", "random"), dtype=("float32", "bfloat16"))
    longer = dict(AXES, scale=(None,), sinks=("none",), dtype=("float32",))
    grids = dict(grid=rows(), masks=rows(masked, MASKS[1:]), more_queries=rows(longer, lengths=((7, 5),)))
    report = {name: summary(grid) for name, grid in grids.items()}
    versions = {p: version(p) for p in ("torch", "coreai-torch", "coreai-core")}
    json.dump(dict(versions=versions, **report), sys.stdout, indent=1)
    print()
    if any(g["ours_wrong"] for groups in report.values() for g in groups.values()): raise SystemExit("ours is outside of the contract")


if __name__ == "__main__": main()
