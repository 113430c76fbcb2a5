"""The user's function that skips prompts. It runs in the trainer's own process, in a thread beside its event loop."""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.domain.curriculum import Judge
from services.trainer.ports import Prompt
from shared.errors import ConfigError
from shared.own_code import own_function

_FIELD = "data.curriculum.function"


def own_judge(path: str, prompts: Sequence[Prompt]) -> Judge:
    """Return the function `module:function` as the curriculum asks it.

    Raises:
        ConfigError: it cannot be imported, is no function, or does not take what it will be given; and later, when
            it is asked: it raised.

    """
    function = own_function(_FIELD, path, ("means", "step", "columns"))

    def judge(means: Sequence[float], step: int, row: int) -> bool:
        try:
            return bool(function(list(means), step, dict(prompts[row].columns)))
        except Exception as error:
            raise ConfigError(
                f"{_FIELD}: {path} raised {type(error).__name__}: {error}, asked about prompt {row + 1} at step {step}"
            ) from error

    return judge
