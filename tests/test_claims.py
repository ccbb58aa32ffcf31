"""Every verdict of every claim, on tables planted to deserve it."""

import numpy as np
import pandas as pd
import pytest

from geomlib.claims import INTERMEDIATE, c1, c2, direction

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
