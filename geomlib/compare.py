"""Models side by side: the curves and shares of runs as one tidy table, beside what the paper published."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from geomlib import claims, runs, scorecard, sparsify
from geomlib.errors import GeomlibError
from geomlib.models import Model
from geomlib.stats import advantage, damage_curves, regime_shares, summary
from geomlib.study import Study

COLUMNS = ["model", "corpus", "queries", "quantity", "group", "x", "mean", "low", "high", "documents"]
BY_REGIME = "best by regime"  # the regime order that did least damage on the calibration documents, as in C11
_FILE = "measures.csv"

# Figures of the paper (arXiv 2602.01893) for its own models, LLaMA, Gemma and Mistral of 7 and more billion weights, on
# WikiText-103 and OpenWebText: to stand beside ours, never among them. (quantity, group, low, high, what)
PUBLISHED = [
    ("times smaller", "median", *claims.SMALLER, "the sink's value norm, times smaller than the others'"),
    ("share", "Retriever", *claims.RETRIEVERS, "share of Retriever heads over its models"),
    ("F halved", "", None, None, "the sink in the top N often halves F"),
    ("negative cosine", "", None, None, "the sink's cosines with the others are systematically negative"),
    ("advantage", "", None, None, "top-N sets more separable than random ones, most at sparse and intermediate N"),
    ("lead", "", None, None, "Mixer is the commonest regime in Gemma and LLaMA-3, Reset in Mistral and LLaMA-2"),
    ("worst head", "", 0.62, 0.62, "NLL increase when layer 0, head 12 of Gemma-7B is cut to its top 128 tokens"),
    (
        "damage",
        "",
        None,
        None,
        "order by taxonomy useful at moderate retention, no better than magnitude or entropy beyond",
    ),
]


def published() -> pd.DataFrame:
    """The paper's figures as a table: quantity, what, low, high (NaN where it gives no number)."""
    table = pd.DataFrame(PUBLISHED, columns=["quantity", "group", "low", "high", "what"])
    return table.astype({"low": float, "high": float})


def measures(out: str | Path) -> pd.DataFrame:
    """What a run's chapters measured, as means with 95 % intervals over documents: made from its tables, or read from
    measures.csv where only that is left of it.

    Returns:
        `COLUMNS`. quantity (x): "F" and "advantage" over random sets (N), groups by control; "sink cost", F without the sink
        less F with it, where it is selected (N); "times smaller" and "negative cosine", over heads; "share" of a regime; "damage"
        (retention), groups by order, `BY_REGIME` once more under its own name.
    """
    out = Path(out)
    found = scorecard.studies(out)
    if not found:
        return _stored(out)
    parts = []

    def add(study, queries, quantity, table, group="", x=None):
        rows = table.assign(
            model=study.record["model"]["name"], corpus=study.corpus, queries=queries, quantity=quantity,
            group=table[group] if group else "", x=table[x] if x else float("nan"),
        )  # fmt: skip
        parts.append(rows[COLUMNS])

    for queries in ("last", "all"):
        for study in scorecard.largest(found, "separability", queries).values():
            table = study.load("separability")
            table = table[
                (table["distance"] == "euclidean") & (table["ranking"] != "contribution") & (table["size"] > 1)
            ]
            add(study, queries, "F", summary(table, "f", by=["control", "size"]), "control", "size")
            add(study, queries, "advantage", summary(advantage(table), "advantage"), x="size")
        for study in scorecard.largest(found, "sink_effect", queries).values():
            cost = claims.sink_cost(study.load("sink_effect"))
            cost = cost[cost.groupby("size")["document"].transform("nunique") >= 2]
            if len(cost):
                add(study, queries, "sink cost", summary(cost, "cost"), x="size")
    for study in scorecard.largest(found, "sinks").values():
        table = study.load("sinks").query("source == 0")
        heads = table.groupby(["layer", "head"])["times_smaller"].mean()
        verdicts = {"times smaller": claims.c4(table), "negative cosine": claims.c5(table)}
        rows = [{"quantity": q, "group": "median" if q == "times smaller" else "heads", "mean": v.value, "low": v.low,
                 "high": v.high} for q, v in verdicts.items()]  # fmt: skip
        rows += [
            {"quantity": "times smaller", "group": f"{q:.0%} of heads", "mean": heads.quantile(q)} for q in (0.1, 0.9)
        ]
        numbers = dict.fromkeys(("mean", "low", "high"), float)  # of one document there are none
        rows = pd.DataFrame(rows).astype(numbers).assign(documents=table["document"].nunique())
        for quantity, part in rows.groupby("quantity", sort=False):
            add(study, "", quantity, part.reindex(columns=["group", "mean", "low", "high", "documents"]), "group")
    for study in scorecard.largest(found, "taxonomy", "all").values():
        add(study, "all", "share", regime_shares(study.load("taxonomy")), "regime")
    _, tried, curves, judged = scorecard.removal(found)
    if judged:
        curves = damage_curves(curves).rename(columns={"damage": "mean"})
        if tried is not None:
            best = sparsify.best(tried, sparsify.REGIME_ORDERS, sparsify.MODERATE)
            curves = pd.concat([curves, curves[curves["order"] == best].assign(order=BY_REGIME)])
        add(judged, "", "damage", curves[curves["retention"] < 1], "order", "retention")
    if not parts:
        raise GeomlibError(f"{out} has no chapter's tables to compare yet: run chapters 02 to 05, it continues.")
    return pd.concat(parts, ignore_index=True)


def _stored(out: Path) -> pd.DataFrame:
    runs.read(out)  # says in words what is no run
    path = out / _FILE
    if not path.is_file():
        raise GeomlibError(f"{out} holds no finished window and no {_FILE} yet: run it again, it continues.")
    try:
        table = pd.read_csv(path, keep_default_na=False, na_values=["nan"], dtype={"queries": str, "group": str})
    except ValueError:  # nothing in it, or no text
        table = pd.DataFrame()
    if list(table.columns) != COLUMNS or table.empty:
        raise GeomlibError(f"{path} is of another version: make it anew from a run with tables.")
    return table


def save(table: pd.DataFrame, out: str | Path) -> None:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        table.to_csv(Path(out) / _FILE, index=False, na_rep="nan", float_format="%.6g")
    except OSError as e:
        raise GeomlibError(f"cannot write to {out}: {e.strerror or e}; mend it, or give another folder.") from e


def over(outs: Sequence[str | Path]) -> pd.DataFrame:
    """`measures` of several runs, which must be of different models."""
    tables = [measures(out) for out in outs]
    models = [t["model"].iloc[0] for t in tables]
    for model in models:
        if models.count(model) > 1:
            raise GeomlibError(f"{models.count(model)} of the runs are of {model}: give one run a model.")
    return pd.concat(tables, ignore_index=True)


def recheck(out: str | Path, model: Model, corpus: str) -> pd.DataFrame:
    """A run's separability on the final query of one corpus, measured anew: size, stored and now (mean F of attention's top N)."""
    table, studies = measures(out), scorecard.card(out)["studies"]
    same = [s for s in studies if s["corpus"] == corpus and s["queries"] == "last" and "separability" in s["analyses"]]
    if not same:
        raise GeomlibError(f"{out} has no separability of the final query on {corpus}: name another corpus.")
    fields = {k: v for k, v in same[0].items() if k != "analyses"}
    with tempfile.TemporaryDirectory() as elsewhere:  # where no earlier tables are
        again = Study(**fields).run(elsewhere, model=model)
    part = again[(again["control"] == "none") & (again["size"] > 1)]
    now = summary(part, "f").set_index("size")["mean"]
    mine = (table["quantity"] == "F") & (table["group"] == "none") & (table["queries"] == "last")
    stored = table[mine & (table["corpus"] == corpus)].set_index("x")["mean"]
    found = pd.DataFrame({"stored": stored.rename_axis("size"), "now": now}).reset_index()
    return found.astype({"size": int})


def beside(table: pd.DataFrame) -> pd.DataFrame:
    """Ours beside the paper's figures where both are one number of the same kind: what, paper, model, corpus, ours, inside."""
    rows = []
    for quantity, group, low, high, what in PUBLISHED:
        part = table[(table["quantity"] == quantity) & (table["group"] == group)]
        if low is None or part.empty:
            continue
        percent = high < 1
        paper = f"{low:.1%} to {high:.1%}" if percent else f"{low} to {high}"
        for r in part.itertuples(index=False):
            mean, *ends = (f"{x:.1%}" if percent else f"{x:.2f}" for x in (r.mean, r.low, r.high) if pd.notna(x))
            ours = f"{mean} [{', '.join(ends)}]" if ends else mean
            rows.append((what, paper, r.model, r.corpus, ours, "inside" if low <= r.mean <= high else "outside"))
    return pd.DataFrame(rows, columns=["what", "paper", "model", "corpus", "ours [95 %]", "ours is"])


def side_by_side(table: pd.DataFrame, queries: str = "last") -> dict[str, pd.DataFrame]:
    """Small tables for reading, rows (model, corpus): title -> values with intervals."""
    found = {}
    for title, quantity, group, xs in (
        ("F of attention's top N", "F", "none", (2, 8, 32)),
        ("advantage over random sets", "advantage", "", (2, 8, 32)),
        ("F without the sink less F with it, where it is selected", "sink cost", "", (2, 8, 32)),
    ):
        part = table[(table["quantity"] == quantity) & (table["group"] == group) & (table["queries"] == queries)]
        found[f"{title}, by N"] = _wide(part[part["x"].isin(xs)].assign(x=part["x"].astype(int)), "x")
    part = table[table["quantity"].isin(["times smaller", "negative cosine"])]
    label = part["group"].where(part["quantity"] == "times smaller", "cosine below 0")
    found["the sink's value: times smaller, over heads; heads with a mean cosine below 0"] = _wide(
        part.assign(x=label), "x"
    )
    found["share of the heads, by regime"] = _wide(table[table["quantity"] == "share"], "group")
    part = table[(table["quantity"] == "damage") & table["x"].isin([0.8, 0.5, 0.2])]
    names = [n for n in ("random", "magnitude", "gradient", "damage", BY_REGIME) if n in set(part["group"])]
    shown = part[part["group"].isin(names)].sort_values("x", ascending=False, kind="stable")
    shown = shown.assign(x=shown["x"].map("{:.0%} kept".format))
    found["damage of removing heads, by order"] = _wide(shown, "x", ["model", "group"])
    return {title: wide for title, wide in found.items() if len(wide)}


def _wide(part: pd.DataFrame, column: str, rows: Sequence[str] = ("model", "corpus")) -> pd.DataFrame:
    if part.empty:
        return pd.DataFrame()
    cells = [
        f"{r.mean:.2f}" if pd.isna(r.low) else f"{r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]"
        for r in part[["mean", "low", "high"]].round(2).add(0.0).itertuples(index=False)
    ]
    order = list(dict.fromkeys(part[column]))
    wide = part.assign(cell=cells).pivot(index=list(rows), columns=column, values="cell")
    keep = list(dict.fromkeys(part[list(rows)].itertuples(index=False, name=None)))
    return wide.reindex(index=pd.MultiIndex.from_tuples(keep, names=rows), columns=order).rename_axis(columns=None)
