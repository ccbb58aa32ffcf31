"""The book's look: one look for each thing in every figure, and what the figures share.

Every figure is `WIDTH` inches wide, so that text has one size on the page: 9 points and more become 8 and more on paper
(16 cm), 15 pixels and more in the page's column. Of sets, the line says which (solid: attention's, dashed: directions
permuted, dotted: random), so that the colour is free to say of what model, N or ranking. Markers, lines and hollow marks say
again what colours say, for grey paper.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geomlib.compare import BY_REGIME
from geomlib.sparsify import REGIME_ORDERS
from geomlib.taxonomy import REGIMES as _REGIMES

WIDTH = 7.0
SMALL = 9  # points; no text is smaller

BLUE, ORANGE, GREEN, VERMILION, PINK, BROWN, _, _, _, SKY = sns.color_palette("colorblind").as_hex()
DARK, GREY, INDIGO = "#000000", "#595959", "#332288"


def _look(color: str, marker: str, linestyle: str = "-", **more) -> dict:
    return {"color": color, "marker": marker, "linestyle": linestyle, **more}


SETS = {"none": _look(BLUE, "o"), "magnitude": _look(GREEN, "s", "--"), "random": _look(GREY, "X", ":")}
SINK = {"with": SETS["none"], "sink": _look(ORANGE, "s"), "other": _look(GREEN, "D", "--"),
        "direction": _look(VERMILION, "^", "-.")}  # fmt: skip
RANKINGS = {"attention": BLUE, "contribution": PINK}
RADII = {"max": {"color": ORANGE, "linestyle": "-"}, "min": {"color": GREEN, "linestyle": "--"}}
REGIMES = dict(zip(_REGIMES, (_look(GREEN, "^"), _look(BLUE, "o"), _look(ORANGE, "s")), strict=True))
BOUNDS = {
    "exact": SETS["none"],
    "inversion": _look(SKY, "h", "--"),
    "joint_inversion": _look(GREEN, "D"),
    "constant_norm": _look(DARK, "p", ":"),
    "global": _look(PINK, "v"),
    "quantile": _look(PINK, "v", ":"),
    "rowwise": _look(VERMILION, "^"),
    "sketch_0": _look(SKY, "X"),
    "sketch_1": _look(PINK, "<"),
    "sketch_4": _look(BROWN, "P"),
    "sketch_16": _look(GREEN, ">"),
    "combined": _look(ORANGE, "*"),
    "gaussian": _look(DARK, "d", "--"),
    "permuted": SETS["magnitude"],
}
# An order by regime has the colour (and a line) of the regime that goes first and the marker of the second.
_LINES = dict(zip(_REGIMES, ("-", "--", "-."), strict=True))
ORDERS = {
    "random": SETS["random"],
    "magnitude": _look(VERMILION, "D"),
    "contribution": _look(BROWN, "v"),
    "gradient": _look(DARK, "^"),
    "entropy": _look(PINK, "<"),
    "entropy-reversed": _look(PINK, ">", "-."),
    "damage": _look(SKY, "P"),
    BY_REGIME: _look(INDIGO, "*"),
} | {
    name: REGIMES[first] | {"marker": REGIMES[second]["marker"], "linestyle": _LINES[first]}
    for name in REGIME_ORDERS
    for first, second, _ in [name.title().split("-")]
}
PAPER = {"color": "0.6", "alpha": 0.35, "linewidth": 0, "label": "the paper's models"}
MARKERS = "os^Dv"  # of what has no look of its own, such as corpora
_BOOK = ("smollm2-135m", "gemma3-270m")
_MODELS = tuple(
    _look(color, marker, markerfacecolor=color if full else "white")
    for color, marker, full in zip((VERMILION, PINK, SKY, BROWN, DARK), MARKERS, (1, 0, 1, 0, 1), strict=True)
)


def models(names: Iterable[str]) -> dict[str, dict]:
    """Look of each model: the book's have theirs in every chapter, others take what is free."""
    names = list(dict.fromkeys(names))
    free = (i for i in count() if not (i < len(_BOOK) and _BOOK[i] in names))
    places = {name: _BOOK.index(name) if name in _BOOK else next(free) for name in names}
    return {name: _MODELS[place % len(_MODELS)] for name, place in places.items()}


def order_look(name: str) -> dict:
    """Look of an order of removal; guarded, or of its layers alone, it is hollow, dash-dot-dot."""
    plain = name.removesuffix(", guarded").removeprefix("layers of ")
    look = ORDERS.get(plain, _look(GREY, "X"))
    return look if name == plain else look | {"linestyle": (0, (4, 1, 1, 1, 1, 1)), "markerfacecolor": "white"}


def style() -> None:
    """Set the book's look; called once per notebook."""
    sns.set_theme(context="paper", style="whitegrid", palette="colorblind", font_scale=1.05)
    plt.rcParams.update(
        {"figure.dpi": 160, "savefig.facecolor": "white", "figure.facecolor": "white", "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True}
    )  # fmt: skip


def panels(number: int, height: float, columns: int = 2, **options) -> tuple[Figure, list]:
    """A figure of the page's width with that many panels, each so many inches high, in rows of at most `columns`."""
    columns = min(number, columns)
    rows = -(-number // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, rows * height), squeeze=False, **options)
    for rest in axes.flat[number:]:
        rest.remove()
    return figure, list(axes.flat[:number])


def beside(axes, **options) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), **options)


def beneath(axes, **options) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=3.8, labelspacing=0.3, **options)


def curve(axes, rows: pd.DataFrame, label: str, look: dict, x: str = "size", y: str = "mean") -> None:
    """One line with its interval band; `rows` as `stats.summary` gives them for one group."""
    rows = rows.sort_values(x)
    axes.plot(rows[x], rows[y], label=label, **{"markersize": 4} | look)
    if rows["low"].notna().all():
        axes.fill_between(rows[x], rows["low"], rows["high"], alpha=0.2, color=look["color"], linewidth=0)


def points(axes, x, rows: pd.DataFrame, label: str, look: dict, y: str = "mean") -> None:
    """Points with their interval bars."""
    bars = np.nan_to_num([rows[y] - rows["low"], rows["high"] - rows[y]]).clip(min=0)  # rounding
    axes.errorbar(x, rows[y], bars, label=label, capsize=2, **{"markersize": 5} | look)


def doubling(axes, sizes: Sequence[int], every: int = 1) -> None:
    """A doubling axis of N, with each `every`-th number named."""
    sizes = sorted(sizes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, ["" if i % every else f"{n:.0f}" for i, n in enumerate(sizes)])
    axes.set_xlabel("N (selected sources)")


def positions(table: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `position`, the middle of each bin of query positions."""
    return table.assign(position=(table["query_from"] + table["query_to"]) / 2)


def layer_maps(grids: dict[str, pd.DataFrame], **colours) -> tuple[Figure, list, list]:
    """Maps of query heads (rows) by layers (columns), a panel for each: figure, panels, meshes. A dash marks what is below 0,
    for those who see no colours; hatched: nothing there."""
    grids = {t: g.reindex(index=range(g.index.max() + 1), columns=range(g.columns.max() + 1)) for t, g in grids.items()}
    heights, widest = [len(g) for g in grids.values()], max(g.shape[1] for g in grids.values())
    height = min((WIDTH - 1.6) / widest, 0.5) * sum(heights) + 0.75 * len(grids) + 0.3
    figure, axes = plt.subplots(len(grids), 1, figsize=(WIDTH, height), height_ratios=heights, squeeze=False)
    meshes = []
    for axis, (title, grid) in zip(axes[:, 0], grids.items(), strict=True):
        edges = [np.arange(n + 1) - 0.5 for n in reversed(grid.shape)]
        meshes.append(axis.pcolormesh(*edges, grid, edgecolors="white", linewidth=0.5, **colours))
        head, layer = np.nonzero(grid.to_numpy() < 0)
        axis.plot(layer, head, linestyle="", marker="_", color="0.2", markersize=4)
        axis.patch.set(hatch="/////", edgecolor="0.75")
        axis.set(title=title, xlabel="layer", ylabel="query head", aspect="equal", anchor="W")
        axis.invert_yaxis()
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(False)
    return figure, list(axes[:, 0]), meshes
