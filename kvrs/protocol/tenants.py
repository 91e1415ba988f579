"""Values derived from the cluster's secret per tenant: the keys of its records and the salt of its
pages. No value of one tenant is valid for another. Pure.

A tenant is an owner's name, or without API keys the value of `Authorization`. Other proxies get
derived values only, never the name, the API key or the client's idempotency key.
"""

from collections.abc import Sequence

from kvrs.protocol.secrets import derive

_MARK_BYTES = 8


class TenantSecret:
    """A tenant's derived values. `ring` has the cluster's secrets: the first makes new values; the
    others find records made before the secret was replaced.
    """

    __slots__ = ("_roots", "mark")

    def __init__(self, ring: Sequence[bytes], owner: bytes) -> None:
        self._roots = [derive(derive(secret, b"kvrs-tenants"), owner) for secret in ring]
        # Value that tells tenants apart without their names.
        self.mark = derive(self._roots[0], b"mark")[:_MARK_BYTES].hex()

    def record_keys(self, key: str) -> list[str]:
        """Return the keys of a stream's record for the client's idempotency key, one per secret of
        the cluster.
        """
        return [derive(root, b"record\0" + key.encode()).hex() for root in self._roots]

    def salt(self, cache_salt: str) -> str:
        """Return the salt of the tenant's pages; `cache_salt`, from the client, divides the pages
        further.
        """
        return derive(self._roots[0], b"salt\0" + cache_salt.encode()).hex()
