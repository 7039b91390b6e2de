"""Golden bundles: what a kernel set must give, recorded once and checked anywhere.

``golden.check(my_kernel_set)`` tests kernels of your own against the bundles that come with the package;
``python -m mla.golden`` records, checks and compares bundles. Loading one never runs code.
"""

from mla.errors import GoldenError
from mla.golden.bundle import SHIPPED, Bundle, Provenance, Tolerance, Tolerances, find_bundles, load_bundle, save_bundle
from mla.golden.case import Gains, GoldenCase, Salts, case_from_json, case_to_json, read_cases
from mla.golden.diff import diff
from mla.golden.replay import check, check_bundle, record
from mla.golden.report import Report, Result

__all__ = [
    "SHIPPED",
    "Bundle",
    "Gains",
    "GoldenCase",
    "GoldenError",
    "Provenance",
    "Report",
    "Result",
    "Salts",
    "Tolerance",
    "Tolerances",
    "case_from_json",
    "case_to_json",
    "check",
    "check_bundle",
    "diff",
    "find_bundles",
    "load_bundle",
    "read_cases",
    "record",
    "save_bundle",
]
