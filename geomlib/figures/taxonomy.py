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

from geomlib.figures import base
from geomlib.stats import regime_shares, summary
from geomlib.taxonomy import REGIMES, VOTES

COLORS = {regime: look["color"] for regime, look in base.REGIMES.items()}
MARKERS = {regime: look["marker"] for regime, look in base.REGIMES.items()}


def simplex(tables: dict[str, pd.DataFrame]) -> Figure:
    """Shares of votes of all query heads in a triangle, a panel for each table of heads (`taxonomy.regimes`); lines where
    the regime changes."""
    rows = -(-len(tables) // 2)
    figure = plt.figure(figsize=(base.WIDTH, 3.7 * rows), layout="none")
    for i, (title, heads) in enumerate(tables.items(), 1):
        axes = figure.add_subplot(rows, 2, i, projection="ternary", ternary_sum=100)
        for regime in REGIMES:
            part = 100 * heads.loc[heads["regime"] == regime, ["vote_other", "vote_sink", "vote_current"]]
            label = f"{regime} ({len(part)})"
            axes.scatter(
                *part.to_numpy().T,
                s=13,
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
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3, columnspacing=0.6, handletextpad=0)
    figure.subplots_adjust(wspace=0.4, hspace=0.8, left=0.08, right=0.92, bottom=0.28 / rows, top=1 - 0.12 / rows)
    return figure


def regime_map(tables: dict[str, pd.DataFrame]) -> Figure:
    """Regimes by layer and query head, a panel for each table of heads."""
    grids = {t: h.pivot(index="head", columns="layer", values="regime") for t, h in tables.items()}
    codes = {t: g.replace({r: i for i, r in enumerate(REGIMES)}).astype(float) for t, g in grids.items()}
    figure, panels, _ = base.layer_maps(codes, cmap=ListedColormap(list(COLORS.values())), vmin=0, vmax=2)
    letters = dict(zip(REGIMES, "RMx", strict=True))  # also to be told apart without colour
    for axes, heads in zip(panels, tables.values(), strict=True):
        for row in heads.itertuples():
            axes.text(
                row.layer, row.head, letters[row.regime], ha="center", va="center", fontsize=base.SMALL, color="black"
            )
    handles = [Patch(color=COLORS[r], label=f"{r} ({letters[r]})") for r in REGIMES]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def shares(tables: dict[str, dict[str, pd.DataFrame]], seed: int = 0) -> Figure:
    """Share of heads of each regime with its document-bootstrap interval, a panel for each model and a marker for each corpus
    (`taxonomy` tables, model -> corpus -> table)."""
    figure, panels = base.panels(len(tables), 3.1, sharey=True)
    corpora = list(dict.fromkeys(corpus for found in tables.values() for corpus in found))
    looks = base.models(tables)
    for axes, (model, found) in zip(panels, tables.items(), strict=True):
        for i, corpus in enumerate(corpora):
            if corpus in found:
                rows = regime_shares(found[corpus], seed=seed)
                place = np.arange(len(rows)) + 0.16 * (i - (len(corpora) - 1) / 2)
                base.points(axes, place, rows, corpus, looks[model] | {"marker": base.MARKERS[i % 5], "linestyle": ""})
        axes.set_xticks(range(len(REGIMES)), list(REGIMES))
        axes.set(title=model, ylim=(0, 1))
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("share of the query heads")
    marks = [
        plt.Line2D([], [], marker=base.MARKERS[i % 5], color=base.GREY, linestyle="", label=corpus)
        for i, corpus in enumerate(corpora)
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
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
    figure, panels = base.panels(len(SIGNATURES), 2.5, 3)
    order = [r for r in REGIMES if (heads["regime"] == r).any()]
    for axes, (value, label) in zip(panels, SIGNATURES.items(), strict=True):
        sns.stripplot(
            heads, x="regime", y=value, order=order, hue="regime", hue_order=order, legend=False, size=2.8, alpha=0.65,
            jitter=0.25, palette=[COLORS[r] for r in order], ax=axes,
        )  # fmt: skip
        medians = heads.groupby("regime")[value].median()
        for i, regime in enumerate(order):
            axes.hlines(medians[regime], i - 0.35, i + 0.35, color="black", linewidth=2, zorder=5)
        if value.startswith("cos"):
            axes.axhline(0, color="grey", linewidth=1)
        axes.set(xlabel="", ylabel="")
        axes.set_title(label)
    return figure


def winners(weights: dict[str, torch.Tensor], tokens: Sequence[str]) -> Figure:
    """Attention weights of some heads on one text, and each query's source-winner; title -> (query, source)."""
    figure, panels = base.panels(len(weights), 4.6, 3, sharey=True)
    names = [repr(t)[1:-1].strip() or repr(t) for t in tokens]
    for axes, (title, alpha) in zip(panels, weights.items(), strict=True):
        shown = axes.imshow(alpha.numpy(), cmap="Greys", vmin=0, vmax=1)
        won = alpha.argmax(-1).numpy()
        for regime, here in _votes(won).items():
            look = {"color": COLORS[regime], "marker": MARKERS[regime], "edgecolors": "white", "linewidths": 0.4}
            axes.scatter(won[here], np.flatnonzero(here), s=20, label=regime, **look)
        axes.set_title(title.replace(": ", "\n"))
        axes.set_xlabel("source")
        axes.grid(False)
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    panels[0].set_ylabel("query")
    marks = [
        plt.Line2D([], [], marker=MARKERS[r], color=COLORS[r], linestyle="", label=f"winner: {v}")
        for r, v in zip(REGIMES, ("own token", "sink", "another"), strict=True)
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3)
    figure.colorbar(shown, ax=panels, label="attention weight", location="bottom", shrink=0.5, aspect=30)
    return figure


def _votes(won: np.ndarray) -> dict[str, np.ndarray]:
    queries = np.arange(len(won))
    current, sink = (won == queries) & (queries > 0), (won == 0) & (queries > 0)
    return {"Retriever": current, "Mixer": sink, "Reset": (queries > 0) & ~current & ~sink}


def votes_by_position(tables: dict[str, pd.DataFrame], seed: int = 0) -> Figure:
    """Shares of votes against query position, mean over heads and layers, a panel for each `taxonomy` table."""
    figure, panels = base.panels(len(tables), 3.2, sharey=True)
    for axes, (title, table) in zip(panels, tables.items(), strict=True):
        table = base.positions(table)
        for regime, vote in zip(REGIMES, VOTES, strict=True):
            rows = summary(table, vote, by=["position"], seed=seed)
            base.curve(axes, rows, f"{REGIMES[regime]} ({regime})", base.REGIMES[regime], x="position")
        axes.set(title=title, xlabel="query position (middle of its bin)", ylim=(0, 1))
    panels[0].set_ylabel("share of votes")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="vote for", loc="outside lower center", ncols=3)
    return figure


def stability(length: dict[str, pd.DataFrame], documents: dict[str, pd.DataFrame]) -> Figure:
    """Share of heads with the same label: from the first tokens of the windows against from all, and from n documents against
    from n others; title -> `taxonomy.stability_over_length`, `taxonomy.stability_over_documents`."""
    figure, (left, right) = base.panels(2, 3, sharey=True)
    for title, look in base.models(length).items():
        left.plot(length[title]["length"], length[title]["share"], label=title, **look)
        base.points(right, documents[title]["documents"], documents[title], title, look, y="share")
    left.set(xlabel="first tokens of each window", ylabel="share of heads with the same label", ylim=(0, 1.03))
    right.set(xlabel="documents on each side")
    drawn = sorted({n for rows in documents.values() for n in rows["documents"]})
    if drawn:  # of one document there is nothing to compare
        right.set_xscale("log", base=2)
        right.set_xticks(drawn, [str(n) for n in drawn])
    right.legend(loc="lower right")
    return figure
