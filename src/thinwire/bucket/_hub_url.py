"""What an ``hf://buckets/…`` URL says, without asking anyone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from thinwire.bucket._objects_url import check_endpoint, names_a_secret, redacted, secret
from thinwire.bucket.base import check_key
from thinwire.errors import InvalidKey, Misuse

__all__ = ["GATEWAY", "HubLocation", "parse_hub_url"]

GATEWAY = "https://s3.hf.co"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_OPTIONS = ("create", "endpoint", "gateway")
_FORM = "write hf://buckets/<namespace>/<name> or hf://buckets/<namespace>/<name>/<prefix>"


@dataclass(frozen=True)
class HubLocation:
    """A place in a Hub bucket, and how to write there.

    Attributes:
        url: the URL as given.
        namespace: the user or organisation.
        name: the bucket's name.
        prefix: what every key starts with: empty, or ends with a slash.
        create: how ``create`` keeps from replacing: the Hub's own API, or its S3 gateway.
        endpoint: the Hub's address; None means huggingface_hub's own.
        gateway: the S3 gateway's address, without the namespace; None: the public Hub's.
    """

    url: str
    namespace: str
    name: str
    prefix: str = ""
    create: Literal["hub", "s3"] = "hub"
    endpoint: str | None = None
    gateway: str | None = None

    @property
    def bucket_id(self) -> str:
        """The bucket as the Hub names it."""
        return f"{self.namespace}/{self.name}"


def parse_hub_url(url: str) -> HubLocation:
    """The parts of ``hf://buckets/<namespace>/<name>[/<prefix>][?option=value&…]``.

    Raises:
        Misuse: it is malformed, or has an option that does not exist.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Misuse(f"not a bucket URL: {error}", hint=_FORM) from None
    shown = redacted(url)
    namespace, _, rest = unquote(parts.path).strip("/").partition("/")
    name, _, prefix = rest.partition("/")
    if "@" in parts.netloc + namespace:
        raise secret("hf")
    if parts.scheme.lower() != "hf" or parts.netloc != "buckets":
        raise Misuse(f"not a Hub bucket: {shown!r}", hint=_FORM)
    if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name) or parts.fragment:
        raise Misuse(f"not a Hub bucket: {shown!r}", hint=_FORM)
    try:
        prefix = f"{check_key(prefix)}/" if prefix else ""
    except InvalidKey as error:
        raise Misuse(f"not a usable prefix in {shown!r}", hint=_FORM) from error
    options = _options(shown, parts.query)
    create = options.get("create", "hub")
    if create not in ("hub", "s3"):
        raise Misuse(f"create={create!r} in {shown!r}", hint="use create=hub or create=s3")
    if "gateway" in options and create != "s3":
        raise Misuse(f"a gateway without create=s3 in {shown!r}", hint="add create=s3")
    return HubLocation(
        url=url,
        namespace=namespace,
        name=name,
        prefix=prefix,
        create="s3" if create == "s3" else "hub",
        endpoint=_address(options, "endpoint"),
        gateway=_address(options, "gateway"),
    )


def _options(url: str, query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    unknown = sorted(options.keys() - set(_OPTIONS))
    if any(names_a_secret(name) for name in unknown):
        raise secret("hf")
    if unknown or len(options) != len(pairs):
        what = f"unknown options {', '.join(unknown)}" if unknown else "an option twice"
        raise Misuse(f"{what} in {url!r}", hint=f"known options: {', '.join(_OPTIONS)}")
    return options


def _address(options: dict[str, str], name: str) -> str | None:
    return check_endpoint(options[name], f"option {name!r}") if name in options else None
