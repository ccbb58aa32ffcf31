"""A study on a Dask cluster: a scheduler and two workers in processes of their own, on the prose of this book.

What one of them leaves when it is killed, or refuses, never changes a table: they are those of a run in this process.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
from distributed import Client, KilledWorker
from distributed.utils import LoopRunner
from test_study import files, leftovers, save_model, save_texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from geomlib import cluster, sparsify, store
from geomlib import study as S
from geomlib.errors import GeomlibError
from geomlib.models import load_model
from geomlib.study import Study, load_table

ROOT = Path(__file__).parents[1]
DASK = Path(sys.executable).with_name("dask")
LAYERS, HEADS = 3, 4


def words() -> list[str]:
    pages = [p.read_text() for p in sorted([*(ROOT / "book").glob("*.md"), ROOT / "README.md"])]
    return re.findall(r"\w+|[^\w\s]", " ".join(pages))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with model/ and prose.jsonl."""
    place = tmp_path_factory.mktemp("cluster")
    found = words()
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", *sorted(set(found))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = {"hidden_size": 64, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
    save_model(place / "model", vocab_size=len(vocabulary), **shape)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>").save_pretrained(
        place / "model"
    )
    passages = [" ".join(found[i : i + 300]) for i in range(0, len(found) - 300, 300)]
    (place / "prose.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in passages))
    return place


@pytest.fixture(scope="module")
def fields(place) -> dict:
    return {
        "model": str(place / "model"), "text": str(place / "prose.jsonl"), "windows": 8, "length": 160,
        "sizes": (2, 8, 32), "bins": 4, "random_rankings": 4,
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(fields):
    return load_model(fields["model"], device="cpu")


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    """The scheduler's address, and pid -> process of two workers."""
    folder = tmp_path_factory.mktemp("dask")
    file, log = folder / "scheduler.json", open(folder / "log", "w")  # noqa: SIM115 (closed below)

    def start(*command) -> subprocess.Popen:
        return subprocess.Popen([DASK, *command], stdout=log, stderr=subprocess.STDOUT, cwd=folder)

    local = ["--host", "127.0.0.1", "--scheduler-file", file, "--no-dashboard"]
    scheduler = start("scheduler", *local, "--port", "0")
    workers = [start("worker", *local, "--nthreads", "1", "--no-nanny", "--memory-limit", "0") for _ in range(2)]
    try:
        while not file.exists() or not file.read_text().strip():
            assert scheduler.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
        yield address, {w.pid: w for w in workers}
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()
        log.close()


ORDERS = [
    sparsify.random_order(
        pd.DataFrame([(layer, head) for layer in range(LAYERS) for head in range(HEADS)], columns=["layer", "head"]),
        seed,
    )
    for seed in range(2)
]
ASKED = {"analyses": ["separability", "taxonomy", "retention"], "orders": ORDERS, "retentions": [0.5]}


def test_a_worker_killed_half_way(dask, fields, model, tmp_path):
    """First, since it leaves one worker for the others."""
    address, workers = dask
    whole = Study(**fields).run(tmp_path / "whole", model, **ASKED)
    out, killed = tmp_path / "out", []

    def kill():
        with Client(address, set_as_default=False) as client:
            pids = client.run(os.getpid)
            while not killed:
                time.sleep(0.01)
                busy = [w for w, keys in client.processing().items() if keys]
                if files(out) and busy:
                    os.kill(pids[busy[0]], signal.SIGKILL)
                    killed.append((pids[busy[0]], len(list(out.glob("*/*.parquet")))))

    killer = threading.Thread(target=kill)
    killer.start()
    tables = Study(**fields).run(out, model, scheduler=address, **ASKED)
    killer.join()
    ((pid, written),) = killed
    assert workers[pid].wait(timeout=5) == -signal.SIGKILL
    assert 1 <= written < 3 * fields["windows"]
    assert list(tables) == ASKED["analyses"]
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table, whole[name], check_exact=True)
    for ours, theirs in zip(*(sorted(p.glob("*/*.parquet")) for p in (out, tmp_path / "whole")), strict=True):
        assert ours.relative_to(out) == theirs.relative_to(tmp_path / "whole")
    assert (out / "study.json").read_bytes() == (tmp_path / "whole" / "study.json").read_bytes()


def test_what_is_there_needs_no_cluster(dask, fields, model, tmp_path, monkeypatch):
    """The address comes from the environment too; one window is missing, then none."""
    small = Study(**fields | {"windows": 2})
    table = small.run(tmp_path, model)
    files(tmp_path)[1].unlink()
    monkeypatch.setenv("GEOMLIB_SCHEDULER", dask[0])
    monkeypatch.setenv("GEOMLIB_PROGRESS", str(tmp_path / "progress"))
    seen = []
    look = cluster._look
    monkeypatch.setattr(cluster, "_look", lambda *a: seen.append((tmp_path / "progress").read_text()) or look(*a))
    before = files(tmp_path)[0].stat().st_mtime_ns
    pd.testing.assert_frame_equal(small.run(tmp_path, model), table, check_exact=True)
    assert len(seen) == 1 and "| 0/1 [" in seen[0] and (tmp_path / "progress").read_text() == ""
    assert files(tmp_path)[0].stat().st_mtime_ns == before
    monkeypatch.setenv("GEOMLIB_SCHEDULER", "tcp://127.0.0.1:1")
    pd.testing.assert_frame_equal(small.run(tmp_path, model), table)


def test_batches_are_sent_together(dask, fields, model, tmp_path):
    study = Study(**fields | {"windows": 3, "queries": "last"})
    table = study.run(tmp_path / "out", model, scheduler=dask[0], batch=2)
    assert len(files(tmp_path / "out")) == 3
    pd.testing.assert_frame_equal(table, study.run(tmp_path / "here", model, batch=2), check_exact=True)


def refused(fields, model, out, address, **asked) -> str:
    with pytest.raises(GeomlibError) as caught:
        Study(**fields | {"windows": 2}).run(out, model, scheduler=address, **asked)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@pytest.mark.parametrize("changed", ["torch", "transformers", "code"])
def test_workers_of_another_version_are_refused(dask, fields, model, tmp_path, monkeypatch, changed):
    ours = S.versions()
    monkeypatch.setattr(S, "versions", lambda: ours | {changed: "0.0"})
    sentence = refused(fields, model, tmp_path, dask[0])
    assert re.match(
        rf"worker tcp://\S+ runs {changed} {re.escape(ours[changed])} where this study needs {changed} 0\.0: ", sentence
    )
    assert not files(tmp_path)


def test_workers_with_other_model_files_are_refused(dask, fields, model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "sha256", model.sha256 | {"model.safetensors": "0" * 64})
    assert "(it differs in fingerprint, sha256): give it the same files" in refused(fields, model, tmp_path, dask[0])


def test_a_folder_that_is_not_shared(dask, fields, model, tmp_path, monkeypatch):
    """Another folder of the same name stands for another machine's."""
    monkeypatch.setattr(cluster, "_SHARED_SECONDS", 0.5)
    monkeypatch.setattr(cluster, "Tables", lambda folder, *a: store.Tables(tmp_path / "theirs", *a))
    out = tmp_path / "out"
    sentence = refused(fields, model, out, dask[0])
    assert re.match(
        r".*theirs is another folder on worker tcp://\S+: give an --out on a file system that all", sentence
    )
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "study.json").write_bytes((out / "study.json").read_bytes())
    assert re.match(r".*out is another folder on a worker: give an --out on", refused(fields, model, out, dask[0]))
    assert not files(out)


def test_what_a_worker_raises_arrives_as_its_sentence(dask, fields, place, tmp_path):
    """Another model than the one before: the embedding of unknown words is NaN, and windows without it are kept."""
    found = words()
    folder = save_model(
        tmp_path / "model", lambda hf: hf.model.embed_tokens.weight.data[0].fill_(float("nan")),
        vocab_size=len(set(found)) + 2, max_position_embeddings=512,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((place / "model" / name).read_bytes())
    clean = [" ".join(found[i : i + 270]) for i in (0, 300)]
    unclean = clean[0].replace("the", "Zyzzyva")  # wherever its window starts
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [unclean, *clean]))
    nan = load_model(str(folder), device="cpu", check=False)
    own = fields | {"model": str(folder), "text": str(tmp_path / "t.jsonl"), "windows": 3}
    with pytest.raises(GeomlibError, match=r"^layer 0 gives NaN or infinite attention outputs: .*\.$"):
        Study(**own).run(tmp_path / "out", nan, scheduler=dask[0])
    assert len(files(tmp_path / "out")) <= 2 and not leftovers(tmp_path / "out")


def test_stopped_by_hand(dask, fields, model, tmp_path, monkeypatch):
    """By Ctrl-C, after the first window. (Sent by itself, it would now and then fall into a finaliser, where Python loses it.)"""
    look = cluster._look

    def interrupted(*a):
        look(*a)
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr(cluster, "_look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Study(**fields).run(tmp_path, model, scheduler=dask[0])
    time.sleep(1)  # for the one that was running
    assert 1 <= len(files(tmp_path)) < fields["windows"]
    with pytest.warns(UserWarning, match="run the study again"):
        load_table(tmp_path)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "127.0.0.1:1", "nonsense://x:1", "tcp://", "tcp://no.such.host:8786"]
)
def test_no_scheduler(fields, model, tmp_path, monkeypatch, address):
    if address != "tcp://127.0.0.1:1":
        monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 0.5)
    started = time.monotonic()
    sentence = refused(fields, model, tmp_path, address)
    assert f"no Dask scheduler answers at {address}: start one with dask scheduler" in sentence
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("slow", [1, 3])
def test_a_busy_machine(dask, fields, model, tmp_path, monkeypatch, slow):
    """Dask gives the thread of its loop 10 seconds to start, and then fails by an assertion."""
    start, failed = LoopRunner.start, []

    def late(self):
        if len(failed) < slow:
            failed.append(self)
            raise AssertionError
        start(self)

    monkeypatch.setattr(LoopRunner, "start", late)
    if slow == 3:
        assert "less busy, and run again." in refused(fields, model, tmp_path, dask[0])
    else:
        Study(**fields | {"windows": 1}).run(tmp_path, model, scheduler=dask[0])
    assert len(failed) == slow


def test_a_window_that_ends_workers_is_named():
    class Future:
        def cancelled(self):
            return False

        def exception(self):
            return KilledWorker("task", None, 3)

    import distributed

    window = S.Window("page 7", 0, [1], True)
    error = cluster._sentence(distributed, Future(), [S.Job("0.parquet", window, ["taxonomy"])], "tcp://x:1")
    assert isinstance(error, GeomlibError) and str(error).startswith("page 7 ended 4 workers one after the other")


def test_without_the_extra(fields, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "run pip install 'geomlib[cluster]'" in refused(fields, model, tmp_path, "tcp://127.0.0.1:1")


def test_a_run_here_imports_nothing_of_dask(place, tmp_path):
    texts = save_texts(tmp_path / "t.jsonl", 2)
    small = {"model": str(place / "model"), "text": str(texts), "windows": 1, "length": 16, "sizes": (2,), "bins": 2}
    program = (
        "import sys, geomlib\n"
        f"geomlib.Study(**{small!r}).run({str(tmp_path / 'out')!r})\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'dask', 'distributed'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_scheduler_ends_half_way(dask, fields, model, tmp_path):
    """Last, since nothing is left of the cluster."""
    with Client(dask[0], set_as_default=False) as client:
        scheduler = client.run_on_scheduler(os.getpid)

    def end():
        while not files(tmp_path):
            time.sleep(0.01)
        os.kill(scheduler, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(GeomlibError, match=r"^the connection to tcp://\S+ was lost: what is finished is kept, run"):
        Study(**fields).run(tmp_path, model, scheduler=dask[0])
    assert time.monotonic() - started < 60
    assert files(tmp_path)
