"""What the attention sink is, and what it does to separability: two observers.

The sink is source 0, the first token of the window. Some models keep further sinks in the middle of a text, so every
source is also looked at by a rule that knows no position. THEORY sections 4 and 6.
"""

from collections.abc import Sequence

import pandas as pd
import torch

from geomlib.attention import Block
from geomlib.controls import random_directions
from geomlib.geometry import SIZES, separability
from geomlib.separability import attention_sets
from geomlib.tables import COLUMNS, BinnedMeans

MASS = 0.3  # mean weight from later queries from which a source is a sink: the epsilon of Gu et al. 2024
SHORT = 0.5  # and its value is shorter than this part of the median value
LATER = 16  # queries after a source that the rule asks for: of fewer, the mean says little

SINKS_SCHEMA: dict[str, tuple[str, str]] = {
    "document": COLUMNS["document"],
    "layer": COLUMNS["layer"],
    "head": COLUMNS["head"],
    "source": ("int32", "position of the source: 0 always, others where the rule finds them"),
    "found": ("int8", f"1 where the rule finds it: received >= {MASS}, value norm < {SHORT} of the median, {LATER} later queries"),
    "later": ("int32", "queries after the source that see it"),
    "received": ("float64", "mean attention weight that these give it"),
    "times_smaller": ("float64", "mean norm of the other sources' values over the norm of its own"),
    "cosine_mean": ("float64", "mean cosine of its value with those of all other sources of the window"),
    "cosine_low": ("float64", "the 5 % quantile of these cosines"),
    "cosine_median": ("float64", "their median"),
    "cosine_high": ("float64", "their 95 % quantile"),
    "cosine_negative": ("float64", "share of them below zero"),
}  # fmt: skip

EFFECT_METRICS = ("f_with", "f_without", "lower", "mass", "extreme")
EFFECT_SCHEMA: dict[str, tuple[str, str]] = {
    **COLUMNS,
    "queries": ("int32", "queries of the bin whose sink is in this state and leaves F defined with and without; all means are over these"),
    "sink": ("string", "selected (source 0 is in the top N), unselected, or hidden (the layer's window hides it: no sink, left out of claims)"),
    "without": ("string", "what f_without lacks: sink (source 0); other (the best source besides it, a control); direction (source 0 borrows another's)"),
    "f_with": ("float64", "mean F_N of the top N as it is"),
    "f_without": ("float64", "mean F_N without that; a source left out is neither selected nor unselected, and the next takes its place"),
    "lower": ("float64", "share of the queries in which f_with is the lower of the two"),
    "mass": ("float64", "mean attention weight of source 0"),
    "extreme": ("float64", "share of the queries in which source 0 sets a radius: selected and the farthest, or unselected and the nearest"),
}  # fmt: skip


class SinkEffectTable:
    """Observer: F_N with source 0 as a candidate and without it, per layer, query head, query bin and size (columns:
    `EFFECT_SCHEMA`), attention ranking and Euclidean distance.

    Args:
        length, queries, sizes, bins: as `tables.BinnedMeans` takes them; N = 1 says nothing and is left out. With queries
            "last" there are two controls more: F without the best source besides the sink, and F where the sink borrows
            the direction of another source, drawn at random.
        key: names the run and the text; decides that draw.

    Operations (query head, query, N) in which the sink is selected are apart from those in which it is not; those whose
    window hides it are counted apart, with f_without = f_with. Source: THEORY section 6.
    """

    shares = True  # a `SeparabilityTable` of the same pass takes its F

    def __init__(self, length: int, queries: str = "all", sizes: Sequence[int] = SIZES, bins: int = 8, key: str = ""):
        self.sizes = tuple(sizes)
        self.means = BinnedMeans(length, queries, [n for n in sizes if n > 1], bins)
        self.key = key

    def __call__(self, block: Block) -> None:
        block = self.means.rows(block)
        if block is None or not self.means.sizes:
            return
        weights, values, visible = block.weights, block.values, block.visible
        (found,) = attention_sets(block, self.sizes, ["euclidean"], without=0)  # N = 1 too: others may take it
        keep = [self.sizes.index(n) for n in self.means.sizes]
        f, without_sink, farthest, nearest = (
            x[..., keep] for x in (found.f, found.f_without, found.farthest, found.nearest)
        )
        # Source 0 wins its ties, so it is selected where fewer than N are above it.
        above = (weights > weights[..., :1]).sum(-1, dtype=torch.int32)
        seen = visible[:, :1, None].movedim(0, 1)  # (1, query, 1)
        selected = seen & (above[..., None] < torch.tensor(self.means.sizes, device=weights.device))
        states = {"selected": selected, "unselected": seen & ~selected, "hidden": ~seen.expand_as(selected)}
        changed = {"sink": without_sink}
        if self.means.queries == "last":
            first = torch.arange(weights.shape[-1], dtype=torch.int32, device=weights.device) == 0
            settings = {"sizes": self.means.sizes, "visible": visible, "counts_only": True}
            best = weights.masked_fill(first | ~visible, -1).argmax(-1)
            changed["other"] = separability(weights, values, exclude=best, **settings).f
            turned = torch.where(first, random_directions(block, self.key), torch.arange(len(first)).to(best))
            changed["direction"] = separability(weights, values, directions=turned, **settings).f
        extreme = torch.where(selected, farthest, nearest) == 0
        mass = weights[..., :1].expand_as(f)
        for name, other in changed.items():
            metrics = torch.stack([f, other, (f < other).double(), mass.double(), extreme.double()])
            for state, here in states.items():
                here = here & ~without_sink.isnan()
                if here.any() and (state != "hidden" or name == "sink"):
                    self.means.add(block, {"sink": state, "without": name}, metrics.masked_fill(~here, torch.nan))

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `EFFECT_SCHEMA` without the document."""
        return self.means.table(EFFECT_METRICS)


class SinksTable:
    """Observer: source 0 of every query head, and every other source that acts as a sink by a rule that knows no position
    (columns: `SINKS_SCHEMA`).

    The rule: of the queries after it that see it, `LATER` or more, it receives a mean weight of at least `MASS`, and its
    value is shorter than `SHORT` of the median value. Its cosines and norms are taken against all other sources of the
    window, whatever a layer's window shows. A learned sink (`s_aux`) is no source and is not here.
    """

    def __init__(self, length: int):
        self.length = length
        self._received: dict[int, torch.Tensor] = {}
        self._later: dict[int, torch.Tensor] = {}
        self._rows: list[pd.DataFrame] = []

    def __call__(self, block: Block) -> None:
        weights, own = block.weights, block.queries
        row = torch.arange(len(own), device=own.device)
        received = weights.sum(1).double().index_add_(1, own, -weights[:, row, own].double())
        later = block.visible.sum(0).index_add_(0, own, -block.visible[row, own].long())
        self._received[block.layer] = self._received.get(block.layer, 0) + received
        self._later[block.layer] = self._later.get(block.layer, 0) + later
        if (own == self.length - 1).any():
            self._rows.append(self._layer(block.layer, block.values.double()))

    def _layer(self, layer: int, values: torch.Tensor) -> pd.DataFrame:
        later = self._later.pop(layer)
        received = self._received.pop(layer) / later.clamp(min=1)
        norms = values.norm(dim=-1)
        short = norms < SHORT * norms.median(dim=-1, keepdim=True).values
        found = (received >= MASS) & short & (later >= LATER)
        shown = found.clone()
        shown[:, 0] = True
        h, i = shown.nonzero(as_tuple=True)
        tiny = torch.finfo(values.dtype).tiny
        units = values / norms.clamp(min=tiny)[..., None]
        others = torch.ones(len(i), norms.shape[1], dtype=torch.bool, device=i.device)
        others[torch.arange(len(i)), i] = False
        cosines = (units[h] @ units[h, i, :, None])[..., 0][others].view(len(i), -1)
        rest = norms[h][others].view(len(i), -1).mean(-1)
        low, middle, high = torch.quantile(cosines, torch.tensor([0.05, 0.5, 0.95]).to(cosines), dim=-1)
        columns = {
            "head": h, "source": i, "found": found[h, i].to(torch.int8), "later": later[i], "received": received[h, i],
            "times_smaller": rest / norms[h, i].clamp(min=1e-300), "cosine_mean": cosines.mean(-1), "cosine_low": low,
            "cosine_median": middle, "cosine_high": high, "cosine_negative": (cosines < 0).double().mean(-1),
        }  # fmt: skip
        return pd.DataFrame({"layer": layer} | {k: v.cpu().numpy() for k, v in columns.items()})

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SINKS_SCHEMA` without the document."""
        return pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()
