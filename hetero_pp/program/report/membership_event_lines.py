"""Membership events of a run in words, for the terminal and as marks of the page."""

from __future__ import annotations

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.units import format_number, format_seconds
from hetero_pp.messages.messages_pb2 import MembershipEventKind
from hetero_pp.program.report.state import News
from replica_groups.rounds.slot import with_name


def kind_of(news: News) -> str:
    """Return the name of a membership event, such as `restarted`."""
    event = str(news.report.WhichOneof("event"))
    if event == "membership_event":
        told = news.report.membership_event
        return "left" if told.has_left else MembershipEventKind.Name(told.what).lower()
    return event


def words_of(news: News, spec: RunSpec) -> str:
    """Return a membership event in words."""
    report = news.report
    match report.WhichOneof("event"):
        case "begun":
            note = f"; {report.begun.note}" if report.begun.note else ""
            return f"resuming after round {report.begun.last_round}{note}"
        case "failure":
            return report.failure.cause if report.member == EXCHANGE else f"{report.member}: {report.failure.cause}"
        case "joined":
            incarnation = report.joined.incarnation
            return f"{report.member} has joined{f' again (incarnation {incarnation})' if incarnation > 1 else ''}"
        case "waiting":
            seconds = format_seconds(max(1, round(report.waiting.seconds)))
            return f"resuming after {seconds}: reads and writes succeed again"
        case "state_saving":
            failure, which = report.state_saving.failure, f"its state after round {report.state_saving.round}"
            if not failure:
                return f"{report.member} saved {which}; saving works again"
            lost = "it continues training, and saves its next state on schedule"
            return f"{report.member} could not save {which}: {failure}; {lost}"
    event, outer = report.membership_event, spec.config.outer
    of_round = f"its contribution to round {event.round}"
    share = "" if outer.returned == 1 else f"{format_number(100 * outer.returned)} % of "
    restored = f"{share}its contribution is restored to its error feedback"
    became = restored if outer.returned else "its contribution is discarded"
    match event.what:
        case MembershipEventKind.INCARNATION_OVER | MembershipEventKind.SILENT:
            told = with_name(event.slot, event.cause)
            return f"{told}; its slot is vacant" if news.is_line else told
        case MembershipEventKind.SUSPENDED if news.slot:
            return f"{event.replica} returns to the start of its round and waits for {news.slot}"
        case MembershipEventKind.SUSPENDED:
            return f"{event.slot} is suspended: {event.cause}"
        case MembershipEventKind.INJECTED:
            return f"injected fault: {event.cause}"
        case MembershipEventKind.LATE:
            after = "it continues from its own parameters" if outer.keep_local else became
            return f"{event.replica} was too late for round {event.round}: {after}"
        case MembershipEventKind.LEFT_OUT:
            why = f"is excluded ({event.cause})" if event.cause else "is far larger than expected and is excluded"
            return f"{event.replica}: {of_round} {why}: {became}"
        case MembershipEventKind.SCALED:
            return f"{event.replica}: {of_round} is larger than expected and is scaled by {event.scale:.3g}"
        case MembershipEventKind.PAUSED:
            return f"round {event.round} is paused: {event.cause}; it continues when more replicas join"
        case MembershipEventKind.WENT_ON:
            return f"round {event.round} continues after {format_seconds(news.paused)}"
        case MembershipEventKind.HEALED:
            return f"after round {event.round}, {event.slot} {event.cause}; it recovers from the run log"
        case MembershipEventKind.UNAUDITED:
            return f"unaudited: {event.cause}"
        case MembershipEventKind.NOT_AWAITED:
            included = "its contributions are included if they arrive in time"
            return f"{event.replica} {event.cause} do not wait for it; {included}"
    return event.cause  # restarted, given up, excluded, audited
