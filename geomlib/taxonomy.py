"""Retriever, Mixer or Reset: what a query head looks at most, query by query, and the regime that follows.

Each query t >= 1 votes by its source-winner, the visible source of largest weight (ties to the lower index): for the current
token (w = t), for the sink (w = 0), or for another one. A head's regime is the vote of most queries. No threshold anywhere.
Chapter 4 of the book.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from geomlib.attention import Block
from geomlib.errors import GeomlibError
from geomlib.tables import COLUMNS, BinnedMeans

REGIMES = {"Retriever": "current", "Mixer": "sink", "Reset": "other"}  # regime -> the vote that makes it
TIES = ("Reset", "Mixer", "Retriever")  # of equal shares, the first of these
VOTES = tuple(f"vote_{v}" for v in REGIMES.values())
SIGNATURES = (
    "cos_sink", "cos_current", "sink_mass", "learned_mass", "entropy", "distance", "sees_sink", "tied",
)  # fmt: skip

SCHEMA: dict[str, tuple[str, str]] = {
    **{c: t for c, t in COLUMNS.items() if c != "size"},
    "queries": ("int32", "queries of the bin from the second of the window on; all means are over these"),
    "vote_current": ("float64", "share of them whose source-winner is the query's own token"),
    "vote_sink": ("float64", "share of them whose source-winner is source 0"),
    "vote_other": ("float64", "share of them with another source-winner"),
    "cos_sink": ("float64", "mean cosine of the head's output z with the value of source 0"),
    "cos_current": ("float64", "mean cosine of z with the value of the query's own token"),
    "sink_mass": ("float64", "mean weight of source 0, 0 where the layer's window hides it"),
    "learned_mass": ("float64", "mean weight of a learned sink (s_aux), which is no source; 0 where the model has none"),
    "entropy": ("float64", "mean entropy of the weights of the sources, in nats"),
    "distance": ("float64", "mean distance from the query back to its source-winner, in tokens"),
    "sees_sink": ("float64", "share of them that see source 0"),
    "tied": ("float64", "share of them whose largest weight two sources or more have"),
}  # fmt: skip


def source_winner(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The visible source of largest weight, ties to the lower index, and how many have that weight, (query head, query)."""
    if "source winner" not in block.shared:
        # Invisible sources have weight 0 and so can only tie with a row of zeros, which a learned sink can leave.
        largest = (block.weights == block.weights.amax(-1, keepdim=True)) & block.visible
        block.shared["source winner"] = (
            largest.to(torch.uint8).argmax(-1),  # the first
            largest.sum(-1, dtype=torch.int32),
        )
    return block.shared["source winner"]


class TaxonomyTable:
    """Observer: votes and signatures per layer, query head and query bin (columns: `SCHEMA`).

    Args:
        length, queries, bins: as `tables.BinnedMeans` takes them.
    """

    def __init__(self, length: int, queries: str = "all", bins: int = 8):
        self.means = BinnedMeans(length, queries, (0,), bins)

    def __call__(self, block: Block) -> None:
        block = self.means.rows(block)
        if block is None:
            return
        weights, own, values = block.weights, block.queries, block.values
        winner, ties = source_winner(block)
        current, sink = winner == own, (winner == 0) & (own > 0)
        mass, tiny = block.learned_sink_mass, torch.finfo(weights.dtype).tiny
        metrics = [
            current, sink, ~(current | sink), _cosine(block.outputs, values[:, :1]),
            _cosine(block.outputs, values[:, own]), weights[..., 0],
            torch.zeros_like(weights[..., 0]) if mass is None else mass,
            -torch.linalg.vecdot(weights, weights.clamp_min(tiny).log_()), own - winner, block.visible[:, 0].expand_as(winner), ties > 1,
        ]  # fmt: skip
        metrics = torch.stack([m.double() for m in metrics])[..., None]
        self.means.add(block, {}, metrics.masked_fill((own == 0)[:, None], torch.nan))

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SCHEMA` without the document."""
        return self.means.table((*VOTES, *SIGNATURES)).drop(columns="size", errors="ignore")


def _cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1, eps=1e-300)  # tiny ones too


class Agreement(NamedTuple):
    """How far two labellings of the same heads agree: number of heads, share with the same label, and Cohen's kappa, the
    agreement beyond chance (1: all; 0: what chance gives with these shares; NaN where both know one label only)."""

    heads: int
    share: float
    kappa: float


def regimes(table: pd.DataFrame, ties: Sequence[str] = TIES, by: Sequence[str] = ()) -> pd.DataFrame:
    """The table of heads: one row for each (layer, head), to be joined on these two.

    Args:
        table: of the analysis "taxonomy"; all its queries count alike, whatever document they are of.
        ties: which regime equal shares of votes go to, the first of these.
        by: columns of the table that make further groups, "document" for instance.

    Returns:
        Those of `by`, layer, head, queries, the shares of votes, regime, and the means of `SIGNATURES` over the queries.

    Source: arXiv 2602.01893; chapter 4 of the book. With documents of one length, equal weight a query is equal weight a document.
    """
    by = [by] if isinstance(by, str) else list(by)
    if len(ties) != len(REGIMES) or set(ties) != set(REGIMES):
        raise GeomlibError(f"ties = {tuple(ties)} is not usable: give {', '.join(REGIMES)} in the order you want.")
    if missing := [c for c in (*by, "layer", "head", "queries", *VOTES) if c not in table]:
        raise GeomlibError(f"the table has no column {missing[0]}: give one of the analysis 'taxonomy'.")
    columns = [*VOTES, *(c for c in SIGNATURES if c in table)]
    if wrong := {"layer", "head", "queries", *columns} & set(by):
        raise GeomlibError(f"by = {wrong.pop()!r} is not usable: give columns that name something else, document say.")
    sums = table[columns].mul(table["queries"], axis=0).assign(queries=table["queries"])
    sums = sums.groupby([table[k] for k in (*by, "layer", "head")], observed=True).sum()
    counts = sums[list(VOTES)].round().to_numpy()  # whole numbers again: equal counts are ties, whatever was rounded
    heads = sums[columns].div(sums["queries"], axis=0)
    heads.insert(0, "queries", sums["queries"])
    heads.insert(1 + len(VOTES), "regime", label(counts, ties))
    return heads.reset_index()


def label(counts: np.ndarray, ties: Sequence[str] = TIES) -> np.ndarray:
    """The regime of the most votes; counts (..., 3) of votes for the current token, the sink and others, as `VOTES`."""
    columns = [list(REGIMES).index(regime) for regime in ties]
    return np.array(ties, dtype=object)[np.asarray(counts)[..., columns].argmax(-1)]


def counts_by_document(table: pd.DataFrame) -> tuple[list[str], pd.DataFrame, np.ndarray]:
    """Votes of a `taxonomy` table as whole numbers: the documents, the heads (columns layer, head), and the counts, (document,
    head, 3) in the order of `VOTES`."""
    each = regimes(table, by=["document"])
    documents, heads = sorted(each["document"].unique()), each[["layer", "head"]].drop_duplicates(ignore_index=True)
    if not len(each) or len(each) != len(documents) * len(heads):
        raise GeomlibError("not every document of the table has every head: give one study's table.")
    counts = each[list(VOTES)].mul(each["queries"], axis=0).round().to_numpy()
    return documents, heads, counts.reshape(len(documents), len(heads), len(VOTES))


def _pairs(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """The heads of two tables side by side, `regime` and `regime_second` among the columns."""
    for table in (first, second):
        if not {"layer", "head", "regime"} <= set(table) or table.duplicated(["layer", "head"]).any():
            raise GeomlibError("this is no table of heads, one row each: give what taxonomy.regimes(table) returns.")
    pairs = first.merge(second, on=["layer", "head"], suffixes=("", "_second"))
    if not len(pairs) == len(first) == len(second):
        raise GeomlibError("the two tables are not of the same heads: give labellings of one model.")
    return pairs


def agreement(first: pd.DataFrame, second: pd.DataFrame) -> Agreement:
    """Agreement of the regimes in two tables of heads (`regimes`) of one model, Cohen's kappa by scikit-learn."""
    from sklearn.metrics import cohen_kappa_score

    pairs = _pairs(first, second)
    a, b = pairs["regime"], pairs["regime_second"]
    one_label = pd.concat([a, b]).nunique() == 1
    kappa = float("nan") if one_label else cohen_kappa_score(a, b, labels=list(REGIMES))
    return Agreement(len(pairs), float((a == b).mean()), float(kappa))


def moved(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Heads whose regime differs between two tables of heads, those nearest to a border first.

    Returns:
        Columns layer, head, regime, regime_second, lead (see `lead`, in `first`).
    """
    pairs = _pairs(first, second)
    pairs = pairs.assign(lead=lead(pairs))[pairs["regime"] != pairs["regime_second"]]
    columns = ["layer", "head", "regime", "regime_second", "lead"]
    return pairs.sort_values(["lead", "layer", "head"], ignore_index=True)[columns]


def lead(heads: pd.DataFrame) -> pd.Series:
    """How clear each head's regime is: its largest share of votes less the next one."""
    ranked = np.sort(heads[list(VOTES)].to_numpy(), axis=1)
    return pd.Series(ranked[:, -1] - ranked[:, -2], index=heads.index)


def stability_over_length(table: pd.DataFrame) -> pd.DataFrame:
    """Labels from the first queries of each window, up to the end of each bin, against those from all of its queries.

    Attention is causal: a window cut short has the very same weights. The shorter votes are part of the longer ones.

    Returns:
        Columns length, share, kappa.
    """
    whole = regimes(table)
    ends = sorted(table["query_to"].unique())
    rows = [(end, *agreement(regimes(table[table["query_to"] <= end]), whole)[1:]) for end in ends]
    return pd.DataFrame(rows, columns=["length", "share", "kappa"])


def stability_over_documents(table: pd.DataFrame, draws: int = 50, seed: int = 0) -> pd.DataFrame:
    """Labels from n documents against those from n others, for n = 1, 2, 4 ... up to half of them, drawn `draws` times.

    Returns:
        Columns documents, share, low, high (the range that holds 95 % of the draws), kappa (mean). No rows with one document.
    """
    if draws < 1:
        raise GeomlibError(f"draws = {draws} is not usable: give 1 or more.")
    rng = np.random.default_rng(seed)
    names, heads, counts = counts_by_document(table)
    rows, n = [], 1
    while 2 * n <= len(names):
        found = []
        for _ in range(draws):
            order = rng.permutation(len(names))
            halves = [heads.assign(regime=label(counts[part].sum(0))) for part in (order[:n], order[n : 2 * n])]
            found.append(agreement(*halves))
        shares, kappas = [f.share for f in found], [f.kappa for f in found if not np.isnan(f.kappa)]
        kappa = np.mean(kappas) if kappas else np.nan
        rows.append((n, np.mean(shares), *np.percentile(shares, [2.5, 97.5]), kappa))
        n *= 2
    return pd.DataFrame(rows, columns=["documents", "share", "low", "high", "kappa"])
