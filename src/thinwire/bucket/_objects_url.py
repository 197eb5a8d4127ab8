"""What ``s3://``, ``gs://`` and ``az://`` URLs say: parsed, checked, and written back.

Pure: nothing is read from the environment and nothing is connected to. A URL holds a place and how
to reach it, never a secret; one that does is refused without being repeated in the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from thinwire.bucket.base import check_key
from thinwire.errors import Misuse

__all__ = [
    "OPTIONS",
    "Location",
    "check_endpoint",
    "names_a_secret",
    "parse_location",
    "redacted",
    "secret",
]

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "az": ("account", "anonymous", "endpoint"),
    "gs": ("anonymous", "endpoint"),
    "s3": ("anonymous", "endpoint", "profile", "region", "virtual_hosted"),
}
"""What may stand in a URL's query, by scheme."""

# Stores allow keys of 1024 bytes; a prefix and its slash leave room for every key of a bucket.
MAX_PREFIX = 120

# Wider than Amazon's rule: stores that speak its protocol allow capitals and underscores.
_BUCKET = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
_CONTAINER = re.compile(r"(?=.{3,63}\Z)[a-z0-9]+(?:-[a-z0-9]+)*")
# What obstore would take for something else, or panic at, is not let through to it.
_ENDPOINT = re.compile(
    r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?(?:/[A-Za-z0-9._~/-]*)?"
)
_NAMES = {"az": _CONTAINER, "gs": _BUCKET, "s3": _BUCKET}
_VALUES = {
    "account": re.compile(r"[a-z0-9]{3,24}"),
    "profile": re.compile(r"[^\0-\x1f]{1,100}"),
    "region": re.compile(r"[a-z0-9-]{1,40}"),
}
_USER = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:/*)[^/]*@")
_SECRET_WORDS = ("key", "secret", "token", "sas", "sig", "password", "credential")
_FLAGS = {"1": True, "true": True, "0": False, "false": False}
_ENVIRONMENT = {
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}


@dataclass(frozen=True)
class Location:
    """A place in an object store.

    Attributes:
        scheme: ``s3``, ``gs`` or ``az``.
        name: of the bucket, or of the container in Azure.
        prefix: of every key, without slashes around it; may be empty.
        options: the query's, by name.
    """

    scheme: str
    name: str
    prefix: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL that :func:`parse_location` turns into this location."""
        query = urlencode(sorted(self.options.items()), safe=":/")
        path = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{self.name}{path}" + (f"?{query}" if query else "")

    def flag(self, option: str) -> bool:
        """Whether an option that is either true or false is true; by default it is not."""
        return _FLAGS[self.options.get(option, "false")]

    def path(self, key: str) -> str:
        """Where ``key`` lies in the store."""
        return f"{self.prefix}/{key}" if self.prefix else key


def parse_location(url: str) -> Location:
    """The place that ``url`` names.

    Raises:
        InvalidKey: the prefix holds what no key may hold.
        Misuse: anything else is malformed, unknown, or secret.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Misuse(f"not a bucket URL: {error}") from None
    scheme = parts.scheme.lower()
    if scheme not in OPTIONS:
        raise Misuse(f"not an object store's URL: it starts with {parts.scheme[:20]!r}")
    if "@" in parts.netloc:
        raise secret(scheme)
    if not _NAMES[scheme].fullmatch(parts.netloc):
        what = "container" if scheme == "az" else "bucket"
        raise Misuse(
            f"not a {what} name: {parts.netloc!r}",
            hint=f"write {scheme}://<{what}>/<prefix>, with ?endpoint=… for a server of your own",
        )
    if parts.fragment:
        raise Misuse(f"a bucket URL has no fragment: {scheme}://{parts.netloc}…#…")
    prefix = unquote(parts.path).strip("/")
    if len(prefix) > MAX_PREFIX:
        raise Misuse(f"the prefix is longer than {MAX_PREFIX} characters: {prefix!r}")
    if prefix:
        check_key(prefix)
    return Location(scheme, parts.netloc, prefix, _options(scheme, parts.query))


def check_endpoint(endpoint: str, source: str) -> str:
    """``endpoint`` without a trailing slash, if it is an HTTP URL and no more.

    Raises:
        Misuse: otherwise; ``source`` says where it was found.
    """
    try:
        usable = bool(_ENDPOINT.fullmatch(endpoint)) and urlsplit(endpoint).port != 0
    except ValueError:
        usable = False
    if not usable:
        raise Misuse(
            f"{source} is not the URL of a server",
            hint="write http://host:port or https://host, without credentials",
        )
    return endpoint.rstrip("/")


def _options(scheme: str, query: str) -> dict[str, str]:
    known = OPTIONS[scheme]
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            if names_a_secret(name):
                raise secret(scheme)
            raise Misuse(
                f"unknown option {name!r} in a {scheme}:// URL",
                hint=f"known options: {', '.join(known)}",
            )
        if name in options:
            raise Misuse(f"option {name!r} is given twice")
        options[name] = _value(name, value)
    return options


def _value(name: str, value: str) -> str:
    if name == "endpoint":
        return check_endpoint(value, "option 'endpoint'")
    if name in _VALUES:
        if not _VALUES[name].fullmatch(value):
            raise Misuse(f"option {name!r} cannot be {value!r}")
        return value
    if value.lower() not in _FLAGS:
        raise Misuse(f"option {name!r} is 'true' or 'false', not {value!r}")
    return "true" if _FLAGS[value.lower()] else "false"


def redacted(url: str) -> str:
    """``url`` as it may be shown: without user, password, query and fragment."""
    return _USER.sub(r"\1", re.split(r"[?#]", url, maxsplit=1)[0])


def names_a_secret(option: str) -> bool:
    """Whether an option that does not exist looks as if its value were a secret."""
    return any(word in option.lower() for word in _SECRET_WORDS)


def secret(scheme: str) -> Misuse:
    """The error for a URL with credentials in it."""
    return Misuse(
        f"a {scheme}:// URL may not hold credentials: URLs end up in logs",
        hint=f"set {_ENVIRONMENT[scheme]} in the environment",
    )
