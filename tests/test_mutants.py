"Planted faults: each has its place in today's source, each is killed by the case that is known for it, and nothing right is accused."
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from tensorplay_attn.evidence import conformance, mutants
from tensorplay_attn.evidence.mutants import (CRITERIA, INNOCENT, MUTANTS, Fate, Mutant, alarms, copied, counts, face, false_alarms, fates, judged,
                                              judging, mutants_command, ordered, planted)
from tensorplay_attn.evidence.suites import REPORTS, reports


pytestmark = pytest.mark.usefixtures("one_thread")


def named(name): return next(m for m in MUTANTS if m.name == name)


# ---------------------------------------------------------------- the list

def test_every_mutant_has_its_place_and_changes_something():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 60
    for m in MUTANTS: planted(m, m.file.read_text(encoding="utf-8"))


def test_every_mutant_stands_for_something_and_names_a_case():
    cases, quick = judging()
    known, rows, ids = reports(REPORTS), {c.row for c in cases}, {c.id for c in cases}
    for m in MUTANTS:
        assert m.after and set(m.after) <= known | rows, m.name
        assert m.what and m.case in ids, f"{m.name}: no case of today is called {m.case!r}; tensorplay-attn mutants --only '{m.name}' finds one"
    assert 2 * sum(m.case in quick for m in MUTANTS) >= len(MUTANTS)


@pytest.mark.parametrize("changes", [dict(old="no such text"), dict(old="import"), dict(new="(j >= positions(problem, rows) - left)")])
def test_a_text_that_is_not_there_or_that_changes_nothing_is_refused(changes):
    m = replace(named("window one short"), **changes)
    with pytest.raises(ValueError, match="window one short"): planted(m, m.file.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- the verdict

def test_each_is_killed_by_its_case():
    "One process, as the whole; who dies of it is started again."
    found = fates(MUTANTS, known=True, others=False, jobs=1)
    assert [f.mutant for f in found] == [m.name for m in MUTANTS]
    assert [f.mutant for f in found if not f.case] == []


@pytest.mark.parametrize("innocent", INNOCENT, ids=[m.engine for m in INNOCENT])
def test_a_copy_without_a_fault_lives(innocent):
    quick = ordered(innocent, quick_only=True)[::6]
    with copied(None) as package, judged(package): fate = face(innocent, conformance.engine_column(innocent.engine), quick)
    assert fate.tried == len(quick) and not fate.case, fate.message


def test_the_judge_is_itself_again():
    before = {judge: dict(vars(judge)) for judge in mutants.KEPT}
    with copied(None) as package, judged(package):
        assert conformance.tensorplay_attn is package and conformance.attend.__module__.startswith(package.__name__)
        assert conformance.pose.__module__ == "tensorplay_attn.evidence.cases"  # truth stays ours
    assert all(dict(vars(judge)) == was for judge, was in before.items())


# ---------------------------------------------------------------- others

@pytest.mark.parametrize("engine", ["math", "tiled"])
def test_others_accuse_the_right_engine_by_ratios_alone(engine):
    assert {x[0] for x in false_alarms(engine)} <= {"mean*1.1", "max*2"} and len(false_alarms(engine)) < 6


def test_each_criterion_sees_a_plain_fault():
    m = named("heads interleaved")
    with copied(m) as package, judged(package): found = {x[0] for x in alarms(conformance.engine_column("tiled"))}
    assert found == set(CRITERIA)


# ---------------------------------------------------------------- processes

LOOP = Mutant("for ever", "tiled", "    out, lse, top = _forward(problem, need_max)\n", "    while True: pass\n", "never ends", ("R1",))


def test_who_never_ends_and_who_dies_is_killed():
    hung, dead = fates([replace(LOOP, case=named("scale twice").case), named("no key heads")], known=True, others=False, jobs=1, patience=10)
    assert hung.message == "no answer within 10 seconds" and hung.row == "process" and all(hung.seen.values())
    assert dead.case


def test_a_fault_of_the_page_kills_nobody():
    with pytest.raises(RuntimeError, match="was not judged: ValueError"): fates([replace(LOOP, old="no such text")], known=True, jobs=1)


def test_the_command():
    answer = CliRunner().invoke(mutants_command, ["--known", "--no-others", "--only", "scale twice", "--jobs", "1"])
    assert answer.exit_code == 0 and "of 1: killed 1, by the quick part 1" in answer.output and "scale twice" in answer.output


def test_a_mutant_that_lives_fails_the_command(monkeypatch):
    harmless = Mutant("harmless", "tiled", '"The CPU engine, forward."', '"The engine."', "nothing", ("R1",))
    monkeypatch.setattr(mutants, "MUTANTS", [harmless])
    answer = CliRunner().invoke(mutants_command, ["--known", "--no-others", "--jobs", "1"])
    assert answer.exit_code == 1 and "LIVES" in answer.output and "killed 0" in answer.output


def test_counts():
    found = [Fate("a", "R1/x", "R1", quick=True, seen={"close": True}), Fate("b", seen={"close": False})]
    assert counts([replace(f, seen=dict.fromkeys(CRITERIA, f.quick)) for f in found]).startswith("of 2: killed 1, by the quick part 1, mean*1.1 1")
    assert asdict(found[0])["quick"]


def test_imported_alone():
    code = "import tensorplay_attn.evidence.mutants, sys; assert 'triton' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
