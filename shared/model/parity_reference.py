"""The parity reference of a weight version: a few token sequences with the trainer's log-probabilities.

It is part of the version's manifest, so it is stored, verified and copied with the weights. A worker whose engine
computes other log-probabilities for these tokens does not serve the version.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError, model_validator

from rlboost.shared.errors import Undecodable

Dtype = Literal["float32", "bfloat16"]
Tokens = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class ScoredSequence(BaseModel):
    """One sequence with the trainer's log-probabilities."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: Tokens
    completion: Tokens
    logprobs: tuple[FiniteFloat, ...]
    """The log-probability of each completion token given all tokens before it, in nats."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.logprobs) != len(self.completion):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.completion)} tokens")
        return self


class ParityReference(BaseModel):
    """The reference of one version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: float = Field(gt=0)
    """The temperature of the log-probabilities: the job's sampling temperature, which training uses too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The top-p that training samples with. The log-probabilities are of the whole distribution."""
    dtype: Dtype
    """The dtype of the trainer's matrix multiplications."""
    rows: tuple[ScoredSequence, ...] = Field(min_length=1)

    def encode(self) -> str:
        """Return the reference as JSON."""
        return self.model_dump_json()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Invert `encode`.

        Raises:
            Undecodable: the text is not a parity reference.

        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise Undecodable(f"parity reference: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
