"""What this book adds to Sphinx: figures and run times that other pages take from executed notebooks and from the runs that
come with the book, so that neither is typed or copied; and a quieter API reference."""

import base64
import json
import os
from pathlib import Path
from typing import ClassVar

import nbformat
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent


class NotebookFigure(SphinxDirective):
    """```{notebook-figure} notebooks/00_quickstart fig-plane``` shows that figure of a committed notebook, with the
    content as its caption; the alternative text is the notebook's unless `alt` is given."""

    required_arguments = 2
    has_content = True
    option_spec: ClassVar = {"alt": directives.unchanged, "name": directives.unchanged}

    def run(self):
        notebook, name = self.arguments
        path = ROOT / f"{notebook}.ipynb"
        self.env.note_dependency(str(path))
        png, alt = picture(path, name)
        file = Path(self.env.app.outdir).parent / "notebook_figures" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png)
        source = os.path.relpath(file, Path(self.env.doc2path(self.env.docname)).parent)
        label = f":name: {self.options['name']}\n" if "name" in self.options else ""
        figure = (
            f":::{{figure}} {source}\n:alt: {self.options.get('alt', alt)}\n{label}\n"
            + "\n".join(self.content)
            + "\n:::"
        )
        return self.parse_text_to_nodes(figure)


def picture(notebook: Path, name: str) -> tuple[bytes, str]:
    """PNG and alternative text of the figure of that name in an executed notebook."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        shown = cell.metadata.get("mystnb", {})
        if shown.get("figure", {}).get("name") == name:
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    return base64.b64decode(output.data["image/png"]), shown["image"]["alt"]
    raise ValueError(f"{notebook.name} has no figure {name}")


class RunTimes(SphinxDirective):
    """```{run-times}```: a chapter a row, a run under book/runs a column, minutes and peak memory."""

    def run(self):
        runs = {p.parent.name: p for p in sorted((ROOT / "book" / "runs").glob("*/run.json"))}
        for path in runs.values():
            self.env.note_dependency(str(path))
        return self.parse_text_to_nodes(run_times({m: json.loads(p.read_text())["chapters"] for m, p in runs.items()}))


def run_times(runs: dict[str, dict[str, dict]]) -> str:
    """A Markdown table of model -> chapter -> seconds and peak_bytes."""

    def cell(chapters) -> str:
        chapters = list(chapters)
        seconds, memory = sum(c["seconds"] for c in chapters), max(c["peak_bytes"] for c in chapters)
        return f"{seconds / 60:.1f} min, {memory / 1e9:.1f} GB"

    rows = [["chapter", *(f"`{model}`" for model in runs)], ["---"] * (len(runs) + 1)]
    for name in sorted({name for chapters in runs.values() for name in chapters}):
        done = [cell([chapters[name]]) if name in chapters else "" for chapters in runs.values()]
        rows.append([f"{{doc}}`/notebooks/{name}`", *done])
    rows.append(["together", *(cell(chapters.values()) for chapters in runs.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def skip_tuple_fields(app, what, name, obj, skip, options):
    """Fields of named tuples, whose docstrings say no more than their place."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def returns_in_words(app, what, name, obj, options, lines):
    """No return type is read out of the words before a colon: an empty one goes before them, ahead of napoleon."""
    for i, line in enumerate(lines[:-1]):
        if line.strip() in ("Returns:", "Yields:"):
            words = lines[i + 1].lstrip()
            lines[i + 1] = f"{lines[i + 1][: -len(words)]}: {words}"


def plain_citations(app, pagename, templatename, context, doctree):
    """Without docutils' role "list" around the bibliography, whose entries are no list items to a screen reader."""
    if "body" in context:
        context["body"] = context["body"].replace('role="list" class="citation-list"', 'class="citation-list"')


def without_source_maps(app, exception):
    """The theme's maps, for debugging it, are a seventh of the book."""
    for path in (Path(app.outdir) / "_static").rglob("*.map"):
        path.unlink()


def setup(app):
    # The search fetches an excerpt of each page that it finds, which a browser refuses a book opened as files.
    app.add_js_file(None, body='if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;')
    app.add_directive("notebook-figure", NotebookFigure)
    app.add_directive("run-times", RunTimes)
    app.connect("html-page-context", plain_citations)
    app.connect("autodoc-process-docstring", returns_in_words, priority=400)  # napoleon's is 500
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("build-finished", without_source_maps)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
