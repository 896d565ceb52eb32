"""`tba doctor`: faults of this machine, and the remedy for each."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import typer

from flows.cli.common import AsJson, StoreOption, say, store_url
from flows.report.text import without_secrets

app = typer.Typer()

MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "fault": ("✗", "bold red")}


@app.command()
def doctor(store: StoreOption = None, as_json: AsJson = False) -> None:
    """Check this machine: install, engine, store, disks, ports, server. Names each fault and its remedy.

    Exit status 0: no faults, perhaps warnings. 1: at least one fault.

    Example: tba doctor --store s3://bucket/runs
    """
    from rich.table import Table

    from flows.cli.console import console, styled
    from infra.doctor import examine

    out, findings = console(), []
    for finding in examine(Path.cwd(), store_url(store)):
        finding = replace(finding, what=without_secrets(finding.what), remedy=without_secrets(finding.remedy))
        findings.append(finding)
        if as_json:
            continue
        mark, style = MARKS[finding.state]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=8)
        line.add_row(styled(mark, style), finding.subject, finding.what)
        if finding.remedy:
            line.add_row("", "", styled(f"→ {finding.remedy}", "bold"))
        out.print(line)
    faults = [finding for finding in findings if finding.state == "fault"]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        say(f"{len(faults)} faults." if faults else "No faults.")
    raise typer.Exit(1 if faults else 0)
