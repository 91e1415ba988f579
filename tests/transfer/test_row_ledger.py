"""A row is trusted exactly while it holds what its ledger says."""

import fcntl
import os
import stat
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import TransferError
from kvrs.transfer.rows.ledger import MAX_KEY_BYTES, LedgerView, RowLedger

ROWS = 4
KEYS = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
STEPS = st.lists(
    st.tuples(st.sampled_from(["writing", "holds"]), st.integers(0, ROWS - 1), KEYS), max_size=40
)


@given(STEPS)
def test_a_row_holds_the_key_of_its_last_whole_copy(steps: list[tuple[str, int, bytes]]) -> None:
    ledger = RowLedger(ROWS, 4096)
    view = LedgerView(ledger.descriptor)
    being_written: set[int] = set()
    held: dict[int, bytes] = {}
    for step, row, key in steps:
        if step == "writing":
            ledger.writing(row)
            being_written.add(row)
            held.pop(row, None)
        else:
            ledger.holds(row, key)
            if row in being_written:
                being_written.remove(row)
                held[row] = key
        found = {each: view.entry(each) for each in range(ROWS)}
        assert {each: entry[0] for each, entry in found.items() if entry} == held
    os.close(ledger.descriptor)


@given(STEPS)
def test_every_copy_changes_the_sequence(steps: list[tuple[str, int, bytes]]) -> None:
    """Else a reader takes the bytes of two copies for those of one."""
    ledger = RowLedger(ROWS)
    view = LedgerView(ledger.descriptor)
    seen: set[tuple[int, int]] = set()
    for step, row, key in steps:
        if step == "holds":
            ledger.holds(row, key)
            continue
        before = view.sequences()[row]
        ledger.writing(row)
        assert not view.still(row, before)
        assert (row, view.sequences()[row]) not in seen
        seen.add((row, view.sequences()[row]))
    os.close(ledger.descriptor)


def test_a_closed_ledger_has_no_row_and_another_epoch() -> None:
    ledger = RowLedger(ROWS)
    view = LedgerView(ledger.descriptor)
    ledger.writing(1)
    ledger.holds(1, b"key")
    entry, epoch = view.entry(1), view.epoch
    assert entry is not None
    ledger.close()
    assert view.sequences() == [0] * ROWS
    assert not view.still(1, entry[1])
    assert view.epoch != epoch


def test_a_key_that_is_too_long_is_not_told() -> None:
    ledger = RowLedger(ROWS)
    ledger.writing(0)
    ledger.holds(0, bytes(MAX_KEY_BYTES + 1))
    assert LedgerView(ledger.descriptor).entry(0) is None


def test_protection_is_told_beside_the_key_and_ends_with_it() -> None:
    ledger = RowLedger(ROWS)
    view = LedgerView(ledger.descriptor)
    for row in range(3):
        ledger.writing(row)
        ledger.holds(row, b"k" * MAX_KEY_BYTES, protected=row == 1)
    ledger.protect(2, protected=True)
    assert view.protected() == [1, 2]
    assert view.entry(2) == (b"k" * MAX_KEY_BYTES, 2)
    ledger.protect(1, protected=False)
    ledger.writing(2)
    ledger.holds(2, b"other")
    assert view.protected() == []
    assert view.entry(2) == (b"other", 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:64], "4 rows in 64 bytes"),
        (lambda data: data[:-1], "319 bytes"),
        (lambda data: b"", "0 bytes"),
        (lambda data: b"x" + data[1:], "xvrsrows"),
        (lambda data: data[:8] + b"\x01" + data[9:], "version 1"),
        (lambda data: data + bytes(64), "4 rows in 384 bytes"),
    ],
)
def test_memory_that_is_no_ledger_is_refused(change: Callable[[bytes], bytes], said: str) -> None:
    ledger = RowLedger(ROWS)
    data = change(os.pread(ledger.descriptor, 1 << 20, 0))
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(other, data)
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(TransferError, match=said):
        LedgerView(other)


def test_memory_that_can_be_cut_is_refused() -> None:
    ledger = RowLedger(ROWS)
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(other, os.pread(ledger.descriptor, 1 << 20, 0))
    with pytest.raises(TransferError, match="sealed"):
        LedgerView(other)


def test_a_reader_of_another_user_cannot_open_a_ledger_for_writing() -> None:
    """All users may open memory by a descriptor of it, unless its mode says otherwise."""
    ledger = RowLedger(ROWS, 4096)

    mode = os.fstat(ledger.descriptor).st_mode

    assert stat.S_IMODE(mode) == 0o600
    os.close(ledger.descriptor)
