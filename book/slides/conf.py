"""Slides of the seminar, built by sphinx-revealjs; their figures and prints are taken from the executed notebooks at each build."""

import os
import sys
from pathlib import Path

import nbformat
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "book"))
from extension import picture

project = "geomlib"
language = "en"
extensions = ["myst_parser", "sphinx_revealjs"]
myst_enable_extensions = ["dollarmath"]

# MathJax is the book's and the fonts are the package's: nothing comes from a network.
mathjax_path = "mathjax/tex-mml-chtml.js"
revealjs_static_path = ["../static", "static"]
revealjs_style_theme = "white"
revealjs_css_files = ["slides.css"]
revealjs_script_plugins = [{"src": "revealjs/plugin/notes/notes.js", "name": "RevealNotes"}]
revealjs_script_conf = {
    "hash": True, "slideNumber": "c/t", "transition": "none", "width": 1280, "height": 720, "margin": 0.05,
}  # fmt: skip


class ChapterFigure(SphinxDirective):
    """```{chapter-figure} 00_quickstart fig-plane```: the picture of a figure."""

    required_arguments = 2

    def run(self):
        notebook, name = ROOT / "notebooks" / f"{self.arguments[0]}.ipynb", self.arguments[1]
        self.env.note_dependency(str(notebook))
        png, alt = picture(notebook, name)
        file = Path(self.env.app.doctreedir) / f"{name}.png"
        file.write_bytes(png)
        return [nodes.image(uri=os.path.relpath(file, self.env.app.srcdir), alt=alt)]


class ChapterPrint(SphinxDirective):
    """```{chapter-print} 00_quickstart for i in chosen:```: what the cell with this piece of code printed."""

    required_arguments = 2
    final_argument_whitespace = True

    def run(self):
        notebook, code = ROOT / "notebooks" / f"{self.arguments[0]}.ipynb", self.arguments[1]
        self.env.note_dependency(str(notebook))
        cells = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code" and code in c.source]
        printed = "".join(o.text for c in cells[:1] for o in c.outputs if o.get("name") == "stdout")
        if not printed:
            raise ValueError(f"{notebook.name} has no cell with {code!r} that prints")
        return [nodes.literal_block(printed, printed, language="text")]


def setup(app):
    app.add_directive("chapter-figure", ChapterFigure)
    app.add_directive("chapter-print", ChapterPrint)
