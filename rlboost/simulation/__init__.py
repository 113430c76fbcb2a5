"""Simulates a job on a spot fleet in virtual time, with the rollout manager's own decisions.

    result = simulate(job, machine, trace, POLICIES["rlboost"], seed=1)

Workers, trainer, network and cloud are simulated; what is placed, migrated, reclaimed or awaited is decided by
`services/rollout_manager/domain`, which receives the messages that the real services send.
"""

from __future__ import annotations

from rlboost.simulation.policies import POLICIES, Policy
from rlboost.simulation.result import InstanceResult, SimulationResult, StepResult
from rlboost.simulation.run import StepTooLong, simulate
from rlboost.simulation.scenario import EngineSpec, Lengths, Machine, SimulatedJob

__all__ = [
    "POLICIES",
    "EngineSpec",
    "InstanceResult",
    "Lengths",
    "Machine",
    "Policy",
    "SimulatedJob",
    "SimulationResult",
    "StepResult",
    "StepTooLong",
    "simulate",
]
