"""`propolis flow`."""

from __future__ import annotations

import click
from msgspec.structs import asdict

from propolis.app.flow import FlowRun, FlowStatus
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.errors import FlowBroken


@click.group()
def flow() -> None:
    """Show or cancel a flow."""


@flow.command()
@click.argument("flow_id", metavar="ID")
@click.option("--mermaid", is_flag=True, help="Draw it as a Mermaid flowchart.")
@looks_at_app
async def show(session: Session, flow_id: str, mermaid: bool) -> int | None:
    """Draw a flow, and how far each of its steps is."""
    status = await found(session, flow_id)
    if status is None:
        return PROBLEMS
    steps = [asdict(step) for step in status.steps]
    session.out.document({"id": status.id, "state": status.state.value, "steps": steps})
    if mermaid:
        session.out.say(status.mermaid())
    else:
        session.out.say(f"{status.id}  {status.state.value}\n{status.draw()}")
    return None


@flow.command()
@click.argument("flow_id", metavar="ID")
@on_app
async def cancel(session: Session, flow_id: str) -> int | None:
    """End the jobs of a flow that wait, and ask those that run to stop."""
    if await found(session, flow_id) is None:
        return PROBLEMS
    cancelled = await FlowRun[object](session.app.client, flow_id).acancel()
    session.out.say(f"{flow_id}: " + ("cancelled" if cancelled else "nothing to do, it has ended"))
    session.out.document({"id": flow_id, "cancelled": cancelled})
    return None


async def found(session: Session, flow_id: str) -> FlowStatus | None:
    """The flow; None, after a note that says why, if there is none."""
    try:
        status = await FlowRun[object](session.app.client, flow_id).astatus()
    except FlowBroken as error:
        session.out.note(str(error))
        return None
    if status is None:
        session.out.note(f"no such flow: {flow_id}: it was never started, or its time is over")
    return status
