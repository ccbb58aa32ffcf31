"""What the figures of the sink and the taxonomy show is what their input says."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from geomlib import figures, taxonomy
from geomlib.geometry import separability
from geomlib.stats import damage_difference


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def heads() -> pd.DataFrame:
    rows = [(0, 0, "Retriever", 0.8, 0.1, 0.1), (0, 1, "Mixer", 0.1, 0.8, 0.1), (1, 0, "Reset", 0.2, 0.2, 0.6)]
    return pd.DataFrame(rows, columns=["layer", "head", "regime", *taxonomy.VOTES])


def test_distances_in_the_sink_plane_are_exact():
    g = torch.Generator().manual_seed(0)
    weights, values = torch.rand(30, generator=g).softmax(-1), torch.randn(30, 8, generator=g)
    weights[0] = 0.5  # selected
    for axes, exclude in zip(figures.sink_plane(weights, values, 4).axes, (None, torch.arange(30) == 0), strict=True):
        found = separability(weights[None], values, [4], exclude=exclude)
        points = {c.get_label(): np.asarray(c.get_offsets()) for c in axes.collections}
        far = {name: np.linalg.norm(xy, axis=1) for name, xy in points.items()}
        selected = [far["selected"], far["the sink"]] if exclude is None else [far["selected"]]
        assert sum(map(len, selected)) == 4 and len(far["unselected"]) == 30 - 4 - (exclude is not None)
        assert max(map(max, selected)) == pytest.approx(found.rho_max.item(), rel=1e-5)
        assert far["unselected"].min() == pytest.approx(found.rho_min.item(), rel=1e-5)
        y = (weights[:, None] * values).double()
        total = y[weights.masked_fill(torch.zeros(30).bool() if exclude is None else exclude, -1).topk(4).indices].sum(
            0
        )
        assert points["origin"][0] == pytest.approx([-total.norm().item(), 0], rel=1e-5)
        assert sorted(p.radius for p in axes.patches) == pytest.approx(
            sorted([found.rho_max.item(), found.rho_min.item()])
        )


def test_the_map_has_each_heads_regime_and_holes_where_there_is_none(heads):
    (axes,) = figures.regime_map({"model": heads}).axes
    letters = {(t.get_position()): t.get_text() for t in axes.texts}
    assert letters == {(0, 0): "R", (0, 1): "M", (1, 0): "x", (1, 1): ""}


def test_the_simplex_counts_the_heads_and_puts_them_in_their_corner(heads):
    (axes,) = figures.simplex({"model": heads}).axes
    assert [c.get_label() for c in axes.collections] == ["Retriever (1)", "Mixer (1)", "Reset (1)"]
    retriever, mixer, reset = (np.asarray(c.get_offsets())[0] for c in axes.collections)
    assert retriever[0] > reset[0] > mixer[0] and reset[1] > max(retriever[1], mixer[1])


def test_winners_are_marked_where_the_weight_is_largest():
    weights = torch.tensor([[1.0, 0, 0, 0], [0.2, 0.8, 0, 0], [0.5, 0.3, 0.2, 0], [0.1, 0.6, 0.1, 0.2]])
    axes = figures.winners({"head": weights}, ["a", "b", "c", "d"]).axes[0]
    marks = {c.get_label(): np.asarray(c.get_offsets()).tolist() for c in axes.collections}
    assert marks == {
        "Retriever": [[1, 1]],
        "Mixer": [[0, 2]],
        "Reset": [[1, 3]],
    }  # (source, query); query 0 does not vote


def test_stability_of_one_document_has_nothing_on_the_right():
    length = {"model": pd.DataFrame({"length": [8, 16], "share": [0.5, 1.0], "kappa": [0.2, 1.0]})}
    columns = ["documents", "share", "low", "high", "kappa"]
    none, some = (
        pd.DataFrame(rows, columns=columns)
        for rows in ([], [(1, 0.9, 0.8, 1.0, 0.7), (2, 0.95, 0.95 + 1e-16, 0.95, 0.8)])
    )
    for documents, ticks in ((none, None), (some, ["1", "2"])):
        left, right = figures.stability(length, {"model": documents}).axes
        assert left.lines[0].get_ydata().tolist() == [0.5, 1.0]
        assert ticks is None or [t.get_text() for t in right.get_xticklabels()] == ticks


# --- removing heads ---------------------------------------------------------------------------------------------------


@pytest.fixture
def curves() -> pd.DataFrame:
    rows = [
        (f"d{d}", order, q, 10, 2.0 * (1 + damage * (1 - q) + 0.01 * d * (q < 1)), 2.0, 9)
        for d in range(3)
        for order, damage in {"random 0": 1.0, "random 1": 3.0, "gradient": 0.5, "gradient, guarded": 0.25}.items()
        for q in (1.0, 0.8, 0.5)
    ]
    return pd.DataFrame(rows, columns=["document", "order", "retention", "heads", "nll", "full_nll", "targets"])


def test_retention_curves_show_damage_and_its_band(curves):
    (axes,) = figures.retention_curves(curves, {"a": ["random", "gradient", "gradient, guarded"]}).axes
    lines = {line.get_label(): line for line in axes.lines}
    for name, damage in {"random": 2.0, "gradient": 0.5, "gradient, guarded": 0.25}.items():
        assert lines[name].get_xdata().tolist() == [0.5, 0.8]  # the whole model is no point
        assert lines[name].get_ydata() == pytest.approx([0.5 * damage + 0.01, 0.2 * damage + 0.01])
    assert lines["gradient"].get_color() == lines["gradient, guarded"].get_color()
    assert lines["gradient"].get_linestyle() != lines["gradient, guarded"].get_linestyle()
    assert len(axes.collections) == 3
    band = axes.collections[1].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(0.1, abs=1e-9) and band.max() == pytest.approx(0.25 + 0.02, abs=1e-9)


def test_gaps_lie_where_the_table_says(curves):
    gap = damage_difference(curves, "gradient", "random")
    (axes,) = figures.damage_gaps({"random": gap}, "gradient").axes
    (container,) = axes.containers
    assert container.lines[0].get_ydata().tolist() == gap["mean"].tolist()
    assert container.lines[0].get_ydata() == pytest.approx([-0.75, -0.3])


@pytest.fixture
def alone() -> pd.DataFrame:
    rows = [(0, 1, 0.2, "Reset"), (1, 0, 0.01, "Mixer"), (0, 0, 0.0, "Mixer"), (1, 1, -0.02, "Retriever")]
    found = pd.DataFrame(rows, columns=["layer", "head", "damage", "regime"])
    return found.assign(low=found["damage"] - 0.001, high=found["damage"] + 0.001, critical=found["damage"] > 0.1)


def test_the_map_has_each_head_in_its_cell_and_marks_outliers(alone):
    axes, _ = figures.damage_map({"m": alone}).axes
    mesh, marks = axes.collections
    assert np.asarray(mesh.get_array()).reshape(2, 2).tolist() == [[0.0, 0.01], [0.2, -0.02]]  # head, layer
    assert marks.get_offsets().tolist() == [[0, 1]]


def test_models_on_one_map_share_its_colours(alone):
    figure = figures.damage_map({"a": alone, "b": alone.assign(damage=alone["damage"] / 10)})
    assert len({axes.collections[0].get_clim() for axes in figure.axes[:2]}) == 1 and len(figure.axes) == 3


def test_sorted_damages_are_named_and_stand_under_their_regime(alone):
    left, right = figures.damage_sorted(alone, names=2).axes
    assert [t.get_text() for t in left.texts] == ["layer 0, head 1", "layer 1, head 0"]
    points = np.concatenate([c.get_offsets() for c in left.collections[1:]])
    assert sorted(map(tuple, points.tolist())) == [(1, 0.2), (2, 0.01), (3, 0.0), (4, -0.02)]
    means = {
        round(c.get_segments()[0][:, 0].mean()): c.get_segments()[0][0, 1]
        for c in right.collections
        if hasattr(c, "get_segments")
    }
    assert means == pytest.approx({0: -0.02, 1: 0.005, 2: 0.2})
