"""The metrics against exact cases, an obvious loop, planted geometry and their own invariances."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomlib import geometry
from geomlib.errors import GeomlibError
from geomlib.geometry import Separability, separability

CASES = json.loads((Path(__file__).parent / "cases" / "geometry.json").read_text())


@pytest.fixture(params=["kernel", "torch"])
def engine(request, monkeypatch):
    """Both ways of computing: the fused CPU kernel, and plain torch as on any other device."""
    if request.param == "torch":
        monkeypatch.setattr(geometry, "_on_cpu", geometry._in_torch)
    return request.param


def slow(weights, values, n, ranking="attention", distance="euclidean", visible=None, exclude=None, directions=None):
    """THEORY section 2 for one query, word by word, in Python floats. weights (source,), values (source, dim)."""
    alpha, v = weights.double().tolist(), values.double().tolist()
    norm = [math.sqrt(sum(x * x for x in row)) for row in v]
    keep = [i for i in range(len(alpha)) if (visible is None or visible[i]) and (exclude is None or not exclude[i])]
    if n >= len(keep):
        return None
    y = []
    for i in range(len(alpha)):
        j = i if directions is None else int(directions[i])
        unit = [x / norm[j] if norm[j] else 0.0 for x in v[j]]
        y.append([alpha[i] * (x if directions is None else norm[i] * u) for x, u in zip(v[i], unit, strict=True)])
    if isinstance(ranking, torch.Tensor):
        score = ranking.double().tolist()
    else:
        score = alpha if ranking == "attention" else [a * r for a, r in zip(alpha, norm, strict=True)]
    best = sorted(keep, key=lambda i: (-score[i], i))
    chosen, rest = best[:n], best[n:]
    s = [sum(y[i][d] for i in chosen) for d in range(len(v[0]))]

    def far(i):
        if distance == "euclidean":
            return math.dist(y[i], s)
        dot = sum(a * b for a, b in zip(y[i], s, strict=True))
        return 1 - dot / (math.hypot(*y[i]) * math.hypot(*s) + 1e-12)

    d = {i: far(i) for i in keep}
    rho_max, rho_min = max(d[i] for i in chosen), min(d[j] for j in rest)
    fp, fn = sum(d[j] <= rho_max for j in rest), sum(d[i] >= rho_min for i in chosen)
    p, r = n / (n + fp), (n - fn) / n
    inversions = sum(d[j] <= d[i] for i in chosen for j in rest)
    far, near = max(chosen, key=lambda i: d[i]), min(rest, key=lambda j: d[j])
    return Separability(
        p,
        r,
        2 * p * r / (p + r) if p + r else 0.0,
        rho_min - rho_max,
        inversions,
        fp,
        fn,
        rho_min,
        rho_max,
        far,
        near,
        math.nan,
    )


def planted(queries, sources, dim, seed, dtype=torch.float64):
    """Attention that falls off, values with a common direction: neither separable nor hopeless."""
    g = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(queries, sources, generator=g, dtype=torch.float64)
    values = torch.randn(sources, dim, generator=g, dtype=torch.float64) + 0.5 * torch.randn(dim, generator=g).double()
    return scores.softmax(-1).to(dtype), values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']}-{len(c['alpha'])}-{c['n']}")
def test_exact_cases(case, dtype, engine):
    alpha, v = torch.tensor([case["alpha"]], dtype=dtype), torch.tensor(case["v"], dtype=dtype)
    sink = torch.zeros(len(v), dtype=torch.bool)
    sink[0] = True
    for expected, exclude in ((case["expected"], None), (case["expected_without_sink"], sink)):
        if expected is None:
            continue
        got = separability(alpha, v, [case["n"]], case["ranking"], exclude=exclude)
        for name in ("false_positives", "false_negatives", "inversions"):
            assert getattr(got, name).item() == expected[name], name
        for name in ("precision", "recall", "f"):
            assert getattr(got, name).item() == pytest.approx(expected[name], abs=1e-15), name
        for name in ("rho_min", "rho_max"):
            assert getattr(got, name).item() == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("ranking", ["attention", "contribution", "scores"])
@pytest.mark.parametrize("masks", ["none", "window", "window and exclude", "directions"])
def test_agrees_with_the_loop(engine, distance, ranking, masks):
    queries, sources = 5, 70  # more than one tile of the kernel
    weights, values = planted(queries, sources, dim=7, seed=1)
    visible = exclude = directions = None
    if masks.startswith("window"):
        position = torch.arange(queries)[:, None] + 62
        visible = (torch.arange(sources) <= position) & (torch.arange(sources) > position - 50)
        visible[0] = torch.arange(sources) < 3  # too short for most sizes
        weights = weights * visible
    if "exclude" in masks:
        exclude = torch.arange(sources) == 30
    if masks == "directions":
        directions = torch.stack(
            [torch.randperm(sources, generator=torch.Generator().manual_seed(q)) for q in range(queries)]
        )
    scores = torch.rand(queries, sources, generator=torch.Generator().manual_seed(9)).double()
    rule = scores if ranking == "scores" else ranking
    sizes = [1, 2, 3, 8, 16, 49, 69, 70, 200]
    got = separability(weights, values, sizes, rule, distance, visible, exclude, directions)
    for q in range(queries):
        for c, n in enumerate(sizes):
            expected = slow(
                weights[q], values, n, scores[q] if ranking == "scores" else ranking, distance,
                None if visible is None else visible[q], exclude, None if directions is None else directions[q],
            )  # fmt: skip
            found = Separability(*(x[q, c].item() for x in got))
            if expected is None:
                assert all(math.isnan(x) for x in found)
            else:
                assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def test_float32_kernel_agrees_with_torch_and_float64(monkeypatch):
    weights, values = planted(32, 300, dim=64, seed=2)
    exact = separability(weights, values, distance=("euclidean", "cosine"))
    single = separability(weights.float(), values.float(), distance=("euclidean", "cosine"))
    half = separability(weights.bfloat16(), values.bfloat16())
    monkeypatch.setattr(geometry, "_on_cpu", geometry._in_torch)
    in_torch = separability(weights.float(), values.float(), distance=("euclidean", "cosine"))
    for a, b, c in zip(exact, single, in_torch, strict=True):
        assert (a.isnan() == b.isnan()).all() and (a.isnan() == c.isnan()).all()
    # a near-tie may fall either way in float32, but not often, and not by much
    for other in (single, in_torch):
        assert ((exact.f - other.f).abs() > 1e-9).double().mean() < 0.02
        torch.testing.assert_close(exact.f, other.f, rtol=0, atol=0.02, equal_nan=True)
        torch.testing.assert_close(exact.rho_max, other.rho_max, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(exact.rho_min, other.rho_min, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert half.f.dtype == torch.float64 and half.f[~half.f.isnan()].max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_need_no_rounding_tie_as_they_should(engine, dtype):
    """Small whole numbers: a root such as that of 5, squared again, is not 5, and a tie would be lost."""
    g = torch.Generator().manual_seed(0)
    ties = 0
    for _ in range(150):
        values = torch.randint(-2, 3, (9, 2), generator=g)
        weights = torch.randint(0, 4, (9,), generator=g) / 8
        for n in (1, 2, 4, 8):
            y = (weights[:, None] * values).double()
            order = sorted(range(9), key=lambda i: (-weights[i].item(), i))
            keys = (y.square().sum(-1) - 2 * y @ y[order[:n]].sum(0)).tolist()  # exact
            chosen, rest = [keys[i] for i in order[:n]], [keys[i] for i in order[n:]]
            counts = (
                sum(k <= max(chosen) for k in rest), sum(k >= min(rest) for k in chosen),
                sum(j <= i for i in chosen for j in rest),
            )  # fmt: skip
            ties += max(chosen) in rest or min(rest) in chosen
            found = separability(weights[None].to(dtype), values.to(dtype), [n])
            got = (found.false_positives.item(), found.false_negatives.item(), found.inversions.item())
            assert got == counts
    assert ties > 100


def test_ties_go_to_the_lower_index(engine):
    # equal weights: S must be the first N; the values make only that choice separable
    weights = torch.full((1, 6), 1 / 6)
    values = torch.tensor([[1.0, 0], [1, 0.1], [1, -0.1], [-1, 0], [-1, 0.1], [-1, -0.1]])
    assert separability(weights, values, [3]).f.item() == 1.0
    assert separability(weights, values.flip(0), [3]).f.item() == 1.0
    assert separability(weights, values[[0, 3, 1, 4, 2, 5]], [3]).f.item() < 1.0


def test_one_source_says_nothing_unless_duplicated(engine):
    weights, values = planted(4, 20, dim=5, seed=3)
    random_scores = torch.rand(4, 20, generator=torch.Generator().manual_seed(0))
    for rule in ("attention", "contribution", random_scores):
        got = separability(weights, values, [1], rule)
        assert (got.f == 1).all() and (got.rho_max < 1e-6 * got.rho_min).all() and (got.margin > 0).all()
    weights, values = torch.tensor([[0.4, 0.4, 0.2]]), torch.tensor([[1.0, 2], [1, 2], [0, 1]])
    got = separability(weights, values, [1])
    assert got.precision.item() == 0.5 and got.recall.item() == 0.0 and got.f.item() == 0.0 and got.margin.item() == 0.0


def test_separated_clusters_give_one_and_a_swap_does_not(engine):
    g = torch.Generator().manual_seed(4)
    values = torch.cat([torch.randn(8, 6, generator=g) * 0.01 + 1, torch.randn(24, 6, generator=g) * 0.01 - 1])
    weights = torch.cat([torch.full((8,), 0.1), torch.full((24,), 0.2 / 24)])[None]
    got = separability(weights, values, [8])
    assert got.f.item() == 1.0 and got.margin.item() > 0 and got.inversions.item() == 0
    weights[0, 3], weights[0, 20] = weights[0, 20].item(), weights[0, 3].item()  # a selected source from the other side
    assert separability(weights, values, [8]).f.item() < 1.0


def test_a_visible_source_of_weight_zero_counts_and_an_invisible_one_does_not(engine):
    weights, values = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[2.0], [-2.0], [1.0], [3.0]])
    # s = 0 and both selected lie at distance 1; a source of weight zero sits on s
    assert separability(weights, values, [2]).false_positives.item() == 2
    seen = torch.tensor([[True, True, True, False]])
    assert separability(weights, values, [2], visible=seen).false_positives.item() == 1
    assert separability(weights, values, [2], visible=seen, exclude=~seen[0] | (torch.arange(4) == 2)).f.isnan().all()


def test_excluding_is_the_same_as_removing(engine):
    weights, values = planted(6, 40, dim=8, seed=5)
    keep = torch.arange(40) != 0
    got, less = separability(weights, values, exclude=~keep), separability(weights[:, keep], values[keep])
    for name, a, b in zip(Separability._fields, got, less, strict=True):
        torch.testing.assert_close(a, b + 1 if name in ("farthest", "nearest") else b, equal_nan=True)


@pytest.mark.parametrize("ranking", ["attention", "contribution", "scores"])
@pytest.mark.parametrize("without", [0, 7, 39])
@pytest.mark.parametrize("ties", [False, True])
def test_without_a_source_is_the_same_as_excluding_it(ranking, without, ties, engine):
    weights, values = planted(40, 40, dim=8, seed=5)
    visible = torch.ones(40, 40, dtype=torch.bool).tril()
    visible[20:, 3] = False  # a hole
    visible[30:, :8] = False  # a window
    weights = (weights * 4).round() / 4 if ties else weights
    rule = torch.rand(40, 40, generator=torch.Generator().manual_seed(9)) if ranking == "scores" else ranking
    sizes, kinds = [1, 2, 5, 8, 31, 32], ("euclidean", "cosine")
    common = {"sizes": sizes, "ranking": rule, "distance": kinds, "visible": visible}
    got = separability(weights, values, without=without, **common)
    expected = separability(weights, values, exclude=torch.arange(40) == without, **common)
    torch.testing.assert_close(got.f_without, expected.f, rtol=1e-12, atol=0, equal_nan=True)
    for name, a, b in zip(Separability._fields, got, separability(weights, values, **common), strict=True):
        if name != "f_without":  # trying that changes nothing else
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_each_row_may_leave_out_another_source(distance, engine):
    weights, values = planted(6, 40, dim=8, seed=5)
    stacked = torch.stack([weights, weights.flip(0)])
    left_out = torch.tensor([[0, 3, -1, 39, 0, 17], [5, -1, 0, 0, 1, 2]])
    visible = torch.arange(40) < torch.tensor([[40], [40], [39], [40], [9], [9]])
    got = separability(stacked, values, [2, 7, 8, 38], distance=distance, visible=visible, exclude=left_out)
    for b, row in enumerate(left_out.tolist()):
        for q, source in enumerate(row):
            mask = torch.arange(40) == source
            seen = visible[q : q + 1]
            alone = separability(
                stacked[b, q : q + 1], values, [2, 7, 8, 38], distance=distance, visible=seen, exclude=mask
            )
            for a, expected in zip(got, alone, strict=True):
                torch.testing.assert_close(a[b, q], expected[0], equal_nan=True)
    assert got.f[0, 4].isnan().tolist() == [False, False, True, True]  # 8 of 9 are left


def test_counts_only_are_the_same_counts(engine):
    weights, values = planted(6, 40, dim=8, seed=5)
    kinds = ("euclidean", "cosine")
    whole, counts = (separability(weights, values, distance=kinds, counts_only=only) for only in (False, True))
    for name in Separability._fields:
        a, b = getattr(whole, name), getattr(counts, name)
        if name in ("precision", "recall", "f", "false_positives", "false_negatives"):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert b.isnan().all() and not (a.isnan().all() and name != "f_without")


def test_leading_axes_and_order_of_sizes(engine):
    weights, values = planted(6, 40, dim=8, seed=6)
    stacked = torch.stack([weights, weights.flip(0)])[None]
    got = separability(stacked, values[None, None], [8, 2])
    assert got.f.shape == (1, 2, 6, 2)
    torch.testing.assert_close(got.f[0, 1], separability(weights.flip(0), values, [8, 2]).f)
    torch.testing.assert_close(got.f[0, 0, :, 0], separability(weights, values, [8]).f[:, 0])
    both = separability(weights, values, [8], distance=["cosine", "euclidean"]).f
    torch.testing.assert_close(both[0], separability(weights, values, [8], distance="cosine").f)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), sources=st.integers(2, 40), dim=st.integers(1, 9), scale=st.floats(1e-3, 1e3))
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_invariances_and_ranges(distance, seed, sources, dim, scale):
    g = torch.Generator().manual_seed(seed)
    weights, values = planted(3, sources, dim, seed)
    sizes = [1, 2, 3, 5, 8]
    got = separability(weights, values, sizes, distance=distance)
    shuffle = torch.randperm(sources, generator=g)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64)).Q
    same = {
        "permutation": (separability(weights[:, shuffle], values[shuffle], sizes, distance=distance), 1.0),
        "scale": (separability(weights, values * scale, sizes, distance=distance), scale),
        "rotation": (separability(weights, values @ rotation, sizes, distance=distance), 1.0),
    }
    if distance == "cosine":
        del same["scale"]  # the 1e-12 of its definition is not scaled along, and shows on tiny contributions
    defined = ~got.f.isnan()
    assert (defined == torch.tensor([n < sources for n in sizes])).all()
    length = 1.0 if distance == "euclidean" else 0.0
    if not (distance == "cosine" and dim == 1):  # in one dimension every cosine is +-1: all ties, decided by rounding
        for name, (other, factor) in same.items():
            torch.testing.assert_close(other.f, got.f, equal_nan=True, msg=name)
            expected = got.margin * (factor if length else 1.0)
            torch.testing.assert_close(other.margin, expected, rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)
    for ratio in (got.precision, got.recall, got.f):
        assert ((ratio >= 0) & (ratio <= 1))[defined].all()
    assert (got.precision[defined] > 0).all()
    assert ((got.f == 1) == (got.margin > 0))[defined].all()
    assert ((got.inversions == 0) == (got.margin > 0))[defined].all()
    n = torch.tensor(sizes).expand_as(got.f)
    # THEORY section 3: what the inversions alone imply
    assert (got.precision >= n / (n + got.inversions) - 1e-12)[defined].all()
    assert (got.recall >= 1 - got.inversions / n - 1e-12)[defined].all()


def test_aggregate_far_away_keeps_its_digits():
    # one source outweighs the rest by 1e6: in float32, D² = k + ‖s‖² would lose the order of the small ones
    g = torch.Generator().manual_seed(7)
    weights = torch.cat([torch.ones(1), torch.rand(200, generator=g) * 1e-6])[None]
    values = torch.randn(201, 16, generator=g)
    exact = separability(weights.double(), values.double(), [2, 8, 32])
    single = separability(weights, values, [2, 8, 32])
    assert (exact.false_positives - single.false_positives).abs().max() <= 1
    assert (exact.inversions - single.inversions).abs().max() <= 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": torch.full((2, 5), float("nan"))}, "NaN"),
        ({"values": torch.full((5, 3), float("inf"))}, "NaN or infinite"),
        ({"values": torch.zeros(4, 3)}, "do not fit"),
        ({"sizes": [0, 1]}, "1 or more"),
        ({"sizes": []}, "1 or more"),
        ({"ranking": "magnitude"}, "attention, contribution"),
        ({"distance": "manhattan"}, "euclidean, cosine"),
        ({"visible": torch.ones(2, 4, dtype=torch.bool)}, "visible"),
        ({"exclude": torch.ones(5)}, "exclude"),
        ({"exclude": torch.ones(5, dtype=torch.long)}, "exclude"),  # a source of each query: there are two
        ({"exclude": torch.tensor([0, 5])}, "outside 0 to 4"),
        ({"without": 5}, "without = 5"),
        ({"without": 0, "directions": torch.zeros(2, 5, dtype=torch.long)}, "without = 0"),
        ({"without": 0, "counts_only": True}, "without = 0"),
        ({"exclude": torch.tensor([-2, 0])}, "outside 0 to 4"),
        ({"directions": torch.zeros(2, 4)}, "directions"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, says):
    arguments = {"weights": torch.full((2, 5), 0.2), "values": torch.ones(5, 3), "sizes": [1, 2]} | change
    with pytest.raises(GeomlibError, match=says) as caught:
        separability(**arguments)
    assert "\n" not in str(caught.value)
