"""What an instance is to be done with whose GPU is not well."""

from kvrs.policy.config import Degraded, Failing, GpuSettings
from kvrs.protocol.gpus import GpuState


def treatment_of(settings: GpuSettings, state: GpuState) -> Failing | None:
    """None: it is used like any other."""
    match state:
        case GpuState.HEALTHY:
            return None
        case GpuState.DEGRADED:
            return Failing.DRAIN if settings.degraded is Degraded.DRAIN else None
        case GpuState.FAILING:
            return settings.failing
