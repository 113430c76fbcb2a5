"""Agents: programs that call the model as OpenAI's API has it, and are trained with what it answered."""

from rlboost.shared.job.agent import Session

__all__ = ["Session"]
