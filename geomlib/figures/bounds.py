"""Figures of the theory: bounds beside what they bound, and what it assumes."""

from collections.abc import Sequence
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geomlib.figures.base import curve, doubling
from geomlib.stats import head_means, summary

LEVELS = {
    "exact": ("exact", "black", "-"),
    "joint_inversion": ("joint inversion bound", "C2", "-"),
    "global": ("global intervals", "C4", "-"),
    "quantile": ("5-95 % intervals (no bound)", "C4", ":"),
    "rowwise": ("rowwise intervals", "C3", "-"),
    "sketch_0": ("sketch, lengths only", "C9", "-"),
    "sketch_1": ("sketch, 1 coordinate", "C0", "-"),
    "sketch_4": ("sketch, 4 coordinates", "C8", "-"),
    "sketch_16": ("sketch, 16 coordinates", "C2", "-"),
    "combined": ("rowwise and lengths", "C1", "-"),
    "gaussian": ("Gaussian model", "C0", "--"),
    "permuted": ("directions permuted", "C1", "-"),
}


def bounds_curves(table: pd.DataFrame, panels: dict[str, Sequence[tuple[str, str]]], seed: int = 0) -> Figure:
    """F_N over N for levels of a `bounds` table.

    Args:
        panels: title -> (level, sink) pairs to draw in one panel; the exact F is in each.
    """
    means = summary(table[table["size"] > 1], "f", by=["level", "sink", "size"], seed=seed)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.7 * len(panels), 4.9), sharey=True, squeeze=False)
    for axis, (title, pairs) in zip(axes[0], panels.items(), strict=True):
        for level, sink in [("exact", "none"), *pairs]:
            label, color, line = LEVELS[level]
            if sink == "agnostic":
                label += ", sink like the others"
            rows = means[(means["level"] == level) & (means["sink"] == sink)]
            light = sink == "agnostic"
            color = sns.desaturate(color, 0.25) if light else color
            curve(
                axis,
                rows,
                label,
                color,
                "s" if light else "o",
                {"-": ":", "--": "-."}.get(line, line) if light else line,
            )
        doubling(axis, means["size"].unique())
        axis.set(title=title, ylim=(0, 1.03))
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize="x-small")
    axes[0][0].set_ylabel("F$_N$, mean over heads and layers")
    return figure


def profile_curves(table: pd.DataFrame, rows: str, columns: str, color: str, label: str = "{}") -> Figure:
    """Certified (solid) and predicted (dashed) F over N of `theory.profile_table`, a panel for each row and column value."""
    values = {name: list(dict.fromkeys(table[name])) for name in (rows, columns, color)}
    shape = (len(values[rows]), len(values[columns]))
    figure, axes = plt.subplots(
        *shape, figsize=(3.3 * shape[1] + 1.2, 2.5 * shape[0] + 0.5), sharex=True, sharey=True, squeeze=False
    )
    palette = sns.color_palette("colorblind", len(values[color]))
    for (i, row), (j, column) in product(enumerate(values[rows]), enumerate(values[columns])):
        axis = axes[i][j]
        part = table[(table[rows] == row) & (table[columns] == column)]
        for k, (value, shade) in enumerate(zip(values[color], palette, strict=True)):
            line = part[part[color] == value].sort_values("size")
            # Thick below thin, with markers of their own: equal curves stay visible.
            look = {"marker": "os^Dv"[k % 5], "markersize": 6 - k, "linewidth": max(3 - k, 1), "color": shade}
            axis.plot(line["size"], line["certified"], label=label.format(value), **look)
            axis.plot(line["size"], line["predicted"], "--", color=shade)
            band = 1.96 * line["standard_error"]
            axis.fill_between(
                line["size"],
                (line["predicted"] - band).clip(0),
                (line["predicted"] + band).clip(upper=1),
                color=shade,
                alpha=0.2,
            )
        doubling(axis, table["size"].unique())
        axis.tick_params(axis="x", labelsize="x-small")
        axis.set(ylim=(-0.03, 1.05), xlabel="N" if i == shape[0] - 1 else "")
        titles = [
            str(v) if isinstance(v, str) else f"{n.replace('_', ' ')} {v:g}"
            for n, v in ((rows, row), (columns, column))
        ]
        axis.set_title(
            ", ".join(t for t, n in zip(titles, shape, strict=True) if n > 1 or shape == (1, 1)), fontsize="small"
        )
    axes[0][0].plot([], [], color="grey", label="certified")
    axes[0][0].plot([], [], "--", color="grey", label="predicted")
    figure.supylabel("F$_N$", fontsize="medium")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    return figure


def per_head(table: pd.DataFrame, level: str, sink: str, sizes: Sequence[int]) -> Figure:
    """F of a level against the exact F, a point a query head (mean over documents and queries), a panel for each N that
    the table has."""
    sizes = [n for n in sizes if (table["size"] == n).any()]
    figure, axes = plt.subplots(1, len(sizes), figsize=(3.4 * len(sizes) + 0.9, 3.4), sharex=True, sharey=True)
    for axis, size in zip(np.atleast_1d(axes), sizes, strict=True):
        part = table[table["size"] == size]
        heads = head_means(part, "f", by=["level", "sink"]).groupby(["level", "sink", "layer", "head"])["f"].mean()
        x, y = heads.loc[("exact", "none")], heads.loc[(level, sink)]
        shown = axis.scatter(x, y, c=x.index.get_level_values("layer"), cmap="viridis", s=14)
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1)
        axis.set(title=f"N = {size}", xlabel="exact F$_N$", xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    np.atleast_1d(axes)[0].set_ylabel(f"{LEVELS[level][0]}")
    figure.colorbar(shown, ax=axes, label="layer", shrink=0.85, ticks=MaxNLocator(integer=True))
    return figure


def assumptions(table: pd.DataFrame) -> Figure:
    """What the theory assumes, per head of a `coherence` table: constant norms, spread of cosines, the sink's place."""
    heads = table.groupby(["layer", "head"]).mean(numeric_only=True)
    figure, (norms, cosines, sink) = plt.subplots(1, 3, figsize=(11.5, 3.5))
    blue, orange = sns.color_palette("colorblind")[:2]
    norms.hist(heads["norm_cv"], bins=24, color=blue)
    norms.axvline(0.2, color=orange, linestyle="--", label="limit of C7")
    norms.set(xlabel="sd / mean of norms", ylabel="query heads", xlim=(0, None))
    norms.legend(loc="upper right")
    cosines.scatter(heads["mu_mean"], heads["mu_sd"], s=12, color=blue)
    cosines.axhline(heads["dim"].iloc[0] ** -0.5, color=orange, linestyle="--", label="1/√d, independent directions")
    cosines.axvline(0, color="grey", linewidth=1)
    cosines.set(xlabel="mean cosine of two values", ylabel="sd of these cosines", ylim=(0, None))
    cosines.legend(loc="lower right")
    shown = sink.scatter(
        heads["norm_ratio"], heads["kappa_mean"], s=12, c=heads.index.get_level_values("layer"), cmap="viridis"
    )
    sink.set_xscale("log")
    sink.axhline(0, color="grey", linewidth=1)
    sink.axvline(1, color="grey", linewidth=1)
    sink.set(xlabel="r: norm of the sink over the others'", ylabel="mean κ")
    figure.colorbar(shown, ax=sink, label="layer", ticks=MaxNLocator(integer=True))
    return figure
