"""Means and intervals against tables small enough to work out by hand."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from geomlib.stats import (
    advantage,
    by_size,
    document_means,
    head_means,
    interval_of,
    positive_share,
    regime_shares,
    summary,
    with_interval,
)


def table(*rows, **constant) -> pd.DataFrame:
    """Rows of (document, layer, head, f), the rest constant."""
    default = {
        "query_from": 0, "query_to": 8, "queries": 8, "size": 2, "ranking": "attention", "distance": "euclidean",
        "control": "none",
    }  # fmt: skip
    found = pd.DataFrame(rows, columns=["document", "layer", "head", "f"])
    return found.assign(**(default | constant))


def test_queries_count_once_each():
    bins = pd.concat(
        [
            table(("a", 0, 0, 1.0), queries=1, query_from=0, query_to=1),
            table(("a", 0, 0, 0.5), queries=3, query_from=1, query_to=4),
        ]
    )
    (mean,) = head_means(bins)["f"]
    assert mean == pytest.approx((1 * 1.0 + 3 * 0.5) / 4)  # and not (1.0 + 0.5) / 2


def test_heads_then_layers_then_documents():
    """Unequal numbers everywhere, so that every other order of averaging gives another number."""
    uneven = table(
        ("a", 0, 0, 0.0), ("a", 0, 1, 1.0), ("a", 0, 2, 1.0),  # layer 0: 2/3
        ("a", 1, 0, 0.2),  # layer 1: 0.2; document a: 13/30
        ("b", 0, 0, 0.9),  # document b: 0.9
    )  # fmt: skip
    means = document_means(uneven)[2]
    assert means.to_dict() == {"a": pytest.approx(13 / 30), "b": pytest.approx(0.9)}
    found = summary(uneven).iloc[0]
    assert found["mean"] == pytest.approx((13 / 30 + 0.9) / 2)
    others = [np.mean([0, 1, 1, 0.2, 0.9]), np.mean([0, 1, 1, 0.2]) / 2 + 0.45, (np.mean([0, 1, 1, 0.9]) + 0.2) / 2]
    assert min(abs(found["mean"] - x) for x in others) > 0.01


def test_groups_stay_apart():
    both = pd.concat(
        [
            table(("a", 0, 0, 0.1), ("b", 0, 0, 0.3), size=2),
            table(("a", 0, 0, 0.6), ("b", 0, 0, 0.8), size=4),
            table(("a", 0, 0, 0.9), ("b", 0, 0, 1.0), size=4, control="random"),
        ]
    )
    found = summary(both, by=["control", "size"]).set_index(["control", "size"])["mean"]
    assert found.to_dict() == pytest.approx({("none", 2): 0.2, ("none", 4): 0.7, ("random", 4): 0.95})
    assert summary(both.query("control == 'none'"))["mean"].tolist() == pytest.approx([0.2, 0.7])


def test_another_column():
    values = table(("a", 0, 0, 0.1), ("b", 0, 0, 0.1)).assign(margin=[1.0, 5.0])
    assert summary(values, "margin")["mean"].tolist() == [3.0]


# --- the bootstrap ----------------------------------------------------------------------------------------------------


def documents(values) -> pd.DataFrame:
    return table(*((f"d{i:03d}", 0, 0, v) for i, v in enumerate(values)))


def test_interval_against_a_slow_loop():
    """Another generator and a loop: two intervals of 2000 replicates agree to their own Monte Carlo error."""
    values = np.random.default_rng(1).gamma(2.0, 0.1, size=12)
    rng = np.random.default_rng(99)
    means = sorted(np.mean([values[rng.integers(12)] for _ in range(12)]) for _ in range(2000))
    low, high = means[50], means[1949]
    found = summary(documents(values)).iloc[0]
    width = high - low
    assert found["mean"] == pytest.approx(values.mean())
    assert found["low"] == pytest.approx(low, abs=0.06 * width)
    assert found["high"] == pytest.approx(high, abs=0.06 * width)
    assert found["low"] != low  # other draws
    assert found["documents"] == 12


def test_interval_of_two_documents_by_hand():
    """Means are a, (a + b) / 2, b with chances 1/4, 1/2, 1/4, so 95 % reaches from a to b and 40 % is the middle."""
    two = documents([0.2, 0.6])
    wide, narrow = summary(two).iloc[0], summary(two, level=0.4).iloc[0]
    assert (wide["low"], wide["high"]) == (pytest.approx(0.2), pytest.approx(0.6))
    assert (narrow["low"], narrow["high"]) == (pytest.approx(0.4), pytest.approx(0.4))


def test_the_seed_decides_the_interval():
    values = documents(np.random.default_rng(0).random(9))
    assert summary(values).equals(summary(values))
    assert not summary(values).equals(summary(values, seed=1))


def test_a_single_document_has_no_interval():
    found = summary(documents([0.5])).iloc[0]
    assert found["mean"] == 0.5 and found["documents"] == 1
    assert math.isnan(found["low"]) and math.isnan(found["high"])


def test_intervals_cover_the_truth():
    """400 studies of 30 normal documents: a 95 % interval covers in about 94 % (percentile intervals are a bit short)."""
    rng = np.random.default_rng(5)
    covered = 0
    for values in rng.normal(0.5, 0.1, size=(400, 30)):
        found = summary(documents(values), replicates=500).iloc[0]
        covered += found["low"] <= 0.5 <= found["high"]
    assert 0.90 <= covered / 400 <= 0.99


def test_heads_are_not_drawn():
    """Documents that agree give an interval of no width, however much their heads differ."""
    rows = [(d, layer, h, (layer + h) / 10) for d in "abc" for layer in range(2) for h in range(4)]
    found = summary(table(*rows)).iloc[0]
    assert found["low"] == pytest.approx(found["mean"]) == found["high"]


# --- advantage --------------------------------------------------------------------------------------------------------


def with_controls() -> pd.DataFrame:
    """Two heads in two bins, two rankings and distances; every F is told apart by its digits."""
    rows = []
    for head in (0, 1):
        for b in (0, 1):
            for i, distance in enumerate(("euclidean", "cosine")):
                place = {"query_from": 4 * b, "query_to": 4 * b + 4, "queries": 4 - b, "distance": distance}
                base = 0.1 * head + 0.02 * b + 0.004 * i
                rows += [
                    table(("a", 0, head, 0.50 + base), ranking="attention", **place),
                    table(("a", 0, head, 0.70 + base), ranking="contribution", **place),
                    table(("a", 0, head, 0.30 + 2 * base), ranking="random", control="random", **place),
                    table(("a", 0, head, 0.40 + 3 * base), ranking="attention", control="magnitude", **place),
                    table(("a", 0, head, 0.45 + 3 * base), ranking="contribution", control="magnitude", **place),
                ]
    return pd.concat(rows).sample(frac=1, random_state=0)  # no order to lean on


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("random", {"attention": lambda x: 0.20 - x, "contribution": lambda x: 0.40 - x}),
        ("magnitude", {"attention": lambda x: 0.10 - 2 * x, "contribution": lambda x: 0.25 - 2 * x}),
    ],
)
def test_advantage_pairs_like_with_like(over, expected):
    found = advantage(with_controls(), over)
    assert len(found) == 2 * 2 * 2 * 2
    assert not found.duplicated(["head", "query_from", "ranking", "distance"]).any()
    for row in found.itertuples():
        base = 0.1 * row.head + 0.02 * (row.query_from // 4) + 0.004 * (row.distance == "cosine")
        assert row.advantage == pytest.approx(expected[row.ranking](base)), row
        assert row.queries == 4 - row.query_from // 4


def test_advantage_without_a_partner_is_left_out():
    lonely = with_controls().query("control == 'none' or head == 0")
    assert set(advantage(lonely)["head"]) == {0}
    assert advantage(with_controls().query("control != 'random'")).empty


def test_positive_share():
    """Head means over documents: +0.1, -0.1, +0.2, 0; zero is not above zero."""
    rows = [("a", 0, 0, 0.3), ("a", 0, 1, 0.1), ("a", 1, 0, 0.2), ("a", 1, 1, 0.0)]
    rows += [("b", 0, 0, -0.1), ("b", 0, 1, -0.3), ("b", 1, 0, 0.2), ("b", 1, 1, 0.0)]
    found = positive_share(table(*rows).rename(columns={"f": "advantage"})).iloc[0]
    assert found["mean"] == 0.5
    # Draws aa, ab, bb have shares 3/4, 2/4, 1/4.
    assert (found["low"], found["high"], found["documents"]) == (0.25, 0.75, 2)


def test_positive_share_of_one_document_has_no_interval():
    found = positive_share(table(("a", 0, 0, 0.3), ("a", 0, 1, -0.3)).rename(columns={"f": "advantage"})).iloc[0]
    assert found["mean"] == 0.5
    assert math.isnan(found["low"]) and math.isnan(found["high"])


def test_a_table_without_queries_has_one_row_a_head():
    plain = table(("a", 0, 0, 0.2), ("a", 0, 1, 0.6)).drop(columns="queries")
    assert document_means(plain)[2].to_dict() == {"a": pytest.approx(0.4)}


def test_by_size():
    parts = [table(("a", 0, 0, f), ("b", 0, 0, f + 0.2), size=n, level=level, sink="none")
             for n, level, f in ((1, "x", 0.7), (2, "x", 0.1), (4, "x", 0.3), (2, "y", 0.5), (4, "y", 0.6))]  # fmt: skip
    wide = by_size(pd.concat(parts))
    assert list(wide.columns) == [2, 4]  # N = 1 says nothing
    assert wide.loc[("x", "none")].tolist() == pytest.approx([0.2, 0.4])
    assert wide.loc[("y", "none")].tolist() == pytest.approx([0.6, 0.7])
    assert list(by_size(pd.concat(parts), sizes=[1, 4]).columns) == [1, 4]
    texts = by_size(pd.concat(parts), sizes=[1, 4], intervals=True)
    assert texts.index.equals(wide.index) and all(re.match(r"-?\d\.\d\d( \[.*\])?$", t) for t in texts.stack().dropna())


def test_with_interval():
    means = pd.DataFrame({"mean": [0.5, 0.123], "low": [0.25, np.nan], "high": [0.75, np.nan]})
    assert with_interval(means).tolist() == ["0.50 [0.25, 0.75]", "0.12"]


# --- regime_shares ----------------------------------------------------------------------------------------------------

NAMES = ["Retriever", "Mixer", "Reset"]


def votes(counts, bins: int = 1) -> pd.DataFrame:
    """A `taxonomy` table of `counts[document][head]` votes for (current token, sink, other), two heads a layer.

    bins: each row as often, for bins with the same shares.
    """
    rows = []
    for d, heads in enumerate(counts):
        for h, each in enumerate(heads):
            shares = dict(zip(("vote_current", "vote_sink", "vote_other"), np.array(each) / sum(each), strict=True))
            rows += [
                {"document": f"d{d:02d}", "layer": h // 2, "head": h % 2, "query_from": 8 * b, "query_to": 8 * b + 8,
                 "queries": int(sum(each))} | shares for b in range(bins)
            ]  # fmt: skip
    return pd.DataFrame(rows)


def wavering(documents: int, heads: int, seed: int = 0) -> list[list[tuple[int, ...]]]:
    """Random votes of near equal chances, documents of other numbers of queries, so that labels change with the draw."""
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet([20, 20, 20], size=heads)
    return [[tuple(rng.multinomial(12 + 25 * d, p).tolist()) for p in chances] for d in range(documents)]


def by_hand(counts) -> str:
    """The regime of summed votes: of equal ones Reset before Mixer before Retriever."""
    current, sink, other = counts
    if other >= sink and other >= current:
        return "Reset"
    return "Mixer" if sink >= current else "Retriever"


def test_regime_shares_by_hand():
    """Votes in sum: (9, 6, 5), (6, 9, 5), (0, 0, 20), a tie of all, a tie of the current token and the sink."""
    first = [(9, 1, 0), (3, 5, 2), (0, 0, 10), (2, 2, 2), (5, 3, 2)]
    second = [(0, 5, 5), (3, 4, 3), (0, 0, 10), (1, 1, 1), (3, 5, 2)]
    found = regime_shares(votes([first, second]))
    assert list(found.columns) == ["regime", "heads", "mean", "low", "high", "documents"]
    assert found["regime"].tolist() == NAMES
    assert found["heads"].tolist() == [1, 2, 2]
    assert found["mean"].tolist() == [0.2, 0.4, 0.4]
    assert found["documents"].tolist() == [2, 2, 2]
    # Draws aa: R M O O R; ab: R M O O M; bb: O M O O M. Each of them has 1/4 or 1/2.
    assert found["low"].tolist() == pytest.approx([0.0, 0.2, 0.4])
    assert found["high"].tolist() == pytest.approx([0.4, 0.4, 0.6])


def test_regime_shares_of_a_single_document():
    found = regime_shares(votes([[(8, 0, 0), (0, 8, 0), (0, 0, 8), (0, 0, 8)]]))
    assert found["mean"].tolist() == [0.25, 0.25, 0.5] and found["documents"].tolist() == [1, 1, 1]
    assert found["low"].isna().all() and found["high"].isna().all()


def test_regime_shares_of_a_regime_without_heads():
    found = regime_shares(votes([[(0, 8, 0)] * 4] * 3)).set_index("regime")
    assert found["heads"].to_dict() == {"Retriever": 0, "Mixer": 4, "Reset": 0}
    assert found.loc["Retriever", ["mean", "low", "high"]].tolist() == [0, 0, 0]
    assert found.loc["Mixer", ["mean", "low", "high"]].tolist() == [1, 1, 1]


def test_regime_shares_against_a_plain_bootstrap():
    """The same draws of documents, in loops: votes added up, labelled and counted one by one."""
    counts = wavering(documents=5, heads=9)
    replicates, seed = 300, 7
    found = regime_shares(votes(counts), replicates=replicates, seed=seed)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(replicates):
        times = rng.multinomial(5, [1 / 5] * 5)
        labels = [by_hand([sum(times[d] * counts[d][h][v] for d in range(5)) for v in range(3)]) for h in range(9)]
        drawn.append([labels.count(name) / 9 for name in NAMES])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    assert found["low"].tolist() == pytest.approx(low.tolist()) and found["high"].tolist() == pytest.approx(
        high.tolist()
    )
    assert (high - low).max() > 0.2  # something to get wrong
    now = [by_hand(np.sum([counts[d][h] for d in range(5)], axis=0)) for h in range(9)]
    assert found["heads"].tolist() == [now.count(name) for name in NAMES]
    other = regime_shares(votes(counts), replicates=replicates, seed=8)
    assert not other.equals(found) and other["mean"].equals(found["mean"])


def test_regime_shares_count_queries():
    """A long document of 100 queries outvotes two short ones; as often as not it is drawn."""
    found = regime_shares(votes([[(100, 0, 0)], [(0, 10, 0)], [(0, 10, 0)]])).set_index("regime")
    assert found["mean"].to_dict() == {"Retriever": 1.0, "Mixer": 0.0, "Reset": 0.0}
    assert found.loc["Retriever", ["low", "high"]].tolist() == [0.0, 1.0]  # 8 of 27 draws lack it


def test_regime_shares_sum_bins_and_do_not_lean_on_the_order_of_rows():
    table = votes(wavering(documents=6, heads=7, seed=2), bins=2)
    found = regime_shares(table)
    assert found["mean"].sum() == pytest.approx(1) and (found["high"] > found["low"]).any()
    for seed in range(3):
        pd.testing.assert_frame_equal(regime_shares(table.sample(frac=1, random_state=seed)), found)
    once = regime_shares(table[table["query_from"] == 0])  # twice the same votes are no other votes
    pd.testing.assert_frame_equal(once, found)


def test_regime_shares_ties_survive_rounding():
    """15 votes of 22 are a share of which 22 times is less than 15; a tie with 15 others is a tie all the same, for the Mixer."""
    assert 15 / 22 * 22 < 15
    first, second = [(0, 15, 7), (0, 8, 0)], [(15, 0, 0), (8, 0, 1)]
    found = regime_shares(votes([first, second])).set_index("regime")
    assert found["heads"].to_dict() == {"Retriever": 0, "Mixer": 2, "Reset": 0}
    assert found.loc["Mixer", ["low", "high"]].tolist() == [0.0, 1.0]


def test_regime_shares_cover_the_truth():
    """60 studies of 20 documents that each lean to the current token or the sink, all of their heads alike. Of 40 heads 25 are
    Retrievers in expectation; the margins are spread evenly, so that as many heads are near a tie on either side.
    """
    rng = np.random.default_rng(0)
    margins = np.linspace(-0.15, 0.25, 40)
    truth = (margins > 0).mean()
    covered, widths = 0, []
    for _ in range(60):
        lean = np.clip(margins + rng.normal(0, 0.1, (20, 1)), -0.7, 0.7) / 2
        chances = np.stack([0.375 + lean, 0.375 - lean, np.full_like(lean, 0.25)], axis=-1)
        found = regime_shares(votes(rng.multinomial(60, chances).tolist()), replicates=200).iloc[0]
        covered += found["low"] - 1e-9 <= truth <= found["high"] + 1e-9
        widths.append(found["high"] - found["low"])
    assert truth == 0.625 and covered >= 54
    assert np.mean(widths) < 0.3  # and not by being wide


def test_interval_of_columns_is_that_of_the_summary():
    rng = np.random.default_rng(3)
    rows = [(f"d{d}", 0, 0, n, rng.random()) for d in range(7) for n in (2, 8)]
    table = pd.DataFrame(rows, columns=["document", "layer", "head", "size", "f"])
    means = table.pivot(index="document", columns="size", values="f")
    found = summary(table, "f")
    for got, column in zip(interval_of(means), ("low", "high"), strict=True):
        assert got.tolist() == found[column].tolist()
    assert all(np.isnan(x).all() and len(x) == 2 for x in interval_of(means.iloc[:1]))


def test_no_interval_says_minus_zero():
    means = pd.DataFrame({"mean": [-0.001, 0.25], "low": [-0.004, np.nan], "high": [0.003, np.nan]})
    assert with_interval(means).tolist() == ["0.00 [0.00, 0.00]", "0.25"]
