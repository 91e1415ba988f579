"""The style sheet of `report.html`: light and dark by the reader's setting, or narrow."""

from kvrs.core.model.estimates import Option

# Colours of the options that end in a token, on a light page and on a dark one.
OPTION_COLORS = {
    Option.MIGRATE: ("#1f6feb", "#5aa2ff"),
    Option.RECOMPUTE: ("#d97706", "#f5a53d"),
    Option.RESTORE: ("#0f9d78", "#3ecfa0"),
    Option.SPLIT: ("#c026a3", "#f07ad6"),
    Option.START: ("#8b5e34", "#c99a6b"),
    Option.IN_PLACE: ("#7c5cd6", "#b39bff"),
    Option.SUBSTITUTE: ("#0891b2", "#39c6e6"),
    Option.REUSE: ("#65a30d", "#a3d34a"),
    Option.REPLAY: ("#7d7a16", "#cfc94a"),
}


def _options(scheme: int) -> str:
    return " ".join(f"--{name}: {colors[scheme]};" for name, colors in OPTION_COLORS.items())


CSS = f"""\
:root {{ {_options(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_options(1)} }} }}
"""
CSS += """\
:root { color-scheme: light dark; --ink: #1d2430; --soft: #667085; --line: #d9dee7;
  --page: #f5f6f9; --card: #ffffff;
  --good: #117a43; --bad: #c22b32; --base: #a3acbb; --tokens: #4a5568; --fault: #c22b32; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #98a2b3; --line: #2c3340;
  --page: #0e1116; --card: #161b23;
  --good: #4ade80; --bad: #ff7b7b; --base: #5b6678; --tokens: #aab4c4; --fault: #ff7b7b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 20px 14px 48px; display: grid; gap: 16px;
  grid-template-columns: minmax(0, 1fr); }
header, section { background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 16px 18px; }
header { border-left: 6px solid var(--good); }
header.bad { border-left-color: var(--bad); }
header h1 { margin: 0 0 4px; font-size: clamp(20px, 4.5vw, 30px); line-height: 1.2;
  color: var(--good); }
header.bad h1 { color: var(--bad); }
header p { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
header ul { margin: 0 0 6px; padding-left: 20px; }
header .warning, header .note { margin-top: 8px; color: var(--fault); }
header .note { color: var(--ink); }
.kicker { font-size: 12px; letter-spacing: .08em; text-transform: uppercase; }
.words { color: var(--soft); font-size: 13px; }
.words { margin: 0 0 8px; }
h2, summary { font-size: 16px; font-weight: 600; margin: 0 0 2px; }
summary { cursor: pointer; }
.plot, .scroll { overflow-x: auto; }
.plot svg { display: block; width: 100%; min-width: 640px; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right; }
td.long { white-space: normal; min-width: 15em; overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
pre { font-size: 12px; overflow-x: auto; margin: 8px 0 0; }
"""
