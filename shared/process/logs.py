"""Structured logs: one line per event with ids as fields, as JSON or for the console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO, cast

import stamina
import structlog

from rlboost.shared.process.log_buffer import BUFFER


def configure(service: str, *, level: str = "info", form: str = "json", secrets: Iterable[str] = ()) -> None:
    """Send structlog and the standard library's loggers to standard error, `service` on every line.

    Each line is also retained in `log_buffer.BUFFER`, without `secrets`.
    """
    BUFFER.hide(secrets)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        BUFFER,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Lossy(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    stamina.instrumentation.set_on_retry_hooks([_log_retry])
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


class _Lossy:
    """A stream that drops lines which cannot be written, as when standard error is a file on a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _log_retry(details: stamina.instrumentation.RetryDetails) -> None:
    if details.retry_num == 1 or details.retry_num % 10 == 0:
        cause = str(details.caused_by) or repr(details.caused_by)
        structlog.get_logger(__name__).warning("retrying", cause=cause, tries=details.retry_num)
