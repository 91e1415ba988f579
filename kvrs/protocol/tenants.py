"""Values derived from the cluster's secret for one tenant, so that nothing of a tenant has a
meaning for another one: the keys of its records, the salt of its pages. Pure.

A tenant is an owner's name, or without API keys the value of `Authorization`. Other proxies get
what is derived only, never the name, the API key or the client's idempotency key.
"""

from collections.abc import Sequence

from kvrs.protocol.secrets import derive

_MARK_BYTES = 8


class TenantSecret:
    """`ring`: the cluster's secrets; the first is used. A record that was made under another one,
    while the secret was being replaced, is found by it.
    """

    __slots__ = ("_roots", "mark")

    def __init__(self, ring: Sequence[bytes], owner: bytes) -> None:
        self._roots = [derive(derive(secret, b"kvrs-tenants"), owner) for secret in ring]
        # Tells tenants apart, without their names.
        self.mark = derive(self._roots[0], b"mark")[:_MARK_BYTES].hex()

    def record_keys(self, key: str) -> list[str]:
        """For an idempotency key, the key of its record under each secret."""
        return [derive(root, b"record\0" + key.encode()).hex() for root in self._roots]

    def salt(self, cache_salt: str) -> str:
        """The salt of the tenant's pages; a client's own one divides them further."""
        return derive(self._roots[0], b"salt\0" + cache_salt.encode()).hex()
