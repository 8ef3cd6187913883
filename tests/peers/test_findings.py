"Everybody asked again: what page 51 says about them is what they do."
import json
from pathlib import Path

import pytest

from tensorplay_attn.evidence import peers

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "nbs/peers.json").read_text(encoding="utf-8"))
VARIES = {c.does for c in peers.CAUSES if c.varies}  # how often they show depends on the machine
NEXT = "if it is right: cp _report/peers.json nbs/peers.json, and run page 51 again"


@pytest.fixture(scope="module")
def found():
    "The whole run, written where it can be looked at."
    names = peers.present()
    found = peers.findings(peers.compare(names, quick=False)) | {"said": peers.said()}
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
    def of(x): return {f["does"]: (f["count"], f["rows"], f["case"]) for f in x["found"] if f["peer"] == name and f["does"] not in VARIES}
    assert of(found) == of(KEPT), NEXT


def test_the_matrix_is_that_of_the_page(found):
    shaky = {(f["peer"], row) for x in (found, KEPT) for f in x["found"] if f["does"] in VARIES for row in f["rows"]}
    def firm(x): return {(n, row): v for row, cells in x["cells"].items() for n, v in cells.items() if (n, row) not in shaky}
    assert firm(found) == firm(KEPT), NEXT
    assert len(firm(KEPT)) > 150


@pytest.mark.parametrize("probe", peers.PROBES, ids=[p.name for p in peers.PROBES])
def test_said(found, probe):
    ours, theirs = found["said"][probe.name]
    assert (ours == theirs) == (not probe.why), (ours, theirs)
    assert [ours, theirs] == KEPT["said"][probe.name], NEXT


def test_a_crash_is_a_cell_and_not_an_end(found):
    assert "died" in found["cells"]["layout"]["tensorplay"] and found["said"]["bias: a copy"][1] == "kills the process"
    assert "right" in found["cells"]["scale, lse"]["tensorplay"]  # asked afterwards, in another process
