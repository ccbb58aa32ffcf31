"""One function a figure, from a tidy table to a matplotlib Figure: one style, colours that colour-blind readers tell
apart, N on a doubling axis, intervals always shown. A module a chapter."""

from geomlib.figures.base import curve, style
from geomlib.figures.bounds import LEVELS, assumptions, bounds_curves, per_head, profile_curves
from geomlib.figures.compare import (
    comparison,
    retention_compared,
    separability_compared,
    shares_compared,
    sink_compared,
)
from geomlib.figures.separability import (
    NAMES,
    by_position,
    contributions_plane,
    head_map,
    separability_curves,
    variants,
)
from geomlib.figures.sink import WITHOUT, extremes, mass_by_position, sink_curves, sink_plane, sinks_by_layer
from geomlib.figures.sparsify import damage_gaps, damage_map, damage_sorted, retention_curves
from geomlib.figures.taxonomy import regime_map, shares, signatures, simplex, stability, votes_by_position, winners

__all__ = [
    "LEVELS", "NAMES", "WITHOUT", "assumptions", "bounds_curves", "by_position", "comparison", "contributions_plane", "curve", "damage_gaps", "damage_map", "damage_sorted", "extremes", "head_map",
    "mass_by_position", "per_head", "profile_curves", "regime_map", "retention_compared", "retention_curves", "separability_compared", "separability_curves", "shares",
    "shares_compared", "signatures", "simplex", "sink_compared",
    "sink_curves", "sink_plane", "sinks_by_layer", "stability", "style", "variants", "votes_by_position", "winners",
]  # fmt: skip
