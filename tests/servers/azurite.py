"""A local Azure Blob Storage for tests: Azurite from npm ``azurite``, on 127.0.0.1."""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import os
import shutil
import urllib.parse
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from types import TracebackType

from servers.ports import ServerProcess, answers, free_port

__all__ = ["AzuriteServer", "azurite"]

HOST = "127.0.0.1"
ACCOUNT = "thinwiretests"
KEY = base64.b64encode(b"a key for tests, known to everybody").decode()


def azurite() -> Path | None:
    """The server's program: $THINWIRE_AZURITE, ``azurite-blob`` on PATH or in node_modules."""
    root = Path(__file__).parents[2]
    for place in (os.environ.get("THINWIRE_AZURITE"), root / "node_modules/.bin/azurite-blob"):
        if place and Path(place).exists():
            return Path(place)
    found = shutil.which("azurite-blob")
    return Path(found) if found else None


class AzuriteServer:
    """Runs inside ``with``; keeps its data in ``folder``.

    Attributes:
        endpoint: its URL, with the account, for clients.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._port = port = free_port()
        self.endpoint = f"http://{HOST}:{port}/{ACCOUNT}"
        self._made = 0
        program = azurite()
        if program is None:
            raise RuntimeError("no `azurite-blob`: npm install azurite, or set THINWIRE_AZURITE")
        self._process = ServerProcess(
            [
                program,
                f"--blobHost={HOST}",
                f"--blobPort={port}",
                f"--location={self.folder}",
                "--skipApiVersionCheck",
                "--disableTelemetry",
                "--silent",
            ],
            ready=lambda: answers(self.endpoint),
            log=self.folder / "azurite.log",
            environment={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            folder=self.folder,
        )

    def make_container(self) -> str:
        """Make a container under a new name, and return the name."""
        self._made += 1
        name = f"container-{self._made:04}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        # Shared Key (Microsoft, "Authorize with Shared Key"): eleven headers that are not sent lie
        # between the verb and ours. A local server's account is a part of the path, so it comes
        # twice in the resource.
        canonical = "".join(f"{header}:{headers[header]}\n" for header in sorted(headers))
        resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        text = "PUT" + "\n" * 12 + canonical + resource
        digest = hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection(HOST, self._port, timeout=10)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            if answer.status != 201:
                raise RuntimeError(f"no container: {answer.status} {answer.read()[:500]!r}")
        return name

    def container_url(self, name: str, prefix: str = "") -> str:
        """What ``open_bucket`` takes; the environment has the credentials."""
        query = urllib.parse.urlencode({"account": ACCOUNT, "endpoint": self.endpoint})
        return f"az://{name}/{prefix}?{query}"

    def environment(self) -> Mapping[str, str]:
        """The variables that a client needs, beside a container's URL."""
        return {"AZURE_STORAGE_ACCOUNT_KEY": KEY}

    def __enter__(self) -> AzuriteServer:
        self._process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.stop()
