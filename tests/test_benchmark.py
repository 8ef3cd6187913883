"The benchmark's machinery on tiny sizes: nothing here depends on how fast anything is."
import gc
import json
import math
from dataclasses import asdict, replace
import pytest
import torch
from click.testing import CliRunner
from tensorplay_attn.evidence import benchmark as bm
from tensorplay_attn.evidence.benchmark import Case, Settings

TINY = dict(H=2, Hkv=2, L=24, E=8)
FAST = Settings(threads=1, budget=0.0, min_rounds=2)


class Clock:
    "Tells what it was told."
    def __init__(self): self.now = 0.0
    def __call__(self): return self.now


def test_alternate_order_and_samples():
    clock, calls = Clock(), []
    def work(name, seconds):
        def run():
            calls.append(name)
            clock.now += seconds
        return run
    samples = bm.alternate({"a": work("a", 1), "b": work("b", 2), "c": work("c", 4)}, math.inf, 1, 4, (clock, clock))
    assert calls == list("abc" "cba" "abc" "cba")
    assert samples == {"a": [(1, 1)] * 4, "b": [(2, 2)] * 4, "c": [(4, 4)] * 4}


@pytest.mark.parametrize("budget, low, high, rounds", [(10, 1, 50, 10), (0, 3, 50, 3), (10, 20, 50, 20), (math.inf, 1, 7, 7), (2.5, 1, 50, 3)])
def test_alternate_stops(budget, low, high, rounds):
    clock = Clock()
    def run(): clock.now += 1
    assert len(bm.alternate({"a": run}, budget, low, high, (clock,))["a"]) == rounds


def test_summary_and_ratios():
    assert bm.summary([4.0]) == {"median": 4.0, "min": 4.0, "iqr": 0.0, "n": 1}
    assert bm.summary([1, 2, 3, 4, 5]) == {"median": 3, "min": 1, "iqr": 2, "n": 5}
    mood = [1, 1, 1, 50, 3, 3, 3]  # the same mood for both in a round; one round disturbed for one of them only
    samples = {"ours": [(2 * m, m) for m in mood], "torch": [(m, m) for m in mood]}
    samples["ours"][3] = (1e6, 1e6)
    got = bm.ratios(samples, "torch")
    assert got["ratio"]["median"] == 2 and got["wall_ratio"]["median"] == 1 and got["ratio"]["iqr"] == 0


@pytest.mark.parametrize("record, want", [
    (dict(error="x", limit=1), "error"), (dict(ratio=9), ""), (dict(limit=1.1, ratio=1.1), "met"), (dict(limit=1.1, ratio=1.101), "missed"),
    (dict(limit=1.1, ratio=0.5, against="torch math"), ""), (dict(limit=1.1, ratio=9, against="torch math"), ""), (dict(limit=1.1, against=None), ""),
    (dict(limit_mib=96, extra_mib=97.0), "missed"), (dict(limit_mib=96, extra_mib=0.0), "met"), (dict(extra_mib=97.0), ""),
    (dict(limit_s=2, took_s=2.0), "met"), (dict(limit_s=2, took_s=2.01), "missed"), (dict(took_s=9), ""),
    (dict(limit_s=2, took_s=1, limit_mib=256, extra_mib=257), "missed"), (dict(limit_s=2, took_s=3, limit_mib=256, extra_mib=1), "missed"),
    (dict(limit_s=2, took_s=1, limit_mib=256, extra_mib=256), "met")])
def test_verdict(record, want):
    "A case's limits, each against its own measure."
    limits = {name: record.pop(name) for name in list(record) if name.startswith("limit")}
    for name in ("ratio", "took_s"):
        if name in record: record[name] = bm.summary([float(record[name])])
    assert bm.verdict(dict(error=None, against="torch", case=asdict(Case("x", **limits))) | record) == want


SAME = {
    "dense": {}, "causal": dict(is_causal=True), "gqa": dict(H=4, is_causal=True),
    "window": dict(window=(5, 0)), "window both sides": dict(window=(2, 3)),
    "lengths": dict(B=3, kv_length=6), "bias": dict(bias=True), "bf16": dict(dtype="bfloat16", is_causal=True), "fp16": dict(dtype="float16"),
}
OMNI = {
    "dense": {}, "causal": dict(is_causal=True), "gqa": dict(H=4, is_causal=True), "window": dict(window=(5, 0)), "lengths": dict(B=3, kv_length=6),
    "documents": dict(documents=3), "causal documents": dict(documents=5, is_causal=True), "alibi": dict(score="alibi", is_causal=True),
    "relative": dict(score="relative"), "relative documents": dict(score="relative", documents=2, H=4),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
def test_contenders_answer_the_same(name, backward):
    peers = ("torch", "torch math", "dense") + (("torch mask",) if name in ("causal", "gqa") else ())
    case = Case(name, **TINY | SAME[name], backward=backward, peers=peers, limit=math.inf)
    record = bm.run_case(case, FAST)
    assert record["error"] is None and record["verdict"] == "met", record["error"]
    for peer in peers: assert record["contenders"][peer]["process_ms"]["n"] == 2, record["contenders"][peer]
    t = bm.make_inputs(case)
    assert len(bm.runner(case, t, "ours")()) == (1 + len(t.leaves) if backward else 1)


@pytest.mark.parametrize("name", OMNI)
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
def test_omni_and_its_peers_answer_the_same(name, backward):
    knobs = TINY | OMNI[name]
    peers = ("dense",) + (() if "score" in knobs else ("torch",)) + (() if {"score", "documents"} & set(knobs) else ("our sdpa",))
    record = bm.run_case(Case(name, **knobs, omni=True, backward=backward, peers=peers, limit=math.inf), FAST)
    assert record["error"] is None and record["verdict"] == "met" and record["against"] == "dense", record["error"]
    for peer in peers: assert record["contenders"][peer]["process_ms"]["n"] == 2, record["contenders"][peer]


def test_ours_comes_through_the_door_asked_for(monkeypatch):
    asked = []
    for name in ("omni_attention", "scaled_dot_product_attention"):
        monkeypatch.setattr(bm, name, lambda q, k, v, *args, name=name, **kwargs: asked.append(name) or v)
    for omni in (True, False):
        case = Case("case", **TINY, omni=omni, is_causal=True)
        bm.runner(case, bm.make_inputs(case), "ours")()
    assert asked == ["omni_attention", "scaled_dot_product_attention"]


def test_what_is_prepared_is_prepared_once(monkeypatch):
    "No call that is timed makes a mask."
    made = []
    for name in ("create_block_mask", "create_mask"):
        real = getattr(bm, name)
        monkeypatch.setattr(bm, name, lambda *args, real=real, **kwargs: made.append(real) or real(*args, **kwargs))
    monkeypatch.setattr(bm.block_mask, "__defaults__", (bm.create_block_mask,))
    case = Case("case", **TINY, omni=True, documents=3, is_causal=True, score="alibi", peers=("dense",))
    t = bm.make_inputs(case)
    for name in ("ours", "dense"): bm.runner(case, t, name)()
    before, kept = len(made), dict(t.prepared)
    for name in ("ours", "dense"): bm.runner(case, t, name)()
    assert len(made) == before == 3 and {"our blocks", "hidden", "score"} == set(kept) and all(t.prepared[x] is kept[x] for x in kept)


def test_documents():
    even = Case("even", L=32, documents=8)
    assert bm.document_ids(even).tolist() == [i // 4 for i in range(32)]
    ids = bm.document_ids(replace(even, L=1000, group="building"))
    assert ids.unique().tolist() == list(range(8)) and bool((ids.diff() >= 0).all()) and len(set(ids.bincount().tolist())) > 1
    assert torch.equal(ids, bm.document_ids(replace(even, L=1000, group="building")))
    assert bm.make_inputs(even).mask.sum() == 8 * 16 and bm.make_inputs(replace(even, is_causal=True)).mask.sum() == 8 * 10


def boom(case, t): raise ZeroDivisionError("made to fail\nsecond line")


def test_a_failing_case_is_reported(monkeypatch):
    case = Case("fails", **TINY, limit=1.0)
    monkeypatch.setitem(bm.ATTENTIONS, "ours", boom)
    report = bm.bench([case, replace(case, name="fails too")], FAST)
    assert [r["verdict"] for r in report["records"]] == ["error", "error"]
    assert report["records"][0]["error"] == "ZeroDivisionError: made to fail" and "failed: fails fwd" in "\n".join(bm.conclusion(report))
    json.dumps(report, allow_nan=False)


def test_a_first_peer_that_cannot_run_is_said_and_replaced(monkeypatch):
    monkeypatch.setitem(bm.ATTENTIONS, "torch", boom)
    case = Case("case", **TINY, is_causal=True, peers=("torch", "torch math", "dense"), limit=1e9)
    report = bm.bench([case, replace(case, name="no limit", limit=None), replace(case, name="alone", peers=("torch",))], FAST)
    first, unlimited, alone = report["records"]
    assert [r["verdict"] for r in report["records"]] == ["", "", ""] and [r["error"] for r in report["records"]] == [None] * 3
    assert first["against"] == unlimited["against"] == "torch math" and "ratio" in first and alone["against"] is None and "ratio" not in alone
    rows = {row[0]: row for row in bm.table_rows(report["records"])}
    assert rows["case fwd"][2] == "torch math" and rows["alone fwd"][2:4] == ("torch", "cannot") and rows["alone fwd"][-1] == ""
    others = [row for row in bm.other_rows(report["records"]) if row[1] == "torch"]
    assert [row[2:] for row in others] == [("cannot", "", "ZeroDivisionError: made to fail")] * 3
    said = [line for line in bm.conclusion(report) if "cannot:" in line]
    assert len(said) == 3 and "case fwd: torch: ZeroDivisionError: made to fail" in said[0] and "torch math" in said[0]
    assert "second line" not in str(said)
    again = json.loads(json.dumps(report, allow_nan=False))
    assert bm.conclusion(again) == bm.conclusion(report) and "cannot" in bm.html_page(again) and "missed: 0" in str(bm.conclusion(report))


def test_a_reason_is_one_short_line():
    assert bm.reason(ValueError("\n\nfirst\nsecond")) == "ValueError: first" and bm.reason(KeyError()) == "KeyError: "
    assert len(long := bm.reason(RuntimeError("x" * 5000))) == 160 and long.endswith("…")


def test_a_failing_later_peer_only_loses_its_place(monkeypatch):
    monkeypatch.setitem(bm.ATTENTIONS, "torch math", boom)
    record = bm.run_case(Case("case", **TINY, peers=("torch", "torch math", "torch mask"), is_causal=True, limit=math.inf), FAST)
    assert record["verdict"] == "met" and record["contenders"]["torch math"] == {"error": "ZeroDivisionError: made to fail"}
    assert "process_ms" in record["contenders"]["torch mask"]
    assert [row[1:] for row in bm.other_rows([record])][0][-1] == "ZeroDivisionError: made to fail"


@pytest.mark.parametrize("spoil", [lambda x: x * 1.5, lambda x: x * torch.nan, lambda x: x.roll(1, 2), lambda x: torch.zeros_like(x)],
                         ids=["scaled", "nan", "shifted", "zero"])
def test_different_answers_are_not_timed(monkeypatch, spoil):
    ours = bm.ATTENTIONS["ours"]
    monkeypatch.setitem(bm.ATTENTIONS, "ours", lambda case, t: spoil(ours(case, t)))
    record = bm.run_case(Case("wrong", **TINY, is_causal=True), FAST)
    assert record["verdict"] == "error" and "different questions" in record["error"] and "ratio" not in record


def test_the_peer_that_is_compared_must_answer_the_same(monkeypatch):
    "Whoever takes the place of one that cannot is held to that too; a wrong answer of somebody else costs only its place."
    case = Case("wrong", **TINY, is_causal=True, peers=("torch", "torch math", "dense"), limit=math.inf)
    monkeypatch.setitem(bm.ATTENTIONS, "torch math", lambda case, t: t.v)
    record = bm.run_case(case, FAST)
    assert record["verdict"] == "met" and "different questions" in record["contenders"]["torch math"]["error"]
    monkeypatch.setitem(bm.ATTENTIONS, "torch", boom)
    record = bm.run_case(case, FAST)
    assert record["verdict"] == "error" and "different questions" in record["error"]


def test_a_large_dense_peer_is_not_run():
    t = bm.make_inputs(small := Case("small", **TINY))
    with pytest.raises(NotImplementedError, match="2.0 GiB"): bm.ATTENTIONS["torch math"](replace(small, H=8, L=8192), t)


def test_report_survives_json_and_becomes_text():
    report = bm.bench([Case("causal", **TINY, is_causal=True, limit=1e9), Case("none", **TINY), Case("strict & <b>", **TINY, limit=0.0)], FAST)
    again = json.loads(json.dumps(report, allow_nan=False))
    assert [Case(**r["case"]) for r in again["records"]] == [Case(**r["case"]) for r in report["records"]]
    assert bm.table_rows(again["records"]) == bm.table_rows(report["records"]) and bm.conclusion(again) == bm.conclusion(report)
    page = bm.html_page(again)
    assert page.count("<table>") == 1 and "strict &amp; &lt;b&gt; fwd" in page and "<b>" not in page and "src=" not in page and "href=" not in page
    assert all(report["machine"][x] for x in ("cpu", "cores", "threads", "torch", "python", "date"))
    assert "missed: strict & <b> fwd" in "\n".join(bm.conclusion(report))


def test_threads_and_collector_are_restored(monkeypatch):
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(bm, "run_case", lambda case, settings: seen.append((torch.get_num_threads(), gc.isenabled())) or 1 / 0)
    with pytest.raises(ZeroDivisionError): bm.bench([Case("x")], Settings(threads=1))
    assert seen == [(1, False)] and gc.isenabled() and torch.get_num_threads() == before


def test_limits_are_those_promised():
    "The table of the issue: who is held to what."
    limits = {c.id: c.limit for c in bm.target_cases()}
    for kind in ("dense", "causal"):
        for size in ("(1,8,1024,64)", "(1,8,4096,64)", "(1,8,2048,128)", "(1,32/8,2048,128)"):
            for way in ("fwd", "fwd+bwd"): assert limits[f"{kind} {size} {way}"] == 1.1
        for dtype in ("bf16", "fp16"):
            for way in ("fwd", "fwd+bwd"): assert limits[f"{kind} {dtype} (1,8,2048,64) {way}"] == 1.0
    for way in ("fwd", "fwd+bwd"):
        assert limits[f"window (255,0) (1,8,8192,64) {way}"] == 1 / 8 and limits[f"lengths 25% (4,8,4096,64) {way}"] == 1 / 3
    assert limits["bias (1,8,2048,64) fwd+bwd"] == 1.0
    memory = {c.L: c for c in bm.memory_cases()}[65536]
    assert (memory.limit_mib, memory.H, memory.window, memory.backward) == (96, 1, (255, 0), True)
    assert {c.L for c in bm.curve_cases()} == {256, 512, 1024, 2048, 4096, 8192}


def test_limits_of_omni_attention():
    cases = {c.id: c for c in bm.omni_cases()}
    for name in ("causal", "window (255,0)", "documents", "causal documents"):
        forward, both = (cases[f"omni {name} (1,8,4096,64) {way}"] for way in ("fwd", "fwd+bwd"))
        assert forward.limit == 1 / 1.5 and forward.peers[0] == "torch flex" and both.limit == 1 / 3 and both.peers[0] == "dense"
    for way in ("fwd", "fwd+bwd"):
        beside = cases[f"omni causal beside sdpa (1,8,4096,64) {way}"]
        assert beside.limit == 1.15 and beside.peers == ("our sdpa",) and beside.is_causal
    for c in cases.values(): assert c.omni and (c.L, c.H, c.E, c.dtype) == (4096, 8, 64, "float32") and c.documents in (0, 8)
    assert {c.score: c.limit for c in cases.values() if c.score} == {"alibi": None, "relative": None}
    once = {c.id: c for c in bm.fresh_cases()}
    built, first = once["omni building causal documents 131072"], once["omni first result (1,8,1024,64)"]
    assert (built.L, built.documents, built.is_causal, built.limit_s, built.limit_mib) == (131072, 64, True, 2, 256)
    assert (first.L, first.limit_s, first.peers) == (1024, 0.5, ("torch flex",))
    assert {c for c in bm.all_cases() if "omni" in c.id} == {*cases.values(), *once.values()} == set(bm.select(bm.all_cases(), "*omni*"))


def test_a_mask_built_in_a_fresh_process():
    case = Case("building", L=640, documents=3, is_causal=True, omni=True, group="building", limit_s=1e9, limit_mib=1e9)
    record = bm.run_case(case, replace(FAST, quick=True))
    ours = record["contenders"]["ours"]
    assert record["verdict"] == "met" and list(record["contenders"]) == ["ours"] and ours["wall_s"]["n"] == 1
    assert record["took_s"] == ours["wall_s"] and record["extra_mib"] == ours["extra"] / 2**20 >= 0
    peer = bm.child_building(asdict(case), "torch flex")
    assert peer["sparsity"] == pytest.approx(ours["sparsity"]) and 40 <= ours["sparsity"] < 100  # 10 of 25 blocks lie above the diagonal
    row, = bm.fresh_rows([record])
    assert row[0] == "building" and row[6] == "≤ 1e+09 s, ≤ 1e+09 MiB" and row[-1] == "met"
    assert bm.table_rows([record]) == bm.memory_rows([record]) == bm.other_rows([record]) == []
    json.dumps(record, allow_nan=False)


def test_a_first_result(monkeypatch):
    "Ours in a process of its own; the peer here, uncompiled, since the question is whether it answers the same."
    case = Case("first", H=1, Hkv=1, L=40, E=8, omni=True, group="first", limit_s=0.0)
    record = bm.run_case(case, replace(FAST, quick=True))
    assert record["verdict"] == "missed" and record["contenders"]["ours"]["share_of_allowed_difference"] < 1 and "extra_mib" not in record
    said = bm.conclusion({"machine": bm.machine(FAST), "settings": asdict(FAST), "records": [record]})
    assert [line for line in said if "missed: first:" in line and " s, limit 0" in line]
    monkeypatch.setattr(bm, "_compiled_flex", lambda: bm._flex().flex_attention)
    monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "given back afterwards")
    assert bm.child_first(asdict(case), "torch flex")["share_of_allowed_difference"] < 1


def test_fresh_processes_of_ours_and_peers(monkeypatch):
    "Ours is asked three times, a peer once; a peer that cannot keeps its reason; ours that cannot, or a wrong answer, is an error."
    asked, case = [], Case("case", group="building", peers=("torch flex", "dense"), limit_s=2, limit_mib=1)
    def answer(function, threads, case, name):
        asked.append(name)
        if name == "dense": raise RuntimeError("MemoryError: too much")
        return {"wall_s": float(len(asked)), "process_s": 1.0, "extra": 2**19 * len(asked), "sparsity": 50.0}
    monkeypatch.setattr(bm, "in_fresh_process", answer)
    record = bm.run_case(case, FAST)
    assert asked == ["ours"] * 3 + ["torch flex", "dense"] and record["took_s"]["median"] == 2 and record["extra_mib"] == 1.5
    assert record["verdict"] == "missed" and record["contenders"]["dense"] == {"error": "RuntimeError: MemoryError: too much"}
    assert bm.fresh_rows([record])[0][1:] == ("2.00", "1.00", "4.00", "2", "2", "≤ 2 s, ≤ 1 MiB", "missed")
    for who, why in (("ours", "MemoryError: x"), ("torch flex", "DifferentAnswers: x")):
        def fail(function, threads, case, name, who=who, why=why):
            if name == who: raise RuntimeError(why)
            return {"wall_s": 1.0, "process_s": 1.0}
        monkeypatch.setattr(bm, "in_fresh_process", fail)
        record = bm.run_case(case, FAST)
        assert record["verdict"] == "error" and why in record["error"] and bm.fresh_rows([record])[0][-1] == "error"


def test_sampler_sees_a_known_allocation():
    "In a fresh process, so that nothing freed before is reused."
    for mib in (64, 200): assert abs(bm.in_fresh_process("tensorplay_attn.evidence.benchmark:known_allocation", mib=mib) - mib) < 0.25 * mib


def test_sampler_ends_its_thread_when_the_function_raises():
    import threading
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError): bm.sample_peak(lambda: 1 / 0)
    assert threading.active_count() == before


def test_memory_of_a_case():
    case = Case("memory", H=1, Hkv=1, L=2048, backward=True, group="memory", window=(63, 0), peers=("torch", "torch math"), limit_mib=1000)
    record = bm.run_case(case, FAST)
    math_way = record["contenders"]["torch math"]
    assert record["verdict"] == "met" and record["extra_mib"] == record["contenders"]["ours"]["extra"] / 2**20
    assert math_way["results"] == 4 * 2048 * 64 * 4 and math_way["inputs"] == math_way["results"] + 2048**2
    assert math_way["extra"] > case.scores_bytes == 16 * 2**20
    json.dumps(record, allow_nan=False)


def test_errors_of_a_fresh_process():
    with pytest.raises(RuntimeError, match="AttributeError.*nonsense"):
        bm.in_fresh_process("tensorplay_attn.evidence.benchmark:child_memory", case=asdict(Case("x", L=8, dtype="nonsense")), name="ours")
    record = bm.run_case(Case("heads", H=3, Hkv=2, L=8, E=4, group="memory"), FAST)
    assert record["verdict"] == "error" and "ValueError" in record["error"] and "extra_mib" not in record


def test_select():
    cases = bm.all_cases()
    assert bm.select(cases) == cases and 0 < len(bm.select(cases, quick=True)) < len(cases) and all(c.quick for c in bm.select(cases, quick=True))
    assert {c.dtype for c in bm.select(cases, "*fp16*")} == {"float16"}
    assert [c.id for c in bm.select(cases, "bias*bwd")] == ["bias (1,8,2048,64) fwd+bwd"]
    assert bm.select(cases, "fp16") == bm.select(cases, "*fp16*") and bm.select(cases, "nothing") == []


@pytest.fixture
def tiny_cases(monkeypatch):
    def use(*cases): monkeypatch.setattr(bm, "all_cases", lambda: list(cases))
    curve = [Case(f"curve {L}", H=1, Hkv=1, L=L, is_causal=True, group="curve") for L in (8, 16)]
    use(Case("causal", **TINY, is_causal=True, limit=0.0, quick=True), *curve)
    return use


def run(*args): return CliRunner().invoke(bm.bench_command, [*args, "--budget", "0", "--threads", "1"], env={"COLUMNS": "150"})


def test_command(tiny_cases, tmp_path):
    files = {kind: tmp_path / "new" / f"bench.{kind}" for kind in ("json", "html", "svg")}
    result = run(*(x for kind, file in files.items() for x in (f"--{kind}", str(file))))
    assert result.exit_code == 0 and "missed: causal fwd" in result.output and "Limits met: 0, missed: 1" in result.output, result.output
    assert len(json.loads(files["json"].read_text())["records"]) == 3
    assert files["svg"].read_text().startswith("<svg") and "<svg" in files["html"].read_text()


def test_command_selects(tiny_cases):
    assert run("--list").output.split("\n") == ["causal fwd", "curve 8 fwd", "curve 16 fwd", ""]
    assert run("--list", "--quick").output.split("\n") == ["causal fwd", ""]
    assert run("--list", "--only", "curve*", "--quick").output.split("\n") == ["curve 8 fwd", "curve 16 fwd", ""]
    wrong = run("--only", "zzz")
    assert wrong.exit_code == 2 and "zzz" in wrong.output


def test_command_fails_when_a_case_fails(tiny_cases):
    tiny_cases(Case("heads", H=3, Hkv=2, L=8, E=4), Case("fine", **TINY))
    result = run()
    assert result.exit_code == 1 and "failed: heads fwd: ValueError" in result.output and "fine fwd" in result.output


def test_without_matplotlib(tiny_cases, tmp_path, monkeypatch):
    "Everything but the plot is written, and it is said."
    real = bm.importlib.import_module
    def absent(name, *args):
        if name.startswith("matplotlib"): raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *args)
    monkeypatch.setattr(bm.importlib, "import_module", absent)
    result = run("--json", str(tmp_path / "b.json"), "--svg", str(tmp_path / "b.svg"))
    assert result.exit_code == 0 and "matplotlib" in result.output and (tmp_path / "b.json").exists() and not (tmp_path / "b.svg").exists()


def test_every_peer_prepares_for_itself(monkeypatch):
    monkeypatch.setattr(bm.torch, "compile", lambda f, **kwargs: f)  # eager: the question is who may run, not how fast
    monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)  # flex_attention says that it should be compiled
    everyone = ("torch", "torch math", "torch mask", "torch flex", "dense", "our sdpa")
    for case in (Case("all", **TINY, peers=everyone, is_causal=True), Case("omni", **TINY, peers=everyone, is_causal=True, omni=True),
                 *(Case(score, **TINY, peers=("torch flex", "dense"), score=score, omni=True, documents=2) for score in bm.SCORES)):
        record = bm.run_case(case, FAST)
        assert record["error"] is None and not [n for n, c in record["contenders"].items() if "error" in c], record["contenders"]
