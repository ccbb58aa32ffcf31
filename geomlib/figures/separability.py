"""Figures of separability: F over N, over heads, over positions, and one operation's contributions."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from geomlib.figures import base
from geomlib.geometry import separability
from geomlib.stats import head_means, summary

NAMES = {
    "none": "attention's top N",
    "random": "random sets",
    "magnitude": "top N, directions permuted",
    "attention": "ranked by weight",
    "contribution": "ranked by contribution",
}


def separability_curves(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """F_N over N of the attention sets, random sets and the magnitude control, one panel per table.

    Args:
        tables: title -> study table (attention ranking and Euclidean distance are drawn).
    """
    figure, panels = base.panels(len(tables), 3.1, sharey=True)
    for axes, (title, table) in zip(panels, tables.items(), strict=True):
        part = table[(table["distance"] == "euclidean") & (table["ranking"] != "contribution")]
        means = summary(part, "f", by=["control", "size"], seed=seed)
        for control in ("none", "magnitude", "random"):
            rows = means[means["control"] == control]
            if len(rows):
                base.curve(axes, rows, NAMES[control], base.SETS[control])
        base.doubling(axes, means["size"].unique())
        axes.set(title=f"{title} ({means['documents'].max()} documents)", ylim=(0, 1.03))
    panels[0].set_ylabel("F$_N$, mean over heads and layers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def variants(table: pd.DataFrame, seed: int = 0) -> Figure:
    """F_N over N for both distances (panels) and rankings (colours), each with its magnitude control (dashed)."""
    distances = sorted(table["distance"].unique(), reverse=True)
    means = summary(table[table["control"] != "random"], "f", by=["distance", "ranking", "control", "size"], seed=seed)
    figure, panels = base.panels(len(distances), 3.3, sharey=True)
    for axes, distance in zip(panels, distances, strict=True):
        for (ranking, control), rows in means[means["distance"] == distance].groupby(
            ["ranking", "control"], sort=False
        ):
            label = NAMES[ranking] + (", directions permuted" if control == "magnitude" else "")
            base.curve(axes, rows, label, base.SETS[control] | {"color": base.RANKINGS[ranking]})
        base.doubling(axes, means["size"].unique())
        axes.set(title=f"{distance.replace('euclid', 'Euclid')} distance", ylim=(0, 1.03))
    panels[0].set_ylabel("F$_N$, mean over heads and layers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def head_map(table: pd.DataFrame, size: int, value: str = "advantage", label: str = "F(top) - F(random)") -> Figure:
    """Layer x query head map of a value at one N, mean over documents."""
    heads = head_means(table[table["size"] == size], value).groupby(["head", "layer"])[value].mean().unstack()
    bound = float(np.nanmax(np.abs(heads)))
    figure, (axes,), (mesh,) = base.layer_maps({f"{label}, N = {size}": heads}, cmap="RdBu", vmin=-bound, vmax=bound)
    figure.colorbar(mesh, ax=axes, pad=0.01, shrink=0.8)
    return figure


def by_position(table: pd.DataFrame, sizes: Sequence[int], seed: int = 0) -> Figure:
    """F_N against query position, attention sets (solid) and random sets (dotted), one colour per N."""
    part = table[(table["distance"] == "euclidean") & (table["ranking"] != "contribution") & table["size"].isin(sizes)]
    means = summary(base.positions(part), "f", by=["control", "size", "position"], seed=seed)
    figure, (axes,) = base.panels(1, 3.3)
    for i, (size, color) in enumerate(zip(sizes, sns.color_palette("viridis", len(sizes)), strict=True)):
        for control in ("none", "random"):
            rows = means[(means["size"] == size) & (means["control"] == control)]
            look = base.SETS[control] | {"color": color, "marker": base.MARKERS[i % 5]}
            base.curve(axes, rows, f"N = {size}" if control == "none" else "_", look, x="position")
    axes.plot([], [], base.SETS["random"]["linestyle"], color="grey", label="random sets")
    axes.set(xlabel="query position (middle of its bin)", ylabel="F$_N$, mean over heads and layers", ylim=(0, 1.03))
    base.beside(axes)
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
    radii = {"max": found.rho_max.item(), "min": found.rho_min.item()}
    names = [repr(t)[1:-1].strip() or repr(t) for t in tokens]
    figure, (axes, rows) = plt.subplots(1, 2, figsize=(base.WIDTH, 4.2), width_ratios=(1.2, 1))
    axes.scatter(*points[selected].T, s=30, color=base.BLUE, label=f"selected (N = {size})", zorder=3)
    axes.scatter(*points[~selected].T, s=24, facecolors="none", edgecolors="0.25", label="unselected", zorder=4)
    axes.scatter(0, 0, marker="*", s=110, color="black", label="aggregate s$_N$", zorder=4)
    for name, radius in radii.items():
        label = f"$\\rho_\\{name}$ = {radius:.3f}"
        axes.add_patch(Circle((0, 0), radius, fill=False, linewidth=1.5, label=label, **base.RADII[name]))
    axes.set(xlabel="main axis 1 of the contributions", ylabel="main axis 2", aspect="equal")
    axes.margins(0.12)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, columnspacing=1.2)

    distance = length[:, 0].numpy()
    place = np.arange(len(points))
    for group, color in ((selected, base.BLUE), (~selected, "0.45")):
        rows.scatter(distance[group], place[group], color=color, s=22, zorder=3)
    for name, radius in radii.items():
        rows.axvline(radius, linewidth=1.5, **base.RADII[name])
    if len(points) <= 40:  # more names than that cannot be read
        rows.set_yticks(place, names)
    rows.invert_yaxis()
    rows.set(xlabel="distance D to the aggregate", ylabel="source, in reading order")
    return figure
