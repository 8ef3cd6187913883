"""The site: nbdev's processed notebooks and an API reference, laid out for Sphinx and built: python docs/adapt.py _docs

Exported cells stay on the page with their source; their signatures and parameters are gathered in the API reference."""
import ast
import enum
import functools
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import get_origin

import click
from execnb.nbio import mk_cell, write_nb
from fastcore.docments import docments
from nbdev import processors
from nbdev.process import NBProcessor
from site_pages import pages
from sphinx.cmd.build import build_main

ROOT = Path(__file__).parents[1]
ROOMS = {"00": "Ground", "10": "Mathematics", "19": "Kernels", "30": "Doors", "40": "The world", "47": "Evidence"}  # by their first number
TAGS = {"echo: false": "remove-input", "output: false": "remove-output", "include: false": "remove-cell", "code-fold: true": "hide-input"}
EMPTY = inspect.Parameter.empty

def mark_export(cell):
    "Keep an exported cell and mark it; drop what only tells nbdev where to export to."
    if "default_exp" in cell.directives_: del cell["source"]
    elif cell.directives_.keys() & {"export", "exports", "exporti"}: cell.metadata["tags"] = ["exported"]

def tag(cell):
    "Turn the directives that nbdev leaves for Quarto into tags that myst-nb knows; drop a cell that is left empty."
    if cell.cell_type != "code": return
    found = re.findall(r"^#\|\s*([\w-]+: \w+)", cell.source, re.M)
    if alt := re.search(r"^#\|\s*fig-alt: (.*)$", cell.source, re.M): cell.metadata["mystnb"] = {"image": {"alt": alt[1]}}
    cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip()
    cell.metadata["tags"] = cell.metadata.get("tags", []) + [TAGS[o] for o in found if o in TAGS]
    if not cell.source and not cell.outputs: del cell["source"]
    elif imports_only(cell.source): fold(cell)

def imports_only(source: str) -> bool:
    try: body = ast.parse(source).body
    except SyntaxError: return False  # an IPython command
    return bool(body) and all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in body)

def fold(cell):
    "Where names come from is a click away, not in the way."
    cell.metadata["tags"] = cell.metadata.get("tags", []) + ["hide-input"]
    cell.metadata["mystnb"] = {"code_prompt_show": "Imports", "code_prompt_hide": "Imports"}

class Pages(processors.FilterDefaults):
    "nbdev's filter, less what hides exported source, executes cells and writes for Quarto."
    less = {"FrontmatterProc", "add_show_docs", "insert_warning", "exec_show_docs", "add_links", "add_fold", "mv_exports"}

    def base_procs(self):
        procs = [mark_export if p.__name__ == "rm_export" else p for p in super().base_procs()]
        return [p for p in procs if p.__name__ not in self.less] + [tag]

def link(
    text: str,  # Markdown
    links: dict,  # name -> label of its entry in the API reference
) -> str:  # with the public names in backticks linked, but for letters, code blocks and headings
    def one(m): return f"[`{m[1]}`](#{links[m[1]]})" if m[1] in links else m[0]
    fences = re.split(r"(^```.*?^```\s*?$|^#.*?$)", text, flags=re.M | re.S)
    return "".join(t if i % 2 else re.sub(r"(?<![\[`])`([\w.]{2,})`(?![\]`])", one, t) for i, t in enumerate(fences))

def labels(
    module: str,  # its full name
) -> dict:  # public name -> label of its entry; labels know no capitals, so the second of `form` and `Form` gets a number
    names = import_module(module).__all__
    earlier = {n: sum(n.lower() == o.lower() for o in names[:i]) for i, n in enumerate(names)}
    return {n: f"{module}.{n}" + (f"-{k + 1}" if k else "") for n, k in earlier.items()}

def cell_text(text): return re.sub(r"([|*<$])", r"\\\1", " ".join(str(text or "").split()))

def type_name(anno):
    name = anno.__name__ if isinstance(anno, type) and not hasattr(anno, "__args__") else str(anno)
    return "" if anno in (EMPTY, None) else "`" + re.sub(r"torch\.(?=Tensor)|typing\.|collections\.abc\.", "", name).replace("|", "\\|") + "`"

def table(obj, signature):
    "Parameters and result with the comments that stand beside them in the source."
    notes = {n: p.docment for n, p in docments(obj, full=True).items()}
    if hasattr(obj, "_fields"): notes = dict(re.findall(r"^\s+(\w+):.*?# *(.*)$", inspect.getsource(obj), re.M))  # a named tuple
    rows = [(f"`{n}`", type_name(p.annotation), cell_text(notes.get(n))) for n, p in signature.parameters.items() if n != "self"]
    result = signature.return_annotation
    if result not in (EMPTY, None): rows.append(("*returns*", type_name(result), cell_text(notes.get("return"))))
    return "\n".join(["| | type | |\n|---|---|---|", *(f"| {' | '.join(r)} |" for r in rows)]) if rows else ""

def value(obj):
    "What a constant is; of a large table only what it has."
    text = repr(obj)
    if len(text) <= 400 and " at 0x" not in text: return f"```python\n{text}\n```"
    if isinstance(obj, dict): return "A table of " + ", ".join(f"`{k}`" for k in obj) + "."
    return f"{len(obj)} of `{type(obj[0]).__name__}`." if isinstance(obj, (list, tuple)) else f"A `{type(obj).__name__}`."

def described(obj):
    "Signature, docstring and table of a function or class; the members or the value of anything else."
    obj = getattr(obj, "fn", obj)  # a Triton function wraps the Python one
    doc = re.sub(r"(?<=\w)\*(?=\w)", r"\\*", inspect.cleandoc(obj.__doc__ or ""))
    if isinstance(obj, property): return doc
    if isinstance(obj, click.Command): return f"```text\n{obj.get_help(click.Context(obj, info_name=obj.name))}\n```"
    if not callable(obj) or not hasattr(obj, "__name__") or get_origin(obj): return value(obj)
    if isinstance(obj, enum.EnumType): return "\n\n".join([doc, ", ".join(f"`{m.name} = {m.value}`" for m in obj)])
    try: signature = inspect.signature(obj)
    except ValueError: return f"```python\nclass {obj.__name__}({obj.__base__.__name__})\n```\n\n{doc}"  # an exception, an int
    names = ", ".join(str(p.replace(annotation=EMPTY)) for p in signature.parameters.values())
    call = re.sub(r"<(?:function |class |built-in function )?'?([\w.]+).*?>", r"\1", f"{obj.__name__}({names})")
    return "\n\n".join(filter(None, [f"```python\n{call}\n```", doc, table(obj, signature)]))

def reference(
    module: str,  # its full name
    source: str,  # the notebook that it is exported from
) -> str:  # Markdown: the page of one module
    mod, label = import_module(module), labels(module)
    parts = [f"# {module.partition('.')[2]}", mod.__doc__ or "", f"Derived and checked in [](../{source}.ipynb)."]
    for name in mod.__all__:
        obj = getattr(mod, name)
        parts += [f"({label[name]})=\n## {name}", described(obj)]
        if cell := SOURCES.get(label[name]): parts.append(f"[Its cell](#{cell}) on the page that derives it.")
        for n in vars(obj) if isinstance(obj, type) and not isinstance(obj, enum.EnumType) else ():
            f = getattr(obj, n)
            if n[0] != "_" and (inspect.isroutine(f) or isinstance(f, property)) and f.__doc__: parts += [f"### {name}.{n}", described(f)]
    return "\n\n".join(parts) + "\n"

def exported() -> dict:  # module -> notebook, in the order of the notebooks
    "Which notebook each module comes from, by the line nbdev writes at its head."
    found = {}
    for path in (ROOT / "tensorplay_attn").rglob("*.py"):
        head = re.search(r"File to edit: \S*?nbs/(\w+)\.ipynb", path.read_text(encoding="utf-8")[:2000])
        if head: found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = head[1]
    return dict(sorted(found.items(), key=lambda item: item[::-1]))

def toctree(caption, names): return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])

def defined(source: str, names) -> list:  # of those names, the ones that a cell defines
    "By its text, so that nothing has to run."
    return [n for n in names if re.search(rf"^(?:def|class) {re.escape(n)}\b|^(?:\w+, )*{re.escape(n)}(?:, \w+)*(?:: [^=]+)? = ", source, re.M)]

def with_sources(
    cells: list,  # of a processed notebook
    module: str,  # that it exports
) -> list:  # the cells, each exported one with an anchor and a line that leads to its entries in the API reference
    found = []
    for cell in cells:
        if "exported" in cell.metadata.get("tags", []) and (names := defined(cell.source, labels(module))):
            anchors = "\n".join(f"({labels(module)[n].replace('tensorplay_attn', 'source', 1)})=" for n in names[:1])
            links = ", ".join(f"[{n}](#{labels(module)[n]})" for n in names)
            found.append(mk_cell(f"{anchors}\n{{.source}}\nReference: {links}", "markdown"))
            SOURCES.update({labels(module)[n]: labels(module)[names[0]].replace("tensorplay_attn", "source", 1) for n in names})
        found.append(cell)
    return found

SOURCES = {}  # label of an entry -> label of the cell that defines it

def where(name, names, modules) -> str:
    "A line below the title: the room, the pages this one builds on, and those that build on it."
    needs = {s: set() for s in names}
    for m, s in modules.items():
        text = inspect.getsource(import_module(m))
        base = m.split(".")[:-1]
        for dots, rest in re.findall(r"^from (\.+)(\w[\w.]*)? import", text, re.M):
            needs.setdefault(s, set()).add(modules.get(".".join([*base[:len(base) - len(dots) + 1], rest])))
    here = [n for n in names if room(n) == room(name)]
    above, below = sorted(x for x in needs[name] if x and x != name), [n for n in names if name in needs[n] and n != name]
    line = [f"{room(name)}, page {here.index(name) + 1} of {len(here)}."]
    for what, who in (("Builds on", above), ("Used by", below)):
        if who: line.append(f"{what} " + ", ".join(f"[](./{w}.ipynb)" for w in who[:8]) + (f" and {len(who) - 8} more." if len(who) > 8 else "."))
    return "{.where}\n" + " ".join(line)

def merged(cells: list) -> list:
    "Folded cells that follow each other are one."
    kept = cells[:1]
    for cell in cells[1:]:
        if all("hide-input" in c.metadata.get("tags", []) for c in (kept[-1], cell)): kept[-1].source += f"\n\n{cell.source}"
        else: kept.append(cell)
    return kept

def room(name): return ROOMS[max(k for k in ROOMS if k <= name)]

def book(names, heads) -> str:
    "Every notebook in order, with what it is about."
    parts = []
    for title, here in groupby(names, room):
        parts += [f"### {title}", "\n".join(f"- [{n[:2]} {heads[n][0]}]({n}.ipynb): {heads[n][1]}" for n in here)]
    return "\n\n".join(parts)

def lay_out(out: Path):
    "Write the sources that Sphinx reads."
    modules, names = exported(), sorted(p.stem for p in (ROOT / "nbs").glob("[0-9]*.ipynb"))
    modules = {m: s for m, s in modules.items() if s in names}
    links = functools.reduce(lambda a, m: labels(m) | a, modules, {})  # a name that two modules have is the lower one's,
    own = {s: links | labels(m) for m, s in modules.items()}  # but for the page of the other
    heads, module_of = {}, {s: m for m, s in modules.items()}
    for name in names:
        nb = NBProcessor(ROOT / f"nbs/{name}.ipynb", procs=Pages().procs(), process=True).nb
        first = "".join(json.loads((ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8"))["cells"][0]["source"])
        title, line = re.match(r"# (.*?)\n+> (.*)", first, re.S).groups()
        heads[name] = title, " ".join(re.sub(r"^> ", "", line, flags=re.M).split("\n\n")[0].split())
        for cell in nb.cells:
            if cell.cell_type == "markdown": cell.source = link(cell.source, own.get(name, links))
        nb.cells.insert(1, mk_cell(where(name, names, modules), "markdown"))
        nb.cells = merged(nb.cells)
        if name in module_of: nb.cells = with_sources(nb.cells, module_of[name])
        save_page(nb, out / f"{name}.ipynb")
    rooms = [toctree(title, list(here)) for title, here in groupby(names, room)]
    trees = [toctree("Start", ["start", "gallery", "cost", "coming_from", "glossary"]), *rooms]
    trees += [toctree("API", ["names"] + [f"api/{m.partition('.')[2]}" for m in modules]), toctree("Project", ["contributing", "changelog"])]
    for name, nb in pages(book(names, heads)).items():
        for cell in nb.cells:
            if cell.cell_type == "markdown": cell.source = link(cell.source, links)
        if name == "index": nb.cells.append(mk_cell("\n\n".join(trees), "markdown"))
        save_page(nb, out / f"{name}.ipynb")
    texts = {name.lower(): (ROOT / f"{name}.md").read_text(encoding="utf-8") for name in ("CONTRIBUTING", "CHANGELOG")}
    texts = {name: link(text, links) for name, text in texts.items()}
    texts |= {f"api/{m.partition('.')[2]}": link(reference(m, s), own[s]) for m, s in modules.items()}
    for name, text in texts.items(): (out / f"{name}.md").write_text(text, encoding="utf-8")

def save_page(nb, path):
    nb.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    write_nb(nb, path)

def build(
    target: Path,  # folder of the built site; what was there is replaced
) -> int:  # Sphinx's exit status
    "Build in a temporary folder; any warning is an error."
    os.chdir(ROOT)  # where nbdev looks for settings.ini
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "source/api").mkdir(parents=True)
        lay_out(Path(tmp) / "source")
        args = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs"), f"{tmp}/source", f"{tmp}/site"]
        if status := build_main(args): return status
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(f"{tmp}/site", target, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    return 0

if __name__ == "__main__": sys.exit(build(Path(sys.argv[1]).resolve()))
