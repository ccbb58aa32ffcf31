"""Windows of a study on several processes or machines, through a Dask scheduler (extra `geomlib[cluster]`).

    dask scheduler --port 8786
    dask worker tcp://HOST:8786 --nthreads 1 --memory-limit 0 --name gpu0     # one for each GPU, on any machine
    Study(...).run(scheduler="tcp://HOST:8786")

The client cuts the windows and sends them with the study; a worker loads the model once, measures a window at a time and
writes its tables into the study's folder, which all must see under one path. Workers must be the client's twins: the same
code, versions and model files, or they refuse. What a worker that dies was measuring goes to another one.
"""

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from geomlib import study as S
from geomlib.errors import GeomlibError
from geomlib.models import EMBEDDED, Model, load_model
from geomlib.store import Tables, holds

_CONNECT_SECONDS = 5
_LOOK_SECONDS = 5  # between looks at whether there is a worker at all
_SHARED_SECONDS = 10  # until a file written elsewhere shows on a network file system

_busy = threading.Lock()  # of a worker with several threads: one measurement at a time
_loaded: tuple[str, Model] | None = None  # of a worker


# --- the client -------------------------------------------------------------------------------------------------------


def measure(address: str, study: S.Study, model: Model, record: dict, kept: Tables, chunks, asked: dict, bar) -> None:
    """Have the workers at `address` measure and write these chunks of jobs; the bar counts windows.

    Raises:
        GeomlibError: no Dask, no scheduler, workers of another version or without the folder, or what a window gives. What
            other windows wrote is kept.
    """
    try:
        import distributed
    except ImportError:
        raise GeomlibError(
            "measuring on a cluster needs Dask, which is not installed: run pip install 'geomlib[cluster]'."
        ) from None
    folder = kept.folder.absolute()
    common = {"record": record, "versions": _versions(), "source": _source(study, model)}
    content = (study, Tables(folder, kept.stamps, kept.marks), asked)
    with _client(distributed, address) as client:
        jobs = {
            client.submit(_work, common | {"content": pickle.dumps((*content, chunk))}, pure=False): chunk
            for chunk in chunks
        }
        try:
            for future in _finished(distributed, client, address, list(jobs)):
                chunk = jobs[future]
                if future.status != "finished":
                    raise _sentence(distributed, future, chunk, address)
                _look(kept, chunk)
                bar.update(len(chunk))
        finally:
            client.cancel([f for f in jobs if not f.done()])  # also on Ctrl-C; what runs already ends by itself


@contextmanager
def _client(distributed, address: str) -> Iterator:
    unreachable = GeomlibError(
        f"no Dask scheduler answers at {address}: start one with dask scheduler, or check the address (tcp://HOST:PORT)."
    )
    for tries_left in (2, 1, 0):
        try:
            client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
            break
        except (OSError, ValueError, ImportError):  # a timeout is an OSError; an unknown protocol a ValueError
            raise unreachable from None
        except AssertionError:  # its loop's thread did not come up in the 10 s it is given: a machine that was busy or asleep
            if not tries_left:
                raise GeomlibError(
                    "Dask's client does not start here in 30 seconds: wait until this machine is less busy, and run again."
                ) from None
    with client, client.as_current():
        yield client


def _finished(distributed, client, address: str, futures: list) -> Iterator:
    """Futures as they end, well or not; says once that nobody works on them."""
    told = False
    while futures:
        try:
            distributed.wait(futures, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
        except TimeoutError:
            if not told and not client.scheduler_info()["workers"]:
                told = True
                print(f"geomlib: no worker is connected to {address}: waiting for one", file=sys.stderr)
            continue
        except (distributed.CancelledError, OSError):
            raise _lost(address) from None
        ended = [f for f in futures if f.done()]
        futures = [f for f in futures if not f.done()]
        yield from ended


def _sentence(distributed, future, chunk: Sequence, address: str) -> Exception:
    """What a future means that did not finish."""
    if future.cancelled():
        return _lost(address)
    error = future.exception()
    names = ", ".join(job.window.document for job in chunk)
    if isinstance(error, distributed.KilledWorker):
        return GeomlibError(
            f"{names} ended {error.allowed_failures + 1} workers one after the other, most likely for want of memory: give the "
            f"workers more, or a shorter length; other windows are kept."
        )
    if isinstance(error, (ImportError, AttributeError)):  # before or instead of our own check
        return GeomlibError(
            f"a worker at {address} cannot run this geomlib ({error}): install the same versions on all machines."
        )
    return error


def _lost(address: str) -> GeomlibError:
    return GeomlibError(
        f"the connection to {address} was lost: what is finished is kept, run the same again to continue."
    )


def _look(kept: Tables, chunk: Sequence) -> None:
    """Make sure that what a worker wrote is there."""
    until = time.monotonic() + _SHARED_SECONDS
    for job in chunk:
        for name in job.names:
            while not kept.has(name, job.file):
                if time.monotonic() > until:
                    raise _not_shared(kept.folder)
                time.sleep(0.2)


def _not_shared(folder: Path, where: str = "a worker") -> GeomlibError:
    return GeomlibError(
        f"{folder} is another folder on {where}: give an --out on a file system that all machines share under the same path."
    )


def _source(study: S.Study, model: Model) -> dict:
    """What makes `load_model` give the same model on a worker."""
    name, revision = study.model, study.revision
    if name not in EMBEDDED and Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser().absolute())
    elif model.revision and "@" not in name:
        revision = model.revision  # the commit that the client has
    dtype = str(model.dtype).removeprefix("torch.")  # a worker's own default depends on its device
    options = json.loads(os.environ.get("GEOMLIB_LOAD") or "{}")
    return {"name": name, "revision": revision, "dtype": dtype, "options": options}


def _versions() -> dict:
    """Of all that decides a number here, Python apart, which decides none."""
    analyses = {f"code of {n}": S._code(a.code) for n, a in S.ANALYSES.items()}
    return {k: v for k, v in S.versions().items() if k != "python"} | analyses


# --- a worker ---------------------------------------------------------------------------------------------------------


def _work(task: dict) -> None:
    """Measure and write one chunk of windows, in a worker's process."""
    from distributed import get_worker

    with _busy:
        where = f"worker {get_worker().address}"
        ours, theirs = _versions(), task["versions"]
        other = [n for n in theirs if ours.get(n) != theirs[n]]
        if other:
            was, now = (", ".join(f"{n} {v.get(n)}" for n in other) for v in (ours, theirs))
            raise GeomlibError(
                f"{where} runs {was} where this study needs {now}: install the same versions there and start it again."
            )
        study, kept, asked, chunk = pickle.loads(task["content"])  # only now: another version may not know its classes
        if not holds(kept.folder, task["record"]):
            raise _not_shared(kept.folder, where)
        model = _model(task, where)
        study.fill(model, chunk, asked, kept, tqdm(disable=True))


def _model(task: dict, where: str) -> Model:
    """The study's model, loaded unless the last task had it."""
    global _loaded
    source, wanted = task["source"], task["record"]["model"]
    key = json.dumps([source, wanted], sort_keys=True)
    if _loaded is None or _loaded[0] != key:
        _loaded = None  # before another one needs the memory
        before = os.environ.get("GEOMLIB_LOAD") or "{}"  # such as this worker's device
        os.environ["GEOMLIB_LOAD"] = json.dumps(json.loads(before) | source["options"])
        try:
            model = load_model(source["name"], revision=source["revision"], dtype=source["dtype"])
        except GeomlibError as e:
            raise GeomlibError(f"{where}: {e}") from None
        finally:
            os.environ["GEOMLIB_LOAD"] = before
        model.name = wanted["name"]  # a folder's is absolute here
        _loaded = key, model
    model = _loaded[1]
    other = [n for n, v in json.loads(json.dumps(S.model_record(model))).items() if wanted[n] != v]
    if other:
        raise GeomlibError(
            f"{where} has another {wanted['name']} (it differs in {', '.join(other)}): give it the same files and options."
        )
    return model
