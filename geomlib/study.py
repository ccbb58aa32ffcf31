"""A Study: everything that decides a number, and the loop that fills its tables.

One Parquet file per window (`store`), skipped when already there, so a study can be killed anywhere and run again: it
continues, and its tables are those of an uninterrupted run.
"""

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from geomlib import progress as bars
from geomlib import separability, sink, sparsify, store, taxonomy, theory
from geomlib.attention import observe
from geomlib.controls import RANDOM_RANKINGS
from geomlib.corpora import Corpus, Document, Window, detokenise_wikitext, load_corpus, take_windows, text_corpus
from geomlib.errors import GeomlibError
from geomlib.geometry import SIZES
from geomlib.models import Model, load_model
from geomlib.source import deciding
from geomlib.store import place, read, results_root, stamp_of

FORMAT = 1  # of the tables; raise it when their meaning changes
# The modules that decide a number, whatever is measured: results of other code are never continued or mixed.
_CODE = ("_kernels", "attention", "corpora", "geometry", "models", "store", "study", "tables")

CURVE = ["document", "order", "retention"]  # names a row of retention curves

# Of windows that share a forward pass on a GPU: as many tokens as fill its products, and no more windows than one would
# want to lose to a kill.
_PASS_TOKENS, _PASS_WINDOWS = 4096, 16


class _Analysis(NamedTuple):
    """What a study can measure of a window: the columns, the modules that decide them, and the observer."""

    schema: dict[str, tuple[str, str]]
    code: tuple[str, ...]
    observer: Callable[["Study", str], Any] | None  # of the study and the window's key
    # Why a table can be empty; mostly sliding windows in every layer, of which the length says nothing.
    empty: str = (
        "no query of {model} sees more than N of sizes {sizes} sources, so nothing is unselected: give smaller sizes."
    )
    # In place of an observer, for what takes passes of its own: model, [window], progress, and what `run` was given for it.
    passes: Callable[..., pd.DataFrame] | None = None


ANALYSES = {
    "separability": _Analysis(
        separability.SCHEMA,
        ("controls", "separability"),
        lambda s, key: separability.SeparabilityTable(
            s.length, s.queries, s.sizes, s.rankings, s.distances, s.controls, s.random_rankings, s.bins, key
        ),
    ),
    "bounds": _Analysis(
        theory.SCHEMA,
        ("bounds", "controls", "theory"),
        lambda s, key: theory.BoundsTable(s.length, s.queries, s.sizes, s.bins, key),
    ),
    "coherence": _Analysis(
        theory.COHERENCE_SCHEMA, ("bounds", "controls", "theory"), lambda s, key: theory.CoherenceTable(s.length)
    ),
    "selection": _Analysis(
        theory.SELECTION_SCHEMA,
        ("bounds", "controls", "theory"),
        lambda s, key: theory.SelectionTable(s.length, s.sizes),
        "no top-N set of {model} with N of sizes {sizes} has two sources besides the first and leaves one out: give other "
        "sizes, or longer windows.",
    ),
    "sink_effect": _Analysis(
        sink.EFFECT_SCHEMA,
        ("controls", "separability", "sink", "taxonomy"),
        lambda s, key: sink.SinkEffectTable(s.length, s.queries, s.sizes, s.bins, key),
        "no top-N set of {model} with N of sizes {sizes}, N = 1 apart, leaves two sources out: give other sizes, or longer "
        "windows.",
    ),
    "sinks": _Analysis(
        sink.SINKS_SCHEMA, ("controls", "separability", "sink", "taxonomy"), lambda s, key: sink.SinksTable(s.length)
    ),
    "taxonomy": _Analysis(
        taxonomy.SCHEMA, ("taxonomy",), lambda s, key: taxonomy.TaxonomyTable(s.length, s.queries, s.bins)
    ),
    "importance": _Analysis(
        sparsify.IMPORTANCE_SCHEMA,
        ("nll", "resume", "sparsify", "taxonomy"),
        None,
        passes=lambda m, w, p, _: sparsify.importance(m, w, p),
    ),
    "scan": _Analysis(
        sparsify.SCAN_SCHEMA,
        ("nll", "resume", "sparsify", "taxonomy"),
        None,
        passes=lambda m, w, p, _: sparsify.head_scan(m, w, progress=p),
    ),
    "retention": _Analysis(
        sparsify.RETENTION_SCHEMA,
        ("nll", "resume", "sparsify", "taxonomy"),
        None,
        passes=lambda m, w, p, asked: sparsify.retention_curve(m, w, *asked, progress=p, in_sample=True),
    ),
}

# As they were when this process read them: a worker or a kernel goes on with the code that it has imported.
_SOURCES = {
    m: deciding(Path(__file__).parent / f"{m}.py")
    for m in {*_CODE, *(m for analysis in ANALYSES.values() for m in analysis.code)}
}


class Job(NamedTuple):
    """What is missing of one window: the analyses, and the file that each of them writes."""

    file: str
    window: Window
    names: list[str]


class Study(BaseModel):
    """What is measured, on what: a frozen record whose fields are the notebooks' parameters.

    A window is one document's; `queries` is "all" or "last" (the paper's protocol); `bins` equal bins of query
    position; `text` is a file of one's own that takes the place of `corpus`; `detokenise` undoes WikiText's spaced
    punctuation in either; `skip` leaves out the first windows that the
    seed draws, so that what was chosen on these is judged on others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    revision: str | None = None
    corpus: str = "vital-articles"
    text: str | None = None
    detokenise: bool = False
    windows: int = Field(8, ge=1)
    skip: int = Field(0, ge=0)
    length: int = Field(512, ge=3)
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    queries: Literal["all", "last"] = "all"
    sizes: tuple[int, ...] = SIZES
    rankings: tuple[Literal["attention", "contribution"], ...] = ("attention",)
    distances: tuple[Literal["euclidean", "cosine"], ...] = ("euclidean",)
    controls: tuple[Literal["random", "magnitude"], ...] = ("random", "magnitude")
    random_rankings: int = Field(RANDOM_RANKINGS, ge=1)
    bins: int = Field(8, ge=1)

    @field_validator("sizes")
    @classmethod
    def _usable_sizes(cls, sizes):
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise ValueError("give different whole numbers N of 1 or more")
        return tuple(sorted(sizes))

    @field_validator("rankings", "distances", "controls")
    @classmethod
    def _each_once(cls, names, info):
        if len(set(names)) < len(names) or not (names or info.field_name == "controls"):
            raise ValueError("give each once" if names else "give one or more")
        return names

    def __init__(self, **fields):
        try:
            super().__init__(**fields)
        except ValidationError as e:
            first = e.errors()[0]
            name = ".".join(str(x) for x in first["loc"]) or "study"
            known = f"; known are {', '.join(type(self).model_fields)}" if first["type"] == "extra_forbidden" else ""
            why = first["msg"].removeprefix("Value error, ")
            raise GeomlibError(f"{name} = {first['input']!r} is not usable: {why}{known}.") from None
        if min(self.sizes) >= self.length:
            raise GeomlibError(
                f"every N of sizes {self.sizes} is at least the window's {self.length} sources, so nothing is unselected: "
                f"give smaller sizes or a larger length."
            )
        if self.queries == "all" and self.bins > self.length:
            raise GeomlibError(f"{self.bins} bins do not fit {self.length} queries: give fewer bins.")

    def run(
        self,
        out: str | Path | None = None,
        model: Model | None = None,
        progress: bool = False,
        analyses: str | Sequence[str] = "separability",
        orders: Sequence[sparsify.Order] = (),
        retentions: Sequence[float] = sparsify.RETENTIONS,
        in_sample: bool = False,
        published: bool = False,
        scheduler: str | None = None,
        batch: int | None = None,
    ) -> pd.DataFrame | dict[str, pd.DataFrame]:
        """Measure what is not there yet and return the whole table (columns: `ANALYSES[name].schema`).

        Args:
            out: folder of the results; None: `results_root()` / the study's key. One process at a time measures into it.
            model: the loaded model, to load it once for several studies; None: load it.
            progress: show a bar with the time left (on a terminal; a file that $GEOMLIB_PROGRESS names gets it in any case).
            analyses: names of `ANALYSES`. Those that observe share each window's forward pass; several give a dict of tables.
            orders, retentions, in_sample: of the analysis "retention", as `sparsify.retention_curve` takes them.
            published: take tables that come with the book where it has this very study, of the same model files and windows,
                whatever version of the library measured them; recompute some of them (`sparsify.recomputed`).
            scheduler: address (tcp://...) of a Dask scheduler whose workers measure; None: $GEOMLIB_SCHEDULER, else here.
            batch: how many windows share a forward pass, which changes no number beyond rounding; None: one on a CPU (and on a
                cluster), what fits on a GPU.

        Raises:
            GeomlibError: bad input, a folder that holds another study, a full disk, NaN in the model. What was
                measured before stays.
        """
        names = [analyses] if isinstance(analyses, str) else list(analyses or [])
        for name in names or [None]:
            _known(name)
        if batch is not None and batch < 1:
            raise GeomlibError(f"batch = {batch} is not usable: give a whole number of windows, 1 or more.")
        model, corpus, windows, skipped = self._inputs(model)
        asked = {}
        if "retention" in names:
            sparsify.check_orders(model.hf, list(orders), [w.document for w in windows], in_sample)
            asked["retention"] = (list(orders), [float(q) for q in retentions])
        marks = {n: _mark(asked[n]) if n in asked else "" for n in names}
        record = self._record(model, corpus, windows, skipped)
        if published and (found := _published(record, marks)):
            if out is None and os.environ.get("GEOMLIB_RESULTS"):  # a run's folder is complete by itself
                store.copy(found, results_root() / json.loads((found / "study.json").read_text())["key"], marks)
            tables = {n: load_table(found, n, marks[n], any_code=True) for n in names}
            return tables[analyses] if isinstance(analyses, str) else tables
        folder = Path(out) if out is not None else results_root() / record["key"]
        kept = store.Tables(folder, {n: _stamp(n, record["key"], marks[n]) for n in names}, marks)
        jobs = [Job(_file(i, w), w, names) for i, w in enumerate(windows)]
        if not store.holds(folder, record) or _missing(jobs, kept):  # a whole one may lie where nothing can be written
            with store.locked(folder):
                store.claim(folder, record)
                jobs = _missing(jobs, kept)  # anew: another process may have measured some of it
                scheduler = scheduler or os.environ.get("GEOMLIB_SCHEDULER")
                if jobs and scheduler:
                    from geomlib import cluster  # Dask is an extra

                    with bars.bar(len(jobs), "window", model.name, progress) as bar:
                        cluster.measure(scheduler, self, model, record, kept, _chunks(jobs, batch or 1), asked, bar)
                elif jobs:
                    units = sum(_units(job.names) for job in jobs)
                    with bars.bar(units * model.layers, "layer", model.name, progress) as bar:
                        for chunk in _chunks(jobs, batch or self._batch(model)):
                            self.fill(model, chunk, asked, kept, bar)
        tables = {name: load_table(folder, name, marks[name]) for name in names}
        return tables[analyses] if isinstance(analyses, str) else tables

    def fill(self, model: Model, jobs: list[Job], asked: dict, kept: store.Tables, bar) -> None:
        """Measure and write what is missing of these windows, which share their forward passes."""
        empty = []
        for job, name, table in self._measure(model, jobs, asked, bar):
            if table.empty:
                empty.append(name)
            else:
                check_table(table, name)
                kept.keep(table, name, job.file)
        for name in empty:  # after what there is has been kept
            raise GeomlibError(ANALYSES[name].empty.format(model=model.name, sizes=self.sizes))

    def _batch(self, model: Model) -> int:
        """Windows that share a forward pass unless told. On a CPU one: eight short ones together save a tenth of the time, and a
        kill would lose eight."""
        if model.device.type != "cuda":
            return 1
        width = model.config.hidden_size + (getattr(model.config, "intermediate_size", None) or 0)
        # A layer holds a few tensors of this width at once; a quarter of what is free is for them, the rest for observers.
        fit = torch.cuda.mem_get_info(model.device)[0] // 4 // (self.length * 8 * width * 4)
        return max(1, min(fit, _PASS_TOKENS // self.length, _PASS_WINDOWS))

    def _inputs(self, model: Model | None) -> tuple[Model, Any, list[Window], int]:
        """The model, the text, its windows and how many documents were too short; the text first, so that what is wrong with
        it shows before a model is fetched or loaded."""
        corpus = _detokenised_text(self) if self.text else load_corpus(self.corpus, detokenise=self.detokenise)
        if model is None:
            model = load_model(self.model, revision=self.revision, dtype=self.dtype)
        if model.name != self.model:
            raise GeomlibError(f"the study is of {self.model} and the given model is {model.name}: give the same one.")
        if self.dtype not in (None, str(model.dtype).removeprefix("torch.")):
            raise GeomlibError(
                f"the study is in {self.dtype} and the given model in {model.dtype}: load it in {self.dtype}."
            )
        if model.max_length is not None and self.length > model.max_length:
            raise GeomlibError(f"{model.name} has {model.max_length} positions: give a length of at most that.")
        windows, skipped = take_windows(corpus, model.tokenizer, self.skip + self.windows, self.length, self.seed)
        if len(windows) <= self.skip:  # a plain text gives what it holds
            raise GeomlibError(
                f"{corpus.name} holds {len(windows)} windows of {self.length} tokens, and skip = {self.skip} leaves none: give a "
                f"longer text or a smaller length."
            )
        return model, corpus, windows[self.skip :], skipped

    def take(self, model: Model | None = None) -> list[Window]:
        """The windows that `run` measures."""
        return self._inputs(model)[2]

    def _measure(self, model: Model, jobs: list[Job], asked: dict, bar) -> Iterator[tuple]:
        """Job, name and table of each analysis, as soon as it is measured; all jobs lack the same."""
        alone = [n for n in jobs[0].names if ANALYSES[n].passes]
        together = [n for n in jobs[0].names if n not in alone]
        if together:
            yield from self._observed(model, jobs, together, bar)
        for job in jobs:
            for name in alone:
                table = ANALYSES[name].passes(
                    model.hf, [job.window], lambda share: bar.update(share * model.layers), asked.get(name)
                )
                yield job, name, table.astype({c: t for c, (t, _) in ANALYSES[name].schema.items()})

    def _observed(self, model: Model, jobs: list[Job], names: list[str], bar) -> Iterator[tuple]:
        """In one forward pass of all windows, each with observers of its own."""
        observers = [
            {n: ANALYSES[n].observer(self, f"{self.seed} {j.window.document} {j.window.start}") for n in names}
            for j in jobs
        ]
        # Those first whose work others take, as `observe` has it for those that it calls itself.
        ordered = [sorted(o.values(), key=lambda each: not getattr(each, "shares", False)) for o in observers]
        ticks = 0

        def show(block):
            nonlocal ticks
            for observer in ordered[block.batch]:
                observer(block)
            if block.queries[-1] == self.length - 1:
                bar.update()
                ticks += 1

        ids = torch.tensor([j.window.input_ids for j in jobs], device=model.device)
        try:
            with torch.no_grad(), observe(model, show):
                # No logits: the vocabulary is not needed.
                hidden = model.hf.base_model(input_ids=ids, use_cache=False)[0]
            if not torch.isfinite(hidden).all():
                raise GeomlibError(
                    f"{model.name} gives NaN or infinite numbers after its last layer ({model.layers - 1}): load it in float32."
                )
        except (GeomlibError, torch.OutOfMemoryError):
            if len(jobs) == 1:
                raise
            observers = ordered = hidden = None
        if observers is None:  # one by one: what the others give is kept, and takes less memory
            bar.update(-ticks)
            for job in jobs:
                yield from self._observed(model, [job], names, bar)
            return
        for job, found in zip(jobs, observers, strict=True):
            for name, observer in found.items():
                table = observer.table()
                table.insert(0, "document", job.window.document)
                yield job, name, table.astype({c: t for c, (t, _) in ANALYSES[name].schema.items() if c in table})

    def _record(self, model: Model, corpus, windows: list[Window], skipped: int) -> dict:
        """study.json: the fields, and every version and hash behind the numbers."""
        fields = self.model_dump(mode="json")
        if self.text:  # what it says counts, not where it lies
            fields["corpus"], fields["text"] = None, Path(self.text).name
        elif Path(self.corpus).expanduser().is_file():
            fields["corpus"] = corpus.name
        record = {
            "study": fields,
            "model": model_record(model),
            "corpus": {"name": corpus.name, **corpus.source},
            "windows": [
                {"document": w.document, "start": w.start, "bos": w.bos, "sha256": _ids_hash(w)} for w in windows
            ],
            "skipped_documents": skipped,
            "versions": versions(),
        }
        record["key"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        return record


def model_record(model: Model) -> dict:
    """What study.json says of the model."""
    return {
        "name": model.name, "fingerprint": model.fingerprint, "revision": model.revision, "sha256": model.sha256,
        "note": model.note, "dtype": str(model.dtype).removeprefix("torch."), "layers": model.layers,
        "query_heads": model.query_heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim,
    }  # fmt: skip


def versions() -> dict:
    """Of all that decides a number here."""
    packages = ("geomlib", "torch", "transformers", "tokenizers", "numpy", "numba")
    decisive = {"python": platform.python_version(), "format": FORMAT, "code": _code(_CODE)}
    return decisive | {p: version(p) for p in packages}


def _code(modules: Sequence[str]) -> str:
    return hashlib.sha256(b"".join(_SOURCES[m] for m in modules)).hexdigest()[:16]


def _detokenised_text(study: Study) -> Corpus:
    """The text of one's own, without WikiText's spaces if the study says so."""
    corpus = text_corpus(study.text)
    if not study.detokenise:
        return corpus

    def documents() -> Iterator[Document]:
        return (Document(d.id, detokenise_wikitext(d.text)) for d in corpus.documents())

    return replace(corpus, read=documents, source=corpus.source | {"detokenised": True})


def _missing(jobs: Sequence[Job], kept: store.Tables) -> list[Job]:
    found = [job._replace(names=[n for n in job.names if not kept.has(n, job.file)]) for job in jobs]
    return [job for job in found if job.names]


def _chunks(jobs: Sequence[Job], batch: int) -> Iterator[list[Job]]:
    """Jobs that follow each other and lack the same, up to `batch` at a time."""
    chunk = []
    for job in jobs:
        if chunk and (len(chunk) == batch or job.names != chunk[0].names):
            yield chunk
            chunk = []
        chunk.append(job)
    if chunk:
        yield chunk


def load_table(
    folder: str | Path, analysis: str = "separability", mark: str | None = None, any_code: bool = False
) -> pd.DataFrame:
    """One table of a study's folder, windows in order, checked; warns when windows are still missing.

    Args:
        mark: of the orders and retentions of a "retention" table; None: any, if it is the same in all files.
        any_code: take what another version of the analysis wrote.
    """
    _known(analysis)
    folder = Path(folder)
    if not (folder / "study.json").is_file():
        raise GeomlibError(f"{folder} holds no study (no study.json): give the folder that a run wrote.")
    if mark is None:
        found = sorted(folder.glob(f"{analysis}-*"))
        if len(found) > 1:
            raise GeomlibError(
                f"{folder} holds {analysis} of {len(found)} sets of orders: run the study with those you want."
            )
        where = found[0] if found else folder / analysis
    else:
        where = place(folder, analysis, mark)
    files = sorted(where.glob("*.parquet"))
    if not files:
        raise GeomlibError(
            f"{folder} holds no finished window of {analysis} yet: run the study with analyses={analysis!r}, it continues."
        )
    record = json.loads((folder / "study.json").read_text())
    if len(files) < len(record["windows"]):
        warnings.warn(
            f"{folder} holds {len(files)} of {len(record['windows'])} windows: run the study again.", stacklevel=2
        )
    stamps = [stamp_of(f) for f in files]
    mark = (stamps[0] or "").split(" ")[-1] if mark is None else mark
    wanted = _stamp(analysis, record["key"], mark)
    parts = []
    for file, stamp in zip(files, stamps, strict=True):
        same = stamp is not None and (stamp.split(" ")[::2] == wanted.split(" ")[::2] if any_code else stamp == wanted)
        part = read(file, stamp) if same else None
        parts.append(part)
        if part is None:
            raise GeomlibError(f"{file} is damaged, or of another study or version: remove it and run the study again.")
    table = pd.concat(parts, ignore_index=True)
    check_table(table, analysis)
    return table


def load_all(folder: str | Path, analysis: str = "retention") -> pd.DataFrame:
    """The tables of all sets of orders of a study, of whatever code, one after the other; the same row counts once."""
    marks = {(stamp_of(f) or "").split(" ")[-1] for f in Path(folder).glob(f"{analysis}-*/*.parquet")}
    tables = [load_table(folder, analysis, mark, any_code=True) for mark in sorted(marks)]
    return pd.concat(tables, ignore_index=True).drop_duplicates(CURVE, ignore_index=True)


def _known(analysis: str) -> None:
    if not isinstance(analysis, str) or analysis not in ANALYSES:
        raise GeomlibError(f"unknown analysis {analysis!r}: give any of {', '.join(ANALYSES)}.")


_SHARES = (
    "precision", "recall", "f", "holds", "separated", "f_with", "f_without", "lower", "extreme", "won", "cosine_negative",
    *taxonomy.VOTES, "sees_sink", "tied",
)  # fmt: skip
_COUNTED = ("query_to", "queries", "dim", "sources", "heads", "targets")  # say no more than the other names of a row


def check_table(table: pd.DataFrame, analysis: str = "separability") -> None:
    """Raise GeomlibError unless the table is what its schema says: columns, types, ranges, and no row twice."""
    expected = {c: t for c, (t, _) in ANALYSES[analysis].schema.items()}
    found = {c: "string" if pd.api.types.is_string_dtype(t) else str(t) for c, t in table.dtypes.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))
        raise GeomlibError(
            f"the table does not fit the schema at {wrong}: it was written by another version, run it again."
        )
    metrics = table[[c for c, t in expected.items() if t == "float64"]]
    shares = table[[c for c in _SHARES if c in expected]]
    if not np.isfinite(metrics).all(axis=None) or not ((shares >= 0) & (shares <= 1)).all(axis=None):
        raise GeomlibError("the table holds values out of range: run the study again in another folder.")
    names = [c for c, t in expected.items() if (t != "float64" and c not in _COUNTED) or c == "retention"]
    if table.duplicated(names).any():
        raise GeomlibError("the table holds rows twice: run the study again in another folder.")


def _ids_hash(window: Window) -> str:
    return hashlib.sha256(json.dumps(window.input_ids).encode()).hexdigest()[:16]


def _file(index: int, window: Window) -> str:
    safe = "".join(c if c.isalnum() else "-" for c in window.document)[:60]
    return f"{index:05d}-{safe}.parquet"


def _stamp(analysis: str, key: str, mark: str = "") -> str:
    """What a table carries: its study, the code of its analysis (the rest of the code is in the study's key), and the mark of
    what `run` was given for it."""
    return f"{key} {_code(ANALYSES[analysis].code)} {mark}"


def _mark(asked: tuple) -> str:
    orders, retentions = asked
    content = json.dumps(sorted([o.name, o.heads, o.group] for o in orders) + [sorted(set(retentions))])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _units(names: Sequence[str]) -> int:
    """Turns of the bar that these analyses of one window take, in passes through all layers."""
    return any(ANALYSES[n].passes is None for n in names) + sum(ANALYSES[n].passes is not None for n in names)


def _published(record: dict, marks: dict[str, str]) -> Path | None:
    """The folder under book/studies that holds this study's tables whole, from whatever code; None if there is none."""
    same = [k for k in record if k not in ("versions", "key")]
    for root in (Path.cwd(), Path(__file__).parent.parent):
        for path in sorted((root / "book" / "studies").glob("*/study.json")):
            there = json.loads(path.read_text())
            if any(there.get(k) != record[k] for k in same):
                continue
            for name, mark in marks.items():
                stamps = [stamp_of(f) for f in sorted(place(path.parent, name, mark).glob("*.parquet"))]
                if [s and s.split(" ")[::2] for s in stamps] != [[there["key"], mark]] * len(record["windows"]):
                    break
            else:
                return path.parent
    return None
