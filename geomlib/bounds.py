"""Lower bounds on precision, recall and F that need less than the vectors, and a prediction of F.

Three kinds, all for one attention operation with contributions y_i of magnitudes a_i and selected set S:

- inversion bounds, from the number of pairs in the wrong order;
- certificates, from magnitudes and what is known about directions: F computed from upper keys of S and lower keys of
  the rest by the same function as the exact F, hence never above it;
- the Gaussian coherence model: no bound, what F would be if cosines were random with the measured mean and spread.

All proved in chapter 1 of the book; the joint bound, rowwise, the sketch, and the combined certificate are its own.
"""

import math
from typing import NamedTuple

import torch

from geomlib.errors import GeomlibError
from geomlib.geometry import extremal, prf

LEVELS = ("constant_norm", "global", "rowwise", "sketch", "combined")
TAIL = 0.05  # of the quantile intervals: 5 to 95 %
STEPS = 1000  # their grid per unit of cosine, outward
DRAWS = 40
AT_ONCE = 256  # rows of cosines that `coherence` holds
GUARD = 4  # machine epsilons of outward rounding, per term of a sum: see `certificate`


class Certificate(NamedTuple):
    """Lower bounds, each (...)."""

    precision: torch.Tensor
    recall: torch.Tensor
    f: torch.Tensor


class Prediction(NamedTuple):
    """Mean over the simulated draws, each (...), and the standard error of the F."""

    precision: torch.Tensor
    recall: torch.Tensor
    f: torch.Tensor
    standard_error: torch.Tensor


class Coherence(NamedTuple):
    """Norms and cosines of a head's value states, each (...). mu: cosines of two sources neither of which is the sink;
    kappa: of the sink (source 0) with the others.

    Fields: mean, standard deviation, and spread between the row means of mu; mean and standard deviation of kappa; least
    and greatest of both; norm_ratio r = ‖v_0‖ over the mean norm of the others; norm_cv = standard deviation over
    mean of the others' norms.
    """

    mu_mean: torch.Tensor
    mu_sd: torch.Tensor
    mu_row_sd: torch.Tensor
    kappa_mean: torch.Tensor
    kappa_sd: torch.Tensor
    mu_low: torch.Tensor
    mu_high: torch.Tensor
    kappa_low: torch.Tensor
    kappa_high: torch.Tensor
    norm_ratio: torch.Tensor
    norm_cv: torch.Tensor


# --- inversions -------------------------------------------------------------------------------------------------------


def _counts(inversions, n) -> tuple[torch.Tensor, torch.Tensor]:
    inversions, n = torch.as_tensor(inversions).double(), torch.as_tensor(n).double()
    if (n < 1).any() or (inversions < 0).any():
        raise GeomlibError("inversion bounds need sizes N of 1 or more and inversions of 0 or more.")
    inversions, n = torch.broadcast_tensors(inversions, n)
    return inversions.where(~n.isnan(), torch.nan), n


def inversion_bound(inversions: torch.Tensor | float, n: torch.Tensor | int) -> Certificate:
    """The paper's bound: P >= N / (N + I), R >= max(0, 1 - I / N), and the F of the two.

    Args:
        inversions: I = #{(i, j): i selected, j not, D_j <= D_i} of single operations (not their mean), any shape.
        n: N, broadcastable.

    Raises:
        GeomlibError: N below 1 or negative inversions.

    Source: arXiv 2602.01893; chapter 1 of the book. Float64; NaN stays NaN.
    """
    inversions, n = _counts(inversions, n)
    # As if each inversion were an intruder of its own, and each a stray of its own.
    precision, recall, f = prf(n, inversions, inversions.clamp(max=n))
    return Certificate(precision, recall, torch.where(inversions.isnan(), torch.nan, f))


def joint_inversion_bound(inversions: torch.Tensor | float, n: torch.Tensor | int) -> torch.Tensor:
    """The best bound on F that knows only N and I (ours): 1 if I = 0, 2 / (1 + 1/N + N / (N - I)) if I < N, else 0.

    The pair of the farthest selected and the nearest unselected source is counted by FP and by FN, so FP + FN <= I + 1;
    the worst case is one intruder and I strays, and it occurs. Arguments and errors as `inversion_bound`.
    """
    inversions, n = _counts(inversions, n)
    worst = 2 / (1 + 1 / n + n / (n - inversions).clamp(min=1e-300))
    f = torch.where(inversions == 0, 1.0, torch.where(inversions < n, worst, 0.0))
    return torch.where(inversions.isnan(), torch.nan, f)


# --- certificates -----------------------------------------------------------------------------------------------------


def certificate(
    magnitudes: torch.Tensor,
    selected: torch.Tensor,
    level: str,
    sink: bool = True,
    *,
    values: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    mu: tuple[float, float] | None = None,
    kappa: tuple[float, float] | None = None,
    norm_ratio: float | torch.Tensor | None = None,
    tail: float | None = None,
    rank: int = 0,
) -> Certificate:
    """Lower bounds on precision, recall and F of the selected sets (Euclidean distance).

    Levels, each with what it needs to know:

    - "constant_norm": `magnitudes` are attention weights; every value has the same norm, the sink `norm_ratio` times
      that. A bound only where norms really are so (the paper's model).
    - "global": the magnitudes; one interval for all cosines, another for those with the sink.
    - "rowwise": the magnitudes; for each source the interval of its cosines with the selected, and its own with the sink.
    - "sketch": the magnitudes; the selected contributions; of each other source `rank` coordinates (rank 0: nothing
      but its magnitude). Never lower at a higher rank, exact at rank = dim, both but for rounding.
    - "combined": for each source the tighter of "rowwise" and the sketch of that rank.

    Args:
        magnitudes: a_i = alpha_i ‖v_i‖ (for "constant_norm": alpha_i), (..., source), computed in float32 or better:
            half precision rounds them by more than what is allowed for below.
        selected: the set S of each operation, boolean, (..., source).
        sink: True: source 0 has a norm and cosines of its own, and the first coordinate of a sketch is along v_0; False:
            source 0 is like the others. Where source 0 is not visible, both are the same, sketches aside.
        values: value states, (..., source, dim), leading axes that broadcast to those of `magnitudes`, from which intervals (over the visible sources), norm ratio, and
            sketches are measured.
        visible: the sources that count, boolean, (..., source). None: all.
        mu, kappa: intervals in place of measured ones, for "constant_norm" and "global"; both, also sink-agnostic.
        norm_ratio: in place of the measured one.
        tail: take the quantiles `tail` and 1 - `tail` (outward to 1/1000) of the measured cosines in place of least
            and greatest: tighter, and no bound any more. For "constant_norm" and "global".
        rank: coordinates per source of "sketch" and "combined".

    Raises:
        GeomlibError: an unknown level, shapes that do not fit, a level without what it needs, input that is not finite or
            whose squares overflow.

    Source: arXiv 2602.01893 for constant_norm; chapter 1 of the book for all. Keys are rounded outward by 4 (N + dim + 8) machine
    epsilons of a_i (a_i + A), A the sum of the selected magnitudes, which covers the rounding of both these and the exact
    keys: a certificate is not above the computed F either.
    """
    visible = torch.ones_like(selected) if visible is None and isinstance(selected, torch.Tensor) else visible
    _check(magnitudes, selected, level, values, visible, mu, kappa, norm_ratio, sink, tail, rank)
    dtype = torch.promote_types(magnitudes.dtype, torch.float32)
    a = magnitudes.detach().to(dtype)
    selected, visible, a = torch.broadcast_tensors(selected, visible, a)
    size = selected.sum(-1)
    rest = visible & ~selected
    aware = visible[..., :1] & sink
    dim = 0
    if values is not None:
        values = values.detach().to(torch.promote_types(values.dtype, dtype))
        norms = values.norm(dim=-1)
        units = values / norms.clamp(min=torch.finfo(values.dtype).tiny)[..., None]
        dim = values.shape[-1]
    if level == "constant_norm" and sink and norm_ratio is not None:
        a = a.clone()
        a[..., 0] *= norm_ratio
    elif level == "constant_norm" and values is not None:
        others = visible.clone()
        others[..., 0] &= not sink
        mean = (norms * others).sum(-1) / others.sum(-1).clamp(min=1)
        first = a[..., 0] * torch.where(mean > 0, norms[..., 0] / mean, (norms[..., 0] > 0).to(norms.dtype))
        a = a * (mean > 0)[..., None]  # the norm that all have may be 0, and no ratio says that
        if sink:
            a[..., 0] = first
    total = (a * selected).sum(-1, keepdim=True)
    if not torch.isfinite(8 * a * (a + total)).all():
        raise GeomlibError(
            f"squares of these magnitudes are beyond {str(dtype).removeprefix('torch.')}: divide all by one number, which "
            f"changes no certificate."
        )
    tiny = torch.finfo(dtype).tiny
    slack = GUARD * torch.finfo(dtype).eps * (size[..., None] + dim + 8) * a * (a + total) + tiny

    if level in ("sketch", "combined"):
        upper, lower = _sketched_keys(a, units, selected, rank, sink)
    if level != "sketch":
        if level in ("rowwise", "combined"):
            ends = _row_intervals(units, selected, aware)
        else:
            ends = _global_intervals(values is not None and units, visible, aware, mu, kappa, tail)
        interval_upper, interval_lower = _interval_keys(a, selected, ends)
        if level == "combined":
            upper, lower = torch.minimum(upper, interval_upper), torch.maximum(lower, interval_lower)
        else:
            upper, lower = interval_upper, interval_lower
    false_positives, false_negatives, *_ = extremal(upper + slack, lower - slack, selected, rest, inversions=False)
    return Certificate(*prf(size, false_positives, false_negatives))


def _check(a, selected, level, values, visible, mu, kappa, norm_ratio, sink, tail, rank) -> None:
    if level not in LEVELS:
        raise GeomlibError(f"unknown level {level!r}: give one of {', '.join(LEVELS)}.")
    _check_operations(a, selected, visible)
    if not isinstance(sink, bool):
        raise GeomlibError(f"sink = {sink!r} is not usable: give True (sink-aware) or False (agnostic).")
    if values is not None:
        _check_values(values, a.shape[-1])
        try:
            torch.broadcast_shapes(values.shape[:-1], a.shape)
        except RuntimeError:
            raise GeomlibError(
                f"values {tuple(values.shape)} do not fit magnitudes {tuple(a.shape)}: give leading axes that broadcast, "
                f"as values[:, None] for (head, query, source)."
            ) from None
    if values is None and (level in ("rowwise", "sketch", "combined") or mu is None or kappa is None):
        raise GeomlibError(
            f"{level} needs values" + (", or mu and kappa." if level in ("constant_norm", "global") else ".")
        )
    for name, ends in (("mu", mu), ("kappa", kappa)):
        if ends is None:
            continue
        ordered = len(ends) == 2 and torch.as_tensor(ends[0]) <= torch.as_tensor(ends[1])  # not so with NaN
        if not torch.as_tensor(ordered).all():
            raise GeomlibError(f"{name} = {ends} is no interval: give its low end and its high end.")
    if level == "constant_norm" and sink and values is None and norm_ratio is None:
        raise GeomlibError("constant_norm needs values, or a norm_ratio beside mu and kappa.")
    if norm_ratio is not None and not (torch.as_tensor(norm_ratio) >= 0).all():
        raise GeomlibError(f"norm_ratio = {norm_ratio} is not usable: give a norm over a norm, 0 or more.")
    if tail is not None and not 0 <= tail < 0.5:
        raise GeomlibError(f"tail = {tail} is not usable: give a share from 0 to below 0.5.")
    if values is not None:
        _check_rank(rank, values.shape[-1])


def _check_operations(magnitudes, selected, visible) -> None:
    for name, x in (("magnitudes", magnitudes), ("selected", selected), ("visible", visible)):
        if not isinstance(x, torch.Tensor) or x.ndim < 1:
            raise GeomlibError(f"{name} must be a tensor of (..., source), not {type(x).__name__}.")
    sources = magnitudes.shape[-1]
    for name, mask in (("selected", selected), ("visible", visible)):
        if mask.dtype != torch.bool or mask.shape[-1] != sources:
            raise GeomlibError(f"{name} must be boolean with {sources} sources, not {tuple(mask.shape)} {mask.dtype}.")
    if (selected & ~visible).any() or not selected.any(-1).all() or not (visible & ~selected).any(-1).all():
        raise GeomlibError("every operation needs one or more selected and one or more unselected visible sources.")
    if not torch.isfinite(magnitudes).all() or (magnitudes < 0).any():
        raise GeomlibError("magnitudes must be finite and not negative.")


def _check_values(values, sources: int | None = None) -> None:
    if not isinstance(values, torch.Tensor) or values.ndim < 2 or 0 in values.shape:
        raise GeomlibError("values must be a tensor of (..., source, dim), neither of them 0.")
    if sources is not None and values.shape[-2] != sources:
        raise GeomlibError(f"values {tuple(values.shape)} do not fit {sources} magnitudes: give (..., source, dim).")
    if not torch.isfinite(values).all():
        raise GeomlibError("values hold NaN or infinite numbers: check the model's precision and weights.")


def _check_rank(rank: int, dim: int) -> None:
    if not isinstance(rank, int) or not 0 <= rank <= dim:
        raise GeomlibError(f"rank {rank!r} is not usable: give a whole number from 0 to the values' dimension {dim}.")


def _interval_keys(a, selected, ends) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper keys of the selected and lower keys of the rest; `ends` as (mu_low, mu_high, kappa_low, kappa_high), each
    (..., source): the interval of a source's cosines with the selected other than the sink, and with the sink."""
    mu_low, mu_high, kappa_low, kappa_high = ends
    first = torch.zeros(a.shape[-1], dtype=torch.bool, device=a.device)
    first[0] = True
    sigma = (a[..., :1] * selected[..., :1]).masked_fill(first, 0)  # nobody's partner is itself
    others = (a * (selected & ~first)).sum(-1, keepdim=True)
    mine = torch.where(first, others, (others - a).clamp(min=0))
    upper = -(a**2) - 2 * a * (mu_low * mine + kappa_low * sigma)
    lower = a**2 - 2 * a * (mu_high * others + kappa_high * sigma)
    return upper, lower


def _cosines(units: torch.Tensor) -> torch.Tensor:
    return units @ units.transpose(-1, -2)


def _global_intervals(units, visible, aware, mu, kappa, tail):
    """Ends for `_interval_keys`, the same for every source but the sink."""
    if mu is None or kappa is None:
        cosines = _cosines(units)
        sources = visible.shape[-1]
        pair = torch.ones(sources, sources, dtype=torch.bool, device=visible.device).triu(1)
        pair = visible[..., None, :] & visible[..., :, None] & pair
        with_sink = pair.clone()
        with_sink[..., 1:, :] = False
        cosines = cosines.expand(pair.shape).flatten(-2)
        mu = mu if mu is not None else _range(cosines, (pair & ~with_sink).flatten(-2), tail)
        kappa = kappa if kappa is not None else _range(cosines, with_sink.flatten(-2), tail)
    # Given ends in double: rounded to less, an interval could lose what it must hold.
    (mu_low, mu_high), (kappa_low, kappa_high) = (
        [
            torch.as_tensor(e, dtype=None if isinstance(e, torch.Tensor) else torch.float64, device=visible.device)[
                ..., None
            ]
            for e in ends
        ]
        for ends in (mu, kappa)
    )
    # Agnostic: one interval that holds both; without a visible sink there is none to hold.
    sees = visible[..., :1]
    wide_low = torch.where(sees, torch.minimum(mu_low, kappa_low), mu_low)
    wide_high = torch.where(sees, torch.maximum(mu_high, kappa_high), mu_high)
    low, high = torch.where(aware, mu_low, wide_low), torch.where(aware, mu_high, wide_high)
    own_low, own_high = torch.where(aware, kappa_low, wide_low), torch.where(aware, kappa_high, wide_high)
    first = torch.arange(visible.shape[-1], device=visible.device) == 0
    return torch.where(first, own_low, low), torch.where(first, own_high, high), own_low, own_high


def _range(cosines: torch.Tensor, keep: torch.Tensor, tail: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest of what is kept, or its quantiles outward to the grid; 0 where nothing is."""
    count = keep.sum(-1)
    rising = cosines.masked_fill(~keep, float("inf")).sort(dim=-1).values
    outside = torch.zeros_like(count) if tail is None else (tail * count.double()).floor().long()
    low = rising.gather(-1, outside[..., None])[..., 0]
    high = rising.gather(-1, (count - 1 - outside).clamp(min=0)[..., None])[..., 0]
    if tail is not None:
        low = (((low.double() + 1) * STEPS).floor().clamp(min=0) / STEPS - 1).to(cosines.dtype)
        high = ((((high.double() + 1) * STEPS).floor() + 1) / STEPS - 1).to(cosines.dtype)
    return tuple(torch.where(count > 0, e, 0.0) for e in (low, high))


def _row_intervals(units, selected, aware):
    """Ends for `_interval_keys` from each source's cosines with the selected ones."""
    sources = selected.shape[-1]
    cosines = _cosines(units).expand(*selected.shape[:-1], sources, sources)
    first = torch.arange(sources, device=selected.device) == 0
    partner = selected[..., None, :] & ~torch.eye(sources, dtype=torch.bool, device=selected.device)
    partner = partner & ~(first & aware)[..., None, :]
    low = cosines.masked_fill(~partner, float("inf")).amin(-1)
    high = cosines.masked_fill(~partner, float("-inf")).amax(-1)
    any_ = partner.any(-1)
    low, high = torch.where(any_, low, 0.0), torch.where(any_, high, 0.0)
    own = cosines[..., 0, :]
    return low, high, torch.where(aware, own, low), torch.where(aware, own, high)


def sketch_directions(values: torch.Tensor, rank: int, sink: bool = True) -> torch.Tensor:
    """The orthonormal directions of a sketch, (..., rank, dim), float64: v_0's first if `sink`, then the principal ones
    (uncentred) of the unit values, in what v_0 leaves. Nested: the first k are those of rank k.

    Any orthonormal set gives a valid certificate; this one is chosen to leave little. Errors: as `certificate`.
    """
    _check_values(values)
    _check_rank(rank, values.shape[-1])
    values = values.detach().double()
    units = values / values.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    if not sink:
        return _principal(units)[..., :rank, :]
    first = units[..., :1, :]
    left = units - (units @ first.transpose(-1, -2)) * first
    # A sink of norm 0 has no direction: it comes last then, where nothing is left for it.
    has = (first != 0).any(-1, keepdim=True)
    principal = _principal(left)
    found = torch.where(has, torch.cat([first, principal], dim=-2), torch.cat([principal, first], dim=-2))
    return torch.linalg.qr(found.transpose(-1, -2)).Q.transpose(-1, -2)[..., :rank, :]


def _principal(units: torch.Tensor) -> torch.Tensor:
    """All dim eigenvectors of the second moment, largest first, (..., dim, dim)."""
    return torch.linalg.eigh(units.transpose(-1, -2) @ units).eigenvectors.transpose(-1, -2).flip(-2)


def _sketched_keys(a, units, selected, rank, sink) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact keys of the selected; of the rest, <y_j, s_N> at most what a few coordinates and Cauchy-Schwarz allow."""
    y = a[..., None] * units
    aggregate = (y * selected[..., None]).sum(-2)  # s_N
    exact = a**2 - 2 * (y @ aggregate[..., None])[..., 0]
    basis = sketch_directions(units, rank, sink)
    full = units.double()
    coordinates = full @ basis.transpose(-1, -2)
    beyond = (full - coordinates @ basis).norm(dim=-1)
    shadow = (basis @ aggregate.double()[..., None])[..., 0]
    left = (aggregate.double() - (shadow[..., None, :] @ basis)[..., 0, :]).norm(dim=-1, keepdim=True)
    most = a.double() * ((coordinates @ shadow[..., None])[..., 0] + beyond * left)
    return exact, a**2 - 2 * most.to(a.dtype)


# --- dimension --------------------------------------------------------------------------------------------------------


def spherical_coherence(dim: int, sources: int, delta: float = 0.05) -> float:
    """With probability 1 - delta, no absolute cosine among `sources` independent uniform directions in R^dim exceeds this.

    sqrt(2 log(sources² / delta) / dim), at most 1 (which says nothing): the cap bound P(cos >= c) <= exp(-dim c² / 2)
    for both signs of all pairs. Chapter 1 of the book.
    """
    if not (dim >= 1 and sources >= 1 and 0 < delta < 1):
        raise GeomlibError("spherical_coherence needs dim and sources of 1 or more and delta between 0 and 1.")
    return min(1.0, math.sqrt(2 * math.log(sources**2 / delta) / dim))


def coherence(values: torch.Tensor, visible: torch.Tensor | None = None) -> Coherence:
    """Norms and cosines of value states (..., source, dim), over all sources or the visible ones (..., source).

    Source 0 is the sink; where it is not visible, kappa and the norm ratio are NaN. Needs two others or more.
    GeomlibError: fewer of them, shapes that do not fit, values that are not finite.
    """
    _check_values(values)
    if visible is not None and (visible.dtype != torch.bool or visible.shape[-1] != values.shape[-2]):
        raise GeomlibError(f"visible must be boolean with {values.shape[-2]} sources, not {tuple(visible.shape)}.")
    values = values.detach().double()
    sources = values.shape[-2]
    keep = torch.ones(sources, dtype=torch.bool, device=values.device) if visible is None else visible
    keep = keep.expand(values.shape[:-1])
    sees = keep[..., 0]
    others = keep.clone()
    others[..., 0] = False
    count = others.sum(-1)
    if (count < 2).any():
        raise GeomlibError("coherence needs two visible sources or more besides source 0.")
    norms = values.norm(dim=-1)
    units = values / norms.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
    # Moments of all pairs from d numbers each, without the pairs: sums over k of c_ik and c_ik², less those of k = i.
    rest = units * others[..., None]
    self_ = rest.square().sum(-1)
    rows = ((rest @ rest.sum(-2)[..., None])[..., 0] - self_) / (count - 1)[..., None]
    second = ((rest.transpose(-1, -2) @ rest).square().sum((-2, -1)) - self_.square().sum(-1)) / (count * (count - 1))
    mean, row_sd = _moments(rows, others)
    sd = (second - mean**2).clamp(min=0).sqrt()
    kappa = (units @ units[..., 0, :, None])[..., 0]
    kappa_mean, kappa_sd = _moments(kappa, others)
    norm_mean, norm_sd = _moments(norms, others)
    kappas = (kappa_mean, kappa_sd, *_extremes(kappa, others))
    kappa_mean, kappa_sd, kappa_low, kappa_high = (torch.where(sees, k, torch.nan) for k in kappas)
    ends = []
    for start in range(0, sources, AT_ONCE):  # the extremes need every pair, but not at once
        rows_ = slice(start, start + AT_ONCE)
        pair = others[..., rows_, None] & others[..., None, :]
        pair.diagonal(start, -2, -1).fill_(False)
        cosines = units[..., rows_, :] @ units.transpose(-1, -2)
        ends.append(_extremes(cosines.flatten(-2), pair.flatten(-2)))
    low, high = torch.stack([e[0] for e in ends]).amin(0), torch.stack([e[1] for e in ends]).amax(0)
    ratio, cv = torch.where(sees, norms[..., 0] / norm_mean, torch.nan), norm_sd / norm_mean
    return Coherence(mean, sd, row_sd, kappa_mean, kappa_sd, low, high, kappa_low, kappa_high, ratio, cv)


def _extremes(x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.masked_fill(~keep, float("inf")).amin(-1), x.masked_fill(~keep, float("-inf")).amax(-1)


def _moments(x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = keep.sum(-1)
    mean = (x * keep).sum(-1) / count
    return mean, ((((x - mean[..., None]) * keep) ** 2).sum(-1) / count).sqrt()


def gaussian_prediction(
    magnitudes: torch.Tensor,
    selected: torch.Tensor,
    mu_mean: float | torch.Tensor,
    mu_sd: float | torch.Tensor,
    mu_row_sd: float | torch.Tensor = 0.0,
    kappa_mean: float | torch.Tensor | None = None,
    kappa_sd: float | torch.Tensor | None = None,
    *,
    visible: torch.Tensor | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Prediction:
    """What F would be if directions were random with the given mean and spread of cosines: a prediction, no bound.

    The cosine of sources i and k is mu_mean + u_i + e_ik, u of standard deviation `mu_row_sd` and e of the rest of
    `mu_sd`; with the sink, kappa_mean + noise of kappa_sd. Given the magnitudes every key is then Gaussian, and F is
    averaged over `draws` seeded draws of all keys.

    Args:
        magnitudes, selected, visible: as `certificate` takes them, (..., source).
        mu_mean ... kappa_sd: the first five fields of `Coherence`, (...); kappa None: the sink is like the others.

    Returns:
        Prediction of (...), float64.

    Raises:
        GeomlibError: as `certificate`; means or spreads that are not finite, negative spreads, fewer than two draws.

    Source: chapter 1 of the book. The draws depend on the shape of `magnitudes` alone: selections in a leading axis share
    them, so that curves over N are smooth.
    """
    visible = torch.ones_like(selected) if visible is None and isinstance(selected, torch.Tensor) else visible
    _check_operations(magnitudes, selected, visible)
    if not isinstance(draws, int) or draws < 2:
        raise GeomlibError("a standard error needs two draws or more.")
    if (kappa_mean is None) != (kappa_sd is None):
        raise GeomlibError("give kappa_mean and kappa_sd together, or neither.")
    sees = visible[..., :1]
    for name, x in (("mu_mean", mu_mean), ("mu_sd", mu_sd), ("mu_row_sd", mu_row_sd), ("kappa_mean", kappa_mean),
                    ("kappa_sd", kappa_sd)):  # fmt: skip
        if x is None or (name.startswith("kappa") and not sees.any()):
            continue
        if not torch.isfinite(torch.as_tensor(x)).all() or (name.endswith("sd") and (torch.as_tensor(x) < 0).any()):
            raise GeomlibError(f"{name} must be finite" + (" and not negative." if name.endswith("sd") else "."))
    a = magnitudes.detach().double()
    selected, visible, a = torch.broadcast_tensors(selected, visible, a)
    as_column = [
        None if x is None else torch.as_tensor(x, dtype=torch.float64, device=a.device)[..., None]
        for x in (mu_mean, mu_sd, mu_row_sd, kappa_mean, kappa_sd)
    ]
    mu_mean, mu_sd, mu_row_sd = as_column[:3]
    first = torch.arange(a.shape[-1], device=a.device) == 0
    if kappa_mean is None:  # nobody is the sink
        kappa_mean, kappa_sd, first = mu_mean, mu_sd, torch.zeros_like(first)
    else:
        kappa_mean, kappa_sd = as_column[3:]
    sees = visible[..., :1]
    kappa_mean, kappa_sd = torch.where(sees, kappa_mean, 0.0), torch.where(sees, kappa_sd, 0.0)
    noise = (mu_sd**2 - mu_row_sd**2).clamp(min=0)
    sigma = (a * selected * first).sum(-1, keepdim=True).masked_fill(first, 0)
    mine = a * (selected & ~first)
    others = (mine.sum(-1, keepdim=True) - mine).clamp(min=0)
    squares = ((mine**2).sum(-1, keepdim=True) - mine**2).clamp(min=0)
    mean = torch.where(first, kappa_mean * others, mu_mean * others + kappa_mean * sigma)
    variance = torch.where(
        first, kappa_sd**2 * squares, mu_row_sd**2 * others**2 + noise * squares + kappa_sd**2 * sigma**2
    )
    own = torch.where(selected, -(a**2), a**2)
    generator = torch.Generator().manual_seed(seed)
    found, size = [], selected.sum(-1)
    at_once = max(1, (4 << 20) // max(1, a.numel()))
    for start in range(0, draws, at_once):
        # One by one, so that how many are held at once changes none of them.
        count, extra = min(at_once, draws - start), [1] * (a.ndim - magnitudes.ndim)
        normal = [torch.randn(magnitudes.shape, generator=generator, dtype=torch.float64) for _ in range(count)]
        normal = torch.stack(normal).view(count, *extra, *magnitudes.shape).to(a.device)
        keys = own - 2 * a * (mean + variance.sqrt() * normal)
        false_positives, false_negatives, *_ = extremal(keys, keys, selected, visible & ~selected, inversions=False)
        found.append(torch.stack(prf(size, false_positives, false_negatives), dim=1))
    found = torch.cat(found)  # (draw, metric, ...)
    return Prediction(*found.mean(0), found[:, 2].std(0) / draws**0.5)
