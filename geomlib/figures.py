"""One function a figure, from a tidy table to a matplotlib Figure: one style, colours that colour-blind readers tell
apart, N on a doubling axis, intervals always shown."""

from collections.abc import Sequence
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator

from geomlib.geometry import separability
from geomlib.stats import head_means, summary

NAMES = {
    "none": "attention's top N",
    "random": "random sets",
    "magnitude": "top N, directions permuted",
    "attention": "ranked by weight",
    "contribution": "ranked by contribution",
}
_PALETTE = dict(
    zip(["none", "random", "magnitude", "attention", "contribution"], sns.color_palette("colorblind"), strict=False)
)


def style() -> None:
    """Set the book's look; called once per notebook."""
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font_scale=0.95)
    plt.rcParams.update(
        {"figure.dpi": 110, "savefig.facecolor": "white", "figure.facecolor": "white", "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True}
    )  # fmt: skip


def curve(axes, means: pd.DataFrame, label: str, color=None, marker: str = "o", linestyle: str = "-") -> None:
    """One line over N with its interval band; `means` as `stats.summary` gives it for one group."""
    means = means.sort_values("size")
    axes.plot(means["size"], means["mean"], marker=marker, markersize=4, label=label, color=color, linestyle=linestyle)
    if means["low"].notna().all():
        axes.fill_between(means["size"], means["low"], means["high"], alpha=0.25, color=color, linewidth=0)


def _doubling(axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), [f"{n:.0f}" for n in sorted(sizes)])
    axes.set_xlabel("N (selected sources)")


def separability_curves(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """F_N over N of the attention sets, random sets and the magnitude control, one panel per table.

    Args:
        tables: title -> study table (attention ranking and Euclidean distance are drawn).
    """
    figure, panels = plt.subplots(1, len(tables), figsize=(4.6 * len(tables), 3.6), sharey=True, squeeze=False)
    for axes, (title, table) in zip(panels[0], tables.items(), strict=True):
        part = table[(table["distance"] == "euclidean") & (table["ranking"] != "contribution")]
        means = summary(part, "f", by=["control", "size"], seed=seed)
        for control in ("none", "magnitude", "random"):
            rows = means[means["control"] == control]
            if len(rows):
                curve(axes, rows, NAMES[control], _PALETTE[control])
        _doubling(axes, means["size"].unique())
        axes.set(title=f"{title} ({means['documents'].max()} documents)", ylim=(0, 1.03))
    panels[0][0].set_ylabel("F$_N$, mean over heads and layers")
    panels[0][0].legend(loc="upper right")
    return figure


def variants(table: pd.DataFrame, seed: int = 0) -> Figure:
    """F_N over N for both distances (panels) and rankings (colours), each with its magnitude control (dashed)."""
    distances = sorted(table["distance"].unique(), reverse=True)
    means = summary(table[table["control"] != "random"], "f", by=["distance", "ranking", "control", "size"], seed=seed)
    figure, panels = plt.subplots(1, len(distances), figsize=(4.6 * len(distances), 3.6), sharey=True, squeeze=False)
    for axes, distance in zip(panels[0], distances, strict=True):
        for (ranking, control), rows in means[means["distance"] == distance].groupby(["ranking", "control"]):
            dashed = control == "magnitude"
            label = NAMES[ranking] + (", directions permuted" if dashed else "")
            curve(axes, rows, label, _PALETTE[ranking], "s" if dashed else "o", "--" if dashed else "-")
        _doubling(axes, means["size"].unique())
        axes.set(title=f"{distance.capitalize()} distance", ylim=(0, 1.03))
    panels[0][0].set_ylabel("F$_N$, mean over heads and layers")
    panels[0][-1].legend(loc="best", fontsize="small")
    return figure


def head_map(table: pd.DataFrame, size: int, value: str = "advantage", label: str = "F(top) - F(random)") -> Figure:
    """Layer x query head map of a value at one N, mean over documents."""
    heads = head_means(table[table["size"] == size], value).groupby(["head", "layer"])[value].mean().unstack()
    figure, axes = plt.subplots(figsize=(max(5.0, 0.28 * heads.shape[1] + 1.5), max(2.2, 0.28 * heads.shape[0] + 0.8)))
    bound = float(np.nanmax(np.abs(heads)))
    sns.heatmap(
        heads, cmap="RdBu", center=0, vmin=-bound, vmax=bound, ax=axes, cbar_kws={"label": f"{label}, N = {size}"}
    )
    axes.set(xlabel="layer", ylabel="query head")
    axes.tick_params(axis="y", rotation=0)
    return figure


def by_position(table: pd.DataFrame, sizes: Sequence[int], seed: int = 0) -> Figure:
    """F_N against query position, attention sets (solid) and random sets (dotted), one colour per N."""
    part = table[(table["distance"] == "euclidean") & (table["ranking"] != "contribution") & table["size"].isin(sizes)]
    part = part.assign(position=(part["query_from"] + part["query_to"]) / 2)
    means = summary(part, "f", by=["control", "size", "position"], seed=seed)
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    for size, color in zip(sizes, sns.color_palette("viridis", len(sizes)), strict=True):
        for control, linestyle in (("none", "-"), ("random", ":")):
            rows = means[(means["size"] == size) & (means["control"] == control)]
            label = f"N = {size}" if control == "none" else None
            axes.plot(rows["position"], rows["mean"], linestyle, color=color, marker="o", markersize=3, label=label)
            axes.fill_between(rows["position"], rows["low"], rows["high"], color=color, alpha=0.2, linewidth=0)
    axes.plot([], [], ":", color="grey", label="random sets")
    axes.set(xlabel="query position (middle of its bin)", ylabel="F$_N$, mean over heads and layers", ylim=(0, 1.03))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def contributions_plane(weights: torch.Tensor, values: torch.Tensor, size: int, tokens: Sequence[str]) -> Figure:
    """One query's contributions around their aggregate s_N, with both radii; beside it, every source's distance.

    Left: distances from s_N (the centre) are exact. Directions are those of the two main axes (PCA) of y_i - s_N, so angles
    between points are only what two of the `dim` dimensions show.

    Args:
        weights: (source,). values: (source, dim). tokens: what each source reads, for the labels of the selected.
    """
    found = separability(weights[None], values, [size])
    chosen = weights.sort(descending=True, stable=True).indices[:size]
    y = (weights[:, None] * values).double()
    gap = y - y[chosen].sum(0)
    _, _, axes_of_data = torch.linalg.svd(gap - gap.mean(0), full_matrices=False)
    plane = gap @ axes_of_data[:2].T
    length = gap.norm(dim=-1, keepdim=True)
    points = (plane / plane.norm(dim=-1, keepdim=True).clamp(min=1e-12) * length).numpy()

    selected = np.zeros(len(points), bool)
    selected[chosen.numpy()] = True
    blue, orange, green = sns.color_palette("colorblind")[:3]
    radii = ((found.rho_max, orange, "max"), (found.rho_min, green, "min"))
    names = [repr(t)[1:-1].strip() or repr(t) for t in tokens]
    figure, (axes, rows) = plt.subplots(1, 2, figsize=(9.2, 4.6), width_ratios=(1.25, 1))
    axes.scatter(*points[selected].T, s=46, color=blue, label=f"selected (N = {size})", zorder=3)
    axes.scatter(*points[~selected].T, s=40, facecolors="none", edgecolors="0.25", label="unselected", zorder=4)
    axes.scatter(0, 0, marker="*", s=170, color="black", label="aggregate s$_N$", zorder=4)
    for radius, color, name in radii:
        label = f"$\\rho_\\{name}$ = {radius.item():.3f}"
        axes.add_patch(Circle((0, 0), radius.item(), fill=False, color=color, linewidth=1.8, label=label))
    axes.set(xlabel="main axis 1 of the contributions", ylabel="main axis 2", aspect="equal")
    axes.margins(0.12)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize="small")

    distance = length[:, 0].numpy()
    place = np.arange(len(points))
    for group, color in ((selected, blue), (~selected, "0.45")):
        rows.scatter(distance[group], place[group], color=color, s=34, zorder=3)
    for radius, color, _ in radii:
        rows.axvline(radius.item(), color=color, linewidth=1.8)
    if len(points) <= 40:  # more names than that cannot be read
        rows.set_yticks(place, names, fontsize=8)
    rows.invert_yaxis()
    rows.set(xlabel="distance D to the aggregate", ylabel="source, in reading order")
    return figure


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
        _doubling(axis, means["size"].unique())
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
        _doubling(axis, table["size"].unique())
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
