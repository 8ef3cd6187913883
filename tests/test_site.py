"The site: it builds without a warning, holds together, fetches nothing, and is near to what one looks for."
import http.server
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
from browser import Browser
from filelock import FileLock
from fontTools.ttLib import TTFont
from test_frame import ROOT, run, sources

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LARGE = {"47_refusals.html", "49_suites.html", "57_gpu.html"}  # their source is shown in colours: hundreds of calls, or a whole report


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
        for tag in re.findall(r"<img\b[^>]*>", article(html)): assert re.search(r'\balt="[^"]+"', tag), f"{path}: {tag[:100]}"
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


def test_a_page_whose_block_fails_ends_the_build():
    program = "import sys; sys.path.insert(0, 'docs'); from site_pages import cells; cells('text\\n\\n```python\\n1 / 0\\n```\\n')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "a block of a page failed" in done.stderr


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
    finally:
        browser.close()
        server.shutdown()
