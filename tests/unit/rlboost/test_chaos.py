from __future__ import annotations

import pytest

from rlboost.local.chaos import ChaosEvent, generate, parse, play
from rlboost.shared.errors import ConfigError


def test_parse_chaos_file_returns_joins_notices_and_kills() -> None:
    text = "0,add,node7\n\n1500,remove,node7\n2000, kill ,worker-1\n2000,notice,worker-2\n"
    assert parse(text, ["worker-1", "worker-2"]) == [
        ChaosEvent(0.0, "join", "node7"),
        ChaosEvent(1.5, "notice", "node7"),
        ChaosEvent(2.0, "kill", "worker-1"),
        ChaosEvent(2.0, "notice", "worker-2"),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1000,remove", "expected time_ms,add|remove|notice|kill,node"),
        ("soon,remove,worker-1", "'soon' is not a time"),
        ("-5,remove,worker-1", "'-5' is not a time"),
        ("1000,explode,worker-1", "'explode' is not an action"),
        ("1000,add,../x", "'../x' is not a node name"),
        ("1000,remove,node9", "node9 is not present; present nodes: node1, worker-1"),
        ("1000,add,node1", "node1 is already there"),
        ("10,remove,worker-1", "earlier than the line before it"),
    ],
)
def test_invalid_chaos_line_error_names_line_and_reason(line: str, what: str) -> None:
    with pytest.raises(ConfigError, match="line 2") as caught:
        parse(f"500,add,node1\n{line}\n", ["worker-1"])
    assert what in str(caught.value)


def test_a_preempted_node_cannot_be_preempted_again() -> None:
    with pytest.raises(ConfigError, match=r"line 2 .*present nodes: none"):
        parse("0,kill,worker-1\n1,kill,worker-1", ["worker-1"])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("preemptions", [0, 1, 7, 40])
def test_generated_schedule_balances_kills_and_notices_and_joins_as_many(seed: int, preemptions: int) -> None:
    nodes = ["worker-1", "worker-2", "worker-3"]
    schedule = generate(seed, nodes=nodes, preemptions=preemptions, duration_s=60.0)
    actions = [event.action for event in schedule]
    assert len(actions) - actions.count("join") == preemptions
    assert actions.count("join") == preemptions
    assert abs(actions.count("kill") - actions.count("notice")) <= 1
    assert [event.at_s for event in schedule] == sorted(event.at_s for event in schedule)


@pytest.mark.parametrize("seed", range(20))
def test_a_generated_schedule_preempts_only_present_nodes(seed: int) -> None:
    nodes = ["worker-1", "worker-2"]
    schedule = generate(seed, nodes=nodes, preemptions=30, duration_s=20.0)  # denser than the nodes can bear
    verb = {"join": "add", "kill": "kill", "notice": "notice"}
    text = "\n".join(f"{event.at_s * 1000:.0f},{verb[event.action]},{event.node}" for event in schedule)
    assert len(parse(text, nodes)) == len(schedule)


def test_the_same_seed_gives_the_same_schedule() -> None:
    first, again, other = (generate(seed, nodes=["a", "b"], preemptions=9, duration_s=9.0) for seed in (1, 1, 2))
    assert first == again != other


def test_a_schedule_without_workers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--workers 1"):
        generate(1, nodes=[], preemptions=1, duration_s=1.0)


class RecordedFleet:
    def __init__(self) -> None:
        self.did: list[str] = []

    def kill(self, name: str) -> None:
        self.did.append(f"kill {name}")

    def notice(self, name: str) -> None:
        self.did.append(f"notice {name}")

    def join_worker(self) -> str:
        self.did.append("join")
        return "worker-9"


async def test_the_player_takes_the_worker_that_came_for_the_node() -> None:
    fleet = RecordedFleet()
    schedule = parse("0,kill,worker-1\n5,add,node3\n10,notice,node3", ["worker-1"])
    await play(schedule, fleet)
    assert fleet.did == ["kill worker-1", "join", "notice worker-9"]
