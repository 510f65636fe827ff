"""The command line: `lmperf <verb>`, the same verbs as the workflow's rules.

Exit code 0: done; 1: a check or the run failed; 2: bad input, told in one line.  Progress goes to stderr, results to
stdout or to files.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lmperf import __version__
from lmperf.records import CheckFailed, InputError, canonical_json

try:  # newer releases of typer carry click inside
    from typer._click import exceptions as usage
except ImportError:
    from click import exceptions as usage

app = typer.Typer(
    name="lmperf",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A reproducible laboratory for language-model performance: raw text in, a report of trusted comparisons out.",
)

ConfigFiles = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="FILE", help="Configuration; repeat to overlay (default: config.yaml)."),
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key.")]
Spec = Annotated[str | None, typer.Option("--spec", metavar="JSON", help="The stage's spec (used by the workflow).")]
Data = Annotated[str | None, typer.Option("--data", metavar="DIR", help="Folder of corpus stages.")]
Reports = Annotated[str | None, typer.Option("--reports", metavar="DIR", help="Folder of results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; every error that a user can cause is one line and a documented exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        sys.exit(_fail(error, 2))
    except usage.ClickException as error:
        sys.exit(_fail(error.format_message(), 2))
    except CheckFailed as error:
        sys.exit(_fail(error, 1))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_fail(f"{where}{error.strerror or error}", 1))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: object, code: int) -> int:
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    return code


def tell(message: str) -> None:
    """One line of progress on stderr."""
    print(message, file=sys.stderr, flush=True)


def read_config(files: list[str] | None, overrides: list[str] | None) -> Any:
    """The configuration that --config and --set describe."""
    from lmperf.config import load

    return load(files or ["config.yaml"], overrides or ())


def plan_of(files: list[str] | None, overrides: list[str] | None) -> Any:
    """The plan of that configuration, the same that the workflow makes of it."""
    from lmperf.planning import make_plan
    from lmperf.workflow import settled

    return make_plan(settled(read_config(files, overrides)))


def run_stage(
    verb: str, spec: str | None, data: str | None, reports: str | None, config: list[str] | None,
    overrides: list[str] | None, only: list[str] | None = None,
) -> None:  # fmt: skip
    """Run one stage with a given spec, or with each spec of that verb in the configuration's plan, and remember it."""
    from lmperf.stages import STAGES
    from lmperf.steps import Stamps, step_of, steps

    if spec is not None:
        try:
            chosen = [json.loads(spec)]
        except json.JSONDecodeError as error:
            raise InputError(f"--spec: not valid JSON ({error})") from None
        folders = Path(data or "data"), Path(reports or "reports")
    else:
        plan = plan_of(config, overrides)
        found = {step.name: step for step in steps(plan) if step.verb == verb}
        chosen = [found[name].spec for name in _selected(verb, list(found), only)]
        folders = Path(data or plan.data), Path(reports or plan.reports)
    for one in chosen:
        STAGES[verb](one, *folders, tell)
        Stamps(folders[1]).record(step_of(verb, one, *map(str, folders)))


def _selected(verb: str, names: list[str], only: list[str] | None) -> list[str]:
    if not only:
        return names
    from lmperf.catalogue import suggest

    short = {name.removeprefix(f"{verb} "): name for name in names}
    for name in only:
        if name not in short:
            raise InputError(f"{verb}: {name!r} is not in the plan{suggest(name, short)}; allowed: {', '.join(short)}")
    return [short[name] for name in only]


@app.command("fetch-corpus")
def fetch_corpus(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Fetch the declared text sources.  Example: lmperf fetch-corpus --config config.yaml"""
    run_stage("fetch-corpus", spec, data, reports, config, set_)


@app.command()
def ingest(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Merge raw text into Arrow shards.  Example: lmperf ingest"""
    run_stage("ingest", spec, data, reports, config, set_)


@app.command()
def tokenize(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Train the tokenizer and write token shards.  Example: lmperf tokenize --set tokenizer.vocab_size=2048"""
    run_stage("tokenize", spec, data, reports, config, set_)


@app.command()
def profile(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Profile the baseline: hotspots, trace, memory, machine peaks.  Example: lmperf profile"""
    run_stage("profile", spec, data, reports, config, set_)


@app.command()
def measure(
    session: Annotated[list[str] | None, typer.Option("--session", metavar="NAME", help="Only this session.")] = None,
    config: ConfigFiles = None,
    set_: Overrides = None,
    spec: Spec = None,
    data: Data = None,
    reports: Reports = None,
) -> None:
    """Run timing sessions.  Example: lmperf measure --session attention.training_step"""
    run_stage("measure", spec, data, reports, config, set_, session)


@app.command()
def train(
    run_name: Annotated[list[str] | None, typer.Option("--run", metavar="NAME", help="Only this run.")] = None,
    config: ConfigFiles = None,
    set_: Overrides = None,
    spec: Spec = None,
    data: Data = None,
    reports: Reports = None,
) -> None:
    """Do quality runs (training to a fixed number of tokens).  Example: lmperf train --run baseline.s1234"""
    run_stage("train", spec, data, reports, config, set_, run_name)


@app.command()
def compare(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Turn sessions into comparisons and verdicts.  Example: lmperf compare"""
    run_stage("compare", spec, data, reports, config, set_)


@app.command()
def ablate(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Ablation in five dimensions, ladders, claims.  Example: lmperf ablate"""
    run_stage("ablate", spec, data, reports, config, set_)


@app.command()
def report(
    config: ConfigFiles = None, set_: Overrides = None, spec: Spec = None, data: Data = None, reports: Reports = None
) -> None:
    """Write the report page, figures and TensorBoard files.  Example: lmperf report"""
    run_stage("report", spec, data, reports, config, set_)


@app.command("run")
def run_all(config: ConfigFiles = None, set_: Overrides = None) -> None:
    """The whole flow without Snakemake, same files.  Example: lmperf run --config config.yaml"""
    from lmperf.running import run

    plan = plan_of(config, set_)
    tell(f"{run(plan, tell)} steps done, the rest was current; see {plan.reports}/index.html")


@app.command()
def status(config: ConfigFiles = None, set_: Overrides = None, as_json: AsJson = False) -> None:
    """What a run would do and why, one line each, by Snakemake or not.  Example: lmperf status"""
    from lmperf.running import pending

    plan = plan_of(config, set_)
    rows = [{"step": step.name, "reason": reason} for step, reason in pending(plan)]
    if as_json:
        print(json.dumps(rows))
    else:
        print("\n".join(f"{row['step']}: {row['reason']}" for row in rows) or "nothing to be done")


@app.command()
def plan(config: ConfigFiles = None, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Sessions, quality runs, rounds, what the design can detect, predicted duration.  Example: lmperf plan --json

    It times a few training steps first, which takes about ten seconds.
    """
    from lmperf.forecast import forecast, forecast_lines
    from lmperf.planning import threads
    from lmperf.probing import probe

    plan = plan_of(config, set_)
    outlook = forecast(plan, probe(plan, threads(plan.config)))
    print(json.dumps(outlook, indent=1) if as_json else "\n".join(forecast_lines(outlook)))


@app.command()
def variants(
    axis: Annotated[str | None, typer.Option("--axis", metavar="AXIS", help="Only this axis.")] = None,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", metavar="FILE", help="Load this plugin.")] = None,
    as_json: AsJson = False,
) -> None:
    """The catalogue: what exists, what can run here, and why not.  Example: lmperf variants --axis attention"""
    from lmperf.catalogue import AXES, suggest

    if axis is not None and axis not in AXES:
        raise InputError(f"--axis {axis!r} is unknown{suggest(axis, AXES)}; allowed: {', '.join(AXES)}")
    rows = variant_rows(axis, plugin or [])
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        state = "" if row["available"] else f"  [not here: {row['reason']}]"
        print(f"{row['axis'] + '/' + row['name']:34} {row['fidelity']:8} {row['summary']}{state}")


def variant_rows(axis: str | None, plugins: list[str]) -> list[dict[str, Any]]:
    """Rows of `lmperf variants`: axis, name, summary, fidelity, requires, available, reason, source."""
    from lmperf import registry
    from lmperf.catalogue import PACKAGE

    rows = []
    for entry in registry.variants(axis, plugins).values():
        reason = entry.unavailable()
        source = entry.source.replace(str(PACKAGE.parent) + "/", "")
        row = {"axis": entry.axis, "name": entry.name, "summary": entry.summary, "fidelity": entry.fidelity}
        row |= {"requires": list(entry.requires), "available": reason is None, "reason": reason, "source": source}
        rows.append(row)
    return rows


@app.command()
def doctor(config: ConfigFiles = None, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Machine, what can run here and why not, and the checklist.  Example: lmperf doctor --json"""
    from lmperf.doctor import doctor, doctor_lines

    chosen = None
    if config or Path("config.yaml").exists():
        chosen = read_config(config, set_)
    reports = Path(chosen.output.reports if chosen else "reports")
    outcome = doctor(chosen.model_dump(mode="json") if chosen else None, reports / "tables")
    print(json.dumps(outcome, indent=1) if as_json else "\n".join(doctor_lines(outcome)))


@app.command()
def qualify(
    comparisons: Annotated[int, typer.Option(help="A/A comparisons at least.", min=5)] = 40,
    rounds: Annotated[int, typer.Option(help="Rounds of each session.", min=3)] = 9,
    hog: Annotated[bool, typer.Option(help="Keep one core busy meanwhile.")] = False,
    reports: Reports = None,
    as_json: AsJson = False,
) -> None:
    """The harness's own false-positive and detection rates on this machine.  Example: lmperf qualify --hog"""
    from lmperf.qualify import qualify, qualify_lines

    folder = Path(reports or "reports")
    outcome = qualify(
        folder / "tables", folder / "work", comparisons=comparisons, rounds=rounds, hog=hog, progress=tell
    )
    print(canonical_json(outcome) if as_json else "\n".join(qualify_lines(outcome)))
    low = outcome["false_positive_rate"]["low"]
    if low is not None and low > 0.05:
        raise CheckFailed("qualify: the false-positive rate's interval lies above 5 %")


@app.command()
def diff(
    old: Annotated[str, typer.Argument(help="Older report folder.")],
    new: Annotated[str, typer.Argument(help="Newer report folder.")],
    as_json: AsJson = False,
) -> None:
    """Two report folders, verdict by verdict; exit 1 when one got worse.  Example: lmperf diff old/reports reports"""
    from lmperf.diffing import diff, diff_lines

    rows, worse = diff(Path(old), Path(new))
    print(json.dumps(rows, indent=1) if as_json else "\n".join(diff_lines(rows)))
    if worse:
        raise CheckFailed("diff: something got worse")


@app.command()
def bundle(
    out: Annotated[str, typer.Argument(metavar="OUT.tar", help="The file to write.")],
    reports: Reports = None,
) -> None:
    """Pack this machine's results to carry them to another.  Example: lmperf bundle laptop.tar"""
    from lmperf.bundling import bundle

    tell(f"{out}: {bundle(Path(reports or 'reports'), Path(out))} files")


@app.command()
def merge(
    bundles: Annotated[list[str], typer.Argument(metavar="A.tar B.tar ...", help="Bundles of several machines.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the merged page.")] = "merged",
) -> None:
    """Show several machines' results side by side.  Example: lmperf merge laptop.tar server.tar --out merged"""
    from lmperf.bundling import merge

    machines = merge([Path(name) for name in bundles], Path(out))
    tell(f"{len(machines)} machines; see {out}/index.html")


@app.command()
def schema() -> None:
    """Print the configuration's JSON Schema.  Example: lmperf schema > workflow/schemas/config.schema.json"""
    from lmperf.config import json_schema

    print(json.dumps(json_schema(), indent=1))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A reproducible laboratory for language-model performance: raw text in, a report of trusted comparisons out."""
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


if __name__ == "__main__":
    main()
