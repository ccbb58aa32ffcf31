"""A study's progress bar: on the terminal, or in a file for the process that started this one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_FORMAT = "{l_bar}{bar}| {n:.0f}/{total_fmt} [{elapsed}<{remaining}]"


@contextmanager
def bar(total: int, unit: str, title: str, shown: bool) -> Iterator[tqdm]:
    """A bar on stderr if `shown` and that is a terminal; where $GEOMLIB_PROGRESS names a file, its current line there instead.

    A notebook's kernel has no terminal: whoever executes the notebook reads the line and shows it.
    """
    file = _open(os.environ.get("GEOMLIB_PROGRESS"))
    to_file = {"file": file, "disable": False, "mininterval": 0.5} if file else {"disable": None if shown else True}
    try:
        with tqdm(total=total, unit=unit, desc=title, bar_format=_FORMAT, **to_file) as shown_bar:
            yield shown_bar
    finally:
        if file:
            file.close()


class _Line:
    """A file that holds what was written last."""

    encoding = "utf-8"

    def __init__(self, path: str):
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

    def write(self, text: str) -> None:
        if text.strip():  # not the line feed at the end
            content = text.encode()
            os.pwrite(self.handle, content, 0)
            os.ftruncate(self.handle, len(content))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        os.ftruncate(self.handle, 0)  # the study is at its end, the notebook may not be
        os.close(self.handle)


def _open(path: str | None) -> _Line | None:
    try:
        return _Line(path) if path else None
    except OSError:  # no reason not to measure
        return None
