"""How long will a run take, and how much memory? From a short timed probe of the model and the list of a chapter's studies.

Each kind of work is timed on one window at two short lengths and extrapolated as a L + b L^2: the model's matrices grow with
the length L, attention and geometry with its square.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import transformers

from geomlib import sparsify
from geomlib.errors import GeomlibError
from geomlib.models import LOAD, Model, _placement, config_of, load_model
from geomlib.notebooks import chapters, parameters
from geomlib.runs import Run
from geomlib.study import Study

PROBE = (96, 192)  # tokens of the two probes
# What a chapter takes beside its studies: kernel, imports, figures; and reading, averaging and drawing anew a table's rows.
_CHAPTER_SECONDS = 12.0
_ROW_SECONDS, _ROW_BYTES = 12e-6, 900.0
_VARIANTS = {"rankings": ("attention", "contribution"), "distances": ("euclidean", "cosine")}


class Work(NamedTuple):
    """Studies of one kind in one chapter: the fields of `Study`, its analyses, and how many studies (corpora) of it."""

    chapter: str
    fields: dict
    analyses: tuple[str, ...]
    studies: int = 1
    points: int = 0  # of retention curves, per window


class Estimate(NamedTuple):
    """Seconds by chapter, and the largest memory of a kernel in bytes."""

    seconds: dict[str, float]
    memory: float


def plan(run: Run, names: Sequence[str] = ()) -> list[Work]:
    """What the chapters of a run measure; of models beside the run's own (compare_with, other_model) too."""
    work = []
    for book in chapters(list(names)):
        known = parameters(book)
        p = known | run.values(book, known, Path())
        if book.stem.split("_")[0] not in _PLANS:
            continue
        corpora, n = p.get("corpora", []), len(p.get("corpora", []))
        shared = {"length": p["length"], "seed": p["seed"]} if "length" in p else {}
        for fields, analyses, *rest in _PLANS[book.stem.split("_")[0]](p):
            for model in dict.fromkeys(filter(None, [p["model_name"], *fields.pop("beside", [])])):
                corpus = fields.pop("corpus", corpora[0] if corpora else None)
                here = shared | fields | {"model": model, "corpus": corpus}
                work.append(Work(book.stem, here, analyses, *(rest or [n])))
    return work


def _final(p: dict) -> dict:
    return {"windows": p["final_windows"], "queries": "last"}


def _removal(p: dict) -> list:
    orders = p["random_orders"] + len(sparsify.METRICS) + len(sparsify.REGIME_ORDERS) + 5  # guarded, KV groups
    points, tried = len(p["retentions"]), len(sparsify.REGIME_ORDERS) + 2
    first, judged = {"windows": p["calibrate"], "corpus": p["corpus"]}, {
        "windows": p["windows"], "skip": p["calibrate"], "corpus": p["corpus"],
    }  # fmt: skip
    return [
        ({**first, "beside": [p["other_model"]]}, ("taxonomy", "importance", "scan"), 1),
        (dict(first), ("retention",), 1, tried * points),
        (dict(judged), ("retention",), 1, (orders + p["random_orders"]) * points),
    ]


# By the chapter's number: (fields of the study, analyses[, studies in place of one a corpus[, points]]) for its parameters.
# A test compares the list with what a run leaves in tables/.
_PLANS: dict[str, Callable[[dict], list]] = {
    "01": lambda p: [
        ({"windows": p["windows"]}, ("bounds",)),
        (_final(p), ("bounds", "coherence", "selection")),
    ],
    "02": lambda p: [
        ({"windows": p["windows"], "random_rankings": p["random_rankings"], **_VARIANTS}, ("separability",)),
        (_final(p), ("separability",)),
    ],
    "03": lambda p: [
        ({"windows": p["windows"], "beside": [p["compare_with"]]}, ("sink_effect", "sinks", "taxonomy")),
        ({**_final(p), "beside": [p["compare_with"]]}, ("sink_effect", "sinks")),
        ({"windows": 1, "length": 2 * p["length"], "corpus": p["corpora"][-1]}, ("sink_effect",), 1),
    ],
    "04": lambda p: [
        ({"windows": p["windows"], "beside": [p["compare_with"]]}, ("taxonomy", "sinks")),
        ({"windows": 1, "length": 2 * p["length"], "corpus": p["corpora"][:2][-1]}, ("taxonomy",), 1),
    ],
    "05": _removal,
}

# Passes with the loss that the removal chapter makes beside its studies: rows of tables measured again, critical heads alone
# and together, pruned copies.
_PASSES: dict[str, Callable[[dict], int]] = {"05": lambda p: 2 * p["recheck"] + 20 * p["windows"]}


def estimate(run: Run, names: Sequence[str] = (), progress: Callable[[str], None] = lambda line: None) -> Estimate:
    """Time and memory of a run on this machine, from a short probe.

    Raises:
        GeomlibError: as `load_model`, and a model whose weights do not fit into this machine's memory.
    """
    work, books = plan(run, names), chapters(list(names))
    seconds = dict.fromkeys([b.stem for b in books], _CHAPTER_SECONDS)
    memory = 0.0
    for name in dict.fromkeys(w.fields["model"] for w in work):
        progress(f"loading {name} ...")
        _refuse_too_large(name)
        started = time.monotonic()
        model = load_model(name)
        loading, empty = time.monotonic() - started, _peak()
        progress(model.checked)
        mine, timed = [w for w in work if w.fields["model"] == name], {}
        rows = dict.fromkeys([w.chapter for w in mine], 0.0)
        for w in mine:
            progress(f"timing {', '.join(w.analyses)} ...")
            rows[w.chapter] += _rows(w, model)
            seconds[w.chapter] += w.studies * w.fields["windows"] * _window(w, model, timed)
        for chapter in rows:
            seconds[chapter] += loading + rows[chapter] * _ROW_SECONDS
        for book in books if name == run.model else []:
            if passes := _PASSES.get(book.stem.split("_")[0]):
                known = parameters(book)
                p = known | run.values(book, known, Path())
                fields = {"model": name, "corpus": p["corpus"], "length": p["length"], "windows": 1}
                count = Work(book.stem, fields, ("nll",), points=passes(p))
                seconds[book.stem] += _window(count, model, timed)
                copies = 2 * sum(t.nbytes for t in model.hf.parameters())  # smaller ones, made beside it
                memory = max(memory, empty + copies)
        longest = max(w.fields["length"] for w in mine if w.fields["windows"] == max(v.fields["windows"] for v in mine))
        grown = (_peak() - empty) * longest / max(PROBE)
        memory = max(memory, empty + grown + max(rows.values()) * _ROW_BYTES)
        del model
    return Estimate(seconds, memory or float(_peak()))


def _window(w: Work, model: Model, timed: dict) -> float:
    """Seconds of one window of this work."""
    length = w.fields["length"]
    if {"scan", "retention"} & {*w.analyses} and _comes_with_the_book(Study(**w.fields), model, w.analyses[-1]):
        return 0.0
    kind = (
        w.analyses,
        *sorted((k, v) for k, v in w.fields.items() if k not in ("length", "windows", "skip", "corpus", "seed")),
    )
    if kind not in timed:
        timed[kind] = [(n, _timed(w, model, n)) for n in sorted({min(n, length) for n in PROBE})]
    (first, t1), (second, t2) = timed[kind][0], timed[kind][-1]
    if first == second:
        each = t1 * length / first
    else:
        square = max((t2 / second - t1 / first) / (second - first), 0.0)
        each = max(t2 / second - square * second, 0.0) * length + square * length**2
    return each * (w.points or 1)


def _comes_with_the_book(study: Study, model: Model, analysis: str) -> bool:
    """Whether the book has this very study's tables of the analysis, whatever the orders: a run takes those."""
    _, *inputs = study._inputs(model)
    record = {k: v for k, v in study._record(model, *inputs).items() if k not in ("versions", "key")}
    for root in (Path.cwd(), Path(__file__).parent.parent):
        for path in root.glob("book/studies/*/study.json"):
            there = json.loads(path.read_text())
            if all(there.get(k) == v for k, v in record.items()) and any(path.parent.glob(f"{analysis}*/*.parquet")):
                return True
    return False


def _timed(w: Work, model: Model, length: int) -> float:
    """Seconds of one window of this length: of the observers as they are, of scan and curves a few passes of the many."""
    fields = w.fields | {"length": length, "windows": 1, "skip": 0, "bins": min(8, length)}
    sizes = tuple(n for n in Study.model_fields["sizes"].default if n < length)
    study = Study(**(fields | {"sizes": sizes}))
    windows, passes = study.take(model), 0.0
    if {"retention", "nll"} & {*w.analyses}:
        mask = torch.ones(model.layers, model.query_heads)
        mask[model.layers // 2, 0] = 0
        return _clock(lambda: sparsify.nll(model, windows, head_mask=mask))
    analyses = [a for a in w.analyses if a != "scan"]
    if "scan" in w.analyses:
        heads = [(i, 0) for i in sorted({i * (model.layers - 1) // 5 for i in range(6)})]
        one = _clock(lambda: sparsify.head_scan(model, windows, heads[:1]))
        several = _clock(lambda: sparsify.head_scan(model, windows, heads))
        passes = one + (several - one) / max(len(heads) - 1, 1) * model.layers * model.query_heads

    def observed():
        with tempfile.TemporaryDirectory() as folder:
            study.run(folder, model=model, analyses=analyses)

    return passes + _clock(observed)


def _clock(work: Callable[[], object]) -> float:
    """Seconds, the lesser of two turns: the first may compile."""
    turns = []
    for _ in range(2):
        started = time.monotonic()
        work()
        turns.append(time.monotonic() - started)
    return min(turns)


def _rows(w: Work, model: Model) -> float:
    """About how many rows the tables of this work have."""
    heads, bins = model.layers * model.query_heads, 1 if w.fields.get("queries") == "last" else 8
    per_head = {"separability": 9 * 3 * (3 if "rankings" in w.fields else 1), "bounds": 9 * 20, "sink_effect": 9 * 4}
    rows = sum(bins * per_head.get(a, 1) for a in w.analyses)
    return w.studies * w.fields["windows"] * (heads * rows if not w.points else w.points)


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def lines(found: Estimate) -> list[str]:
    """As the command line prints it."""
    width = max(map(len, found.seconds))
    each = [f"{chapter:{width}}  {_span(s)}" for chapter, s in found.seconds.items()]
    total = f"{'together':{width}}  {_span(sum(found.seconds.values()))}, memory about {found.memory / 1e9:.1f} GB"
    return [*each, total]


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _refuse_too_large(name: str) -> None:
    """Refuse a model whose weights alone do not fit into the memory of this machine, before they are read."""
    load = json.loads(os.environ.get(LOAD) or "{}")
    if torch.cuda.is_available() or load.get("device_map"):
        return
    dtype, _ = _placement(load.get("dtype"), load.get("device"), {})
    bits = load.get("bits") or 8 * getattr(dtype, "itemsize", 4)
    needed, free = weights(name) * bits / 8, psutil.virtual_memory().available
    fits(needed, free, name)


def fits(needed: float, free: float, name: str) -> None:
    """Refuse what is larger than the memory."""
    if needed > free:
        raise GeomlibError(
            f"{name} needs {needed / 1e9:.0f} GB for its weights and {free / 1e9:.0f} GB are free: give --dtype bfloat16 or --bits 4, "
            f"or take a larger machine or a smaller model."
        )


def weights(name: str) -> int:
    """How many weights a model has, from its config alone."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(name)).num_parameters()
