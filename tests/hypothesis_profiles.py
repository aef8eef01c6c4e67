"""Settings of hypothesis, which the tests on a GPU do without."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# `make test` draws the same cases every time, so that what turns red is what a change broke; `make test-all` draws
# afresh and prints how to draw a failing case again. How long a case takes says nothing: others may be at work.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.register_profile("fresh", derandomize=False, print_blob=True, **UNTIMED)
settings.load_profile("repeatable")
# It would also draw numbers and words that it finds in those of our modules that happen to be imported: other ones in
# each process, by the tests that ran there before. Older versions do not.
if hasattr(providers, "Constants"):
    providers._get_local_constants = providers.Constants
