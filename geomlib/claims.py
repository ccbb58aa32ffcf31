"""The paper's claims as rules over numbers. The rules of C1 and C2 were written before our tables were made, after the
means of one window had been seen, that of C7 was decided before any norm had been looked at; that of C3 follows from the theorems.
Those of C4, C5 and C6 were written with the sink's norms and cosines on the two embedded models known (the theory chapter prints them)
and one look at the final query of one window of each; those of C8 to C10 after a look at votes there, and tightened (C9: intervals,
two documents) after a try-out on three documents of one corpus, before any other corpus had been labelled. Those of C11 to C13 were
written before any head had been removed.
`direction` is no claim of the paper's and came after a look at the tables.

Verdicts: "holds", "holds in part", "does not hold", "not testable here".
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from geomlib import sparsify, taxonomy
from geomlib.errors import GeomlibError
from geomlib.stats import (
    LEVEL,
    REPLICATES,
    _bootstrap,
    _interval,
    advantage,
    agreement_interval,
    by_size,
    damage_difference,
    document_means,
    head_means,
    positive_share,
    regime_lead,
    regime_shares,
    summary,
    with_interval,
)
from geomlib.theory import THEOREMS

SMALLER = (3, 10)  # how many times smaller C4 has it: the paper's range
OFTEN = 1 / 3  # of the pairs (head, N) that C6 calls "often"
RETRIEVERS = (0.058, 0.172)  # shares of Retriever heads in the paper's models, for C8
SUBSTANTIAL = 0.6  # Cohen's kappa from which Landis and Koch (1977) call agreement substantial, for C9
BREAKS = 0.1  # damage of one head alone that "breaks the model" in C13: a tenth of the NLL
HIDDEN = 0.1  # of a head's damage that the mean of its regime stays below to hide it, for C13
SINGLE_METRICS = (
    "magnitude",
    "entropy",
    "entropy-reversed",
    "contribution",
    "gradient",
)  # orders by one number, for C12
CONSTANT = 0.2  # standard deviation over mean up to which C7 calls norms "about constant"
INTERMEDIATE = 32  # the largest N that counts as "sparse or intermediate" in C2: an eighth of the paper's largest N

STATEMENTS = {
    "C1": "top-N attention sets are more separable than random sets of the same size",
    "C2": "the advantage is largest at sparse and intermediate N",
    "C3": "the inversion bounds and the sink-aware certificates always hold",
    "C4": f"the sink's value norm is {SMALLER[0]}-{SMALLER[1]} times smaller",
    "C5": "the sink's direction is negatively aligned with the others",
    "C6": "the sink in the top N lowers F, often by half",
    "C7": "value norms other than the sink's are about constant",
    "C8": f"Retriever heads are a minority ({RETRIEVERS[0]:.1%}-{RETRIEVERS[1]:.1%} in the paper's models)",
    "C9": "which of Mixer and Reset dominates depends on the model and not on the corpus",
    "C10": "Mixers align with the sink and Retrievers with the current token",
    "C11": "the taxonomy is a useful order for removing heads at moderate retention",
    "C12": "the taxonomy does not beat single-metric orders under aggressive pruning",
    "C13": "single heads exist whose removal alone breaks the model, and regime means hide them",
}


@dataclass(frozen=True)
class Verdict:
    """A claim, what was measured, the rule that decides, and what it decides.

    `quantity` names the one number that stands for it in a scorecard, `value` with its 95 % interval `low` to `high` (None
    where there is none: a count, a single document, nothing measured). The rule may ask for more than this number.
    """

    claim: str
    statement: str
    rule: str
    measured: str
    verdict: str
    quantity: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None


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
    statement = STATEMENTS["C1"]
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
    number = ("smallest advantage over random sets", worst["mean"], worst["low"], worst["high"])
    return Verdict("C1", statement, rule, measured, _grade(good), *number)


def c2(table: pd.DataFrame) -> Verdict:
    """C2: the advantage is largest at sparse and intermediate N."""
    pairs = _attention_sets(table)
    rule = (
        f"N at which F(top) - F(random) peaks, in each bootstrap replicate over documents. At most {INTERMEDIATE} in 95 % "
        f"of them: holds; in the mean alone: holds in part; else: does not hold. Needs two documents or more and an N "
        f"above {INTERMEDIATE}."
    )
    statement = STATEMENTS["C2"]
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
    return Verdict("C2", statement, rule, measured, verdict, "N at the peak", peak, *_interval(peaks, LEVEL))


def c3(table: pd.DataFrame) -> Verdict:
    """C3: the inversion bounds and the sink-aware certificates always hold; of a `bounds` table."""
    statement = STATEMENTS["C3"]
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
    return Verdict("C3", statement, rule, measured, verdict, "violations of proved levels", broken)


def c4(table: pd.DataFrame) -> Verdict:
    """C4: the sink's value norm is 3-10 times smaller; of a `sinks` table."""
    low, high = SMALLER
    statement = STATEMENTS["C4"]
    rule = (
        f"Mean norm of the other values over the sink's, mean over documents, median over heads. It and its 95 % interval from "
        f"{low} to {high}: holds; its interval above 1: holds in part; else: does not hold. Needs two documents or more."
    )
    heads = _by_document(_source_0(table, "times_smaller"), "times_smaller")
    if len(heads) < 2:
        return Verdict("C4", statement, rule, "too few documents", "not testable here")
    each = heads.mean().to_numpy()
    middle = np.median(each)
    least, most = _interval(np.median(_bootstrap(heads.to_numpy(), REPLICATES, 0), axis=1), LEVEL)
    inside = ((each >= low) & (each <= high)).mean()
    measured = (
        f"median {middle:.2f} [{least:.2f}, {most:.2f}]; {inside:.0%} of the heads from {low} to {high}, "
        f"{(each < 1).mean():.0%} below 1"
    )
    good = low <= min(least, middle) and max(most, middle) <= high
    verdict = "holds" if good else "holds in part" if least > 1 else "does not hold"
    return Verdict("C4", statement, rule, measured, verdict, "times smaller, median head", middle, least, most)


def c5(table: pd.DataFrame) -> Verdict:
    """C5: the sink's direction is negatively aligned with the others; of a `sinks` table."""
    statement = STATEMENTS["C5"]
    rule = (
        "Share of the heads whose mean cosine of the sink's value with the others', mean over documents, is below 0. At least "
        "90 %: holds; it and its 95 % interval above one half: holds in part; else: does not hold. Needs two documents or more."
    )
    heads = _by_document(_source_0(table, "cosine_mean"), "cosine_mean")
    if len(heads) < 2:
        return Verdict("C5", statement, rule, "too few documents", "not testable here")
    drawn = _bootstrap(heads.to_numpy(), REPLICATES, 0)
    share, mean = (heads.mean() < 0).mean(), heads.mean().mean()
    (low, high), (least, most) = _interval((drawn < 0).mean(1), LEVEL), _interval(drawn.mean(1), LEVEL)
    measured = (
        f"{share:.1%} [{low:.1%}, {high:.1%}] of the heads below 0; mean cosine {mean:+.2f} [{least:+.2f}, {most:+.2f}]"
    )
    verdict = "holds" if share >= 0.9 else "holds in part" if min(low, share) > 0.5 else "does not hold"
    return Verdict("C5", statement, rule, measured, verdict, "heads with a negative mean cosine", share, low, high)


def sink_cost(table: pd.DataFrame, without: str = "sink") -> pd.DataFrame:
    """Rows of a `sink_effect` table whose sink is selected, N >= 2, with a column `cost` = f_without - f_with."""
    _columns(table, "sink_effect", "sink", "without", "size", "f_with", "f_without")
    part = table[(table["sink"] == "selected") & (table["without"] == without) & (table["size"] >= 2)]
    return part.assign(cost=part["f_without"] - part["f_with"])


def c6(table: pd.DataFrame) -> Verdict:
    """C6: the sink in the top-N lowers F_N, often by half; of a `sink_effect` table."""
    statement = STATEMENTS["C6"]
    rule = (
        "Over the operations that select the sink, for each N >= 2 that two documents or more have: F without the sink as a "
        "candidate less F with it, the sink's cost. Its 95 % interval above 0 at every N, and F at least halved for a third or "
        "more of the pairs (head, N), means over documents: holds; above 0 at some N: holds in part; else: does not hold."
    )
    part = sink_cost(table)
    part = part[part.groupby("size")["document"].transform("nunique") >= 2]
    if part.empty:
        return Verdict("C6", statement, rule, "too few documents or no sink selected", "not testable here")
    cost = summary(part, "cost").set_index("size")
    values = ("f_with", "f_without")
    pairs = [head_means(part, v).pivot(index="document", columns=["layer", "head", "size"], values=v) for v in values]
    heads = [p.mean() for p in pairs]
    halved = ((2 * heads[0] <= heads[1]) & (heads[1] > 0)).mean()
    drawn = [_bootstrap(p.to_numpy(), REPLICATES, 0) for p in pairs]  # the same draws of both
    low, high = _interval(((2 * drawn[0] <= drawn[1]) & (drawn[1] > 0)).mean(1), LEVEL)
    good = (cost["low"] > 0).to_numpy()
    means = [summary(part, v).set_index("size")["mean"] for v in values]

    def at(size):
        c = cost.loc[size]
        return (
            f"cost {c['mean']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}] at N = {size} "
            f"(F {means[0][size]:.2f} with, {means[1][size]:.2f} without)"
        )

    sizes = list(dict.fromkeys([cost.index.min(), cost["mean"].idxmax()]))
    measured = (
        f"lower at {good.sum()} of {len(good)} N; {', '.join(map(at, sizes))}; halved for {halved:.1%} "
        f"[{low:.1%}, {high:.1%}] of the pairs"
    )
    grade = _grade(good)
    verdict = "holds in part" if grade == "holds" and halved < OFTEN else grade
    return Verdict("C6", statement, rule, measured, verdict, "pairs (head, N) with F halved", halved, low, high)


def _columns(table: pd.DataFrame, analysis: str, *columns: str) -> None:
    missing = [c for c in ("document", "layer", "head", *columns) if c not in table]
    if missing or table.empty:
        why = f"has no column {missing[0]}" if missing else "is empty"
        raise GeomlibError(f"the table {why}: give one of the analysis {analysis!r}.")


def _source_0(table: pd.DataFrame, value: str) -> pd.DataFrame:
    _columns(table, "sinks", "source", value)
    return table[table["source"] == 0]


def _by_document(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Documents as rows, heads as columns."""
    if table.duplicated(["document", "layer", "head"]).any():
        raise GeomlibError("the table has a head twice in one document: give one study's table.")
    return table.pivot(index="document", columns=["layer", "head"], values=value)


def c7(table: pd.DataFrame) -> Verdict:
    """C7: non-sink value norms are about constant; of a `coherence` table."""
    statement = STATEMENTS["C7"]
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
    number = ("heads with about constant norms", share["mean"], share["low"], share["high"])
    return Verdict("C7", statement, rule, measured, verdict, *(number if documents > 1 else number[:2]))


def c8(table: pd.DataFrame) -> Verdict:
    """C8: Retriever heads are a minority; of a `taxonomy` table."""
    low, high = RETRIEVERS
    statement = STATEMENTS["C8"]
    rule = (
        f"Share of the heads labelled Retriever. Its 95 % interval below one half, and the share from {low:.1%} to {high:.1%}: "
        "holds; the interval below one half: holds in part; else: does not hold. Needs two documents or more."
    )
    _columns(table, "taxonomy", "queries", *taxonomy.VOTES)
    shares = regime_shares(table).set_index("regime")
    found = shares.loc["Retriever"]
    if found["documents"] < 2:
        return Verdict("C8", statement, rule, "too few documents", "not testable here")
    each = ", ".join(f"{r} {s['mean']:.2%} [{s['low']:.2%}, {s['high']:.2%}]" for r, s in shares.iterrows())
    minority = max(found["high"], found["mean"]) < 0.5
    verdict = "holds" if minority and low <= found["mean"] <= high else "holds in part" if minority else "does not hold"
    return Verdict("C8", statement, rule, each, verdict, "Retriever heads", found["mean"], found["low"], found["high"])


_C9 = (
    "C9",
    STATEMENTS["C9"],
    (
        "Of each model, on each corpus, the commoner of the two, the same in 95 % of the bootstrap replicates, else neither. One "
        f"of them, the same on all corpora, and Cohen's kappa of the heads' labels {SUBSTANTIAL} or more between every two "
        "(identical labels: 1): it does not depend on the corpus. Not the same for all models: it depends on the model. Both: "
        "holds; the former only, all that one model can show: holds in part; else: does not hold. Needs two corpora or more of "
        "each model and two documents or more of each."
    ),
)


def dominance(corpora: dict[str, pd.DataFrame]) -> dict | None:
    """What C9 needs of one model: of `taxonomy` tables, corpus -> table. None: too few corpora or documents.

    Returns:
        lead (the commoner of Mixer and Reset on each corpus, each name once), share with low and high (least agreement of the
        heads' labels between two corpora), kappa (the least).
    """
    for table in corpora.values():
        _columns(table, "taxonomy", "queries", *taxonomy.VOTES)
    if len(corpora) < 2 or any(t["document"].nunique() < 2 for t in corpora.values()):
        return None
    pairs = list(combinations(corpora.values(), 2))
    found = [taxonomy.agreement(taxonomy.regimes(a), taxonomy.regimes(b)) for a, b in pairs]
    least = min(range(len(pairs)), key=lambda i: found[i].share)
    low, high = agreement_interval(*pairs[least])
    kappa = min(1.0 if f.share == 1 else f.kappa for f in found)
    lead = sorted({regime_lead(t) for t in corpora.values()})
    return {"lead": lead, "share": float(found[least].share), "low": low, "high": high, "kappa": float(kappa)}


def c9(tables: dict[str, dict[str, pd.DataFrame]]) -> Verdict:
    """C9: which of Mixer and Reset dominates depends on the model and not on the corpus; of `taxonomy` tables, model ->
    corpus -> table."""
    return c9_of({model: dominance(corpora) for model, corpora in tables.items()})


def c9_of(models: dict[str, dict | None]) -> Verdict:
    """C9 of what `dominance` found for each model."""
    few = [model for model, found in models.items() if found is None]
    if few or not models:
        return Verdict(*_C9, f"{few[0]}: too few corpora or documents" if few else "no tables", "not testable here")
    parts = [
        f"{model}: {' or '.join(x['lead'])}; least agreement {x['share']:.1%} [{x['low']:.1%}, {x['high']:.1%}], "
        f"least kappa {x['kappa']:.3f}"
        for model, x in models.items()
    ]
    stable = all(
        len(x["lead"]) == 1 and "neither" not in x["lead"] and x["kappa"] >= SUBSTANTIAL for x in models.values()
    )
    commoner = {name for x in models.values() for name in x["lead"]}
    verdict = "does not hold" if not stable else "holds" if len(commoner) > 1 else "holds in part"
    least = min(models.values(), key=lambda x: x["share"])
    number = ("heads with the same label on two corpora, least", least["share"], least["low"], least["high"])
    return Verdict(*_C9, "; ".join(parts), verdict, *number)


def c10(table: pd.DataFrame) -> Verdict:
    """C10: Mixers align with the sink and Retrievers with the current token; of a `taxonomy` table."""
    statement = STATEMENTS["C10"]
    rule = (
        "Cosine of the output z with the sink's value (Mixers; over query bins that all see the sink) and with the current "
        "token's (Retrievers), mean over queries, then heads, then documents: above 0, and above that of all other heads with the "
        "whole 95 % interval of the difference. Both: holds; one: holds in part; none: does not hold. Needs two documents or "
        "more, and heads of both regimes."
    )
    _columns(table, "taxonomy", "queries", *taxonomy.VOTES, "cos_sink", "cos_current", "sees_sink")
    if table["document"].nunique() < 2:
        return Verdict("C10", statement, rule, "too few documents", "not testable here")
    regime = taxonomy.regimes(table).set_index(["layer", "head"])["regime"]
    good, parts, gaps = [], [], []
    for name, value in (("Mixer", "cos_sink"), ("Retriever", "cos_current")):
        part = table[table["sees_sink"] == 1] if value == "cos_sink" else table
        heads = _by_document(taxonomy.regimes(part, by=["document"]), value).dropna(axis=1)
        mine = (regime.reindex(heads.columns) == name).to_numpy()
        if mine.all() or not mine.any():
            return Verdict(
                "C10", statement, rule, f"{mine.sum()} of {len(mine)} heads are {name}s", "not testable here"
            )
        drawn = _bootstrap(heads.to_numpy(), REPLICATES, 0)
        low, high = _interval(drawn[:, mine].mean(1) - drawn[:, ~mine].mean(1), LEVEL)
        own, rest = heads.loc[:, mine].mean().mean(), heads.loc[:, ~mine].mean().mean()
        good.append(own > 0 and low > 0)
        target = "sink" if name == "Mixer" else "current token"
        gaps.append((f"cosine with the {target}, {name}s less other heads", own - rest, low, high))
        parts.append(
            f"{name} with the {target} {own:+.2f}, other heads {rest:+.2f}, difference [{low:+.2f}, {high:+.2f}]"
        )
    return Verdict("C10", statement, rule, "; ".join(parts), _grade(np.array(good)), *min(gaps, key=lambda g: g[1]))


def c11(curves: pd.DataFrame, order: str, entropy: str = "entropy") -> Verdict:
    """C11: the taxonomy is a useful order for removing heads at moderate retention; of a "retention" table of judged documents.

    Args:
        order: the order by regime and `entropy` that by entropy, each chosen on calibration documents (`sparsify.best`).
    """
    statement = STATEMENTS["C11"]
    baselines = ("random", "magnitude", entropy)
    rule = (
        "Damage of the order by regime that was best on the calibration documents at these retentions, less that of random, "
        "magnitude and entropy (its better direction there), on other documents, at each retention from 90 to 50 %. All of the "
        "95 % intervals below 0: holds; those against random at more than half of the retentions: holds in part; else: does not "
        "hold. Needs two documents or more."
    )
    part = curves[curves["retention"].between(*sparsify.MODERATE) | (curves["retention"] == 1)]
    gaps = _gaps(part, order, baselines)
    if not gaps or gaps["random"]["documents"].min() < 2:
        return Verdict("C11", statement, rule, "too few documents or retentions", "not testable here")
    below = {name: (gap["high"] < 0).to_numpy() for name, gap in gaps.items()}
    good, partly = all(b.all() for b in below.values()), below["random"].mean() > 0.5
    measured = f"{order}: " + "; ".join(
        f"less damage than {name} at {below[name].sum()} of {len(gap)} retentions ({_span(gap)})"
        for name, gap in gaps.items()
    )
    return Verdict(
        "C11", statement, rule, measured, "holds" if good else "holds in part" if partly else "does not hold",
        *_lowest(gaps, "random"),
    )  # fmt: skip


def c12(curves: pd.DataFrame, order: str) -> Verdict:
    """C12: the taxonomy does not beat single-metric orders under aggressive pruning; of a "retention" table of judged documents.

    Args:
        order: the order by regime that was best on calibration documents at these retentions (`sparsify.best`).
    """
    statement = STATEMENTS["C12"]
    names = [n for n in SINGLE_METRICS if n in set(curves["order"])]
    rule = (
        f"The order by regime that was best on the calibration documents at these retentions against {', '.join(SINGLE_METRICS)}, "
        "on other documents, at each retention from 40 to 10 %. It beats them where the 95 % interval of its damage less that of "
        "each of them lies below 0. At no retention: holds; at some: holds in part; at all: does not hold. Needs two documents or "
        "more."
    )
    gaps = _gaps(curves[curves["retention"].between(*sparsify.AGGRESSIVE) | (curves["retention"] == 1)], order, names)
    if not gaps or min(g["documents"].min() for g in gaps.values()) < 2:
        return Verdict("C12", statement, rule, "too few documents, orders or retentions", "not testable here")
    beats = np.all([(gap["high"] < 0).to_numpy() for gap in gaps.values()], axis=0)
    hardest = max(gaps, key=lambda name: gaps[name]["mean"].mean())
    measured = (
        f"{order} beats all {len(gaps)} at {beats.sum()} of {len(beats)} retentions; against {hardest}, the best of them, "
        f"its damage is higher by {_span(gaps[hardest])}"
    )
    return Verdict("C12", statement, rule, measured, _grade(~beats), *_lowest(gaps, hardest))


def _gaps(curves: pd.DataFrame, order: str, baselines) -> dict[str, pd.DataFrame]:
    """`damage_difference` to each baseline; nothing where there is no retention below 1."""
    _columns(curves.assign(layer=0, head=0), "retention", "order", "retention", "nll", "full_nll")
    if not (curves["retention"] < 1).any() or not len(baselines):
        return {}
    return {name: damage_difference(curves, order, name) for name in baselines}


def _lowest(gaps: dict[str, pd.DataFrame], other: str) -> tuple[str, float, float, float]:
    """The gap to an order at the lowest retention, as the number of a scorecard."""
    row = gaps[other].loc[gaps[other]["retention"].idxmin()]
    return f"damage less that of {other}, {row['retention']:.0%} kept", row["mean"], row["low"], row["high"]


def _span(gap: pd.DataFrame) -> str:
    each = [f"{r['mean']:+.2f} [{r['low']:+.2f}, {r['high']:+.2f}] at {r['retention']:.0%}" for _, r in gap.iterrows()]
    return " ... ".join(dict.fromkeys([each[-1], each[0]]))


def c13(scan: pd.DataFrame, regimes: pd.DataFrame) -> Verdict:
    """C13: single heads exist whose removal alone breaks the model, and regime means hide them; of a "scan" table and the table
    of heads of `taxonomy.regimes`."""
    statement = STATEMENTS["C13"]
    rule = (
        f"A head breaks the model if its damage alone is an outlier of the scan (modified z-score above {sparsify.OUTLIER}) and "
        f"{BREAKS:.0%} of the NLL or more with its whole 95 % interval; its regime hides it if the mean damage of the regime's "
        f"heads is below {HIDDEN:.0%} of its own. Some break and every one of these is hidden: holds; outliers exist, but none "
        "breaks or some are not hidden: holds in part; no outliers: does not hold. Needs two documents or more."
    )
    _columns(scan, "scan", "nll", "full_nll", "targets")
    if scan["document"].nunique() < 2:
        return Verdict("C13", statement, rule, "too few documents", "not testable here")
    heads = critical(scan, regimes)
    outliers = heads[heads["critical"]]
    breaking = outliers[outliers["low"] >= BREAKS]
    hidden = breaking["regime_mean"] < HIDDEN * breaking["damage"]
    worst = heads.iloc[0]
    measured = (
        f"{len(outliers)} outliers of {len(heads)} heads; {len(breaking)} break the model, {hidden.sum()} of them hidden; worst: layer "
        f"{worst['layer']}, head {worst['head']} ({worst['regime']}), damage {worst['damage']:.1%} [{worst['low']:.1%}, "
        f"{worst['high']:.1%}], mean of its regime {worst['regime_mean']:.2%}"
    )
    good = len(breaking) > 0 and hidden.all()
    return Verdict(
        "C13", statement, rule, measured, "holds" if good else "holds in part" if len(outliers) else "does not hold",
        "damage of the worst head alone", worst["damage"], worst["low"], worst["high"],
    )  # fmt: skip


def critical(scan: pd.DataFrame, regimes: pd.DataFrame) -> pd.DataFrame:
    """The heads of a scan, largest damage first (`sparsify.damages`), with document-bootstrap intervals and their regimes.

    Returns:
        Columns layer, head, damage, low, high, z, critical, regime, regime_mean (mean damage of the regime's heads).
    """
    heads = sparsify.damages(scan).merge(regimes[["layer", "head", "regime"]], on=["layer", "head"], how="left")
    sums = [
        scan.assign(sum=scan[c] * scan["targets"]).pivot(index="document", columns=["layer", "head"], values="sum")
        for c in ("nll", "full_nll")
    ]
    drawn = _bootstrap(sums[0].to_numpy(), REPLICATES, 0) / _bootstrap(sums[1].to_numpy(), REPLICATES, 0) - 1
    low, high = _interval(drawn, LEVEL) if len(sums[0]) > 1 else (np.nan, np.nan)
    limits = pd.DataFrame({"low": low, "high": high}, index=sums[0].columns).reset_index()
    heads = heads.merge(limits, on=["layer", "head"])
    heads["regime_mean"] = heads.groupby("regime")["damage"].transform("mean")
    return heads[["layer", "head", "damage", "low", "high", "z", "critical", "regime", "regime_mean"]]


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
    """How far the Gaussian model is from permuted directions and from the exact F, over N >= 2: rows (sink, compared with);
    columns mean and largest absolute difference of the mean F, and mean absolute difference of a single head's (mean over
    documents). `table` of the analysis "bounds", final query."""
    _needs_prediction(table)
    means = by_size(table)
    heads = table[table["size"] > 1].groupby(["level", "sink", "layer", "head", "size"])["f"].mean()
    rows = {}
    for sink, other in (("aware", "permuted"), ("agnostic", "permuted"), ("aware", "exact")):
        one, two = ("gaussian", sink), (other, "none" if other == "exact" else sink)
        gap, single = (means.loc[one] - means.loc[two]).abs(), (heads.loc[one] - heads.loc[two]).abs()
        rows[(sink, other)] = {"mean": gap.mean(), "largest": gap.max(), "single head": single.mean()}
    return pd.DataFrame(rows).T.rename_axis(["sink", "compared with"])


def prediction_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Exact F, Gaussian model and permuted directions, the sink apart, less each other: mean over heads with its interval
    over documents, as text; N as rows, from 2. `table` of the analysis "bounds", final query."""
    _needs_prediction(table)
    keys = ["document", "layer", "head", "size"]
    f = table[table["size"] > 1].set_index([*keys, "level", "sink"])["f"].unstack(["level", "sink"])
    parts = {"exact": f["exact", "none"], "gaussian": f["gaussian", "aware"], "permuted": f["permuted", "aware"]}
    rows = {}
    for one, other in (("exact", "gaussian"), ("exact", "permuted"), ("gaussian", "permuted")):
        means = summary((parts[one] - parts[other]).rename("f").dropna().reset_index(), "f", by=["size"])
        rows[f"{one} - {other}"] = with_interval(means).set_axis(means["size"])
    return pd.DataFrame(rows)


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
    for level, sink in (("global", "aware"), ("rowwise", "aware"), ("sketch_0", "none"), ("sketch_1", "agnostic"),
                        ("sketch_1", "aware"), ("combined", "aware")):  # fmt: skip
        least = share.loc[(share["level"] == level) & (share["sink"] == sink), "ratio"].min()
        word = "promises at least half" if least >= 0.5 else "does not"
        name = f"{level}, agnostic" if sink == "agnostic" else level
        lines.append(f"{name:18} {word} (least share {least:.2f})")
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
    """Does what the prediction misses go with selected sources being alike? Of `beyond_prediction`; for all layers and for
    each third of them."""
    layers = heads.index.get_level_values("layer")
    thirds = (part for _, part in heads.groupby(layers * 3 // (layers.max() + 1)))
    parts = zip(("all layers", "first third", "middle third", "last third"), (heads, *thirds), strict=False)
    return "\n".join(
        f"{name + ':':13} exact F less predicted F {part['beyond'].mean():+.2f}, correlation with within - across "
        f"{part['beyond'].corr(part['alike']):+.2f}"
        for name, part in parts
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
