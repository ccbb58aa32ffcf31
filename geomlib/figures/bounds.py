"""Figures of the theory: bounds beside what they bound, and what it assumes."""

from collections.abc import Sequence
from itertools import product

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geomlib.figures import base
from geomlib.stats import head_means, summary

LEVELS = {
    "exact": "exact",
    "inversion": "the paper's inversion bound",
    "joint_inversion": "joint inversion bound",
    "constant_norm": "constant norms (the paper's model)",
    "global": "global intervals",
    "quantile": "5-95% intervals (no bound)",
    "rowwise": "rowwise intervals",
    "sketch_0": "sketch, lengths only",
    "sketch_1": "sketch, 1 coordinate",
    "sketch_4": "sketch, 4 coordinates",
    "sketch_16": "sketch, 16 coordinates",
    "combined": "rowwise and lengths",
    "gaussian": "Gaussian model",
    "permuted": "directions permuted",
}


def bounds_curves(table: pd.DataFrame, panels: dict[str, Sequence[tuple[str, str]]], seed: int = 0) -> Figure:
    """F_N over N for levels of a `bounds` table.

    Args:
        panels: title -> (level, sink) pairs to draw in one panel; the exact F is in each.
    """
    means = summary(table[table["size"] > 1], "f", by=["level", "sink", "size"], seed=seed)
    figure, all_axes = base.panels(len(panels), 4.2, sharey=True)
    for axes, (title, pairs) in zip(all_axes, panels.items(), strict=True):
        for level, sink in [("exact", "none"), *pairs]:
            rows = means[(means["level"] == level) & (means["sink"] == sink)]
            label, look = LEVELS[level], base.BOUNDS[level]
            if sink == "agnostic":
                label, look = f"{label}, sink like the others", _lighter(look)
            base.curve(axes, rows, label, look)
        base.doubling(axes, means["size"].unique())
        axes.set(title=title, ylim=(0, 1.03))
        base.beneath(axes)
    for axes in all_axes[::2]:
        axes.set_ylabel("F$_N$, mean over heads and layers")
    return figure


def _lighter(look: dict) -> dict:
    line = {"-": ":", "--": "-."}.get(look["linestyle"], look["linestyle"])
    return look | {"color": sns.blend_palette([look["color"], "0.85"], 3).as_hex()[1], "marker": "s", "linestyle": line}


def profile_curves(
    table: pd.DataFrame, rows: str, columns: str, color: str, label: str = "{}", reference: pd.DataFrame | None = None
) -> Figure:
    """Certified (solid) and predicted (dashed, hollow) F over N of `theory.profile_table`, a panel for each row and column
    value.

    Args:
        reference: one more table of a single setting, "no sink", in grey in every panel.
    """
    values = {name: list(dict.fromkeys(table[name])) for name in (rows, columns, color)}
    shape = (len(values[rows]), len(values[columns]))
    figure, all_axes = plt.subplots(
        *shape, figsize=(base.WIDTH, 1.8 * shape[0] + 0.8), sharex=True, sharey=True, squeeze=False
    )
    palette = sns.color_palette("viridis", len(values[color]))
    for (i, row), (j, column) in product(enumerate(values[rows]), enumerate(values[columns])):
        axes = all_axes[i][j]
        if reference is not None:
            axes.plot(reference["size"], reference["certified"], color="0.6", linewidth=4, alpha=0.6, label="no sink")
            axes.plot(reference["size"], reference["predicted"], "--", color="0.6", linewidth=4, alpha=0.6)
        part = table[(table[rows] == row) & (table[columns] == column)]
        for k, (value, shade) in enumerate(zip(values[color], palette, strict=True)):
            line = part[part[color] == value].sort_values("size")
            # Thick below thin, with markers of their own: equal curves stay visible.
            look = {"marker": base.MARKERS[k % 5], "markersize": max(5.5 - k, 2.5), "color": shade}
            axes.plot(
                line["size"], line["certified"], label=label.format(value), linewidth=max(2.6 - 0.8 * k, 1), **look
            )
            axes.plot(line["size"], line["predicted"], "--", markerfacecolor="white", linewidth=1, **look)
            low, high = (line["predicted"] + side * 1.96 * line["standard_error"] for side in (-1, 1))
            axes.fill_between(line["size"], low.clip(0), high.clip(upper=1), color=shade, alpha=0.2, linewidth=0)
        base.doubling(axes, table["size"].unique(), every=2)
        axes.set(ylim=(-0.05, 1.07))
        axes.label_outer()
        titles = [
            str(v) if isinstance(v, str) else f"{n.replace('_', ' ')} {v:g}"
            for n, v in ((rows, row), (columns, column))
        ]
        axes.set_title(", ".join(t for t, n in zip(titles, shape, strict=True) if n > 1 or shape == (1, 1)))
    all_axes[0][0].plot([], [], color="grey", label="certified")
    all_axes[0][0].plot([], [], "--", color="grey", label="predicted")
    figure.supylabel("F$_N$", fontsize="medium")
    figure.legend(*all_axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def per_head(table: pd.DataFrame, level: str, sink: str, sizes: Sequence[int]) -> Figure:
    """F of a level against the exact F, a point a query head (mean over documents and queries), a panel for each N that
    the table has."""
    sizes = [n for n in sizes if (table["size"] == n).any()]
    figure, all_axes = base.panels(len(sizes), 2.6, 3, sharex=True, sharey=True)
    for axes, size in zip(all_axes, sizes, strict=True):
        part = table[table["size"] == size]
        heads = head_means(part, "f", by=["level", "sink"]).groupby(["level", "sink", "layer", "head"])["f"].mean()
        x, y = heads.loc[("exact", "none")], heads.loc[(level, sink)]
        shown = axes.scatter(x, y, c=x.index.get_level_values("layer"), cmap="viridis", s=9)
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
        axes.set(title=f"N = {size}", xlabel="exact F$_N$", xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    all_axes[0].set_ylabel(f"F$_N$, {LEVELS[level]}")
    figure.colorbar(shown, ax=all_axes, label="layer", shrink=0.85, ticks=MaxNLocator(integer=True))
    return figure


def assumptions(table: pd.DataFrame) -> Figure:
    """What the theory assumes, per head of a `coherence` table: constant norms, spread of cosines, the sink's place."""
    heads = table.groupby(["layer", "head"]).mean(numeric_only=True)
    figure, (norms, cosines, sink) = base.panels(3, 2.7, 3)
    norms.hist(heads["norm_cv"], bins=24, color=base.BLUE)
    norms.axvline(0.2, color="black", linestyle="--", label="limit of C7")
    norms.set(xlabel="sd / mean of the norms", ylabel="query heads", xlim=(0, None))
    norms.margins(y=0.2)
    norms.legend(loc="upper right")
    cosines.scatter(heads["mu_mean"], heads["mu_sd"], s=9, color=base.BLUE)
    cosines.axhline(heads["dim"].iloc[0] ** -0.5, color="black", linestyle="--", label="1/√d")
    cosines.axvline(0, color="grey", linewidth=1)
    cosines.set(xlabel="mean cosine of two values", ylabel="sd of these cosines", ylim=(0, None))
    cosines.legend(loc="lower right")
    shown = sink.scatter(
        heads["norm_ratio"], heads["kappa_mean"], s=9, c=heads.index.get_level_values("layer"), cmap="viridis"
    )
    sink.set_xscale("log")
    sink.axhline(0, color="grey", linewidth=1)
    sink.axvline(1, color="grey", linewidth=1)
    sink.set(xlabel="norm ratio r of the sink", ylabel="mean cosine κ")
    figure.colorbar(shown, ax=sink, label="layer", ticks=MaxNLocator(integer=True))
    return figure
