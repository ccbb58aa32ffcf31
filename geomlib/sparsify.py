"""Which heads can go? Scores of heads, orders of removal, and what removing them costs.

Removing a query head is zeroing its output before the output projection (`attention.intervene`). At retention q the first heads
of an order go until ceil(q * heads) are left. Damage = NLL(sparsified) / NLL(full) - 1, on documents that the order has not seen.
Chapter 5 of the book.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from geomlib import taxonomy
from geomlib.attention import _hf, intervene, output_projections, refuse_ragged
from geomlib.errors import GeomlibError
from geomlib.nll import input_ids, mean, nll, score
from geomlib.resume import Recording, head_columns, resumes

__all__ = [
    "Order", "all_orders", "best", "by_score", "damages", "grouped", "guarded", "head_scan", "importance", "layers_of", "nll",
    "random_order", "recomputed", "regime_orders", "retention_curve", "scores",
]  # fmt: skip

RETENTIONS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
RANDOM_SEEDS = 5
REGIME_ORDERS = tuple("-".join(order).lower() for order in itertools.permutations(taxonomy.REGIMES))
METRICS = ("magnitude", "contribution", "gradient", "entropy", "entropy-reversed", "damage")  # orders by one number
MODERATE, AGGRESSIVE = (0.5, 0.9), (0.1, 0.4)  # from and to which retention, in claims C11 and C12
OUTLIER = 3.5  # modified z-score from which Iglewicz and Hoaglin (1993) call a value an outlier

_HEAD = {
    "document": ("string", "id of the document the window was taken from"),
    "layer": ("int16", "layer, from 0"),
    "head": ("int16", "query head, from 0"),
}
_SCORED = {
    "nll": ("float64", "mean negative log likelihood of the window's targets, in nats"),
    "full_nll": ("float64", "the same of the whole model"),
    "targets": ("int32", "tokens scored: each token but the first, once, given all before it"),
}
IMPORTANCE_SCHEMA: dict[str, tuple[str, str]] = {
    **_HEAD,
    "magnitude": ("float64", "Frobenius norm of the head's columns of the output projection"),
    "contribution": ("float64", "mean norm of the head's output after the projection, W_O^h z, queries from the second on"),
    "gradient": ("float64", "mean over queries of |g . z|, z the head's output, g the gradient of the window's summed NLL by it"),
}  # fmt: skip
SCAN_SCHEMA: dict[str, tuple[str, str]] = {**_HEAD, **_SCORED}
RETENTION_SCHEMA: dict[str, tuple[str, str]] = {
    "document": _HEAD["document"],
    "order": ("string", "name of the order of removal"),
    "retention": ("float64", "share of the units (query heads or KV groups) that stays, as it was asked for"),
    "heads": ("int32", "query heads that stay"),
    **_SCORED,
}


# --- what each head weighs --------------------------------------------------------------------------------------------


def importance(model, windows: Sequence, progress: bool | Callable = False) -> pd.DataFrame:
    """Baseline scores of every query head on each window (columns: `IMPORTANCE_SCHEMA`), in one pass forward and back.

    Source: magnitude and contribution, chapter 5 of the book; gradient, Michel et al. 2019, the first-order change of the NLL,
    `|g . z|` of each query by itself.
    """
    hf = _hf(model)
    refuse_ragged(hf)
    projections = [p for _, p in output_projections(model)]
    heads = hf.config.get_text_config().num_attention_heads
    parts = []
    for window in _bar(windows, progress):
        inputs: dict[int, torch.Tensor] = {}

        def keep(projection, args, inputs=inputs):
            z = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            inputs[id(projection)] = z
            return (z, *args[1:])

        hooks = [p.register_forward_pre_hook(keep) for p in projections]
        try:
            with torch.enable_grad():
                losses = score(hf, input_ids(hf, window))
                entered = [inputs[id(p)] for p in projections]
                pulls = torch.autograd.grad(losses.sum(), entered)  # nothing is left on the parameters
        finally:
            for hook in hooks:
                hook.remove()
        mean(losses.detach())
        for layer, (projection, pull, z) in enumerate(zip(projections, pulls, entered, strict=True)):
            pull, z = (x.detach().flatten(0, -2).unflatten(-1, (heads, -1)) for x in (pull, z))  # (query, head, dim)
            columns = head_columns(projection, heads)
            written = z[1:].to(columns)
            sizes = torch.stack([(written[:, h] @ columns[h]).norm(dim=-1).double().mean() for h in range(heads)])
            taylor = torch.linalg.vecdot(pull.double(), z.double()).abs().mean(0)
            values = [columns.double().flatten(1).norm(dim=1), sizes, taylor]
            parts.append(
                pd.DataFrame(
                    {"document": window.document, "layer": layer, "head": range(heads)}
                    | {
                        n: v.detach().cpu().numpy()
                        for n, v in zip(("magnitude", "contribution", "gradient"), values, strict=True)
                    }
                )
            )
    return pd.concat(parts, ignore_index=True).astype({"layer": "int16", "head": "int16"})


def _bar(items: Sequence, progress: bool | Callable):
    """The items, with a bar, or with a call of `progress` (with the share that is done) after each."""
    if not callable(progress):
        yield from tqdm(items, disable=None if progress else True)
        return
    for item in items:
        yield item
        progress(1 / len(items))


# --- the single-head scan ---------------------------------------------------------------------------------------------


def head_scan(
    model, windows: Sequence, heads: Sequence | None = None, progress: bool | Callable = False
) -> pd.DataFrame:
    """NLL of each window without one query head, for each head in turn (columns: `SCAN_SCHEMA`).

    What lies before the head's layer does not change, so it runs once per window: each pass resumes at that layer, whose
    attention output is the recorded one less what the head adds. Before the first window the model is asked whether it can be
    resumed so (against `intervene`, on a short input); if not, whole passes are made.

    Args:
        heads: pairs (layer, query head); None: all.
        progress: show a bar, or be called with the share of the work that is done after each head.
    """
    hf = _hf(model)
    refuse_ragged(hf)
    config = hf.config.get_text_config()
    every = list(itertools.product(range(config.num_hidden_layers), range(config.num_attention_heads)))
    heads = every if heads is None else [(int(layer), int(head)) for layer, head in heads]
    if not heads or not set(heads) <= set(every):
        raise GeomlibError(f"the model has {len(every)} query heads, from (0, 0) to {every[-1]}: give pairs of these.")
    mask = torch.ones(config.num_hidden_layers, config.num_attention_heads)
    resumed = resumes(hf)
    rows = []
    work = [(w, *h) for w in windows for h in sorted(heads)]
    recording = window_of = None
    with torch.no_grad():
        for window, layer, head in _bar(work, progress):
            if window is not window_of:
                window_of, ids = window, input_ids(hf, window)
                recording = Recording(hf, ids) if resumed else None
                full = mean(recording.scores if resumed else score(hf, ids))
            if resumed:
                losses = recording.without(layer, head)
            else:
                mask[layer, head] = 0
                with intervene(model, head_mask=mask):
                    losses = score(hf, ids)
                mask[layer, head] = 1
            rows.append((window.document, layer, head, mean(losses), full, ids.shape[1] - 1))
    table = pd.DataFrame(rows, columns=list(SCAN_SCHEMA))
    return table.astype({c: t for c, (t, _) in SCAN_SCHEMA.items() if t != "string"})


def damages(scan: pd.DataFrame) -> pd.DataFrame:
    """The damage of each head alone over all documents of a scan, the largest first.

    Returns:
        Columns layer, head, damage, z: the modified z-score 0.6745 (damage - median) / MAD over heads, and critical: z above
        3.5, an outlier by the rule of Iglewicz and Hoaglin (1993).
    """
    weighted = scan.assign(nll=scan["nll"] * scan["targets"], full_nll=scan["full_nll"] * scan["targets"])
    sums = weighted.groupby(["layer", "head"])[["nll", "full_nll"]].sum()
    found = (sums["nll"] / sums["full_nll"] - 1).rename("damage").reset_index()
    off = found["damage"] - found["damage"].median()
    spread = off.abs().median()
    z = 0.6745 * off / spread if spread > 0 else off * 0 + np.where(off > 0, np.inf, 0)
    found = found.assign(z=z, critical=z > OUTLIER)
    return found.sort_values(["damage", "layer", "head"], ascending=[False, True, True], ignore_index=True)


# --- orders of removal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """An order in which heads go.

    Attributes:
        name: what it goes by.
        heads: all query heads as (layer, head), the first to go first.
        documents: of the windows that it was made from; it must not be judged on these.
        group: query heads that go together: 1, or those of a KV head, which then stand side by side in `heads`.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    documents: tuple[str, ...] = ()
    group: int = 1

    def removed(self, retention: float) -> tuple[tuple[int, int], ...]:
        """The query heads that go at a retention: all but ceil(retention * units)."""
        if not 0 <= retention <= 1:
            raise GeomlibError(f"retention = {retention!r} is not usable: give a share from 0 to 1, such as 0.8.")
        units = len(self.heads) // self.group
        kept = math.ceil(round(retention * units, 9))  # 0.55 * 100 is a little over 55 in floating point
        return self.heads[: (units - kept) * self.group]

    def mask(self, retention: float) -> torch.Tensor:
        """The head mask for `intervene` at a retention, (layer, query head)."""
        layers, heads = (max(x) + 1 for x in zip(*self.heads, strict=True))
        mask = torch.ones(layers, heads)
        for layer, head in self.removed(retention):
            mask[layer, head] = 0
        return mask


def by_score(name: str, scores: pd.DataFrame, column: str, documents=(), ascending: bool = True) -> Order:
    """Heads by one column, the lowest first (or the highest); columns layer, head and that one. Equal scores: lower layers and
    heads first."""
    ranked = scores.sort_values([column, "layer", "head"], ascending=[ascending, True, True])
    return Order(name, _pairs(ranked), tuple(documents))


def random_order(heads: pd.DataFrame, seed: int) -> Order:
    """A random order of the heads (columns layer, head)."""
    ranked = heads.sort_values(["layer", "head"]).sample(frac=1, random_state=np.random.default_rng(seed))
    return Order(f"random {seed}", _pairs(ranked))


def regime_orders(heads: pd.DataFrame, documents=()) -> list[Order]:
    """The six orders by regime: which goes first, then second; inside a regime the smallest mean contribution first.

    Args:
        heads: columns layer, head, regime, contribution (`scores`).
    """
    orders = []
    for sequence in itertools.permutations(taxonomy.REGIMES):
        ranked = heads.assign(turn=heads["regime"].map(sequence.index))
        ranked = ranked.sort_values(["turn", "contribution", "layer", "head"])
        orders.append(Order("-".join(sequence).lower(), _pairs(ranked), tuple(documents)))
    return orders


def _pairs(table: pd.DataFrame) -> tuple[tuple[int, int], ...]:
    return tuple(zip(table["layer"].astype(int).tolist(), table["head"].astype(int).tolist(), strict=True))


def all_orders(
    votes: pd.DataFrame, importance: pd.DataFrame, scan: pd.DataFrame | None = None, seeds: int = RANDOM_SEEDS
) -> dict[str, Order]:
    """Every order of the book's chapter 5 by name, from the tables of one study's windows.

    Args:
        votes, importance, scan: tables of the analyses "taxonomy", "importance" and "scan"; without the scan there is no
            order by single-head damage.
        seeds: number of random orders.

    Of attention entropy both directions are given, since which heads it makes dispensable is a matter of belief: "entropy"
    removes the most diffuse first, "entropy-reversed" the most focused.
    """
    documents = tuple(sorted(importance["document"].unique()))
    heads = scores(votes, importance, scan)
    orders = [random_order(heads, seed) for seed in range(seeds)]
    orders += [by_score(c, heads, c, documents) for c in ("magnitude", "contribution", "gradient")]
    orders.append(by_score("entropy", heads, "entropy", documents, ascending=False))
    orders.append(by_score("entropy-reversed", heads, "entropy", documents))
    if scan is not None:
        orders.append(by_score("damage", heads, "damage", documents))
    return {order.name: order for order in [*orders, *regime_orders(heads, documents)]}


def scores(votes: pd.DataFrame, importance: pd.DataFrame, scan: pd.DataFrame | None = None) -> pd.DataFrame:
    """All that is known of each head, from the same tables: columns layer, head, regime, magnitude, contribution, gradient,
    entropy (means over documents), and damage if there is a scan."""
    heads = taxonomy.regimes(votes)[["layer", "head", "regime", "entropy"]]
    heads = heads.merge(
        importance.groupby(["layer", "head"], as_index=False)[list(METRICS[:3])].mean(), on=["layer", "head"]
    )
    return heads if scan is None else heads.merge(damages(scan)[["layer", "head", "damage"]], on=["layer", "head"])


def guarded(order: Order, critical: Sequence[tuple[int, int]]) -> Order:
    """The same order with the critical heads last, so that they stay as long as anything does."""
    keep = {(int(layer), int(head)) for layer, head in critical}
    if order.group > 1:
        raise GeomlibError("a guarded order is one of query heads: guard it before grouping it.")
    heads = [h for h in order.heads if h not in keep] + [h for h in order.heads if h in keep]
    return replace(order, name=f"{order.name}, guarded", heads=tuple(heads))


def layers_of(order: Order, seed: int) -> Order:
    """A control: at each step a head goes from the same layer as in the order, but a random one. What does as well as the order
    knows all that the order knew about heads: their layers."""
    rng = np.random.default_rng(seed)
    layers = [layer for layer, _ in order.heads]
    left = {x: iter(rng.permutation([h for at, h in order.heads if at == x]).tolist()) for x in sorted(set(layers))}
    if order.group > 1:
        raise GeomlibError("the layers of an order are those of query heads: take them before grouping it.")
    heads = tuple((layer, next(left[layer])) for layer in layers)
    return replace(order, name=f"layers of {order.name} {seed}", heads=heads)


def grouped(order: Order, group: int) -> Order:
    """The order of whole KV groups (`group` query heads that share a KV head): by the mean place of their heads."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, (layer, head) in enumerate(order.heads):
        places.setdefault((layer, head // group), []).append(place)
    if any(len(p) != group for p in places.values()):
        raise GeomlibError(f"the heads of a layer do not divide into groups of {group}: give query heads per KV head.")
    units = sorted(places, key=lambda unit: (sum(places[unit]), unit))
    heads = [(layer, unit * group + i) for layer, unit in units for i in range(group)]
    return replace(order, name=f"{order.name}, KV groups", heads=tuple(heads), group=group)


# --- curves -----------------------------------------------------------------------------------------------------------


def retention_curve(
    model,
    windows: Sequence,
    orders: Order | Sequence[Order],
    retentions: Sequence[float] = RETENTIONS,
    progress: bool | Callable = False,
    in_sample: bool = False,
) -> pd.DataFrame:
    """NLL of each window with the heads of each order removed down to each retention (columns: `RETENTION_SCHEMA`).

    Args:
        in_sample: allow windows of documents that an order was made from, to choose among orders; not to judge them.

    Retention 1, the whole model, needs no pass and is always in the table.
    """
    orders = [orders] if isinstance(orders, Order) else list(orders)
    check_orders(model, orders, [w.document for w in windows], in_sample)
    hf = _hf(model)
    rows, full = [], {}
    work = [(w, o, q) for w in windows for o in orders for q in sorted({1.0, *retentions}, reverse=True)]
    with torch.no_grad():
        for window, order, retention in _bar(work, progress):
            ids = input_ids(hf, window)
            place = (window.document, window.start)
            if place not in full:
                full[place] = mean(score(hf, ids))
            removed = order.removed(retention)
            value = full[place]
            if removed:
                with intervene(model, head_mask=order.mask(retention)):
                    value = mean(score(hf, ids))
            kept = len(order.heads) - len(removed)
            rows.append((window.document, order.name, retention, kept, value, full[place], ids.shape[1] - 1))
    table = pd.DataFrame(rows, columns=list(RETENTION_SCHEMA))
    return table.astype({c: t for c, (t, _) in RETENTION_SCHEMA.items() if t != "string"})


def best(curves: pd.DataFrame, names: Sequence[str], span: tuple[float, float]) -> str:
    """Which of these orders has the least damage, mean over the retentions from span[0] to span[1] (over all, if none was
    measured there)."""
    part = curves[curves["order"].isin(list(names))]
    part = part[part["retention"] < 1] if (part["retention"] < 1).any() else part
    inside = part["retention"].between(*span)
    part = part[inside] if inside.any() else part
    if part.empty:
        raise GeomlibError(f"the curves have none of the orders {', '.join(names)}: give some that were measured.")
    part = part.assign(nll=part["nll"] * part["targets"], full_nll=part["full_nll"] * part["targets"])
    sums = part.groupby(["order", "retention"])[["nll", "full_nll"]].sum()
    return (sums["nll"] / sums["full_nll"]).groupby("order").mean().idxmin()


def check_orders(model, orders: Sequence[Order], documents: Sequence[str], in_sample: bool) -> None:
    """Refuse orders of another model's heads, of one name, or that have seen a document they would be judged on."""
    if not orders or len({o.name for o in orders}) < len(orders):
        raise GeomlibError("give one order or more, each under a name of its own.")
    config = _hf(model).config.get_text_config()
    every = set(itertools.product(range(config.num_hidden_layers), range(config.num_attention_heads)))
    for order in orders:
        if len(order.heads) != len(every) or set(order.heads) != every:
            raise GeomlibError(f"the order {order.name} is not one of this model's {len(every)} query heads.")
        seen = sorted(set(order.documents) & set(documents))
        if seen and not in_sample:
            raise GeomlibError(
                f"the order {order.name} was made from {seen[0]}, which is among the documents to judge it on: take others."
            )


def recomputed(
    model, windows: Sequence, table: pd.DataFrame, count: int, seed: int = 0, orders: Sequence[Order] = ()
) -> pd.DataFrame:
    """Measure `count` random rows of a scan, or of retention curves given their orders, once more: a check of stored tables.

    Returns:
        These rows, with columns again (the NLL now) and difference.
    """
    names = {w.document: w for w in windows}
    named = {o.name: o for o in orders}
    rows = table[table["document"].isin(list(names))].sample(count, random_state=np.random.default_rng(seed))
    again = []
    for row in rows.itertuples():
        one = [names[row.document]]
        if named:
            found = retention_curve(model, one, named[row.order], [row.retention], in_sample=True)
            again.append(found.loc[found["retention"] == row.retention, "nll"].iloc[0])
        else:
            again.append(head_scan(model, one, [(row.layer, row.head)])["nll"].iloc[0])
    return rows.assign(again=again, difference=np.array(again) - rows["nll"])
