"""The book's notebooks: which there are, what parameters they take, and executing them anew in place.

papermill takes any parameter and warns at most; here names that a notebook lacks and values of another type are
refused before anything runs.
"""

import ast
import hashlib
import json
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from geomlib.errors import GeomlibError
from geomlib.source import deciding

_CELL_SECONDS = 1800
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    list: "a list",
    tuple: "a tuple",
}


def folder() -> Path:
    """The notebooks of this project: in the current folder, else beside the package."""
    for place in (Path.cwd(), Path(__file__).parent.parent):
        if list((place / "notebooks").glob("[0-9]*.ipynb")):
            return place / "notebooks"
    raise GeomlibError("the notebooks are not here: run this in a checkout of the project.")


def chapters(names: list[str]) -> list[Path]:
    """Paths of the named notebooks (with or without .ipynb, or by their number), all when none is named."""
    known = sorted(folder().glob("[0-9]*.ipynb"))
    found = []
    for name in names:
        match = [p for p in known if p.stem == name.removesuffix(".ipynb") or p.stem.split("_")[0] == name.zfill(2)]
        if not match:
            raise GeomlibError(f"there is no notebook {name}: give one of {', '.join(p.stem for p in known)}.")
        found += match
    return found or known


def parse_settings(settings: list[str]) -> dict:
    """["windows=2", "corpus=django-docs"] to values: Python literals where they are, text otherwise."""
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.isidentifier():
            raise GeomlibError(f"--set {setting} is not usable: give name=value.")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def parameters(notebook: Path) -> dict:
    """Names and default values of a notebook's parameters: the literals of its one cell tagged `parameters`."""
    cells = [c for c in nbformat.read(notebook, as_version=4).cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise GeomlibError(f"{notebook.name} has {len(cells)} cells tagged parameters: it needs exactly one.")
    found = {}
    for line in ast.parse(cells[0].source).body:
        try:
            (name,) = line.targets
            found[name.id] = ast.literal_eval(line.value)
        except (AttributeError, ValueError):
            raise GeomlibError(f"{notebook.name}: the parameters cell may hold assignments of literals only.") from None
    return found


def check_parameters(notebook: Path, values: dict) -> None:
    """Refuse names that the notebook lacks and values of another type than its default."""
    known = parameters(notebook)
    for name, value in values.items():
        if name not in known:
            raise GeomlibError(f"{notebook.stem} has no parameter {name}: known are {', '.join(known)}.")
        default = known[name]
        same = isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool)
        whole = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
        if default is not None and not (same or whole):
            raise GeomlibError(
                f"{name} = {value!r} does not fit {notebook.stem}: give {_WORDS.get(type(default), 'a value')} such as {default!r}."
            )


# What no output depends on.
_NO_SOURCE = (
    "cli.py", "cluster.py", "estimate.py", "fetch.py", "hub.py", "notebooks.py", "progress.py", "runs.py", "source.py",
    "teach.py",
)  # fmt: skip


def _code() -> bytes:
    return b"".join(deciding(p) for p in sorted(Path(__file__).parent.rglob("*.py")) if p.name not in _NO_SOURCE)


def code_hash() -> str:
    """Changes when the library behind the notebooks does."""
    return hashlib.sha256(_code()).hexdigest()[:16]


def sources_hash(book: Path) -> str:
    """Changes when the notebook's code or the library behind it does, or, of one that reads them, the runs of the book."""
    cells = [c.source for c in nbformat.read(book, as_version=4).cells if c.cell_type == "code"]
    content = json.dumps(cells).encode() + _code()
    if "runs" in parameters(book):
        content += b"".join(p.read_bytes() for p in sorted(book.parent.parent.glob("book/runs/*/*")))
    return hashlib.sha256(content).hexdigest()[:16]


def _join_streams(cell) -> None:
    """One output for what was printed in a row: where the kernel flushed in between is chance."""
    joined = []
    for output in cell.get("outputs", []):
        last = joined[-1] if joined else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            joined.append(output)
    if "outputs" in cell:
        cell["outputs"] = joined


def regenerate(names: list[str]) -> None:
    """Execute committed notebooks in place: all named, or those whose code or library changed since they were executed.

    What they were executed with stands in their metadata. Cell ids stay and run-time metadata goes, so that a difference
    in git is a difference in content.
    """
    for book in chapters(names):
        sources = sources_hash(book)
        if not names and nbformat.read(book, as_version=4).metadata.get("geomlib_sources") == sources:
            print(f"{book.stem}: up to date")
            continue
        print(f"{book.stem}: executing ...", flush=True)
        notebook = nbformat.read(book, as_version=4)
        place = {"metadata": {"path": str(folder().parent)}}
        try:
            NotebookClient(notebook, timeout=_CELL_SECONDS, kernel_name="python3", resources=place).execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
            last = str(e).strip().splitlines()[-1]
            raise GeomlibError(f"{book.stem} failed ({last}): the committed notebook is as it was.") from e
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            _join_streams(cell)
        notebook.metadata["geomlib_sources"] = sources
        nbformat.write(notebook, book)
