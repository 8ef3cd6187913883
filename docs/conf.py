"Sphinx's settings; docs/adapt.py lays out the sources. Nothing here reaches for the network, nor do the pages."
import functools
from pathlib import Path

from docutils import nodes
from py_mini_racer import JSEvalException, MiniRacer
from sphinx.util import logging

import tensorplay_attn

project = "tensorplay_attn"
author = copyright = "The tensorplay_attn authors"
version = release = tensorplay_attn.__version__

extensions = ["myst_nb", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # pages show the committed outputs; the tests execute them
nb_merge_streams = True

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["katex", "static"]
html_css_files = ["katex.min.css", "pages.css"]
exclude_patterns = ["katex.min.js"]  # runs here, not at the reader's
html_math_renderer = "katex"
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

@functools.cache
def katex():
    "A JavaScript engine with KaTeX in it."
    engine = MiniRacer()
    engine.eval((Path(__file__).parent / "katex/katex.min.js").read_text(encoding="utf-8"))
    return engine

def visit(self, node, display):
    "Write a formula as static HTML; one that KaTeX cannot read is a warning, hence an error, at its place."
    try: html = katex().call("katex.renderToString", node.astext(), {"displayMode": display, "throwOnError": True})
    except JSEvalException as e:
        logging.getLogger(__name__).warning("formula: %s", str(e).splitlines()[0], location=node)
        html = ""
    tag = "div" if display else "span"
    self.body.append(f'{self.starttag(node, tag, "", CLASS="math")}{html}</{tag}>')
    raise nodes.SkipNode

def setup(app):
    app.add_html_math_renderer("katex", (functools.partial(visit, display=False), None), (functools.partial(visit, display=True), None))
