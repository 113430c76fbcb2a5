"""An agent that runs an environment of the package `verifiers`, unchanged.

`agent: {function: "rlboost.agents.verifiers:Environment", arguments: {env_id: wordle}}`, with `data: {train:
"agent:rows"}` for the environment's own data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from rlboost.agents import Session

PACKAGE = "verifiers>=0.1.14,<0.4"
_N_POOLS = 16
"""Of connections: httpx looks at all connections of a pool for each request."""
MAX_RETRIES = 10
"""Of a call of the model: they outlast a restart of the rollout manager."""


class Environment:
    """The environment of a process, which runs all of its sessions on one event loop.

    A session is a rollout: the environment calls the model, answers it, and its rubric returns the reward.
    """

    def __init__(self, env_id: str, **arguments: Any) -> None:
        """Load the environment, as `verifiers.load_environment(env_id, **arguments)`.

        Raises:
            ModuleNotFoundError: `verifiers` or the environment is not installed.
            ValueError: its rewards compare rollouts of a group with each other.

        """
        try:
            import verifiers as vf  # noqa: PLC0415 - an optional package
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # noqa: PLC0415 - which it brings
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: pip install '{PACKAGE}'", name=error.name) from error
        if not hasattr(vf, "load_environment"):
            raise ValueError(
                f"verifiers {vf.__version__} has no load_environment, only tasksets whose programs run in processes of "
                f"their own, which is not supported: pip install '{PACKAGE}'"
            )
        self._vf, self._openai = vf, AsyncOpenAI
        try:
            self._environment = vf.load_environment(env_id, **arguments)
        except ValueError as error:
            if isinstance(missing := error.__cause__, ImportError):
                raise ModuleNotFoundError(f"{error} ({missing})", name=missing.name) from error
            raise
        if self._environment.requires_group_rollouts:
            raise ValueError(
                f"{env_id} has a reward for all rollouts of a group together, and sessions are rewarded alone: use its "
                "other reward functions"
            )
        self._http = cycle(DefaultAsyncHttpxClient() for _ in range(_N_POOLS))

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of the training data set, or, for another split than `train`, of the one for evaluations."""
        environment = self._environment
        for row in environment.get_dataset() if split == "train" else environment.get_eval_dataset():
            yield {**row, "prompt": _without_nulls(row["prompt"])}

    async def __call__(self, session: Session, row: dict[str, Any]) -> float:
        """Return the reward of a rollout.

        Raises:
            RuntimeError: something else than the model failed, so that the rollout says nothing about it.

        """
        client = self._openai(
            base_url=session.base_url, api_key=session.key, http_client=next(self._http), max_retries=MAX_RETRIES
        )
        output = await self._environment.run_rollout(
            {"example_id": 0, **row},
            self._vf.OpenAIChatCompletionsClient(client),
            "policy",
            dict(self._environment.sampling_args),
        )
        if (error := output.get("error")) and not self.is_of_model(error["error_chain_str"].split(" -> ")):
            raise RuntimeError(error["error_chain_repr"])
        if output.get("stop_condition") == "timeout_reached":
            raise RuntimeError(f"the environment's timeout_seconds ({self._environment.timeout_seconds:g}) have passed")
        return float(output["reward"])

    def is_of_model(self, chain: list[str]) -> bool:
        """Return True if an error, given as the names of its class and those of its causes, is the model's doing."""
        vf = self._vf
        if any(name in _names(vf.InfraError) for name in chain):
            return False
        of_model = (vf.EmptyModelResponseError, vf.OverlongPromptError, vf.ToolError)
        return any(chain[0] in _names(kind) for kind in of_model)


def _names(kind: type) -> set[str]:
    """Return the names of a class and of those that derive from it."""
    return {kind.__name__}.union(*map(_names, kind.__subclasses__()))


def _without_nulls(prompt: Any) -> Any:
    """Return messages without the keys that a table adds to those that lack them."""
    if isinstance(prompt, str):
        return prompt
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]
