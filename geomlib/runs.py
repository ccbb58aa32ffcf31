"""A run: the book's chapters on one model and some texts, in one folder that can be continued, compared and cited.

    *.ipynb       the executed chapters           tables/    their studies, one Parquet file a window
    figures/      their pictures                  run.json   what was asked, versions, what became of each chapter
    scorecard.*, measures.csv                     run.log, environment.txt

Each chapter is one papermill execution in a kernel of its own, whose studies go to tables/; so a run that was stopped
anywhere goes on at the first window that is missing.
"""

import base64
import hashlib
import json
import logging
import os
import platform
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, TextIO

import nbformat
import papermill
from filelock import FileLock, Timeout
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from pydantic import BaseModel, ConfigDict
from traitlets.config import Config

from geomlib import __version__
from geomlib.errors import GeomlibError
from geomlib.notebooks import chapters, check_parameters, code_hash, parameters, sources_hash

# Values of the notebooks' parameters, for all chapters and for some; where a profile says nothing, the notebook's own
# default holds. `windows` counts documents whose queries are all measured, `final_windows` those of the final query alone.
PROFILES: dict[str, dict[str, dict]] = {
    "quick": {
        "": {"length": 128, "windows": 2, "final_windows": 3, "random_rankings": 1, "calibrate": 2, "random_orders": 1,
             "retentions": [0.8, 0.5, 0.2], "recheck": 2},
    },
    "standard": {},
    # The paper's protocol: 1024 tokens, 256 documents, the final query, 16 random rankings, N to 256. What is ours beside
    # it, all queries and the removal of heads, takes fewer documents.
    "paper": {
        "": {"corpora": ["wikitext-103", "openwebtext"], "corpus": "wikitext-103", "length": 1024, "windows": 8,
             "final_windows": 256, "random_rankings": 16, "calibrate": 16},
        "04_taxonomy": {"windows": 256},
        "05_sparsification": {"windows": 32},
    },
}  # fmt: skip
_BY_OPTION = {"model_name": "--model", "corpora": "--corpus", "corpus": "--corpus", "runs": "geomlib scorecard"}
# Sockets in the run's folder, which one process has at a time: no ports to clash, nothing on the network.
_KERNEL = Config({"KernelManager": {"transport": "ipc"}})
_CELL_SECONDS = 7 * 24 * 3600  # of a large model on a large profile; who wants less stops it and goes on later
_LINE_SECONDS = 60  # between lines about progress where they are not overwritten


class Run(BaseModel):
    """What was asked: all that decides what the chapters measure. `load` are options of `load_model` that change numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    corpora: tuple[str, ...] = ()
    profile: Literal["quick", "standard", "paper"] = "standard"
    settings: dict = {}
    load: dict = {}

    def values(self, book: Path, known: dict, out: Path) -> dict:
        """The parameters that a chapter is executed with: what its profile, the options and the settings say of those it has."""
        profile = PROFILES[self.profile]
        values = {"compare_with": self.model, "other_model": "", **profile.get("", {}), **profile.get(book.stem, {})}
        if self.corpora:
            values |= {"corpora": list(self.corpora), "corpus": self.corpora[0]}
        values |= {"model_name": self.model, "measure_again": self.model, "runs": [str(out)], **self.settings}
        return {n: v for n, v in values.items() if n in known}

    @property
    def folder(self) -> Path:
        """Where it goes by itself: the same request finds the same folder."""
        key = hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]
        short = re.sub(r"(?<=@[0-9a-f]{12})[0-9a-f]{28}$", "", self.model)  # of a commit
        safe = re.sub(r"[^\w.@-]+", "-", short).strip("-.")[-60:]
        return Path("runs") / f"{safe}-{self.profile}-{key}"


def check(run: Run, names: Sequence[str] = ()) -> dict[Path, dict]:
    """The chapters of a run and the parameters they know, if all that is asked for fits them (`execute`)."""
    known = {b: parameters(b) for b in chapters(list(names))}
    for name in run.settings:
        if name in _BY_OPTION:
            raise GeomlibError(f"{name} is not for --set: give {_BY_OPTION[name]} instead.")
        if not any(name in k for k in known.values()):
            every = sorted({n for k in known.values() for n in k} - {*_BY_OPTION})
            raise GeomlibError(f"no chapter has a parameter {name}: known are {', '.join(every)}.")
    for book, there in known.items():
        check_parameters(book, run.values(book, there, Path()))
    return known


def execute(
    run: Run, out: Path | None = None, names: Sequence[str] = (), environ: dict[str, str] | None = None
) -> tuple[Path, dict[str, str]]:
    """Execute chapters into the run's folder; those that are finished there are passed over.

    Args:
        out: the folder; None: `run.folder`.
        names: chapters, by name or number; none: all.
        environ: more environment variables for the kernels (GEOMLIB_LOAD, GEOMLIB_SCHEDULER).

    Returns:
        The folder, and what went wrong: chapter -> a line about it. A chapter that fails leaves its executed copy with the error
        and stops nothing.

    Raises:
        GeomlibError: unknown chapters or parameters, values of another type, a folder of another run or version, or one
            in which another process is running.
        KeyboardInterrupt: stopped; what is finished is kept.
    """
    known = check(run, names)  # before the folder's name is made of it
    books = list(known)
    out = Path(out or run.folder).absolute()
    if out.resolve() in {b.parent.resolve() for b in books}:
        raise GeomlibError(f"{out} holds the notebooks themselves, which a run leaves as they are: give another --out.")
    given = {b: run.values(b, known[b], out) for b in books}
    failed = {}
    with _only_one(out), _log(out) as log, _terminated():
        record = _claim(run, out)
        stamps = {b: _stamp(b, values) for b, values in given.items()}
        other = [b.stem for b in books if _finished(record, b, out) not in (None, stamps[b])]
        if other:
            raise GeomlibError(
                f"{out} holds {', '.join(other)} executed from another version of the notebook: it is left as it is; give "
                f"another --out to run anew."
            )
        for socket in out.glob("kernel-ipc-*"):  # of a run that was killed
            socket.unlink()
        log.info("run of %s, profile %s: %s", run.model, run.profile, ", ".join(b.stem for b in books))
        for i, (book, values) in enumerate(given.items()):
            # A chapter that reads the run itself has to be made again when another one has been measured since.
            over = {n: c["stamp"] for n, c in record["chapters"].items() if n != book.stem} if "runs" in values else {}
            if _finished(record, book, out) and record["chapters"][book.stem].get("over", {}) == over:
                print(f"[{i + 1}/{len(books)}] {book.stem}: finished before", file=sys.stderr)
                continue
            started = time.monotonic()
            record["chapters"][book.stem] = {"status": "stopped", "stamp": stamps[book], "parameters": values}
            if over:
                record["chapters"][book.stem]["over"] = over
            _save(out, record)
            with _environment({"GEOMLIB_RESULTS": str(out / "tables"), **(environ or {})}):
                wrong = _chapter(book, values, out, f"[{i + 1}/{len(books)}] {book.stem}")
            took = {"seconds": round(time.monotonic() - started, 1), "peak_bytes": _children_peak()}
            record["chapters"][book.stem] |= {"status": "failed" if wrong else "finished", **took}
            if wrong:
                failed[book.stem] = record["chapters"][book.stem]["error"] = wrong
            _save(out, record)
            pictures(out / book.name, out / "figures")
            log.info("%s: %s", book.stem, wrong or f"finished in {took['seconds']} s")
            print(
                f"[{i + 1}/{len(books)}] {book.stem}: {wrong or 'finished'}, {took['seconds']:.0f} s", file=sys.stderr
            )
    return out, failed


def _chapter(book: Path, values: dict, out: Path, title: str) -> str | None:
    """What went wrong, None if nothing did."""
    with _noise_to(out / "run.log") as terminal, _Progress(out / ".progress", terminal) as progress:
        bar = {"desc": title, "file": progress, "bar_format": "{desc}: cell {n_fmt} of {total_fmt}"}
        try:
            papermill.execute_notebook(
                str(book), str(out / book.name), parameters=values, cwd=str(out), kernel_name="python3",
                progress_bar=bar, execution_timeout=_CELL_SECONDS, config=_KERNEL,
            )  # fmt: skip
        except KeyboardInterrupt:
            # The cell that was waited for is never asked again, of which asyncio would print a traceback at the very end.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            raise
        except papermill.PapermillExecutionError as e:
            return f"failed: {e.ename}: {e.evalue}"
        except (DeadKernelError, CellTimeoutError, RuntimeError) as e:  # out of memory, or of time; or it did not start
            return f"failed: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
        except OSError as e:
            raise GeomlibError(
                f"cannot write to {out}: {e.strerror or e}; what was finished before is kept, mend it and run the same again."
            ) from e
    return None


def pictures(notebook: Path, folder: Path) -> None:
    """The PNG pictures of an executed notebook as files, named by chapter and number."""
    shown = [
        output.data["image/png"]
        for cell in nbformat.read(notebook, as_version=4).cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{notebook.stem}-*.png"):
        old.unlink()
    for i, data in enumerate(shown, 1):
        (folder / f"{notebook.stem}-{i:02d}.png").write_bytes(base64.b64decode(data))


# --- the folder -------------------------------------------------------------------------------------------------------


def read(out: str | Path) -> dict:
    """run.json of a folder that a run wrote, of whatever version."""
    try:
        record = json.loads((Path(out) / "run.json").read_text())
        _ = Run(**record["asked"]), record["versions"]["geomlib"], record["versions"]["code"], dict(record["chapters"])
        return record
    except OSError:
        raise GeomlibError(f"{out} holds no run (no run.json): give a folder that geomlib run wrote.") from None
    except (ValueError, KeyError, TypeError):
        raise GeomlibError(
            f"{Path(out) / 'run.json'} cannot be read: give another folder, or remove this one."
        ) from None


def committed(folders: Sequence[str | Path] = ()) -> list[Path]:
    """These folders; none: those that come with the book, in the order of their names."""
    if folders:
        return [Path(f) for f in folders]
    for place in (Path.cwd(), Path(__file__).parent.parent):
        found = sorted(p.parent for p in (place / "book" / "runs").glob("*/run.json"))
        if found:
            return found
    raise GeomlibError(
        "there are no runs in book/runs: run this in a checkout of the project, or name folders of runs."
    )


def _claim(run: Run, out: Path) -> dict:
    """run.json of this very run, written if there is none."""
    code, asked = code_hash(), run.model_dump(mode="json")
    if (out / "run.json").exists():
        record = read(out)
        names = [n for n in asked if record["asked"].get(n) != asked[n]]
        if names:
            raise GeomlibError(f"{out} holds another run (it differs in {', '.join(names)}): give another --out.")
        if record["versions"]["code"] != code:
            theirs = record["versions"]
            raise GeomlibError(
                f"{out} was made by geomlib {theirs['geomlib']} with code {theirs['code']}, and this is {__version__} with code "
                f"{code}: it is left as it is, to be read with geomlib scorecard; give another --out to run anew."
            )
        return record
    installed = sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()}, key=str.lower)
    (out / "environment.txt").write_text("\n".join(installed) + "\n")
    versions = {"geomlib": __version__, "code": code, "python": platform.python_version()}
    record = {"asked": asked, "versions": versions, "machine": _machine(), "chapters": {}}
    _save(out, record)
    return record


def _stamp(book: Path, values: dict) -> str:
    """Changes with the notebook and what it is executed with; not with the folder's place."""
    given = {n: v for n, v in values.items() if n != "runs"}
    return hashlib.sha256((sources_hash(book) + json.dumps(given, sort_keys=True)).encode()).hexdigest()[:16]


def _finished(record: dict, book: Path, out: Path) -> str | None:
    """The stamp of a chapter that is finished in the folder, None if it is not."""
    there = record["chapters"].get(book.stem, {})
    return there.get("stamp") if there.get("status") == "finished" and (out / book.name).is_file() else None


def _save(out: Path, record: dict) -> None:
    tmp = out / ".run.json"
    tmp.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(tmp, out / "run.json")


def _machine() -> dict:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": platform.platform(), "cores": os.cpu_count(), "memory_bytes": memory}


def _children_peak() -> int:
    """Largest memory of a kernel so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise GeomlibError(f"another process is running in {out}: wait for it, or give another --out.") from None
    except OSError as e:
        raise GeomlibError(f"cannot write to {out}: {e.strerror or e}; mend it, or give another --out.") from e


@contextmanager
def _log(out: Path) -> Iterator[logging.Logger]:
    """run.log, with a time on each line; lines are added when the run goes on."""
    log = logging.getLogger("geomlib.run")
    log.setLevel(logging.INFO)
    handler = logging.FileHandler(out / "run.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    try:
        yield log
    except BaseException as e:
        log.info("stopped by %s", f"{type(e).__name__} {e}".strip())
        raise
    finally:
        log.removeHandler(handler)
        handler.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that the kernels inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM, as a batch system sends it before it kills, stops a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _noise_to(file: Path) -> Iterator[TextIO]:
    """What kernels and libraries print on stderr goes to a file; gives a handle on stderr as it was."""
    sys.stderr.flush()
    with open(file, "a") as log, os.fdopen(os.dup(2), "w") as terminal:
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            os.dup2(terminal.fileno(), 2)


class _Progress:
    """One line on stderr about where a run is: papermill's bar over the cells, which writes here, and the bar of the study that
    the kernel is measuring, which writes to a file. Where stderr is no terminal, a line a minute."""

    def __init__(self, file: Path, terminal: TextIO):
        self.file, self.terminal, self.cells, self.shown = file, terminal, "", ""
        self.live = terminal.isatty()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def write(self, text: str) -> None:
        self.cells = text.strip() or self.cells

    def flush(self) -> None:
        pass

    def __enter__(self):
        self.file.unlink(missing_ok=True)
        self.environment = _environment({"GEOMLIB_PROGRESS": str(self.file)})
        self.environment.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.environment.__exit__(None, None, None)
        self.file.unlink(missing_ok=True)
        if self.live:
            print("\r\x1b[K", end="", file=self.terminal, flush=True)

    def _watch(self) -> None:
        while not self.ended.wait(0.5 if self.live else _LINE_SECONDS):
            try:
                study = self.file.read_text()[-1000:].rstrip().split("\r")[-1].strip()
            except OSError:
                study = ""
            line = f"{self.cells} | {study}" if study else self.cells
            if self.live:
                room = (os.get_terminal_size(self.terminal.fileno()).columns or 80) - 1
                left = room - len(self.cells) - 4  # for the end of the study's bar: a model's name may be a long path
                if len(line) > room:
                    line = f"{self.cells} | …{study[-left:]}" if left > 0 else line[:room]
                print(f"\r\x1b[K{line}", end="", file=self.terminal, flush=True)
            elif line != self.shown:
                print(line, file=self.terminal, flush=True)
            self.shown = line
