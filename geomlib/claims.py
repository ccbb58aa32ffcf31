"""The paper's claims as rules over numbers. Each rule was fixed before looking at ours, and is shown beside its number.

Verdicts: "holds", "holds in part", "does not hold", "not testable here".
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from geomlib.stats import REPLICATES, _bootstrap, advantage, document_means, positive_share, summary

INTERMEDIATE = 32  # the largest N that counts as "sparse or intermediate" in C2: an eighth of the grid's largest N


@dataclass(frozen=True)
class Verdict:
    """A claim, what was measured, the rule that decides, and what it decides."""

    claim: str
    statement: str
    rule: str
    measured: str
    verdict: str


def _attention_sets(table: pd.DataFrame) -> pd.DataFrame:
    """Advantage over random sets, N >= 2 (N = 1 says nothing), attention ranking and Euclidean distance."""
    pairs = advantage(table, over="random")
    return pairs[(pairs["ranking"] == "attention") & (pairs["distance"] == "euclidean") & (pairs["size"] >= 2)]


def c1(table: pd.DataFrame) -> Verdict:
    """C1: top-N attention sets are more separable than random sets of the same size."""
    pairs = _attention_sets(table)
    rule = (
        "For each N >= 2: the 95 % interval of F(top) - F(random) lies above 0 and more than half of the heads are above 0. "
        "True for every N: holds; for some: holds in part; for none: does not hold. Needs two documents or more."
    )
    statement = "top-N attention sets are more separable than random sets of the same size"
    if pairs["document"].nunique() < 2:
        return Verdict("C1", statement, rule, "too few documents or sizes", "not testable here")
    gain, share = summary(pairs, "advantage"), positive_share(pairs)
    good = (gain["low"] > 0).to_numpy() & (share["mean"] > 0.5).to_numpy()
    worst = gain.loc[gain["mean"].idxmin()]
    measured = (
        f"true for {good.sum()} of {len(good)} N; smallest advantage {worst['mean']:+.3f} "
        f"[{worst['low']:+.3f}, {worst['high']:+.3f}] at N = {worst['size']:.0f}; "
        f"heads above 0: {share['mean'].min():.0%} to {share['mean'].max():.0%}"
    )
    return Verdict("C1", statement, rule, measured, _grade(good))


def c2(table: pd.DataFrame) -> Verdict:
    """C2: the advantage is largest at sparse and intermediate N."""
    pairs = _attention_sets(table)
    rule = (
        f"N at which F(top) - F(random) peaks, in each bootstrap replicate over documents. At most {INTERMEDIATE} in 95 % "
        f"of them: holds; in the mean alone: holds in part; else: does not hold. Needs two documents or more and an N "
        f"above {INTERMEDIATE}."
    )
    statement = "the advantage is largest at sparse and intermediate N"
    if pairs["document"].nunique() < 2 or pairs["size"].max() <= INTERMEDIATE:
        return Verdict("C2", statement, rule, "too few documents or sizes", "not testable here")
    means = document_means(pairs, "advantage")
    sizes = means.columns.to_numpy().astype(int)
    peak = sizes[int(np.argmax(means.mean().to_numpy()))]
    peaks = sizes[np.argmax(_bootstrap(means.to_numpy(), REPLICATES, 0), axis=1)]
    share = (peaks <= INTERMEDIATE).mean()
    measured = f"peak at N = {peak}; at most {INTERMEDIATE} in {share:.1%} of the replicates"
    verdict = "does not hold" if peak > INTERMEDIATE else "holds" if share >= 0.95 else "holds in part"
    return Verdict("C2", statement, rule, measured, verdict)


def direction(table: pd.DataFrame) -> str:
    """Do the real directions help to separate, given the lengths? One sentence per distance, against the magnitude control.

    "help" or "hurt" only where the 95 % interval lies on one side of 0 for every N >= 2 and every ranking.
    """
    pairs = advantage(table[table["size"] >= 2], over="magnitude")
    sentences = []
    for distance, part in pairs.groupby("distance"):
        effect = summary(part, "advantage", by=["ranking", "size"])
        if effect["documents"].min() < 2:
            word = "cannot be judged on one document"
        elif (effect["low"] > 0).all():
            word = "help at every N"
        elif (effect["high"] < 0).all():
            word = "hurt at every N"
        else:
            word = "help at some N and not at others"
        span = f"{effect['mean'].min():+.2f} to {effect['mean'].max():+.2f}"
        sentences.append(f"{distance}: the real directions {word} ({span})")
    return "\n".join(sentences)


def _grade(good: np.ndarray) -> str:
    return "holds" if good.all() else "holds in part" if good.any() else "does not hold"
