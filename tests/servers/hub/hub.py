"""The state of one Hub, and who may do what in it."""

from __future__ import annotations

from collections.abc import Iterable

from servers.hub.access import ANONYMOUS_REFUSED, Access, Account
from servers.hub.cas import Cas
from servers.hub.control import Faults, Stats
from servers.hub.store import Buckets, StoredBucket
from servers.hub.web import HttpError, Request

__all__ = ["Hub"]


class Hub:
    """Everything the server knows.

    Args:
        accounts: who exists.
        page: entries on one page of a listing.
        ttl: seconds that a Xet token is good for.
        redirect: ``resolve`` sends readers on to a content URL, as the Hub does for files in
            Xet (docs/xet/file-id.md); otherwise it answers with the content itself.
    """

    def __init__(
        self,
        accounts: Iterable[Account] = (),
        *,
        page: int = 1000,
        ttl: float = 3600,
        redirect: bool = True,
    ) -> None:
        self.access = Access(accounts, ttl)
        self.buckets = Buckets()
        self.cas = Cas()
        self.stats = Stats()
        self.faults = Faults()
        self.page = page
        self.redirect = redirect

    def readable(self, request: Request, bucket_id: str) -> StoredBucket:
        """The bucket, for a request that reads.

        What one may not see does not exist: the Hub says 404 to a token without rights and 401
        to no token at all, for a private bucket and for a missing one alike.

        Raises:
            HttpError: 401, 404.
        """
        account = self.access.account(request)
        bucket = self.buckets.find(bucket_id)
        if bucket is not None and (not bucket.private or _owns(account, bucket_id)):
            return bucket
        if account is None:
            raise HttpError(401, ANONYMOUS_REFUSED, code="RepoNotFound")
        raise HttpError(404, "Repository not found", code="RepoNotFound")

    def writable(self, request: Request, bucket_id: str) -> StoredBucket:
        """The bucket, for a request that writes.

        Raises:
            HttpError: 401, 403, 404.
        """
        bucket = self.readable(request, bucket_id)
        self.check_writer(request, bucket_id)
        return bucket

    def check_writer(self, request: Request, bucket_id: str) -> None:
        """Refuse a request that may not write in the bucket's namespace.

        Raises:
            HttpError: 401, 403.
        """
        account = self.access.account(request)
        if account is None:
            raise HttpError(401, ANONYMOUS_REFUSED)
        if account.scope != "write" or not _owns(account, bucket_id):
            raise HttpError(403, "You don't have the required permissions to perform this action")


def _owns(account: Account | None, bucket_id: str) -> bool:
    return account is not None and account.name == bucket_id.split("/")[0]
