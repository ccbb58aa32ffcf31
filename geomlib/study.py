"""A Study: everything that decides a number, its results on disk, and the loop that fills them.

One Parquet file per window, written whole or not at all and skipped when already there, so a study can be killed
anywhere and run again: it continues, and its tables are those of an uninterrupted run.
"""

import errno
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from tqdm import tqdm

from geomlib import separability, sink, taxonomy, theory
from geomlib.attention import observe
from geomlib.controls import RANDOM_RANKINGS
from geomlib.corpora import Window, load_corpus, take_windows, text_corpus
from geomlib.errors import GeomlibError
from geomlib.geometry import SIZES
from geomlib.models import Model, load_model

FORMAT = 1  # of the tables; raise it when their meaning changes
# The modules that decide a number, whatever is measured: results of other code are never continued or mixed.
_CODE = ("_kernels", "attention", "corpora", "geometry", "models", "study", "tables")


class _Analysis(NamedTuple):
    """What a study can measure of a window: the columns, the modules that decide them, and the observer."""

    schema: dict[str, tuple[str, str]]
    code: tuple[str, ...]
    observer: Callable[["Study", str], Any]  # of the study and the window's key
    # Why a table can be empty; mostly sliding windows in every layer, of which the length says nothing.
    empty: str = (
        "no query of {model} sees more than N of sizes {sizes} sources, so nothing is unselected: give smaller sizes."
    )


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
}


class Study(BaseModel):
    """What is measured, on what: a frozen record whose fields are the notebooks' parameters.

    A window is one document's; `queries` is "all" or "last" (the paper's protocol); `bins` equal bins of query
    position; `text` is a file of one's own that takes the place of `corpus`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    revision: str | None = None
    corpus: str = "vital-articles"
    text: str | None = None
    detokenise: bool = False
    windows: int = Field(8, ge=1)
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
    ) -> pd.DataFrame | dict[str, pd.DataFrame]:
        """Measure what is not there yet and return the whole table (columns: `ANALYSES[name].schema`).

        Args:
            out: folder of the results; None: `results_root()` / the study's key.
            model: the loaded model, to load it once for several studies; None: load it.
            progress: show a bar with the time left (on a terminal).
            analyses: names of `ANALYSES`. Several share each window's forward pass and give a dict of tables.

        Raises:
            GeomlibError: bad input, a folder that holds another study, a full disk, NaN in the model. What was
                measured before stays.
        """
        names = [analyses] if isinstance(analyses, str) else list(analyses or [])
        for name in names or [None]:
            _known(name)
        # The text first: what is wrong with it shows before a model is fetched or loaded.
        corpus = text_corpus(self.text) if self.text else load_corpus(self.corpus, detokenise=self.detokenise)
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
        windows, skipped = take_windows(corpus, model.tokenizer, self.windows, self.length, self.seed)
        record = self._record(model, corpus, windows, skipped)
        folder = Path(out) if out is not None else results_root() / record["key"]
        _claim(folder, record)
        todo = []
        for i, window in enumerate(windows):
            missing = [n for n in names if _read(folder / n / _file(i, window), n, record["key"]) is None]
            if missing:
                todo.append((_file(i, window), window, missing))
        bar = tqdm(total=len(todo) * model.layers, disable=None if progress else True, unit="layer", desc=model.name)
        with bar:
            for file, window, missing in todo:
                tables = self._measure(model, window, missing, bar)
                for name, table in tables.items():
                    if not table.empty:
                        _write(table, folder / name / file, name, record["key"])
                for name in (n for n, table in tables.items() if table.empty):  # after what there is has been kept
                    raise GeomlibError(ANALYSES[name].empty.format(model=model.name, sizes=self.sizes))
        tables = {name: load_table(folder, name) for name in names}
        return tables[analyses] if isinstance(analyses, str) else tables

    def _measure(self, model: Model, window: Window, names: list[str], bar) -> dict[str, pd.DataFrame]:
        observers = {n: ANALYSES[n].observer(self, f"{self.seed} {window.document} {window.start}") for n in names}

        def tick(block):
            if block.queries[-1] == self.length - 1:
                bar.update()

        ids = torch.tensor([window.input_ids], device=model.device)
        with torch.no_grad(), observe(model, *observers.values(), tick):
            hidden = model.hf.base_model(input_ids=ids, use_cache=False)[0]  # no logits: the vocabulary is not needed
        if not torch.isfinite(hidden).all():
            raise GeomlibError(
                f"{model.name} gives NaN or infinite numbers after its last layer ({model.layers - 1}): load it in float32."
            )
        tables = {}
        for name, observer in observers.items():
            table = observer.table()
            table.insert(0, "document", window.document)
            tables[name] = table.astype({c: t for c, (t, _) in ANALYSES[name].schema.items() if c in table})
        return tables

    def _record(self, model: Model, corpus, windows: list[Window], skipped: int) -> dict:
        """study.json: the fields, and every version and hash behind the numbers."""
        fields = self.model_dump(mode="json")
        if self.text:  # what it says counts, not where it lies
            fields["corpus"], fields["text"] = None, Path(self.text).name
        record = {
            "study": fields,
            "model": {
                "name": model.name, "fingerprint": model.fingerprint, "revision": model.revision, "sha256": model.sha256,
                "note": model.note, "dtype": str(model.dtype).removeprefix("torch."), "layers": model.layers,
                "query_heads": model.query_heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim,
            },
            "corpus": {"name": corpus.name, **corpus.source},
            "windows": [
                {"document": w.document, "start": w.start, "bos": w.bos, "sha256": _ids_hash(w)} for w in windows
            ],
            "skipped_documents": skipped,
            "versions": {"python": platform.python_version(), "format": FORMAT, "code": _code(_CODE)}
            | {p: version(p) for p in ("geomlib", "torch", "transformers", "tokenizers", "numpy", "numba")},
        }  # fmt: skip
        record["key"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        return record


def _code(modules: Sequence[str]) -> str:
    code = b"".join((Path(__file__).parent / f"{m}.py").read_bytes() for m in modules)
    return hashlib.sha256(code).hexdigest()[:16]


def results_root() -> Path:
    """Where studies go by themselves: $GEOMLIB_RESULTS, else the folder runs/studies here."""
    return Path(os.environ.get("GEOMLIB_RESULTS") or Path("runs") / "studies")


def load_table(folder: str | Path, analysis: str = "separability") -> pd.DataFrame:
    """One table of a study's folder, windows in order, checked; warns when windows are still missing."""
    _known(analysis)
    folder = Path(folder)
    if not (folder / "study.json").is_file():
        raise GeomlibError(f"{folder} holds no study (no study.json): give the folder that a run wrote.")
    files = sorted((folder / analysis).glob("*.parquet"))
    if not files:
        raise GeomlibError(
            f"{folder} holds no finished window of {analysis} yet: run the study with analyses={analysis!r}, it continues."
        )
    record = json.loads((folder / "study.json").read_text())
    if len(files) < len(record["windows"]):
        warnings.warn(
            f"{folder} holds {len(files)} of {len(record['windows'])} windows: run the study again.", stacklevel=2
        )
    key = record["key"]
    parts = [_read(f, analysis, key) for f in files]
    for file, part in zip(files, parts, strict=True):
        if part is None:
            raise GeomlibError(f"{file} is damaged, or of another study or version: remove it and run the study again.")
    table = pd.concat(parts, ignore_index=True)
    check_table(table, analysis)
    return table


def _known(analysis: str) -> None:
    if not isinstance(analysis, str) or analysis not in ANALYSES:
        raise GeomlibError(f"unknown analysis {analysis!r}: give any of {', '.join(ANALYSES)}.")


_SHARES = (
    "precision", "recall", "f", "holds", "separated", "f_with", "f_without", "lower", "extreme", "won", "cosine_negative",
    *taxonomy.VOTES, "sees_sink", "tied",
)  # fmt: skip
_COUNTED = ("query_to", "queries", "dim", "sources")  # say no more than the other names of a row


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
    if table.duplicated([c for c, t in expected.items() if t != "float64" and c not in _COUNTED]).any():
        raise GeomlibError("the table holds rows twice: run the study again in another folder.")


def _ids_hash(window: Window) -> str:
    return hashlib.sha256(json.dumps(window.input_ids).encode()).hexdigest()[:16]


def _file(index: int, window: Window) -> str:
    safe = "".join(c if c.isalnum() else "-" for c in window.document)[:60]
    return f"{index:05d}-{safe}.parquet"


def _claim(folder: Path, record: dict) -> None:
    """Write study.json, or make sure that the one there is this very study."""
    path = folder / "study.json"
    try:
        there = dict(json.loads(path.read_text())) if path.is_file() else None
    except (OSError, ValueError, TypeError):
        raise GeomlibError(f"{path} cannot be read: give another folder, or remove this one.") from None
    if there is not None:
        if there.get("key") != record["key"]:
            parts = [k for k in record if k != "key" and there.get(k) != record[k]]
            names = [f for f, v in record["study"].items() if there.get("study", {}).get(f) != v] or parts
            raise GeomlibError(
                f"{folder} holds another study (it differs in {', '.join(names)}): give another folder, or remove this one."
            )
        return
    with _one_sentence(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _whole(path, lambda tmp: tmp.write_text(json.dumps(record, indent=1) + "\n"))


def _stamp(analysis: str, key: str) -> bytes:
    """What a table carries: its study, and the code of its analysis (the rest of the code is in the study's key)."""
    return f"{key} {_code(ANALYSES[analysis].code)}".encode()


def _read(path: Path, analysis: str, key: str) -> pd.DataFrame | None:
    """The table of one window, or None unless the file is there, whole, of this study and of today's code."""
    try:
        table = pq.read_table(path, page_checksum_verification=True) if path.is_file() else None
    except (OSError, pa.ArrowException):
        return None
    mine = table is not None and (table.schema.metadata or {}).get(b"geomlib_study") == _stamp(analysis, key)
    return table.to_pandas() if mine else None


def _write(table: pd.DataFrame, path: Path, analysis: str, key: str) -> None:
    check_table(table, analysis)
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    arrow = arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), b"geomlib_study": _stamp(analysis, key)})
    with _one_sentence(path.parent.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _whole(path, lambda tmp: pq.write_table(arrow, tmp, compression="zstd", write_page_checksum=True))


def _whole(path: Path, write) -> None:
    """Write beside it, flush to disk, then rename: the file is there whole or not at all."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(tmp)
        with open(tmp, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


class _one_sentence:
    """Turns a write that fails into one sentence; what was written before is whole."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = "the disk is full" if full else f"{error.strerror or error}"
            raise GeomlibError(
                f"cannot write to {self.folder}: {why}; the windows written before are kept, "
                f"{'free some space' if full else 'mend it'} and run the same again."
            ) from error
