"""The ids under which the turns of conversations are generated.

A sample's first turn has the sample's own id, and is requested with its group, which shares the prompt. Each later turn
is a group of one, numbered after the step's groups. Ids are derived, never random, so a restarted trainer requests the
same turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId


@dataclass(frozen=True, slots=True)
class TurnIds:
    """The ids of one step's turns, of its training groups or of its evaluation groups."""

    n_groups: int
    group_size: int
    """Size of the largest group."""
    max_turns: int

    @property
    def n_numbers(self) -> int:
        """Return the number of group numbers, which must fit into an id."""
        return self.n_groups * (1 + (self.max_turns - 1) * self.group_size)

    def id_of(self, sample: int, turn: int) -> int:
        """Return the packed id of a turn of a sample; turn 0 is the first."""
        if turn == 0:
            return sample
        first = SampleId.unpack(sample)
        number = ((turn - 1) * self.n_groups + first.group) * self.group_size + first.member
        return first._replace(group=self.n_groups + number, member=0).pack()

    def turn_of(self, packed: int) -> tuple[int, int]:
        """Invert `id_of`: return the sample and the number of the turn."""
        found = SampleId.unpack(packed)
        if found.group < self.n_groups:
            return packed, 0
        index, member = divmod(found.group - self.n_groups, self.group_size)
        turn, group = divmod(index, self.n_groups)
        return found._replace(group=group, member=member).pack(), turn + 1


class StepTurnIds(NamedTuple):
    """The ids of all turns of one step."""

    training: TurnIds | None
    """None if the job trains on no generated groups."""
    evaluation: TurnIds | None
    """None if the job does not evaluate."""

    def of(self, packed: int) -> TurnIds:
        """Return the ids of the kind of group that a sample or turn belongs to.

        Raises:
            Unprocessable: the job has no groups of this kind.

        """
        sample = SampleId.unpack(packed)
        ids = self.evaluation if sample.is_eval else self.training
        if ids is None:
            raise Unprocessable(f"received sample {sample}, which was not requested: the job has no such groups")
        return ids
