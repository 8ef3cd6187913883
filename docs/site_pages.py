"The site's own pages: docs/pages/*.md. Their Python blocks are executed when the site is built, and what they say is shown."
import json
import re
from html import escape
from pathlib import Path

import torch
from execnb.nbio import dict2nb, mk_cell
from execnb.shell import CaptureShell

from tensorplay_attn.masks import CATALOGUE, create_mask, index_tensors
from tensorplay_attn.scores import SCORES

HERE, NBS = Path(__file__).parent / "pages", Path(__file__).parents[1] / "nbs"
SIZES = 2, 3, 12, 16  # batch, heads, queries, keys of the gallery's pictures

def picture(
    rows: torch.Tensor,  # (L, S) numbers from 0 to 1: how dark
    alt: str,  # what it shows
) -> str:  # an SVG that follows the page's colours
    "Squares for a matrix, one rectangle for equal neighbours."
    L, S = rows.shape
    parts = []
    for i, row in enumerate(rows.tolist()):
        j = 0
        while j < S:
            n = next((n for n in range(j, S) if abs(row[n] - row[j]) > 1e-3), S)
            if row[j] > 1e-3: parts.append(f'<rect x="{j}" y="{i}" width="{n - j}" height="1" opacity="{row[j]:.2f}"/>')
            j = n
    box = f'viewBox="-0.1 -0.1 {S + 0.2} {L + 0.2}" width="{12 * S}" shape-rendering="crispEdges"'
    return (f'<svg class="mask" role="img" aria-label="{escape(alt, quote=True)}" {box}>'
            f'<rect class="frame" width="{S}" height="{L}"/>{"".join(parts)}</svg>')

def masks() -> str:
    "Every entry of CATALOGUE."
    parts, (B, H, L, S) = ["## Masks"], SIZES
    for name, make in CATALOGUE.items():
        seen = create_mask(make(*SIZES), B, H, L, S, "cpu").float()
        shown = {b: seen[b, 0] for b in range(B) if b == 0 or not seen[b].equal(seen[0])}
        if not seen[:, 1:].equal(seen[:, :-1]): shown = {f"0, head {h}": seen[0, h] for h in range(H)}
        svgs = "".join(picture(x, f"Mask {name}, batch entry {b}: {int(x.sum())} of {L * S} pairs are seen") for b, x in shown.items())
        code = (f'mask_mod = CATALOGUE["{name}"](B, H, L, S)\nblock_mask = create_block_mask(mask_mod, B, H, L, S, device="cpu", BLOCK_SIZE=4)\n'
                "out = omni_attention(q, k, v, block_mask=block_mask)")
        parts += [f"(mask-{name})=\n### {name}", f'<div class="masks">{svgs}</div>', f"```python\n{code}\n```"]
    return "\n\n".join(parts)

def scores() -> str:
    "Every entry of SCORES: what it makes of a score that is 1 everywhere."
    parts, (B, H, L, S) = ["## Functions of scores", "What each makes of scores that are all 1: the darker, the larger; the first head."], SIZES
    for name, make in SCORES.items():
        score_mod, _ = make(*SIZES)
        with torch.no_grad(): x = score_mod(torch.ones(B, H, L, S), *index_tensors(B, H, L, S, "cpu")).expand(B, H, L, S)[0, 0]
        finite = x[x.isfinite()]
        low, high = finite.min(), finite.max()
        dark = torch.where(x.isfinite(), 0.1 + 0.9 * (x - low) / (high - low) if high > low else torch.full_like(x, 0.5), 0)
        alt = f"Scores after {name}: from {low:.2f} to {high:.2f}"
        code = f'score_mod, learned = SCORES["{name}"](B, H, L, S)\nout = omni_attention(q, k, v, score_mod)\nout.shape'
        parts += [f"(score-{name})=\n### {name}", f'<div class="masks">{picture(dark, alt)}</div>',
                  f"From {low:.2f} to {high:.2f}.", f"```python\n{code}\n```"]
    return "\n\n".join(parts)

def front() -> str:
    "Causal, a window and two tokens that everybody sees."
    i, j = torch.arange(16)[:, None], torch.arange(24)[None, :]
    keep = (j <= i + 8) & ((j > i + 2) | (j < 2))
    return f'<div class="masks">{picture(keep.float(), "A mask: causal, a window of six keys, and two tokens that every query sees")}</div>'

def verdict() -> str:
    "What was found on other implementations, as kept in peers.json; ours on a part of every row, asked now."
    from tensorplay_attn.evidence.conformance import TITLES, engine_column, run
    from tensorplay_attn.evidence.peers import PEERS, cells_of, plain_cases
    cases = [c for c in plain_cases(True) if re.fullmatch(r"R\d+", c.row)]
    ours = cells_of(run(cases, [engine_column("tiled", "cpu")]))
    kept = json.loads((NBS / "peers.json").read_text(encoding="utf-8"))
    names = list(next(iter(kept["cells"].values())))
    lines = ["| row | ours, CPU | " + " | ".join(PEERS[n].title for n in names) + " |", "|---" * (len(names) + 2) + "|"]
    short = lambda cell: cell.replace(" right", " ✓") if "wrong" not in cell else cell.replace(" wrong of ", "/") + " ✗"
    lines += [f"| {row}: {TITLES[row]} | {short(ours[row]['tiled'])} | " + " | ".join(short(kept["cells"][row].get(n, "-")) for n in names) + " |"
        for row in ours if row in kept["cells"]]
    said = ("Rows of the rule; ✓ after how many cases were right, ✗ after how many of how many were wrong, - could not be asked. "
            "Ours: a part of every row, judged while this page was built. ")
    return said + "The others: every case, on the versions that [page 51](51_peers.ipynb) names.\n\n" + "\n".join(lines)

def cells(
    text: str,  # Markdown
) -> list:  # cells of a notebook, executed
    "A page's words and its Python blocks, each with what it says; an error ends the build."
    made, shell = [], CaptureShell()
    for i, part in enumerate(re.split(r"^```python\n(.*?)^```\n?", text, flags=re.M | re.S)):
        if not part.strip(): continue
        cell = mk_cell(part.strip(), "code" if i % 2 else "markdown")
        if i % 2:
            cell.outputs = shell.run(cell.source)
            if shell.exc: raise RuntimeError(f"a block of a page failed:\n{cell.source}") from shell.exc
        made.append(cell)
    return made

def pages(
    book: str,  # the list of notebooks, Markdown
) -> dict:  # name -> notebook
    "Every page of docs/pages."
    inserts = {"masks": masks, "scores": scores, "picture": front, "verdict": verdict, "book": lambda: book}
    made = {}
    for path in sorted(HERE.glob("*.md")):
        text = re.sub(r"<!-- (\w+) -->", lambda m: inserts[m[1]](), path.read_text(encoding="utf-8"))
        made[path.stem] = dict2nb({"cells": cells(text), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    return made
