"""What can go wrong by the user's or the world's doing. Our own bugs are assertions."""


class KvrsError(Exception):
    """Base of every error that kvrs raises on purpose."""


class ConfigError(KvrsError):
    """The configuration is wrong. `faults` holds one line per fault: path, value, what is allowed."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        # A worker process may have raised it.
        return ConfigError, (self.faults,)


class TraceError(KvrsError):
    """A trace is wrong; the message names file, line and reason."""


class RequestError(KvrsError):
    """A client's request is wrong (HTTP 4xx). `param` names the field and `code` the kind, as the OpenAI error body does."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class TransferError(KvrsError):
    """A page transfer failed: peer gone, refused at the hand-shake, bad frame, bad checksum, or too slow."""


class DamagedPageError(TransferError):
    """A page arrived whole, but with another checksum than it set out with: memory, a link or a fault on purpose."""


class UpstreamError(KvrsError):
    """An engine failed while it served a stream: reset, end without a finish, error event, or silence."""


class GossipError(KvrsError):
    """A gossip packet or a record in it is malformed or exceeds a bound; the message says which."""


class LogError(KvrsError):
    """An event log cannot be read or run again; the message names line and reason."""
