"""Multi-turn environments: the interface, and ready-made environments."""

from rlboost.environments.tools import ToolEnvironment
from rlboost.shared.job.environment import Environment, Message, Step

__all__ = ["Environment", "Message", "Step", "ToolEnvironment"]
