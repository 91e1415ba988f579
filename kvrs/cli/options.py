"""Command-line options with type, bounds and help text, for options that take more than a line."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvrs.config import presets
from kvrs.config.policy import PolicyName
from kvrs.config.proxy import MAX_WORKERS

# Short name and full list of the policies: the list is too wide for the help's column of types.
POLICY, POLICIES = "POLICY", ", ".join(policy.value for policy in PolicyName)
FILE = "With a file"  # Headings under which the help of `kvrs proxy` groups its options.
URLS = "Without a file"


class StockEngine(StrEnum):
    """Stock engines among the values of `Backend`, repeated because importing that module
    is slow.
    """

    VLLM = "vllm"
    SGLANG = "sglang"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


ConfigFile = Annotated[
    Path, typer.Option("--config", help="YAML file; `kvrs config init` writes a first one")
]
ProxyFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file; `kvrs config init --for vllm` writes a first one",
        rich_help_panel=FILE,
    ),
]
Prefill = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Server that computes prompts, as http://HOST:PORT; repeatable. Without any, the "
        "decode servers compute prompts",
        rich_help_panel=URLS,
    ),
]
Decode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Server that decodes, as http://HOST:PORT; repeatable",
        rich_help_panel=URLS,
    ),
]
ProxyModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Directory of the model, or its name in the Hugging Face cache; default: the name "
        "that the servers report",
        rich_help_panel=URLS,
    ),
]
StockBackend = Annotated[
    StockEngine | None,
    typer.Option(
        "--backend",
        help="Engine of these servers; default: vllm",
        rich_help_panel=URLS,
    ),
]
Host = Annotated[str | None, typer.Option(help="Address of the OpenAI API [127.0.0.1]")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
NoEnv = Annotated[
    bool, typer.Option("--no-env", help="Take no settings and no ${NAME} from the environment")
]
# Facts about the `kvrs lab up` that starts this proxy, in JSON.
LaunchJson = Annotated[str | None, typer.Option("--launch", hidden=True)]
# A `WorkerPlan` in JSON, passed by the proxy that starts this worker.
WorkerJson = Annotated[str | None, typer.Option("--worker", hidden=True)]
Preset = Annotated[
    presets.SystemPreset | None,
    typer.Option(help="Settings that replace the defaults (kvrs docs presets)"),
]
Model = Annotated[
    Path | None, typer.Option(help="Hugging Face directory; without it, a tiny random model")
]
ProfiledUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Running, idle vLLM server to measure, as http://HOST:PORT"),
]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the OpenAI API [8000]")]
AdminPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of state and metrics [8001]")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_WORKERS, help="Worker processes that share the client port [1]"),
]
ProfileOut = Annotated[Path, typer.Option(help="JSON file to write, for `profiles.prefill`")]
LongestTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longest prompt; default: the model's, at most 1,024 (vLLM: 16,384)"),
]
MaxBatchTokens = Annotated[int, typer.Option(min=1, help="Embedded engine: tokens per step")]
