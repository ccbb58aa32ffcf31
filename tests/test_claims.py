"""Every verdict of every claim, on tables planted to deserve it."""

import numpy as np
import pandas as pd
import pytest

from geomlib.claims import CONSTANT, INTERMEDIATE, alikeness, assumptions, c1, c2, c3, c7, direction, half
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
             ("combined", "aware"): 0.5, ("exact", "none"): 0.5}  # fmt: skip
    assert half(promises(shown)).split("\n") == [
        "global    does not (least share 0.02)",
        "rowwise   does not (least share 0.48)",
        "sketch_0  promises at least half (least share 0.50)",
        "sketch_1  promises at least half (least share 0.80)",
        "combined  promises at least half (least share 1.00)",
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
    assert ": +0.30, +0.10, -0.20\n" in sentence and sentence.endswith("1.00")
