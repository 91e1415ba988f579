"""Outlier ejection: an instance that reports good health but fails its requests gets nothing new.

An instance is ejected when it fails after the pause of a failure again, or after several failures
in a row; never more than half of a role. A refusal (4xx), an error before any token, and the lack
of a first token in time count as failures only once another instance has accepted the request. A
refusal that blames the request is final: no other instance is asked. Two instances that fail a
request alike show that the request is the cause, and neither is charged; but two equal errors that
do not name the input may have a cause that the instances share (a full disk, a registry, a
restart), so the request is tried once more after a pause. Logits that are not numbers count once
another instance has the stream's next token. Busy answers do not eject: the instance pauses.
"""

from typing import assert_never

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.member import BUSY_PAUSE_S, EJECTION_PAUSE_S, FAILURE_PAUSE_S, Member, pause_s
from kvrs.core.model.streams import RefusedBy, Stream
from kvrs.core.state import State

CONSECUTIVE_FAILURES = 3
# Connections that break within this time count as one failure.
_TOGETHER_S = 0.1
# Pause before a request is tried a third time that two instances have failed with one error.
ERROR_PAUSE_S = 1.0
# Time without an ejection after which pauses restart with the shortest.
_FORGIVEN_AFTER_S = 60.0


def started(state: State, stream: Stream, member: Member) -> None:
    """Note an attempt at an instance; at a closed instance it is the probe."""
    health = member.answers
    if health.until_s is not None and health.probe is None:
        health.probe = stream.id
    if health.busy_until_s is not None:
        health.try_busy(stream.id, state.view.now_s)


def answered(state: State, stream: Stream, member: Member, now_s: float) -> None:
    """Note an instance's answer: the attempt's prefill, or its first token."""
    health = member.answers
    health.awaited.pop(stream.id, None)
    health.answered_s = now_s
    if health.whole or health.probe is not None:
        health.left(stream.id)
    # An attempt from before the pause does not end it.
    if health.until_s is None or stream.attempt.started_s >= health.closed_s:
        was_ejected = health.is_ejected
        health.consecutive, health.refuses_wrongly = 0, False
        if health.pauses:  # Each closing and each busy answer adds a pause, so 0 means open.
            health.open()
        if was_ejected:
            health.readmitted_s = now_s
            state.actions.append(act.Readmitted(member.id, member.epoch))
    if stream.refusals:
        contradict(state, stream, member)


def contradict(state: State, stream: Stream, accepting: Member) -> None:
    """Charge instances that refused what another instance has accepted."""
    for refusal in stream.refusals:
        refuser = state.view.members.get(refusal.instance)
        if (
            refuser is not None
            and not refuser.abilities.prefills
            and not accepting.abilities.decodes
        ):
            # A prefill instance's answer does not show that a decode instance refused wrongly.
            continue
        stream.forget_refusal(refusal.instance)
        if refuser is None or refuser is accepting or refuser.epoch != refusal.epoch:
            continue
        is_probe = refusal.is_probe and refuser.answers.until_s is not None
        cause = refusal.cause
        if refusal.failure.is_refusal:
            refuser.answers.refuses_wrongly = True
            cause = "it refuses what others accept"
        _charge(state, refuser, cause, is_probe=is_probe)


def computed(state: State, stream: Stream, member: Member) -> None:
    """Note that an instance has computed the stream's next token: earlier logits that were not
    numbers were the fault of the instance before.
    """
    for each in stream.recovery.overflowed:
        other = state.view.members.get(each.instance)
        if other is None or other is member or other.epoch != each.epoch:
            continue
        is_probe = each.is_probe and other.answers.until_s is not None
        _charge(state, other, "its logits overflow where others' do not", is_probe=is_probe)


def failed(state: State, stream: Stream, event: ev.AttemptFailed) -> None:
    """Note an attempt's failure at an instance: broken, busy, or refused, as far as is known."""
    member = state.view.members.get(event.instance)
    if member is None:
        return
    health = member.answers
    is_probe = health.probe == stream.id
    health.left(stream.id)
    match event.failure:
        case (
            ev.FailureKind.REFUSED
            | ev.FailureKind.DENIED
            | ev.FailureKind.ERROR
            | ev.FailureKind.SILENT
            | ev.FailureKind.NOT_A_NUMBER
        ):
            _doubt(state, stream, member, event, is_probe=is_probe)
        case ev.FailureKind.BUSY:
            wait_s = event.retry_after_s or 0.0
            health.note_busy(event.instance, stream.id, wait_s, state.view.now_s)
            state.view.prefill_order.restrict(member)
            if not health.is_ejected or is_probe:
                _pause(state, member, event.cause, BUSY_PAUSE_S)
        case ev.FailureKind.DIFFERS:
            pass  # Near-ties and parsers are no fault of an instance.
        case ev.FailureKind.BROKEN:
            if event.abrupt:
                if (
                    state.view.now_s - health.abrupt_s
                    < max(_TOGETHER_S, state.settings.policy.recovery.gather_s)
                    and not is_probe
                ):
                    return
                health.abrupt_s = state.view.now_s
            _charge(state, member, event.cause, is_probe=is_probe)
        case _:
            assert_never(event.failure)


def _doubt(
    state: State, stream: Stream, member: Member, event: ev.AttemptFailed, *, is_probe: bool
) -> None:
    """Note a failure of which the request may be the cause."""
    by = RefusedBy(event.instance, member.epoch, is_probe, event.failure, event.cause)
    if event.failure is ev.FailureKind.NOT_A_NUMBER:
        stream.recovery.note_overflow(by)
    else:
        stream.note_refusal(by)
    if is_probe:  # The next probe waits: a second instance may show the cause meanwhile.
        member.answers.close(event.cause, state.view.now_s, FAILURE_PAUSE_S)
    elif event.failure is ev.FailureKind.SILENT:
        _pause(state, member, event.cause, FAILURE_PAUSE_S)


def is_refused_for_good(state: State, stream: Stream, event: ev.AttemptFailed) -> bool:
    """Return whether a refusal or an error goes to the client: nothing was produced, and a second
    instance has answered likewise, or there is no other (then an error must come twice from the
    same one). An error that does not name the input (`final`) must come once more after a pause. A
    final refusal goes at once, unless the instance is known to refuse what others accept.
    """
    if stream.first_token_sent or event.produced_tokens:
        return False
    member = state.view.members.get(event.instance)
    if event.failure is ev.FailureKind.ERROR:
        is_equal = is_equal_error(state, stream, event)
        return is_equal and (event.final or stream.recovery.has_paused)
    if not event.failure.is_refusal:
        return False
    refused_by = (each for each in stream.refusals if each.failure.is_refusal)
    if any(each.instance != event.instance for each in refused_by):
        return True
    if member is not None and member.answers.refuses_wrongly:
        return False
    return event.final or member is None or not _others(state, stream, member)


def is_equal_error(state: State, stream: Stream, event: ev.AttemptFailed) -> bool:
    """Return whether a second instance has failed the stream with the same error, or the only one
    twice.
    """
    if event.failure is not ev.FailureKind.ERROR or event.produced_tokens:
        return False
    member = state.view.members.get(event.instance)
    again = any(
        each.instance == event.instance and each.is_alike(event) for each in stream.refusals
    )
    return _is_shown_by_another(state, stream, event) or (
        again and (member is None or not _others(state, stream, member))
    )


def is_slow(state: State, stream: Stream, event: ev.AttemptFailed) -> bool:
    """Return whether a request is slow anywhere: no first token came in time from a second instance
    either, or there is no other.
    """
    if event.failure is not ev.FailureKind.SILENT:
        return False
    member = state.view.members.get(event.instance)
    return _is_shown_by_another(state, stream, event) or (
        member is not None and not _others(state, stream, member)
    )


def keep_to_asked(state: State, stream: Stream, event: ev.AttemptFailed) -> None:
    """Let a slow request go only to the instances that have it: others would stand still for it,
    too.
    """
    asked = [each.instance for each in stream.refusals if each.is_alike(event)]
    member = state.view.members.get(event.instance)
    stream.keep_to([*asked, event.instance], [] if member is None else peers(state, member))


def _is_shown_by_another(state: State, stream: Stream, event: ev.AttemptFailed) -> bool:
    """Return whether another running instance has failed the stream in the same way."""
    members = state.view.members
    return any(
        each.instance != event.instance
        and each.is_alike(event)
        and (other := members.get(each.instance)) is not None
        and other.epoch == each.epoch
        for each in stream.refusals
    )


def _others(state: State, stream: Stream, member: Member) -> list[Member]:
    """Other instances of the same role that may be asked for the stream."""
    return [
        other
        for other in peers(state, member)
        if other is not member
        and stream.is_served_at(other)
        and not other.is_drained
        and not other.answers.is_ejected
    ]


def left(state: State, stream: Stream, member: Member) -> None:
    """Note the end of an attempt at an instance, for whatever reason."""
    health = member.answers
    is_overdue = health.is_overdue(state.view.now_s, member.reported_queue_s)
    health.left(stream.id)
    if is_overdue and not health.is_ejected:
        _pause(state, member, "it answers nothing", FAILURE_PAUSE_S)


def _charge(state: State, member: Member, cause: str, *, is_probe: bool) -> None:
    health = member.answers
    health.consecutive += 1
    if health.is_ejected:
        if is_probe:
            _eject(state, member, cause)
    elif (is_probe or health.consecutive >= CONSECUTIVE_FAILURES) and _may_eject(state, member):
        if state.view.now_s - health.readmitted_s > _FORGIVEN_AFTER_S:
            health.ejections = 0
        _eject(state, member, cause)
    else:
        _pause(state, member, cause, FAILURE_PAUSE_S)


def _pause(state: State, member: Member, cause: str, first_s: float) -> None:
    health = member.answers
    if health.until_s is not None and state.view.now_s < health.until_s:
        return  # The attempt is from before the pause, which is not prolonged.
    if health.is_ejected:
        _eject(state, member, cause)
        return
    pause = pause_s(member.id, first_s, health.pauses)
    health.close(cause, state.view.now_s, pause)


def _eject(state: State, member: Member, cause: str) -> None:
    health = member.answers
    pause = pause_s(member.id, EJECTION_PAUSE_S, health.ejections)
    health.is_ejected = True
    health.ejections += 1
    health.close(cause, state.view.now_s, pause)
    state.actions.append(act.Ejected(member.id, member.epoch, cause, pause))


def _may_eject(state: State, member: Member) -> bool:
    """Return whether an instance may be ejected: at most half of a role, so that at least one
    stays.
    """
    for does in (_prefills, _decodes):
        peers = [other for other in state.view.members.values() if does(other)]
        ejected = sum(other.answers.is_ejected for other in peers)
        if does(member) and 2 * (ejected + 1) > len(peers):
            return False
    return True


def peers(state: State, member: Member) -> list[Member]:
    """Instances of the member's role, including itself."""
    return [
        other
        for other in state.view.members.values()
        if (member.abilities.prefills and other.abilities.prefills)
        or (member.abilities.decodes and other.abilities.decodes)
    ]


def _prefills(member: Member) -> bool:
    return member.abilities.prefills


def _decodes(member: Member) -> bool:
    return member.abilities.decodes
