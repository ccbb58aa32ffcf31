"""Figures of the sink: its value among the others, its weight, and F with and without it."""

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator

from geomlib.figures import base
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
    figure, panels = base.panels(len(tables), 3.2, sharey=True)
    for axes, (title, table) in zip(panels, tables.items(), strict=True):
        part = table[table["source"] == 0]
        heads = part.groupby(["layer", "head"])[value].mean()
        axes.scatter(heads.index.get_level_values("layer"), heads, s=8, color=base.BLUE, alpha=0.6, label="query head")
        layers = part.groupby(["document", "layer"])[value].median().unstack()
        low, high = interval_of(layers)
        axes.plot(layers.columns, layers.mean(), color="black", label="median of the layer")
        axes.fill_between(layers.columns, low, high, color="black", alpha=0.25, linewidth=0)
        axes.axhline(line, color="grey", linewidth=1)
        if band:
            axes.axhspan(*band, **base.PAPER)
        if log:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=title, xlabel="layer")
    panels[0].set_ylabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


WITHOUT = {"sink": "without the sink", "other": "without the best other source", "direction": "sink turned"}


def sink_curves(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """F_N over N of the operations that select the sink, with it and without it (and the controls that the tables have), a
    panel for each `sink_effect` table."""
    figure, panels = base.panels(len(tables), 2.8, sharey=True)
    for axes, (title, table) in zip(panels, tables.items(), strict=True):
        part = table[table["sink"] == "selected"]
        rows = summary(part[part["without"] == "sink"], "f_with", seed=seed)
        base.curve(axes, rows, "as it is", base.SINK["with"])
        for name, label in WITHOUT.items():
            changed = part[part["without"] == name]
            if len(changed):
                base.curve(axes, summary(changed, "f_without", seed=seed), label, base.SINK[name])
        base.doubling(axes, rows["size"].unique())
        axes.set(title=title, ylim=(0, 1.03))
    figure.supylabel("F$_N$, mean over heads and layers", fontsize="medium")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def mass_by_position(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """Weight of source 0 against query position, mean over heads and layers, a line for each `taxonomy` table; that of a learned
    sink, where there is one, dashed."""
    figure, (axes,) = base.panels(1, 3.2)
    for (title, look), table in zip(base.models(tables).items(), tables.values(), strict=True):
        table = base.positions(table)
        for value, line in (("sink_mass", "-"), ("learned_mass", "--")):
            if value == "sink_mass" or table[value].any():
                rows = summary(table, value, by=["position"], seed=seed)
                label = title if value == "sink_mass" else f"{title}, learned sink"
                base.curve(axes, rows, label, look | {"linestyle": line}, x="position")
    axes.set(xlabel="query position (middle of its bin)", ylabel="attention weight of the sink", ylim=(0, None))
    base.beside(axes)
    return figure


def extremes(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """How often a selected sink is the farthest of the selected, over N, beside the 1/N of a source that is nothing special;
    a line for each `sink_effect` table."""
    figure, (axes,) = base.panels(1, 3.2)
    for (title, look), table in zip(base.models(tables).items(), tables.values(), strict=True):
        rows = summary(table[(table["sink"] == "selected") & (table["without"] == "sink")], "extreme", seed=seed)
        base.curve(axes, rows, title, look)
    sizes = rows["size"].to_numpy()
    axes.plot(sizes, 1 / sizes, ":", color="grey", label="1/N")
    base.doubling(axes, sizes)
    axes.set(ylabel="share of operations whose farthest\nselected source is the sink", ylim=(0, 1.03))
    base.beside(axes)
    return figure


def sink_plane(weights: torch.Tensor, values: torch.Tensor, size: int) -> Figure:
    """One query's contributions around their aggregate, with the sink as a candidate (left) and without it (right).

    Distances from s_N (the centre) are exact, and so are directions within the plane of s_N and the sink's
    contribution; what leaves that plane is folded into it, so that distances stay what they are.

    Args:
        weights: (source,). values: (source, dim).
    """
    y = (weights[:, None] * values).double()
    figure, panels = base.panels(2, 4.3, sharey=True)
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
        axes.scatter(*points[selected & plain].T, s=30, color=base.BLUE, label="selected", zorder=3)
        unselected = {"facecolors": "none", "edgecolors": "0.25"}
        axes.scatter(*points[~selected & plain].T, s=24, label="unselected", zorder=4, **unselected)
        face = base.VERMILION if exclude is None else "none"
        axes.scatter(
            *points[0], marker="D", s=50, facecolors=face, edgecolors=base.VERMILION, label="the sink", zorder=5
        )
        axes.scatter(0, 0, marker="*", s=110, color="black", label="aggregate s$_N$", zorder=4)
        axes.scatter(-total.norm().item(), 0, marker="x", s=45, color="black", label="origin", zorder=6)
        for name, radius in (("max", found.rho_max.item()), ("min", found.rho_min.item())):
            label = f"$\\rho_\\{name}$"
            axes.add_patch(Circle((0, 0), radius, fill=False, linewidth=1.5, label=label, **base.RADII[name]))
        what = "with the sink" if exclude is None else "without the sink"
        axes.set(title=f"{what}: F = {found.f.item():.2f}", xlabel="along s$_N$", aspect="equal")
        widest = max(widest, 1.08 * found.rho_max.item(), 1.08 * found.rho_min.item(), 1.08 * np.abs(points).max())
    for axes in panels:
        axes.set(xlim=(-widest, widest), ylim=(-widest, widest))
    panels[0].set_ylabel("away from the line of s$_N$")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, columnspacing=1.2)
    return figure


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm().clamp(min=1e-300)
