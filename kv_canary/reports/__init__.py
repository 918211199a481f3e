"""Violations as a person can act on them: who, where, what is there, who wrote it, what was expected, likely why.

Rows of the violation ring become reports (`decode`), reports of one cause an incident (`incidents`), which is logged
once, looked around (`neighbourhood`) and saved (`bundle`) by the `reporter`.
"""

from kv_canary.reports.decode import Decoder
from kv_canary.reports.error import CanaryViolationError
from kv_canary.reports.incidents import Incident
from kv_canary.reports.neighbourhood import Neighbour, Neighbourhood
from kv_canary.reports.report import StoredRecord, ViolationReport

__all__ = [
    "CanaryViolationError",
    "Decoder",
    "Incident",
    "Neighbour",
    "Neighbourhood",
    "StoredRecord",
    "ViolationReport",
]
