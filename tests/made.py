"""Folders of runs for the tests of what reads them: planted tables, and what the book's chapters measure on a small model."""

import ast
import contextlib
import io
import json
import os
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import nbformat
import pandas as pd
from test_study import save_model, save_texts

import geomlib
from geomlib import notebooks, store
from geomlib.runs import Run
from geomlib.study import ANALYSES, Study

CHAPTERS = ["01", "02", "03", "04", "05"]


class Measured(NamedTuple):
    """A run whose tables are there: what was asked for, its folder, and each chapter's pairs (study, analysis)."""

    asked: Run
    out: Path
    studies: dict[str, set[tuple[Study, str]]]


def record(out: Path, asked: Run, **more) -> Path:
    """run.json of a folder, as a run writes it."""
    out.mkdir(parents=True, exist_ok=True)
    versions = {"geomlib": geomlib.__version__, "code": "0" * 16, "python": "3.11"}
    content = {"asked": asked.model_dump(mode="json"), "versions": versions, "machine": {}, "chapters": {}} | more
    (out / "run.json").write_text(json.dumps(content))
    return out


def fitted(table: pd.DataFrame, analysis: str) -> pd.DataFrame:
    """A table with the columns that matter, filled up with values that fit the schema."""
    filler = {"string": "x", "float64": 0.5}
    columns = {n: table[n] if n in table else filler.get(t, 1) for n, (t, _) in ANALYSES[analysis].schema.items()}
    return pd.DataFrame(columns, index=table.index).astype({n: t for n, (t, _) in ANALYSES[analysis].schema.items()})


def plant(
    out: Path, tables: dict[str, pd.DataFrame], corpus: str = "a", model: str = "m", mark: str = "", **fields
) -> Path:
    """A study in a run's folder: one Parquet file a document and analysis, study.json with these fields of it."""
    name = "-".join([corpus, model.replace("/", "-"), *map(str, fields.values())])
    folder = out / "tables" / name
    documents = sorted({d for t in tables.values() for d in t["document"]})
    about = {
        "study": {"queries": "all", "skip": 0, "length": 512} | fields,
        "model": {"name": model, "fingerprint": "f", "note": "", "dtype": "float32", "layers": 1, "query_heads": 4,
                  "kv_heads": 4},
        "corpus": {"name": corpus, "sha256": f"of {corpus}"}, "windows": [{"document": d} for d in documents],
        "versions": {"geomlib": geomlib.__version__}, "key": name,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(about))
    for analysis, table in tables.items():
        kept = store.Tables(folder, {analysis: f"{name} code {mark}"}, {analysis: mark})
        for i, document in enumerate(documents):
            rows = table[table["document"] == document]
            if len(rows):
                kept.keep(fitted(rows, analysis), analysis, f"{i:05d}-{document}.parquet")
    return folder


def measuring(book: Path) -> list[tuple[int, str]]:
    """The code cells that run studies, and those before them that they take names from: number and source."""
    cells = [c for c in nbformat.read(book, as_version=4).cells if c.cell_type == "code"]
    kept, wanted = [], set()
    for i, cell in reversed(list(enumerate(cells))):
        nodes = list(ast.walk(ast.parse(cell.source)))
        names = [n for n in nodes if isinstance(n, ast.Name)]
        own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        given = own | {n.name for n in nodes if hasattr(n, "name")}
        given |= {a.asname or a.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
        filled = [n.value for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        given |= {n.id for f in filled for n in ast.walk(f) if isinstance(n, ast.Name)}
        if "parameters" not in cell.metadata.get("tags", []) and (".run(" in cell.source or given & wanted):
            wanted |= {n.id for n in names if isinstance(n.ctx, ast.Load)} - own
            kept.append((i, cell.source))
    return kept[::-1]


def measure(place: Path) -> Measured:
    """What the chapters measure, in this process and without what they print and draw, on a model with random weights and two files of
    random words."""
    model = save_model(place / "model", max_position_embeddings=256)
    texts = [str(save_texts(place / f"{n}.jsonl", 12, 290 + i)) for i, n in enumerate("ab")]
    settings = {"length": 64, "final_windows": 4}
    asked = Run(model=str(model), corpora=tuple(texts), profile="quick", settings=settings)
    out, studies, run = record(place / "out", asked), defaultdict(set), Study.run
    now = [""]

    def noted(self, *args, analyses="separability", **kwargs):
        found = run(self, *args, analyses=analyses, **kwargs)
        studies[now[0]] |= {(self, a) for a in ([analyses] if isinstance(analyses, str) else analyses)}
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"GEOMLIB_RESULTS": str(out / "tables")}))
        stack.enter_context(mock.patch.object(Study, "run", noted))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        for book in notebooks.chapters(CHAPTERS):
            now[0] = book.stem
            known = notebooks.parameters(book)
            space = known | asked.values(book, known, out)
            for i, source in measuring(book):
                exec(compile(source, f"{book.stem}, code cell {i}", "exec"), space)  # noqa: S102
    return Measured(asked, out, dict(studies))
