"""Geometric precision, recall and F of the top-N sources of an attention operation.

For one query with weights alpha and values v: contributions y_i = alpha_i v_i, the set S of the N best sources, its
sum s_N, distances D_i of every y_i to s_N. How well does a ball around s_N separate S from the rest?

On the CPU the fused kernel of `_kernels.py` does the work; elsewhere the same definitions run in plain torch below.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from geomlib.errors import GeomlibError

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the paper's grid of N
RANKINGS = ("attention", "contribution")
DISTANCES = ("euclidean", "cosine")
EPSILON = 1e-12  # of the cosine distance 1 - <x, y> / (‖x‖‖y‖ + EPSILON)


class Separability(NamedTuple):
    """Each field (..., query, size), float64, NaN where N >= T (nothing is unselected).

    precision = N / (N + false_positives); recall = (N - false_negatives) / N; f = their harmonic mean;
    margin = rho_min - rho_max, positive exactly when f is 1; inversions = pairs (selected, unselected) in the wrong
    order; false_positives = unselected within rho_max; false_negatives = selected at or beyond rho_min;
    rho_min = distance of the nearest unselected source; rho_max = distance of the farthest selected one; farthest and
    nearest = which sources these are (one of them where several are at that distance); f_without = f as it is where
    the source `without` is left out (NaN unless asked for).
    """

    precision: torch.Tensor
    recall: torch.Tensor
    f: torch.Tensor
    margin: torch.Tensor
    inversions: torch.Tensor
    false_positives: torch.Tensor
    false_negatives: torch.Tensor
    rho_min: torch.Tensor
    rho_max: torch.Tensor
    farthest: torch.Tensor
    nearest: torch.Tensor
    f_without: torch.Tensor


def separability(
    weights: torch.Tensor,
    values: torch.Tensor,
    sizes: Sequence[int] = SIZES,
    ranking: str | torch.Tensor = "attention",
    distance: str | Sequence[str] = "euclidean",
    visible: torch.Tensor | None = None,
    exclude: torch.Tensor | None = None,
    directions: torch.Tensor | None = None,
    counts_only: bool = False,
    without: int | None = None,
) -> Separability:
    """How separable the top-N sources of each query are from the rest, for every N of `sizes` together.

    Args:
        weights: attention weights, (..., query, source), any float dtype; computed in float32 or better.
        values: value states, (..., source, dim); leading axes as in `weights` or broadcastable to them.
        sizes: the N to measure, whole numbers from 1.
        ranking: "attention" ranks by alpha_i, "contribution" by alpha_i ‖v_i‖, and a tensor of scores shaped as
            `weights` ranks by itself (random scores give nested random sets). Ties go to the lower index.
        distance: "euclidean" or "cosine"; a sequence of them gives a leading axis in that order, at little more cost.
        visible: True where the query may see the source, (query, source). None: all. A visible source of weight 0
            counts, an invisible one does not.
        exclude: sources left out as if they were not there, neither selected nor unselected: boolean (source,), or whole
            numbers (..., query), one source of each row (-1: none of them). None: none.
        directions: magnitude control, (..., query, source) whole numbers: source i keeps its magnitude
            alpha_i ‖v_i‖ and borrows the direction of source directions[i]. None: its own.
        counts_only: give precision, recall, f, false_positives and false_negatives alone, the other fields NaN: faster.
        without: also give f_without, the f that `exclude` of this source gives, for about a third more time. Not together
            with directions or counts_only.

    Returns:
        Separability of (..., query, size).

    Raises:
        GeomlibError: shapes that do not fit, sizes below 1, NaN or infinite input, values whose squares overflow, an unknown
            ranking or distance.

    Source: Mudarisov et al. 2026 (arXiv 2602.01893); the book's notation page. Compared are the keys
    k_i = ‖y_i‖² - 2<y_i, s_N> = D_i² - ‖s_N‖², which order as D_i does and lose no digits when ‖s_N‖ is large.
    """
    distances = (distance,) if isinstance(distance, str) else tuple(distance)
    dtype = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    weights, values = weights.detach().to(dtype), values.detach().to(dtype)
    *lead, queries, sources = weights.shape
    sizes = [int(n) for n in sizes]
    _check(weights, values, sizes, ranking, distances, visible, exclude, directions)
    if without is not None and (directions is not None or counts_only or not 0 <= without < sources):
        raise GeomlibError(
            f"without = {without!r} is not usable: give a source, and neither directions nor counts_only."
        )

    candidates = torch.ones(queries, sources, dtype=torch.bool, device=weights.device) if visible is None else visible
    each = torch.full(weights.shape[:-1], -1, device=weights.device)  # a source to leave out of each row
    if exclude is not None and exclude.dtype == torch.bool:
        candidates = candidates & ~exclude
    elif exclude is not None:
        each = exclude
    each = each.reshape(-1, queries)
    values = values.expand(*lead, *values.shape[-2:]).reshape(-1, *values.shape[-2:])
    weights = weights.reshape(-1, queries, sources)
    if isinstance(ranking, torch.Tensor):
        ranking = ranking.detach().to(dtype).expand(*lead, queries, sources).reshape(weights.shape)
    if directions is not None:
        directions = directions.expand(*lead, queries, sources).reshape(weights.shape)
    ascending = sorted(set(sizes))
    compute = _on_cpu if weights.device.type == "cpu" else _in_torch
    out = compute(weights, values, ascending, ranking, distances, candidates, each, directions, counts_only, without)
    out = out[..., [ascending.index(n) for n in sizes], :]
    shape = (*lead, queries, len(sizes)) if isinstance(distance, str) else (len(distances), *lead, queries, len(sizes))
    return Separability(*(x.reshape(shape) for x in out.unbind(-1)))


def _check(weights, values, sizes, ranking, distances, visible, exclude, directions) -> None:
    queries, sources = weights.shape[-2:]
    if values.ndim < 2 or values.shape[-2] != sources:
        raise GeomlibError(
            f"values {tuple(values.shape)} do not fit weights {tuple(weights.shape)}: give (..., source, dim)."
        )
    if not sizes or min(sizes) < 1:
        raise GeomlibError(f"sizes {sizes} are not usable: give whole numbers N of 1 or more.")
    if isinstance(ranking, torch.Tensor):
        if ranking.shape[-2:] != weights.shape[-2:]:
            raise GeomlibError(f"ranking scores {tuple(ranking.shape)} do not fit weights {tuple(weights.shape)}.")
    elif ranking not in RANKINGS:
        raise GeomlibError(f"unknown ranking {ranking!r}: give one of {', '.join(RANKINGS)}, or a tensor of scores.")
    for name in distances:
        if name not in DISTANCES:
            raise GeomlibError(f"unknown distance {name!r}: give one of {', '.join(DISTANCES)}.")
    if visible is not None and (visible.dtype != torch.bool or tuple(visible.shape) != (queries, sources)):
        raise GeomlibError(
            f"visible must be a boolean tensor of shape {(queries, sources)}, not {tuple(visible.shape)} {visible.dtype}."
        )
    if exclude is not None:
        whole = exclude.dtype in (torch.int32, torch.int64)
        if tuple(exclude.shape) != (tuple(weights.shape[:-1]) if whole else (sources,)) or (
            not whole and exclude.dtype != torch.bool
        ):
            raise GeomlibError(
                f"exclude must be a boolean tensor of shape {(sources,)} or whole numbers of shape "
                f"{tuple(weights.shape[:-1])}, not {tuple(exclude.shape)} {exclude.dtype}."
            )
        if whole and not ((exclude >= -1) & (exclude < sources)).all():
            raise GeomlibError(f"exclude names sources outside 0 to {sources - 1}: give those, or -1 for none.")
    if directions is not None and directions.shape[-2:] != weights.shape[-2:]:
        raise GeomlibError(f"directions {tuple(directions.shape)} do not fit weights {tuple(weights.shape)}.")
    for name, tensor in (("weights", weights), ("values", values)):
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise GeomlibError(f"{name} hold NaN or infinite numbers: check the model's precision and weights.")
    check_range(values)


def check_range(values: torch.Tensor) -> None:
    """Raises GeomlibError where squares of such values leave their dtype: keys would be NaN, which compares false."""
    limit = (torch.finfo(values.dtype).max / (64 * values.shape[-1])) ** 0.5
    if values.numel() and values.abs().max() > limit:
        raise GeomlibError(
            f"values up to {values.abs().max().item():.1e} have squares beyond {str(values.dtype).removeprefix('torch.')}: "
            f"divide all by one number, which changes no score."
        )


def _on_cpu(
    weights, values, sizes, ranking, distances, candidates, exclude, directions, counts_only, without
) -> torch.Tensor:
    """Through the fused kernel: float64 (distance, batch, query, size, metric)."""
    import numpy as np

    from geomlib import _kernels

    none = np.zeros((1, 1, 1), np.float32)
    if isinstance(ranking, torch.Tensor):
        code, scores = _kernels.BY_SCORES, ranking.contiguous().numpy()
    else:
        code = _kernels.BY_ATTENTION if ranking == "attention" else _kernels.BY_CONTRIBUTION
        scores = none.astype(weights.numpy().dtype)
    padded, tiles = tiles_of(values)
    out = np.empty((len(distances), *weights.shape[:2], len(sizes), _kernels.METRICS))
    _kernels.separability_rows(
        weights.contiguous().numpy(),
        padded.numpy(),
        tiles.numpy(),
        values.norm(dim=-1).numpy(),
        values.square().sum(dim=-1).numpy(),
        scores,
        candidates.contiguous().numpy(),
        exclude.to(torch.int32).contiguous().numpy(),
        (torch.zeros(1, 1, 1) if directions is None else directions.contiguous()).to(torch.int32).numpy(),
        -1 if without is None else without,
        np.asarray(sizes, np.int64),
        code,
        np.asarray([DISTANCES.index(d) for d in distances], np.int64),
        directions is not None,
        not counts_only,
        out,
    )
    return torch.from_numpy(out)


def tiles_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (batch, source, dim) as the kernels take them: padded with zeros to whole tiles and a multiple of 8
    dimensions; and packed, (batch, tile, dim x TILE)."""
    from geomlib._kernels import TILE

    batch, sources, dim = values.shape
    padded = torch.nn.functional.pad(values, (0, -dim % 8, 0, -sources % TILE))
    tiles = padded.view(batch, -1, TILE, padded.shape[-1]).transpose(2, 3)
    return padded, tiles.reshape(batch, -1, TILE * padded.shape[-1])


def _in_torch(
    weights, values, sizes, ranking, distances, candidates, exclude, directions, counts_only, without
) -> torch.Tensor:
    """The same in plain torch, for any device: float64 (distance, batch, query, size, metric)."""
    rows = max(1, (64 << 20) // (4 * weights.shape[0] * (weights.shape[-1] + max(sizes) * values.shape[-1])))
    parts = []
    for start in range(0, weights.shape[1], rows):
        part = slice(start, start + rows)
        scores = ranking[:, part] if isinstance(ranking, torch.Tensor) else ranking
        turned = None if directions is None else directions[:, part].long()
        left = exclude[:, part, None]
        seen = candidates[part].expand(len(weights), -1, -1)
        seen = seen & (torch.arange(weights.shape[-1], device=weights.device) != left)
        rows_of = weights[:, part], values, sizes, scores, distances
        found = _rows_in_torch(*rows_of, seen, turned, counts_only)
        if without is not None:
            others = seen & (torch.arange(weights.shape[-1], device=weights.device) != without)
            found[..., -1] = _rows_in_torch(*rows_of, others, None, True)[..., 2]
        parts.append(found)
    return torch.cat(parts, dim=2)


def _rows_in_torch(weights, values, sizes, ranking, distances, candidates, directions, counts_only) -> torch.Tensor:
    """candidates: (batch, query, source)."""
    norms, squares = values.norm(dim=-1)[:, None], values.square().sum(dim=-1)[:, None]  # (batch, 1, source)
    ratio = torch.ones((), dtype=weights.dtype, device=weights.device)
    if directions is not None:
        other = norms.expand_as(weights).gather(-1, directions)
        ratio = torch.where(other > 0, norms / other, 0.0)
    magnitudes = weights * norms
    scores = {"attention": weights, "contribution": magnitudes}[ranking] if isinstance(ranking, str) else ranking
    total = candidates.sum(-1)
    order = scores.masked_fill(~candidates, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    out = weights.new_full(
        (len(distances), *weights.shape[:2], len(sizes), len(Separability._fields)), float("nan"), dtype=torch.float64
    )
    sources = weights.shape[-1]
    for c, size in enumerate(n for n in sizes if n < sources):
        selected = torch.zeros_like(candidates).scatter(-1, order[..., :size], True)
        pull = weights * ratio * selected
        if directions is not None:
            pull = torch.zeros_like(pull).scatter_add(-1, directions, pull)
        total_sum = pull @ values  # s_N, (batch, query, dim)
        dots = total_sum @ values.transpose(1, 2)
        if directions is not None:
            dots = dots.gather(-1, directions)
        dots = dots * ratio * weights  # <y_i, s_N>
        length = total_sum.norm(dim=-1, keepdim=True)
        for m, distance in enumerate(distances):
            if distance == "euclidean":
                keys = weights * (weights * squares) - 2 * dots
            else:
                keys = -dots / (magnitudes * length + EPSILON)
            fp, fn, inversions, far, near = extremal(keys, keys, selected, candidates & ~selected, not counts_only)
            if distance == "euclidean":
                index = torch.stack([near, far], dim=-1)
                a = (weights * ratio).gather(-1, index) if directions is not None else weights.gather(-1, index)
                at = directions.gather(-1, index) if directions is not None else index
                batch = torch.arange(len(values), device=values.device)[:, None, None]
                gap = a[..., None] * values[batch, at] - total_sum[..., None, :]
                rho_min, rho_max = gap.double().norm(dim=-1).unbind(-1)
                difference = (keys.gather(-1, near[..., None]) - keys.gather(-1, far[..., None]))[..., 0].double()
                span = rho_min + rho_max
                margin = torch.where(span > 0, difference / span, difference)
            else:
                rho_min = 1 + keys.gather(-1, near[..., None])[..., 0].double()
                rho_max = 1 + keys.gather(-1, far[..., None])[..., 0].double()
                margin = rho_min - rho_max
            columns = [
                *prf(size, fp, fn),
                margin,
                inversions,
                fp,
                fn,
                rho_min,
                rho_max,
                far.double(),
                near.double(),
                torch.full_like(fp, torch.nan),
            ]
            if counts_only:
                columns = [x if k in (0, 1, 2, 5, 6) else torch.full_like(fp, torch.nan) for k, x in enumerate(columns)]
            out[m, :, :, c] = torch.where((total > size)[..., None], torch.stack(columns, dim=-1), torch.nan)
    return out


def extremal(
    upper: torch.Tensor, lower: torch.Tensor, selected: torch.Tensor, unselected: torch.Tensor, inversions: bool = True
):
    """False positives, false negatives and inversions of keys. (`_kernels._extremal` is this definition for nested sets;
    tests hold the two together.)

    Args:
        upper: keys (or upper bounds on them) of the selected, (..., source).
        lower: keys (or lower bounds on them) of the unselected, (..., source).
        selected, unselected: boolean, (..., source); neither empty.
        inversions: False: do not count them (they need a sort), give 0.

    Returns:
        false_positives = #{unselected j: lower_j <= max upper}, false_negatives = #{selected i: upper_i >= min lower},
        inversions = #{(i, j): lower_j <= upper_i}, each (...) float64; indices of the farthest selected and of the
        nearest unselected source, (...).
    """
    chosen = upper.masked_fill(~selected, float("-inf"))
    rest = lower.masked_fill(~unselected, float("inf"))
    top, far = chosen.max(dim=-1)
    bottom, near = rest.min(dim=-1)
    false_positives = (unselected & (lower <= top[..., None])).sum(-1)
    false_negatives = (selected & (upper >= bottom[..., None])).sum(-1)
    pairs = torch.zeros_like(false_positives)
    if inversions:  # rest at or below each chosen
        pairs = (torch.searchsorted(rest.sort(dim=-1).values, chosen.contiguous(), right=True) * selected).sum(-1)
    return false_positives.double(), false_negatives.double(), pairs.double(), far, near


def prf(size, false_positives: torch.Tensor, false_negatives: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Precision N / (N + FP), recall (N - FN) / N and their harmonic mean F, 0 when both are 0."""
    precision = size / (size + false_positives)
    recall = (size - false_negatives) / size
    both = precision + recall
    return precision, recall, torch.where(both > 0, 2 * precision * recall / both.clamp(min=1e-300), 0.0)
