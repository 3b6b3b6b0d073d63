"""Machines of one memory against cards: what fits where, how, how fast, at what price."""

from uma.plan.compare.candidates import (
    YOURS,
    Candidate,
    HostProfile,
    candidates,
    catalog_candidates,
    this_candidate,
)
from uma.plan.compare.plans import Plan
from uma.plan.compare.prices import Price
from uma.plan.compare.search import Comparison, Row, Wanted, compare

__all__ = [
    "YOURS",
    "Candidate",
    "Comparison",
    "HostProfile",
    "Plan",
    "Price",
    "Row",
    "Wanted",
    "candidates",
    "catalog_candidates",
    "compare",
    "this_candidate",
]
