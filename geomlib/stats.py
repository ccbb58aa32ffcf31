"""Means and their intervals: over heads, then layers, then documents; documents are what is drawn anew.

The paper's protocol (arXiv 2602.01893): a document bootstrap with 2000 replicates. Heads and layers of a model are
not a sample of anything, so they are averaged, not drawn.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from geomlib import sparsify, taxonomy
from geomlib.errors import GeomlibError

REPLICATES = 2000
LEVEL = 0.95


def head_means(table: pd.DataFrame, value: str = "f", by: Sequence[str] = ("size",)) -> pd.DataFrame:
    """Mean over queries (each query counts once), document, layer, head and `by` as rows, one column `value`.

    A table without the column `queries` has one row a head.
    """
    keys = ["document", "layer", "head", *by]
    queries = table.get("queries", 1)
    weighted = table.assign(_sum=table[value] * queries, queries=queries)
    sums = weighted.groupby(keys, observed=True, sort=True)[["_sum", "queries"]].sum()
    return (sums["_sum"] / sums["queries"]).rename(value).reset_index()


def document_means(table: pd.DataFrame, value: str = "f", by: Sequence[str] = ("size",)) -> pd.DataFrame:
    """Mean over heads, then layers: documents as rows, one column per group of `by`."""
    per_layer = head_means(table, value, by).groupby(["document", "layer", *by], observed=True)[value].mean()
    return per_layer.groupby(["document", *by], observed=True).mean().unstack(list(by))


def summary(
    table: pd.DataFrame,
    value: str = "f",
    by: Sequence[str] = ("size",),
    replicates: int = REPLICATES,
    seed: int = 0,
    level: float = LEVEL,
) -> pd.DataFrame:
    """Mean with a document-bootstrap interval for each group of `by`.

    Args:
        table: a study's table, or `advantage()` of one.
        value: the column to average.
        by: the columns that make a group; all other rows are averaged, so filter first what must not be mixed.

    Returns:
        Columns: those of `by`, mean, low, high (percentile interval at `level`), documents. low and high are NaN for a single
        document: it says nothing about the next one.
    """
    means = document_means(table, value, list(by))
    drawn = _bootstrap(means.to_numpy(), replicates, seed)
    low, high = _interval(drawn, level)
    single = len(means) < 2
    out = means.mean().rename("mean").reset_index()
    return out.assign(low=np.nan if single else low, high=np.nan if single else high, documents=len(means))


def by_size(
    table: pd.DataFrame,
    value: str = "f",
    by: Sequence[str] = ("level", "sink"),
    sizes: Sequence[int] | None = None,
    intervals: bool = False,
) -> pd.DataFrame:
    """Means (over heads, layers, documents) with groups as rows, in the table's order, and N as columns; N = 1, which says
    nothing, is left out unless it is in `sizes`. `intervals`: as text, each with its interval (`with_interval`)."""
    part = table[table["size"].isin(sizes) if sizes else table["size"] > 1]
    means = summary(part, value, by=[*by, "size"], **({} if intervals else {"replicates": 1}))
    means = means.assign(cell=with_interval(means) if intervals else means["mean"])
    means = means.set_index([*by, "size"])["cell"].unstack("size")
    order = part[list(by)].drop_duplicates()
    return means.loc[list(order.itertuples(index=False, name=None)) if len(by) > 1 else order[by[0]]]


def with_interval(means: pd.DataFrame, value: str = "mean") -> pd.Series:
    """Each value with its interval, as text: 0.50 [0.48, 0.53]; without one where there is none."""
    rounded = means[[value, "low", "high"]].to_numpy().round(2) + 0.0  # no -0.00
    texts = [f"{m:.2f}" if np.isnan(a) else f"{m:.2f} [{a:.2f}, {b:.2f}]" for m, a, b in rounded]
    return pd.Series(texts, index=means.index)


def advantage(table: pd.DataFrame, over: str = "random", value: str = "f") -> pd.DataFrame:
    """How much better the ranked sets are than a control, pair by pair: rows as in the table, one column `advantage`.

    Args:
        over: "random" or "magnitude".

    A pair shares document, layer, head, query bin, size and distance (and ranking, which random sets have none of).
    """
    keys = ["document", "layer", "head", "query_from", "query_to", "queries", "size", "distance"]
    keys += ["ranking"] if over == "magnitude" else []
    control = table[table["control"] == over].set_index(keys)[value].rename("_control")
    ranked = table[table["control"] == "none"].join(control, on=keys, how="inner")
    kept = [
        c for c in ("document", "layer", "head", "query_from", "query_to", "queries", "size", "ranking", "distance")
    ]
    return ranked[kept].assign(advantage=ranked[value] - ranked["_control"])


def positive_share(
    table: pd.DataFrame,
    value: str = "advantage",
    by: Sequence[str] = ("size",),
    replicates: int = REPLICATES,
    seed: int = 0,
) -> pd.DataFrame:
    """Share of query heads whose mean over documents is above zero, with its document-bootstrap interval."""
    rows = []
    for group, part in head_means(table, value, by).groupby(list(by), observed=True):
        heads = part.pivot(index="document", columns=["layer", "head"], values=value).to_numpy()
        drawn = (_bootstrap(heads, replicates, seed) > 0).mean(axis=1)[:, None]
        (low,), (high,) = _interval(drawn, LEVEL) if len(heads) > 1 else ([np.nan], [np.nan])
        rows.append((*group, (np.nanmean(heads, axis=0) > 0).mean(), low, high, len(heads)))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "documents"])


def regime_shares(table: pd.DataFrame, replicates: int = REPLICATES, seed: int = 0) -> pd.DataFrame:
    """Share of the query heads that are Retriever, Mixer and Reset, with document-bootstrap intervals: each replicate
    labels the heads anew from the documents drawn. `table` of the analysis "taxonomy".

    Where many heads are within a few votes of a tie, drawing documents spreads them over the regimes; the interval is then
    wide, and the share may lie near its end or outside.

    Returns:
        Columns regime, heads, mean (the share), low, high (NaN for a single document), documents.
    """
    now, labels, documents = _labels(table, replicates, seed)
    rows = []
    for regime in taxonomy.REGIMES:
        low, high = _interval((labels == regime).mean(1), LEVEL) if documents > 1 else (np.nan, np.nan)
        rows.append((regime, (now == regime).sum(), (now == regime).mean(), low, high, documents))
    return pd.DataFrame(rows, columns=["regime", "heads", "mean", "low", "high", "documents"])


def regime_lead(table: pd.DataFrame, replicates: int = REPLICATES, seed: int = 0) -> str:
    """Which of Mixer and Reset more heads are, if the same in 95 % of the bootstrap replicates over documents; else "neither"."""
    now, labels, _ = _labels(table, replicates, seed)
    lead = [(x == "Mixer").sum(-1) - (x == "Reset").sum(-1) for x in (now, labels)]
    for regime, sign in (("Mixer", 1), ("Reset", -1)):
        if sign * lead[0] > 0 and (sign * lead[1] > 0).mean() >= LEVEL:
            return regime
    return "neither"


def agreement_interval(
    first: pd.DataFrame, second: pd.DataFrame, replicates: int = REPLICATES, seed: int = 0
) -> tuple[float, float]:
    """Interval of the share of heads with the same regime in two `taxonomy` tables of one model (`taxonomy.agreement`), the
    documents of each drawn by themselves."""
    drawn = [_labels(table, replicates, seed + i)[1] for i, table in enumerate((first, second))]
    return tuple(_interval((drawn[0] == drawn[1]).mean(1), LEVEL))


def _labels(table: pd.DataFrame, replicates: int, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Regimes of all heads, in order of layer and head: from all documents, (head,); from those of each replicate,
    (replicate, head); and the number of documents."""
    documents, _, counts = taxonomy.counts_by_document(table)
    n = len(documents)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=replicates).astype(float)
    return taxonomy.label(counts.sum(0)), taxonomy.label(np.einsum("rd,dhv->rhv", drawn, counts)), n


def damage_curves(curves: pd.DataFrame, replicates: int = REPLICATES, seed: int = 0) -> pd.DataFrame:
    """Damage, NLL(sparsified) / NLL(full) - 1 over the targets of all documents, with its document-bootstrap interval.

    Args:
        curves: a "retention" table. Orders whose names differ in a last number ("random 0", "random 1") are taken together, as
            "random": means over them.

    Returns:
        Columns order, retention, heads, damage, low, high (NaN for a single document), perplexity, documents.
    """
    sums, full, targets, heads = _losses(curves)
    drawn = _bootstrap(sums.to_numpy(), replicates, seed) / _bootstrap(full, replicates, seed) - 1
    low, high = _interval(drawn, LEVEL) if len(sums) > 1 else (np.nan, np.nan)
    found = (sums.mean() / full.mean() - 1).rename("damage").reset_index().assign(low=low, high=high)
    found.insert(2, "heads", heads.reindex(sums.columns).to_numpy())
    return found.assign(perplexity=np.exp(sums.sum().to_numpy() / targets.sum()), documents=len(sums))


def damage_difference(
    curves: pd.DataFrame, order: str, baseline: str, replicates: int = REPLICATES, seed: int = 0
) -> pd.DataFrame:
    """Damage of one order less that of another at each retention, with its paired document-bootstrap interval.

    Returns:
        Columns retention, mean, low, high, documents.
    """
    sums, full, _, _ = _losses(curves)
    for name in (order, baseline):
        if name not in sums:
            raise GeomlibError(f"the curves have no order {name}: known are {', '.join(sums.columns.levels[0])}.")
    gap = (sums[order] - sums[baseline]).drop(columns=1.0, errors="ignore")
    drawn = _bootstrap(gap.to_numpy(), replicates, seed) / _bootstrap(full, replicates, seed)
    low, high = _interval(drawn, LEVEL) if len(gap) > 1 else (np.nan, np.nan)
    found = (gap.mean() / full.mean()).rename("mean").reset_index()
    return found.assign(low=low, high=high, documents=len(gap))


def _losses(curves: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray, np.ndarray, pd.Series]:
    """Summed NLL, documents as rows and (order, retention) as columns; that of the whole model, (document, 1); targets of each
    document; heads left for each (order, retention)."""
    table = curves.assign(order=curves["order"].str.replace(r" \d+$", "", regex=True))
    table["sum"] = table["nll"] * table["targets"]
    sums = table.pivot_table(index="document", columns=["order", "retention"], values="sum", sort=True)
    if len(table) != curves["document"].nunique() * len(curves[["order", "retention"]].drop_duplicates()):
        raise GeomlibError("not every document has every order and retention: give one study's table.")
    each = table.groupby("document").first()
    full = (each["full_nll"] * each["targets"]).to_numpy()[:, None]
    return sums, full, each["targets"].to_numpy(), table.groupby(["order", "retention"])["heads"].first()


def rank_correlations(votes: pd.DataFrame, importance: pd.DataFrame, scan: pd.DataFrame) -> pd.DataFrame:
    """Spearman's correlation over heads of each score (`sparsify.scores`) with the damage of the head alone, both on one
    document; mean over documents with its document-bootstrap interval.

    Returns:
        Columns score, mean, low, high (NaN for a single document), documents.
    """
    rows = []
    for document in sorted(scan["document"].unique()):
        heads = sparsify.scores(*(t[t["document"] == document] for t in (votes, importance, scan)))
        names = [n for n in sparsify.METRICS if n in heads and n != "damage"]
        rows.append(heads[[*names, "damage"]].corr("spearman")["damage"][names])
    means = pd.DataFrame(rows)
    low, high = interval_of(means)
    found = pd.DataFrame({"score": means.columns, "mean": means.mean().to_numpy(), "low": low, "high": high})
    return found.assign(documents=len(means))


def interval_of(means: pd.DataFrame, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Document-bootstrap interval of the mean of each column, documents as rows; NaN for a single document."""
    if len(means) < 2:
        return (np.full(means.shape[1], np.nan),) * 2
    return _interval(_bootstrap(means.to_numpy(), REPLICATES, seed), LEVEL)


def _bootstrap(values: np.ndarray, replicates: int, seed: int) -> np.ndarray:
    """Means over documents drawn with replacement, the same draws for every column: (replicate, column)."""
    n = len(values)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=replicates).astype(float)
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return counts @ np.where(there, values, 0.0) / (counts @ there)


def _interval(drawn: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    tail = 100 * (1 - level) / 2
    return tuple(np.nanpercentile(drawn, [tail, 100 - tail], axis=0))
