"""Bounds against slow loops in Python floats, against the exact metrics on awkward inputs, and their own order."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomlib import theory
from geomlib.bounds import (
    LEVELS,
    Coherence,
    certificate,
    coherence,
    gaussian_prediction,
    inversion_bound,
    joint_inversion_bound,
    sketch_directions,
    spherical_coherence,
)
from geomlib.errors import GeomlibError
from geomlib.geometry import separability

WAYS = [(level, sink) for level in LEVELS for sink in (True, False)]
NAN = float("nan")


# --- slow: THEORY section 4 for one operation, formula by formula -----------------------------------------------------


def dot(x, y) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def unit(x) -> list[float]:
    length = math.sqrt(dot(x, x))
    return [e / length if length else 0.0 for e in x]


def counted(n, fp, fn) -> tuple[float, float, float]:
    p, r = n / (n + fp), (n - fn) / n
    return p, r, 2 * p * r / (p + r) if p + r else 0.0


def slow_interval(cosines, tail=None) -> tuple[float, float]:
    rising = sorted(cosines)
    if not rising:
        return 0.0, 0.0
    if tail is None:
        return rising[0], rising[-1]
    out = math.floor(tail * len(rising))
    low, high = rising[out], rising[len(rising) - 1 - out]
    return math.floor(low * 1000) / 1000, (math.floor(high * 1000) + 1) / 1000


def slow_directions(v, rank, sink) -> list[list[float]]:
    """v_0's direction, then the principal ones of what it leaves; from singular vectors, not from a second moment."""
    units = [unit(x) for x in v]
    if not sink:
        return np.linalg.svd(np.array(units), full_matrices=True)[2][:rank].tolist()
    if rank <= 1:
        return [units[0]][:rank]
    left = [[e - dot(x, units[0]) * f for e, f in zip(x, units[0], strict=True)] for x in units]
    return [units[0], *np.linalg.svd(np.array(left), full_matrices=True)[2].tolist()][:rank]


def slow_keys(level, a, chosen, seen, v=None, sink=True, mu=None, kappa=None, ratio=None, tail=None, rank=0):
    """Upper keys of the chosen and lower keys of the other seen sources, as two dicts."""
    a, rest, sees = list(a), [j for j in seen if j not in chosen], 0 in seen
    aware = sink and sees
    if v is not None:
        norm, u = [math.sqrt(dot(x, x)) for x in v], [unit(x) for x in v]
    if level == "combined":
        parts = [slow_keys(way, a, chosen, seen, v, sink, rank=rank) for way in ("rowwise", "sketch")]
        return (
            {i: min(upper[i] for upper, _ in parts) for i in chosen},
            {j: max(lower[j] for _, lower in parts) for j in rest},
        )
    if level in ("exact", "sketch"):
        y = [[m * e for e in x] for m, x in zip(a, u, strict=True)]
        s = [math.fsum(y[i][d] for i in chosen) for d in range(len(u[0]))]
        true = {i: a[i] ** 2 - 2 * dot(y[i], s) for i in seen}
        if level == "exact":
            return {i: true[i] for i in chosen}, {j: true[j] for j in rest}
        directions = slow_directions(v, rank, sink)

        def split(x):
            inside = [dot(x, p) for p in directions]
            shadow = [math.fsum(t * p[d] for t, p in zip(inside, directions, strict=True)) for d in range(len(x))]
            beyond = [e - f for e, f in zip(x, shadow, strict=True)]
            return shadow, math.sqrt(dot(beyond, beyond))

        ps, beyond_s = split(s)
        lower = {}
        for j in rest:
            py, beyond_y = split(y[j])
            lower[j] = a[j] ** 2 - 2 * (dot(py, ps) + beyond_y * beyond_s)
        return {i: true[i] for i in chosen}, lower
    if level == "constant_norm" and sink:
        if ratio is None:
            others = [norm[i] for i in seen if i]
            ratio = norm[0] / (sum(others) / len(others))
        a[0] *= ratio
    if level in ("constant_norm", "global"):
        mu = mu or slow_interval([dot(u[i], u[k]) for i in seen for k in seen if 0 < i < k], tail)
        kappa = kappa or slow_interval([dot(u[0], u[i]) for i in seen if i] if sees else [], tail)
        if sees and not aware:
            mu = kappa = min(mu[0], kappa[0]), max(mu[1], kappa[1])
    if level == "rowwise":
        c = [[dot(x, y) for y in u] for x in u]
    upper, lower = {}, {}
    for i in seen:
        partners = [k for k in chosen if k != i and not (aware and k == 0)]
        mass = math.fsum(a[k] for k in partners)
        sigma = a[0] if aware and 0 in chosen and i != 0 else 0.0
        if level == "rowwise":
            low, high = min((c[i][k] for k in partners), default=0), max((c[i][k] for k in partners), default=0)
            own = (c[0][i], c[0][i])
        else:
            low, high = kappa if i == 0 else mu
            own = kappa
        if i in chosen:
            upper[i] = -(a[i] ** 2) - 2 * a[i] * (low * mass + own[0] * sigma)
        else:
            lower[i] = a[i] ** 2 - 2 * a[i] * (high * mass + own[1] * sigma)
    return upper, lower


def slow_counts(upper, lower, a, chosen, slack=0.0) -> tuple[float, float, float]:
    """Precision, recall and F from keys; `slack`: all keys outward by that times a_i (a_i + A), inward if negative."""
    total = math.fsum(a[k] for k in chosen)
    upper = {i: k + slack * a[i] * (a[i] + total) for i, k in upper.items()}
    lower = {j: k - slack * a[j] * (a[j] + total) for j, k in lower.items()}
    top, bottom = max(upper.values()), min(lower.values())
    fp, fn = sum(k <= top for k in lower.values()), sum(k >= bottom for k in upper.values())
    return counted(len(chosen), fp, fn)


def slow_certificate(level, a, chosen, seen, v=None, sink=True, **settings) -> tuple[float, float, float]:
    return slow_counts(*slow_keys(level, a, chosen, seen, v, sink, **settings), a, chosen)


# --- inputs -----------------------------------------------------------------------------------------------------------


def generic(seed, sources=12, dim=5, dtype=torch.float64):
    """Attention with a heavy first source, values with a common direction and a small sink that points away."""
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(dim, generator=g, dtype=torch.float64)
    values = torch.randn(sources, dim, generator=g, dtype=torch.float64) + common
    values[0] = 0.3 * (torch.randn(dim, generator=g, dtype=torch.float64) - common)
    scores = 1.5 * torch.randn(sources, generator=g, dtype=torch.float64)
    scores[0] += 1
    return scores.softmax(-1).to(dtype), values.to(dtype)


def best(weights, n, visible=None) -> torch.Tensor:
    """The n of most weight, as a mask."""
    seen = range(len(weights)) if visible is None else visible.nonzero().flatten().tolist()
    mask = torch.zeros(len(weights), dtype=torch.bool)
    mask[sorted(seen, key=lambda i: (-weights[i].item(), i))[:n]] = True
    return mask


def exact(weights, values, selected, visible=None):
    """The exact metrics of that very set."""
    return separability(
        weights[None], values, [int(selected.sum())], selected[None].double(), visible=None if visible is None else visible[None]
    )  # fmt: skip


def magnitudes_of(weights, values):
    return weights * values.norm(dim=-1)


VALUES = {
    "random": lambda g, t, d: torch.randn(t, d, generator=g),
    "common direction": lambda g, t, d: torch.randn(t, d, generator=g) + 3,
    "duplicated": lambda g, t, d: torch.randn(t, d, generator=g)[torch.randint(0, (t + 1) // 2, (t,), generator=g)],
    "some zero": lambda g, t, d: torch.randn(t, d, generator=g) * (torch.rand(t, 1, generator=g) < 0.6),
    "zero sink": lambda g, t, d: torch.randn(t, d, generator=g) * (torch.arange(t) > 0)[:, None],
    "collinear": lambda g, t, d: torch.randn(t, 1, generator=g) * torch.randn(d, generator=g),
    "opposite": lambda g, t, d: torch.randn(d, generator=g) * (1 - 2 * torch.randint(0, 2, (t, 1), generator=g)),
    "equal": lambda g, t, d: torch.randn(d, generator=g).expand(t, d),
    "whole numbers": lambda g, t, d: torch.randint(-2, 3, (t, d), generator=g),
}
WEIGHTS = {
    "softmax": lambda g, t: (2 * torch.randn(t, generator=g)).softmax(-1),
    "tiny": lambda g, t: torch.where(torch.rand(t, generator=g) < 0.5, 1e-12, 1.0) * torch.rand(t, generator=g),
    "equal": lambda g, t: torch.full((t,), 1 / t),
    "whole numbers": lambda g, t: torch.randint(0, 3, (t,), generator=g),
}


@st.composite
def operations(draw):
    """(weights, values, selected, visible) of one operation, as awkward as they come."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    sources = draw(st.integers(2, 14))
    dim = draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    values = draw(st.sampled_from(sorted(VALUES)))
    weights = draw(st.sampled_from(sorted(WEIGHTS)))
    weights, values = WEIGHTS[weights](g, sources).to(dtype), VALUES[values](g, sources, dim).to(dtype).clone()
    visible = torch.ones(sources, dtype=torch.bool)
    if sources > 3 and draw(st.booleans()):
        visible[draw(st.lists(st.integers(0, sources - 1), max_size=sources - 2, unique=True))] = False
    count = int(visible.sum())
    n = draw(st.sampled_from([count - 1, *range(1, count)]))
    scores = draw(st.sampled_from([weights, torch.rand(sources, generator=g)]))
    return weights, values, best(scores, n, visible), visible


# --- inversions -------------------------------------------------------------------------------------------------------


def paper(n, inversions) -> Fraction:
    p, r = Fraction(n, n + inversions), max(Fraction(0), 1 - Fraction(inversions, n))
    return 2 * p * r / (p + r)


def joint(n, inversions) -> Fraction:
    if inversions == 0:
        return Fraction(1)
    return 2 / (1 + Fraction(1, n) + Fraction(n, n - inversions)) if inversions < n else Fraction(0)


def test_inversion_bounds_are_their_formulas():
    n, inversions = torch.arange(1, 13)[:, None], torch.arange(0, 30)
    got, best_ = inversion_bound(inversions, n), joint_inversion_bound(inversions, n)
    assert got.f.shape == best_.shape == (12, 30) and got.f.dtype == best_.dtype == torch.float64
    for i, size in enumerate(range(1, 13)):
        for k in range(30):
            assert got.precision[i, k].item() == pytest.approx(size / (size + k), rel=1e-14)
            assert got.recall[i, k].item() == pytest.approx(max(0, 1 - k / size), rel=1e-14, abs=1e-15)
            assert got.f[i, k].item() == pytest.approx(float(paper(size, k)), rel=1e-14, abs=1e-15)
            assert best_[i, k].item() == pytest.approx(float(joint(size, k)), rel=1e-14, abs=1e-15)
            assert joint(size, k) >= paper(size, k)
    assert (best_ > got.f + 1e-3).any()  # it does buy something


def test_inversion_bounds_of_plain_numbers_and_of_nan():
    assert inversion_bound(2, 4).precision.item() == pytest.approx(2 / 3)
    assert joint_inversion_bound(2, 4).item() == pytest.approx(2 / 3.25)
    inversions = torch.tensor([0.0, NAN, 3.0])
    assert joint_inversion_bound(inversions, 4).isnan().tolist() == [False, True, False]
    for field in inversion_bound(inversions, 4):
        assert field.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("bound", [inversion_bound, joint_inversion_bound])
@pytest.mark.parametrize(("inversions", "n"), [(0, 0), (1, -2), (-1, 3), ([0.0, -1.0], 3), (1, [4, 0])])
def test_impossible_counts_are_refused(bound, inversions, n):
    with pytest.raises(GeomlibError, match="need sizes N of 1 or more and inversions of 0 or more") as caught:
        bound(torch.tensor(inversions), torch.tensor(n))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", range(1, 13))
def test_the_joint_bound_is_attained(n):
    """One intruder nearer than exactly I of the selected. In one dimension all selected lie below s, the larger nearer."""
    for inversions in range(n):
        selected = [10.0 * (i + 1) for i in range(n)]
        intruder = 10.0 * inversions + 5
        values = torch.tensor([[x] for x in [*selected, intruder, 0.0, 1.0]])
        scores = torch.tensor([[1.0] * n + [0.0] * 3])
        got = separability(torch.ones_like(scores), values, [n], scores)
        assert got.inversions.item() == inversions
        assert got.f.item() == pytest.approx(float(joint(n, inversions)), rel=1e-14)
        assert got.f.item() == pytest.approx(joint_inversion_bound(got.inversions, n).item(), rel=1e-14)


@settings(max_examples=300, deadline=None)
@given(operation=operations())
def test_inversion_bounds_hold(operation):
    weights, values, selected, visible = operation
    found = exact(weights, values, selected, visible)
    n = int(selected.sum())
    bound = inversion_bound(found.inversions, n)
    assert bound.precision <= found.precision + 1e-12 and bound.recall <= found.recall + 1e-12
    assert bound.f <= joint_inversion_bound(found.inversions, n) + 1e-12
    assert joint_inversion_bound(found.inversions, n) <= found.f + 1e-12


# --- certificates against the slow loop -------------------------------------------------------------------------------

MASKS = {
    "all": torch.ones(12, dtype=torch.bool),
    "window": torch.tensor([True] * 9 + [False] * 3),
    "no sink": torch.tensor([False] * 2 + [True] * 10),
    "holes": torch.tensor([True, False, True, True, False] + [True] * 7),
}


def agree(got, expected):
    assert tuple(x.item() for x in got) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_certificates_are_the_slow_loops(level, sink, mask):
    visible, found = MASKS[mask], set()
    seen = visible.nonzero().flatten().tolist()
    for seed in range(3):
        weights, values = generic(seed)
        a = weights if level == "constant_norm" else magnitudes_of(weights, values)
        for n in (1, 2, 3, 5, len(seen) - 1):
            selected = best(weights, n, visible)
            for rank in (0, 1, 2, 4, 5) if level in ("sketch", "combined") else (0,):
                got = certificate(a, selected, level, sink, values=values, visible=visible, rank=rank)
                chosen = selected.nonzero().flatten().tolist()
                expected = slow_certificate(level, a.tolist(), chosen, seen, values.tolist(), sink, rank=rank)
                agree(got, expected)
                found.add(expected)
    assert len(found) > 4  # and they say something


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("level", ["constant_norm", "global"])
def test_quantiles_are_the_slow_loops(level, sink):
    differ = 0
    for visible in MASKS.values():
        seen = visible.nonzero().flatten().tolist()
        for seed in range(6):
            weights, values = generic(seed, dim=24)
            a = weights if level == "constant_norm" else magnitudes_of(weights, values)
            for n in (2, 4):
                selected = best(weights, n, visible)
                chosen = selected.nonzero().flatten().tolist()
                for tail in (0.05, 0.2):
                    got = certificate(a, selected, level, sink, values=values, visible=visible, tail=tail)
                    expected = slow_certificate(level, a.tolist(), chosen, seen, values.tolist(), sink, tail=tail)
                    agree(got, expected)
                    plain = certificate(a, selected, level, sink, values=values, visible=visible)
                    differ += (plain.f != got.f).item()
    assert differ > 0


def test_the_grid_of_the_quantiles_is_outward():
    """Three directions of known cosines: the thousandths below and above them, seen where F changes with a magnitude."""
    c = 0.9505
    h, mu = math.sqrt(1 - c * c), 2 * c * c - 1  # 0.8069005
    values = torch.tensor([[1.0, 0], [c, h], [c, -h]], dtype=torch.float64)
    selected = torch.tensor([True, True, False])
    a = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64).repeat(20000, 1)
    a[:, 2] = torch.linspace(0.01, 1, 20000, dtype=torch.float64)
    rows = selected.expand_as(a)
    got = certificate(a, rows, "global", values=values, tail=0.05)
    plain = certificate(a, rows, "global", values=values)
    for got_, plain_ in zip(got, plain, strict=True):
        assert (got_ <= plain_).all() and (got_ < plain_).any()
    for n in range(0, 20000, 7):
        agree(
            (x[n] for x in got),
            slow_certificate("global", a[n].tolist(), [0, 1], [0, 1, 2], mu=(0.806, 0.807), kappa=(0.95, 0.951)),
        )
    assert mu == pytest.approx(0.8069005)


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("level", ["constant_norm", "global"])
def test_given_intervals_and_ratio_need_no_values(level, sink):
    found = set()
    for seed in range(8):
        weights, values = generic(seed)
        a = weights if level == "constant_norm" else magnitudes_of(weights, values)
        for visible in MASKS.values():
            seen = visible.nonzero().flatten().tolist()
            for mu, kappa, ratio in (((-0.1, 0.2), (-0.4, -0.3), 0.2), ((0.0, 0.0), (0.5, 0.75), 2.0)):
                selected = best(weights, 4, visible)
                chosen = selected.nonzero().flatten().tolist()
                got = certificate(a, selected, level, sink, visible=visible, mu=mu, kappa=kappa, norm_ratio=ratio)
                given_ = {"mu": mu, "kappa": kappa, "ratio": ratio}
                expected = slow_certificate(level, a.tolist(), chosen, seen, sink=sink, **given_)
                agree(got, expected)
                found.add(expected)
                # one given, the rest measured
                part = certificate(a, selected, level, sink, values=values, visible=visible, kappa=kappa)
                agree(part, slow_certificate(level, a.tolist(), chosen, seen, values.tolist(), sink, kappa=kappa))
    assert len(found) > 3


def test_given_intervals_are_not_rounded_inward():
    """Cosines that float32 does not hold, and an unselected source a hair nearer than the sink, the farther selected one:
    however narrow true intervals are, F = 1 may not be certified."""
    kappa, mu, a0, a1 = 0.6, 0.9, 1.0, 4.0
    across = (mu - kappa**2) / math.sqrt(1 - kappa**2)
    values = torch.tensor(
        [[1, 0, 0], [kappa, math.sqrt(1 - kappa**2), 0], [kappa, across, math.sqrt(1 - kappa**2 - across**2)]],
        dtype=torch.float64,
    )
    key = -(a0**2) - 2 * a0 * kappa * a1 - 4e-9  # of the unselected one: a2² - 2 a2 (mu a1 + kappa a0)
    toward = mu * a1 + kappa * a0
    a = torch.tensor([a0, a1, toward - math.sqrt(toward**2 + key)], dtype=torch.float64)
    selected, hair = torch.tensor([True, True, False]), 1e-12
    true = exact(a, values, selected)
    assert true.f.item() < 1
    intervals = {"mu": (mu - hair, mu + hair), "kappa": (kappa - hair, kappa + hair)}
    for level in ("global", "constant_norm"):
        below(certificate(a, selected, level, **intervals, norm_ratio=1.0), true, level)


def test_measured_and_given_are_the_same():
    """Intervals and ratio measured by hand and handed over give what the values themselves give."""
    for seed in range(10):
        weights, values = generic(seed)
        u = [unit(x) for x in values.tolist()]
        mu = slow_interval([dot(u[i], u[k]) for i in range(1, 12) for k in range(i + 1, 12)])
        kappa = slow_interval([dot(u[0], u[i]) for i in range(1, 12)])
        ratio = (values[0].norm() / values[1:].norm(dim=-1).mean()).item()
        for level, a in (("constant_norm", weights), ("global", magnitudes_of(weights, values))):
            for sink in (True, False):
                selected = best(weights, 3)
                one = certificate(a, selected, level, sink, values=values)
                two = certificate(a, selected, level, sink, mu=mu, kappa=kappa, norm_ratio=ratio)
                assert one == two


@pytest.mark.parametrize(("level", "sink"), WAYS)
def test_leading_axes(level, sink):
    """Heads with values of their own, selections in front, masks of their own: what each gives alone."""
    heads, sources, sizes = 3, 10, (1, 2, 4)
    weights, values = (torch.stack(x) for x in zip(*(generic(s, sources) for s in range(heads)), strict=True))
    visible = torch.ones(heads, sources, dtype=torch.bool)
    visible[1, 0] = visible[2, 7:] = False
    a = weights if level == "constant_norm" else magnitudes_of(weights, values)
    selected = torch.stack(
        [torch.stack([best(w, n, m) for w, m in zip(weights, visible, strict=True)]) for n in sizes]
    )  # (size, head, source)
    got = certificate(a, selected, level, sink, values=values, visible=visible, rank=2)
    shared = certificate(a, selected, level, sink, values=values[0], visible=visible, rank=2)
    assert got.f.shape == shared.f.shape == (3, heads)
    for s in range(3):
        for h in range(heads):
            arguments = {"visible": visible[h], "rank": 2}
            alone = certificate(a[h], selected[s, h], level, sink, values=values[h], **arguments)
            agree((x[s, h] for x in got), tuple(x.item() for x in alone))
            alone = certificate(a[h], selected[s, h], level, sink, values=values[0], **arguments)
            agree((x[s, h] for x in shared), tuple(x.item() for x in alone))


# --- certificates on awkward inputs -----------------------------------------------------------------------------------


def below(lower, upper, what=""):
    for name in ("precision", "recall", "f"):
        assert getattr(lower, name).item() <= getattr(upper, name).item(), (what, name)


@settings(max_examples=500, deadline=None)
@given(operation=operations())
def test_true_bounds_are_never_above_the_exact_metrics_and_keep_their_order(operation):
    weights, values, selected, visible = operation
    a, dim = magnitudes_of(weights, values), values.shape[-1]
    true = exact(weights, values, selected, visible)
    found = {}
    for sink in (True, False):
        for level in ("global", "rowwise"):
            found[level, sink] = certificate(a, selected, level, sink, values=values, visible=visible)
        for level in ("sketch", "combined"):
            for rank in sorted({0, 1, (dim + 1) // 2, dim}):
                found[level, sink, rank] = certificate(
                    a, selected, level, sink, values=values, visible=visible, rank=rank
                )
    for name, bound in found.items():
        below(bound, true, name)
        assert bound.f.item() < 1 or true.margin.item() > 0, name
    for sink in (True, False):
        below(found["global", sink], found["rowwise", sink], "global")
        below(found["rowwise", sink], found["combined", sink, 0], "rowwise")
        below(found["sketch", sink, 0], found["combined", sink, 0], "sketch")
    for level in ("global", "rowwise"):
        below(found[level, False], found[level, True], "agnostic")


@settings(max_examples=150, deadline=None)
@given(operation=operations())
def test_the_streamed_bounds_are_never_above_the_streamed_exact_metrics(operation):
    """The kernel's, on the same awkward inputs: top-N sets of one query."""
    weights, values, selected, visible = operation
    levels, _ = theory.every_level(weights[None, None], values, visible[None], (int(selected.sum()),))
    for name, found in zip(theory._NAMES, levels[:, 0, 0, 0], strict=True):
        if name[0] in theory.THEOREMS:
            assert (found[:3] <= levels[0, 0, 0, 0, :3]).all() and found[3] == 1, name
    for name in ("global", "rowwise"):
        less, more = (levels[theory._NAMES.index((name, sink))][0, 0, 0, 2] for sink in ("agnostic", "aware"))
        assert less <= more, name


def test_a_sketch_keeps_its_digits_where_the_sum_lies_in_its_directions():
    """What is left of s_N beyond them is small, and no difference of squares."""
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        tilt, back = 10 ** (-8.5 - torch.rand(1, generator=g).item()), -0.1 * torch.rand(1, generator=g).item()
        values = torch.tensor([[1, 0, 0], [1, tilt, 0], [back, 0, 0], [0, 1, 0]], dtype=torch.float64)
        weights = (torch.tensor([0.47, 0.3, 0.2, 0.1]) + 0.01 * torch.rand(4, generator=g)).double()
        levels, _ = theory.every_level(weights[None, None], values, torch.ones(1, 4, dtype=torch.bool), (3,))
        found = dict(zip(theory._NAMES, levels[:, 0, 0, 0], strict=True))
        for rank in (1, 4):
            for way in ("aware", "agnostic"):
                assert found[f"sketch_{rank}", way][3] == 1
    values[1, 1] = 1.188139667243938e-09
    values[2, 0] = -0.03257223887834004
    weights[0] = 0.4707819864399788
    weights[1:] = torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64)
    levels, _ = theory.every_level(weights[None, None], values, torch.ones(1, 4, dtype=torch.bool), (3,))
    f = dict(zip(theory._NAMES, levels[:, 0, 0, 0, 2].tolist(), strict=True))
    assert f["exact", "none"] == pytest.approx(12 / 17) and f["sketch_1", "aware"] <= 12 / 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_whose_squares_do_not_fit_are_refused(dtype):
    huge = torch.finfo(dtype).max ** 0.5 * 10
    selected = torch.arange(6) < 3
    a = torch.where(selected, 1.0, 0.5).to(dtype)
    assert certificate(a * huge / 1e4, selected, "global", mu=(-1, 1), kappa=(-1, 1)).f < 1
    with pytest.raises(GeomlibError, match=r"squares of these magnitudes are beyond float\d+: divide all by one number"):
        certificate(a * huge, selected, "global", mu=(-1, 1), kappa=(-1, 1))
    weights, values = generic(0, dtype=dtype)
    for measure in (
        lambda: separability(weights[None], values * huge, [2]),
        lambda: theory.every_level(weights[None, None], values * huge, torch.ones(1, 12, dtype=torch.bool), (2,)),
    ):
        with pytest.raises(GeomlibError, match=r"have squares beyond float\d+: divide all by one number"):
            measure()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), sources=st.integers(3, 16), dim=st.integers(2, 8), sink=st.booleans())
def test_a_sketch_of_more_directions_is_never_worse_and_of_all_is_exact(seed, sources, dim, sink):
    weights, values = generic(seed, sources, dim)
    a = magnitudes_of(weights, values)
    for n in sorted({1, 2, sources // 2, sources - 1}):
        selected = best(weights, n)
        for level in ("sketch", "combined"):
            ladder = [certificate(a, selected, level, sink, values=values, rank=r) for r in range(dim + 1)]
            for less, more in pairwise(ladder):
                below(less, more, level)
            true = exact(weights, values, selected)
            agree(ladder[-1], (true.precision.item(), true.recall.item(), true.f.item()))


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["random", "common direction", "duplicated", "collinear", "opposite", "equal"]),
    weights=st.sampled_from(sorted(WEIGHTS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 10**6),
    sources=st.integers(3, 12),
    dim=st.integers(1, 6),
    ratio=st.floats(0.01, 3),
    norm=st.sampled_from([0.125, 1.0, 7.0]),
    given_ratio=st.booleans(),
)
def test_the_papers_model_is_a_bound_where_norms_are_constant(
    kind, weights, dtype, seed, sources, dim, ratio, norm, given_ratio
):
    g = torch.Generator().manual_seed(seed)
    values = torch.nn.functional.normalize(VALUES[kind](g, sources, dim).double(), dim=-1) * norm
    values[0] *= ratio
    weights, values = WEIGHTS[weights](g, sources).to(dtype), values.to(dtype)
    for n in (1, 2, sources - 1):
        selected = best(weights, n)
        bound = certificate(
            weights, selected, "constant_norm", values=values, norm_ratio=ratio if given_ratio else None
        )
        below(bound, exact(weights, values, selected))
    values[0] = torch.nn.functional.normalize(values[0].double(), dim=0).to(dtype) * norm  # the sink is like the others
    for n in (1, 2, sources - 1):
        selected = best(weights, n)
        below(certificate(weights, selected, "constant_norm", False, values=values), exact(weights, values, selected))


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("first", [0.0, 5.0])
def test_the_papers_model_is_a_bound_where_the_norm_is_zero(sink, first):
    """Of all others, or of all: no ratio of norms says so."""
    if first and not sink:
        return  # then norms are not all the same
    weights = torch.tensor([[0.0, 0.125, 0.25], [0.5, 0.125, 0.25]], dtype=torch.double)
    values = torch.zeros(3, 2, dtype=torch.double)
    values[0, 0] = first
    for n in (1, 2):
        exact = separability(weights, values, [n], ranking="contribution")
        chosen = (weights * values.norm(dim=-1)).sort(dim=-1, descending=True, stable=True).indices[:, :n]
        selected = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, chosen, True)
        promised = certificate(weights, selected, "constant_norm", sink, values=values)
        for name in ("precision", "recall", "f"):
            assert (getattr(promised, name) <= getattr(exact, name)[..., 0]).all(), (n, name)


def test_constant_norm_without_a_sink_takes_all_norms_to_be_one():
    weights, values = generic(3)
    values = torch.nn.functional.normalize(values, dim=-1)
    for n in (2, 4):
        selected = best(weights, n)
        one = certificate(weights, selected, "constant_norm", False, values=values)
        two = certificate(magnitudes_of(weights, values), selected, "global", False, values=values)
        assert one == two


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), sources=st.integers(3, 14), dim=st.integers(2, 6))
@pytest.mark.parametrize(("level", "sink"), WAYS)
def test_invariances(level, sink, seed, sources, dim):
    g = torch.Generator().manual_seed(seed)
    weights, values = generic(seed, sources, dim)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64)).Q
    shuffle = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(sources - 1, generator=g)])
    selected = best(weights, 1 + seed % (sources - 1))

    def found(weights, values, selected=selected):
        a = weights if level == "constant_norm" else magnitudes_of(weights, values)
        return certificate(a, selected, level, sink, values=values, rank=1)

    expected = found(weights, values)
    # A power of two rounds nothing, so these must agree to the last bit; the others hold away from ties.
    assert found(weights, values * 2.0**-9) == expected
    assert found(weights, values * 2.0**11) == expected
    assert found(weights * 0.37, values) == expected
    assert found(weights, values @ rotation) == expected
    assert found(weights[shuffle], values[shuffle], selected[shuffle]) == expected


@pytest.mark.parametrize("sink", [True, False])
def test_directions_of_a_sketch(sink):
    """Orthonormal, nested, and the ones that leave least: of all sets of that size, or of those that hold v_0."""
    _, values = generic(5, sources=20, dim=6)
    whole = sketch_directions(values, 6, sink)
    torch.testing.assert_close(whole @ whole.T, torch.eye(6, dtype=torch.float64))
    for rank in range(7):
        assert torch.equal(sketch_directions(values, rank, sink), whole[:rank])
    if sink:
        assert abs(dot(whole[0].tolist(), unit(values[0].tolist()))) == pytest.approx(1, abs=1e-12)
    units = torch.nn.functional.normalize(values, dim=-1)
    for rank in range(1, 6):
        slow_ = torch.tensor(slow_directions(values.tolist(), rank, sink), dtype=torch.float64)
        torch.testing.assert_close(whole[:rank].T @ whole[:rank], slow_.T @ slow_)
        left = (units - units @ whole[:rank].T @ whole[:rank]).square().sum()
        for seed in range(5):
            other = torch.randn(rank, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            if sink:
                other[0] = values[0]
            other = torch.linalg.qr(other.T).Q.T
            assert left <= (units - units @ other.T @ other).square().sum()


def test_a_sink_without_direction_leaves_its_place_to_a_principal_one():
    _, values = generic(6, sources=20, dim=6)
    values[0] = 0
    for rank in (1, 2, 3):
        with_sink, without = (sketch_directions(values, rank, sink) for sink in (True, False))
        torch.testing.assert_close(with_sink.T @ with_sink, without.T @ without)


# --- what is refused --------------------------------------------------------------------------------------------------

CHOSEN = torch.tensor([True, True, False, False])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"level": "exact"}, "unknown level 'exact': give one of constant_norm, global, rowwise, sketch, combined"),
        ({"selected": CHOSEN.double()}, "selected must be boolean with 4 sources"),
        ({"selected": CHOSEN[:3]}, "selected must be boolean with 4 sources"),
        ({"visible": torch.ones(4)}, "visible must be boolean with 4 sources"),
        ({"visible": torch.ones(5, dtype=torch.bool)}, "visible must be boolean with 4 sources"),
        ({"values": torch.ones(3, 2)}, r"values \(3, 2\) do not fit 4 magnitudes"),
        ({"values": torch.ones(4)}, "values must be a tensor of"),
        ({"visible": torch.tensor([True, False, True, True])}, "one or more selected and one or more unselected"),
        ({"selected": torch.zeros(4, dtype=torch.bool)}, "one or more selected and one or more unselected"),
        ({"selected": torch.ones(4, dtype=torch.bool)}, "one or more selected and one or more unselected"),
        ({"visible": CHOSEN}, "one or more selected and one or more unselected"),
        ({"magnitudes": torch.tensor([0.1, NAN, 0.1, 0.1])}, "magnitudes must be finite and not negative"),
        ({"magnitudes": torch.tensor([0.1, math.inf, 0.1, 0.1])}, "magnitudes must be finite and not negative"),
        ({"magnitudes": torch.tensor([0.1, -0.1, 0.1, 0.1])}, "magnitudes must be finite and not negative"),
        ({"values": None}, r"rowwise needs values\."),
        ({"level": "sketch", "values": None, "mu": (0, 0), "kappa": (0, 0)}, r"sketch needs values\."),
        ({"level": "combined", "values": None, "mu": (0, 0), "kappa": (0, 0)}, r"combined needs values\."),
        ({"level": "global", "values": None, "mu": (0, 0)}, "global needs values, or mu and kappa"),
        ({"level": "global", "values": None, "kappa": (0, 0)}, "global needs values, or mu and kappa"),
        ({"level": "constant_norm", "values": None, "norm_ratio": 1.0}, "constant_norm needs values, or mu and kappa"),
        (
            {"level": "constant_norm", "values": None, "mu": (0, 0), "kappa": (0, 0)},
            "constant_norm needs values, or a norm_ratio beside mu and kappa",
        ),
        ({"level": "sketch", "rank": -1}, "rank -1 is not usable: give a whole number from 0"),
        ({"level": "combined", "rank": 3}, "rank 3 is not usable: give a whole number from 0"),
        ({"level": "sketch", "rank": 1.0}, "rank 1.0 is not usable: give a whole number from 0"),
        ({"values": torch.tensor([[1.0, NAN]]).expand(4, 2)}, "values hold NaN or infinite numbers"),
        ({"level": "sketch", "values": torch.full((4, 2), math.inf)}, "values hold NaN or infinite numbers"),
        ({"values": torch.ones(4, 0)}, "values must be a tensor of"),
        ({"values": torch.ones(3, 4, 2), "magnitudes": torch.ones(2, 4)}, "give leading axes that broadcast"),
        ({"level": "global", "mu": (0.1, -0.1)}, r"mu = \(0.1, -0.1\) is no interval"),
        ({"level": "global", "kappa": (NAN, 0.1)}, r"kappa = \(nan, 0.1\) is no interval"),
        ({"level": "global", "mu": (0.1,)}, r"mu = \(0.1,\) is no interval"),
        ({"level": "global", "tail": 0.5}, "tail = 0.5 is not usable"),
        ({"level": "global", "tail": NAN}, "tail = nan is not usable"),
        ({"level": "constant_norm", "norm_ratio": -1.0}, "norm_ratio = -1.0 is not usable"),
        ({"level": "constant_norm", "norm_ratio": NAN}, "norm_ratio = nan is not usable"),
        ({"sink": "agnostic"}, "sink = 'agnostic' is not usable"),
        ({"magnitudes": [1.0] * 4}, "magnitudes must be a tensor of"),
        ({"selected": [True, False]}, "selected must be a tensor of"),
        ({"selected": torch.tensor(True)}, "selected must be a tensor of"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, says):
    arguments = {"magnitudes": torch.ones(4), "selected": CHOSEN, "level": "rowwise", "values": torch.ones(4, 2)}
    certificate(**arguments)
    with pytest.raises(GeomlibError, match=says) as caught:
        certificate(**arguments | change)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"magnitudes": torch.tensor([0.1, NAN, 0.1, 0.1])}, "magnitudes must be finite and not negative"),
        ({"magnitudes": torch.tensor([0.1, -0.1, 0.1, 0.1])}, "magnitudes must be finite and not negative"),
        ({"selected": torch.ones(4, dtype=torch.bool)}, "one or more selected and one or more unselected"),
        ({"visible": torch.tensor([True, False, True, True])}, "one or more selected and one or more unselected"),
        ({"selected": CHOSEN.int()}, "selected must be boolean"),
        ({"mu_mean": NAN}, "mu_mean must be finite"),
        ({"mu_sd": -0.1}, "mu_sd must be finite and not negative"),
        ({"kappa_mean": 0.1}, "give kappa_mean and kappa_sd together"),
        ({"kappa_mean": NAN, "kappa_sd": 0.1}, "kappa_mean must be finite"),
        ({"draws": 1}, "two draws or more"),
        ({"draws": 2.5}, "two draws or more"),
    ],
)
def test_a_prediction_from_bad_input_is_refused(change, says):
    arguments = {"magnitudes": torch.ones(4), "selected": CHOSEN, "mu_mean": 0.1, "mu_sd": 0.2}
    gaussian_prediction(**arguments)
    with pytest.raises(GeomlibError, match=says):
        gaussian_prediction(**arguments | change)


@pytest.mark.parametrize("call", [
    lambda: sketch_directions(torch.ones(3, 2), -1), lambda: sketch_directions(torch.ones(3, 2), 3),
    lambda: sketch_directions(torch.full((3, 2), NAN), 1), lambda: coherence([1.0, 2.0]),
    lambda: coherence(torch.full((4, 2), NAN)), lambda: coherence(torch.ones(4, 2), torch.ones(3, dtype=torch.bool)),
    lambda: coherence(torch.ones(4, 2), torch.ones(4)),
])  # fmt: skip
def test_other_bad_input_is_refused(call):
    with pytest.raises(GeomlibError):
        call()


def test_constant_norm_without_sink_needs_no_ratio():
    weights = torch.tensor([0.7, 0.2, 0.06, 0.04])
    got = certificate(weights, CHOSEN, "constant_norm", False, mu=(0.0, 0.0), kappa=(0.0, 0.0))
    assert got.f.item() == 1


# --- dimension --------------------------------------------------------------------------------------------------------


def test_spherical_coherence_is_its_formula():
    assert spherical_coherence(128, 50, 0.05) == pytest.approx(math.sqrt(2 * math.log(50 * 50 / 0.05) / 128))
    assert spherical_coherence(1000, 7) == pytest.approx(math.sqrt(2 * math.log(49 / 0.05) / 1000))
    assert spherical_coherence(1, 2) == spherical_coherence(20, 10**6) == 1
    assert spherical_coherence(1000, 1, 0.5) == pytest.approx(math.sqrt(2 * math.log(2) / 1000))


@pytest.mark.parametrize(
    ("dim", "sources", "delta"), [(0, 5, 0.05), (5, 0, 0.05), (5, 5, 0.0), (5, 5, 1.0), (5, 5, -1), (5, 5, NAN)]
)
def test_spherical_coherence_refuses(dim, sources, delta):
    with pytest.raises(GeomlibError, match="needs dim and sources of 1 or more and delta between 0 and 1") as caught:
        spherical_coherence(dim, sources, delta)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dim", "sources"), [(128, 50), (64, 200), (40, 20)])
@pytest.mark.parametrize("delta", [0.05, 0.5])
def test_spherical_coherence_holds_on_the_sphere_and_is_not_idle(dim, sources, delta):
    g = torch.Generator().manual_seed(dim)
    u = torch.nn.functional.normalize(torch.randn(200, sources, dim, generator=g, dtype=torch.float64), dim=-1)
    largest = (u @ u.transpose(1, 2)).abs().masked_fill(torch.eye(sources, dtype=torch.bool), 0).amax((1, 2))
    bound = spherical_coherence(dim, sources, delta)
    share = (largest > bound).double().mean().item()
    assert share <= delta + 3 * math.sqrt(delta * (1 - delta) / 200)
    assert largest.median().item() > 0.5 * bound
    assert largest.max().item() > 0.7 * bound


def slow_coherence(v, seen) -> tuple[float, ...]:
    u, norm = [unit(x) for x in v], [math.sqrt(dot(x, x)) for x in v]
    others = [i for i in seen if i]
    pairs = [dot(u[i], u[k]) for i in others for k in others if i < k]
    rows = [sum(dot(u[i], u[k]) for k in others if k != i) / (len(others) - 1) for i in others]
    kappa = [dot(u[0], u[i]) for i in others] if 0 in seen else [NAN]
    norms = [norm[i] for i in others]

    def mean(x):
        return sum(x) / len(x)

    def sd(x):
        return math.sqrt(sum((e - mean(x)) ** 2 for e in x) / len(x))

    ratio = norm[0] / mean(norms) if 0 in seen else NAN
    return (
        mean(pairs), sd(pairs), sd(rows), mean(kappa), sd(kappa), min(pairs), max(pairs), min(kappa), max(kappa), ratio,
        sd(norms) / mean(norms),
    )  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coherence_is_the_slow_loops(mask, dtype):
    visible = MASKS[mask]
    _, values = generic(2, dtype=dtype)
    got = coherence(values, visible)
    expected = slow_coherence(values.double().tolist(), visible.nonzero().flatten().tolist())
    assert tuple(x.item() for x in got) == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
    hidden = [name for name in Coherence._fields if getattr(got, name).isnan()]
    kappas = ["kappa_mean", "kappa_sd", "kappa_low", "kappa_high", "norm_ratio"]
    assert hidden == ([] if visible[0] else kappas)
    if mask == "all":
        assert coherence(values) == got


def test_coherence_of_several_heads():
    values = torch.stack([generic(s)[1] for s in range(3)])
    visible = torch.stack([MASKS["all"], MASKS["no sink"], MASKS["holes"]])
    for fields in ((coherence(values, visible), visible), (coherence(values), [None] * 3)):
        got, masks = fields
        assert all(x.shape == (3,) and x.dtype == torch.float64 for x in got)
        for h in range(3):
            alone = coherence(values[h], masks[h])
            assert [x[h].item() for x in got] == pytest.approx([x.item() for x in alone], nan_ok=True, rel=1e-9)


def test_coherence_of_planted_directions():
    """Right angles among the others, the sink opposite to one of them, lengths 1, 2 and 3."""
    values = torch.tensor([[-4.0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 3]])
    got = coherence(values)
    assert [got.mu_mean.item(), got.mu_sd.item(), got.mu_row_sd.item()] == [0, 0, 0]
    assert got.kappa_mean.item() == pytest.approx(-1 / 3) and got.kappa_sd.item() == pytest.approx(math.sqrt(2) / 3)
    assert (got.kappa_low.item(), got.kappa_high.item()) == (-1, 0)
    assert got.norm_ratio.item() == 2 and got.norm_cv.item() == pytest.approx(math.sqrt(2 / 3) / 2)


@pytest.mark.parametrize("visible", [None, torch.tensor([True, False, True])])
def test_coherence_of_too_few_is_refused(visible):
    with pytest.raises(GeomlibError, match="coherence needs two visible sources or more besides source 0") as caught:
        coherence(torch.ones(2 if visible is None else 3, 4), visible)
    assert "\n" not in str(caught.value)


# --- the Gaussian model -----------------------------------------------------------------------------------------------


def power_law(sources, exponent=1.0):
    weights = torch.arange(1, sources + 1, dtype=torch.float64) ** -exponent
    return weights / weights.sum()


@pytest.mark.parametrize("mask", ["all", "no sink"])
def test_without_spread_the_prediction_is_the_f_of_the_mean_cosines(mask):
    visible, found = MASKS[mask], set()
    seen = visible.nonzero().flatten().tolist()
    for seed in range(8):
        weights, values = generic(seed)
        a = magnitudes_of(weights, values)
        for n in (1, 2, 4, 8):
            selected = best(weights, n, visible)
            chosen = selected.nonzero().flatten().tolist()
            for mu, kappa in ((0.3, -0.4), (0.0, 0.2), (-0.05, -0.9)):
                got = gaussian_prediction(a, selected, mu, 0.0, 0.0, kappa, 0.0, visible=visible)
                expected = slow_certificate("global", a.tolist(), chosen, seen, mu=(mu, mu), kappa=(kappa, kappa))
                agree(got[:3], expected)
                assert got.standard_error.item() == pytest.approx(0, abs=1e-15)
                found.add(expected)
    assert len(found) > 4


def test_predictions_are_seeded():
    a, selected = power_law(30), best(power_law(30), 4)
    first, again, other = (gaussian_prediction(a, selected, 0.1, 0.2, 0.05, -0.2, 0.1, seed=s) for s in (3, 3, 4))
    assert first == again and first.f != other.f
    assert all(0 <= x.item() <= 1 for x in first) and first.f.dtype == torch.float64


def slow_draw(a, chosen, mu, mu_sd, row_sd, kappa, kappa_sd, g) -> float:
    """F of one draw of all cosines, pair by pair (each key has its own draws of e, as the model has it)."""
    keys = []
    for i in range(len(a)):
        u, along = torch.randn((), generator=g).item() * row_sd, 0.0
        for k in chosen:
            if k != i:
                z = torch.randn((), generator=g).item()
                if 0 in (i, k):
                    along += a[k] * (kappa + kappa_sd * z)
                else:
                    along += a[k] * (mu + u + math.sqrt(mu_sd**2 - row_sd**2) * z)
        keys.append((-1 if i in chosen else 1) * a[i] ** 2 - 2 * a[i] * along)
    top, bottom = max(keys[i] for i in chosen), min(k for i, k in enumerate(keys) if i not in chosen)
    fp = sum(k <= top for i, k in enumerate(keys) if i not in chosen)
    return counted(len(chosen), fp, sum(keys[i] >= bottom for i in chosen))[2]


@pytest.mark.parametrize("first", [True, False])
def test_the_prediction_is_the_mean_of_pairwise_draws(first):
    """With every parameter in play; the sink among the selected, and not."""
    a = [0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
    chosen = [0, 1, 2] if first else [1, 2, 3]
    parameters = (0.15, 0.3, 0.2, -0.4, 0.25)
    g = torch.Generator().manual_seed(0)
    slow_ = torch.tensor([slow_draw(a, chosen, *parameters, g) for _ in range(3000)], dtype=torch.float64)
    selected = torch.tensor([i in chosen for i in range(len(a))])
    got = gaussian_prediction(torch.tensor(a), selected, *parameters, draws=20000)
    error = math.hypot(got.standard_error.item(), slow_.std().item() / 3000**0.5)
    assert error < 0.01 and abs(got.f.item() - slow_.mean().item()) < 3.5 * error


def test_without_kappa_the_sink_is_like_the_others():
    """So it does not matter which source stands first."""
    a = torch.tensor([5.0, 4, 3, 2, 1, 0.5, 0.4, 0.3])
    turned = a.flip(0)
    for row_sd in (0.0, 0.2, 0.3):
        one = gaussian_prediction(a, a >= 3, 0.2, 0.3, row_sd, draws=4000)
        two = gaussian_prediction(turned, turned >= 3, 0.2, 0.3, row_sd, draws=4000)
        error = math.hypot(one.standard_error.item(), two.standard_error.item())
        assert abs(one.f.item() - two.f.item()) < 4 * error, row_sd


def test_a_hidden_sink_changes_nothing():
    a, visible = power_law(20), torch.arange(20) > 0
    selected = best(a, 4, visible)
    nan = torch.tensor(NAN, dtype=torch.float64)  # what `coherence` says of a hidden sink
    one, two = (gaussian_prediction(a, selected, 0.1, 0.2, 0.1, *k, visible=visible) for k in ((nan, nan), (0.5, 0.3)))
    assert one == two and 0 < one.f < 1


@pytest.mark.parametrize("sources", [31, 1001])
def test_selections_given_together_share_their_draws(sources):
    """Whatever their number: the draws depend on the shape of the magnitudes alone."""
    a = torch.stack([power_law(sources), power_law(sources, 0.5)])
    sizes = (2, 3, 5, 8)
    selected = torch.stack([torch.stack([best(x, n) for x in a]) for n in sizes])
    mu_mean, mu_sd = torch.tensor([0.1, 0.2]).double(), torch.tensor([0.2, 0.1]).double()
    together = gaussian_prediction(a, selected, mu_mean, mu_sd, draws=40)
    many = gaussian_prediction(a, selected.repeat(40, 1, 1), mu_mean, mu_sd, draws=40)
    assert together.f.shape == (4, 2)
    for i in range(4):
        alone = gaussian_prediction(a, selected[i], mu_mean, mu_sd, draws=40)
        for field in ("precision", "recall", "f", "standard_error"):
            expected = getattr(alone, field)
            torch.testing.assert_close(getattr(together, field)[i], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(getattr(many, field)[i], expected, rtol=1e-12, atol=1e-12)


def test_the_standard_error_is_that_of_the_mean():
    a = power_law(40)
    selected = torch.stack([best(a, n) for n in (2, 3, 4, 6, 8, 12)])
    few, many = (gaussian_prediction(a, selected, 0.0, 0.125, draws=d).standard_error for d in (40, 1000))
    assert 0.8 * 5 < (few / many).mean().item() < 1.2 * 5
    repeats = torch.stack([gaussian_prediction(a, selected, 0.0, 0.125, seed=s).f for s in range(100)])
    assert 0.8 < (repeats.std(0) / few).mean().item() < 1.25


def test_the_prediction_is_right_on_the_sphere():
    """Directions uniform in R^64 and no sink effect: what the model is made for."""
    sources, dim, repeats, sizes = 60, 64, 1000, (2, 4, 8, 16)
    g = torch.Generator().manual_seed(1)
    for exponent in (0.7, 1.2):
        weights = power_law(sources, exponent)
        values = torch.nn.functional.normalize(
            torch.randn(repeats, sources, dim, generator=g, dtype=torch.float64), dim=-1
        )
        f = separability(weights.expand(repeats, 1, -1), values, sizes).f[:, 0]
        selected = torch.stack([best(weights, n) for n in sizes])
        guess = gaussian_prediction(weights, selected, 0.0, dim**-0.5, draws=400)
        error = torch.hypot(f.std(0) / repeats**0.5, guess.standard_error)
        assert (error < 0.025).all()
        assert ((f.mean(0) - guess.f).abs() < 3 * error + 0.03).all(), (f.mean(0), guess.f)
        assert guess.f.min() < 0.9  # not all of it trivial


@pytest.mark.parametrize("draws", [1, 0, -3])
def test_a_single_draw_is_refused(draws):
    with pytest.raises(GeomlibError, match=r"a standard error needs two draws or more\.") as caught:
        gaussian_prediction(torch.ones(4), CHOSEN, 0.0, 0.1, draws=draws)
    assert "\n" not in str(caught.value)
