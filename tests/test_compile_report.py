"What is promised about compiled kernels. Compiling runs in processes of its own: in this one the kernels are interpreted."
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tensorplay_attn.evidence import compile_report as cr
from tensorplay_attn.evidence.cli import main
from tensorplay_attn.kernels import launch

COMMAND = Path(sys.executable).parent / "tensorplay-attn"
GOOD = cr.Row("flash_forward", "_flash_fwd", "sm_90", "bfloat16", 128, True, registers=200, shared=1000, dots=7, unit="wgmma")
CAUSAL_128 = cr.Setting(torch.bfloat16, 128, True)


def run(*command):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=900, env=env)


# Together every kernel, dtype and machine; every promise is put to the test on the machine it is about. The command without options compiles all.
SLICES = {
    "flash sm_90": "--kernel flash_forward --kernel flash_backward --target sm_90 --dtype bfloat16 --E 64 --E 128 --causal",
    "flash sm_80": "--kernel flash_forward --kernel flash_backward --target sm_80 --dtype bfloat16 --E 64 --E 128 --causal",
    "full": "--kernel flash_forward --target sm_80 --target sm_90 --dtype float16 --E 128 --full",
    "fp32": "--kernel flash_forward --kernel flash_backward --target sm_90 --dtype float32 --E 128 --causal",
    "efficient": "--kernel efficient_forward --kernel efficient_backward --target sm_90 --dtype bfloat16 --E 128 --causal",
    "packed": "--kernel packed_forward --kernel packed_backward --target sm_90 --dtype bfloat16 --E 64 --causal",
    "decode": "--kernel decode --target sm_80 --dtype bfloat16 --E 128 --causal",
    "user sm_90": "--kernel omni_forward:relative --kernel omni_forward:documents --kernel omni_backward:relative --kernel omni_backward:documents "
        "--target sm_90 --dtype bfloat16 --E 128 --causal",
    "user sm_80": "--kernel omni_forward:relative --kernel omni_backward:relative --kernel omni_decode:documents --target sm_80 --dtype float16 "
        "--E 128 --causal",
    "user 64": "--kernel omni_forward:relative --kernel omni_backward:relative --target sm_80 --dtype float16 --dtype float32 --E 64 --causal",
    "user fp32": "--kernel omni_backward:documents --kernel omni_decode:relative --target sm_90 --dtype float32 --E 64 --full",
    "user others": "--kernel omni_forward:relative --target sm_100 --target gfx942 --dtype bfloat16 --E 128 --causal",
    "others": "--kernel flash_forward --target sm_100 --target gfx942 --dtype bfloat16 --E 128 --causal",
}


@pytest.mark.parametrize("part", SLICES)
def test_promises(part, tmp_path):
    done = run(COMMAND, "compile-report", *SLICES[part].split(), "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert rows and all(r["registers"] and r["programs"] and not r["broken"] for r in rows)
    for r in rows:
        if r["dots"] and not any(n in r["kernel"] for n in cr.FEW_ROWS):
            assert r["products"] and r["exps"] and r["loads"], r  # the step was found
        if r["kernel"] in cr.TABLE_OF and r["target"] in ("sm_80", "sm_90"): assert cr.told(cr.Row(**known(r))), r


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("L, Hkv", [(4096, 8), (1, 2)])
def test_functions_of_a_user(L, Hkv, causal):
    setting = cr.Setting(torch.bfloat16, 64, causal)
    relative, documents = (setting.user(kind, L, Hkv) for kind in ("relative", "documents"))
    assert relative.mods.score and not relative.mods.mask and relative.mods.blocks is None
    assert relative.window == ((-1, 0) if causal else (-1, -1)) and (not causal or relative.shift == 4096 - L)
    assert documents.mods.mask and not documents.mods.score and documents.mods.blocks and documents.window == (-1, -1)
    assert any(n.op == "le" for n in documents.mods.mask.nodes) == causal and len(documents.mods.mask_tensors) == 2


def known(row): return {k: v for k, v in row.items() if k != "broken"}


def test_tables_are_explained_and_fit():
    assert cr.unexplained() == []
    assert all(list(table) == sorted(table) for table in launch.CONFIGS.values())
    assert set(cr.TABLE_OF.values()) <= {kernel for kernel, _ in launch.CONFIGS}
    for (kernel, target), needs in launch.SHARED.items():
        least = cr.MACHINES["sm_89" if target == "sm_80" else target].most
        assert all(n is None or 0 < n <= least for n in needs), (kernel, target)


@pytest.mark.parametrize("target", ["sm_75", "sm_86", "sm_89", "sm_120", "sm_121", "sm_103", "gfx90a", "gfx950", "gfx1100", "xpu"])
def test_other_machines_find_rows_that_fit(target):
    least = 99 * 1024 if target.startswith(("sm", "xpu")) else 64 * 1024
    for kernel in {k for k, _ in launch.CONFIGS} - {"any"}:
        for width, size in ((1, 2), (64, 2), (80, 4), (256, 2), (256, 4)):
            assert launch.configure(kernel, target, width, size).block_m >= 16
            assert target == "sm_103" or (launch.shared_memory_needed(kernel, target, width, size) or 0) <= least, (kernel, width, size)


def test_wide_and_double():
    assert launch.configure("efficient_forward", "sm_90", 4096, 4) == launch.configure("efficient_forward", "sm_90", 256, 4)
    with pytest.raises(ValueError, match="kernel='flash_forward' on target='sm_90' with head size 64 and elements of 8 bytes"):
        launch.configure("flash_forward", "sm_90", 64, 8)
    with pytest.raises(ValueError, match="there are no tile sizes for kernel='soft'"): launch.configure("soft", "sm_90", 64, 2)


# ---------------------------------------------------------------- 64 bits

PLANTED = '''
import sys, torch, triton, triton.language as tl
from tensorplay_attn.evidence.compile_report import compile_call, narrow_offsets
from tensorplay_attn.kernels.launch import Launch
from tensorplay_attn.kernels.tile import load_rows, store_rows, view

@triton.jit
def right(first, x, y, L, G, BLOCK: tl.constexpr):
    h = first // G * G + first % G
    i = first * BLOCK + tl.arange(0, BLOCK)
    t = load_rows(x, first, h, i, i < L, 16, 16)
    for start in range(0, L, BLOCK): t += load_rows(x, first, h, start + i, None, 16, 16)
    store_rows(y, first, h, i, i < L, t, 16, 16)

@triton.jit
def row_in_32(first, x, y, L, G, BLOCK: tl.constexpr):
    i = first * BLOCK + tl.arange(0, BLOCK)
    tl.store(y.ptr + i.to(tl.int64), tl.load(x.ptr + i * x.n))

@triton.jit
def widened_late(first, x, y, L, G, BLOCK: tl.constexpr):
    i = first * BLOCK + tl.arange(0, BLOCK)
    tl.store(y.ptr + i.to(tl.int64), tl.load(x.ptr + (i * x.n).to(tl.int64)))

@triton.jit
def moved_in_a_loop(first, x, y, L, G, BLOCK: tl.constexpr):
    at, i = x.ptr + tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    for start in range(0, L, BLOCK):
        tl.store(y.ptr + i, tl.load(at))
        at += BLOCK * x.n

@triton.jit
def summed_in_32(first, x, y, L, G, BLOCK: tl.constexpr):
    at, i = first * 0, tl.arange(0, BLOCK).to(tl.int64)
    for start in range(0, L, BLOCK):
        tl.store(y.ptr + i, tl.load(x.ptr + at.to(tl.int64) + i))
        at += x.n

@triton.jit
def rows_of_heads(first, x, y, L, G, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y.ptr + (first * L + i).to(tl.int64), tl.load(x.ptr + i))

@triton.jit
def in_a_branch(first, x, y, L, G, BLOCK: tl.constexpr):
    i, at = tl.arange(0, BLOCK), first
    if L > G: at = first * L
    tl.store(y.ptr + (at + i).to(tl.int64), tl.load(x.ptr + i))

x = torch.empty(2, 3, 64, 16, device="meta").transpose(1, 2)
for kernel in (right, row_in_32, widened_late, moved_in_a_loop, summed_in_32, rows_of_heads, in_a_branch):
    for target in ("sm_80",):
        found = narrow_offsets(compile_call(Launch(kernel, 1, (0, view(x), view(x), 64, 3), dict(BLOCK=32)), target).asm["ttir"])
        print(kernel.fn.__name__, len(found), *found, sep="|")
'''


def test_narrow_offsets_are_found(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    done = run(sys.executable, tmp_path / "planted.py")
    assert done.returncode == 0, done.stderr
    found = {name: int(n) for name, n, *_ in (line.split("|") for line in done.stdout.splitlines())}
    assert found.pop("right") == 0, done.stdout
    assert len(found) == 6 and all(found.values()), done.stdout
    assert re.search(r"widened_late\|1\|planted.py:\d+: a stride is used in tensor<32xi32>", done.stdout), done.stdout


# ---------------------------------------------------------------- what it says

def test_interpreted_kernels_are_refused():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET was set when they were imported"):
        cr.compile_call(cr.launches_of("flash_forward", "sm_90", CAUSAL_128)[0], "sm_90")
    result = CliRunner().invoke(main, ["compile-report", "--kernel", "flash_forward", "--target", "sm_90", "--E", "64"])
    assert result.exit_code == 1 and "Unset it" in result.output


def test_missing_tools_are_named(monkeypatch):
    class Nothing:
        def __getattr__(self, name): raise RuntimeError(f"Cannot find {name}")
    monkeypatch.setattr(cr.triton.knobs, "nvidia", Nothing())
    with pytest.raises(RuntimeError, match="nvdisasm was not found.*TRITON_NVDISASM_PATH"): cr.tool("nvdisasm")


def test_wrong_options():
    for wrong in (["--target", "sm_1"], ["--kernel", "fast"], ["--E", "0"], ["--dtype", "float64"], ["--jobs", "0"]):
        assert CliRunner().invoke(main, ["compile-report", *wrong]).exit_code == 2


@pytest.mark.parametrize("change, words", [
    (dict(error="CompilationError: line 3"), "it does not compile: CompilationError: line 3"),
    (dict(spilled=8), "it spills 8 bytes"), (dict(hot_spills=1), "a loop that multiplies has 1 spills"),
    (dict(kernel="_decode", spilled=24), "it spills 24 bytes"),
    (dict(target="sm_80", unit="mma", spilled=8), "it spills 8 bytes"), (dict(unit="mma"), "it multiplies by mma, not by wgmma"),
    (dict(unit="wgmma+mma"), "it multiplies by wgmma+mma, not by wgmma"), (dict(unit="fma"), "it multiplies by fma, not by wgmma"),
    (dict(kernel="_row_delta", dots=0, shared=227 * 1024 + 1), "it takes 232449 bytes of shared memory, and there are 232448"),
    (dict(shared=163841), "it takes 163841 bytes of shared memory, and the table says 163840"),
    (dict(offsets=["a.py:1: narrow"]), "a.py:1: narrow")])
def test_broken_promises(change, words):
    assert cr.broken(GOOD) == [] and cr.broken(replace(GOOD, **change)) == [words]


@pytest.mark.parametrize("change", [dict(E=256, spilled=8), dict(target="sm_100", unit="tcgen05", spilled=8), dict(dtype="float32", unit="fma"),
    dict(kernel="_decode", unit="mma", spilled=16), dict(target="gfx942", unit="mfma", spilled=4), dict(kernel="_row_delta", dots=0, unit="fma")])
def test_what_is_not_promised(change): assert cr.broken(replace(GOOD, **change)) == []


def test_loops():
    code, labels = cr.instructions("\n".join([".L_1:", "\tHMMA.16816 R1 ;", "  @P0 BRA `(.L_1) ;", ".L_2:", "\tHMMA.16816 R1 ;", ".L_3:",
        "\tMUFU.EX2 R1 ;", "\t@!UP0 BRA.U `(.L_3) ;", "\tBRA `(.L_2) ;", "\tBRA `(.L_4) ;", ".L_4:"]))
    assert [name for name, _ in code] == ["HMMA.16816", "BRA", "HMMA.16816", "MUFU.EX2", "BRA.U", "BRA", "BRA"]
    assert sorted(cr.inner_loops(code, labels)) == [(0, 1), (3, 4)]


def test_waiting_is_no_loop():
    code, labels = cr.instructions("\n".join([".L_1:", "\tUTCHMMA R1 ;", ".L_2:", "\tSYNCS.PHASECHK.TRANS64.TRYWAIT P0 ;", "\t@!P0 BRA `(.L_2) ;",
        "\tBRA `(.L_1) ;"]))
    assert cr.inner_loops(code, labels) == [(0, 3)]


def test_step_is_the_short_loop_that_multiplies():
    loop = lambda n, *body: [f".L_{n}:", *(f"\t{b} ;" for b in body), f"\tBRA `(.L_{n}) ;"]
    edge = ["HGMMA.64x64x16 R1", "ISETP R1", "SEL R1", "LDGSTS.E R1", "MUFU.EX2 R1", "MUFU.EX2 R1", "STL R1"]
    full = ["HGMMA.64x64x16 R1", "LDGSTS.E R1", "LDGDEPBAR", "MUFU.EX2 R1", "MUFU.EX2 R1"]
    loops = loop(1, *edge) + loop(2, *full) + loop(3, "FFMA R1", "LDG R1") + loop(4, "HGMMA.64x64x16 R1", "MUFU.EX2 R1")
    units, step, spills = cr.step_of("\n".join(loops))
    assert units == ["wgmma"] and (step["wgmma"], step["exps"], step["loads"], step["spills"]) == (1, 2, 1, 0) and spills == 1


@pytest.mark.parametrize("registers, shared, warps, expected", [
    (128, 0, 8, 2), (129, 0, 8, 1), (255, 0, 4, 2), (32, 0, 4, 16), (16, 0, 1, 32), (64, 100 * 1024, 4, 2), (64, 227 * 1024, 4, 1),
    (64, 228 * 1024, 4, 0)])
def test_programs_sm_90(registers, shared, warps, expected): assert cr.programs_of(cr.MACHINES["sm_90"], registers, shared, warps) == expected


@pytest.mark.parametrize("registers, shared, warps, expected", [
    (512, 0, 4, 1), (256, 0, 4, 2), (257, 0, 4, 1), (64, 0, 4, 8), (128, 32 * 1024, 4, 2)])
def test_programs_gfx942(registers, shared, warps, expected): assert cr.programs_of(cr.MACHINES["gfx942"], registers, shared, warps) == expected


def test_jobs():
    assert len(cr.all_jobs()) == len(cr.CASES) * 3 * 3 * 2 * 4
    [job] = cr.all_jobs(["decode"], ["sm_90"], ["float16"], [64], [True])
    assert job == ("decode", "sm_90", cr.Setting(torch.float16, 64, True))


def test_every_case_starts_kernels():
    for case in cr.CASES:
        for causal in (True, False):
            calls = cr.launches_of(case, "sm_90", cr.Setting(torch.float16, 64, causal))
            assert calls and all(c.programs > 0 for c in calls), case
