"""Figures of head removal: damage against retention, and what each head costs alone."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from geomlib.figures import base
from geomlib.stats import damage_curves
from geomlib.taxonomy import REGIMES

_LINEAR = 0.05  # damage up to which the axis is linear; logarithmic beyond


def retention_curves(curves: pd.DataFrame, panels: dict[str, Sequence[str]], chance: float | None = None) -> Figure:
    """Damage against the share of heads that stays, with document-bootstrap bands: a panel for each group of orders (title ->
    names, "random" for the mean of the random ones); of a "retention" table. `chance`: damage of guessing, a line."""
    found = damage_curves(curves)
    kept = found[found["retention"] < 1]
    figure, all_axes = base.panels(len(panels), 3.8 if len(panels) == 1 else 5.2, sharey=True)
    for axes, (title, names) in zip(all_axes, panels.items(), strict=True):
        for name in names:
            base.curve(axes, kept[kept["order"] == name], name, base.order_look(name), "retention", "damage")
        axes.set(title=title)
        if chance is not None:
            axes.axhline(chance, color="0.3", linewidth=1, linestyle="--", label="guessing every token alike", zorder=1)
        retention_axis(axes)
        damage_axis(axes, min(-0.01, found["low"].min(), found["damage"].min()))
        (base.beside if len(panels) == 1 else base.beneath)(axes)
    all_axes[0].set_ylabel("damage: NLL over that of\nthe whole model, less 1")
    return figure


def retention_axis(axes) -> None:
    axes.set_xlabel("query heads that stay")
    axes.invert_xaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def damage_axis(axes, lowest: float | None = None) -> None:
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.5)
    if lowest is not None:
        axes.set_ylim(bottom=1.1 * lowest)
    low, high = axes.get_ylim()
    axes.set_yticks([t for t in (-3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30) if low <= t <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    axes.yaxis.set_minor_locator(plt.NullLocator())


def damage_gaps(gaps: dict[str, pd.DataFrame], order: str) -> Figure:
    """Damage of an order less that of others, with paired intervals: name of the other -> `stats.damage_difference`."""
    figure, (axes,) = base.panels(1, 3.6)
    shares = sorted({q for rows in gaps.values() for q in rows["retention"]}, reverse=True)
    for i, (name, rows) in enumerate(gaps.items()):
        place = rows["retention"].map(shares.index) + 0.11 * (i - (len(gaps) - 1) / 2)
        base.points(axes, place, rows, name, base.order_look(name) | {"linestyle": "", "markersize": 4})
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set(xlabel="query heads that stay", ylabel="difference in damage")
    axes.set_title(f"damage of {order} less that of ... (below 0: it does less)")
    axes.set_xticks(range(len(shares)), [f"{q:.0%}" for q in shares])
    axes.grid(axis="x", visible=False)
    damage_axis(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def damage_map(tables: dict[str, pd.DataFrame]) -> Figure:
    """Damage of each query head alone by layer and head, outliers marked, a panel for each table (`claims.critical`)."""
    grids = {t: h.pivot(index="head", columns="layer", values="damage") for t, h in tables.items()}
    most = 1.05 * max(max(float(np.nanmax(np.abs(g.to_numpy()))) for g in grids.values()), 1e-6)
    norm = SymLogNorm(linthresh=min(0.003, most), vmin=-most, vmax=most)
    figure, panels, meshes = base.layer_maps(grids, cmap="PuOr_r", norm=norm)
    for axes, heads in zip(panels, tables.values(), strict=True):
        found = heads[heads["critical"]]
        axes.scatter(
            found["layer"], found["head"], marker="o", s=18, color="black", edgecolors="white", label="outlier"
        )
    bar = figure.colorbar(meshes[0], ax=panels, shrink=0.9, pad=0.01, panchor=False)
    bar.set_ticks([t for t in (-1, -0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3) if abs(t) <= most])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    bar.ax.minorticks_off()
    bar.set_label("damage")
    return figure


def damage_sorted(heads: pd.DataFrame, names: int = 4) -> Figure:
    """Damage of each head alone, the largest first and named, with intervals; and by regime, with the regime's mean (line); of
    `claims.critical`."""
    figure, (left, right) = base.panels(2, 3.8, width_ratios=(1.6, 1), sharey=True)
    heads = heads.reset_index(drop=True)
    bars = np.nan_to_num([heads["damage"] - heads["low"], heads["high"] - heads["damage"]]).clip(min=0)
    left.errorbar(heads.index + 1, heads["damage"], bars, fmt="none", ecolor="0.8", linewidth=1)
    for turn, regime in enumerate(REGIMES):
        part = heads[heads["regime"] == regime]
        style = {key: base.REGIMES[regime][key] for key in ("color", "marker")} | {"s": 11}
        left.scatter(part.index + 1, part["damage"], label=f"{regime} ({len(part)})", zorder=3, **style)
        jitter = np.random.default_rng(0).uniform(-0.22, 0.22, len(part))
        right.scatter(turn + jitter, part["damage"], alpha=0.7, **style)
        if len(part):
            right.hlines(part["damage"].mean(), turn - 0.35, turn + 0.35, color="black", linewidth=1.5)
    for row in heads.head(names).itertuples():
        left.annotate(
            f"layer {row.layer}, head {row.head}", (row.Index + 1, row.damage), (0.14, 0.97 - 0.065 * row.Index),
            textcoords="axes fraction", fontsize=base.SMALL, va="center", bbox={"fc": "white", "ec": "none", "pad": 0.4}, arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},
        )  # fmt: skip
    left.set(xlabel="query heads, by damage", ylabel="damage of the head alone")
    left.legend(loc="upper right")
    right.set_xticks(range(len(REGIMES)), list(REGIMES))
    right.grid(axis="x", visible=False)
    left.set_yscale("symlog", linthresh=0.003, linscale=0.7)
    low, high = left.get_ylim()
    ticks = (-0.3, -0.1, -0.03, -0.01, -0.003, 0, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
    left.set_yticks([t for t in ticks if low <= t <= high])
    left.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    left.yaxis.set_minor_locator(plt.NullLocator())
    return figure
