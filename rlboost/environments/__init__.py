"""Environments that the model acts in by turns: what one is, and ready-made ones."""

from rlboost.environments.tools import ToolEnvironment
from shared.environment import Environment, Said, Step

__all__ = ["Environment", "Said", "Step", "ToolEnvironment"]
