"""The user's function that skips prompts. It runs in the trainer's process, in a thread."""

from __future__ import annotations

from collections.abc import Sequence

from rlboost.services.trainer.domain.curriculum import SkipFunction
from rlboost.services.trainer.ports.data import Prompt
from rlboost.shared.errors import ConfigError
from rlboost.shared.user_code.errors import describe_error
from rlboost.shared.user_code.functions import load_user_function

_FIELD = "data.curriculum.function"


def load_skip_function(path: str, prompts: Sequence[Prompt]) -> SkipFunction:
    """Return the function `module:function` in the form that the curriculum calls.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take the arguments `means`, `step` and
            `columns`. The returned function raises it if the user's function raises.

    """
    function = load_user_function(_FIELD, path, ("means", "step", "columns"))

    def skips(means: Sequence[float], step: int, row: int) -> bool:
        try:
            return bool(function(list(means), step, dict(prompts[row].columns)))
        except Exception as error:
            given = {"prompt": prompts[row].given, **prompts[row].columns, "means": list(means)}
            raise ConfigError(
                f"{_FIELD}: for prompt {row + 1} at step {step + 1}, {path} raised {describe_error(error, given)}"
            ) from error

    return skips
