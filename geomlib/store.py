"""The folder of a study on disk: study.json and one Parquet file a window and analysis.

Each file is written whole or not at all, and one process at a time measures into a folder.
"""

import errno
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from geomlib.errors import GeomlibError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)  # what network file systems answer
_POLL_SECONDS = 0.5


def results_root() -> Path:
    """Where studies go by themselves: $GEOMLIB_RESULTS, else the folder runs/studies here."""
    return Path(os.environ.get("GEOMLIB_RESULTS") or Path("runs") / "studies")


# --- whose folder it is -----------------------------------------------------------------------------------------------


def holds(folder: Path, record: dict) -> bool:
    """Whether the folder is this very study's (True) or nobody's (False).

    Raises:
        GeomlibError: it holds another study, or this one measured by another version; it is left as it is.
    """
    path = folder / "study.json"
    try:
        there = dict(json.loads(path.read_text())) if path.is_file() else None
    except (OSError, ValueError, TypeError):
        raise GeomlibError(f"{path} cannot be read: give another folder, or remove this one.") from None
    if there is None or there.get("key") == record["key"]:
        return there is not None
    parts = [k for k in record if k != "key" and there.get(k) != record[k]]
    fields = there.get("study") if isinstance(there.get("study"), dict) else {}
    # A field that one of the two does not know says which version wrote it, not what was asked.
    names = [f for f, v in record["study"].items() if f in fields and fields[f] != v]
    if fields and not names and set(parts) <= {"versions", "study"}:
        theirs, ours = there.get("versions") or {}, record["versions"]
        other = [n for n in ours if theirs.get(n) != ours[n]]
        was, now = (", ".join(f"{n} {v.get(n, 'unknown')}" for n in other) for v in (theirs, ours))
        raise GeomlibError(
            f"{folder} holds this study measured by another version ({was or 'unknown'}; here {now or 'other fields'}) and is "
            f"left as it is: read it with load_table(folder, any_code=True), give another folder, or remove this one."
        )
    raise GeomlibError(
        f"{folder} holds another study (it differs in {', '.join(names or parts)}): give another folder, or remove this one."
    )


def claim(folder: Path, record: dict) -> None:
    """Write study.json, or make sure that the one there is this very study's."""
    if not holds(folder, record):
        with one_sentence(folder):
            folder.mkdir(parents=True, exist_ok=True)
            whole(folder / "study.json", lambda tmp: tmp.write_text(json.dumps(record, indent=1) + "\n"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone; waits for another one. The lock of a killed process is free."""
    with one_sentence(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # No soft lock where flock is missing: one left by a killed process would have to be removed by hand.
        lock = FileLock(folder / ".lock", is_singleton=True, fallback_to_soft=False, poll_interval=_POLL_SECONDS)
        _acquire(lock, folder)
    try:
        yield
    finally:
        if lock.is_locked:
            lock.release()


def _acquire(lock: FileLock, folder: Path) -> None:
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"geomlib: another process measures this study in {folder}: waiting for it", file=sys.stderr)
            lock.acquire()
    except (OSError, NotImplementedError) as e:
        if isinstance(e, OSError) and e.errno not in _NO_LOCKS:
            raise
        # Nothing gets lost all the same, since files appear whole; two processes would measure some windows twice.
        print(
            f"geomlib: the file system of {folder} has no locks: let one process at a time measure this study",
            file=sys.stderr,
        )


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """Where the tables of a study go.

    Attributes:
        folder: the study's.
        stamps: analysis -> what its files carry.
        marks: analysis -> the mark of what `run` was given for it, or "".
    """

    folder: Path
    stamps: dict[str, str]
    marks: dict[str, str]

    def path(self, analysis: str, file: str) -> Path:
        return place(self.folder, analysis, self.marks[analysis]) / file

    def has(self, analysis: str, file: str) -> bool:
        return read(self.path(analysis, file), self.stamps[analysis]) is not None

    def keep(self, table: pd.DataFrame, analysis: str, file: str) -> None:
        """Write one window's table."""
        path, stamp = self.path(analysis, file), self.stamps[analysis]
        arrow = pa.Table.from_pandas(table, preserve_index=False)
        arrow = arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), b"geomlib_study": stamp.encode()})
        with one_sentence(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole(path, lambda tmp: pq.write_table(arrow, tmp, compression="zstd", write_page_checksum=True))


def place(folder: Path, analysis: str, mark: str) -> Path:
    """Where a table's files are: what was asked for with other orders has a folder of its own."""
    return folder / (f"{analysis}-{mark[:8]}" if mark else analysis)


def stamp_of(path: Path) -> str | None:
    """The stamp of a table's file, None where there is none to read."""
    try:
        metadata = pq.read_schema(path).metadata if path.is_file() else None
    except (OSError, pa.ArrowException):
        return None
    return ((metadata or {}).get(b"geomlib_study") or b"").decode() or None


def read(path: Path, stamp: str) -> pd.DataFrame | None:
    """The table of one window, or None unless the file is there, whole, and carries this stamp."""
    try:
        table = pq.read_table(path, page_checksum_verification=True) if path.is_file() else None
    except (OSError, pa.ArrowException):
        return None
    mine = table is not None and (table.schema.metadata or {}).get(b"geomlib_study") == stamp.encode()
    return table.to_pandas() if mine else None


def copy(source: Path, folder: Path, marks: dict[str, str]) -> None:
    """study.json and these tables of one folder into another, what is not there yet."""
    if folder.resolve() == source.resolve():
        return
    record = json.loads((source / "study.json").read_text())
    with locked(folder):
        claim(folder, record)
        for name, mark in marks.items():
            for file in sorted(place(source, name, mark).glob("*.parquet")):
                path = place(folder, name, mark) / file.name
                if stamp_of(path) is None:
                    with one_sentence(folder):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        whole(path, lambda tmp, file=file: shutil.copyfile(file, tmp))


# --- writing ----------------------------------------------------------------------------------------------------------


def whole(path: Path, write) -> None:
    """Write beside it, flush to disk, then rename: the file is there whole or not at all."""
    # Two processes of one number may write to one folder from two machines.
    tmp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write(tmp)
        with open(tmp, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


class one_sentence:
    """Turns a write that fails into one sentence; what was written before is whole."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            full = error.errno in _FULL
            why = "the disk is full" if full else f"{error.strerror or error}"
            raise GeomlibError(
                f"cannot write to {self.folder}: {why}; the windows written before are kept, "
                f"{'free some space' if full else 'mend it'} and run the same again."
            ) from error
