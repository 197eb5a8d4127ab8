"""Fuzz the decoders against each other: ``make fuzz``, or this file with ``--help``.

With atheris installed (``pip install atheris``), libFuzzer guides the mutations by what they reach
in the reference decoder, which has a branch for every rule; the library's kernels are compiled and
cannot be watched. Without it, the same mutations are made at random. Either way a finding ends the
run, and the file that shows it is left in the folder of findings; fix it, and keep the file as a
vector of the kind ``refused``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

try:
    import atheris
except ImportError:
    atheris = None

import thinwire.codec  # noqa: E402, F401  its kernels must not be instrumented

with atheris.instrument_imports() if atheris else contextlib.nullcontext():
    import reference_decoder  # noqa: F401

import mutations  # noqa: E402


def keep(file: bytes, folder: Path) -> Path:
    """Write a finding down."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(file).hexdigest()[:16]}.safetensors"
    path.write_bytes(file)
    return path


def check(file: bytes, seed: mutations.Seed, folder: Path) -> None:
    try:
        mutations.agree(file, seed)
    except BaseException:
        print(f"found {keep(file, folder)} for {seed.tensors}", file=sys.stderr)
        raise


def at_random(seconds: float, folder: Path) -> None:
    """Mutate the vectors until the time is over."""
    number = random.SystemRandom().randrange(1 << 32)
    print(f"random seed {number}")
    rng, rounds, seeds = random.Random(number), 0, mutations.seeds()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seed = rng.choice(seeds)
        if rng.random() < 0.1:
            seed = mutations.rebased(rng, seed)
        check(mutations.mutate(rng, seed), seed, folder)
        rounds += 1
    print(f"{rounds} payloads, no finding")


def guided(seconds: float, folder: Path) -> None:
    """Let libFuzzer choose: a byte that says which schema, then the payload."""
    seeds = mutations.seeds()

    def one(data: bytes) -> None:
        if data:
            check(data[1:], seeds[data[0] % len(seeds)], folder)

    def mutator(data: bytes, limit: int, number: int) -> bytes:
        rng = random.Random(number)
        if not data or rng.random() < 0.05:
            k = rng.randrange(len(seeds))
            return bytes([k]) + seeds[k].file
        seed = seeds[data[0] % len(seeds)]
        return (data[:1] + mutations.mutate(rng, seed, data[1:]))[:limit]

    with tempfile.TemporaryDirectory() as corpus:
        for k, seed in enumerate(seeds):
            Path(corpus, str(k)).write_bytes(bytes([k]) + seed.file)
        options = ["-max_len=65536", f"-max_total_time={int(seconds)}", "-timeout=30"]
        arguments = [sys.argv[0], *options, "-rss_limit_mb=4096", f"-artifact_prefix={folder}/"]
        folder.mkdir(parents=True, exist_ok=True)
        atheris.Setup([*arguments, corpus], one, custom_mutator=mutator)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--random", action="store_true", help="do not use atheris")
    arguments = parser.parse_args()
    run = at_random if arguments.random or atheris is None else guided
    run(arguments.seconds, arguments.findings)


if __name__ == "__main__":
    main()
