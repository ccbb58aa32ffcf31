"""Figures of the sink: its value among the others, its weight, and F with and without it."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from geomlib.figures.base import curve, doubling, positions
from geomlib.geometry import separability
from geomlib.stats import interval_of, summary


def sinks_by_layer(
    tables: dict[str, pd.DataFrame],
    value: str,
    label: str,
    line: float,
    band: tuple[float, float] | None = None,
    log: bool = False,
) -> Figure:
    """A value of source 0 by layer: a point a query head (mean over documents), and the median over the heads of each layer
    with its document-bootstrap interval; a panel for each `sinks` table.

    Args:
        tables: title -> table. line: the value that means nothing in particular. band: a range to shade (the paper's).
    """
    figure, panels = plt.subplots(1, len(tables), figsize=(4.8 * len(tables), 3.6), sharey=True, squeeze=False)
    blue, orange = sns.color_palette("colorblind")[:2]
    for axes, (title, table) in zip(panels[0], tables.items(), strict=True):
        part = table[table["source"] == 0]
        heads = part.groupby(["layer", "head"])[value].mean()
        axes.scatter(heads.index.get_level_values("layer"), heads, s=11, color=blue, alpha=0.6, label="query head")
        layers = part.groupby(["document", "layer"])[value].median().unstack()
        low, high = interval_of(layers)
        axes.plot(layers.columns, layers.mean(), color="black", label="median of the layer")
        axes.fill_between(layers.columns, low, high, color="black", alpha=0.25, linewidth=0)
        axes.axhline(line, color="grey", linewidth=1)
        if band:
            axes.axhspan(*band, color=orange, alpha=0.2, linewidth=0, label=f"{band[0]} to {band[1]} (the paper)")
        if log:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.set(title=title, xlabel="layer")
    panels[0][0].set_ylabel(label)
    panels[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


WITHOUT = {"sink": "without the sink", "other": "without the best other source", "direction": "sink turned"}


def sink_curves(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """F_N over N of the operations that select the sink, with it and without it (and the controls that the tables have), a
    panel for each `sink_effect` table."""
    columns = min(len(tables), 2)  # more would be too small on a page
    shape = (-(-len(tables) // columns), columns)
    figure, panels = plt.subplots(
        *shape, figsize=(4.3 * columns, 3.5 * shape[0]), sharex=True, sharey=True, squeeze=False
    )
    palette = sns.color_palette("colorblind")
    for axes, (title, table) in zip(panels.flat, tables.items(), strict=False):
        part = table[table["sink"] == "selected"]
        rows = summary(part[part["without"] == "sink"], "f_with", seed=seed)
        curve(axes, rows, "as it is", palette[0])
        for i, (name, label) in enumerate(WITHOUT.items(), 1):
            changed = part[part["without"] == name]
            if len(changed):
                line = "-" if name == "sink" else "--"
                curve(axes, summary(changed, "f_without", seed=seed), label, palette[i], "osD^"[i], line)
        doubling(axes, rows["size"].unique())
        axes.set(title=title, ylim=(0, 1.03))
    for axes in panels.flat[len(tables) :]:
        axes.set_axis_off()
    figure.supylabel("F$_N$, mean over heads and layers", fontsize="medium")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def mass_by_position(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """Weight of source 0 against query position, mean over heads and layers, a line for each `taxonomy` table; that of a learned
    sink, where there is one, dashed."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for color, (title, table) in zip(sns.color_palette("colorblind"), tables.items(), strict=False):
        table = positions(table)
        for value, line in (("sink_mass", "-"), ("learned_mass", "--")):
            if value == "sink_mass" or table[value].any():
                rows = summary(table, value, by=["position"], seed=seed)
                label = title if value == "sink_mass" else f"{title}, learned sink"
                axes.plot(rows["position"], rows["mean"], line, color=color, marker="o", markersize=3, label=label)
                axes.fill_between(rows["position"], rows["low"], rows["high"], color=color, alpha=0.25, linewidth=0)
    axes.set(xlabel="query position (middle of its bin)", ylabel="attention weight of the sink", ylim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def extremes(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """How often a selected sink is the farthest of the selected, over N, beside the 1/N of a source that is nothing special;
    a line for each `sink_effect` table."""
    figure, axes = plt.subplots(figsize=(6.2, 3.6))
    for i, (title, table) in enumerate(tables.items()):
        rows = summary(table[(table["sink"] == "selected") & (table["without"] == "sink")], "extreme", seed=seed)
        curve(axes, rows, title, sns.color_palette("colorblind")[i], "osD^v"[i % 5])
    sizes = rows["size"].to_numpy()
    axes.plot(sizes, 1 / sizes, ":", color="grey", label="1/N")
    doubling(axes, sizes)
    axes.set(ylabel="share of operations whose farthest\nselected source is the sink", ylim=(0, 1.03))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def sink_plane(weights: torch.Tensor, values: torch.Tensor, size: int) -> Figure:
    """One query's contributions around their aggregate, with the sink as a candidate (left) and without it (right).

    Distances from s_N (the centre) are exact, and so are directions within the plane of s_N and the sink's
    contribution; what leaves that plane is folded into it, so that distances stay what they are.

    Args:
        weights: (source,). values: (source, dim).
    """
    y = (weights[:, None] * values).double()
    figure, panels = plt.subplots(1, 2, figsize=(8.8, 4.8))
    blue, orange, green = sns.color_palette("colorblind")[:3]
    widest = 0.0
    for axes, exclude in zip(panels, (None, torch.arange(len(weights)) == 0), strict=True):
        found = separability(weights[None], values, [size], exclude=exclude)
        scores = weights.clone() if exclude is None else weights.masked_fill(exclude, -1)
        chosen = scores.sort(descending=True, stable=True).indices[:size]
        total = y[chosen].sum(0)
        gap = y - total
        length = gap.norm(dim=-1)
        across = gap @ _unit(total)
        along = gap[0] - (gap[0] @ _unit(total)) * _unit(total)  # the sink's own way out of the line of s_N
        side = torch.sign(gap @ _unit(along))
        up = (length**2 - across**2).clamp(min=0).sqrt() * torch.where(side == 0, 1, side)
        points = torch.stack([across, up], dim=-1).numpy()
        selected = np.zeros(len(points), bool)
        selected[chosen.numpy()] = True
        plain = np.arange(len(points)) > 0
        axes.scatter(*points[selected & plain].T, s=44, color=blue, label="selected", zorder=3)
        axes.scatter(
            *points[~selected & plain].T, s=36, facecolors="none", edgecolors="0.25", label="unselected", zorder=4
        )
        look = {"color": orange} if exclude is None else {"facecolors": "none", "edgecolors": orange, "alpha": 0.7}
        axes.scatter(*points[0], marker="D", s=80, label="the sink", zorder=5, **look)
        axes.scatter(0, 0, marker="*", s=150, color="black", label="aggregate s$_N$", zorder=4)
        axes.scatter(-total.norm().item(), 0, marker="x", s=60, color="tab:red", label="origin", zorder=6)
        for radius, color, name in ((found.rho_max, orange, "max"), (found.rho_min, green, "min")):
            axes.add_patch(
                Circle((0, 0), radius.item(), fill=False, color=color, linewidth=1.8, label=f"$\\rho_\\{name}$")
            )
        what = "with the sink" if exclude is None else "without the sink"
        axes.set(title=f"{what}: F = {found.f.item():.2f}", xlabel="along s$_N$", aspect="equal")
        widest = max(widest, 1.08 * found.rho_max.item(), 1.08 * found.rho_min.item(), 1.08 * np.abs(points).max())
    for axes in panels:
        axes.set(xlim=(-widest, widest), ylim=(-widest, widest))
    panels[0].set_ylabel("away from the line of s$_N$")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize="small")
    return figure


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm().clamp(min=1e-300)
