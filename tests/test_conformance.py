"The judge judged: suites that are whole, faults that are caught, nobody accused wrongly, strangers that misbehave."
import gc
import json
import math
import re
import statistics
import sys
import time
from dataclasses import replace

import pytest
import torch

from tensorplay_attn.engines import ENGINES
from tensorplay_attn.evidence import conformance as judge
from tensorplay_attn.block_mask import BlockMask, create_block_mask
from tensorplay_attn.evidence.cases import Blocked, Call, Cannot, Crash, Score, Truth, make_call, values
from tensorplay_attn.evidence.refusals import REFUSALS, SDPA
from tensorplay_attn.evidence.report import template, to_html
from tensorplay_attn.evidence.suites import (REPORTS, SUITES, answering, asked_alone, block_kinds, catalogue, given, listed, pairwise, reports,
                                             select, spread, suite, wrong_call)
from tensorplay_attn.functional import AuxOutput, scaled_dot_product_attention as ours
from tensorplay_attn.interop.onnx import allowed_error, check_case, own_error, attention_node, compare, node_cases
from tensorplay_attn.masks import CATALOGUE, causal_mask, document_mask, index_tensors, window_mask
from tensorplay_attn.omni_attention import omni_attention
from tensorplay_attn.scores import SCORES


def failed(column, *globs, quick=False):
    "The rows in which a column fails."
    cases = select([c for name in ("contract", "faults") for c in suite(name, quick)], globs)
    assert cases
    return {r.row for r in judge.run(cases, [column]).of(status="fail")}


# ---------------------------------------------------------------- the suites

@pytest.mark.parametrize("name", SUITES)
def test_our_engines_pass(name):
    results = judge.run(suite(name), [judge.engine_column(n) for n in ("math", "tiled")])
    assert [(r.column, r.case, r.what, r.message) for r in results.failures] == []
    assert results.of(status="cannot") == []


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def interpreted(monkeypatch):
    "Triton's kernels answer on a CPU too; conftest has imported them for that."
    if DEVICE == "cpu": monkeypatch.setenv("TRITON_INTERPRET", "1")


def small(case):
    "Not one of the few that an interpreter takes minutes for."
    return DEVICE != "cpu" or not re.search(r"pytorch#153799|pytorch#158212", case.id)


ONLY_WHEN_ASKED = {"T14", "packed sequences", "FlexAttention"}  # rows whose cases are no call: who cannot says so when it is asked


def taken(column, cases):
    "Those that a column takes; node cases and packed sequences say so only when they are asked."
    calls = ((c, c.make()) for c in cases)
    return [c for c, call in calls if call is None or not column.cannot(call)]


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_a_tolerance_that_onnx_itself_nearly_fills(name, interpreted):
    """Half-precision nodes whose expected output lies nearly all of the documented tolerance from the truth: an answer of weights in fp32 has
    the rest of it, weights in fp16, as a GPU multiplies them, need the room that is derived for them."""
    for node in (n for n in node_cases() if n.name in ("attention_4d_fp16", "attention_4d_causal_fp16") and n.opset == 23):
        derived, documented = allowed_error(node)["Y"]
        judged = {}
        for engine in ("math", name):
            attend = judge.engine_column(engine, DEVICE).attend
            got = attention_node(node.attributes, node.inputs, node.opset, attend, ("Y",))["Y"]
            judged[engine] = [compare(got, node.outputs["Y"], allowed).share for allowed in (derived, documented)]
            assert check_case(node, attend)["Y"].passed and own_error(node).median() < 3 * documented.median()
        assert judged["math"][1] > 0.9 and judged[name][0] < 0.1 and judged[name][1] > 1, judged


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", ["flash", "efficient", "omni"])
def test_kernels_pass(name, part, interpreted):
    "A part of what they take, from every row; CONTRIBUTING has the command for the whole."
    column, few = judge.engine_column(name, DEVICE), dict(share=50, least=3) if name == "omni" and DEVICE == "cpu" else dict(share=12, least=3)
    suites = [s for s in SUITES if name != "omni" or s != "onnx"]  # that kernels for user functions are not asked
    cases = spread([c for s in suites for c in taken(column, suite(s)) if small(c)], **few)[part::4]
    results = judge.run(cases, [column])
    assert [(r.case, r.what, r.message) for r in results.failures] == []
    assert len(results.of(status="pass")) > 0.8 * len(cases)
    assert all(r.row.startswith("opset") or r.row in ONLY_WHEN_ASKED for r in results.of(status="cannot"))


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_kernels_are_asked_in_every_row(name, interpreted):
    column, cases = judge.engine_column(name, DEVICE), [c for s in ("contract", "faults") for c in suite(s)]
    could, rows = taken(column, cases), {c.row for c in cases}
    assert {c.row for c in could} >= rows - ({"R6", "R7"} if name == "flash" else set())  # rows about masks
    assert len(could) > {"flash": 0.5, "efficient": 0.75}[name] * len(cases)


def test_the_omni_kernels_are_asked_about_users_functions(interpreted):
    every = [c for name in ("contract", "catalogue", "faults") for c in suite(name)]
    column, users = judge.engine_column("omni", DEVICE), [c for c in every if c.make().omni]
    could = taken(column, users)
    assert {c.row for c in could} == {c.row for c in users} == {"T11", "masks", "scores", "masks and scores", "gradients", "block masks"}
    assert len(could) > 0.7 * len(users) > 200


@pytest.mark.skipif(DEVICE != "cpu", reason="about a machine without a GPU")
def test_engines_here(monkeypatch):
    assert judge.engines_here() == ["math", "tiled"] and [c.name for c in judge.default_columns()] == [
        "math", "tiled", "torch math", "torch flash", "torch flex"]
    assert all("set TRITON_INTERPRET=1" in judge.absence(n) for n in ("flash", "omni")) and "CUDA" in judge.absence("cudnn")
    assert judge.absence("math", "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert judge.engines_here() == ["math", "flash", "efficient", "omni"] and "flash and efficient" in judge.absence("tiled")
    assert not judge.engine_column("cudnn").decides and judge.engine_column("flash").decides
    results = judge.run(select(suite("contract"), ("R3/*",)), [judge.engine_column("tiled")])
    assert {r.status for r in results.records} == {"cannot"}


def test_suites_are_whole():
    cases = suite("contract")
    rows = {f"R{n}" for n in range(1, 19)} | {f"T{n}" for n in range(7, 15)} | {f"C{n}" for n in (1, 3, 4, 5, 7)} | {"T5", "errors"}
    assert {c.row for c in cases} == rows and len(cases) > 600
    for row in {f"R{n}" for n in range(1, 18)} | {"T11", "C3"}:
        ends = {c.id.rsplit("/", 1)[1] for c in cases if c.row == row and "/refuses/" not in c.id}
        assert ends == {"forward", "backward"}, row
    assert len([c for c in suite("contract") if c.row == "errors"]) >= 60 and len(suite("onnx")) >= 93 + 11
    every = [c for name in SUITES for c in suite(name)]
    assert len({c.id for c in every}) == len(every) and all(re.fullmatch(r"[\w#./+-]+", c.id) for c in every)
    quick = [c.id for name in SUITES for c in suite(name, quick=True)]
    assert len(quick) < len(every) / 4 and set(quick) < {c.id for c in every}


def parts(t):  # of any layout, as plain tensors: the refusals' tensors are nested, sparse, quantized, ...
    if t.is_meta: return []
    if t.is_nested: return list(t.unbind())
    if t.is_quantized: return [t.int_repr()]
    return [t if t.layout == torch.strided else t.to_dense()]


def test_a_case_alone_is_the_case_in_the_suite():
    first, again = suite("contract"), suite("contract")
    for a, b in zip(first, again, strict=True):
        x, y = a.make(), b.make()
        assert a.id == b.id and x.said == y.said and str(x) == str(y) and list(x.tensors) == list(y.tensors)
        for name, t in x.tensors.items():
            for s, u in zip(parts(t), parts(y.tensors[name]), strict=True):
                assert s.dtype == u.dtype and torch.allclose(s, u, 0, 0, equal_nan=True), (a.id, name)


def test_no_report_is_forgotten():
    "Each has a case and says what it is about; labels are whole ids of cases."
    assert {c.id.split("/")[1] for c in suite("faults")} == set(REPORTS)
    assert reports(REPORTS) == reports(c.id for c in suite("faults"))
    every = reports(REPORTS) - {"combinators"}  # nobody reported that
    assert len(every) == 94 and all(re.fullmatch(r"[\w-]+#\d+", r) for r in every), sorted(every)
    assert all(len(lesson) > 10 for lesson in REPORTS.values())


def test_the_catalogue_is_whole():
    "Every mask and every score function, alone, forward and backward; every size, and every block size with each."
    ids = [c.id for c in catalogue()]
    for kind, names in (("mask", CATALOGUE), ("score", SCORES)):
        for end in ("forward", "backward"):
            assert {re.search(rf"^{kind}s/.*{kind}-(\w+)/", i)[1] for i in ids if i.startswith(f"{kind}s/") and i.endswith(end)} == set(names)
    pairs = {(re.search(r"L(\d+)-S(\d+)", i).groups()) for i in ids}
    assert len(pairs) == 36 and {re.search(r"blocks-(\w+)", i)[1] for i in ids if "blocks-" in i} == {"16", "64", "128", "32x128"}
    assert sum("one-for-all" in i for i in ids) > 40 and sum("Hkv" in i for i in ids) > 60 and sum("d_lse" in i for i in ids) > 40


def test_wrong_calls_are_those_of_the_page():
    errors = {c.id for c in suite("contract") if c.row == "errors"}
    front = [r for r in REFUSALS if r.door == SDPA]
    assert len(errors) >= len(front) - 1 >= 60  # all but a word that the door does not have
    plain = wrong_call(next(r for r in front if r.name == "mask of the wrong length"))
    assert plain.said == {"attn_mask"} and plain.key.shape[1] == plain.query.shape[1]  # can be put to whoever knows no groups
    assert "enable_gqa" in wrong_call(next(r for r in front if r.name == "no key heads at all")).said


def test_unknown_suite():
    with pytest.raises(ValueError, match="contract, catalogue, onnx, faults"): suite("speed")


def test_pairwise_covers_pairs():
    knobs = {n: list(range(3)) for n in "abcd"}
    chosen = pairwise(knobs)
    assert {(c["a"], c["d"]) for c in chosen} == {(x, y) for x in range(3) for y in range(3)} and len(chosen) < 20


# ---------------------------------------------------------------- planted faults

def planted(change=None, after=None):
    "Our door with its words changed on the way in, or its answer on the way out."
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, alignment="upper_left",
                  window_size=(-1, -1), softcap=0.0, sinks=None, return_aux=None):
        words = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, alignment=alignment,
                     window_size=window_size, softcap=softcap, sinks=sinks, return_aux=return_aux)
        said = dict(query=query, key=key, value=value) | words
        answer = ours(**said | (change(said) if change else {}))
        if after is None: return answer
        return after(answer) if return_aux is None else (after(answer[0]), answer[1])
    return judge.impl_column(attention)


def lse_change(f):
    column = planted()
    inner = column.function
    def attention(*tensors, return_aux=None, **words):
        answer = inner(*tensors, return_aux=return_aux, **words)
        return answer if return_aux is None else (answer[0], AuxOutput(None if answer[1].lse is None else f(answer[1].lse), answer[1].max_scores))
    column.function = attention
    return column


def interleaved(w):
    G = w["query"].shape[1] // max(w["key"].shape[1], 1) if w["query"].ndim == 4 else 1
    return {n: w[n].repeat(1, G, 1, 1) for n in ("key", "value")} if G > 1 else {}


def tail_seen(w):  # a bool mask whose last column is forgotten
    m = w["attn_mask"]
    if m is None or m.dtype != torch.bool or m.ndim == 0 or m.shape[-1] < 2: return {}
    return {"attn_mask": torch.cat([m[..., :-1], torch.ones_like(m[..., -1:])], -1)}


def zero_row(out): return torch.cat([out[..., :-1, :], out[..., -1:, :] * 0], -2)


FAULTS = {
    "alignment ignored": (planted(lambda w: {"alignment": "upper_left"}), "R2"),
    "alignment guessed": (planted(lambda w: {"alignment": "lower_right"}), "R3"),
    "window one short": (planted(lambda w: {"window_size": tuple(max(x - 1, -1) if x > 0 else x for x in w["window_size"])}), "R2"),
    "mask replaces causal": (planted(lambda w: {"is_causal": w["is_causal"] and w["attn_mask"] is None}), "R1"),
    "scale twice": (planted(lambda w: {"query": w["query"] * (w["query"].shape[-1] ** -0.5 if w["query"].shape[-1] else 1)}), "R16"),
    "softcap ignored": (planted(lambda w: {"softcap": 0.0}), "scale, lse"),
    "sinks ignored": (planted(lambda w: {"sinks": None}), "R13"),
    "heads interleaved": (planted(interleaved), "R9"),
    "last key always seen": (planted(tail_seen), "R6"),
    "one row zeroed": (planted(after=zero_row), "R16"),
    "gradient of key halved": (planted(lambda w: {"key": (w["key"] + w["key"].detach()) / 2}), "R9"),
    "bias without gradient": (planted(lambda w: {} if w["attn_mask"] is None else {"attn_mask": w["attn_mask"].detach()}), "gradients"),
    "lse in base 2": (lse_change(lambda lse: lse / math.log(2)), "R12"),
    "lse of nothing is 0": (lse_change(lambda lse: torch.where(lse == -math.inf, 0.0, lse)), "R4"),
    "lse without gradient": (lse_change(lambda lse: lse.detach()), "R12"),
    "NaN made a number": (planted(after=lambda out: out.nan_to_num()), "R8"),
    "half precision inside": (planted(lambda w: {n: w[n].bfloat16().to(w[n].dtype) for n in ("query", "key", "value")}), "R11"),
}
GLOBS = {"R16": "R16/B1-L*", "scale, lse": "faults/sglang*", "gradients": "faults/pytorch#148476/*"}  # where a row has heavy cases, or no name in ids


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    column, row = FAULTS[fault]
    assert row in failed(column, GLOBS.get(row, f"{row}/*"))


def test_dropout_without_scaling_is_caught():
    def unscaled(query, key, value, dropout_p=0.0): return ours(query, key, value, dropout_p=dropout_p) * (1 - dropout_p)
    def drops_twice_as_much(query, key, value, dropout_p=0.0): return ours(query, key, value, dropout_p=min(2 * dropout_p, 1.0))
    for f in (unscaled, drops_twice_as_much): assert failed(judge.impl_column(f), "R14/observed/*") == {"R14"}


def outcome(column, *globs):
    "The one record of a column in the one case."
    (record,) = judge.run(select(suite("faults"), globs), [column]).records
    return record


def test_an_order_of_preference_that_is_not_kept_is_caught():
    "A column that calls itself by the other engine's name."
    record = outcome(replace(judge.engine_column("math"), name="tiled"), "faults/pytorch#149725*")
    assert record.status == "fail" and "['math'] answered" in record.message


def test_silence_is_caught():
    class Silent(judge.Column):
        def answer(self, call):
            answer, self.warnings = super().answer(call), []
            return answer
    for engine, status in (("math", "fail"), ("tiled", "pass")):
        column = Silent(**vars(judge.engine_column(engine)))
        record = outcome(column, "faults/pytorch#154363*")
        assert record.status == status, record.message
    assert outcome(judge.engine_column("math"), "faults/pytorch#154363*").status == "pass"


def test_pieces_are_not_one_node():
    def pieces(query, key, value, **words): return ours(query, key, value, **words) * 1
    case = "faults/pytorch#119439*"
    assert "not one node but 2" in outcome(replace(judge.engine_column("math"), function=pieces), case).message
    assert outcome(judge.impl_column(ours), case).message == "promises no single node"
    assert outcome(judge.torch_column("MATH"), case).status == "fail"


def test_a_scale_lost_in_compilation_is_caught(monkeypatch):
    def loses(function, whole): return lambda *tensors, scale=None, **words: function(*tensors, **words)
    monkeypatch.setitem(judge.WAYS, "compiled", loses)
    assert outcome(judge.engine_column("tiled"), "faults/pytorch#174049/*/forward").status == "fail"


def test_answering_leaves_the_engines_as_they_were():
    before, call = dict(ENGINES), make_call("anything")
    with answering() as names: judge.engine_column("tiled").answer(call)
    assert names == ["tiled"] and ENGINES == before


def planted_omni(change=None, after=None):
    "omni_attention with its words changed on the way in, or its answer on the way out."
    def omni(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, kernel_options=None, return_aux=None):
        words = dict(score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa, kernel_options=kernel_options)
        words |= change(dict(query=query, key=key, value=value) | words) if change else {}
        out, aux = omni_attention(query, words.pop("key", key), value, **words, return_aux=judge.AuxRequest(lse=True))
        out, lse = (out, aux.lse) if after is None else after(out, aux.lse)
        return out if return_aux is None else (out, AuxOutput(lse, None))
    return judge.impl_column(omni)


def mask_only(w):  # lists that somebody gave are not read
    m = w["block_mask"]
    return {} if m is None else {"block_mask": create_block_mask(m.mask_mod, *m.shape, device="cpu", BLOCK_SIZE=m.BLOCK_SIZE)}


def blocks_only(w):  # partial blocks are taken for full
    m = w["block_mask"]
    return {} if m is None else {"block_mask": BlockMask.from_kv_blocks(*lists_of(m), BLOCK_SIZE=m.BLOCK_SIZE, seq_lengths=m.seq_lengths)}


def lists_of(m): return m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices


def no_full(w):  # full blocks are forgotten
    m = w["block_mask"]
    if m is None: return {}
    return {"block_mask": BlockMask.from_kv_blocks(*lists_of(m)[:2], BLOCK_SIZE=m.BLOCK_SIZE, seq_lengths=m.seq_lengths, mask_mod=m.mask_mod)}


def scored(f):
    def change(w):
        inner = w["score_mod"]
        return {} if inner is None else {"score_mod": f(inner)}
    return change


OMNI_FAULTS = {
    "score_mod ignored": (planted_omni(lambda w: {"score_mod": None}), "scores/*"),
    "block mask ignored": (planted_omni(lambda w: {"block_mask": None}), "masks/*"),
    "lists ignored": (planted_omni(mask_only), "T11/given*"),
    "partial blocks full": (planted_omni(blocks_only), "masks/*"),
    "full blocks forgotten": (planted_omni(no_full), "masks/*"),
    "indices exchanged": (planted_omni(scored(lambda f: lambda s, b, h, i, j: f(s, b, h, j, i))), "scores/*"),
    "first head's score for all": (planted_omni(scored(lambda f: lambda s, b, h, i, j: f(s, b, h * 0, i, j))), "scores/*"),
    "score before the scale": (planted_omni(scored(lambda f: lambda s, b, h, i, j: f(s / 2, b, h, i, j) * 2)), "scores/*"),
    "lse in base 2": (planted_omni(after=lambda out, lse: (out, lse / math.log(2))), "masks/*"),
    "lse without gradient": (planted_omni(after=lambda out, lse: (out, lse.detach() + out.sum(-1) * 0)), "masks/*d_lse*"),
}


@pytest.mark.parametrize("fault", OMNI_FAULTS)
def test_planted_faults_of_omni_attention_are_caught(fault):
    column, glob = OMNI_FAULTS[fault]
    cases = spread(select([c for name in ("contract", "catalogue") for c in suite(name)], (glob,)), share=3, least=8)
    assert cases and judge.run(cases, [column]).failures


def test_what_is_planted_in_is_right():
    cases = select(suite("contract"), ("T11/given*",)) + suite("catalogue", quick=True)
    results = judge.run(cases, [planted_omni()])
    assert [(r.case, r.message) for r in results.failures] == [] and results.of(status="cannot") == []


def test_tensors_that_learn_nothing_are_missed():
    def frozen(query, key, value, score_mod=None, block_mask=None, enable_gqa=False):
        learned = [t for c in score_mod.__closure__ if isinstance(t := c.cell_contents, torch.Tensor) and t.requires_grad]
        for t in learned: t.requires_grad_(False)
        out = omni_attention(query, key, value, score_mod, block_mask, enable_gqa=enable_gqa)
        for t in learned: t.requires_grad_()
        return out
    results = judge.run(select(catalogue(), ("scores/score-[brt]*backward",)), [judge.impl_column(frozen)])
    assert len(results.failures) > 2 and {(r.what, r.message) for r in results.failures} == {("dtensors0", "missing")}


class Masks:
    "Functions that make masks, each wrong in one way."
    create_mask = staticmethod(lambda mod, *size, **where: ~judge.tensorplay_attn.create_mask(mod, *size, **where))
    and_masks, or_masks = judge.tensorplay_attn.or_masks, judge.tensorplay_attn.and_masks
    noop_mask = staticmethod(lambda *at: at[3] > 0)
    BlockMask = BlockMask
    AuxRequest, AuxOutput = AuxOutput, judge.AuxRequest

    @staticmethod
    def create_block_mask(*args, **words):  # the last column of blocks is seen in full
        mask = create_block_mask(*args, **words)
        kinds = mask.kinds().clone()
        kinds[..., -1:] = 2
        return mask.like(kinds, mask.seq_lengths, mask.mask_mod)


def test_wrong_makers_of_masks_are_caught():
    column = replace(judge.engine_column("math"), masks=Masks)
    failed = {r.row for r in judge.run(select(suite("contract"), ("T7/*", "T8/*", "T9/[cp]*", "T10/*", "T12/*")), [column]).failures}
    assert failed == {"T7", "T8", "T9", "T10", "T12"}


def test_nobody_is_accused_wrongly():
    "Our own doors as strangers: what they say in words must all pass, dropout observed."
    cases = [c for name in SUITES for c in suite(name, quick=True)]
    results = judge.run(cases, [judge.impl_column(ours), judge.impl_column(omni_attention)])
    assert [(r.case, r.what, r.message) for r in results.failures if not (r.column == "omni_attention" and "/rank-" in r.case)] == []
    plain = [c.id for c in cases if not re.match(r"[TCms]", c.id) and c.row not in ONLY_WHEN_ASKED]
    assert sum(r.case in plain for r in results.of(column=ours.__name__, status="pass")) > 0.8 * len(plain)
    assert sum(r.row in ("T11", "masks", "scores", "masks and scores") for r in results.of(column="omni_attention", status="pass")) > 40


# ---------------------------------------------------------------- elsewhere

def test_an_engine_is_not_asked_where_it_does_not_run(monkeypatch):
    "As on a device that is not its own: cannot, with the reason, in every suite."
    monkeypatch.setitem(ENGINES, "tiled", ENGINES["tiled"]._replace(reasons=lambda problem: ["the tiled engine runs elsewhere"]))
    cases = [c for name in SUITES for c in suite(name, quick=True)]
    results = judge.run(cases, [judge.engine_column("tiled")])
    assert [(r.case, r.message) for r in results.failures] == []
    passed = {r.row for r in results.records if r.status == "pass" and "/refuses/" not in r.case}
    assert passed <= {"errors", "layout", "T7", "T8", "T9", "T10", "T12", "T14", "block masks", "packed sequences"}
    # a wrong call is wrong everywhere, a mask made anywhere, and packed sequences have engines of their own
    assert {r.message for r in results.of(status="cannot")} == {"the tiled engine runs elsewhere"}


def test_a_device_without_the_engine():
    cases = select(suite("contract"), ("R1/*H4-Hkv2*", "R14/*", "R18/*"))
    results = judge.run(cases, [judge.engine_column("tiled", "meta")])
    assert {r.status for r in results.records} == {"cannot"} and all("query is on meta" in r.message for r in results.records)


# ---------------------------------------------------------------- strangers

def test_words_are_read_from_the_signature():
    def few(query, key, value, attn_mask=None, *, softcap=0.0): ...
    def anything(*args, **kwargs): ...
    assert judge.spoken(few) == {"attn_mask", "softcap"}
    assert judge.spoken(anything) == judge.spoken(torch.nn.functional.scaled_dot_product_attention) == set(judge.TORCH_WORDS)


def test_what_cannot_be_said_is_no_pass():
    def few(query, key, value): return ours(query, key, value)
    results = judge.run(select(suite("contract"), ("R2/window*", "R13/*")), [judge.impl_column(few)])
    assert {r.status for r in results.records} == {"cannot"} and all("has no word for" in r.message for r in results.records)


def test_not_implemented_is_cannot():
    def later(query, key, value): raise NotImplementedError("next week")
    (record, *_) = judge.run(select(suite("contract"), ("R16/B1-L1-*",)), [judge.impl_column(later)]).records
    assert record.status == "cannot" and "next week" in record.message


@pytest.mark.parametrize("wrong, message", [
    (lambda q, k, v: None, "no tensor"),
    (lambda q, k, v: ours(q, k, v)[..., :3], "shape"),
    (lambda q, k, v: ours(q, k, v).double(), "dtype"),
    (lambda q, k, v: ours(q, k, v) * math.nan, "nan"),
    (lambda q, k, v: ours(q, k, v).detach(), "gradient"),
    (lambda q, k, v: 1 / 0, "ZeroDivisionError"),
])
def test_misbehaviour_is_a_failure_with_words(wrong, message):
    def attention(query, key, value): return wrong(query, key, value)
    results = judge.run(select(suite("contract"), ("R16/B1-L16-*",)), [judge.impl_column(attention)])
    assert any(message in r.message for r in results.failures), [r.message for r in results.records]


def test_writing_into_inputs_is_caught_and_undone():
    def scribbles(query, key, value):
        out = ours(query, key, value)
        query.detach().zero_()
        return out
    cases = select(suite("contract"), ("R16/B1-L16-*", "R15/expanded-*"))
    results = judge.run(cases, [judge.impl_column(scribbles), judge.engine_column("tiled")])
    assert {r.status for r in results.of(column="scribbles")} == {"fail"} and "wrote into query" in results.records[0].message
    assert results.of(column="tiled", status="fail") == []


STRANGER = """
import os, time
from tensorplay_attn.functional import scaled_dot_product_attention as attention
def aborts(query, key, value): os.abort()
def hangs(query, key, value): time.sleep(99)
def fails(query, key, value): raise IndexError("tile 3")
def declines(query, key, value): raise NotImplementedError
"""


def test_behind_glass(tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    glass, call = judge.Glass(), make_call("anything")
    column = {n: judge.apart(f"impl:{tmp_path}/stranger.py:{n}", glass) for n in ("attention", "aborts", "hangs", "fails", "declines")}
    assert column["attention"].words == judge.spoken(ours)
    with pytest.raises(judge.Raised, match="IndexError: tile 3"): column["fails"].answer(call)
    with pytest.raises(Cannot): column["declines"].answer(call)
    glass.patience = 1
    with pytest.raises(Crash, match="1 seconds"): column["hangs"].answer(call)
    glass.patience = 60
    with pytest.raises(Crash, match="SIGABRT"): column["aborts"].answer(call)
    results = judge.run(select(suite("contract"), ("R15/*L18-S33/float32/*", "errors/query-*")), [column["attention"]])
    assert results.failures == [] and len(results.of(status="pass")) > 16
    with pytest.raises(judge.Raised, match="no_such"): judge.apart(f"impl:{tmp_path}/stranger.py:no_such", glass)
    with pytest.raises(judge.Raised, match="ModuleNotFoundError"): judge.apart("impl:no_such_module:f", glass)


def test_every_wrong_call_can_be_sent():
    "A tensor of a dtype that cannot be sent must not look like a crash of whoever was asked."
    cases = select(suite("contract"), ("errors/*",))
    results = judge.run(cases, [judge.apart("impl:tensorplay_attn.functional:scaled_dot_product_attention", judge.Glass())])
    assert [(r.case, r.message) for r in results.failures] == []
    why = {"has no word for kv_lengths", "is asked in another process, and a function cannot be sent"}
    assert {r.message for r in results.of(status="cannot")} == why


def test_recipes_can_be_sent():
    "Another process makes the functions anew, and what learns gets its gradient there."
    column = judge.apart("impl:tensorplay_attn.omni_attention:omni_attention", judge.Glass())
    cases = select(suite("catalogue") + suite("contract"), ("scores/score-t5/*", "scores/score-bias/*", "masks/mask-document/*", "T11/refuses/*"))
    results = judge.run(cases, [column])
    assert [(r.case, r.message) for r in results.failures] == []
    assert len(results.of(status="pass")) > 0.8 * len(cases) and "dtensors0" in results.of(row="scores", status="pass")[1].shares
    def local(device): return causal_mask()
    call = make_call("local", edit=lambda c: replace(c, words={"block_mask": Blocked("local", local, (None, None, 5, 7))}))
    assert "a function cannot be sent" in column.cannot(call)


# ---------------------------------------------------------------- truth and reports

@pytest.mark.parametrize("name", SCORES)
def test_truth_is_what_autograd_makes_of_the_function_itself(name):
    "In fp64, called as it is on all scores at once; masked by where."
    call = make_call(name, score=name, users="prefix_by_batch", L=6, S=9, H=4, Hkv=2, d_lse=True)
    truth, (score_mod, learned) = Truth(call), call.words["score_mod"].make("cpu")
    q, k, v = leaves = [t.double().requires_grad_() for t in (call.query, call.key, call.value)]
    key, value = (t.repeat_interleave(2, 1) for t in (k, v))
    s = score_mod(q @ key.mT / 8**0.5, *index_tensors(2, 4, 6, 9))
    s = torch.where(asked_alone(call.words["block_mask"].mask_mod("cpu"), 2, 4, 6, 9), s, -math.inf)
    empty = s.amax(-1, keepdim=True) == -math.inf
    lse = torch.where(empty, 0, s).logsumexp(-1)
    out = torch.where(empty, 0, (s - lse[..., None]).exp()) @ value
    loss = (out * call.d_out).sum() + torch.where(empty[..., 0], 0, lse * call.d_lse).sum()
    grads = torch.autograd.grad(loss, [*leaves, *learned])
    assert torch.allclose(truth.forward["out"][0], out, rtol=0, atol=2e-6)  # a function computes in fp32 where it is free to
    for n, g in zip(("dq", "dk", "dv", *(f"dtensors{n}" for n in range(len(learned)))), grads, strict=True):
        assert torch.allclose(truth.backward[n][0], g.double(), rtol=2e-6, atol=2e-6), n


def test_truth_of_lists_is_what_they_say():
    blocked = given(2, 3, 16, (20, 40), full=True, mod=causal_mask())
    number, index, full_number, full_index = blocked.lists("cpu")
    seen = blocked.visible()[0, 0]
    for row in range(2):
        partial_blocks, full = index[0, 0, row, :number[0, 0, row]].tolist(), full_index[0, 0, row, :full_number[0, 0, row]].tolist()
        for i in range(row * 16, min(row * 16 + 16, 20)):
            assert seen[i].tolist() == [j // 16 in full or j // 16 in partial_blocks and j <= i for j in range(40)]


def test_kinds_and_lists():
    mask = create_block_mask(causal_mask(), 1, 1, 40, 70, device="cpu", BLOCK_SIZE=(16, 32))
    seen = torch.ones(40, 70, dtype=torch.bool).tril()[None, None]
    want = torch.tensor([[1, 0, 0], [1, 0, 0], [2, 1, 0]], dtype=torch.int8)
    want[2, 0] = 1  # ragged: rows 32 to 39 of a block of 16
    assert block_kinds(seen, (16, 32))[0, 0].equal(want) and listed(mask)[0, 0].equal(want) and listed(mask, columns=True)[0, 0].equal(want)


def test_parts_of_a_tensor_get_their_gradients():
    "Two rows of one tensor are read as two; its truth is both."
    def make(device):
        t = torch.linspace(-1, 1, 14).view(2, 7).requires_grad_()
        return (lambda s, b, h, i, j: s * t[0][j] + t[1][j]), [t]
    call = make_call("parts", edit=lambda c: replace(c, words={"score_mod": Score("rows", make)}))
    truth = Truth(call)
    assert truth.backward["dtensors0"][0].shape == (2, 7) and (truth.backward["dtensors0"][0] != 0).all()
    for name in ("math", "tiled"): assert all(v for _, v in values(judge.engine_column(name), call, truth))


def test_a_hundred_lengths_and_masks():
    "Other lengths, other masks, other functions each time: no slower at the end, and nothing is kept."
    def once(n):
        L, S, ids = 20 + n % 37, 30 + n % 41, torch.arange(80) // (5 + n % 11)
        q, k = torch.randn(1, 2, L, 8, requires_grad=True), torch.randn(1, 2, S, 8)
        table = torch.randn(200, requires_grad=True)
        mod = (window_mask(n % 7, 2), document_mask(ids), causal_mask(n % 5))[n % 3]
        mask = create_block_mask(mod, None, None, L, S, device="cpu", BLOCK_SIZE=16)
        omni_attention(q, k, k, lambda s, b, h, i, j: s * (n + 1) + table[i - j + 100], mask).sum().backward()
        assert q.grad.isfinite().all() and table.grad.isfinite().all()
    def timed(n):
        start = time.perf_counter()
        once(n)
        return time.perf_counter() - start
    alive = lambda: gc.collect() and 0 or sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    for n in range(10): once(n)
    before, first = alive(), [timed(n) for n in range(10, 40)]
    for n in range(40, 100): once(n)
    last = [timed(n) for n in range(100, 130)]
    assert alive() <= before + 5 and statistics.median(last) < 2 * statistics.median(first) + 0.005


def test_truth_sums_what_was_broadcast():
    one = make_call("broadcast", B=3)
    one = Call(one.query, one.key[:1], one.value[:1], d_out=one.d_out)
    many = Call(one.query, one.key.expand(3, -1, -1, -1).clone(), one.value.expand(3, -1, -1, -1).clone(), d_out=one.d_out)
    dk, allowed, _ = Truth(one).backward["dk"]
    assert dk.shape == one.key.shape and torch.allclose(dk, Truth(many).backward["dk"][0].sum(0, keepdim=True)) and (allowed > 0).all()
    assert all(v for _, v in values(judge.engine_column("math"), one, Truth(one)))


def test_errors_must_be_of_our_types():
    class Column(judge.Column): pass
    def wrong_type(query, key, value, **words): raise RuntimeError("no")
    cases = select(suite("contract"), ("errors/key-and-value-differ-in-length",))
    mine = Column("mine", wrong_type, frozenset(judge.TORCH_WORDS), ours=True)
    assert judge.run(cases, [mine]).failures and not judge.run(cases, [judge.impl_column(wrong_type)]).failures


def test_reports(tmp_path):
    def half(query, key, value, is_causal=False): return ours(query.half(), key.half(), value.half(), is_causal=is_causal).to(query.dtype)
    results = judge.run(select(suite("contract"), ("R3/*", "R5/empty/B0*")), [judge.engine_column("math"), judge.impl_column(half)])
    report = json.loads(judge.to_json(results), parse_constant=pytest.fail)
    assert report["failures"] == len(results.failures) > 0 and report["versions"]["torch"] == torch.__version__
    (group, *_) = judge.differences(results.of(row="R3", status="fail"))
    assert group.record.size == min(r.size for r in results.of(row="R3", status="fail"))
    page = to_html(results)
    assert page.count("<h2>") == 6 and "<script" not in page and not re.search(r'(src|href)=', page)
    for r in results.failures: assert r.case in page


def test_a_report_without_jinja2(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensorplay_attn\[report\]'") as e: template()
    assert e.value.name == "jinja2"
