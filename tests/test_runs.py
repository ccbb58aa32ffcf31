"""A run's folder: what is asked for, what goes on where it stopped, what is refused, and what is never touched.

On made-up notebooks, most of which import nothing, for a kernel starts in seconds; the one that measures does so on a small
model with random weights.
"""

import base64
import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from importlib.metadata import version
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from test_cli import run as command
from test_notebooks import printed, write
from test_study import save_model, save_texts

from geomlib import notebooks as N
from geomlib import runs
from geomlib.errors import GeomlibError
from geomlib.runs import PROFILES, Run, execute
from geomlib.study import Study, load_table

# One black point.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
SHOW = f"import base64\nfrom IPython.display import Image, display\ndisplay(Image(base64.b64decode('{PNG}')))"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A project with two chapters that no test executes; gives the notebooks' folder."""
    folder = tmp_path / "project" / "notebooks"
    folder.mkdir(parents=True)
    write(folder / "00_first.ipynb", "print(windows)")
    parameters = "model_name = 'm'\ncorpora = ['a']\nspeed = 1.5\nfast = True\nretentions = [0.5]"
    write(folder / "01_second.ipynb", "print(speed)", parameters=parameters)
    monkeypatch.chdir(folder.parent)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, to the byte; the lock and the log, to which each try adds, apart."""
    kept = [p for p in folder.rglob("*") if p.is_file() and p.name not in (".lock", "run.log")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in kept}


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_name_parameters_that_the_chapters_have_with_values_of_their_type(profile):
    """Of the project's own notebooks; each value must reach one of them."""
    known = {b: N.parameters(b) for b in N.chapters([])}
    for chapter, values in PROFILES[profile].items():
        assert chapter == "" or chapter in {b.stem for b in known}
        for name, value in values.items():
            having = [b for b in known if name in known[b] and chapter in ("", b.stem)]
            assert having, (profile, chapter, name)
            for b in having:
                N.check_parameters(b, {name: value})
    for b, defaults in known.items():
        given = Run(profile=profile, corpora=("x", "y"), model="m").values(b, defaults, Path("out"))
        N.check_parameters(b, given)
        assert set(given) <= set(defaults)
        for name in set(given) & {"corpora", "retentions"}:  # of lists, each element too
            assert {type(x) for x in given[name]} == {type(x) for x in defaults[name]}


def test_a_profile_gives_way_to_a_chapters_own_values_and_these_to_settings(book, monkeypatch):
    monkeypatch.setitem(PROFILES, "quick", {"": {"speed": 2.0, "windows": 7}, "01_second": {"speed": 3.0}})
    first, second = N.chapters([])
    known = {b: N.parameters(b) for b in (first, second)}

    def values(b, **fields):
        return Run(profile="quick", **fields).values(b, known[b], Path("out"))

    assert values(first) == {"windows": 7}
    assert values(second, model="other")["speed"] == 3.0
    assert values(second, settings={"speed": 4.0})["speed"] == 4.0
    assert values(second, corpora=("x", "y"), model="other") == {
        "speed": 3.0,
        "corpora": ["x", "y"],
        "model_name": "other",
    }
    assert "corpora" not in values(second)  # the notebook's own stand


def test_models_beside_the_runs_own_are_measured_only_if_asked_for():
    for b in N.chapters([]):
        known = N.parameters(b)
        given = Run(model="mine").values(b, known, Path("out"))
        assert {n: v for n, v in given.items() if n in ("model_name", "compare_with", "other_model")} == {
            n: v for n, v in {"model_name": "mine", "compare_with": "mine", "other_model": ""}.items() if n in known
        }
        named = Run(model="mine", settings={"other_model": "yours"}).values(b, known, Path("out"))
        assert named.get("other_model") == ("yours" if "other_model" in known else None)


def test_the_same_request_finds_the_same_folder_and_another_one_another():
    asked = {
        "model": "org/name@" + "0123456789abcdef" * 2 + "01234567",
        "corpora": ("a", "b"),
        "settings": {"n": 2, "m": 3},
    }
    folder = Run(**asked).folder
    assert folder.parent == Path("runs") and folder == Run(**asked | {"settings": {"m": 3, "n": 2}}).folder
    assert re.fullmatch(r"org-name@0123456789ab-standard-[0-9a-f]{8}", folder.name)
    others = [
        {"model": "org/name@" + "0" * 40}, {"corpora": ("b", "a")}, {"corpora": ("a",)}, {"profile": "quick"},
        {"settings": {"n": 2}}, {"settings": {"n": 2, "m": 4}}, {"load": {"bits": 4}},
    ]  # fmt: skip
    assert len({folder, *(Run(**asked | o).folder for o in others)}) == len(others) + 1
    strange = Run(model="/tmp/../my models/ü'\"|*?\n" + "x" * 300).folder
    assert strange.parent == Path("runs") and len(strange.name) < 100 and not set(" '\"|*?\n/") & set(strange.name)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"colour": "blue"}, r"no chapter has a parameter colour: known are fast, name, retentions, speed, windows\."),
        ({"windows": "many"}, "windows = 'many' does not fit 00_first: give a whole number such as 2"),
        ({"windows": True}, "does not fit 00_first"),
        ({"windows": ...}, "does not fit 00_first"),  # a literal that JSON does not know
        ({"speed": "1"}, "speed = '1' does not fit 01_second: give a number such as 1.5"),
        ({"fast": 1}, "give True or False"),
        ({"retentions": 0.5}, "give a list such as"),
        ({"model_name": "x"}, "model_name is not for --set: give --model instead"),
        ({"corpora": ["x"]}, "corpora is not for --set: give --corpus instead"),
        ({"corpus": "x"}, "corpus is not for --set: give --corpus instead"),
        ({"runs": ["x"]}, "runs is not for --set"),
    ],
)
def test_settings_that_no_chapter_has_are_refused_before_anything_is_written(book, tmp_path, settings, sentence):
    for out in (tmp_path / "out", None):
        with pytest.raises(GeomlibError, match=sentence):
            execute(Run(settings=settings), out)
    assert not (tmp_path / "out").exists() and not Path("runs").exists()


def test_a_setting_must_be_of_a_chapter_that_runs(book, tmp_path):
    with pytest.raises(GeomlibError, match="no chapter has a parameter speed: known are name, windows"):
        execute(Run(settings={"speed": 2.0}), tmp_path / "out", ["00"])
    with pytest.raises(GeomlibError, match="there is no notebook 07: give one of 00_first, 01_second"):
        execute(Run(), tmp_path / "out", ["00", "07"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["itself", "by another path", "by a link"])
def test_the_notebooks_own_folder_is_no_place_for_a_run(book, tmp_path, way):
    (tmp_path / "link").symlink_to(book)
    out = {"itself": book, "by another path": book / ".." / "notebooks", "by a link": tmp_path / "link"}[way]
    before = content(book)
    with pytest.raises(GeomlibError, match="holds the notebooks themselves, .*: give another --out"):
        execute(Run(), out)
    assert content(book) == before


# --- a run with everything that can happen to a chapter ---------------------------------------------------------------

FAILS = "import pathlib\nassert pathlib.Path('mended').exists(), f'only {windows}'\nprint('mended')"
DIES = "import os, pathlib, signal\nif not pathlib.Path('mended').exists():\n    os.kill(os.getpid(), signal.SIGKILL)"
ASKED = Run(model="some/model@0", settings={"windows": 4})


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of four chapters, of which the second fails and the third kills its kernel: its folder, what `execute` gave, stderr,
    the environment before and after, the notebooks before and after; then what a second try of it gave, once mended."""
    place = tmp_path_factory.mktemp("runs")
    book = place / "notebooks"
    book.mkdir()
    where = "import os, sys\nprint(windows, os.getcwd(), os.environ['GEOMLIB_RESULTS'], os.environ['GEOMLIB_LOAD'])"
    write(book / "00_first.ipynb", where, SHOW, "print('aside', file=sys.stderr)\nos.system('echo below >&2')", SHOW)
    write(book / "01_second.ipynb", SHOW, FAILS, "print('never')")
    write(book / "02_third.ipynb", DIES)
    write(book / "03_fourth.ipynb", "print(name, speed)", parameters="name = 'c'\nspeed = 1.5")
    found = {"out": place / "out", "notebooks": content(book), "place": place}
    here, stderr = os.getcwd(), sys.stderr
    os.environ["GEOMLIB_LOAD"] = "{}"
    os.environ.pop("GEOMLIB_RESULTS", None)
    before = dict(os.environ)
    os.chdir(place)
    try:
        for name in ("first", "second"):
            with open(place / name, "w+") as sys.stderr:
                found[name] = execute(ASKED, place / "out", environ={"GEOMLIB_LOAD": '{"device": "cpu"}'})
            found[f"{name} said"] = (place / name).read_text().splitlines()
            found[f"{name} record"] = runs.read(place / "out")
            found[f"{name} notebooks"] = {p.stem: nbformat.read(p, 4) for p in sorted((place / "out").glob("0*.ipynb"))}
            found[f"{name} times"] = {p.stem: p.stat().st_mtime_ns for p in sorted((place / "out").glob("0*.ipynb"))}
            (place / "out" / "mended").touch()
        found["environment"] = (before, dict(os.environ))
        found["handlers"] = (signal.getsignal(signal.SIGTERM), os.getcwd())
        found["notebooks after"] = content(book)
        yield found
    finally:
        sys.stderr = stderr
        os.chdir(here)
        del os.environ["GEOMLIB_LOAD"]


def test_a_chapter_that_fails_stops_nothing_and_leaves_its_copy_with_the_error(done):
    out, failed = done["first"]
    assert out == done["out"] and list(failed) == ["01_second", "02_third"]
    assert failed["01_second"] == "failed: AssertionError: only 4"
    assert failed["02_third"].startswith("failed: ") and "died" in failed["02_third"]
    copy = done["first notebooks"]["01_second"]
    errors = [o for c in copy.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "error"]
    assert [(e.ename, e.evalue) for e in errors] == [("AssertionError", "only 4")]
    assert "02_third" in done["first notebooks"]  # as far as it came
    assert printed(out / "03_fourth.ipynb") == "c 1.5\n"  # `windows` is no parameter of this one


def test_each_chapter_is_said_with_its_place_and_what_became_of_it(done):
    lines = done["first said"]
    assert [re.sub(r"\d+ s$", "N s", line) for line in lines] == [
        "[1/4] 00_first: finished, N s", "[2/4] 01_second: failed: AssertionError: only 4, N s",
        f"[3/4] 02_third: {done['first'][1]['02_third']}, N s", "[4/4] 03_fourth: finished, N s",
    ]  # fmt: skip


def test_kernels_know_where_results_go_and_nothing_else_changes(done):
    out = done["out"]
    assert printed(out / "00_first.ipynb") == f'4 {out} {out / "tables"} {{"device": "cpu"}}\n'
    before, after = done["environment"]
    assert after == before
    assert done["handlers"] == (signal.SIG_DFL, str(done["place"]))


def test_the_committed_notebooks_stay_as_they_are_to_the_byte(done):
    assert done["notebooks after"] == done["notebooks"]


def test_what_kernels_print_aside_is_in_the_log_and_not_on_the_terminal(done):
    log = (done["out"] / "run.log").read_text()
    assert "below" in log.splitlines()
    assert not any("below" in line or "aside" in line for line in done["first said"])
    stamped = [line[24:] for line in log.splitlines() if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line)]
    assert stamped[0] == "run of some/model@0, profile standard: 00_first, 01_second, 02_third, 03_fourth"
    assert re.fullmatch(r"00_first: finished in \d+\.\d s", stamped[1])
    assert stamped[2] == "01_second: failed: AssertionError: only 4"
    assert stamped.count(stamped[0]) == 2  # the second try adds to it


def test_the_environment_and_what_was_asked_are_written_down(done):
    packages = (done["out"] / "environment.txt").read_text().splitlines()
    assert packages == sorted(packages, key=str.lower) and len(packages) > 50
    for name in ("papermill", "torch", "pandas"):
        assert f"{name}=={version(name)}" in packages
    record = done["first record"]
    assert record["asked"] == {
        "model": "some/model@0",
        "corpora": [],
        "profile": "standard",
        "settings": {"windows": 4},
        "load": {},
    }
    assert record["versions"]["geomlib"] == version("geomlib") and record["versions"]["python"] in sys.version
    assert record["machine"]["cores"] == os.cpu_count() and record["machine"]["memory_bytes"] > 2**28
    chapters = record["chapters"]
    assert {c: x["status"] for c, x in chapters.items()} == {
        "00_first": "finished", "01_second": "failed", "02_third": "failed", "03_fourth": "finished",
    }  # fmt: skip
    assert chapters["00_first"]["parameters"] == {"windows": 4} and chapters["03_fourth"]["parameters"] == {}
    assert {c: x.get("error") for c, x in chapters.items()} == dict.fromkeys(chapters) | done["first"][1]
    assert all(0 < x["seconds"] < 120 and x["peak_bytes"] > 2**24 for x in chapters.values())


def test_pictures_are_files_named_by_chapter_and_number(done):
    files = sorted((done["out"] / "figures").iterdir())
    assert [p.name for p in files] == ["00_first-01.png", "00_first-02.png", "01_second-01.png"]
    assert all(p.read_bytes() == base64.b64decode(PNG) for p in files)


def test_a_second_try_passes_over_what_is_finished_and_does_the_rest_again(done):
    assert done["second"] == (done["out"], {})
    assert [re.sub(r"\d+ s$", "N s", line) for line in done["second said"]] == [
        "[1/4] 00_first: finished before", "[2/4] 01_second: finished, N s", "[3/4] 02_third: finished, N s",
        "[4/4] 03_fourth: finished before",
    ]  # fmt: skip
    first, second = done["first times"], done["second times"]
    assert {c for c in first if first[c] == second[c]} == {"00_first", "03_fourth"}
    assert {x["status"] for x in done["second record"]["chapters"].values()} == {"finished"}
    assert not any("error" in x for x in done["second record"]["chapters"].values())
    assert printed(done["out"] / "01_second.ipynb") == "mended\nnever\n"


def test_nothing_is_left_of_kernels(done):
    assert not list(done["out"].glob("kernel-ipc-*")) and not list(done["out"].glob(".progress"))
    assert sorted(p.name for p in done["out"].iterdir() if not p.name.startswith(".")) == [
        "00_first.ipynb", "01_second.ipynb", "02_third.ipynb", "03_fourth.ipynb", "environment.txt", "figures", "mended",
        "run.json", "run.log",
    ]  # fmt: skip


@pytest.fixture
def again(done, tmp_path, monkeypatch):
    """A copy of that run, finished, with its notebooks; where it lies is no part of what it is."""
    shutil.copytree(done["out"], tmp_path / "out")
    shutil.copytree(done["place"] / "notebooks", tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def test_a_folder_that_was_moved_is_still_that_run(again, capsys):
    assert execute(ASKED, again) == (again, {})
    assert capsys.readouterr().err.count("finished before") == 4


def refused(asked: Run, out: Path, sentence: str) -> None:
    before = content(out)
    with pytest.raises(GeomlibError, match=sentence) as caught:
        execute(asked, out)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert content(out) == before


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"settings": {"windows": 5}}, "settings"),
        ({"settings": {}}, "settings"),
        ({"model": "other", "profile": "quick"}, "model, profile"),
        ({"corpora": ("x",), "load": {"bits": 4}}, "corpora, load"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(again, changed, names):
    refused(
        ASKED.model_copy(update=changed), again, rf"holds another run \(it differs in {names}\): give another --out"
    )


def test_a_run_of_another_version_of_the_library_is_explained_and_left(again, monkeypatch):
    monkeypatch.setattr(runs, "code_hash", lambda: "0123456789abcdef")
    was = re.escape(runs.read(again)["versions"]["code"])
    refused(
        ASKED, again, f"was made by geomlib .* with code {was}, and this is .* with code 0123456789abcdef: it is left"
    )


def test_a_run_of_another_version_of_a_notebook_is_explained_and_left(again, capsys):
    write(Path("notebooks") / "03_fourth.ipynb", "print('anew')", parameters="name = 'c'\nspeed = 1.5")
    refused(ASKED, again, "holds 03_fourth executed from another version of the notebook: it is left as it is")
    assert execute(ASKED, again, ["00", "01"]) == (again, {})  # the others are what they were


def test_other_values_of_a_profile_are_another_version(again, monkeypatch):
    monkeypatch.setitem(PROFILES, "standard", {"": {"speed": 2.5}})
    refused(ASKED, again, "holds 03_fourth executed from another version")


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        '"run"',
        "{}",
        '{"asked": {}}',
        '{"asked": {"colour": 1}, "versions": {}, "chapters": {}}',
        "\udcff",
    ],
)
def test_a_damaged_record_is_one_sentence(again, damaged):
    (again / "run.json").write_bytes(damaged.encode(errors="surrogateescape"))
    refused(ASKED, again, r"run\.json cannot be read: give another folder, or remove this one")
    with pytest.raises(GeomlibError, match="cannot be read"):
        runs.read(again)


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    for folder in (tmp_path, tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(GeomlibError, match=r"holds no run \(no run.json\): give a folder that geomlib run wrote\."):
            runs.read(folder)


def test_where_nothing_can_be_written(book, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/none")):
        with pytest.raises(GeomlibError, match=f"cannot write to {out}: .*; mend it, or give another --out"):
            execute(Run(), out)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_fills_up_is_one_sentence_and_keeps_what_was_finished(again, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    (again / "03_fourth.ipynb").unlink()
    monkeypatch.setattr(runs.papermill, "execute_notebook", full)
    with pytest.raises(
        GeomlibError, match="cannot write to .*: No space left on device; what was finished before is kept"
    ):
        execute(ASKED, again)
    statuses = {c: x["status"] for c, x in runs.read(again)["chapters"].items()}
    assert statuses == {"00_first": "finished", "01_second": "finished", "02_third": "finished", "03_fourth": "stopped"}
    assert (again / "run.log").read_text().splitlines()[-1].split(" ", 2)[2].startswith("stopped by GeomlibError")


def test_a_kernel_that_does_not_start_is_a_failed_chapter(again, monkeypatch):
    def dead(*args, **kwargs):
        raise RuntimeError("Kernel died before replying to kernel_info\nmore")

    shutil.copy(again / "02_third.ipynb", again / "03_fourth.ipynb")
    record = runs.read(again)
    record["chapters"]["03_fourth"]["status"] = "stopped"
    (again / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr(runs.papermill, "execute_notebook", dead)
    assert execute(ASKED, again)[1] == {"03_fourth": "failed: Kernel died before replying to kernel_info"}


def test_fewer_pictures_than_before_leave_none_of_the_old(again):
    notebook = nbformat.read(again / "00_first.ipynb", as_version=4)
    notebook.cells[-1].outputs = []
    nbformat.write(notebook, again / "00_first.ipynb")
    (again / "figures" / "00_first-notes.txt").touch()
    runs.pictures(again / "00_first.ipynb", again / "figures")
    assert sorted(p.name for p in (again / "figures").glob("00_*")) == ["00_first-01.png", "00_first-notes.txt"]


def test_not_on_the_main_thread_signals_are_left_alone(again, capsys):
    found = []
    thread = threading.Thread(target=lambda: found.append(execute(ASKED, again)))
    thread.start()
    thread.join()
    assert found == [(again, {})]


# --- stopping, in the midst of a window -------------------------------------------------------------------------------

# Notes each window when its table is written, and takes its time over each so that a signal meets it half done.
MEASURE = """
import os, time
from pathlib import Path
from geomlib import Study, load_model, store
Path("pid").write_text(str(os.getpid()))
measure, keep = Study._measure, store.Tables.keep

def slow(self, *args):
    time.sleep(0.3)
    for each in measure(self, *args):
        time.sleep(0.3)
        yield each

def noted(self, table, analysis, file):
    keep(self, table, analysis, file)
    with open("measured.txt", "a") as notes:
        notes.write(f"{file}\\n")

Study._measure, store.Tables.keep = slow, noted
table = Study(model=model_name, text=text, windows=windows, length=24, sizes=(1, 2, 4), bins=3, random_rankings=2).run()
print(len(table))
"""
# In the background Python ignores Ctrl-C; here it is taken as in the foreground.
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from geomlib import runs
try:
    out, failed = runs.execute(runs.Run(model=sys.argv[1]), Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(1 if failed else 0)
"""
WINDOWS = 8


def start(model: Path, out: Path, **kwargs) -> subprocess.Popen:
    """A run in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model), str(out)], start_new_session=True, **kwargs,
    )  # fmt: skip


def until(true, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False


def test_stopped_in_every_way_it_goes_on_at_the_first_window_that_is_missing(tmp_path, monkeypatch):
    """SIGKILL, SIGTERM and Ctrl-C each in the midst of a window, then the rest on a terminal: each window is measured once and
    the table is that of a study that nobody stopped. While it runs, another process is refused."""
    model, texts, out = save_model(tmp_path / "model"), save_texts(tmp_path / "texts.jsonl", 30), tmp_path / "out"
    (tmp_path / "notebooks").mkdir()
    parameters = f"model_name = ''\ntext = {str(texts)!r}\nwindows = {WINDOWS}"
    book = write(tmp_path / "notebooks" / "00_only.ipynb", MEASURE, parameters=parameters)
    committed = book.read_bytes()
    monkeypatch.chdir(tmp_path)

    def tables() -> list[str]:
        return sorted(p.name for p in out.glob("tables/*/separability/*.parquet"))

    stops = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    for turn, number in enumerate(stops):
        with start(model, out, stderr=subprocess.PIPE, text=True) as running:
            until(lambda turn=turn: len(tables()) > 2 * turn or running.poll() is not None)
            if turn == 0:
                with pytest.raises(
                    GeomlibError, match=f"another process is running in {out}: wait for it, or give another"
                ):
                    execute(Run(model=str(model)), out)
            os.killpg(running.pid, number)
            _, errors = running.communicate(timeout=60)
        assert running.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), errors
        assert "Traceback" not in errors
        kernel = int((out / "pid").read_text())
        until(lambda kernel=kernel: not alive(kernel), 10)  # none is left behind
        assert 2 * turn < len(tables()) < WINDOWS
        assert runs.read(out)["chapters"]["00_only"]["status"] == "stopped"
    assert "stopped by KeyboardInterrupt" in (out / "run.log").read_text()
    assert not [p for p in out.rglob(".*.parquet*")]  # no table half written

    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (30, 100))
    with start(model, out, stdin=follower, stdout=follower, stderr=follower, close_fds=True) as running:
        os.close(follower)
        shown = b""
        while select.select([leader], [], [], 90)[0]:
            with contextlib.suppress(OSError):
                if chunk := os.read(leader, 65536):
                    shown += chunk
                    continue
            break
    os.close(leader)
    shown = shown.decode()
    assert running.returncode == 0, shown
    assert "[1/1] 00_only: cell 1 of 3" in shown  # over the chapters and their cells, one of them papermill's
    assert re.search(r"\[1/1\] 00_only: cell \d of 3 \| …\S+:\s+\d+%\|[^\r]*\| \d+/\d+ \[\d\d:\d\d<", shown), shown
    assert max(len(line) for line in shown.split("\r\x1b[K")[:-1]) <= 99  # on one line, the model's long path cut
    assert shown.splitlines()[-1].split("\x1b[K")[-1].startswith("[1/1] 00_only: finished, ")

    noted = (out / "measured.txt").read_text().split()
    assert sorted(noted) == tables() and len(set(noted)) == len(noted) == WINDOWS
    study = Study(
        model=str(model), text=str(texts), windows=WINDOWS, length=24, sizes=(1, 2, 4), bins=3, random_rankings=2
    )
    whole = study.run(tmp_path / "whole")
    (folder,) = [p.parent for p in out.glob("tables/*/study.json")]
    pd.testing.assert_frame_equal(load_table(folder), whole)
    assert printed(out / "00_only.ipynb") == f"{len(whole)}\n" and book.read_bytes() == committed
    assert not list(out.glob("kernel-ipc-*")) and not (out / ".progress").exists()


def test_the_command_says_which_failed(book, tmp_path):
    write(book / "01_second.ipynb", "assert speed == 2.5, f'speed is {speed}'", parameters="speed = 1.5")
    (tmp_path / "model").mkdir()
    arguments = ["run", "--model", tmp_path / "model", "--out", tmp_path / "out", "--chapters", "01"]
    done = command(*arguments, "--set", "speed=3.5")
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr and lines[0].startswith(
        "[1/1] 01_second: failed: AssertionError: speed is 3.5"
    )
    assert lines[-1] == f"geomlib: 01_second failed: open the executed notebook in {tmp_path / 'out'} to see where."
    done = command(*arguments, "--set", "speed=2.5")
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert "holds another run (it differs in settings)" in done.stderr
