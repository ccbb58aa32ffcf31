"""Removing heads for good: a copy of the model without them, and a folder to load it from.

Where all query heads of a KV head go, the rows and columns of the projections go with them: less memory, less time. Where only
some go, their columns of the output projection become zero, which changes what is computed and not how long it takes.
Chapter 5 of the book.
"""

import copy
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from geomlib import sparsify
from geomlib.attention import _hf, intervene, output_projections, short_input
from geomlib.errors import GeomlibError
from geomlib.models import _quiet, load_model
from geomlib.nll import evaluating, input_ids

# The key in config.json: {"removed": [[layer, head], ...], "cut": {layer: [query heads left]}, "projection": name}.
RECORD = "geomlib_pruned"
_SAME = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest logit


@torch.no_grad()
def prune(model, heads: Sequence[tuple[int, int]], cut: bool = True):
    """A copy of the model without these query heads; its logits are those of the model with them zeroed (`intervene`).

    Args:
        model: a geomlib `Model`, or transformers' own causal language model; the copy is of the same kind.
        heads: pairs (layer, query head).
        cut: False: only zero columns, so that every layer keeps its shape and plain `transformers` loads the model.

    The projections get smaller where whole KV groups go and the copy's logits prove that the architecture bears it; elsewhere the
    output projection's columns are zeroed. A layer that loses all its groups keeps one query head and its KV head with zero
    columns, so that caches and tools still find an attention there. What was done stands in the config, under "geomlib_pruned".

    Raises:
        GeomlibError: no such head, or quantised weights, which are read only here.
    """
    hf = _hf(model)
    _check(hf)
    config = hf.config.get_text_config()
    layers, count = config.num_hidden_layers, config.num_attention_heads
    gone = sorted({(int(layer), int(head)) for layer, head in heads})
    if wrong := [h for h in gone if not (0 <= h[0] < layers and 0 <= h[1] < count)]:
        raise GeomlibError(
            f"the model has no head {wrong[0]}: give (layer, query head) below ({layers}, {count}), from 0."
        )
    mask = torch.ones(layers, count)
    for layer, head in gone:
        mask[layer, head] = 0
    ids = short_input(hf)
    with intervene(hf, head_mask=mask):
        wanted = hf(input_ids=ids, use_cache=False).logits
    attention, projection = output_projections(hf)[0]
    name = next(n for n, child in attention.named_children() if child is projection)
    left = _whole_groups(hf, gone) if cut else {}
    small = _zeroed(hf, gone)
    if left:
        try:
            cut_heads(small, left, name)
            with evaluating(small):
                found = small(input_ids=ids, use_cache=False).logits
            works = float((found - wanted).abs().max()) <= _SAME[found.dtype] * float(wanted.abs().max())
        except (RuntimeError, AttributeError, TypeError, ValueError, IndexError, KeyError):
            works = False
        if not works:  # fused or shared projections: the columns stay, as zeros
            left, small = {}, _zeroed(hf, gone)
    record = {"removed": [list(h) for h in gone], "cut": {str(k): v for k, v in left.items()}, "projection": name}
    setattr(small.config, RECORD, record)
    if model is hf:
        return small
    note = "; ".join(filter(None, [model.note, f"without {len(gone)} of {layers * count} query heads"]))
    source = model.sha256 or {"commit": model.revision or ""}
    return replace(
        model, hf=small, revision=None, sha256=source | {"removed": json.dumps(record)}, note=note, checked=""
    )


def _check(hf: PreTrainedModel) -> None:
    if getattr(hf, "is_quantized", False) or getattr(hf.config, "quantization_config", None):
        raise GeomlibError("quantised weights cannot be pruned: load the model dequantised, in float32 or bfloat16.")
    if any(p.device.type == "meta" for p in hf.parameters()):
        raise GeomlibError(
            "some of the weights are offloaded by the device_map: load the model whole, without one, to prune it."
        )
    if getattr(hf.config, RECORD, None):
        raise GeomlibError("the model is pruned already: prune the one that it was made from, with all heads at once.")


def _whole_groups(hf: PreTrainedModel, gone: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Layer -> the query heads left once whole KV groups are cut out, for the layers that lose one."""
    config = hf.config.get_text_config()
    whole = {}
    for layer, (attention, _) in enumerate(output_projections(hf)):
        group = _group(attention, config)
        heads = range(config.num_attention_heads)
        mine = {head for at, head in gone if at == layer}
        groups = [list(heads[i : i + group]) for i in range(0, len(heads), group)]
        left = [g for g in groups if not mine.issuperset(g)]
        if len(left) < len(groups):
            whole[layer] = [head for g in left for head in g] or [0]
    return whole


def _group(attention: torch.nn.Module, config) -> int:
    """Query heads per KV head."""
    return getattr(attention, "num_key_value_groups", None) or (
        config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    )


def _zeroed(hf: PreTrainedModel, gone: Sequence[tuple[int, int]]) -> PreTrainedModel:
    small = copy.deepcopy(hf)
    heads = hf.config.get_text_config().num_attention_heads
    projections = [p for _, p in output_projections(small)]
    for layer, head in gone:
        weight = projections[layer].weight
        columns = weight if isinstance(projections[layer], Conv1D) else weight.T
        dim = len(columns) // heads
        columns[head * dim : (head + 1) * dim] = 0
    return small


@torch.no_grad()
def cut_heads(hf: PreTrainedModel, cut: dict[int, list[int]], projection: str) -> None:
    """Make the projections of these layers smaller, in place: only these query heads and their KV heads are left.

    Args:
        projection: name of the output projection in its attention module.
    """
    config = hf.config.get_text_config()
    count = config.num_attention_heads
    for attention in hf.modules():
        children = dict(attention.named_children())
        layer = getattr(attention, "layer_idx", None)
        if "Attention" not in type(attention).__name__ or layer not in cut or projection not in children:
            continue
        group = _group(attention, config)
        queries = cut[layer]
        keys = sorted({head // group for head in queries})
        if {"q_proj", "k_proj", "v_proj"} <= set(children):
            for name, kept, total in (
                ("q_proj", queries, count),
                ("k_proj", keys, count // group),
                ("v_proj", keys, count // group),
            ):
                _keep(children[name], 0, _places(kept, children[name].weight.shape[0] // total))
        elif "c_attn" in children:  # GPT-2: q, k, v side by side
            size = children["c_attn"].weight.shape[1] // 3
            places = _places(queries, size // count)
            _keep(children["c_attn"], 1, [place + i * size for i in range(3) for place in places])
            attention.split_size = len(places)
        elif "query_key_value" in children and group == 1:  # GPT-NeoX: q, k, v of each head side by side
            _keep(
                children["query_key_value"], 0, _places(queries, children["query_key_value"].weight.shape[0] // count)
            )
        else:
            raise ValueError(f"no way to cut a {type(attention).__name__}")
        out = children[projection]
        inputs = 0 if isinstance(out, Conv1D) else 1
        _keep(out, inputs, _places(queries, out.weight.shape[inputs] // count), bias=False)
        for name, parameter in attention.named_parameters(recurse=False):  # one number a head, as learned sinks
            if parameter.shape == (count,):
                setattr(attention, name, _kept(parameter, 0, queries))
        for name, kept in (("num_heads", queries), ("num_attention_heads", queries), ("num_key_value_heads", keys)):
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, len(kept))
        if len(queries) < group:
            attention.num_key_value_groups = len(queries)


def _places(heads: Sequence[int], dim: int) -> list[int]:
    return [head * dim + i for head in heads for i in range(dim)]


def _kept(parameter: torch.nn.Parameter, axis: int, places: Sequence[int]) -> torch.nn.Parameter:
    places = torch.tensor(places, device=parameter.device)
    return torch.nn.Parameter(parameter.index_select(axis, places).contiguous(), requires_grad=parameter.requires_grad)


def _keep(module: torch.nn.Module, axis: int, places: Sequence[int], bias: bool = True) -> None:
    """Keep these rows (0) or columns (1) of a projection's weight, and of its bias where they are outputs."""
    module.weight = _kept(module.weight, axis, places)
    if bias and getattr(module, "bias", None) is not None:
        module.bias = _kept(module.bias, 0, places)
    if isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape
    else:
        module.out_features, module.in_features = module.weight.shape


def parameters(hf: PreTrainedModel) -> int:
    """Number of weights, tied ones once."""
    return sum(p.numel() for p in hf.parameters())


# --- the folder -------------------------------------------------------------------------------------------------------


def save(model, folder: str | Path, record: dict) -> Path:
    """Write a pruned geomlib `Model` to a new folder, whole or not at all, with `record` beside it as geomlib_pruned.json.

    With zeroed columns only, it is an ordinary model that `AutoModelForCausalLM.from_pretrained` loads; where KV groups were cut,
    layers differ in shape, and `geomlib.load_model` loads it.
    """
    folder = check_new(folder)
    tmp = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        tmp.mkdir(parents=True)
        with _quiet():
            model.hf.save_pretrained(tmp)
        model.tokenizer.save_pretrained(tmp)
        (tmp / f"{RECORD}.json").write_text(json.dumps(record, indent=1) + "\n")
        if folder.exists():
            folder.rmdir()
        os.replace(tmp, folder)
    except (OSError, SafetensorError) as e:
        why = getattr(e, "strerror", None) or e
        raise GeomlibError(f"cannot write to {folder}: {why}; free some space or give another folder.") from e
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return folder


def check_new(folder: str | Path) -> Path:
    """The path, if there is nothing yet."""
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GeomlibError(f"{folder} is there already: give a new folder, nothing is overwritten.")
    return folder


def export(
    calibration,
    judged,
    order: str,
    retention: float,
    out: str | Path,
    unit: str = "head",
    cut: bool = True,
    progress: bool = False,
) -> Iterator[str]:
    """Prune a model by an order made on one study's windows, judge it on another's and save it; yields lines that say what was
    done and measured.

    Args:
        calibration, judged: two `Study`s of one model, of different documents (`skip`).
        order: "random" or a name of `sparsify.METRICS` or `sparsify.REGIME_ORDERS`.
        unit: "head", or "group": whole KV groups go.
    """
    if order not in ("random", *sparsify.METRICS, *sparsify.REGIME_ORDERS):
        names = ", ".join(("random", *sparsify.METRICS, *sparsify.REGIME_ORDERS))
        raise GeomlibError(f"there is no order {order!r}: give one of {names}.")
    if not 0 < retention < 1:
        raise GeomlibError(f"retention = {retention:g} is not usable: give a share between 0 and 1, such as 0.8.")
    check_new(out)
    model = load_model(calibration.model, revision=calibration.revision, dtype=calibration.dtype)
    _check(model.hf)
    windows = judged.take(model)
    names = ["taxonomy", "importance", *(["scan"] if order == "damage" else [])]
    tables = calibration.run(model=model, progress=progress, analyses=names)
    orders = sparsify.all_orders(tables["taxonomy"], tables["importance"], tables.get("scan"), seeds=0)
    heads = tables["importance"].drop_duplicates(["layer", "head"])
    chosen = sparsify.random_order(heads, calibration.seed) if order == "random" else orders[order]
    if unit == "group":
        chosen = sparsify.grouped(chosen, model.query_heads // model.kv_heads)
    sparsify.check_orders(model, [chosen], [w.document for w in windows], in_sample=False)
    gone = chosen.removed(retention)
    small = prune(model, gone, cut)
    done = getattr(small.hf.config, RECORD)["cut"]
    group = model.query_heads // model.kv_heads
    members = Counter((layer, head // group) for layer, head in gone)
    whole = sum(count == group for count in members.values())
    losses = [sparsify.nll(m, windows) for m in (model, small)]
    before, after = (float((x["nll"] * x["targets"]).sum() / x["targets"].sum()) for x in losses)
    seconds = [_seconds(m.hf, windows[0]) for m in (model, small)]
    sizes = [parameters(m.hf) for m in (model, small)]
    record = {
        "model": {"name": model.name, "fingerprint": model.fingerprint, "note": model.note},
        "order": chosen.name, "retention": retention, "unit": unit,
        "calibration": {"documents": list(chosen.documents), "study": calibration.model_dump(mode="json")},
        "judged": {"documents": [w.document for w in windows], "study": judged.model_dump(mode="json")},
        "nll": {"before": before, "after": after, "targets": int(losses[0]["targets"].sum())},
        "weights": sizes, "versions": {p: version(p) for p in ("geomlib", "torch", "transformers")},
    }  # fmt: skip
    folder = save(small, out, record)
    total = model.layers * model.query_heads
    yield (
        f"{model.name}: {len(gone)} of {total} query heads removed (order {chosen.name}); {whole} of "
        f"{model.layers * model.kv_heads} KV groups went whole."
    )
    yield (
        "Whole groups are cut out; of single heads the columns are zero."
        if done
        else "Their columns are zero: every layer keeps its shape, and no time is saved."
    )
    yield (
        f"NLL on {len(windows)} other document{'s' * (len(windows) > 1)}: {before:.3f} -> {after:.3f} nats (damage {after / before - 1:.1%}), perplexity "
        f"{math.exp(before):.1f} -> {math.exp(after):.1f}."
    )
    yield (
        f"Weights: {sizes[0] / 1e6:.1f} M -> {sizes[1] / 1e6:.1f} M; forward pass of {len(windows[0].input_ids)} tokens: "
        f"{seconds[0]:.2f} s -> {seconds[1]:.2f} s."
    )
    how = "geomlib.load_model (its layers differ in shape)" if done else "transformers, as any model"
    yield f"Saved in {folder}: load it with {how}."


@torch.no_grad()
def _seconds(hf: PreTrainedModel, window, repeats: int = 3) -> float:
    """Median time of a forward pass without logits."""
    ids = input_ids(hf, window)
    times = []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        hf.base_model(input_ids=ids, use_cache=False)[0].sum().item()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def load_cut(path: str, config, **kwargs) -> tuple[PreTrainedModel, dict]:
    """What `from_pretrained` gives for a folder whose layers differ in shape: a model that is cut before it is filled.

    Raises:
        GeomlibError: the weights are not those that the config tells of.
    """
    plain = AutoModelForCausalLM._model_mapping[type(config)]
    record = getattr(config, RECORD)

    def cut(self, config, *args, **kwargs):
        plain.__init__(self, config, *args, **kwargs)
        cut_heads(self, {int(layer): heads for layer, heads in record["cut"].items()}, record["projection"])

    # transformers knows how a family's weights are named on disk by the module of its class
    made = type(plain.__name__, (plain,), {"__init__": cut, "__module__": plain.__module__})
    try:
        hf, info = made.from_pretrained(path, **kwargs)
    except (RuntimeError, IndexError, KeyError, TypeError, SafetensorError) as e:
        raise GeomlibError(f"{path} does not hold the weights that its config tells of: prune the model again.") from e
    hf.__class__ = plain
    return hf, info
