"The site: it builds without a warning, holds together, fetches nothing, and is near to what one looks for."
import http.server
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections import deque
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
import torch
from browser import Browser
from filelock import FileLock
from fontTools.ttLib import TTFont
from test_frame import ROOT, load, run, sources

import tensorplay_attn
from tensorplay_attn.evidence.cli import main
from tensorplay_attn.evidence.gpu import Ledger, Row
from tensorplay_attn.functional import scaled_dot_product_attention
from tensorplay_attn.masks import CATALOGUE
from tensorplay_attn.scores import SCORES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LARGE = {"47_refusals.html"}  # hundreds of calls, in colours


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    "Built once, whoever asks first."
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists(): run(sys.executable, "docs/adapt.py", str(folder))
    return folder


@pytest.fixture(scope="session")
def pages(site): return {p.relative_to(site).as_posix(): p.read_text(encoding="utf-8") for p in sorted(site.rglob("*.html"))}


def article(html): return re.search(r"<article.*?</article>", html, re.S)[0] if "<article" in html else ""


def test_pages_are_whole(site, pages):
    "Every notebook has its page; formulas are static, in a font that is there."
    assert {f"{n}.html" for n in sources()} <= {*pages}
    for path, html in pages.items():
        prose = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", html, flags=re.S)
        assert not re.search(r"\$\$|#\| *\w", prose), f"{path} shows raw text"
    shown = [n for n, cells in sources().items() if any(c["cell_type"] == "markdown" and "$$" in "".join(c["source"]) for c in cells)]
    assert shown and all('<math display="block">' in pages[f"{n}.html"] for n in shown)
    letters = set("".join(re.findall(r"<math.*?</math>", "".join(pages.values()), re.S)))
    with TTFont(site / "_static/math.woff") as font:
        assert "MATH" in font and len(letters & set(map(chr, font.getBestCmap()))) > 100, "the formulas' own font"


def test_nothing_is_fetched_from_elsewhere(site, pages):
    "Neither by a page nor by a style sheet; a link that a reader follows may lead out."
    for path, html in pages.items():
        found = re.findall(r'<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*?(?:src|href|data)="(?:https?:)?//[^"]*', html)
        assert not found, f"{path} fetches from elsewhere: {found[:3]}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_links_lead_somewhere(site, pages):
    "Every address within the site is a file, and what comes after # is on that page."
    ids = {path: set(re.findall(r'\bid="([^"]+)"', html)) for path, html in pages.items()}
    lost = []
    for path, html in pages.items():
        for address in set(re.findall(r'\b(?:href|src)="([^"]+)"', re.sub(r"<pre.*?</pre>", "", html, flags=re.S))):
            if urlparse(address).scheme: continue
            target, anchor = urldefrag(urljoin(path, unescape(address)))
            target = unquote(target).split("?")[0]
            if not (site / target).is_file(): lost.append((path, address))
            elif anchor and target in ids and unquote(anchor) not in ids[target]: lost.append((path, address))
    assert lost == []


def test_pictures_say_what_they_show(pages):
    for path, html in pages.items():
        for tag in re.findall(r"<img\b[^>]*>", article(html)): assert re.search(r'\balt="[^"]* [^"]+"', tag), f"{path}: {tag[:300]}"
        for tag in re.findall(r"<svg\b[^>]*class=\"mask\"[^>]*>", html): assert re.search(r'aria-label="[^"]+"', tag), f"{path}: {tag[:100]}"


def test_pages_are_light(site, pages):
    heavy = {p for p in pages if (site / p).stat().st_size > 500_000 and "<svg" not in article(pages[p])}
    assert heavy <= LARGE, heavy - LARGE
    assert max((site / p).stat().st_size for p in pages) < 1_000_000


def clicks(pages, start="index.html"):
    "How many links of a page's own text lead to each page."
    found, todo = {start: 0}, deque([start])
    while todo:
        page = todo.popleft()
        for address in re.findall(r'href="([^"#?]+)', article(pages[page])):
            target = urljoin(page, unescape(address))
            if target in pages and target not in found: found[target] = found[page] + 1; todo.append(target)
    return found


def test_a_strangers_path(pages):
    "From the front page: to the gradients in three clicks, to one's own kernel in two, to a first call in one."
    near = clicks(pages)
    assert near["13_gradients.html"] <= 3 and near["63_your_kernel.html"] <= 2 and near["start.html"] == 1
    assert not [p for p in pages if re.match(r"\d\d_", p) and p not in near]


@pytest.fixture(scope="session")
def site_pages(): return load("site_pages")


@pytest.mark.parametrize("block, said", [("1 / 0", "failed"), ("import sys; print('no', file=sys.stderr)", "warned")])
def test_a_page_whose_block_fails_ends_the_build(site_pages, block, said):
    with pytest.raises(RuntimeError, match=f"a block of a page {said}"): site_pages.cells(f"text\n\n```python\n{block}\n```\n")


def test_every_public_name_is_shown_at_work(site_pages):
    "Those of the package and of its doors, but for what only other pages import."
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/pages/names.md").read_text(), re.M | re.S))
    doors = {"functional": ["scaled_dot_product_attention"], "varlen": ["varlen_attn", "varlen_attn_out", "AuxRequest"], "sdpa": ["SDPA"],
             "externalize": ["export_composite"], "bias": ["CausalVariant", "CausalBias", "causal_upper_left", "causal_lower_right"]}
    assert {*doors} <= {*tensorplay_attn.__all__}
    names = [*tensorplay_attn.__all__, *sum(doors.values(), [])]
    assert [n for n in names if not re.search(rf"\b{n}\b", blocks)] == []


def test_the_gallery_shows_every_entry(pages):
    html = pages["gallery.html"]
    for kind, table in (("mask", CATALOGUE), ("score", SCORES)):
        for name in table:
            part = re.search(rf'id="{kind}-{name.replace("_", "-")}".*?</section>', html, re.S)
            assert part and 'class="mask"' in part[0] and f"{kind}_mod" in part[0], name


def test_cost_says_what_was_measured_and_what_was_not(site_pages, pages, tmp_path):
    kept = json.loads((ROOT / "nbs/bench.json").read_text())
    assert kept["machine"]["cpu"] in pages["cost.html"] and kept["machine"]["date"] in pages["cost.html"]
    assert (ROOT / "nbs/gpu.csv").exists() or "No figure" in site_pages.gpu()
    ledger = Ledger(tmp_path / "gpu.csv", {"machine": "a GPU", "versions": "torch 9", "date": "2026-01-02"})
    ledger.write([Row("speed", "causal", impl, 1, 1, 1, 8192, 8192, 128, "bf16", "forward", ms=ms, tflops=t, ok=True)
                  for impl, ms, t in (("flash", 2., 500.), ("flex", 4., 250.))])
    ledger.close()
    said = site_pages.gpu(tmp_path / "gpu.csv")
    assert said.startswith("a GPU; torch 9; 2026-01-02.") and "| 500 |" in said and "above FlexAttention's 250: met" in said


def fences(language):
    "What stands in the prose of the notebooks and cannot be a cell."
    for name, cells in sources().items():
        for cell in cells:
            if cell["cell_type"] == "markdown":
                yield from ((name, code) for code in re.findall(rf"^```{language}\n(.*?)^```", "".join(cell["source"]), re.M | re.S))


def test_code_in_prose_runs():
    "It names what a reader has: a kernel, or its wrapper."
    def my_kernel(q, k, v, causal, sm_scale): return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    for name, code in fences("python"):
        names = {"scaled_dot_product_attention": scaled_dot_product_attention, "my_kernel": my_kernel, "attention": scaled_dot_product_attention}
        exec(code, names)
        torch.testing.assert_close(names["attention"](q, k, v, is_causal=True), scaled_dot_product_attention(q, k, v, is_causal=True), msg=name)
        assert callable(names.get("test_mine", print)), name


def test_commands_in_prose_exist():
    "Their options too; nothing is run."
    shown = "".join(code for language in ("bash", "text") for _, code in fences(language)) + (ROOT / "docs/pages/index.md").read_text()
    lines = [shlex.split(line, comments=True) for line in shown.splitlines() if line.startswith(("make ", "tensorplay-attn "))]
    assert len(lines) >= 8
    for program, command, *args in lines:
        if program == "make": run("make", "-n", command, *args)
        else: main.get_command(None, command).make_context(command, args)


def test_a_formula_that_cannot_be_read_fails_the_site(tmp_path):
    (tmp_path / "index.md").write_text("# Title\n\nText.\n\n$$\\frac{a}$$\n")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-c", str(ROOT / "docs"), str(tmp_path), str(tmp_path / "out")],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and re.search(r"index\.md:5: \w+: formula: ", done.stderr), done.stderr


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_in_a_browser(site, pages, tmp_path):
    "No page asks another host for anything, none complains, formulas and pictures have a size, and nothing is wider than a phone."
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Quiet(*a, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, browser = f"http://127.0.0.1:{server.server_port}/", Browser(CHROMIUM, tmp_path)
    broken = "[...document.querySelectorAll('article img, article math')].filter(x => !x.getBoundingClientRect().height).length"
    try:
        for n, path in enumerate(p for p in pages if Path(p).name not in ("genindex.html", "search.html")):
            browser.size(390, 844, dark=n % 2 == 1)
            asked, wrong = browser.open(host + path)
            assert [a for a in asked if not a.startswith((host, "data:"))] == [] and wrong == [], (path, wrong)
            assert browser.ask(broken) == 0, f"{path}: a formula or a picture without a size"
            assert browser.ask("document.documentElement.scrollWidth") <= 390, f"{path} is wider than a phone"
        browser.size(1280, 900)
        asked, wrong = browser.open(host + "search.html?q=softcap")
        assert [a for a in asked if not a.startswith((host, "data:"))] == [] and wrong == []
        assert browser.until("document.querySelectorAll('#search-results li a').length >= 3"), "the search finds nothing"
        browser.open(host + "start.html")
        browser.press("/")
        assert browser.until("document.activeElement.name == 'q'"), "the key / leads to the search"
        browser.ask("document.activeElement.blur()")
        browser.press("ArrowRight")
        assert browser.until("location.pathname == '/gallery.html'"), "the right arrow turns the page"
    finally:
        browser.close()
        server.shutdown()
