"""What the repository promises as a whole: its pins agree, its notebooks keep the contract, its command line starts fast."""

import ast
import copy
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SANITIZE = ROOT / "tests" / "nbval_sanitize.cfg"


def run(*command, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


# --- versions ---------------------------------------------------------------------------------------------------------


def pins(lines) -> dict[str, Requirement]:
    """Canonical name -> requirement, of lines that must each name one exact version."""
    found = {}
    for line in lines:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert requirement.url is None and re.fullmatch(r"==[^*+]+", str(requirement.specifier)), f"not exact: {line}"
        assert name not in found, f"twice: {line}"
        found[name] = requirement
    return found


def lock() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return pins(line for line in lines if line and not line.startswith("#"))


def conda() -> dict[str, Requirement]:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return pins(next(entry for entry in dependencies if isinstance(entry, dict))["pip"])


def direct() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return pins(itertools.chain(project["dependencies"], *project["optional-dependencies"].values()))


def test_pyproject_lock_and_conda_environment_agree():
    def versions(requirements):
        return {name: (str(r.specifier), str(r.marker or "")) for name, r in requirements.items()}

    assert versions(conda()) == versions(lock()), "run make environment.yml"
    for name, requirement in direct().items():
        assert name in lock() and lock()[name].specifier == requirement.specifier, name


@pytest.mark.parametrize("name", sorted(direct()))
def test_direct_dependency_is_installed_at_its_pin(name):
    installed = Version(importlib.metadata.version(name))
    assert f"=={installed.public}" == str(direct()[name].specifier)  # public: torch's CPU build calls itself +cpu


def test_lock_is_closed():
    """Every package that a direct dependency needs here, however far down, is in the lock."""
    locked, seen, todo = lock(), set(), list(direct())
    while todo:
        name = todo.pop()
        if name in seen or re.match(r"nvidia-|cuda-|triton", name):  # torch's CUDA build pins these itself
            continue
        seen.add(name)
        assert name in locked, name
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(requirement.name))


def test_every_imported_package_is_a_direct_dependency():
    files = [*(ROOT / "geomlib").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    own = {"geomlib"} | {path.stem for path in files}
    provided_by = importlib.metadata.packages_distributions()
    for module in imported - set(sys.stdlib_module_names) - own:
        assert {canonicalize_name(name) for name in provided_by[module]} & set(direct()), module


def test_conda_python_is_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(entry for entry in dependencies if str(entry).startswith("python="))
    assert Requirement("python" + project["requires-python"]).specifier.contains(python.removeprefix("python="))


# --- files ------------------------------------------------------------------------------------------------------------


def tracked() -> list[Path]:
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_registry_host_or_a_path_of_one_machine():
    hosts = [r"pypi\.org", r"files\.pythonhosted", r"registry\.npmjs", r"deb\.debian", r"security\.debian"]
    paths = [r"(?<![\w.])/root/", r"(?<![\w.])/work/", r"(?<![\w.])/home/\w", r"(?<![\w.])/Users/\w"]
    forbidden = re.compile("|".join(hosts + paths).encode())
    for path in tracked():
        if path != Path(__file__):
            found = forbidden.search(path.read_bytes())
            assert not found, f"{path.relative_to(ROOT)}: {found.group().decode()}"


def test_no_file_is_large():
    assert not [path for path in tracked() if path.stat().st_size > 1_500_000]


def test_ci_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("\nmake test")


# --- the book ---------------------------------------------------------------------------------------------------------


def contents() -> list[str]:
    def files(node):
        if isinstance(node, dict):
            yield from (node[key] for key in ("root", "file") if key in node)
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
            yield from files(child)

    return list(files(yaml.safe_load((ROOT / "_toc.yml").read_text())))


def test_the_contents_and_the_files_are_the_same():
    listed = contents()
    assert len(listed) == len(set(listed))
    assert {name for name in listed if name.startswith("notebooks/")} == {f"notebooks/{p.stem}" for p in NOTEBOOKS}
    pages = {str(p.relative_to(ROOT).with_suffix("")) for p in (ROOT / "book").rglob("*.md") if "slides" not in p.parts}
    assert {name for name in listed if name.startswith("book/")} == pages


def test_nothing_is_executed_at_build():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["execute"]["execute_notebooks"] == "off"  # unquoted, YAML reads it as false


def test_formulas_need_no_network():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]
    folders = [ROOT / folder for folder in config["html_static_path"]]
    assert any((folder / config["mathjax_path"]).is_file() for folder in folders)
    assert any(list((folder / config["mathjax_path"]).parent.rglob("*.woff")) for folder in folders)
    assert not (ROOT / "_static").exists()  # jupyter-book would put its scripts into every page


# --- notebooks --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_notebook_has_one_parameters_cell_of_literals(notebook):
    tagged = [cell for cell in code(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign | ast.AnnAssign), ast.unparse(statement)
        ast.literal_eval(statement.value)


def test_every_figure_has_number_caption_and_description_and_is_referred_to(notebook):
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for cell in code(notebook):
        if not any("image/png" in output.get("data", {}) for output in cell.outputs):
            continue
        figure, image = cell.metadata.mystnb.figure, cell.metadata.mystnb.image
        assert figure.name.startswith("fig-") and len(figure.caption) > 40, cell.source
        assert f"{{numref}}`{figure.name}`" in prose, figure.name
        assert len(image.alt) > 40 and image.alt != figure.caption, figure.name


def test_figure_names_are_unique_in_the_book():
    cells = [cell for path in NOTEBOOKS for cell in code(nbformat.read(path, as_version=4))]
    names = [
        cell.metadata.mystnb.figure.name
        for cell in cells
        if "mystnb" in cell.metadata and "figure" in cell.metadata.mystnb
    ]
    assert len(names) == len(set(names)) > 30


# Terms of the glossary that are also everyday words, so that a first use cannot be told by spelling.
EVERYDAY = {
    "bin",
    "claim",
    "control",
    "cost",
    "damage",
    "stray",
    "advantage",
    "key",
    "level",
    "operation",
    "profile",
    "run",
    "sketch",
    "study",
    "vote",
    "window",
}


def test_terms_of_the_glossary_are_linked_at_first_use(notebook):
    """Where a term stands in the running text, its first mention, headings and exercises aside, is the link."""
    glossary = (ROOT / "book" / "notation.md").read_text().split("```{glossary}\n")[1].split("```")[0]
    terms = [line for line in glossary.splitlines() if re.match(r"\S", line)]
    assert len(terms) > 25
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    text = "\n".join(cells).split("\n## Exercises")[0]
    text = re.sub(r"(?ms)^```\w*$.*?^```$", "", text)  # code in the prose
    text = re.sub(r"(?m)^(#.*|```.*|:label:.*|:class:.*)$|\*\*[^*]+\*\*|\*[^*]+\*", "", text)
    spoken = r"(\{term\}`[^`]*`)|\{[\w:]+\}`[^`]*`|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\[[^]]*\]\([^)]*\)"
    text = re.sub(spoken, lambda m: m[1] or " ", text, flags=re.DOTALL)
    for term in set(terms) - EVERYDAY:
        word = re.compile(rf"(?<![\w-]){re.escape(term)}(?:s|es)?(?![\w-])", re.IGNORECASE)
        links = [m for m in re.finditer(r"\{term\}`([^`<]*)(?:<([^>]*)>)?`", text) if (m[2] or m[1]).strip() == term]
        assert len(links) <= 1, term
        first = word.search(text)
        if first:
            assert links and links[0].start() <= first.start() <= links[0].end(), text[
                max(0, first.start() - 60) : first.end() + 40
            ]


def test_notebook_sets_itself_up_on_colab_and_nowhere_else(notebook):
    """By one and the same cell, hidden in the book, from the repository that the launch buttons name."""
    first = nbformat.read(NOTEBOOKS[0], as_version=4).cells[1]
    cell = notebook.cells[1]
    assert cell.source == first.source and cell.metadata.tags == ["remove-cell"] and not cell.get("outputs")
    url = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    outside, guarded = cell.source.split('if "google.colab" in sys.modules:\n')
    assert f'"git clone --quiet --depth 1 {url}"' in guarded
    assert outside.splitlines()[1:] == ["import os", "import sys", ""]
    assert all(line.startswith("    ") for line in guarded.splitlines())


def test_notebook_has_what_papermill_and_the_strict_build_need(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.kernelspec.language == "python"
    assert notebook.metadata.language_info.name == "python"
    assert "papermill" not in notebook.metadata


def test_notebook_is_committed_with_clean_outputs(notebook):
    for cell in code(notebook):
        assert cell.execution_count is not None, cell.source  # nbval compares nothing in such a cell
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", cell.source


def test_notebook_holds_calls_and_no_logic(notebook):
    for cell in code(notebook):
        assert not re.search(r"^\s*(async\s+def|def|class)\s", cell.source, re.MULTILINE), cell.source
        assert not cell.source.rstrip().endswith(";"), cell.source  # nbval then sees another output
        assert len(cell.source.splitlines()) <= 15, cell.source


@pytest.fixture(scope="module")
def small_notebook():
    """An executed notebook with a number, a table, an object's address and a duration in its outputs."""
    sources = [
        "print('F = 0.67')",
        "import pandas as pd\npd.DataFrame({'f': [0.672, 0.372]}, index=[2, 8])",
        "object()",
        "import time\nprint(f'took {time.time() % 100:.3f} s')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    return notebook


@pytest.mark.parametrize(
    ("committed", "passes"),
    [
        ({}, True),
        ({"F = 0.67": "F = 0.68"}, False),
        ({"0.372": "0.373"}, False),
        ({"took ": "needed "}, False),
    ],
    ids=["as it is", "a number", "a cell of a table", "a word"],
)
def test_nbval_notices_a_changed_output(small_notebook, committed, passes, tmp_path):
    notebook = copy.deepcopy(small_notebook)
    for cell in notebook.cells:
        outputs = json.dumps(cell.outputs)
        for before, after in committed.items():
            outputs = outputs.replace(before, after)
        cell.outputs = [nbformat.from_dict(output) for output in json.loads(outputs)]
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)

    options = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with", str(SANITIZE), "--nbval-cell-timeout=60"]
    done = run(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, *options, path, cwd=tmp_path
    )
    assert done.returncode == (0 if passes else 1), done.stdout


# --- the command line -------------------------------------------------------------------------------------------------


def test_help_comes_within_a_second():
    script = Path(sys.executable).with_name("geomlib")
    times = []
    for _ in range(5):  # the best of five: a busy machine slows some runs, never speeds one up
        start = time.perf_counter()
        done = run(script, "--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0 and "measure" in done.stdout, done.stderr
    assert min(times) < 1


def test_help_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from geomlib.cli import app\n"
        "sys.argv = ['geomlib', '--help']\n"
        "try:\n    app()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'numba', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
