"""The single-head scan against whole passes, and what cutting KV groups saves, side by side in one run.

    python benchmarks/sparsify.py                                  # the numbers of the README, some minutes on 2 cores
    python benchmarks/sparsify.py --model gemma3-270m --length 512

Scan: for heads spread evenly over all layers, in turn (a) a whole pass with the head masked, logits and cross-entropy, as one
would write it; (b) the same with the library's NLL, which never holds all logits; (c) the resumed pass. All three give the same
NLL. Pruning: forward pass without logits of the whole model and of copies with KV groups cut out, alternating; medians.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import geomlib
from geomlib import nll, pruning, resume, sparsify
from geomlib.attention import intervene


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def scan(model, window, count: int) -> None:
    ids = torch.tensor([window.input_ids])
    recording = resume.Recording(model.hf, ids)
    heads = [(i * model.layers // count, i % model.query_heads) for i in range(count)]
    times = {"whole pass": [], "whole pass, lean NLL": [], "resumed": []}
    worst = 0.0
    for layer, head in heads:
        mask = torch.ones(model.layers, model.query_heads)
        mask[layer, head] = 0

        def plain(mask=mask):
            with intervene(model, head_mask=mask):
                logits = model.hf(input_ids=ids, use_cache=False).logits[0, :-1]
            return float(F.cross_entropy(logits, ids[0, 1:]))

        def lean(mask=mask):
            with intervene(model, head_mask=mask):
                return float(nll.score(model.hf, ids).mean())

        def resumed(layer=layer, head=head):
            return float(recording.without(layer, head).mean())

        found = []
        for name, call in zip(times, (plain, lean, resumed), strict=True):
            seconds, value = timed(call)
            times[name].append(seconds)
            found.append(value)
        worst = max(worst, max(found) - min(found))
    means = {name: statistics.mean(t) for name, t in times.items()}
    print(f"scan, {count} heads over all layers, {len(ids[0])} tokens; largest difference in NLL {worst:.1e}")
    for name, seconds in means.items():
        print(f"  {name:22} {seconds:.3f} s a head, {seconds / means['resumed']:.2f} of the resumed pass")


def prune(model, window, repeats: int) -> None:
    ids = torch.tensor([window.input_ids])
    heads = [(layer, head) for layer in range(model.layers) for head in range(model.query_heads)]
    order = sparsify.grouped(sparsify.Order("even", tuple(heads)), model.query_heads // model.kv_heads)
    spread = sorted(range(len(heads) // order.group), key=lambda i: (i * 7919) % (len(heads) // order.group))
    mixed = [heads[i * order.group + j] for i in spread for j in range(order.group)]
    order = sparsify.Order("spread", tuple(mixed), group=order.group)
    models = {1.0: model.hf} | {q: pruning.prune(model.hf, order.removed(q)) for q in (0.8, 0.5, 0.2)}
    models["0.5, zero columns only"] = pruning.prune(model.hf, order.removed(0.5), cut=False)
    times = {q: [] for q in models}
    with torch.no_grad():
        for _ in range(repeats + 1):
            for q, hf in models.items():
                times[q].append(timed(lambda hf=hf: hf.base_model(input_ids=ids, use_cache=False))[0])
    whole = statistics.median(times[1.0][1:])
    print(f"forward pass of {len(ids[0])} tokens without logits, KV groups that stay:")
    for q, found in times.items():
        seconds, size = statistics.median(found[1:]), pruning.parameters(models[q])
        print(f"  {q!s:22} {seconds:.3f} s, {seconds / whole:.2f} of the whole; {size / 1e6:.1f} M weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    model = geomlib.load_model(given.model)
    (window,) = geomlib.Study(model=given.model, windows=1, length=given.length).take(model)
    print(f"{given.model}, {model.note}, float32, {torch.get_num_threads()} threads")
    with torch.no_grad():
        scan(model, window, given.heads)
    prune(model, window, given.repeats)


if __name__ == "__main__":
    main()
