"Write README.md from nbs/index.ipynb: python docs/readme.py"
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

def fenced(text, lang=""): return f"```{lang}\n{text.rstrip()}\n```"

def shown(output):
    "What an output says in plain text."
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", []))

def cell_text(
    cell: dict,  # of a notebook
) -> str:  # Markdown; nothing for a hidden cell
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown": return re.sub(r"\]\((\d\d_\w+\.ipynb)", r"](nbs/\1", source)
    if re.search(r"^#\|\s*hide", source, re.M): return ""
    code = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip()
    outputs = "".join(map(shown, cell["outputs"]))
    return "\n\n".join(filter(None, [code and fenced(code, "python"), outputs and fenced(outputs)]))

def readme() -> str:
    "The front page as Markdown."
    cells = json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))["cells"]
    note = "<!-- Written by docs/readme.py from nbs/index.ipynb: edit that. -->"
    return "\n\n".join(filter(None, [note, *map(cell_text, cells)])) + "\n"

if __name__ == "__main__": (ROOT / "README.md").write_text(readme(), encoding="utf-8")
