from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.examples.countdown import make_data, reward
from rlboost.examples.countdown.make_traces import N_ROWS, traces
from rlboost.examples.countdown.task import (
    ALL_OPERATORS,
    EOS,
    HIT,
    RL_OPERATORS,
    VOCABULARY,
    VOCABULARY_SIZE,
    Attempt,
    Problem,
    all_problems,
    answer_of,
    calculate,
    noisy_trace,
    parse_attempt,
    training_problems,
)
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import RlJob

COUNTDOWN = Path(make_data.__file__).parent
PROBLEM = Problem((3, 8, 4), 44)
GOOD = "<think>8*4=32*3=96 ✗ 4+8=12*3=36 ✗ 3+8=11*4=44 ✓</think>3+8=11*4=44<eos>"

digits = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def reward_of(completion: str, problem: Problem = PROBLEM) -> float | None:
    (value,) = reward.score(
        [problem.prompt],
        [completion.removesuffix("<eos>")],
        [[]],
        completions_raw=[completion],
        numbers=[list(problem.numbers)],
        target=[problem.target],
        id=["train-0"],
    )
    return value


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (COUNTDOWN / file).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        "<think></think>3+8=11*4=44<eos>",
        "<think></think>8+3=11*4=44<eos>",
        "<think>3+8=</think>3+8=11*4=44<eos>",
        "<think>3+8=12 ✓</think>3+8=11*4=44<eos>",
    ],
)
def test_right_answer_is_rewarded_with_any_thinking(completion: str) -> None:
    assert reward_of(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "<eos>",
        GOOD.removesuffix("<eos>"),
        GOOD + "<eos>",
        GOOD + "<pad>",
        "<bos>" + GOOD,
        GOOD.removeprefix("<think>"),
        "<think>3+8=11*4=44 ✓<eos>",
        "<think>3+8=11*4=44",
        "<think></think><eos>",
        "<think></think></think>3+8=11*4=44<eos>",
        "<think><think></think>3+8=11*4=44<eos>",
        "<think><pad></think>3+8=11*4=44<eos>",
        "<think></think>44<eos>",
        "<think></think>3+8=11*4=44 ✓<eos>",
        "<think></think> 3+8=11*4=44<eos>",
        "<think></think>3+8=11*4=44\n<eos>",
        "<think></think>3+8=11*4=44=44<eos>",
        "<think></think>03+8=11*4=44<eos>",
        "<think></think>3+8=11*4=044<eos>",
        "<think></think>٣+8=11*4=44<eos>",
    ],
)
def test_a_malformed_or_truncated_completion_earns_nothing(completion: str) -> None:
    assert reward_of(completion) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "8*4=32*3=96",  # misses the target
        "3+8=12*4=44",  # the first step is wrong
        "3+8=10*4=44",  # the first step is wrong
        "3+8=11+4=44",  # the second step is wrong
        "4+7=11*4=44",  # a digit that was not given
        "4*4=16*3=48",  # one digit twice
        "40+4=44+0=44",  # none of the digits
        "11*4=44+0=44",  # a partial result in place of digits
    ],
)
def test_a_wrong_answer_earns_nothing(answer: str) -> None:
    assert reward_of(f"<think></think>{answer}<eos>") == 0.0


def test_a_step_outside_0_to_99_is_not_allowed_even_where_the_result_is_right() -> None:
    assert reward_of("<think></think>3-8=5*4=20<eos>", Problem((3, 8, 4), 20)) == 0.0
    assert parse_attempt("9*9=81*9=729") is None


def test_a_batch_is_scored_one_by_one() -> None:
    completions = [GOOD, "<think>", GOOD]
    numbers, targets = [[3, 8, 4], [3, 8, 4], [3, 8, 5]], [44, 44, 44]
    rewards = reward.score([], [], [], completions_raw=completions, numbers=numbers, target=targets)
    assert rewards == [1.0, 0.0, 0.0]


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        reward.score(["", ""], ["", ""], [[], []], completions_raw=[GOOD, GOOD], numbers=[[3, 8, 4]], target=[44])


@given(st.text(alphabet="0123456789+-*=<>/ ✓✗thinkeos", max_size=60))
def test_no_text_breaks_the_reward(text: str) -> None:
    assert reward_of(text) == 0.0
    assert reward_of(f"<think>{text}</think>3+8=11*4=44<eos>") in {0.0, 1.0}


@given(
    st.builds(
        Attempt,
        *(st.integers(0, 99), st.sampled_from(ALL_OPERATORS), st.integers(0, 99)),
        st.integers(0, 99),
        st.sampled_from(ALL_OPERATORS),
        st.integers(0, 99),
        st.integers(0, 99),
    )
)
def test_an_attempt_reads_back_as_it_was_written(attempt: Attempt) -> None:
    assert parse_attempt(str(attempt)) == attempt


@given(st.lists(digits, min_size=3, max_size=3), st.integers(10, 99), st.randoms())
def test_no_reordering_of_a_held_out_problem_is_trained_on(numbers: list[int], target: int, rng: Random) -> None:
    first, second, third = numbers
    shuffled_first, shuffled_second, shuffled_third = rng.sample(numbers, 3)
    problem = Problem((first, second, third), target)
    assert Problem((shuffled_first, shuffled_second, shuffled_third), target).is_held_out == problem.is_held_out


@given(seeds)
def test_a_noisy_trace_is_well_formed_and_spelled_by_the_vocabulary(seed: int) -> None:
    rng = Random(seed)
    problem = next(training_problems(rng, ALL_OPERATORS))
    trace = noisy_trace(problem, rng)
    assert answer_of(trace) is not None
    assert trace.endswith(EOS)
    assert reward_of(trace, problem) in {0.0, 1.0}


def test_noisy_traces_are_right_about_one_time_in_five() -> None:
    rng = Random(0)
    problems = list(islice(training_problems(rng, ALL_OPERATORS), 4000))
    rewards = [reward_of(noisy_trace(problem, rng), problem) for problem in problems]
    assert 0.18 < sum(value or 0.0 for value in rewards) / len(rewards) < 0.25


def test_a_trace_without_slips_and_quitting_ends_at_a_hit() -> None:
    trace = noisy_trace(
        PROBLEM, Random(0), blurt_probability=0, quit_probability=0, slip_probability=0, max_attempts=10_000
    )
    assert trace.count("✓") == 1
    assert reward_of(trace) == 1.0


def test_training_and_evaluation_problems_are_disjoint_and_distinct() -> None:
    train, held_out = make_data.train_problems(), make_data.eval_problems()
    assert len(train) == len(set(train)) == make_data.N_TRAIN
    train_keys = {(*sorted(problem.numbers), problem.target) for problem in train}
    held_out_keys = {(*sorted(problem.numbers), problem.target) for problem in held_out}
    assert len(held_out) == len(held_out_keys) == 102
    assert not train_keys & held_out_keys


def test_every_shipped_problem_can_be_solved_without_minus() -> None:
    solvable = set(all_problems(RL_OPERATORS))
    for problem in [*make_data.train_problems(), *make_data.eval_problems()]:
        first, second, third = sorted(problem.numbers)
        assert Problem((first, second, third), problem.target) in solvable


@pytest.mark.parametrize("name", ["train", "eval"])
def test_shipped_data_matches_make_data(name: str) -> None:
    problems = {"train": make_data.train_problems, "eval": make_data.eval_problems}[name]()
    assert (COUNTDOWN / f"{name}.jsonl").read_text(encoding="utf-8") == make_data.to_jsonl(name, problems)


def test_columns_of_a_row_match_its_prompt() -> None:
    for row in rows_of("train.jsonl") + rows_of("eval.jsonl"):
        first, second, third = row["numbers"]
        assert Problem((first, second, third), row["target"]).prompt == row["prompt"]


def test_the_shipped_job_file_is_valid_and_its_prompts_last_for_one_epoch() -> None:
    spec = job_spec.parse(load(str(COUNTDOWN / "job.yaml")))
    assert spec.steps * spec.data.prompts_per_step <= len(rows_of("train.jsonl"))
    assert isinstance(spec, RlJob)
    assert spec.eval is not None
    assert spec.eval.samples % len(rows_of("eval.jsonl")) == 0


@pytest.mark.parametrize(
    ("left", "operator", "right", "result"), [(9, "+", 9, 18), (3, "-", 8, None), (50, "*", 2, None)]
)
def test_a_step_outside_0_to_99_has_no_result(left: int, operator: str, right: int, result: int | None) -> None:
    assert calculate(left, operator, right) == result


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(COUNTDOWN / "base" / "tokenizer.json"))


def test_shipped_tokenizer_has_exactly_the_vocabulary(tokenizer: Any) -> None:
    assert tokenizer.get_vocab() == {text: token_id for token_id, text in enumerate(VOCABULARY)}
    assert len(set(VOCABULARY)) == VOCABULARY_SIZE


def test_a_prompt_gets_its_bos_and_one_token_a_number(tokenizer: Any) -> None:
    assert tokenizer.encode(PROBLEM.prompt).tokens == ["<bos>", "3", ",", "8", ",", "4", ">", "44"]


def test_a_completion_survives_encoding_and_decoding_exactly(tokenizer: Any) -> None:
    encoded = tokenizer.encode(GOOD, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == GOOD
    assert encoded.tokens[:10] == ["<think>", "8", "*", "4", "=", "32", "*", "3", "=", "96"]


def test_every_trace_survives_encoding_and_decoding_exactly(tokenizer: Any) -> None:
    rng = Random(1)
    for problem in islice(training_problems(rng, ALL_OPERATORS), 300):
        text = noisy_trace(problem, rng)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_of_any_sampled_tokens_survives_encoding_and_decoding(tokenizer: Any) -> None:
    rng = Random(2)
    for _ in range(300):
        sampled = rng.choices(range(VOCABULARY_SIZE), k=40)
        text = tokenizer.decode(sampled, skip_special_tokens=False)
        assert text == "".join(VOCABULARY[token_id] for token_id in sampled)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_that_the_vocabulary_cannot_spell_is_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("hello")


def test_traces_exclude_held_out_problems_and_end_with_an_answer() -> None:
    rows = list(islice(traces(0.5, seed=1), 200))
    assert rows == list(islice(traces(0.5, seed=1), 200))
    behind_a_hit = [row for row in rows if row["completion"].startswith(HIT)]
    assert 60 < len(behind_a_hit) < 140
    for row in rows:
        prompt, think, _ = row["prompt"].partition("<think>")
        numbers, _, target = prompt.partition(">")
        first, second, third = map(int, numbers.split(","))
        assert not Problem((first, second, third), int(target)).is_held_out
        assert answer_of(think + row["prompt"].partition("<think>")[2] + row["completion"]) is not None
        assert bool(think) == (row in behind_a_hit)


def test_the_warm_up_is_a_job_that_imitates_each_trace_once() -> None:
    spec = job_spec.parse(load(str(COUNTDOWN / "warmup.yaml")))
    assert (spec.kind, spec.optimizer.name) == ("sft", "muon")
    assert spec.steps * spec.data.prompts_per_step == N_ROWS


def test_measured_compares_verdicts_with_the_answers() -> None:
    pytest.importorskip("transformers")
    from rlboost.examples.countdown.measure import measured  # noqa: PLC0415 - imports torch

    wrong = "<think>3+8=11*4=44 ✓</think>3+8=11+4=15<eos>"
    texts = [GOOD, wrong, wrong, "<think></think>3+8=11*4=44<eos>", "<think>"]
    assert measured([PROBLEM] * 5, texts) == (2 / 5, 4 / 5, 3, 1 / 3)


def test_rounding_a_trained_model_copies_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    from rlboost.examples.countdown import model  # noqa: PLC0415 - imports torch

    for arguments in (["--out", "trained"], ["--rounded", "trained", "--out", "base"]):
        monkeypatch.setattr("sys.argv", ["model", *arguments])
        monkeypatch.chdir(tmp_path)
        model.main()
    trained, base = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("trained", "base"))
    assert {name: tensor.dtype for name, tensor in base.items()} == dict.fromkeys(trained, torch.bfloat16)
    assert all(torch.equal(base[name], tensor.bfloat16()) for name, tensor in trained.items())
    assert json.loads((tmp_path / "base/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "base/tokenizer.json").read_bytes() == (COUNTDOWN / "base/tokenizer.json").read_bytes()
