"""The sink's geometry and its effect on F: slow loops over the very blocks, and planted blocks with known answers."""

import json
import math
import statistics
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pandas as pd
import pytest
import torch
from conftest import HEADS, LAYERS, LENGTH, REAL_LENGTH, WINDOW, collected, small_model, text

from geomlib import attention, geometry
from geomlib.attention import Block, observe
from geomlib.controls import random_scores
from geomlib.errors import GeomlibError
from geomlib.geometry import separability
from geomlib.separability import SeparabilityTable
from geomlib.sink import (
    EFFECT_METRICS,
    EFFECT_SCHEMA,
    LATER,
    MASS,
    SHORT,
    SINKS_SCHEMA,
    SinkEffectTable,
    SinksTable,
    elsewhere,
    holds_origin,
    opposition,
    pulls,
)

SIZES = (1, 2, 3, 4, 8, 16, 17, 18, 64)  # 17 = LENGTH - 2 is the last with one left when two are out
KEY = "0 document 0"
PLACE = ["layer", "head", "query_from", "query_to", "size", "sink", "without"]


def cut(block: Block, *ends: int) -> list[Block]:
    """The block's rows in several blocks."""
    edges = [0, *ends, len(block.queries)]
    return [
        replace(
            block, queries=block.queries[a:b], weights=block.weights[:, a:b], visible=block.visible[a:b],
            outputs=block.outputs[:, a:b], learned_sink_mass=None, shared={},
        )
        for a, b in pairwise(edges)
    ]  # fmt: skip


def measured(model, ids, *observers) -> list[pd.DataFrame]:
    with torch.no_grad(), observe(model, *observers):
        model(ids)
    return [o.table() for o in observers]


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(PLACE, ignore_index=True)


# --- F with and without the sink --------------------------------------------------------------------------------------


def operation(alpha, y, candidates, n):
    """THEORY section 2 for one query and N in Python floats: F exactly, the selected, and the sources at the two radii."""
    selected = sorted(candidates, key=lambda i: (-alpha[i], i))[:n]
    rest = [j for j in candidates if j not in selected]
    s = [sum(y[i][d] for i in selected) for d in range(len(y[0]))]
    far = {i: math.dist(y[i], s) for i in candidates}
    rho_max, rho_min = max(far[i] for i in selected), min(far[j] for j in rest)
    fp, fn = sum(far[j] <= rho_max for j in rest), sum(far[i] >= rho_min for i in selected)
    p, r = Fraction(n, n + fp), Fraction(n - fn, n)
    f = 2 * p * r / (p + r) if p + r else Fraction(0)
    return f, selected, max(selected, key=far.get), min(rest, key=far.get)


def slow_effects(alpha, v, visible, n, borrowed=None):
    """What one query says about the sink: rows (state, without, F with, F without, mass, extreme); none where nothing would
    be left. borrowed: the source whose direction the sink takes; None: no controls."""
    sources = [i for i in range(len(alpha)) if visible[i]]
    y = [[a * x for x in row] for a, row in zip(alpha, v, strict=True)]
    if not visible[0]:
        if n >= len(sources):
            return []
        f, *_ = operation(alpha, y, sources, n)
        return [("hidden", "sink", f, f, 0.0, False)]
    if n >= len(sources) - 1:
        return []
    f, selected, farthest, nearest = operation(alpha, y, sources, n)
    state = "selected" if 0 in selected else "unselected"
    extreme = (farthest if 0 in selected else nearest) == 0
    others = {"sink": operation(alpha, y, sources[1:], n)[0]}
    if borrowed is not None:
        best = min(sources[1:], key=lambda i: (-alpha[i], i))
        others["other"] = operation(alpha, y, [i for i in sources if i != best], n)[0]
        length = alpha[0] * math.hypot(*v[0])
        turned = [length * x / math.hypot(*v[borrowed]) for x in v[borrowed]]
        others["direction"] = operation(alpha, [turned, *y[1:]], sources, n)[0]
    return [(state, name, f, other, alpha[0], extreme) for name, other in others.items()]


def sink_borrows(block, key) -> list[list[int]]:
    """Whose direction the sink takes in the control, by head and row: of the visible others that with the highest draw."""
    scores = random_scores(block, "sink direction " + key, 0)
    rows = range(scores.shape[1])
    others = [[i for i in range(1, scores.shape[2]) if block.visible[q, i]] or [0] for q in rows]
    return [[max(others[q], key=lambda i: scores[h, q, i].item()) for q in rows] for h in range(len(scores))]


def slow_effect_table(blocks, queries, bins, sizes=SIZES, length=LENGTH, heads=None, key=KEY) -> pd.DataFrame:
    """Every operation one by one, then means by pandas."""
    last = queries == "last"
    edges = [length - 1, length] if last else [round(i * length / bins) for i in range(bins + 1)]
    rows = []
    for block in blocks:
        turned = sink_borrows(block, key) if last else None
        for h in range(block.weights.shape[0]):
            v = block.values[h].tolist()
            for q, position in enumerate(block.queries.tolist()):
                if last and position != length - 1:
                    continue
                (b,) = [i for i in range(len(edges) - 1) if edges[i] <= position < edges[i + 1]]
                alpha, visible = block.weights[h, q].tolist(), block.visible[q].tolist()
                for n in (n for n in sizes if n > 1):
                    for state, name, f, other, mass, extreme in slow_effects(
                        alpha, v, visible, n, turned[h][q] if last else None
                    ):
                        place = (block.layer, h, edges[b], edges[b + 1], n, state, name)
                        rows.append((*place, float(f), float(other), float(f < other), mass, float(extreme)))
    every = pd.DataFrame(rows, columns=[*PLACE, *EFFECT_METRICS])
    groups = every.groupby(PLACE)
    table = groups[list(EFFECT_METRICS)].mean()
    table.insert(0, "queries", groups.size())
    return in_order(table.reset_index())


# GPT-2 (Conv1D, learned positions), grouped queries, windows shorter than the text, layers of both kinds, learned sinks.
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("queries", ["all", "last"])
def test_the_effect_is_the_slow_loops(name, queries):
    # float64, so that no near tie falls to one side here and to the other there
    model, ids = small_model(name, torch.float64), text()
    (got,) = measured(model, ids, SinkEffectTable(LENGTH, queries, SIZES, bins=3, key=KEY))
    expected = slow_effect_table(collected(model, ids), queries, bins=3)
    assert list(got) == [c for c in EFFECT_SCHEMA if c != "document"]
    pd.testing.assert_frame_equal(in_order(got)[expected.columns], expected, check_dtype=False, rtol=1e-9, atol=1e-9)
    # what the architectures are here for
    windowed = name in ("mistral", "gemma3", "gpt_oss")
    states = {"hidden"} if name == "mistral" and queries == "last" else {"selected", "unselected"}
    assert states | ({"hidden"} if windowed else set()) == set(expected["sink"])
    if states != {"hidden"}:
        assert set(expected["without"]) == ({"sink", "other", "direction"} if queries == "last" else {"sink"})
        assert (expected["f_with"] != expected["f_without"]).any()
        assert expected["extreme"].mean() < 1 and expected["lower"].max() > 0
        assert expected["extreme"].max() > 0 or queries == "last"


def test_the_effect_in_plain_torch(monkeypatch):
    """What other devices than the CPU run."""
    monkeypatch.setattr(geometry, "_on_cpu", geometry._in_torch)
    model, ids = small_model("gemma3", torch.float64), text()
    for queries in ("all", "last"):
        (got,) = measured(model, ids, SinkEffectTable(LENGTH, queries, SIZES, bins=3, key=KEY))
        expected = slow_effect_table(collected(model, ids), queries, bins=3)
        got = in_order(got)[expected.columns]
        pd.testing.assert_frame_equal(got, expected, check_dtype=False, rtol=1e-9, atol=1e-9)


def test_the_control_leaves_another_source_out_than_the_sink():
    """A model whose sink is the best source, second or neither, so that `other` is each of the cases."""
    model, ids = small_model("llama", torch.float64), text()
    best = {int(block.weights[h, -1].argmax()) == 0 for block in collected(model, ids) for h in range(HEADS)}
    assert best == {True, False}
    (table,) = measured(model, ids, SinkEffectTable(LENGTH, "last", (2, 4), key=KEY))
    each = table.pivot(index=["layer", "head", "size", "sink"], columns="without", values="f_without")
    assert not each.isna().any(axis=None)
    for a, b in (("sink", "other"), ("sink", "direction"), ("other", "direction")):
        assert (each[a] != each[b]).any()
    each = table.pivot(index=["layer", "head", "size", "sink"], columns="without", values="f_with")
    assert (each.nunique(axis=1) == 1).all()


def test_n_of_1_and_n_that_leaves_nothing_have_no_row():
    sizes = (1, 2, WINDOW - 1, WINDOW, LENGTH - 2, LENGTH - 1, LENGTH)
    for name, most in (("llama", LENGTH - 2), ("mistral", WINDOW - 1)):
        (table,) = measured(small_model(name), text(), SinkEffectTable(LENGTH, "all", sizes, bins=LENGTH))
        assert 1 not in set(table["size"]) and table["size"].max() == most
        seen = table[table["sink"] != "hidden"]  # one row a query: bins = LENGTH. T = query + 1
        assert (seen["size"] < seen["query_from"] + 1 - 1).all() and (seen["query_from"] >= 3).all()
        for n in set(seen["size"]):
            there = seen[seen["size"] == n]
            last = WINDOW if name == "mistral" else LENGTH
            queries = range(n + 1, last)
            assert sorted(there["query_from"]) == sorted(list(queries) * LAYERS * HEADS)
        hidden = table[table["sink"] == "hidden"]
        assert hidden["query_from"].min() == WINDOW if name == "mistral" else hidden.empty


def test_hidden_sinks_are_counted_and_left_out_of_the_others():
    """Windows of five: the queries 5 to 18 see no sink, 0 to 4 do; whatever the bins, none is lost or counted twice."""
    (table,) = measured(small_model("mistral"), text(), SinkEffectTable(LENGTH, "all", (2, 3), bins=2))
    hidden = table[table["sink"] == "hidden"]
    assert (hidden["f_with"] == hidden["f_without"]).all()
    assert not hidden[["lower", "mass", "extreme"]].any(axis=None)
    assert (hidden.groupby(["layer", "head", "size"])["queries"].sum() == LENGTH - WINDOW).all()
    seen = table[table["sink"] != "hidden"].groupby(["layer", "head", "size"])["queries"].sum()
    assert (seen.xs(2, level="size") == 2).all()  # queries 3 and 4 have 4 and 5 sources
    assert (seen.xs(3, level="size") == 1).all()
    assert (table.loc[table["sink"] != "hidden", "mass"] > 0).all()


def test_sizes_of_which_none_says_anything_give_an_empty_table():
    for sizes in ((1,), (LENGTH - 1,), (1, LENGTH)):
        (table,) = measured(small_model("llama"), text(), SinkEffectTable(LENGTH, "all", sizes))
        assert table.empty


def rows_of(weights, values, visible=None, **more) -> Block:
    """Of (head, query, source) weights and (head, source, dim) values; the queries are the last positions, causal."""
    queries, sources = weights.shape[1:]
    position = torch.arange(sources - queries, sources)
    visible = position[:, None] >= torch.arange(sources) if visible is None else visible
    return Block(0, position, weights, values, visible, None, **more)


def test_a_planted_sink_lowers_f():
    """Two alike and heavy, three that give little, and a shorter sink on the other side of the origin.

    With the sink, s_2 = y_0 + y_1 lies near the origin: the unselected are all nearer than either. Without it,
    s_2 = y_1 + y_2 is nearest to these two.
    """
    values = torch.tensor(
        [[[-0.9, 0.0], [1.0, 0.1], [1.0, -0.1], [0.0, 0.1], [0.1, 0.0], [0.0, -0.1]]], dtype=torch.float64
    )
    weights = torch.tensor([[[0.35, 0.34, 0.28, 0.01, 0.01, 0.01]]], dtype=torch.float64)
    block = rows_of(weights, values)
    effect = SinkEffectTable(6, "last", (2,), key=KEY)
    effect(block)
    table = effect.table().set_index("without")
    assert (table["sink"] == "selected").all() and (table["extreme"] == 1).all()
    assert (table["mass"] == 0.35).all() and (table["queries"] == 1).all()
    # D_0 = ‖y_1‖ = 0.342, D_1 = ‖y_0‖ = 0.315, D_2 = 0.262 and the other three below 0.06: FP = 4, FN = 2, so F = 0
    assert (table["f_with"] == 0).all()
    assert table.loc["sink", "f_without"] == 1 and table.loc["sink", "lower"] == 1
    # leaving the best other one out, the sink and source 2 cancel as well
    assert table.loc["other", "f_without"] == 0 and table.loc["other", "lower"] == 0
    ((turned,),) = sink_borrows(block, KEY)
    expected = [float(r[3]) for r in slow_effects(
        weights[0, 0].tolist(), values[0].tolist(), [True] * 6, 2, turned) if r[1] == "direction"]  # fmt: skip
    assert table.loc["direction", "f_without"] == expected[0]


def test_ties_and_weights_of_zero_are_the_lower_indexs():
    """A sink as heavy as others is before them; also with weight 0 among zeros."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, 7, 4, generator=generator, dtype=torch.float64)
    weights = torch.tensor([
        [0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1],  # in the top 2
        [0.0, 0.6, 0.4, 0.0, 0.0, 0.0, 0.0],  # not in the top 2, the third
        [0.125, 0.25, 0.125, 0.125, 0.125, 0.125, 0.125],  # the second of the top 2
    ]).double()[:, None]  # fmt: skip
    effect = SinkEffectTable(7, "all", (2, 3), bins=1)
    effect(rows_of(weights, values))
    states = effect.table().set_index(["head", "size"])["sink"].to_dict()
    assert states == {(0, 2): "selected", (1, 2): "unselected", (2, 2): "selected",
                      (0, 3): "selected", (1, 3): "selected", (2, 3): "selected"}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("limits", [{"MAX_ROWS": 1}, {"MAX_ROWS": 4}, {"BLOCK_BYTES": 4 * HEADS * LENGTH * 7}])
@pytest.mark.parametrize("queries", ["all", "last"])
def test_blocks_change_nothing(name, limits, queries, monkeypatch):
    model, ids = small_model(name, torch.float64), text()

    def make():
        return SinkEffectTable(LENGTH, queries, SIZES, bins=3, key=KEY), SinksTable(LENGTH)

    once = measured(model, ids, *make())
    blocks = []
    for limit, value in limits.items():
        monkeypatch.setattr(attention, limit, value)
    with observe(model, blocks.append):
        in_parts = measured(model, ids, *make())
    assert len(blocks) > LAYERS
    for a, b in zip(once, in_parts, strict=True):
        pd.testing.assert_frame_equal(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("queries", ["all", "last"])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("distances", [("euclidean",), ("cosine", "euclidean")])
def test_neither_observer_changes_the_others_table(dtype, queries, by_hand, distances):
    """What one computes the other takes; alone, together and in either order the numbers are the same to the bit."""
    model, ids = small_model("gemma3", dtype), text()
    sizes = (1, 2, 4, 8, 16)

    def tables(*kinds):
        makers = {
            "effect": lambda: SinkEffectTable(LENGTH, queries, sizes, bins=3, key=KEY),
            "sets": lambda: SeparabilityTable(LENGTH, queries, sizes, distances=distances, bins=3, key=KEY),
        }
        observers = {k: makers[k]() for k in kinds}
        if by_hand:  # in this very order, which observe() would not keep
            blocks = []
            with torch.no_grad(), observe(model, blocks.append):
                model(ids)
            for block in (replace(b, shared={}) for b in blocks):
                for observer in observers.values():
                    observer(block)
        else:
            measured(model, ids, *observers.values())
        return {k: o.table() for k, o in observers.items()}

    alone = tables("effect") | tables("sets")
    for pair in (tables("effect", "sets"), tables("sets", "effect")):
        for kind, table in pair.items():
            pd.testing.assert_frame_equal(table, alone[kind], check_exact=True)
    ranked = alone["sets"].query("control == 'none' and distance == 'euclidean' and size > 1")
    with_sink = alone["effect"].query("without == 'sink'").groupby(["layer", "head", "query_from", "size"])
    counts = with_sink["queries"].sum()
    there = ranked.set_index(["layer", "head", "query_from", "size"])["queries"].loc[counts.index]
    assert (counts <= there).all() and (counts == there).any()


def test_together_with_other_sizes():
    """One asks for sizes that the other lacks: neither misses any, neither gets more."""
    model, ids = small_model("llama", torch.float64), text()
    for mine, others in (((2, 4), (1, 2, 4, 8)), ((2, 4, 8), (4,)), ((1, 2, 8), (4, 8, 16))):

        def make(mine=mine, others=others):
            return SinkEffectTable(LENGTH, sizes=mine, key=KEY), SeparabilityTable(LENGTH, sizes=others, key=KEY)

        alone = [measured(model, ids, observer)[0] for observer in make()]
        for a, b in zip(alone, measured(model, ids, *make()), strict=True):
            pd.testing.assert_frame_equal(a, b, rtol=1e-10, atol=1e-12)
        assert set(alone[0]["size"]) == {n for n in mine if n > 1} and set(alone[1]["size"]) == set(others)


def test_the_key_decides_the_borrowed_direction_and_nothing_else():
    model, ids = small_model("llama", torch.float64), text()
    first, second, again = (
        measured(model, ids, SinkEffectTable(LENGTH, "last", (2, 4, 8), key=key))[0] for key in ("a", "b", "a")
    )
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    drawn = first["without"] == "direction"
    pd.testing.assert_frame_equal(first[~drawn], second[~drawn], check_exact=True)
    assert (first.loc[drawn, "f_without"] != second.loc[drawn, "f_without"]).any()


def test_wrong_queries_are_refused():
    with pytest.raises(GeomlibError, match="queries = 'some' is not usable: give all or last") as caught:
        SinkEffectTable(LENGTH, "some")
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


# --- sinks wherever they are ------------------------------------------------------------------------------------------


def slow_quantile(x, share):
    """Linear between the two nearest of the sorted numbers."""
    x = sorted(x)
    at = share * (len(x) - 1)
    low = math.floor(at)
    return x[low] + (at - low) * (x[min(low + 1, len(x) - 1)] - x[low])


def slow_sinks(block: Block) -> pd.DataFrame:
    """Source by source in Python floats, of one block of all rows; the median is the lower of two middle ones."""
    rows = []
    own, visible = block.queries.tolist(), block.visible.tolist()
    seen = [[j for j in range(len(row)) if row[j]] for row in visible]
    for h in range(block.weights.shape[0]):
        v, alpha = block.values[h].tolist(), block.weights[h].tolist()
        norms = [math.hypot(*x) for x in v]
        winner = [min(js, key=lambda j: (-row[j], j)) for js, row in zip(seen, alpha, strict=True)]
        for i in range(len(v)):
            after = [q for q, position in enumerate(own) if position > i and visible[q][i]]
            received = sum(alpha[q][i] for q in after) / len(after) if after else 0.0
            won = sum(winner[q] == i for q in after) / max(len(after), 1)
            short = norms[i] < SHORT * statistics.median_low(norms)
            found = received >= MASS and short and len(after) >= LATER
            if i > 0 and not found:
                continue
            others = [j for j in range(len(v)) if j != i]
            cosines = [
                sum(map(math.prod, zip(v[i], v[j], strict=True))) / (norms[i] * norms[j])
                if norms[i] * norms[j]
                else 0.0
                for j in others
            ]
            ratio = statistics.fmean(norms[j] for j in others) / max(norms[i], 1e-300)
            quantiles = [slow_quantile(cosines, share) for share in (0.05, 0.5, 0.95)]
            negative = sum(c < 0 for c in cosines) / len(cosines)
            rows.append(
                (block.layer, h, i, int(found), len(after), received, won)
                + (ratio, statistics.fmean(cosines), *quantiles, negative)
            )
    return pd.DataFrame(rows, columns=[c for c in SINKS_SCHEMA if c != "document"])


def sinks(*blocks: Block, length: int | None = None) -> pd.DataFrame:
    observer = SinksTable(length or blocks[0].weights.shape[-1])
    for block in blocks:
        observer(block)
    return observer.table()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "gpt_oss"])
def test_sinks_are_the_slow_loops(name):
    model, ids = small_model(name, torch.float64), text()
    (got,) = measured(model, ids, SinksTable(LENGTH))
    expected = pd.concat([slow_sinks(block) for block in collected(model, ids)], ignore_index=True)
    assert list(got) == [c for c in SINKS_SCHEMA if c != "document"] and len(got) >= LAYERS * HEADS
    pd.testing.assert_frame_equal(got, expected, check_dtype=False, rtol=1e-9, atol=1e-7)


T, PLANTED = 41, 12  # an odd number of sources, so that there is one median


def planted(
    mass=0.5, norm=0.2, source=PLANTED, sources=T, heads=1, own=None, dim=6, seed=0, window=None, axes=False
) -> Block:
    """All queries that see `source` give it `mass` (the query at it gives it `own`), the rest they spread over the others; its
    value has length `norm`, and the others have length 1, to the bit with `axes`."""
    values = torch.randn(heads, sources, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = (values == values.amax(-1, keepdim=True)).double() if axes else values
    values /= values.norm(dim=-1, keepdim=True)
    values[:, source] *= norm
    position = torch.arange(sources)
    visible = position[:, None] >= position
    if window:
        visible &= position[:, None] - position < window
    given = torch.full((sources,), float(mass), dtype=torch.float64)
    if own is not None:
        given[source] = own
    rest = visible.double()
    rest[:, source] = 0
    count = rest.sum(-1)
    given = torch.where(count == 0, 1.0, given) * visible[:, source]
    weights = rest * ((1 - given) / count.clamp(min=1))[:, None]
    weights[:, source] = given
    assert torch.allclose(weights.sum(-1), torch.ones(sources, dtype=torch.float64))
    return Block(0, position, weights.expand(heads, -1, -1).clone(), values, visible, None)


def found(table: pd.DataFrame) -> set[int]:
    return set(table.loc[table["found"] == 1, "source"])


def test_a_sink_in_the_middle_of_the_text_is_found():
    table = sinks(planted(heads=2)).set_index(["head", "source"])
    assert set(table.index) == {(0, 0), (0, PLANTED), (1, 0), (1, PLANTED)}
    for head in (0, 1):
        first, middle = table.loc[(head, 0)], table.loc[(head, PLANTED)]
        assert middle["found"] == 1 and first["found"] == 0
        assert middle["later"] == T - 1 - PLANTED and first["later"] == T - 1
        assert middle["received"] == pytest.approx(0.5, abs=1e-12)
        assert middle["times_smaller"] == pytest.approx(5, abs=1e-12)
        assert first["times_smaller"] == pytest.approx((39 + 0.2) / 40, abs=1e-12)


def test_source_0_is_found_by_the_same_rule():
    for norm, expected in ((0.2, {0}), (1.0, set())):
        table = sinks(planted(source=0, norm=norm))
        assert found(table) == expected and list(table["source"]) == [0]
        assert table["received"].item() == pytest.approx(0.5, abs=1e-12)
        assert table["times_smaller"].item() == pytest.approx(1 / norm, abs=1e-12)


@pytest.mark.parametrize(
    ("decoy", "why"),
    [
        ({"norm": 1.0}, "much mass, long value"),
        ({"norm": 3.0}, "much mass, longer value"),
        ({"mass": 0.05}, "short value, little mass"),
        ({"mass": 0.0, "own": 1.0}, "short value, mass from itself alone"),
        ({"mass": MASS - 1e-6, "own": 1.0}, "its weight on itself must not count"),
        ({"mass": MASS - 1e-6}, "just too little"),
        ({"norm": SHORT, "axes": True}, "exactly half of the median is not short"),
        ({"source": T - LATER}, "15 later queries"),
        ({"source": T - 1, "mass": 1.0}, "the last"),
        ({"window": LATER}, "a window of 16 shows it to 15 later queries"),
    ],
)
def test_decoys_are_not_found(decoy, why):
    block = planted(**decoy)
    assert found(sinks(block)) == set(), why
    assert list(sinks(block)["source"]) == [0]
    pd.testing.assert_frame_equal(sinks(block), slow_sinks(block), check_dtype=False, rtol=1e-12, atol=1e-7)


@pytest.mark.parametrize(
    ("real", "why"),
    [
        ({"mass": MASS + 1e-6}, "just enough"),
        ({"mass": MASS + 1e-6, "own": 0.0}, "its weight on itself must not count"),
        ({"norm": math.nextafter(SHORT, 0), "axes": True}, "just short"),
        ({"source": T - 1 - LATER}, "16 later queries"),
        ({"window": LATER + 1}, "a window of 17 shows it to 16 later queries, and their mean counts"),
        ({"norm": 0.0}, "no value at all"),
    ],
)
def test_at_the_edge_they_are(real, why):
    block = planted(**real)
    source = real.get("source", PLANTED)
    assert found(sinks(block)) == {source}, why
    pd.testing.assert_frame_equal(sinks(block), slow_sinks(block), check_dtype=False, rtol=1e-12, atol=1e-7)


def test_the_mean_weight_that_makes_a_sink_is_included():
    """16 later queries, four that give 1 and one 0.8: their mean is the float 0.3 to the bit."""
    assert (LATER, MASS) == (16, 0.3)
    block = planted(mass=0.0, own=0.0, sources=LATER + 5, source=4)
    for row, weight in zip(range(5, 10), (1.0, 1.0, 1.0, 1.0, 0.8), strict=True):
        block.weights[:, row] *= 1 - weight
        block.weights[:, row, 4] = weight
    table = sinks(block)
    assert found(table) == {4} and table.loc[1, "received"] == 0.3
    block.weights[:, 9, 4] -= 1e-14
    assert found(sinks(block)) == set()


def test_only_queries_that_see_a_source_count():
    """A window hides the sink: what its 19 viewers give is the mean, over 19."""
    block = planted(source=0, window=20)
    row = sinks(block).iloc[0]
    assert row["later"] == 19 and row["received"] == pytest.approx(0.5, abs=1e-12) and row["found"] == 1
    row = sinks(planted(source=0, window=1)).iloc[0]  # nobody but itself
    assert row["later"] == 0 and row["received"] == 0 and row["found"] == 0


def test_norms_and_cosines_are_against_all_other_sources():
    """Ten sources in the plane at known angles, of known lengths; most are hidden from most by a window of two."""
    angles = [0, 90, 90, 120, 180, 180, 180, 60, 120, 0]
    lengths = [0.5, 1, 2, 1, 3, 1, 1, 4, 1, 4]
    values = torch.tensor([[[r * math.cos(math.radians(a)), r * math.sin(math.radians(a))]
                            for a, r in zip(angles, lengths, strict=True)]], dtype=torch.float64)  # fmt: skip
    position = torch.arange(10)
    visible = (position[:, None] >= position) & (position[:, None] - position < 2)
    weights = visible.double() / visible.sum(-1, keepdim=True)
    row = sinks(Block(3, position, weights[None], values, visible, None)).iloc[0]
    assert row["layer"] == 3 and row["later"] == 1 and row["received"] == 0.5
    assert row["times_smaller"] == pytest.approx(18 / 9 / 0.5)
    # sorted: -1 -1 -1 -0.5 -0.5 0 0 0.5 1; cos 90 is 6e-17 in floats
    assert row["cosine_mean"] == pytest.approx(-2.5 / 9)
    assert row["cosine_low"] == pytest.approx(-1) and row["cosine_median"] == pytest.approx(-0.5)
    assert row["cosine_high"] == pytest.approx(0.5 + 0.6 * 0.5)  # 0.95 * 8 = 7.6
    assert row["cosine_negative"] == pytest.approx(5 / 9)


def test_quantiles_of_cosines_are_at_5_and_95_percent_to_the_digits_of_float64():
    """Of a wide window, where a share that is off by 1e-9 shows."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 2001, 2, generator=generator, dtype=torch.float64)
    weights = torch.full((1, 1, 2001), 1 / 2001, dtype=torch.float64)
    row = sinks(rows_of(weights, values)).iloc[0]
    unit = (values[0] / values[0].norm(dim=-1, keepdim=True)).tolist()
    cosines = [sum(map(math.prod, zip(unit[0], x, strict=True))) for x in unit[1:]]
    for name, share in (("low", 0.05), ("median", 0.5), ("high", 0.95)):
        assert row[f"cosine_{name}"] == pytest.approx(slow_quantile(cosines, share), abs=1e-12), name


def test_a_cosine_of_zero_is_not_negative():
    values = torch.eye(5, dtype=torch.float64)[None]
    values[0, 1] = -values[0, 0]
    weights = torch.ones(5, 5, dtype=torch.float64).tril()
    row = sinks(rows_of((weights / weights.sum(-1, keepdim=True))[None], values)).iloc[0]
    assert row["cosine_negative"] == 0.25 and row["cosine_mean"] == -0.25


@pytest.mark.parametrize("ends", [(1,), (7, 20), (PLANTED,), (PLANTED + 1,), tuple(range(1, T))])
def test_several_blocks_are_one_block(ends):
    block = planted(heads=2, own=0.9)
    pd.testing.assert_frame_equal(sinks(*cut(block, *ends)), sinks(block), rtol=1e-12, atol=1e-15)
    assert found(sinks(block)) == {PLANTED}


def test_layers_in_turn_and_windows_in_turn_are_kept_apart():
    """One observer, two layers whose blocks come in turn; then the same layers once more."""
    first = planted()
    second = replace(planted(mass=0.4, norm=0.1, source=20, seed=1), layer=1)
    blocks = [b for pair in zip(cut(first, 9, 30), cut(second, 9, 30), strict=True) for b in pair]
    expected = pd.concat([sinks(first), sinks(second)], ignore_index=True)
    pd.testing.assert_frame_equal(sinks(*blocks), expected, rtol=1e-12, atol=1e-15)
    twice = sinks(first, second, first, second)
    pd.testing.assert_frame_equal(twice, pd.concat([expected] * 2, ignore_index=True), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("which", [[0], [PLANTED], [0, PLANTED, 5], list(range(T))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_length_zero_give_finite_numbers(which, dtype):
    block = planted(heads=2)
    block.values[:, which] = 0
    block = replace(block, weights=block.weights.to(dtype), values=block.values.to(dtype), outputs=None)
    table = sinks(block)
    numbers = table[[c for c in table if c.startswith(("cosine", "times", "received"))]]
    assert torch.isfinite(torch.tensor(numbers.to_numpy())).all()
    assert (numbers.mean().abs() < math.inf).all()
    if 0 in which:
        assert not table.loc[table["source"] == 0, [c for c in table if c.startswith("cosine")]].any(axis=None)


def test_a_tiny_sink_is_measured_as_any_other():
    """Lengths whose square float32 cannot hold: 1e-25."""
    block = planted(norm=1e-25)
    block = replace(block, weights=block.weights.float(), values=block.values.float(), outputs=None)
    row = sinks(block).set_index("source").loc[PLANTED]
    assert row["times_smaller"] == pytest.approx(1e25, rel=1e-5)
    direct = planted(norm=1.0)
    v = direct.values[0]
    cosines = [float(v[PLANTED] @ v[j]) for j in range(T) if j != PLANTED]
    assert row["cosine_mean"] == pytest.approx(statistics.fmean(cosines), abs=1e-6)


def test_nothing_seen_is_an_empty_table():
    assert SinksTable(8).table().empty
    assert sinks(*cut(planted(), 20)[:1], length=T).empty  # the window's last query has not come
    assert SinkEffectTable(8).table().empty


def test_won_counts_the_source_winner_with_ties_to_the_lower_index():
    """Uniform weights in windows of three: every query's winner is the first that it sees."""
    position = torch.arange(8)
    visible = (position[:, None] >= position) & (position[:, None] - position < 3)
    weights = visible.double() / visible.sum(-1, keepdim=True)
    block = Block(0, position, weights[None], torch.eye(8, dtype=torch.float64)[None], visible, None)
    row = sinks(block).iloc[0]
    assert row["later"] == 2 and row["won"] == 1  # queries 1 and 2; query 0 is the source itself
    block.weights[0, 2, 1] += 0.01
    assert sinks(replace(block, shared={})).iloc[0]["won"] == 0.5
    block.weights[0, :, :] = 0  # rows of zeros, as a learned sink can leave them: the first that is visible
    assert sinks(replace(block, shared={})).iloc[0]["won"] == 1


def test_votes_for_sinks_elsewhere_move_to_the_sink():
    """A head that looks at source 12 whenever it can is Reset; if that counts as the sink, it is Mixer. The decoy is not."""
    from geomlib.taxonomy import TaxonomyTable, regimes

    block = planted(mass=0.9, heads=2)
    block.values[1, PLANTED] *= 10  # head 1: a long value, no sink
    observers = SinksTable(T), TaxonomyTable(T)
    for part in cut(block, 5, 20):
        for observer in observers:
            observer(part)
    heads = regimes(observers[1].table())
    moved = elsewhere(heads, observers[0].table()).set_index("head")
    assert list(moved["regime"]) == ["Reset", "Reset"]
    assert list(moved["regime_anywhere"]) == ["Mixer", "Reset"] and list(moved["changed"]) == [True, False]
    # the queries 13 to 40 have source 12 for a winner, of 40 that vote
    assert moved.loc[0, "elsewhere"] == pytest.approx(28 / 40, abs=1e-15) and moved.loc[1, "elsewhere"] == 0
    pd.testing.assert_frame_equal(moved.reset_index()[list(heads)], heads)


def test_votes_for_the_sink_itself_are_not_moved():
    """Source 0 is found by the rule too; its votes are where they belong."""
    from geomlib.taxonomy import TaxonomyTable, regimes

    block = planted(mass=0.9, source=0)
    observers = SinksTable(T), TaxonomyTable(T)
    for observer in observers:
        observer(block)
    assert found(observers[0].table()) == {0}
    heads = regimes(observers[1].table())
    moved = elsewhere(heads, observers[0].table()).iloc[0]
    assert heads["vote_sink"].item() == 1
    assert moved["elsewhere"] == 0 and moved["regime_anywhere"] == "Mixer" and not moved["changed"]


def test_opposition_of_one_is_where_the_origin_is_as_near_as_the_sink():
    """-2 <y_0, s'> / ‖y_0‖² in Python floats, and what it is said to mean."""
    model, ids = small_model("gemma3", torch.float64), text()
    above = below = 0
    for block in collected(model, ids):
        got = opposition(block.weights, block.values, (2, 5, 16), block.visible)
        for h in range(HEADS):
            v = block.values[h].tolist()
            for q in range(LENGTH):
                alpha, visible = block.weights[h, q].tolist(), block.visible[q].tolist()
                sources = [i for i in range(LENGTH) if visible[i]]
                y = [[a * x for x in row] for a, row in zip(alpha, v, strict=True)]
                for c, n in enumerate((2, 5, 16)):
                    selected = sorted(sources, key=lambda i: (-alpha[i], i))[:n]
                    if 0 not in selected or n >= len(sources):
                        assert got[h, q, c].isnan()
                        continue
                    others = [math.fsum(y[i][d] for i in selected if i) for d in range(len(v[0]))]
                    square = sum(x * x for x in y[0])
                    expected = -2 * sum(a * b for a, b in zip(y[0], others, strict=True)) / square
                    assert float(got[h, q, c]) == pytest.approx(expected, rel=1e-9, abs=1e-9)
                    aggregate = [a + b for a, b in zip(y[0], others, strict=True)]
                    far, origin = math.dist(y[0], aggregate), math.hypot(*aggregate)
                    if abs(expected - 1) > 1e-9:
                        assert (far > origin) == (expected > 1)
                    above, below = above + (expected > 1), below + (expected < 1)
    assert above > 8 and below > 20


def test_no_opposition_where_there_is_no_sink_or_it_gives_nothing():
    values = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.5, 0.4], [0.0, 0.0, 1.0], [0.0, 0.6, 0.4]])
    visible = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [False, True, True]])
    got = opposition(weights, values, (1, 2, 3), visible)
    expected = torch.tensor([[0.0, 1.0, torch.nan], [torch.nan] * 3, [torch.nan] * 3, [torch.nan] * 3])
    torch.testing.assert_close(got, expected.double(), equal_nan=True, rtol=1e-6, atol=0)
    assert opposition(weights, values * 0, (2,)).isnan().all()


# --- in a study -------------------------------------------------------------------------------------------------------


def folder_with_a_model(place, **settings):
    """A model and a tokenizer of one token a word, saved, and texts of such words."""
    from conftest import randomize
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<unk>", "<s>", *(f"w{i}" for i in range(60))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        **{"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128} | settings
    )  # fmt: skip
    randomize(LlamaForCausalLM(config)).save_pretrained(place / "model")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>").save_pretrained(
        place / "model"
    )
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(f"w{i}" for i in torch.randint(60, (80,), generator=generator).tolist()) for _ in range(40)]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return {"model": str(place / "model"), "text": str(place / "texts.jsonl"), "windows": 2, "length": 24, "bins": 3}


@pytest.mark.parametrize("queries", ["all", "last"])
def test_a_study_of_the_sink(tmp_path, queries):
    """The tables of a study are those of its windows, and fit their schema."""
    from geomlib.corpora import take_windows, text_corpus
    from geomlib.models import load_model
    from geomlib.study import ANALYSES, Study, check_table, load_table

    fields = folder_with_a_model(tmp_path)
    study = Study(**fields, queries=queries, sizes=(1, 2, 4, 8), controls=())
    model = load_model(study.model, device="cpu")
    names = ["separability", "sinks", "sink_effect"]
    tables = study.run(tmp_path / "out", model, analyses=names)
    alone = Study(**fields, queries=queries, sizes=(1, 2, 4, 8), controls=()).run(tmp_path / "alone", model)
    pd.testing.assert_frame_equal(alone, tables["separability"], check_exact=True)
    windows, _ = take_windows(text_corpus(study.text), model.tokenizer, 2, 24)
    for name in names:
        check_table(tables[name], name)
        assert list(tables[name]) == list(ANALYSES[name].schema)
        pd.testing.assert_frame_equal(load_table(tmp_path / "out", name), tables[name])
    for window in windows:
        key = f"0 {window.document} {window.start}"
        effect, found_there = SinkEffectTable(24, queries, study.sizes, 3, key), SinksTable(24)
        measured(model.hf, torch.tensor([window.input_ids]), effect, found_there)
        for name, observer in (("sink_effect", effect), ("sinks", found_there)):
            mine = tables[name][tables[name]["document"] == window.document].drop(columns="document")
            pd.testing.assert_frame_equal(mine.reset_index(drop=True), observer.table(), check_dtype=False)


def test_a_study_whose_sizes_say_nothing_about_the_sink_says_so(tmp_path):
    from geomlib.study import Study

    fields = folder_with_a_model(tmp_path)
    for sizes in ((1,), (23,)):
        with pytest.raises(GeomlibError, match=r"N = 1 apart, leaves two sources out: give other sizes") as caught:
            Study(**fields, sizes=sizes).run(tmp_path / f"out{sizes[0]}", analyses=["sinks", "sink_effect"])
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


# --- the default model on real text -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "layers", "sizes"), [("last", (0, 1, 7, 15, 22, 29), (1, 2, 4, 8, 32, 64)), ("all", (15,), (2, 8))]
)
def test_the_default_models_effect_against_the_slow_loop(real, queries, layers, sizes):
    """All heads of these layers, with both controls at the last query."""
    model, ids = real
    (got,) = measured(model.hf, ids, SinkEffectTable(REAL_LENGTH, queries, sizes, bins=4, key=KEY))
    blocks = [b for b in collected(model.hf, ids) if b.layer in layers]
    expected = slow_effect_table(blocks, queries, 4, sizes, REAL_LENGTH)
    got = in_order(got[got["layer"].isin(layers)])
    assert expected.groupby(["layer", "head"]).ngroups == 9 * len(layers)
    pd.testing.assert_frame_equal(got[expected.columns], expected, check_dtype=False, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_default_models_sinks_against_the_slow_loop(real):
    """Every layer and head, and whatever other sources the rule finds."""
    model, ids = real
    (got,) = measured(model.hf, ids, SinksTable(REAL_LENGTH))
    expected = pd.concat([slow_sinks(b) for b in collected(model.hf, ids)], ignore_index=True)
    assert (expected["source"] == 0).sum() == 270 and expected["found"].sum() > 100
    pd.testing.assert_frame_equal(got, expected, check_dtype=False, rtol=1e-9, atol=1e-6)
    print(expected.loc[expected["source"] > 0, ["layer", "head", "source", "received", "times_smaller"]])


# --- why it hurts, and what if a sink is one anywhere ------------------------------------------------------------------


def test_whether_the_ball_of_the_selected_holds_the_origin():
    """Against plain arithmetic, in many small operations, with and without the sink: rho_max >= ‖s_N‖."""
    g = torch.Generator().manual_seed(0)
    first, seen_inside, sizes = torch.arange(9) == 0, [], (1, 2, 4)
    for _ in range(40):
        weights, visible = torch.rand(2, 3, 9, generator=g).double(), torch.rand(3, 9, generator=g) < 0.8
        values = torch.randn(2, 9, 4, generator=g).double()
        weights = weights * visible
        for exclude in (None, first):
            got = holds_origin(weights, values, sizes, visible, exclude)
            for h, q, (c, size) in product(range(2), range(3), enumerate(sizes)):
                seen = [i for i in range(9) if visible[q, i] and (exclude is None or i)]
                if size >= len(seen):
                    assert got[h, q, c].isnan()
                    continue
                chosen = sorted(seen, key=lambda i: (-weights[h, q, i].item(), i))[:size]
                y = {i: [weights[h, q, i].item() * x for x in values[h, i].tolist()] for i in chosen}
                total = [sum(y[i][d] for i in chosen) for d in range(4)]
                inside = max(math.dist(y[i], total) for i in chosen) >= math.hypot(*total)
                if size > 1:
                    assert got[h, q, c].item() == inside
                    seen_inside.append(inside)
            pull = opposition(weights, values, sizes, visible)
            if exclude is None:  # the sink's own ball is one of those of the selected
                assert (got[pull >= 1] == 1).all()
    assert 0.1 < sum(seen_inside) / len(seen_inside) < 0.9


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_table_of_pulls_is_of_the_operations_that_select_the_sink(name):
    model, ids, sizes, total = small_model(name, torch.float64), text(), (2, 5), 0
    for block in collected(model, ids):
        table = pulls(block, sizes).set_index(["head", "query", "size"])
        whole = separability(block.weights, block.values, sizes, visible=block.visible, without=0)
        parts = [opposition, holds_origin]
        pull, inside = (f(block.weights, block.values, sizes, block.visible) for f in parts)
        first = torch.arange(LENGTH) == 0
        alone = holds_origin(block.weights, block.values, sizes, block.visible, first)
        expected = {
            (h, q, n): [x[h, q, c].item() for x in (pull, inside, alone, whole.f, whole.f_without)]
            for h, q, (c, n) in product(range(HEADS), range(LENGTH), enumerate(sizes))
            if not pull[h, q, c].isnan() and not whole.f_without[h, q, c].isnan()
        }
        assert set(table.index) == set(expected) and (table["layer"] == block.layer).all()
        total += len(table)
        for place, row in expected.items():
            assert table.loc[place, list(table.columns)[1:]].tolist() == pytest.approx(row, rel=1e-12)
    assert total > 20


def test_votes_for_sinks_elsewhere_are_moved_to_the_sink():
    votes = {"vote_current": [0.1, 0.0, 0.9], "vote_sink": [0.2, 0.4, 0.0], "vote_other": [0.7, 0.6, 0.1]}
    heads = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "queries": 20, **votes})
    heads["regime"] = ["Reset", "Reset", "Retriever"]
    rows = [  # head, source, found, later, won
        (0, 0, 0, 1, 10, 1.0),  # source 0 is counted already
        (0, 0, 4, 1, 6, 0.5),  # 3 votes, of one document
        (0, 0, 5, 1, 5, 0.6),  # 3 of another
        (0, 1, 3, 0, 9, 1.0),  # not found by the rule
        (0, 1, 6, 1, 4, 0.5),  # 2 votes: 0.5 for the sink, 0.5 for others, a tie
        (1, 0, 2, 1, 2, 0.5),
    ]
    table = pd.DataFrame(rows, columns=["layer", "head", "source", "found", "later", "won"])
    got = elsewhere(heads.sample(frac=1, random_state=1), table).sort_values(["layer", "head"])
    assert got["elsewhere"].tolist() == pytest.approx([0.3, 0.1, 0.05])
    assert got["regime_anywhere"].tolist() == ["Mixer", "Reset", "Retriever"]
    assert got["changed"].tolist() == [True, False, False]
    none = elsewhere(heads, table[table["source"] == 0])
    assert (none["elsewhere"] == 0).all() and not none["changed"].any()
