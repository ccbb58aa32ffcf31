"""The fused CPU kernel of `geomlib.geometry`: one pass over each query's sources for all sizes and distances.

Per query row: nested selection of the N best sources by quickselect (ties to the lower index), the sums s_N in
segments of the nested sets, all products <v_i, s_N> in tiles that stay in cache, and the counts. No array of
(query, size, source) is ever written to memory. The same definitions in plain torch are in `geometry.py`.
"""

import numpy as np
from numba import njit, prange

_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
METRICS = 9  # precision, recall, f, margin, inversions, false_positives, false_negatives, rho_min, rho_max
EUCLIDEAN, COSINE = 0, 1
BY_ATTENTION, BY_CONTRIBUTION, BY_SCORES = 0, 1, 2
TILE = 64  # sources per tile: 64 dims x 64 sources of float32 is half of a first-level cache
_ROWS = 8  # query rows per task
# Sums may be reordered and fused, and inputs hold no NaN (checked by the caller); infinities are used as marks.
_FAST = {"contract", "reassoc", "nsz", "nnan"}


@njit(cache=True, fastmath=_FAST, inline="always")
def _kth_largest(a, n, k):
    """The k-th largest (k from 1) of a[:n]; reorders a. Branch-free partition, three-way so that ties cost nothing."""
    low, high, want = 0, n, k - 1
    while True:
        if high - low == 1:
            return a[low]
        x, y, z = a[low], a[(low + high) >> 1], a[high - 1]
        pivot = max(min(x, y), min(max(x, y), z))
        above = low
        for i in range(low, high):
            value = a[i]
            a[i] = a[above]
            a[above] = value
            above += value > pivot
        if want < above:
            high = above
            continue
        level = above
        for i in range(above, high):
            value = a[i]
            a[i] = a[level]
            a[level] = value
            level += value == pivot
        if want < level:
            return pivot
        low = level


@njit(cache=True, fastmath=_FAST)
def _nested(scores, index, n, sizes, count, work, order):
    """Fill order[:sizes[count-1]] so that order[:N] is the set of the N best for every size; scores/index are consumed.
    order has one place more than the largest size.

    Within a segment between two sizes the order means nothing.
    """
    for c in range(count - 1, -1, -1):
        size = sizes[c]
        for i in range(n):
            work[i] = scores[i]
        threshold = _kth_largest(work, n, size)
        above = 0
        for i in range(n):
            above += scores[i] > threshold
        ties = size - above
        kept = 0
        dropped = size
        dummy = len(order) - 1
        inner = c + 1 < count  # what the largest set leaves out goes nowhere
        for i in range(n):  # no branches: half of them would be mispredicted
            s, j = scores[i], index[i]
            level = (s == threshold) & (ties > 0)
            take = (s > threshold) | level
            ties -= level
            scores[kept] = s
            index[kept] = j
            kept += take
            leave = inner & (not take)
            order[dropped if leave else dummy] = j
            dropped += leave
        n = size
    for i in range(n):
        order[i] = index[i]


@njit(cache=True, fastmath=_FAST)
def _products(tiles, sums, count, first, last, products):
    """products[c, i] = <v_i, s_c> for the sources of tiles first..last-1.

    tiles is (tile, dim x TILE), flat so that the compiler sees one stream and vectorises; dim a multiple of 8.
    """
    for t in range(first, last):
        tile = tiles[t]
        for c in range(count):
            out = products[c, t * TILE : (t + 1) * TILE]
            for i in range(TILE):
                out[i] = 0.0
            for d in range(0, sums.shape[1], 8):
                s = sums[c, d : d + 8]
                s0, s1, s2, s3, s4, s5, s6, s7 = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
                v = tile[d * TILE : (d + 8) * TILE]
                for i in range(TILE):
                    out[i] += ((s0 * v[i] + s1 * v[i + TILE]) + (s2 * v[i + 2 * TILE] + s3 * v[i + 3 * TILE])) + (
                        (s4 * v[i + 4 * TILE] + s5 * v[i + 5 * TILE]) + (s6 * v[i + 6 * TILE] + s7 * v[i + 7 * TILE])
                    )


@njit(cache=True, fastmath=_FAST)
def _pairs(wrong, k0, k1, k2, k3):
    """How many (wrong, k) pairs have wrong <= k."""
    here = np.int32(0)
    for j in range(len(wrong)):
        key = wrong[j]
        here += np.int32(key <= k0) + np.int32(key <= k1) + np.int32(key <= k2) + np.int32(key <= k3)
    return here


@njit(cache=True, fastmath=_FAST)
def _extremal(keys, order, size, low, high, chosen, wrong):
    """FP, FN and inversions from keys; keys of non-candidates must be +inf. Overwrites keys of the selected.

    Returns (FP, FN, inversions, farthest selected, nearest unselected, their keys).
    """
    top = -np.inf
    farthest = -1
    for r in range(size):
        i = order[r]
        key = keys[i]
        chosen[r] = key
        keys[i] = np.inf
        if key > top:
            top = key
            farthest = i
    bottom = keys[low]
    for i in range(low, high):
        bottom = min(bottom, keys[i])
    nearest = low
    while keys[nearest] != bottom:
        nearest += 1
    if bottom > top:
        return 0, 0, 0, farthest, nearest, top, bottom
    false_positives = 0
    for i in range(low, high):
        key = keys[i]
        wrong[false_positives] = key
        false_positives += key <= top
    false_negatives = 0
    for r in range(size):
        key = chosen[r]
        chosen[false_negatives] = key
        false_negatives += key >= bottom
    inversions = 0
    r = 0
    while r < false_negatives:  # four selected at a time against all that are in the way
        k0 = chosen[r]
        k1 = chosen[r + 1] if r + 1 < false_negatives else -np.inf
        k2 = chosen[r + 2] if r + 2 < false_negatives else -np.inf
        k3 = chosen[r + 3] if r + 3 < false_negatives else -np.inf
        inversions += _pairs(wrong[:false_positives], k0, k1, k2, k3)
        r += 4
    return false_positives, false_negatives, inversions, farthest, nearest, top, bottom


@njit(cache=True, fastmath={"contract", "nnan"})  # not reassociated: a * a would leave float32's range, slowly
def _keys(distance, alpha, norms, dots, length, keys):
    """What orders as the distance does: ‖y‖² - 2<y, s> = D² - ‖s‖², or -<y, s> / (‖y‖‖s‖ + 1e-12) = D - 1."""
    if distance == EUCLIDEAN:
        for i in range(len(keys)):
            a = alpha[i]
            keys[i] = a * (a * (norms[i] * norms[i]) - 2 * dots[i])
    else:
        for i in range(len(keys)):
            a = alpha[i]
            keys[i] = -(a * dots[i]) / (a * norms[i] * length + dots.dtype.type(1e-12))


@njit(cache=True, parallel=True, fastmath=_FAST)
def separability_rows(
    weights, values, tiles, norms, scores, visible, directions, sizes, ranking, distances, permuted, out
):  # fmt: skip
    """All metrics of all query rows.

    Args:
        weights: (batch, query, source); values: (batch, source, dim); tiles: the same, (batch, tile, dim x TILE), see
        `_products`, dim padded with zeros to a multiple of 8 here and in `values`;
        norms: ‖v‖, (batch, source); scores: (batch, query, source) or (1, 1, 1) unless ranking is BY_SCORES;
        visible: candidates, (query, source); directions: (batch, query, source) int32 or (1, 1, 1) unless `permuted`:
        source i borrows the direction of source directions[i] and keeps its own magnitude;
        sizes: ascending, (size,); distances: codes, (distance,); out: float64 (distance, batch, query, size, METRICS).
    """
    batch, queries, sources = weights.shape
    dim = values.shape[2]
    count_all = len(sizes)
    largest = sizes[count_all - 1]
    tasks = (queries + _ROWS - 1) // _ROWS
    zero = weights.dtype.type(0)
    for task in prange(batch * tasks):
        b = task // tasks
        first = (task % tasks) * _ROWS
        index = np.empty(sources, np.int32)
        ranked = np.empty(sources, weights.dtype)
        work = np.empty(sources, weights.dtype)
        order = np.empty(largest + 1, np.int32)
        chosen = np.empty(largest, weights.dtype)
        wrong = np.empty(sources + 1, weights.dtype)
        keys = np.empty(sources, weights.dtype)
        ratio = np.empty(sources, weights.dtype)
        sums = np.zeros((count_all, dim), weights.dtype)
        products = np.empty((count_all, tiles.shape[1] * TILE), weights.dtype)
        for q in range(first, min(first + _ROWS, queries)):
            alpha = weights[b, q]
            seen = visible[q]
            total = 0
            for i in range(sources):
                index[total] = i
                total += seen[i]
            count = 0
            while count < count_all and sizes[count] < total:
                count += 1
            for m in range(len(distances)):
                for c in range(count, count_all):
                    for k in range(METRICS):
                        out[m, b, q, c, k] = np.nan
            if count == 0:
                continue
            low, high = index[0], index[total - 1] + 1
            holes = high - low != total
            if ranking == BY_ATTENTION:
                for j in range(total):
                    ranked[j] = alpha[index[j]]
            elif ranking == BY_CONTRIBUTION:
                for j in range(total):
                    ranked[j] = alpha[index[j]] * norms[b, index[j]]
            else:
                for j in range(total):
                    ranked[j] = scores[b, q, index[j]]
            _nested(ranked, index, total, sizes, count, work, order)

            if permuted:
                for i in range(low, high):
                    if seen[i]:
                        other = norms[b, directions[b, q, i]]
                        ratio[i] = norms[b, i] / other if other > 0 else zero
            done = 0
            for c in range(count):
                if c > 0:
                    for d in range(dim):
                        sums[c, d] = sums[c - 1, d]
                else:
                    for d in range(dim):
                        sums[c, d] = zero
                total_here = sums[c]
                for r in range(done, sizes[c]):
                    i = order[r]
                    a = alpha[i]
                    if permuted:
                        a *= ratio[i]
                        i = directions[b, q, i]
                    v = values[b, i]
                    for d in range(len(total_here)):
                        total_here[d] += a * v[d]
                done = sizes[c]
            _products(tiles[b], sums, count, low // TILE, (high + TILE - 1) // TILE, products)

            for c in range(count):
                length = zero
                for d in range(dim):
                    length += sums[c, d] * sums[c, d]
                length = np.sqrt(length)
                dots = products[c]
                if permuted:
                    for i in range(low, high):
                        if seen[i]:
                            work[i] = dots[directions[b, q, i]] * ratio[i]
                    for i in range(low, high):
                        dots[i] = work[i]
                for m in range(len(distances)):
                    _keys(distances[m], alpha[low:high], norms[b, low:high], dots[low:high], length, keys[low:high])
                    if holes:
                        for i in range(low, high):
                            if not seen[i]:
                                keys[i] = np.inf
                    size = sizes[c]
                    fp, fn, inversions, far, near, top, bottom = _extremal(keys, order, size, low, high, chosen, wrong)
                    if distances[m] == EUCLIDEAN:
                        # From the vectors, not from the key: k + ‖s‖² cancels where a selected source lies near s.
                        far_a, near_a = alpha[far], alpha[near]
                        far_i, near_i = far, near
                        if permuted:
                            far_a *= ratio[far]
                            near_a *= ratio[near]
                            far_i, near_i = directions[b, q, far], directions[b, q, near]
                        rho_max = 0.0
                        rho_min = 0.0
                        for d in range(dim):
                            x = np.float64(far_a) * values[b, far_i, d] - sums[c, d]
                            y = np.float64(near_a) * values[b, near_i, d] - sums[c, d]
                            rho_max += x * x
                            rho_min += y * y
                        rho_max = np.sqrt(rho_max)
                        rho_min = np.sqrt(rho_min)
                        gap = np.float64(bottom) - np.float64(top)  # = rho_min² - rho_max²: keeps the sign of the keys
                        span = rho_min + rho_max
                        margin = gap / span if span > 0 else gap
                    else:
                        rho_max, rho_min = 1.0 + np.float64(top), 1.0 + np.float64(bottom)
                        margin = np.float64(bottom) - np.float64(top)
                    precision = size / (size + fp)
                    recall = (size - fn) / size
                    out[m, b, q, c, 0] = precision
                    out[m, b, q, c, 1] = recall
                    both = precision + recall
                    out[m, b, q, c, 2] = 2 * precision * recall / both if both > 0 else 0.0
                    out[m, b, q, c, 3] = margin
                    out[m, b, q, c, 4] = inversions
                    out[m, b, q, c, 5] = fp
                    out[m, b, q, c, 6] = fn
                    out[m, b, q, c, 7] = rho_min
                    out[m, b, q, c, 8] = rho_max


@njit(cache=True, inline="always")
def _mix(x):
    """SplitMix64's finaliser: a counter becomes 64 random bits, the same on every machine and in any order."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, parallel=True)
def random_scores(seeds, scores):
    """scores[r, i] uniform on [0, 1), a function of seeds[r] and i alone."""
    for r in prange(len(seeds)):
        state = seeds[r]
        for i in range(scores.shape[1]):
            state = state + _STEP
            scores[r, i] = (_mix(state) >> np.uint64(40)) * 2.0**-24


@njit(cache=True, parallel=True)
def random_permutations(seeds, visible, directions):
    """directions[r]: a uniform permutation of the visible sources of row r, a function of seeds[r] and visible[r]."""
    for r in prange(len(seeds)):
        state = seeds[r]
        where = np.empty(visible.shape[1], np.int32)
        total = 0
        for i in range(visible.shape[1]):
            directions[r, i] = i
            where[total] = i
            total += visible[r, i]
        for last in range(total - 1, 0, -1):
            state = state + _STEP
            other = np.int64(_mix(state) % np.uint64(last + 1))  # the bias of % is below 1e-15 here
            i, j = where[last], where[other]
            directions[r, i], directions[r, j] = directions[r, j], directions[r, i]


@njit(cache=True)
def row_seeds(base, layer, rows, draw, seeds):
    """seeds[head, row] from the base and what names the row, so that blocks and threads change nothing."""
    for h in range(seeds.shape[0]):
        for r in range(seeds.shape[1]):
            state = _mix(base + np.uint64(layer + 1) * _STEP)
            state = _mix(state + np.uint64(h + 1) * _STEP)
            state = _mix(state + np.uint64(rows[r] + 1) * _STEP)
            seeds[h, r] = _mix(state + np.uint64(draw + 1) * _STEP)
