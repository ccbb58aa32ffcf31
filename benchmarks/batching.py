"""Does it pay to let windows share a forward pass? CPU seconds a window, and the largest difference of F to one at a time.

OMP_NUM_THREADS=1 python benchmarks/batching.py --length 128
"""

import argparse
import statistics
import tempfile
import time

from geomlib import Study, load_model

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--windows", type=int, default=8)
parser.add_argument("--repeats", type=int, default=3)
given = parser.parse_args()
model = load_model(given.model)
for queries in ("last", "all"):
    study = Study(model=given.model, windows=given.windows, length=given.length, queries=queries, random_rankings=4)
    took: dict[int, list] = {1: [], 4: [], 8: []}
    alone = None
    for _ in range(given.repeats):
        for batch, times in took.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                table = study.run(folder, model=model, batch=batch)
                times.append((time.process_time() - started) / given.windows)
            alone = table if alone is None else alone
            worst = (table["f"] - alone["f"]).abs().max()
            assert worst < 1e-6, worst
    each = ", ".join(f"batch {b}: {statistics.median(t):.2f} s" for b, t in took.items())
    print(f"queries {queries}, {given.length} tokens, CPU time a window: {each}")
