"""Separability of every head over a window: an observer that turns attention blocks into one tidy table."""

from collections.abc import Sequence

import pandas as pd
import torch

from geomlib.attention import Block
from geomlib.controls import RANDOM_RANKINGS, random_directions, random_scores
from geomlib.geometry import SIZES, Separability, separability

CONTROLS = ("random", "magnitude")
METRICS = Separability._fields


class SeparabilityTable:
    """Observer: means of all nine metrics per layer, query head, query bin, size, ranking, distance and control.

    Args:
        length: tokens of the window.
        queries: "all" (every query of the window, in `bins` equal bins of position) or "last" (the final one, the
            paper's protocol).
        sizes, rankings, distances: as `geometry.separability` takes them.
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
        self.length, self.queries, self.sizes, self.key = length, queries, tuple(sizes), key
        self.rankings, self.distances, self.controls = tuple(rankings), tuple(distances), tuple(controls)
        self.random_rankings = random_rankings
        self.edges = [length - 1, length] if queries == "last" else [round(i * length / bins) for i in range(bins + 1)]
        self._sums: dict[tuple[int, str, str], torch.Tensor] = {}

    def __call__(self, block: Block) -> None:
        if self.queries == "last":
            block = _rows(block, block.queries == self.length - 1)
            if block is None:
                return
        weights, values, visible = block.weights, block.values, block.visible
        common = {"sizes": self.sizes, "distance": self.distances, "visible": visible}
        for ranking in self.rankings:
            self._add(block, ranking, "none", separability(weights, values, ranking=ranking, **common))
            if "magnitude" in self.controls:
                turned = random_directions(block, self.key)
                found = separability(weights, values, ranking=ranking, directions=turned, **common)
                self._add(block, ranking, "magnitude", found)
        if "random" in self.controls:
            for draw in range(self.random_rankings):
                found = separability(weights, values, ranking=random_scores(block, self.key, draw), **common)
                self._add(block, "random", "random", found)

    def _add(self, block: Block, ranking: str, control: str, found: Separability) -> None:
        """Add a block to the running sums, (metric and count, distance, query head, bin, size)."""
        stacked = torch.stack([*found, (~found.f.isnan()).double()]).nan_to_num(0.0).cpu()
        _, distances, heads, _, sizes = stacked.shape
        place = (block.layer, ranking, control)
        if place not in self._sums:
            self._sums[place] = torch.zeros(
                len(stacked), distances, heads, len(self.edges) - 1, sizes, dtype=torch.double
            )
        bins = torch.bucketize(block.queries.cpu(), torch.tensor(self.edges[1:]), right=True)
        self._sums[place].index_add_(3, bins, stacked)

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far: one row per combination, means over the queries of the bin."""
        parts = []
        for (layer, ranking, control), sums in self._sums.items():
            count = sums[-1]
            d, h, b, n = count.nonzero(as_tuple=True)
            draws = self.random_rankings if control == "random" else 1
            columns = {
                "layer": layer,
                "head": h,
                "query_from": torch.tensor(self.edges)[b],
                "query_to": torch.tensor(self.edges)[b + 1],
                "queries": (count[d, h, b, n] / draws).round().long(),
                "size": torch.tensor(self.sizes)[n],
                "ranking": ranking,
                "distance": [self.distances[i] for i in d],
                "control": control,
            }
            for i, name in enumerate(METRICS):
                columns[name] = sums[i][d, h, b, n] / count[d, h, b, n]
            parts.append(pd.DataFrame({k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in columns.items()}))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _rows(block: Block, keep: torch.Tensor) -> Block | None:
    """The block with some of its rows; None when none is left."""
    if not keep.any():
        return None
    mass = None if block.learned_sink_mass is None else block.learned_sink_mass[:, keep]
    return Block(
        block.layer, block.queries[keep], block.weights[:, keep], block.values, block.visible[keep], mass, block.batch
    )
