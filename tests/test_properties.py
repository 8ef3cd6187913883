"Properties: they hold, each of them can fail, what fails is shrunk, and what was found is kept and asked again."
import json
import random
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings

from tensorplay_attn import BlockMask
from tensorplay_attn.evidence import properties
from tensorplay_attn.evidence.cases import Case, Truth
from tensorplay_attn.evidence.conformance import engine_column, impl_column, try_case
from tensorplay_attn.evidence.properties import EDITS, LAYOUTS, PROPERTIES, ask, build, check, fuzz_command, search, specs
from tensorplay_attn.functional import scaled_dot_product_attention as ours


pytestmark = pytest.mark.usefixtures("one_thread")


def judged(spec, column, name):
    call = build(spec)
    return try_case(Case(name, "", None, check(name)), column, call, Truth(call))


# ---------------------------------------------------------------- nobody right is accused

@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_holds(name):
    statuses, columns = [], [engine_column(n) for n in ("math", "tiled")]
    @settings(derandomize=True, max_examples=8, deadline=None, database=None)
    @given(specs(20))
    def holds(spec):
        records = [judged(spec, c, name) for c in columns]
        statuses.extend(r.status for r in records)
        assert [(r.column, r.what, r.message) for r in records if r.status == "fail"] == []
    holds()
    assert "pass" in statuses


KERNELS = [dict(is_causal=True), dict(mask="bias:H,L,S"), dict(lengths=[3], dtype="bfloat16"), dict(sinks="float32", softcap=1.0),
           dict(dropout_p=0.3, alignment="lower_right"), dict(window_size=[2, 1], edits=["nan in hidden"])]


@pytest.mark.parametrize("name", [n for n in PROPERTIES if n not in ("differences", "cropped", "lists")])
def test_a_property_holds_on_interpreted_kernels(name, monkeypatch):
    if not torch.cuda.is_available(): monkeypatch.setenv("TRITON_INTERPRET", "1")
    more = KERNELS[list(PROPERTIES).index(name) % len(KERNELS)]
    spec = dict(L=3, S=5, E=4, B=1, H=2, Hkv=1, seed=3) | more
    records = [judged(spec, engine_column(n, "cuda" if torch.cuda.is_available() else "cpu"), name) for n in ("flash", "efficient")]
    assert [(r.column, r.what, r.message) for r in records if r.status == "fail"] == [] and "pass" in {r.status for r in records}


def test_specs_are_json_and_make_one_call():
    words = set()
    @settings(derandomize=True, max_examples=60, deadline=None, database=None)
    @given(specs(9))
    def whole(spec):
        a, b = build(spec), build(json.loads(json.dumps(spec)))
        words.update(a.words)
        assert str(a) == str(b) and a.seed == b.seed
        for n, t in a.tensors.items(): assert torch.allclose(t, b.tensors[n], 0, 0, equal_nan=True) and t.stride() == b.tensors[n].stride()
    whole()
    assert words >= {"attn_mask", "is_causal", "window_size", "alignment", "softcap", "scale", "sinks", "kv_lengths", "dropout_p", "enable_gqa"}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_numbers(edit):
    spec = dict(L=3, S=5, E=4, B=2, H=2, mask="bias:L,S", window_size=[0, 0], seed=1)
    before, after = (build(s) for s in (spec, spec | {"edits": [edit]}))
    assert any(not torch.equal(t, after.tensors[n]) for n, t in before.tensors.items())


@pytest.mark.parametrize("way", LAYOUTS)
def test_a_layout_changes_strides(way):
    spec = dict(L=3, S=5, E=4, B=2, H=2, seed=1)
    assert not build(spec | {"layout": {"key": way}}).key.is_contiguous() and build(spec).key.is_contiguous()


# ---------------------------------------------------------------- each can fail

SPEC = dict(L=6, S=9, E=8, B=2, H=4, Hkv=2, d_lse=True, seed=1)


def changed(before=None, after=None):
    "Our call with its arguments or its answer changed: before(q, k, v, words), after(out, lse, words)."
    def function(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, alignment="upper_left",
                 window_size=(-1, -1), softcap=0.0, sinks=None, return_aux=None):
        words = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, alignment=alignment,
                     window_size=window_size, softcap=softcap, sinks=sinks)
        if before: query, key, value, words = before(query, key, value, dict(words))
        result = ours(query, key, value, **words, return_aux=return_aux)
        if after is None: return result
        if return_aux is None: return after(result, None, words)[0]
        out, lse = after(result[0], result[1].lse, words)
        return out, result[1]._replace(lse=lse)
    return function


def first_key_larger(q, k, v, w): return q, torch.cat([k[:, :, :1] * 1.01, k[:, :, 1:]], 2), v, w
def wide_window(q, k, v, w): return q, k, v, w | {"window_size": tuple(n + (n > 0) for n in w["window_size"])}
def short_query(q, k, v, w): return q.clamp(-0.9, 0.9), k, v, w
def other_groups(q, k, v, w): return q, k[:, [1, 0]] if k.shape[1] == 2 else k, v, w
def causal_and_one(q, k, v, w): return q, k, v, w | ({"is_causal": False, "window_size": (-1, 1)} if w["is_causal"] else {})
def scaled_sink(q, k, v, w): return q, k, v, w | ({"sinks": w["sinks"] * 0.9} if w["sinks"] is not None else {})
def scaled_by_keys(q, k, v, w): return q * (1 + k.shape[2] / 1000), k, v, w
def half_of_q(q, k, v, w): return (q + q.detach()) / 2, k, v, w
def noise(q, k, v, w): return q + torch.randn(q.shape, generator=NOISE) / 1000, k, v, w
def by_stride(q, k, v, w): return q, k if k.is_contiguous() else k * 1.01, v, w


NOISE = torch.Generator().manual_seed(0)
FAULTS = {
    "bounded": (changed(short_query), {}), "twice": (changed(noise), {}), "strides": (changed(by_stride), {"layout": {"key": "sliced"}}),
    "written out": (changed(wide_window), {"window_size": [2, 1]}), "permuted": (changed(first_key_larger), {}),
    "split": (changed(after=lambda out, lse, w: (out, lse * 1.4427)), {}), "shifted": (changed(short_query), {}),
    "linear": (changed(after=lambda out, lse, w: (out.clamp(-0.1, 0.1), lse)), {}), "repeated heads": (changed(other_groups), {}),
    "causal window": (changed(causal_and_one), {}),
    "row of batch": (changed(after=lambda out, lse, w: (out + out.mean(0) / 1000, lse)), {}),
    "sink key": (changed(scaled_sink), {"sinks": "float32"}),
    "no sink": (changed(after=lambda out, lse, w: (out if w["sinks"] is None else out * 0.999, lse)), {}),
    "no softcap": (changed(after=lambda out, lse, w: (out * 0.999 if w["softcap"] else out, lse)), {}),
    "end to end": (changed(scaled_by_keys), {}), "differences": (changed(half_of_q), {}), "loops": (changed(half_of_q), {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_property_can_fail(name):
    function, more = FAULTS[name]
    right, wrong = (judged(SPEC | more, impl_column(f), name) for f in (ours, function))
    assert right.status == "pass", right
    assert wrong.status == "fail" and wrong.what != "call", wrong


def test_the_packed_call_can_fail(monkeypatch):
    real = properties.varlen_attn
    assert judged(SPEC, engine_column("tiled"), "packed").status == "pass"
    monkeypatch.setattr(properties, "varlen_attn", lambda *a, scale, **k: real(*a, scale=scale * 1.01, **k))
    assert judged(SPEC, engine_column("tiled"), "packed").status == "fail"


def test_block_masks_can_fail(monkeypatch):
    column, crop = engine_column("math"), BlockMask.crop
    assert judged(SPEC, column, "cropped").status == judged(SPEC, column, "lists").status == "pass"
    wrong = replace(column, omni=lambda query, *more, **words: column.omni(query * 1.01, *more, **words))
    assert judged(SPEC, wrong, "lists").status == "fail"
    monkeypatch.setattr(BlockMask, "crop", lambda mask, *lengths: crop(mask.shift(1), *lengths))
    assert judged(SPEC, column, "cropped").status == "fail"


def test_dropout_of_others_is_not_accused():
    assert judged(SPEC | {"dropout_p": 0.3}, impl_column(ours), "linear").status == "cannot"


@pytest.mark.parametrize("name, more", [
    ("row of batch", dict(L=8, S=1, E=1, B=2, H=1)),  # NaN with a sign alone, and without one in a batch
    ("sink key", dict(L=1, S=1, E=1, B=1, H=1, mask="bool:L,S"))])  # NaN times a zero key is no sink
def test_a_nan_accuses_nobody(name, more):
    spec = dict(edits=["nan query", "empty row"], seed=0) | more
    assert "fail" not in {judged(spec, engine_column(n), name).status for n in ("math", "tiled")}


def test_unknown_property():
    with pytest.raises(ValueError, match="permuted, split"): check("symmetry")


# ---------------------------------------------------------------- found and shrunk

def forgets_far_keys(query, key, value): return ours(query, key[..., :16, :], value[..., :16, :])
def forgets_the_sink(query, key, value, sinks=None): return ours(query, key, value)
def half_gradient(query, key, value): return ours((query + query.detach()) / 2, key, value)
def mixes_heads(query, key, value, enable_gqa=False): return ours(query, key.flip(1), value.flip(1), enable_gqa=enable_gqa)
def rounds(query, key, value): return ours(query.bfloat16(), key.bfloat16(), value.bfloat16()).to(query.dtype)
def breaks_at_nan(query, key, value): return ours(query.nan_to_num(), key, value)


@pytest.mark.parametrize("function, small", [
    (forgets_far_keys, {"L": 1, "S": 17, "H": 1, "B": 1}), (forgets_the_sink, {"L": 1, "S": 1, "H": 1, "sinks": "float32"}),
    (half_gradient, {"L": 1, "S": 2, "B": 1}), (mixes_heads, {"Hkv": 2, "H": 2, "B": 1, "L": 1, "S": 1}),
    (rounds, {"L": 1, "S": 1, "H": 1}), (breaks_at_nan, {"L": 1, "S": 1, "edits": ["nan query"]})], ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_is_found_and_shrunk(function, small):
    spec, record = search([impl_column(function)], random.Random(0), 300, most=24)
    assert record.status == "fail" and ask(spec, [impl_column(function)])[0].status == "fail"
    assert all(spec[n] == x if isinstance(x, (str, list)) else spec[n] <= x + (n == "S" and function is forgets_far_keys) * 8
               for n, x in small.items()), spec


def test_who_failed_is_not_asked_further(tmp_path):
    columns = [impl_column(changed(half_of_q), "half"), engine_column("math")]
    run = properties.Fuzz(columns, properties.Corpus(tmp_path), most=9)
    run.go_on(60, 30, batch=15)
    assert [r.column for _, r in run.failures] == ["half"] and [c.name for c in run.left] == ["math"] and run.asked >= 30


# ---------------------------------------------------------------- the command

STRANGER = """
from torch.nn.functional import scaled_dot_product_attention as right
def wrong(query, key, value): return right(query, key, value) * 1.001
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger.py").write_text(STRANGER)
    return tmp_path


def fuzz(*options): return CliRunner().invoke(fuzz_command, ["--size", "9", *options])


def test_a_failure_is_kept_and_asked_again(folder):
    options = "--impl", "stranger.py:wrong", "--in-process", "--corpus", "kept", "--max-examples", "20"
    done = fuzz(*options)
    assert done.exit_code == 1 and "stranger.py:wrong, bounded, out" in done.stdout and "1 of 1 failed" in done.stdout, done.output
    kept = json.loads((folder / "kept/failure-stranger-py-wrong-bounded-out.json").read_text())
    assert kept["column"] == "stranger.py:wrong" and kept["spec"]["L"] <= 1 and kept["message"]
    again = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")][:3]
    exec("\n".join(again).replace("print(ask(", "seen = (ask("), space := {})
    assert space["seen"][0].status == "fail"
    assert fuzz(*options[:-2], "--seconds", "0").exit_code == 1
    (folder / "stranger.py").write_text(STRANGER.replace(" * 1.001", ""))
    done = fuzz(*options[:-2], "--seconds", "0")
    assert done.exit_code == 0 and "no failure" in done.stdout and (folder / "kept/failure-stranger-py-wrong-bounded-out.json").is_file()


def test_a_run_goes_on_where_the_last_one_stopped(folder, monkeypatch):
    asked, real = [], properties.ask
    def ask(spec, columns):
        asked.append(json.dumps(spec, sort_keys=True))
        return real(spec, columns)
    monkeypatch.setattr(properties, "ask", ask)
    run = lambda *more: fuzz("--engine", "math", "--max-examples", "12", *more)
    assert run("--corpus", "kept").exit_code == 0
    first, kept = list(asked), len(list((folder / "kept").glob("closest-*.json")))
    drawn = lambda: json.loads((folder / "kept/drawn.json").read_text())["0"]
    batches = drawn()
    assert batches >= 1 and kept > 5
    assert run("--corpus", "kept").exit_code == 0
    again, new = asked[len(first):len(first) + kept], asked[len(first) + kept:]
    assert drawn() > batches and set(again) <= set(first) and len(new) >= 12 and len(set(new) & set(first)) < 3
    asked.clear()
    assert run().exit_code == 0 and asked == first and run("--seed", "1").exit_code == 0 and asked[len(first):] != first


def test_ctrl_c_is_clean(folder, monkeypatch):
    real, count = properties.ask, []
    def ask(spec, columns):
        if len(count) == 3: raise KeyboardInterrupt
        count.append(spec)
        return real(spec, columns)
    monkeypatch.setattr(properties, "ask", ask)
    done = fuzz("--engine", "math", "--corpus", "kept")
    assert done.exit_code == 130 and done.stdout == "stopped; 3 problems before math; no failure\n", done.output
    assert list((folder / "kept").glob("closest-*.json"))


def test_a_corpus_that_is_none_is_said_before(folder):
    (folder / "kept").mkdir()
    (folder / "kept/failure-x.json").write_text("{}")
    done = fuzz("--engine", "math", "--corpus", "kept")
    assert done.exit_code == 2 and "failure-x.json holds no spec" in done.output.replace("\n", " "), done.output
    assert fuzz("--engine", "math", "--corpus", "stranger.py/kept").exit_code == 2


@pytest.mark.parametrize("wrong, words", [
    (["--impl", "no_colon"], "module:function"), (["--impl", "json:nothing"], "nothing"), (["--impl", "nowhere.py:f"], "nowhere.py"),
    (["--impl", "json:__name__"], "callable"), (["--engine", "fast"], "'math', 'tiled'"), (["--engine", "cudnn"], "CUDA"),
    (["--seconds", "-1"], "x>=0"), (["--size", "0"], "x>=1")])
def test_wrong_options_are_status_2(wrong, words):
    done = fuzz("--in-process", *wrong)
    assert done.exit_code == 2 and words in done.output.replace("\n", " "), done.output


def test_without_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensorplay_attn\[fuzz\]'"): specs()
    done = fuzz("--engine", "math")
    assert done.exit_code == 2 and "pip install" in done.output
