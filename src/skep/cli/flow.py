"""`skep flow`."""

from __future__ import annotations

import click
from msgspec.structs import asdict

from skep.cli.session import PROBLEMS, Session, on_app
from skep.errors import FlowBroken
from skep.flow import FlowRun, FlowStatus


@click.group()
def flow() -> None:
    """Show or cancel a flow."""


@flow.command()
@click.argument("flow_id", metavar="ID")
@click.option("--mermaid", is_flag=True, help="As a Mermaid flowchart.")
@on_app
async def show(session: Session, flow_id: str, mermaid: bool) -> int | None:
    """Draw a flow, with how far each step of it is."""
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
    """End what waits and ask what runs to stop."""
    if await found(session, flow_id) is None:
        return PROBLEMS
    cancelled = await FlowRun[object](session.app, flow_id).acancel()
    session.out.say(f"{flow_id}: " + ("cancelled" if cancelled else "nothing to do, it has ended"))
    session.out.document({"id": flow_id, "cancelled": cancelled})
    return None


async def found(session: Session, flow_id: str) -> FlowStatus | None:
    """Says what is wrong, if there is none."""
    try:
        status = await FlowRun[object](session.app, flow_id).astatus()
    except FlowBroken as error:
        session.out.note(str(error))
        return None
    if status is None:
        session.out.note(f"no such flow: {flow_id}: it was never started, or its linger time is over")
    return status
