"""Membership, failure detection and replicated records of facts, by gossip.

SWIM with Lifeguard detects failures (`detector`), scuttlebutt replicates each node's own record
(`records`, `exchange`), and `Gossip` in `node` combines both behind three calls: `handle`, `tick`,
`next_tick_s`. That part is pure: no clock, socket or randomness of its own. `transport` carries the
packets, `authenticator` seals them.
"""
