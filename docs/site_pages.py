"The site's own pages: docs/pages/*.md. Their Python blocks are executed when the site is built, and what they say is shown."
import ast
import base64
import json
import re
from html import escape
from pathlib import Path

import torch
from execnb.nbio import dict2nb, mk_cell
from execnb.shell import CaptureShell

from tensorplay_attn import masks, scores

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

def literal(value) -> str:
    "A value as one writes it: flags as 0 and 1, for they are many."
    if not isinstance(value, torch.Tensor): return f'"{value}"' if isinstance(value, str) else repr(value)
    kind = {torch.bool: ".bool()", torch.int32: ".int()"}.get(value.dtype, "")
    return f"torch.tensor({(value.int() if value.dtype == torch.bool else value).tolist()}){kind}"

def written(node, names: dict, public) -> str:
    "An expression of a table of examples with the public functions left, and what they are called with computed."
    if isinstance(node, ast.Name) and node.id in public: return node.id
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in public):
        return literal(eval(compile(ast.Expression(node), "example", "eval"), names))
    parts = [written(a, names, public) for a in node.args]
    line = f"{node.func.id}({', '.join(parts)})"
    return line if len(line) < 100 else f"{node.func.id}(\n    " + ",\n    ".join(parts) + ")"

def examples(
    module,  # with a table of examples and their functions
    table: str,  # its name
) -> dict:  # name of an example -> the lines that make it: learned tensors, then the function
    "What the table does, in lines of one's own: read from its source, so that nothing is said twice."
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    named = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    entries = next(n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == table)
    entries = entries if isinstance(entries, ast.Dict) else entries.generators[0].iter.func.value
    public, found = {*masks.__all__, *scores.__all__}, {}
    for key, node in zip(entries.keys, entries.values):
        names, lines, call = vars(module) | {"z": masks.Sizes(*SIZES)}, [], isinstance(node, ast.Call)
        make, *sizes = node.args if call else [named.get(getattr(node, "id", None), node)]
        for name, of in zip(make.args.args[1:], sizes):
            shape = eval(compile(ast.Expression(of.body), "sizes", "eval"), names)
            size = ", ".join(map(str, shape)) or "()"
            made = f"(1 + torch.randn({size}).tanh() / 2).requires_grad_()" if node.keywords else f"torch.randn({size}, requires_grad=True)"
            lines.append(f"{name.arg} = {made}")
            names[name.arg] = None
            public = public | {name.arg}
        if isinstance(make, ast.FunctionDef):
            *before, last = make.body
            exec(compile(ast.Module(before, []), "example", "exec"), names)
        body = last.value if isinstance(make, ast.FunctionDef) else make.body
        found[key.value] = "\n".join([*lines, f"{'score' if call else 'mask'}_mod = {written(body, names, public)}"])
    return found

def made(lines: str, name: str):
    "What those lines call so, from random numbers that stay the same."
    torch.manual_seed(0)
    names = vars(masks) | vars(scores)
    exec(lines, names)
    return names[name]

def entries(title: str, table: str, drawn) -> str:
    "A heading, pictures and three lines of use for each example."
    parts = [f"## {title}"]
    for name, (lines, svgs, use) in drawn.items():
        parts += [f"({table}-{name})=\n### {name}", f'<div class="masks">{svgs}</div>', f"```python\n{lines}\n{use}\n```"]
    return "\n\n".join(parts)

def each(x, title: str, tell=lambda x: "") -> str:
    "A picture of every batch entry and head that is not like the one before it."
    B, H = x.shape[:2]
    by_batch, by_head = (not x.equal(x[i].expand_as(x)) for i in (slice(0, 1), (slice(None), slice(0, 1))))
    where = [(b, h) for b in range(B if by_batch else 1) for h in range(H if by_head else 1)]
    label = lambda b, h: ", ".join([f"batch entry {b}"] * by_batch + [f"head {h}"] * by_head) or "every batch entry and head"
    return "".join(picture(x[b, h], f"{title}, {label(b, h)}{tell(x[b, h])}") for b, h in where)

def mask_entries() -> str:
    "Every entry of CATALOGUE; what the lines make is what the table makes."
    drawn, (B, H, L, S) = {}, SIZES
    use = 'block_mask = create_block_mask(mask_mod, B, H, L, S, device="cpu")\nout = omni_attention(q, k, v, block_mask=block_mask)'
    for name, lines in examples(masks, "CATALOGUE").items():
        seen, asked = (masks.create_mask(mod, B, H, L, S, "cpu") for mod in (made(lines, "mask_mod"), masks.CATALOGUE[name](*SIZES)))
        assert seen.equal(asked), f"the gallery's lines for {name} make another mask"
        svgs = each(seen.float(), f"Mask {name}", lambda x: f": {int(x.sum())} of {x.numel()} pairs are seen")
        drawn[name] = lines, svgs, use
    return entries("Masks", "mask", drawn)

def score_entries() -> str:
    "Every entry of SCORES: what it makes of a score that is 1 everywhere."
    drawn, (B, H, L, S) = {}, SIZES
    for name, lines in examples(scores, "SCORES").items():
        with torch.no_grad():
            x = made(lines, "score_mod")(torch.ones(B, H, L, S), *masks.index_tensors(B, H, L, S, "cpu")).expand(B, H, L, S)
        low, high = (f(x[x.isfinite()]).item() for f in (torch.min, torch.max))
        dark = torch.where(x.isfinite(), 0.1 + 0.9 * (x - low) / (high - low) if high > low else torch.full_like(x, 0.5), 0)
        svgs = each(dark, f"Scores after {name}, from {low:.2f} to {high:.2f}")
        drawn[name] = lines, svgs, "out = omni_attention(q, k, v, score_mod)"
    told = "What each makes of scores that are all 1: the darker, the larger. What is learned is random here, and gets a gradient."
    return entries(f"Functions of scores\n\n{told}", "score", drawn)

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
    heads = "".join(f'<th scope="col"><span>{escape(n)}</span></th>' for n in ["ours, CPU", *(PEERS[n].title for n in names)])
    rows = [f'<tr><th scope="row"><b>{row}</b> {escape(TITLES[row])}</th>'
            + "".join(mark(cell) for cell in [ours[row]["tiled"], *(kept["cells"][row].get(n, "-") for n in names)]) + "</tr>"
            for row in ours if row in kept["cells"]]
    said = ("Rows of the rule; ✓ with how many cases were right, ✗ with how many of how many were wrong, · could not be asked. "
            "Ours: a part of every row, judged while this page was built. ")
    return (said + "The others: the cases and versions that [page 51](51_peers.ipynb) names.\n\n"
            f'<div class="verdict"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>')

def mark(cell: str) -> str:  # "12 right", "3 wrong of 9" or "-"
    "A cell of the verdict."
    if cell == "-": return '<td title="could not be asked">·</td>'
    kind, text = ("right", cell.replace(" right", " ✓")) if cell.endswith(" right") else ("wrong", re.sub(r" (wrong|died)\b.* of ", "/", cell) + " ✗")
    return f'<td class="{kind}">{text}</td>'

def as_table(columns, rows) -> str:
    "A Markdown table of texts."
    line = lambda cells: "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"
    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])

def bench() -> str:
    "What bench.json says: machine, date, curves, every table."
    from tensorplay_attn.evidence.benchmark import conclusion, report_svg, sections
    report = json.loads((NBS / "bench.json").read_text(encoding="utf-8"))
    svg = base64.b64encode(report_svg(report).encode()).decode()
    figure = (f'<div class="figure"><img alt="Process time against length, ours and PyTorch, causal and window, forward and backward" '
              f'src="data:image/svg+xml;base64,{svg}"></div>\n\n*A causal call takes PyTorch\'s time, in both directions; a window that is '
              "skipped grows as the length, not as its square.*")
    head, *lines = conclusion(report)
    tables = [as_table(*section) for section in sections(report["records"])]
    return "\n\n".join([f"{head}.", figure, *tables, "```text\n" + "\n".join(lines) + "\n```"])

def gpu(
    path: Path = NBS / "gpu.csv",  # what `make gpu` wrote, if anybody kept it
) -> str:
    "Figures of GPUs, or that there are none."
    from tensorplay_attn.evidence.gpu import read_rows, table, verdict
    if not path.exists():
        return "No figure: our kernels have not been timed on a GPU. `make gpu` does it, on a machine with one ([page 57](57_gpu.ipynb))."
    rows = read_rows(path)
    shown = table(rows)
    return "\n\n".join([f"{rows[0].machine}; {rows[0].versions}; {rows[0].date}. {shown.caption}.",
        as_table([c.header for c in shown.columns], zip(*(c.cells for c in shown.columns))), "\n".join(f"- {line}" for line in verdict(rows))])

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
            said = [o for o in cell.outputs if o.get("name") == "stderr"]
            if said: raise RuntimeError(f"a block of a page warned: {said}\n{cell.source}")
        made.append(cell)
    return made

def pages(
    book: str,  # the list of notebooks, Markdown
) -> dict:  # name -> notebook
    "Every page of docs/pages."
    inserts = {"masks": mask_entries, "scores": score_entries, "picture": front, "verdict": verdict, "bench": bench, "gpu": gpu, "book": lambda: book}
    made = {}
    for path in sorted(HERE.glob("*.md")):
        text = re.sub(r"<!-- (\w+) -->", lambda m: inserts[m[1]](), path.read_text(encoding="utf-8"))
        made[path.stem] = dict2nb({"cells": cells(text), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    return made
