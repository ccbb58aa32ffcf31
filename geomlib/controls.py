"""What would chance do? Random sets of the same size, and the same magnitudes with other directions.

Both are drawn row by row from a hash of (seed, text, layer, query head, query, draw): neither the block size, nor the
number of threads, nor the device changes them. Chapter 2 of the book.
"""

import hashlib

import numpy as np
import torch

from geomlib import _kernels
from geomlib.attention import Block

RANDOM_RANKINGS = 16  # the paper's number


def _seeds(block: Block, key: str, draw: int) -> np.ndarray:
    """One 64-bit seed per (query head, query) of the block."""
    base = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    seeds = np.empty(block.weights.shape[:2], np.uint64)
    _kernels.row_seeds(base, block.layer, block.queries.cpu().numpy(), draw, seeds)
    return seeds.ravel()


def random_scores(block: Block, key: str, draw: int) -> torch.Tensor:
    """Scores of one random ranking for every row, (query head, query, source), for `separability(ranking=...)`.

    One ranking gives the sets of every size, so they are nested as those of attention are. `key` names the run and the
    text, `draw` the ranking (0 to 15 in the paper's protocol).
    """
    scores = np.empty((block.weights.shape[0] * block.weights.shape[1], block.weights.shape[2]), np.float32)
    _kernels.random_scores(_seeds(block, key, draw), scores)
    return torch.from_numpy(scores).view(block.weights.shape).to(block.weights.device)


def random_directions(block: Block, key: str, keep_sink: bool = False) -> torch.Tensor:
    """A random permutation of each row's visible sources, (query head, query, source), for `separability(directions=...)`.

    Magnitude control (ours): every contribution keeps its length and borrows another one's direction. Separability
    that survives is magnitude; what is lost is direction. With `keep_sink`, source 0 keeps its own direction and nobody
    else gets it: what is lost is then the direction of the others alone.
    """
    heads, queries, sources = block.weights.shape
    movable = block.visible.cpu().clone()
    if keep_sink:
        movable[:, 0] = False
    visible = movable.expand(heads, queries, sources).reshape(-1, sources).numpy()
    directions = np.empty(visible.shape, np.int32)
    _kernels.random_permutations(_seeds(block, "directions " + key, 0), visible, directions)
    return torch.from_numpy(directions).view(block.weights.shape).to(block.weights.device)
