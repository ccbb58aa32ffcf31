"""The book's look, and what its figures share."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns


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


def doubling(axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), [f"{n:.0f}" for n in sorted(sizes)])
    axes.set_xlabel("N (selected sources)")


def positions(table: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `position`, the middle of each bin of query positions."""
    return table.assign(position=(table["query_from"] + table["query_to"]) / 2)
