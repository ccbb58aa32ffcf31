"""Running means over the queries of a window: what every analysis of all queries accumulates, block by block."""

from collections.abc import Sequence

import pandas as pd
import torch

from geomlib.attention import Block
from geomlib.errors import GeomlibError

# Columns that name a row of every table of binned means: name -> type, meaning.
COLUMNS: dict[str, tuple[str, str]] = {
    "document": ("string", "id of the document the window was taken from"),
    "layer": ("int16", "layer, from 0"),
    "head": ("int16", "query head, from 0"),
    "query_from": ("int32", "first query position of the bin"),
    "query_to": ("int32", "one past its last query position"),
    "queries": ("int32", "queries of the bin that see more than `size` sources; all means are over these"),
    "size": ("int32", "N, the number of selected sources"),
}


class BinnedMeans:
    """Means per layer, query head, bin of query position and size, for every combination of further names.

    Args:
        length: tokens of the window.
        queries: "all" (every query of the window, in `bins` equal bins of position) or "last" (the final one, the
            paper's protocol).
        sizes: the N of the last axis of what is added.
    """

    def __init__(self, length: int, queries: str, sizes: Sequence[int], bins: int):
        if queries not in ("all", "last"):
            raise GeomlibError(f"queries = {queries!r} is not usable: give all or last.")
        if bins < 1 or len(set(sizes)) < len(sizes):
            raise GeomlibError(
                f"bins = {bins} and sizes {tuple(sizes)} are not usable: give 1 bin or more, each size once."
            )
        self.length, self.queries, self.sizes = length, queries, tuple(sizes)
        self.edges = [length - 1, length] if queries == "last" else [round(i * length / bins) for i in range(bins + 1)]
        self._sums: dict[tuple, torch.Tensor] = {}

    def rows(self, block: Block) -> Block | None:
        """The block with the rows that count; None when it has none."""
        if self.queries == "all":
            return block
        keep = block.queries == self.length - 1
        return block.only(keep) if keep.any() else None

    def add(self, block: Block, names: dict[str, str], metrics: torch.Tensor, draws: int = 1) -> None:
        """Add the rows of a block: metrics (metric, head, query, size). NaN in the first metric: the query does not count.

        draws: how many times each query is added under these names.
        """
        stacked = torch.cat([metrics, (~metrics[:1].isnan()).to(metrics.dtype)]).double().nan_to_num(0.0).cpu()
        place = (block.layer, tuple(names.items()), draws)
        count, heads, _, sizes = stacked.shape
        if place not in self._sums:
            self._sums[place] = torch.zeros(count, heads, len(self.edges) - 1, sizes, dtype=torch.double)
        bins = torch.bucketize(block.queries.cpu(), torch.tensor(self.edges[1:]), right=True)
        self._sums[place].index_add_(2, bins, stacked)

    def table(self, metrics: Sequence[str]) -> pd.DataFrame:
        """One row per combination with a query in it; the metrics are means over the queries of the bin."""
        edges, sizes = torch.tensor(self.edges), torch.tensor(self.sizes)
        parts = []
        for (layer, names, draws), sums in self._sums.items():
            count = sums[-1]
            h, b, n = count.nonzero(as_tuple=True)
            columns = {
                "layer": layer,
                "head": h,
                "query_from": edges[b],
                "query_to": edges[b + 1],
                "queries": (count[h, b, n] / draws).round().long(),
                "size": sizes[n],
                **dict(names),
            } | {name: sums[i][h, b, n] / count[h, b, n] for i, name in enumerate(metrics)}
            parts.append(pd.DataFrame({k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in columns.items()}))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
