"""Create-only writes through the Hub's S3 gateway.

The gateway is at ``https://s3.hf.co/<namespace>``, addressed by path, in region us-east-1, and
honours ``If-None-Match`` on PutObject (hub-docs ``docs/hub/storage-buckets-s3.md``). Its keys are
made from a Hub token, in the account's settings.
"""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.bucket._hub_url import GATEWAY, HubLocation
from thinwire.bucket._objects_stores import wants_boto3
from thinwire.bucket._objects_url import Location
from thinwire.bucket.base import Data
from thinwire.bucket.objects import ObjectBucket
from thinwire.errors import AccessDenied, Misuse

__all__ = ["GATEWAY_LIMIT", "Gateway", "gateway_of"]

PUBLIC_HUB = "https://huggingface.co"

GATEWAY_LIMIT = 16 << 20
"""Bytes up to which an object is created through the gateway: it goes in one request."""

_KEYS = (
    "make keys at huggingface.co (Settings, Access Tokens, Generate S3 credentials) and set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)


def gateway_of(location: HubLocation, endpoint: str) -> str:
    """The gateway's address.

    Args:
        endpoint: the Hub's.

    Raises:
        Misuse: it is not the public Hub, and no gateway is named: S3 keys for one place must not
            go to another.
    """
    if location.gateway is None and endpoint.rstrip("/") != PUBLIC_HUB:
        raise Misuse(
            f"create=s3 with the Hub at {endpoint} needs to know its S3 gateway",
            hint="add gateway=…, or leave create=s3 out",
        )
    return location.gateway or GATEWAY


class Gateway:
    """The place that ``location`` names, as S3 at ``gateway``."""

    def __init__(self, location: HubLocation, gateway: str) -> None:
        endpoint = f"{gateway}/{location.namespace}"
        self._location = Location(
            "s3",
            location.name,
            location.prefix.rstrip("/"),
            {"endpoint": endpoint, "region": "us-east-1"},
        )
        self._bucket = ObjectBucket(self._location)

    def create(self, key: str, data: Data) -> None:
        """Write an object unless there is one: one winner, whoever else writes.

        Raises:
            AccessDenied: the keys are refused, or there are none.
            AlreadyExists, BucketNotFound, BucketUnavailable
        """
        # Without keys obstore would look for a cloud's metadata service, for half a minute.
        if not os.environ.get("AWS_ACCESS_KEY_ID") and not wants_boto3(
            self._location, os.environ, Path.home()
        ):
            raise AccessDenied(f"no S3 keys for {self._location.url}", hint=_KEYS)
        try:
            self._bucket.create(key, data)
        except AccessDenied as error:
            raise AccessDenied(str(error), hint=_KEYS) from error

    def close(self) -> None:
        """Release the connections."""
        self._bucket.close()
