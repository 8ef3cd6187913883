"Sphinx's settings; docs/adapt.py lays out the sources. Nothing here reaches for the network, nor do the pages."
import functools
from importlib.resources import files
from logging import getLogger
from pathlib import Path

from docutils import nodes
from fontTools import subset
from math_core import LatexError, LatexToMathML
from pygments.formatters import HtmlFormatter
from pygments.token import Name, Punctuation, Text, Whitespace
from sphinx.highlighting import PygmentsBridge
from sphinx.util import logging

import tensorplay_attn

project = "tensorplay_attn"
author = copyright = "The tensorplay_attn authors"
version = release = tensorplay_attn.__version__

extensions = ["myst_nb", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_block"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # pages show the committed outputs; the tests execute them
nb_merge_streams = True

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}  # the left and right keys turn pages
pygments_dark_style = "github-dark"
html_title = f"{project} {version}"
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

class Plain(HtmlFormatter):
    "Without a tag around each name and bracket that has no colour of its own: a third less of a page of code."
    def _get_css_class(self, ttype): return "" if ttype in (Name, Punctuation, Text, Whitespace) else super()._get_css_class(ttype)

PygmentsBridge.html_formatter = Plain

CONVERTER = LatexToMathML(fancy_error=False)
written = set()  # the characters of all formulas, which the font must have

def visit(self, node, display):
    "Write a formula as MathML; one that cannot be read is a warning, hence an error, at its place."
    try: mathml = CONVERTER.convert_with_local_state(node.astext(), displaystyle=display)
    except LatexError as e:
        logging.getLogger(__name__).warning("formula: %s: %s", e, node.astext(), location=node)
        mathml = ""
    written.update(mathml)
    tag = "div" if display else "span"
    self.body.append(f'{self.starttag(node, tag, "", CLASS="math")}{mathml}</{tag}>')
    raise nodes.SkipNode

def write_font(app, exception):
    "STIX Two Math as ziamath carries it, cut down to what the pages use: formulas look the same on a machine without a font for them."
    if exception: return
    options = subset.Options(layout_features=["*"], notdef_outline=True, flavor="woff")
    with files("ziamath.fonts").joinpath("STIXTwoMath-Regular.ttf").open("rb") as f, subset.load_font(f, options) as font:
        cut = subset.Subsetter(options)
        cut.populate(text="".join(written))
        cut.subset(font)
        subset.save_font(font, Path(app.outdir) / "_static/math.woff", options)

def setup(app):
    getLogger("fontTools").setLevel("WARNING")  # it tells every step
    app.add_html_math_renderer("mathml", (functools.partial(visit, display=False), None), (functools.partial(visit, display=True), None))
    app.connect("build-finished", write_font)
