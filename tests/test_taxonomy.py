"""Votes, regimes and agreement: planted attention with known answers, and slow loops over the very blocks."""

import math
import statistics
import warnings
from collections import Counter
from itertools import permutations

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import HEADS, LAYERS, LENGTH, REAL_LENGTH, WINDOW, collected, small_model, text

from geomlib import attention
from geomlib.attention import Block, observe
from geomlib.errors import GeomlibError
from geomlib.separability import SeparabilityTable
from geomlib.taxonomy import (
    REGIMES,
    SCHEMA,
    SIGNATURES,
    TIES,
    VOTES,
    TaxonomyTable,
    agreement,
    label,
    regimes,
    stability_over_documents,
    stability_over_length,
)

PLACE = ["layer", "head", "query_from", "query_to"]


def measured(model, ids, *observers) -> pd.DataFrame:
    with torch.no_grad(), observe(model, *observers):
        model(ids)
    return observers[0].table()


def cosine(x, y) -> float:
    lengths = math.hypot(*x) * math.hypot(*y)
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / lengths if lengths else 0.0


def slow_table(blocks, queries="all", bins=8, length=LENGTH) -> pd.DataFrame:
    """THEORY section 8, query by query in Python floats, then means by pandas."""
    edges = [length - 1, length] if queries == "last" else [round(i * length / bins) for i in range(bins + 1)]
    rows = []
    for block in blocks:
        for h in range(block.weights.shape[0]):
            v = block.values[h].tolist()
            for q, t in enumerate(block.queries.tolist()):
                if t == 0 or (queries == "last" and t != length - 1):
                    continue
                (b,) = [i for i in range(len(edges) - 1) if edges[i] <= t < edges[i + 1]]
                alpha = block.weights[h, q].tolist()
                seen = [j for j in range(len(alpha)) if block.visible[q, j]]
                winner = max(seen, key=lambda j: (alpha[j], -j))
                z = [math.fsum(alpha[j] * v[j][d] for j in seen) for d in range(len(v[0]))]
                votes = (winner == t, winner == 0, winner not in (0, t))
                learned = 0.0 if block.learned_sink_mass is None else float(block.learned_sink_mass[h, q])
                entropy = -math.fsum(alpha[j] * math.log(alpha[j]) for j in seen if alpha[j] > 0)
                rows.append((
                    block.layer, h, edges[b], edges[b + 1], *map(float, votes), cosine(z, v[0]), cosine(z, v[t]),
                    alpha[0] if 0 in seen else 0.0, learned, entropy, float(t - winner), float(0 in seen),
                    float(sum(alpha[j] == alpha[winner] for j in seen) > 1),
                ))  # fmt: skip
    every = pd.DataFrame(rows, columns=[*PLACE, *VOTES, *SIGNATURES])
    groups = every.groupby(PLACE)
    table = groups[[*VOTES, *SIGNATURES]].mean()
    table.insert(0, "queries", groups.size())
    return table.reset_index()


def compare(got, expected, **settings):
    got = got.sort_values(PLACE, ignore_index=True)[expected.columns]
    pd.testing.assert_frame_equal(got, expected, check_dtype=False, **settings)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "gpt_oss", "falcon_alibi", "gemma4"])
@pytest.mark.parametrize("queries", ["all", "last"])
def test_the_table_is_the_slow_loops(name, queries):
    model, ids = small_model(name, torch.float64), text()
    got = measured(model, ids, TaxonomyTable(LENGTH, queries, bins=3))
    expected = slow_table(collected(model, ids), queries, bins=3)
    assert list(got) == [c for c in SCHEMA if c != "document"]
    compare(got, expected, rtol=1e-9, atol=1e-12)
    if queries == "all":
        assert (expected.groupby(["layer", "head"])["queries"].sum() == LENGTH - 1).all()  # query 0 does not vote
        assert (expected["learned_mass"] > 0).all() == (name == "gpt_oss") == (expected["learned_mass"] > 0).any()
        assert (expected["sees_sink"] < 1).any() == (name in ("mistral", "gemma3", "gpt_oss", "gemma4"))


def test_half_the_digits_give_the_same_votes():
    """float32 weights: the votes of float64, signatures to its digits."""
    ids = text()
    first, second = (
        measured(small_model("gemma3", dtype), ids, TaxonomyTable(LENGTH)) for dtype in (torch.float32, torch.float64)
    )
    pd.testing.assert_frame_equal(first[[*PLACE, "queries", *VOTES]], second[[*PLACE, "queries", *VOTES]])
    pd.testing.assert_frame_equal(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("limits", [{"MAX_ROWS": 1}, {"MAX_ROWS": 4}, {"BLOCK_BYTES": 4 * HEADS * LENGTH * 7}])
@pytest.mark.parametrize("queries", ["all", "last"])
def test_blocks_change_nothing(name, limits, queries, monkeypatch):
    model, ids = small_model(name, torch.float64), text()
    once = measured(model, ids, TaxonomyTable(LENGTH, queries, bins=4))
    for limit, value in limits.items():
        monkeypatch.setattr(attention, limit, value)
    blocks = []
    parts = measured(model, ids, TaxonomyTable(LENGTH, queries, bins=4), blocks.append)
    assert len(blocks) > LAYERS
    pd.testing.assert_frame_equal(parts, once, rtol=1e-10, atol=1e-12)


def test_other_observers_change_nothing():
    from geomlib.sink import SinkEffectTable, SinksTable

    model, ids = small_model("mistral"), text()
    alone = measured(model, ids, TaxonomyTable(LENGTH))
    others = SinksTable(LENGTH), SeparabilityTable(LENGTH, sizes=(2,)), SinkEffectTable(LENGTH, sizes=(2,))
    pd.testing.assert_frame_equal(measured(model, ids, TaxonomyTable(LENGTH), *others), alone, check_exact=True)


def planted(weights, visible=None, values=None, learned=None, layer=0) -> Block:
    """Of (head, query, source) weights for all queries of a window."""
    weights = torch.as_tensor(weights, dtype=torch.float64)
    heads, length, _ = weights.shape
    position = torch.arange(length)
    visible = position[:, None] >= position if visible is None else visible
    if values is None:
        values = torch.randn(heads, length, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Block(layer, position, weights, values, visible, learned)


def looking_at(targets, length=None) -> torch.Tensor:
    """One head whose query t gives 0.6 to targets[t] and spreads the rest over all that it sees."""
    length = length or len(targets)
    rows = torch.zeros(length, length, dtype=torch.float64)
    for t, target in enumerate(targets):
        rows[t, : t + 1] = 0.4 / (t + 1)
        rows[t, target] += 0.6
    return rows


def window(length, width) -> torch.Tensor:
    position = torch.arange(length)
    return (position[:, None] >= position) & (position[:, None] - position < width)


def table_of(*blocks: Block, bins=1, queries="all") -> pd.DataFrame:
    observer = TaxonomyTable(blocks[0].weights.shape[-1], queries, bins)
    for block in blocks:
        observer(block)
    return observer.table()


def labels(table, **settings) -> list[str]:
    return regimes(table, **settings)["regime"].tolist()


def test_pure_heads():
    """Retriever, Mixer, and Reset, which can only start with query 2: query 1 sees the sink and itself alone."""
    n = 9
    own, first, before = list(range(n)), [0] * n, [0, 1, *range(1, n - 1)]
    table = table_of(planted(torch.stack([looking_at(x) for x in (own, first, before)])))
    assert labels(table) == ["Retriever", "Mixer", "Reset"]
    votes = table[list(VOTES)].to_numpy() * 8
    np.testing.assert_allclose(votes, [[8, 0, 0], [0, 8, 0], [1, 0, 7]], atol=1e-12)
    assert (table["queries"] == 8).all() and not table["tied"].any()
    np.testing.assert_allclose(table["distance"], [0, sum(range(1, 9)) / 8, 7 / 8])


def test_ties_of_weights_go_to_the_lower_index():
    """Uniform rows: the first visible source, source 0 under a full mask and another one where the window hides it."""
    n = 8
    full = torch.ones(n, n, dtype=torch.float64).tril()
    narrow = window(n, 3)
    uniform = [m.double() / m.sum(-1, keepdim=True) for m in (full, narrow)]
    (row,) = table_of(planted(uniform[0][None])).to_dict("records")
    assert (row["vote_sink"], row["tied"], row["sees_sink"]) == (1, 1, 1)
    assert row["entropy"] == pytest.approx(statistics.fmean(math.log(t + 1) for t in range(1, n)), abs=1e-12)
    (row,) = table_of(planted(uniform[1][None], narrow)).to_dict("records")
    assert row["vote_sink"] == pytest.approx(2 / 7) and row["vote_other"] == pytest.approx(5 / 7)
    assert row["sees_sink"] == pytest.approx(2 / 7) and row["distance"] == pytest.approx((1 + 6 * 2) / 7)
    # two in the middle against the query itself: the lower, which is another one
    weights = looking_at([0] * n)[None] * 0
    weights[0, :, 0] = 1
    weights[0, 5] = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.1, 0.3, 0, 0])
    (row,) = table_of(planted(weights)).to_dict("records")
    assert row["vote_other"] == pytest.approx(1 / 7) and row["tied"] == pytest.approx(1 / 7)


def test_a_window_that_hides_source_0_leaves_no_vote_for_it():
    n = 8
    visible = window(n, 2)
    weights = visible.double() * torch.tensor(0.5)
    weights[0, 0] = 1
    weights[range(1, n), range(n - 1)] = 0.9
    weights[range(1, n), range(1, n)] = 0.1
    table = table_of(planted(weights[None], visible), bins=4)
    first, *later = table.to_dict("records")
    assert (first["queries"], first["vote_sink"], first["sees_sink"], first["sink_mass"]) == (1, 1, 1, 0.9)
    for row in later:
        assert (row["queries"], row["vote_sink"], row["vote_other"]) == (2, 0, 1)
        assert (row["sees_sink"], row["sink_mass"], row["distance"]) == (0, 0, 1)
    assert labels(table) == ["Reset"]
    # a window of one: nothing but itself
    table = table_of(planted(torch.eye(n)[None], window(n, 1)))
    assert labels(table) == ["Retriever"] and table["entropy"].item() == 0 and table["sees_sink"].item() == 0


def test_two_tokens_and_one():
    """Query 1 alone votes; of one token nobody."""
    for row, regime in (([0.7, 0.3], "Mixer"), ([0.3, 0.7], "Retriever"), ([0.5, 0.5], "Mixer")):
        table = table_of(planted([[[1.0, 0.0], row]]), bins=2)
        assert labels(table) == [regime] and table["queries"].tolist() == [1] and table["query_from"].tolist() == [1]
        assert table["tied"].item() == (row[0] == 0.5)
    assert table_of(planted([[[1.0]]])).empty


def test_query_0_never_votes_whatever_it_weighs():
    """Its winner is at once the sink and its own token."""
    n = 6
    weights = torch.stack([looking_at([0, *[max(t - 1, 1) for t in range(1, n)]])])
    table = table_of(planted(weights), bins=n)
    assert table["query_from"].tolist() == [1, 2, 3, 4, 5] and (table["queries"] == 1).all()
    assert table["vote_sink"].sum() == 0
    whole = table_of(planted(weights)).iloc[0]
    assert whole["queries"] == 5 and whole["query_from"] == 0 and whole["query_to"] == n


def test_the_last_query_alone():
    n = 7
    weights = looking_at([0] * (n - 1) + [n - 1])[None]
    (row,) = table_of(planted(weights), queries="last").to_dict("records")
    assert (row["queries"], row["query_from"], row["query_to"], row["vote_current"]) == (1, n - 1, n, 1)
    assert row["sink_mass"] == pytest.approx(0.4 / n)


def test_a_learned_sink_is_no_source():
    """Its mass stands apart: it neither wins, nor is in sink_mass, nor in the entropy. Where it takes all, a row of zeros is
    left: the first visible source has the most, as all others."""
    n = 6
    learned = torch.full((1, n), 0.75, dtype=torch.float64)
    weights = 0.25 * looking_at([0, 1, 1, 2, 3, 4])[None]
    (row,) = table_of(planted(weights, learned=learned)).to_dict("records")
    assert row["learned_mass"] == 0.75 and row["vote_other"] == 0.8 and row["vote_sink"] == 0
    assert row["sink_mass"] == pytest.approx(0.25 * statistics.fmean(0.4 / (t + 1) for t in range(1, n)))
    (expected,) = slow_table([planted(weights, learned=learned)], bins=1, length=n).to_dict("records")
    assert row["entropy"] == pytest.approx(expected["entropy"], abs=1e-12)

    zeros = torch.zeros(1, n, n, dtype=torch.float64)
    everything = torch.ones(1, n, dtype=torch.float64)
    (row,) = table_of(planted(zeros, learned=everything)).to_dict("records")
    assert (row["vote_sink"], row["learned_mass"], row["entropy"], row["tied"]) == (1, 1, 0, 1)
    assert row["cos_sink"] == 0 and row["cos_current"] == 0
    (row,) = table_of(planted(zeros, window(n, 2), learned=everything)).to_dict("records")
    assert (row["vote_sink"], row["vote_other"], row["distance"]) == (0.2, 0.8, 1)
    (row,) = table_of(planted(zeros, window(n, 1), learned=everything)).to_dict("records")
    assert (row["vote_current"], row["tied"], row["distance"]) == (1, 0, 0)
    for mask in (None, window(n, 2)):
        compare(
            table_of(planted(zeros, mask, learned=everything)),
            slow_table([planted(zeros, mask, learned=everything)], bins=1, length=n),
        )


def test_signatures_of_a_planted_head():
    """z is the value that is looked at: cosines are those of two values, whatever their lengths."""
    values = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [-5.0, 0.0], [3.0, 4.0]]], dtype=torch.float64)
    hard = torch.zeros(1, 4, 4, dtype=torch.float64)
    hard[0, range(4), [0, 0, 1, 2]] = 1
    table = table_of(planted(hard, values=values), bins=4).set_index("query_from")
    assert table["cos_sink"].to_dict() == pytest.approx({1: 1, 2: 0, 3: -1})
    assert table["cos_current"].to_dict() == pytest.approx({1: 0, 2: 0, 3: -0.6})
    assert table["distance"].tolist() == [1, 1, 1] and not table["entropy"].any()
    assert table["sink_mass"].tolist() == [1, 0, 0]
    even = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0], [0.25] * 4]], dtype=torch.float64)
    table = table_of(planted(even, values=values), bins=4)
    np.testing.assert_allclose(table["entropy"], [math.log(2), 1.5 * math.log(2), math.log(4)], rtol=1e-14)
    assert table["tied"].tolist() == [1, 0, 1]


def test_values_of_length_zero_give_finite_numbers():
    n = 6
    for which in ([0], [2], list(range(n))):
        values = torch.randn(1, n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        values[:, which] = 0
        block = planted(looking_at([0, 1, 1, 2, 3, 4])[None], values=values)
        compare(table_of(block), slow_table([block], bins=1, length=n), rtol=1e-12, atol=1e-15)


def test_cosines_of_tiny_values_are_cosines():
    """Lengths whose square float32 cannot hold."""
    values = torch.tensor([[[3e-25, 4e-25], [1.0, 0.0], [0.0, 2e-25]]])
    weights = torch.tensor([[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0, 0.5]]])
    block = Block(0, torch.arange(3), weights, values, torch.ones(3, 3, dtype=torch.bool).tril(), None)
    table = table_of(block, bins=3)
    np.testing.assert_allclose(table["cos_sink"], [0.6, 33 / 5 / math.hypot(3, 6)], rtol=1e-5)
    np.testing.assert_allclose(table["cos_current"], [1, 6 / math.hypot(3, 6)], rtol=1e-5)


def test_wrong_queries_are_refused():
    with pytest.raises(GeomlibError, match="queries = 'some' is not usable: give all or last"):
        TaxonomyTable(LENGTH, "some")


# --- regimes ----------------------------------------------------------------------------------------------------------


def counted(votes: dict) -> pd.DataFrame:
    """A table of known votes: {(document, layer, head, query_from, query_to): (current, sink, other)}."""
    rows = [
        (*place, sum(v), *(x / sum(v) for x in v), *(0.5 for _ in SIGNATURES)) for place, v in votes.items()
    ]  # each share a float of its own, as a running mean gives it
    return pd.DataFrame(rows, columns=["document", *PLACE, "queries", *VOTES, *SIGNATURES])


def rule(current, sink, other, ties=("Reset", "Mixer", "Retriever")) -> str:
    """THEORY section 8 of whole numbers of votes."""
    votes = {"Retriever": current, "Mixer": sink, "Reset": other}
    most = max(votes.values())
    return next(r for r in ties if votes[r] == most)


def test_equal_shares():
    cases = {(3, 3, 3): "Reset", (3, 3, 0): "Mixer", (3, 0, 3): "Reset", (0, 3, 3): "Reset", (4, 3, 3): "Retriever",
             (3, 4, 3): "Mixer", (1, 0, 0): "Retriever"}  # fmt: skip
    table = counted({("a", 0, h, 0, 10): votes for h, votes in enumerate(cases)})
    assert labels(table) == list(cases.values())
    assert label(np.array(list(cases))).tolist() == list(cases.values())
    for ties in permutations(REGIMES):
        expected = [rule(*votes, ties) for votes in cases]
        assert labels(table, ties=ties) == expected and label(np.array(list(cases)), ties).tolist() == expected
    assert TIES == ("Reset", "Mixer", "Retriever")


def test_labels_of_many_axes():
    counts = np.random.default_rng(0).integers(0, 3, (4, 5, 6, 3))
    got = label(counts)
    assert got.shape == (4, 5, 6)
    for place in np.ndindex(4, 5, 6):
        assert got[place] == rule(*counts[place])


def test_rounding_never_breaks_a_tie():
    """Heads whose votes tie exactly over three documents of two bins, though the means of their rounded shares do not."""
    rng = np.random.default_rng(1)
    votes, expected, naive = {}, [], []
    for queries in np.repeat([3, 5, 7, 10, 30, 49], 150).tolist():
        parts = rng.multinomial(queries, [0.4, 0.3, 0.3], size=6)
        total = parts.sum(0).tolist()
        if total.count(max(total)) < 2:
            continue
        place = len(expected)
        for i, part in enumerate(parts.tolist()):
            votes[(f"d{i % 3}", place // 9, place % 9, 50 * (i // 3), 50 * (i // 3) + 50)] = tuple(part)
        expected.append(rule(*total))
        naive.append(rule(*(sum(part[k] / queries for part in parts.tolist()) for k in range(3))))
    assert sum(a != b for a, b in zip(expected, naive, strict=True)) > 3  # so a rule on these means would not do
    assert set(expected) == {"Reset", "Mixer"} and len(expected) > 30
    assert labels(counted(votes)) == expected


def test_shares_times_queries_are_whole_numbers_of_votes():
    """15 / 22 * 22 is not 15 in floats; 15 votes against 7 and 8 are a tie all the same."""
    assert 15 / 22 * 22 != 15
    heads = [((15, 7, 0), (0, 8, 0)), ((7, 15, 0), (8, 0, 0)), ((7, 0, 15), (8, 0, 0)), ((15, 0, 7), (0, 0, 8))]
    votes = {(d, 0, h, 0, 30): v for h, parts in enumerate(heads) for d, v in zip("ab", parts, strict=True)}
    for ties in permutations(REGIMES):
        expected = [rule(*(x + y for x, y in zip(*parts, strict=True)), ties) for parts in heads]
        assert labels(counted(votes), ties=ties) == expected


@pytest.mark.parametrize("bins", [1, 2, 3, 5])
def test_an_exact_tie_through_blocks_bins_and_documents(bins):
    """Three documents of 9 votes each, the winners in any order: 9 votes for each regime in the end."""
    rng = np.random.default_rng(bins)
    heads = 20
    tables = []
    draws = [[] for _ in range(heads)]
    for document in range(3):
        rows = []
        for h in range(heads):
            wanted = ["current"] * 3 + ["sink"] * 3 + ["other"] * 3
            while wanted[0] == "other":  # query 1 has none
                rng.shuffle(wanted)
            rows.append(looking_at([0, *[{"current": t, "sink": 0, "other": t - 1}[w] for t, w in enumerate(wanted, 1)]]))  # fmt: skip
            draws[h] += wanted
        tables.append(table_of(planted(torch.stack(rows)), bins=bins).assign(document=f"d{document}"))
    assert all(Counter(d) == {"current": 9, "sink": 9, "other": 9} for d in draws)
    table = pd.concat(tables, ignore_index=True)
    for ties in permutations(REGIMES):
        assert labels(table, ties=ties) == [ties[0]] * heads
    assert labels(table, by=["document"]) == ["Reset"] * 3 * heads


def test_the_table_of_heads():
    """One row a head, whatever the order of the rows; means over queries; joined on layer and head."""
    model = small_model("llama", torch.float64)
    tables, length = [], 5  # of so few sources the winner is often the first or the last
    for seed, name in ((0, "b"), (1, "a")):
        tables.append(measured(model, text(1, length, seed=seed), TaxonomyTable(length, bins=2)).assign(document=name))
    table = pd.concat(tables, ignore_index=True)
    heads = regimes(table.sample(frac=1, random_state=0))
    assert list(heads) == ["layer", "head", "queries", *VOTES, "regime", *SIGNATURES]
    places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    assert list(heads[["layer", "head"]].itertuples(index=False, name=None)) == places
    assert (heads["queries"] == 2 * (length - 1)).all()
    np.testing.assert_allclose(heads[list(VOTES)].sum(axis=1), 1)
    whole = [slow_table(collected(model, text(1, length, seed=seed)), bins=1, length=length) for seed in (0, 1)]
    mean = (whole[0][[*VOTES, *SIGNATURES]] + whole[1][[*VOTES, *SIGNATURES]]) / 2
    pd.testing.assert_frame_equal(heads[[*VOTES, *SIGNATURES]], mean, rtol=1e-9, atol=1e-12)
    votes = [(w[list(VOTES)].mul(w["queries"], axis=0)).round().astype(int) for w in whole]
    expected = [rule(*row) for row in (votes[0] + votes[1]).to_numpy().tolist()]
    assert heads["regime"].tolist() == expected and len(set(expected)) > 1

    each = regimes(table, by=["document"])
    assert list(each) == ["document", *heads] and each["document"].tolist() == ["a"] * 12 + ["b"] * 12
    for name, one in zip("ba", votes, strict=True):
        assert each.loc[each["document"] == name, "regime"].tolist() == [rule(*r) for r in one.to_numpy().tolist()]
    table["corpus"] = "c"
    two = regimes(table, by=["corpus", "document"])
    pd.testing.assert_frame_equal(two.drop(columns="corpus"), each)
    joined = table.merge(heads[["layer", "head", "regime"]], on=["layer", "head"], validate="many_to_one")
    assert len(joined) == len(table)


def test_queries_count_alike_whatever_bin_they_are_in():
    """One bin of a single query, one of nine: nine to one, not one to one."""
    table = counted({("a", 0, 0, 0, 2): (1, 0, 0), ("a", 0, 0, 2, 11): (0, 5, 4)})
    (head,) = regimes(table).to_dict("records")
    assert head["regime"] == "Mixer" and head["queries"] == 10
    assert [head[v] for v in VOTES] == pytest.approx([0.1, 0.5, 0.4])


@pytest.mark.parametrize("ties", [("Reset", "Mixer"), ("Reset", "Mixer", "Mixer"), ("reset", "mixer", "retriever"), ()])
def test_wrong_ties_are_refused(ties):
    with pytest.raises(GeomlibError, match="give Retriever, Mixer, Reset in the order you want") as caught:
        regimes(counted({("a", 0, 0, 0, 2): (1, 0, 0)}), ties=ties)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_wrong_tables_are_refused():
    good = counted({("a", 0, 0, 0, 2): (1, 0, 0)})
    separability = measured(small_model("llama"), text(), SeparabilityTable(LENGTH, sizes=(2,)))
    for table, by, column in (
        (separability, [], "vote_current"),
        (good.drop(columns="queries"), [], "queries"),
        (good, ["corpus"], "corpus"),
        (pd.DataFrame(), [], "layer"),
    ):
        with pytest.raises(GeomlibError, match=f"the table has no column {column}: give one of the analysis") as caught:
            regimes(table, by=by)
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


# --- agreement --------------------------------------------------------------------------------------------------------


def heads_of(names: str) -> pd.DataFrame:
    """A table of heads, three a layer, from one letter a head."""
    full = {"R": "Retriever", "M": "Mixer", "0": "Reset"}
    rows = [(i // 3, i % 3, full[x]) for i, x in enumerate(names)]
    return pd.DataFrame(rows, columns=["layer", "head", "regime"])


def kappa_by_hand(a: str, b: str) -> float:
    """Cohen 1960: (p_o - p_e) / (1 - p_e)."""
    n = len(a)
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / n
    chance = sum((a.count(x) / n) * (b.count(x) / n) for x in "RM0")
    return (observed - chance) / (1 - chance)


@pytest.mark.parametrize(
    ("a", "b"),
    [("RRMM00", "RRMM00"), ("RRMM00", "RM0R0M"), ("RRRRRM", "RRRRMR"), ("RMRM", "MRMR"), ("RRR", "MMM"), ("MMMM", "MM0R")],
)  # fmt: skip
def test_cohens_kappa_by_hand(a, b):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = agreement(heads_of(a), heads_of(b))
    assert found.heads == len(a)
    assert found.share == pytest.approx(sum(x == y for x, y in zip(a, b, strict=True)) / len(a))
    assert found.kappa == pytest.approx(kappa_by_hand(a, b), abs=1e-12)
    shuffled = agreement(heads_of(a).sample(frac=1, random_state=1), heads_of(b).sample(frac=1, random_state=2))
    assert shuffled == pytest.approx(found)


def test_a_kappa_worked_out_on_paper():
    """10 heads: 7 alike; 5 R, 3 M, 2 0 against 4 R, 4 M, 2 0: chance 0.2 + 0.12 + 0.04 = 0.36; kappa 0.34 / 0.64."""
    found = agreement(heads_of("RRRRRMMM00"), heads_of("RRRMMMM00R"))
    assert found.share == 0.6  # R R R . . M M . 0 .
    found = agreement(heads_of("RRRRRMMM00"), heads_of("RRRMMMMR00"))
    assert found.share == 0.7 and found.kappa == pytest.approx(0.34 / 0.64, abs=1e-12)


def test_one_label_gives_no_kappa_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = agreement(heads_of("MMMM"), heads_of("MMMM"))
    assert found.heads == 4 and found.share == 1 and math.isnan(found.kappa)


def test_other_heads_are_refused():
    for other in ("RRMM0", "RRMM000"):
        with pytest.raises(GeomlibError, match="not of the same heads: give labellings of one model") as caught:
            agreement(heads_of("RRMM00"), heads_of(other))
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    moved = heads_of("RRMM00").assign(layer=lambda t: t["layer"] + 1)
    with pytest.raises(GeomlibError, match="not of the same heads"):
        agreement(heads_of("RRMM00"), moved)


def test_heads_that_come_twice_are_refused():
    """As `regimes(by=["document"])` gives them: which of the two would be meant?"""
    twice = regimes(counted({(d, 0, 0, 0, 2): (1, 0, 0) for d in "ab"}), by=["document"])
    with pytest.raises(GeomlibError):
        agreement(twice, regimes(counted({("a", 0, 0, 0, 2): (1, 0, 0)})))


# --- stability --------------------------------------------------------------------------------------------------------


def test_stability_over_length_on_planted_votes():
    """Bins of four queries. Head 0 is the sink's throughout; head 1 changes in the third bin, head 2 in the second."""
    votes = {}
    for document in "ab":
        for h, bins in enumerate((
            [(0, 4, 0), (0, 4, 0), (0, 4, 0)],
            [(3, 1, 0), (2, 2, 0), (0, 0, 4)],  # 3 1 0 | 5 3 0 | 5 3 4: Retriever all along, by 5 to 4
            [(0, 0, 4), (0, 4, 0), (0, 4, 0)],  # Reset, then a tie that Reset wins, then Mixer
        )):  # fmt: skip
            for b, v in enumerate(bins):
                votes[(document, 0, h, 4 * b, 4 * b + 4)] = v
    got = stability_over_length(counted(votes))
    assert list(got) == ["length", "share", "kappa"] and got["length"].tolist() == [4, 8, 12]
    whole = "MRM"
    parts = ["MR0", "MR0", "MRM"]
    assert got["share"].tolist() == pytest.approx([2 / 3, 2 / 3, 1])
    assert got["kappa"].tolist() == pytest.approx([kappa_by_hand(p, whole) for p in parts])


def test_stability_over_length_is_that_of_shorter_windows():
    """Attention is causal: a window cut short has the same votes."""
    model, ids = small_model("llama", torch.float64), text()
    bins = 4
    table = measured(model, ids, TaxonomyTable(LENGTH, bins=bins)).assign(document="a")
    whole = regimes(table)
    got = stability_over_length(table)
    for row in got.to_dict("records"):
        end = int(row["length"])
        short = measured(model, ids[:, :end], TaxonomyTable(end, bins=1)).assign(document="a")
        expected = agreement(regimes(short), whole)
        assert row["share"] == expected.share and row["kappa"] == pytest.approx(expected.kappa, nan_ok=True)
    assert got["length"].tolist() == [round(i * LENGTH / bins) for i in range(1, bins + 1)]
    assert got["share"].iloc[-1] == 1 and got["share"].iloc[0] < 1


def documents(labels_of: dict[str, str], votes=(8, 1, 1)) -> pd.DataFrame:
    """Each document's labels, one letter a head, by a majority of votes that differs from head to head."""
    found = {}
    for document, names in labels_of.items():
        for h, name in enumerate(names):
            order = {"R": (0, 1, 2), "M": (1, 0, 2), "0": (2, 1, 0)}[name]
            v = [0, 0, 0]
            for k, x in zip(order, votes, strict=True):
                v[k] = x
            found[(document, h // 3, h % 3, 0, 10)] = tuple(v)
    return counted(found)


def test_stability_over_documents_that_all_say_the_same():
    table = documents({f"d{i}": "RM0M0R" for i in range(9)})
    got = stability_over_documents(table.sample(frac=1, random_state=0), draws=7)
    assert list(got) == ["documents", "share", "low", "high", "kappa"]
    assert got["documents"].tolist() == [1, 2, 4]
    assert (got[["share", "low", "high", "kappa"]] == 1).all(axis=None)


def test_stability_over_documents_of_two_kinds():
    """Three documents say one thing, one the other: of two drawn alone they agree half of the time, and of two
    pairs the one with the odd document is a tie, which Reset wins."""
    table = documents({"a": "0M0", "b": "0M0", "c": "0M0", "d": "M0M"}, votes=(10, 0, 0))
    got = stability_over_documents(table, draws=60).set_index("documents")
    assert got.index.tolist() == [1, 2]
    assert got.loc[1, "share"] == pytest.approx(0.5, abs=0.2)  # 6 of the 12 ordered pairs hold d
    assert (got.loc[1, "low"], got.loc[1, "high"]) == (0, 1)
    # with the odd document: 000 against 0M0, always: two of three alike, and no agreement beyond chance
    assert got.loc[2].tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])
    assert stability_over_documents(table, draws=60).equals(got.reset_index())
    assert stability_over_documents(table, draws=5, seed=1)["share"].iloc[0] != got.loc[1, "share"]


def test_one_document_says_nothing_about_others():
    got = stability_over_documents(documents({"a": "RM0"}))
    assert got.empty and list(got) == ["documents", "share", "low", "high", "kappa"]


def test_stability_where_all_heads_are_alike():
    """No kappa, and no warning about it."""
    table = documents({d: "MMM" for d in "abcd"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lengths, parts = stability_over_length(table), stability_over_documents(table, draws=3)
    assert (lengths["share"] == 1).all() and lengths["kappa"].isna().all()
    assert (parts["share"] == 1).all() and parts["kappa"].isna().all()


# --- in a study -------------------------------------------------------------------------------------------------------


def test_a_study_of_the_taxonomy(tmp_path):
    """On a folder's small model, beside another analysis: the table of its windows, and it fits its schema."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from geomlib.corpora import take_windows, text_corpus
    from geomlib.models import load_model
    from geomlib.study import Study, check_table, load_table

    words = {f"w{i}": i for i in range(67)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    small_model("mistral").save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="w1", unk_token="w0").save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "texts.jsonl").write_text(
        "".join('{"text": "' + " ".join(f"w{i}" for i in text(60, seed=s).tolist()) + '"}\n' for s in range(40))
    )
    study = Study(model=str(tmp_path / "model"), text=str(tmp_path / "texts.jsonl"), windows=3, length=24, bins=3)
    model = load_model(study.model, device="cpu")
    table = study.run(tmp_path / "out", model, analyses=["taxonomy", "sinks"])["taxonomy"]
    check_table(table, "taxonomy")
    assert list(table) == list(SCHEMA)
    pd.testing.assert_frame_equal(load_table(tmp_path / "out", "taxonomy"), table)
    windows, _ = take_windows(text_corpus(study.text), model.tokenizer, 3, 24)
    for window_ in windows:
        expected = measured(model.hf, torch.tensor([window_.input_ids]), TaxonomyTable(24, bins=3))
        mine = table[table["document"] == window_.document].drop(columns="document").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, expected, check_dtype=False)
    heads = regimes(table)
    assert len(heads) == LAYERS * HEADS and (heads["queries"] == 3 * 23).all()
    np.testing.assert_allclose(heads["sees_sink"], (WINDOW - 1) / 23)
    assert stability_over_documents(table, draws=3)["documents"].tolist() == [1]


# --- the default model on real text -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_models_labels_against_the_slow_loop(real):
    """All heads of six layers: every share and signature, and the labels."""
    model, ids = real
    layers = (0, 1, 7, 15, 22, 29)
    got = measured(model.hf, ids, TaxonomyTable(REAL_LENGTH, bins=4))
    expected = slow_table([b for b in collected(model.hf, ids) if b.layer in layers], bins=4, length=REAL_LENGTH)
    compare(got[got["layer"].isin(layers)], expected, rtol=1e-9, atol=1e-9)
    counts = (
        expected[list(VOTES)].mul(expected["queries"], axis=0).round().groupby([expected["layer"], expected["head"]])
    )
    heads = regimes(got[got["layer"].isin(layers)])
    assert len(heads) == 9 * len(layers)
    assert heads["regime"].tolist() == [rule(*row) for row in counts.sum().to_numpy().tolist()]
    assert len(set(heads["regime"])) > 1
    print(regimes(got)["regime"].value_counts().to_dict())


@pytest.mark.slow
def test_a_study_of_the_default_model_gives_the_labels_of_float64(real, tmp_path):
    """In float32, through the command's own way: the same labels and signatures as the slow loop in float64."""
    from geomlib import Study

    model, ids = real
    study = Study(windows=1, length=REAL_LENGTH, sizes=(2, 8), bins=1, dtype="float32")
    tables = study.run(tmp_path, analyses=["taxonomy", "sinks", "sink_effect"])
    layers = (0, 15, 29)
    expected = slow_table([b for b in collected(model.hf, ids) if b.layer in layers], bins=1, length=REAL_LENGTH)
    got = tables["taxonomy"]
    compare(got[got["layer"].isin(layers)], expected, rtol=1e-4, atol=1e-4)
    assert len(regimes(got)) == 270 and (tables["sinks"]["source"] == 0).sum() == 270
    merged = got.merge(tables["sinks"].query("source == 0"), on=["layer", "head"])
    pd.testing.assert_series_equal(merged["sink_mass"], merged["received"], check_names=False, rtol=1e-5)
    pd.testing.assert_series_equal(merged["vote_sink"], merged["won"], check_names=False, rtol=1e-12)
    assert set(tables["sink_effect"]["size"]) == {2, 8}
