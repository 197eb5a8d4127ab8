"""The coordinator: starts the trainer and the servers, listens, and proves the outcome.

It carries no weights and no versions between them: the trainer gets the servers' addresses, and
everything else goes through the bucket or over HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import thinwire
from thinwire.demo.client import RolloutClient
from thinwire.demo.display import Display
from thinwire.demo.events import Event, Finished, Phase, Plan, Ready, Stepped
from thinwire.demo.ledger import Ledger, totals
from thinwire.demo.processes import ChildFailed, Children
from thinwire.demo.proof import folder_sha256
from thinwire.demo.settings import SERVERS, TRAINER, Settings, child_environment

__all__ = ["run_demo"]

_CATCH_UP_S = 60.0
_STOP_S = 20.0


def run_demo(
    settings: Settings, *, work: Path, logs: Path, display: Display, ledger: Ledger
) -> dict[str, Any]:
    """Run the demo from start to end.

    Args:
        work: folder for the servers' mirrors.
        logs: folder for one log per process.
        display: shows ``ledger``.

    Returns:
        The run as JSON: ``bit_identical``, ``versions``, ``totals``, ``proof``, ``plan``,
        ``settings``, ``servers``.

    Raises:
        ChildFailed, ChildRefused: a process ended early. Whatever is raised, none is left behind.
    """
    return _Run(settings, work, logs, display, ledger).go()


class _Run:
    def __init__(
        self, settings: Settings, work: Path, logs: Path, display: Display, ledger: Ledger
    ) -> None:
        self._settings = settings
        self._work = work
        self._display = display
        self._ledger = ledger
        self._children = Children(logs)
        self._token = secrets.token_urlsafe(32)
        self._started = time.monotonic()
        self._first_step: float | None = None
        self._introduced = False
        self._finished: Finished | None = None

    def go(self) -> dict[str, Any]:
        patience = 0.0
        try:
            self._start()
            while self._finished is None:
                self._pump(1.0)
            finished = self._finished
            self._await_versions(finished.version)
            live, mirrors = self._inspect()
            for server in SERVERS:
                self._children.expect_end(server)
                self._children.send(server, {"stop": True})
            patience = _STOP_S
            return self._document(finished, live, mirrors)
        finally:
            self._children.end(patience_s=patience)

    def _start(self) -> None:
        config = {"settings": self._settings.to_json(), "token": self._token}
        bucket = self._settings.bucket
        environment = child_environment(self._settings.trainer_threads, bucket)
        self._children.start(TRAINER, "trainer", config, environment)
        for server in SERVERS:
            self._children.start(
                server,
                "server",
                {**config, "mirror": str(self._mirror(server))},
                child_environment(self._settings.server_threads, bucket),
            )

    def _mirror(self, server: str) -> Path:
        return self._work / server

    # --- listening ----------------------------------------------------------------------

    def _pump(self, timeout: float) -> None:
        for source, event in self._children.events(timeout):
            self._take(source, event)
            if self._finished is not None:
                return

    def _take(self, source: str, event: Event) -> None:
        display = self._display
        row = self._ledger.add(source, event)
        if row is not None:
            display.completed(row)
        if isinstance(event, Phase):
            display.say(event.text, source)
        elif isinstance(event, Plan):
            display.say(_plan_line(event), source)
        elif isinstance(event, Ready):
            display.say(f"answers at {event.url}", source)
        elif isinstance(event, Stepped):
            self._first_step = self._first_step or time.monotonic() - event.train_s - event.wait_s
            display.status(f"step {event.step} of {self._settings.recipe.steps}")
        elif isinstance(event, Finished):
            self._finished = event
            self._children.expect_end(source)
        if not self._introduced and self._ledger.plan and len(self._ledger.ready) == len(SERVERS):
            self._introduced = True
            servers = {name: self._ledger.ready[name].url for name in SERVERS}
            self._children.send(TRAINER, {"servers": servers})

    def _await_versions(self, version: int) -> None:
        """Listen until both servers have applied the last version."""
        deadline = time.monotonic() + _CATCH_UP_S
        while True:
            row = self._ledger.rows.get(version)
            if row is not None and row.complete(len(SERVERS)):
                return
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"a server has not applied version {version} after {_CATCH_UP_S:.0f} s"
                )
            for source, event in self._children.events(0.2):
                self._take(source, event)

    # --- proving ------------------------------------------------------------------------

    def _inspect(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        self._display.say("compares what the servers hold with the trainer's cast", "demo")
        live = {
            name: RolloutClient(ready.url, self._token).weights()
            for name, ready in sorted(self._ledger.ready.items())
        }
        mirrors = {name: folder_sha256(self._mirror(name)) for name in live}
        return live, mirrors

    def _document(
        self,
        finished: Finished,
        live: Mapping[str, Mapping[str, Any]],
        mirrors: Mapping[str, str],
    ) -> dict[str, Any]:
        now = time.monotonic()
        proof = prove(finished, live, mirrors)
        first = self._first_step or now
        return {
            "bit_identical": proof["bit_identical"],
            "versions": [row.to_json() for _, row in sorted(self._ledger.rows.items())],
            "totals": totals(
                self._ledger,
                wall_s=now - self._started,
                setup_s=first - self._started,
                servers=live,
            ),
            "proof": proof,
            "plan": asdict(self._ledger.plan) if self._ledger.plan else None,
            "settings": self._settings.to_json(),
            "servers": {name: dict(answer) for name, answer in live.items()},
            "thinwire": thinwire.__version__,
        }


def prove(
    finished: Finished, live: Mapping[str, Mapping[str, Any]], mirrors: Mapping[str, str]
) -> dict[str, Any]:
    """Compare every server's live weights and mirror with the trainer's cast of its masters."""
    servers = {
        name: {
            "version": answer["weight_version"],
            "live_state_digest": answer["state_digest"],
            "live_sha256": answer["sha256"],
            "mirror_sha256": mirrors[name],
        }
        for name, answer in live.items()
    }
    same = len(servers) == len(SERVERS) and all(
        held["version"] == finished.version
        and held["live_state_digest"] == finished.state_digest
        and held["live_sha256"] == held["mirror_sha256"] == finished.sha256
        for held in servers.values()
    )
    return {
        "bit_identical": same,
        "version": finished.version,
        "state_digest": finished.state_digest,
        "sha256": finished.sha256,
        "servers": servers,
    }


def _plan_line(plan: Plan) -> str:
    return (
        f"{plan.model}, {plan.parameters / 1e6:.3g} M weights; {plan.steps} steps of "
        f"{plan.prompts_per_step} prompts x {plan.samples_per_prompt} completions; "
        f"task: {plan.task}"
    )
