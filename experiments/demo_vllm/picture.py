"""The kept stream as a film: each word when it came, and the kill, as an SVG that plays by itself.

    python -m experiments.demo_vllm.picture     # Of the kept result.

Without animation it shows the end. It names no font and no file of another site.
"""

import json
import math
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results"
_STREAM_S, _REST_S = 7.0, 5.0  # At least so long for the stream, and for its end.
_COLUMNS, _CHARACTER, _LINE = 94, 9.0, 24
_LEFT, _TOP = 37, 298
_INK, _GREY, _RED, _GREEN, _BLUE = "#1f2733", "#5b6675", "#d03b3b", "#1c8a4a", "#2457d6"


def film_of(kept: dict[str, Any]) -> str:
    """Draw a kept result of `run.py`."""
    return _Film(kept).drawn()


class _Film:
    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept
        self._events: list[tuple[float, str]] = kept["events"]
        self._ended_s = self._events[-1][0]
        self._killed_s: float = kept["killed_at_s"]
        # The longest pause is the one between the servers.
        times = [at_s for at_s, _ in self._events]
        self._pause_s, self._back_s = max((b - a, b) for a, b in pairwise(times))
        self._slower = max(1, math.ceil(_STREAM_S / self._ended_s))
        self._whole_s = self._ended_s * self._slower + _REST_S

    def drawn(self) -> str:
        kept, victim, target = self._kept, self._kept["victim"], self._kept["went_to"]
        back = (
            f"{target} goes on: {kept['loaded_tokens']} tokens of KV restored from the memory of "
            f"the dead {victim}, {kept['computed_tokens']} computed"
        )
        end = f"{kept['tokens']} tokens, each exactly once; the same text as without the kill"
        lines = len(_wrapped(self._text()))
        height = _TOP + lines * _LINE + 64
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 {height}" '
            f'font-family="system-ui, sans-serif" font-size="14" role="img" '
            f'aria-label="A stream of vLLM goes on, word by word, after its server is killed">',
            f'<rect width="920" height="{height}" rx="12" fill="#fbfbfd"/>',
            '<g transform="translate(0 36)">',
            *self._cluster(victim, target),
            "</g>",
            f'<rect x="20" y="240" width="880" height="{height - 260}" rx="8" fill="#161b22"/>',
            f'<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
            f'font-size="15"><text x="{_LEFT}" y="{_TOP - 30}" fill="#8b949e">'
            f"&gt; {escape(kept['prompt'])}</text>",
            *self._words(),
            "</g>",
            *self._caption("the client streams one answer", _GREY, 0, self._killed_s),
            *self._caption(
                f"SIGKILL of all processes of {victim}", _RED, self._killed_s, self._back_s
            ),
            *self._caption(back, _GREEN, self._back_s, self._ended_s),
            *self._caption(end, _GREEN, self._ended_s, None),
            f'<text x="883" y="{height - 34}" font-size="12" fill="#8b949e" text-anchor="end">'
            f"real vLLM on CPUs; longest pause {self._pause_s * 1000:.0f} ms; "
            f"played {self._slower} times slower</text>",
            "</svg>\n",
        ]
        return "\n".join(parts)

    def _text(self) -> str:
        return "".join(text for _, text in self._events)

    def _cluster(self, victim: str, target: str) -> Iterator[str]:
        """Draw client, proxy and both servers with their memory, and which of them is at work."""
        yield from _box(20, 76, 110, 64, "client", "OpenAI API")
        yield from _box(230, 66, 160, 84, "kvrs proxy", "every token once", _BLUE)
        yield '<path d="M130 108H230" stroke="#9aa4b2" stroke-width="2"/>'
        for name, y in ((victim, 24), (target, 118)):
            yield from _box(520, y, 170, 66, f"vLLM {name}", "decode")
            yield from _box(740, y, 160, 66, f"memory of {name}", "KV, held by the agent")
        at_work = '<path d="M390 96C450 70 470 57 518 57"/>'
        dead = _box(520, 24, 170, 66, f"{victim} is dead", "SIGKILL", _RED)
        restored = (
            '<path d="M390 122C450 148 470 151 518 151"/><rect x="520" y="118" width="170" '
            'height="66" rx="8"/><path d="M740 84C715 100 705 108 692 124M705 105l-13 19 20 -6"/>'
        )
        yield f'<g fill="none" stroke-width="3" stroke="{_BLUE}" opacity="0">{at_work}'
        yield f"{self._shown(0, self._killed_s)}</g>"
        yield f"<g>{''.join(dead)}{self._shown(self._killed_s, None)}</g>"
        yield f'<g fill="none" stroke-width="3" stroke="{_GREEN}">{restored}'
        yield f"{self._shown(self._back_s, None)}</g>"

    def _words(self) -> Iterator[str]:
        """Draw each event's text in its place, from when it came on."""
        lines = _wrapped(self._text())
        place, line, column = 0, 0, 0
        for at_s, text in self._events:
            color = "#e6edf3" if at_s < self._back_s else "#7ee787"
            run = ""
            for character in text:
                if column == len(lines[line]) and character == " ":
                    yield from self._piece(run, line, column - len(run), color, at_s)
                    run, line, column = "", line + 1, 0
                elif place or character != " ":
                    run, column = run + character, column + 1
                place += 1
            yield from self._piece(run, line, column - len(run), color, at_s)

    def _piece(self, text: str, line: int, column: int, color: str, at_s: float) -> Iterator[str]:
        column += len(text) - len(text.lstrip())
        if text := text.strip():
            x, y, width = _LEFT + column * _CHARACTER, _TOP + line * _LINE, len(text) * _CHARACTER
            yield (
                f'<text x="{x:.0f}" y="{y}" textLength="{width:.0f}" fill="{color}">'
                f"{escape(text)}{self._shown(at_s, None)}</text>"
            )

    def _caption(self, text: str, color: str, from_s: float, to_s: float | None) -> Iterator[str]:
        unless_animated = 0 if to_s is not None else 1
        yield (
            f'<text x="20" y="36" font-size="16" font-weight="600" fill="{color}" '
            f'opacity="{unless_animated}">{escape(text)}{self._shown(from_s, to_s)}</text>'
        )

    def _shown(self, from_s: float, to_s: float | None) -> str:
        """Animate the opacity: seen from one time of the stream to another, or to the end."""
        times = [from_s] if to_s is None else [from_s, to_s]
        shares = [at_s * self._slower / self._whole_s for at_s in times]
        values = ("0;1", "0;1;0")[len(times) - 1]
        keys = ";".join(f"{share:.4f}".rstrip("0").rstrip(".") for share in (0, *shares))
        return (
            f'<animate attributeName="opacity" dur="{self._whole_s:.1f}s" calcMode="discrete" '
            f'repeatCount="indefinite" values="{values}" keyTimes="{keys}"/>'
        )


def _box(
    x: int, y: int, width: int, height: int, title: str, below: str, stroke: str = "#9aa4b2"
) -> Iterator[str]:
    middle, center = x + width // 2, y + height // 2
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#fff" '
        f'stroke="{stroke}" stroke-width="2"/>'
    )
    yield (
        f'<text x="{middle}" y="{center - 4}" text-anchor="middle" font-weight="600" '
        f'fill="{_INK}">{title}</text>'
    )
    yield (
        f'<text x="{middle}" y="{center + 16}" text-anchor="middle" font-size="12" '
        f'fill="{_GREY}">{below}</text>'
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text.strip(), _COLUMNS, break_on_hyphens=False)


def main() -> None:
    kept = json.loads((RESULTS / "demo_vllm.json").read_text())
    (RESULTS / "demo_vllm.svg").write_text(film_of(kept))


if __name__ == "__main__":
    main()
