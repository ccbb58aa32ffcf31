"""`geomlib estimate` against what runs really took, chapter by chapter: on the machine, and with the threads, of the runs.

python benchmarks/estimate.py runs/book-smollm2-135m runs/book-gemma3-270m
"""

import sys

from geomlib import runs
from geomlib.estimate import estimate

for folder in sys.argv[1:]:
    record = runs.read(folder)
    took = {n: c for n, c in record["chapters"].items() if c["status"] == "finished"}
    found = estimate(runs.Run(**record["asked"]), list(took))
    print(f"{record['asked']['model']}, profile {record['asked']['profile']}: estimated, took, ratio")
    for name, chapter in took.items():
        print(
            f"  {name:24}{found.seconds[name]:8.0f} s{chapter['seconds']:8.0f} s{found.seconds[name] / chapter['seconds']:8.2f}"
        )
    total, real = sum(found.seconds.values()), sum(c["seconds"] for c in took.values())
    print(f"  {'together':24}{total:8.0f} s{real:8.0f} s{total / real:8.2f}")
    peak = max(c["peak_bytes"] for c in took.values())
    print(f"  {'memory':24}{found.memory / 1e9:7.1f} GB{peak / 1e9:7.1f} GB{found.memory / peak:8.2f}")
