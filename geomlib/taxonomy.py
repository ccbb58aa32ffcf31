"""Retriever, Mixer or Reset: what a query head looks at most, query by query, and the regime that follows.

Each query t >= 1 votes by its source-winner, the visible source of largest weight (ties to the lower index): for the current
token (w = t), for the sink (w = 0), or for another one. A head's regime is the vote of most queries. No threshold anywhere.
THEORY section 8.
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
        most = weights.amax(-1, keepdim=True)
        # Invisible sources have weight 0 and so can only tie with a row of zeros, which a learned sink can leave.
        largest = (weights == most) & block.visible
        winner = largest.to(torch.uint8).argmax(-1)  # the first
        current, sink = winner == own, (winner == 0) & (own > 0)
        mass, tiny = block.learned_sink_mass, torch.finfo(weights.dtype).tiny
        metrics = [
            current, sink, ~(current | sink), _cosine(block.outputs, values[:, :1]),
            _cosine(block.outputs, values[:, own]), weights[..., 0],
            torch.zeros_like(weights[..., 0]) if mass is None else mass,
            -torch.linalg.vecdot(weights, weights.clamp_min(tiny).log_()), own - winner, block.visible[:, 0].expand_as(winner), largest.sum(-1, dtype=torch.int32) > 1,
        ]  # fmt: skip
        metrics = torch.stack([m.double() for m in metrics])[..., None]
        self.means.add(block, {}, metrics.masked_fill((own == 0)[:, None], torch.nan))

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SCHEMA` without the document."""
        return self.means.table((*VOTES, *SIGNATURES)).drop(columns="size", errors="ignore")


def _cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(x, y, dim=-1, eps=torch.finfo(x.dtype).tiny)


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
        Columns *by, layer, head, queries, the shares of votes, regime, and the means of `SIGNATURES` over the queries.

    Source: THEORY section 8. With documents of one length, equal weight a query is equal weight a document.
    """
    if sorted(ties) != sorted(REGIMES):
        raise GeomlibError(f"ties = {tuple(ties)} is not usable: give {', '.join(REGIMES)} in the order you want.")
    if missing := [c for c in (*by, "layer", "head", "queries", *VOTES) if c not in table]:
        raise GeomlibError(f"the table has no column {missing[0]}: give one of the analysis 'taxonomy'.")
    columns = [*VOTES, *(c for c in SIGNATURES if c in table)]
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
    return np.array(ties, dtype=object)[counts[..., columns].argmax(-1)]


def agreement(first: pd.DataFrame, second: pd.DataFrame) -> Agreement:
    """Agreement of the regimes in two tables of heads (`regimes`) of one model, Cohen's kappa by scikit-learn."""
    from sklearn.metrics import cohen_kappa_score

    pairs = first.merge(second, on=["layer", "head"], suffixes=("_first", "_second"), validate="one_to_one")
    if not len(pairs) == len(first) == len(second):
        raise GeomlibError("the two tables are not of the same heads: give labellings of one model.")
    a, b = pairs["regime_first"], pairs["regime_second"]
    one_label = pd.concat([a, b]).nunique() == 1
    kappa = float("nan") if one_label else cohen_kappa_score(a, b, labels=list(REGIMES))
    return Agreement(len(pairs), float((a == b).mean()), float(kappa))


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
    rng = np.random.default_rng(seed)
    names = sorted(table["document"].unique())
    each = regimes(table, by=["document"])
    counts = each[list(VOTES)].mul(each["queries"], axis=0).round().to_numpy().reshape(len(names), -1, len(VOTES))
    heads = each.loc[each["document"] == names[0], ["layer", "head"]].reset_index(drop=True)
    rows, n = [], 1
    while 2 * n <= len(names):
        found = []
        for _ in range(draws):
            order = rng.permutation(len(names))
            halves = [heads.assign(regime=label(counts[part].sum(0))) for part in (order[:n], order[n : 2 * n])]
            found.append(agreement(*halves))
        shares = [f.share for f in found]
        rows.append((n, np.mean(shares), *np.percentile(shares, [2.5, 97.5]), np.nanmean([f.kappa for f in found])))
        n *= 2
    return pd.DataFrame(rows, columns=["documents", "share", "low", "high", "kappa"])
