"""Facts in load reports about the stages of an instance: their hosts, loans and replicas."""

from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StageInfo(msgspec.Struct, frozen=True):
    """A stage of an instance, and the process that runs its ranks."""

    stage: _Natural
    node: NodeId
    host_pid: int  # Process that runs the ranks: a stage host, or the instance itself.
    session: _Natural | None  # Number of the session at the stage host; None: there is no host.
    epoch: _Natural  # Epoch of the instance when the session was opened.
    # CPU time that the ranks have computed; each rank's starts again at 0 after 71 minutes.
    worked_s: _Seconds
    read_bytes: _Natural  # Bytes of weights read from files since the process began.
    # Instance that owns the host which runs the stage now; None: this instance.
    donor: InstanceId | None = None
    # Pages that the instance may use, if the stage is borrowed; None: all.
    pages: _Natural | None = None
    # Instance of the group whose host of the stage keeps replicas of this stage's parts of full
    # pages. None: no replicas; `unprotected` has the reason, if replicas are configured.
    replica_to: InstanceId | None = None
    unprotected: str | None = None
    replica_lag_pages: _Natural = 0  # Full pages that have no replica yet.
    # Bytes of replicas sent since the start of the instance.
    replica_sent_bytes: _Natural = 0
    replica_dropped_pages: _Natural = 0  # Pages that the holder did not accept or keep as replicas.


class StageLent(msgspec.Struct, frozen=True):
    """Pages of one of an instance's stages that another instance of the group uses."""

    to: InstanceId
    stage: _Natural
    pages: _Natural


class RestartReport(msgspec.Struct, frozen=True):
    """Report of the first token of an attempt that restarted at its instance after a stage lost
    cells.
    """

    stream: StreamId
    attempt: _Natural
    owner_epoch: _Natural
    # Pages whose lost part was a replica at the stage's new host.
    adopted_pages: _Natural
    recomputed_tokens: _Natural  # Tokens of the history that were computed again.
