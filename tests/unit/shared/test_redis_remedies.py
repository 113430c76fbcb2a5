"""Which rejections by Redis are waited out, in the words of its releases."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from rlboost.shared.redis.bus import remedy, reply_code

IN_SCRIPT = "Error running script (call to f_a720): @user_script:11: @user_script: 11: "
IN_TRANSACTION = "Command # 2 (XADD s ...) of pipeline caused error: "


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM"),
        (ResponseError(IN_SCRIPT + "-OOM command not allowed when used memory > 'maxmemory'."), "OOM"),
        (ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        (ResponseError(IN_SCRIPT + "-READONLY You can't write against a read only replica."), "READONLY"),
        (ResponseError("LOADING Redis is loading the dataset in memory"), "LOADING"),
        (ResponseError(IN_TRANSACTION + "('MISCONF Redis is configured to save RDB snapshots',)"), "MISCONF"),
        (ResponseError(IN_TRANSACTION + '("MISCONF Redis can\'t write its log",)'), "MISCONF"),
    ],
)
def test_rejection_that_ends_has_a_remedy(error: ResponseError, code: str) -> None:
    assert reply_code(error) == code
    assert remedy(error)


@pytest.mark.parametrize("text", ["WRONGTYPE Operation against a key", IN_SCRIPT + "-WRONGTYPE Operation", "ERR x", ""])
def test_rejection_of_a_wrong_command_has_no_remedy(text: str) -> None:
    assert remedy(ResponseError(text)) is None
