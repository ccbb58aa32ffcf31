"""Figures of separability: F over N, over heads, over positions, and one operation's contributions."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from geomlib.figures.base import curve, doubling, positions
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
        doubling(axes, means["size"].unique())
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
        doubling(axes, means["size"].unique())
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
    axes.grid(False)
    axes.tick_params(axis="y", rotation=0)
    return figure


def by_position(table: pd.DataFrame, sizes: Sequence[int], seed: int = 0) -> Figure:
    """F_N against query position, attention sets (solid) and random sets (dotted), one colour per N."""
    part = table[(table["distance"] == "euclidean") & (table["ranking"] != "contribution") & table["size"].isin(sizes)]
    means = summary(positions(part), "f", by=["control", "size", "position"], seed=seed)
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
