"""Membership, failure detection and replicated records of facts, by gossip.

`Gossip` in `swim` detects failures by SWIM with Lifeguard and replicates each node's own record
(`facts`) by scuttlebutt, behind three calls: `handle`, `tick`, `next_tick_s`. It is pure: no clock,
socket or randomness of its own. `membership` carries its packets, `authenticator` seals them.
"""
