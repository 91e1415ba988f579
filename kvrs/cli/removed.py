"""Options of earlier versions and their replacements."""

from collections.abc import Sequence

from kvrs.errors import ConfigError

_QUESTION = "ask kvrs_lab.api.explain, whose Question has it"

# By command: each removed option, with what replaces it.
REMOVED = {
    "top": {
        "--json": "GET /kvrs/v1/overview of the admin port has it",
    },
    "incidents": {
        "--what-if": "kvrs lab explain --replay FILE --set policy.name=POLICY",
    },
    "lab explain": {
        "--log": "kvrs incidents FILE",
        "--budget-s": _QUESTION,
        "--checkpoint-at": _QUESTION,
        "--correct": _QUESTION,
        "--held-tokens": _QUESTION,
        "--host-bandwidth": _QUESTION,
        "--local-bandwidth": _QUESTION,
        "--others": _QUESTION,
        "--own-queue-depth": _QUESTION,
        "--policy": "answer.by_policy has the choice of each policy",
        "--queue-s": "give the requests ahead: --queue-depth",
        "--reused-tokens": _QUESTION,
        "--service-s": _QUESTION,
        "--target-queue-s": _QUESTION,
    },
    "lab compare": {
        "--out": "--json prints what it kept",
    },
    "lab replay": {
        "--api": "requests are completions; other clients drive chat",
        "--json": "report.json in --out has the report",
        "--max-input": "use --length-scale, or cut the trace",
        "--max-output": "use --length-scale, or cut the trace",
        "--repeat": "run it again with another --seed; kvrs lab report compares the reports",
        "--sample": "give a file of these requests, as by shuf(1)",
        "--slo-tpot": "goodput is within 0.2 s a token; report.json has each stream",
        "--slo-ttft": "goodput is within 2 s to the first token; report.json has each stream",
        "--text-prompts": "prompts are token ids",
        "--window": "use --requests for the first ones, or cut the trace",
    },
    "lab report": {
        "--json": "report.json has it, with the measures that are compared",
        "--out": "kvrs lab replay and demo write the page",
    },
    "lab simulate": {
        "--oracle": "reports are those of replays",
        "--out": "--json prints the outcome of each seed",
        "--policy": "set policy.name, or KVRS_POLICY__NAME; kvrs lab compare takes several",
    },
    "lab tune": {
        "--held-out": "the second half of --trace is held out, or other seeds",
    },
}


def check_options(arguments: Sequence[str]) -> None:
    """Check for options of earlier versions. Raises ConfigError: one is given; the message names
    what replaces it.
    """
    for command, options in REMOVED.items():
        words = command.split()
        if [*arguments[: len(words)]] == words:
            given = (each.partition("=")[0] for each in arguments[len(words) :])
            if faults := [
                f"{option}: this option is gone; {options[option]}"
                for option in dict.fromkeys(given)
                if option in options
            ]:
                raise ConfigError(faults)
