"""The paper's claims as rules over numbers. The rules of C1 and C2 were written before our tables were made, after the
means of one window had been seen, that of C7 was decided before any norm had been looked at; that of C3 follows from the theorems.
`direction` is no claim of the paper's and came after a look at the tables.

Verdicts: "holds", "holds in part", "does not hold", "not testable here".
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from geomlib.errors import GeomlibError
from geomlib.stats import (
    LEVEL,
    REPLICATES,
    _bootstrap,
    _interval,
    advantage,
    by_size,
    document_means,
    head_means,
    positive_share,
    summary,
)
from geomlib.theory import THEOREMS

CONSTANT = 0.2  # standard deviation over mean up to which C7 calls norms "about constant"
INTERMEDIATE = 32  # the largest N that counts as "sparse or intermediate" in C2: an eighth of the paper's largest N


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
    overall = means.mean()
    sparse = overall[sizes <= INTERMEDIATE]
    measured = (
        f"peak at N = {peak} ({overall.max():+.2f}); best of N <= {INTERMEDIATE}: {sparse.max():+.2f} at "
        f"N = {sizes[int(np.argmax(sparse.to_numpy()))]}; peak at most {INTERMEDIATE} in {share:.1%} of the replicates"
    )
    verdict = "does not hold" if peak > INTERMEDIATE else "holds" if share >= 0.95 else "holds in part"
    return Verdict("C2", statement, rule, measured, verdict)


def c3(table: pd.DataFrame) -> Verdict:
    """C3: the inversion bounds and the sink-aware certificates always hold; of a `bounds` table."""
    statement = "the inversion bounds and the sink-aware certificates always hold"
    rule = (
        "A violation: an operation (head, query, N) whose precision, recall or F lies below what a level promises. None at a "
        "level that is proved without assumptions, and none at sink-aware constant_norm, the paper's model: holds; none at "
        "the former only: holds in part; else: does not hold."
    )
    operations = table["queries"] * (1 - table["holds"])
    proved = table["level"].isin(THEOREMS)
    model = (table["level"] == "constant_norm") & (table["sink"] == "aware")
    checked = int(table.loc[proved, "queries"].sum())
    broken, broken_model = round(operations[proved].sum()), round(operations[model].sum())
    share = broken_model / table.loc[model, "queries"].sum()
    measured = (
        f"{broken} violations in {checked:,} checks of proved levels; constant_norm: {broken_model:,} of "
        f"{int(table.loc[model, 'queries'].sum()):,} ({share:.2%})"
    )
    verdict = "does not hold" if broken else "holds in part" if broken_model else "holds"
    return Verdict("C3", statement, rule, measured, verdict)


def c7(table: pd.DataFrame) -> Verdict:
    """C7: non-sink value norms are about constant; of a `coherence` table."""
    statement = "value norms other than the sink's are about constant"
    rule = (
        f"A head's norms are about constant when their standard deviation is at most {CONSTANT} of their mean, over the "
        "sources of a window, mean over documents. So in at least 90 % of the heads: holds; in at least half: holds in part; "
        "else: does not hold."
    )
    spread = table.groupby(["layer", "head"])["norm_cv"].mean()
    share = positive_share(table.assign(below=CONSTANT - table["norm_cv"]), "below", by=["dim"]).iloc[0]
    documents = int(share["documents"])
    interval = f" [{share['low']:.0%}, {share['high']:.0%}]" if documents > 1 else ""
    measured = (
        f"{share['mean']:.0%}{interval} of the heads at most {CONSTANT}; median {spread.median():.2f}, from "
        f"{spread.min():.2f} to {spread.max():.2f}"
    )
    verdict = "holds" if share["mean"] >= 0.9 else "holds in part" if share["mean"] >= 0.5 else "does not hold"
    return Verdict("C7", statement, rule, measured, verdict)


def tightness(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """How much of the exact F each level gives: mean F over mean exact F, with its document-bootstrap interval.

    Args:
        table: of the analysis "bounds".

    Returns:
        Columns level, sink, size, ratio, low, high (NaN for a single document).
    """
    means = document_means(table, "f", by=["level", "sink", "size"])
    drawn = pd.DataFrame(_bootstrap(means.to_numpy(), REPLICATES, seed), columns=means.columns)
    ratio = (
        means.mean() / means.mean().loc[("exact", "none")].reindex(means.columns.get_level_values("size")).to_numpy()
    )
    per_size = drawn["exact"]["none"]
    drawn = drawn / per_size[drawn.columns.get_level_values("size")].to_numpy()
    low, high = _interval(drawn.to_numpy(), LEVEL) if len(means) > 1 else (np.nan, np.nan)
    share = ratio.rename("ratio").reset_index().assign(low=low, high=high)
    order = {level: i for i, level in enumerate(table["level"].drop_duplicates())}
    return share.sort_values("level", key=lambda c: c.map(order), kind="stable", ignore_index=True)


def agreement(table: pd.DataFrame) -> pd.DataFrame:
    """The Gaussian model (sink-aware) against the exact F, over heads (means over documents): columns size, exact,
    predicted, correlation. `table` of the analysis "bounds", final query."""
    _needs_prediction(table)
    heads = head_means(table[table["size"] > 1], "f", by=["level", "sink", "size"])
    heads = heads.groupby(["level", "sink", "size", "layer", "head"])["f"].mean()
    pairs = pd.DataFrame({"exact": heads.loc[("exact", "none")], "predicted": heads.loc[("gaussian", "aware")]})
    groups = pairs.groupby("size")
    correlation = groups.apply(lambda g: g["exact"].corr(g["predicted"]))
    return groups.mean().assign(correlation=correlation).reset_index()


def _needs_prediction(table: pd.DataFrame) -> None:
    if not (table["level"] == "gaussian").any():
        raise GeomlibError("the table has no Gaussian prediction: measure the bounds with queries = 'last'.")


def prediction_gaps(table: pd.DataFrame) -> pd.DataFrame:
    """How far the Gaussian model is from permuted directions and from the exact F: rows (sink, compared with), columns
    mean and largest absolute difference of the mean F over N >= 2. `table` of the analysis "bounds", final query."""
    _needs_prediction(table)
    means = by_size(table)
    rows = {}
    for sink, other in (("aware", "permuted"), ("agnostic", "permuted"), ("aware", "exact")):
        gap = (means.loc[("gaussian", sink)] - means.loc[(other, "none" if other == "exact" else sink)]).abs()
        rows[(sink, other)] = {"mean": gap.mean(), "largest": gap.max()}
    return pd.DataFrame(rows).T.rename_axis(["sink", "compared with"])


def beyond_prediction(bounds: pd.DataFrame, selection: pd.DataFrame, size: int) -> pd.DataFrame:
    """Per head (mean over documents): exact F less predicted F at one N, and how much more alike the selected are among
    themselves than with the rest. Index (layer, head), columns beyond, alike."""
    part = bounds[bounds["size"] == size].groupby(["level", "sink", "layer", "head"])["f"].mean()
    cosines = selection[selection["size"] == size].groupby(["layer", "head"])[["within", "across"]].mean()
    beyond = part.loc[("exact", "none")] - part.loc[("gaussian", "aware")]
    return pd.DataFrame({"beyond": beyond, "alike": cosines["within"] - cosines["across"]})


def half(table: pd.DataFrame, sizes: tuple[int, ...] = (2, 4, 8)) -> str:
    """Which levels promise at least half of the exact F at each of these N? A line each; of a `bounds` table."""
    share = tightness(table[table["size"].isin(sizes)])
    lines = []
    for level, sink in (("global", "aware"), ("rowwise", "aware"), ("sketch_0", "none"), ("sketch_1", "aware"),
                        ("combined", "aware")):  # fmt: skip
        least = share.loc[(share["level"] == level) & (share["sink"] == sink), "ratio"].min()
        word = "promises at least half" if least >= 0.5 else "does not"
        lines.append(f"{level:9} {word} (least share {least:.2f})")
    return "\n".join(lines)


def assumptions(table: pd.DataFrame) -> str:
    """What the theory assumes about directions and the sink, counted over heads; of a `coherence` table."""
    heads = table.groupby(["layer", "head"]).mean(numeric_only=True)
    independent = heads["dim"].iloc[0] ** -0.5
    return (
        f"cosines spread more than 1/sqrt(d) = {independent:.3f}: {(heads['mu_sd'] > independent).mean():.0%} of the heads\n"
        f"the sink is shorter than the others' mean: {(heads['norm_ratio'] < 1).mean():.0%}\n"
        f"it points away from them on average: {(heads['kappa_mean'] < 0).mean():.0%}"
    )


def alikeness(heads: pd.DataFrame) -> str:
    """Does what the prediction misses go with selected sources being alike? Of `beyond_prediction`."""
    layers = heads.index.get_level_values("layer")
    thirds = heads["beyond"].groupby(layers * 3 // (layers.max() + 1)).mean()
    parts = ", ".join(f"{x:+.2f}" for x in thirds)
    return (
        f"exact F less predicted F in the first, middle and last third of the layers: {parts}\n"
        f"its correlation over heads with within - across: {heads['beyond'].corr(heads['alike']):.2f}"
    )


def direction(table: pd.DataFrame) -> str:
    """Do the real directions help to separate, given the lengths? One sentence per distance, against the magnitude control.

    Each (N >= 2, ranking) counts as helped or hurt where its 95 % interval lies on one side of 0.
    """
    pairs = advantage(table[table["size"] >= 2], over="magnitude")
    sentences = []
    for distance, part in pairs.groupby("distance"):
        effect = summary(part, "advantage", by=["ranking", "size"])
        helped, hurt, all_ = (effect["low"] > 0).sum(), (effect["high"] < 0).sum(), len(effect)
        if effect["documents"].min() < 2:
            word = "cannot be judged on one document"
        elif all_ in (helped, hurt):
            word = "help at every N" if helped else "hurt at every N"
        else:
            word = f"help in {helped} of {all_} cases (N and ranking) and hurt in {hurt}"
        span = f"{effect['mean'].min():+.2f} to {effect['mean'].max():+.2f}"
        sentences.append(f"{distance}: the real directions {word} ({span})")
    return "\n".join(sentences)


def _grade(good: np.ndarray) -> str:
    return "holds" if good.all() else "holds in part" if good.any() else "does not hold"
