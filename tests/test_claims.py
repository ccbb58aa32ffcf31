"""Every verdict of every claim, on tables planted to deserve it."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from geomlib.claims import (
    CONSTANT,
    INTERMEDIATE,
    STATEMENTS,
    alikeness,
    assumptions,
    c1,
    c2,
    c3,
    c4,
    c5,
    c6,
    c7,
    c8,
    c9,
    c9_of,
    c10,
    direction,
    dominance,
    half,
    sink_cost,
)
from geomlib.errors import GeomlibError
from geomlib.theory import THEOREMS

DOCUMENTS = 6


def planted(gains: dict[int, list[float] | float], heads: int = 4, split: float = 0.0, **constant) -> pd.DataFrame:
    """A table whose advantage at each N is `gains[N]`, one number or one a document, and random F 0.4.

    `split`: this much more for the even heads and less for the odd ones.
    """
    rows = []
    for size, gain in gains.items():
        each = gain if isinstance(gain, list) else [gain] * DOCUMENTS
        for d, g in enumerate(each):
            for h in range(heads):
                common = {"document": f"d{d}", "layer": 0, "head": h, "query_from": 0, "query_to": 8, "queries": 8,
                          "size": size, "distance": "euclidean"} | constant  # fmt: skip
                f = 0.4 + g + (split if h % 2 == 0 else -split)
                rows.append(common | {"ranking": "attention", "control": "none", "f": f})
                rows.append(common | {"ranking": "random", "control": "random", "f": 0.4})
    return pd.DataFrame(rows)


UNSURE = [0.5, -0.4, 0.1, -0.3, 0.2, 0.1]  # a mean above zero, an interval across it


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({1: 0.0, 2: 0.1, 8: 0.2, 64: 0.05}, "holds"),
        ({1: 0.0, 2: 0.1, 8: UNSURE, 64: 0.05}, "holds in part"),
        ({1: 0.0, 2: 0.1, 8: -0.1, 64: 0.05}, "holds in part"),
        ({2: -0.1, 8: UNSURE, 64: 0.0}, "does not hold"),
        ({1: 0.5, 2: -0.1}, "does not hold"),  # N = 1 says nothing
    ],
)
def test_c1(gains, verdict):
    found = c1(planted(gains))
    assert found.verdict == verdict
    judged = [n for n in gains if n >= 2]
    assert f"of {len(judged)} N" in found.measured
    assert found.claim == "C1" and "95 %" in found.rule


def test_c1_says_how_many_and_which_is_worst():
    found = c1(planted({2: 0.1, 8: -0.1, 64: 0.05}))
    assert found.measured == (
        "true for 2 of 3 N; smallest advantage -0.100 [-0.100, -0.100] at N = 8; heads above 0: 0% to 100%"
    )


def test_c1_needs_most_heads():
    """A mean that two strong heads of four carry is not a majority of heads."""
    assert c1(planted({2: 0.1, 8: 0.1}, split=0.2)).verdict == "does not hold"
    assert c1(planted({2: 0.1, 8: 0.1}, split=0.05)).verdict == "holds"


def test_c2_holds():
    found = c2(planted({2: 0.1, 8: 0.3, 32: 0.2, 64: 0.1}))
    assert found.verdict == "holds"
    assert found.measured == (
        "peak at N = 8 (+0.30); best of N <= 32: +0.30 at N = 8; peak at most 32 in 100.0% of the replicates"
    )


def test_c2_at_the_border():
    assert c2(planted({2: 0.1, INTERMEDIATE: 0.3, 64: 0.2})).verdict == "holds"


def test_c2_holds_in_part():
    wavering = [0.9, -0.3, 0.5, -0.1, 0.6, 0.1]
    found = c2(planted({2: 0.1, 8: wavering, 64: 0.2}))  # means 0.1, 0.283, 0.2: many replicates peak at 64
    assert found.verdict == "holds in part"
    assert "peak at N = 8" in found.measured


def test_c2_does_not_hold():
    found = c2(planted({2: 0.1, 8: 0.2, 64: 0.3}))
    assert found.verdict == "does not hold"
    assert "peak at N = 64" in found.measured


def test_c2_ignores_n_1():
    assert c2(planted({1: 0.9, 2: 0.1, 64: 0.3})).verdict == "does not hold"


@pytest.mark.parametrize("claim", [c1, c2])
@pytest.mark.parametrize(
    "table",
    [
        planted({2: [0.1], 8: [0.2], 64: [0.1]}),  # one document
        planted({1: 0.1}),  # no N that says anything
        planted({2: 0.1, 64: 0.1}, distance="cosine"),
        planted({2: 0.1, 64: 0.1}).query("control == 'none'"),  # no random sets to compare with
    ],
    ids=["one document", "N = 1", "cosine", "no control"],
)
def test_not_testable(claim, table):
    found = claim(table)
    assert found.verdict == "not testable here"
    assert found.measured


def test_c2_is_not_testable_on_small_n_alone():
    table = planted({2: 0.1, 32: 0.3})
    assert c2(table).verdict == "not testable here"
    assert c1(table).verdict == "holds"


def test_only_attention_ranking_and_euclidean_distance_count():
    good = planted({2: 0.2, 64: 0.1})
    other = planted({2: -0.2, 64: 0.5}, distance="cosine")
    contribution = planted({2: -0.2, 64: 0.5})
    contribution = contribution[contribution["control"] == "none"].assign(ranking="contribution")
    table = pd.concat([good, other, contribution])
    assert (c1(table).verdict, c2(table).verdict) == ("holds", "holds")


@pytest.mark.parametrize(
    ("shift", "word"),
    [(0.1, "help at every N"), (-0.1, "hurt at every N"), (0.0, "in 0 of 2 cases (N and ranking) and hurt in 0")],
)
def test_direction_against_the_magnitude_control(shift, word):
    rng = np.random.default_rng(0)
    rows = []
    for document in range(6):
        for size in (1, 2, 8):
            noise = rng.normal(0, 0.01)
            for control, f in (("none", 0.5 + shift + noise), ("magnitude", 0.5)):
                rows.append(
                    {"document": f"d{document}", "layer": 0, "head": 0, "query_from": 0, "query_to": 8, "queries": 4,
                     "size": size, "ranking": "attention", "distance": "cosine", "control": control, "f": f}
                )  # fmt: skip
    sentence = direction(pd.DataFrame(rows))
    assert sentence.startswith("cosine: the real directions") and word in sentence


def promises(levels: dict[tuple[str, str], float], holds: dict[str, float] | None = None) -> pd.DataFrame:
    """A `bounds` table: (level, sink) -> F, the same for two documents and N of 2, 4, 8; holds: level -> share."""
    rows = [
        {"document": d, "layer": 0, "head": 0, "queries": 100, "size": n, "level": level, "sink": sink, "f": f,
         "holds": (holds or {}).get(level, 1.0)}
        for d in ("a", "b") for n in (2, 4, 8) for (level, sink), f in levels.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


EVERY = {(level, "aware"): 0.3 for level in THEOREMS} | {("constant_norm", "aware"): 0.1, ("exact", "none"): 0.5}


@pytest.mark.parametrize("broken", THEOREMS)
def test_c3_does_not_hold_with_one_violation_of_a_proved_level(broken):
    found = c3(promises(EVERY, {broken: 0.99}))
    assert found.verdict == "does not hold"
    assert found.measured.startswith(f"6 violations in {600 * len(THEOREMS):,} checks")


def test_c3_holds_and_holds_in_part():
    found = c3(promises(EVERY))
    assert (found.claim, found.verdict) == ("C3", "holds")
    assert found.measured.startswith("0 violations") and "constant_norm: 0 of 600 (0.00%)" in found.measured
    found = c3(promises(EVERY, {"constant_norm": 0.97}))
    assert found.verdict == "holds in part" and "constant_norm: 18 of 600 (3.00%)" in found.measured


def test_c3_judges_the_sink_aware_model_only_and_no_level_without_a_claim():
    blind = {("constant_norm", "agnostic"): 0.1, ("quantile", "aware"): 0.4, ("gaussian", "aware"): 0.6}
    table = pd.concat([promises(EVERY), promises(blind, dict.fromkeys(("constant_norm", "quantile", "gaussian"), 0.0))])
    assert c3(table).verdict == "holds"


def norms(spreads: list[float], documents: int = 3, **columns) -> pd.DataFrame:
    """A `coherence` table with one head for each spread."""
    rows = [
        {"document": f"d{d}", "layer": h // 4, "head": h % 4, "dim": 64, "norm_cv": cv, "mu_sd": 0.2, "norm_ratio": 0.3,
         "kappa_mean": -0.1} | columns
        for d in range(documents) for h, cv in enumerate(spreads)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("spreads", "verdict"),
    [
        ([0.1] * 10, "holds"),
        ([0.1] * 9 + [0.5], "holds"),
        ([0.1] * 8 + [0.5] * 2, "holds in part"),
        ([0.1] * 5 + [0.5] * 5, "holds in part"),
        ([0.1] * 4 + [0.5] * 6, "does not hold"),
    ],
)
def test_c7(spreads, verdict):
    found = c7(norms(spreads))
    assert (found.claim, found.verdict) == ("C7", verdict)
    share = sum(s <= CONSTANT for s in spreads) / len(spreads)
    assert found.measured.startswith(f"{share:.0%} [{share:.0%}, {share:.0%}] of the heads")


def test_c7_of_one_document_has_no_interval_and_takes_the_mean_over_documents():
    assert c7(norms([0.1, 0.3], documents=1)).measured.startswith("50% of the heads")
    lower, higher = norms([0.1], documents=1), norms([0.5], documents=1).assign(document="other")
    assert c7(pd.concat([lower, higher])).verdict == "does not hold"  # 0.3 in the mean


def test_half():
    shown = {("global", "aware"): 0.01, ("rowwise", "aware"): 0.24, ("sketch_0", "none"): 0.25, ("sketch_1", "aware"): 0.4,
             ("sketch_1", "agnostic"): 0.1, ("combined", "aware"): 0.5, ("exact", "none"): 0.5}  # fmt: skip
    assert half(promises(shown)).split("\n") == [
        "global             does not (least share 0.02)",
        "rowwise            does not (least share 0.48)",
        "sketch_0           promises at least half (least share 0.50)",
        "sketch_1, agnostic does not (least share 0.20)",
        "sketch_1           promises at least half (least share 0.80)",
        "combined           promises at least half (least share 1.00)",
    ]


def test_assumptions_are_counted_over_heads():
    table = pd.concat([norms([0.1] * 3), norms([0.1], mu_sd=0.1, norm_ratio=2.0, kappa_mean=0.2).assign(layer=1)])
    sentence = assumptions(table)
    assert [line.rsplit(": ")[1].split("%")[0] for line in sentence.split("\n")] == ["75", "75", "75"]
    assert "1/sqrt(d) = 0.125" in sentence


def test_alikeness():
    index = pd.MultiIndex.from_product([range(6), range(2)], names=["layer", "head"])
    beyond = np.repeat([0.3, 0.1, -0.2], 4)
    sentence = alikeness(pd.DataFrame({"beyond": beyond, "alike": 2 * beyond + 1}, index))
    assert [line.split(":")[0] for line in sentence.split("\n")] == ["all layers", "first third", "middle third", "last third"]
    assert [re.search(r"predicted F (\S+),", line)[1] for line in sentence.split("\n")] == ["+0.07", "+0.30", "+0.10", "-0.20"]
    assert sentence.split("\n")[0].endswith("across +1.00")
    mixed = beyond + np.tile([0.01, -0.01], 6)
    alike_ = np.concatenate([mixed[:4], -mixed[4:8], mixed[8:]])
    lines = alikeness(pd.DataFrame({"beyond": mixed, "alike": alike_}, index)).split("\n")
    assert [line[-5:] for line in lines[1:]] == ["+1.00", "-1.00", "+1.00"]


# --- C4 and C5: tables of sinks ---------------------------------------------------------------------------------------


def sinks(column: str, values: list[list[float]], source: int = 0, found: int = 1, layers: int = 1) -> pd.DataFrame:
    """A `sinks` table: `values[document][head]` in `column`, the head in layer head % layers."""
    rows = [
        {"document": f"d{d}", "layer": h % layers, "head": h // layers, "source": source, "found": found, "later": 100,
         "received": 0.5, "won": 0.5, "times_smaller": 5.0, "cosine_mean": -0.2, "cosine_low": -0.4, "cosine_median": -0.2,
         "cosine_high": 0.1, "cosine_negative": 0.9} | {column: value}
        for d, heads in enumerate(values) for h, value in enumerate(heads)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def shuffled(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    return table.sample(frac=1, random_state=seed)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([[5.0] * 3] * 3, "holds"),
        ([[3.0] * 3] * 3, "holds"),  # "from 3 to 10": both belong
        ([[10.0] * 3] * 3, "holds"),
        ([[2.99] * 3] * 3, "holds in part"),
        ([[10.01] * 3] * 3, "holds in part"),
        ([[1.01] * 3] * 3, "holds in part"),
        ([[1.0] * 3] * 3, "does not hold"),  # "above 1"
        ([[0.4] * 3] * 3, "does not hold"),
        ([[3.0] * 3, [10.0] * 3], "holds"),  # two documents: the interval is [3, 10]
        ([[2.5] * 3, [7.5] * 3], "holds in part"),  # the median inside, its interval not
        ([[5.0] * 3, [11.0] * 3], "holds in part"),
        ([[0.9] * 3, [9.0] * 3], "does not hold"),
        ([[1.0] * 3, [9.0] * 3], "does not hold"),
        ([[5.0, 5.0, 100.0]] * 2, "holds"),  # the median over heads, not the mean
        ([[2.0, 2.0, 14.0]] * 2, "holds in part"),
        ([[5.0] * 3], "not testable here"),
    ],
)
def test_c4(values, verdict):
    found = c4(sinks("times_smaller", values))
    assert (found.claim, found.verdict) == ("C4", verdict)
    assert found.measured and "3-10 times smaller" in found.statement


def test_c4_says_the_numbers_with_the_mean_over_documents_first():
    """Means over documents are 5, 5, 2 and 0.5, so their median is 3.5; the median of each document is 2."""
    found = c4(sinks("times_smaller", [[2.0, 8.0, 2.0, 0.5], [8.0, 2.0, 2.0, 0.5]]))
    assert found.measured == "median 3.50 [2.00, 3.50]; 50% of the heads from 3 to 10, 25% below 1"
    assert found.verdict == "holds in part"


def test_c4_counts_the_borders_as_inside():
    found = c4(sinks("times_smaller", [[3.0, 10.0, 1.0, 0.99, 10.01]] * 2))
    assert found.measured == "median 3.00 [3.00, 3.00]; 40% of the heads from 3 to 10, 20% below 1"


def test_c4_counts_every_head_of_every_layer_alike():
    """Layers of 3 and 2 heads: the median over the five is 4, that over layer medians would be 5.5."""
    table = sinks("times_smaller", [[4.0, 9.0, 4.0, 9.0, 2.0]] * 2, layers=2)
    assert table.groupby("layer").size().tolist() == [6, 4]
    assert c4(table).measured.startswith("median 4.00 [4.00, 4.00]; 80% of")


def test_c4_and_c5_judge_source_0_only_and_whether_or_not_the_rule_finds_it():
    values = [[5.0, 6.0, 4.0], [6.0, 5.0, 5.0]]
    cosines = [[-0.2, -0.3, -0.1], [-0.1, -0.3, -0.2]]
    table = sinks("times_smaller", values, found=0)
    table["cosine_mean"] = np.ravel(cosines)
    others = [sinks("times_smaller", [[0.1]] * 2, source=s).assign(cosine_mean=0.9, document=d)
              for s in (7, 40, 90) for d in ("d0", "d1")]  # fmt: skip
    more = pd.concat([*others, table]).drop_duplicates(["document", "layer", "head", "source"])
    assert len(more) == 12
    for claim in (c4, c5):
        assert claim(table).verdict == "holds"
        assert claim(more) == claim(table)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([[-0.2] * 10] * 3, "holds"),
        ([[-0.2] * 9 + [0.9]] * 3, "holds"),  # at least 90 %, whatever the mean cosine
        ([[-0.2] * 8 + [0.1] * 2] * 3, "holds in part"),
        ([[-0.2] * 6 + [0.1] * 4] * 3, "holds in part"),
        ([[-0.2] * 5 + [0.1] * 5] * 3, "does not hold"),  # half is not more than half
        ([[0.0] * 10] * 3, "does not hold"),  # 0 is not below 0
        ([[0.1] * 10] * 3, "does not hold"),
        ([[-0.9] * 4 + [0.1] * 6] * 3, "does not hold"),  # a negative mean is not a majority
        # One head at -0.1 in the mean that one document alone has above 0: its share is not sure.
        ([[-0.2] * 5 + [-0.3] + [0.1] * 4, [-0.2] * 5 + [0.1] + [0.1] * 4], "does not hold"),  # 60 % [50, 60]
        ([[-0.2] * 6 + [-0.3] + [0.1] * 3, [-0.2] * 6 + [0.1] + [0.1] * 3], "holds in part"),  # 70 % [60, 70]
        ([[-0.2] * 8 + [-0.3] + [0.1], [-0.2] * 8 + [0.1] + [0.1]], "holds"),  # 90 % [80, 90]: no interval is asked for
        ([[-0.2] * 10], "not testable here"),
    ],
)
def test_c5(values, verdict):
    found = c5(sinks("cosine_mean", values))
    assert (found.claim, found.verdict) == ("C5", verdict)
    assert found.measured


def test_c5_says_the_numbers():
    """Document means (8 * -0.2 - 0.3 + 0.1) / 10 = -0.18 and (8 * -0.2 + 0.2) / 10 = -0.14."""
    found = c5(sinks("cosine_mean", [[-0.2] * 8 + [-0.3, 0.1], [-0.2] * 8 + [0.1, 0.1]]))
    assert found.measured == "90.0% [80.0%, 90.0%] of the heads below 0; mean cosine -0.16 [-0.18, -0.14]"


@pytest.mark.parametrize(("claim", "column", "middle"), [(c4, "times_smaller", 4.0), (c5, "cosine_mean", 0.0)])
def test_c4_and_c5_do_not_lean_on_the_order_of_rows(claim, column, middle):
    values = np.random.default_rng(3).normal(middle, 1.0, (7, 12))
    table = sinks(column, values.tolist(), layers=3)
    found = claim(table)
    assert found != claim(sinks(column, [values.mean(0).tolist()] * 7, layers=3))  # documents differ, so it has a width
    for seed in range(3):
        assert claim(shuffled(table, seed)) == found


@pytest.mark.parametrize("claim", [c4, c5])
def test_c4_and_c5_of_no_source_0(claim):
    assert claim(sinks("times_smaller", [[5.0]] * 3, source=4)).verdict == "not testable here"


# --- C6: tables of the sink's effect ----------------------------------------------------------------------------------


def effect(cells: list[tuple], **constant) -> pd.DataFrame:
    """A `sink_effect` table: a row for each (document, head, N, f_with, f_without), all selected, layer 0."""
    rows = [
        {"document": d, "layer": 0, "head": h, "query_from": 0, "query_to": 64, "queries": 8, "size": n,
         "sink": "selected", "without": "sink", "f_with": f_with, "f_without": f_without, "lower": 1.0, "mass": 0.5,
         "extreme": 1.0} | constant
        for d, h, n, f_with, f_without in cells
    ]  # fmt: skip
    return pd.DataFrame(rows)


def cost(sizes: dict[int, list[tuple[float, float]] | tuple[float, float]], documents: int = 4, heads: int = 3):
    """The same (with, without) for every head; at each N one pair, or one for each document."""
    cells = []
    for n, pairs in sizes.items():
        each = pairs if isinstance(pairs, list) else [pairs] * documents
        cells += [(f"d{d}", h, n, *pair) for d, pair in enumerate(each) for h in range(heads)]
    return effect(cells)


HALF, LESS, NONE, RAISED = (0.25, 0.5), (0.375, 0.5), (0.5, 0.5), (0.6, 0.5)
WAVERING = [
    (0.25, 0.5),
    (0.625, 0.5),
    (0.25, 0.5),
    (0.5, 0.5),
]  # 0.25, -0.125, 0.25, 0: a mean above 0, not its interval


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        ({2: HALF, 8: HALF, 64: HALF}, "holds"),
        ({2: HALF, 8: LESS, 64: LESS}, "holds"),  # 1/3 of the pairs, and exactly half counts as halved
        ({2: (0.26, 0.5), 8: LESS, 64: LESS}, "holds in part"),  # lower at every N, never halved
        ({2: HALF, 8: LESS, 64: LESS, 128: LESS}, "holds in part"),  # 1/4 of the pairs
        ({2: HALF, 8: NONE, 64: HALF}, "holds in part"),  # an interval of [0, 0] is not above 0
        ({2: HALF, 8: HALF, 64: RAISED}, "holds in part"),
        ({2: HALF, 8: WAVERING}, "holds in part"),
        ({2: WAVERING}, "does not hold"),
        ({2: NONE, 8: NONE}, "does not hold"),
        ({2: RAISED, 8: RAISED}, "does not hold"),
        ({1: HALF, 2: NONE}, "does not hold"),  # N = 1 says nothing
        ({1: RAISED, 2: HALF}, "holds"),
    ],
)
def test_c6(sizes, verdict):
    found = c6(cost(sizes))
    assert (found.claim, found.verdict) == ("C6", verdict)
    assert f"of {len([n for n in sizes if n >= 2])} N" in found.measured


@pytest.mark.parametrize(
    "table",
    [
        cost({2: HALF}, documents=1),
        cost({1: HALF}),
        cost({2: HALF}).assign(sink="unselected"),
        cost({2: HALF}).assign(sink="hidden"),
        cost({2: HALF}).assign(without="other"),
        pd.concat([cost({2: HALF}, documents=1), cost({2: HALF}, documents=3).assign(sink="unselected")]),
    ],
    ids=["one document", "N = 1", "never selected", "hidden", "a control", "selected in one document"],
)
def test_c6_not_testable(table):
    assert c6(table).verdict == "not testable here"


def uneven() -> pd.DataFrame:
    """Two documents of other numbers of queries, two layers of 2 and 1 heads, two bins of other numbers of queries."""
    cells = {"head 0": (0, 0), "head 1": (0, 1), "head 2": (1, 0)}  # layer, head
    each = {
        # bins of 1 and 3 queries: with 0.35, without 0.8 (and 0.3 if each bin counted once)
        ("a", 2): {"head 0": [(1, 0.2, 0.8), (3, 0.4, 0.8)], "head 1": [(4, 0.45, 0.8)], "head 2": [(4, 0.1, 0.5)]},
        ("b", 2): {"head 0": [(400, 0.45, 0.9)], "head 1": [(400, 0.55, 0.9)], "head 2": [(400, 0.2, 0.6)]},
        ("a", 4): {"head 0": [(4, 0.6, 0.7)], "head 1": [(4, 0.6, 0.7)], "head 2": [(4, 0.3, 0.5)]},
        ("b", 4): {"head 0": [(400, 0.5, 0.6)], "head 1": [(400, 0.5, 0.6)], "head 2": [(400, 0.4, 0.6)]},
    }
    parts = []
    for (document, size), heads in each.items():
        for name, bins in heads.items():
            layer, head = cells[name]
            for b, (queries, *pair) in enumerate(bins):
                place = {"layer": layer, "query_from": b * 500, "query_to": b * 500 + 500, "queries": queries}
                parts.append(effect([(document, head, size, *pair)], **place))
    return pd.concat(parts, ignore_index=True)


def test_c6_says_the_numbers():
    """N = 2, with: a (0.40 + 0.10) / 2 = 0.25, b (0.50 + 0.20) / 2 = 0.35, so 0.30; without 0.65 and 0.75, so 0.70.

    Halved: 0.40 of 0.85 and 0.15 of 0.55 at N = 2, not 0.50 of 0.85, none at N = 4; 2 of 6 pairs are 1/3.
    """
    found = c6(uneven())
    assert found.measured == (
        "lower at 2 of 2 N; cost +0.40 [+0.40, +0.40] at N = 2 (F 0.30 with, 0.70 without); halved for 33.3% [33.3%, 33.3%] of the pairs"
    )
    assert found.verdict == "holds"


def test_c6_says_where_the_loss_is_greatest():
    found = c6(cost({2: LESS, 8: (0.1, 0.4), 64: (0.4, 0.9)}))
    assert found.measured == (
        "lower at 3 of 3 N; cost +0.12 [+0.12, +0.12] at N = 2 (F 0.38 with, 0.50 without), "
        "cost +0.50 [+0.50, +0.50] at N = 64 (F 0.40 with, 0.90 without); halved for 66.7% [66.7%, 66.7%] of the pairs"
    )


def test_c6_counts_nothing_but_the_selected_sink_against_none():
    table = uneven()
    swapped = table.rename(columns={"f_with": "f_without", "f_without": "f_with"})
    more = [swapped.assign(sink="unselected"), swapped.assign(sink="hidden"), swapped.assign(without="other"),
            swapped.assign(without="direction"), swapped.assign(size=1),
            swapped.assign(size=16, sink="unselected"), swapped.assign(document="c", sink="unselected"),
            swapped.assign(head=5, sink="unselected")]  # fmt: skip
    assert c6(pd.concat([*more, table])) == c6(table)
    assert c6(swapped) != c6(table)


def test_c6_of_heads_that_do_not_select_the_sink():
    """One of four heads halves its F; without the fourth head it is one of three."""
    four = effect([(d, h, 2, *(HALF if h == 0 else LESS)) for d in "ab" for h in range(4)])
    assert c6(four).verdict == "holds in part"
    assert c6(four.assign(sink=np.where(four["head"] == 3, "unselected", "selected"))).verdict == "holds"


def test_c6_of_a_head_that_selects_the_sink_in_one_document_only():
    """Head 1 is in document a alone: a has 0.2 of 0.56, b 0.1 of 0.4; of the pairs head 0 is halved, head 1 is not."""
    cells = [("a", 0, 2, 0.1, 0.6), ("a", 1, 2, 0.3, 0.52), ("b", 0, 2, 0.1, 0.4)]
    found = c6(effect(cells))
    assert "(F 0.15 with, 0.48 without)" in found.measured
    assert "halved for 50.0% [" in found.measured and found.verdict == "holds"


def test_c6_halves_the_mean_over_documents():
    """0.1 of 0.6 and 0.4 of 0.5 are 0.25 of 0.55 in the mean, 0.2 of 0.5 and 0.4 of 0.5 are 0.3 of 0.5; in both
    one document of two is halved."""
    assert "halved for 100.0%" in c6(effect([("a", 0, 2, 0.1, 0.6), ("b", 0, 2, 0.4, 0.5)])).measured
    assert "halved for 0.0%" in c6(effect([("a", 0, 2, 0.2, 0.5), ("b", 0, 2, 0.4, 0.5)])).measured


def test_c6_halves_means_that_count_queries_in_a_document_and_documents_once():
    """b: bins of 1 and 7 queries, 0.2 of 0.45; with a 0.15 of 0.525. By rows it were 0.37 of 0.4. Then b of 800 queries."""
    first = effect([("a", 0, 2, 0.1, 0.6)])
    bins = [effect([("b", 0, 2, 0.9, 0.1)], queries=1), effect([("b", 0, 2, 0.1, 0.5)], queries=7, query_from=64)]
    assert "halved for 100.0% [" in c6(pd.concat([first, *bins])).measured
    long = effect([("b", 0, 2, 0.35, 0.5)], queries=800)
    assert "halved for 100.0% [" in c6(pd.concat([first, long])).measured  # 0.225 of 0.55


def test_c6_does_not_lean_on_the_order_of_rows():
    rng = np.random.default_rng(1)
    cells = [(f"d{d}", h, n, *rng.random(2)) for d in range(6) for h in range(5) for n in (2, 16, 128)]
    for table in (uneven(), effect(cells)):
        for seed in range(3):
            assert c6(shuffled(table, seed)) == c6(table)


def test_sink_cost():
    table = effect([("a", 0, 1, 0.1, 0.9), ("a", 0, 2, 0.25, 0.5), ("b", 0, 2, 0.75, 0.5)])
    other = effect([("a", 0, 2, 0.25, 0.375), ("a", 0, 1, 0.25, 0.375)], without="other")
    rest = [table.assign(sink="unselected"), table.assign(sink="hidden"), other.assign(sink="unselected")]
    both = pd.concat([*rest, table, other], ignore_index=True)
    found = sink_cost(both)
    assert found["cost"].tolist() == [0.25, -0.25] and found["document"].tolist() == ["a", "b"]
    assert list(found.columns) == [*both.columns, "cost"]
    assert sink_cost(both, without="other")["cost"].tolist() == [0.125]
    assert "cost" not in both


# --- C8, C9 and C10: tables of votes ----------------------------------------------------------------------------------

ORDER = {"R": (8, 0, 0), "M": (0, 8, 0), "O": (0, 0, 8)}  # votes for the current token, the sink, others: the regimes


def votes(counts, **columns) -> pd.DataFrame:
    """A `taxonomy` table: `counts[document][head]` votes for the current token, the sink, others, a bin a row.

    columns: name -> values[document][head].
    """
    rows = []
    for d, heads in enumerate(counts):
        for h, each in enumerate(heads):
            n = sum(each)
            shares = dict(zip(("vote_current", "vote_sink", "vote_other"), (c / n for c in each), strict=True))
            row = {"document": f"d{d}", "layer": h % 2, "head": h // 2, "query_from": 0, "query_to": 64, "queries": n}
            rows.append(
                row
                | shares
                | {"cos_sink": 0.1, "cos_current": 0.1, "sees_sink": 1.0}
                | {k: v[d][h] for k, v in columns.items()}
            )
    return pd.DataFrame(rows)


def labelled(labels: str, documents: int = 2, **columns) -> pd.DataFrame:
    """The same regimes in every document, a letter a head: R(etriever), M(ixer), O(ther: Reset)."""
    return votes([[ORDER[r] for r in labels]] * documents, **columns)


@pytest.mark.parametrize(
    ("labels", "verdict"),
    [
        ("R" + "M" * 5 + "O" * 4, "holds"),  # 10 %
        ("R" * 29 + "M" * 471, "holds"),  # 5.8 %
        ("R" * 28 + "M" * 472, "holds in part"),
        ("R" * 86 + "O" * 414, "holds"),  # 17.2 %
        ("R" * 87 + "O" * 413, "holds in part"),
        ("M" * 10, "holds in part"),  # none at all is a minority too
        ("R" * 49 + "O" * 51, "holds in part"),
        ("R" * 50 + "O" * 50, "does not hold"),  # half is not below one half
        ("R" * 10, "does not hold"),
        ("R" * 40 + "M" * 30 + "O" * 30, "holds in part"),  # the commonest, and a minority
    ],
)
def test_c8(labels, verdict):
    found = c8(labelled(labels))
    assert (found.claim, found.verdict) == ("C8", verdict)
    assert found.measured.startswith(f"Retriever {labels.count('R') / len(labels):.2%} [")
    assert "5.8%-17.2%" in found.statement


def test_c8_asks_for_the_whole_interval():
    """Head 4 is a Mixer by 9 votes to 11 and a Retriever in the draws of document a alone: 40 % [40 %, 50 %]."""
    sure = [ORDER[r] for r in "RRRRMMMMM"]
    table = votes([[*sure, (6, 4, 0)], [*sure, (3, 7, 0)]])
    found = c8(table)
    assert (
        found.measured == "Retriever 40.00% [40.00%, 50.00%], Mixer 60.00% [50.00%, 60.00%], Reset 0.00% [0.00%, 0.00%]"
    )
    assert found.verdict == "does not hold"


def test_c8_counts_queries_and_not_documents():
    """Head 0: 60 of 100 votes for its token in a, none of 10 in b. In sum a Retriever; by documents it would be a Mixer."""
    table = votes([[(60, 40, 0), *[(0, 100, 0)] * 9], [(0, 10, 0), *[(0, 10, 0)] * 9]])
    found = c8(table)
    assert found.measured.startswith("Retriever 10.00% [0.00%, 10.00%], Mixer 90.00% [90.00%, 100.00%]")
    assert found.verdict == "holds"


def test_c8_gives_ties_away():
    """Reset before Mixer before Retriever, so a tie makes no Retriever."""
    found = c8(votes([[(4, 4, 0), (4, 0, 4), (0, 4, 4), (4, 4, 4), (8, 0, 0)] * 2] * 2))
    assert found.measured.startswith("Retriever 20.00% [20.00%, 20.00%], Mixer 20.00% [20.00%, 20.00%], Reset 60.00%")


def test_c8_of_one_document():
    assert c8(labelled("RMMMMMMMMM", documents=1)).verdict == "not testable here"


M, O = "M" * 6 + "O" * 3 + "R", "O" * 6 + "M" * 3 + "R"


def other_corpus(labels: dict[str, list[str]]) -> dict[str, dict[str, pd.DataFrame]]:
    return {m: {f"corpus {i}": labelled(x) for i, x in enumerate(each)} for m, each in labels.items()}


@pytest.mark.parametrize(
    ("labels", "verdict"),
    [
        ({"a": [M, M], "b": [O, O]}, "holds"),
        ({"a": [M, M, M], "b": [O, O], "c": [M, M]}, "holds"),
        ({"a": [M, M], "b": [M, M]}, "holds in part"),
        ({"a": [M, M]}, "holds in part"),
        ({"a": [M, O], "b": [O, O]}, "does not hold"),  # the corpus decides
        ({"a": [M, M], "b": [O, O, M]}, "does not hold"),  # the last corpus of the last model
        ({"a": ["MMMMMOOOO", "MMMMOOOOO"], "b": [O, O]}, "does not hold"),  # whatever kappa, 0.78 here
        ({"a": ["RRRRRMMO", "RRRRRMMO"], "b": ["RRRRROOM", "RRRRROOM"]}, "holds"),  # the commoner of the two
        ({"a": ["MMOORR", "MMOORR"], "b": [O, O]}, "does not hold"),  # neither is commoner
        ({"a": ["RRRR", "RRRR"], "b": [O, O]}, "does not hold"),
        ({"a": ["MMMM", "MMMM"], "b": ["OOOO", "OOOO"]}, "holds"),  # one label: all the same, kappa is not defined
        ({"a": ["MMMM", "MMMM"], "b": ["MMMM", "MMMM"]}, "holds in part"),
        # Mixer on both corpora, the heads' labels at kappa 0.6 and below
        ({"a": ["MMMMMMOO", "MMMMMMMO"], "b": [O, O]}, "holds"),
        ({"a": ["MMMMMMOO", "MMMMMMOO", "MMMMMMMO"], "b": [O, O]}, "holds"),
        ({"a": ["MMMMMOO", "MMMMMMO"], "b": [O, O]}, "does not hold"),  # 0.588
        ({"a": [M, M, "MMMOOOMMMR"], "b": [O, O]}, "does not hold"),
        ({"a": ["MMMMMMMM", "MMMMMMMO"], "b": [O, O]}, "does not hold"),  # 88 % agree, kappa 0
    ],
)
def test_c9(labels, verdict):
    found = c9(other_corpus(labels))
    assert (found.claim, found.verdict) == ("C9", verdict)
    assert all(f"{model}: " in found.measured for model in labels)


def test_c9_kappa_of_the_cases_above():
    from geomlib.taxonomy import agreement, regimes

    for pair, kappa in ((("MMMMMMOO", "MMMMMMMO"), 0.6), (("MMMMMOO", "MMMMMMO"), 10 / 17)):
        assert agreement(*(regimes(labelled(x)) for x in pair)).kappa == pytest.approx(kappa, abs=1e-12)


def test_c9_says_the_numbers():
    """Of a's 8 heads 7 agree: (7/8 - 44/64) / (20/64) = 0.6, the least of three pairs. Of c's 10, 1: (0.1 - 0.37) / 0.63."""
    found = c9(other_corpus({"a": ["MMMMMMOO", "MMMMMMMO", "MMMMMMOO"], "b": [O, O], "c": [M, O]}))
    assert found.measured == (
        "a: Mixer; least agreement 87.5% [87.5%, 87.5%], least kappa 0.600; "
        "b: Reset; least agreement 100.0% [100.0%, 100.0%], least kappa 1.000; "
        "c: Mixer or Reset; least agreement 10.0% [10.0%, 10.0%], least kappa -0.429"
    )


def test_c9_needs_two_corpora_of_each_model():
    found = c9(other_corpus({"a": [M, M], "b": [O]}))
    assert found.verdict == "not testable here" and "b" in found.measured


def test_c9_of_other_heads_is_an_error():
    with pytest.raises(GeomlibError, match="same heads"):
        c9(other_corpus({"a": [M, M + "M"]}))


def test_c9_pools_the_queries_of_documents_of_other_lengths():
    """Two Mixers by their 108 votes: half of the documents (the short one) has them as Resets. So has a draw of that one
    alone, a quarter of the draws, and Mixer is not the commoner in 95 % of them."""
    counts = [[(0, 100, 0), (0, 100, 0), (0, 0, 100)], [(0, 0, 8), (0, 0, 8), (0, 0, 8)]]
    sure = votes(counts[:1] * 2)
    found = c9({"a": {"x": votes(counts), "y": sure}, "b": {"x": labelled("OOM"), "y": labelled("OOM")}})
    assert found.verdict == "does not hold" and found.measured.startswith(
        "a: Mixer or neither; least agreement 100.0% ["
    )
    assert c9({"a": {"x": sure, "y": sure}, "b": {"x": labelled("OOM"), "y": labelled("OOM")}}).verdict == "holds"


def test_c9_needs_two_documents_of_each_corpus_and_some_table():
    tables = other_corpus({"a": [M, M], "b": [O, O]})
    tables["b"]["corpus 1"] = labelled(O, documents=1)
    assert c9(tables).verdict == c9({}).verdict == "not testable here"


def test_c6_does_not_judge_an_n_that_one_document_has():
    cells = [("a", 0, 2, 0.5, 0.1), ("a", 0, 4, 0.1, 0.5), ("b", 0, 4, 0.1, 0.5)]
    assert c6(effect(cells)).measured.startswith("lower at 1 of 1 N;") and c6(effect(cells)).verdict == "holds"
    assert c6(effect(cells[:1])).verdict == "not testable here"


def test_c6_nothing_is_not_the_half_of_nothing():
    heads = [(d, h, 2, *((0.4, 0.5) if h < 2 else (0.0, 0.0))) for d in "ab" for h in range(4)]
    found = c6(effect(heads))
    assert found.verdict == "holds in part" and "halved for 0.0% [" in found.measured
    assert c6(effect([(d, 0, 2, 0.0, 0.0) for d in "ab"])).verdict == "does not hold"


def test_c4_and_c5_ask_for_the_mean_and_for_its_interval():
    v = np.random.default_rng(0).normal(size=12)
    v -= v.mean()
    found = c4(sinks("times_smaller", np.c_[np.full(12, 4.0), 10.005 + v, 10.005 - v].tolist()))
    assert found.verdict == "holds in part" and found.measured.startswith("median 10.01 [")
    w = np.array([1, 2, 4, 8, 16, 32, 64, -127]) / 256  # mean 0: three of five heads are not below it
    found = c5(sinks("cosine_mean", np.c_[np.tile([-0.2] * 4, (8, 1)), w, -w, w, -w, w, -w].tolist()))
    assert found.verdict == "does not hold" and found.measured.startswith("40.0% [70.0%, ")


def test_c10_leaves_out_bins_that_do_not_see_the_sink():
    table = cosines(LABELS, HIGH_M, HIGH_R)
    blind = table.assign(query_from=64, query_to=128, cos_sink=-1.0, sees_sink=0.5)
    assert c10(pd.concat([table, blind])).measured == c10(table).measured


@pytest.mark.parametrize("claim", [c4, c5, c6, c8, c10, lambda t: c9({"a": {"x": t, "y": t}})])
def test_a_table_of_something_else_is_refused_in_one_sentence(claim):
    for table in (pd.DataFrame(), planted({2: 0.1}), norms([0.1]), labelled("MRO").iloc[:0]):
        with pytest.raises(GeomlibError, match="give one of the analysis"):
            claim(table)


def cosines(labels: str, sink: list, current: list, **more) -> pd.DataFrame:
    """Cosines of each head, one list for all of three documents or a list for each."""
    sink, current = (x if isinstance(x[0], list) else [x] * 3 for x in (sink, current))
    return labelled(labels, len(sink), cos_sink=sink, cos_current=current, **more)


LABELS = "MMRROO"
HIGH_M, HIGH_R = [0.6, 0.4, 0.1, 0.1, 0.2, 0.0], [0.1, 0.1, 0.5, 0.7, 0.0, 0.2]


@pytest.mark.parametrize(
    ("sink", "current", "verdict"),
    [
        (HIGH_M, HIGH_R, "holds"),
        (HIGH_M, HIGH_M, "holds in part"),
        (HIGH_R, HIGH_R, "holds in part"),
        (HIGH_R, HIGH_M, "does not hold"),
        ([0.1] * 6, HIGH_R, "holds in part"),  # as much is not more
        ([0.1] * 6, [0.1] * 6, "does not hold"),
        ([-0.1, -0.1, -0.5, -0.5, -0.5, -0.5], HIGH_R, "holds in part"),  # more, and not above 0
        ([0.0, 0.0, -0.5, -0.5, -0.5, -0.5], HIGH_R, "holds in part"),
        ([0.25, -0.125, -0.5, -0.5, -0.5, -0.5], HIGH_R, "holds"),  # the regime's mean is above 0
        ([0.4, 0.4, 0.9, 0.1, 0.1, 0.1], HIGH_R, "holds"),  # above the mean of the others, not above each
        ([0.4, 0.4, 0.9, 0.9, 0.1, 0.1], HIGH_R, "holds in part"),
        # above 0 in the mean and above the others in two documents of three, not in the interval
        ([[0.6, 0.6, 0.1, 0.1, 0.1, 0.1], [0.6, 0.6, 0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.1, 0.1, 0.1, 0.1]], HIGH_R,
         "holds in part"),
    ],
)  # fmt: skip
def test_c10(sink, current, verdict):
    found = c10(cosines(LABELS, sink, current))
    assert (found.claim, found.verdict) == ("C10", verdict)
    assert found.measured.startswith("Mixer with the sink ") and "; Retriever with the current token " in found.measured


@pytest.mark.parametrize(
    ("labels", "measured"),
    [
        ("RROORR", "0 of 6 heads are Mixers"),
        ("MMOOOO", "0 of 6 heads are Retrievers"),
        ("MMMMMM", "6 of 6 heads are Mixers"),
        ("RRRRRR", "0 of 6 heads are Mixers"),
        ("OOOOOO", "0 of 6 heads are Mixers"),
    ],
)
def test_c10_of_a_regime_without_heads(labels, measured):
    found = c10(cosines(labels, HIGH_M, HIGH_R))
    assert (found.verdict, found.measured) == ("not testable here", measured)


def test_c10_of_one_document():
    assert c10(cosines(LABELS, [HIGH_M], [HIGH_R])).verdict == "not testable here"


def test_c10_says_the_numbers():
    """Two documents of 8 and 80 queries count alike; in the first, head 0 has bins of 2 and 6 queries.

    Sink, a: head 0 (2 * 0.2 + 6 * 0.6) / 8 = 0.5, head 1 0.3, so 0.4; b: 0.6; others 0.1 and 0.2.
    Current token, a: 0.5 against 0.1; b: 0.7 against -0.1.
    """
    sink = [[0.5, 0.3, 0.1, 0.1, 0.1], [0.6, 0.6, 0.2, 0.2, 0.2]]
    current = [[0.1, 0.1, 0.5, 0.1, 0.1], [-0.1, -0.1, 0.7, -0.1, -0.1]]
    table = cosines("MMROO", sink, current)
    table.loc[table["document"] == "d1", "queries"] = 80
    first = table.iloc[[0]]
    bins = [first.assign(queries=2, query_to=16, cos_sink=0.2), first.assign(queries=6, query_from=16, cos_sink=0.6)]
    table = pd.concat([table.iloc[1:], *bins])
    found = c10(table)
    assert found.measured == (
        "Mixer with the sink +0.50, other heads +0.15, difference [+0.30, +0.40]; "
        "Retriever with the current token +0.60, other heads +0.00, difference [+0.40, +0.80]"
    )
    assert found.verdict == "holds"


def test_c10_labels_by_all_queries():
    """Head 0 is a Mixer by its 104 votes, a Reset in the shorter document; it counts as a Mixer in both."""
    counts = [[(0, 0, 8), (0, 0, 8), (8, 0, 0)], [(0, 96, 0), (0, 0, 96), (96, 0, 0)]]
    found = c10(votes(counts, cos_sink=[[0.2, 0.0, 0.0], [0.6, 0.0, 0.0]], cos_current=[[0.0, 0.0, 0.5]] * 2))
    assert found.measured.startswith("Mixer with the sink +0.40, other heads +0.00, difference [+0.20, +0.60]")


def many(seed: int = 0, documents: int = 6, heads: int = 14) -> pd.DataFrame:
    """Heads of three leanings, documents of other numbers of queries, two bins each."""
    rng = np.random.default_rng(seed)
    leaning = np.eye(3)[np.arange(heads) % 3] * 0.1 + 1
    parts = []
    for b in range(2):
        counts = [
            [tuple(rng.multinomial(20 + 17 * d, p / p.sum()).tolist()) for p in leaning] for d in range(documents)
        ]
        cos = {k: rng.normal(0.1, 0.3, (documents, heads)) for k in ("cos_sink", "cos_current")}
        parts.append(votes(counts, **cos).assign(query_from=64 * b, query_to=64 * b + 64))
    return pd.concat(parts, ignore_index=True)


def test_c8_c9_and_c10_do_not_lean_on_the_order_of_rows():
    table, second = many(), many(1)
    two = {"m": {"x": table, "y": second}, "n": {"x": second, "y": table}}
    for seed in range(3):
        assert c8(shuffled(table, seed)) == c8(table)
        assert c10(shuffled(table, seed)) == c10(table)
        assert c9({m: {c: shuffled(t, seed) for c, t in each.items()} for m, each in two.items()}) == c9(two)
    assert c8(second) != c8(table) and c10(second) != c10(table)


# --- the one number of a scorecard ------------------------------------------------------------------------------------


def numbers(found) -> list:
    return [found.value, found.low, found.high]


def test_numbers_of_c1_and_c2():
    """C1: the smallest advantage, at N = 64; C2: where the advantage peaks, and where in the draws."""
    each = [0.0, 0.1, 0.2, 0.0, 0.1, 0.2]
    found = c1(planted({2: 0.2, 64: each}))
    assert found.quantity == "smallest advantage over random sets" and found.value == pytest.approx(0.1)
    assert 0 < found.low < 0.1 < found.high < 0.2
    assert f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}] at N = 64" in found.measured
    assert numbers(c1(planted({2: 0.2, 64: 0.3}))) == pytest.approx([0.2] * 3)
    found = c2(planted({2: 0.1, 8: 0.3, 64: 0.2}))
    assert (found.quantity, *numbers(found)) == ("N at the peak", 8, 8, 8)
    found = c2(planted({2: 0.1, 8: [0.9, -0.3, 0.5, -0.1, 0.6, 0.1], 64: 0.2}))
    assert (found.value, found.low, found.high) == (8, 8, 64)


def test_numbers_of_c3():
    """A count, so without an interval."""
    for holds, broken in ((1.0, 0), (0.99, 6)):
        found = c3(promises(EVERY, {THEOREMS[0]: holds}))
        assert (found.quantity, *numbers(found)) == ("violations of proved levels", broken, None, None)


def test_numbers_of_c4_and_c5():
    """Two documents: a bootstrap of them has the ends 2 and 4, the mean 3."""
    found = c4(sinks("times_smaller", [[2.0] * 3, [4.0] * 3]))
    assert found.quantity == "times smaller, median head" and numbers(found) == pytest.approx([3, 2, 4])
    found = c5(
        sinks("cosine_mean", [[-0.1, -0.1, -0.2, 0.4], [-0.1, -0.1, 0.1, 0.4]])
    )  # the third head: -0.05 in the mean
    assert found.quantity == "heads with a negative mean cosine" and numbers(found) == pytest.approx([0.75, 0.5, 0.75])


def test_numbers_of_c6():
    """Of two pairs (head, N), the second is halved in document a alone: in the mean 0.3 of 0.55."""
    cells = [("a", 0, 2, 0.1, 0.6), ("b", 0, 2, 0.1, 0.6), ("a", 1, 2, 0.1, 0.6), ("b", 1, 2, 0.5, 0.5)]
    found = c6(effect(cells))
    assert found.quantity == "pairs (head, N) with F halved" and numbers(found) == pytest.approx([0.5, 0.5, 1.0])


def test_numbers_of_c7_and_c8():
    found = c7(norms([0.1, 0.1, 0.1, 0.5]))
    assert found.quantity == "heads with about constant norms" and numbers(found) == pytest.approx([0.75] * 3)
    found = c7(norms([0.1, 0.1, 0.1, 0.5], documents=1))
    assert (found.quantity, *numbers(found)) == ("heads with about constant norms", 0.75, None, None)
    sure = [ORDER[r] for r in "RRRRMMMMM"]
    found = c8(votes([[*sure, (6, 4, 0)], [*sure, (3, 7, 0)]]))  # as above
    assert found.quantity == "Retriever heads" and numbers(found) == pytest.approx([0.4, 0.4, 0.5])


def test_numbers_of_c9():
    """The least agreement of all models and pairs of corpora: 7 of 8 heads of a."""
    tables = other_corpus({"a": ["MMMMMMOO", "MMMMMMMO", "MMMMMMOO"], "b": [O, O]})
    found = c9(tables)
    assert found.quantity == "heads with the same label on two corpora, least"
    assert numbers(found) == pytest.approx([0.875] * 3)


def test_dominance_is_what_c9_needs_of_a_model():
    tables = other_corpus({"a": ["MMMMMMOO", "MMMMMMMO", "MMMMMMOO"], "b": [O, M], "c": ["MMMM", "MMMM"]})
    a, b, c = (dominance(tables[m]) for m in "abc")
    assert a == {"lead": ["Mixer"], "share": 0.875, "low": 0.875, "high": 0.875, "kappa": pytest.approx(0.6)}
    assert b["lead"] == ["Mixer", "Reset"] and b["share"] == pytest.approx(0.4 if M[-1] != O[-1] else 0.1)
    assert c["kappa"] == 1.0 and c["share"] == 1.0  # where all labels are one, kappa is not defined
    assert c9_of({"a": a, "b": b, "c": c}) == c9(tables)
    assert c9_of(json.loads(json.dumps({"a": a, "b": b, "c": c}))) == c9(tables)  # so it can be kept in a file
    assert dominance({"x": labelled(M)}) is None and dominance({"x": labelled(M), "y": labelled(M, 1)}) is None


def test_c9_of_nothing_or_too_little():
    assert (c9_of({}).verdict, c9_of({}).measured) == ("not testable here", "no tables")
    found = c9_of({"a": dominance({"x": labelled(M), "y": labelled(M)}), "b": None})
    assert (found.verdict, found.measured) == ("not testable here", "b: too few corpora or documents")
    assert numbers(found) == [None] * 3 and found.quantity == ""


def test_numbers_of_c10():
    """The smaller of the two differences: Mixers 0.5 against 0.1, Retrievers 0.6 against 0.1."""
    found = c10(cosines("MMRROO", [0.5, 0.5, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.6, 0.1, 0.1]))
    assert found.quantity == "cosine with the sink, Mixers less other heads"
    assert numbers(found) == pytest.approx([0.4] * 3)
    found = c10(cosines("MMRROO", [0.5, 0.5, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.2, 0.1, 0.1]))
    assert found.quantity == "cosine with the current token, Retrievers less other heads"
    assert numbers(found) == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(
    "found",
    [
        c1(planted({2: [0.1]})), c2(planted({2: 0.1})), c4(sinks("times_smaller", [[5.0]])), c5(sinks("cosine_mean", [[0.1]])),
        c8(labelled("RM", 1)), c10(labelled("RM", 1)),
    ],
    ids=lambda v: v.claim,
)  # fmt: skip
def test_what_is_not_testable_has_no_number(found):
    assert found.verdict == "not testable here" and found.quantity == "" and numbers(found) == [None] * 3


def test_every_claim_has_its_statement_once():
    assert list(STATEMENTS) == [f"C{i}" for i in range(1, 14)] and len(set(STATEMENTS.values())) == 13
    made = [c1(planted({2: 0.1})), c3(promises(EVERY)), c7(norms([0.1])), c8(labelled("RM")), c9({})]
    assert all(v.statement == STATEMENTS[v.claim] for v in made)
