"""Figures of the comparison: models side by side, the paper's published figures as grey bands."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from geomlib import claims
from geomlib.compare import BY_REGIME
from geomlib.figures import base
from geomlib.figures.sparsify import damage_axis, retention_axis
from geomlib.taxonomy import REGIMES

_STYLES = ("-", "--", "-.", ":")


def comparison(table: pd.DataFrame) -> dict[str, Figure]:
    """Every figure that the measures have rows for, by name."""
    drawn = {"separability": ("F", separability_compared), "sink": ("sink cost", sink_compared),
             "shares": ("share", shares_compared), "retention": ("damage", retention_compared)}  # fmt: skip
    return {name: draw(table) for name, (quantity, draw) in drawn.items() if (table["quantity"] == quantity).any()}


def _of(table: pd.DataFrame, quantity: str, queries: str) -> pd.DataFrame:
    """Rows of one quantity over N on these queries; where nothing was measured on them, on the others."""
    part = table[table["quantity"] == quantity].rename(columns={"x": "size"})
    mine = part[part["queries"] == queries]
    return mine if len(mine) else part


def separability_compared(table: pd.DataFrame, queries: str = "last") -> Figure:
    """F over N of attention's top N (solid) and of random sets (dotted), a panel for each corpus, a look for each model."""
    part = _of(table, "F", queries)
    corpora, looks = list(dict.fromkeys(part["corpus"])), base.models(table["model"])
    figure, panels = base.panels(len(corpora), 3.8, sharey=True)
    for axes, corpus in zip(panels, corpora, strict=True):
        for (model, control), rows in part[part["corpus"] == corpus].groupby(["model", "group"], sort=False):
            if control == "none":
                base.curve(axes, rows, model, looks[model])
            elif control == "random":
                look = looks[model] | {"linestyle": base.SETS["random"]["linestyle"]}
                base.curve(axes, rows, f"{model}, random sets", look)
        base.doubling(axes, part["size"].unique())
        axes.set(title=corpus, ylim=(0, 1.03))
    panels[0].set_ylabel("F$_N$, mean over heads and layers")
    base.beneath(panels[0])
    return figure


def sink_compared(table: pd.DataFrame, queries: str = "last") -> Figure:
    """How many times smaller the sink's value is (median head with its interval, bar from the 10 % to the 90 % quantile over heads)
    and what selecting it costs, over N."""
    looks = base.models(table["model"])
    figure, (left, right) = base.panels(2, 3.9, width_ratios=(1, 1.3))
    found = table[table["quantity"] == "times smaller"]
    places = list(found[["model", "corpus"]].drop_duplicates().itertuples(index=False, name=None))
    for i, (model, corpus) in enumerate(places):
        rows = found[(found["model"] == model) & (found["corpus"] == corpus)].set_index("group")
        ends = rows["mean"].reindex(["10% of heads", "90% of heads"])
        left.hlines(i, *ends, color=looks[model]["color"], linewidth=2, alpha=0.4)
        middle = rows.loc["median"]
        bars = np.nan_to_num([[middle["mean"] - middle["low"]], [middle["high"] - middle["mean"]]]).clip(min=0)
        left.errorbar(middle["mean"], i, xerr=bars, capsize=3, **looks[model] | {"marker": "o"})
    left.axvspan(*claims.SMALLER, **base.PAPER)
    left.axvline(1, color="0.3", linewidth=1)
    left.set_xscale("log")
    left.set_xticks([0.5, 1, 2, 3, 5, 10, 20], ["0.5", "1", "2", "3", "5", "10", "20"])
    left.minorticks_off()
    left.set_yticks(range(len(places)), [f"{m}\n{c}" for m, c in places])
    left.set_ylim(len(places) - 0.5, -0.5)
    left.grid(axis="y", visible=False)
    left.set_xlabel("value of the sink:\ntimes smaller than the others")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1))
    cost = _of(table, "sink cost", queries)
    corpora = list(dict.fromkeys(cost["corpus"]))
    for (model, corpus), rows in cost.groupby(["model", "corpus"], sort=False):
        i = corpora.index(corpus)
        look = looks[model] | {"marker": base.MARKERS[i % 5], "linestyle": _STYLES[i % 4]}
        base.curve(right, rows, f"{model}, {corpus}", look)
    right.axhline(0, color="0.3", linewidth=1)
    if len(cost):
        base.doubling(right, cost["size"].unique())
        base.beneath(right)
    right.set_ylabel("F without the sink - F with it")
    return figure


def shares_compared(table: pd.DataFrame) -> Figure:
    """Share of the heads of each regime with its interval, a colour for each model and a marker for each corpus; the paper's
    Retrievers as a band."""
    part, looks = table[table["quantity"] == "share"], base.models(table["model"])
    places = list(part[["model", "corpus"]].drop_duplicates().itertuples(index=False, name=None))
    corpora, regimes = list(dict.fromkeys(part["corpus"])), list(REGIMES)
    figure, (axes,) = base.panels(1, 3.2)
    for i, (model, corpus) in enumerate(places):
        rows = part[(part["model"] == model) & (part["corpus"] == corpus)].set_index("group").reindex(regimes)
        x = np.arange(len(regimes)) + 0.14 * (i - (len(places) - 1) / 2)
        look = looks[model] | {"marker": base.MARKERS[corpora.index(corpus) % 5], "linestyle": ""}
        base.points(axes, x, rows, f"{model}, {corpus}", look)
    place = regimes.index("Retriever")
    axes.fill_between([place - 0.45, place + 0.45], *claims.RETRIEVERS, **base.PAPER)
    axes.set_xticks(range(len(regimes)), regimes)
    axes.set(ylabel="share of the query heads", ylim=(0, 1))
    axes.grid(axis="x", visible=False)
    base.beside(axes)
    return figure


def retention_compared(
    table: pd.DataFrame,
    orders: tuple[str, ...] = ("random", "magnitude", "gradient", "damage", BY_REGIME),
) -> Figure:
    """Damage over the share of heads that stays, a panel for each model, a line for each of a few orders."""
    part = table[table["quantity"] == "damage"]
    models = list(dict.fromkeys(part["model"]))
    figure, panels = base.panels(len(models), 4.2, sharey=True)
    for axes, model in zip(panels, models, strict=True):
        for order in orders:
            rows = part[(part["model"] == model) & (part["group"] == order)]
            base.curve(axes, rows, order, base.order_look(order), x="x")
        axes.set(title=model)
        retention_axis(axes)
        damage_axis(axes, min(-0.01, part["low"].min(), part["mean"].min()))
        base.beneath(axes, ncols=2)
    panels[0].set_ylabel("damage: NLL over that of\nthe whole model, less 1")
    return figure
