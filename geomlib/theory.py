"""Every bound of `geomlib.bounds` over a window, beside what it bounds, and what the theory assumes: two observers.

And the theory without a model: certified and predicted F from an attention profile alone.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import pandas as pd
import torch

from geomlib import _kernels
from geomlib.attention import Block
from geomlib.bounds import (
    DRAWS,
    TAIL,
    certificate,
    coherence,
    gaussian_prediction,
    inversion_bound,
    joint_inversion_bound,
    sketch_directions,
    spherical_coherence,
)
from geomlib.geometry import SIZES, tiles_of
from geomlib.tables import BinnedMeans

RANKS = (0, 1, 4, 16)  # of the sketches
_NAMES = [("exact", "none")]
_NAMES += [
    (level, sink) for level in ("constant_norm", "global", "quantile", "rowwise") for sink in ("aware", "agnostic")
]
_NAMES += [(f"sketch_{r}", "aware" if r else "none") for r in RANKS]
_NAMES += [(f"sketch_{r}", "agnostic") for r in RANKS if r]
_NAMES += [("combined", "aware")]
THEOREMS = ("inversion", "joint_inversion", "global", "rowwise", *(f"sketch_{r}" for r in RANKS), "combined")
_GUARD = 4.0  # as in `bounds.certificate`

METRICS = ("precision", "recall", "f", "holds", "separated", "standard_error")
SCHEMA: dict[str, tuple[str, str]] = {
    "document": ("string", "id of the document the window was taken from"),
    "layer": ("int16", "layer, from 0"),
    "head": ("int16", "query head, from 0"),
    "query_from": ("int32", "first query position of the bin"),
    "query_to": ("int32", "one past its last query position"),
    "queries": ("int32", "queries of the bin that see more than `size` sources; all means are over these"),
    "size": ("int32", "N, the number of selected sources"),
    "level": ("string", "exact, inversion, joint_inversion, constant_norm, global, quantile, rowwise, sketch_R, combined, gaussian"),
    "sink": ("string", "aware, agnostic, or none (the level knows no difference)"),
    "precision": ("float64", "mean precision that the level certifies (exact: reaches; gaussian: predicts)"),
    "recall": ("float64", "the same of recall"),
    "f": ("float64", "the same of F"),
    "holds": ("float64", "share of the queries in which neither precision, recall nor F exceeds the exact one"),
    "separated": ("float64", "share of the queries in which F = 1 is certified (exact: reached; gaussian: mean over draws is 1)"),
    "standard_error": ("float64", "mean standard error of f from the simulation; 0 where nothing is simulated"),
}  # fmt: skip
COHERENCE_SCHEMA: dict[str, tuple[str, str]] = {
    "document": ("string", "id of the document the window was taken from"),
    "layer": ("int16", "layer, from 0"),
    "head": ("int16", "query head, from 0; those that share a KV head have equal rows"),
    "dim": ("int32", "dimension of the value states"),
    "sources": ("int32", "sources of the window, all of which count"),
    "mu_mean": ("float64", "mean cosine of two value states, the sink's apart"),
    "mu_sd": ("float64", "their standard deviation"),
    "mu_row_sd": ("float64", "standard deviation of the sources' mean cosines"),
    "kappa_mean": ("float64", "mean cosine of the sink's value state with the others"),
    "kappa_sd": ("float64", "their standard deviation"),
    "mu_low": ("float64", "least cosine of two value states, the sink's apart"),
    "mu_high": ("float64", "the greatest"),
    "kappa_low": ("float64", "least cosine with the sink's value state"),
    "kappa_high": ("float64", "the greatest"),
    "norm_ratio": ("float64", "r: norm of the sink's value state over the mean norm of the others"),
    "norm_cv": ("float64", "standard deviation over mean of the others' norms"),
}


def _same_values(values: torch.Tensor) -> Iterable[slice]:
    """Runs of query heads that read one KV head: what depends on values alone is computed once for them."""
    start = 0
    for h in range(1, len(values) + 1):
        if h == len(values) or not torch.equal(values[h], values[start]):
            yield slice(start, h)
            start = h


def every_level(
    weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, sizes: Sequence[int] = SIZES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact metrics and every certificate for query heads that share their values (top-N by attention, Euclidean).

    Args:
        weights: (head, query, source), the queries in order. values: (source, dim). visible: (query, source).
        sizes: ascending.

    Returns:
        (level, head, query, size, 5) float64: levels as `_NAMES`, then precision, recall, F, whether these do not exceed
        the exact ones, whether F = 1 is certified; and the inversions, (head, query, size). NaN where N >= T.

    One (source, source) array of cosines exists at a time. Source: `bounds.certificate`, which says the same slowly.
    """
    sources = torch.arange(visible.shape[1])
    # Where the visible sources have holes, or the first one moves back: the range around them, which stays a bound.
    low = torch.where(visible, sources, len(sources)).amin(1).flip(0).cummin(0).values.flip(0)
    high = torch.where(visible, sources + 1, 0).amax(1).cummax(0).values
    end = int(high[-1])
    weights, values, visible = weights[..., :end], values[:end], visible[:, :end]
    norms = values.norm(dim=-1)
    full = values.double()
    units = full / full.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    cosines = units.to(values.dtype) @ units.to(values.dtype).T
    intervals = np.empty((len(low), 8))
    _kernels.pair_intervals(cosines.numpy(), low.numpy(), high.numpy(), TAIL, intervals)
    others = visible.clone()
    others[:, 0] = False
    mean = (others * norms.double()).sum(-1) / others.sum(-1).clamp(min=1)
    ratio = torch.where(mean > 0, norms[0].double() / mean, 1.0)
    ranks = [min(r, values.shape[1]) for r in RANKS]
    basis = torch.stack([sketch_directions(units, ranks[-1], sink) for sink in (True, False)])
    coordinates = units @ basis.transpose(1, 2)  # (way, source, rank)
    residuals = torch.stack(
        [(units - coordinates[..., :r] @ basis[:, :r]).norm(dim=-1) for r in ranks], dim=1
    )  # (way, ranks, source)
    padded, tiles = tiles_of(values[None])
    out = np.empty((len(_NAMES), *weights.shape[:2], len(sizes), 5))
    inversions = np.empty((*weights.shape[:2], len(sizes)))
    _kernels.certificate_rows(
        weights.contiguous().numpy(), padded[0].numpy(), tiles[0].numpy(), norms.numpy(), cosines.numpy(),
        visible.contiguous().numpy(), np.asarray(sizes, np.int64), intervals, ratio.numpy(), basis.contiguous().numpy(),
        coordinates.transpose(1, 2).to(values.dtype).contiguous().numpy(), residuals.to(values.dtype).contiguous().numpy(),
        np.asarray(ranks, np.int64), _GUARD * torch.finfo(values.dtype).eps, out, inversions,
    )  # fmt: skip
    return torch.from_numpy(out), torch.from_numpy(inversions)


class BoundsTable:
    """Observer: every bound per layer, query head, query bin and size, beside the exact F (columns: `SCHEMA`).

    Args:
        length, queries, sizes, bins: as `tables.BinnedMeans` takes them. With queries "last", the Gaussian prediction
            is there too (for every query it would take hours).
        key: names the run and the text; decides the simulation's draws.

    Computed on the CPU, whatever the model runs on.
    """

    def __init__(self, length: int, queries: str = "all", sizes: Sequence[int] = SIZES, bins: int = 8, key: str = ""):
        self.means = BinnedMeans(length, queries, sorted(sizes), bins)
        self.key = key

    def __call__(self, block: Block) -> None:
        block = self.means.rows(block)
        if block is None:
            return
        weights, values, visible = block.weights.cpu(), block.values.cpu(), block.visible.cpu()
        parts = [every_level(weights[h], values[h][0], visible, self.means.sizes) for h in _same_values(values)]
        levels, inversions = (torch.cat([p[i] for p in parts], dim=1 - i) for i in (0, 1))
        zero = torch.zeros_like(inversions)
        for (level, sink), found in zip(_NAMES, levels, strict=True):
            self._add(block, level, sink, [*found.unbind(-1), zero])
        exact = levels[0]
        sizes = torch.tensor(self.means.sizes, dtype=torch.double)
        paper = inversion_bound(inversions, sizes)
        joint = joint_inversion_bound(inversions, sizes)
        for level, (p, r, f) in (("inversion", paper), ("joint_inversion", (paper.precision, paper.recall, joint))):
            slack = 1e-12  # of float64: these are exact counts
            holds = (p <= exact[..., 0] + slack) & (r <= exact[..., 1] + slack) & (f <= exact[..., 2] + slack)
            self._add(block, level, "none", [p, r, f, holds.double(), (f == 1).double(), zero])
        if self.means.queries == "last":
            self._predict(block.layer, block, weights, values, visible, exact)

    def _predict(self, layer: int, block: Block, weights, values, visible, exact) -> None:
        seen = visible[0].expand(weights.shape[0], -1)
        order = weights[:, 0].masked_fill(~seen, -1).sort(dim=-1, descending=True, stable=True).indices
        seed = int.from_bytes(hashlib.sha256(f"{self.key} {layer}".encode()).digest()[:6], "little")
        magnitudes = weights[:, 0] * values.norm(dim=-1)
        metrics = torch.full((6, *exact.shape[:-1]), torch.nan, dtype=torch.double)
        if seen[0].sum() >= 3:
            groups = list(_same_values(values))
            found = [coherence(values[h.start], seen[0])[:5] for h in groups]
            repeats = torch.tensor([h.stop - h.start for h in groups])
            measured = [torch.stack(field).repeat_interleave(repeats) for field in zip(*found, strict=True)]
            sizes = [n for n in self.means.sizes if n < int(seen[0].sum())]
            selected = torch.stack([torch.zeros_like(seen).scatter(1, order[:, :n], True) for n in sizes])
            guess = gaussian_prediction(magnitudes, selected, *measured, visible=seen, seed=seed)
            holds = guess.f <= exact[:, 0, : len(sizes), 2].T
            columns = [guess.precision, guess.recall, guess.f, holds, guess.f == 1, guess.standard_error]
            metrics[:, :, 0, : len(sizes)] = torch.stack([c.double() for c in columns]).transpose(1, 2)
        self._add(block, "gaussian", "aware", list(metrics))

    def _add(self, block: Block, level: str, sink: str, metrics: list[torch.Tensor]) -> None:
        self.means.add(block, {"level": level, "sink": sink}, torch.stack(metrics))

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SCHEMA` without the document."""
        return self.means.table(METRICS)


class CoherenceTable:
    """Observer: `bounds.coherence` of every head over all sources of the window (columns: `COHERENCE_SCHEMA`)."""

    def __init__(self, length: int):
        self.length = length
        self._rows: list[pd.DataFrame] = []

    def __call__(self, block: Block) -> None:
        if not (block.queries == self.length - 1).any():
            return
        values = block.values.cpu()
        for heads in _same_values(values):
            found = coherence(values[heads][0])
            first = {"layer": block.layer, "head": range(heads.start, heads.stop), "dim": values.shape[-1]}
            row = first | {"sources": values.shape[-2]} | {k: v.item() for k, v in found._asdict().items()}
            self._rows.append(pd.DataFrame(row))

    def table(self) -> pd.DataFrame:
        return pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()


# --- without a model --------------------------------------------------------------------------------------------------


def profile_table(
    profiles: dict[str, torch.Tensor],
    dims: Sequence[int],
    sizes: Sequence[int] = SIZES[1:],
    sink_masses: Sequence[float] = (0.0,),
    norm_ratios: Sequence[float] = (1.0,),
    kappas: Sequence[float] = (0.0,),
    delta: float = 0.05,
    draws: int = DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Certified and predicted F of top-N sets from an attention profile alone, if directions were uniform in R^dim.

    Args:
        profiles: name -> weights of the sources other than the sink, any scale, (source,).
        dims: dimensions d. The certificate (constant_norm, sink-aware) takes all cosines to lie within
            `spherical_coherence(d)` of 0, those with the sink of kappa: true with probability 1 - delta. The
            prediction takes them to have that mean and a standard deviation of 1/sqrt(d).
        sink_masses, norm_ratios, kappas: weight of the sink; its norm over the others' (r); its mean cosine with them.
            Each combination is one setting. Mass 0: there is no sink.

    Returns:
        Columns profile, dim, sink_mass, norm_ratio, kappa, size, certified, predicted, standard_error.
    """
    rows = []
    grid = product(profiles.items(), dims, sink_masses, norm_ratios, kappas)
    for (name, rest), dim, mass, ratio, kappa in grid:
        rest = rest.double() / rest.double().sum() * (1 - mass)
        weights = torch.cat([torch.tensor([mass], dtype=torch.double), rest])
        visible = torch.ones(len(weights), dtype=torch.bool)
        visible[0] = mass > 0
        width, sd = spherical_coherence(dim, len(weights), delta), dim**-0.5
        order = weights.masked_fill(~visible, -1).sort(descending=True, stable=True).indices
        scaled = torch.cat([weights[:1] * ratio, weights[1:]])
        for size in (n for n in sizes if n < int(visible.sum())):
            selected = torch.zeros_like(visible).scatter(0, order[:size], True)
            own = (max(-1.0, kappa - width), min(1.0, kappa + width))
            sure = certificate(
                weights, selected, "constant_norm", visible=visible, mu=(-width, width), kappa=own, norm_ratio=ratio
            )
            likely = gaussian_prediction(
                scaled, selected, 0.0, sd, 0.0, kappa, sd, visible=visible, draws=draws, seed=seed
            )
            rows.append(
                (name, dim, mass, ratio, kappa, size, sure.f.item(), likely.f.item(), likely.standard_error.item())
            )
    columns = ["profile", "dim", "sink_mass", "norm_ratio", "kappa", "size", "certified", "predicted", "standard_error"]
    return pd.DataFrame(rows, columns=columns)
