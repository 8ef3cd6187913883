"Everybody asked again: what page 51 says about them is what they do."
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tensorplay_attn.evidence import peers

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "nbs/peers.json").read_text(encoding="utf-8"))
VARIES = {c.does for c in peers.CAUSES if c.varies}  # how often they show depends on the machine
ABSENT = {n: p.lacks() for n, p in peers.PEERS.items() if p.lacks()}  # without a C++ compiler; all others are installed
NEXT = "if it is right: cp _report/peers.json nbs/peers.json, and run page 51 again"


def asked(names): return peers.findings(peers.compare(names, quick=False))

def together(*parts):  # as if they had been one
    names = [n for n in peers.PEERS if any(n in next(iter(p["cells"].values())) for p in parts)]
    cells = {row: {n: next((p["cells"][row][n] for p in parts if n in p["cells"].get(row, ())), "-") for n in names} for row in parts[0]["cells"]}
    found = sorted((f for p in parts for f in p["found"]), key=lambda f: names.index(f["peer"]))
    return parts[0] | dict(cells=cells, found=found)


@pytest.fixture(scope="module")
def found():
    "The whole run, written where it can be looked at. What a C++ compiler works at takes as long as all others: it has a core to itself."
    names = peers.present()
    compiled = [n for n in names if peers.PEERS[n].compiles]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as beside:
        later = beside.submit(asked, compiled) if compiled else None
        found = asked([n for n in names if n not in compiled])
        said = peers.said()
        if later: found = together(found, later.result())
    found["said"] = said
    (ROOT / "_report").mkdir(exist_ok=True)
    (ROOT / "_report/peers.json").write_text(peers.as_json(found), encoding="utf-8")
    return found


def pins():
    lines = [line.split("#")[0].strip() for file in ("constraints.txt", "constraints-peers.txt") for line in (ROOT / file).read_text().split("\n")]
    return dict(line.split("==") for line in lines if "==" in line)


def test_versions(found):
    pinned = pins()
    assert {n: v for n, v in found["versions"].items() if n not in ("tensorplay_attn", "python") and pinned[n] != v} == {}
    assert all(found["versions"][n] == v for n, v in KEPT["versions"].items() if n not in ("tensorplay_attn", "python"))


def test_every_failure_has_a_cause_and_every_cause_a_failure(found):
    assert [f for f in found["found"] if not f["does"]] == []
    seen = {(f["peer"], f["does"]) for f in found["found"]}
    slow = {n for n, p in peers.PEERS.items() if p.slow}  # not asked everything
    named = {(n, c.does) for c in peers.CAUSES if not c.varies for n in c.peers.split(",") if n not in slow}
    assert named - seen == set()


@pytest.mark.parametrize("name", peers.PEERS)
def test_findings_are_those_of_the_page(found, name):
    if name in ABSENT: pytest.skip(f"{name} cannot be asked here, for want of {' and '.join(ABSENT[name])}")
    def of(x): return {f["does"]: (f["count"], f["rows"], f["case"]) for f in x["found"] if f["peer"] == name and f["does"] not in VARIES}
    assert of(found) == of(KEPT), NEXT


def test_the_matrix_is_that_of_the_page(found):
    shaky = {(f["peer"], row) for x in (found, KEPT) for f in x["found"] if f["does"] in VARIES for row in f["rows"]}
    def firm(x): return {(n, row): v for row, cells in x["cells"].items() for n, v in cells.items() if (n, row) not in shaky and n not in ABSENT}
    assert firm(found) == firm(KEPT), NEXT
    assert len(firm(KEPT)) > 150


@pytest.mark.parametrize("probe", peers.PROBES, ids=[p.name for p in peers.PROBES])
def test_said(found, probe):
    ours, theirs = found["said"][probe.name]
    assert (ours == theirs) == (not probe.why), (ours, theirs)
    assert [ours, theirs] == KEPT["said"][probe.name], NEXT


@pytest.mark.skipif("flex-compiled" in ABSENT, reason="nothing is compiled here")
def test_what_compiled_flex_is_not_asked_it_refuses():
    "No backward, no lse, no float64: PyTorch's own words, told as what it does not do."
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 3, 8)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"): peers.flex_compiled(q.clone().requires_grad_(), k, k)
    with pytest.raises(NotImplementedError, match="supported in FlexAttention for CPU device"), torch.no_grad():
        peers.flex_compiled(*(x.double() for x in (q, k, k)))
    with pytest.raises(Exception, match="`return_lse` is not supported") as caught, torch.no_grad():
        torch.compile(peers.flex_attention, fullgraph=True)(q, k, k, return_aux=torch.nn.attention.flex_attention.AuxRequest(lse=True))
    assert type(peers.unwrapped(caught.value)) is NotImplementedError


def test_a_crash_is_a_cell_and_not_an_end(found):
    assert "died" in found["cells"]["layout"]["tensorplay"] and found["said"]["bias: a copy"][1] == "kills the process"
    assert "right" in found["cells"]["scale, lse"]["tensorplay"]  # asked afterwards, in another process
