"""Figures of head removal: damage against retention, and what each head costs alone."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from geomlib.figures.taxonomy import COLORS as REGIME_COLORS
from geomlib.figures.taxonomy import MARKERS as REGIME_MARKERS
from geomlib.sparsify import METRICS
from geomlib.stats import damage_curves
from geomlib.taxonomy import REGIMES

_MARKERS, _STYLES = "os^Dv<>P*X", ("-", "--", "-.", ":")
_PALETTE = [sns.color_palette("colorblind")[i] for i in (0, 1, 2, 3, 4, 9, 5, 7)]
_LINEAR = 0.05  # damage up to which the axis is linear; logarithmic beyond


def _look(name: str, names: Sequence[str]) -> dict:
    """Colour and marker of an order: a score of single heads has the same in every figure, an order and its guarded form too."""
    if name == "random":
        return {"color": "0.35", "marker": "o"}
    plain = list(dict.fromkeys(n.split(", ")[0] for n in names if n != "random"))
    name = name.split(", ")[0]
    place = METRICS.index(name) if set(plain) <= set(METRICS) else plain.index(name)
    return {"color": _PALETTE[place % len(_PALETTE)], "marker": _MARKERS[place % len(_MARKERS)]}


def retention_curves(curves: pd.DataFrame, panels: dict[str, Sequence[str]], chance: float | None = None) -> Figure:
    """Damage against the share of heads that stays, with document-bootstrap bands: a panel for each group of orders (title ->
    names, "random" for the mean of the random ones); of a "retention" table. `chance`: damage of guessing, a line."""
    found = damage_curves(curves)
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels) + 0.4, 5), sharey=True, squeeze=False)
    for axes, (title, names) in zip(all_axes[0], panels.items(), strict=True):
        for i, name in enumerate(names):
            rows = found[(found["order"] == name) & (found["retention"] < 1)].sort_values("retention")
            look = _look(name, names)
            line = ":" if name == "random" else _STYLES[i % 3]
            if any(", " in n for n in names):
                line = "-" if ", " in name else "--"
            axes.plot(rows["retention"], rows["damage"], linestyle=line, markersize=4, label=name, **look)
            if rows["low"].notna().all():
                axes.fill_between(
                    rows["retention"], rows["low"], rows["high"], color=look["color"], alpha=0.18, linewidth=0
                )
        axes.set(title=title, xlabel="heads that stay")
        if chance is not None:
            axes.axhline(chance, color="0.3", linewidth=1, linestyle="--", label="guessing every token alike", zorder=1)
        axes.invert_xaxis()
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.legend(loc="lower right", fontsize="small")
        _damage_axis(axes, min(-0.01, found["low"].min(), found["damage"].min()))
    all_axes[0][0].set_ylabel("damage: NLL over that of the whole model, less 1")
    return figure


def _damage_axis(axes, lowest: float | None = None) -> None:
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.5)
    if lowest is not None:
        axes.set_ylim(bottom=1.1 * lowest)
    low, high = axes.get_ylim()
    axes.set_yticks([t for t in (-3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30) if low <= t <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    axes.yaxis.set_minor_locator(plt.NullLocator())


def damage_gaps(gaps: dict[str, pd.DataFrame], order: str) -> Figure:
    """Damage of an order less that of others, with paired intervals: name of the other -> `stats.damage_difference`."""
    figure, axes = plt.subplots(figsize=(9.4, 4.2))
    shares = sorted({q for rows in gaps.values() for q in rows["retention"]}, reverse=True)
    for i, (name, rows) in enumerate(gaps.items()):
        look = _look(name, list(gaps))
        place = rows["retention"].map(shares.index) + 0.09 * (i - (len(gaps) - 1) / 2)
        bars = np.nan_to_num([rows["mean"] - rows["low"], rows["high"] - rows["mean"]]).clip(min=0)
        axes.errorbar(place, rows["mean"], bars, linestyle="none", capsize=2, markersize=4, label=name, **look)
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set(xlabel="heads that stay", ylabel="difference in damage")
    axes.set_title(f"damage of {order} less that of ... (below 0: it does less)")
    axes.set_xticks(range(len(shares)), [f"{q:.0%}" for q in shares])
    axes.grid(axis="x", visible=False)
    _damage_axis(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def damage_map(tables: dict[str, pd.DataFrame]) -> Figure:
    """Damage of each query head alone by layer and head, outliers marked, a panel for each table (`claims.critical`)."""
    grids = {t: h.pivot(index="head", columns="layer", values="damage") for t, h in tables.items()}
    heights, widest = [g.shape[0] for g in grids.values()], max(g.shape[1] for g in grids.values())
    size = (0.29 * widest + 3.2, 0.29 * sum(heights) + 1.2 * len(grids))
    figure, panels = plt.subplots(len(grids), 1, figsize=size, height_ratios=heights, squeeze=False)
    most = 1.05 * max(max(float(np.nanmax(np.abs(g.to_numpy()))) for g in grids.values()), 1e-6)
    norm = SymLogNorm(linthresh=min(0.003, most), vmin=-most, vmax=most)
    for axes, (title, grid) in zip(panels[:, 0], grids.items(), strict=True):
        mesh = axes.pcolormesh(
            np.arange(grid.shape[1] + 1) - 0.5, np.arange(grid.shape[0] + 1) - 0.5, grid, cmap="PuOr_r", norm=norm,
            edgecolors="white", linewidth=0.5,
        )  # fmt: skip
        found = tables[title][tables[title]["critical"]]
        axes.scatter(found["layer"], found["head"], marker="o", s=14, color="black", label="outlier")
        axes.set(title=title, xlabel="layer", ylabel="query head", aspect="equal", anchor="W")
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False)
    bar = figure.colorbar(mesh, ax=list(panels[:, 0]), shrink=0.9, pad=0.01, panchor=False)
    bar.set_ticks([t for t in (-1, -0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3) if abs(t) <= most])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    bar.ax.minorticks_off()
    bar.set_label("damage")
    return figure


def damage_sorted(heads: pd.DataFrame, names: int = 4) -> Figure:
    """Damage of each head alone, the largest first and named, with intervals; and by regime, with the regime's mean (line); of
    `claims.critical`."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.2), width_ratios=(1.7, 1), sharey=True)
    heads = heads.reset_index(drop=True)
    bars = np.nan_to_num([heads["damage"] - heads["low"], heads["high"] - heads["damage"]]).clip(min=0)
    left.errorbar(heads.index + 1, heads["damage"], bars, fmt="none", ecolor="0.8", linewidth=1)
    for turn, regime in enumerate(REGIMES):
        part = heads[heads["regime"] == regime]
        style = {"color": REGIME_COLORS[regime], "marker": REGIME_MARKERS[regime], "s": 16}
        left.scatter(part.index + 1, part["damage"], label=f"{regime} ({len(part)})", zorder=3, **style)
        jitter = np.random.default_rng(0).uniform(-0.22, 0.22, len(part))
        right.scatter(turn + jitter, part["damage"], alpha=0.7, **style)
        if len(part):
            right.hlines(part["damage"].mean(), turn - 0.35, turn + 0.35, color="black", linewidth=1.5)
    for row in heads.head(names).itertuples():
        left.annotate(
            f"layer {row.layer}, head {row.head}", (row.Index + 1, row.damage), (0.14, 0.97 - 0.055 * row.Index),
            textcoords="axes fraction", fontsize=8, va="center", bbox={"fc": "white", "ec": "none", "pad": 0.4}, arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},
        )  # fmt: skip
    left.set(xlabel="query heads, by damage", ylabel="damage of the head alone")
    left.legend(loc="upper right")
    right.set_xticks(range(len(REGIMES)), list(REGIMES))
    right.grid(axis="x", visible=False)
    left.set_yscale("symlog", linthresh=0.003, linscale=0.7)
    low, high = left.get_ylim()
    ticks = (-0.3, -0.1, -0.03, -0.01, -0.003, 0, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
    left.set_yticks([t for t in ticks if low <= t <= high])
    left.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
    left.yaxis.set_minor_locator(plt.NullLocator())
    return figure
