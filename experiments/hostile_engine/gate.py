"""A gate before a scripted server, which passes everything on but completions of marked prompts:
those get the bytes of a broken engine.

    python -m experiments.hostile_engine.gate TARGET_PORT KIND...

Prints its port, and a line for each broken answer that it has sent; serves until the end of stdin.
"""

import json
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

MARK = (4001, 4002)  # Marked prompts begin with these ids; the third one is the number of a kind.
_MARKED = re.compile(rb"4001, ?4002, ?(\d+)")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WRITE_BYTES = 1 << 20
RECORD_EVENTS = 2000  # Events of a stream whose record is to be packed, of some 400 bytes.
_SEED = 3


def informational() -> Iterator[bytes]:
    """2 MB of answers 1xx."""
    for _ in range(2):
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000


def one_event() -> Iterator[bytes]:
    """15 MB of one event, 300 further bytes one by one, and the event's end."""
    yield _HEAD + b"6\r\ndata: \r\n"
    for _ in range(15):
        yield b"%x\r\n%b\r\n" % (1_000_000, b"x" * 1_000_000)
    for _ in range(300):
        time.sleep(0.005)
        yield b"1\r\nx\r\n"
    yield b"2\r\n\n\n\r\n"


def tiny_chunks() -> Iterator[bytes]:
    """7 MB of chunks of one byte."""
    yield _HEAD + b"6\r\ndata: \r\n"
    for _ in range(7):
        yield b"1\r\nx\r\n" * (1_000_000 // 6)


def record() -> Iterator[bytes]:
    """A stream of many tokens, which then goes on without any."""
    words = random.Random(_SEED).choices(["one", "word", "of", "many", "in", "the", "text"], k=4096)
    events = list[bytes]()
    for n in range(RECORD_EVENTS):
        choice = {
            "index": 0,
            "text": " ".join(words[n : n + 40]),
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [5 + n],
            "prompt_token_ids": [*MARK, KINDS.index(record)] if n == 0 else None,
        }
        if n:
            del choice["prompt_token_ids"]
        event = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": "tiny",
            "choices": [choice],
        }
        data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        events.append(b"%x\r\n%b\r\n" % (len(data), data))
    yield _HEAD + b"".join(events)
    time.sleep(60)


KINDS: list[Callable[[], Iterator[bytes]]] = [informational, one_event, tiny_chunks, record]


def _serve(client: socket.socket, target: int) -> None:
    with client, suppress(OSError):
        data = b""
        while True:
            while (end := data.find(b"\r\n\r\n")) < 0:
                if not (more := client.recv(_WRITE_BYTES)):
                    return
                data += more
            found = _LENGTH.search(data, 0, end + 2)
            size = end + 4 + (int(found[1]) if found else 0)
            while len(data) < size:
                if not (more := client.recv(_WRITE_BYTES)):
                    return
                data += more
            request, data = data[:size], data[size:]
            marked = _MARKED.search(request, end)
            if marked is not None and marked[1].decode() in sys.argv[2:]:
                _break(client, int(marked[1]))
                return
            request = request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            with socket.create_connection(("127.0.0.1", target)) as server:
                server.sendall(request)
                while more := server.recv(_WRITE_BYTES):
                    client.sendall(more)
            return


def _break(client: socket.socket, kind: int) -> None:
    sent_bytes = 0
    with suppress(OSError):
        for piece in KINDS[kind]():
            client.sendall(piece)
            sent_bytes += len(piece)
    # The lines of several threads are not to mix.
    sys.stdout.write(f"{KINDS[kind].__name__} {sent_bytes}\n")
    sys.stdout.flush()


def main() -> None:
    target = int(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listening, target), daemon=True).start()
        sys.stdin.read()


def _accept(listening: socket.socket, target: int) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=_serve, args=(client, target), daemon=True).start()


if __name__ == "__main__":
    main()
