"""Ranks that do at once what a re-forming asks of them."""

from kvrs_engine.elastic.reforming import (
    Action,
    CarryOut,
    FormRanks,
    ProbeEnded,
    ProbeStep,
    RankJoined,
    Reforming,
    UnitArrived,
)


def carry_through(own: Reforming, actions: list[Action]) -> list[Action]:
    """Do everything that is asked for; returns all actions in order."""
    done: list[Action] = []
    while actions:
        done += actions
        events = [event for action in actions for event in answers(action)]
        actions = [more for event in events for more in own.handle(event)]
    return done


def answers(action: Action) -> list[UnitArrived | RankJoined | ProbeEnded]:
    """The reports of ranks once they have done it."""
    match action:
        case CarryOut(epoch=epoch, plan=plan):
            places = dict.fromkeys((move.target, move.unit) for move in plan.moves)
            return [UnitArrived(epoch, rank, unit) for rank, unit in places]
        case FormRanks(epoch=epoch, layout=layout):
            return [RankJoined(epoch, rank) for rank in layout.ranks]
        case ProbeStep(epoch=epoch):
            return [ProbeEnded(epoch, equal=True)]
        case _:
            return []
