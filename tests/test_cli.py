"The command as people run it: a process, files, an exit status."
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensorplay_attn import __version__
from tensorplay_attn.evidence import cli

COMMAND = Path(sys.executable).parent / "tensorplay-attn"
STRANGER = """
import os
import torch.nn.functional as F
def right(query, key, value, is_causal=False): return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
def wrong(query, key, value, is_causal=False): return F.scaled_dot_product_attention(query, key, value, is_causal=not is_causal)
def deadly(query, key, value, is_causal=False):
    print("on my way")
    os.abort()
"""


def run(*arguments, cwd, **env):
    return subprocess.run([COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | env)


def call(*arguments): return CliRunner().invoke(cli.main, list(arguments))


def test_verify_writes_its_reports(tmp_path):
    done = run("verify", "--case", "R4/bool-row/*", "--case", "R8/nan-in-hidden*", "--json", "out/a.json", "--html", "out/a.html", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "no failure of math, tiled" in done.stdout
    report, page = json.loads((tmp_path / "out/a.json").read_text()), (tmp_path / "out/a.html").read_text()
    decides = {"math": True, "tiled": True, "torch math": False, "torch flash": False, "torch flex": False}
    assert {c["name"]: c["decides"] for c in report["columns"]} == decides
    assert report["failures"] == 0 and any(r["status"] == "fail" for r in report["records"])  # PyTorch's, which decide nothing
    assert "where others differ" in done.stdout.lower() and "</html>" in page


def test_kernels_in_the_interpreter(tmp_path):
    done = run("verify", "--engine", "flash", "--engine", "efficient", "--no-torch", "--case", "R3/default/causal/L5-S9*",
               "--case", "R7/row/*/float16/*", cwd=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0 and "4 cases, 2 columns; no failure of flash, efficient" in done.stdout, done.stdout + done.stderr
    assert "flash cannot, 2 cases: FLASH_ATTENTION knows structural masks only" in done.stdout


def test_strangers_decide(tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    named = [x for n in ("right", "wrong", "deadly") for x in ("--impl", f"stranger:{n}")]
    done = run("verify", *named, "--no-torch", "--case", "R3/default/causal/L5-S9/float32/forward", cwd=tmp_path)
    assert done.returncode == 1 and "failures: stranger:wrong 1, stranger:deadly 1\n" in done.stdout, done.stdout + done.stderr
    assert "stranger:wrong: R3/" in done.stdout and "stranger:right: R3/" not in done.stdout
    assert done.stdout.count("the process died of SIGABRT") == 2  # told, and again above the lines that bring it back
    assert "--case 'R3/default/causal/L5-S9/float32/forward' --impl stranger:wrong\n" in done.stdout


def test_a_file_and_this_process(tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    ask = lambda name: call("verify", "--impl", f"{tmp_path}/stranger.py:{name}", "--engine", "math", "--no-torch", "--in-process", "--case", "R3/*")
    wrong, right = ask("wrong"), ask("right")
    assert wrong.exit_code == 1 and right.exit_code == 0 and "no failure of math, " in right.output


def test_lists():
    everything, quick = (call("verify", "--list", *more).output.split() for more in ((), ("--quick",)))
    assert len(everything) > 1000 and set(quick) < set(everything)
    assert call("verify", "--list", "--suite", "onnx").output.split()[0].startswith("onnx/23/")
    assert call("verify", "--list", "--quick", "--case", "R3/*").output.split() == [i for i in everything if i.startswith("R3/")]


@pytest.mark.parametrize("wrong, words", [
    (["--case", "nothing"], "--list names them"), (["--suite", "speed"], "'contract', 'catalogue', 'onnx', 'faults'"),
    (["--engine", "fast"], "'math', 'tiled'"),
    (["--impl", "no_colon", "--case", "R3/*"], "module:function"), (["--impl", "json:nothing", "--case", "R3/*"], "nothing"),
    (["--engine", "flash"], "set TRITON_INTERPRET=1"), (["--engine", "cudnn"], "CUDA"), (["--device", "nowhere"], "nowhere"),
    (["--impl", "json:dumps", "--unsupported", "sink: a slip", "--case", "R3/*"], "unsupported='sink'"),
    (["--impl", "json:dumps", "--unsupported", "sinks", "--case", "R3/*"], "needs a reason"), (["--unsupported", "sinks: later"], "there is none"),
    (["--case", "R5/*/backward", "--forward-only"], "--list names them"),
    (["--impl", "nowhere.py:f", "--case", "R3/*"], "nowhere.py"), (["--impl", "json:__name__", "--case", "R3/*"], "callable"),
])
def test_wrong_options_are_status_2(wrong, words):
    result = call("verify", *wrong)
    assert result.exit_code == 2 and words in result.output.replace("\n", " "), result.output


def test_without_onnx(monkeypatch):
    whole = cli.suite
    def suite(name, quick=False):
        if name == "onnx": raise ModuleNotFoundError("onnx is not installed: pip install 'tensorplay_attn[onnx]'")
        return whole(name, quick)
    monkeypatch.setattr(cli, "suite", suite)
    result = call("verify", "--engine", "math", "--no-torch", "--case", "R3/*")
    assert result.exit_code == 0 and "onnx suite was left out" in result.output and "pip install" in result.output
    assert call("verify", "--suite", "onnx").exit_code == 2


EXTRAS = ["jinja2", "matplotlib", "onnx", "onnxruntime", "psutil", "pytest", "hypothesis", "IPython", "nbdev", "fastcore"]


def without_extras(*arguments):
    "The command in a process that has nothing but what the package requires."
    code = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); from tensorplay_attn.evidence.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def test_without_any_extra(tmp_path):
    done = without_extras("verify", "--quick", "--no-torch", "--engine", "tiled", "--case", "R4/*L9-S4*", "--json", str(tmp_path / "a.json"))
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert "The onnx suite was left out: onnx is not installed: pip install 'tensorplay_attn[onnx]'" in done.stdout
    assert json.loads((tmp_path / "a.json").read_text())["notes"]
    done = without_extras("verify", "--case", "R3/*", "--html", str(tmp_path / "a.html"))
    assert done.returncode == 2 and "pip install 'tensorplay_attn[report]'" in done.stderr.replace("\n", " "), done.stderr
    done = without_extras("verify", "--case", "onnx/*")
    assert done.returncode == 2 and "onnx is not installed" in done.stderr.replace("\n", " ")


def test_the_rest_of_the_command():
    assert call("--version").output.strip() == f"tensorplay-attn, version {__version__}"
    assert {"verify", *cli.COMMANDS} <= set(call("--help").output.split())
    assert all(isinstance(cli.main.get_command(click.Context(cli.main), n), click.Command) for n in cli.COMMANDS)
    assert cli.main.get_command(click.Context(cli.main), "bench").name == "bench" and call("bench", "--help").exit_code == 0
    assert cli.main.get_command(click.Context(cli.main), "nothing") is None
