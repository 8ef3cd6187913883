"Each notebook as nbdev_test runs it, in a process of its own, so that a crash names its notebook."
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
RUN = "import sys; from nbdev.test import nbdev_test; nbdev_test(path=sys.argv[1], n_workers=0, do_print=True)"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[p.stem for p in NOTEBOOKS])
def test_notebook(path):
    done = subprocess.run([sys.executable, "-c", RUN, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=900)
    said = f"{path.name} ended with status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0 and f"- Completed {path}" in done.stdout, said
