"""The copies for a class: nothing of a solution in a student's, all else as in the book; slides from executed notebooks."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from browser import HTML
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from test_cli import refused, run

from geomlib import notebooks, teach
from geomlib.errors import GeomlibError

ROOT = Path(__file__).parent.parent
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
START = re.compile(r"^```\{exercise-start\} (.*)\n:label: (.*)\n```\n", re.MULTILINE)
SOLUTION = re.compile(
    r"^```\{solution-start\} ([^\n]*)\n:class: dropdown\n```\n(.*?)^```\{solution-end\}\n```$", re.MULTILINE | re.DOTALL
)
LEVELS = ["warm-up", "middle", "middle, in code", "open"]


FIVE = "It is five.\n\n```python\nprint(2 + three)\n```\n\nAs it must be."


def exercise(title="Add (middle, in code)", label="ex-add", solution=FIVE) -> str:
    question = "How much is $2 + 3$? See {prf:ref}`def-sum`."
    return (
        f"```{{exercise-start}} {title}\n:label: {label}\n```\n\n{question}\n\n```{{exercise-end}}\n```\n\n"
        f"```{{solution-start}} {label}\n:class: dropdown\n```\n\n{solution}\n\n```{{solution-end}}\n```"
    )


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A book of two pages and two chapters, in the current folder."""
    root = tmp_path / "project"
    (root / "notebooks").mkdir(parents=True)
    (root / "book").mkdir()
    files = ["book/intro", "book/notation", "notebooks/00_start", "notebooks/01_sums", "book/teaching"]
    (root / "_toc.yml").write_text("root: book/intro\n" + "".join(f"- file: {name}\n" for name in files[1:]))
    (root / "LICENSE").write_text("Do as you like.\n")
    (root / "book" / "intro.md").write_text("# Hello\n")
    (root / "book" / "teaching.md").write_text("# Teaching\n")
    (root / "book" / "references.bib").write_text(
        "% all\n\n@misc{one2020,\n  author = {Mart{\\'i}n, A.},\n  year = {2020},\n  url = {https://example.org/1},\n}\n\n"
        "@misc{two2021,\n  author = {Ng, B. and Oh, C.},\n  year = {2021},\n}\n\n"
        "@misc{three2022,\n  author = {Poe, D. and Quo, E. and\n   Roe, F.},\n  year = {2022},\n  url = {https://example.org/3},\n}\n"
    )
    (root / "book" / "notation.md").write_text(
        "# Words and signs\n\n```{glossary}\nsum\n  What is left\n  of many: {prf:ref}`def-sum`.\n\ntwo words\n  A {term}`sum` of words.\n```\n\n"
        + exercise("By hand", "ex-hand")
    )
    for name, cells in {
        "00_start": [new_markdown_cell("# Start\n\n{doc}`Next <01_sums>`.", id="top"), new_code_cell("three = 3", id="given", metadata={"tags": ["parameters"]})],
        "01_sums": [
            new_markdown_cell("(here)=\n# Sums\n\n```{prf:definition} Sum\n:label: def-sum\nAll together.\n```", id="top"),
            new_code_cell("three = 3", id="given", metadata={"tags": ["parameters"]}),
            new_code_cell(
                "print(three)", id="shown", execution_count=1, outputs=[new_output("stream", text="3\n")],
                metadata={"mystnb": {"figure": {"name": "fig-three", "caption": "A three, see {term}`sum`."}, "image": {"alt": "3"}}},
            ),
            new_markdown_cell("## Exercises", id="head"),
            new_markdown_cell(exercise("Think (warm-up)", "ex-think", "Of $5$."), id="first"),
            new_markdown_cell(exercise(), id="second"),
            new_markdown_cell(exercise("Go on (open)", "ex-open"), id="third"),
            new_markdown_cell("## What this does not show\n\nMuch.", id="end"),
        ],
    }.items():  # fmt: skip
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "geomlib_sources": "x"}
        nbformat.write(new_notebook(cells=cells, metadata=metadata), root / "notebooks" / f"{name}.ipynb")
    monkeypatch.chdir(root)
    return root


def cells(path: Path) -> list[tuple[str, str, str]]:
    return [(c.id, c.cell_type, c.source) for c in nbformat.read(path, as_version=4).cells]


# --- the two copies ---------------------------------------------------------------------------------------------------


def test_a_students_copy(project):
    told = teach.copy(project / "out")
    assert told["01_sums"] == "about 1 minutes to read; exercises: warm-up; middle, in code; open"
    assert sorted(p.name for p in (project / "out").iterdir()) == [
        ".teach.json", "00_start.ipynb", "01_sums.ipynb", "LICENSE", "notation.md",
    ]  # fmt: skip
    text = "How much is $2 + 3$? See Definition 1.1."
    assert cells(project / "out" / "01_sums.ipynb") == [
        ("top", "markdown", "# Sums\n\n**Definition 1.1 (Sum).** All together."),
        ("given", "code", "three = 3"),
        ("shown", "code", "print(three)"),
        ("shown-1", "markdown", "*Fig. 1.1.* A three, see [sum](notation.md)."),
        ("head", "markdown", "## Exercises"),
        ("first", "markdown", f"### Exercise 1.1: Think\n\n*Level: warm-up.*\n\n{text}"),
        ("first-1", "markdown", "**Your answer:**"),
        ("second", "markdown", f"### Exercise 1.2: Add\n\n*Level: middle, in code.*\n\n{text}"),
        ("second-1", "code", ""),
        ("second-2", "markdown", "**Your answer:**"),
        ("third", "markdown", f"### Exercise 1.3: Go on\n\n*Level: open.*\n\n{text}"),
        ("third-1", "code", ""),
        ("third-2", "markdown", "**Your answer:**"),
        ("end", "markdown", "## What this does not show\n\nMuch."),
    ]
    copied = nbformat.read(project / "out" / "01_sums.ipynb", as_version=4)
    nbformat.validate(copied)
    assert copied.metadata.kernelspec.name == "python3" and "geomlib_sources" not in copied.metadata
    tags = {c.id: c.metadata.get("tags") for c in copied.cells}
    assert tags["given"] == ["parameters"] and tags["second"] == tags["second-1"] == tags["second-2"] == ["exercise"]
    assert all(c.outputs == [] and c.execution_count is None for c in copied.cells if c.cell_type == "code")
    assert (project / "out" / "notation.md").read_text() == (
        "# Words and signs\n\n- **sum**: What is left of many: [Definition 1.1](01_sums.ipynb).\n- **two words**: A sum of words.\n\n"
        "### Exercise 1: By hand\n\nHow much is $2 + 3$? See [Definition 1.1](01_sums.ipynb).\n"
    )


def test_an_instructors_copy(project):
    teach.copy(project / "out", solutions=True)
    found = {id: (kind, source) for id, kind, source in cells(project / "out" / "01_sums.ipynb")}
    assert found["first-1"] == ("markdown", "**Solution to Exercise 1.1.**\n\nOf $5$.")
    assert [found[f"second-{i}"] for i in (1, 2, 3)] == [
        ("markdown", "**Solution to Exercise 1.2.**\n\nIt is five."), ("code", "print(2 + three)"), ("markdown", "As it must be."),
    ]  # fmt: skip
    assert not any("Your answer" in source for _, source in found.values())
    assert "It is five." in (project / "out" / "notation.md").read_text()


def test_outputs_are_kept_on_request(project):
    teach.copy(project / "out", keep_outputs=True)
    shown = nbformat.read(project / "out" / "01_sums.ipynb", as_version=4).cells[2]
    assert shown.execution_count == 1 and shown.outputs[0].text == "3\n"


@pytest.mark.parametrize(
    ("myst", "markdown"),
    [
        ("{term}`sum`, {term}`sums <sum>`", "[sum](notation.md), [sums](notation.md)"),
        ("{cite}`one2020,two2021`", "([Martin, 2020](https://example.org/1); Ng and Oh, 2021)"),
        ("{cite:p}`three2022`", "([Poe et al., 2022](https://example.org/3))"),
        ("{cite:t}`three2022` says", "[Poe et al. (2022)](https://example.org/3) says"),
        ("{doc}`01_sums`, {doc}`../book/notation`", "[Sums](01_sums.ipynb), [Words and signs](notation.md)"),
        ("{doc}`the guide <../book/teaching>`", "the guide (in the book)"),
        ("[page](../book/notation.md#words), [api](api/x.md), [web](https://a.org/b.md)", "[page](notation.md), api (in the book), [web](https://a.org/b.md)"),
        ("{numref}`fig-three`, {ref}`ex-add`, {ref}`there <here>`, {ref}`here`", "[Fig. 1.1](01_sums.ipynb), [Exercise 1.2](01_sums.ipynb), [there](01_sums.ipynb), [Sums](01_sums.ipynb)"),
        ("{math}`a_1` and {kbd}`Ctrl`", "$a_1$ and Ctrl"),
        ("`{a}` and $\\{a\\}$ and ${a}_b$", "`{a}` and $\\{a\\}$ and ${a}_b$"),
        ("```{prf:proof}\nClear.\n```", "*Proof.* Clear. ∎"),
        ("```{prf:lemma}\n- one\n- two\n```", "**Lemma.**\n\n- one\n- two"),
        ("````{note}\nMind this.\n\n```{tip} Short\n:class: dropdown\nOr that.\n```\n````", "**Note.** Mind this.\n\n**Tip (Short).** Or that."),
        (":::{admonition} The question\nWhy?\n:::", "**The question.** Why?"),
        ("```{run-times}\n```", "*(The book has a figure or a table here.)*"),
        ("```{code-block} python\nx = 1\n```", "```python\nx = 1\n```"),
        ("```python\nx = {1}\n```", "```python\nx = {1}\n```"),
        ("```{math}\n:label: eq-a\na = b\n```", "$$\na = b\n$$"),
        ("(a-place)=\n## Words\n\nText", "## Words\n\nText"),
    ],
)  # fmt: skip
def test_myst_becomes_markdown(project, myst, markdown):
    assert teach.Book().plain(myst, "00_start") == markdown


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_students_work_is_never_overwritten(project):
    out = project / "out"
    teach.copy(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    teach.copy(out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    edited = (out / "01_sums.ipynb").read_text().replace("Your answer:", "Your answer: 5")
    (out / "01_sums.ipynb").write_text(edited)
    (project / "LICENSE").write_text("Do as I like.\n")
    (out / "mine.txt").write_text("mine")
    with pytest.raises(
        GeomlibError, match=r"01_sums\.ipynb was edited or comes from elsewhere, so nothing was written"
    ):
        teach.copy(out)
    assert (out / "01_sums.ipynb").read_text() == edited
    assert (out / "LICENSE").read_bytes() == before["LICENSE"]
    (out / "01_sums.ipynb").rename(project / "mine.ipynb")
    teach.copy(out)
    assert (out / "01_sums.ipynb").read_bytes() == before["01_sums.ipynb"]
    assert (out / "LICENSE").read_text() == "Do as I like.\n" and (out / "mine.txt").read_text() == "mine"


def test_what_was_not_written_here_is_not_overwritten(project):
    before = (project / "notebooks" / "01_sums.ipynb").read_bytes()
    with pytest.raises(GeomlibError, match="comes from elsewhere"):
        teach.copy(project / "notebooks")
    assert (project / "notebooks" / "01_sums.ipynb").read_bytes() == before


@pytest.mark.parametrize("spoil", ["file", "record"])
def test_a_folder_that_cannot_be_used(project, spoil):
    (project / "out").write_text("") if spoil == "file" else (project / "out").mkdir()
    if spoil == "record":
        (project / "out" / ".teach.json").write_text("{")
    with pytest.raises(GeomlibError, match=r"the copy cannot be written to .*out \("):
        teach.copy(project / "out")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{solution-end}", "{solution-and}"),
        ("{solution-start} ex-add", "{solution} ex-add"),
        ("{exercise-end}", "{exercise-start}"),
    ],
)
def test_a_solution_without_its_end_is_refused(project, old, new):
    path = project / "notebooks" / "01_sums.ipynb"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(GeomlibError, match="01_sums: an exercise or a solution lacks its start or end"):
        teach.copy(project / "out")
    assert not (project / "out").exists()


@pytest.mark.parametrize("content", ["not a notebook", "{}", "[]", '{"nbformat": 4}'])
def test_bad_notebooks_are_one_sentence(project, content):
    (project / "notebooks" / "01_sums.ipynb").write_text(content)
    with pytest.raises(GeomlibError, match=r"01_sums\.ipynb is not a notebook that can be read \([^\n]*\): restore it"):
        teach.copy(project / "out")


@pytest.mark.parametrize(
    "name", ["_toc.yml", "book/references.bib", "book/notation.md", "notebooks/01_sums.ipynb", "LICENSE"]
)
def test_what_is_no_text_is_named(project, name):
    (project / name).write_bytes(b"\xff\xfe")
    with pytest.raises(GeomlibError, match=rf"{re.escape(name)} cannot be read .*: restore it"):
        teach.copy(project / "out")
    assert not (project / "out").exists()


@pytest.mark.parametrize("name", ["book/notation.md", "notebooks/01_sums.ipynb"])
def test_a_page_of_the_contents_that_is_missing(project, name):
    (project / name).unlink()
    with pytest.raises(GeomlibError, match=r"cannot be read \(.*No such file.*\): restore it"):
        teach.copy(project / "out")


@pytest.mark.parametrize("place", [".", "out/.."])
def test_the_books_own_folder_is_refused(project, place):
    (project / "out").mkdir()
    before = sorted(project.iterdir())
    with pytest.raises(GeomlibError, match="is the book's own folder, so nothing was written"):
        teach.copy(Path(place))
    assert sorted(project.iterdir()) == before


def test_stopped_half_way_and_begun_again(project, monkeypatch):
    """A full disk in the middle of a file: what is there is whole, and the next try takes it up."""
    write = Path.write_text

    def full(self, text, **settings):
        if self.name == ".01_sums.ipynb.part":
            write(self, text[:100])
            raise OSError(28, "No space left on device")
        return write(self, text, **settings)

    with monkeypatch.context() as m:
        m.setattr(Path, "write_text", full)
        with pytest.raises(GeomlibError, match="No space left"):
            teach.copy(project / "out")
    assert (project / "out" / "00_start.ipynb").is_file() and not (project / "out" / "01_sums.ipynb").exists()
    teach.copy(project / "out")
    assert sorted(p.name for p in (project / "out").iterdir()) == [
        ".teach.json", "00_start.ipynb", "01_sums.ipynb", "LICENSE", "notation.md"
    ]  # fmt: skip


def test_the_command(project, monkeypatch):
    for options, folder, whose in (
        ((), "teach/student", "student"),
        (("--solutions",), "teach/instructor", "instructor"),
    ):
        done = run("teach", *options)
        assert done.returncode == 0 and done.stderr == ""
        assert done.stdout.splitlines()[-1] == f"The {whose}'s copy is in {folder}."
        assert (project / folder / "01_sums.ipynb").is_file()
    (project / "teach" / "student" / "LICENSE").write_text("mine")
    refused(run("teach"), "LICENSE was edited or comes from elsewhere, so nothing was written")
    assert run("teach", "--out", "other").returncode == 0


def test_without_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebooks, "__file__", str(tmp_path / "site-packages" / "geomlib" / "notebooks.py"))
    with pytest.raises(GeomlibError, match="the notebooks are not here"):
        teach.copy(tmp_path / "out")


# --- the chapters of this book ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("teach")
    teach.copy(place / "student")
    teach.copy(place / "instructor", solutions=True)
    return {name: place / name for name in ("student", "instructor")}


def markdown(path: Path) -> str:
    return "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")


def everything(path: Path) -> str:
    return (
        "\n".join(c.source for c in nbformat.read(path, as_version=4).cells)
        if path.suffix == ".ipynb"
        else path.read_text()
    )


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_the_convention_of_exercises(path):
    """One in a cell under its heading, warm-ups first and open ones last, each with a solution."""
    found = nbformat.read(path, as_version=4).cells
    holding = [i for i, c in enumerate(found) if "exercise-start" in c.source or "solution-start" in c.source]
    assert all(found[i].cell_type == "markdown" for i in holding)
    assert any(re.search(r"^## Exercises$", c.source, re.MULTILINE) for c in found[: min(holding)])
    levels = []
    for i in holding:
        ((title, label),) = START.findall(found[i].source)
        ((of, text),) = SOLUTION.findall(found[i].source)
        assert label == of and re.fullmatch(r"ex-[a-z0-9-]+", label) and text.strip(), title
        levels.append(re.fullmatch(rf"[^()]+ \(({'|'.join(LEVELS)})\)", title)[1])
    assert (3 if path.stem.startswith("00") else 4) <= len(levels) <= 6
    rank = [["warm-up", "middle", "open"].index(level.partition(",")[0]) for level in levels]
    assert rank == sorted(rank) and set(rank) == {0, 1, 2}


@pytest.mark.parametrize("path", [*CHAPTERS, ROOT / "book" / "notation.md"], ids=lambda p: p.stem)
def test_no_line_of_a_solution_is_in_a_students_copy(path, copies):
    source, book = markdown(path) if path.suffix == ".ipynb" else path.read_text(), teach.Book()
    outside = "\n".join(SOLUTION.sub("", c.source) for cells in book.pages.values() for c in cells)
    copied = "\n".join(everything(p) for p in copies["student"].iterdir() if p.suffix in (".ipynb", ".md"))
    solutions = SOLUTION.findall(source)
    assert source.count("{solution-start}") == len(solutions) > 0
    for _, text in solutions:
        for line in filter(None, map(str.strip, text.splitlines())):
            for part in {line, book.plain(line, path.stem), *re.split(r"(?<=[.?!:;]) ", line)}:
                assert len(part.split()) < 4 or part not in copied or part in outside, part
    assert "Solution to" not in copied


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_copied_chapter(path, copies):
    original = nbformat.read(path, as_version=4)
    copied = nbformat.read(copies["student"] / path.name, as_version=4)
    nbformat.validate(copied)
    ids = [c.id for c in copied.cells]
    assert len(ids) == len(set(ids)) and {c.id for c in original.cells} <= set(ids)
    assert copied.metadata.kernelspec == original.metadata.kernelspec
    code = [c for c in copied.cells if c.cell_type == "code"]
    given = [c.source for c in code if "exercise" not in c.metadata.get("tags", [])]
    assert given == [c.source for c in original.cells if c.cell_type == "code"]
    assert all(c.source == "" for c in code if "exercise" in c.metadata.get("tags", []))
    assert all(not c.outputs and c.execution_count is None for c in code)
    assert notebooks.parameters(copies["student"] / path.name) == notebooks.parameters(path)
    titles = [title for title, _ in START.findall(markdown(path))]
    chapter = int(path.stem[:2])
    text = markdown(copies["student"] / path.name)
    shown = re.findall(r"^### Exercise (?:(\d+)\.)?(\d+): (.*)\n\n\*Level: (.*)\.\*$", text, re.MULTILINE)
    assert [f"{title} ({level})" for *_, title, level in shown] == titles
    first = int(shown[0][1])
    assert [(c, int(n)) for c, n, *_ in shown] == [
        (str(chapter) if chapter else "", first + i) for i in range(len(shown))
    ]
    assert chapter == 0 or first == 1


@pytest.mark.parametrize("whose", ["student", "instructor"])
def test_plain_markdown_whose_links_lead_somewhere(copies, whose):
    for path in copies[whose].iterdir():
        if path.suffix in (".ipynb", ".md"):
            text = markdown(path) if path.suffix == ".ipynb" else path.read_text()
            assert not re.search(r"\{[\w:-]+\}`|^[`:]{3,}\{|^\(\S+\)=$|\{\{", text, re.MULTILINE), path.name
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\$\$.*?\$\$|\$.*?\$", "", text, flags=re.DOTALL)):
                assert target.startswith("https://") or (path.parent / target.partition("#")[0]).is_file(), (
                    path.name,
                    target,
                )


def test_the_guide_has_each_chapters_reading_time():
    """Within a quarter, or five minutes: what `make teach` prints."""
    guide = (ROOT / "book" / "teaching.md").read_text()
    rows = re.findall(r"^\| \{doc\}`[^<`]*<\.\./notebooks/(\w+)>` \|.*\| about (\d+) \|", guide, re.MULTILINE)
    assert [name for name, _ in rows] == [p.stem for p in CHAPTERS]
    for name, minutes in rows:
        assert int(minutes) == pytest.approx(teach.Book().minutes(name), rel=0.25, abs=5), name


def executed(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    return notebook


def printed(cell) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["00_quickstart", "06_scorecard"])
@pytest.mark.parametrize("whose", ["student", "instructor"])
def test_the_copies_run(copies, whose, name):
    ran = executed(copies[whose] / f"{name}.ipynb")
    original = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    again, before = ({c.id: printed(c) for c in n.cells if c.cell_type == "code"} for n in (ran, original))
    assert {id: again[id] for id in before} == before


@pytest.mark.browser
def test_numbers_are_those_of_the_built_book():
    """Exercises, statements and figures, by label."""
    pages = "\n".join(p.read_text() for p in HTML.rglob("*.html"))
    numbered = {label: name for label, (name, _) in teach.Book().names.items() if re.search(r" [\d.]+$", name)}
    assert len(numbered) > 50
    for label, name in numbered.items():
        begin = pages.index(f'id="{label}"')
        assert re.search(r'class="caption-number">([^<]*)<', pages[begin:])[1].strip() == name, label


# --- slides -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slides(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("slides") / "slides"
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-b",
        "revealjs",
        "-d",
        out.parent / "trees",
        ROOT / "book" / "slides",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


def test_slides_show_what_the_notebooks_have(slides):
    text, source = (slides / "index.html").read_text(), (ROOT / "book" / "slides" / "index.md").read_text()
    figures = re.findall(r"\{chapter-figure\} (\w+) (\S+)", source)
    assert figures and sorted(p.stem for p in (slides / "_images").iterdir()) == sorted(name for _, name in figures)
    for notebook, code in re.findall(r"\{chapter-print\} (\w+) (.*)", source):
        found = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4).cells
        (cell,) = [c for c in found if c.cell_type == "code" and code in c.source]
        assert cell.outputs[0].text.strip() in html.unescape(text)
    assert notebooks.parameters(ROOT / "notebooks" / "00_quickstart.ipynb")["sentence"] in source
    assert "cdn" not in text and not re.search(r'(src|href)="https?:', text)
    notes = re.findall(r'<aside class="notes">Minutes? (\d+)(?: to (\d+))?', text)
    assert len(notes) == source.count("\n#") + source.startswith("#")  # a slide, a note
    ends = [int(end or start) for start, end in notes]
    assert ends == sorted(ends) and ends[-1] == 90
    assert [int(start) for start, _ in notes][1:] == ends[:-1]


@pytest.mark.browser
def test_slides_open_without_a_network(slides, open_page):
    page = open_page(os.path.relpath(slides / "index.html", HTML))
    page.wait_for_function("window.Reveal && Reveal.isReady() && document.querySelectorAll('mjx-container').length")
    count = page.evaluate("Reveal.getTotalSlides()")
    assert count == (slides / "index.html").read_text().count('class="notes"')
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.evaluate("[...document.images].every(i => i.alt.length > 20)")
    assert not page.evaluate("document.querySelector('.slides').innerText.includes('\\\\(')")
    for _ in range(count):
        tall = page.evaluate("[Reveal.getCurrentSlide().scrollHeight, Reveal.getConfig().height]")
        assert tall[0] <= tall[1]
        page.evaluate("Reveal.next()")
    assert page.evaluate("Reveal.isLastSlide()")


def test_one_copy_never_takes_the_place_of_the_other(tmp_path):
    teach.copy(tmp_path / "class")
    before = {p.name: p.read_bytes() for p in (tmp_path / "class").iterdir()}
    with pytest.raises(GeomlibError, match="holds the student's copy, so nothing was written"):
        teach.copy(tmp_path / "class", solutions=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "class").iterdir()} == before


@pytest.mark.parametrize("content", ["[1, 2]", '"x"', "null"])
def test_a_record_that_is_none_is_refused(tmp_path, content):
    (tmp_path / ".teach.json").write_text(content)
    with pytest.raises(GeomlibError, match=r"\.teach\.json is damaged: delete it"):
        teach.copy(tmp_path)
