"""Who is alive, and what every node says of itself.

SWIM with Lifeguard finds out who is dead (`detector`), scuttlebutt carries each node's own record to all others (`records`,
`exchange`), and `Gossip` in `node` puts both behind three calls: `handle`, `tick`, `next_tick_s`. That is pure: no clock, socket
or randomness of its own. `transport` carries the packets, sealed by `seal`.
"""
