"""Every bound of `geomlib.bounds` over a window, beside what it bounds, and what the theory assumes: three observers.

And the theory without a model: certified and predicted F from an attention profile alone.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import numpy as np
import pandas as pd
import torch

from geomlib import _kernels
from geomlib.attention import Block, final_rows
from geomlib.bounds import (
    DRAWS,
    GUARD,
    TAIL,
    certificate,
    coherence,
    gaussian_prediction,
    inversion_bound,
    joint_inversion_bound,
    sketch_directions,
    spherical_coherence,
)
from geomlib.controls import random_directions
from geomlib.errors import GeomlibError
from geomlib.geometry import SIZES, check_range, separability, tiles_of
from geomlib.models import Model
from geomlib.tables import COLUMNS, BinnedMeans

RANKS = (0, 1, 4, 16)  # of the sketches
_NAMES = [("exact", "none")]
_NAMES += [
    (level, sink) for level in ("constant_norm", "global", "quantile", "rowwise") for sink in ("aware", "agnostic")
]
_NAMES += [(f"sketch_{r}", "aware" if r else "none") for r in RANKS]
_NAMES += [(f"sketch_{r}", "agnostic") for r in RANKS if r]
_NAMES += [("combined", "aware")]
THEOREMS = ("inversion", "joint_inversion", "global", "rowwise", *(f"sketch_{r}" for r in RANKS), "combined")

METRICS = ("precision", "recall", "f", "holds", "separated", "standard_error")
SCHEMA: dict[str, tuple[str, str]] = {
    **COLUMNS,
    "level": ("string", "exact, inversion, joint_inversion, constant_norm, global, quantile, rowwise, sketch_R, combined, gaussian, permuted"),
    "sink": ("string", "aware, agnostic, or none (the level knows no difference)"),
    "precision": ("float64", "mean precision that the level certifies (exact, permuted: reaches; gaussian: predicts)"),
    "recall": ("float64", "the same of recall"),
    "f": ("float64", "the same of F"),
    "holds": ("float64", "share of the queries in which neither precision, recall nor F exceeds the exact one"),
    "separated": ("float64", "share of the queries in which F = 1 is certified (exact: reached; gaussian: mean over draws is 1)"),
    "standard_error": ("float64", "mean standard error of f from the simulation; 0 where nothing is simulated"),
}  # fmt: skip
SELECTION_SCHEMA: dict[str, tuple[str, str]] = {
    **COLUMNS,
    "within": ("float64", "mean cosine of two selected sources' value states, the sink apart"),
    "across": ("float64", "mean cosine of a selected and an unselected one's, the sink apart"),
}
COHERENCE_SCHEMA: dict[str, tuple[str, str]] = {
    "document": COLUMNS["document"],
    "layer": COLUMNS["layer"],
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

    Raises:
        GeomlibError: shapes that do not fit, sizes that do not rise, input that is not finite.

    One (source, source) array of cosines exists at a time. Source: `bounds.certificate`, which says the same slowly (where
    the visible sources have holes, or the first of them moves back, intervals here are those of the range around them).
    """
    queries, count = weights.shape[-2:] if weights.ndim == 3 else (0, 0)
    if values.ndim != 2 or values.shape[0] != count or tuple(visible.shape) != (queries, count):
        raise GeomlibError(
            f"weights {tuple(weights.shape)}, values {tuple(values.shape)} and visible {tuple(visible.shape)} do not fit: "
            f"give (head, query, source), (source, dim) and (query, source)."
        )
    if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
        raise GeomlibError(f"sizes {tuple(sizes)} are not usable: give rising whole numbers N of 1 or more.")
    if not torch.isfinite(weights).all() or not torch.isfinite(values).all():
        raise GeomlibError("weights or values hold NaN or infinite numbers: check the model's precision and weights.")
    dtype = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    weights, values = weights.to(dtype), values.to(dtype)
    check_range(values)
    sources = torch.arange(visible.shape[1])
    # Where the visible sources have holes, or the first one moves back: the range around them, which stays a bound.
    low = torch.where(visible, sources, len(sources)).amin(1).flip(0).cummin(0).values.flip(0)
    high = torch.where(visible, sources + 1, 0).amax(1).cummax(0).values
    full = values.double()
    units = full / full.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    ranks = [min(r, values.shape[1]) for r in RANKS]
    # Of all sources, so that blocks change nothing.
    basis = torch.stack([sketch_directions(units, ranks[-1], sink) for sink in (True, False)])
    end = int(high[-1])
    weights, values, visible, units = weights[..., :end], values[:end], visible[:, :end], units[:end]
    norms = values.norm(dim=-1)
    cosines = units.to(values.dtype) @ units.to(values.dtype).T
    intervals = np.empty((len(low), 8))
    _kernels.pair_intervals(cosines.numpy(), low.numpy(), high.numpy(), TAIL, intervals)
    others = visible.clone()
    others[:, 0] = False
    mean = (others * norms.double()).sum(-1) / others.sum(-1).clamp(min=1)
    # In units of the others' mean norm, unless that is 0: then no ratio says what all have.
    first, has = norms[0].double().expand_as(mean), (mean > 0).double()
    aware = torch.stack([torch.where(mean > 0, first / mean, (first > 0).double()), has], dim=-1)
    alike = torch.maximum(has, (first * visible[:, 0] > 0).double())
    constants = torch.stack([torch.stack([alike, alike], dim=-1), aware])
    coordinates = units @ basis.transpose(1, 2)  # (way, source, rank)
    residuals = torch.stack(
        [(units - coordinates[..., :r] @ basis[:, :r]).norm(dim=-1) for r in ranks], dim=1
    )  # (way, ranks, source)
    padded, tiles = tiles_of(values[None])
    out = np.empty((len(_NAMES), *weights.shape[:2], len(sizes), 5))
    inversions = np.empty((*weights.shape[:2], len(sizes)))
    _kernels.certificate_rows(
        weights.contiguous().numpy(), padded[0].numpy(), tiles[0].numpy(), norms.numpy(), values.square().sum(-1).numpy(), cosines.numpy(),
        visible.contiguous().numpy(), np.asarray(sizes, np.int64), intervals, constants.numpy(), basis.contiguous().numpy(),
        coordinates.transpose(1, 2).to(values.dtype).contiguous().numpy(), residuals.to(values.dtype).contiguous().numpy(),
        np.asarray(ranks, np.int64), GUARD * torch.finfo(values.dtype).eps, out, inversions,
    )  # fmt: skip
    return torch.from_numpy(out), torch.from_numpy(inversions)


def mean_profile(model: Model, input_ids: torch.Tensor) -> torch.Tensor:
    """Attention of the final query to the sources other than the first: each head's weights in falling order and scaled
    to sum 1, mean over heads and layers. input_ids (1, token) -> (source - 1,), float64."""
    total = []
    for block in final_rows(model, input_ids[0]).values():
        if block.visible[-1].all():
            rest = block.weights[:, -1, 1:].double().sort(dim=-1, descending=True).values
            total.append((rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)).mean(0).cpu())
    return torch.stack(total).mean(0)


class BoundsTable:
    """Observer: every bound per layer, query head, query bin and size, beside the exact F (columns: `SCHEMA`).

    Args:
        length, queries, sizes, bins: as `tables.BinnedMeans` takes them. With queries "last" there are two more levels
            (for every query they would take minutes a window): the Gaussian prediction, and F with directions permuted among the
            sources, for which it is a model; both aware of the sink (whose direction stays its own) or not.
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
            self._predict(block, exact)
            for sink in (True, False):
                turned = random_directions(block, self.key, keep_sink=sink).cpu()
                found = separability(weights, values, self.means.sizes, visible=visible, directions=turned)
                within = (found.f <= exact[..., 2]).double()
                columns = [found.precision, found.recall, found.f, within, (found.f == 1).double(), zero]
                self._add(block, "permuted", "aware" if sink else "agnostic", columns)

    def _predict(self, block: Block, exact: torch.Tensor) -> None:
        weights, values, seen = block.weights.cpu()[:, 0], block.values.cpu(), block.visible.cpu()[0]
        if seen[1:].sum() < 2:
            return
        found = [(h.stop - h.start, coherence(values[h.start], seen)[:5]) for h in _same_values(values)]
        repeats = torch.tensor([n for n, _ in found])
        measured = [torch.stack(f).repeat_interleave(repeats) for f in zip(*(c for _, c in found), strict=True)]
        sizes = [n for n in self.means.sizes if n < int(seen.sum())]
        selected = _top(weights, seen, sizes)
        magnitudes = weights * values.norm(dim=-1)
        seed = int.from_bytes(hashlib.sha256(f"{self.key} {block.layer}".encode()).digest()[:6], "little")
        for sink, moments in (("aware", measured), ("agnostic", measured[:3])):
            guess = gaussian_prediction(magnitudes, selected, *moments, visible=seen, seed=seed)
            metrics = torch.full((len(METRICS), *exact.shape[:-1]), torch.nan, dtype=torch.double)
            below = guess.f <= exact[:, 0, : len(sizes), 2].T
            columns = [guess.precision, guess.recall, guess.f, below, guess.f == 1, guess.standard_error]
            metrics[:, :, 0, : len(sizes)] = torch.stack([c.double() for c in columns]).transpose(1, 2)
            self._add(block, "gaussian", sink, list(metrics))

    def _add(self, block: Block, level: str, sink: str, metrics: list[torch.Tensor]) -> None:
        self.means.add(block, {"level": level, "sink": sink}, torch.stack(metrics))

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SCHEMA` without the document."""
        return self.means.table(METRICS)


def _top(weights: torch.Tensor, seen: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The top-N sets by attention, boolean (size, ..., source). weights (..., source), seen (source,)."""
    order = weights.masked_fill(~seen, -1).sort(dim=-1, descending=True, stable=True).indices
    nothing = torch.zeros_like(weights, dtype=torch.bool)
    return torch.stack([nothing.scatter(-1, order[..., :n], True) for n in sizes])


class SelectionTable:
    """Observer: are the value states of the selected alike? Mean cosines within the top-N set and across its border, the
    sink apart, at the final query of the window (columns: `SELECTION_SCHEMA`).

    Sets with fewer than two sources besides the sink say nothing and have no row.
    """

    def __init__(self, length: int, sizes: Sequence[int] = SIZES):
        self.means = BinnedMeans(length, "last", sorted(sizes), 1)

    def __call__(self, block: Block) -> None:
        block = self.means.rows(block)
        if block is None:
            return
        values, seen = block.values.double(), block.visible[0]
        units = values / values.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        metrics = torch.full((2, len(values), 1, len(self.means.sizes)), torch.nan, dtype=torch.double)
        for i, size in enumerate(n for n in self.means.sizes if n < int(seen.sum())):
            chosen = _top(block.weights[:, 0], seen, [size])[0]
            selected, rest = chosen.clone(), seen & ~chosen
            selected[:, 0] = rest[:, 0] = False
            n, m = selected.sum(-1), rest.sum(-1)
            inside = (units * selected[..., None]).sum(1)  # sum of unit values: its square holds all pairs
            outside = (units * rest[..., None]).sum(1)
            own = (units.square().sum(-1) * selected).sum(-1)
            within = (inside.square().sum(-1) - own) / (n * (n - 1))
            across = (inside * outside).sum(-1) / (n * m)
            usable = (n >= 2) & (m >= 1)
            metrics[:, :, 0, i] = torch.where(usable, torch.stack([within, across]), torch.nan).cpu()
        self.means.add(block, {}, metrics)

    def table(self) -> pd.DataFrame:
        """The tidy table of what was observed so far, columns as `SELECTION_SCHEMA` without the document."""
        return self.means.table(("within", "across"))


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
        dims: dimensions d of independent uniform directions, except that each has cosine kappa with the sink, so that
            two of them have one of kappa² on average. The certificate (constant_norm, sink-aware) takes the independent
            parts to be within `spherical_coherence(d)` of orthogonal, true with probability 1 - delta; the prediction
            takes their cosines to have a standard deviation of 1/sqrt(d).
        sink_masses, norm_ratios, kappas: weight of the sink; its norm over the others' (r); its cosine with them. Each
            combination is one setting. Mass 0: there is no sink.

    Returns:
        Columns profile, dim, sink_mass, norm_ratio, kappa, size, certified, predicted, standard_error (of the predicted
        F), precision (the predicted one).
    """
    for name, rest in profiles.items():
        if not (rest >= 0).all() or not 0 < rest.sum() < float("inf"):
            raise GeomlibError(f"the profile {name!r} is not usable: give weights of 0 or more, some of them above 0.")
    for name, given, low, high in (("sink_masses", sink_masses, 0, 1), ("norm_ratios", norm_ratios, 0, float("inf")),
                                   ("kappas", kappas, -1, 1)):  # fmt: skip
        if not all(low <= x <= high for x in given):
            raise GeomlibError(f"{name} = {tuple(given)} are not usable: give numbers from {low} to {high}.")
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
            low, high = (kappa**2 + (1 - kappa**2) * e for e in (-width, width))
            sure = certificate(
                weights,
                selected,
                "constant_norm",
                visible=visible,
                mu=(low, high),
                kappa=(kappa, kappa),
                norm_ratio=ratio,
            )
            moments = (kappa**2, (1 - kappa**2) * sd, 0.0, kappa, 0.0)
            likely = gaussian_prediction(scaled, selected, *moments, visible=visible, draws=draws, seed=seed)
            found = sure.f, likely.f, likely.standard_error, likely.precision
            rows.append((name, dim, mass, ratio, kappa, size, *(x.item() for x in found)))
    columns = ["profile", "dim", "sink_mass", "norm_ratio", "kappa", "size"]
    return pd.DataFrame(rows, columns=[*columns, "certified", "predicted", "standard_error", "precision"])
