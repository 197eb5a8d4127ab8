"""``thinwire bench vllm`` where there is no vLLM; with one, see ``make test-vllm``."""

from __future__ import annotations

from importlib.util import find_spec

import click.testing
import pytest

from thinwire.cli import main


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is there")
def test_it_says_what_it_needs() -> None:
    result = click.testing.CliRunner().invoke(main, ["bench", "vllm"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: vLLM is not installed here\nhint: run this in an environment" in result.stderr
