"The command for a GPU, without one: its parts, its dry run, and what it does when things go wrong."
import csv
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tensorplay_attn.kernels import flash_forward
from tensorplay_attn.problem import visible_range

with pytest.MonkeyPatch.context() as patch:  # its kernel is interpreted too, as those that conftest imports
    if not torch.cuda.is_available(): patch.setenv("TRITON_INTERPRET", "1")
    from tensorplay_attn.evidence import gpu

Budget, Job, Lab, Row, Worker = gpu.Budget, gpu.Job, gpu.Lab, gpu.Row, gpu.Worker
ROOT = Path(__file__).parents[1]
TINY = Lab("cpu", True)
CAUSAL = gpu.shapes()[0].id


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 0), (2, 4), (-1, 2), (5, -1)])
@pytest.mark.parametrize("L, S, shift", [(1, 1, 0), (7, 7, 0), (5, 9, 4), (9, 5, 0), (9, 5, -4), (0, 3, 0), (3, 0, 0)])
def test_pairs(window, L, S, shift):
    ranges = [visible_range(i + shift, window, S) for i in range(L)]
    assert gpu.pairs(L, S, window, shift) == sum(max(0, stop - start) for start, stop in ranges)


def test_work_of_every_question():
    for s in gpu.shapes():
        whole = 4 * s.B * s.H * s.L * s.S * s.E
        share = gpu.flops(s, "forward") / whole
        if s.window == (-1, -1): assert share == 1
        if s.window == (-1, 0) and not s.lengths: assert 0.5 < share < 0.5006
        if s.window == (1023, 0): assert abs(share - (1024 - 1023 * 1024 / 2 / s.L) / s.L) < 1e-6
        assert gpu.flops(s, "backward") == 2.5 * gpu.flops(s, "forward") and sum(s.lengths) in (0, s.L)


def test_the_file_survives(tmp_path):
    ledger = gpu.Ledger(tmp_path / "x.csv", {"machine": "m", "versions": "v, w", "date": "d"})
    rows = [Row("speed", "a", "flash", B=1, ms=0.0123456789, ok=False, note='quoted "x",\nnew line'), Row("right", share=float("inf"), ok=True),
        Row("tune")]
    ledger.write(rows[:2])
    ledger.write(rows[2:])
    back = gpu.read_rows(tmp_path / "x.csv")  # not closed yet: what a killed run leaves
    ledger.close()
    assert [r.what for r in back] == ["speed", "right", "tune"] and back[0].note == 'quoted "x", new line' and back[0].versions == "v, w"
    assert back[0].ms == 0.012346 and back[0].ok is False and back[1].share == float("inf") and back[2].ok is None and back[2].B is None
    with open(tmp_path / "x.csv", newline="") as f: assert next(csv.reader(f)) == list(gpu.COLUMNS)


# ---------------------------------------------------------------- the clock

class Cuda:
    "A GPU's queue that takes no time to hand over, and as long as it is told to run."
    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        for name in ("synchronize", "reset_peak_memory_stats"): monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work("sleep", cycles / 2e6))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(gpu, "CACHE", 16)

    def work(self, name, ms):
        self.log.append(name)
        self.now += ms


class Event:
    def __init__(self, cuda): self.cuda = cuda

    def record(self):
        self.cuda.log.append("event")
        self.at = self.cuda.now

    def elapsed_time(self, other): return other.at - self.at


def test_stopwatch(monkeypatch):
    cuda = Cuda(monkeypatch)
    watch, run = gpu.Stopwatch("cpu"), lambda: cuda.work("run", 3.0)
    watch.rubbish.fill_(1)
    assert watch.sample(run, 0.002)() == 3.0 and cuda.log == ["sleep", "event", "run", "event"] and not watch.rubbish.any()
    assert cuda.now - 3.0 > 2.0, "the GPU waits longer than Python takes"
    times = gpu.beat({"a": run, "b": lambda: cuda.work("b", 5.0)}, watch, 0, least=3)
    assert [times[n][0] for n in "ab"] == [3.0, 5.0] and all(x[1] >= 0 for x in times.values())
    assert [x for x in cuda.log if x in ("run", "b")][-6:] == ["run", "b", "b", "run", "run", "b"]


@pytest.mark.parametrize("name", ["causal", "decode", "bias"])
def test_a_timed_question(monkeypatch, name):
    "What is done on a GPU, with a clock that ticks on a CPU and a small question."
    small = gpu.shrink(next(s for s in gpu.shapes() if s.name == name))
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(gpu, "shapes", lambda: [small])
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    def beat(runs, watch): return {n: (2.0 if n in gpu.KERNELS else 4.0, 0.1) for n in runs if watch.sample(runs[n], 0)() == 0}
    monkeypatch.setattr(gpu, "beat", beat)
    rows = gpu.speed(small.id, Lab("cpu", False))
    assert gpu.speed(small.id, Lab("cpu", False), rehearsal=True) == [] and cuda.now == 0
    mine = [r for r in rows if r.impl in gpu.KERNELS]
    assert {r.direction for r in mine} == set(small.directions) and all(r.ok and r.peak_mib == 2 for r in mine)
    assert all(abs(r.tflops - gpu.flops(small, r.direction) / 2e-3 / 1e12) < 1e-12 for r in mine)
    flash = [r for r in rows if r.impl == "torch flash" and r.ms]
    assert flash and flash[0].ratio == 1 and next(r for r in mine if r.direction == flash[0].direction).ratio == 0.5
    assert (mine[0].gbs is not None) == (name == "decode")


def test_timed_tile_sizes(monkeypatch):
    "Fastest first, with the work of the kernel's own products; what cannot be launched is said."
    small = gpu.shrink(gpu.shapes()[0])
    Cuda(monkeypatch)
    monkeypatch.setattr(gpu, "shapes", lambda: [small])
    tiles = ((32, 32, 4, 1), (32, 16, 4, 1), (24, 32, 4, 1))  # no power of two: refused
    monkeypatch.setitem(gpu.TUNED, "flash_backward_dkdv", gpu.TUNED["flash_backward_dkdv"]._replace(tiles=tiles))
    monkeypatch.setattr(gpu, "beat", lambda runs, watch: {n: (5.0 - i, 0.1) for i, n in enumerate(runs)})
    rows = gpu.tune("flash_backward_dkdv", small.id, Lab("cpu", False))
    assert [r.config[:5] for r in rows] == ["24x32", "32x16", "32x32", "64x64"] and rows[0].note.startswith("cannot: ")
    assert [r.ms for r in rows[1:]] == [3.0, 4.0, 5.0] and all(r.ok for r in rows[1:]) and rows[3].note == "the table's"
    assert abs(rows[1].tflops - 2 * gpu.flops(small, "forward") / 3e-3 / 1e12) < 1e-12


# ---------------------------------------------------------------- what is right

def test_a_wrong_engine_is_found(monkeypatch):
    whole = flash_forward.flash_forward
    assert all(r.ok for r in gpu.right("flash", "causal", "fp16", TINY))
    def spoilt(problem, *args):
        out, *more = whole(problem, *args)
        out[-1, -1, -1, -1] += 0.01
        return out, *more
    monkeypatch.setattr(flash_forward, "flash_forward", spoilt)
    rows = gpu.right("flash", "causal", "fp16", TINY)
    assert rows[0].ok is False and "out: " in rows[0].note and rows[0].share > 1 and rows[0].direction == "forward"


def test_bits_that_change_are_found(monkeypatch):
    whole, calls = flash_forward.flash_forward, []
    def unsteady(problem, *args):
        out, lse, *more = whole(problem, *args)
        calls.append(1)
        return out, lse + 1e-7 * len(calls), *more
    monkeypatch.setattr(flash_forward, "flash_forward", unsteady)
    rows = {r.name: r for r in gpu.right("flash", "sinks", "bf16", TINY)}
    assert rows["sinks"].ok and not rows["sinks: twice"].ok and not rows["sinks: alone"].ok


@pytest.mark.parametrize("impl, name", [("flash", n) for n in ("scores of thousands", "NaN in a value", "rows that see nothing", "heads innermost")]
    + [("efficient", n) for n in ("bias of a column", "heads of 320", "dropout")])
def test_checks_of_kernels(impl, name):
    rows = gpu.right(impl, name, "fp16", TINY)
    assert all(r.ok for r in rows), [r.note for r in rows]


def test_a_coarse_exponential_is_found(monkeypatch):
    exact = gpu.by_kernel
    assert all(r.ok for r in gpu.powers(TINY))
    monkeypatch.setattr(gpu, "by_kernel", lambda x, log: exact(x, log) * (1 + 1e-6))
    assert not any(r.ok for r in gpu.powers(TINY))


def test_the_outvoted_is_not_timed_as_right(monkeypatch):
    kernels = gpu.ours
    def wrong(impl, shape, t):
        return {d: (lambda call=call: tuple(x * 1.5 for x in call())) for d, call in kernels(impl, shape, t).items()}
    monkeypatch.setattr(gpu, "ours", wrong)
    rows = {(r.impl, r.direction): r for r in gpu.speed(CAUSAL, TINY)}
    assert rows["flash", "forward"].ok is False and rows["torch flash", "forward"].ok and rows["flex", "forward"].ok
    assert gpu.rate(replace(rows["flash", "forward"], ms=1.0, tflops=500.0)) == "500 wrong"


# ---------------------------------------------------------------- jobs

def test_a_failing_job_is_a_line(monkeypatch):
    rows, alive = gpu.do(Job("speed", ("nothing",)), TINY)
    assert alive and rows[0].ok is False and "there is no question 'nothing'" in rows[0].note
    def gone(device, who=""): raise gpu.Broken("the device is gone")
    monkeypatch.setattr(gpu, "check_alive", gone)
    rows, alive = gpu.do(Job("speed", ("nothing",)), TINY)
    assert not alive and "the device is gone" in rows[0].note


def test_a_worker_that_dies_is_replaced():
    worker = Worker(TINY)
    with gpu.environment(TRITON_INTERPRET="1"):
        worker.ask(Job("powers"))
        os.kill(worker.process.pid, signal.SIGKILL)
        rows = worker.answer(Job("powers"))
        assert rows[0].ok is False and "died: exit status -9" in rows[0].note and worker.process is None
        worker.ask(Job("powers"))
        assert [r.ok for r in worker.answer(Job("powers"))] == [True, True]
    worker.stop()
    assert worker.process is None


class Slow:
    "A worker that never answers."
    connection, stopped = None, 0
    def __init__(self, clock): self.clock = clock
    def ask(self, job): pass
    def stop(self): self.stopped += 1


class Clock:
    now = 0.0
    def __call__(self): return self.now


def test_what_takes_too_long_is_stopped():
    clock, lines = Clock(), []
    def look(connections, seconds):
        clock.now += 10
        return []
    slow, jobs = Slow(clock), [Job("right", ("a",)), Job("right", ("b",))]
    left = gpu.work_through(jobs, [slow], Budget(300, clock), 0.5, lambda rows, line: lines.extend(rows), look)
    assert slow.stopped == 1 and lines[0].ok is False and "stopped after" in lines[0].note and [j.args for j in left] == [("b",)]


def test_what_is_left_out_is_said():
    jobs = [Job("speed", ("x",)), *gpu.few_at_a_time(True)[:3], Job("rehearse", ("speed", "x"))]
    assert [(r.what, r.note) for r in gpu.left_out(jobs)] == [("speed", "left out: no time"), ("contract", "left out: no time for 3 jobs")]


def test_verdict_sentences():
    shape = gpu.shapes()[0]
    row = lambda impl, x, **more: gpu.described(replace(shape, **more), impl=impl, direction="forward", ok=True, ms=1.0, tflops=x)
    assert all("not measured" in line for line in gpu.verdict([]))
    some = [row("flash", 500.0), row("flex", 450.0), row("efficient", 1.0)]
    assert "500 TFLOP/s; above FlexAttention's 450: met; above 400: met; aim 500: met" in gpu.verdict(some)[0]
    assert "FlexAttention not measured; above 400: missed" in gpu.verdict([row("flash", 399.0)])[0]
    assert "not measured" in gpu.verdict([replace(row("flash", 900.0), ok=False)])[0], "a wrong answer has no speed"
    half = [row("flash", 400.0), row("flash", 200.0, name="window 1024"), row("flash", 300.0, name="window 1024", B=1, L=16384, S=16384)]
    assert "50% of" in gpu.verdict(half)[2] and gpu.verdict(half)[2].endswith("missed") and gpu.verdict(half)[4].endswith("met")


def test_a_plot_has_a_line_for_each():
    pytest.importorskip("matplotlib")
    rows = [replace(gpu.described(replace(gpu.shapes()[0], L=L), impl=n, direction=d, ok=True, ms=1.0, tflops=100.0), machine="m")
        for n in ("flash", "flex") for d in ("forward", "backward") for L in (1024, 2048)]
    figure = gpu.plot_speed(rows)
    assert [[line.get_label() for line in ax.lines] for ax in figure.axes] == [["ours", "flex"]] * 2


# ---------------------------------------------------------------- the command

def test_the_list_and_wrong_words():
    run = lambda *args: CliRunner().invoke(gpu.gpu_command, args)
    lines = run("--list").output.split("\n")
    assert lines[0] == "powers" and len(lines) > 500 and "speed decode" in run("--list", "--only", "speed decode*").output
    assert run("--only", "nothing*").exit_code == 2 and run("--seconds", "1").exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = CliRunner().invoke(gpu.gpu_command, ["--csv", str(tmp_path / "x.csv")])
    assert done.exit_code == 1 and "--dry-run" in done.output and not (tmp_path / "x.csv").exists()


def test_make_gpu_names_what_is_missing(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -I \"$@\"\n")  # without site-packages
    python.chmod(0o755)
    done = subprocess.run(["make", "gpu", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "has no torch, triton" in done.stderr


def test_dry_run(tmp_path):
    "The whole command, as `make gpu` calls it, tiny and interpreted."
    file = tmp_path / "gpu.csv"
    done = subprocess.run(["make", "gpu", f"PYTHON={sys.executable}", f"ARGS=--dry-run --csv {file}"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500)
    rows = gpu.read_rows(file)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert {r.what for r in rows} == {"powers", "right", "ceiling", "speed", "tune", "contract"} and not [r for r in rows if r.ok is False]
    assert {r.impl for r in rows if r.ok and r.what != "tune"} >= {"flash", "efficient", "packed", "decode", "flex", "torch flash"}
    assert all(x is None for r in rows for x in (r.ms, r.host_ms, r.tflops, r.gbs, r.peak_mib, r.ratio)), "a dry run measures nothing"
    assert any(r.impl == "torch cudnn" and r.note.startswith("absent: ") for r in rows) and not [r for r in rows if r.note.startswith("left out")]
    assert "causal forward, bf16, E = 128, L = 8192: not measured" in done.stdout
