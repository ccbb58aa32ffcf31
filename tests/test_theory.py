"""Tables of bounds against the slow certificates, against loops over the model's own blocks, and inside a study."""

import itertools
import math
import random

import pandas as pd
import pytest
import torch
from conftest import HEADS, LAYERS, LENGTH, small_model, text
from test_bounds import best, magnitudes_of, slow_certificate, slow_counts, slow_keys
from test_separability import collected, slow
from test_study import save_model, save_texts

from geomlib import attention, bounds, theory
from geomlib import study as S
from geomlib.attention import Block, observe
from geomlib.bounds import certificate, coherence, gaussian_prediction, spherical_coherence
from geomlib.claims import agreement, beyond_prediction, prediction_differences, prediction_gaps, tightness
from geomlib.controls import random_directions
from geomlib.errors import GeomlibError
from geomlib.geometry import SIZES, separability
from geomlib.models import Model, load_model
from geomlib.study import ANALYSES, Study, check_table, load_table
from geomlib.theory import (
    COHERENCE_SCHEMA,
    METRICS,
    RANKS,
    SCHEMA,
    THEOREMS,
    BoundsTable,
    CoherenceTable,
    SelectionTable,
    every_level,
    mean_profile,
    profile_table,
)

SORTED = ["layer", "head", "query_from", "size", "level", "sink"]
NAMES = ["gpt2", "llama", "mistral", "gemma3", "gpt_oss"]
SMALL = (1, 2, 4, 8, 64)
SIMULATED = ("gaussian", "permuted")

# --- every level ------------------------------------------------------------------------------------------------------


def planted(visible, dim, dtype, heads=2, seed=0, sink=True):
    """Values with a common direction, a small sink that points the other way and draws attention."""
    g = torch.Generator().manual_seed(seed)
    sources = visible.shape[1]
    common = torch.randn(dim, generator=g, dtype=torch.float64)
    values = torch.randn(sources, dim, generator=g, dtype=torch.float64) + 0.7 * common
    values[0] = 0.2 * values[0] - 0.5 * common if sink else 0.0
    scores = 2 * torch.randn(heads, len(visible), sources, generator=g, dtype=torch.float64)
    scores[..., 0] += 2
    return scores.masked_fill(~visible, float("-inf")).softmax(-1).to(dtype), values.to(dtype)


def causal(length, window=None):
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    return visible if window is None else visible & ~torch.ones(length, length, dtype=torch.bool).tril(-window)


def one_by_one(weights, values, visible, size, level, sink):
    """The three metrics of `bounds.certificate` for every (head, query) that has more than `size` sources."""
    rows = visible.sum(1) > size
    settings, way = {}, level
    magnitudes = weights if level == "constant_norm" else magnitudes_of(weights, values)
    if level == "quantile":
        way, settings = "global", {"tail": theory.TAIL}
    elif level.startswith("sketch_"):
        way, settings = "sketch", {"rank": min(int(level.removeprefix("sketch_")), values.shape[1])}
    selected = torch.stack(
        [torch.stack([best(w, size, m) for w, m in zip(head, visible[rows], strict=True)]) for head in weights[:, rows]]
    )
    found = certificate(
        magnitudes[:, rows], selected, way, sink != "agnostic", values=values, visible=visible[rows], **settings
    )
    return rows, torch.stack([x.double() for x in found], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["causal", "window", "narrow", "one dimension", "zero sink", "zero others", "zeros"])
def test_every_level_is_the_certificates(kind, dtype):
    visible = causal(24, 9 if kind == "window" else None)
    dim = {"narrow": 5, "one dimension": 1}.get(kind, 16)
    weights, values = planted(visible, dim, dtype, sink=kind != "zero sink")
    values[int(kind == "zero others") :] *= not kind.startswith("zero") or kind == "zero sink"
    sizes = [1, 2, 3, 5, 8, 23, 24]
    levels, _ = every_level(weights, values, visible, sizes)
    assert levels.shape == (len(theory._NAMES), 2, 24, len(sizes), 5) and levels.dtype == torch.float64
    said = {}
    for (level, sink), got in zip(theory._NAMES[1:], levels[1:], strict=True):
        for c, size in enumerate(sizes):
            assert (got[:, visible.sum(1) <= size, c].isnan()).all()
            if size >= int(visible.sum(1).max()):
                continue
            rows, expected = one_by_one(weights, values, visible, size, level, sink)
            found = got[:, rows, c]
            torch.testing.assert_close(found[..., :3], expected, rtol=0, atol=1e-12, msg=f"{level} {sink} N={size}")
            true = levels[0][:, rows, c, :3]
            assert torch.equal(found[..., 3], (found[..., :3] <= true + 1e-12).all(-1).double()), (level, sink)
            assert torch.equal(found[..., 4], (found[..., 2] == 1).double()), (level, sink)
            said.setdefault(level, set()).update(found[..., 2].flatten().tolist())
    assert all(len(f) > 2 or kind in ("zero others", "zeros") for f in said.values())
    for (level, _), found in zip(theory._NAMES, levels, strict=True):
        assert level not in THEOREMS or found[..., 3].nan_to_num(1).min() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 9])
def test_the_exact_columns_and_inversions_are_separability(dtype, window):
    visible = causal(90, window)
    weights, values = planted(visible, 12, dtype)
    levels, inversions = every_level(weights, values, visible, SIZES)
    expected = separability(weights, values, SIZES, visible=visible)
    for i, name in enumerate(("precision", "recall", "f")):
        torch.testing.assert_close(levels[0][..., i], getattr(expected, name), rtol=0, atol=1e-15, equal_nan=True)
    assert torch.equal(inversions.nan_to_num(-1), expected.inversions.nan_to_num(-1))
    assert (inversions > 0).any()
    defined = ~expected.f.isnan()
    assert (levels[0][..., 3][defined] == 1).all()
    assert torch.equal(levels[0][..., 4][defined], (expected.margin[defined] > 0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", ["planted", "duplicated", "zeros", "equal"])
def test_masks_with_holes_and_awkward_values_keep_every_theorem(values, dtype):
    """Rows that skip sources, that hide the sink, and whose first source moves back."""
    g = torch.Generator().manual_seed(3)
    visible = causal(24) & (torch.rand(24, 24, generator=g) < 0.6)
    visible |= torch.eye(24, dtype=torch.bool)
    visible[10:14, :6] = False
    assert not visible[10:14, 0].any() and visible[14:, 0].any()
    weights, given = planted(visible, 6, dtype, seed=1)
    if values == "duplicated":
        given = given[torch.randint(0, 6, (24,), generator=g)]
    elif values == "zeros":
        given = given * (torch.arange(24) % 3 > 0)[:, None]
    elif values == "equal":
        given = given[5].expand(24, -1).contiguous()
    levels, inversions = every_level(weights, given, visible, (1, 2, 3, 5, 8))
    expected = separability(weights, given, (1, 2, 3, 5, 8), visible=visible)
    torch.testing.assert_close(levels[0][..., 2], expected.f, rtol=0, atol=1e-15, equal_nan=True)
    assert torch.equal(inversions.nan_to_num(-1), expected.inversions.nan_to_num(-1))
    place = {name: i for i, name in enumerate(theory._NAMES)}
    defined = ~expected.f.isnan()
    assert defined.sum() > 100
    for name in place:
        if name[0] in THEOREMS:
            assert (levels[place[name]][..., 3][defined] == 1).all(), name
            assert (levels[place[name]][..., :3] <= levels[0][..., :3] + 1e-12)[defined].all(), name
    for less, more in (("global", "rowwise"), ("rowwise", "combined")):
        for i in range(3):
            lower, upper = (levels[place[level, "aware"]][..., i][defined] for level in (less, more))
            assert (lower <= upper + 1e-12).all(), (less, more)


def test_sizes_and_heads_alone_give_what_they_give_together():
    visible = causal(40)
    weights, values = planted(visible, 8, torch.float64, heads=3)
    together, inversions = every_level(weights, values, visible, (2, 5, 9))
    for c, size in enumerate((2, 5, 9)):
        for h in range(3):
            alone, pairs = every_level(weights[h : h + 1], values, visible, (size,))
            torch.testing.assert_close(alone[:, 0, :, 0], together[:, h, :, c], rtol=0, atol=1e-12, equal_nan=True)
            torch.testing.assert_close(pairs[0, :, 0], inversions[h, :, c], rtol=0, atol=0, equal_nan=True)


# --- the table of a model ---------------------------------------------------------------------------------------------


def bounds_of(model, ids, **settings) -> pd.DataFrame:
    recorder = BoundsTable(ids.shape[1], **settings)
    with torch.no_grad(), observe(model, recorder):
        model(ids)
    return recorder.table().sort_values(SORTED, ignore_index=True)


def slow_bounds(blocks, queries, bins) -> pd.DataFrame:
    """exact, the inversion bounds and the sink-aware rowwise certificate, one operation at a time, means by pandas."""
    rows = []
    edges = [LENGTH - 1, LENGTH] if queries == "last" else [round(i * LENGTH / bins) for i in range(bins + 1)]
    for block in blocks:
        for h in range(block.weights.shape[0]):
            v = block.values[h].tolist()
            length = [math.hypot(*x) for x in v]
            for q, position in enumerate(block.queries.tolist()):
                if queries == "last" and position != LENGTH - 1:
                    continue
                alpha, visible = block.weights[h, q].tolist(), block.visible[q].tolist()
                seen = [i for i in range(len(alpha)) if visible[i]]
                (b,) = [i for i in range(len(edges) - 1) if edges[i] <= position < edges[i + 1]]
                for n in SMALL:
                    true = slow(alpha, v, visible, alpha, n, "euclidean")
                    if true is None:
                        continue
                    inv = true["inversions"]
                    p, r = n / (n + inv), max(0.0, 1 - inv / n)
                    joint = 1.0 if inv == 0 else 2 / (1 + 1 / n + n / (n - inv)) if inv < n else 0.0
                    chosen = sorted(seen, key=lambda i: (-alpha[i], i))[:n]
                    a = [w * x for w, x in zip(alpha, length, strict=True)]
                    found = {
                        ("exact", "none"): (true["precision"], true["recall"], true["f"]),
                        ("inversion", "none"): (p, r, 2 * p * r / (p + r)),
                        ("joint_inversion", "none"): (p, r, joint),
                        ("rowwise", "aware"): slow_certificate("rowwise", a, chosen, seen, v),
                    }
                    place = (block.layer, h, edges[b], edges[b + 1], position, n)
                    rows += [(*place, *name, *x, 1.0, float(x[2] == 1), 0.0) for name, x in found.items()]
    names = ["layer", "head", "query_from", "query_to", "position", "size", "level", "sink"]
    groups = pd.DataFrame(rows, columns=[*names, *METRICS]).groupby([n for n in names if n != "position"])
    table = groups[list(METRICS)].mean()
    table.insert(0, "queries", groups.size())
    return table.reset_index().sort_values(SORTED, ignore_index=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("queries", ["all", "last"])
def test_the_table_is_the_slow_loops(name, queries):
    model, ids = small_model(name, torch.float64), text()
    got = bounds_of(model, ids, queries=queries, sizes=SMALL, bins=3)
    expected = slow_bounds(collected(model, ids), queries, 3)
    assert len(expected) > 50 and expected.loc[expected["level"] == "exact", "f"].nunique() > 6
    chosen = got["level"].isin(["exact", "inversion", "joint_inversion"])
    chosen |= (got["level"] == "rowwise") & (got["sink"] == "aware")
    part = got[chosen].reset_index(drop=True)
    pd.testing.assert_frame_equal(part[expected.columns], expected, check_dtype=False, rtol=1e-9, atol=1e-9)
    # every level stands beside every exact row, and no theorem fails
    simulated = got["level"].isin(SIMULATED)
    assert simulated.any() == (queries == "last")
    for _, rows in got[~simulated].groupby(["layer", "head", "query_from", "size"]):
        assert sorted(zip(rows["level"], rows["sink"], strict=True)) == sorted(
            [*theory._NAMES, ("inversion", "none"), ("joint_inversion", "none")]
        )
        assert rows["queries"].nunique() == 1
    theorems = got[got["level"].isin(THEOREMS)]
    assert set(theorems["level"]) == set(THEOREMS) and (theorems["holds"] == 1).all()
    assert (got.loc[got["level"] != "gaussian", "standard_error"] == 0).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("limits", [{"MAX_ROWS": 1}, {"MAX_ROWS": 4}, {"BLOCK_BYTES": 4 * HEADS * LENGTH * 7}])
@pytest.mark.parametrize("queries", ["all", "last"])
def test_blocks_change_nothing(name, limits, queries, monkeypatch):
    model, ids = small_model(name, torch.float64), text()
    whole = bounds_of(model, ids, sizes=SMALL, queries=queries)
    blocks = []
    for limit, value in limits.items():
        monkeypatch.setattr(attention, limit, value)
    with observe(model, blocks.append):
        cut = bounds_of(model, ids, sizes=SMALL, queries=queries)
    assert len(blocks) > LAYERS
    pd.testing.assert_frame_equal(cut, whole, rtol=1e-10, atol=1e-12)


def test_float32_loses_no_theorem_and_little_else():
    ids = text(1, 48)
    single, double = (bounds_of(small_model("llama", t), ids, sizes=SMALL) for t in (torch.float32, torch.float64))
    assert (single.loc[single["level"].isin(THEOREMS), "holds"] == 1).all()
    assert single[SORTED].equals(double[SORTED])
    assert (single["f"] - double["f"]).abs().mean() < 2e-3


def test_an_inversion_bound_holds_only_if_each_of_the_three_does(monkeypatch):
    """And layers draw by themselves."""
    visible = causal(24)
    weights, values = planted(visible, 8, torch.float32)

    def table(layer=0):
        seen = BoundsTable(24, "last", (2, 4), 1)
        seen(Block(layer, torch.arange(24), weights, values[None].expand(2, -1, -1), visible, None))
        return seen.table().set_index(["level", "sink", "size"]).sort_index()

    first, second = table(), table(1)
    assert (first.loc["inversion", "holds"] == 1).all()
    assert (first.loc["exact", "f"].to_numpy() == second.loc["exact", "f"].to_numpy()).all()
    assert (first.loc["gaussian", "f"].to_numpy() != second.loc["gaussian", "f"].to_numpy()).any()
    for field in range(3):
        right = theory.inversion_bound

        def wrong(inversions, n, field=field, right=right):
            found = list(right(inversions, n))
            found[field] = torch.ones_like(found[field]) * 1.5
            return bounds.Certificate(*found)

        with monkeypatch.context() as m:
            m.setattr(theory, "inversion_bound", wrong)
            assert (table().loc["inversion", "holds"] == 0).all(), field


def test_the_prediction_is_there_for_the_last_query_and_depends_on_the_key():
    model, ids = small_model("llama", torch.float64), text()
    assert "gaussian" not in set(bounds_of(model, ids, sizes=SMALL, key="a")["level"])
    first, again, other = (bounds_of(model, ids, queries="last", sizes=SMALL, key=key) for key in ("a", "a", "b"))
    pd.testing.assert_frame_equal(first, again)
    pd.testing.assert_frame_equal(*(t[~t["level"].isin(SIMULATED)] for t in (first, other)))
    guessed = first["level"] == "gaussian"
    assert (first.loc[guessed, "f"] != other.loc[guessed, "f"]).mean() > 0.3
    assert (first.loc[guessed & (first["size"] > 1), "standard_error"] > 0).any()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_prediction_is_the_models_own_with_what_was_measured(name):
    """Against many more draws, from each head's coherence over the sources that its last query sees."""
    model, ids = small_model(name, torch.float64), text()
    table = bounds_of(model, ids, queries="last", sizes=(2, 4, 8)).query("level == 'gaussian' and sink == 'aware'")
    table = table.set_index(["layer", "head", "size"])
    wrong = []
    for block in collected(model, ids):
        weights, visible = block.weights[:, -1], block.visible[-1]
        for h in range(HEADS):
            values = block.values[h]
            exact = separability(weights[h][None], values, (2, 4, 8), visible=visible[None])
            for c, n in enumerate((2, 4, 8)):
                if n >= int(visible.sum()):
                    assert (block.layer, h, n) not in table.index
                    continue
                row = table.loc[block.layer, h, n]
                many = gaussian_prediction(
                    magnitudes_of(weights[h], values), best(weights[h], n, visible), *coherence(values, visible)[:5],
                    visible=visible, draws=2000, seed=99,
                )  # fmt: skip
                spread = many.standard_error.item() * 2000**0.5
                wrong.append(abs(row["f"] - many.f.item()) / max(spread * (1 / 40 + 1 / 2000) ** 0.5, 0.01))
                assert row["holds"] == float(row["f"] <= exact.f[0, c].item())
                assert row["standard_error"] == pytest.approx(spread / 40**0.5, rel=0.9, abs=0.02)
    assert max(wrong) < 4.5 and sum(w > 2 for w in wrong) < 0.15 * len(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_coherence(name):
    model, ids = small_model(name, torch.float64), text()
    recorder = CoherenceTable(LENGTH)
    with torch.no_grad(), observe(model, recorder):
        model(ids)
    table = recorder.table()
    assert list(table.columns) == [c for c in COHERENCE_SCHEMA if c != "document"]
    assert list(zip(table["layer"], table["head"], strict=True)) == [
        (i, h) for i in range(LAYERS) for h in range(HEADS)
    ]
    for block in collected(model, ids):
        for h in range(HEADS):
            row = table[(table["layer"] == block.layer) & (table["head"] == h)].iloc[0]
            assert (row["dim"], row["sources"]) == (block.values.shape[-1], LENGTH)
            for field, expected in coherence(block.values[h])._asdict().items():
                assert row[field] == pytest.approx(expected.item(), rel=1e-9, abs=1e-12), field


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_permuted_directions_are_the_magnitude_control(name):
    """Aware: every source but the first borrows a direction; agnostic: the first one too."""
    model, ids = small_model(name, torch.float64), text()
    table = bounds_of(model, ids, queries="last", sizes=SMALL, key="k").query("level == 'permuted'")
    table = table.set_index(["sink", "layer", "head", "size"])["f"]
    compared = 0
    for block in collected(model, ids):
        last = theory.BinnedMeans(LENGTH, "last", SMALL, 1).rows(block)
        visible = block.visible[-1].tolist()
        for sink in ("aware", "agnostic"):
            turned = random_directions(last, "k", keep_sink=sink == "aware")[:, 0].tolist()
            for h, n in itertools.product(range(HEADS), SMALL):
                alpha, v = block.weights[h, -1].tolist(), block.values[h].tolist()
                expected = slow(alpha, v, visible, alpha, n, "euclidean", turned[h])
                if expected:
                    compared += 1
                    assert table.loc[sink, block.layer, h, n] == pytest.approx(expected["f"], abs=1e-9)
    assert compared > 50


def cosine(x, y):
    return sum(map(math.prod, zip(x, y, strict=True))) / math.hypot(*x) / math.hypot(*y)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_table_of_selection(name):
    model, ids = small_model(name, torch.float64), text()
    recorder = SelectionTable(LENGTH, SMALL)
    with torch.no_grad(), observe(model, recorder):
        model(ids)
    table = recorder.table().set_index(["layer", "head", "size"])
    expected = {}
    for block in collected(model, ids):
        seen = block.visible[-1].nonzero()[:, 0].tolist()
        for h, n in itertools.product(range(HEADS), SMALL):
            alpha, v = block.weights[h, -1].tolist(), block.values[h].tolist()
            chosen = sorted(seen, key=lambda i: (-alpha[i], i))[:n]
            rest = [j for j in seen if j not in chosen and j != 0]
            chosen = [i for i in chosen if i != 0]

            if len(chosen) >= 2 and rest and n < len(seen):
                within = [cosine(v[i], v[k]) for i in chosen for k in chosen if i < k]
                across = [cosine(v[i], v[j]) for i in chosen for j in rest]
                expected[block.layer, h, n] = (sum(within) / len(within), sum(across) / len(across))
    assert set(table.index) == set(expected) and len(expected) > 20
    for place, (within, across) in expected.items():
        assert table.loc[place, ["within", "across"]].tolist() == pytest.approx([within, across], abs=1e-9)


def planted_bounds(f: dict[tuple[str, str, int, int], list[float]]) -> pd.DataFrame:
    """(level, sink, head, size) -> F of each document."""
    rows = [
        {"document": f"d{d}", "layer": 0, "head": head, "queries": 1, "size": size, "level": level, "sink": sink, "f": x}
        for (level, sink, head, size), each in f.items() for d, x in enumerate(each)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_tightness_is_the_ratio_of_the_means():
    share = tightness(planted_bounds({
        ("exact", "none", 0, 2): [0.4, 0.8], ("rowwise", "aware", 0, 2): [0.1, 0.5],
        ("exact", "none", 0, 4): [0.5, 0.5], ("rowwise", "aware", 0, 4): [0.25, 0.25],
    }))  # fmt: skip
    share = share.set_index(["level", "size"])[["ratio", "low", "high"]]
    assert share.loc[("exact", 2)].tolist() == [1, 1, 1]
    # Of two documents: the first alone, both, or the second alone; the same documents above and below the line.
    assert share.loc[("rowwise", 2)].tolist() == pytest.approx([0.5, 0.25, 0.625])
    assert share.loc[("rowwise", 4)].tolist() == pytest.approx([0.5, 0.5, 0.5])
    alone = tightness(planted_bounds({("exact", "none", 0, 2): [0.4], ("rowwise", "aware", 0, 2): [0.1]}))
    assert alone["low"].isna().all() and alone["ratio"].tolist() == pytest.approx([1, 0.25])


def planted_predictions() -> pd.DataFrame:
    exact, predicted = [0.2, 0.4, 0.9], [0.3, 0.4, 0.6]
    f = {}
    for size in (1, 2, 8):
        for head in range(3):
            f["exact", "none", head, size] = [exact[head] - 0.1, exact[head] + 0.1]
            f["gaussian", "aware", head, size] = 2 * [predicted[head] if size == 2 else exact[head] / 2]
            f["gaussian", "agnostic", head, size] = [0.5, 0.5]
            f["permuted", "aware", head, size] = 2 * [predicted[head] + 0.02 if size == 2 else exact[head] / 2]
            f["permuted", "agnostic", head, size] = [0.4, 0.4]
    return planted_bounds(f)


def test_agreement_is_over_heads():
    found = agreement(planted_predictions()).set_index("size")
    assert list(found.index) == [2, 8]
    assert found.loc[2, ["exact", "predicted"]].tolist() == pytest.approx([0.5, 1.3 / 3])
    x, y = pd.Series([0.2, 0.4, 0.9]), pd.Series([0.3, 0.4, 0.6])
    assert found["correlation"].tolist() == pytest.approx([x.corr(y), 1.0])


def test_prediction_gaps():
    gaps = prediction_gaps(planted_predictions())
    assert gaps.loc[("aware", "permuted")].tolist() == pytest.approx([0.01, 0.02, 0.01])
    assert gaps.loc[("agnostic", "permuted")].tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert gaps.loc[("aware", "exact")].tolist() == pytest.approx([(0.5 - 1.3 / 3 + 0.25) / 2, 0.25, (0.4 / 3 + 0.25) / 2])


def test_prediction_differences():
    found = prediction_differences(planted_predictions())
    assert list(found.index) == [2, 8] and list(found) == ["exact - gaussian", "exact - permuted", "gaussian - permuted"]
    # Two documents, a tenth to either side: the interval is their range.
    assert found.loc[8].tolist() == ["0.25 [0.15, 0.35]", "0.25 [0.15, 0.35]", "0.00 [0.00, 0.00]"]
    assert found.loc[2, "gaussian - permuted"] == "-0.02 [-0.02, -0.02]"


def test_beyond_prediction():
    selection = pd.DataFrame([
        {"document": d, "layer": 0, "head": h, "size": n, "within": 0.1 * h + 0.2, "across": 0.1}
        for d in "ab" for h in range(3) for n in (2, 8)
    ])  # fmt: skip
    found = beyond_prediction(planted_predictions(), selection, 2)
    assert found["beyond"].tolist() == pytest.approx([-0.1, 0.0, 0.3])
    assert found["alike"].tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_mean_profile():
    model, ids = small_model("gpt2", torch.float64), text()
    blocks = collected(model, ids)
    rows = torch.cat([b.weights[:, -1, 1:] for b in blocks])
    expected = torch.stack([r.sort(descending=True).values / r.sum() for r in rows]).mean(0)

    class Loaded:
        hf, device = model, torch.device("cpu")

    found = mean_profile(Loaded, ids)
    torch.testing.assert_close(found, expected.double(), rtol=1e-9, atol=0)
    assert found.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("observer", [BoundsTable, CoherenceTable, SelectionTable])
def test_nothing_observed_is_an_empty_table(observer):
    assert observer(LENGTH).table().empty


def test_the_schemas_are_the_tables():
    assert [c for c, (kind, _) in SCHEMA.items() if kind == "float64"] == list(METRICS)
    assert set(THEOREMS) < {level for level, _ in theory._NAMES} | {"inversion", "joint_inversion"}
    assert {f"sketch_{r}" for r in RANKS} < set(THEOREMS)


# --- without a model --------------------------------------------------------------------------------------------------

PROFILE = torch.arange(1, 41, dtype=torch.float64) ** -1.0
COLUMNS = [
    "profile", "dim", "sink_mass", "norm_ratio", "kappa", "size", "certified", "predicted", "standard_error", "precision"
]  # fmt: skip


def test_profile_table_has_a_row_for_every_setting():
    profiles = {"power": PROFILE, "equal": torch.ones(5)}
    table = profile_table(profiles, (64, 4096), (2, 4, 5, 8), (0.0, 0.4), (0.2, 1.0), (-0.3, 0.0))
    assert list(table.columns) == COLUMNS
    # 5 sources and the sink: N = 5 is there only with it, N = 8 never
    settings = {"power": 2 * 8 * 4, "equal": 2 * 4 * (2 + 3)}
    assert table.groupby("profile").size().to_dict() == settings
    assert not table.duplicated(COLUMNS[:6]).any()
    assert table[["certified", "predicted", "precision"]].stack().between(0, 1).all()
    assert (table["precision"] > table["predicted"] / (2 - table["predicted"]) - 1e-9).all()  # with a recall of 1 at most
    assert set(table.query("profile == 'equal' and size == 5")["sink_mass"]) == {0.4}
    scaled = profile_table(
        {n: 7 * w for n, w in profiles.items()}, (64, 4096), (2, 4, 5, 8), (0.0, 0.4), (0.2, 1.0), (-0.3, 0.0)
    )
    pd.testing.assert_frame_equal(table, scaled)
    assert set(profile_table({"power": PROFILE}, [64])["size"]) == {2, 4, 8, 16, 32}
    other = profile_table({"power": PROFILE}, [64], seed=1)["predicted"]
    assert (other != profile_table({"power": PROFILE}, [64])["predicted"]).any()


@pytest.mark.parametrize("dim", [30000, 10**6])
@pytest.mark.parametrize(("mass", "ratio", "kappa"), [(0.0, 1.0, 0.0), (0.3, 0.5, -0.4), (0.5, 0.2, 0.3)])
def test_profile_table_certifies_what_the_formulas_do(dim, mass, ratio, kappa):
    table = profile_table({"power": PROFILE}, [dim], (1, 2, 4, 8, 16), [mass], [ratio], [kappa]).set_index("size")
    alpha = [mass, *((1 - mass) * PROFILE / PROFILE.sum()).tolist()]
    seen = [i for i in range(41) if alpha[i] > 0]
    width = spherical_coherence(dim, 41)
    for n in (1, 2, 4, 8, 16):
        chosen = sorted(seen, key=lambda i: -alpha[i])[:n]
        mu = tuple(kappa**2 + (1 - kappa**2) * e for e in (-width, width))
        intervals = {"mu": mu, "kappa": (kappa, kappa)}
        expected = slow_certificate("constant_norm", alpha, chosen, seen, ratio=ratio, **intervals)[2]
        assert table.loc[n, "certified"] == pytest.approx(expected, abs=1e-12), n


@pytest.mark.parametrize(("mass", "ratio"), [(0.0, 1.0), (0.3, 1.0), (0.4, 0.3)])
@pytest.mark.parametrize("kappa", [0.0, -0.5])
def test_in_a_huge_dimension_both_tend_to_the_f_of_orthogonal_directions(mass, ratio, kappa):
    """The others have kappa with the sink and at right angles to one another otherwise."""
    table = profile_table({"power": PROFILE}, [10**12], (1, 2, 4, 8, 16), [mass], [ratio], [kappa]).set_index("size")
    a = [mass * ratio, *((1 - mass) * PROFILE / PROFILE.sum()).tolist()]
    alpha = [mass, *a[1:]]
    seen = [i for i in range(41) if alpha[i] > 0]
    for n in (1, 2, 4, 8, 16):
        chosen = sorted(seen, key=lambda i: -alpha[i])[:n]
        expected = slow_certificate("global", a, chosen, seen, mu=(kappa**2, kappa**2), kappa=(kappa, kappa))[2]
        assert expected == 1 or kappa < 0
        assert table.loc[n, "certified"] == pytest.approx(expected, abs=1e-9), n
        assert table.loc[n, "predicted"] == pytest.approx(expected, abs=1e-9), n


def test_more_dimensions_certify_and_predict_more():
    """Up to the noise of the prediction."""
    table = profile_table({"power": PROFILE}, (16, 256, 4096, 10**5, 10**7), (2, 8), draws=400)
    for _, rows in table.groupby("size"):
        assert rows["certified"].is_monotonic_increasing and rows["certified"].iloc[-1] == 1
        assert (rows["predicted"].diff().dropna() > -3 * rows["standard_error"].max()).all()
        assert rows["predicted"].iloc[0] < 0.9 and rows["predicted"].iloc[-1] == 1
        assert (rows["certified"] <= rows["predicted"] + 3 * rows["standard_error"] + 1e-12).all()


def test_a_selected_opposite_sink_lowers_the_prediction():
    settings = {"dims": [64], "sizes": (2, 4, 8), "norm_ratios": [0.5], "kappas": [-0.5], "draws": 400}
    without, with_ = (
        profile_table({"power": PROFILE}, sink_masses=[mass], **settings).set_index("size") for mass in (0.0, 0.6)
    )
    error = (without["standard_error"] ** 2 + with_["standard_error"] ** 2) ** 0.5
    assert (with_["predicted"] < without["predicted"] - 4 * error).all()


@pytest.mark.parametrize(
    ("mass", "ratio", "kappa"), [(0.0, 1.0, 0.0), (0.3, 0.5, 0.4), (0.3, 0.5, -0.3), (0.4, 0.2, 0.0)]
)
def test_what_a_profile_certifies_holds_on_the_sphere(mass, ratio, kappa):
    """In all but a share delta of draws: directions that are uniform but for their cosine with the sink."""
    dim, sizes, repeats = 2000, (2, 4, 8), 60
    profile = torch.arange(1, 13, dtype=torch.float64) ** -1.0
    table = profile_table({"power": profile}, [dim], sizes, [mass], [ratio], [kappa]).set_index("size")
    assert kappa < 0 or (table["certified"] > 0.3).any()
    g = torch.Generator().manual_seed(2)
    free = torch.nn.functional.normalize(torch.randn(repeats, 12, dim, generator=g), dim=-1)
    sink = torch.zeros(repeats, 1, dim + 1)
    sink[..., 0] = ratio
    others = torch.cat([torch.full((repeats, 12, 1), kappa), (1 - kappa**2) ** 0.5 * free], dim=-1)
    weights = torch.cat([torch.tensor([mass]), (profile / profile.sum() * (1 - mass)).float()]).expand(repeats, 1, -1)
    visible = torch.ones(1, 13, dtype=torch.bool)
    visible[0, 0] = mass > 0
    true = separability(weights, torch.cat([sink, others], dim=1), sizes, visible=visible).f[:, 0]
    sure = torch.tensor([table.loc[n, "certified"] for n in sizes])
    assert (true < sure - 1e-12).any(1).double().mean() <= 0.05
    assert (true.mean(0) - torch.tensor([table.loc[n, "predicted"] for n in sizes])).abs().max() < 0.1


@pytest.mark.parametrize(("wrong", "says"), [
    ({"sizes": (4, 2)}, "give rising whole numbers"), ({"sizes": (0, 2)}, "give rising whole numbers"),
    ({"sizes": ()}, "give rising whole numbers"), ({"visible": torch.ones(1, 12, dtype=torch.bool)}, "do not fit"),
    ({"values": torch.ones(3, 12, 4)}, "do not fit"), ({"weights": torch.ones(3, 12)}, "do not fit"),
    ({"weights": torch.full((2, 3, 12), math.nan)}, "NaN or infinite"), ({"values": torch.full((12, 4), math.inf)}, "NaN or"),
])  # fmt: skip
def test_every_level_refuses_what_does_not_fit(wrong, says):
    given = {
        "weights": torch.ones(2, 3, 12),
        "values": torch.ones(12, 4),
        "visible": torch.ones(3, 12, dtype=torch.bool),
    }
    with pytest.raises(GeomlibError, match=says):
        every_level(**given | {"sizes": (2, 4)} | wrong)


@pytest.mark.parametrize("wrong", [
    {"profiles": {"u": torch.zeros(5)}}, {"profiles": {"u": -torch.ones(5)}}, {"sink_masses": [2.0]}, {"sink_masses": [-0.5]},
    {"norm_ratios": [-1.0]}, {"kappas": [2.0]}, {"kappas": [math.nan]},
])  # fmt: skip
def test_profile_table_refuses_what_cannot_be(wrong):
    with pytest.raises(GeomlibError, match="not usable"):
        profile_table(**{"profiles": {"u": torch.ones(5)}, "dims": [64]} | wrong)


def test_a_table_without_prediction_is_refused():
    table = planted_predictions().query("level == 'exact'")
    for call in (agreement, prediction_gaps, prediction_differences):
        with pytest.raises(GeomlibError, match="queries = 'last'"):
            call(table)
    with pytest.raises(GeomlibError, match="give all or last"):
        BoundsTable(24, "final")


# --- in a study -------------------------------------------------------------------------------------------------------

ALL = ["separability", "bounds", "coherence"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("theory")
    save_model(place / "model")
    save_texts(place / "texts.jsonl", 70)
    return place


@pytest.fixture(scope="module")
def model(place) -> Model:
    return load_model(str(place / "model"), device="cpu")


@pytest.fixture
def fields(place) -> dict:
    return {
        "model": str(place / "model"), "text": str(place / "texts.jsonl"), "windows": 2, "length": 24,
        "sizes": (1, 2, 4, 8), "bins": 3, "random_rankings": 2,
    }  # fmt: skip


@pytest.fixture
def passes(model):
    """Forward passes of the model so far, one entry each."""
    calls = []
    handle = model.hf.base_model.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


def written(out, analysis="*") -> dict:
    return {p: p.stat().st_mtime_ns for p in sorted(out.glob(f"{analysis}/*.parquet"))}


@pytest.mark.parametrize("queries", ["all", "last"])
def test_several_analyses_share_a_pass_and_give_what_each_gives_alone(fields, model, tmp_path, passes, queries):
    study = Study(**fields | {"queries": queries})
    together = study.run(tmp_path / "all", model, analyses=ALL)
    assert list(together) == ALL and len(passes) == 2
    for name in ALL:
        alone = study.run(tmp_path / name, model, analyses=name)
        pd.testing.assert_frame_equal(together[name], alone)
        pd.testing.assert_frame_equal(load_table(tmp_path / "all", name), alone)
        (again,) = study.run(tmp_path / name, model, analyses=[name]).values()  # a list of one gives a dict
        pd.testing.assert_frame_equal(again, alone)
        check_table(alone, name)
        assert list(alone.columns) == list(ANALYSES[name].schema) and alone["document"].nunique() == 2
    assert len(passes) == 2 + 3 * 2
    assert ("gaussian" in set(together["bounds"]["level"])) == (queries == "last")
    bounds = together["bounds"]
    assert (bounds.loc[bounds["level"].isin(THEOREMS), "holds"] == 1).all()
    # the exact rows are what separability says of the very same operations
    names = ["document", "layer", "head", "query_from", "query_to", "queries", "size"]
    metrics = ["precision", "recall", "f"]
    plain = together["separability"].query("control == 'none'").sort_values(names, ignore_index=True)
    exact = bounds.query("level == 'exact'").sort_values(names, ignore_index=True)
    pd.testing.assert_frame_equal(exact[names + metrics], plain[names + metrics], rtol=1e-12, atol=1e-12)


def test_a_later_analysis_leaves_the_first_as_it_is(fields, model, tmp_path, passes):
    study = Study(**fields)
    study.run(tmp_path, model)
    before, record = written(tmp_path), (tmp_path / "study.json").read_bytes()
    assert len(before) == 2 and len(passes) == 2
    study.run(tmp_path, model, analyses="coherence")
    assert len(passes) == 4 and (tmp_path / "study.json").read_bytes() == record
    assert len(written(tmp_path, "coherence")) == 2 and written(tmp_path, "separability") == before
    study.run(tmp_path, model, analyses=["coherence", "separability"])
    assert len(passes) == 4  # all there
    next(iter(written(tmp_path, "coherence"))).unlink()
    study.run(tmp_path, model, analyses=["coherence", "separability"])
    assert len(passes) == 5 and written(tmp_path, "separability") == before


@pytest.mark.parametrize("names", ["magic", ["bounds", "magic"]])
def test_an_unknown_analysis_is_one_sentence(fields, model, tmp_path, names):
    says = r"unknown analysis 'magic': give any of separability, bounds, coherence.*\.$"
    with pytest.raises(GeomlibError, match=says) as caught:
        Study(**fields).run(tmp_path / "out", model, analyses=names)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_table_of_other_code_is_measured_again(fields, model, tmp_path, passes, monkeypatch):
    study = Study(**fields)
    tables = study.run(tmp_path, model, analyses=ALL)
    before = written(tmp_path)
    code = S._code
    monkeypatch.setattr(S, "_code", lambda m: "other" if tuple(m) == ANALYSES["bounds"].code else code(m))
    assert ANALYSES["bounds"].code == ANALYSES["coherence"].code != ANALYSES["separability"].code
    for name in ("bounds", "coherence"):
        with pytest.raises(GeomlibError, match="is damaged, or of another study or version"):
            load_table(tmp_path, name)
    pd.testing.assert_frame_equal(load_table(tmp_path), tables["separability"])
    passes.clear()
    again = study.run(tmp_path, model, analyses=ALL)
    assert len(passes) == 2
    changed = {p.parent.name for p, t in written(tmp_path).items() if before[p] != t}
    assert changed == {"bounds", "coherence"}
    for name in ALL:
        pd.testing.assert_frame_equal(again[name], tables[name])


# --- the embedded models ----------------------------------------------------------------------------------------------

REAL_LENGTH = 512
OPERATIONS = 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_no_theorem_fails_on_real_text(name):
    """Every head, query and N of one window; and some operations in float64 Python, to either side of the rounding."""
    from geomlib import load_corpus, take_windows

    model = load_model(name, device="cpu", dtype="float32")
    (window,), _ = take_windows(load_corpus("vital-articles"), model.tokenizer, 1, REAL_LENGTH, 0)
    rng = random.Random(0)
    sample = {}
    while sum(map(len, sample.values())) < OPERATIONS:
        layer, h, q = (rng.randrange(x) for x in (model.layers, model.query_heads, REAL_LENGTH))
        n = rng.choice([n for n in SIZES if 2 <= n <= q] or [0])
        if n:
            sample.setdefault((layer, h), set()).add((q, n))
    place = {level: i for i, level in enumerate(theory._NAMES)}
    compared = {"exact": [], "sketch_1": []}

    def check(block):
        for h in range(block.weights.shape[0]):
            at = block.queries.tolist()
            todo = [(at.index(q), n) for q, n in sorted(sample.get((block.layer, h), ())) if q in at]
            if not todo:
                continue
            levels, _ = every_level(block.weights[h : h + 1], block.values[h], block.visible, SIZES)
            v = block.values[h].double().tolist()
            for q, n in todo:
                seen = block.visible[q].nonzero().flatten().tolist()
                if n >= len(seen):  # a sliding window
                    continue
                alpha = block.weights[h, q].double().tolist()
                a = [w * math.hypot(*x) for w, x in zip(alpha, v, strict=True)]
                chosen = sorted(seen, key=lambda i: (-alpha[i], i))[:n]
                eps = 4 * 2.0**-23 * (n + len(v[0]) + 8)
                for level, slow_level, sink, inward in (
                    ("exact", "exact", "none", eps),
                    ("sketch_1", "sketch", "aware", 0.0),
                ):
                    keys = slow_keys(slow_level, a, chosen, seen, v, rank=1)
                    low, high = (slow_counts(*keys, a, chosen, slack) for slack in (2 * eps, -inward))
                    got = levels[place[level, sink], 0, q, SIZES.index(n), :3].tolist()
                    assert all(x - 1e-12 <= y <= z + 1e-12 for x, y, z in zip(low, got, high, strict=True)), level
                    compared[level].append((low == high, got[2]))

    table = BoundsTable(REAL_LENGTH, "all", bins=1)
    with torch.no_grad(), observe(model, table, check):
        model.hf.base_model(input_ids=torch.tensor([window.input_ids]), use_cache=False)
    table = table.table()
    assert table.groupby(["layer", "head"]).ngroups == model.layers * model.query_heads
    theorems = table[table["level"].isin(THEOREMS)]
    assert set(theorems["level"]) == set(THEOREMS)
    assert not len(theorems[theorems["holds"] < 1])
    means = table[table["sink"].isin(["aware", "none"])].pivot_table(
        index=["layer", "head", "size"], columns="level", values="f"
    )
    for less, more in (("global", "rowwise"), ("rowwise", "combined"), ("combined", "exact")):
        assert (means[less] <= means[more] + 1e-12).all(), (less, more)
        assert means[less].mean() < means[more].mean()
    if name == "smollm2-135m":  # the aim: half of the exact F, from one coordinate of each source
        for size in (2, 4, 8):
            of_size = means.xs(size, level="size")
            assert of_size["sketch_1"].mean() > 0.5 * of_size["exact"].mean(), size
    for level, found in compared.items():
        sharp = [f for same, f in found if same]
        print(f"{name}: {level}: {len(sharp)} of {len(found)} operations leave no room for rounding")
        assert len(found) > 0.6 * OPERATIONS and len(sharp) > 0.5 * len(found)
        assert len(set(sharp)) > 5


def test_what_there_is_is_kept_when_one_analysis_finds_nothing(fields, model, tmp_path):
    """No set of one source has two besides the sink."""
    study = Study(**fields | {"sizes": (1,), "queries": "last"})
    with pytest.raises(GeomlibError, match="no top-N set of .* has two sources besides the first"):
        study.run(tmp_path, model, analyses=["coherence", "selection", "bounds"])
    assert len(load_table(tmp_path, "coherence")) and len(load_table(tmp_path, "bounds"))


@pytest.mark.parametrize("analysis", ["Bounds", "", ".", None])
def test_a_table_of_no_known_analysis(analysis, tmp_path):
    with pytest.raises(GeomlibError, match="unknown analysis"):
        load_table(tmp_path, analysis)
