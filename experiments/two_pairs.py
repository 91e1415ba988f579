"""The cluster of the series of kills: two nodes with a prefill and a decode instance each, which
compute a tiny model in the time of OPT-13B on an A100, and a slow link between them.
"""

from kvrs.config.backup import BackupMode
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName

PACE = "opt-13b-a100-distserve-tp1"
REQUESTS_PER_S = 8.0
# The transfer of a long prompt costs about as much as computing it, so that both are chosen.
LINK_BYTES_PER_S = 20e6
# Memory of each agent: the KV of about a hundred streams.
BACKUP_BYTES = 64 << 20


def two_pairs(policy: PolicyName, seed: int, backup: BackupMode = BackupMode.OFF) -> Config:
    """Return the configuration of the cluster, with any free ports."""
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": {"seed": seed, "pace": PACE}, "allow_faults": True},
            "policy": {"name": policy.value},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S, "probe_interval_s": 1.0},
            "backup": {"mode": backup.value, "capacity_bytes": BACKUP_BYTES},
        }
    )
