"""The canary of a version: a few sequences of tokens, and what the trainer's own forward pass says of them.

It travels in the version's manifest, so it is kept, verified and copied with the weights that it speaks of. A worker
whose engine says something else of the same tokens does not serve them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError, model_validator

from shared.errors import Undecodable

Dtype = Literal["float32", "bfloat16"]
Tokens = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class Scored(BaseModel):
    """One sequence and its answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: Tokens
    completion: Tokens
    logprobs: tuple[FiniteFloat, ...]
    """Of each completion token, given all before it, in nats."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.logprobs) != len(self.completion):
            raise ValueError(f"{len(self.logprobs)} log-probabilities of {len(self.completion)} tokens")
        return self


class Canary(BaseModel):
    """The probe of one version with the trainer's answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: float = Field(gt=0)
    """The log-probabilities are of the distribution at this temperature: the job's, which training compares too."""
    dtype: Dtype
    """What the trainer multiplied matrices in."""
    rows: tuple[Scored, ...] = Field(min_length=1)

    def encode(self) -> str:
        """Return JSON."""
        return self.model_dump_json()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Invert `encode`.

        Raises:
            Undecodable: the text is no canary.

        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise Undecodable(f"canary: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
