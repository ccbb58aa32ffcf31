"""Notebooks on a made-up folder of them: which there are, their parameters, and executing them anew in place.

What runs them for a model is in test_runs.
"""

import nbformat
import pytest

from geomlib import notebooks as N
from geomlib.errors import GeomlibError

METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}


def write(path, *sources, parameters: str | None = "windows = 2  # few, so that it is quick\nname = 'a'"):
    """A notebook of code cells, its parameters cell first; the ids are its own."""
    cells = [nbformat.v4.new_code_cell(s, id=f"cell-{i}") for i, s in enumerate(sources)]
    if parameters is not None:
        cells.insert(0, nbformat.v4.new_code_cell(parameters, id="given", metadata={"tags": ["parameters"]}))
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=METADATA), path)
    return path


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A project with three chapters, the second of which fails unless `windows` is 3; gives the notebooks' folder."""
    folder = tmp_path / "project" / "notebooks"
    folder.mkdir(parents=True)
    write(folder / "00_first.ipynb", "print(f'{windows} windows of {name}')")
    write(folder / "01_second.ipynb", "assert windows == 3, f'only {windows}'\nprint('second')")
    write(
        folder / "02_third.ipynb",
        "print(f'{name} {speed}')",
        parameters="name = 'c'\nspeed = 1.5\nfast = True\nwhere = None",
    )
    write(folder / "draft.ipynb", "print('no chapter')")
    monkeypatch.chdir(folder.parent)
    return folder


def printed(path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(o.text for c in cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stdout")


# --- parameters -------------------------------------------------------------------------------------------------------


def test_settings_are_literals_or_text():
    given = ["n=2", "x=1.5", "flag=True", "none=None", "sizes=(1, 2)", "corpus=django-docs", "quoted='3'", "empty="]
    given += ["formula=a=b", "call=__import__('os').getcwd()"]
    assert N.parse_settings(given) == {
        "n": 2, "x": 1.5, "flag": True, "none": None, "sizes": (1, 2), "corpus": "django-docs", "quoted": "3",
        "empty": "", "formula": "a=b", "call": "__import__('os').getcwd()",
    }  # fmt: skip


@pytest.mark.parametrize("setting", ["windows", "=3", "2x=3", "a-b=3", ""])
def test_settings_without_name_or_value_are_refused(setting):
    with pytest.raises(GeomlibError, match="is not usable: give name=value"):
        N.parse_settings([setting])


def test_parameters_are_the_literals_of_the_tagged_cell(tmp_path):
    source = "a = 2  # because\nb = -1.5\nc = 'x'\nd = None\ne = (1, 'y')\nf = [True]\ng = {'h': 1}"
    path = write(tmp_path / "n.ipynb", "z = 3", parameters=source)
    assert N.parameters(path) == {"a": 2, "b": -1.5, "c": "x", "d": None, "e": (1, "y"), "f": [True], "g": {"h": 1}}


@pytest.mark.parametrize(
    "source", ["a = 1 + n", "a = f()", "a, b = 1, 2", "a = b = 1", "print(1)", "import os", "a += 1"]
)
def test_a_parameters_cell_of_anything_else_is_refused(tmp_path, source):
    with pytest.raises(GeomlibError, match=r"n\.ipynb: the parameters cell may hold assignments of literals only"):
        N.parameters(write(tmp_path / "n.ipynb", parameters=source))


def test_a_notebook_without_a_parameters_cell_is_refused(tmp_path):
    with pytest.raises(GeomlibError, match=r"n\.ipynb has 0 cells tagged parameters"):
        N.parameters(write(tmp_path / "n.ipynb", "a = 1", parameters=None))


DEFAULTS = "whole = 2\nreal = 0.5\nflag = True\ntext = 'a'\nsizes = (1, 2)\nanything = None"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hole": 3}, "n has no parameter hole: known are whole, real, flag, text, sizes, anything"),
        ({"whole": "3"}, "whole = '3' does not fit n: give a whole number such as 2"),
        ({"whole": 2.0}, "whole = 2.0 does not fit"),
        ({"whole": True}, "whole = True does not fit"),
        ({"whole": None}, "whole = None does not fit"),
        ({"real": True}, "real = True does not fit n: give a number such as 0.5"),
        ({"real": "1"}, "real = '1' does not fit"),
        ({"flag": 1}, "flag = 1 does not fit n: give True or False such as True"),
        ({"text": 3}, "text = 3 does not fit n: give a text such as 'a'"),
        ({"sizes": [1, 2]}, "does not fit n: give a tuple such as"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, values, sentence):
    with pytest.raises(GeomlibError, match=sentence):
        N.check_parameters(write(tmp_path / "n.ipynb", parameters=DEFAULTS), values)


def test_values_that_fit(tmp_path):
    path = write(tmp_path / "n.ipynb", parameters=DEFAULTS)
    N.check_parameters(path, {"whole": 3, "real": 1, "flag": False, "text": "b", "sizes": (4,), "anything": 7})
    N.check_parameters(path, {"real": 1.5, "anything": "x"})
    N.check_parameters(path, {})


# --- which notebooks --------------------------------------------------------------------------------------------------


def test_chapters_are_found_by_name_or_number(book):
    assert [p.name for p in N.chapters([])] == ["00_first.ipynb", "01_second.ipynb", "02_third.ipynb"]
    assert N.chapters(["02", "00_first", "01_second.ipynb"]) == [
        book / "02_third.ipynb", book / "00_first.ipynb", book / "01_second.ipynb",
    ]  # fmt: skip
    with pytest.raises(GeomlibError, match="there is no notebook draft: give one of 00_first, 01_second, 02_third"):
        N.chapters(["00", "draft"])


def test_without_a_checkout_there_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(N, "__file__", str(tmp_path / "site-packages" / "geomlib" / "notebooks.py"))
    with pytest.raises(GeomlibError, match="run this in a checkout"):
        N.folder()


# --- regenerating -----------------------------------------------------------------------------------------------------


def test_regenerating_in_place(book, capsys):
    N.regenerate(["00", "02"])
    notebook = nbformat.read(book / "00_first.ipynb", as_version=4)
    assert [c.id for c in notebook.cells] == ["given", "cell-0"]
    assert [c.execution_count for c in notebook.cells] == [1, 2]
    assert all("execution" not in c.metadata for c in notebook.cells)
    assert notebook.cells[0].metadata.tags == ["parameters"]
    assert printed(book / "00_first.ipynb") == "2 windows of a\n"
    assert notebook.metadata.kernelspec == METADATA["kernelspec"]
    nbformat.validate(notebook)

    # Again with nothing changed: the same bytes, whether asked for by name or passed over.
    once = (book / "00_first.ipynb").read_bytes()
    N.regenerate(["00"])
    assert (book / "00_first.ipynb").read_bytes() == once


def test_only_what_changed_is_executed_again(book, capsys, monkeypatch):
    (book / "01_second.ipynb").unlink()
    N.regenerate([])
    capsys.readouterr()
    N.regenerate([])
    assert capsys.readouterr().out.splitlines() == ["00_first: up to date", "02_third: up to date"]
    write(book / "00_first.ipynb", "print('changed')")
    N.regenerate([])
    assert capsys.readouterr().out.splitlines() == ["00_first: executing ...", "02_third: up to date"]
    assert printed(book / "00_first.ipynb") == "changed\n"


def test_a_chapter_that_fails_is_left_as_it_was(book):
    before = (book / "01_second.ipynb").read_bytes()
    with pytest.raises(Exception, match="only 2"):
        N.regenerate(["01"])
    assert (book / "01_second.ipynb").read_bytes() == before


def test_what_is_printed_in_a_row_is_one_output(book):
    write(
        book / "00_first.ipynb",
        "import sys, time\nprint('a', flush=True)\ntime.sleep(0.5)\nprint('b')\nprint('c', file=sys.stderr)",
    )
    N.regenerate(["00"])
    outputs = nbformat.read(book / "00_first.ipynb", as_version=4).cells[-1].outputs
    assert [(o.name, o.text) for o in outputs] == [("stdout", "a\nb\n"), ("stderr", "c\n")]
