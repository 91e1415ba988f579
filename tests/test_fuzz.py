"""A few hundred mutated inputs to every parser of bytes from outside."""

import traceback
from random import Random

import pytest

from tests.fuzz_targets import TARGETS, Target

INPUTS = 300
LONGEST_BYTES = 4096
KEPT = 64  # Inputs of a target that are mutated further.


def mutated(draw: Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A few changes of the kinds that parsers trip over."""
    found = bytearray(data)
    for _ in range(1 + int(draw.expovariate(1.0))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(7)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 2:
            del found[at : at + draw.randint(1, 16)]
        elif kind == 3:
            found[at:at] = found[at : at + draw.randint(1, 32)] * draw.choice((1, 2, 50))
        elif kind == 4 and words:
            found[at:at] = draw.choice(words)
        elif kind == 5:
            other = draw.choice(others)
            cut = draw.randrange(len(other) + 1)
            found[at:] = other[cut:]
        elif kind == 6 and found:
            found[at % len(found)] = draw.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(found[:LONGEST_BYTES])


def crashes_of(target: Target, inputs: int, seed: int) -> list[str]:
    """Run one parser; any exception but its refusals is a crash."""
    draw, corpus, found = Random(f"{seed} {target.name}"), list(target.seeds), list[str]()
    words = tuple(target.words)
    for _ in range(inputs):
        data = mutated(draw, draw.choice(corpus), corpus, words)
        try:
            target.run(data)
        except target.refused:
            continue
        except Exception as error:
            found.append("".join(traceback.format_exception(error)[-2:]))
            continue
        # Taken inputs lead further into the parser than refused ones.
        if len(corpus) < KEPT:
            corpus.append(data)
        else:
            corpus[draw.randrange(len(target.seeds), KEPT)] = data
    return found


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_every_input_is_taken_or_refused_by_name(target: Target) -> None:
    """Any other exception would end a task, or the process."""
    assert crashes_of(target, 10 if target.name == "yaml" else INPUTS, seed=0) == []
