from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from thinwire import errors
from thinwire.errors import Misuse, Resync, Retryable, Stop, ThinwireError

GROUPS = (Retryable, Resync, Stop, Misuse)
TREE = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__
]
LEAVES = [error for error in TREE if error not in (ThinwireError, *GROUPS)]


def test_all_is_sorted_and_complete() -> None:
    assert errors.__all__ == sorted(error.__name__ for error in TREE)


@pytest.mark.parametrize("error", LEAVES)
def test_every_error_is_in_exactly_one_group(error: type[ThinwireError]) -> None:
    assert sum(issubclass(error, group) for group in GROUPS) == 1


def test_groups_are_apart() -> None:
    for group in GROUPS:
        assert [g for g in GROUPS if issubclass(group, g)] == [group]
        assert issubclass(group, ThinwireError)


@pytest.mark.parametrize("error", TREE)
def test_every_error_says_when_it_is_raised(error: type[ThinwireError]) -> None:
    doc = error.__dict__.get("__doc__")
    assert doc
    assert doc.strip().splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("error", TREE)
def test_hints(error: type[ThinwireError]) -> None:
    assert error("what").hint == error.default_hint
    assert error("what", hint="do this").hint == "do this"
    assert error("what", hint="").hint == ""
    assert str(error("what", hint="do this")) == "what"
    # one clause, to be printed after the message
    assert "\n" not in error.default_hint
    assert not error.default_hint.endswith(".")


@pytest.mark.parametrize("error", [e for e in LEAVES if not issubclass(e, Misuse)])
def test_what_is_not_the_callers_fault_has_a_way_out(error: type[ThinwireError]) -> None:
    assert error.default_hint


@pytest.mark.parametrize("error", TREE)
@pytest.mark.parametrize("hint", [None, "do this", ""])
def test_copies_keep_message_and_hint(error: type[ThinwireError], hint: str | None) -> None:
    """Errors cross processes: a replica's worker pickles them for its parent."""
    original = error("what", hint=hint)
    twin_of_pickle = pickle.loads(pickle.dumps(original))  # noqa: S301
    for twin in (twin_of_pickle, copy.copy(original), copy.deepcopy(original)):
        assert type(twin) is error
        assert (str(twin), twin.hint) == ("what", original.hint)


def test_standard_errors_that_callers_may_expect() -> None:
    assert issubclass(Misuse, ValueError)
    assert issubclass(errors.KeyNotFound, LookupError)
