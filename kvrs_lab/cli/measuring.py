"""Commands that measure: replays, simulations, and the reports of both."""

import os
from pathlib import Path

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.cli.common import filled
from kvrs.config.file import ENV_NAME, Config, checked, load_source, read_secret
from kvrs.errors import check_extras


def replay(
    url: opt.Url,
    trace: opt.ReplayTrace = None,
    preset: opt.TracePreset = None,
    requests: opt.Requests = None,
    rate: opt.Rate = None,
    length_scale: opt.LengthScale = 1.0,
    model: opt.ReplayModel = None,
    plain: opt.Plain = False,
    seed: opt.ReplaySeed = 0,
    oracle: opt.Oracle = False,
    fault: opt.ReplayFault = None,
    admin_url: opt.AdminUrl = None,
    config: opt.ReplayConfig = None,
    out: opt.Out = Path("out/replay"),
) -> None:
    """Replay a trace against an OpenAI endpoint, inject faults if asked to, and write a report."""
    given = locals()
    from kvrs.net.admin import AdminClient
    from kvrs.net.tls import load_certificates
    from kvrs_lab.cluster.fault_injection import check_faults, inject_faults
    from kvrs_lab.load.command import ReplayOptions, run_replay
    from kvrs_lab.load.open_loop import Dialect

    settings = Config() if config is None else checked(load_source(config, os.environ))
    security, secret = settings.security, None
    if security.secret_file is not None or ENV_NAME in os.environ:
        secret = read_secret(security, os.environ)
    options = filled(
        ReplayOptions,
        given,
        dialect=filled(Dialect, given, api_key=os.environ.get("OPENAI_API_KEY")),
        secret=secret,
        admin=None if admin_url is None else AdminClient.of(settings, os.environ, admin_url),
        tls=load_certificates("security.tls", security.tls),
    )
    raise typer.Exit(0 if run_replay(options, inject_faults, check_faults) else 1)


def simulate(
    config: opt.DemoConfig = None,
    trace: opt.SimulateTrace = None,
    requests: opt.SimulatedStreams = None,
    rate: opt.SimulatedRate = None,
    fault: opt.SimulatedFault = None,
    deaths: opt.RandomDeaths = 0,
    seed: opt.FirstSeed = 0,
    seeds: opt.Seeds = 1,
    proxies: opt.SimulateProxies = 1,
    jobs: opt.Jobs = 1,
    json: base.Json = False,
) -> None:
    """Simulate a cluster in virtual time, with faults, and check the invariants as it runs."""
    given = locals()
    from kvrs_lab.sim.case import SimulateOptions
    from kvrs_lab.sim.command import run_simulation

    options = filled(SimulateOptions, given)
    raise typer.Exit(run_simulation(options))


def compare(
    policies: opt.Compared,
    config: opt.DemoConfig = None,
    trace: opt.SimulateTrace = None,
    requests: opt.SimulatedStreams = None,
    rate: opt.SimulatedRate = None,
    fault: opt.SimulatedFault = None,
    deaths: opt.RandomDeaths = 0,
    seeds: opt.ComparedSeeds = 10,
    jobs: opt.Jobs = 1,
    json: base.Json = False,
) -> None:
    """Simulate several policies under the same load and faults, and tell which one is better."""
    given = locals()
    from kvrs_lab.sim.case import SimulateOptions
    from kvrs_lab.sim.comparison import parse_policies, run_comparison

    options = filled(SimulateOptions, given, policy=parse_policies(policies))
    raise typer.Exit(run_comparison(options))


def tune(
    space: opt.TuneSpace,
    goal: opt.TuneGoal,
    trials: opt.TuneTrials = 30,
    config: opt.DemoConfig = None,
    trace: opt.SimulateTrace = None,
    requests: opt.SimulatedStreams = None,
    rate: opt.SimulatedRate = None,
    fault: opt.SimulatedFault = None,
    deaths: opt.RandomDeaths = 0,
    seeds: opt.TuneSeeds = 5,
    jobs: opt.Jobs = 1,
) -> None:
    """Search for better values of settings in the simulator, and test them on a held-out load."""
    given = locals()
    check_extras("tune")
    from kvrs_lab.sim.case import SimulateOptions
    from kvrs_lab.sim.tuning import TuneOptions, run_tuning

    case = filled(SimulateOptions, given)
    raise typer.Exit(run_tuning(filled(TuneOptions, given), case))


def report(files: opt.Files) -> None:
    """Show a report, or compare several: every measure with its ratio to the first one."""
    from kvrs_lab.report.command import run_report

    run_report(files)
