"""Random rankings and turned directions: uniform, independent, and the same however they are computed.

All draws are hashes of fixed keys, so each test sees the same numbers every time; bounds are beyond one in a million of
the chi-square distribution named beside them.
"""

from itertools import permutations

import pytest
import torch

from geomlib.attention import Block
from geomlib.controls import random_directions, random_scores


def make_block(heads=4, queries=64, sources=64, layer=0, first=0, visible=None) -> Block:
    """Query positions first, first + 1...; causal unless `visible` is given."""
    position = torch.arange(first, first + queries)
    if visible is None:
        visible = torch.arange(sources) <= position[:, None]
    weights = torch.zeros(heads, queries, sources)
    return Block(layer, position, weights, torch.zeros(heads, sources, 2), visible, None)


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.double().mean()
    return float(((counts - expected) ** 2 / expected).sum())


def test_scores_are_uniform():
    scores = random_scores(make_block(queries=200, sources=200), "k", 0)
    assert scores.dtype == torch.float32 and 0 <= scores.min() and scores.max() < 1
    counts = torch.histc(scores, bins=50, min=0, max=1)
    assert 15 < chi_square(counts) < 120  # 49 degrees of freedom
    assert len(scores.unique()) > 0.99 * scores.numel()  # 24 bits: ties are rare


def test_every_source_is_in_the_top_n_equally_often():
    block = make_block(heads=8, queries=500, sources=20, visible=torch.ones(500, 20, dtype=torch.bool))
    top = torch.cat([random_scores(block, "k", d).topk(5).indices.flatten() for d in range(4)])
    # 19 degrees of freedom, less what drawing without replacement takes off the variance
    assert 2 < chi_square(torch.bincount(top, minlength=20)) < 60


@pytest.mark.parametrize(
    "other",
    [
        {"draw": 1},
        {"key": "l"},
        {"layer": 1},
        {"first": 1},  # each query against the next one
        {"heads": True},
        {"sources": True},
    ],
    ids=lambda o: next(iter(o)),
)
def test_scores_are_independent_over(other):
    """Contingency of 8 x 8 bins: 49 degrees of freedom; equal or shifted draws would give thousands."""
    a = random_scores(make_block(queries=100, sources=100), "k", 0)
    block = make_block(queries=100, sources=100, layer=other.get("layer", 0), first=other.get("first", 0))
    b = random_scores(block, other.get("key", "k"), other.get("draw", 0))
    if "heads" in other:
        a, b = a[:-1], a[1:]
    if "sources" in other:
        a, b = a[..., :-1], a[..., 1:]
    if "first" in other:
        assert torch.equal(a[:, 1:], b[:, :-1])  # the position counts, not the row
    assert not torch.equal(a, b)
    cells = (a * 8).long() * 8 + (b * 8).long()
    assert chi_square(torch.bincount(cells.flatten(), minlength=64)) < 130
    assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 5 / a.numel() ** 0.5


def test_no_two_rows_share_a_ranking():
    scores = torch.cat([random_scores(make_block(layer=layer), "k", draw) for layer in range(3) for draw in range(4)])
    orders = scores.flatten(0, 1).argsort(dim=-1)
    assert len(orders.unique(dim=0)) == len(orders)


@pytest.mark.parametrize("rows", [1, 7])
def test_blocks_change_nothing(rows):
    whole = make_block()
    for start in range(0, 64, rows):
        stop = min(start + rows, 64)
        part = make_block(queries=stop - start, first=start)
        assert torch.equal(random_scores(part, "k", 3), random_scores(whole, "k", 3)[:, start:stop])
        assert torch.equal(random_directions(part, "k"), random_directions(whole, "k")[:, start:stop])


def test_the_draws_are_the_same_everywhere():
    # Pinned: a change of the draws would change every published number of the controls.
    block = make_block(heads=1, queries=2, sources=4, first=2)
    assert (random_scores(block, "k", 0) * 2**24).long().tolist() == [
        [[16326375, 10592723, 135947, 8898560], [2699200, 8204428, 4086076, 4029852]]
    ]
    assert random_directions(block, "k").tolist() == [[[0, 2, 1, 3], [2, 0, 1, 3]]]


def test_directions_permute_the_visible_sources_alone():
    window = torch.arange(64) > torch.arange(64)[:, None] - 9
    visible = (torch.arange(64) <= torch.arange(64)[:, None]) & window
    directions = random_directions(make_block(visible=visible), "k")
    for q in range(64):
        seen = visible[q].nonzero()[:, 0]
        for h in range(4):
            assert sorted(directions[h, q, seen].tolist()) == seen.tolist()
            assert torch.equal(directions[h, q, ~visible[q]], torch.arange(64)[~visible[q]].int())


def test_the_sink_may_keep_its_direction():
    block = make_block()
    free, kept = random_directions(block, "k"), random_directions(block, "k", keep_sink=True)
    assert (kept[..., 0] == 0).all() and (free[:, 1:, 0] != 0).any()
    for q in range(64):
        assert torch.equal(kept[:, q, 1 : q + 1].sort(-1).values, torch.arange(1, q + 1).int().expand(4, -1))
        assert torch.equal(kept[:, q, q + 1 :], torch.arange(q + 1, 64).int().expand(4, -1))
    assert (kept[:, 8:, 1:] != torch.arange(1, 64).int()).any(-1).all()  # and the others move


def test_directions_are_uniform():
    """All 24 permutations of four visible sources equally often: 23 degrees of freedom."""
    visible = torch.tensor([False, True, True, False, True, True, False])
    block = make_block(heads=8, queries=1500, sources=7, visible=visible.expand(1500, 7))
    found = random_directions(block, "k")[..., visible].flatten(0, 1)
    every = torch.tensor(list(permutations(visible.nonzero()[:, 0].tolist())))
    counts = (found[:, None] == every).all(-1).sum(0)
    assert counts.sum() == 8 * 1500
    assert 3 < chi_square(counts) < 80


def test_directions_of_a_long_row_have_no_favourites():
    visible = torch.ones(2000, 30, dtype=torch.bool)
    directions = random_directions(make_block(heads=4, queries=2000, sources=30, visible=visible), "k")
    for source in (0, 13, 29):
        counts = torch.bincount(directions[..., source].flatten().long(), minlength=30)
        assert 5 < chi_square(counts) < 85  # 29 degrees of freedom
    fixed = (directions == torch.arange(30)).float().sum(-1).mean()
    assert abs(float(fixed) - 1) < 0.06  # a permutation leaves one place in the mean


def test_directions_differ_by_key_and_from_the_scores():
    block = make_block(visible=torch.ones(64, 64, dtype=torch.bool))
    a, b = random_directions(block, "a"), random_directions(block, "b")
    assert (a == b).float().mean() < 0.03  # 1 in 64 by chance
    order = random_scores(block, "a", 0).argsort(dim=-1)
    assert (a == order).float().mean() < 0.03
