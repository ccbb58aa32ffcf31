"""Separability of every head over a window: an observer that turns attention blocks into one tidy table."""

from collections.abc import Sequence

import pandas as pd
import torch

from geomlib.attention import Block
from geomlib.controls import RANDOM_RANKINGS, random_directions, random_scores
from geomlib.geometry import SIZES, Separability, separability
from geomlib.tables import COLUMNS, BinnedMeans

CONTROLS = ("random", "magnitude")
METRICS = Separability._fields[:9]  # the others name sources, or are the sink's

SCHEMA: dict[str, tuple[str, str]] = {
    **COLUMNS,
    "ranking": ("string", "attention, contribution, or random"),
    "distance": ("string", "euclidean or cosine"),
    "control": ("string", "none (the ranked sets themselves), random, or magnitude (directions permuted)"),
    "precision": ("float64", "mean of N / (N + false positives)"),
    "recall": ("float64", "mean of (N - false negatives) / N"),
    "f": ("float64", "mean of F_N, the harmonic mean of the two"),
    "margin": ("float64", "mean of rho_min - rho_max, in units of the value states (cosine: dimensionless)"),
    "inversions": ("float64", "mean number of (selected, unselected) pairs in the wrong order"),
    "false_positives": ("float64", "mean number of unselected sources within rho_max"),
    "false_negatives": ("float64", "mean number of selected sources at or beyond rho_min"),
    "rho_min": ("float64", "mean distance of the nearest unselected source to the aggregate"),
    "rho_max": ("float64", "mean distance of the farthest selected source to the aggregate"),
}


def attention_sets(
    block: Block, sizes: Sequence[int], distances: Sequence[str], without: int | None = None
) -> list[Separability]:
    """Separability of the block's top-N sets by attention, one for each distance, each of (query head, query, size).

    Several analyses of one forward pass need it: what one of them computed the others take.
    """
    shared = block.shared.setdefault("attention sets", {})  # distance -> sizes, without, metrics
    missing = [d for d in distances if d not in shared or not set(sizes) <= set(shared[d][0])
               or without not in (None, shared[d][1])]  # fmt: skip
    if missing:
        settings = {"distance": missing, "visible": block.visible, "without": without}
        found = separability(block.weights, block.values, sizes, **settings)
        for i, distance in enumerate(missing):
            shared[distance] = (tuple(sizes), without, Separability(*(x[i] for x in found)))
    sets = []
    for there, _, found in (shared[d] for d in distances):
        keep = [there.index(n) for n in sizes]
        sets.append(found if there == tuple(sizes) else Separability(*(x[..., keep] for x in found)))
    return sets


class SeparabilityTable:
    """Observer: means of all nine metrics per layer, query head, query bin, size, ranking, distance and control.

    Args:
        length, queries, sizes, bins: as `tables.BinnedMeans` takes them.
        rankings, distances: as `geometry.separability` takes them.
        controls: any of "random" (mean over `random_rankings` nested random rankings per query) and "magnitude".
        key: names the run and the text; decides the random draws.

    Rows of control "none" are the attention sets themselves; the random control has ranking "random". A query counts
    in a bin only for the sizes N < T; where none does, there is no row.
    """

    def __init__(
        self,
        length: int,
        queries: str = "all",
        sizes: Sequence[int] = SIZES,
        rankings: Sequence[str] = ("attention",),
        distances: Sequence[str] = ("euclidean",),
        controls: Sequence[str] = CONTROLS,
        random_rankings: int = RANDOM_RANKINGS,
        bins: int = 8,
        key: str = "",
    ):
        self.means = BinnedMeans(length, queries, sizes, bins)
        self.rankings, self.distances, self.controls = tuple(rankings), tuple(distances), tuple(controls)
        self.random_rankings, self.key = random_rankings, key

    def __call__(self, block: Block) -> None:
        block = self.means.rows(block)
        if block is None:
            return
        weights, values, visible = block.weights, block.values, block.visible
        common = {"sizes": self.means.sizes, "distance": self.distances, "visible": visible}
        for ranking in self.rankings:
            if ranking == "attention":
                found = attention_sets(block, self.means.sizes, self.distances)
                found = Separability(*(torch.stack(x) for x in zip(*found, strict=True)))
            else:
                found = separability(weights, values, ranking=ranking, **common)
            self._add(block, ranking, "none", found)
            if "magnitude" in self.controls:
                turned = random_directions(block, self.key)
                found = separability(weights, values, ranking=ranking, directions=turned, **common)
                self._add(block, ranking, "magnitude", found)
        if "random" in self.controls:
            for draw in range(self.random_rankings):
                found = separability(weights, values, ranking=random_scores(block, self.key, draw), **common)
                self._add(block, "random", "random", found, self.random_rankings)

    def _add(self, block: Block, ranking: str, control: str, found: Separability, draws: int = 1) -> None:
        for distance, metrics in zip(self.distances, torch.stack(found[: len(METRICS)], dim=1), strict=True):
            self.means.add(block, {"ranking": ranking, "distance": distance, "control": control}, metrics, draws)

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SCHEMA` without the document."""
        return self.means.table(METRICS)
