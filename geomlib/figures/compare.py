"""Figures of the comparison: models side by side, the paper's published figures as grey bands."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from geomlib import claims
from geomlib.compare import BY_REGIME
from geomlib.figures.base import curve, doubling
from geomlib.figures.sparsify import _damage_axis
from geomlib.taxonomy import REGIMES

_STYLES, _MARKERS = ("-", "--", "-.", ":"), "os^Dv"
_PAPER = {"color": "0.6", "alpha": 0.35, "linewidth": 0, "label": "the paper's models"}


def comparison(table: pd.DataFrame) -> dict[str, Figure]:
    """Every figure that the measures have rows for, by name."""
    drawn = {"separability": ("F", separability_compared), "sink": ("sink cost", sink_compared),
             "shares": ("share", shares_compared), "retention": ("damage", retention_compared)}  # fmt: skip
    return {name: draw(table) for name, (quantity, draw) in drawn.items() if (table["quantity"] == quantity).any()}


def _colors(table: pd.DataFrame) -> dict[str, tuple]:
    models = list(dict.fromkeys(table["model"]))
    return dict(zip(models, sns.color_palette("colorblind", max(len(models), 3)), strict=False))


def _of(table: pd.DataFrame, quantity: str, queries: str) -> pd.DataFrame:
    """Rows of one quantity over N on these queries; where nothing was measured on them, on the others."""
    part = table[table["quantity"] == quantity].rename(columns={"x": "size"})
    mine = part[part["queries"] == queries]
    return mine if len(mine) else part


def separability_compared(table: pd.DataFrame, queries: str = "last") -> Figure:
    """F over N of attention's top N (filled) and of random sets (dashed), a panel for each corpus, a colour for each model."""
    part = _of(table, "F", queries)
    corpora, colors = list(dict.fromkeys(part["corpus"])), _colors(table)
    figure, panels = plt.subplots(1, len(corpora), figsize=(4.6 * len(corpora), 3.8), sharey=True, squeeze=False)
    for axes, corpus in zip(panels[0], corpora, strict=True):
        for (model, control), rows in part[part["corpus"] == corpus].groupby(["model", "group"], sort=False):
            if control == "none":
                curve(axes, rows, model, colors[model])
            elif control == "random":
                curve(axes, rows, f"{model}, random sets", colors[model], "s", "--")
        doubling(axes, part["size"].unique())
        axes.set(title=corpus, ylim=(0, 1.03))
    panels[0][0].set_ylabel("F$_N$, mean over heads and layers")
    panels[0][0].legend(loc="upper right", fontsize="small")
    return figure


def sink_compared(table: pd.DataFrame, queries: str = "last") -> Figure:
    """How many times smaller the sink's value is (median head with its interval, bar from the 10 % to the 90 % quantile over heads)
    and what selecting it costs, over N."""
    colors = _colors(table)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.8), width_ratios=(1, 1.3))
    found = table[table["quantity"] == "times smaller"]
    places = list(found[["model", "corpus"]].drop_duplicates().itertuples(index=False, name=None))
    for i, (model, corpus) in enumerate(places):
        rows = found[(found["model"] == model) & (found["corpus"] == corpus)].set_index("group")
        ends = rows["mean"].reindex(["10% of heads", "90% of heads"])
        left.hlines(i, *ends, color=colors[model], linewidth=2, alpha=0.4)
        middle = rows.loc["median"]
        bars = np.nan_to_num([[middle["mean"] - middle["low"]], [middle["high"] - middle["mean"]]]).clip(min=0)
        left.errorbar(middle["mean"], i, xerr=bars, fmt="o", color=colors[model], capsize=3)
    left.axvspan(*claims.SMALLER, **_PAPER)
    left.axvline(1, color="0.3", linewidth=1)
    left.set_xscale("log")
    left.set_xticks([0.5, 1, 2, 3, 5, 10, 20], ["0.5", "1", "2", "3", "5", "10", "20"])
    left.minorticks_off()
    left.set_yticks(range(len(places)), [f"{m}\n{c}" for m, c in places])
    left.set_ylim(len(places) - 0.5, -0.5)
    left.grid(axis="y", visible=False)
    left.set_xlabel("the sink's value: times smaller than the others'")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), fontsize="small")
    cost = _of(table, "sink cost", queries)
    corpora = list(dict.fromkeys(cost["corpus"]))
    for (model, corpus), rows in cost.groupby(["model", "corpus"], sort=False):
        i = corpora.index(corpus)
        curve(right, rows, f"{model}, {corpus}", colors[model], _MARKERS[i % 5], _STYLES[i % 4])
    right.axhline(0, color="0.3", linewidth=1)
    if len(cost):
        doubling(right, cost["size"].unique())
        right.legend(loc="best", fontsize="small")
    right.set_ylabel("F without the sink - F with it")
    return figure


def shares_compared(table: pd.DataFrame) -> Figure:
    """Share of the heads of each regime with its interval, a colour for each model and a marker for each corpus; the paper's
    Retrievers as a band."""
    part, colors = table[table["quantity"] == "share"], _colors(table)
    places = list(part[["model", "corpus"]].drop_duplicates().itertuples(index=False, name=None))
    corpora = list(dict.fromkeys(part["corpus"]))
    figure, axes = plt.subplots(figsize=(9.4, 3.8))
    regimes = list(REGIMES)
    for i, (model, corpus) in enumerate(places):
        rows = part[(part["model"] == model) & (part["corpus"] == corpus)].set_index("group").reindex(regimes)
        x = np.arange(len(regimes)) + 0.14 * (i - (len(places) - 1) / 2)
        bars = np.nan_to_num([rows["mean"] - rows["low"], rows["high"] - rows["mean"]]).clip(min=0)
        marker = _MARKERS[corpora.index(corpus) % 5]
        axes.errorbar(x, rows["mean"], bars, fmt=marker, color=colors[model], capsize=3, label=f"{model}, {corpus}")
    place = regimes.index("Retriever")
    axes.fill_between([place - 0.45, place + 0.45], *claims.RETRIEVERS, **_PAPER)
    axes.set_xticks(range(len(regimes)), regimes)
    axes.set(ylabel="share of the query heads", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    return figure


def retention_compared(
    table: pd.DataFrame,
    orders: tuple[str, ...] = ("random", "magnitude", "gradient", "damage", BY_REGIME),
) -> Figure:
    """Damage over the share of heads that stays, a panel for each model, a line for each of a few orders."""
    part, models = table[table["quantity"] == "damage"], list(dict.fromkeys(table["model"]))
    models = [m for m in models if (part["model"] == m).any()]
    figure, panels = plt.subplots(1, len(models), figsize=(4.6 * len(models) + 0.4, 4.2), sharey=True, squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        for i, order in enumerate(orders):
            rows = part[(part["model"] == model) & (part["group"] == order)].sort_values("x")
            color = "0.35" if order == "random" else sns.color_palette("colorblind")[i]
            axes.plot(rows["x"], rows["mean"], color=color, marker=_MARKERS[i % 5], markersize=4, label=order)
            if rows["low"].notna().all():
                axes.fill_between(rows["x"], rows["low"], rows["high"], color=color, alpha=0.18, linewidth=0)
        axes.set(title=model, xlabel="heads that stay")
        axes.invert_xaxis()
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        _damage_axis(axes, min(-0.01, part["low"].min(), part["mean"].min()))
    panels[0][0].set_ylabel("damage: NLL over that of the whole model, less 1")
    panels[0][-1].legend(loc="lower right", fontsize="small")
    return figure
