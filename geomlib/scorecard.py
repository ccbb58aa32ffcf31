"""The paper's claims over runs: a row for each claim, model, corpus and protocol, with value, interval, rule and verdict.

The rules are those of `claims`; here it is decided which of a run's tables they are asked of.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from geomlib import __version__, claims, runs, sparsify, taxonomy
from geomlib.claims import Verdict
from geomlib.errors import GeomlibError
from geomlib.study import ANALYSES, CURVE, load_all, load_table

FORMAT = 1
# Of which analysis, on which queries ("" = it has none), and the rules over it.
_RULES = (
    ("separability", ("last", "all"), (claims.c1, claims.c2)),
    ("bounds", ("last", "all"), (claims.c3,)),
    ("sinks", ("",), (claims.c4, claims.c5)),
    ("sink_effect", ("last", "all"), (claims.c6,)),
    ("coherence", ("",), (claims.c7,)),
    ("taxonomy", ("all",), (claims.c8, claims.c10)),
)
ORDER = list(claims.STATEMENTS)
COLUMNS = [
    "model", "claim", "corpus", "queries", "documents", "tokens", "verdict", "quantity", "value", "low", "high", "measured",
    "statement", "rule",
]  # fmt: skip


class Found(NamedTuple):
    """A study of a run: its folder, and its study.json."""

    folder: Path
    record: dict

    @property
    def corpus(self) -> str:
        return self.record["corpus"]["name"]

    def has(self, analysis: str) -> bool:
        return any(self.folder.glob(f"{analysis}/*.parquet")) or any(self.folder.glob(f"{analysis}-*/*.parquet"))

    def load(self, analysis: str) -> pd.DataFrame:
        if analysis == "retention":  # of an unfinished run: the orders that all documents have
            table = load_all(self.folder, analysis)
            whole = table.groupby("order")["document"].transform("nunique") == table["document"].nunique()
            return table[whole].reset_index(drop=True)
        return load_table(self.folder, analysis, any_code=True)


def studies(out: str | Path) -> list[Found]:
    """The studies of a run's own model (a chapter may measure another one beside it), those of most documents first."""
    model = runs.read(out)["asked"]["model"]
    found = [Found(p.parent, _json(p)) for p in sorted(Path(out).glob("tables/*/study.json"))]
    found = [f for f in found if f.record["model"]["name"] == model]
    return sorted(
        found, key=lambda f: (-len(f.record["windows"]), f.corpus, f.record["study"]["length"], f.folder.name)
    )


def largest(found: Sequence[Found], analysis: str, queries: str = "") -> dict[str, Found]:
    """Of each corpus the study with most documents that has this analysis on these queries ("": any)."""
    chosen: dict[str, Found] = {}
    for f in found:
        if queries in ("", f.record["study"]["queries"]) and f.has(analysis):
            chosen.setdefault(f.corpus, f)
    return dict(sorted(chosen.items()))


class Removal(NamedTuple):
    """What a run measured of removing heads: the study of the single-head scan, the curves on its documents (from which orders
    are chosen), those on other documents, and a study of these."""

    scan: Found | None
    tried: pd.DataFrame | None
    curves: pd.DataFrame | None
    judged: Found | None


def removal(found: Sequence[Found]) -> Removal:
    """The parts may lie in several folders, where some of them came with the book."""
    scan = next((f for f in found if f.has("scan") and f.has("taxonomy")), None)
    curves = [f for f in found if f.has("retention")]
    tried = [f for f in curves if scan and f.record["windows"] == scan.record["windows"]]
    judged = [f for f in curves if f.record["study"]["skip"]]
    judged = [f for f in judged if f.record["windows"] == judged[0].record["windows"]]
    return Removal(scan, _together(tried), _together(judged), (judged or [None])[0])


def _together(found: Sequence[Found]) -> pd.DataFrame | None:
    tables = [f.load("retention") for f in found]
    return pd.concat(tables, ignore_index=True).drop_duplicates(CURVE, ignore_index=True) if tables else None


def card(out: str | Path) -> dict:
    """A run's scorecard, ready for JSON: made from its tables, or read where only that is left of a run.

    Returns:
        model, fingerprint, note, profile, versions, texts, studies (fields of each), rows (`COLUMNS` each), dominance (what C9
        needs of one model, or None).

    Raises:
        GeomlibError: no run, or one without tables and scorecard.
    """
    out = Path(out)
    record = runs.read(out)
    found = studies(out)
    if not found:
        return _stored(out)
    rows = []
    for analysis, protocols, rules in _RULES:
        for queries in protocols:
            for corpus, study in largest(found, analysis, queries).items():
                table = study.load(analysis)
                rows += [_row(rule(table), study, corpus, queries, table) for rule in rules]
    tables = {c: f.load("taxonomy") for c, f in largest(found, "taxonomy", "all").items()}
    dominance = claims.dominance(tables) if tables else None
    if tables:
        verdict = claims.c9_of({record["asked"]["model"]: dominance})
        corpora = " and ".join(sorted(tables))
        study = largest(found, "taxonomy", "all")[next(iter(tables))]
        rows.append(_row(verdict, study, corpora, "all", next(iter(tables.values()))))
    rows += _removal_rows(found)
    there = {r["claim"] for r in rows}
    for claim, statement in claims.STATEMENTS.items():
        if claim not in there:
            verdict = Verdict(claim, statement, "", "not measured in this run", "not testable here")
            rows.append(_plain(asdict(verdict) | {"corpus": "", "queries": "", "documents": 0, "tokens": 0}))
    model = found[0].record["model"]
    rows = [{"model": model["name"], **r} for r in sorted(rows, key=lambda r: ORDER.index(r["claim"]))]
    return {
        "format": FORMAT, "model": model["name"], "fingerprint": model["fingerprint"], "note": model["note"],
        "dtype": model["dtype"], "layers": model["layers"], "query_heads": model["query_heads"], "kv_heads": model["kv_heads"],
        "profile": record["asked"]["profile"], "settings": record["asked"]["settings"],
        "texts": {f.corpus: f.record["corpus"] for f in found}, "versions": found[0].record["versions"],
        "studies": [f.record["study"] | {"analyses": [a for a in ANALYSES if f.has(a)]} for f in found],
        "rows": [{c: r[c] for c in COLUMNS} for r in rows], "dominance": dominance,
    }  # fmt: skip


def _removal_rows(found: Sequence[Found]) -> list[dict]:
    scan, tried, curves, judged = removal(found)
    rows = []
    if scan:
        table = scan.load("scan")
        verdict = claims.c13(table, taxonomy.regimes(scan.load("taxonomy")))
        rows.append(_row(verdict, scan, scan.corpus, "", table))
    if tried is not None and curves is not None:
        best = [sparsify.best(tried, sparsify.REGIME_ORDERS, s) for s in (sparsify.MODERATE, sparsify.AGGRESSIVE)]
        entropy = sparsify.best(tried, ("entropy", "entropy-reversed"), sparsify.MODERATE)
        for verdict in (claims.c11(curves, best[0], entropy), claims.c12(curves, best[1])):
            rows.append(_row(verdict, judged, judged.corpus, "", curves))
    return rows


def _row(verdict: Verdict, study: Found, corpus: str, queries: str, table: pd.DataFrame) -> dict:
    size = {"documents": table["document"].nunique(), "tokens": study.record["study"]["length"]}
    return _plain(asdict(verdict) | {"corpus": corpus, "queries": queries, **size})


def _plain(row: dict) -> dict:
    """numpy's numbers as Python's, and None for what is no number: JSON knows neither."""
    plain = {k: v.item() if hasattr(v, "item") else v for k, v in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


def _json(path: Path) -> dict:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise GeomlibError(f"{path} cannot be read: give another run, or remove this file's folder.") from None


def _stored(out: Path) -> dict:
    path = out / "scorecard.json"
    if not path.is_file():
        raise GeomlibError(f"{out} holds no finished window and no scorecard yet: run it again, it continues.")
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise GeomlibError(f"{path} cannot be read: make it anew from a run with tables.") from None
    if found.get("format") != FORMAT:
        raise GeomlibError(
            f"{path} is of another version (format {found.get('format')}): make it anew from a run with tables."
        )
    if "cards" in found:
        raise GeomlibError(f"{path} is of several models: give the folder of each run instead.")
    return found


def over(cards: Sequence[dict]) -> list[dict]:
    """The rows of several models, with C9 over all of them where there is more than one."""
    names = [c["model"] for c in cards]
    for name in names:
        if names.count(name) > 1:
            raise GeomlibError(f"{names.count(name)} of the runs are of {name}: give one run a model.")
    rows = [r for c in cards for r in c["rows"]]
    models = {c["model"]: c["dominance"] for c in cards if c["dominance"]}
    if len(models) > 1:
        verdict = asdict(claims.c9_of(models)) | {"corpus": "all", "queries": "all", "documents": 0, "tokens": 0}
        rows.append({"model": "all models", **_plain(verdict)})
    return sorted(rows, key=lambda r: ORDER.index(r["claim"]))


_COLORS = {  # of a verdict's cell: (background, text), legible on a light and on a dark page
    "holds": ("#cfe8d5", "#10351a"), "holds in part": ("#fbe6b3", "#453000"), "does not hold": ("#f3c6bd", "#4b1206"),
}  # fmt: skip


def styled(table: pd.DataFrame):
    """An overview as an HTML table: lines of a cell kept, the cells of one verdict coloured."""

    def color(cell):
        background, text = _COLORS.get(str(cell).split("\n")[0], ("", ""))
        return f"background-color: {background}; color: {text}" if background else ""

    style = table.style.hide(axis="index").map(color, subset=list(table.columns[3:]))
    return style.set_properties(**{"white-space": "pre-line", "text-align": "left"}).set_uuid("scorecard")


def number(row: dict) -> str:
    """A row's value with its interval: 0.19 [0.17, 0.21]; counts whole; "" where there is none."""
    if row["value"] is None:
        return ""
    texts = [f"{round(x, 2) + 0.0:.2f}" if isinstance(x, float) and not x.is_integer() else f"{x:.0f}" for x in
             (row[k] for k in ("value", "low", "high") if row[k] is not None)]  # fmt: skip
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else texts[0]


def overview(rows: Sequence[dict], breaks: str = "\n") -> pd.DataFrame:
    """Claims as rows, models as columns: in each cell the verdicts and, corpus by corpus in the order of their names, the value
    with its interval; on the final query where a claim has both (the paper's protocol). `number` says what the value is."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    lines = []
    for claim, statement in claims.STATEMENTS.items():
        mine = [r for r in rows if r["claim"] == claim]
        paper = {r["model"] for r in mine if r["queries"] == "last"}
        mine = [r for r in mine if r["queries"] == "last" or r["model"] not in paper]
        numbers = dict.fromkeys(r["quantity"] for r in mine if r["quantity"])
        line = {"claim": claim, "statement": statement, "number": " or ".join(numbers)}
        for model in models:
            part = [r for r in mine if r["model"] == model]
            words = ", ".join(dict.fromkeys(r["verdict"] if r["rule"] else "not measured" for r in part))
            if paper and any(r["queries"] == "all" for r in part):  # beside models with the final one
                words += " (all queries)"
            line[model] = breaks.join(filter(None, [words, *map(number, part)]))
        lines.append(line)
    return pd.DataFrame(lines)


def details(rows: Sequence[dict]) -> pd.DataFrame:
    """Every row: claim, model, corpus, queries, documents, tokens, verdict, what stands for it, its value, what was measured."""
    table = pd.DataFrame(rows)[
        ["claim", "model", "corpus", "queries", "documents", "tokens", "verdict", "quantity", "measured"]
    ]
    table.insert(8, "value [95 %]", [number(r) for r in rows])
    return table


def rules(rows: Sequence[dict]) -> dict[str, str]:
    """claim -> rule, of the claims that were measured."""
    return {r["claim"]: r["rule"] for r in sorted(rows, key=lambda r: ORDER.index(r["claim"])) if r["rule"]}


def markdown(cards: Sequence[dict]) -> str:
    """The scorecard of one or several models as Markdown: an overview, every row, the rules, and what was measured with."""
    rows = over(cards)
    parts = ["# Scorecard", _pipes(overview(rows, "<br>")), "## Every measurement", _pipes(details(rows)), "## Rules"]
    parts.append("\n".join(f"- **{claim}**: {rule}" for claim, rule in rules(rows).items()))
    parts.append("## Measured with")
    for c in cards:
        texts = "; ".join(f"{n}: {t.get('sha256') or t.get('revision')}" for n, t in c["texts"].items())
        versions = ", ".join(f"{k} {v}" for k, v in c["versions"].items())
        note = f" ({c['note']})" if c["note"] else ""
        parts.append(
            f"- {c['model']}{note}, {c['fingerprint']}, {c['dtype']}, profile {c['profile']}; texts: {texts}; {versions}"
        )
    return "\n\n".join(parts) + f"\n\nMade by geomlib {__version__}.\n"


def _pipes(table: pd.DataFrame) -> str:
    lines = [[str(x).replace("|", "\\|") for x in row] for row in (table.columns, *table.itertuples(index=False))]
    lines.insert(1, ["---"] * len(table.columns))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(cards: Sequence[dict], out: str | Path) -> None:
    """scorecard.json (of one model its card, of several a list) and scorecard.md in a folder."""
    out = Path(out)
    content = cards[0] if len(cards) == 1 else {"format": FORMAT, "cards": list(cards), "rows": over(cards)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "scorecard.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        (out / "scorecard.md").write_text(markdown(cards))
    except OSError as e:
        raise GeomlibError(f"cannot write to {out}: {e.strerror or e}; mend it, or give another folder.") from e
