"""Stateful test of all manager invariants under faults of managers, workers, bus and trainers.

The machine drives two real managers over one in-memory bus, one of them the leader: they crash, lose replies, pause in
the middle of a commit and take over from each other. Workers crash, stall, repeat and delay frames; samples are
reclaimed, weights change in the middle of samples, two jobs share the fleet, trainers request groups again. No sample
may be lost or delivered twice, and every sample ends.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.support.stateful_manager import Spot

TestSpot = pytest.mark.timeout(600)(Spot.TestCase)  # finding is quick, shrinking what was found is not
TestSpot.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
