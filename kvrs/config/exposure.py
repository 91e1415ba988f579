"""Checks of ports beyond loopback, each of which must authenticate its clients: by API keys, the
admin port's token, or the cluster's secret.
"""

from collections.abc import Callable, Iterator, Mapping

from kvrs.config.file import ADMIN_ENV_NAME, ENV_NAME, Config, read_admin_tokens, read_secrets
from kvrs.config.security import KEYS_ENV_NAME, has_keys
from kvrs.config.settings import is_loopback
from kvrs.errors import ConfigError


def check_exposure(config: Config, environ: Mapping[str, str]) -> None:
    """Check that every port beyond loopback, of all processes, authenticates its clients.

    Raises:
        ConfigError: a port beyond loopback would answer to everyone.
    """
    faults = [*faults_of_proxy(config, environ)]
    if hosts := [*_hosts_with_secret(config)]:
        problem = _problem(lambda: read_secrets(config.security, environ))
        faults += [
            f"{key}: got {host!r} without a secret ({problem}); allowed: a loopback address, or a "
            f"secret in security.secret_file or the environment's {ENV_NAME}"
            for key, host in hosts
            if problem is not None
        ]
    if faults:
        raise ConfigError(faults)


def needs_secret(config: Config) -> bool:
    """Return whether another process must know the proxy's secret: an agent, another proxy or a
    kvrs engine. Otherwise the proxy can make one itself.
    """
    return not config.cluster.backend.is_stock or has_peers_or_agents(config)


def has_peers_or_agents(config: Config) -> bool:
    return bool(config.proxy.peers or config.proxy.peer_port or config.agents_run)


def notes(config: Config) -> Iterator[str]:
    """Yield a note for each setting that is allowed but leaves a port or an identity
    unprotected.
    """
    if config.cluster.backend.is_stock:
        yield (
            f"note: cluster.backend: {config.cluster.backend} instances cannot prove their "
            f"identity: a process at the address of a dead one gets prompts and the API key "
            f"(kvrs docs security)"
        )


def faults_of_proxy(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield faults of a proxy's client port and admin port, which the cluster's secret does not
    protect.
    """
    proxy = config.proxy
    needs_keys = not (is_loopback(proxy.host) or proxy.allow_anonymous)
    if needs_keys and not has_keys(config.security, environ):
        yield (
            f"proxy.host: got {proxy.host!r}, and clients need no key; allowed: a loopback "
            f"address, or keys in security.key_file or the environment's {KEYS_ENV_NAME}, or "
            f"proxy.allow_anonymous: true behind a gateway that authenticates them"
        )
    if not is_loopback(proxy.admin_host):
        problem = _problem(lambda: read_admin_tokens(config.security, environ))
        if problem is not None:
            yield (
                f"proxy.admin_host: got {proxy.admin_host!r} without a token ({problem}); allowed: "
                f"a loopback address, or a token in security.admin_token_file or the "
                f"environment's {ADMIN_ENV_NAME}"
            )


def _hosts_with_secret(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, host) for each host beyond loopback whose port the cluster's secret protects."""
    hosts: list[tuple[str, str | None]] = [
        ("proxy.peer_host", config.proxy.peer_host),
        ("proxy.gossip_host", config.proxy.gossip_host),
    ]
    for node in config.cluster.nodes:
        # A stock engine's ports are not bound by kvrs, and the secret does not protect them.
        ours = () if config.cluster.backend.is_stock else node.instances
        for instance in ours:
            hosts += [
                (f"cluster.nodes: instance {instance.id!r}: {key}", getattr(instance, key))
                for key in ("host", "bind")
            ]
            hosts += [
                (f"cluster.nodes: instance {instance.id!r}: stage {stage}: host", host.host)
                for stage, host in instance.remote_stages.items()
            ]
        hosts += [
            (f"cluster.nodes: agent of node {node.id!r}: {key}", getattr(node.agent, key))
            for key in ("host", "bind")
        ]
    return ((key, host) for key, host in hosts if host is not None and not is_loopback(host))


def _problem(read: Callable[[], list[bytes]]) -> str | None:
    """Return the reason why `read` gives no key or token; None: it gives some."""
    try:
        return None if read() else "there is none"
    except ConfigError as error:
        return "; ".join(error.faults)
