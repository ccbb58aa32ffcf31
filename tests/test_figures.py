"""What the figures show is what their input says, and each can be read: on paper, without colour, in any chapter."""

import itertools

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from geomlib import compare, figures, sparsify, taxonomy
from geomlib.figures import base
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
    assert letters == {(0, 0): "R", (0, 1): "M", (1, 0): "x"}


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


# --- one look for one thing -------------------------------------------------------------------------------------------


GUARDED = ["magnitude", "contribution", "mixer-reset-retriever"]
FAMILIES = {
    "sets": base.SETS,
    "sink": base.SINK,
    "regimes": base.REGIMES,
    "bounds": base.BOUNDS,
    "orders by one number": {name: base.ORDERS[name] for name in ("random", *sparsify.METRICS, compare.BY_REGIME)},
    "orders by regime": {name: base.ORDERS[name] for name in ("random", *sparsify.REGIME_ORDERS)},
    "guarded": {n: base.order_look(n) for name in GUARDED for n in (name, f"{name}, guarded")},
    "models": base.models("abcde"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_looks_are_told_apart_without_colour(family):
    looks = [(v["marker"], v["linestyle"], v.get("markerfacecolor") == "white") for v in FAMILIES[family].values()]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("look", [v for looks in FAMILIES.values() for v in looks.values()], ids=lambda v: v["color"])
def test_every_line_stands_out_from_white_paper(look):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(look["color"])]
    assert 1.05 / (np.dot(linear, (0.2126, 0.7152, 0.0722)) + 0.05) > 2.3


def test_the_same_thing_looks_the_same_in_every_chapter():
    assert (
        base.BOUNDS["exact"] == base.SINK["with"] == base.SETS["none"]
        and base.BOUNDS["permuted"] == base.SETS["magnitude"]
    )
    assert base.ORDERS["random"] == base.SETS["random"]
    assert {*sparsify.METRICS, *sparsify.REGIME_ORDERS} < set(base.ORDERS) and set(figures.LEVELS) == set(base.BOUNDS)


def test_a_model_keeps_its_look_whatever_stands_beside_it():
    alone = {name: base.models([name])[name] for name in ("smollm2-135m", "gemma3-270m")}
    assert base.models(["mine", "gemma3-270m", "yours", "smollm2-135m"]) | alone == base.models(
        ["mine", "gemma3-270m", "yours", "smollm2-135m"]
    )
    colors = [v["color"] for v in base.models(["mine", *alone, "yours"]).values()]
    assert len(set(colors)) == 4


# --- legible ----------------------------------------------------------------------------------------------------------


SIZES, POSITIONS = [2**i for i in range(9)], [0, 64, 128]


def crossed(measures: str, **columns) -> pd.DataFrame:
    """Every combination of the columns' values, with seeded random measures between 0 and 1."""
    table = pd.MultiIndex.from_product(columns.values(), names=columns).to_frame(index=False)
    draw = np.random.default_rng(0)
    return table.assign(**{name: draw.random(len(table)) for name in measures.split()})


def shaped(measures: str, layers: int = 30, **columns) -> pd.DataFrame:
    table = crossed(measures, document=["a", "b"], layer=range(layers), head=range(9), **columns)
    return table.assign(query_from=table.get("query_from", 0), query_to=table.get("query_from", 0) + 64, queries=1)


def separability_table() -> pd.DataFrame:
    kinds = {"ranking": ["attention", "contribution"], "distance": ["euclidean", "cosine"]}
    return shaped("f advantage", 2, size=SIZES, control=list(figures.NAMES)[:3], query_from=POSITIONS, **kinds)


def sink_table() -> pd.DataFrame:
    return shaped("f_with f_without extreme", 3, size=SIZES[1:], without=list(figures.WITHOUT)).assign(sink="selected")


def votes_table() -> pd.DataFrame:
    return shaped(" ".join([*taxonomy.VOTES, "sink_mass"]), 3, query_from=POSITIONS).assign(learned_mass=0.0)


def heads_table(layers: int = 30) -> pd.DataFrame:
    table = crossed(
        " ".join([*taxonomy.VOTES, *figures.taxonomy.SIGNATURES, "damage"]), layer=range(layers), head=range(9)
    )
    votes = table[list(taxonomy.VOTES)]
    table[list(taxonomy.VOTES)] = votes.div(votes.sum(axis=1), axis=0)
    table = table.assign(regime=np.resize(list(taxonomy.REGIMES), len(table)), damage=table["damage"] ** 9 - 0.01)
    table = table.assign(low=table["damage"] - 0.01, high=table["damage"] + 0.01, critical=table["damage"] > 0.5)
    return table.sort_values("damage", ascending=False)


def removed() -> pd.DataFrame:
    orders = ["random 0", *sparsify.METRICS, *sparsify.REGIME_ORDERS]
    orders += [f"{name}, guarded" for name in orders[1:]]
    table = crossed("nll", document=["a", "b"], order=orders, retention=[1.0, 0.95, *np.arange(9, 0, -1) / 10])
    return table.assign(nll=2 + 6 * (table["nll"] + 0.2) * (1 - table["retention"]), full_nll=2.0, targets=9, heads=9)


def measures_table() -> pd.DataFrame:
    models, corpora = {"model": MODELS}, {"corpus": ["vital-articles", "django-docs", "vital-articles-fr"]}
    both = models | corpora
    parts = {
        "F": crossed("mean", **both, group=["none", "random"], x=SIZES[1:]),
        "sink cost": crossed("mean", **both, x=SIZES[1:]),
        "times smaller": crossed("mean", **both, group=["median", "10% of heads", "90% of heads"]),
        "share": crossed("mean", **both, group=list(taxonomy.REGIMES)),
        "damage": crossed("mean", **models, group=list(base.ORDERS), x=[0.95, 0.5, 0.1]),
    }
    table = pd.concat([part.assign(quantity=name) for name, part in parts.items()], ignore_index=True)
    return table.assign(queries="last", low=table["mean"] - 0.1, high=table["mean"] + 0.1)


MODELS, CORPORA = ["smollm2-135m", "gemma3-270m"], ["vital-articles", "django-docs"]
TOKENS = [
    "<|im_start|>",
    "The",
    "capital",
    "of",
    "Italy",
    "is",
    "Rome",
    ",",
    "and",
    "the",
    "capital",
    "of",
    "France",
    "is",
]


def bounds_curves():
    levels = {"level": list(figures.LEVELS), "sink": ["none", "aware", "agnostic"]}
    pairs = list(itertools.product(["rowwise", "sketch_16", "gaussian"], ["aware", "agnostic"]))
    return figures.bounds_curves(shaped("f", 2, size=SIZES, **levels), dict.fromkeys(["intervals", "sketches", "model"], pairs))


def profile_curves():
    numbers = {"norm_ratio": [0.1, 0.3, 1.0], "sink_mass": [0.1, 0.5, 0.9], "kappa": [-0.4, 0.0, 0.4]}
    table = crossed("certified predicted", **numbers, size=SIZES[1:]).assign(standard_error=0.02)
    alone = crossed("certified predicted", size=SIZES[1:])
    return figures.profile_curves(table, *numbers, "κ = {}", reference=alone)


def per_head():
    table = shaped("f", size=[2, 8, 32], level=["exact", "gaussian"], sink=["none", "aware"])
    return figures.per_head(table, "gaussian", "aware", [2, 8, 32])


def assumptions():
    table = shaped("norm_cv mu_mean mu_sd norm_ratio kappa_mean").assign(dim=64)
    return figures.assumptions(table)


def weights_and_values():
    g = torch.Generator().manual_seed(0)
    return torch.rand(14, generator=g).softmax(-1), torch.randn(14, 8, generator=g)


def sinks_by_layer():
    table = shaped("times_smaller").assign(source=0)
    table["times_smaller"] = 20 ** table["times_smaller"] / 2
    tables = dict.fromkeys(MODELS, table)
    return figures.sinks_by_layer(tables, "times_smaller", "times smaller than the others", 1, (3, 10), log=True)


def shares():
    table = votes_table()
    return figures.shares({m: dict.fromkeys([*CORPORA, "vital-articles-fr"], table) for m in MODELS})


def stability():
    length = crossed("share", length=[64, 128, 256, 512])
    documents = crossed("share", documents=[1, 2, 4]).assign(low=0.0, high=1.0)
    return figures.stability(dict.fromkeys(MODELS, length / [1, 4] + [0, 0.7]), dict.fromkeys(MODELS, documents))


def winners():
    weights = torch.rand(len(TOKENS), len(TOKENS), generator=torch.Generator().manual_seed(0)).tril()
    return figures.winners({f"{r}: layer 11, head 6": weights for r in taxonomy.REGIMES}, TOKENS)


def orders_removed():
    panels = {"one number a head": ["random", *sparsify.METRICS], "by regime": ["random", *sparsify.REGIME_ORDERS]}
    return figures.retention_curves(removed(), panels, 3.0)


def guarded():
    names = [n for name in GUARDED for n in (name, f"{name}, guarded")]
    return figures.retention_curves(removed(), {"guarded and not": names})


def damage_gaps():
    others = ("random", *sparsify.METRICS)
    order = "retriever-mixer-reset"
    return figures.damage_gaps({n: damage_difference(removed(), order, n) for n in others}, order)


DRAWN = {
    "plane": lambda: figures.contributions_plane(*weights_and_values(), 4, TOKENS),
    "curves": lambda: figures.separability_curves({f"{c}, final query": separability_table() for c in CORPORA}),
    "variants": lambda: figures.variants(separability_table()),
    "head map": lambda: figures.head_map(shaped("advantage", size=[8]), 8),
    "position": lambda: figures.by_position(separability_table(), [2, 8, 32]),
    "bounds": bounds_curves, "profiles": profile_curves, "heads": per_head, "assumptions": assumptions,
    "sinks by layer": sinks_by_layer,
    "sink curves": lambda: figures.sink_curves({f"{m}\n{c}": sink_table() for m in MODELS for c in CORPORA}),
    "mass": lambda: figures.mass_by_position(dict.fromkeys(MODELS, votes_table())),
    "extremes": lambda: figures.extremes(dict.fromkeys(MODELS, sink_table())),
    "sink plane": lambda: figures.sink_plane(*weights_and_values(), 4),
    "simplex": lambda: figures.simplex(dict.fromkeys(MODELS, heads_table())),
    "regimes": lambda: figures.regime_map({MODELS[0]: heads_table(), MODELS[1]: heads_table(18)}),
    "shares": shares, "stability": stability, "winners": winners,
    "signatures": lambda: figures.signatures(heads_table()),
    "votes": lambda: figures.votes_by_position(dict.fromkeys(MODELS, votes_table())),
    "damage map": lambda: figures.damage_map({MODELS[0]: heads_table(), MODELS[1]: heads_table(18)}),
    "damage sorted": lambda: figures.damage_sorted(heads_table()),
    "orders": orders_removed, "guarded": guarded, "gaps": damage_gaps,
    "separability compared": lambda: figures.separability_compared(measures_table()),
    "sink compared": lambda: figures.sink_compared(measures_table()),
    "shares compared": lambda: figures.shares_compared(measures_table()),
    "retention compared": lambda: figures.retention_compared(measures_table()),
}  # fmt: skip


def test_every_figure_is_among_those_checked():
    source = "".join(name for draw in DRAWN.values() for name in draw.__code__.co_names)
    helpers = {"LEVELS", "NAMES", "WITHOUT", "comparison", "curve", "style"}
    assert [name for name in set(figures.__all__) - helpers if name not in source] == []


@pytest.mark.parametrize("name", DRAWN)
def test_text_is_large_enough_on_the_page_and_none_lies_on_another(name, monkeypatch):
    with plt.rc_context():
        figures.style()
        figure = DRAWN[name]()
        figure.canvas.draw()  # lays out
        texts, draw = [], Text.draw

        def seen(text, *args, **kwargs):
            if text.get_visible() and text.get_text().strip():
                texts.append(text)
            draw(text, *args, **kwargs)

        monkeypatch.setattr(Text, "draw", seen)
        figure.canvas.draw()
    assert len(texts) > 5
    page = figure.bbox
    paper, screen = 16 / 2.54 / figure.get_figwidth(), 830 / 72 / figure.get_figwidth()
    small = {
        t.get_text(): t.get_fontsize() for t in texts if t.get_fontsize() * paper < 8 or t.get_fontsize() * screen < 14
    }
    assert small == {}
    boxes = {}
    for text in texts:
        box = Text.get_window_extent(text)  # of an annotation without its line
        assert page.x0 - 2 < box.x0 and box.x1 < page.x1 + 2 and page.y0 - 2 < box.y0 and box.y1 < page.y1 + 2, text
        if text.get_rotation() % 90 == 0:  # of others the box is no measure
            boxes[text] = box.padded(-0.12 * text.get_fontsize() * figure.dpi / 72)
    over = [(a.get_text(), b.get_text()) for a, b in itertools.combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]
    assert over == []


def test_a_map_marks_what_is_below_0_and_hatches_what_is_not_there():
    table = crossed("", layer=[0, 1], head=[0, 1]).assign(document="a", size=8, advantage=[0.1, -0.2, 0.3, 0.4])
    axes = figures.head_map(table[:3], 8).axes[0]
    (marks,) = axes.lines
    assert marks.get_xydata().tolist() == [[0, 1]] and axes.patch.get_hatch()
    mesh = axes.collections[0]
    assert mesh.get_clim() == (-0.3, 0.3) and np.ma.getmaskarray(mesh.get_array()).ravel().tolist() == [False] * 3 + [
        True
    ]
