"""Proves a recipe against a reference, or names its first node that disagrees."""

from fastgen.verify.report import Cause, Finding, Report
from fastgen.verify.run import verify

__all__ = ["Cause", "Finding", "Report", "verify"]
