"""Chapters for a class: a student's copy, with room for answers and no solution, or an instructor's, solutions as cells.

Jupyter shows no MyST, so directives and roles become plain Markdown, under the numbers that they have in the book.
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from geomlib.errors import GeomlibError
from geomlib.notebooks import chapters, folder

_PAGES = ("notation", "rerun")  # what chapters link to and a student needs, copied beside them
_ADMONITIONS = (
    "admonition",
    "note",
    "tip",
    "hint",
    "important",
    "warning",
    "caution",
    "attention",
    "seealso",
    "dropdown",
)
_BOTH, _FENCE = re.MULTILINE | re.DOTALL, r"^(?P<fence>`{3,}|:{3,})"
_HEAD = r"(?P<title>[^\n]*)\n(?P<options>(?::[^\n]*\n)*)"
_BLOCK = re.compile(  # a gated exercise or solution
    _FENCE + r"\{(?P<what>exercise|solution)-start\} *" + _HEAD + r"(?P=fence) *\n(?P<body>.*?)"
    r"^(?P=fence)\{(?P=what)-end\} *\n(?P=fence) *$", _BOTH,
)  # fmt: skip
_DIRECTIVE = re.compile(_FENCE + r"\{(?P<what>[\w:-]+)\} *" + _HEAD + r"(?P<body>.*?)^(?P=fence) *$", _BOTH)
_COUNTED = re.compile(  # what has a number in the book, with its label
    r"^[`:]{3,}\{(?:prf:(?!proof)|notebook-(?=figure)|(?=exercise-start|figure))(\w+)(?:-start)?\}.*\n(?::.*\n)*?:(?:label|name): *(\S+)",
    re.MULTILINE,
)
_TARGET = re.compile(r"^\((\S+)\)=\n+(#+ (.*))?", re.MULTILINE)
_ROLE = re.compile(r"\{([\w:-]+)\}`([^`]+)`")
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)[\w./-]*?(\w+)\.(?:md|ipynb)(?:#[^)]*)?\)")
_PYTHON = re.compile(r"^```(?:python|\{code-block\} python)\n(.*?)^```$", _BOTH)
_GLOSSED = re.compile(r"^(\S.*)\n((?:  .*\n?|\n(?=  ))+)", re.MULTILINE)
_ANSWER = "**Your answer:**"
_LEVEL = re.compile(r"(.*?)(?: *\(([^()]*)\))?")


def copy(out: Path, solutions: bool = False, keep_outputs: bool = False) -> dict[str, str]:
    """Write the copy into a folder; what is in each chapter, in words. A file that was edited there is never overwritten."""
    book, files, told = Book(), {}, {}
    for path in chapters([]):
        notebook = _notebook(path)
        notebook.cells = [c for cell in notebook.cells for c in book.translated(cell, path.stem, solutions)]
        notebook.metadata.pop("geomlib_sources", None)
        for cell in notebook.cells:
            if cell.cell_type == "code" and not keep_outputs:
                cell.update(outputs=[], execution_count=None)
        nbformat.validate(notebook)
        files[path.name] = nbformat.writes(notebook) + "\n"
        levels = [c.metadata["level"] for c in notebook.cells if "level" in c.metadata]
        told[path.stem] = f"about {book.minutes(path.stem)} minutes to read; exercises: {'; '.join(levels) or 'none'}"
    for page in filter(book.pages.get, _PAGES):
        cells = [c for cell in book.pages[page] for c in book.translated(cell, page, solutions)]
        shown = [c.source if c.cell_type == "markdown" else f"```python\n{c.source}\n```" for c in cells if c.source]
        files[f"{page}.md"] = "\n\n".join(s for s in shown if s != _ANSWER) + "\n"
    if (folder().parent / "LICENSE").is_file():
        files["LICENSE"] = _text(folder().parent / "LICENSE")
    _save(files, out, "instructor" if solutions else "student")
    return told


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise GeomlibError(f"{path} cannot be read ({e}): restore it from the repository.") from e


def _notebook(path: Path):
    try:
        return nbformat.reads(_text(path), as_version=4)
    except (ValueError, AttributeError, nbformat.ValidationError) as e:
        reason = str(e).partition("\n")[0]
        raise GeomlibError(f"{path} is not a notebook that can be read ({reason}): restore it from the repository.") from e


def _save(files: dict[str, str], out: Path, kind: str) -> None:
    """All files or, where one is not as it was written last or the folder holds the other copy, none."""
    if out.resolve() == folder().parent.resolve():
        raise GeomlibError(f"{out} is the book's own folder, so nothing was written: give another --out.")
    record, new = out / ".teach.json", {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    try:
        old = json.loads(record.read_text()) if record.is_file() else {}
        if not isinstance(old, dict):
            raise GeomlibError(f"{record} is damaged: delete it and give another --out, or move the folder away.")
        if old.get("kind", kind) != kind:
            raise GeomlibError(f"{out} holds the {old['kind']}'s copy, so nothing was written: give another --out.")
        for name in filter(lambda name: (out / name).exists(), files):
            if hashlib.sha256((out / name).read_bytes()).hexdigest() not in (old.get(name), new[name]):
                raise GeomlibError(
                    f"{out / name} was edited or comes from elsewhere, so nothing was written: give another --out, or move it away."
                )
        out.mkdir(parents=True, exist_ok=True)
        for name, text in [*files.items(), (record.name, json.dumps(old | new | {"kind": kind}, indent=1))]:
            part = out / f".{name}.part"  # never half a file, which would look like one that was edited
            part.write_text(text, encoding="utf-8")
            part.replace(out / name)
    except (OSError, ValueError) as e:
        raise GeomlibError(f"the copy cannot be written to {out} ({e}): give another --out.") from e


class Book:
    """All pages in the order of the contents, and how the built book calls what they refer to.

    Attributes:
        pages: cells of each page, by its file's name without folder and ending.
        names: of each label, what it reads as, such as "Exercise 3.1", and its page.
        references: authors, year and address of each entry of the bibliography.
    """

    def __init__(self):
        root = folder().parent
        contents = _text(root / "_toc.yml") if (root / "_toc.yml").is_file() else ""
        self.pages, self.titles, self.names, self.references = {}, {}, {}, {}
        for name in re.findall(r"(?:root|file): *(\S+)", contents) or [f"notebooks/{p.stem}" for p in chapters([])]:
            page, path = name.rpartition("/")[2], root / f"{name}.ipynb"
            if path.is_file():
                self.pages[page] = _notebook(path).cells
            else:
                self.pages[page] = [new_markdown_cell(_text(path.with_suffix(".md")))]
        loose = Counter()  # pages outside the numbered chapters go on from each other
        for page, cells in self.pages.items():
            chapter = int(page[:2]) if page[:2].isdigit() else 0
            count, before = (Counter(), f"{chapter}.") if chapter else (loose, "")
            for cell in cells:
                figure = cell.metadata.get("mystnb", {}).get("figure", {})
                labels = [("figure", figure["name"])] if "name" in figure else []
                if cell.cell_type == "markdown":
                    labels += _COUNTED.findall(cell.source)
                    self.names |= {m[1]: (m[3] or m[1], page) for m in _TARGET.finditer(cell.source)}
                    title = re.search(r"^# (.*)", cell.source, re.MULTILINE)
                    self.titles.setdefault(page, title[1] if title else page)
                for kind, label in labels:
                    count[kind] += 1
                    self.names[label] = (
                        f"{'Fig.' if kind == 'figure' else kind.capitalize()} {before}{count[kind]}",
                        page,
                    )
        bibliography = root / "book" / "references.bib"
        for entry in _text(bibliography).split("\n@")[1:] if bibliography.is_file() else []:
            fields = dict(re.findall(r"^ *(\w+) *= *\{(.*?)\},?$", entry, _BOTH))
            people = re.split(r"\s+and\s+", fields.get("author", fields.get("key", "")))
            people = [re.sub(r"\\\W|\\\w+ ?|[{}]", "", p.split(",")[0]).strip() for p in people]
            who = " and ".join(people) if len(people) < 3 else f"{people[0]} et al."
            self.references[re.split("[{,]", entry)[1]] = (who, fields.get("year", ""), fields.get("url"))

    def minutes(self, page: str) -> int:
        """An estimate: 200 words a minute, a formula as one word, and a minute for each figure; without the exercises."""
        text = "\n".join(_BLOCK.sub("", c.source) for c in self.pages[page] if c.cell_type == "markdown")
        words = re.sub(r"\$\$.*?\$\$|\$.*?\$", "x", text, flags=re.DOTALL).split()
        return round(len(words) / 200 + sum("figure" in c.metadata.get("mystnb", {}) for c in self.pages[page]))

    def translated(self, cell, page: str, solutions: bool) -> list:
        """The cells that stand for a cell in the copy; the first keeps its id."""
        figure = cell.metadata.pop("mystnb", {}).get("figure", {})
        found, at = [cell], 0
        if "name" in figure:
            caption = f"*{self.names[figure['name']][0]}.* {self.plain(figure['caption'], page)}"
            found.append(new_markdown_cell(caption))
        if cell.cell_type == "markdown":
            found = []
            for m in _BLOCK.finditer(cell.source):
                found.append(new_markdown_cell(self.plain(cell.source[at : m.start()], page)))
                if m["what"] == "exercise":
                    found += self._exercise(m, page, solutions)
                elif solutions:
                    found += self._solution(m, page)
                at = m.end()
            found.append(
                new_markdown_cell(self.plain(cell.source[at:], page), metadata=cell.metadata if not at else {})
            )
            found = [c for c in found if c.source or c.cell_type == "code"]
        for i, c in enumerate(found):
            c.id = f"{cell.id}-{i}" if i else cell.id
        return found

    def _exercise(self, m, page, solutions) -> list:
        """Heading with number, level and text; for a student, room for the answer."""
        title, level = _LEVEL.fullmatch(m["title"].strip()).groups("")
        level_line = f"*Level: {level}.*\n\n" if level else ""
        text = f"### {self._name(m, 'Exercise')}: {title}\n\n{level_line}{self.plain(m['body'], page)}"
        tagged = {"tags": ["exercise"]}
        cells = [new_markdown_cell(text, metadata=tagged | {"level": level})]
        if not solutions and ("code" in level or "open" in level):
            cells.append(new_code_cell(metadata=tagged))
        return cells if solutions else [*cells, new_markdown_cell(_ANSWER, metadata=tagged)]

    def _solution(self, m, page) -> list:
        """Text, and each block of Python as a cell that runs."""
        number, cells = self.names.get(m["title"].strip(), ("this exercise", page))[0], []
        for i, part in enumerate(_PYTHON.split(f"**Solution to {number}.**\n\n{m['body'].strip()}\n")):
            new, text = (new_code_cell, part.strip()) if i % 2 else (new_markdown_cell, self.plain(part, page))
            cells += [new(text, metadata={"tags": ["solution"]})] if text else []
        return cells

    def _name(self, m, otherwise: str) -> str:
        label = m["options"].partition(":label:")[2].split()
        return self.names[label[0]][0] if label and label[0] in self.names else otherwise

    def plain(self, text: str, page: str) -> str:
        """MyST to the Markdown that Jupyter and Colab show."""
        if re.search(r"\{(solution|exercise)(-start|-end)?\}", text):
            raise GeomlibError(
                f"{page}: an exercise or a solution lacks its start or end, so solutions cannot be taken out."
            )
        text = _DIRECTIVE.sub(lambda m: self._directive(m, page), text)
        text = _TARGET.sub(lambda m: m[2] or "", text)
        text = _ROLE.sub(lambda m: self._role(m[1], m[2], page), text)
        return _LINK.sub(lambda m: self._link(m[1], m[2], page), text).strip()

    def _directive(self, m, page) -> str:
        what, title, body = m["what"], m["title"].strip(), m["body"].strip("\n")
        if what in ("code-block", "code-cell", "math"):
            return f"$$\n{body}\n$$" if what == "math" else f"```{title}\n{body}\n```"
        body = _DIRECTIVE.sub(lambda m: self._directive(m, page), body)
        if what == "glossary":
            return _GLOSSED.sub(lambda g: f"- **{g[1]}**: {' '.join(g[2].split())}\n", body + "\n").replace(
                "\n\n- ", "\n- "
            )
        if what == "prf:proof":
            return f"*Proof.* {body} ∎"
        if not what.startswith("prf:") and what not in _ADMONITIONS:
            return f"*(The book has a figure or a table here.)* {body}".strip()
        name = self._name(m, "" if what == "admonition" else what.split(":")[-1].capitalize())
        heading = f"{name} ({title})" if name and title else name or title
        return f"**{heading.rstrip('.')}.**" + ("\n\n" if re.match(r"[-|>]|```|\$\$|\d+\.", body) else " ") + body

    def _role(self, role, text, page) -> str:
        shown, target = re.fullmatch(r"(.*?) *<(.*)>", text, re.DOTALL).groups() if text.endswith(">") else (None, text)
        if role.startswith("cite"):
            found = [self.references[key.strip()] for key in text.split(",") if key.strip() in self.references]
            inside = role.startswith("cite:t")
            names = [(f"{who} ({year})" if inside else f"{who}, {year}", url) for who, year, url in found]
            joined = "; ".join(f"[{name}]({url})" if url else name for name, url in names)
            return joined if inside else f"({joined})"
        if role == "doc":
            name = target.rpartition("/")[2]
            return self._link(shown or self.titles.get(name, name), name, page)
        if role == "term":
            return self._link(shown or target, "notation", page)
        if role in ("ref", "numref", "prf:ref", "eq") and target in self.names:
            name, where = self.names[target]
            return self._link(shown or name, where, page)
        return f"${text}$" if role == "math" else shown or text

    def _link(self, shown: str, name: str, page: str) -> str:
        """To a file beside this one; what only the book has is named and not linked."""
        if name == page:
            return shown
        notebook = name[:2].isdigit()
        if not notebook and name not in _PAGES:
            return f"{shown} (in the book)"
        return f"[{shown}]({name}.{'ipynb' if notebook else 'md'})"
