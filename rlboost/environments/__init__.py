"""Multi-turn environments: the interface, and ready-made environments."""

from rlboost.environments.tools import ToolEnvironment
from rlboost.shared.job.environment import Environment, Message, Step, ToolUnavailable
from rlboost.shared.job.priced_model import BudgetSpent, PricedModel

__all__ = ["BudgetSpent", "Environment", "Message", "PricedModel", "Step", "ToolEnvironment", "ToolUnavailable"]
