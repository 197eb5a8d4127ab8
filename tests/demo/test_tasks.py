from __future__ import annotations

import random

import pytest

from thinwire.demo.tasks import LetterReversal, Problem, Task, WordSorting, best_constant


def byte_length(text: str) -> int:
    return len(text) // 4


@pytest.fixture(scope="module", params=["words", "letters"])
def task(request: pytest.FixtureRequest) -> Task:
    return WordSorting(byte_length) if request.param == "words" else LetterReversal()


def test_the_answer_earns_one(task: Task) -> None:
    assert [task.reward(p, p.answer) for p in task.problems(50, seed=3)] == [1.0] * 50


def test_the_answer_follows_from_the_prompt(task: Task) -> None:
    for problem in task.problems(50, seed=3):
        question = problem.prompt.rsplit("A to Z: ")[-1].split("<|im_end|>")[0].rstrip(">")
        items = task.split(question)
        expected = items[::-1] if isinstance(task, LetterReversal) else sorted(items)
        assert task.join(expected) == problem.answer


def test_problems_repeat_for_a_seed_and_differ_between_seeds(task: Task) -> None:
    first = [p.prompt for p in task.problems(40, seed=1)]
    assert first == [p.prompt for p in task.problems(40, seed=1)]
    assert len({*first, *(p.prompt for p in task.problems(40, seed=2))}) > 70


def test_junk_earns_nothing(task: Task) -> None:
    for problem in task.problems(20, seed=5):
        assert task.reward(problem, "") == 0
        assert task.reward(problem, "\n\N{SNOWMAN} 123 456, 789") == 0


def test_no_constant_earns_much(task: Task) -> None:
    problems = task.problems(300, seed=7)
    text, reward = best_constant(task, problems)
    assert reward < 0.1
    assert reward == pytest.approx(sum(task.reward(p, text) for p in problems) / len(problems))


def test_no_answer_or_shuffled_answer_beats_the_best_constant(task: Task) -> None:
    problems = task.problems(60, seed=9)
    _, best = best_constant(task, problems)
    rng = random.Random(0)
    for problem in problems:
        items = task.split(problem.answer)
        rng.shuffle(items)
        for candidate in (problem.answer, task.join(items), problem.prompt):
            assert sum(task.reward(p, candidate) for p in problems) / len(problems) <= best


def test_best_constant_is_found_where_it_is_known() -> None:
    problems = [Problem("", answer) for answer in ("abcd", "abxy", "qbcz")]
    assert best_constant(LetterReversal(), problems) == ("abcd", pytest.approx(2 / 3))


def test_best_constant_needs_a_problem(task: Task) -> None:
    with pytest.raises(ValueError, match="at least one"):
        best_constant(task, [])


def test_words_earn_by_position() -> None:
    task = WordSorting(byte_length)
    problem = task.problems(1, seed=0)[0]
    a, b, c = task.split(problem.answer)
    assert task.reward(problem, f" {a}, {b}, {c}\n") == 1
    assert task.reward(problem, f"{a}, {c}, {b}") == pytest.approx(1 / 3)
    assert task.reward(problem, f"{b}, {c}, {a}") == pytest.approx(0.2)
    assert task.reward(problem, f"{a}, {b}") == pytest.approx(2 / 3)


def test_word_problems_keep_to_their_token_budget() -> None:
    task = WordSorting(byte_length)
    for problem in task.problems(100, seed=0):
        assert byte_length(problem.prompt) <= task.max_prompt_tokens
        assert byte_length(problem.answer) < task.max_tokens


def test_rambling_letters_earn_less() -> None:
    task = LetterReversal()
    problem = Problem("abcd>", "dcba")
    assert task.reward(problem, "dcab") == pytest.approx(0.5)
    assert task.reward(problem, "dcbaxxxx") == pytest.approx(0.5)
