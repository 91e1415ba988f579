"""Bookkeeping between the policy and I/O, pure: the proxy drives it with sockets and a clock, the
simulator with virtual time.
"""
