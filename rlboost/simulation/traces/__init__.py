"""Spot traces: when instances became available and when they were reclaimed."""

from rlboost.simulation.traces.fleet_trace import FleetEvent, FleetTrace
from rlboost.simulation.traces.generate import G4DN, TraceStatistics, generate_trace
from rlboost.simulation.traces.read import read_trace

__all__ = ["G4DN", "FleetEvent", "FleetTrace", "TraceStatistics", "generate_trace", "read_trace"]
