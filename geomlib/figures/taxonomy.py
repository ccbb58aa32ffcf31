"""Figures of the taxonomy: shares of votes, regimes and what goes with them."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import mpltern  # noqa: F401 (registers the ternary projection)
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from geomlib.figures.base import positions
from geomlib.stats import regime_shares, summary
from geomlib.taxonomy import REGIMES, VOTES

COLORS = dict(zip(REGIMES, (sns.color_palette("colorblind")[i] for i in (2, 0, 1)), strict=True))
MARKERS = dict(zip(REGIMES, "^os", strict=True))


def simplex(tables: dict[str, pd.DataFrame]) -> Figure:
    """Shares of votes of all query heads in a triangle, a panel for each table of heads (`taxonomy.regimes`); lines where
    the regime changes."""
    figure = plt.figure(figsize=(5.4 * len(tables), 4.6), layout="none")
    for i, (title, heads) in enumerate(tables.items(), 1):
        axes = figure.add_subplot(1, len(tables), i, projection="ternary", ternary_sum=100)
        for regime in REGIMES:
            part = 100 * heads.loc[heads["regime"] == regime, ["vote_other", "vote_sink", "vote_current"]]
            label = f"{regime} ({len(part)})"
            axes.scatter(
                *part.to_numpy().T,
                s=22,
                color=COLORS[regime],
                marker=MARKERS[regime],
                alpha=0.8,
                label=label,
                clip_on=False,
            )
        third = 100 / 3
        for corner in ((50, 50, 0), (50, 0, 50), (0, 50, 50)):
            axes.plot(*zip((third,) * 3, corner, strict=True), color="0.3", linewidth=1)
        axes.set_tlabel("% other source")
        axes.set_llabel("% sink")
        axes.set_rlabel("% current token")
        for axis in (axes.taxis, axes.laxis, axes.raxis):
            axis.set_label_position("tick1")
        axes.grid(alpha=0.5)
        axes.set_title(title, pad=14)
        axes.legend(loc="upper left", bbox_to_anchor=(0.86, 1.02), fontsize="small")
    figure.subplots_adjust(wspace=0.55, left=0.08, right=0.9, bottom=0.14, top=0.86)
    return figure


def regime_map(tables: dict[str, pd.DataFrame]) -> Figure:
    """Regimes by layer and query head, a panel for each table of heads."""
    grids = {t: h.pivot(index="head", columns="layer", values="regime") for t, h in tables.items()}
    heights, widest = [g.shape[0] for g in grids.values()], max(g.shape[1] for g in grids.values())
    size = (0.29 * widest + 2.6, 0.29 * sum(heights) + 1.1 * len(grids))
    figure, panels = plt.subplots(len(grids), 1, figsize=size, height_ratios=heights, squeeze=False)
    for axes, (title, grid) in zip(panels[:, 0], grids.items(), strict=True):
        codes = grid.replace({r: i for i, r in enumerate(REGIMES)}).astype(float)
        axes.pcolormesh(
            np.arange(codes.shape[1] + 1) - 0.5, np.arange(codes.shape[0] + 1) - 0.5, codes,
            cmap=ListedColormap(list(COLORS.values())), vmin=0, vmax=2, edgecolors="white", linewidth=1,
        )  # fmt: skip
        for (y, x), code in np.ndenumerate(codes.to_numpy()):  # also to be told apart without colour
            axes.text(
                x,
                y,
                "RMx"[int(code)] if not np.isnan(code) else "",
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
        axes.set(title=title, xlabel="layer", ylabel="query head", aspect="equal", anchor="W")
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False)
    letters = dict(zip(REGIMES, "RMx", strict=True))
    handles = [Patch(color=COLORS[r], label=f"{r} ({letters[r]})") for r in REGIMES]
    figure.legend(handles=handles, loc="outside right center")
    return figure


def shares(tables: dict[str, dict[str, pd.DataFrame]], seed: int = 0) -> Figure:
    """Share of heads of each regime with its document-bootstrap interval, a panel for each model and a marker for each corpus
    (`taxonomy` tables, model -> corpus -> table)."""
    figure, panels = plt.subplots(1, len(tables), figsize=(4.6 * len(tables) + 1, 3.4), sharey=True, squeeze=False)
    for axes, (model, corpora) in zip(panels[0], tables.items(), strict=True):
        for i, (corpus, table) in enumerate(corpora.items()):
            found = regime_shares(table, seed=seed)
            place = np.arange(len(found)) + 0.16 * (i - (len(corpora) - 1) / 2)
            bars = np.nan_to_num([found["mean"] - found["low"], found["high"] - found["mean"]]).clip(min=0)
            color = sns.color_palette("colorblind")[3 + i]
            axes.errorbar(place, found["mean"], bars, fmt="os^Dv"[i % 5], color=color, capsize=3, label=corpus)
        axes.set_xticks(range(len(REGIMES)), list(REGIMES))
        axes.set(title=model, ylim=(0, 1))
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("share of the query heads")
    panels[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


SIGNATURES = {
    "cos_sink": "cos(z, sink's value)",
    "cos_current": "cos(z, own token's value)",
    "sink_mass": "weight of the sink",
    "entropy": "entropy of the weights, nats",
    "distance": "distance to the winner, tokens",
}


def signatures(heads: pd.DataFrame) -> Figure:
    """Signatures of every query head by regime: a point a head, a line at the median; of a table of heads."""
    figure, panels = plt.subplots(1, len(SIGNATURES), figsize=(2.5 * len(SIGNATURES), 3.5))
    order = [r for r in REGIMES if (heads["regime"] == r).any()]
    for axes, (value, label) in zip(panels, SIGNATURES.items(), strict=True):
        sns.stripplot(
            heads, x="regime", y=value, order=order, hue="regime", hue_order=order, legend=False, size=3.2, alpha=0.65,
            jitter=0.25, palette=[COLORS[r] for r in order], ax=axes,
        )  # fmt: skip
        medians = heads.groupby("regime")[value].median()
        for i, regime in enumerate(order):
            axes.hlines(medians[regime], i - 0.35, i + 0.35, color="black", linewidth=2, zorder=5)
        if value.startswith("cos"):
            axes.axhline(0, color="grey", linewidth=1)
        axes.set(xlabel="", ylabel="")
        axes.set_title(label, fontsize="small")
        axes.tick_params(axis="x", labelsize="small", rotation=30)
    return figure


def winners(weights: dict[str, torch.Tensor], tokens: Sequence[str]) -> Figure:
    """Attention weights of some heads on one text, and each query's source-winner; title -> (query, source)."""
    figure, panels = plt.subplots(1, len(weights), figsize=(3.9 * len(weights) + 0.6, 4.3), sharey=True, squeeze=False)
    names = [repr(t)[1:-1].strip() or repr(t) for t in tokens]
    for axes, (title, alpha) in zip(panels[0], weights.items(), strict=True):
        shown = axes.imshow(alpha.numpy(), cmap="Greys", vmin=0, vmax=1)
        won = alpha.argmax(-1).numpy()
        for regime, here in _votes(won).items():
            axes.scatter(
                won[here], np.flatnonzero(here), s=26, color=COLORS[regime], marker=MARKERS[regime], label=regime
            )
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("source")
        axes.grid(False)
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    panels[0][0].set_ylabel("query")
    marks = [
        plt.Line2D([], [], marker=MARKERS[r], color=COLORS[r], linestyle="", label=f"winner: {v}")
        for r, v in zip(REGIMES, ("own token", "sink", "another"), strict=True)
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize="small")
    figure.colorbar(shown, ax=panels[0].tolist(), label="attention weight", shrink=0.7)
    return figure


def _votes(won: np.ndarray) -> dict[str, np.ndarray]:
    queries = np.arange(len(won))
    current, sink = (won == queries) & (queries > 0), (won == 0) & (queries > 0)
    return {"Retriever": current, "Mixer": sink, "Reset": (queries > 0) & ~current & ~sink}


def votes_by_position(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """Shares of votes against query position, mean over heads and layers, a panel for each `taxonomy` table."""
    figure, panels = plt.subplots(1, len(tables), figsize=(4.4 * len(tables) + 1, 3.4), sharey=True, squeeze=False)
    for axes, (title, table) in zip(panels[0], tables.items(), strict=True):
        table = positions(table)
        for regime, vote in zip(REGIMES, VOTES, strict=True):
            rows = summary(table, vote, by=["position"], seed=seed)
            label = f"{REGIMES[regime]} ({regime})"
            axes.plot(rows["position"], rows["mean"], color=COLORS[regime], marker=MARKERS[regime], label=label)
            axes.fill_between(
                rows["position"], rows["low"], rows["high"], color=COLORS[regime], alpha=0.25, linewidth=0
            )
        axes.set(title=title, xlabel="query position (middle of its bin)", ylim=(0, 1))
    panels[0][0].set_ylabel("share of votes")
    panels[0][-1].legend(title="vote for", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def stability(length: dict[str, pd.DataFrame], documents: dict[str, pd.DataFrame]) -> Figure:
    """Share of heads with the same label: from the first tokens of the windows against from all, and from n documents against
    from n others; title -> `taxonomy.stability_over_length`, `taxonomy.stability_over_documents`."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.4), sharey=True)
    palette = sns.color_palette("colorblind")
    for i, title in enumerate(length):
        left.plot(length[title]["length"], length[title]["share"], marker="os^Dv"[i % 5], color=palette[i], label=title)
        rows = documents[title]
        bars = [(rows["share"] - rows["low"]).clip(0), (rows["high"] - rows["share"]).clip(0)]  # rounding
        right.errorbar(
            rows["documents"], rows["share"], bars, marker="os^Dv"[i % 5], color=palette[i], capsize=3, label=title
        )
    left.set(xlabel="first tokens of each window", ylabel="share of heads with the same label", ylim=(0, 1.03))
    right.set(xlabel="documents on each side")
    drawn = sorted({n for rows in documents.values() for n in rows["documents"]})
    if drawn:  # of one document there is nothing to compare
        right.set_xscale("log", base=2)
        right.set_xticks(drawn, [str(n) for n in drawn])
    right.legend(loc="lower right")
    return figure
