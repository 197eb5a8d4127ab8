"""From a location and the environment to an obstore store.

Credentials are obstore's affair: it reads ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*`` variables, web
identity and container credentials, and asks the metadata service of a cloud machine. It does not
read ``~/.aws``; where those files are to be used, boto3 does it, if it is installed.

Time limits: 5 s to connect; for a whole request 10 s where little is sent, 60 s where an object is,
so a part of 8 MiB needs 140 kB/s. There obstore itself tries a request three times within 30 s, so
that one dropped connection does not cost a whole upload; any other patience is for the caller, who
knows what waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from thinwire.bucket._objects_native import Native
from thinwire.bucket._objects_url import Location, check_endpoint
from thinwire.errors import Misuse

__all__ = ["Settings", "make_store", "settings", "wants_boto3"]

CLIENT = {
    "connect_timeout": "5s",
    "pool_idle_timeout": "60s",
    "user_agent": "thinwire",
}
TIMEOUTS = {"ask": "10s", "move": "60s"}
"""Of questions, whose answers are short, and of objects on the move."""

RETRIES = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
_ENDPOINTS = {
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}
_VARIABLES = {"az": "AZURE_", "gs": "GOOGLE_", "s3": "AWS_"}
_OF_LINES = ("GOOGLE_SERVICE_ACCOUNT_KEY",)  # JSON
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
_AZURE_ACCOUNTS = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
# Where credentials are said to be, in whole: then no file is looked at.
_AWS_EXPLICIT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class Settings:
    """What a store is made with.

    Attributes:
        store: name of obstore's class.
        config: its settings. No secret is among them: obstore finds those itself.
        allow_http: the endpoint is plain HTTP, so that is allowed.
        sorted_by_key: listings come in key order. Amazon and Google promise it; other servers of
            the same protocols, Amazon's directory buckets and Azure's hierarchical accounts do not.
    """

    store: str
    config: Mapping[str, Any] = field(default_factory=dict)
    allow_http: bool = False
    sorted_by_key: bool = False


def settings(location: Location, environment: Mapping[str, str]) -> Settings:
    """What ``location`` needs, seen from an environment. Pure.

    Raises:
        Misuse: something is missing or malformed.
    """
    _check_variables(location, environment)
    endpoint = _endpoint(location, environment)
    allow_http = endpoint is not None and endpoint.startswith("http://")
    config: dict[str, Any] = {}
    if location.flag("anonymous"):
        config["skip_signature"] = True
    if location.scheme == "s3":
        config |= _s3(location, endpoint)
        ordered = endpoint is None and not location.name.endswith("--x-s3")
        return Settings("S3Store", config, allow_http, ordered)
    if location.scheme == "gs":
        if endpoint:
            config["base_url"] = endpoint
        return Settings("GCSStore", config, allow_http, endpoint is None)
    config["account_name"] = _account(location, environment)
    if endpoint:
        config["endpoint"] = endpoint
    return Settings("AzureStore", config, allow_http)


def wants_boto3(location: Location, environment: Mapping[str, str], home: Path) -> bool:
    """Whether the credentials are to come from ``~/.aws``, which only boto3 reads.

    Raises:
        Misuse: a profile is asked for and boto3 is not installed.
    """
    if location.scheme != "s3" or location.flag("anonymous"):
        return False
    installed = importlib.util.find_spec("boto3") is not None
    profile = location.options.get("profile")
    if profile is None and any(environment.get(name) for name in _AWS_EXPLICIT):
        return False
    if profile or environment.get("AWS_PROFILE"):
        if not installed:
            raise Misuse(
                f"AWS profile {profile or environment['AWS_PROFILE']!r} needs boto3 to be read",
                hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        return True
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials",
        environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config",
    )
    return installed and any(Path(file).is_file() for file in files)


def make_store(
    native: Native, location: Location, purpose: Literal["ask", "move"] = "move"
) -> tuple[Any, Settings]:
    """obstore's store for ``location``, and what it was made with. Nothing is connected to.

    Args:
        purpose: which of the two time limits it has.

    Raises:
        Misuse: something is missing or malformed. What obstore raises is left to the caller.
    """
    chosen = settings(location, os.environ)
    config = dict(chosen.config)
    options: dict[str, Any] = {
        "client_options": {
            **CLIENT,
            "timeout": TIMEOUTS[purpose],
            "allow_http": chosen.allow_http,
        },
        "retry_config": RETRIES if purpose == "move" else {**RETRIES, "max_retries": 0},
    }
    if wants_boto3(location, os.environ, Path.home()):
        provider = _boto3_provider(location)
        if not any(os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
            config = {**provider.config, **config}  # the profile's region
        options["credential_provider"] = provider
    return getattr(native.stores, chosen.store)(location.name, config=config, **options), chosen


def _s3(location: Location, endpoint: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "conditional_put": "etag",  # whatever the environment says: commits depend on it
        "disable_bulk_delete": True,  # not every server has it, and one key is deleted at a time
    }
    if "region" in location.options:
        config["region"] = location.options["region"]
    if location.flag("virtual_hosted"):
        config["virtual_hosted_style_request"] = True
        if endpoint:
            parts = urlsplit(endpoint)
            endpoint = parts._replace(netloc=f"{location.name}.{parts.netloc}").geturl()
    if endpoint:
        # By this name it outranks every endpoint that obstore finds in the environment.
        config["aws_endpoint_url_s3"] = endpoint
    return config


def _endpoint(location: Location, environment: Mapping[str, str]) -> str | None:
    if "endpoint" in location.options:
        return location.options["endpoint"]
    for name in _ENDPOINTS[location.scheme]:
        if environment.get(name):
            return check_endpoint(environment[name], name)
    return None


def _check_variables(location: Location, environment: Mapping[str, str]) -> None:
    """obstore panics at a secret that no HTTP header can hold, such as one with a line's end."""
    for name, value in environment.items():
        if not name.startswith(_VARIABLES[location.scheme]) or name in _OF_LINES:
            continue
        if _CONTROL.search(value):
            raise Misuse(
                f"{name} holds a line's end or another control character",
                hint="set it again without: a file with Windows line ends leaves one behind",
            )


def _account(location: Location, environment: Mapping[str, str]) -> str:
    if "account" in location.options:
        return location.options["account"]
    for name in _AZURE_ACCOUNTS:
        if environment.get(name):
            return environment[name]
    raise Misuse(
        f"no storage account for {location.url}",
        hint="add ?account=… or set AZURE_STORAGE_ACCOUNT_NAME",
    )


def _boto3_provider(location: Location) -> Any:
    boto3: Any = importlib.import_module("boto3")
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=location.options.get("profile")))
    except Exception as error:  # botocore's own tree, and ValueError for none found
        raise Misuse(
            f"boto3 finds no credentials for {location.url}: {error}",
            hint="check AWS_PROFILE and the files in ~/.aws",
        ) from error
