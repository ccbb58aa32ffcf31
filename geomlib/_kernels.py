"""The fused CPU kernels of `geomlib.geometry` and `geomlib.bounds`: one pass over each query's sources for all sizes.

Per query row: nested selection of the N best sources by quickselect (ties to the lower index), the sums s_N in
segments of the nested sets, all products <v_i, s_N> in tiles that stay in cache, and the counts. No array of
(query, size, source) is ever written to memory. The same definitions in plain torch are in those two modules. All kernels
share this file because numba's cache does not notice when a function imported from another one changes.
"""

import numpy as np
from numba import njit, prange

_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
# precision, recall, f, margin, inversions, false_positives, false_negatives, rho_min, rho_max, farthest, nearest, f_without
METRICS = 12
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
def _least(keys):
    n = len(keys) // 8 * 8
    k0 = k1 = k2 = k3 = k4 = k5 = k6 = k7 = keys[0]
    for i in range(0, n, 8):  # the compiler does not do this by itself
        k = keys[i : i + 8]
        k0, k1, k2, k3 = min(k0, k[0]), min(k1, k[1]), min(k2, k[2]), min(k3, k[3])
        k4, k5, k6, k7 = min(k4, k[4]), min(k5, k[5]), min(k6, k[6]), min(k7, k[7])
    least = min(min(min(k0, k1), min(k2, k3)), min(min(k4, k5), min(k6, k7)))
    for i in range(n, len(keys)):
        least = min(least, keys[i])
    return least


@njit(cache=True, fastmath=_FAST)
def _at_most(keys, bound):
    count = np.int32(0)
    for i in range(len(keys)):
        count += np.int32(keys[i] <= bound)
    return count


@njit(cache=True, fastmath=_FAST)
def _extremal(keys, order, size, low, high, chosen, wrong, pairs):
    """FP, FN and inversions from keys; keys of non-candidates must be +inf. Overwrites keys of the selected. The keys may
    be bounds: upper ones of the selected, lower ones of the rest. Without `pairs`, FP and FN only.

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
    bottom = _least(keys[low:high])
    if not pairs:
        false_negatives = 0
        for r in range(size):
            false_negatives += chosen[r] >= bottom
        return _at_most(keys[low:high], top), false_negatives, 0, farthest, -1, top, bottom
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
def _keys(distance, alpha, norms, squares, dots, length, keys):
    """What orders as the distance does: ‖y‖² - 2<y, s> = D² - ‖s‖², or -<y, s> / (‖y‖‖s‖ + 1e-12) = D - 1.

    squares: ‖v‖² as sums, since the square of a rounded root would break the ties of numbers that need no rounding.
    """
    if distance == EUCLIDEAN:
        for i in range(len(keys)):
            a = alpha[i]
            keys[i] = a * (a * squares[i] - 2 * dots[i])
    else:
        for i in range(len(keys)):
            a = alpha[i]
            keys[i] = -(a * dots[i]) / (a * norms[i] * length + dots.dtype.type(1e-12))


@njit(cache=True, fastmath=_FAST)
def _f(size, false_positives, false_negatives):
    precision = size / (size + false_positives)
    recall = (size - false_negatives) / size
    both = precision + recall
    return 2 * precision * recall / both if both > 0 else 0.0


@njit(cache=True, fastmath=_FAST)
def _replacements(scores, seen, order, sizes, count, taken, follow):
    """follow[c]: the best source outside the top sizes[c], ties to the lower index, -1 for none. taken is scratch, all False."""
    for r in range(sizes[count - 1]):
        taken[order[r]] = True
    for c in range(count):
        best = -1
        if c + 1 < count:
            for r in range(sizes[c], sizes[c + 1]):
                i = order[r]
                if best < 0 or scores[i] > scores[best] or (scores[i] == scores[best] and i < best):
                    best = i
        else:
            for i in range(len(scores)):
                if seen[i] and not taken[i] and (best < 0 or scores[i] > scores[best]):
                    best = i
        follow[c] = best
    for r in range(sizes[count - 1]):
        taken[order[r]] = False


@njit(cache=True, parallel=True, fastmath=_FAST)
def separability_rows(
    weights, values, tiles, norms, squares, scores, visible, exclude, directions, without, sizes, ranking, distances, permuted, full, out
):  # fmt: skip
    """All metrics of all query rows.

    Args:
        weights: (batch, query, source); values: (batch, source, dim); tiles: the same, (batch, tile, dim x TILE), see
        `_products`, dim padded with zeros to a multiple of 8 here and in `values`;
        norms, squares: ‖v‖ and ‖v‖², (batch, source); scores: (batch, query, source) or (1, 1, 1) unless ranking is BY_SCORES;
        visible: candidates, (query, source); exclude: a source of each row that is none, or -1, (batch, query); directions: (batch, query, source) int32 or (1, 1, 1) unless `permuted`:
        source i borrows the direction of source directions[i] and keeps its own magnitude;
        sizes: ascending, (size,); distances: codes, (distance,); full: all METRICS, else
        precision, recall, f and what they count, the others NaN; out: float64 (distance, batch, query, size, METRICS).
        without: a source whose absence is tried too, with `full` and not with `permuted`; or -1.
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
        seen = np.empty(sources, np.bool_)
        ratio = np.empty(sources, weights.dtype)
        sums = np.zeros((count_all, dim), weights.dtype)
        products = np.empty((count_all, tiles.shape[1] * TILE), weights.dtype)
        tried = count_all if without >= 0 else 0
        rest = np.zeros((tried, dim), weights.dtype)
        rest_products = np.empty((tried, tiles.shape[1] * TILE), weights.dtype)
        follow = np.empty(tried, np.int32)
        taken = np.zeros(sources, np.bool_)
        for q in range(first, min(first + _ROWS, queries)):
            alpha = weights[b, q]
            for i in range(sources):
                seen[i] = visible[q, i]
            if exclude[b, q] >= 0:
                seen[exclude[b, q]] = False
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

            # Without a selected source: the others and the next best; summed anew, for it may be most of the sum.
            changed = count  # from this size on it is selected
            place = -1
            if without >= 0 and seen[without]:
                for r in range(sizes[count - 1]):
                    if order[r] == without:
                        place = r
                while changed > 0 and 0 <= place < sizes[changed - 1]:
                    changed -= 1
            if changed < count:
                for i in range(low, high):
                    if ranking == BY_ATTENTION:
                        work[i] = alpha[i]
                    else:
                        work[i] = alpha[i] * norms[b, i] if ranking == BY_CONTRIBUTION else scores[b, q, i]
                _replacements(work, seen, order, sizes, count, taken, follow)
                for c in range(changed, count):
                    total_here = rest[c - changed]
                    for d in range(dim):
                        total_here[d] = rest[c - changed - 1, d] if c > changed else zero
                    for r in range(sizes[c - 1] if c > changed else 0, sizes[c]):
                        i = order[r]
                        if i != without:
                            a = alpha[i]
                            v = values[b, i]
                            for d in range(len(total_here)):
                                total_here[d] += a * v[d]
                for c in range(changed, count):
                    i = follow[c]
                    if i >= 0:
                        a = alpha[i]
                        v = values[b, i]
                        total_here = rest[c - changed]
                        for d in range(len(total_here)):
                            total_here[d] += a * v[d]
                _products(tiles[b], rest, count - changed, low // TILE, (high + TILE - 1) // TILE, rest_products)

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
                    _keys(
                        distances[m], alpha[low:high], norms[b, low:high], squares[b, low:high], dots[low:high], length,
                        keys[low:high],
                    )  # fmt: skip
                    if holes:
                        for i in range(low, high):
                            if not seen[i]:
                                keys[i] = np.inf
                    size = sizes[c]
                    fp, fn, inversions, far, near, top, bottom = _extremal(
                        keys, order, size, low, high, chosen, wrong, full
                    )
                    out[m, b, q, c, 0] = size / (size + fp)
                    out[m, b, q, c, 1] = (size - fn) / size
                    out[m, b, q, c, 2] = _f(size, fp, fn)
                    out[m, b, q, c, 5] = fp
                    out[m, b, q, c, 6] = fn
                    if not full:
                        for k in (3, 4, 7, 8, 9, 10, 11):
                            out[m, b, q, c, k] = np.nan
                        continue
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
                    out[m, b, q, c, 3] = margin
                    out[m, b, q, c, 4] = inversions
                    out[m, b, q, c, 7] = rho_min
                    out[m, b, q, c, 8] = rho_max
                    out[m, b, q, c, 9] = far
                    out[m, b, q, c, 10] = near
                    if without < 0:
                        out[m, b, q, c, 11] = np.nan
                    elif not seen[without]:
                        out[m, b, q, c, 11] = out[m, b, q, c, 2]
                    elif size >= total - 1:
                        out[m, b, q, c, 11] = np.nan
                    elif c < changed:
                        # Unselected: the same sum, one less in the way; keys of the selected are inf by now.
                        strays = fn if bottom <= top else 0  # `chosen` holds no others
                        own = keys[without]
                        keys[without] = np.inf
                        next_bottom = _least(keys[low:high])
                        fn = 0
                        for r in range(strays):
                            fn += chosen[r] >= next_bottom
                        out[m, b, q, c, 11] = _f(size, fp - (own <= top), fn)
                    else:
                        other_length = zero
                        for d in range(dim):
                            other_length += rest[c - changed, d] * rest[c - changed, d]
                        other_dots = rest_products[c - changed]
                        _keys(
                            distances[m], alpha[low:high], norms[b, low:high], squares[b, low:high], other_dots[low:high],
                            np.sqrt(other_length), keys[low:high],
                        )  # fmt: skip
                        if holes:
                            for i in range(low, high):
                                if not seen[i]:
                                    keys[i] = np.inf
                        keys[without] = np.inf
                        order[place] = follow[c]
                        fp, fn, _, _, _, _, _ = _extremal(keys, order, size, low, high, chosen, wrong, False)
                        order[place] = without
                        out[m, b, q, c, 11] = _f(size, fp, fn)


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


# --- certificates -----------------------------------------------------------------------------------------------------

# What `certificate_rows` computes for each query and size, in this order; then the sketches and the combined one.
EXACT, CONSTANT_NORM, GLOBAL, QUANTILE, ROWWISE = 0, 1, 3, 5, 7  # from CONSTANT_NORM on: sink-aware, then agnostic
SKETCHES = 9
_STEPS = 1000  # of the quantiles' grid, per unit of cosine


@njit(cache=True)
def pair_intervals(cosines, low, high, tail, out):
    """Intervals of the cosines among the sources low[r]..high[r]-1, for each row r; low and high must not fall.

    out: (row, 8): least and greatest cosine of pairs without source 0, then of source 0 with the others; the same for
    the quantiles `tail` and 1 - `tail`, outward to 1 / _STEPS. Where there is no such pair: 0.
    """
    rows = len(low)
    out[:] = 0.0
    end = high[rows - 1]
    # Least and greatest cosine of j with any source from l to j - 1, while l goes down.
    least = np.full(end, np.inf)
    greatest = np.full(end, -np.inf)
    r = rows - 1
    for l in range(end - 2, max(low[0], 1) - 1, -1):
        for j in range(l + 1, end):
            c = cosines[l, j]
            least[j] = min(least[j], c)
            greatest[j] = max(greatest[j], c)
        last = r
        while r >= 0 and max(low[r], 1) >= l:
            r -= 1
        small, large, j = np.inf, -np.inf, l + 1
        for s in range(r + 1, last + 1):  # rows that begin here, and those that begin too late to have a pair
            if max(low[s], 1) == l:
                while j < high[s]:
                    small, large = min(small, least[j]), max(large, greatest[j])
                    j += 1
                if small <= large:
                    out[s, 0], out[s, 1] = small, large
    small, large, j = np.inf, -np.inf, 1
    for s in range(rows):
        if low[s] == 0:
            while j < high[s]:
                small, large = min(small, cosines[0, j]), max(large, cosines[0, j])
                j += 1
            if small <= large:
                out[s, 2], out[s, 3] = small, large

    pairs = np.zeros(2 * _STEPS + 1, np.int64)
    sink = np.zeros(2 * _STEPS + 1, np.int64)
    count, count_sink, first, end = 0, 0, max(low[0], 1), max(low[0], 1)
    for s in range(rows):
        while end < high[s]:
            for i in range(first, end):
                pairs[_step(cosines[i, end])] += 1
            count += end - first
            if low[0] == 0:
                sink[_step(cosines[0, end])] += 1
                count_sink += 1
            end += 1
        while first < max(low[s], 1):
            for i in range(first + 1, end):
                pairs[_step(cosines[first, i])] -= 1
            count -= end - first - 1
            first += 1
        out[s, 4], out[s, 5] = _quantiles(pairs, count, tail)
        if low[s] == 0:
            out[s, 6], out[s, 7] = _quantiles(sink, count_sink, tail)


@njit(cache=True, inline="always")
def _step(cosine):
    return min(max(int(np.floor((np.float64(cosine) + 1.0) * _STEPS)), 0), 2 * _STEPS)


@njit(cache=True)
def _quantiles(counts, total, tail):
    if total == 0:
        return 0.0, 0.0
    outside = int(np.floor(tail * total))
    below, step = 0, 0
    while below + counts[step] <= outside:
        below += counts[step]
        step += 1
    above, last = 0, len(counts) - 1
    while above + counts[last] <= outside:
        above += counts[last]
        last -= 1
    return step / _STEPS - 1.0, (last + 1) / _STEPS - 1.0


# In the loops below a choice is a product with 1 or 0: exact for finite numbers, and the compiler vectorises it, which it
# does not with min, max or a branch. `taken` is 1 for the selected and 0 for the rest.


@njit(cache=True, fastmath={"contract", "nnan"})
def _bounded_keys(a, taken, mean, own, others, sink, total, guard, low, keys):
    """Upper keys of the selected and lower keys of the rest from cosines known up to intervals (the book's chapter 1).

    mean[i]: the end of the interval of i with the selected other than the sink; own[i]: of i with the sink; others: sum
    of the magnitudes of the selected without the sink; sink: its magnitude if selected, else 0; total: both. All arrays
    begin at source `low`. guard: outward rounding.
    """
    tiny = np.finfo(keys.dtype).tiny
    one, two = keys.dtype.type(1), keys.dtype.type(2)
    for i in range(len(keys)):
        x = a[i]
        keys[i] = (one - two * taken[i]) * (x * x - (guard * x * (x + total) + tiny)) - two * x * (
            mean[i] * (others - taken[i] * x) + own[i] * sink
        )
    if low == 0:  # the sink has all the others as partners, and not itself
        x = a[0]
        keys[0] = (one - two * taken[0]) * (x * x - (guard * x * (x + total) + tiny)) - two * x * (mean[0] * others)


@njit(cache=True, fastmath=_FAST)
def _narrow(row, least, greatest):
    one = row.dtype.type(1)
    for i in range(len(row)):
        x = row[i]
        below, above = row.dtype.type(x < least[i]), row.dtype.type(x > greatest[i])
        least[i] = x * below + least[i] * (one - below)
        greatest[i] = x * above + greatest[i] * (one - above)


@njit(cache=True, fastmath=_FAST)
def _choose(taken, if_taken, otherwise, out):
    one = out.dtype.type(1)
    for i in range(len(out)):
        out[i] = if_taken * taken[i] + otherwise * (one - taken[i])


@njit(cache=True, fastmath=_FAST)
def _row_ends(taken, least, greatest, out):
    """The end that each source needs of its interval; 0 where it has no partner (ends are beyond 1)."""
    one, limit = out.dtype.type(1), out.dtype.type(1.5)
    for i in range(len(out)):
        end = least[i] * taken[i] + greatest[i] * (one - taken[i])
        out[i] = end * out.dtype.type(abs(end) < limit)


@njit(cache=True, fastmath=_FAST)
def _outer(taken, other, ends):
    """Where `other` is further out (below for the selected, above for the rest), take it."""
    one, two = ends.dtype.type(1), ends.dtype.type(2)
    for i in range(len(ends)):
        sign = one - two * taken[i]
        out = ends.dtype.type(sign * other[i] > sign * ends[i])
        ends[i] = other[i] * out + ends[i] * (one - out)


@njit(cache=True, fastmath={"contract", "nnan"})
def _sketch_keys(a, taken, exact, dots, left, beyond, total, guard, keys):
    """The selected exactly; of the rest <v_j, s_N> at most what its coordinates give and, beyond them, Cauchy-Schwarz."""
    tiny = np.finfo(keys.dtype).tiny
    one, two = keys.dtype.type(1), keys.dtype.type(2)
    for i in range(len(keys)):
        x = a[i]
        edge = guard * x * (x + total) + tiny
        most = x * (x - two * (dots[i] + left[i] * beyond)) - edge
        keys[i] = (exact[i] + edge) * taken[i] + most * (one - taken[i])


@njit(cache=True, fastmath=_FAST)
def _add_multiple(row, factor, to):
    for i in range(len(row)):
        to[i] += row[i] * factor


@njit(cache=True, parallel=True, fastmath=_FAST)
def certificate_rows(
    weights, values, tiles, norms, squares, cosines, visible, sizes, intervals, constants, basis, coordinates, residuals, ranks,
    guard, out, inversions,
):  # fmt: skip
    """Exact counts and every certificate for query heads that share their values.

    Args:
        weights: (head, query, source); values: (source, dim) and tiles, padded as `separability_rows` takes them;
        norms, squares: ‖v‖ and ‖v‖², (source,); cosines: (source, source); visible: (query, source); sizes: ascending;
        intervals: of `pair_intervals`, (query, 8); constants: norm of the sink and norm of all others where norms are
        taken to be constant, sink-agnostic and aware, (2, query, 2);
        basis: (2, rank, dim) orthonormal directions, sink-aware and agnostic; coordinates: of the unit values in them,
        (2, rank, source); residuals: (2, ranks, source) length of a unit value beyond the first ranks[k] directions;
        guard: relative outward rounding per (N + dim + 8), see `bounds`;
        out: float64 (level, head, query, size, 5): precision, recall, F, 1 where these do not exceed the exact ones, 1
        where F = 1 is certified; inversions: float64 (head, query, size).
    """
    heads, queries, sources = weights.shape
    dim = values.shape[1]
    count_all = len(sizes)
    largest = sizes[count_all - 1]
    tasks = (queries + _ROWS - 1) // _ROWS
    kind = weights.dtype.type
    zero = kind(0)
    for task in prange(heads * tasks):
        h = task // tasks
        first = (task % tasks) * _ROWS
        index = np.empty(sources, np.int32)
        ranked = np.empty(sources, weights.dtype)
        work = np.empty(sources, weights.dtype)
        order = np.empty(largest + 1, np.int32)
        chosen = np.empty(largest, weights.dtype)
        wrong = np.empty(sources + 1, weights.dtype)
        keys = np.empty(sources, weights.dtype)
        exact = np.empty(sources, weights.dtype)
        tight = np.empty(sources, weights.dtype)
        a = np.empty(sources, weights.dtype)
        constant = np.empty(sources, weights.dtype)
        least = np.empty(sources, weights.dtype)
        greatest = np.empty(sources, weights.dtype)
        mean = np.empty(sources, weights.dtype)
        own = np.empty(sources, weights.dtype)
        taken = np.empty(sources, weights.dtype)
        remains = np.empty(basis.shape[2], np.float64)
        sums = np.zeros((count_all, dim), weights.dtype)
        products = np.empty((count_all, tiles.shape[0] * TILE), weights.dtype)
        for q in range(first, min(first + _ROWS, queries)):
            alpha = weights[h, q]
            seen = visible[q]
            total = 0
            for i in range(sources):
                index[total] = i
                total += seen[i]
            count = 0
            while count < count_all and sizes[count] < total:
                count += 1
            out[:, h, q, count:] = np.nan
            inversions[h, q, count:] = np.nan
            if count == 0:
                continue
            low, high = index[0], index[total - 1] + 1
            holes = high - low != total
            has_sink = low == 0
            for j in range(total):
                ranked[j] = alpha[index[j]]
            _nested(ranked, index, total, sizes, count, work, order)
            for i in range(low, high):
                a[i] = alpha[i] * norms[i]
                least[i] = 2
                greatest[i] = -2
                taken[i] = zero
            done = 0
            for c in range(count):
                if c > 0:
                    sums[c] = sums[c - 1]
                else:
                    sums[c] = zero
                s = sums[c]
                for r in range(done, sizes[c]):
                    k = order[r]
                    v = values[k]
                    for d in range(dim):
                        s[d] += alpha[k] * v[d]
                done = sizes[c]
            _products(tiles, sums, count, low // TILE, (high + TILE - 1) // TILE, products)

            done = 0
            for c in range(count):
                size, s = sizes[c], sums[c]
                for r in range(done, size):
                    k = order[r]
                    taken[k] = 1
                    if k != 0 or not has_sink:
                        _narrow(cosines[k, low:high], least[low:high], greatest[low:high])
                done = size
                others, others_constant = 0.0, 0.0
                for r in range(size):
                    k = order[r]
                    others += a[k]
                    others_constant += alpha[k]
                sink = 0.0
                if has_sink and taken[0] > 0:
                    sink = np.float64(a[0])
                    others = max(others - a[0], 0.0) if size > 1 else 0.0
                    others_constant = max(others_constant - alpha[0], 0.0) if size > 1 else 0.0
                whole = kind(others + sink)
                slack = kind(guard * (size + dim + 8))

                _keys(
                    EUCLIDEAN, alpha[low:high], norms[low:high], squares[low:high], products[c, low:high], zero,
                    exact[low:high],
                )  # fmt: skip
                rank = 0
                exact_fp, exact_fn = 0, 0
                for level in range(len(out)):
                    if level == EXACT:
                        keys[low:high] = exact[low:high]
                    elif level < SKETCHES:
                        aware = level % 2 == 1
                        magnitudes = constant if level < GLOBAL else a
                        rest, edge, sums_to = kind(others), kind(sink), whole
                        if level < GLOBAL:
                            norm = kind(constants[int(aware), q, 1])
                            for i in range(low, high):
                                constant[i] = alpha[i] * norm
                            rest = kind(others_constant) * norm
                            if has_sink:
                                constant[0] = alpha[0] * kind(constants[int(aware), q, 0])
                                edge = constant[0] if taken[0] > 0 else zero
                            sums_to = rest + edge
                        if level < ROWWISE:
                            at = 0 if level < QUANTILE else 4
                            mu_low, mu_high = kind(intervals[q, at]), kind(intervals[q, at + 1])
                            own_low, own_high = kind(intervals[q, at + 2]), kind(intervals[q, at + 3])
                            if has_sink and not aware:
                                mu_low, mu_high = min(mu_low, own_low), max(mu_high, own_high)
                                own_low, own_high = mu_low, mu_high
                            _choose(taken[low:high], mu_low, mu_high, mean[low:high])
                            _choose(taken[low:high], own_low, own_high, own[low:high])
                            if has_sink:
                                mean[0] = own[0]
                        else:
                            _row_ends(taken[low:high], least[low:high], greatest[low:high], mean[low:high])
                            if has_sink:
                                own[low:high] = cosines[0, low:high]
                                if not aware and taken[0] > 0:
                                    if size == 1:  # the sink is the only partner of the others
                                        mean[1:high] = own[1:high]
                                    else:
                                        _outer(taken[1:high], own[1:high], mean[1:high])
                                    own[1:high] = mean[1:high]
                            else:
                                own[low:high] = zero
                        _bounded_keys(
                            magnitudes[low:high], taken[low:high], mean[low:high], own[low:high], rest, edge, sums_to,
                            slack, low, keys[low:high],
                        )  # fmt: skip
                        if level == ROWWISE:
                            tight[low:high] = keys[low:high]
                    elif level == len(out) - 1:
                        keys[low:high] = tight[low:high]
                    else:  # the selected exactly, the rest in a few coordinates and by Cauchy-Schwarz beyond them
                        way, k = 0, level - SKETCHES
                        if k >= len(ranks):  # agnostic; rank 0 is the same both ways and stands in the first way only
                            way, k = 1, k - len(ranks) + (ranks[0] == 0)
                        if level == SKETCHES or level == SKETCHES + len(ranks):
                            work[low:high] = zero
                            rank = 0
                            for d in range(basis.shape[2]):
                                remains[d] = s[d]
                        for e in range(rank, ranks[k]):
                            along = 0.0
                            for d in range(basis.shape[2]):
                                along += basis[way, e, d] * np.float64(s[d])
                            for d in range(basis.shape[2]):  # not by the squares, whose difference keeps half the digits
                                remains[d] -= along * basis[way, e, d]
                            _add_multiple(coordinates[way, e, low:high], kind(along), work[low:high])
                        rank = ranks[k]
                        length = 0.0
                        for d in range(basis.shape[2]):
                            length += remains[d] * remains[d]
                        beyond = kind(np.sqrt(length))
                        left = residuals[way, k]
                        _sketch_keys(
                            a[low:high], taken[low:high], exact[low:high], work[low:high], left[low:high], beyond, whole,
                            slack, keys[low:high],
                        )  # fmt: skip
                        if level == SKETCHES:  # combined: the tighter of this and of rowwise
                            # Tighter: lower for the selected, higher for the rest; so is what `_outer` calls further out.
                            _outer(taken[low:high], keys[low:high], tight[low:high])
                    if holes:
                        for i in range(low, high):
                            if not seen[i]:
                                keys[i] = np.inf
                    fp, fn, pairs, _, _, _, _ = _extremal(keys, order, size, low, high, chosen, wrong, level == EXACT)
                    if level == EXACT:
                        exact_fp, exact_fn = fp, fn
                        inversions[h, q, c] = pairs
                    out[level, h, q, c, 0] = size / (size + fp)
                    out[level, h, q, c, 1] = (size - fn) / size
                    out[level, h, q, c, 2] = _f(size, fp, fn)
                    out[level, h, q, c, 3] = 1.0 if fp >= exact_fp and fn >= exact_fn else 0.0
                    out[level, h, q, c, 4] = 1.0 if fp == 0 and fn == 0 else 0.0
