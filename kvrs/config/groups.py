"""The check that instances of a group can lend each other the hosts of their stages."""

from collections.abc import Iterator, Sequence

from kvrs.config.cluster import Backend, ClusterSettings, InstanceSettings

# An instance's keys, which are equal within a group.
_EQUAL = ("role", "tp", "pp", "stages", "shares")


def faults_of_groups(cluster: ClusterSettings, *, re_forms: bool) -> Iterator[str]:
    """Why instances of this cluster cannot lend each other anything. `re_forms`: an instance goes
    on without a rank that is lost.
    """
    groups: dict[str, list[InstanceSettings]] = {}
    for _, instance in cluster.instances():
        if instance.group is not None:
            groups.setdefault(instance.group, []).append(instance)
    if groups and cluster.backend is not Backend.EMBEDDED:
        yield (
            f"cluster.backend: got {cluster.backend.value!r}, with group {next(iter(groups))!r} "
            f"among the instances; allowed: 'embedded', or no group"
        )
        return
    if groups and not re_forms:
        yield (
            f"elastic.enabled: got false, with group {next(iter(groups))!r} among the instances; "
            f"allowed: true, or no group"
        )
    for group, members in groups.items():
        yield from _faults_of_group(group, members)


def _faults_of_group(group: str, members: Sequence[InstanceSettings]) -> Iterator[str]:
    first, *others = members
    if not others:
        yield (
            f"cluster.nodes: instance {first.id!r} is alone in group {group!r}, a ring of one; "
            f"allowed: at least two instances"
        )
    for each in members:
        if each.ranks == 1:
            yield (
                f"cluster.nodes: instance {each.id!r} of group {group!r} has 1 rank; allowed: "
                f"several, in stage_hosts"
            )
        elif (hosts := len(each.stage_hosts)) < each.stage_count:
            yield (
                f"cluster.nodes: instance {each.id!r} of group {group!r} has {hosts} stage_hosts; "
                f"allowed: {each.stage_count}, one for each stage"
            )
    for each in others:
        for key in _EQUAL:
            if (got := getattr(each, key)) != (allowed := getattr(first, key)):
                yield (
                    f"cluster.nodes: instance {each.id!r} of group {group!r} has {key}: "
                    f"{_shown(got)}; allowed: {_shown(allowed)}, as instance {first.id!r}"
                )


def _shown(value: object) -> str:
    """A value as the file has it."""
    return "null" if value is None else f"{value}"
