"""What the attention sink is, and what it does to separability: two observers.

The sink is source 0, the first token of the window. Some models keep further sinks in the middle of a text, so every
source is also looked at by a rule that knows no position. Chapter 3 of the book.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from geomlib.attention import Block
from geomlib.controls import random_scores
from geomlib.errors import GeomlibError
from geomlib.geometry import SIZES, separability
from geomlib.separability import attention_sets
from geomlib.tables import COLUMNS, BinnedMeans
from geomlib.taxonomy import VOTES, label, source_winner

MASS = 0.3  # mean weight from later queries from which a source is a sink: the epsilon of Gu et al. 2024
SHORT = 0.5  # and its value is shorter than this part of the median value
LATER = 16  # queries after a source that the rule asks for: of fewer, the mean says little

SINKS_SCHEMA: dict[str, tuple[str, str]] = {
    "document": COLUMNS["document"],
    "layer": COLUMNS["layer"],
    "head": COLUMNS["head"],
    "source": ("int32", "position of the source: 0 always, others where the rule finds them"),
    "found": ("int8", f"1 where the rule finds it: received >= {MASS}, value norm < {SHORT} of the (lower) median, {LATER} later queries"),
    "later": ("int32", "queries after the source that see it"),
    "received": ("float64", "mean attention weight that these give it"),
    "won": ("float64", "share of them whose source-winner it is (`taxonomy.source_winner`)"),
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
    "queries": ("int32", "queries of the bin whose sink is in this state and for which both F are defined; all means are over these"),
    "sink": ("string", "selected (source 0 is in the top N), unselected, or hidden (the layer's window hides it: no sink, left out of claims)"),
    "without": ("string", "what f_without lacks: sink (source 0); other (the best source besides it, a control); direction (source 0 borrows that of another)"),
    "f_with": ("float64", "mean F_N of the top N as it is"),
    "f_without": ("float64", "mean F_N without that; a source left out is neither selected nor unselected, and the next takes its place"),
    "lower": ("float64", "share of the queries in which f_with is the lower of the two"),
    "mass": ("float64", "mean attention weight of source 0"),
    "extreme": ("float64", "share of the queries in which source 0 sets a radius: selected and the farthest, or unselected and the nearest"),
}  # fmt: skip


def opposition(
    weights: torch.Tensor, values: torch.Tensor, sizes: Sequence[int], visible: torch.Tensor | None = None
) -> torch.Tensor:
    """How hard the other selected pull against the sink: -2 <y_0, s'> / ‖y_0‖², with s' their sum.

    At 1 or more, exactly, the sink is no nearer to the aggregate s_N = y_0 + s' than the origin is: D_0 = ‖s'‖ >= ‖s_N‖. The ball
    that holds the selected then holds the origin, and with it whatever contributes little (ours; proved in chapter 3).

    Args:
        weights: (..., query, source). values: (..., source, dim). visible: (query, source); None: all.

    Returns:
        (..., query, size), NaN where source 0 is not among the top N by attention, contributes nothing, or N >= T.
    """
    pulls = []
    for chosen, defined in _top_sets(weights, sizes, visible):
        first = weights[..., :1].double() * values[..., :1, :].double()  # y_0, (..., query, dim)
        selected = chosen[..., 0] & defined
        chosen[..., 0] = False
        others = (weights * chosen).double() @ values.double()
        pull = -2 * (first * others).sum(-1) / first.square().sum(-1)
        pulls.append(torch.where(selected & torch.isfinite(pull), pull, torch.nan))
    return torch.stack(pulls, dim=-1)


def holds_origin(
    weights: torch.Tensor,
    values: torch.Tensor,
    sizes: Sequence[int],
    visible: torch.Tensor | None = None,
    exclude: torch.Tensor | None = None,
) -> torch.Tensor:
    """Whether the ball that holds the selected holds the origin, rho_max >= ‖s_N‖: then what contributes nothing intrudes.

    It does so exactly when the greatest key of a selected source, ‖y_i‖² - 2 <y_i, s_N>, is 0 or more.

    Args:
        weights, values, visible: as `opposition` takes them. exclude: sources left out, boolean (source,).

    Returns:
        (..., query, size) float64: 1 or 0, NaN where N >= T.
    """
    held = []
    for chosen, defined in _top_sets(weights, sizes, visible, exclude):
        total = (weights * chosen).double() @ values.double()
        a, v = weights.double(), values.double()
        keys = a * (a * v.square().sum(-1)[..., None, :] - 2 * total @ v.transpose(-1, -2))
        inside = (keys.masked_fill(~chosen, -torch.inf).amax(-1) >= 0).double()
        held.append(torch.where(defined, inside, torch.nan))
    return torch.stack(held, dim=-1)


def pulls(block: Block, sizes: Sequence[int]) -> pd.DataFrame:
    """Why the sink costs what it costs: the operations of a block that select it, a row each.

    Returns:
        Columns layer, head, query, size; opposition; inside_with and inside_without (`holds_origin` with the sink as a
        candidate and without it); f_with and f_without.
    """
    block_of = block.weights, block.values
    first = torch.arange(block.weights.shape[-1], device=block.weights.device) == 0
    found = separability(*block_of, sizes, visible=block.visible, without=0)
    columns = {
        "opposition": opposition(*block_of, sizes, block.visible),
        "inside_with": holds_origin(*block_of, sizes, block.visible),
        "inside_without": holds_origin(*block_of, sizes, block.visible, first),
        "f_with": found.f,
        "f_without": found.f_without,
    }
    h, q, n = (~columns["opposition"].isnan() & ~found.f_without.isnan()).nonzero(as_tuple=True)
    place = {"layer": block.layer, "head": h, "query": block.queries[q], "size": torch.tensor(sizes)[n.cpu()]}
    rows = place | {name: x[h, q, n] for name, x in columns.items()}
    return pd.DataFrame({k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in rows.items()})


def _top_sets(weights, sizes, visible, exclude=None):
    """For each size, the top-N set by attention, boolean (..., query, source), and whether N < T, (query,)."""
    candidates = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device)
    if visible is not None:
        candidates = candidates & visible
    if exclude is not None:
        candidates = candidates & ~exclude
    order = weights.masked_fill(~candidates, -1).sort(dim=-1, descending=True, stable=True).indices
    for size in sizes:
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order[..., :size], True)
        yield chosen & candidates, candidates.sum(-1) > size


def elsewhere(heads: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """What if a sink is a sink wherever it stands? The table of heads with the votes for other sinks moved to the sink.

    Args:
        heads: `taxonomy.regimes` of some documents, all queries and the usual order of ties. table: the `sinks` table of the same documents.

    Returns:
        heads with three columns more: `elsewhere`, the share of all votes that go to sources that the rule finds, source 0
        apart; `regime_anywhere`, the regime if these counted as votes for the sink; `changed`, whether it is another one.
    """
    if missing := [c for c in ("layer", "head", "source", "found", "later", "won") if c not in table]:
        raise GeomlibError(f"the table has no column {missing[0]}: give one of the analysis 'sinks'.")
    if heads.duplicated(["layer", "head"]).any():
        raise GeomlibError("a head is there twice: give taxonomy.regimes(table) of all documents together.")
    other = table[(table["found"] == 1) & (table["source"] > 0)]
    votes = (other["won"] * other["later"]).groupby([other["layer"], other["head"]]).sum().round()
    votes = votes.reindex(pd.MultiIndex.from_frame(heads[["layer", "head"]]), fill_value=0).to_numpy()
    counts = heads[list(VOTES)].mul(heads["queries"], axis=0).round().to_numpy()
    counts = counts + np.stack([0 * votes, votes, -votes], axis=-1)
    if (counts < 0).any():
        raise GeomlibError(
            "the sinks win more votes than the heads cast: give two tables of the same documents, all queries."
        )
    after = label(counts)
    return heads.assign(elsewhere=votes / heads["queries"], regime_anywhere=after, changed=after != heads["regime"])


class SinkEffectTable:
    """Observer: F_N with source 0 as a candidate and without it, per layer, query head, query bin and size (columns:
    `EFFECT_SCHEMA`), attention ranking and Euclidean distance.

    Args:
        length, queries, sizes, bins: as `tables.BinnedMeans` takes them; N = 1 says nothing and is left out. With queries
            "last" there are two controls more: F without the best source besides the sink, and F where the sink borrows
            the direction of another source, drawn at random.
        key: names the run and the text; decides that draw.

    Operations (query head, query, N) in which the sink is selected are apart from those in which it is not; those whose
    window hides it are counted apart, with f_without = f_with. Source: arXiv 2602.01893; chapter 3 of the book.
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
            scores = random_scores(block, "sink direction " + self.key, 0).masked_fill(first | ~visible, -1)
            turned = torch.where(first, scores.argmax(-1, keepdim=True), torch.arange(len(first)).to(best))
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
        self._won: dict[int, torch.Tensor] = {}
        self._later: dict[int, torch.Tensor] = {}
        self._rows: list[pd.DataFrame] = []

    def __call__(self, block: Block) -> None:
        weights, own = block.weights, block.queries
        row = torch.arange(len(own), device=own.device)
        received = weights.sum(1).double().index_add_(1, own, -weights[:, row, own].double())
        winner, _ = source_winner(block)
        won = torch.zeros_like(received).scatter_add_(1, winner, (winner != own).to(received))
        later = block.visible.sum(0).index_add_(0, own, -block.visible[row, own].long())
        self._received[block.layer] = self._received.get(block.layer, 0) + received
        self._won[block.layer] = self._won.get(block.layer, 0) + won
        self._later[block.layer] = self._later.get(block.layer, 0) + later
        if (own == self.length - 1).any():
            self._rows.append(self._layer(block.layer, block.values.double()))

    def _layer(self, layer: int, values: torch.Tensor) -> pd.DataFrame:
        later = self._later.pop(layer)
        received, won = (sums.pop(layer) / later.clamp(min=1) for sums in (self._received, self._won))
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
        low, middle, high = torch.quantile(cosines, cosines.new_tensor([0.05, 0.5, 0.95]), dim=-1)
        columns = {
            "head": h, "source": i, "found": found[h, i].to(torch.int8), "later": later[i], "received": received[h, i],
            "won": won[h, i],
            "times_smaller": rest / norms[h, i].clamp(min=1e-300), "cosine_mean": cosines.mean(-1), "cosine_low": low,
            "cosine_median": middle, "cosine_high": high, "cosine_negative": (cosines < 0).double().mean(-1),
        }  # fmt: skip
        return pd.DataFrame({"layer": layer} | {k: v.cpu().numpy() for k, v in columns.items()})

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SINKS_SCHEMA` without the document."""
        return pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()
