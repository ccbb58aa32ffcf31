"""Speed and memory of all-query separability, side by side with the plain forward pass and with what one would do instead.

    python benchmarks/separability.py                      # the table of the README, a few minutes on 2 cores
    python benchmarks/separability.py --lengths 512 1024   # without the long windows
    python benchmarks/separability.py --analysis bounds    # every certificate of the theory chapter instead
    python benchmarks/separability.py --analysis heads     # separability alone, and with sink and taxonomy in the same pass
    python benchmarks/separability.py --lens-python PATH   # also TransformerLens, from an environment that has it

Each length is measured in a process of its own, so that peaks do not mix. Forward pass and measurement alternate, and
medians are shown: what disturbs one disturbs the other. Real text, real model, all layers, heads and queries, nine sizes,
attention ranking, Euclidean distance.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def window(model, length: int):
    import torch

    import geomlib

    (found,), _ = geomlib.take_windows(geomlib.load_corpus("vital-articles"), model.tokenizer, 1, length)
    return torch.tensor([found.input_ids])


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ours(name: str, length: int, repeats: int, analysis: str) -> dict:
    import torch

    import geomlib
    from geomlib.separability import SeparabilityTable
    from geomlib.sink import SinkEffectTable, SinksTable
    from geomlib.taxonomy import TaxonomyTable
    from geomlib.theory import BoundsTable

    model = geomlib.load_model(name)
    ids = window(model, length)

    def observers(length: int, analysis: str = analysis) -> list:
        if analysis == "bounds":
            return [BoundsTable(length, sizes=SIZES)]
        alone = [SeparabilityTable(length, sizes=SIZES, controls=())]
        more = [SinkEffectTable(length, sizes=SIZES), SinksTable(length), TaxonomyTable(length)]
        return alone + more if analysis == "heads" else alone

    def forward():
        if analysis == "heads":  # compared with separability alone
            measure("separability")
        else:
            model.hf(ids, use_cache=False)

    def measure(analysis: str = analysis):
        tables = observers(length, analysis)
        with geomlib.observe(model, *tables):
            model.hf.base_model(ids, use_cache=False)
        assert all(len(t.table()) >= model.layers * model.query_heads for t in tables)

    with torch.no_grad():
        small = window(model, 300)  # compiles and warms what is compiled and warmed once
        with geomlib.observe(model, *observers(300)):
            model.hf.base_model(small, use_cache=False)
        model.hf(small, use_cache=False)
        before = resident()
        measure()
        memory = peak() - before
        times = [(seconds(forward), seconds(measure)) for _ in range(repeats)]
    plain, geometry = (statistics.median(t) for t in zip(*times, strict=True))
    pairs = model.layers * model.query_heads * length * (length + 1) / 2
    return {
        "length": length, "forward_s": plain, "geometry_s": geometry, "ratio": geometry / plain,
        "ns_per_pair": (geometry - plain) / pairs * 1e9, "memory_mb": memory / 2**20,
    }  # fmt: skip


def eager(name: str, length: int) -> dict:
    """`output_attentions=True` under eager and a loop over (head, query, size) in torch, from 32 of the queries."""
    import torch

    import geomlib

    model = geomlib.load_model(name)
    ids = window(model, length)
    values = {}
    model.hf.set_attn_implementation("eager")
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, i=i: values.__setitem__(i, out[0]))
        for i, layer in enumerate(model.hf.base_model.layers)
    ]
    before = resident()
    start = time.perf_counter()
    with torch.no_grad():
        attentions = model.hf(ids, use_cache=False, output_attentions=True).attentions
    capture = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    queries = torch.linspace(1, length - 1, 32).long().tolist()
    group = model.query_heads // model.kv_heads
    start = time.perf_counter()
    for i, weights in enumerate(attentions):
        v = values[i].view(length, model.kv_heads, -1)
        for h in range(model.query_heads):
            for t in queries:
                alpha = weights[0, h, t, : t + 1]
                y = alpha[:, None] * v[: t + 1, h // group]
                order = alpha.sort(descending=True, stable=True).indices
                for n in (n for n in SIZES if n <= t):
                    d = (y - y[order[:n]].sum(0)).norm(dim=-1)
                    chosen, rest = d[order[:n]], d[order[n:]]
                    fp, fn = (rest <= chosen.max()).sum(), (chosen >= rest.min()).sum()
                    _ = 2 / ((n + fp) / n + n / (n - fn))
    loop = (time.perf_counter() - start) * length / len(queries)
    return {"capture_s": capture, "loop_s": loop, "memory_mb": (peak() - before) / 2**20}


LENS = """
import json, resource, sys, time, torch
from transformer_lens.model_bridge import TransformerBridge
folder, ids = sys.argv[1], torch.tensor([json.loads(sys.argv[2])])
model = TransformerBridge.boot_transformers(folder, device="cpu")
model.run_with_cache(ids[:, :64])
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
start = time.perf_counter()
with torch.no_grad():
    model.run_with_cache(ids)
print(json.dumps({"capture_s": time.perf_counter() - start,
                  "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20}))
"""


def lens(python: str, name: str, length: int) -> dict:
    import geomlib
    from geomlib.models import embedded_folder

    model = geomlib.load_model(name)
    ids = json.dumps(window(model, length)[0].tolist())
    done = subprocess.run(
        [python, "-c", LENS, str(embedded_folder(name)), ids], check=False, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr.strip()[-300:]}


def apart(kind: str, *arguments) -> dict:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--analysis", choices=["separability", "bounds", "heads"], default="separability")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lens-python", help="a Python that has transformer_lens")
    parser.add_argument("--skip-eager", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, arguments = options.one
        print(json.dumps({"ours": ours, "eager": eager}[kind](*json.loads(arguments))))
        return
    base = "separability alone" if options.analysis == "heads" else "SDPA forward"
    print(
        f"| tokens | {base} | all-query geometry | ratio | above it, per query-source pair | memory above the model |"
    )
    print("|---|---|---|---|---|---|")
    for length in options.lengths:
        r = apart("ours", options.model, length, options.repeats, options.analysis)
        print(f"| {length} | {r['forward_s']:.2f} s | {r['geometry_s']:.2f} s | {r['ratio']:.2f} | "
              f"{r['ns_per_pair']:.1f} ns | {r['memory_mb']:.0f} MB |", flush=True)  # fmt: skip
    if not options.skip_eager and options.analysis == "separability":
        r = apart("eager", options.model, 1024)
        print(f"\noutput_attentions under eager, 1024 tokens: capture {r['capture_s']:.1f} s and {r['memory_mb']:.0f} MB, "
              f"then the loop {r['loop_s']:.0f} s (extrapolated from 32 queries)", flush=True)  # fmt: skip
    if options.lens_python:
        print("TransformerLens run_with_cache, 1024 tokens:", lens(options.lens_python, options.model, 1024))


if __name__ == "__main__":
    main()
